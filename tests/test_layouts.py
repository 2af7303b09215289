"""What every layout that ships has to do: by the small vectors of other libraries, which `make engines` has whole."""

import json
import random
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.cli import main
from ckptool.errors import CkptoolError, Conflict, UsageError
from ckptool.names.layout import layouts_of, read_layout, shipped, translation_to
from ckptool.names.pattern import parse_name
from tests.support.cli import Run
from tests.support.files import load, saved
from tests.support.layouts import (
    GPT,
    LAYOUT_CASES,
    MetaLlama,
    State,
    case_of,
    configure_optimizers,
    counting,
    digests,
    write_ranks,
)
from tests.support.looped import looped

CASES = sorted(path.name for path in LAYOUT_CASES.iterdir())
WHOLE = [name for name in CASES if name not in ("llama-meta", "llama-megatron-stacked")]  # one file, no numbers to set
HERE = ("gpt2-nanogpt", "vit-timm")
OTHERWISE = {"llama-megatron"}  # in tests of its own
TRIED = 12  # keys that are left out, one after the other


def weights_of(name: str) -> State:
    """The weights of the old side."""
    case = case_of(name)
    return counting(case["shapes"]) if "shapes" in case else load_file(LAYOUT_CASES / name / "model.safetensors")


def sides_of(name: str, tmp_path: Path) -> list[Path]:
    """Files of the weights in both layouts."""
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file(weights_of(name), old)
    ckptool.translate(old, out=new, rules_file=name)
    return [old, new]


def refused(file: Path, name: str, says: str | None = None, out: Path | None = None, **options: Any) -> CkptoolError:
    """The error of a translation, after which nothing is written, with an exit code that says so."""
    out = out or file.with_name("refused.safetensors")
    with pytest.raises(CkptoolError, match=says) as error:
        ckptool.translate(file, out=out, rules_file=name, **options)
    assert error.value.exit_code in (1, 2) and not out.exists()
    return error.value


def refuses(file: Path, layout: str, says: str, tmp_path: Path, **options: Any) -> None:
    refused(file, layout, says, tmp_path / "out.pt", **options)


def test_every_layout_has_its_vectors() -> None:
    assert {*CASES, *OTHERWISE} >= shipped().keys()


