"""Layouts that ship, each by what it alone has: experts, ranks, heads, gates, parts of a single file."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import CkptoolError, Conflict, UsageError
from ckptool.names.layout import read_layout, shipped
from ckptool.names.pattern import parse_name
from tests.support.files import load, saved
from tests.support.layout_vectors import LAYOUT_CASES, case_of, digests
from tests.support.llama_meta import MetaLlama, write_ranks
from tests.support.looped import looped


def refuses(file: Path, layout: str, expected: str, tmp_path: Path, **options: Any) -> None:
    out = tmp_path / "out.pt"
    with pytest.raises(CkptoolError, match=expected):
        ckptool.translate(file, out=out, rules_file=layout, **options)
    assert not out.exists()


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
