"""Errors are also the standard ones that open() and torch.load raise; without torch every name is there."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import errors
from ckptool.errors import CkptoolError, FileProblem
from tests.support.files import saved

STANDARD = {
    "FileProblem": OSError,
    "DiskFull": OSError,
    "FileChanged": OSError,
    "NoCheckpointInside": IsADirectoryError,
    "FileMissing": FileNotFoundError,
    "NoPermission": PermissionError,
    "BrokenLink": FileNotFoundError,
    "Truncated": EOFError,
    "MissingExtra": ImportError,
    "MissingKey": KeyError,
    "UsageError": ValueError,
    "LimitExceeded": MemoryError,
    "OutputExists": FileExistsError,
}


def test_every_error_survives_copies_and_other_processes() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, CkptoolError)]
    assert len(classes) > 25
    for kind in classes:
        assert issubclass(kind, STANDARD.get(kind.__name__, Exception))
        error: Any = kind("what 'it' is", "why", "fix")
        if isinstance(error, FileProblem):
            error.about(errno.ENOENT, "a.pt")
        for other in (error, copy.copy(error), pickle.loads(pickle.dumps(error)), error.within("b.pt: what")):
            assert type(other) is kind and "what 'it' is\nwhy\nfix" in str(other)
            if isinstance(error, FileProblem):
                assert (other.errno, other.filename) == (errno.ENOENT, "a.pt")
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(FileNotFoundError) as raised:
        pool.apply(ckptool.inspect, ["/nowhere/a.pt"])
    assert raised.value.errno == errno.ENOENT


def test_functions_raise_what_open_raises(tmp_path: Path) -> None:
    missing, there = tmp_path / "missing.pt", saved({"w": [1]}, tmp_path / "a.pt")
    one = "open inspect show convert slim strip_module load".split()
    for name in one:
        with pytest.raises(FileNotFoundError) as raised:
            getattr(ckptool, name)(
                missing, *([tmp_path / "o.pt"] if name in ("convert", "slim", "strip_module") else [])
            )
        assert isinstance(raised.value, CkptoolError), name
        assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(missing)), name
    with pytest.raises(FileNotFoundError):
        ckptool.diff(there, missing)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        ckptool.load(tmp_path)
    with pytest.raises(OSError, match="A part of the path is a file"):
        ckptool.inspect(there / "below.pt")
    (tmp_path / "link.pt").symlink_to(missing)
    with pytest.raises(FileNotFoundError):
        ckptool.inspect(tmp_path / "link.pt")


WITHOUT = """
import sys
sys.modules["torch"] = None
import ckptool
assert not {"numpy", "ckptool.bridge"} & sys.modules.keys()
import inspect, pydoc
pydoc.render_doc(ckptool)
assert {name for name, _ in inspect.getmembers(ckptool)} >= {*ckptool.__all__}
for name in ckptool.__all__:
    assert hasattr(ckptool, name), name
space = {}
exec("from ckptool import *", space)
assert {*ckptool.__all__} <= {*space}
for name in ("Run", "load_into", "save_for_cpu"):
    for error in (ImportError, ckptool.CkptoolError):
        try:
            space[name](1, 2)
        except error as raised:
            assert raised.code == "missing-extra" and "pip install 'ckptool[torch]'" in str(raised), str(raised)
        else:
            raise AssertionError(name)
    assert name in pydoc.render_doc(space[name])
assert isinstance(ckptool.Run, type)
"""


def test_without_torch_every_name_is_there_and_says_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_error_of_ours_is_not_told_in_the_words_of_another(tmp_path: Path) -> None:
    """Where a standard error is caught, and made one of ours, such an error itself stays what it is."""
    file = saved({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "made.pt").touch()
    with pytest.raises(FileExistsError, match="exists already") as raised:
        ckptool.convert(file, tmp_path / "made.pt")
    assert (raised.value.errno, type(raised.value).__name__) == (errno.EEXIST, "OutputExists")
    for call in (
        lambda: ckptool.cast(file, tmp_path / "o.pt", dtype="f99"),
        lambda: ckptool.remap(file, tmp_path / "o.pt", to="moon"),
        lambda: ckptool.rename(file, ["w"], tmp_path / "o.pt"),
    ):
        with pytest.raises(ValueError) as refused:
            call()
        assert isinstance(refused.value, errors.UsageError) and refused.value.what, refused.value
    exists = errors.OutputExists("a.pt exists already", "It was left as it is.")
    from ckptool.checkpoint.paths import file_problem
    from ckptool.output.durable import write_problem

    assert file_problem(exists, "a.pt", "write") is exists is write_problem(exists, "a.pt")
