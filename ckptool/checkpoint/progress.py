"""How far long work is. Who reads many values says how many bytes they have; where bytes are read they are counted.

Passes are nested: of many files each is a step of the pass over all of them. Only the program looks at them
(`cli.output`); in a library, and in workers, nothing is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

Item = TypeVar("Item")


class Pass:
    """A pass over `total` bytes. done: of them.  counted: bytes that were read since then, of the `step` that is being
    worked on.  files: how many of how many are done, where it is one over files.  is_output: it writes them."""

    __slots__ = ("began", "counted", "done", "files", "is_output", "most", "step", "total")

    def __init__(self, total: int, files: int = 0, is_output: bool = False) -> None:
        self.total, self.files, self.is_output = total, [0, files], is_output
        self.done = self.counted = self.step = 0
        self.most, self.began = 0.0, monotonic()

    def share(self, below: float) -> float:
        """How much is done, from 0 to 1.  below: of the pass inside it, which is one step."""
        step = self.step or self.total - self.done
        now = self.done + max(below * step, min(self.counted, step))
        self.most = max(self.most, min(1.0, now / self.total)) if self.total else 0.0
        return self.most


passes: list[Pass] = []  # those under way, the outermost first; where bytes are read, the last one counts them
is_watched = False


@contextmanager
def reading(total: int | Callable[[], int], files: int = 0) -> Iterator[Pass]:
    """A pass over so many bytes, in so many files where that is worth saying."""
    if not is_watched:
        yield Pass(0)
        return
    passes.append(here := Pass(total if isinstance(total, int) else total(), files))
    try:
        yield here
    finally:
        if here in passes:
            del passes[passes.index(here) :]


def over(items: Iterable[Item], size: Callable[[Item], int], are_files: bool = False) -> Iterator[Item]:
    """The items, as a pass over the bytes that each of them has."""
    if not is_watched:
        yield from items
        return
    every = [(item, size(item)) for item in items]
    with reading(sum(nbytes for _, nbytes in every), len(every) * are_files) as here:
        for item, here.step in every:
            yield item
            here.done, here.counted = here.done + here.step, max(0, here.counted - here.step)
            here.files[0] += 1


def written(done: int, total: int) -> None:
    """For who writes to tell how much of all is written: a pass, which ends with the last byte."""
    if not (passes and passes[-1].is_output and passes[-1].total == total):
        passes.append(Pass(total, is_output=True))
    passes[-1].done, passes[-1].counted = done, 0
    if done >= total:
        passes.pop()
