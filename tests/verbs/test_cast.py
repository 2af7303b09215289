"""`cast`: model weights in another floating type, and what it says about the values that it changed; `--dequantize`:
the bits of the libraries, and nothing but those or an error.

The bits of each cast are tested in `tests/transforms/test_casting.py`.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.analysis.outline import memory_needs
from ckptool.analysis.quantization import quantized_in
from ckptool.checkpoint.dtypes import by_name
from ckptool.errors import Ambiguous, CkptoolError, Conflict, NoMatch, Unsupported, UsageError
from ckptool.transforms.dequantize import weight_of
from fixtures.make import make
from fixtures.surgery.make_quantized import Case
from fixtures.traps import TRAPS
from tests.support.errors import refused, three_parts
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.quantized_cases import assert_same_bits, awq, gptq, vectors, write_case
from tests.support.same import assert_same_tree
from tests.support.small_models import bits


def test_views_keep_their_strides(tmp_path: Path) -> None:
    values = torch.cat([torch.randn(200) * 10.0 ** torch.randint(-6, 6, (200,)), torch.tensor([0.0, -0.0, torch.inf])])
    for source in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        state = {"w": values.to(source), "t": values[:200].reshape(10, 20).to(source).t()}
        ckptool.cast(saved(state, tmp_path / "in.pt"), tmp_path / "out.pt", dtype="f16", overwrite=True)
        for key, found in load(tmp_path / "out.pt").items():
            assert found.stride() == state[key].stride() and torch.equal(found, state[key].half()), source


W = torch.ones(3)
CODES, FLOAT8 = torch.zeros(8, dtype=torch.uint16), torch.zeros(8, dtype=torch.float8_e4m3fn)
MOMENTS = {"state": {0: {"exp_avg": W, "exp_avg_sq": W}}, "param_groups": []}


@looped(
    ("value", "options", "error", "says"),
    [
        ({"a.w": W, "b.w": W}, {"exclude": "b.w"}, Conflict, r"a\.w shares its storage with b\.w, which is not cast"),
        ({"a.w": W, "b.w": W}, {"exclude": "re:b"}, Conflict, r"a\.w shares its storage with b\.w, which is not cast"),
        ({"m": {"a.w": W}, "optimizer": MOMENTS}, {}, Conflict, "optimizer/state/0/exp_avg, which is not cast"),
        ({"a.w": CODES, "b.w": CODES.view(torch.float8_e5m2)}, {}, Conflict, "shares its storage with a.w, which is"),
        ({"a.w": FLOAT8, "b.w": FLOAT8.view(torch.float8_e5m2)}, {}, Conflict, "viewed as two dtypes"),
        ({"a.w": W}, {"only": "c.*"}, NoMatch, r"'c\.\*' matches no key"),
        ({"a.w": W}, {"exclude": "c.*"}, NoMatch, r"'c\.\*' matches no key"),
    ],
)
def test_what_would_change_something_else_or_nothing_is_refused(
    value: Any, options: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    file = saved(value, tmp_path / "in.pt")
    found = refused(error, tmp_path, lambda: ckptool.cast(file, tmp_path / "out.pt", dtype="f16", **options), says)
    assert "--exclude" in found.fix or "which is not cast" not in str(found)


def test_the_state_of_an_optimizer_keeps_its_types(tmp_path: Path) -> None:
    moments = {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"params": [0]}]}
    file = saved({"model": {"a.w": W}, "optimizer": moments}, tmp_path / "in.pt")
    done = ckptool.cast(file, tmp_path / "out.pt", dtype="bf16")
    assert "the optimizer's state keeps its dtypes" in str(done)
    assert load(tmp_path / "out.pt")["optimizer"]["state"][0]["exp_avg"].dtype is torch.float32
    assert "own types" not in str(ckptool.cast(f"{file}#model", tmp_path / "m.pt", dtype="bf16"))
    state = saved(moments, tmp_path / "o.pt")
    fix = refused(UsageError, tmp_path, lambda: ckptool.convert(state, tmp_path / "o.safetensors"), "optimizer").fix
    assert "--all" in fix
    assert "1 tensor;" in str(ckptool.convert(state, tmp_path / "o.safetensors", all=True))


UNTOUCHED = (
    "int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex32 complex64 complex128 bits8 float4_e2m1fn_x2"
).split()
COMPOSITES = ["09-qint8-per-tensor", "11-sparse-coo", "11-nested", "11-subclass", "11-parameter-with-attributes"]


@looped("name", [*(f"09-{name}" for name in UNTOUCHED), *COMPOSITES])
def test_what_is_no_plain_float_is_not_cast(name: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    done = ckptool.cast(file, tmp_path / "out.pt", dtype="bf16", keep_unknown=True, overwrite=True)
    assert done.facts["tensors"] == 0
    assert [fact["path"] for fact in done.facts["skipped"]] == (["w"] if name in COMPOSITES else [])
    assert_same_tree(ckptool.open(file), ckptool.open(tmp_path / "out.pt"))


def test_what_has_the_type_already_is_left_alone(tmp_path: Path) -> None:
    file = make("bf16.safetensors", tmp_path)
    done = ckptool.cast(file, tmp_path / "out.safetensors", dtype="bf16")
    assert done.how == "copy" and done.summary.startswith("already clean")
    assert (tmp_path / "out.safetensors").read_bytes() == file.read_bytes()
    done = ckptool.cast({"a.w": torch.ones(2).half(), "b.w": torch.ones(2)}, dtype="f16", dry_run=True)
    assert done.facts["tensors"] == 1 and done.facts["bytes_before"] == 8


def test_what_was_lost(tmp_path: Path) -> None:
    state = {"a.w": torch.tensor([1.0, 1.001, 70000.0, float("inf")]), "b.w": torch.tensor([1e-9, 2.0])}
    state |= {"c.w": torch.tensor([0.5]), "tied": state["a.w"]}
    done = ckptool.cast(saved(state, tmp_path / "in.pt"), tmp_path / "out.pt", dtype="f16")
    facts = {fact["storage_of"]: fact for fact in done.facts["lossy"]}
    assert list(facts) == ["a.w", "b.w"] and facts["a.w"]["overflowed"] == 1 and facts["b.w"]["underflowed"] == 1
    assert (facts["a.w"]["elements"], facts["a.w"]["changed"]) == (4, 2)
    assert (done.facts["tensors"], done.facts["bytes_before"], done.facts["bytes_after"]) == (4, 28, 14)
    assert done.details[0].startswith("values rounded in 2 of 3 storages")
    assert "1 value became infinite or NaN" in done.details and "1 value became zero" in done.details
    exact = ckptool.cast(saved({"c.w": state["c.w"]}, tmp_path / "c.pt"), tmp_path / "exact.pt", dtype="f16")
    assert exact.details == ("no value was changed",) and exact.facts["lossy"] == []
    dry = ckptool.cast(tmp_path / "in.pt", tmp_path / "dry.pt", dtype="f16", dry_run=True)
    assert dry.details == ()


# `--dequantize`.
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


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_folder_names_the_quantization_that_its_weights_have(dequantize: bool, tmp_path: Path) -> None:
    folder, out = write_case(tmp_path / "in", gptq(4)).parent, f"{tmp_path / 'out'}/"
    config = json.loads((folder / "config.json").read_text())
    if dequantize:
        ckptool.cast(folder, out, dtype="f16", dequantize=True)
        del config["quantization_config"]
    else:
        assert not ckptool.convert(folder, out).notes
    assert json.loads((tmp_path / "out/config.json").read_text()) == config
    for name in ("one.pt", "one.safetensors"):  # from which only the weights themselves can be understood
        done = ckptool.convert(Path(out), tmp_path / name)
        assert [note.code for note in done.notes] == ["quantized"] * (not dequantize), name
    (note,) = (note for note in ckptool.inspect(folder).notes if note.code == "quantized")
    assert str(note.fix).endswith("/in-fixed/")


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
    metadata = {"tensor_names": '["a.weight", "a.bias"]', "a.weight": json.dumps(fields)}
    metadata |= {"a.bias": '{"_type": "Tensor"}'}
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
    file = torchao(tmp_path, "Int8Tensor", qdata=codes, scale=scale)
    for rename in (  # which the names in the metadata would not follow
        lambda: ckptool.add_module(file, out, overwrite=True),
        lambda: ckptool.rename(file, ["a.* => b.*"], out, overwrite=True),
    ):
        with pytest.raises(Unsupported, match="by name in the metadata"):
            rename()
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
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert_same_bits(dequantized(case._replace(config=said), tmp_path), case.expected)
    with pytest.raises(Unsupported, match="not in blocks"):
        dequantized(case._replace(config=said | {"weight_block_size": [64, 128]}), tmp_path)
    # Enough blocks are of one size alone.
    codes, scale = torch.randn(131, 40).to(torch.float8_e4m3fn), torch.rand(33, 1)
    wide = (codes.float() * scale.repeat_interleave(4, 0)[:131]).bfloat16()
    case = Case("", {"a.weight": codes, "a.weight_scale_inv": scale}, {}, {"a.weight": wide})
    assert_same_bits(dequantized(case, tmp_path), case.expected)


def test_versions_of_gptq_that_contradict(tmp_path: Path) -> None:
    case, far = gptq(4), {**gptq(4, reorder=True).tensors}
    full = {**case.tensors, "a.qzeros": torch.full_like(case.tensors["a.qzeros"], -1)}
    far["a.g_idx"] = far["a.g_idx"] + 1
    for error, says, change in (
        (Ambiguous, "does not say", {"config": {**case.config, "sym": True}}),
        (Ambiguous, "does not say", {"config": {}}),
        (Ambiguous, "15 to 15", {"tensors": full}),
        (CkptoolError, "reaches 4 of 4", {"tensors": far}),
    ):
        with pytest.raises(error, match=says):
            dequantized(case._replace(**change), tmp_path)


def ct(weights: Any = None, **fields: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors, with one group of these weights."""
    groups = {"config_groups": {"a": {"weights": weights}}} if weights else {}
    return {"quant_method": "compressed-tensors", **groups, **fields}


