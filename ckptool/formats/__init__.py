"""Containers: bytes to a tree, and a tree to a plan of what to write.

A format is a module with `NAME`, `SUFFIXES` (the first is the usual one), `detect(head, source)`, `read(source)`, `write(checkpoint,
keep_unknown=...)`, and `append(checkpoint, keep_unknown=...)` where it can be edited in place. To add one: its file, its line below,
its test through the contract. Files are told by content, never by name.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ckptool.checkpoint import Checkpoint, Plan
from ckptool.errors import Truncated, UsageError, listed
from ckptool.files import Source
from ckptool.formats import safetensors, torch_zip
from ckptool.formats.others import refuse


class Format(Protocol):
    """What a module in this folder offers."""

    @property
    def NAME(self) -> str: ...  # noqa: N802 (a module's constant)
    @property
    def SUFFIXES(self) -> tuple[str, ...]: ...  # noqa: N802

    def detect(self, head: bytes, source: Source) -> bool: ...
    def read(self, source: Source) -> Checkpoint: ...
    def write(self, checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan: ...
    def append(self, checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan | None: ...


FORMATS: tuple[Format, ...] = (torch_zip, safetensors)  # asked in this order

HEAD = 512


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint of any known container. Reads its tables, no tensor data.

    Raises `FileProblem`, `NotACheckpoint`, `Unsupported`, `Truncated`, `Corrupt`, `Ambiguous` or `LimitExceeded`.
    """
    source = Source(path)
    if not source.size:
        raise Truncated(
            f"{source} is empty (0 bytes)",
            "It was never written, or lost in a crash or a full disk.",
            "Copy or download it again.",
        )
    head = source.read(0, min(HEAD, source.size))
    for container in FORMATS:
        if container.detect(head, source):
            with no_collection():
                return container.read(source)
    raise refuse(head, source)


@contextmanager
def no_collection() -> Iterator[None]:
    """Stops the garbage collector for a while: among hundreds of thousands of new objects it would search, and find nothing."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def by_name(name: str) -> Format:
    """The format called `name`; raises `UsageError` listing those that can be written."""
    for container in FORMATS:
        if name == container.NAME:
            return container
    raise UsageError(
        f"there is no container {name!r}", f"There are: {listed([container.NAME for container in FORMATS])}."
    )


def for_output(path: str | os.PathLike[str], default: str) -> Format:
    """The format that the suffix of an output stands for, else the one called `default`."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    for container in FORMATS:
        if suffix in container.SUFFIXES:
            return container
    return by_name(default)
