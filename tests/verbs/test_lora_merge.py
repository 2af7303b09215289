"""`lora merge`: where an adapter's changes go, and what is refused. That the values are PEFT's is shown by
`tests/engines/test_lora.py`, and by small ones of its own in `fixtures/surgery/lora`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.errors import CkptoolError, Conflict, NoMatch, Unsupported
from fixtures.surgery.make_lora import Net
from tests.support.adapters import CONFIG, Tensors, halves, peft, stored
from tests.support.cli import Run
from tests.support.files import load
from tests.support.looped import looped

Tensor = torch.Tensor
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
UP, EMBED = "model.layers.0.up", "model.embed_tokens"
FACTORS, KEY = halves(UP, 8), f"{UP}.weight"


def base_weights() -> Tensors:
    torch.manual_seed(0)
    names = {EMBED: (7, 6), "model.layers.0.q": (6, 6), UP: (8, 6), "lm_head": (7, 6)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in names.items()}


def merged(tmp_path: Path, base: Tensors, adapter: Path, **options: Any) -> Tensors:
    file, out = stored(base, tmp_path / "base.safetensors"), tmp_path / "out.safetensors"
    ckptool.lora_merge(file, adapter, out, **{"overwrite": True, **options})
    return load_file(out)


def unit(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A unit in the last place."""
    info = torch.finfo(dtype)
    return torch.exp2(torch.log2(values.double().abs().clamp(min=info.tiny)).floor()) * info.eps


def is_near(found: Tensor, base: Tensor, delta: Tensor) -> bool:
    """True within a unit in the last place of the largest of a weight, its change and their sum, and f32's own sums."""
    of = torch.stack([each.double().abs() for each in (base, delta, base.double() + delta.double())]).amax(0)
    off = (found.double() - base.double() - delta.double()).abs()
    return bool((off <= 2 * unit(of, found.dtype)).all())


def change(scale: float = 2.0) -> Tensor:
    a, b = (FACTORS[f"{UP}.lora_{side}.weight"].double() for side in "AB")
    return (b @ a * scale).float()


def test_only_what_the_adapter_is_for_is_changed(tmp_path: Path, run: Run) -> None:
    base, adapter = base_weights(), peft(tmp_path / "adapter", FACTORS)
    found = merged(tmp_path, base, adapter, scale=0.5)
    assert is_near(found[KEY], base[KEY], change(1.0))
    assert all(torch.equal(found[name], base[name]) for name in base if name != KEY)
    done = run("lora", "merge", tmp_path / "base.safetensors", adapter, "-o", tmp_path / "two.pt", "-n", "--json")
    facts = json.loads(done.out)["facts"]
    assert (done.code, facts["changed"], facts["keys"], facts["base_model"]) == (0, [KEY], 2, "some/model")
    text = run("inspect", adapter).out
    assert "LoRA adapter, PEFT names, rank 2, of 1 module (up)" in text and "the weights of some/model" in text


def test_shards_are_merged_into_shards(tmp_path: Path) -> None:
    ckptool.convert(stored(base_weights(), tmp_path / "b.safetensors"), tmp_path / "base/", shard_size="100B")
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    ckptool.lora_merge(tmp_path / "base", peft(tmp_path / "adapter", FACTORS), f"{tmp_path / 'out'}/")
    assert (tmp_path / "out" / "config.json").exists()
    assert is_near(ckptool.load(tmp_path / "out")[KEY], base_weights()[KEY], change())


def test_an_adapter_at_an_address_and_a_configuration_elsewhere(tmp_path: Path) -> None:
    stored({"lora": {f"base_model.model.{key}": v for key, v in FACTORS.items()}, "step": 3}, tmp_path / "run.pt")
    (tmp_path / "its.json").write_text(json.dumps(CONFIG))
    adapter, base = Path(f"{tmp_path / 'run.pt'}#lora"), base_weights()
    for config in (tmp_path / "its.json", CONFIG):
        assert is_near(merged(tmp_path, base, adapter, config=config)[KEY], base[KEY], change())
    with pytest.raises(CkptoolError, match="does not say its alpha"):
        merged(tmp_path, base, adapter)


def test_whole_modules_are_replaced_or_new(tmp_path: Path) -> None:
    head = {"lm_head.weight": torch.randn(7, 6).bfloat16(), "score.weight": torch.randn(2, 6)}
    found = merged(tmp_path, base_weights(), peft(tmp_path / "a", FACTORS | head, modules_to_save=["score", "lm_head"]))
    assert torch.equal(found["lm_head.weight"], head["lm_head.weight"].float()) and len(found) == 5
    assert torch.equal(found["score.weight"], head["score.weight"])


