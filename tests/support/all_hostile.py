"""Every hostile input by its name: for the suites that run all, that nothing is executed, and fuzzing.

The modules of such inputs have them in a dictionary `INPUTS`: name -> bytes, or a function that gives them.
"""

from collections.abc import Iterator

from tests.support import hostile_pickles, hostile_tensors, legacy_streams


def everything() -> Iterator[tuple[str, bytes]]:
    for module in (hostile_pickles, hostile_tensors, legacy_streams):
        for title, contents in module.INPUTS.items():
            yield title, contents() if callable(contents) else contents
