"""Every example runs as it stands, for a few steps, and is found in the README beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.training import configfile
from ckptool.training.trainer import start
from tests.support.looped import sliced

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
# What differs here: no scikit-learn, no compiler.
INSTEAD = {"digits": ["data.name=data.py:images"], "compile": ["train.compile=eager"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples")
    return Path(shutil.copytree(EXAMPLES, path / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__")))


@pytest.mark.parametrize("name", sliced(NAMES, 12))
def test_an_example_runs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if name == "warm_start":
        start(configfile.read("basic.yaml", ["save.every=200", "eval.every=0"]), resume="auto")
    changes = ["train.epochs=null", "train.steps=6", "save.every=3", "eval.every=3", "log.every=2"]
    config = configfile.read(f"{name}.yaml", [*changes, f"run=runs/test-{name}", *INSTEAD.get(name, [])])
    done = start(config)
    assert (done.status, done.step) == ("done", 6)
    path = Path(f"runs/test-{name}/checkpoints/step-00000006.{'dcp' if name == 'fsdp' else 'pt'}")
    state = ckptool.load(path) if path.is_dir() else torch.load(path, weights_only=True)
    assert state["step"] == 6
    prefixes = ("module.", "_orig_mod.", "0.module")
    weights = [key for part in state if part.startswith("model") for key in state[part]]
    assert weights
    assert not [key for key in weights if key.startswith(prefixes)]
    if name == "hooks":
        line = json.loads(Path(f"runs/test-{name}/metrics.jsonl").read_text().splitlines()[-1])
        assert {"grad_norm", "weight_norm"} < set(line)
    if name == "profile":
        assert json.loads(Path(f"runs/test-{name}/profile.json").read_text())["traceEvents"]
    if name == "ema":
        assert list(state["ema_state_dict"]) == weights


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [name for name in NAMES if f"[{name}.yaml]({name}.yaml) |" not in text] == []


def test_every_example_says_what_it_is_and_has_a_run_of_its_own() -> None:
    for name in NAMES:
        text = (EXAMPLES / f"{name}.yaml").read_text()
        assert text.startswith("# "), name
        assert configfile.checked(configfile.loaded(text, name)[0], name).run == f"runs/{name}"
