"""`lora extract`, `lora resize` and `lora convert`: what is written, and what is refused.

That PEFT and diffusers load it is shown by `tests/engines/test_lora_tools.py`.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import CkptoolError, Conflict, LimitExceeded, NoMatch, Unsupported, UsageError
from tests.support.errors import refused
from tests.support.files import load
from tests.support.looped import looped
from tests.support.small_models import CONFIG, Tensors, halves, model_folder, peft, stored


def weights() -> Tensors:
    torch.manual_seed(0)
    shapes = {"emb_tokens": (7, 6), "up.q": (6, 6), "up.k": (8, 6), "conv": (5, 4, 3, 3), "norm": (6,)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()} | {"up.k.bias": torch.randn(8)}


def config_of(folder: Path) -> Any:
    return json.loads((folder / "adapter_config.json").read_text())


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "adapter_model.safetensors")


def metadata_of(file: Path) -> Any:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["lora_adapter_metadata"])


def test_adapters_with_names_are_said_not_to_be_read(tmp_path: Path) -> None:
    """PEFT writes the one called default into the folder, and others into folders of their names."""
    folder = peft(tmp_path / "adapters", halves("up.q", 6))
    base = stored(weights(), tmp_path / "base.pt")
    assert "other-adapters" not in [note.code for note in ckptool.inspect(folder).notes]
    for name in ("one", "two"):
        peft(folder / name, halves("up.q", 6, seed=1))
    reports = [
        ckptool.inspect(folder),
        ckptool.verify(folder),
        ckptool.lora_merge(base, folder, tmp_path / "out.pt"),
        ckptool.convert(folder, tmp_path / "one.safetensors"),
    ]
    for report in reports:
        (message,) = [note.message for note in report.notes if note.code == "other-adapters"]
        assert message == "2 folders in it have adapters that were not read: one, two"
    assert sum(message in remark for remark in ckptool.diff(folder, folder / "one").remarks) == 1


@pytest.mark.parametrize("layers", [0, 20])
def test_the_state_of_a_whole_model_of_peft_is_no_adapter(layers: int, tmp_path: Path) -> None:
    """`get_peft_model(model, config).state_dict()`: the wrapped layers with their factors, among the others."""
    state = {f"base_model.model.{key.replace('.weight', '.default.weight')}": half for key, half in halves("q").items()}
    state |= {f"base_model.model.{name}": torch.ones(6) for name in ("q.base_layer.bias", *map(str, range(layers)))}
    if not layers:  # with `bias: lora_only` that is an adapter
        (adapter,) = ckptool.inspect(state).roots
        assert adapter.is_adapter and adapter.detail.startswith("LoRA adapter, PEFT names")
    (whole,) = ckptool.inspect(state | {"base_model.model.q.base_layer.weight": torch.ones(5, 6)}).roots
    assert whole.detail == "model with LoRA adapter inside, PEFT names, rank 2, of 1 module (q)"
    assert not whole.is_adapter


def test_what_changed_is_extracted_and_merged_back(tmp_path: Path) -> None:
    base, tuned = weights(), weights()
    tuned["up.q.weight"] += torch.outer(torch.arange(6.0), torch.ones(6))
    tuned["conv.weight"] += torch.randn(5, 4, 3, 3)
    tuned["norm.weight"] += 1
    tuned["up.k.bias"] += 1
    files = stored(tuned, tmp_path / "tuned.safetensors"), stored(base, tmp_path / "base.pt")
    report = ckptool.lora_extract(*files, tmp_path / "a", rank=5)
    assert report.facts["ranks"] == {"up.q": 5, "conv": 5} and report.facts["unchanged"] == 2
    config = config_of(tmp_path / "a")
    assert config["modules_to_save"] == ["norm", "up.k"] and config["bias"] == "none" and config["lora_alpha"] == 5
    assert sorted(config["target_modules"]) == ["conv", "up.q"]
    ckptool.lora_merge(tmp_path / "base.pt", tmp_path / "a", tmp_path / "merged.safetensors")
    merged = load_file(tmp_path / "merged.safetensors")
    assert all((merged[key] - value).abs().max() <= 1e-5 for key, value in tuned.items())
    ckptool.lora_extract(*files, tmp_path / "small", rank=1, dtype="bf16")
    a = tensors_of(tmp_path / "small")["base_model.model.up.q.lora_A.weight"]
    assert a.dtype == torch.bfloat16 and a.shape == (1, 6)


def test_names_that_are_ends_of_others_are_told_apart(tmp_path: Path) -> None:
    """PEFT takes `q` for every module whose name ends with `.q`, and for those to save with any end of a name."""
    base = {"q.weight": torch.zeros(4, 3), "up.q.weight": torch.zeros(4, 3), "n.weight": torch.ones(3)}
    base |= {"upn.weight": torch.ones(3), "upn.bias": torch.ones(3)}
    tuned = base | {"q.weight": torch.ones(4, 3), "n.weight": torch.zeros(3)}
    files = stored(tuned, tmp_path / "t.safetensors"), stored(base, tmp_path / "b.safetensors")
    report = ckptool.lora_extract(*files, tmp_path / "a", rank=2)
    assert config_of(tmp_path / "a")["target_modules"] == "q"
    assert sorted(report.facts["whole"]) == ["n.weight", "upn.bias", "upn.weight"]


def test_tied_tensors_are_taken_once(tmp_path: Path) -> None:
    files = []
    for shared, q in (torch.ones(9, 4), torch.randn(4, 4)), (torch.zeros(9, 4), torch.zeros(4, 4)):
        state = {"wte.weight": shared, "lm_head.weight": shared, "q.weight": q}
        files.append(stored(state, tmp_path / f"{len(files)}.pt"))
    report = ckptool.lora_extract(*files, tmp_path / "a", rank=4)
    assert report.facts["tied"] == ["lm_head.weight"] and list(report.facts["ranks"]) == ["q"]
    # Both under their names, for PEFT.
    assert {f"base_model.model.{name}.weight" for name in ("wte", "lm_head")} < tensors_of(tmp_path / "a").keys()
    assert config_of(tmp_path / "a")["ensure_weight_tying"] is True
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    other = {**tensors_of(tmp_path / "a"), "base_model.model.lm_head.weight": torch.zeros(9, 4)}
    odd = stored(other, tmp_path / "odd.safetensors")
    for name, error in ("", Conflict), ("lm_head.weight", NoMatch):  # a file with both names, and one with one of them
        base = {key: value for key, value in load(files[1]).items() if key != name}
        base_file = stored(base, tmp_path / "base.pt")
        ckptool.lora_merge(base_file, tmp_path / "a", tmp_path / "m.pt", overwrite=True)
        found = load(tmp_path / "m.pt")
        assert torch.equal(found["wte.weight"], torch.ones(9, 4)) and found.keys() == base.keys()
        assert found["wte.weight"].data_ptr() == found["wte.weight" if name else "lm_head.weight"].data_ptr()
        with pytest.raises(error, match="lm_head"):
            ckptool.lora_merge(base_file, odd, tmp_path / "no.pt", config=CONFIG | {"r": 4})


Q = {"up.q.weight": torch.ones(6, 6)}
KINDS = {"up.a.weight": torch.ones(6, 8), "up.b.weight": torch.ones(6, 8)}
KINDS |= {"up.a.bias": torch.ones(6), "up.b.bias": torch.ones(8), "up.q.bias": torch.ones(6)}


@looped(
    ("change", "options", "kind", "message"),
    [
        ({"up.q.weight": torch.zeros(3, 3)}, {}, Conflict, r"up.q.weight is \[3, 3\] in .*, \[6, 6\] in"),
        ({"new.weight": torch.zeros(3, 3)}, {}, Conflict, r"1 only in .*tuned.* \(new.weight\)"),
        ({}, {}, NoMatch, "have the same values"),
        ({"up.q.weight": torch.full((6, 6), math.nan)}, {}, Conflict, "up.q.weight has infinities or NaN"),
        (Q, {"base": KINDS}, Unsupported, "up.q.weight is square, .* both kinds"),
        (Q, {"rank": 7}, UsageError, "rank 7 is higher than that of any matrix"),
        (Q, {"rank": 0}, UsageError, "rank 0 is not from 1"),
        (Q, {"rank": 10**9}, UsageError, "is not from 1"),
        (Q, {"only": "up.k.*"}, NoMatch, "have the same values"),
        (Q, {"only": "nothing"}, NoMatch, "matches no key"),
        ({"norm.weight": torch.zeros(6)}, {}, Unsupported, "is a layer's matrix"),
        ({"up.q.weight": torch.ones(6, 6, dtype=torch.int8)}, {}, Unsupported, "is quantized: up.q.weight"),
        (
            {"scale": torch.ones(3)},
            {"base": {"scale": torch.zeros(3)}},
            Unsupported,
            "scale changed, but a PEFT adapter",
        ),
    ],
)
def test_what_cannot_be_extracted_is_named(
    change: Any, options: dict[str, Any], kind: type[CkptoolError], message: str, tmp_path: Path
) -> None:
    base = weights() | options.pop("base", {})
    files = (stored(base | change, tmp_path / "tuned.safetensors"), stored(base, tmp_path / "base.safetensors"))
    refused(kind, tmp_path, lambda: ckptool.lora_extract(*files, tmp_path / "a", **{"rank": 2} | options), message)


@looped(("kind", "whole"), [("llama", []), ("deepseek_v3", ["mlp.down_proj"]), ("mamba", ["mixer.out_proj"])])
def test_what_peft_takes_for_another_kind_of_module_is_stored_whole(
    kind: str, whole: list[str], tmp_path: Path
) -> None:
    """PEFT 0.21 turns `down_proj` into fused experts, wherever it is, and refuses Mamba's `out_proj`."""
    base = {
        f"model.layers.0.{name}.weight": torch.randn(6, 6) for name in ("mlp.down_proj", "mixer.out_proj", "q_proj")
    }
    files = [
        model_folder(tmp_path / str(change), {key: value + change for key, value in base.items()}, model_type=kind)
        for change in (1, 0)
    ]
    ckptool.lora_extract(*files, tmp_path / "a", rank=2)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["modules_to_save"] or []) == [f"model.layers.0.{name}" for name in whole]


