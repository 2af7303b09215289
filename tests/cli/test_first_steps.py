"""The first minute: the program without a command, the names that people type, and a demo to try it all on."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptool.cli import main
from tests.support.cli import Ran, done
from tests.support.programs import path_with

Run = Callable[..., Ran]


# Demo ----------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(100, 32)
        self.h = nn.ModuleList(Layer(32) for _ in range(6))


def printed(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.startswith("  ckptool ")]


@pytest.mark.parametrize("folder", ["ckptool-demo", "a folder/with 'quotes'", "-x"])
def test_every_command_that_a_demo_prints_runs_as_it_stands(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    environment = os.environ | {"PATH": path_with()}

    def sh(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)

    made = sh(f"ckptool demo -- {shlex.quote(folder)}")
    lines = printed(made.stdout)
    assert made.returncode == 0 and made.stderr == "" and len(lines) >= 3
    for line in lines:
        ran = sh(line)
        assert ran.returncode == (1 if line.split()[1] in ("doctor", "diff") else 0), (line, ran)
        assert ran.stderr == ""
        if line.split()[1] == "diff":
            assert "h.{3..5}" in ran.stdout and re.search("[▁▂▃▄▅▆▇█]{3}", ran.stdout)
    assert sh(f"ckptool demo -f -- {shlex.quote(folder)}").returncode == 0  # over what these commands wrote


def test_torch_reads_the_files_of_a_demo(tmp_path: Path) -> None:
    folder = str(tmp_path / "demo")
    assert main(["demo", folder]) == 0
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(f"{folder}/model.pt", map_location="cpu", weights_only=True)
    devices = []
    tree = torch.load(
        f"{folder}/model.pt", map_location=lambda data, device: devices.append(device) or data, weights_only=False
    )
    assert set(devices) == {"cuda:0", "cpu"}
    net = Net()
    nn.DataParallel(net).load_state_dict(tree["state_dict"])
    net.load_state_dict(tree["ema_state_dict"])
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.load_state_dict(tree["optimizer"])
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert float(tree["best_loss"]) == 2.7183 and type(tree["best_loss"]).__module__ == "numpy"
    net.load_state_dict(torch.load(f"{folder}/finetuned.pt", weights_only=True))


def test_a_demo_replaces_nothing_unless_it_is_told_to(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "demo"
    done(run("demo", str(folder)))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ran = run("demo", str(folder))
    assert ran.code == 2 and "error[output-exists]" in ran.err
    done(run("demo", str(folder), "-f"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # the same bytes, too
    (folder / "mine.txt").write_text("x")
    assert run("demo", str(folder), "-f").code == 2 and (folder / "mine.txt").read_text() == "x"
    (tmp_path / "file").write_text("x")
    assert run("demo", str(tmp_path / "file")).code == 2 and run("demo", str(tmp_path / "no" / "where")).code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "file"]
