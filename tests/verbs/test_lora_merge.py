"""`lora merge`: where an adapter's changes go, and what is refused; `lora extract` and it for models that have other
names in memory than in their files.

That the values and names are those of PEFT and transformers is shown by `tests/engines`, and by small vectors in
`fixtures/surgery/lora`.
"""

import json
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.errors import CkptoolError, Conflict, NoMatch, Unsupported
from ckptool.transforms.memory_names import UNKNOWN, _tables, in_memory
from fixtures.surgery.make_lora import Net
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import load
from tests.support.looped import looped
from tests.support.small_models import CONFIG, Tensors, halves, model_folder, peft, stored

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
    facts = ckptool.lora_merge(tmp_path / "base.safetensors", adapter, tmp_path / "two.pt", dry_run=True).facts
    assert (facts["changed"], facts["keys"], facts["base_model"]) == ([KEY], 2, "some/model")
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
    refused(CkptoolError, tmp_path, lambda: merged(tmp_path, base, adapter), "does not say its alpha")


def test_an_adapter_in_one_file_is_said_to_have_lost_its_alpha(tmp_path: Path) -> None:
    adapter, cast = peft(tmp_path / "adapter", FACTORS), partial(ckptool.cast, dtype="bf16")
    for verb, out in product((ckptool.convert, cast, partial(ckptool.doctor, fix=True)), ("out.pt", "out.safetensors")):
        done = verb(adapter, out=tmp_path / out, overwrite=True)
        assert any(note.code == "adapter" and "which has its alpha" in note.message for note in done.notes), out
    for out in ("folder/", "adapter/beside.pt"):
        notes = ckptool.convert(adapter, out=f"{tmp_path}/{out}").notes
        assert not any("alpha" in note.message for note in notes)


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
    for view in (torch.t, lambda table: table[2:], lambda table: table.view(-1)[3:9]):
        other = stored({**base, "lm_head.weight": view(base[f"{EMBED}.weight"])}, tmp_path / "other.pt")
        with pytest.raises(Conflict, match="which is tied to lm_head"):
            ckptool.lora_merge(other, adapter, out)
    rows = torch.cat([base[f"{EMBED}.weight"], torch.ones(7, 6)])  # beside it in one storage
    beside = {**base, f"{EMBED}.weight": rows[:7], "lm_head.weight": rows[7:]}
    ckptool.lora_merge(stored(beside, tmp_path / "beside.pt"), adapter, out)
    assert torch.equal(load(out)["lm_head.weight"], torch.ones(7, 6))
    out.unlink()
    ckptool.lora_merge(file, peft(tmp_path / "b", FACTORS), out)
    found = load(out)
    assert found["lm_head.weight"].data_ptr() == found[f"{EMBED}.weight"].data_ptr()
    del base["lm_head.weight"]
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    with pytest.raises(Conflict, match=r"tied to lm_head\.weight in the model"):
        merged(tmp_path, base, adapter)
    with pytest.raises(Conflict, match=r"changes lm_head\.weight, which is tied to model\.embed_tokens\.weight in"):
        merged(tmp_path, base, peft(tmp_path / "c", halves("lm_head", 7)))
    found = merged(tmp_path, base, peft(tmp_path / "adapter", EMBEDDING, ensure_weight_tying=True))
    a, b = (EMBEDDING[f"{EMBED}.lora_embedding_{side}"].double() for side in "AB")
    assert is_near(found[f"{EMBED}.weight"], base[f"{EMBED}.weight"], (b @ a).float().T * 2)


def test_a_square_weight_is_as_those_of_its_block(tmp_path: Path) -> None:
    """A ViT with a GPT-2 behind it: the one field of PEFT's configuration holds for one of the two at most."""
    square, turned = "vit.layer.0.attention.query", "gpt.h.0.attn.c_own"
    base = {f"{name}.weight": torch.randn(6, 6) for name in (square, turned)} | {f"{turned}.bias": torch.randn(6)}
    base |= {"vit.layer.0.dense.weight": torch.randn(8, 6), "vit.layer.0.dense.bias": torch.randn(8)}
    base |= {"gpt.h.0.attn.c_attn.weight": torch.randn(6, 18), "gpt.h.0.attn.c_attn.bias": torch.randn(18)}
    tensors = halves(square, 6) | halves(turned, 6, seed=1)
    for said, with_bias in product((False, True), repeat=2):
        biases = {f"{square}.bias": torch.randn(6)} if with_bias else {}
        found = merged(tmp_path, base | biases, peft(tmp_path / "a", tensors, fan_in_fan_out=said))
        for name in (square, turned):
            delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"] * 2
            delta = delta.T if name == turned else delta
            assert torch.allclose(found[f"{name}.weight"], base[f"{name}.weight"] + delta, atol=1e-5)
    # In one block of both kinds, the field is that of the layer that PEFT wrapped last. A Conv1D has a bias.
    mixed = {f"x.{'.'.join(key.split('.')[-2:])}": value for key, value in base.items()}
    own, more = halves("x.query", 6), halves("x.dense", 8)
    for said, with_bias in product((False, True), repeat=2):
        biases = {"x.query.bias": torch.randn(6)} if with_bias else {}
        found = merged(tmp_path, mixed | biases, peft(tmp_path / "b", own, fan_in_fan_out=said))
        delta = own["x.query.lora_B.weight"] @ own["x.query.lora_A.weight"] * 2
        delta = delta.T if said and with_bias else delta
        assert torch.allclose(found["x.query.weight"], mixed["x.query.weight"] + delta, atol=1e-5)
        two = peft(tmp_path / "c", own | more, fan_in_fan_out=said)
        if with_bias:
            with pytest.raises(Unsupported, match=r"x\.query\.weight of .* is square"):
                merged(tmp_path, mixed | biases, two)
            with pytest.raises(Unsupported, match=r"x\.query\.weight of .* is square"):  # the last is the other
                ckptool.lora_merge(stored(mixed | biases, tmp_path / "b.pt"), two, tmp_path / "out.pt")
        else:
            merged(tmp_path, mixed, two)