@pytest.mark.parametrize("name", CASES)
def test_weights_of_the_one_library_are_those_of_the_other(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    source, out, back = LAYOUT_CASES / name, tmp_path / "out.safetensors", tmp_path / "back.safetensors"
    if "shapes" in case:
        source = tmp_path / "in.safetensors"
        save_file(counting(case["shapes"]), source)
    ckptool.translate(source, out=out, rules_file=case["layout"], set=case.get("set", ()))
    assert digests(load_file(out)) == case["expected"]
    ckptool.translate(out, out=back, rules_file=case["layout"], set=case.get("back", ()), reverse=True)
    again, whole = load_file(back), tmp_path / "again.safetensors"
    if source.is_file() or (source / "model.safetensors").exists():
        first = load_file(source if source.is_file() else source / "model.safetensors")
        assert again.keys() == first.keys()
        for key, value in first.items():  # what was cut off comes back as zeros
            same = case.get("kept", {}).get(key, len(value) if value.dim() else 1)
            one, other = (each.reshape(-1, *each.shape[1:])[:same] for each in (again[key], value))
            assert torch.equal(one, other) and again[key].shape == value.shape
    if name in WHOLE:  # which side a file is of is told without being said
        ckptool.translate(out, out=whole, rules_file=name, set=case.get("back", ()))
        assert digests(load_file(whole)) == digests(again)
    ckptool.translate(
        back, out=whole, overwrite=True, rules_file=case["layout"], set=case.get("set", case.get("back", ()))
    )
    assert digests(load_file(whole)) == case["expected"]


@looped("name", sorted(shipped()))
def test_a_layout_says_where_its_facts_are_from_and_what_its_sides_are(name: str, tmp_path: Path) -> None:
    layout = read_layout(shipped()[name])
    assert layout.title.count(" ↔ ") == 1 and layout.source
    assert layout.old.name != layout.new.name and layout.old.has and layout.new.has
    layout.translation.reversed()
    if name not in WHOLE:
        return
    nodes, sides = [ckptool.open(file).tree for file in sides_of(name, tmp_path)], [layout.old.name, layout.new.name]
    for turned, (here, there) in enumerate((nodes, nodes[::-1])):
        assert (name, bool(turned)) in [(each.name, back) for each, back in layouts_of(here)]
        found = translation_to(here, there)
        assert found is not None and str(found[1]) == f"ckptool translate FILE --rules {name} -o OUT"
        own, other = sides[turned], sides[1 - turned]
        assert found[0].startswith(f"names and shapes are those of {own}, and the model has those of {other} (")
        assert translation_to(here, here) is None


def test_the_layout_in_the_documents(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "translate.md").read_text(encoding="utf-8")
    example = next(each for each in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "title: our model" in each)
    (tmp_path / "ours.yaml").write_text(example, encoding="utf-8")
    layout = read_layout(str(tmp_path / "ours.yaml"))
    weights = counting({"blocks.0.qkv.weight": [12, 4], "blocks.0.qkv.bias": [12], "decoder.weight": [2, 4]})
    save_file({**weights, "attn.mask": torch.ones(1)}, tmp_path / "m.safetensors")
    assert layout.old.is_of(ckptool.open(tmp_path / "m.safetensors").tree) and layout.translation.reversed()
    assert all(f"`{name}`" in page for name in shipped())


# Wrong files ---------------------------------------------------------------------------------------------------------


@looped("name", WHOLE, at_once=4)
def test_one_key_too_many_or_missing(name: str, tmp_path: Path) -> None:
    for file in sides_of(name, tmp_path):
        weights, other = load_file(file), tmp_path / "other.safetensors"
        save_file({**weights, "a.surplus.key": torch.ones(2)}, other)
        if name == "bert-gamma":  # which takes every key along
            ckptool.translate(other, out=tmp_path / f"{file.stem}.out.safetensors", rules_file=name)
        else:
            assert "no rule matches 1 key: a.surplus.key" in refused(other, name).what
        keys = [key for key in sorted(weights) if not MAY_BE_MISSING.get(name, re.compile("$")).search(key)]
        for key in random.Random(name).sample(keys, min(TRIED, len(keys))):
            save_file({each: value for each, value in weights.items() if each != key}, other)
            refused(other, name)


# A model has these or not, and nothing else in the file tells; in bert-gamma, all other keys stay as they are.
MAY_BE_MISSING = {
    "bert-gamma": re.compile(r"^(?!.*LayerNorm)"),
    "mixtral-stacked": re.compile(r"lm_head|embed_tokens|model\.norm"),
    "qwen-moe-stacked": re.compile(r"lm_head|embed_tokens|model\.norm"),
}


@looped(
    ("name", "side", "pattern"),
    [
        (name, side, pattern)
        for name in WHOLE
        for side in ("old", "new")
        for pattern, _ in getattr(read_layout(shipped()[name]), side).refuse
        if " != " not in pattern and " = " not in pattern
    ],
)
def test_what_has_no_place_in_the_other_side_is_refused(name: str, side: str, pattern: str, tmp_path: Path) -> None:
    file = sides_of(name, tmp_path)[side == "new"]
    key = re.sub(r"\[(\w)[\w-]*\]", r"\1", re.sub(r"\{\w+\}", "0", pattern).replace("*", "x"))
    save_file({**load_file(file), key: torch.ones(2)}, file)
    why = dict(getattr(read_layout(shipped()[name]), side).refuse)[pattern]
    assert refused(file, name).what == f"{key}: {why}"


@looped(
    ("name", "changed", "why"),
    [
        ("resnet-torchvision", {"layer1.0.conv2.weight": [4, 2, 3, 3]}, "no grouped convolutions (ResNeXt)"),
        ("resnet-torchvision", {"layer1.0.conv3.weight": [32, 4, 1, 1]}, "no wide bottlenecks (Wide ResNet)"),
        ("vit-timm", {"pos_embed": [1, 16, 8]}, "positions without a row for the class token"),
        ("vit-timm", {"blocks.0.mlp.fc1.weight": [48, 8]}, "gated MLPs"),
        ("clip-openclip", {"logit_scale": [1]}, "a scale of the shape [1]"),
    ],
)
def test_shapes_that_the_other_side_does_not_have(
    name: str, changed: dict[str, list[int]], why: str, tmp_path: Path
) -> None:
    save_file({**weights_of(name), **counting(changed)}, tmp_path / "m.safetensors")
    assert why in refused(tmp_path / "m.safetensors", name).what


def test_a_side_that_was_not_asked_for(tmp_path: Path) -> None:
    error = refused(sides_of("vit-timm", tmp_path)[0], "vit-timm", "are already those of timm", reverse=True)
    assert error.fix == "Leave out --reverse."


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_wrappers_are_named(prefix: str, tmp_path: Path) -> None:
    save_file({prefix + key: value for key, value in weights_of("vit-timm").items()}, tmp_path / "m.safetensors")
    error = refused(tmp_path / "m.safetensors", "vit-timm")
    assert "the keys begin with a wrapper's prefix" in error.what and "ckptool strip-module" in str(error.fix)


# nanoGPT -------------------------------------------------------------------------------------------------------------


def test_biases_are_filled_with_zeros_and_left_out_while_all_are(tmp_path: Path) -> None:
    weights = {key: value for key, value in weights_of("gpt2-nanogpt").items() if not key.endswith(".bias")}
    old, new, back = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "back"))
    save_file(weights, old)
    ckptool.translate(old, out=new, rules_file="gpt2-nanogpt")
    filled = load_file(new)
    assert filled.keys() == case_of("gpt2-nanogpt")["expected"].keys()
    assert all(not value.any() for key, value in filled.items() if key.endswith(".bias"))
    ckptool.translate(new, out=back, rules_file="gpt2-nanogpt")
    assert digests(load_file(back)) == digests(weights)

    filled["transformer.h.1.ln_2.bias"][3] = 1e-30  # one of them was trained
    save_file(filled, new)
    ckptool.translate(new, out=back, rules_file="gpt2-nanogpt", overwrite=True)
    assert load_file(back).keys() == filled.keys()