def test_a_rank_that_needs_gigabytes_is_refused(tmp_path: Path) -> None:
    """A file of a kilobyte may show a tensor of a terabyte."""
    wide = [torch.full((1, 1), value).expand(1 << 21, 1 << 21) for value in (0.0, 1.0)]
    files = [stored({"q.weight": each}, tmp_path / f"{number}.pt") for number, each in enumerate(wide)]
    says = r"q\.weight in rank 1,000 takes 4,194,304,000 elements"
    refused(LimitExceeded, tmp_path, lambda: ckptool.lora_extract(*files, tmp_path / "a", rank=1000), says)


def test_a_smaller_rank_is_the_nearest(tmp_path: Path) -> None:
    tensors = halves("a.q", rank=3) | halves("b.q", seed=1)
    config = {"rank_pattern": {"a.q": 3}, "lora_alpha": 6, "target_modules": ["q"], "task_type": "CAUSAL_LM"}
    adapter = peft(tmp_path / "a", tensors, **config)
    with pytest.raises(UsageError, match="rank 4 is higher than that of any module"):
        ckptool.lora_resize(adapter, tmp_path / "large", rank=4)
    report = ckptool.lora_resize(adapter, tmp_path / "two", rank=2)
    made, two = config_of(tmp_path / "two"), tensors_of(tmp_path / "two")
    assert (made["r"], made["rank_pattern"], made["task_type"]) == (2, {}, "CAUSAL_LM")
    assert (made["lora_alpha"], made["alpha_pattern"]) == (4, {r"^b\.q": 6})
    assert torch.equal(two["base_model.model.b.q.lora_A.weight"], tensors["b.q.lora_A.weight"])  # has no more
    assert list(report.facts["errors"]) == ["a.q"]
    report = ckptool.lora_resize(adapter, tmp_path / "small", rank=1)
    made, small = config_of(tmp_path / "small"), tensors_of(tmp_path / "small")
    for module, scale in (("a.q", 2.0), ("b.q", 3.0)):
        own = made["alpha_pattern"].get("^" + module.replace(".", r"\."), made["lora_alpha"])
        before, after = (
            factor * (of[f"{place}.lora_B.weight"] @ of[f"{place}.lora_A.weight"]).double()
            for factor, of, place in ((scale, tensors, module), (own, small, f"base_model.model.{module}"))
        )
        values = torch.linalg.svdvals(before)
        best = values[1:].norm().item()
        assert (before - after).norm().item() == pytest.approx(best, rel=1e-5)
        assert report.facts["errors"][module] == pytest.approx(best / values.norm().item(), rel=1e-5)


