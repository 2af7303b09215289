"""Little memory, few open files, no place for temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.files import load, saved
from tests.support.hostile_system import FULL, PROGRAM, temporaries, wrapped_state


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(wrapped_state(), tmp_path / "in.pt")


LOW_MEMORY = """
import resource, sys
from ckptool.cli import main
room = int(sys.argv.pop(1))
pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else 0
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
main()
"""


@pytest.mark.parametrize("words", [FULL[0], FULL[3], ["inspect", "in.pt", "--stats"]], ids=" ".join)
def test_too_little_memory_is_an_error_and_writes_nothing(words: list[str], tmp_path: Path) -> None:
    saved({"model": wrapped_state(12_000), "text": "x" * 3_000_000}, tmp_path / "in.pt")
    codes = set()
    for room in (1 << 18, 3 << 20, 12 << 20, 400 << 20):
        (tmp_path / "out.pt").write_bytes(b"old")
        ended = subprocess.run(
            [sys.executable, "-c", LOW_MEMORY, str(room), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        codes.add(ended.returncode)
        assert ended.returncode in (0, 2) and "Traceback" not in ended.stderr, (room, ended.stderr)
        assert "error[bug]" not in ended.stderr, (room, ended.stderr)
        assert temporaries(tmp_path) == []
        assert ((tmp_path / "out.pt").read_bytes() == b"old") is (ended.returncode == 2 or words[0] == "inspect")
    assert 0 in codes and (2 in codes or sys.platform != "linux")


FEW_FILES = """
import os, resource, sys
from ckptool.cli import main
count = int(sys.argv.pop(1))
taken = len(os.listdir("/proc/self/fd")) - 1 if os.path.isdir("/proc/self/fd") else 3
resource.setrlimit(resource.RLIMIT_NOFILE, (taken + count,) * 2)
main()
"""


def test_too_few_open_files_are_an_error_and_write_nothing(model: Path) -> None:
    codes = []
    for count in (0, 1, 2, 3, 6):
        (model.parent / "out.pt").write_bytes(b"old")
        words = ["strip-module", "in.pt", "-o", "out.pt", "-f", "--verify"]
        ended = subprocess.run(
            [sys.executable, "-c", FEW_FILES, str(count), *words],
            cwd=model.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode in (0, 2) and "Traceback" not in ended.stderr, ended.stderr
        assert ended.returncode == 0 or ("open files" in ended.stderr and "error[io]" in ended.stderr), ended.stderr
        assert temporaries(model.parent) == []
        assert ((model.parent / "out.pt").read_bytes() == b"old") is (ended.returncode == 2)
        codes.append(ended.returncode)
    assert codes[0] == 2 and codes[-1] == 0


@pytest.mark.parametrize("folder", [None, "/nowhere", "/proc", "\0"])
def test_no_temporary_folder_is_needed(folder: str | None, model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    if folder is not None and folder != "\0":
        environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)
    words = ["cast", "in.pt", "--dtype", "f16", "-o", "out.pt"]
    ended = subprocess.run(
        [*PROGRAM, *words], cwd=model.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert load(model.parent / "out.pt")["module.fc.weight"].dtype == torch.float16
