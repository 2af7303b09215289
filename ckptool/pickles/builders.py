"""What a builder is: the meaning of one known function in pickles, as a function from the arguments of a call to its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptool.errors import LimitExceeded

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
