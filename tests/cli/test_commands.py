"""Every command, as a user types it: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ckptool.cli import main
from ckptool.commands import VERBS as COMMANDS
from tests.support.cli import Ran, done
from tests.support.files import load
from tests.support.looped import looped

Run = Callable[..., Ran]


@looped("command", ["", *COMMANDS])
def test_help(command: str, run: Run) -> None:
    text = done(run(*command.split(), "--help"))
    assert "Usage: ckptool" in text and (not command or "--json" in text)
    assert done(run(*command.split(), "-h")) == text
    if not command:
        assert all(name in text for name in COMMANDS)


def test_version_and_no_command(run: Run) -> None:
    import ckptool

    assert done(run("--version")) == f"ckptool {ckptool.__version__}\n"
    ran = run()
    assert ran.code == 2 and "ckptool --help" in ran.err and ran.out == ""


# Looking


def test_inspect_says_what_the_parts_look_like(files: Path, run: Run) -> None:
    text = done(run("inspect", "training.pt"))
    lines = [" ".join(line.split()) for line in text.split("\n")]
    assert lines[0] == "training.pt: torch-zip, 21.5 kB"
    assert "epoch 3" in lines and "best_metric 0.875" in lines
    assert any(line.endswith("model weights: 9 tensors, 277 elements, f32 + i64") for line in lines)
    assert any("EMA weights" in line and "names and shapes as in model_state_dict" in line for line in lines)
    assert any("Adam state for 6 parameters: 18 tensors" in line for line in lines)
    assert "38 tensors in 38 storages, 9.26 kB" in lines
    assert len(lines) <= 45 and "\x1b" not in text


def test_inspect_gives_commands_that_run_as_they_are(files: Path, run: Run) -> None:
    import shlex

    (files / "dp.pt").rename(files / "a name.pt")
    (files / "a name.fixed.pt").touch()
    fixes = [line.strip() for line in done(run("inspect", "a name.pt")).split("\n") if line.startswith("  ckptool ")]
    assert fixes == ["ckptool strip-module 'a name.pt' -o 'a name.fixed2.pt'"]
    done(run(*shlex.split(fixes[0])[1:]))
    assert not json.loads(done(run("inspect", "a name.fixed2.pt", "--json")))["notes"]
    assert json.loads(done(run("inspect", "cuda.pt", "--json")))["notes"][0]["fix"][-1] == "cuda.fixed.pt"


def test_inspect_all_lists_every_tensor_and_entry(files: Path, run: Run) -> None:
    text = done(run("inspect", "training.pt", "--all"))
    for row in json.loads(done(run("inspect", "training.pt", "--json")))["tensors"]:
        assert "/".join(map(str, row["path"])) in text
    assert "optimizer_state_dict/param_groups/0/lr" in text
    tied = done(run("inspect", "ties.pt", "--all"))
    assert "head.weight" in tied and "tied to embed.weight" in tied and "1 name tied to another" in tied


def test_inspect_orders_depth_and_parts(files: Path, run: Run) -> None:
    def names(*words: str) -> list[str]:
        rows = done(run("inspect", "training.pt#model_state_dict", "--all", *words)).split("\n\n")[1].split("\n")
        return [row.split()[0].partition("/")[2] for row in rows]

    assert names()[0] == "fc1.weight"
    flat = done(run("inspect", "training.pt", "--depth", "0"))
    assert "fc1" not in flat and "fc1" in done(run("inspect", "training.pt", "--depth", "1"))
    assert done(run("inspect", "training.pt", "--at", "model_state_dict")) == done(
        run("inspect", "training.pt#model_state_dict")
    )


def test_inspect_statistics(files: Path, run: Run) -> None:
    torch.save({"fc.weight": torch.tensor([1.0, float("nan"), 0.0, -3.0])}, "nan.pt")
    text = done(run("inspect", "nan.pt", "--stats"))
    assert "non-finite: 1 of 1 tensor holds NaN or Inf" in text and "25.0%" in text
    facts = json.loads(done(run("inspect", "nan.pt", "--stats", "--json")))["tensors"][0]["statistics"]
    assert (facts["min"], facts["max"], facts["nans"], facts["zeros"]) == (-3.0, 1.0, 1, 1)


def test_several_files(files: Path, run: Run) -> None:
    assert done(run("inspect", "dp.pt", "ties.pt")).count("torch-zip") == 2
    found = json.loads(done(run("inspect", "dp.pt", "ties.pt", "--json")))
    assert found["schema"] == "ckptool.results/2"
    assert [result["file"] for result in found["results"]] == ["dp.pt", "ties.pt"]


def test_show(files: Path, run: Run) -> None:
    text = done(run("show", "dp.pt#module.bn.weight"))
    assert (
        text == "module.bn.weight: f32 [16], 64 B\n[1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1.]\n"
    )
    assert "lr: 0.001" in done(run("show", "training.pt", "--at", "config"))
    assert done(run("show", "training.pt#epoch")) == "3\n"
    sliced = json.loads(done(run("show", "dp.pt#module.fc1.weight", "--slice", "0:2,:", "--json")))
    expected = torch.load("dp.pt", weights_only=True)["module.fc1.weight"][:2].tolist()
    assert sliced["values"] == expected and sliced["schema"] == "ckptool.show/2"
    big = torch.zeros(100, 100)
    torch.save({"big.weight": big}, "big.pt")
    assert "--all" in done(run("show", "big.pt#big.weight"))
    assert json.loads(done(run("show", "big.pt#big.weight", "--json")))["values"] is None
    assert json.loads(done(run("show", "big.pt#big.weight", "--json", "--all")))["values"] == big.tolist()


def test_show_json_has_no_raw_nan(files: Path, run: Run) -> None:
    torch.save({"w.weight": torch.tensor([float("nan"), float("inf")]), "c.weight": torch.tensor([1 - 2j])}, "nan.pt")
    assert '"values": ["NaN", "Infinity"]' in done(run("show", "nan.pt#w.weight", "--json"))
    assert json.loads(done(run("show", "nan.pt#c.weight", "--json")))["values"] == [[1.0, -2.0]]


def test_diff_ends_with_one_where_files_differ(files: Path, run: Run) -> None:
    assert done(run("diff", "dp.pt", "dp.pt")) == "same: 9 tensors, byte for byte\n"
    done(run("strip-module", "dp.pt", "-o", "clean.pt"))
    ran = run("diff", "dp.pt", "clean.pt")
    assert ran.code == 1 and ran.err == "" and ran.out.startswith("differ: 9 only in dp.pt, 9 only in clean.pt")
    assert "--ignore prefix" in ran.out
    assert done(run("diff", "dp.pt", "clean.pt", "--ignore", "prefix")).startswith("same: 9 tensors")
    assert len(run("diff", "dp.pt", "clean.pt", "--stat").out) < 300


def test_diff_of_values(files: Path, run: Run) -> None:
    state = torch.load("dp.pt", weights_only=True)
    state["module.fc1.bias"][3] += 0.5
    torch.save(state, "other.pt")
    ran = run("diff", "dp.pt", "other.pt")
    assert ran.code == 1 and "1 of 16" in ran.out and "[3]" in ran.out and "8 tensors the same" in ran.out
    close = done(run("diff", "dp.pt", "other.pt", "--atol", "1"))
    assert close == "same: 9 tensors, within the tolerance\n"
    found = json.loads(run("diff", "dp.pt", "other.pt", "--json").out)
    assert not found["same"] and found["changed"][0]["values"]["max_abs"] == pytest.approx(0.5)
    assert found["changed"][0]["values"]["first"] == [3]
    done(run("convert", "dp.pt", "-o", "dp.safetensors"))
    assert "not compared" in done(run("diff", "dp.pt", "dp.safetensors"))


# Changing


def test_strip_and_add(files: Path, run: Run) -> None:
    text = done(run("strip-module", "dp.pt", "-o", "clean.pt", "--verify"))
    assert text.startswith("strip-module: 9 of 9 keys renamed → clean.pt (") and "new file, verified)" in text
    assert "fc1.weight" in load("clean.pt")
    assert "already clean" in done(run("strip-module", "clean.pt", "-o", "copy.pt"))
    assert Path("copy.pt").read_bytes() == Path("clean.pt").read_bytes()
    done(run("add-module", "clean.pt", "--prefix", "net.", "-o", "net.pt"))
    assert "net.fc1.weight" in load("net.pt")
    done(run("strip-module", "net.pt", "--prefix", "net.", "-o", "net.pt", "-f"))
    assert list(load("net.pt")) == list(load("clean.pt"))


def test_in_place_and_dry_run(files: Path, run: Run) -> None:
    before = Path("dp.pt").read_bytes()
    dry = done(run("strip-module", "dp.pt", "--in-place", "-n"))
    assert "would be" in dry and "nothing was written" in dry and Path("dp.pt").read_bytes() == before
    assert "in place" in done(run("strip-module", "dp.pt", "--in-place"))
    assert "fc1.weight" in load("dp.pt")
    assert "unchanged" in done(run("strip-module", "dp.pt", "--in-place"))
    done(run("strip-module", "compiled.pt", "-d", "out", "-n"))
    assert not Path("out").exists()


def test_a_folder_of_outputs(files: Path, run: Run) -> None:
    found = json.loads(done(run("strip-module", "dp.pt", "compiled.pt", "-d", "out/deep", "--json")))
    assert [result["output"] for result in found["results"]] == ["out/deep/dp.pt", "out/deep/compiled.pt"]
    assert list(load("out/deep/dp.pt")) == list(load("out/deep/compiled.pt"))
    done(run("convert", "dp.pt", "training.pt#ema_state_dict", "-d", "out", "--to", "safetensors"))
    assert {path.name for path in Path("out").iterdir()} == {"deep", "dp.safetensors", "training.safetensors"}


def test_rename(files: Path, run: Run) -> None:
    Path("rules.yaml").write_text("- 'fc{n}.* => layers.{n}.*'\n- 'bn.* => norm.*'\n")
    done(run("rename", "training.pt", "fc1.weight => first", "-o", "a.pt", "--rules", "rules.yaml"))
    assert {"first", "layers.2.weight", "norm.bias"} <= set(load("a.pt")["ema_state_dict"])
    done(run("rename", "dp.pt", "compiled.pt", "*fc1.weight => *first.weight", "-d", "out"))
    assert "_orig_mod.first.weight" in load("out/compiled.pt")


def test_remap(files: Path, run: Run) -> None:
    assert "9 of 9 storages moved" in done(run("remap", "cuda.pt", "--to", "cpu", "-o", "cpu.pt"))
    assert load("cpu.pt")["fc1.weight"].device.type == "cpu"
    done(run("remap", "cuda.pt", "--map", "cuda:0=cuda:1", "-o", "one.pt"))
    places = {row["location"] for row in json.loads(done(run("inspect", "one.pt", "--json")))["tensors"]}
    assert places == {"cuda:1"}


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


# JSON


def check_inspection(found: dict[str, Any]) -> None:
    assert found["schema"] == "ckptool.inspect/2"
    assert isinstance(found["bytes"], int) and isinstance(found["file"], str) and isinstance(found["container"], str)
    for row in found["tensors"]:
        assert {"path", "dtype", "shape", "stride", "offset", "location", "storage", "nbytes"} <= set(row)
        assert all(type(segment) in (str, int) for segment in row["path"])
        assert "kind" in row or (len(row["shape"]) == len(row["stride"]) and isinstance(row["storage"], int))
    for row in found["entries"]:
        assert set(row) == {"path", "type", "value"}
    for note in found["notes"]:
        assert set(note) == {"code", "message", "fix"} and all(isinstance(word, str) for word in note["fix"])
        assert not any(word in ("{file}", "{out}") for word in note["fix"])


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
    check_inspection(found)
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
