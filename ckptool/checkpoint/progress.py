"""How far long work is. Code that reads many values says how many bytes they have; bytes are counted as they are read.

Passes are nested: each of many files is a step of the pass over all of them. Only the program watches them
(`cli.output`); in a library, and in workers, nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

Item = TypeVar("Item")


class Pass:
    """A pass over `total` bytes. done: of them.  counted: bytes read since then, of the `step` that is being worked on.
    files: how many are done, of how many, where it is one over files.  is_output: it writes them."""

    __slots__ = ("began", "counted", "done", "files", "highest", "is_output", "step", "total")

    def __init__(self, total: int, files: int = 0, is_output: bool = False) -> None:
        self.total, self.files, self.is_output = total, [0, files], is_output
        self.done = self.counted = self.step = 0
        self.highest, self.began = 0.0, monotonic()

    def share(self, inner: float) -> float:
        """How much is done, from 0 to 1.  inner: the same of the pass inside it, which is one step."""
        step = self.step or self.total - self.done
        now = self.done + max(inner * step, min(self.counted, step))
        self.highest = max(self.highest, min(1.0, now / self.total)) if self.total else 0.0
        return self.highest


passes: list[Pass] = []  # those under way, the outermost first; where bytes are read, the last one counts them
is_watched = False


@contextmanager
def reading(total: int | Callable[[], int], files: int = 0) -> Iterator[Pass]:
    """A pass over `total` bytes, in a number of files if that is to be shown."""
    if not is_watched:
        yield Pass(0)
        return
    passes.append(current := Pass(total if isinstance(total, int) else total(), files))
    try:
        yield current
    finally:
        if current in passes:
            del passes[passes.index(current) :]


def over(items: Iterable[Item], size: Callable[[Item], int], are_files: bool = False) -> Iterator[Item]:
    """The items, iterated as a pass over the bytes that each of them has."""
    if not is_watched:
        yield from items
        return
    sized = [(item, size(item)) for item in items]
    with reading(sum(nbytes for _, nbytes in sized), len(sized) * are_files) as current:
        for item, current.step in sized:
            yield item
            current.done, current.counted = current.done + current.step, max(0, current.counted - current.step)
            current.files[0] += 1


def written(done: int, total: int) -> None:
    """Called by writers with how much is written, of how much: a pass, which ends with the last byte."""
    if not (passes and passes[-1].is_output and passes[-1].total == total):
        passes.append(Pass(total, is_output=True))
    passes[-1].done, passes[-1].counted = done, 0
    if done >= total:
        passes.pop()
