"""Programs of `torch.export` and packages of `torch.package`: their tensors as torch has them, and nothing run."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.tree import tensors
from ckptool.errors import CkptoolError, Unsupported, UsageError
from ckptool.formats import read
from fixtures import make_export
from fixtures.make import records
from fixtures.make import write_torch_zip as written
from tests.support.errors import refused
from tests.support.looped import looped

HERE = Path(make_export.__file__).parent / "versions"
EXPORTED, LOADED = HERE / "torch-2.13-export.pt2", HERE / "torch-2.13-export.pt"
GRAPH, TABLE = "models/model.json", "data/weights/model_weights_config.json"


def same_as_torch(entries: Any, expected: dict[str, Any]) -> None:
    assert list(entries) == list(expected)
    for name, tensor in expected.items():
        entry = entries[name]
        mine = entry.torch()
        assert torch.equal(mine, tensor) and mine.dtype == tensor.dtype and mine.stride() == tensor.stride(), name
        assert not (entry.flags.parameter or entry.flags.requires_grad), name  # as in a state dict
    shared = {name: tensor.untyped_storage().data_ptr() for name, tensor in expected.items() if tensor.numel()}
    for one in shared:
        for other in shared:
            assert (shared[one] == shared[other]) == (entries[one].storage is entries[other].storage), (one, other)


def test_the_tensors_are_those_that_torch_loads(tmp_path: Path) -> None:
    checkpoint, expected = read(EXPORTED), torch.load(LOADED)
    assert checkpoint.container == "torch-export"
    for part in ("state_dict", "constants"):
        same_as_torch(checkpoint.tree[part], expected[part])
    out = ckptool.convert(EXPORTED, out=tmp_path / "weights.pt").output
    loaded = torch.load(out)
    assert loaded.keys() == expected["state_dict"].keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected["state_dict"].items())
    ckptool.convert(EXPORTED, out=tmp_path / "weights.safetensors")
    assert ckptool.diff(EXPORTED, tmp_path / "weights.safetensors").same


def before_28(contents: dict[str, bytes], path: Path) -> Path:
    """The same program as torch wrote it until 2.7: with files of torch.save, in a plain zip."""
    expected = torch.load(LOADED, weights_only=False)
    with zipfile.ZipFile(path, "w") as archive:
        for part in ("state_dict", "constants"):
            torch.save(expected[part], path.with_suffix(".tmp"))
            archive.write(path.with_suffix(".tmp"), f"serialized_{part}.pt")
        archive.writestr("serialized_example_inputs.pt", contents["data/sample_inputs/model.pt"])
        archive.writestr("serialized_exported_program.json", contents[GRAPH])
        version = json.loads(contents[GRAPH])["schema_version"]
        archive.writestr("version", f"{version['major']}.{version['minor']}")
    return path


def test_programs_as_torch_wrote_them_before_2_8_and_several_in_one_file(tmp_path: Path) -> None:
    contents, expected = records(EXPORTED), torch.load(LOADED)
    old = read(before_28(contents, tmp_path / "old.pt2"))
    for part in ("state_dict", "constants"):
        same_as_torch(old.tree[part], expected[part])
    twice = contents | {name.replace("/model", "/other"): data for name, data in contents.items() if "/model" in name}
    both = read(written(tmp_path / "both.pt2", twice)).tree
    assert list(both) == ["model", "other"]
    same_as_torch(both["other"]["state_dict"], expected["state_dict"])


def test_what_other_verbs_say_of_a_program(tmp_path: Path) -> None:
    assert "never run" in next(note.message for note in ckptool.inspect(EXPORTED).notes if note.code == "torch-export")
    assert ckptool.scan(EXPORTED).files[0].is_good
    assert ckptool.doctor(EXPORTED).findings[0].code == "torch-export"
    with pytest.raises(Unsupported, match="beside its tensors"):
        ckptool.rename(EXPORTED, ["first.* => third.*"], out=tmp_path / "renamed.pt")
    with pytest.raises(UsageError, match=r"\.pt2 is not the suffix"):
        ckptool.convert(EXPORTED, out=tmp_path / "copy.pt2")


# What loading would run ----------------------------------------------------------------------------------------------

EXPRESSIONS = {
    "Symbol('s77', positive=True, integer=True)": False,
    "Mul(Integer(2), Symbol('s77', positive=True, integer=True))": False,
    "2*s0 + Max(3, s1) - FloorDiv(s0, 4)": False,
    "s0 <= 5": False,
    "__import__('os').system('touch RUN')": True,
    "Mul(Integer(2), __import__('os').system('touch RUN'))": True,
    "(exec)('import os')": True,
    "eval(s0)": True,
    "[s0 for s0 in (1,)]": True,
    "(lambda: 1)()": True,
    "Symbol('a b')": True,
    "s0.__class__": True,
    "breakpoint()": True,
    "Mul(Integer(2), open)": False,  # a name alone is not called
}
TARGETS = {
    "torch.ops.aten.linear.default": False,
    "torch.ops.higher_order.cond": False,
    "torch.ops.aten.__and__.Tensor": False,
    "_operator.mul": False,
    "math.floor": False,
    "torch._sym_sqrt": False,
    "torch.os.system": True,
    "torch.hub.load": True,
    "torch.load": True,
    "torch.ops.load_library": True,
    "torch.ops.aten.__class__.__init__": True,
    "#extension:call": True,
}


def graph_with(kind: str, text: str) -> bytes:
    """The graph of the kept program with another expression or operator in the place of its first."""
    graph = records(EXPORTED)[GRAPH].decode()
    key = f'"{kind}": '
    before, _, after = graph.partition(key)
    _, end = json.JSONDecoder().raw_decode(after)
    return f"{before}{key}{json.dumps(text)}{after[end:]}".encode()


CASES = [("expr_str", *case) for case in EXPRESSIONS.items()] + [("target", *case) for case in TARGETS.items()]


@looped(("kind", "text", "runs"), CASES)
def test_a_graph_that_loading_would_take_code_from_is_unsafe(kind: str, text: str, runs: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "model.pt2", records(EXPORTED) | {GRAPH: graph_with(kind, text)})
    row = ckptool.scan(path).files[0]
    assert (row.state == "unsafe-global") is runs, row
    assert bool(row.calls) is runs
    ckptool.convert(path, out=tmp_path / "weights.safetensors", overwrite=True)  # the weights alone run nothing


def test_what_hides_in_json_and_what_is_compiled_is_unsafe(tmp_path: Path) -> None:
    contents = records(EXPORTED)
    hidden = contents[GRAPH].replace(b'"expr_str"', rb'"\u0065xpr_str"')
    assert json.loads(hidden) == json.loads(contents[GRAPH])
    long = contents[GRAPH].replace(b'"expr_str": "', b'"expr_str": "' + b"1 + " * 2_000)
    far = contents[GRAPH].replace(b'"expr_str": ', b'"expr_str"' + b" " * 99 + b": ")
    padded = contents[GRAPH][:-1] + b" " * (3 << 20) + b"}"
    for graph, runs in ((long, True), (far, True), (padded, False), (graph_with("expr_str", "breakpoint()"), True)):
        for size in (0, 511 << 10, (512 << 10) - 5, 1 << 20):  # wherever it lies in the blocks that are read
            path = written(tmp_path / "model.pt2", contents | {GRAPH: b" " * size + graph})
            assert (ckptool.scan(path).files[0].state == "unsafe-global") is runs
    library = {"data/aotinductor/model/model.so": b"\x7fELF"}
    for change in ({GRAPH: hidden}, library):
        assert ckptool.scan(written(tmp_path / "model.pt2", contents | change)).files[0].state == "unsafe-global"
    compiled = {name: data for name, data in contents.items() if not name.startswith(("models/", "data/"))} | library
    with pytest.raises(Unsupported, match="compiled"):
        read(written(tmp_path / "model.pt2", compiled))


@pytest.mark.soak  # each starts torch anew
@pytest.mark.parametrize("text", [text for text, runs in EXPRESSIONS.items() if runs and "RUN" in text])
def test_torch_does_run_these(text: str, tmp_path: Path) -> None:
    graph = graph_with("expr_str", text.replace("RUN", str(tmp_path / "RUN")))
    path = written(tmp_path / "model.pt2", records(EXPORTED) | {GRAPH: graph})
    subprocess.run([sys.executable, "-c", f"import torch; torch.export.load({str(path)!r})"], capture_output=True)
    assert (tmp_path / "RUN").exists()


def damaged_tables() -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Changes of a table that torch does not write."""
    for key, value in (("path_name", "weight_99"), ("path_name", 5), ("use_pickle", None), ("tensor_meta", None)):
        yield lambda payload, key=key, value=value: payload.update({key: value})  # type: ignore[misc]
    for key, value in (
        ("dtype", 99), ("dtype", "7"), ("dtype", None), ("layout", 1), ("sizes", [{"as_int": 1 << 40}]), ("sizes", 4),
        ("sizes", [{"as_expr": {"expr_str": "s0"}}]), ("strides", []), ("storage_offset", {"as_int": 1 << 20}),
        ("storage_offset", None), ("device", None),
    ):  # fmt: skip
        yield lambda payload, key=key, value=value: payload["tensor_meta"].update({key: value})  # type: ignore[misc]


