"""`lora merge`: where an adapter's changes go, and what is refused. That the values are PEFT's is shown by
`tests/engines/test_lora.py`, and by small ones of its own in `fixtures/surgery/lora`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import CkptoolError, Conflict, NoMatch, Unsupported
from fixtures.surgery.make_lora import Net
from tests.support.cli import Run
from tests.support.looped import looped

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "some/model"}


def base_weights() -> Tensors:
    torch.manual_seed(0)
    names = {"model.embed_tokens": (7, 6), "model.layers.0.q": (6, 6), "model.layers.0.up": (8, 6), "lm_head": (7, 6)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in names.items()}


def halves(module: str, out: int, inputs: int, rank: int = 2) -> Tensors:
    torch.manual_seed(len(module))
    return {f"{module}.lora_A.weight": torch.randn(rank, inputs), f"{module}.lora_B.weight": torch.randn(out, rank)}


def peft(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(
        {f"base_model.model.{key}": value for key, value in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def saved(tensors: Tensors, path: Path, **metadata: str) -> Path:
    save_file(tensors, path, metadata=metadata or None)
    return path


def merged(tmp_path: Path, base: Tensors, adapter: Path, **options: Any) -> Tensors:
    ckptool.lora_merge(saved(base, tmp_path / "base.safetensors"), adapter, tmp_path / "out.safetensors", **options)
    return load_file(tmp_path / "out.safetensors")


def refused(tmp_path: Path, base: Tensors, adapter: Path, kind: type[CkptoolError], message: str) -> None:
    with pytest.raises(kind, match=message):
        merged(tmp_path, base, adapter)
    assert not (tmp_path / "out.safetensors").exists()


def change(tensors: Tensors, module: str, scale: float = 2.0) -> torch.Tensor:
    return product(tensors[f"{module}.lora_B.weight"], tensors[f"{module}.lora_A.weight"]) * scale


def product(left: Tensor, right: Tensor) -> Tensor:
    return (left.double() @ right.double()).float()


def is_near(found: Tensor, base: Tensor, delta: Tensor) -> bool:
    """True within a unit in the last place of the largest of a weight, its change and their sum, and f32's own sums."""
    of = torch.stack([each.double().abs() for each in (base, delta, base.double() + delta.double())]).amax(0)
    info = torch.finfo(found.dtype)
    unit = torch.exp2(torch.log2(of.clamp(min=info.tiny)).floor()) * info.eps
    return bool(((found.double() - base.double() - delta.double()).abs() <= 2 * unit).all())


def test_only_what_the_adapter_is_for_is_changed(tmp_path: Path, run: Run) -> None:
    base, tensors = base_weights(), halves("model.layers.0.up", 8, 6)
    adapter = peft(tmp_path / "adapter", tensors)
    found = merged(tmp_path, base, adapter, scale=0.5)
    key = "model.layers.0.up.weight"
    assert is_near(found[key], base[key], change(tensors, "model.layers.0.up", 1.0))
    assert all(torch.equal(found[name], base[name]) for name in base if name != key)
    done = run("lora", "merge", tmp_path / "base.safetensors", adapter, "-o", tmp_path / "two.pt", "-n", "--json")
    facts = json.loads(done.out)["facts"]
    assert (done.code, facts["changed"], facts["keys"], facts["base_model"]) == (0, [key], 2, "some/model")
    text = run("inspect", adapter).out
    assert (
        "LoRA adapter, PEFT names, rank 2, of 1 module (up)" in text and "changes to the weights of some/model" in text
    )


def test_a_prefix_that_could_be_two_is_refused(tmp_path: Path) -> None:
    base = {f"{tower}.layers.0.up.weight": torch.randn(8, 6) for tower in ("text", "vision")}
    adapter = peft(tmp_path / "adapter", halves("layers.0.up", 8, 6))
    refused(tmp_path, base, adapter, Conflict, "2 times: under text., vision.")


@pytest.mark.parametrize("wrong", ["model.layers.0.upp", "model.layers.9.up", "up"])
def test_a_misspelt_key_ends_with_1_and_writes_nothing(wrong: str, tmp_path: Path, run: Run) -> None:
    tensors = halves("model.layers.0.q", 6, 6) | halves(wrong, 8, 6)
    adapter, base = peft(tmp_path / "adapter", tensors), saved(base_weights(), tmp_path / "base.safetensors")
    done = run("lora", "merge", base, adapter, "-o", tmp_path / "out.pt")
    assert done.code == 1 and "2 of 4 keys" in done.err and f"{wrong}.lora_A" in done.err, done
    assert not (tmp_path / "out.pt").exists()


