"""`average`: the mean that torch computes in f64, whatever the type; by `--method` what the formulas of mergekit and
the papers give, written down here in torch."""

import json
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.errors import Conflict
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import load, saved, torch_bytes, written
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.small_models import CONFIG, halves, peft
from tests.support.zips import damaged, rezipped

Tensors = list[torch.Tensor]


def numbered_files(folder: Path, trees: list[Any]) -> list[Path]:
    return [saved(tree, folder / f"{number}.pt") for number, tree in enumerate(trees)]


@given(st.data())
@settings(max_examples=30, derandomize=True)
def test_random_files_and_weights(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("mean")
    count = data.draw(st.integers(2, 4))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    weights = [data.draw(st.floats(-2, 2)) for _ in range(count)]
    trees = [{"a.weight": torch.randn(shape)} for _ in range(count)]
    ckptool.average(numbered_files(folder, trees), folder / "mean.pt", weights=weights)
    total = np.zeros(shape)
    for tree, weight in zip(trees, weights, strict=True):
        total = total + tree["a.weight"].double().numpy() * weight
    assert np.array_equal(load(folder / "mean.pt")["a.weight"].numpy(), total.astype(np.float32))


def test_an_exponential_average_is_the_one_that_torch_keeps(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2).double()
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))
    steps = []
    for _ in range(4):
        torch.nn.init.normal_(model.weight)
        averaged.update_parameters(model)
        steps.append({name: value.clone() for name, value in model.state_dict().items()})
    ckptool.average(numbered_files(tmp_path, steps), tmp_path / "mean.pt", ema=0.7)
    torch.testing.assert_close(load(tmp_path / "mean.pt"), dict(averaged.module.state_dict()))


def test_weights_that_do_not_add_up_to_1_are_said(tmp_path: Path) -> None:
    files = numbered_files(tmp_path, [{"a.weight": torch.ones(2)}] * 2)
    for weights, said in ([0.5, 0.25], ["weights-sum"]), ([0.75, 0.25], []):
        done = ckptool.average(files, tmp_path / "mean.pt", weights=weights, overwrite=True)
        assert [note.code for note in done.notes] == said and str(done).startswith("average: the mean of 2 files")


def test_what_has_no_mean_is_said(tmp_path: Path) -> None:
    files = numbered_files(tmp_path, [torch.nn.BatchNorm1d(2).state_dict(), {"a.running_var.x": torch.ones(2)}])
    for file, said in zip(files, (["batch-statistics"], []), strict=True):
        done = ckptool.average([file, file], tmp_path / "mean.pt", overwrite=True)
        assert [note.code for note in done.notes] == said
    names = {"target_modules": ["q", "k"], "base_model_name_or_path": "x"}
    a, b = (peft(tmp_path / each, halves("q") | halves("k")) for each in "ab")
    for config, said in (
        ({"target_modules": ["k", "q"], "base_model_name_or_path": "y"}, []),
        ({"lora_alpha": 8, "use_rslora": True}, ["lora_alpha, use_rslora"]),
    ):
        for folder, fields in ((a, names), (b, names | config)):
            (folder / "adapter_config.json").write_text(json.dumps(CONFIG | fields))
        notes = ckptool.average([a, b], f"{tmp_path / 'mean'}/", overwrite=True).notes
        assert [note.code for note in notes] == ["factors-apart", *(["configs-differ"] * len(said))]
        assert all(f"differ in {names};" in note.message for names, note in zip(said, notes[1:], strict=True))


def test_deflated_files_are_read_ahead_while_their_sums_are_checked(tmp_path: Path) -> None:
    values = {f"layer{n}.weight": torch.arange(64.0) + n for n in range(24)}
    deflated = rezipped(written(torch_bytes(values), tmp_path / "a.pt"), tmp_path / "b.pt", zipfile.ZIP_DEFLATED)
    for _ in range(20):
        ckptool.average([deflated, deflated], tmp_path / "mean.pt", overwrite=True)
        assert_same_objects(torch.load(tmp_path / "mean.pt"), values)


@looped(
    ("other", "words"),
    [
        ({"a.weight": torch.ones(3)}, "a.weight is"),
        ({"a.weight": torch.ones(2).half()}, "f16"),
        ({"b.weight": torch.ones(2)}, "only in"),
        ({"a.weight": torch.ones(2), "c.weight": torch.ones(1)}, "only in"),
    ],
)
def test_files_that_do_not_agree_are_refused(tmp_path: Path, other: Any, words: str, run: Run) -> None:
    files = numbered_files(tmp_path, [{"a.weight": torch.ones(2)}, other])
    done = run("average", *files, "-o", tmp_path / "mean.pt")
    fix = "ckptool cast FILE --dtype f32" if words == "f16" else "ckptool diff"
    assert done.code == 2 and words in done.err and fix in done.err and not (tmp_path / "mean.pt").exists()


