"""`warm-start` from files to files: what is written, what is refused, and what others load of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CkptoolError, Conflict, OutputExists, UsageError, UserCodeFailed
from fixtures.make import TiedLanguageModel, make, mlp
from tests.support.errors import three_parts
from tests.support.files import load, saved
from tests.support.same import assert_same_objects
from tests.support.warm_starts import warm_started

# What is written -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_exactly_the_targets_keys_in_its_order(tmp_path: Path, suffix: str) -> None:
    old, new = mlp().state_dict(), mlp().state_dict()
    target = saved(new, tmp_path / "target.pt")
    state = {f"module.{key}": value for key, value in reversed(old.items()) if "fc2" not in key} | {
        "extra": torch.ones(1)
    }
    out = tmp_path / f"out{suffix}"
    report = ckptool.warm_start(saved(state, tmp_path / "old.pt"), target, out, verify=True)
    done = ckptool.load(out)
    assert list(done) == list(new)
    for key, value in done.items():
        assert_same_objects(value, (new if "fc2" in key else old)[key])
    mlp().load_state_dict(done, strict=True)
    assert report.taken == ("fc2.weight", "fc2.bias") and [f.source for f in report.unexpected] == ["extra"]
    if suffix == ".pt":
        assert load(out)._metadata == new._metadata


def test_a_factory_fills_up(tmp_path: Path, code: Path) -> None:
    state = {"0.weight": torch.ones(16, 8), "0.bias": torch.ones(16)}
    file = saved(state, tmp_path / "part.pt")
    report, done = warm_started(file, f"{code}:build", tmp_path / "out.pt")
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model.load_state_dict(done, strict=True)
    assert (done["0.weight"] == 1).all() and report.taken == tuple(key for key in model.state_dict() if key[0] != "0")
    assert [fact.kind for fact in report.missing if "running" in fact.name] == ["buffer", "buffer"]
    warm_started(file, f"{code}:build", tmp_path / "again.pt")
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "again.pt").read_bytes()  # same in, same out
    assert list(warm_started(file, f"{code}:state", tmp_path / "state.pt")[1]) == list(done)
    report = ckptool.warm_start(file, f"{code}:on_meta")
    assert report.share == pytest.approx(144 / (144 + 65 + 51))
    with pytest.raises(Conflict, match="has no values"):
        ckptool.warm_start(file, f"{code}:on_meta", tmp_path / "meta.pt")


def test_extra_state_comes_from_the_target(tmp_path: Path, code: Path) -> None:
    file = saved({"fc.weight": torch.ones(16, 8), "fc.bias": torch.ones(16)}, tmp_path / "part.pt")
    report, done = warm_started(file, f"{code}:Model", tmp_path / "out.pt")
    assert done["_extra_state"] == {"seen": 3} and report.taken == ("_extra_state",) and report.share == 1


def test_a_cuda_checkpoint_for_anywhere(tmp_path: Path) -> None:
    warm_started(make("cuda.pt", tmp_path), saved(mlp().state_dict(), tmp_path / "target.pt"), tmp_path / "out.pt")
    assert {tensor.location for tensor in ckptool.open(tmp_path / "out.pt").tree.values()} == {"cpu"}
    torch.load(tmp_path / "out.pt", weights_only=True)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_types_become_the_targets(tmp_path: Path, half: torch.dtype) -> None:
    old, target = mlp().state_dict(), mlp().to(half).state_dict()
    report, done = warm_started(
        saved(old, tmp_path / "old.pt"), saved(target, tmp_path / "target.pt"), tmp_path / "out.pt"
    )
    for key, value in old.items():
        assert_same_objects(done[key], value.to(half) if value.is_floating_point() else value)
    assert {(f.old.name, f.exact) for f in report.dtype_changes if f.target == "fc1.weight"} == {("f32", False)}
    report, done = warm_started(tmp_path / "out.pt", tmp_path / "old.pt", tmp_path / "back.pt")
    assert all(fact.exact for fact in report.dtype_changes) and done["fc1.weight"].dtype is torch.float32


def test_whole_numbers_and_truths(tmp_path: Path) -> None:
    old = {"a.x": torch.tensor([1, 200, -3]), "a.y": torch.tensor([True, False]), "a.z": torch.tensor([1, 2**24 + 1])}
    target = {"a.x": torch.zeros(3, dtype=torch.uint8), "a.y": torch.zeros(2, dtype=torch.int32), "a.z": torch.zeros(2)}
    report, done = warm_started(
        saved(old, tmp_path / "old.pt"), saved(target, tmp_path / "target.pt"), tmp_path / "out.pt"
    )
    assert {key: value.tolist() for key, value in done.items()} == {
        "a.x": [1, 200, 253],
        "a.y": [1, 0],
        "a.z": [1, 2**24],
    }
    facts = {fact.target: (fact.exact, fact.changed) for fact in report.dtype_changes}
    assert facts == {"a.x": (False, 1), "a.y": (True, 0), "a.z": (False, 1)}


def test_ties_are_the_targets(tmp_path: Path) -> None:
    tied, out = saved(TiedLanguageModel().state_dict(), tmp_path / "tied.pt"), tmp_path / "out.pt"
    loose = saved(
        {key: value.clone() for key, value in TiedLanguageModel().state_dict().items()}, tmp_path / "loose.pt"
    )
    report, done = warm_started(tied, loose, out)
    assert done["head.weight"].data_ptr() != done["embed.weight"].data_ptr() and not report.tied
    one = saved({key: value for key, value in load(loose).items() if "head" not in key}, tmp_path / "one.pt")
    report, done = warm_started(one, tied, tmp_path / "tied_out.pt", strict=True)
    assert done["head.weight"].data_ptr() == done["embed.weight"].data_ptr() and report.tied == (
        ("head.weight", "embed.weight"),
    )


def test_views_do_not_drag_their_storage_along(tmp_path: Path) -> None:
    big = torch.arange(1_000_000.0)
    file = saved({"a.weight": big[10:16].view(2, 3), "b.weight": big[100:106].view(3, 2).t()}, tmp_path / "views.pt")
    target = saved({"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(2, 3)}, tmp_path / "target.pt")
    _, done = warm_started(file, target, tmp_path / "out.pt", verify=True)
    assert torch.equal(done["a.weight"], big[10:16].view(2, 3)) and torch.equal(
        done["b.weight"], big[100:106].view(3, 2).t()
    )
    assert (tmp_path / "out.pt").stat().st_size < 10_000


@pytest.mark.parametrize("shape", [(5, 4), (8, 2), (3, 3), (0, 4)])
def test_pad(tmp_path: Path, shape: tuple[int, ...]) -> None:
    part, base = torch.randn(shape).half(), torch.randn(8, 4)
    file, target = (
        saved({"e.weight": part, "x.weight": torch.ones(1)}, tmp_path / "s.pt"),
        {"e.weight": base, "x.weight": torch.ones(1)},
    )
    report, done = warm_started(
        file, saved(target, tmp_path / "target.pt"), tmp_path / "out.pt", on_mismatch="pad", min_loaded=0, verify=True
    )
    want = base.clone()
    want[: shape[0], : shape[1]] = part.float()
    assert torch.equal(done["e.weight"], want) and report.mismatched[0].done == "padded"


def test_slice(tmp_path: Path) -> None:
    old = torch.randn(8, 4, 3)
    file, target = (
        saved({"e.weight": old}, tmp_path / "s.pt"),
        saved({"e.weight": torch.zeros(5, 4, 2)}, tmp_path / "t.pt"),
    )
    report, done = warm_started(file, target, tmp_path / "out.pt", on_mismatch="slice")
    assert torch.equal(done["e.weight"], old[:5, :, :2]) and report.share == 1
    warm_started(file, ckptool.spec(target, tmp_path / "t.json").output, tmp_path / "out2.pt", on_mismatch="slice")


def test_large_tensors_in_pieces(tmp_path: Path) -> None:
    """More than one chunk of each kind of conversion, read back at odd places."""
    old = {"a.weight": torch.randn(300, 700), "b.weight": torch.arange(200_000)}
    base = {"a.weight": torch.randn(400, 900, dtype=torch.float64), "b.weight": torch.zeros(200_000, dtype=torch.int16)}
    file, target = saved(old, tmp_path / "old.pt"), saved(base, tmp_path / "base.pt")
    _, done = warm_started(file, target, tmp_path / "out.pt", on_mismatch="pad", verify=True)
    base["a.weight"][:300, :700] = old["a.weight"]
    assert torch.equal(done["a.weight"], base["a.weight"]) and torch.equal(done["b.weight"], old["b.weight"].short())


def test_an_expanded_tensor_of_4_tb_is_planned_and_not_written_out(tmp_path: Path) -> None:
    """A few bytes that stand for 4 TB are planned at once, written as they are, and never written out."""
    huge = torch.zeros(1).expand(1_000_000, 1_000_000)
    two = {"a.weight": huge, "b.weight": torch.ones(1).expand(1_000_000, 1_000_000)}
    file = saved({"a.weight": huge, "x.weight": torch.ones(1)}, tmp_path / "huge.pt")
    _, done = warm_started(file, file, tmp_path / "out.pt")
    assert done["a.weight"].stride() == (0, 0) and (tmp_path / "out.pt").stat().st_size < 10_000
    tied = saved({"a.weight": huge, "b.weight": huge}, tmp_path / "tied.pt")
    assert not ckptool.warm_start(saved(two, tmp_path / "two.pt"), tied).accepted
    half = saved(
        {"a.weight": torch.zeros(1).half().expand(1_000_000, 1_000_000), "x.weight": torch.ones(1)},
        tmp_path / "half.pt",
    )
    warm_start_refused(tmp_path, file, half, Conflict, "expanded view")


def test_a_numpy_checkpoint(tmp_path: Path) -> None:
    file = saved({"fc.weight": numpy.ones((2, 3), "f4"), "fc.bias": numpy.zeros(2, "f4")}, tmp_path / "arrays.pt")
    report, done = warm_started(
        file, saved(nn.Linear(3, 2).state_dict(), tmp_path / "t.pt"), tmp_path / "out.pt", rename="fc.* => *"
    )
    assert (done["weight"] == 1).all() and report.share == 1


# Refused: nothing is written -----------------------------------------------------------------------------------------


def warm_start_refused(
    tmp_path: Path, file: Path, target: Path | str, kind: type[CkptoolError], words: str, **options: Any
) -> CkptoolError:
    before = sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")
    with pytest.raises(kind, match=words) as found:
        ckptool.warm_start(file, target, tmp_path / "never.pt", **options)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before
    three_parts(found.value)
    return found.value


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"strict": True}, "strict"),
        ({"min_loaded": 0.99}, "min-loaded"),
        ({"rename": "fc* => gc*"}, "nothing-loaded"),
        ({}, "shape-mismatch"),
    ],
)
def test_a_plan_that_is_not_accepted(tmp_path: Path, options: dict[str, Any], code: str) -> None:
    state = mlp().state_dict()
    gone = {key: value for key, value in state.items() if key.startswith("fc")}
    changed = {**gone, "fc1.weight": torch.zeros(3, 3)} if not options else gone
    file, out = saved(changed, tmp_path / "old.pt"), tmp_path / "out.pt"
    report = ckptool.warm_start(file, saved(state, tmp_path / "target.pt"), out, **options)
    assert code in [reason.code for reason in report.refused] and not report.accepted
    assert report.output is None and not out.exists()


def test_strict_does_not_pass_over_what_is_skipped(tmp_path: Path) -> None:
    state = mlp().state_dict()
    file = saved(state | {"fc1.weight": torch.zeros(3, 3)}, tmp_path / "old.pt")
    report = ckptool.warm_start(file, saved(state, tmp_path / "new.pt"), on_mismatch="skip", strict=True)
    assert [(fact.code, fact.what) for fact in report.refused] == [("strict", "1 name is skipped: fc1.weight")]


@pytest.mark.parametrize(
    ("given", "have", "words"),
    [
        ("pad", 9, "Cut what is larger: --on-mismatch slice"),
        ("slice", 2, "Fill up what is smaller: --on-mismatch pad"),
        ("error", 9, "cut or fill up: --on-mismatch slice or --on-mismatch pad"),
    ],
)
def test_the_advice_for_a_shape_is_another_than_what_was_tried(
    tmp_path: Path, given: str, have: int, words: str
) -> None:
    old, new = (
        saved({"a.weight": torch.ones(have)}, tmp_path / "old.pt"),
        saved({"a.weight": torch.ones(4)}, tmp_path / "new.pt"),
    )
    report = ckptool.warm_start(old, new, on_mismatch=given)
    (fix,) = [fact.fix for fact in report.refused if fact.code == "shape-mismatch"]
    assert words in fix


def test_mismatches_are_told_in_groups(tmp_path: Path) -> None:
    old = {f"module.layers.{n}.{name}": torch.ones(3) for n in (0, 1, 2, 5) for name in ("weight", "bias")}
    new = {f"layers.{n}.{name}": torch.ones(4) for n in (0, 1, 2, 5) for name in ("weight", "bias")}
    old["module.head.weight"], new["head.weight"] = torch.ones(1, 2), torch.ones(4)
    report = ckptool.warm_start(saved(old, tmp_path / "old.pt"), saved(new, tmp_path / "new.pt"))
    lines = str(report).split("\n")
    place = lines.index("do not fit 9")
    assert lines[place + 1 : place + 3] == [
        (
            "  layers.{0..2, 5}.{weight, bias}: f32 [3] against f32 [4], refused (from module.layers.{0..2, 5}.{weight,"
            " bias})  (8)"
        ),
        "  head.weight: f32 [1, 2] against f32 [4], refused (from module.head.weight)",
    ]


def test_the_prefix_is_counted_where_a_rule_takes_it_off(tmp_path: Path) -> None:
    old = {f"module.{name}": tensor for name, tensor in mlp().state_dict().items()}
    new = {name.replace("fc1", "first"): tensor for name, tensor in mlp().state_dict().items()}
    report = ckptool.warm_start(
        saved(old, tmp_path / "old.pt"), saved(new, tmp_path / "new.pt"), rename="fc1.* => first.*"
    )
    assert report.accepted and report.share == 1
    assert f"module. taken off {len(old)} keys of the checkpoint" in [note.message for note in report.normalised]


def test_a_factory_that_raises(tmp_path: Path, code: Path) -> None:
    file = saved(mlp().state_dict(), tmp_path / "model.pt")
    error = warm_start_refused(tmp_path, file, f"{code}:raises", UserCodeFailed, "raised ValueError: the data")
    assert 'raise ValueError("the data\\nare missing")' in error.why and "line" in error.why
    assert (
        "ckptool/bridge/user_code.py" not in error.why and error.fix == "The error is in your own code, not in ckptool."
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{code}:nothing", "has no nothing"),
        ("{code}:number", "made int, not a torch.nn.Module"),
        ("{code}", "name what in it builds the model"),
        ("{folder}/none.py:build", "there is no file"),
        ("no_such_module_1:build", "there is no module no_such_module_1"),
        ("model:1", "neither a file nor a name"),
    ],
)
def test_targets_that_are_none(tmp_path: Path, code: Path, name: str, words: str) -> None:
    warm_start_refused(
        tmp_path,
        saved(mlp().state_dict(), tmp_path / "m.pt"),
        name.format(code=code, folder=tmp_path),
        UsageError,
        words,
    )


def test_a_module_and_a_class_are_targets(tmp_path: Path, code: Path) -> None:
    file = saved(nn.Linear(2, 2).state_dict(), tmp_path / "m.pt")
    assert ckptool.warm_start(file, f"{code}:module").share == 1
    assert list(ckptool.spec(f"{code}:Model").target.tensors) == ["fc.weight", "fc.bias"]


def test_outputs_that_are_there(tmp_path: Path) -> None:
    file, target = saved(mlp().state_dict(), tmp_path / "old.pt"), saved(mlp().state_dict(), tmp_path / "target.pt")
    before = target.read_bytes()
    for out in (file, target):
        with pytest.raises((Conflict, UsageError)):
            ckptool.warm_start(file, target, out)
    (tmp_path / "out.pt").write_bytes(b"mine")
    with pytest.raises(OutputExists):
        ckptool.warm_start(file, target, tmp_path / "out.pt")
    assert target.read_bytes() == before and (tmp_path / "out.pt").read_bytes() == b"mine"
    warm_started(file, target, tmp_path / "out.pt", overwrite=True)
    report = ckptool.warm_start(file, target, tmp_path / "dry.pt", dry_run=True)
    assert (
        report.output.output == str(tmp_path / "dry.pt") and not report.applied and not (tmp_path / "dry.pt").exists()
    )
    with pytest.raises(TypeError, match="in_place"):
        ckptool.warm_start(file, target, tmp_path / "x.pt", in_place=True)


def test_damaged_bytes(tmp_path: Path) -> None:
    state = mlp().state_dict()
    file, target = saved(state, tmp_path / "old.pt"), saved(mlp().half().state_dict(), tmp_path / "target.pt")
    raw = bytearray(file.read_bytes())
    raw[raw.rfind(bytes(state["fc2.weight"].numpy()))] ^= 1
    file.write_bytes(raw)
    warm_start_refused(tmp_path, file, target, CkptoolError, "checksum")


# Suggestions ---------------------------------------------------------------------------------------------------------


def test_suggestions_are_rules_that_can_be_passed_back(tmp_path: Path) -> None:
    """A Lightning prefix and a renamed block: nothing fits, the rules are written, and with them everything does."""
    theirs = {
        f"blocks.{n}.attn.{end}": torch.randn(4, n + 2) for n in range(3) for end in ("qkv.weight", "proj.weight")
    }
    ours = {f"model.{key.replace('blocks', 'layers')}": value + 1 for key, value in theirs.items()}
    file, target = saved({"state_dict": ours}, tmp_path / "lightning.ckpt"), saved(theirs, tmp_path / "target.pt")
    rules, out = tmp_path / "rules.yaml", tmp_path / "out.pt"
    report = ckptool.warm_start(file, target, out, suggest=rules)
    assert not report.accepted and report.refused[0].code == "nothing-loaded" and not out.exists()
    assert report.rules_file == str(rules) and "--rename" in report.refused[0].fix
    assert report.suggestions[0].agree == report.suggestions[0].total == 6
    report, done = warm_started(file, target, out, rules_file=str(rules), strict=True)
    assert all(torch.equal(done[key], value + 1) for key, value in theirs.items()) and not report.suggestions
    first = ckptool.warm_start(file, target).suggestions[0]
    assert ckptool.warm_start(file, target, rename=first.rules).share == 1
    with pytest.raises(OutputExists):
        ckptool.warm_start(file, target, suggest=rules)


def test_nothing_to_suggest(tmp_path: Path) -> None:
    file = saved(mlp().state_dict(), tmp_path / "model.pt")
    report = ckptool.warm_start(file, file, suggest=tmp_path / "rules.yaml")
    assert (
        report.accepted
        and [note.code for note in report.normalised] == ["no-suggestions"]
        and not (tmp_path / "rules.yaml").exists()
    )


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptool.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        ended = main(["warm-start", *words])
        return ended, *capsys.readouterr()

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    file, out = str(saved(model.state_dict(), tmp_path / "old.pt")), str(tmp_path / "out.pt")
    ended, told, aside = run(file, "--against", f"{code}:build", "-o", out)
    assert ended == 1 and "refused: 2 tensors are of another shape: 3.weight f32 [5, 16] against f32 [3, 16]" in told
    assert aside == "building\n" and not Path(out).exists()
    ended, told, _ = run(file, "--against", f"{code}:build", "-o", out, "--on-mismatch", "skip", "--json")
    facts = json.loads(told)
    assert ended == 0 and facts["schema"] == "ckptool.warm_start/2" and facts["taken"] == ["3.weight", "3.bias"]
    assert facts["applied"] and facts["output"]["output"] == out and Path(out).exists()
    ended, _, aside = run(file, "--against", f"{code}:raises")
    assert (
        ended == 2 and "error[user-code]" in aside and '\n    raise ValueError("the data' in aside.replace("\n  ", "\n")
    )


def test_nothing_of_a_checkpoint_runs_and_no_torch_is_needed(tmp_path: Path) -> None:
    """Against a checkpoint or a spec, torch is not imported."""
    file = make("training.pt", tmp_path)
    program = f"""
