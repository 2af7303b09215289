"""`cast --dequantize`: the bits of the libraries, and nothing but those or an error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.analysis.quantization import quantized_in
from ckptool.checkpoint.dtypes import by_name
from ckptool.errors import Ambiguous, CkptoolError, Unsupported, UsageError
from ckptool.transforms.dequantize import weight_of
from fixtures.surgery.make_quantized import Case
from tests.support.errors import three_parts
from tests.support.looped import looped
from tests.support.memory import LIMIT, peak_of
from tests.support.quantized_cases import assert_same_bits, awq, gptq, vectors, write_case

BY_HAND = [
    *(gptq(bits, reorder=reorder) for bits in (2, 3, 4, 8) for reorder in (False, True)),
    *(gptq(bits, version=2) for bits in (3, 4)),
    gptq(4, symmetric=True, field="gptq_v2"),  # the field lies, the zero points do not
    gptq(4, symmetric=True, version=2, field="gptq"),
    gptq(3, symmetric=True),
    awq(),
    awq(128, 64, 64),
]
CASES = [*vectors(), *BY_HAND]


def dequantized(case: Case, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    out = folder / "out.safetensors"
    ckptool.cast(write_case(folder / "in", case), out, dtype="bf16", dequantize=True, overwrite=True, **options)
    return load_file(out)


@looped("case", CASES, ids=[f"{n} {case.name}" for n, case in enumerate(CASES)])
def test_the_bits_of_the_libraries(case: Case, tmp_path: Path) -> None:
    assert_same_bits(dequantized(case, tmp_path, verify=True), case.expected)


def test_any_order_of_blocks(tmp_path: Path) -> None:
    for case in CASES:
        checkpoint = ckptool.open(write_case(tmp_path, case))
        for weight in quantized_in(checkpoint, checkpoint.tree).weights:
            entry = weight_of(weight, by_name("bf16"))
            whole = entry.bytes()
            assert whole == bytes(case.expected[weight.name].contiguous().reshape(-1).view(torch.uint8).numpy())
            for start in (len(whole) // 2 | 1, 3, 0):
                assert entry.row_major().read(start, 401) == whole[start : start + 401]


def test_every_set_of_weights_and_its_ties(tmp_path: Path) -> None:
    codes, scale = torch.randn(4, 4).to(torch.float8_e4m3fn), torch.tensor([3.0])
    model = {"a.weight": codes, "a.weight_scale": scale, "b.weight": codes, "b.weight_scale": scale}
    saved = {"model": model, "ema": {"a.weight": codes.clone(), "a.weight_scale": scale.clone()}, "step": 3}
    torch.save(saved, tmp_path / "in.pt")
    ckptool.cast(tmp_path / "in.pt", tmp_path / "out.pt", dtype="bf16", dequantize=True)
    found, weight = torch.load(tmp_path / "out.pt"), (codes.float() * 3).bfloat16()
    assert found["step"] == 3 and found["model"].keys() == {"a.weight", "b.weight"}
    assert all(torch.equal(value, weight) for key in ("model", "ema") for value in found[key].values())
    assert found["model"]["a.weight"].data_ptr() == found["model"]["b.weight"].data_ptr()


def torchao(folder: Path, kind: str, **parts: torch.Tensor) -> Path:
    """A file of torchao's with one weight in blocks of 1 × 4, whose parts are those."""
    fields = {"_type": kind, "_data": {"block_size": [1, 4]}, "_tensor_data_names": list(parts)}
    metadata = {
        "tensor_names": '["a.weight", "a.bias"]',
        "a.weight": json.dumps(fields),
        "a.bias": '{"_type": "Tensor"}',
    }
    tensors = {f"a._weight_{name}": value for name, value in parts.items()} | {"a.bias": torch.ones(6).bfloat16()}
    save_file(tensors, folder / "in.safetensors", metadata={**metadata, "format": "pt"})
    return folder / "in.safetensors"