@looped(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, "'hqq' is not known"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin' of gptq"),
        ({"quant_method": "awq"}, "is not quantized the way awq does it"),
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
    assert "left out, scales of activations: a.input_scale, a.k_scale" in done.details


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


# Verbs that change values: all parts stay together as they are, or the verb refuses by name.

FLOAT8 = Case(
    "fp8 with a scale",
    {"a.weight": torch.randn(4, 6).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)},
    {"quant_method": "fp8"},
    {},
)
KINDS = [*vectors(), gptq(4), awq(), FLOAT8]


PLAIN = {"norm.weight": torch.randn(6, 4), "logit_scale": torch.ones(())}


@pytest.fixture(params=KINDS, ids=[f"{n} {case.name}" for n, case in enumerate(KINDS)])
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
    before["n"] = before.pop("norm.weight").T
    assert {key: bits(value) for key, value in load_file(out).items()} == {k: bits(v) for k, v in before.items()}


def test_a_plain_model_takes_no_codes(file: Path, tmp_path: Path) -> None:
    names = {"a.weight", "a.bias", *PLAIN}
    plain = {key: torch.zeros(value.shape) for key, value in load_file(file).items() if key in names}
    save_file(plain, tmp_path / "plain.safetensors")
    model = torch.nn.ParameterDict({key.replace(".", "_"): value for key, value in plain.items()})
    turned = {"rename": "norm.weight => norm.weight : unsqueeze 0"}
    for more in ({}, {"on_mismatch": "skip"}, {"exclude": "*scale"}, turned):
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
    case = rng.choice(KINDS)
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