def test_names_alphas_and_metadata_stay(tmp_path: Path) -> None:
    kohya = {"lora_down.weight": torch.randn(4, 6, 3, 3), "lora_up.weight": torch.randn(5, 4, 1, 1)}
    kohya = {f"lora_te_fc.{key}": value for key, value in (kohya | {"alpha": torch.tensor(2.0).half()}).items()}
    ckptool.lora_resize(stored(kohya, tmp_path / "k.safetensors"), tmp_path / "out.safetensors", rank=2)
    made = load_file(tmp_path / "out.safetensors")
    assert made.keys() == kohya.keys() and made["lora_te_fc.lora_down.weight"].shape == (2, 6, 3, 3)
    assert made["lora_te_fc.alpha"].dtype == torch.float16 and made["lora_te_fc.alpha"].item() == 1
    fields = {"unet.r": 2, "unet.lora_alpha": 6, "unet.target_modules": ["q"], "unet.lora_dropout": 0.5}
    tensors = {f"unet.{key}": value for key, value in halves("q").items()}
    file = stored(tensors, tmp_path / "d.safetensors", lora_adapter_metadata=json.dumps(fields))
    ckptool.lora_resize(file, tmp_path / "d1.safetensors", rank=1)
    again = metadata_of(tmp_path / "d1.safetensors")
    assert (again["unet.r"], again["unet.lora_alpha"], again["unet.lora_dropout"]) == (1, 3, 0.5)