EMBEDDING = {f"{EMBED}.lora_embedding_A": torch.randn(2, 7), f"{EMBED}.lora_embedding_B": torch.randn(6, 2)}


def test_ties_stay_or_are_refused(tmp_path: Path) -> None:
    base, out = base_weights(), tmp_path / "out.pt"
    base["lm_head.weight"] = base[f"{EMBED}.weight"]
    file, adapter = stored(base, tmp_path / "base.pt"), peft(tmp_path / "adapter", EMBEDDING)
    with pytest.raises(Conflict, match="which is tied to lm_head"):
        ckptool.lora_merge(file, adapter, out)
    ckptool.lora_merge(file, peft(tmp_path / "b", FACTORS), out)
    found = load(out)
    assert found["lm_head.weight"].data_ptr() == found[f"{EMBED}.weight"].data_ptr()
    del base["lm_head.weight"]
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    with pytest.raises(Conflict, match=r"tied to lm_head\.weight in the model"):
        merged(tmp_path, base, adapter)
    found = merged(tmp_path, base, peft(tmp_path / "adapter", EMBEDDING, ensure_weight_tying=True))
    a, b = (EMBEDDING[f"{EMBED}.lora_embedding_{side}"].double() for side in "AB")
    assert is_near(found[f"{EMBED}.weight"], base[f"{EMBED}.weight"], (b @ a).float().T * 2)


def test_trained_tokens_are_rows(tmp_path: Path) -> None:
    """Of PEFT's `trainable_token_indices`, by a list or by tables, and of its adapters of nothing else."""
    name = "trainable_tokens_delta"
    rows, head = torch.randn(2, 6), torch.randn(1, 6)
    both = {f"{EMBED}.token_adapter.{name}": rows, f"lm_head.token_adapter.{name}": head}
    first = dict(list(both.items())[:1])
    alone = {"trainable_token_indices": None, "peft_type": "TRAINABLE_TOKENS", "token_indices": [6, 0]}
    ways: list[tuple[Tensors, dict[str, Any]]] = [
        (FACTORS | first, {"trainable_token_indices": [6, 0]}),
        (FACTORS | both, {"trainable_token_indices": {"embed_tokens": [6, 0], "lm_head": [3]}}),
        ({f"{EMBED}.{name}": rows}, alone),
    ]
    for dtype in (F32, BF16, F16, F64):
        base = {key: value.to(dtype) for key, value in base_weights().items()}
        for tensors, config in ways:
            found = merged(tmp_path, base, peft(tmp_path / "a", tensors, **config))
            expected = {key: value.clone() for key, value in base.items()}
            expected[f"{EMBED}.weight"][[6, 0]] = rows.to(dtype)
            if tensors.keys() >= both.keys():
                expected["lm_head.weight"][3] = head[0].to(dtype)
            assert all(torch.equal(found[key], value) for key, value in expected.items() if key != KEY)
    for indices in ([6, 7], [6, -1], [6], [6, "0"], None):
        adapter = peft(tmp_path / "a", FACTORS | first, trainable_token_indices=indices and {"embed_tokens": indices})
        with pytest.raises(Conflict, match=r"embed_tokens is for \[2"):
            merged(tmp_path, base, adapter)
    base = base_weights() | {"lm_head.weight": base_weights()[f"{EMBED}.weight"]}
    base[f"{EMBED}.weight"] = base["lm_head.weight"]
    adapter = peft(tmp_path / "a", FACTORS | first, trainable_token_indices=[6, 0])
    ckptool.lora_merge(stored(base, tmp_path / "tied.pt"), adapter, tmp_path / "out.pt")
    found = load(tmp_path / "out.pt")
    assert found["lm_head.weight"].data_ptr() == found[f"{EMBED}.weight"].data_ptr()
    assert torch.equal(found["lm_head.weight"][[6, 0]], rows)


# Refused, and nothing written ----------------------------------------------------------------------------------------

ODD = {"unet." + UP + ".lora_A.weight": torch.ones(2, 6), "unet." + UP + ".lora_B.weight": torch.ones(8, 3)}
Q = halves("model.layers.0.q", 6)
CODES = {KEY: torch.zeros(8, 6).to(torch.float8_e4m3fn), f"{KEY}_scale_inv": torch.ones(1, 1)}


