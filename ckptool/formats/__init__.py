"""Containers: bytes to a tree, and a tree to a plan of what to write.

A format is a module with `NAME`, `detect(head, source)` and `read(source)`. One that can also be written has `SUFFIXES` (the first is
the usual one), `write(checkpoint, keep_unknown=...)` and `append(checkpoint, keep_unknown=...)`, which gives None where it cannot be
edited in place; `TENSORS_ONLY = True` if it holds names of tensors and nothing else, and then `TIES = False` if it cannot say that two are
one. To add one: its file, its line below, its test through the contract. Files are told by content, never by name.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Input, Source, open_input, unchanged
from ckptool.checkpoint.plan import Plan
from ckptool.errors import Truncated, UsageError, listed, printable
from ckptool.formats import (
    dcp,
    members,
    npy,
    npz,
    parts,
    pickle_file,
    safetensors,
    sharded,
    torch_legacy,
    torch_tar,
    torch_zip,
    torchscript,
)
from ckptool.formats.unrecognized import refuse
from ckptool.formats.zip import directory


class Reader(Protocol):
    """What a module in this folder offers."""

    @property
    def NAME(self) -> str: ...  # noqa: N802 (a module's constant)

    def detect(self, head: bytes, source: Input) -> bool:
        """True if it is one. head: the first bytes of a file; of a folder, none."""

    def read(self, source: Any) -> Checkpoint: ...


class Format(Reader, Protocol):
    """What a module offers whose container can be written."""

    @property
    def SUFFIXES(self) -> tuple[str, ...]: ...  # noqa: N802

    def write(self, checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan: ...
    def append(self, checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan | None: ...


# Asked in this order.
FORMATS: tuple[Reader, ...] = (
    sharded,
    dcp,  # its table is a pickle, its files begin as zips
    members,
    npz,
    torchscript,
    torch_zip,
    safetensors,
    torch_legacy,
    torch_tar,
    npy,
    pickle_file,
)
WRITERS: tuple[Format, ...] = tuple(cast(Format, module) for module in FORMATS if hasattr(module, "write"))

DEFAULT = "torch-zip"  # what is written where nothing says otherwise
HEAD = 512


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint of any known container: a file, or a folder. Reads its tables, no tensor data.

    Raises `FileProblem`, `NotACheckpoint`, `Unsupported`, `Truncated`, `Corrupt`, `Ambiguous` or `LimitExceeded`.
    """
    source = open_input(path)
    with unchanged(source):
        return read_source(source)


def read_source(source: Input) -> Checkpoint:
    """The same of what is open already."""
    return parts.with_part(read_alone(source), source)


def read_alone(source: Input) -> Checkpoint:
    """The same of one of the files that a checkpoint is put together from: whether it is a part is not looked at."""
    if isinstance(source, Source) and not source.size:
        raise Truncated(
            f"{source} is empty (0 bytes)",
            "It was never written, or lost in a crash or a full disk.",
            "Copy or download it again.",
        )
    head = source.read(0, min(HEAD, source.size)) if isinstance(source, Source) else b""
    if isinstance(source, Source) and (problem := directory.under_another_head(head, source)):
        raise problem
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


def writer(name: str) -> Format | None:
    """The format called `name`, if it can be written."""
    return next((container for container in WRITERS if name == container.NAME), None)


def tensors_only(container: Format) -> bool:
    """True if the container holds names of tensors and nothing else, so that one set of weights is chosen for it."""
    return bool(getattr(container, "TENSORS_ONLY", False))


def keeps_ties(container: Format) -> bool:
    """True if the container can say that two names are one tensor."""
    return bool(getattr(container, "TIES", True))


def by_name(name: str) -> Format:
    """The format called `name`; raises `UsageError` listing those that can be written."""
    container = writer(name)
    if container is None:
        known = any(name == reader.NAME for reader in FORMATS)
        what = f"{name} is read, not written" if known else f"there is no container {name!r}"
        raise UsageError(what, f"Written are: {listed([container.NAME for container in WRITERS])}.")
    return container


def for_output(path: str | os.PathLike[str], default: str) -> Format:
    """The format that the suffix of an output stands for; else the one called `default`, if it is written; else torch's."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    for container in WRITERS:
        if suffix in container.SUFFIXES:
            return container
    return writer(default) or by_name(DEFAULT)


_NOT_WRITTEN = frozenset(
    ".onnx .gguf .ggml .h5 .hdf5 .keras .tflite .pb .engine .trt .plan .mlmodel .npy .msgpack .json .yaml .txt .csv .zip .gz .dcp"
    " .distcp".split()
)
# What a suffix looks like: `.foo`, and not the end of `Llama-3.1-8B` or `epoch=3-loss=0.25`.
_SUFFIX = re.compile(r"\.[a-z][a-z0-9_]{0,11}")


def refuse_suffix(path: str | os.PathLike[str], written: Format, original: str = "", source: str = "") -> None:
    """Raises `UsageError` where an output's suffix is a slip of the pen, or promises what is not written.

    written: the container that would be.  original, source: container and name of the input, whose own suffix is as good as any while its
    container stays. From one torch file to another, suffixes that stand for nothing (`.state`) are a matter of taste.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    known = [known for container in WRITERS for known in container.SUFFIXES]
    torch = written.NAME == DEFAULT and (not original or original.startswith("torch-"))
    own = suffix == os.path.splitext(source)[1].lower() and (torch or original == written.NAME)
    if suffix in known or not _SUFFIX.fullmatch(suffix) or own:
        return
    meant = next((near for near in known if len(near) > 5 and _close(suffix, near)), "")
    if meant or suffix in _NOT_WRITTEN or not torch:
        raise UsageError(
            f"{printable(suffix)} stands for no container that is written",
            f"Written are: {listed([container.NAME for container in WRITERS])}.",
            f"Did you mean {meant}? " * bool(meant) + "To write a torch file of that name: --to torch-zip",
        )


def refuse_index(path: str | os.PathLike[str], written: Format) -> None:
    """Raises `UsageError` where a folder of shards would be called like a file in it."""
    name = os.fspath(path)
    if written is sharded and name.lower().endswith(".json"):
        raise UsageError(
            f"{printable(name)} is the name of an index, and shards are written as a folder",
            "The index is one of the files in it.",
            f"Name the folder: -o {printable(os.path.dirname(name) or 'DIR')}",
        )


def _close(word: str, other: str) -> bool:
    import difflib

    return difflib.SequenceMatcher(None, word, other).ratio() >= 0.8