def test_trained_tokens_of_a_tied_table_replace_no_other_change(tmp_path: Path) -> None:
    base = base_weights()
    base["lm_head.weight"] = base[f"{EMBED}.weight"]
    file = stored(base, tmp_path / "base.pt")
    head = {"lm_head.lora_A.weight": torch.randn(2, 6), "lm_head.lora_B.weight": torch.randn(7, 2)}
    tokens = {f"{EMBED}.token_adapter.trainable_tokens_delta": torch.randn(2, 6)}
    for tensors in (head | tokens, tokens | head):
        with pytest.raises(Conflict, match="twice"):
            ckptool.lora_merge(file, peft(tmp_path / "a", tensors, trainable_token_indices=[6, 0]), tmp_path / "out.pt")


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
    with pytest.raises(Conflict, match=r"up: its factors of shape \[8, 3\] and \[2, 6\] do not fit"):
        merged(tmp_path, base_weights(), stored(ODD, tmp_path / "a.safetensors"))


def test_an_adapter_of_a_changed_base_is_merged_into_that_alone(tmp_path: Path, run: Run) -> None:
    base, out = stored(base_weights(), tmp_path / "b.safetensors"), tmp_path / "o.pt"
    for way in ("pissa", "pissa_niter_4", "olora", "OLoRA", "loftq", "corda", "lora_ga"):
        adapter = peft(tmp_path / "a", FACTORS, init_lora_weights=way)
        with pytest.raises(Unsupported, match=f"{way} changed the base before training") as found:
            ckptool.lora_merge(base, adapter, out)
        assert "changed_base=True" in str(found.value) and not out.exists()
        done = ckptool.lora_merge(base, adapter, out, dry_run=True, changed_base=True)
        assert [note.code for note in done.notes] == ["changed-base"]
    arguments = "lora", "merge", base, adapter, "-o", out
    assert run(*arguments).code == 2 and run(*arguments, "--changed-base").code == 0
    for harmless in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        adapter = peft(tmp_path / "a", FACTORS, init_lora_weights=harmless)
        assert not ckptool.lora_merge(base, adapter, tmp_path / "x.pt", dry_run=True).notes


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
    if "conv1d" in name:  # beside Linears: known by the order of the layers
        base = stored(load_file(base), tmp_path / "base.pt")
    done = ckptool.lora_merge(base, SURGERY / name, tmp_path / "out.safetensors", verify=True)
    files = tmp_path / "out.safetensors", SURGERY / name / "expected.safetensors", base
    ours, theirs, before = map(load, files)
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


VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
OLD, NEW = "vit.encoder.layer.{}.attention.attention.query", "vit.layers.{}.attention.q_proj"


# Names in memory and in files.
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
    # Patterns, of which PEFT adds some for fused matrices, are for names of parameters.
    rs = {"use_rslora": True, "r": 5, "rank_pattern": {r".*\.gate_up_proj": 2, "experts.down_proj": 2}}
    ways: Any = ({"lora_alpha": 2}, {"alpha_pattern": {".*_proj": 2}}, rs | {"lora_alpha": 2**0.5})
    for number, listed in enumerate(permutations(["experts.down_proj", "experts.gate_up_proj", "gate_up_proj"])):
        folder = peft(tmp_path / f"a{number}", keys, target_parameters=listed, **ways[number % 3])
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
    rows = [(kind, name, row) for kind, each in _tables()[0].items() for name, row in each.items()]
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
        with pytest.raises(Unsupported, match="it is unknown what transformers makes of"):
            verb()
    assert not (tmp_path / "out").exists()


@looped(
    ("name", "prefix"),
    [("PaddleOCRVLModel", ""), ("PaddleOCRVLForConditionalGeneration", "model."), ("SomebodysOwn", "model.")],
)
def test_a_model_without_its_head_has_no_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    """As transformers leaves out a prefix that the model does not have, whatever the mapping of its type adds."""
    base = {f"visual.layers.0.{each}_proj.weight": torch.randn(6, 6) for each in "qk"}
    keys = extracted(tmp_path, base, only="*q_proj*", model_type="paddleocr_vl", architectures=[name])
    assert keys == {f"{prefix}visual.layers.0.q_proj.lora_{side}.weight" for side in "AB"}


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
    by_ties = {" ".join(each): (name, each) for name, each in _tables()[3].items()}
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
    without: Any = ({}, tied | {"architectures": ["XLMForTokenClassification"]}, llama | {"exclude": "*embed*"})
    for number, config in enumerate((tied, llama | {"only": only}, *without)):
        found = extracted(tmp_path / f"{number}", base, **config)
        assert ("lm_head.weight" in found) == (config not in without), config
    with pytest.raises(Unsupported, match=r"config\.json ties"):
        extracted(tmp_path / "two", base | {"model.wte.weight": torch.zeros(5, 4)}, **tied)