import sys, ckptool
file, folder = {str(file)!r}, {str(tmp_path)!r}
made = ckptool.spec(file, folder + "/model.spec.json")
assert ckptool.warm_start(file, made.output, folder + "/a.pt", strict=True, optimizer=True).applied
assert ckptool.warm_start(file, file + "#ema_state_dict", folder + "/b.safetensors").share == 1
print([name for name in ("torch", "pickle", "rich", "typer") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout and "typer" not in done.stdout


def test_names_that_would_move_a_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptool.cli import main

    names = ["\x1b[31mred.weight", "line\nbreak.weight", "bidi\u202eflip.weight"]
    file = saved({name: torch.ones(2) for name in names}, tmp_path / "old.pt")
    target = saved({f"{name}2": torch.ones(2) for name in names} | {names[0]: torch.ones(3)}, tmp_path / "new.pt")
    assert main(["warm-start", str(file), "--against", str(target)]) == 1
    shown = "".join(capsys.readouterr())
    assert "\x1b" not in shown and "\u202e" not in shown and "line\\nbreak" in shown


# Rules that change tensors -------------------------------------------------------------------------------------------


def test_fused_attention_is_suggested_and_loaded_by_rules_with_operations(tmp_path: Path) -> None:
    three = {name: numpy.full((4, 4), number, "f4") for number, name in enumerate(("query", "key", "value"))}
    apart = {f"layer.{n}.attention.{name}.weight": value.copy() for n in (0, 1) for name, value in three.items()}
    fused = {f"blocks.{n}.attn.qkv.weight": numpy.concatenate(list(three.values())) for n in (0, 1)}
    for name, weights in (("fused", fused), ("apart", apart)):
        ckptool.save(weights, tmp_path / f"{name}.safetensors")
    file, target = tmp_path / "fused.safetensors", tmp_path / "apart.safetensors"
    report = ckptool.warm_start(file, target)
    (suggestion,) = [one for one in report.suggestions if one.rules]
    (rule,) = suggestion.rules
    assert rule == "blocks.{n}.attn.qkv.* => layer.{n}.attention.{query,key,value}.* : split 0"
    (tmp_path / "rules.yaml").write_text(f"- '{rule}'\n")
    for options in ({"rename": rule}, {"rules_file": str(tmp_path / "rules.yaml")}):
        out = tmp_path / f"{next(iter(options))}.safetensors"
        assert ckptool.warm_start(file, target, out, strict=True, **options).accepted
        assert ckptool.diff(out, target).same
    with pytest.raises(UsageError, match="rules that change tensors"):
        ckptool.warm_start(file, target, rename=rule, optimizer=True)
