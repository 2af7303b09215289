"""Verbs on objects in memory: the same result as the file that they write, with the caller's own tensors in it. Open
files in the place of paths."""

import collections
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool.errors import CkptoolError, Truncated, UsageError
from ckptool.formats.in_memory import source_of
from tests.support.errors import refused
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.object_graphs import saved_graph
from tests.support.same import assert_same_objects

pytestmark = pytest.mark.filterwarnings("ignore:.*optimizer-differs|statistics of BatchNorm:UserWarning")  # of verbs


def wrapped() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    model.append(nn.Linear(4, 4))
    model[3].weight = model[0].weight
    return nn.DataParallel(model)


def training(model: nn.Module) -> dict[str, Any]:
    """A checkpoint in memory: a model, its optimizer, and what else stands in one."""
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "rng": numpy.arange(4, dtype=numpy.uint32),
        "size": torch.Size([2]),
        "sparse": torch.eye(3).to_sparse(),
        "seen": {1, 2},
        "pair": (torch.arange(3), [torch.arange(2)]),
    }


def test_arrays_are_those_of_the_file_that_they_are_saved_in(tmp_path: Path) -> None:
    given = {"a": numpy.ones((2, 3), "f4"), "b": numpy.arange(3)}
    ckptool.save(given, tmp_path / "a.pt")
    for pair in ((given, tmp_path / "a.pt"), (tmp_path / "a.pt", given)):
        report = ckptool.diff(*pair)
        assert report.same and report.not_compared == ("arrays",)
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    assert not ckptool.diff(tensors, tmp_path / "a.pt").same  # both tell them apart


@pytest.mark.parametrize("make", [torch.tensor, lambda values: numpy.array(values, "f4")])
def test_values_that_a_cast_loses_in_memory_are_a_warning(make: Any) -> None:
    with pytest.warns(UserWarning, match="1 value became infinite or NaN") as told:
        assert ckptool.cast({"w": make([1e30, 1.0])}, dtype="f16")["w"][1] == 1
    assert told[0].filename == __file__


def weights() -> dict[str, Any]:
    """A state dict with ties, views and parameters."""
    state = wrapped().state_dict()
    state["module.tied"] = state["module.0.weight"]
    state["module.view"] = state["module.0.weight"].t()
    state["module.parameter"] = nn.Parameter(torch.ones(2))
    return state