def test_the_head_is_tied_and_an_untied_one_refused(tmp_path: Path) -> None:
    weights = weights_of("gpt2-nanogpt")
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    torch.save(weights, tmp_path / "old.pt")
    ckptool.translate(tmp_path / "old.pt", out=tmp_path / "new.pt", rules_file="gpt2-nanogpt")
    assert "lm_head.weight" not in ckptool.load(tmp_path / "new.pt")
    ckptool.translate(tmp_path / "new.pt", out=tmp_path / "back.pt", rules_file="gpt2-nanogpt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["lm_head.weight"].data_ptr() == back["transformer.wte.weight"].data_ptr()

    weights["lm_head.weight"] = weights["lm_head.weight"].clone()  # equal, though on a storage of its own
    save_file(weights, tmp_path / "apart.safetensors")
    ckptool.translate(tmp_path / "apart.safetensors", out=tmp_path / "new.safetensors", rules_file="gpt2-nanogpt")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, tmp_path / "apart.safetensors")
    assert "is not transformer.wte.weight" in refused(tmp_path / "apart.safetensors", "gpt2-nanogpt").what


def run_of_nanogpt(path: Path, mask: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(block_size=6, vocab_size=7, n_layer=2, n_head=2, n_embd=8, bias=True, mask=mask)
    optimizer = configure_optimizers(model)
    model(torch.tensor([[1, 2, 3]])).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 1}, path)
    return model


def test_a_run_of_nanogpt_goes_there_and_back_with_its_moments(tmp_path: Path) -> None:
    model = run_of_nanogpt(tmp_path / "ckpt.pt")
    ckptool.translate(tmp_path / "ckpt.pt", out=tmp_path / "hf.pt", rules_file="gpt2-nanogpt")
    ckptool.translate(tmp_path / "hf.pt", out=tmp_path / "back.pt", rules_file="gpt2-nanogpt")
    first, there, back = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("ckpt", "hf", "back"))
    matrices, vectors = (group["param_names"] for group in there["optimizer"]["param_groups"])
    assert all(there["model"][name].dim() == 2 for name in matrices) and "transformer.ln_f.bias" in vectors
    for number, name in enumerate([*matrices, *vectors]):
        moment, parameter = there["optimizer"]["state"][number]["exp_avg"], there["model"][name]
        mine = dict(model.named_parameters())[name].grad * 0.1
        turned = ".h." in name and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        assert moment.shape == parameter.shape and torch.allclose(moment, mine.T if turned else mine)
    assert back["iter_num"] == 1 and back["model"].keys() == first["model"].keys()
    for number, slot in first["optimizer"]["state"].items():
        assert all(torch.equal(value, back["optimizer"]["state"][number][field]) for field, value in slot.items())


def test_masks_are_no_parameters_and_weights_alone_need_no_optimizer(tmp_path: Path, run: Run) -> None:
    run_of_nanogpt(tmp_path / "ckpt.pt", mask=True)
    args = ("translate", tmp_path / "ckpt.pt", "--rules", "gpt2-nanogpt", "-o")
    assert "moments of 1 optimizer" in run(*args, tmp_path / "hf.pt").out
    done = run(*args, f"{tmp_path / 'hf'}/")
    assert done.code == 0 and "left out (the input keeps it): optimizer" in done.out and "moments" not in done.out, done
    assert "as tied to one that is there: lm_head.weight" in done.out
    back = ckptool.translate(tmp_path / "hf", out=tmp_path / "back.pt", rules_file="gpt2-nanogpt")
    assert back.facts["not_reversible"] == []