HADAMARD = {f"q.hada_w{n}_{side}": torch.ones(shape) for n in "12" for side, shape in (("a", (5, 2)), ("b", (2, 6)))}
KRONECKER = {"q.lokr_w1": torch.ones(2, 2), "q.lokr_w2": torch.ones(3, 3)}
DAMAGED = halves("q", rank=4) | {"q.lora_A.weight": torch.full((4, 6), math.nan)}


@looped(
    ("tensors", "config", "rank", "kind", "message"),
    [
        (HADAMARD, {"peft_type": "LOHA"}, 1, Unsupported, "q is LoHa"),
        (KRONECKER, {"peft_type": "LOKR"}, 1, Unsupported, "q is LoKr"),
        (halves("q"), {"target_parameters": ["q"]}, 1, Unsupported, "parameters of experts"),
        *((halves("q"), {}, rank, UsageError, "is not from 1 to 65,536") for rank in (0, -1, 1 << 17)),
        (DAMAGED, {"r": 4}, 2, Conflict, "q has infinities or NaN"),
    ],
)
def test_what_is_not_resized_nor_converted(
    tensors: Tensors, config: Any, rank: int, kind: type[CkptoolError], message: str, tmp_path: Path
) -> None:
    adapter = peft(tmp_path / "a", tensors, **config)
    refused(kind, tmp_path, lambda: ckptool.lora_resize(adapter, tmp_path / "out", rank=rank), message)
    if kind is Unsupported:
        convert = lambda: ckptool.lora_convert(adapter, tmp_path / "out.safetensors", to="kohya")  # noqa: E731
        refused(kind, tmp_path, convert, message)


UNET = "down_blocks_0_attentions_1_transformer_blocks_0_attn1_to_out_0"


def kohya(alphas: dict[str, float], prefix: str = "lora_unet_", dtype: torch.dtype = torch.bfloat16) -> Tensors:
    tensors: Tensors = {}
    for number, (module, alpha) in enumerate(alphas.items()):
        own = {"alpha": torch.tensor(alpha), "lora_down.weight": torch.randn(2, 6), "lora_up.weight": torch.randn(5, 2)}
        tensors |= {f"{prefix}{module}.{key}": (value + number).to(dtype) for key, value in own.items()}
    return tensors


def test_kohya_to_peft_and_back_is_the_same(tmp_path: Path) -> None:
    before = kohya({UNET: 1.0, "mid_block_resnets_0_time_emb_proj": 4.0, "conv_in": 0.3})
    ckptool.lora_convert(stored(before, tmp_path / "k.safetensors"), tmp_path / "p", to="peft")
    names = "conv_in down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_out.0 mid_block.resnets.0.time_emb_proj"
    assert sorted(config_of(tmp_path / "p")["target_modules"]) == names.split()
    ckptool.lora_convert(tmp_path / "p", tmp_path / "again.safetensors", to="kohya")
    after = load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in before.items())


def test_underscores_of_other_models_need_the_base(tmp_path: Path) -> None:
    file = stored(kohya({"layers_0_q_a": 2.0}, "lora_te_"), tmp_path / "k.safetensors")
    first, second, other = (
        stored({f"{name}.weight": torch.ones(5, 6)}, tmp_path / f"{name}.safetensors")
        for name in ("layers.0.q_a", "layers.0.q.a", "b")
    )
    both = r"layers_0_q_a\.weight is layers\.0\.q\.a\.weight, layers\.0\.q_a\.weight"
    for base, kind, message in (
        ([], NoMatch, "1 module of 1 cannot be resolved: layers_0_q_a"),
        (other, NoMatch, "No base has them"),
        ([first, second], Conflict, both),
    ):
        refused(kind, tmp_path, partial(ckptool.lora_convert, file, tmp_path / "p", to="peft", base=base), message)
    ckptool.lora_convert(file, tmp_path / "p", to="peft", base=[first, other])
    assert config_of(tmp_path / "p")["target_modules"] == ["layers.0.q_a"]