def test_arrays_stay_arrays_without_torch(tmp_path: Path) -> None:
    code = """
import sys, numpy, ckptool
given = {"module.weight": numpy.ones((2, 3), "f4"), "module.names": numpy.array(["a"]), "module.scale": numpy.ones(2)}
done = ckptool.strip_module(given)
assert done["weight"] is given["module.weight"] and done["names"] is given["module.names"], done
entries = {"module.w": ckptool.open(done)["weight"]}
assert ckptool.strip_module(entries)["w"] is entries["module.w"]
ckptool.save({"a": given["module.scale"], "n": 1}, "x.pt")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path)
    assert load(tmp_path / "x.pt", weights_only=False)["a"].tolist() == [1, 1]


@looped(
    ("call", "said"),
    [
        (lambda given: ckptool.cast(given, "bf16"), "dtype='bf16'"),
        (lambda given: ckptool.remap(given, "cpu"), "to='cpu'"),
        (lambda given: ckptool.strip_module(given, "module."), "called 'module.'"),
        (lambda given: ckptool.remap(given, "cuda", to="cpu"), "called 'cuda'"),
        (lambda given: ckptool.strip_module(given, in_place=True), "in_place"),
        (lambda given: ckptool.cast(given, io.BytesIO(), dtype="bf16"), "not a dtype"),
        (lambda given: ckptool.slim(given, io.BytesIO()), "slim was given BytesIO as its output"),
        (lambda given: ckptool.save(given, io.StringIO()), "does not accept bytes"),
        (lambda given: ckptool.save("a.pt", given), "save was given the path 'a.pt'"),
        (lambda given: ckptool.save(Path("a.pt"), "b.pt"), r"convert\(FILE, out=OUT\)"),
        (lambda given: ckptool.average(given, given), r"average\(\[A, B\]\)"),
        (lambda given: ckptool.average([given, given], given), r"average\(\[A, B\]\)"),
        (lambda given: ckptool.bundle(wrapped()), "given DataParallel as members"),
        (lambda given: ckptool.warm_start(given, given, resize=True), "was given bool as"),
        (lambda given: ckptool.train(3), "given int as config(?s:.*)a string or a path or a dictionary"),
        (lambda given: ckptool.train({}, resume="Auto"), "given 'Auto' as resume(?s:.*)'never' or 'auto' or 'must'"),
        (lambda given: ckptool.edit(given, set={"module.tied": 1}), "drop='module.tied'"),
        (lambda given: ckptool.load(b"PK"), r"io.BytesIO\(data\)"),
        (lambda given: ckptool.inspect([1]), r"a list with int in it(?s:.*)ckptool.inspect\(item\) for item"),
        (lambda given: ckptool.cast([given], dtype="f16"), "a list with OrderedDict in it"),
        (lambda given: ckptool.diff([given], given), r"state_dict\(\), model"),
        (lambda given: ckptool.spec([given]), "type list is not a file"),
        (lambda given: ckptool.doctor(numpy.ones(2), fix=True), "type ndarray is not a file"),
        (lambda given: ckptool.save_for_cpu("a.pt", "b.pt"), "str, not a torch.nn.Module"),
        (lambda given: ckptool.unbundle(given, "out"), r"ckptool.bundle\(members={NAME: FILE}"),
        (lambda given: ckptool.open(given)["module.0.weight"].narrow(0, 3, 2), "no elements 3 to 5"),
        (lambda given: ckptool.open(given)["module.0.weight"].permute((0, 0)), "no order of the dimensions"),
        (lambda given: ckptool.open(given)["module.0.weight"].reshape((-1,)), "cannot be reshaped"),
        (lambda given: ckptool.average([{"model": given, "generator": weights()}] * 2), r"checkpoint\['model'\]"),
        (lambda given: ckptool.spec(nn.Linear), "the class Linear is not a file"),
        (lambda given: ckptool.inspect(torch.optim.SGD([torch.ones(1)])), r"\.state_dict\(\)"),
    ],
)
def test_refused(call: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused("usage", tmp_path, lambda: call(weights()), said)


def with_gradients() -> dict[str, Any]:
    """A state dict of parameters, one of them also as a view."""
    state = dict(wrapped().named_parameters(remove_duplicate=False))
    return {**state, "module.view": state["module.0.weight"].detach()[1:]}


GIVEN: dict[str, Callable[[], Any]] = {
    "checkpoint": lambda: training(wrapped()),
    "state dict": lambda: wrapped().state_dict(),
    "plain dictionary": with_gradients,
    "module": wrapped,
}
Call = Callable[[Any, "Path | None"], Any]
VERBS: dict[str, Call] = {
    "strip_module": ckptool.strip_module,
    "add_module": lambda given, out: ckptool.add_module(given, out, prefix="net."),
    "rename": lambda given, out: ckptool.rename(given, "module.* => *", out),
    "remap": lambda given, out: ckptool.remap(given, out, to="cpu"),
    "cast": lambda given, out: ckptool.cast(given, out, dtype=torch.float16),
    "cast of some": lambda given, out: ckptool.cast(given, out, dtype="bf16", only="*bias"),
    "edit": lambda given, out: ckptool.edit(given, out, drop="*bias"),
    "slim": ckptool.slim,
    "bake": ckptool.bake,
    "translate": lambda given, out: ckptool.translate(given, "*.1.bias => *.1.{a,b} : split 0", out, rest="keep"),
    "convert": lambda given, out: ckptool.convert(given, out, only="*weight*"),
    "average": lambda given, out: ckptool.average([given, given, given], out, ema=0.5),
    "bundle": lambda given, out: ckptool.bundle({"one": given}, out, values={"n": 1}),
    "warm_start": lambda given, out: ckptool.warm_start(given, state_of(given), out),
}


def state_of(given: Any) -> Any:
    """What people save of it."""
    return given.state_dict() if isinstance(given, nn.Module) else given


@looped("verb", VERBS)
@pytest.mark.parametrize("kind", GIVEN)
def test_the_result_is_that_of_the_file(kind: str, verb: str, tmp_path: Path) -> None:
    call, given, other = VERBS[verb], GIVEN[kind](), GIVEN[kind]()
    call(saved(state_of(given), tmp_path / "in.pt"), tmp_path / "out.pt")
    found = call(given, None)
    assert len(list(tmp_path.iterdir())) == 2, "nothing is written"
    assert_same_objects(state_of(given), state_of(other))
    call(given, tmp_path / "again.pt")
    for name in ("out.pt", "again.pt"):
        assert_same_objects(load(tmp_path / name, weights_only=False), found, storages=verb != "average")


@looped("verb", VERBS)
def test_open_checkpoints_and_files(verb: str, tmp_path: Path) -> None:
    call = VERBS[verb]
    file = saved(state_of(GIVEN["checkpoint"]()), tmp_path / "in.pt")
    call(file, tmp_path / "out.pt")
    expected = load(tmp_path / "out.pt", weights_only=False)
    made = call(ckptool.open(file), None)
    assert isinstance(made, ckptool.Checkpoint)
    ckptool.save(made, tmp_path / "saved.pt")
    assert_same_objects(expected, load(tmp_path / "saved.pt", weights_only=False))
    if verb not in ("average", "warm_start"):  # which read it more than once
        with file.open("rb") as opened:
            call(opened, tmp_path / "of_file.pt")
        assert (tmp_path / "of_file.pt").read_bytes() == (tmp_path / "out.pt").read_bytes()
        with pytest.raises(ckptool.CkptoolError, match=r"output|write"), file.open("rb") as opened:
            call(opened, None)


def test_a_checkpoint_that_is_clean_already_is_not_the_file_it_came_from(tmp_path: Path) -> None:
    file = saved(wrapped().state_dict(), tmp_path / "in.pt")
    ckptool.strip_module(ckptool.strip_module(ckptool.open(file)), tmp_path / "out.pt")
    assert "0.weight" in load(tmp_path / "out.pt")
    part = ckptool.open(f"{saved({'a': load(file), 'b': 1}, tmp_path / 'two.pt')}#a")
    ckptool.strip_module(part, tmp_path / "part.pt", prefix="module.")
    assert next(iter(load(tmp_path / "part.pt"))) == "0.weight"


@pytest.mark.filterwarnings("ignore")
def test_random_graphs() -> None:
    """Whatever people save: what nothing changed about stays as it is, also objects that only their own code makes."""
    kept = 0
    for graph in filter(None, map(saved_graph, range(30))):
        given, other, expected = (torch.load(io.BytesIO(graph.data), weights_only=False) for _ in range(3))
        try:
            done = ckptool.edit(given, set={"note": 1})
            expected["note"] = 1
            assert_same_objects(expected, done, tuples=True)
            kept += 1
        except AssertionError as error:  # a container that an object of somebody's own class holds, too
            assert "same object" in str(error) and graph.kinds & OWN, f"seed {graph.seed}: {error}"
        except ckptool.CkptoolError as error:  # such an object that holds all of the checkpoint, and would change
            assert error.code == "unsafe-global" and graph.kinds & OWN, f"seed {graph.seed}: {error}"
        assert_same_objects(given, other, tuples=True)
    assert kept > 20


OWN = {"people", "nested class", "mapping", "sequence", "module", "training", "other mapping"}


def test_looking_at_objects(tmp_path: Path) -> None:
    model = wrapped()
    state = model.state_dict()
    file = saved(state, tmp_path / "a.pt")
    assert {row.address for row in ckptool.inspect(model, stats=True).tensors} == set(state)
    assert ckptool.show(model, at="module.0.weight").values is not None
    assert ckptool.diff(model, file).same and ckptool.diff(file, state).same
    found = ckptool.verify(model, digest=True)
    assert not found.problems and found.digest is not None
    assert found.digest == ckptool.verify(file, digest=True).digest
    assert ckptool.report(model, state, against=model.module, out=tmp_path / "r.html").out == str(tmp_path / "r.html")
    assert "strip-module FILE" in str(ckptool.doctor(state)) or ckptool.doctor(state).findings
    assert ckptool.doctor(file, against=model.module).findings
    assert ckptool.spec(model).target.tensors.keys() == ckptool.spec(model.module).target.tensors.keys()
    stripped = ckptool.strip_module(model)
    assert ckptool.find_rules(stripped, stripped).rules is not None
    for name in ("scan", "recover"):
        with pytest.raises(ckptool.CkptoolError, match=f"{name} .*was given DataParallel"):
            getattr(ckptool, name)(model)


def test_models_are_loaded_from_memory(tmp_path: Path) -> None:
    model, other = wrapped(), nn.DataParallel(wrapped().module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    for given in (other.state_dict(), other, ckptool.open(other)):
        target = wrapped()
        assert ckptool.load_into(target, given).applied
        assert_same_objects(dict(other.module.state_dict()), dict(target.module.state_dict()))
    with pytest.raises(ckptool.CkptoolError) as caught:
        ckptool.warm_start({"nothing.weight": torch.ones(3)}, model)
    assert caught.value.code == "plan-refused"
    ckptool.save(other, tmp_path / "saved.pt")
    assert_same_objects(other.state_dict(), load(tmp_path / "saved.pt"))


def test_bundles_in_memory(tmp_path: Path) -> None:
    model = wrapped()
    file = saved({"w.weight": torch.ones(3)}, tmp_path / "d.pt")
    given = model.state_dict()
    made = ckptool.bundle({"g": model, "same": given, "d": file, "e": {"a.weight": numpy.ones(2)}}, values={"epoch": 3})
    assert list(made) == ["g", "same", "d", "e", "epoch"]
    assert made["same"]["module.0.weight"] is given["module.0.weight"]
    assert made["g"]["module.0.weight"].data_ptr() == given["module.0.weight"].data_ptr()
    assert torch.equal(made["d"]["w.weight"], torch.ones(3))
    parts = ckptool.unbundle(made, only=["g", "epoch"])
    assert list(parts) == ["g", "epoch"] and parts["g"]["module.0.weight"] is made["g"]["module.0.weight"]
    ckptool.unbundle(parts, tmp_path / "parts")
    assert (tmp_path / "parts" / "g.pt").is_file()
    more = ckptool.bundle({"h": file}, file=made, drop="same")
    assert list(more) == ["g", "d", "e", "epoch", "h"]


def test_averages_and_adapters(tmp_path: Path) -> None:
    one, two = ({"fc.weight": torch.full((4, 4), value), "n": torch.tensor(7)} for value in (1.0, 3.0))
    made = ckptool.average([one, saved(two, tmp_path / "two.pt")])
    assert torch.equal(made["fc.weight"], torch.full((4, 4), 2.0))
    assert ckptool.average([one, two])["n"] is two["n"]
    adapter = {"lora_unet_fc.lora_down.weight": torch.ones(2, 4), "lora_unet_fc.lora_up.weight": torch.ones(4, 2)}
    merged = ckptool.lora_merge(one, adapter)
    assert torch.equal(merged["fc.weight"], torch.full((4, 4), 3.0)) and merged["n"] is one["n"]
    with pytest.raises(ckptool.CkptoolError, match=r"cannot hold[\s\S]*out='adapter/'"):
        ckptool.lora_extract(two, one, rank=1)
    assert ckptool.lora_extract(two, one, tmp_path / "adapter/", rank=1).output


class Tagged(torch.Tensor):
    """A class of somebody's own."""


