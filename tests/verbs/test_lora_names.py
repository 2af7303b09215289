"""LoRA for models that have other names in memory than in their files, and for names that do not say what they are.

That PEFT and transformers agree is shown by `tests/engines/test_lora_names.py`.
"""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import Unsupported

Tensors = dict[str, torch.Tensor]


def model(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2} | config))
    save_file(
        {f"base_model.model.{key}": value for key, value in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
OLD, NEW = "vit.encoder.layer.{}.attention.attention.query", "vit.layers.{}.attention.q_proj"


def vit() -> Tensors:
    torch.manual_seed(0)
    layers = {
        f"{OLD.format(n)}.{name}": torch.randn(6, *more)
        for n in (0, 10)
        for name, more in (("weight", (6,)), ("bias", ()))
    }
    return layers | {"vit.layernorm.weight": torch.randn(6), "classifier.weight": torch.randn(3, 6)}


def test_adapters_have_names_in_memory_and_models_those_of_files(tmp_path: Path) -> None:
    base, tuned = vit(), vit()
    for n in (0, 10):
        tuned[f"{OLD.format(n)}.weight"] += torch.outer(torch.arange(6.0), torch.ones(6)) * (n + 1)
    folders = model(tmp_path / "tuned", tuned, **VIT), model(tmp_path / "base", base, **VIT)
    ckptool.lora_extract(*folders, tmp_path / "a", rank=1)
    made = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in made} == {
        NEW.format(0),
        NEW.format(10),
    }
    for number, names in enumerate((NEW, OLD)):  # an adapter of transformers 4 has the old ones
        keys = {
            key.removeprefix("base_model.model.")
            .replace("layers.", names[: names.index("{")][4:])
            .replace("attention.q_proj", names.partition("}.")[2]): value
            for key, value in made.items()
        }
        ckptool.lora_merge(
            tmp_path / "base",
            adapter(tmp_path / f"a{number}", keys, r=1, lora_alpha=1),
            f"{tmp_path / f'out{number}'}/",
        )
        merged = load_file(tmp_path / f"out{number}" / "model.safetensors")
        assert merged.keys() == tuned.keys()
        assert all((merged[key] - value).abs().max() <= 1e-5 for key, value in tuned.items())


def test_a_model_in_memory_is_loaded_from_its_files(tmp_path: Path) -> None:
    base = vit()
    folder = model(tmp_path / "base", base, **VIT)
    live = {
        key.replace("encoder.layer.", "layers.").replace("attention.attention.query", "attention.q_proj"): value
        for key, value in base.items()
    }
    torch.save({key: torch.zeros_like(value) for key, value in live.items()}, tmp_path / "live.pt")
    report = ckptool.warm_start(folder, tmp_path / "live.pt", tmp_path / "out.pt", min_loaded=1.0, strict=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert report.accepted and all(torch.equal(found[key], value) for key, value in live.items())


def mixtral(experts: Tensors) -> Tensors:
    """Of fused experts those of the file."""
    found: Tensors = {}
    for name, value in experts.items():
        for number, one in enumerate(value):
            parts = {"w1": one[: len(one) // 2], "w3": one[len(one) // 2 :]} if name == "gate_up_proj" else {"w2": one}
            place = f"model.layers.0.block_sparse_moe.experts.{number}"
            found |= {f"{place}.{part}.weight": each.clone() for part, each in parts.items()}
    return found | {"model.layers.0.block_sparse_moe.gate.weight": torch.ones(11, 6)}


def test_changes_of_fused_experts_go_into_those_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = {"gate_up_proj": torch.randn(11, 8, 6), "down_proj": torch.randn(11, 6, 4)}
    after, keys = {}, {}
    for (name, value), place in zip(before.items(), ("base_layer.", ""), strict=True):  # in the order of the module
        a, b = torch.randn(11, 2, value.shape[2]), torch.randn(11, value.shape[1], 2)
        after[name] = value + b @ a
        keys[f"model.layers.0.mlp.experts.{place}lora_A.weight"] = a.reshape(22, -1)
        keys[f"model.layers.0.mlp.experts.{place}lora_B.weight"] = b.permute(1, 2, 0).reshape(-1, 22).contiguous()
    base = model(tmp_path / "base", mixtral(before), model_type="mixtral", architectures=["MixtralForCausalLM"])
    for number, listed in enumerate(permutations(["experts.down_proj", "experts.gate_up_proj", "gate_up_proj"])):
        ckptool.lora_merge(
            base, adapter(tmp_path / f"a{number}", keys, target_parameters=listed), f"{tmp_path / f'out{number}'}/"
        )
        merged = load_file(tmp_path / f"out{number}" / "model.safetensors")
        expected = mixtral(after)
        assert merged.keys() == expected.keys()
        assert all((merged[key] - value).abs().max() <= 1e-5 for key, value in expected.items())


def test_parameters_of_one_shape_are_told_by_the_order_of_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = {
        "experts.up": torch.randn(3, 6, 4),
        "experts.down": torch.randn(3, 4, 6),
        "experts.by": torch.randn(3, 6, 4),
    }
    keys, expected = {}, {}
    for (name, value), place in zip(base.items(), ("base_layer.base_layer.", "base_layer.", ""), strict=True):
        a, b = torch.randn(3, 2, value.shape[2]), torch.randn(3, value.shape[1], 2)
        expected[name] = value + b @ a
        keys[f"experts.{place}lora_A.weight"] = a.reshape(6, -1)
        keys[f"experts.{place}lora_B.weight"] = b.permute(1, 2, 0).reshape(-1, 6).contiguous()
    torch.save(base, tmp_path / "base.pt")
    save_file(base, tmp_path / "base.safetensors")  # sorts by name
    for number, names in enumerate(permutations(base)):
        folder = adapter(tmp_path / f"a{number}", keys, target_parameters=list(names))
        ckptool.lora_merge(tmp_path / "base.pt", folder, tmp_path / f"{number}.pt")
        merged = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert all((merged[key] - value).abs().max() <= 1e-5 for key, value in expected.items())
        with pytest.raises(Unsupported, match=r"experts\.by, experts\.down, experts\.up is not known"):
            ckptool.lora_merge(tmp_path / "base.safetensors", folder, tmp_path / "no.safetensors")


def test_what_transformers_computes_in_a_way_not_known_here_is_refused(tmp_path: Path) -> None:
    """Every class of the table: names are told, or refused with the way out; no class fails otherwise."""
    from ckptool.transforms.memory_names import UNKNOWN, _table, in_memory

    rows = [(kind, name, row) for kind, each in _table()[0].items() for name, row in each.items()]
    for kind, name, row in rows:
        found = in_memory(ckptool.open(saved_once(tmp_path)), {"model_type": kind, "architectures": [name]}, "f")
        assert bool(found.unknown) == (row == UNKNOWN), kind
    unknown = [(kind, name) for kind, name, row in rows if row == UNKNOWN]
    assert 0 < len(unknown) < len(rows) / 5
    kind, name = unknown[0]
    config = {"model_type": kind, "architectures": [name]}
    base, tuned = model(tmp_path / "base", vit(), **config), model(tmp_path / "tuned", vit(), **config)
    key = "not.there"
    folder = adapter(
        tmp_path / "a", {f"{key}.lora_A.weight": torch.ones(2, 6), f"{key}.lora_B.weight": torch.ones(6, 2)}
    )
    for verb in (
        lambda: ckptool.lora_extract(tuned, base, tmp_path / "out", rank=2),
        lambda: ckptool.lora_merge(base, folder, f"{tmp_path / 'out'}/"),
    ):
        with pytest.raises(Unsupported, match="in memory is not known here"):
            verb()
    assert not (tmp_path / "out").exists()


def saved_once(folder: Path) -> Path:
    if not (folder / "one.safetensors").exists():
        save_file({"classifier.bias": torch.ones(3)}, folder / "one.safetensors")
    return folder / "one.safetensors"


@pytest.mark.parametrize("name", ["emb", "tok", "transformer.tok_emb", "positionTable", "net.0", "char_lookup", "E"])
def test_a_table_of_embeddings_is_taken_whole_whatever_its_name(name: str, tmp_path: Path) -> None:
    base = {
        f"{name}.weight": torch.ones(7, 6),
        "up.proj.weight": torch.ones(5, 6),
        "blocks.0.mix.weight": torch.ones(4, 6),
    }
    base |= {"last.weight": torch.ones(5, 6), "last.bias": torch.ones(5)}
    save_file(base, tmp_path / "base.safetensors")
    save_file({key: value * 2 for key, value in base.items()}, tmp_path / "tuned.safetensors")
    ckptool.lora_extract(tmp_path / "tuned.safetensors", tmp_path / "base.safetensors", tmp_path / "a", rank=1)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == [name]
    assert sorted(config["target_modules"]) == ["blocks.0.mix", "last", "up.proj"]


def test_what_a_class_ties_is_taken_under_each_of_its_names(tmp_path: Path) -> None:
    """Every class of the table, whose file has one name of each tensor; and classes that are not in it."""
    from ckptool.transforms.memory_names import _table

    linear, number = {"block.0.q_proj.weight": torch.zeros(4, 3)}, 0
    for number, (name, names) in enumerate(
        sorted({" ".join(each): (n, each) for n, each in _table()[3].items()}.values())
    ):
        pairs = dict(zip(names[::2], names[1::2], strict=True))
        base = linear | {each: torch.zeros(5, 4) for each in pairs.values() if each not in pairs}
        outer = {
            each
            for each in names
            for other in names
            if other.startswith(f"{each.rpartition('.')[0]}.") and "." in other[len(each.rpartition(".")[0]) + 1 :]
        }
        found = extracted(tmp_path / f"{number}", base, architectures=[name])
        assert {*names} - outer <= found and outer.isdisjoint(found), name
    assert number > 90
    embedding = linear | {"model.embed_tokens.weight": torch.zeros(5, 4)}
    assert "lm_head.weight" not in extracted(tmp_path / "untied", embedding)
    assert "lm_head.weight" in extracted(tmp_path / "tied", embedding, tie_word_embeddings=True)
    more = {"tie_word_embeddings": True, "architectures": ["BertModel"]}
    assert "lm_head.weight" not in extracted(tmp_path / "headless", embedding, **more)
    with pytest.raises(Unsupported, match=r"config\.json ties"):
        two = embedding | {"model.wte.weight": torch.zeros(5, 4)}
        extracted(tmp_path / "two", two, tie_word_embeddings=True)
    llama = {"architectures": ["LlamaForCausalLM"]}
    assert all("q_proj" in key for key in extracted(tmp_path / "not", embedding, exclude="*embed_tokens*", **llama))
    only = extracted(tmp_path / "only", embedding, only=["*embed_tokens*", "*q_proj*"], **llama)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= only


def extracted(folder: Path, base: Tensors, **config: Any) -> set[str]:
    """The keys of the adapter."""
    options = {name: config.pop(name) for name in ("only", "exclude") if name in config}
    folder.mkdir()
    files = model(folder / "tuned", {key: value + 1 for key, value in base.items()}, **config)
    ckptool.lora_extract(files, model(folder / "base", base, **config), folder / "out", rank=1, **options)
    return {key.removeprefix("base_model.model.") for key in load_file(folder / "out" / "adapter_model.safetensors")}