def test_an_adapter_for_another_base_is_named_by_its_shapes(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "adapter", halves("model.layers.0.up", 8, 5))
    refused(tmp_path, base_weights(), adapter, Conflict, r"is for \[8, 5\], and .* is \[8, 6\]")
    adapter = peft(tmp_path / "adapter", {"lm_head.weight": torch.ones(9, 6), **halves("model.layers.0.up", 8, 6)})
    refused(tmp_path, base_weights(), adapter, Conflict, r"is for \[9, 6\], and .* is \[7, 6\]")


def test_factors_that_do_not_fit_each_other_are_named(tmp_path: Path) -> None:
    halves_of = {"lora_A.weight": torch.ones(2, 6), "lora_B.weight": torch.ones(8, 3)}
    wrong = {f"unet.model.layers.0.up.{key}": value for key, value in halves_of.items()}
    file = saved(wrong, tmp_path / "a.safetensors")
    refused(tmp_path, base_weights(), file, Conflict, r"up: its factors of shape \[8, 3\] and \[2, 6\] do not fit")


def test_a_quantized_base_is_named(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "adapter", halves("model.layers.0.up", 8, 6))
    base = base_weights()
    packed = {"model.layers.0.up.weight": torch.zeros(48, 1, dtype=torch.uint8)}
    refused(tmp_path, base | packed, adapter, Unsupported, "quantized")
    codes = base["model.layers.0.up.weight"].to(torch.float8_e4m3fn)
    scaled = {"model.layers.0.up.weight": codes, "model.layers.0.up.weight_scale_inv": torch.ones(1, 1)}
    refused(tmp_path, base | scaled, adapter, Unsupported, "quantized")
    del base["model.layers.0.up.weight"]
    gptq = {"model.layers.0.up.qweight": torch.zeros(1, 8, dtype=torch.int32)}
    refused(tmp_path, base | gptq, adapter, Unsupported, "quantized")


def test_ties_stay_or_are_refused(tmp_path: Path) -> None:
    base = base_weights()
    base["lm_head.weight"] = base["model.embed_tokens.weight"]
    torch.save(base, tmp_path / "base.pt")
    embedding = {"model.embed_tokens.lora_embedding_A": torch.randn(2, 7)}
    embedding["model.embed_tokens.lora_embedding_B"] = torch.randn(6, 2)
    adapter = peft(tmp_path / "adapter", embedding)
    with pytest.raises(Conflict, match="which is tied to lm_head"):
        ckptool.lora_merge(tmp_path / "base.pt", adapter, tmp_path / "out.pt")
    ckptool.lora_merge(
        tmp_path / "base.pt", peft(tmp_path / "b", halves("model.layers.0.up", 8, 6)), tmp_path / "out.pt"
    )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    del base["lm_head.weight"]
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    refused(tmp_path, base, adapter, Conflict, r"tied to lm_head\.weight in the model")
    found = merged(tmp_path, base, peft(tmp_path / "adapter", embedding, ensure_weight_tying=True))
    key = "model.embed_tokens"
    delta = product(embedding[f"{key}.lora_embedding_B"], embedding[f"{key}.lora_embedding_A"]).T * 2
    assert is_near(found[f"{key}.weight"], base[f"{key}.weight"], delta)


def test_whole_modules_are_replaced_or_new(tmp_path: Path) -> None:
    base, tensors = base_weights(), halves("model.layers.0.up", 8, 6)
    head = {"lm_head.weight": torch.randn(7, 6, dtype=torch.bfloat16), "score.weight": torch.randn(2, 6)}
    adapter = peft(tmp_path / "adapter", tensors | head, modules_to_save=["score", "lm_head"])
    found = merged(tmp_path, base, adapter)
    assert torch.equal(found["lm_head.weight"], head["lm_head.weight"].float())
    assert torch.equal(found["score.weight"], head["score.weight"]) and list(found)[-1:] != [] and len(found) == 5
    adapter = peft(tmp_path / "adapter", tensors | head, modules_to_save=["lm_head"])
    (tmp_path / "out.safetensors").unlink()
    refused(tmp_path, base, adapter, NoMatch, r"1 of 4 keys .*: base_model\.model\.score\.weight")


def test_shards_are_merged_into_shards(tmp_path: Path) -> None:
    ckptool.convert(saved(base_weights(), tmp_path / "b.safetensors"), tmp_path / "base/", shard_size="100B")
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    adapter = peft(tmp_path / "adapter", tensors := halves("model.layers.0.up", 8, 6))
    ckptool.lora_merge(tmp_path / "base", adapter, f"{tmp_path / 'out'}/")
    assert (tmp_path / "out" / "config.json").exists()
    found = ckptool.load(tmp_path / "out")["model.layers.0.up.weight"]
    assert is_near(found, base_weights()["model.layers.0.up.weight"], change(tensors, "model.layers.0.up"))