def tagged(value: float) -> torch.Tensor:
    made = torch.full((2,), value)
    made.source = "here"  # type: ignore[attr-defined]
    return made


KINDS: dict[str, Callable[[float], Any]] = {
    "buffer": lambda value: nn.Buffer(torch.full((2,), value)),
    "attributes": tagged,
    "subclass": lambda value: torch.full((2,), value).as_subclass(Tagged),
    "sparse": lambda value: (torch.eye(2) * value).to_sparse(),
    "quantized": lambda value: torch.quantize_per_tensor(torch.full((2,), value), 0.1, 0, torch.qint8),
    "array": lambda value: numpy.full(2, value),
}


@pytest.mark.filterwarnings("ignore")
@looped("kind", KINDS)
def test_other_kinds_of_tensors_stay_themselves_and_have_no_mean(kind: str) -> None:
    one = {"module.w": torch.ones(2), "module.x": KINDS[kind](1.0)}
    assert ckptool.strip_module(one)["x"] is one["module.x"]
    assert ckptool.average([one, one])["module.x"] is one["module.x"]
    with pytest.raises(ckptool.CkptoolError, match=r"module\.x has no mean") as caught:
        ckptool.average([one, {"module.w": torch.ones(2), "module.x": KINDS[kind](2.0)}])
    assert caught.value.code == "unsupported"