def test_a_damaged_input_is_noticed(tmp_path: Path) -> None:
    files = numbered_files(tmp_path, [{"a.weight": torch.randn(4096)}] * 2)
    damaged(files[0], 0)
    refused(ckptool.CkptoolError, tmp_path, lambda: ckptool.average(files, tmp_path / "mean.pt"), "checksum")


def largest(delta: torch.Tensor, density: float) -> torch.Tensor:
    """All but the largest differences set to zero; of equal ones the first are kept."""
    keep = max(1, int(density * delta.numel()))
    order = torch.argsort(delta.abs().flatten(), descending=True, stable=True)[:keep]
    kept = torch.zeros(delta.numel(), dtype=torch.bool).index_fill(0, order, True)
    return torch.where(kept.view(delta.shape), delta, 0)


def task_arithmetic(base: torch.Tensor, files: Tensors, weights: list[float], scale: float) -> torch.Tensor:
    return base + sum((file - base) * weight for file, weight in zip(files, weights, strict=True)) * scale


def ties(base: torch.Tensor, files: Tensors, weights: list[float], density: float, scale: float) -> Any:
    weighted = torch.stack([largest(file - base, density) * w for file, w in zip(files, weights, strict=True)])
    elected = torch.where(weighted.sum(0) >= 0, 1.0, -1.0)
    agree = (weighted.sign() == elected).to(base.dtype)
    divisor = sum(agree[number] * weight for number, weight in enumerate(weights))
    return base + (weighted * agree).sum(0) / torch.where(divisor == 0, 1, divisor) * scale