def test_scales_of_diffusers_stand_in_the_metadata(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "a", halves("q") | halves("k", rank=4), rank_pattern={"k": 4}, lora_alpha=4)
    report = ckptool.lora_convert(adapter, tmp_path / "d.safetensors", to="diffusers")
    assert report.facts == {"from": "PEFT", "to": "diffusers", "modules": 2, "tensors": 4} and not report.notes
    fields = metadata_of(tmp_path / "d.safetensors")
    found = fields["unet.lora_alpha"], fields["unet.r"], fields["unet.rank_pattern"]
    assert found in ((4, 4, {"^q": 2}), (4, 2, {"^k": 4}))
    with pytest.raises(Unsupported, match="cannot hold the scales"):
        ckptool.lora_convert(adapter, tmp_path / "d.pt", to="diffusers")


EMBEDDING = {"e.lora_embedding_A": torch.ones(2, 5), "e.lora_embedding_B": torch.ones(4, 2)}


@looped(
    ("tensors", "config", "to", "kind", "message"),
    [
        ({"q.lora_magnitude_vector": torch.ones(5)}, {"use_dora": True}, "kohya", Unsupported, "q has DoRA"),
        ({"q.lora_B.bias": torch.ones(5)}, {"lora_bias": True}, "kohya", Unsupported, "q has biases"),
        ({"head.weight": torch.ones(5)}, {}, "kohya", Unsupported, r"whole tensors \(modules_to_save\): .*head.weight"),
        (EMBEDDING, {}, "diffusers", Unsupported, "e has embeddings"),
        (halves("mha.base_layer.out_proj"), {}, "kohya", Unsupported, "mha.out_proj has a module in another"),
        ({}, {}, "comfy", UsageError, "given 'comfy' as to"),
        (halves("a.b") | halves("a_b"), {}, "kohya", Conflict, "two tensors would be called lora_unet_a_b"),
    ],
)
def test_what_a_scheme_cannot_hold_is_refused(
    tensors: Tensors, config: Any, to: str, kind: type[CkptoolError], message: str, tmp_path: Path
) -> None:
    adapter = peft(tmp_path / "a", halves("q") | tensors, **config)
    refused(kind, tmp_path, lambda: ckptool.lora_convert(adapter, tmp_path / "out.safetensors", to=to), message)


def test_a_magnitude_of_diffusers_is_that_of_peft(tmp_path: Path) -> None:
    tensors = halves("q", 6) | {"q.lora_magnitude_vector": torch.rand(6)}
    adapter = peft(tmp_path / "a", tensors, use_dora=True)
    ckptool.lora_convert(adapter, tmp_path / "d.safetensors", to="diffusers")
    base = {"q.weight": torch.randn(6, 6, dtype=torch.float64)}
    both = [ckptool.lora_merge(base, each)["q.weight"] for each in (adapter, tmp_path / "d.safetensors")]
    assert torch.equal(*both)


@looped("lead", ["model.", "module._orig_mod.", "policy.net."])
def test_an_adapter_of_a_model_inside_another_is_that_models(lead: str, tmp_path: Path) -> None:
    """As Lightning, DDP and others save it: patterns are for names inside, and PEFT takes no others."""
    factors = halves("up", 8) | halves("q", 8)
    plain = peft(tmp_path / "plain", factors, alpha_pattern={"^up": 9})
    inner = stored({f"{lead}base_model.model.{key}": value for key, value in factors.items()}, tmp_path / "inner.pt")
    base = stored({f"{name}.weight": torch.ones(8, 6) for name in ("up", "q")}, tmp_path / "base.pt")
    for number, (adapter, options) in enumerate(((plain, {}), (inner, {"config": plain / "adapter_config.json"}))):
        ckptool.lora_merge(base, adapter, tmp_path / f"{number}.pt", **options)
        ckptool.lora_resize(adapter, tmp_path / f"resized{number}", rank=1, **options)
        ckptool.lora_convert(adapter, tmp_path / f"{number}.safetensors", to="kohya", **options)
    for names in (("0.pt", "1.pt"), ("resized0", "resized1"), ("0.safetensors", "1.safetensors")):
        assert ckptool.diff(*(tmp_path / name for name in names)).same, names
    inside = stored({f"a.net.{name}.weight": torch.ones(8, 6) for name in ("up", "q")}, tmp_path / "inside.pt")
    for adapter, start in ((plain, "base_model.model."), (tmp_path / "0.safetensors", "lora_unet_")):
        words = f"the adapter's names begin with '{start}', the base's with 'a.net.'"
        assert words in str(ckptool.lora_merge(inside, adapter, tmp_path / "m.pt", overwrite=True))
    both = {f"{side}.base_model.model.{key}": value for side in ("actor", "critic") for key, value in factors.items()}
    with pytest.raises(Unsupported, match=r"is for actor\.base_model\.model\., critic"):
        ckptool.lora_merge(base, stored(both, tmp_path / "both.pt"), tmp_path / "no.pt", config=CONFIG)