def test_the_type_and_attributes_of_a_state_dict_stay() -> None:
    class Named(collections.OrderedDict):  # type: ignore[type-arg]
        pass

    given = Named(wrapped().state_dict())
    given._metadata = {"module": {"version": 1}}  # type: ignore[attr-defined]
    done = ckptool.strip_module(given)
    assert type(done) is collections.OrderedDict and done._metadata == {"": {"version": 1}}


def test_rules_and_layouts_as_they_are_called() -> None:
    given = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
    assert list(ckptool.rename(given, {"a.*": "first.*"})) == ["first.weight", "b.weight"]
    assert list(ckptool.warm_start(given, {"c.weight": torch.ones(2)}, rename={"a.*": "c.*"})) == ["c.weight"]
    assert ckptool.average(each for each in (given, given)).keys() == given.keys()
    with pytest.raises(ckptool.CkptoolError, match="layout vit-timm"):
        ckptool.translate(given, rules="vit-timm")


def test_the_configuration_of_an_adapter_in_memory() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": {"fc"}, "runtime": object()}

    base = {"fc.weight": torch.zeros(4, 4)}
    names = "base_model.model.fc.lora_A.weight", "base_model.model.fc.lora_B.weight"
    adapter = {names[0]: torch.ones(2, 4), names[1]: torch.ones(4, 2)}
    for config in (Config(), {"r": 2, "lora_alpha": 4, "target_modules": ["fc"]}):
        assert torch.equal(ckptool.lora_merge(base, adapter, config=config)["fc.weight"], torch.full((4, 4), 4.0))
    with pytest.raises(ckptool.CkptoolError, match="int is not an adapter's configuration"):
        ckptool.lora_merge(base, adapter, config=3)


