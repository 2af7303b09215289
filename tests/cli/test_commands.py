"""Commands as a user types them. What they print, write and end with is in the record (tests/golden)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ckptool.cli import main
from tests.support.cli import Ran, done
from tests.support.files import load

Run = Callable[..., Ran]


def test_version_and_no_command(run: Run) -> None:
    import ckptool

    assert done(run("--version")) == f"ckptool {ckptool.__version__}\n"
    assert done(run("-h")) == done(run("--help")) and done(run("cast", "-h")) == done(run("cast", "--help"))
    ran = run()
    assert ran.code == 2 and "ckptool --help" in ran.err and ran.out == ""


def test_inspect_gives_commands_that_run_as_they_are(files: Path, run: Run) -> None:
    import shlex

    (files / "dp.pt").rename(files / "a name.pt")
    (files / "a name.fixed.pt").touch()
    fixes = [line.strip() for line in done(run("inspect", "a name.pt")).split("\n") if line.startswith("  ckptool ")]
    assert fixes == ["ckptool strip-module 'a name.pt' -o 'a name.fixed2.pt'"]
    done(run(*shlex.split(fixes[0])[1:]))
    assert not json.loads(done(run("inspect", "a name.fixed2.pt", "--json")))["notes"]
    assert json.loads(done(run("inspect", "cuda.pt", "--json")))["notes"][0]["fix"][-1] == "cuda.fixed.pt"


def test_show_json_has_no_raw_nan(files: Path, run: Run) -> None:
    torch.save({"w.weight": torch.tensor([float("nan"), float("inf")]), "c.weight": torch.tensor([1 - 2j])}, "nan.pt")
    assert '"values": ["NaN", "Infinity"]' in done(run("show", "nan.pt#w.weight", "--json"))
    assert json.loads(done(run("show", "nan.pt#c.weight", "--json")))["values"] == [[1.0, -2.0]]


def test_a_folder_of_outputs(files: Path, run: Run) -> None:
    found = json.loads(done(run("strip-module", "dp.pt", "compiled.pt", "-d", "out/deep", "--json")))
    assert [result["output"] for result in found["results"]] == ["out/deep/dp.pt", "out/deep/compiled.pt"]
    assert list(load("out/deep/dp.pt")) == list(load("out/deep/compiled.pt"))
    done(run("convert", "dp.pt", "training.pt#ema_state_dict", "-d", "out", "--to", "safetensors"))
    assert {path.name for path in Path("out").iterdir()} == {"deep", "dp.safetensors", "training.safetensors"}


def test_cast_edit_convert(files: Path, run: Run) -> None:
    done(run("cast", "dp.pt", "--dtype", "bf16", "--exclude", "*bn*", "-o", "small.pt"))
    small = load("small.pt")
    assert small["module.fc1.weight"].dtype is torch.bfloat16 and small["module.bn.weight"].dtype is torch.float32
    numpy.save("bias.npy", numpy.arange(16, dtype="f4"))
    words = ("--drop", "optimizer*", "--set", "epoch:=7", "--tensor", "model_state_dict/fc1.bias=bias.npy")
    done(run("edit", "training.pt", *words, "-o", "edited.pt"))
    edited = load("edited.pt")
    assert edited["epoch"] == 7 and "optimizer_state_dict" not in edited
    assert edited["model_state_dict"]["fc1.bias"].tolist() == list(range(16))
    done(run("convert", "training.pt", "--all", "-o", "all.safetensors"))
    done(run("convert", "all.safetensors", "-o", "back.pt"))
    done(run("diff", "training.pt", "back.pt"))
    plain = json.loads(done(run("convert", "training.pt", "-o", "w.safetensors", "--ties", "copy", "--json")))
    assert "epoch" in plain["facts"]["left_behind"] and plain["container"] == "safetensors"


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert text.isascii() and text.endswith("}\n") and "\n" not in text[:-1]
    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "name", ["training.pt", "numpy_values.pt", "ties.pt", "gan.pt", "model.safetensors", "hostile.pt"]
)
def test_inspect_json(name: str, files: Path, hostile: Path, run: Run) -> None:
    text = done(run("inspect", name, "--json", "--stats"))
    found = strict(text)
    expected = sum(1 for _ in tensors_of(name))
    assert len(found["tensors"]) == expected
    assert done(run("inspect", name, "--json", "--stats")) == text, "same in, same out"


def tensors_of(name: str) -> Any:
    """Every tensor that stock readers find."""
    if name.endswith(".safetensors"):
        from safetensors.torch import load_file

        loaded: Any = load_file(name)
    else:
        loaded = torch.load(name, weights_only=False)
    stack = [loaded]
    while stack:
        node = stack.pop()
        if isinstance(node, torch.Tensor):
            yield node
        elif isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, (list, tuple)):
            stack += node


def test_a_parameter_called_like_an_option_is_a_file(files: Path, run: Run) -> None:
    (files / "dp.pt").rename(files / "-dp.pt")
    text = done(run("inspect", "--", "-dp.pt"))
    assert "ckptool strip-module ./-dp.pt -o ./-dp.fixed.pt" in text


def test_main_does_not_end_the_process_of_those_who_call_it(files: Path) -> None:
    assert main(["--version"]) == 0


def test_warm_start_names_a_part_once(tmp_path: Path, run: Callable[..., Ran]) -> None:
    torch.save({"G": {"weight": torch.ones(2)}, "D": {"weight": torch.ones(3)}}, file := tmp_path / "gan.pt")
    found = run("warm-start", f"{file}#G", "--against", f"{file}#G")
    assert found.out.startswith(f"{file}#G into "), found
