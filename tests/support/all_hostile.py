"""Every hostile input by its name: for the suites that run all, that nothing is executed, and fuzzing.

The modules of such inputs have them in a dictionary `INPUTS`: name -> bytes, or a function that gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tests.support import hostile_bombs, hostile_calls, hostile_pickles, hostile_streams, hostile_tars, hostile_tensors

Contents = bytes | Callable[[], bytes]
MODULES = (hostile_calls, hostile_pickles, hostile_bombs, hostile_tensors, hostile_streams, hostile_tars)


def everything() -> Iterator[tuple[str, bytes]]:
    for module in MODULES:
        inputs: Mapping[str, Contents] = module.INPUTS
        for title, contents in inputs.items():
            yield title, contents() if callable(contents) else contents