def test_values_are_not_cast_or_saved_without_their_mask(tmp_path: Path) -> None:
    given = {"w": numpy.ma.masked_array([1.0, 2.0], mask=[False, True]), "v": numpy.ones(2)}
    done = ckptool.cast(given, numpy.float16)
    assert done["w"] is given["w"] and done["v"].dtype == numpy.float16
    refused(ckptool.CkptoolError, tmp_path, lambda: ckptool.save(given, tmp_path / "a.safetensors"), "MaskedArray at w")
    with pytest.raises(ckptool.CkptoolError, match=r"nothing was cast: 1 floating tensor .*Tagged"):
        ckptool.cast({"w": torch.ones(2).as_subclass(Tagged)}, torch.bfloat16)


# Open files -----------------------------------------------------------------------------------------------------------


def test_what_gives_no_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    odd = type("Odd", (), {"read": lambda self, n=-1: "text"})()
    with path.open("wb") as writable, path.open() as text:
        for file, words in {
            io.StringIO("text"): "open as text",
            3: "neither a path nor an open file",
            None: "neither a path nor an open file",
            odd: "a bytes-like object is required",
            writable: "cannot be read from",
            text: "open as text",
        }.items():
            with pytest.raises(UsageError, match=words):
                source_of(file)
    refused(UsageError, tmp_path, lambda: source_of(writable), "cannot be read from")


@pytest.mark.parametrize("at", [0, 3, 64])
def test_an_open_file_is_read_from_where_it_stands_and_in_place(at: int, tmp_path: Path) -> None:
    path, out = tmp_path / "x", tmp_path / "out.pt"
    value = {"module.w": torch.randn(300, 100), "module.v": torch.randn(90, 40).t(), "module.e": torch.ones(3).half()}
    save_file({name: tensor.contiguous() for name, tensor in value.items()}, tmp_path / "a.safetensors")
    torch.save(value, tmp_path / "a.pt")
    for whole in (tmp_path / "a.pt", tmp_path / "a.safetensors"):
        path.write_bytes(bytes(range(at)) + whole.read_bytes())
        with path.open("r+b") as file:
            file.seek(at)
            found = source_of(file)
            assert found.read(0, found.size) == whole.read_bytes() and file.tell() == path.stat().st_size
            with pytest.raises(CkptoolError):
                found.read(0, found.size + 1)
            file.seek(at)
            opened = ckptool.open(file)
            assert opened.source is not None and opened.source.is_at(path)  # and no copy of it
            file.seek(at)
            mapped = ckptool.load(file)
        assert found.read(0, 1) == whole.read_bytes()[:1]  # also when it is closed
        assert_same_objects(dict(ckptool.load(whole)), dict(mapped))
        assert (opened["module.v"].numpy() == value["module.v"].numpy()).all()
        ckptool.strip_module(opened, out, overwrite=True, verify=True)
        ckptool.strip_module(whole, tmp_path / "wanted.pt", overwrite=True)
        assert out.read_bytes() == (tmp_path / "wanted.pt").read_bytes()
    with path.open("rb") as file:
        file.seek(0, io.SEEK_END)
        refused(Truncated, tmp_path, lambda: source_of(file), "at its end")


