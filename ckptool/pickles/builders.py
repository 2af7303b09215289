"""What a builder is: the meaning of one known function in pickles, as a function from the arguments of a call to its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.errors import LimitExceeded

if TYPE_CHECKING:
    pass
from ckptool.checkpoint import Data

Builder = Callable[[tuple[Any, ...]], Any]
"""Makes the value of a known call from its arguments; returns `NotImplemented` for arguments that it does not know."""


@dataclass(frozen=True, slots=True)
class PerPickle:
    """A builder whose calls copy what they are given. It is made anew for each pickle: `make(spend)`.

    `spend(n)` says that a call copies what takes at least `n` bytes in a file; it raises `LimitExceeded` when that is more than the
    file can have: the same value is copied again and again.
    """

    make: Callable[[Callable[[int], None]], Builder]

    def __call__(self, args: tuple[Any, ...]) -> Any:
        return self.make(lambda _: None)(args)


def purse(left: int) -> Callable[[int], None]:
    """The `spend` of a builder that may copy so many bytes."""

    def spend(amount: int) -> None:
        nonlocal left
        left -= amount
        if left < 0:
            raise LimitExceeded(
                "one value made into others again and again", "It would fill the memory: the file is built to do that."
            )

    return spend


@dataclass(slots=True, eq=False)
class StubbedValue:
    """A long value of a pickle that was left where it is: `data` are its bytes as the pickle spells them.

    Only builders meet it, while a pickle is decoded (see `pickles/skeleton.py`); there is none in an opened checkpoint.
    kind: what the pickle makes of the bytes: `bytes`, `bytearray`, `string` (of Python 2) or `text` (`data` is its UTF-8).
    of: the blob that it was made from, if another.
    """

    data: Data
    kind: str
    of: StubbedValue | None = None

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.data.length:,} bytes>"
