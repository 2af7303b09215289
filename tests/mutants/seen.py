"""Which test runs which function: a byte for each pair, in a file that all processes have mapped.

A copy of this module is at hand in a clone, where each function of interest begins with `hit(NUMBER)`. Setting a byte
of memory is no event of the file system, which some tests count.
"""

import mmap
import os

MAP = "MUTANTS_MAP"  # FILE:COUNT, the number of functions
TEST = "MUTANTS_TEST"  # the number of the test that runs

_mapped, _count = None, 0
if MAP in os.environ:
    _name, _, _text = os.environ[MAP].rpartition(":")
    _count = int(_text)
    with open(_name, "r+b") as _file:
        _mapped = mmap.mmap(_file.fileno(), 0)


def hit(number: int) -> None:
    """Notes that the function of that number is run."""
    test = os.environ.get(TEST)
    if _mapped is not None and test:
        _mapped[int(test) * _count + number] = 1
