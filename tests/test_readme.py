"""Every block of the README is run, one after the other in one folder as a reader pastes them, and prints what the
README says.

    CKPTOOL_UPDATE_README=1 pytest tests/test_readme.py     puts the real output into the README

A line of output that ends in `…` may go on differently (times, versions); a line that is `…` alone stands for any
lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fixtures.readme import make_readme_files

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"```(console|python|sh)\n(.*?)```", re.DOTALL)
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readme")
    make_readme_files(path)
    return path


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of a shell block as it is pasted, its comment with it. What installs is not run."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = line if not line.startswith("pip ") else "true"
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def run(command: str, folder: Path) -> str:
    done = run_line(command, folder)
    return done.stdout + done.stderr


def commands(block: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that follows it."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def agrees(printed: str, promised: str) -> bool:
    lines = [
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in promised.rstrip("\n").split("\n")
    ]
    pattern = "".join(lines) if promised.strip() else ""
    return re.fullmatch(pattern, printed.rstrip("\n") + "\n" if printed.strip() else "") is not None


def test_every_example_prints_what_the_readme_says(folder: Path) -> None:
    text = README.read_text()
    update = os.environ.get("CKPTOOL_UPDATE_README")
    wrong: list[str] = []

    def checked(match: re.Match[str]) -> str:
        kind, block = match[1], match[2]
        if kind == "python":
            done = subprocess.run(
                [sys.executable, "-W", "error", "-c", block], cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                wrong.append(f"{block}\n{done.stderr}")
            return match[0]
        if kind == "sh":
            for line in block.splitlines():
                done = run_line(line, folder)
                # 1 is an answer: it does not load, it does not fit.
                if done.returncode > 1 or done.stderr.startswith("error["):
                    wrong.append(f"{line}\n{done.stdout}{done.stderr}")
            return match[0]
        shown = ""
        for command, promised in commands(block):
            printed = run(command, folder)
            if not agrees(printed, promised):
                wrong.append(f"$ {command}\n{printed}")
            shown += f"$ {command}\n{printed if update and not agrees(printed, promised) else promised}"
        return f"```console\n{shown}```"

    renewed = BLOCK.sub(checked, text)
    assert text.count("```console") >= 4
    if update:
        README.write_text(renewed)
    else:
        assert not wrong, "\n\n".join(wrong)


def test_what_the_examples_made_loads_in_torch(folder: Path) -> None:
    state_dict = torch.load(folder / "clean.pt", weights_only=True)["state_dict"]
    assert not any(key.startswith("module.") for key in state_dict)
    assert all(tensor.device.type == "cpu" for tensor in state_dict.values())