def test_rs_lora_keeps_its_scale(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "a", halves("q", rank=4), r=4, lora_alpha=3, use_rslora=True)
    ckptool.lora_convert(adapter, tmp_path / "k.safetensors", to="kohya")
    assert load_file(tmp_path / "k.safetensors")["lora_unet_q.alpha"].item() == 6  # 3 / √4 · 4


@looped(("module", "prefix"), [("text_model.q", "lora_te_"), ("transformer_blocks.0.q", "lora_transformer_")])
def test_names_of_diffusers_models_say_which_it_is_for(module: str, prefix: str, tmp_path: Path) -> None:
    report = ckptool.lora_convert(peft(tmp_path / "a", halves(module)), tmp_path / "k.safetensors", to="kohya")
    assert all(key.startswith(prefix) for key in load_file(tmp_path / "k.safetensors"))
    assert f"assumed {prefix}" in str(report)


@pytest.mark.parametrize(
    ("keys", "is_adapter"),
    [
        (["base_model.model.layers.0.self_attn.k_proj.ia3_l", "base_model.model.layers.0.mlp.down_proj.ia3_l"], True),
        (["base_model.model.layers.0.self_attn.q_proj.oft_R.weight"], True),
        (["prompt_embeddings"], True),
        (["prefix_task_cols", "prefix_task_rows", "prompt_embeddings"], True),
        (["base_model.vera_A", "base_model.model.q_proj.vera_lambda_b"], True),
        (["base_model.unilora_theta_d"], True),
        (["base_model.frod_V.q_proj", "base_model.model.q_proj.frod_lambda_l"], True),
        (["base_model.model.q_proj.base_layer.weight", "base_model.model.q_proj.ia3_l.default"], False),  # whole model
        (["base_model.encoder.weight", "base_model.model.weight"], False),
        (["prompt_embeddings", "encoder.weight"], False),
        (["model.layers.0.self_attn.k_proj.weight"], False),
    ],
)
def test_peft_adapters_without_low_rank_factors_are_not_called_model_weights(
    keys: list[str], is_adapter: bool, tmp_path: Path
) -> None:
    save_file({key: torch.ones(2, 2) for key in keys}, tmp_path / "adapter_model.safetensors")
    said = str(ckptool.inspect(tmp_path / "adapter_model.safetensors"))
    assert ("PEFT adapter (not LoRA, LoHa or LoKr)" in said, "model weights" in said) == (is_adapter, not is_adapter)


def test_an_adapter_is_told_from_another_model_and_what_adds_it_is_printed(tmp_path: Path) -> None:
    base = stored(weights(), tmp_path / "base.pt")
    adapter = peft(tmp_path / "a", halves("up.q", 6))
    (finding, note) = ckptool.doctor(adapter, against=base).findings
    assert finding.code == note.code == "adapter" and finding.blocks and not note.blocks
    command = finding.advice.partition(": ")[2]
    refusals = ckptool.warm_start(adapter, base).refused
    assert [each.fix for each in refusals] == [f"Add it to its model: {command.rpartition(' -o ')[0]} -o OUT"]
    assert command.startswith(f"ckptool lora merge {base} {adapter} -o ")
    ckptool.lora_merge(base, adapter, out := tmp_path / "merged.pt")
    assert not ckptool.doctor(out, against=base).findings
    ckptool.spec(base, spec := tmp_path / "base.json")
    assert f"lora merge BASE {adapter}" in ckptool.doctor(adapter, against=spec).findings[0].advice, "it has no values"