def test_torchao_by_the_type_in_the_metadata(tmp_path: Path) -> None:
    codes, scale, zeros = torch.randint(-8, 8, (6, 8)).char(), torch.rand(6, 2), torch.randint(-8, 8, (6, 2)).char()
    wide, points = (each.float().repeat_interleave(4, 1) for each in (scale, zeros))
    floats, out = codes.to(torch.float8_e4m3fn), tmp_path / "out.safetensors"

    def weight(kind: str, **parts: torch.Tensor) -> torch.Tensor:
        ckptool.cast(torchao(tmp_path, kind, **parts), out, dtype="f32", dequantize=True, overwrite=True)
        assert not {"tensor_names", "a.weight"} & ckptool.open(out).metadata.keys()
        return load_file(out)["a.weight"]

    assert torch.equal(weight("Float8Tensor", qdata=floats, scale=scale), floats.float() * wide)
    assert torch.equal(weight("Int8Tensor", qdata=codes, scale=scale), codes * wide)
    found = weight("IntxUnpackedToInt8Tensor", qdata=codes, scale=scale, zero_point=zeros)
    assert torch.equal(found, (codes - points) * wide)
    with pytest.raises(Unsupported, match="torchao's Int4Tensor"):
        weight("Int4Tensor", qdata=codes, scale=scale)
    with pytest.raises(Unsupported, match="torchao's Float8Tensor"):
        weight("Float8Tensor", qdata=floats, scale=scale, act_pre_scale=scale.clone())