UNKNOWN: list[tuple[dict[str, torch.dtype], str]] = [  # the parts of a weight, as their libraries name them; method
    ({"W_q": torch.uint8, "scale": torch.float16, "zero": torch.float16}, "hqq"),
    ({"W_q": torch.int32, "scale": torch.float16, "zero": torch.float16}, "hqq"),
    ({"weight": torch.int8, "weight_scales": torch.float16}, "eetq"),
    ({"weight._data": torch.int8, "weight._scale": torch.float16}, "quanto"),
    ({"weight._data": torch.uint8, "weight._scale": torch.float16, "weight._shift": torch.float16}, "quanto"),
    ({"weight": torch.uint32, "scales": torch.float16, "biases": torch.float16}, "mlx"),
    ({"weight": torch.int16, "tables": torch.float16}, "higgs"),
    ({"codes": torch.int16, "codebooks": torch.float16, "scales": torch.float16}, "aqlm"),
    ({"weight": torch.int8, "scaler": torch.float32}, ""),
    ({"in_proj_weight": torch.int8, "step": torch.float32}, ""),
    ({"weight": torch.int8, "weight.scale": torch.float32}, "deepspeed"),
    ({"weight": torch.int8, "weight_scale": torch.float16}, ""),  # 8 bits, or ChatGLM's 4, two in each
    ({"weight_quantized": torch.int8, "weight_scale": torch.float32}, ""),
    ({"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32}, "modelopt"),
    ({"weight": torch.float8_e4m3fn, "weight_scale": torch.float32, "comfy_quant": torch.uint8}, ""),
]


@looped(
    ("parts", "method", "config"),
    [(*pair, told) for pair in UNKNOWN for told in (False, True) if told <= bool(pair[1])],
)
def test_codes_of_unknown_formats_are_no_weights(
    parts: dict[str, torch.dtype], method: str, config: bool, tmp_path: Path
) -> None:
    """Neither computed from, cast, averaged nor loaded; and no parameters are counted."""
    plain = {"model.q.weight": torch.randn(8, 8), "model.norm.weight": torch.ones(8)}
    for name in "ab":
        values = {f"model.q.{end}": torch.randint(0, 99, (8, 8)).to(dtype) for end, dtype in parts.items()}
        save_file({**values, "model.norm.weight": torch.ones(8)}, tmp_path / f"{name}.safetensors")
    if config:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    file, other, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "out.safetensors"
    report = ckptool.inspect(file)
    assert memory_needs(report).parameters is None and any(note.code.startswith("quantized") for note in report.notes)
    for call in (
        lambda: ckptool.cast(file, out, dtype="bf16", dequantize=True),
        lambda: ckptool.cast(file, out, dtype="bf16"),
        lambda: ckptool.average([file, other], out),
        lambda: ckptool.warm_start(file, saved(plain, tmp_path / "plain.pt"), out, min_loaded=0),
    ):
        with pytest.raises(Unsupported, match="quantized"):
            call()
        assert not out.exists()
