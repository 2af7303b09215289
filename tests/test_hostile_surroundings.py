"""HOSTILE.md, rows 147 and 148: the folder, the variables and the locale that the program runs in decide nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.checkpoints import saved, weights

DECOYS = [
    "torch.py", "numpy.py", "yaml.py", "safetensors.py", "typer.py", "rich.py", "ml_dtypes.py", "models.py", "ckptool.py",
    "sitecustomize.py", "usercustomize.py", "conftest.py", "json.py", "pickle.py", "struct.py",
]  # fmt: skip


SETTINGS = ["ckptool.toml", ".ckptool.toml", "pyproject.toml", ".env", ".ckptoolrc", "ckptool.ini", "setup.cfg"]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which every module leaves a trace when it is imported, and every settings file is broken."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in DECOYS:
        (folder / name).write_text(f"open({str(folder / 'TRACE')!r}, 'a').write({name!r} + '\\n')\n")
    for package in ("torch", "numpy", "ckptool"):
        (folder / f"{package}_pkg").mkdir()
    for name in SETTINGS:
        (folder / name).write_text("this is no setting that anyone could read = = =\n")
        (folder / name).chmod(0)
    model = torch.nn.Linear(2, 2)
    saved({"model": {f"module.{k}": v for k, v in model.state_dict().items()}, "epoch": 1}, folder / "in.pt")
    (folder / "rules.yaml").write_text("- 'module.* => m.*'\n")
    numpy.save(folder / "b.npy", numpy.zeros(2, numpy.float32))
    return folder


COMMANDS = [
    "inspect in.pt --stats",
    "show in.pt#model/module.weight",
    "diff in.pt in.pt",
    "strip-module in.pt -o a.pt --verify",
    "rename in.pt --rules rules.yaml -o b.pt",
    "cast in.pt --dtype bf16 -o c.pt",
    "edit in.pt --tensor model/module.bias=b.npy -o d.pt",
    "convert in.pt --all -o e.safetensors",
    "--help",
]


def program() -> list[str]:
    """The installed program, as a user starts it."""
    return [str(Path(sys.executable).with_name("ckptool"))]


@pytest.mark.parametrize("command", COMMANDS)
def test_row_147_nothing_beside_the_checkpoint_is_imported_or_read(command: str, trap: Path) -> None:
    ended = subprocess.run([*program(), *command.split()], cwd=trap, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not (trap / "TRACE").exists(), (trap / "TRACE").read_text()


def test_row_147_a_path_with_an_empty_part_does_not_lead_to_the_working_directory(trap: Path) -> None:
    """`PYTHONPATH=$PYTHONPATH:/x` puts the working directory first, where the variable was not set before."""
    for name in (
        "json.py",
        "struct.py",
        "pickle.py",
        "sitecustomize.py",
        "usercustomize.py",
        "typer.py",
        "ckptool.py",
        "rich.py",
    ):
        (trap / name).unlink()  # what Python or the program needs before its first line can run is beyond its reach
    for command in (COMMANDS[0], COMMANDS[4], COMMANDS[6]):
        ended = subprocess.run(
            [*program(), *command.split()],
            cwd=trap,
            env=os.environ | {"PYTHONPATH": ":/nowhere"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert not (trap / "TRACE").exists(), (trap / "TRACE").read_text()


ODD = {
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    "PYTHONINSPECT": "",
    "CKPTOOL_CONFIG": "/nowhere",
    "COLUMNS": "\x1b[31m",
    "TERM": "\x1b",
    "TMPDIR": "/nowhere",
    "HOME": "/nowhere",
    "LC_ALL": "C",
    "LANG": "xx_YY.nonsense",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}


def traced(path: Path, trace: Path) -> Path:
    """A checkpoint whose pickle would touch `trace` when it is loaded the unsafe way."""

    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    torch.save({"model": weights("module.a"), "evil": Touch()}, path)
    return path


def test_row_148_variables_have_no_effect(tmp_path: Path) -> None:
    trace = tmp_path / "TRACE"
    startup = tmp_path / "startup.py"
    startup.write_text(f"open({str(trace)!r}, 'w')")
    traced(tmp_path / "in.pt", trace)
    results = []
    for environment in ({}, ODD | {"PYTHONSTARTUP": str(startup)}):
        outputs = []
        for words in (
            ["inspect", "in.pt", "--json"],
            ["strip-module", "in.pt", "-o", "out.pt", "-f", "--keep-unknown"],
        ):
            ended = subprocess.run(
                [*program(), *words], cwd=tmp_path, env=os.environ | environment, capture_output=True, check=False
            )
            assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr
            outputs.append(ended.stdout.replace(b"\xe2\x86\x92", b"->"))
        results.append((outputs, (tmp_path / "out.pt").read_bytes()))
        assert not trace.exists()
    assert results[0] == results[1]


def test_row_148_names_that_no_locale_can_spell(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/\xff\xfe-\xe9.pt"
    path = saved(weights("module.é"), tmp_path / "in.pt")
    try:
        os.rename(os.fsencode(path), raw)
    except OSError:  # a file system that takes only UTF-8: then such a name is simply not there
        os.rename(path, os.fsencode(tmp_path) + b"/in.pt")
    for environment in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C.UTF-8"}):
        for words in (
            [b"inspect", raw, b"--json"],
            [b"strip-module", raw, b"-o", raw + b".out.pt", b"-f"],
            [b"inspect", b"\xff\x1b[31m.pt"],
            [b"show", raw + b"#\xff"],
        ):
            ended = subprocess.run(
                [*map(os.fsencode, program()), *words], env=os.environ | environment, capture_output=True, check=False
            )
            assert ended.returncode in (0, 1, 2) and b"Traceback" not in ended.stderr, ended.stderr
            assert b"error[bug]" not in ended.stderr, (words, ended.stderr)
            assert b"\x1b" not in ended.stdout + ended.stderr
            if words[0] == b"inspect" and raw in words and os.path.exists(raw):
                assert ended.returncode == 0 and b"module." in ended.stdout, ended.stderr
