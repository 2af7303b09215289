"""What a fuzzed file goes through: it is read, walked, shown in every form, compared and written back.

Only a `CkptoolError` may come out, and no file of 64 KB may take more than `SECONDS` of CPU or `MEGABYTES` of memory.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

from ckptool import formats
from ckptool.analysis.diff import diff
from ckptool.analysis.inspect import listing
from ckptool.checkpoint import Checkpoint, Composite, TensorEntry, tree
from ckptool.checkpoint.strided import to_numpy
from ckptool.checkpoint.tree import tensors, walk
from ckptool.errors import CkptoolError
from ckptool.formats import torch_zip
from ckptool.pickles import plain as plain_text
from ckptool.pickles.calls import uses_of
from ckptool.pickles.plain import summary
from ckptool.render import lines
from ckptool.render.json import dumps
from ckptool.verbs.show import Shown

SECONDS = 2.0  # for a dozen reports
MEGABYTES = 300
SMALL = 1 << 16


def cut_off_sooner() -> None:
    """What a file repeats again and again is cut off sooner: that it is cut off at all is tested elsewhere, and takes a
    second."""
    tree.REPEATED_NODES = 2_000
    plain_text.MAX_JSON_NODES = 2_000


class TooMuch(Exception):
    """A file took more time or memory than one of its size may."""


def exercise(path: str) -> None:
    """Everything at once; raises whatever is a finding."""
    began, before = time.process_time(), peak()
    with suppress(CkptoolError):
        _all(formats.read(path), path)
    spent, grown = time.process_time() - began, peak() - before
    if spent > SECONDS:
        raise TooMuch(f"{spent:.1f} s of CPU")
    if grown > MEGABYTES:
        raise TooMuch(f"{grown} MB of memory")


def exercise_bytes(data: bytes) -> None:
    """The same for a file in memory."""
    fd = os.memfd_create("fuzzed")
    try:
        os.write(fd, data)
        exercise(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def peak() -> int:
    """The most memory that this process has taken so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _all(checkpoint: Checkpoint, path: str) -> None:
    steps: tuple[Callable[[Checkpoint, str], Any], ...] = (_inspected, _walked, _values, _shown, _compared, _written)
    for step in steps:
        with suppress(CkptoolError):
            step(checkpoint, path)


def _inspected(checkpoint: Checkpoint, path: str) -> None:
    found = listing(checkpoint)
    _rendered(found, all=True, depth=None)
    _rendered(found, all=False, depth=None)
    found._repr_html_()


def _walked(checkpoint: Checkpoint, path: str) -> None:
    for _, node in islice(walk(checkpoint.tree), 2_000):
        summary(node, 100)
        str(node) if not isinstance(node, (dict, list, tuple)) else None
    list(uses_of(checkpoint))


def _values(checkpoint: Checkpoint, path: str) -> None:
    for _, tensor in islice(tensors(checkpoint.tree), 50):
        with suppress(CkptoolError):
            if isinstance(tensor, TensorEntry) and tensor.nbytes <= SMALL:
                assert len(tensor.bytes()) == tensor.nbytes
                to_numpy(tensor)
            elif isinstance(tensor, Composite):
                list(tensor.parts())


def _shown(checkpoint: Checkpoint, path: str) -> None:
    for node in [checkpoint.tree, *(node for _, node in islice(walk(checkpoint.tree), 3))]:
        if not isinstance(node, TensorEntry):
            _rendered(Shown(path, "", node))


def _compared(checkpoint: Checkpoint, path: str) -> None:
    again = formats.read(path)
    found = diff(checkpoint, again, statistics=False)
    assert found.same, "a file differs from itself"
    _rendered(found)


def _written(checkpoint: Checkpoint, path: str) -> None:
    torch_zip.write(checkpoint, keep_unknown=True)


def _rendered(report: Any, **options: Any) -> None:
    text = lines.text(report, **options)
    assert all(c == "\n" or c.isprintable() for c in text), "a raw control byte is printed"
    dumps(report.to_dict())