def test_views_that_repeat_are_not_written_out(tmp_path: Path) -> None:
    weight = torch.ones(1, 1).to(torch.float8_e4m3fn).expand(1 << 20, 1 << 20)
    torch.save({"a.weight": weight, "a.weight_scale": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match="repeat"):
        ckptool.cast(tmp_path / "in.pt", tmp_path / "out.pt", dtype="bf16", dequantize=True)


def test_blocks_that_shapes_leave_open(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "fp8 130")
    open_case = case._replace(config={})
    with pytest.raises(Unsupported, match="blocks of 65 to 129"):
        dequantized(open_case, tmp_path)
    assert_same_bits(dequantized(open_case, tmp_path, block_size="128x128"), case.expected)
    with pytest.raises(Unsupported, match="not in blocks"):
        dequantized(open_case, tmp_path, block_size="64x128")
    for wrong in ("128", "0x4", "axb"):
        with pytest.raises(UsageError, match="not rows and columns"):
            dequantized(open_case, tmp_path, block_size=wrong)
    with pytest.raises(UsageError, match="of quantized weights"):
        ckptool.cast(tmp_path / "in/model.safetensors", tmp_path / "o.pt", dtype="bf16", block_size="128x128")
    # Enough blocks are of one size alone.
    codes, scale = torch.randn(131, 40).to(torch.float8_e4m3fn), torch.rand(33, 1)
    wide = (codes.float() * scale.repeat_interleave(4, 0)[:131]).bfloat16()
    case = Case("", {"a.weight": codes, "a.weight_scale_inv": scale}, {}, {"a.weight": wide})
    assert_same_bits(dequantized(case, tmp_path), case.expected)


def test_versions_of_gptq_that_contradict(tmp_path: Path) -> None:
    case = gptq(4)
    with pytest.raises(Ambiguous, match="does not settle"):
        dequantized(case._replace(config={**case.config, "sym": True}), tmp_path)
    with pytest.raises(Ambiguous, match="does not settle"):
        dequantized(case._replace(config={}), tmp_path)
    full = {**case.tensors, "a.qzeros": torch.full_like(case.tensors["a.qzeros"], -1)}
    with pytest.raises(Ambiguous, match="15 to 15"):
        dequantized(case._replace(tensors=full), tmp_path)
    far = {**gptq(4, reorder=True).tensors}
    far["a.g_idx"] = far["a.g_idx"] + 1
    with pytest.raises(CkptoolError, match="reaches 4 of 4"):
        dequantized(case._replace(tensors=far), tmp_path)


def ct(weights: Any = None, **fields: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors, with one group of these weights."""
    groups = {"config_groups": {"a": {"weights": weights}}} if weights else {}
    return {"quant_method": "compressed-tensors", **groups, **fields}


@looped(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, "'hqq' is not known"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin' of gptq"),
        ({"quant_method": "awq"}, "is not quantized as awq does it"),
        *(({"quant_method": "fp8", key: of}, f"'{key}") for key, of in (("hadamard", True), ("fmt", "e3m4"))),
        ({"quant_method": "fp8", "scale_fmt": "log2"}, "'scale_fmt=log2'"),
        (ct(format="marlin-24"), "'marlin-24' of compressed-tensors"),
        (ct(transform_config={"config_groups": {"u": {}}}), "'transform_config'"),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), "'sparsity_config'"),
        (ct(config_groups={"a": {"rotation": "hadamard"}}), "'rotation'"),
        (ct({"centroids": 4}), "'centroids'"),
        *(
            (ct({key: of}), f"'{key}={of}'")
            for key, of in (("type", "posit"), ("strategy", "x"), ("actorder", "random"))
        ),
        *((ct({"type": "float"}, format=form), "'type=float'") for form in ("pack-quantized", "int-quantized")),
        (ct({"type": "int"}, format="float-quantized"), "'type=int'"),
    ],
)
def test_methods_that_are_not_known(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)}
    with pytest.raises(Unsupported, match=words):
        dequantized(Case("", tensors, config, {}), tmp_path)
    with pytest.raises(Unsupported, match=words):
        ckptool.cast(write_case(tmp_path, Case("", tensors, config, {})), tmp_path / "out.safetensors", dtype="f32")


def test_scales_of_activations_are_left_out_by_name(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.tensor([2.0]),
        "a.input_scale": torch.ones(1),
        "a.k_scale": torch.ones(()),
        "head.logit_scale": torch.ones(()),
        "head.q_scale": torch.ones(()),  # learned: no quantized weight is near it
        "q_scale": torch.ones(4, 1, 8),
    }
    found = dequantized(Case("", tensors, {}, {}), tmp_path)
    assert found.keys() == {"a.weight", "head.logit_scale", "head.q_scale", "q_scale"}
    assert (found["a.weight"] == 2).all()
    done = ckptool.cast(
        tmp_path / "in/model.safetensors", tmp_path / "o.pt", dtype="bf16", dequantize=True, dry_run=True
    )
    assert "left out, of activations: a.input_scale, a.k_scale" in done.details


def test_memory_does_not_grow_with_the_weight(tmp_path: Path) -> None:
    columns, rows = 8192, 6144  # 100 MB of bf16, packed along the other dimension
    shapes = {"a.qweight": (columns // 8, rows), "a.qzeros": (64, rows // 8), "a.scales": (64, rows)}
    tensors = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    tensors["a.scales"] = tensors["a.scales"].half()
    write_case(tmp_path, Case("", tensors, gptq(4).config | {"group_size": 128}, {}))
    del tensors
    program = "ckptool.cast('model.safetensors', 'out.safetensors', dtype='bf16', dequantize=True)"
    assert peak_of(program, tmp_path) <= LIMIT


# Bad input -----------------------------------------------------------------------------------------------------------


def broken(case: Case, rng: random.Random) -> Case:
    """The case with one thing wrong: a part missing, renamed, of another shape or type; a configuration that lies."""
    tensors, config = dict(case.tensors), json.loads(json.dumps(case.config))
    key = rng.choice([key for key in tensors if not key.endswith("bias")])
    value = tensors[key]
    kind = rng.choice(["missing", "renamed", "shape", "type", "config", "extra"])
    if kind == "missing":
        del tensors[key]
    elif kind == "renamed":
        tensors[rng.choice([f"{key}2", f"b{key}", key[:-1], key.upper()])] = tensors.pop(key)
    elif kind == "shape":
        # Fewer columns of codes with a scale for each row are a smaller weight, and nothing would tell.
        axis = 0 if key == "a.weight" or not value.dim() else rng.randrange(value.dim())
        cut = value.narrow(axis, 0, value.shape[axis] // 2) if value.dim() else value.reshape(1, 1)
        tensors[key] = rng.choice([cut, torch.cat([value, value], axis) if value.dim() else cut, value[None]]).clone()
    elif kind == "type":
        tensors[key] = value.view(torch.uint8) if value.dim() else value.float()
    elif kind == "config":
        field = rng.choice([key for key in config if key != "sym"] or ["quant_method"])
        config[field] = rng.choice([None, "nonsense", 5, [1, 2, 3], {"x": []}, [7, 11]])
    else:
        extra = rng.choice(["a.weight_scale", "a.weight_scale_inv", "a.qzeros", "b.scales", "c.weight_packed", "d.SCB"])
        tensors.setdefault(extra, torch.randint(0, 9, (4, 4), dtype=torch.int32))
    return Case(kind, tensors, config, case.expected)


@pytest.mark.parametrize("seed", range(8))
def test_bad_input_gives_an_error_or_the_right_values(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    refused = 0
    for _ in range(60):
        case = rng.choice(CASES)
        bad = broken(case, rng)
        out = tmp_path / "out.safetensors"
        file = write_case(tmp_path, bad)
        try:
            ckptool.cast(file, out, dtype="bf16", dequantize=True)
        except CkptoolError as error:
            three_parts(error)
            refused += 1
            assert not out.exists()
            continue
        found = load_file(out)
        for name, value in case.expected.items():
            assert name not in found or torch.equal(found[name], value), (bad.name, case.name, name)
        assert found.keys() >= case.expected.keys() or bad.name in ("missing", "renamed"), (bad.name, case.name)
        out.unlink()
    assert refused > 20