def test_an_adapter_at_an_address_and_a_configuration_elsewhere(tmp_path: Path) -> None:
    tensors = halves("model.layers.0.up", 8, 6)
    torch.save({"lora": {f"base_model.model.{key}": v for key, v in tensors.items()}, "step": 3}, tmp_path / "run.pt")
    (tmp_path / "its.json").write_text(json.dumps(CONFIG))
    base = base_weights()
    found = merged(tmp_path, base, Path(f"{tmp_path / 'run.pt'}#lora"), config=tmp_path / "its.json")
    key = "model.layers.0.up.weight"
    assert is_near(found[key], base[key], change(tensors, "model.layers.0.up"))
    with pytest.raises(CkptoolError, match="does not say its alpha"):
        ckptool.lora_merge(tmp_path / "base.safetensors", f"{tmp_path / 'run.pt'}#lora", tmp_path / "o.pt")


def test_an_adapter_of_a_changed_base_is_merged_into_that_alone(tmp_path: Path, run: Run) -> None:
    base = saved(base_weights(), tmp_path / "b.safetensors")
    for number, way in enumerate(("pissa", "pissa_niter_4", "olora", "OLoRA", "loftq", "corda", "lora_ga")):
        adapter = peft(tmp_path / f"{number}", halves("model.layers.0.up", 8, 6), init_lora_weights=way)
        with pytest.raises(Unsupported, match=f"{way} changed the base before the training") as found:
            ckptool.lora_merge(base, adapter, tmp_path / "o.pt")
        assert "changed_base=True" in str(found.value) and not (tmp_path / "o.pt").exists()
        done = ckptool.lora_merge(base, adapter, tmp_path / "o.pt", dry_run=True, changed_base=True)
        assert [note.code for note in done.notes] == ["changed-base"]
    arguments = "lora", "merge", str(base), str(adapter), "-o", str(tmp_path / "run.pt")
    assert run(*arguments).code == 2 and run(*arguments, "--changed-base").code == 0
    for number, harmless in enumerate((True, False, "gaussian", "eva", "orthogonal", "mica")):
        adapter = peft(tmp_path / f"h{number}", halves("model.layers.0.up", 8, 6), init_lora_weights=harmless)
        assert not ckptool.lora_merge(base, adapter, tmp_path / "o.pt", dry_run=True).notes


# Values -------------------------------------------------------------------------------------------------------------

SURGERY = Path(__file__).parents[2] / "fixtures" / "surgery" / "lora"
FOLDERS = sorted(path.name for path in SURGERY.iterdir() if path.is_dir())


F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@looped(
    ("weight", "factor", "rank"),
    [
        *((weight, factor, 16) for weight in (F64, F32, F16, BF16) for factor in (F64, F32, F16, BF16)),
        *((weight, weight, rank) for weight in (F32, BF16) for rank in (1, 64, 65, 200)),
    ],
)
def test_no_value_is_further_from_peft_than_promised(
    weight: torch.dtype, factor: torch.dtype, rank: int, tmp_path: Path
) -> None:
    """One unit in the last place of the largest of a weight, its change and their sum; in f32 and f64 also what the
    order of a sum of products may change; and one unit of the adapter's type, where a half falls the other way."""
    torch.manual_seed(rank)
    base = {"m.weight": (torch.randn(70, 300) / 8).to(weight)}
    b, a = (torch.randn(70, rank) / 8).to(factor), (torch.randn(rank, 300) / 8).to(factor)
    adapter = peft(tmp_path / "adapter", {"m.lora_A.weight": a, "m.lora_B.weight": b}, r=rank, lora_alpha=2 * rank)
    found = merged(tmp_path, base, adapter, overwrite=True)["m.weight"]
    wide = F64 if factor is F64 else F32  # PEFT's merge on a CPU
    delta = (b.to(wide) @ a.to(wide) * 2).to(factor)
    theirs = (base["m.weight"] + delta).to(weight)

    def unit(values: Tensor, dtype: torch.dtype) -> Tensor:
        info = torch.finfo(dtype)
        return torch.exp2(torch.log2(values.double().abs().clamp(min=info.tiny)).floor()) * info.eps

    largest = torch.stack([each.double().abs() for each in (base["m.weight"], delta, theirs)]).amax(0)
    allowed = unit(largest, weight) + rank * torch.finfo(wide).eps * 2 * (b.double().abs() @ a.double().abs())
    off = (found.double() - theirs.double()).abs()
    flipped = off > allowed
    assert found.dtype is weight and int(flipped.sum()) <= flipped.numel() // 1000
    assert (off <= allowed + unit(delta, factor)).all()