@looped(
    ("tensors", "config", "base", "error", "message"),
    [
        (Q | halves(f"{UP}p", 8), {}, {}, NoMatch, f"2 of 4 keys .*{UP}p.lora_A"),
        (Q | halves("model.layers.9.up", 8), {}, {}, NoMatch, "2 of 4 keys .*9.up.lora_A"),
        (Q | halves("up", 8), {}, {}, NoMatch, "2 of 4 keys .*up.lora_A"),
        (FACTORS | {"score.weight": torch.ones(2, 6)}, {"modules_to_save": ["x"]}, {}, NoMatch, "1 of 3 keys"),
        (halves(UP, 8, 5), {}, {}, Conflict, r"is for \[8, 5\], and .* is \[8, 6\]"),
        ({"lm_head.weight": torch.ones(9, 6), **FACTORS}, {}, {}, Conflict, r"is for \[9, 6\], and .* is \[7, 6\]"),
        (halves("n.a", 8), {}, {f"{each}.n.a.weight": torch.ones(8, 6) for each in "xy"}, Conflict, "2 times: under"),
        (FACTORS, {}, {KEY: torch.zeros(48, 1, dtype=torch.uint8)}, Unsupported, "quantized"),
        (FACTORS, {}, CODES, Unsupported, "quantized"),
        (FACTORS, {}, {f"{UP}.qweight": torch.zeros(1, 8).int()}, Unsupported, "quantized"),
        (Q, {"use_dora": True}, {}, CkptoolError, "q has no magnitude, and use_dora is True"),
        (Q, {"lora_bias": True}, {}, CkptoolError, "q has no B.bias, and lora_bias is True"),
        (Q, {"modules_to_save": ["lm_head"]}, {}, CkptoolError, "nothing for 1 tensor .*: lm_head.weight"),
        (Q, {"target_modules": r".*\.(q|up)"}, {}, CkptoolError, f"nothing for 1 tensor .*: {KEY}"),
        (Q | {"model.layers.0.q.lora_magnitude_vector": torch.ones(6)}, {}, {}, Conflict, "use_dora is False"),
    ],
)
def test_what_does_not_fit_is_refused(
    tensors: Tensors, config: Any, base: Tensors, error: type[CkptoolError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        merged(tmp_path, base_weights() | base, peft(tmp_path / "adapter", tensors, **config))
    assert not (tmp_path / "out.safetensors").exists()


def test_factors_that_do_not_fit_each_other_are_named(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match=r"up: its factors of shape \[8, 3\] and \[2, 6\] do not fit"):
        merged(tmp_path, base_weights(), stored(ODD, tmp_path / "a.safetensors"))


def test_an_adapter_of_a_changed_base_is_merged_into_that_alone(tmp_path: Path, run: Run) -> None:
    base, out = stored(base_weights(), tmp_path / "b.safetensors"), tmp_path / "o.pt"
    for way in ("pissa", "pissa_niter_4", "olora", "OLoRA", "loftq", "corda", "lora_ga"):
        adapter = peft(tmp_path / "a", FACTORS, init_lora_weights=way)
        with pytest.raises(Unsupported, match=f"{way} changed the base before the training") as found:
            ckptool.lora_merge(base, adapter, out)
        assert "changed_base=True" in str(found.value) and not out.exists()
        done = ckptool.lora_merge(base, adapter, out, dry_run=True, changed_base=True)
        assert [note.code for note in done.notes] == ["changed-base"]
    arguments = "lora", "merge", base, adapter, "-o", out
    assert run(*arguments).code == 2 and run(*arguments, "--changed-base").code == 0
    for harmless in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        adapter = peft(tmp_path / "a", FACTORS, init_lora_weights=harmless)
        assert not ckptool.lora_merge(base, adapter, tmp_path / "x.pt", dry_run=True).notes


# Values --------------------------------------------------------------------------------------------------------------

SURGERY = Path(__file__).parents[2] / "fixtures" / "surgery" / "lora"
FOLDERS = sorted(path.name for path in SURGERY.iterdir() if path.is_dir())


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
    found = merged(tmp_path, base, adapter)["m.weight"]
    wide = F64 if factor is F64 else F32  # PEFT's merge on a CPU
    delta = (b.to(wide) @ a.to(wide) * 2).to(factor)
    theirs = (base["m.weight"] + delta).to(weight)
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


@looped("name", [name for name in FOLDERS if "lycoris" in name])
def test_a_merged_adapter_of_lycoris_computes_what_lycoris_does(name: str, tmp_path: Path) -> None:
    adapter = SURGERY / name / "adapter.safetensors"
    ckptool.lora_merge(SURGERY / "base-net.safetensors", adapter, tmp_path / "out.safetensors")
    net = Net()
    net.load_state_dict(load_file(tmp_path / "out.safetensors"))
    expected = load_file(SURGERY / name / "expected.safetensors")
    assert (net.double()(expected["x"]) - expected["y"]).abs().max() < 1e-5