def slerp(t: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.double(), b.double()
    near = float((a / a.norm() * (b / b.norm())).sum()) if float(a.norm()) and float(b.norm()) else 0.0
    if abs(near) > 0.9995:
        return (1 - t) * a + t * b
    angle = torch.tensor(near, dtype=torch.float64).acos()
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def models(folder: Path, count: int, dtype: torch.dtype = torch.float32, shape: Any = (70, 1001)) -> tuple[Any, Any]:
    """A base and files that were trained from it, with a counter that has no mean."""
    torch.manual_seed(len(str(dtype)) + count)
    base = torch.randn(shape)
    tensors = [base.to(dtype), *((base + torch.randn(shape) / 10).to(dtype) for _ in range(count))]
    trees = [{"layer.weight": tensor, "steps": torch.tensor(n)} for n, tensor in enumerate(tensors)]
    return tensors, numbered_files(folder, trees)


def merged(paths: list[Path], out: Path, **options: Any) -> torch.Tensor:
    base = {} if options["method"] == "slerp" else {"base": paths[0]}
    ckptool.average(paths[1:], out, **base, **options)
    found = load(out)
    assert int(found["steps"]) == len(paths) - 1
    tensor: torch.Tensor = found["layer.weight"]
    return tensor


@looped(("dtype", "count"), product([torch.float64, torch.float32, torch.float16, torch.bfloat16], [1, 2, 3]))
def test_differences_are_merged_as_the_formulas_say(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    tensors, paths = models(tmp_path, count, dtype)
    base, *files = [tensor.to(torch.float64 if dtype == torch.float64 else torch.float32) for tensor in tensors]
    weights = [0.7, 0.4, -0.3][:count]
    found = merged(paths, tmp_path / "a.pt", method="task-arithmetic", weights=weights, scale=0.8)
    assert torch.equal(found, task_arithmetic(base, files, weights, 0.8).to(dtype))
    found = merged(paths, tmp_path / "b.pt", method="task-arithmetic")
    assert torch.equal(found, (base + sum(f - base for f in files)).to(dtype))
    for density in (0.2, 0.5, 1.0, 1e-9):
        options: Any = {"method": "ties", "weights": weights, "scale": 0.8, "density": density, "overwrite": True}
        found = merged(paths, tmp_path / "c.pt", **options)
        assert torch.equal(found, ties(base, files, weights, density, 0.8).to(dtype))


def test_slerp_of_parallel_opposite_and_empty_vectors(tmp_path: Path) -> None:
    a = torch.randn(50)
    state = {"near.w": a, "far.w": a, "none.w": torch.zeros(50), "empty.w": torch.zeros(0, 3)}
    state |= {"zero.w": torch.tensor(2.0)}
    other = {"near.w": a * 3, "far.w": -a, "none.w": a, "empty.w": torch.zeros(0, 3), "zero.w": torch.tensor(4.0)}
    paths = [saved(state, tmp_path / "a.pt"), saved(other, tmp_path / "b.pt")]
    ckptool.average(paths, tmp_path / "s.pt", method="slerp", t=0.25)
    found = load(tmp_path / "s.pt")
    for name in state:
        assert torch.allclose(found[name].double(), slerp(0.25, state[name], other[name]), atol=1e-6), name


@pytest.mark.parametrize("method", ["mean", "slerp", "task-arithmetic", "ties", "dare"])
def test_a_part_of_a_tensor_in_every_file_stays_one(method: str, tmp_path: Path) -> None:
    """Transposed, reshaped, a slice: what shows the same memory has the same values, and goes on sharing them."""
    files = []
    for seed in range(3):
        # In each file it begins elsewhere in its storage.
        w = torch.randn(4 + seed, 6, generator=torch.Generator().manual_seed(seed))[seed:]
        files.append({"t": w.t(), "w": w, "flat": w.view(24), "part": w[1:3], "column": w[:, 2], "own": w.t().clone()})
        files[-1]["anti"] = torch._neg_view(w)  # no part of it, and not what the others are parts of
    paths = numbered_files(tmp_path, files)
    options: Any = {} if method in ("mean", "slerp") else {"base": paths[2]}
    ckptool.average(paths[:2], tmp_path / "o.pt", method=method, **options)
    found = load(tmp_path / "o.pt")
    for key, old in files[1].items():
        assert (found[key].data_ptr() == found["w"].data_ptr()) == (key in ("t", "w", "flat")), key
        assert key in ("own", "anti") or (found[key].stride(), found[key].storage_offset()) == (
            old.stride(),
            old.storage_offset() - files[1]["w"].storage_offset(),
        )
    assert found["part"].untyped_storage().data_ptr() == found["column"].untyped_storage().data_ptr()
    if method == "mean":
        assert all(torch.allclose(found[key], (files[0][key] + files[1][key]) / 2) for key in found)
    # Where one file has them apart, they are means of their own.
    torch.save({key: value.clone() for key, value in files[0].items()}, paths[0])
    ckptool.average(paths[:2], tmp_path / "apart.pt", method=method, **options)
    apart = load(tmp_path / "apart.pt")
    assert len({value.untyped_storage().data_ptr() for value in apart.values()}) == len(files[0])
    if method == "mean":
        assert all(torch.equal(apart[key], found[key]) for key in found)


def test_ties_between_names_and_values_that_are_not_finite(tmp_path: Path) -> None:
    base = {"a.w": torch.zeros(4)}
    base["b.w"] = base["a.w"]
    files = [{"a.w": torch.tensor([1.0, float("nan"), -2.0, float("inf")])}, {"a.w": torch.ones(4)}]
    for file in files:
        file["b.w"] = file["a.w"]
    paths = numbered_files(tmp_path, [base, *files])
    for method in ("ties", "dare", "task-arithmetic"):
        options = {} if method == "task-arithmetic" else {"density": 1.0}
        ckptool.average(paths[1:], tmp_path / f"{method}.pt", method=method, base=paths[0], **options)
        found = load(tmp_path / f"{method}.pt")
        assert found["a.w"].data_ptr() == found["b.w"].data_ptr()
        assert found["a.w"][1].isnan() and found["a.w"][3].isinf() and found["a.w"][0].isfinite()


@looped(
    ("options", "words"),
    [
        ({"weights": [1.0]}, "1 weight was given for 2 files"),
        ({"ema": 1.5}, "decay of 1.5"),
        ({"ema": 0.5, "weights": [1.0, 1.0]}, "both given"),
        ({"weights": [float("nan"), 1.0]}, "add up to nan"),
        ({"files": 1}, "at least two files"),
        ({"method": "ties"}, "method='ties' needs base"),
        ({"method": "guess"}, "given 'guess' as method"),
        ({"method": "mean", "base": "0.pt"}, "does not take base"),
        ({"method": "slerp", "density": 0.5}, "does not take density"),
        ({"method": "task-arithmetic", "base": "0.pt", "seed": 1}, "does not take seed"),
        ({"method": "dare", "base": "0.pt", "ema": 0.5}, "does not take ema"),
        ({"method": "dare", "base": "0.pt", "density": 0.0}, "density 0 is not from 1e-9"),
        ({"method": "ties", "base": "0.pt", "density": 1.5}, "density 1.5 is not"),
        ({"method": "ties", "base": "0.pt", "density": float("nan")}, "density.nan is not"),
        ({"method": "ties", "base": "0.pt", "density": [0.1, 0.2, 0.3]}, "density gives 3 values"),
        ({"method": "ties", "base": "0.pt", "scale": float("inf")}, "is not a finite number"),
        ({"method": "dare", "base": "0.pt", "density": 1e-300}, "density 1e-300 is not from 1e-9"),
        ({"method": "ties", "base": "0.pt", "weights": [float("nan"), 1]}, "weights add up to nan"),
        ({"method": "slerp", "weights": [1e308, 1e308]}, "weights add up to inf"),
        ({"method": "slerp", "t": 1.5}, "is not from 0 to 1"),
        ({"method": "slerp", "t": 0.5, "weights": [1, 1]}, "both given"),
        ({"method": "slerp", "weights": [-1, 2]}, "negative"),
        ({"method": "slerp", "files": 3}, "slerp.* was given 3 files"),
        ({"method": "ties", "base": "0.pt", "files": 0}, "at least two files"),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, options: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, paths = models(tmp_path, 2, shape=(3,))
    monkeypatch.chdir(tmp_path)
    files = (paths * 2)[: options.pop("files", 2)]
    refused("usage", tmp_path, lambda: ckptool.average(files, tmp_path / "out.pt", **options), f"(?s){words}")


def test_names_that_differ_by_a_prefix_alone_are_told_so(tmp_path: Path) -> None:
    def file(*names: str) -> Path:
        return saved(dict.fromkeys(names, torch.ones(2)), tmp_path / f"{names[-1]}.pt")

    plain, wrapped, other = file("a.w", "b"), file("module.a.w", "module.b"), file("module.a.w", "module.c")
    for files in ([plain, wrapped], [wrapped, plain], [plain, wrapped, plain]):
        with pytest.raises(Conflict) as caught:
            ckptool.average(files, tmp_path / "o.pt")
        assert caught.value.fix == f"Only a prefix differs; remove it: ckptool strip-module {wrapped} -o OUT"
    assert "diff" in refused(Conflict, tmp_path, lambda: ckptool.average([plain, other], tmp_path / "o.pt")).fix


def test_what_is_left_out_of_several_files_is_named_once(tmp_path: Path) -> None:
    whole = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}, "epoch": 1}
    sets = [whole, {key: value for key, value in whole.items() if key != "ema"}, {**whole, "step": 5}]
    files = [saved(each, tmp_path / f"{number}.pt") for number, each in enumerate(sets)]
    lines = [line for line in ckptool.average(files, tmp_path / "out.pt").details if "left out" in line]
    assert lines == [f"left out (the input keeps it): {names}" for names in ("ema (8 B)", "epoch, step")]
    with pytest.warns(UserWarning, match="took model, not its average ema"):  # nobody sees a report
        ckptool.average([whole, whole])
    parts = [f"{files[0]}#{name}" for name in ("model", "ema")]
    both = ckptool.average(parts, tmp_path / "both.pt")  # neither is left out, and each is named
    assert (both.facts["files"], both.facts["left_behind"]) == (parts, ["epoch"]) and "of ema" not in both.summary


def test_keys_that_are_spelled_alike(tmp_path: Path) -> None:
    files = [saved({"a": {0: torch.ones(2) * n, "0": torch.zeros(2)}}, tmp_path / f"{n}.pt") for n in (1, 3)]
    ckptool.average([f"{file}#a" for file in files], tmp_path / "out.pt")
    mean = load(tmp_path / "out.pt")
    assert [*mean] == [0, "0"] and mean[0].tolist() == [2, 2] and mean["0"].tolist() == [0, 0]


@looped("seed", range(30))
def test_what_has_no_mean_and_differs_is_refused(seed: int, tmp_path: Path) -> None:
    """Codes, indices, and tensors inside of other values: only what is the same in all files is taken from the last."""
    torch.manual_seed(seed)
    dtypes = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]

    def value() -> Any:
        codes = torch.randint(0, 2, (seed % 3 + 2, 9)).to(dtypes[seed % len(dtypes)])
        return [codes, (torch.ones(3), codes), codes.numpy(), {"inner": [codes]}][seed % 4]

    one, two = value(), value()
    states = [
        {"a.weight": torch.randn(3, 3), "a.bias": torch.ones(3), "count": torch.tensor(step), "x": x}
        for step, x in ((1, one), (2, two), (3, one))
    ]
    paths = numbered_files(tmp_path, states)
    error = refused("unsupported", tmp_path, lambda: ckptool.average(paths[:2], tmp_path / "o.pt"), "x has no mean")
    assert ("Give it as a plain tensor" in error.fix) == (not isinstance(one, (torch.Tensor, dict)))
    refused("unsupported", tmp_path, lambda: ckptool.average(paths, tmp_path / "o.pt"), "x has no mean")
    written = ckptool.average([paths[0], paths[2]], tmp_path / "o.pt")
    assert ckptool.load(tmp_path / "o.pt")["count"] == 3
    assert written.facts["kept"]["x"].startswith(("of type ", "tuple", "a numpy array", "dict")[seed % 4])