@looped("name", [name for name in FOLDERS if "lycoris" not in name])
def test_the_values_are_those_of_peft(name: str, tmp_path: Path) -> None:
    base = SURGERY / f"base-{'bfloat16' if 'bf16' in name else 'float32'}.safetensors"
    done = ckptool.lora_merge(base, SURGERY / name, tmp_path / "out.safetensors", verify=True)
    files = tmp_path / "out.safetensors", SURGERY / name / "expected.safetensors", base
    ours, theirs, before = map(load_file, files)
    assert theirs.keys() == {*done.facts["changed"], *done.facts["replaced"]} and ours.keys() == before.keys()
    for key, value in ours.items():
        if "dora" in name:
            assert torch.allclose(value, theirs.get(key, before[key]), rtol=3e-7, atol=1e-7), key
        else:
            assert is_near(value, before[key], theirs.get(key, before[key]).double() - before[key].double()), key


@pytest.mark.parametrize("name", [name for name in FOLDERS if "lycoris" in name])
def test_a_merged_adapter_of_lycoris_computes_what_lycoris_does(name: str, tmp_path: Path) -> None:
    adapter = SURGERY / name / "adapter.safetensors"
    ckptool.lora_merge(SURGERY / "base-net.safetensors", adapter, tmp_path / "out.safetensors")
    net = Net()
    net.load_state_dict(load_file(tmp_path / "out.safetensors"))
    expected = load_file(SURGERY / name / "expected.safetensors")
    assert (net.double()(expected["x"]) - expected["y"]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "q has no magnitude, and use_dora is True"),
        ({"lora_bias": True}, "q has no B.bias, and lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "nothing for 1 tensor .*: lm_head.weight"),
        ({"target_modules": r".*\.(q|up)"}, r"nothing for 1 tensor .*: model.layers.0.up.weight"),
    ],
)
def test_what_the_configuration_names_has_to_be_there(config: Any, message: str, tmp_path: Path) -> None:
    adapter = peft(tmp_path / "adapter", halves("model.layers.0.q", 6, 6), **config)
    refused(tmp_path, base_weights(), adapter, CkptoolError, message)


def test_a_magnitude_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    tensors = halves("model.layers.0.q", 6, 6) | {"model.layers.0.q.lora_magnitude_vector": torch.ones(6)}
    refused(tmp_path, base_weights(), peft(tmp_path / "adapter", tensors), Conflict, "use_dora is False")


def test_trained_tokens_are_rows(tmp_path: Path) -> None:
    """Of PEFT's `trainable_token_indices`, by a list or by tables, and of its adapters of nothing else."""
    table, factors = "model.embed_tokens", halves("model.layers.0.up", 8, 6)
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        base = {key: value.to(dtype) for key, value in base_weights().items()}
        rows = {f"{table}.token_adapter.trainable_tokens_delta": torch.randn(2, 6)}
        head = {"lm_head.token_adapter.trainable_tokens_delta": torch.randn(1, 6)}
        alone = {"trainable_token_indices": None, "peft_type": "TRAINABLE_TOKENS", "token_indices": [6, 0]}
        for tensors, indices in (
            (factors | rows, {"trainable_token_indices": [6, 0]}),
            (factors | rows | head, {"trainable_token_indices": {"embed_tokens": [6, 0], "lm_head": [3]}}),
            ({f"{table}.trainable_tokens_delta": next(iter(rows.values()))}, alone),
        ):
            found = merged(tmp_path, base, peft(tmp_path / f"{number}", tensors, **indices), overwrite=True)
            expected = {key: value.clone() for key, value in base.items()}
            expected[f"{table}.weight"][[6, 0]] = next(iter(rows.values())).to(dtype)
            if len(tensors) == 4:
                expected["lm_head.weight"][3] = next(iter(head.values()))[0].to(dtype)
            del expected["model.layers.0.up.weight"], found["model.layers.0.up.weight"]
            assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    (tmp_path / "out.safetensors").unlink()
    for indices in ([6, 7], [6, -1], [6], [6, "0"], None):
        config = {"trainable_token_indices": indices and {"embed_tokens": indices}}
        refused(
            tmp_path, base, peft(tmp_path / "wrong", factors | rows, **config), Conflict, r"embed_tokens is for \[2"
        )
    tied = {key: value for key, value in base_weights().items() if key != "lm_head.weight"}
    torch.save(tied | {"lm_head.weight": tied[f"{table}.weight"]}, tmp_path / "tied.pt")
    adapter = peft(tmp_path / "tied", factors | rows, trainable_token_indices=[6, 0])
    ckptool.lora_merge(tmp_path / "tied.pt", adapter, tmp_path / "tied-out.pt")
    found = torch.load(tmp_path / "tied-out.pt", weights_only=True)
    assert found["lm_head.weight"].data_ptr() == found[f"{table}.weight"].data_ptr()
    assert torch.equal(found["lm_head.weight"][[6, 0]], next(iter(rows.values())))
