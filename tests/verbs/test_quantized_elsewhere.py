"""Verbs that change values, and quantized weights: all parts stay together as they are, or the verb refuses by name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import Unsupported
from fixtures.surgery.make_quantized import Case
from tests.support.looped import looped
from tests.support.quantized_cases import awq, gptq, vectors, write_case

FLOAT8 = Case(
    "fp8 with a scale",
    {"a.weight": torch.randn(4, 6).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)},
    {"quant_method": "fp8"},
    {},
)
CASES = [*vectors(), gptq(4), awq(), FLOAT8]


PLAIN = {"norm.weight": torch.randn(6, 4), "logit_scale": torch.ones(())}


@pytest.fixture(params=CASES, ids=[f"{n} {case.name}" for n, case in enumerate(CASES)])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model with quantized weights, with a plain tensor, and one whose name ends as that of a scale."""
    case = request.param
    return write_case(tmp_path / "in", case._replace(tensors=case.tensors | PLAIN))


def test_operations_refuse_codes_and_scales(file: Path, tmp_path: Path) -> None:
    before, out = load_file(file), tmp_path / "out.safetensors"
    for key in (key for key in before if key not in PLAIN and not key.endswith("bias")):
        with pytest.raises(Unsupported, match="is quantized"):
            ckptool.translate(file, f"{key} => b : unsqueeze 0", out, rest="keep", dry_run=True)
    ckptool.translate(file, "norm.weight => n : transpose", out, rest="keep")
    after = load_file(out)
    assert torch.equal(after.pop("n"), before.pop("norm.weight").T) and after.keys() == before.keys()
    assert all(after[key].numpy(force=True).tobytes() == raw for key, raw in _raw(before, after))


def _raw(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[tuple[str, bytes]]:
    for tensors in (before, after):
        for key in tensors:
            tensors[key] = tensors[key].contiguous().reshape(-1).view(torch.uint8)
    return [(key, value.numpy().tobytes()) for key, value in before.items()]


def test_a_plain_model_takes_no_codes(file: Path, tmp_path: Path) -> None:
    names = {"a.weight", "a.bias", *PLAIN}
    plain = {key: torch.zeros(value.shape) for key, value in load_file(file).items() if key in names}
    save_file(plain, tmp_path / "plain.safetensors")
    model = torch.nn.ParameterDict({key.replace(".", "_"): value for key, value in plain.items()})
    options = [
        {},
        {"on_mismatch": "skip"},
        {"exclude": "*scale"},
        {"rename": "norm.weight => norm.weight : unsqueeze 0"},
    ]
    for more in options:
        with pytest.raises(Unsupported, match="is quantized"):
            ckptool.warm_start(file, tmp_path / "plain.safetensors", tmp_path / "o.safetensors", **more)  # type: ignore[arg-type]
    rules = [f"{key} => {key.replace('.', '_')}" for key in plain if "." in key]
    with pytest.raises(Unsupported, match="is quantized"):
        ckptool.load_into(model, file, rename=rules)
    assert not any(value.any() for value in model.values()) and not (tmp_path / "o.safetensors").exists()
    assert ckptool.warm_start(file, file).accepted
    assert ckptool.warm_start(file, tmp_path / "plain.safetensors", only=["norm.weight", "logit_scale"]).accepted


@looped("seed", range(40))
def test_codes_that_lost_their_scale_are_no_weights(seed: int, tmp_path: Path) -> None:
    """Whatever parts are renamed, and whatever beside: nothing casts or averages what is left."""
    rng = random.Random(seed)
    case = rng.choice(CASES)
    file = write_case(tmp_path, case)
    keys = [key for key in case.tensors if not key.endswith("bias")]
    moved = rng.sample(keys, rng.randint(1, max(1, len(keys) - 1)))
    rules = [f"{key} => {rng.choice(['b', 'a.b', 'model.c'])}.{key}" for key in moved]
    ckptool.rename(file, rules, tmp_path / "moved.safetensors")
    is_float8 = any("float8" in str(value.dtype) for value in case.tensors.values())
    if is_float8 and rng.random() < 0.5:
        (tmp_path / "config.json").unlink()
    for call in (
        lambda out: ckptool.cast(tmp_path / "moved.safetensors", out, dtype="bf16"),
        lambda out: ckptool.average([tmp_path / "moved.safetensors"] * 2, out),
    ):
        with pytest.raises(Unsupported, match="is quantized") as caught:
            call(tmp_path / "out.safetensors")
        assert not caught.value.fix or "--dequantize" in caught.value.fix
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_the_same_model_takes_all_parts_whatever_they_are(tmp_path: Path) -> None:
    """Ties, other values and codes of no known format: what is there twice goes over whole, or not at all."""
    codes, scale = torch.randn(4, 6).to(torch.float8_e4m3fn), torch.ones(1)
    tied = {f"{name}.{end}": part for name in "ab" for end, part in (("weight", codes), ("weight_scale", scale))}
    unknown = {"c.weight": codes.clone(), "c.qscale_weight": scale.clone()}
    packed = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    for number, state in enumerate((tied, tied | unknown, tied | unknown | {"d": packed, "d._extra_state": "text"})):
        torch.save(state, tmp_path / f"{number}.pt")
        file, out = tmp_path / f"{number}.pt", tmp_path / f"out{number}.pt"
        assert ckptool.warm_start(file, file, out).accepted and ckptool.diff(file, out).same
        apart = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
        del apart["b.weight_scale"]
        torch.save(apart, tmp_path / "apart.pt")
        with pytest.raises(Unsupported, match="is quantized"):
            ckptool.warm_start(file, tmp_path / "apart.pt")