@looped("change", [*damaged_tables()])
def test_a_table_that_does_not_fit_is_refused(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    contents = records(EXPORTED)
    table = json.loads(contents[TABLE])
    change(table["config"]["first.weight"])
    with pytest.raises(CkptoolError):
        read(written(tmp_path / "model.pt2", contents | {TABLE: json.dumps(table).encode()}))


def test_archives_that_lack_a_record_or_have_others_are_refused(tmp_path: Path) -> None:
    contents = records(EXPORTED)
    for name in contents:
        if name.startswith("data/weights/"):
            with pytest.raises(CkptoolError):
                read(
                    written(tmp_path / "model.pt2", {other: data for other, data in contents.items() if other != name})
                )
    for change in ({"data.pkl": b"\x80\x02N."}, {"archive_format": b"pt3"}):
        with pytest.raises(CkptoolError):
            read(written(tmp_path / "model.pt2", contents | change))


class Typed(nn.Module):
    """A parameter, a view of a buffer and a constant of each type, in random shapes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        for number, dtype in enumerate(DTYPES):
            shape = torch.randint(0, 4, (int(torch.randint(0, 3, (), generator=chance)),), generator=chance).tolist()
            values = torch.randint(0, 2, shape, generator=chance).to(dtype)
            whole = torch.randint(0, 2, (5, 6), generator=chance).to(dtype)
            is_parameter = dtype.is_floating_point or dtype.is_complex
            setattr(self, f"p{number}", nn.Parameter(values) if is_parameter else values)
            self.register_buffer(f"view{number}", whole[1::2, 2:].t() if number % 2 else whole[2:])
            self.register_buffer(f"whole{number}", whole, persistent=number % 3 > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum((value.numel() for value in self.buffers()), 0)


DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
)  # fmt: skip


@pytest.mark.soak  # torch takes seconds for each
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_exports_of_random_models(seed: int, tmp_path: Path) -> None:
    path = make_export.write_export(tmp_path, Typed(seed), "typed")
    loaded = torch.load(path.with_suffix(".pt"))
    for part in ("state_dict", "constants"):
        same_as_torch(read(path).tree[part], loaded[part])


# Packages ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["module", "script", "state dict"])
def test_a_package_has_the_tensors_that_torch_loads(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.package.package_exporter._gate_torchscript_serialization", False)
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    saved = {"module": model, "script": torch.jit.script(model), "state dict": model.state_dict()}[kind]
    path = tmp_path / "package.pt"
    with torch.package.PackageExporter(str(path)) as exporter:
        exporter.extern("torch.**")
        exporter.save_pickle("models", "model", {"net": saved, "epoch": 3})
        exporter.save_source_string("code.more", "raise SystemExit('was run')")
        exporter.save_text("texts", "words", "abc")
        exporter.save_binary("binary", "no_pickle", b"\x80\x02abc")
    loaded = torch.package.PackageImporter(str(path)).load_pickle("models", "model")["net"]
    expected = loaded if kind == "state dict" else loaded.state_dict()
    checkpoint = read(path)
    assert checkpoint.container == "torch-package" and list(checkpoint.tree) == ["models/model"]
    (weights,) = (root for root in ckptool.inspect(path).roots if root.is_model)
    found = {
        place[-1] if kind != "module" else ".".join(map(str, place)): entry for place, entry in tensors(checkpoint.tree)
    }
    values = [entry.torch() for entry in found.values() if isinstance(entry, TensorEntry)]
    for name, tensor in expected.items():
        assert any(value.shape == tensor.shape and torch.equal(value, tensor) for value in values), name
    out = ckptool.convert(f"{path}#{weights.address}", out=tmp_path / "weights.pt").output
    written_weights = torch.load(out)
    assert written_weights.keys() == expected.keys()
    assert all(torch.equal(written_weights[name], tensor) for name, tensor in expected.items())
    calls = {call.name for call in ckptool.scan(path).files[0].calls}
    assert "torch.package.code/more.py" in calls and not any("unpackage" in name for name in calls)
    assert "was run" in ckptool.show(f"{path}#code/code/more.py").entry


def test_a_package_without_code_or_pickles(tmp_path: Path) -> None:
    path = tmp_path / "package.pt"
    with torch.package.PackageExporter(str(path)) as exporter:
        exporter.save_text("texts", "words", "abc")
    refused(Unsupported, tmp_path, lambda: read(path), "without a pickle")


def test_a_module_of_a_package_that_holds_itself_is_refused(tmp_path: Path) -> None:
    inner = (
        b"(X\x0e\x00\x00\x00reduce_packageK\x00ctorch.jit._script\nunpackage_script_module\nX\x01\x00\x00\x000\x85tQ"
    )
    pickle = b"\x80\x02" + inner + b"."
    scripts = {f".data/ts_code/0/{name}.pkl": pickle for name in ("data", "constants")}
    path = written(tmp_path / "package.pt", {".data/extern_modules": b"torch", "models/model": pickle, **scripts})
    refused(CkptoolError, tmp_path, lambda: read(path), "names no storage")
