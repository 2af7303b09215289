"""What the tests of folders share: plans of small files, and what is in a folder."""

import os
from pathlib import Path

import pytest

from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.blocks import Plan

OLD = {"a": b"old a", "b": b"old b"}


NEW = {"a": b"new a", "c": b"new c"}


def plan(files: dict[str, bytes] | None = None) -> Plan:
    return Plan({name: [InlineBytes(data)] for name, data in (files or NEW).items()})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def free_space(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Every disk has so much room. What is really free may change between two looks at it."""
    real = os.statvfs("/")
    said = os.statvfs_result((1, 1, nbytes, nbytes, nbytes, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda folder: said)
