"""LoRA for models that have other names in memory than in their files, and for names that do not say what they are.

That PEFT and transformers agree is shown by `tests/engines/test_lora_names.py`.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.errors import Unsupported
from ckptool.transforms.memory_names import UNKNOWN, _table, in_memory
from tests.support.adapters import Tensors, halves, model_folder, peft, stored
from tests.support.files import load

VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
OLD, NEW = "vit.encoder.layer.{}.attention.attention.query", "vit.layers.{}.attention.q_proj"


def vit() -> Tensors:
    torch.manual_seed(0)
    layers: Tensors = {}
    for name in (OLD.format(0), OLD.format(10)):
        layers |= {f"{name}.weight": torch.randn(6, 6), f"{name}.bias": torch.randn(6)}
    return layers | {"vit.layernorm.weight": torch.randn(6), "classifier.weight": torch.randn(3, 6)}


def in_terms_of(tensors: Tensors, old: str, new: str) -> Tensors:
    for number in (0, 10):
        tensors = {key.replace(old.format(number), new.format(number)): value for key, value in tensors.items()}
    return tensors


def adapter_of(folder: Path) -> Tensors:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {key.removeprefix("base_model.model."): value for key, value in tensors.items()}


def assert_near(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all((found[key] - value).abs().max() <= 1e-5 for key, value in expected.items())


def test_adapters_have_names_in_memory_and_models_those_of_files(tmp_path: Path) -> None:
    tuned = vit()
    for n in (0, 10):
        tuned[f"{OLD.format(n)}.weight"] += torch.outer(torch.arange(6.0), torch.ones(6)) * (n + 1)
    base = model_folder(tmp_path / "base", vit(), **VIT)
    ckptool.lora_extract(model_folder(tmp_path / "tuned", tuned, **VIT), base, tmp_path / "a", rank=1)
    made = adapter_of(tmp_path / "a")
    assert {key.partition(".lora_")[0] for key in made} == {NEW.format(0), NEW.format(10)}
    for number, names in enumerate((NEW, OLD)):  # an adapter of transformers 4 has the old ones
        folder = peft(tmp_path / f"a{number}", in_terms_of(made, NEW, names), r=1, lora_alpha=1)
        ckptool.lora_merge(base, folder, f"{tmp_path / f'out{number}'}/")
        assert_near(load_file(tmp_path / f"out{number}" / "model.safetensors"), tuned)


def test_a_model_in_memory_is_loaded_from_its_files(tmp_path: Path) -> None:
    folder, live = model_folder(tmp_path / "base", vit(), **VIT), in_terms_of(vit(), OLD, NEW)
    stored({key: torch.zeros_like(value) for key, value in live.items()}, tmp_path / "live.pt")
    report = ckptool.warm_start(folder, tmp_path / "live.pt", tmp_path / "out.pt", min_loaded=1.0, strict=True)
    found = load(tmp_path / "out.pt")
    assert report.accepted and all(torch.equal(found[key], value) for key, value in live.items())


def expert_changes(module: str, before: Tensors) -> tuple[Tensors, Tensors]:
    """Changes of an adapter to all parameters of a module, in its order, and the parameters with them."""
    torch.manual_seed(1)
    keys, after = {}, {}
    for depth, (name, value) in zip(reversed(range(len(before))), before.items(), strict=True):
        count, a, b = len(value), torch.randn(len(value), 2, value.shape[2]), torch.randn(*value.shape[:2], 2)
        after[name] = value + b @ a
        place = f"{module}.{'base_layer.' * depth}"
        keys[f"{place}lora_A.weight"] = a.reshape(2 * count, -1)
        keys[f"{place}lora_B.weight"] = b.permute(1, 2, 0).reshape(-1, 2 * count)
    return keys, after


def mixtral(experts: Tensors) -> Tensors:
    """Of fused experts those of the file."""
    found: Tensors = {"model.layers.0.block_sparse_moe.gate.weight": torch.ones(11, 6)}
    for number in range(11):
        w1, w3 = experts["gate_up_proj"][number].chunk(2)
        for part, value in (("w1", w1), ("w3", w3), ("w2", experts["down_proj"][number])):
            found[f"model.layers.0.block_sparse_moe.experts.{number}.{part}.weight"] = value.clone()
    return found


def test_changes_of_fused_experts_go_into_those_apart(tmp_path: Path) -> None:
    before = {"gate_up_proj": torch.randn(11, 8, 6), "down_proj": torch.randn(11, 6, 4)}
    keys, after = expert_changes("model.layers.0.mlp.experts", before)
    base = model_folder(tmp_path / "base", mixtral(before), model_type="mixtral", architectures=["MixtralForCausalLM"])
    for number, listed in enumerate(permutations(["experts.down_proj", "experts.gate_up_proj", "gate_up_proj"])):
        folder = peft(tmp_path / f"a{number}", keys, lora_alpha=2, target_parameters=listed)
        ckptool.lora_merge(base, folder, f"{tmp_path / f'out{number}'}/")
        assert_near(load_file(tmp_path / f"out{number}" / "model.safetensors"), mixtral(after))


def test_parameters_of_one_shape_are_told_by_the_order_of_the_base(tmp_path: Path) -> None:
    before = {"up": torch.randn(3, 6, 4), "down": torch.randn(3, 4, 6), "by": torch.randn(3, 6, 4)}
    keys, after = expert_changes("experts", before)
    base = {f"experts.{name}": value for name, value in before.items()}
    files = (stored(base, tmp_path / "base.pt"), stored(base, tmp_path / "base.safetensors"))  # which sorts by name
    for number, names in enumerate(permutations(base)):
        folder = peft(tmp_path / f"a{number}", keys, lora_alpha=2, target_parameters=list(names))
        ckptool.lora_merge(files[0], folder, tmp_path / f"{number}.pt")
        assert_near(load(tmp_path / f"{number}.pt"), {f"experts.{name}": value for name, value in after.items()})
        with pytest.raises(Unsupported, match=r"experts\.by, experts\.down, experts\.up is not known"):
            ckptool.lora_merge(files[1], folder, tmp_path / "no.safetensors")


def test_what_transformers_computes_in_a_way_not_known_here_is_refused(tmp_path: Path) -> None:
    """Every class of the table: names are told, or refused with the way out; no class fails otherwise."""
    one = ckptool.open(stored({"classifier.bias": torch.ones(3)}, tmp_path / "one.safetensors"))
    rows = [(kind, name, row) for kind, each in _table()[0].items() for name, row in each.items()]
    for kind, name, row in rows:
        found = in_memory(one, {"model_type": kind, "architectures": [name]}, "f")
        assert bool(found.unknown) == (row == UNKNOWN), kind
    unknown = [(kind, name) for kind, name, row in rows if row == UNKNOWN]
    assert 0 < len(unknown) < len(rows) / 5
    kind, name = unknown[0]
    config = {"model_type": kind, "architectures": [name]}
    base, tuned = model_folder(tmp_path / "base", vit(), **config), model_folder(tmp_path / "tuned", vit(), **config)
    folder = peft(tmp_path / "a", halves("not.there", 6))
    for verb in (
        lambda: ckptool.lora_extract(tuned, base, tmp_path / "out", rank=2),
        lambda: ckptool.lora_merge(base, folder, f"{tmp_path / 'out'}/"),
    ):
        with pytest.raises(Unsupported, match="in memory is not known here"):
            verb()
    assert not (tmp_path / "out").exists()


# What is extracted whole ---------------------------------------------------------------------------------------------


def extracted(folder: Path, base: Tensors, *, only: Any = (), exclude: Any = (), **config: Any) -> set[str]:
    """The keys of the adapter of a model of which all values changed."""
    tuned = model_folder(folder / "tuned", {key: value + 1 for key, value in base.items()}, **config)
    files = tuned, model_folder(folder / "base", base, **config)
    ckptool.lora_extract(*files, folder / "out", rank=1, only=only, exclude=exclude)
    return {*adapter_of(folder / "out")}


@pytest.mark.parametrize("name", ["emb", "tok", "transformer.tok_emb", "positionTable", "net.0", "char_lookup", "E"])
def test_a_table_of_embeddings_is_taken_whole_whatever_its_name(name: str, tmp_path: Path) -> None:
    shapes = {f"{name}.weight": (7, 6), "up.proj.weight": (5, 6), "blocks.0.mix.weight": (4, 6), "last.weight": (5, 6)}
    keys = extracted(tmp_path, {key: torch.ones(shape) for key, shape in shapes.items()} | {"last.bias": torch.ones(5)})
    assert f"{name}.weight" in keys and not any("lora_" in key for key in keys if key.startswith(f"{name}."))
    assert {key.partition(".lora_")[0] for key in keys if "lora_" in key} == {"blocks.0.mix", "last", "up.proj"}


def test_what_a_class_ties_is_taken_under_each_of_its_names(tmp_path: Path) -> None:
    """Every class of the table, whose file has one name of each tensor; and classes that are not in it."""
    linear, number = {"block.0.q_proj.weight": torch.zeros(4, 3)}, 0
    by_ties = {" ".join(each): (name, each) for name, each in _table()[3].items()}
    for number, (name, names) in enumerate(sorted(by_ties.values())):
        pairs = dict(zip(names[::2], names[1::2], strict=True))
        base = linear | {each: torch.zeros(5, 4) for each in pairs.values() if each not in pairs}
        rests = [(each, other.removeprefix(f"{each.rpartition('.')[0]}.")) for each in names for other in names]
        outer = {each for each, rest in rests if "." in rest and rest not in names}
        found = extracted(tmp_path / f"{number}", base, architectures=[name])
        assert {*names} - outer <= found and outer.isdisjoint(found), name
    assert number > 90


def test_a_head_that_is_tied_is_in_the_adapter(tmp_path: Path) -> None:
    base = {"block.0.q_proj.weight": torch.zeros(4, 3), "model.embed_tokens.weight": torch.zeros(5, 4)}
    llama, tied = {"architectures": ["LlamaForCausalLM"]}, {"tie_word_embeddings": True}
    only = ["*embed_tokens*", "*q_proj*"]
    for number, (config, has_head) in enumerate(
        (
            ({}, False),
            (tied, True),
            (tied | {"architectures": ["BertModel"]}, False),
            (llama | {"only": only}, True),
            (llama | {"exclude": "*embed_tokens*"}, False),
        )
    ):
        found = extracted(tmp_path / f"{number}", base, **config)
        assert ("lm_head.weight" in found) == has_head, config
    with pytest.raises(Unsupported, match=r"config\.json ties"):
        extracted(tmp_path / "two", base | {"model.wte.weight": torch.zeros(5, 4)}, **tied)