class Unpicklable:
    def __init__(self, value: float) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot be pickled")


def mapped(value: float) -> Any:
    """A tensor as `torch.vmap` hands it to the function that it maps."""
    kept: list[Any] = []
    torch.vmap(lambda row: (kept.append(row), row)[1])(torch.full((2, 3), value))
    return kept[0]


UNSAVED: dict[str, Callable[[float], Any]] = {
    "oneDNN": lambda value: torch.full((2, 3), value).to_mkldnn(),
    "vmap": mapped,
    "jagged": lambda value: torch.nested.nested_tensor([torch.full((2,), value)], layout=torch.jagged),
    "unpicklable": Unpicklable,
    "function": lambda value: lambda: value,
    "generator": lambda value: (item for item in [value]),
    "local tuple": lambda value: collections.namedtuple("local", "value")(value),
    "local dictionary": lambda value: type("Local", (dict,), {})(value=value),
    "own tensor": lambda value: torch.full((2,), value).as_subclass(type("Own", (torch.Tensor,), {})),
    "masked": lambda value: torch.masked.masked_tensor(torch.full((2,), value), torch.tensor([True, False])),
    "module": lambda value: nn.Linear(1, 1).requires_grad_(bool(value)),
    "bytes": lambda value: io.BytesIO(bytes([int(value)])),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@looped("kind", UNSAVED)
def test_what_no_file_holds_stays_itself_and_is_equal_to_nothing_else(kind: str, tmp_path: Path) -> None:
    one, other = (UNSAVED[kind](value) for value in (1.0, 0.0))
    state = {"module.a": torch.ones(2), "module.b": torch.ones(2), "module.x": one}
    assert ckptool.diff(state, dict(state)).same
    assert not ckptool.diff(state, {**state, "module.x": other}).same
    for result in (ckptool.strip_module(state), ckptool.cast(ckptool.strip_module(state), dtype="f16")):
        assert result["x"] is one
    assert ckptool.inspect(state).tensors and ckptool.doctor(state).file == ""
    refused("unsupported", tmp_path, lambda: ckptool.save(state, tmp_path / "a.pt"), "module.x")


NOTED: dict[str, Call] = {
    "weights-sum": lambda given, out: ckptool.average([given, given], out, weights=[1, 1]),
    "new-ties": lambda given, out: ckptool.slim(given, out, dedup=True),
}


@looped("code", NOTED)
def test_notes_on_results_in_memory_are_warnings(code: str, tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(300), "b.weight": torch.ones(300)}
    (note,) = NOTED[code](state, tmp_path / "out.pt").notes
    assert note.code == code
    with pytest.warns(UserWarning, match=re.escape(f"{note.message} ({code})")) as raised:
        result = NOTED[code](state, None)
    assert len(raised) == 1 and raised[0].filename == __file__
    assert_same_objects(result, load(tmp_path / "out.pt"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_tensors_are_not_said_to_be_on_a_device_that_is_not_there(tmp_path: Path) -> None:
    state = weights()
    refused("unsupported", tmp_path, lambda: ckptool.remap(state, to="cuda:0"), "no cuda:0")
    assert ckptool.remap(state, to="cuda:0", dry_run=True).summary
    ckptool.remap(state, tmp_path / "out.pt", to="cuda:0")
    assert ckptool.remap(ckptool.open(state), to="cpu")
    entries = dict(ckptool.open(tmp_path / "out.pt"))
    moved = ckptool.remap(ckptool.open(tmp_path / "out.pt"), to="cuda:1")
    assert {entry.device for entry in moved.values()} == {"cuda:1"}
    assert ckptool.cast(entries, dtype="f16")