def test_a_configuration_of_both_sides_goes_along(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file(weights_of("mixtral-stacked"), tmp_path / "in" / "model.safetensors", {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text('{"model_type": "mixtral"}')
    ckptool.translate(tmp_path / "in", out=f"{tmp_path / 'out'}/", rules_file="mixtral-stacked")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mixtral"


# Found for a file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HERE)
def test_doctor_and_warm_start_name_the_layout(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that they print are run, and then everything fits."""
    monkeypatch.chdir(tmp_path)
    for file, model in (["old.safetensors", "new.safetensors"], ["new.safetensors", "old.safetensors"]):
        sides_of(name, tmp_path) if not (tmp_path / file).exists() else None
        (finding,) = (each for each in ckptool.doctor(file, against=model).findings if each.blocks)
        line = f"ckptool translate {file} --rules {name} -o {file.replace('.', '.fixed.')}"
        assert (finding.code, finding.fixes) == ("layout", (line,))
        report = ckptool.warm_start(file, model)
        assert not report.accepted or report.share < 1
        assert [each.why.rpartition("): ")[2] for each in report.suggestions] == [line]
        assert main(shlex.split(line)[1:]) == 0
        again = ckptool.warm_start(file.replace(".", ".fixed."), model)
        assert again.accepted and again.share == 1
        assert not [each for each in ckptool.doctor(file, against=file).findings if each.code == "layout"]
    capsys.readouterr()


# Each by what it alone has: experts, ranks, heads, gates --------------------------------------------------------------

LLAMA = "llama-meta"


@pytest.mark.parametrize(("given", "expected"), [
    (["heads=3"], "llama-meta.yaml, line 43: the rule .* 32 cannot be divided by 3"),
    (["heads=8"], r"line 43: .* \[16, 32\] does not have the rows of 2 heads of 4"),
    (["kv_heads=4"], r"line 43: .* does not have the rows of 4 heads of 8"),
    (["head=4"], "head.*: no rule has a variable of that name"),
])  # fmt: skip
def test_numbers_that_do_not_fit(given: list[str], expected: str, tmp_path: Path) -> None:
    refuses(LAYOUT_CASES / LLAMA, LLAMA, expected, tmp_path, set=given)


def test_ranks_that_are_missing(tmp_path: Path) -> None:
    ranks = [LAYOUT_CASES / LLAMA / f"consolidated.{rank:02d}.safetensors" for rank in range(2)]
    refuses(ranks[0], LLAMA, "rank 0 of 2\n.*\nName the folder", tmp_path)
    (folder := tmp_path / "folder").mkdir()
    shutil.copy(ranks[0], folder)
    shutil.copy(LAYOUT_CASES / LLAMA / "params.json", folder)
    refuses(folder, LLAMA, r"\[40, 16\] in 1 file, and norm.weight is \[32\]: a file may be missing", tmp_path)
    shutil.copy(ranks[1], folder / "consolidated.02.safetensors")
    refuses(folder, LLAMA, "has 2 files of 3 ranks", tmp_path)


def test_without_a_configuration_the_numbers_are_asked_for(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    for rank in range(2):
        shutil.copy(LAYOUT_CASES / LLAMA / f"consolidated.{rank:02d}.safetensors", folder)
    refuses(folder, LLAMA, "kv_heads=NUMBER", tmp_path)
    refuses(folder, LLAMA, "[^_]heads=NUMBER", tmp_path, set=["kv_heads=2"])
    ckptool.translate(folder, out=tmp_path / "a.safetensors", rules_file=LLAMA, set=["kv_heads=2", "heads=4"])
    case = case_of(LLAMA)
    assert digests(load_file(tmp_path / "a.safetensors")) == case["expected"]
    (like := tmp_path / "like").mkdir()  # the numbers are also those of the folder that the result is to be like
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}
    (like / "config.json").write_text(json.dumps(config))
    ckptool.translate(folder, out=f"{tmp_path}/new/", rules_file=LLAMA, like=like)
    assert digests(load_file(tmp_path / "new" / "model.safetensors")) == case["expected"]
    file = LAYOUT_CASES / "llama-megatron-stacked" / "model.safetensors"
    refuses(file, "llama-megatron-stacked", "[^_]heads=NUMBER", tmp_path)


def test_more_ranks_than_heads_of_keys(tmp_path: Path) -> None:
    """Keys and values that two ranks have are compared."""
    torch.manual_seed(0)
    state = MetaLlama(kv_heads=2).state_dict()
    (folder := tmp_path / "folder").mkdir()
    write_ranks(state, folder, 4, 2, False)
    ckptool.translate(folder, out=tmp_path / "a.safetensors", rules_file=LLAMA)
    ckptool.translate(tmp_path / "a.safetensors", out=tmp_path / "b.pt", rules_file=LLAMA, set="heads=4")
    assert all(torch.equal(value, state[key]) for key, value in load(tmp_path / "b.pt").items())
    part = load(folder / "consolidated.01.pth")
    part["layers.1.attention.wv.weight"][3, 4] += 1
    torch.save(part, folder / "consolidated.01.pth")
    refuses(folder, LLAMA, r"layers\.1\.attention\.wv\.weight", tmp_path)


def test_experts_whose_moments_are_of_other_steps_are_not_stacked(tmp_path: Path) -> None:
    """Where the steps are equal, `test_translate.py` has it of random rules."""
    model = {name: value.float() for name, value in
             load_file(LAYOUT_CASES / "mixtral-stacked" / "model.safetensors").items()}  # fmt: skip
    slots = [{"step": torch.tensor(3.0), "exp_avg": value + 1} for value in model.values()]
    slots[next(n for n, name in enumerate(model) if name.endswith("experts.1.w1.weight"))]["step"] = torch.tensor(4.0)
    group = {"lr": 0.1, "params": list(range(len(model))), "param_names": list(model)}
    optimizer = {"state": dict(enumerate(slots)), "param_groups": [group]}
    file = saved({"model": model, "optimizer": optimizer}, tmp_path / "a.pt")
    refuses(file, "mixtral-stacked", "step of .*experts", tmp_path)


def test_arithmetic_of_too_many_blocks_is_refused() -> None:
    pattern = replace(parse_name("input_blocks.{b * layers + l}.0"), digits=frozenset({"b", "l"}))
    ranges = {"b": 5, "l": 20}
    found = pattern.match("input_blocks.47.0", {"layers": 20}.get, ranges)
    assert found == {"v_b": "2", "v_l": "7"}
    with pytest.raises(UsageError, match="9,000 ways to solve"):
        pattern.match("input_blocks.47.0", {"layers": 20}.get, ranges | {"b": 450})


def test_megatrons_own_folders_say_what_has_no_place(tmp_path: Path) -> None:
    folder = LAYOUT_CASES.parents[1] / "engines" / "megatron-torch-dist" / "checkpoint"
    refuses(folder, "llama-megatron-stacked", "position_embeddings.weight: learned positions", tmp_path, set="heads=4")


ANOTHER: dict[str, Any] = {"true": False, "false": True, "null": 4096}


@looped("name", shipped())
def test_each_field_that_a_layout_needs(name: str) -> None:
    """Every value that it lists is taken; another one, and one of another type, is refused by the field's name."""
    for side in (layout := read_layout(shipped()[name])).old, layout.new:
        for fields, values in side.needs:
            for field in fields.split("|"):
                for value, is_right in [(yaml.safe_load(text), True) for text in values] + [
                    (ANOTHER.get(values[0], "another"), False),
                    ([yaml.safe_load(values[0]), 7777], False),
                ]:
                    config: Any = value
                    for part in reversed(field.split(".")):
                        config = {part: config}
                    if is_right:
                        side.check({}, config)
                        continue
                    with pytest.raises(Conflict, match=re.escape(field)):
                        side.check({}, config)


def test_an_mlp_without_a_gate_is_not_cut_in_halves(tmp_path: Path) -> None:
    """With stacked layers, and with each layer by itself."""
    state = load_file(LAYOUT_CASES / "llama-megatron-stacked" / "model.safetensors")
    fc1 = "decoder.layers.mlp.linear_fc1.weight"
    state[fc1] = state[fc1][:, : state[fc1].shape[1] // 2].contiguous()
    apart = {
        name.replace("layers.", f"layers.{layer}."): value[layer].clone()
        for name, value in state.items()
        for layer in range(len(value))
        if "decoder.layers." in name
    } | {name: value for name, value in state.items() if "decoder.layers." not in name}
    for layout, tensors in (("llama-megatron-stacked", state), ("llama-megatron", apart)):
        save_file(tensors, tmp_path / "in.safetensors")
        refuses(tmp_path / "in.safetensors", layout, "an MLP without a gate", tmp_path, set=["heads=4", "vocab=37"])
