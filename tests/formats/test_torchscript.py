"""TorchScript files: the state dict that torch.jit.load gives, bit for bit; the program as text; what pretends to be
one."""

from __future__ import annotations

import itertools
import pickletools
import shlex
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.tree import find, tensors
from ckptool.errors import Ambiguous, Corrupt, LimitExceeded, Unsupported, UsageError
from ckptool.formats import read, torchscript
from tests.support.cli import Run
from tests.support.files import load, written
from tests.support.zips import with_record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.arange(3))  # torch puts parameters before it all the same
        self.w = nn.Parameter(torch.randn(2, 3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.plain, self.listed = torch.full((2,), 7.0), [torch.zeros(1), torch.ones(2)]
        self.number, self.numbers, self.table = 3, [1, 2], {"a": torch.ones(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.w.t() + self.first.sum() + self.passing.sum() + self.plain.sum() + self.number
        return out + self.listed[0].sum() + self.numbers[0] + self.table["a"].sum()


class Net(nn.Module):
    """Nested, with buffers, ties, a module in two places, a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Inner()
        self.again = self.a
        self.seq = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.seq[0].weight
        self.values = nn.ParameterList([nn.Parameter(torch.ones(1))])
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.seq(x)) + self.again(x).sum() + self.tied(x).sum() + self.turned.sum()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Embedding(3, 2).bfloat16(), nn.LayerNorm(2).double())


MODELS: dict[str, Any] = {
    "scripted": lambda: torch.jit.script(net()),
    "traced": lambda: torch.jit.trace(net(), torch.randn(4, 3)),
    "linear": lambda: torch.jit.script(nn.Linear(2, 3, bias=False)),
    "recurrent": lambda: torch.jit.script(nn.LSTM(3, 2, num_layers=2)),
    "of several types": lambda: torch.jit.trace_module(half(), {}),
    "convolutions": lambda: torch.jit.script(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())),
    "weight norm": lambda: torch.jit.trace(nn.utils.weight_norm(nn.Linear(2, 2)), torch.ones(1, 2)),
    "quantized": lambda: torch.jit.script(quantized()),
    "mostly quantized": lambda: torch.jit.script(quantized(90)),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(net().seq)),
}


def quantized(size: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(size, 4), nn.ReLU(), nn.LayerNorm(4)))  # type: ignore[no-any-return]


def script_file(name: str, path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of one of the models, and the state dict that torch gives for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MODELS[name]()
        torch.jit.save(model, str(path))
        return path, torch.jit.load(str(path)).state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_the_state_dict_is_the_one_that_torch_gives(name: str, tmp_path: Path) -> None:
    file, expected = script_file(name, tmp_path / "model.jit")
    opened = read(file)
    assert opened.container == torchscript.NAME and list(opened.tree) == ["state_dict", "attributes"]
    names = opened.tree["state_dict"]
    assert list(names) == list(expected)
    for key, entry in names.items():
        tensor = expected[key]
        assert isinstance(entry, TensorEntry) and not any(entry.flags)
        assert (entry.shape, entry.stride) == (tuple(tensor.shape), tensor.stride()), key
        assert torch.equal(entry.torch(), tensor) and entry.torch().dtype == tensor.dtype, key


def of_torch_1_3(file: Path, out: Path) -> Path:
    """The archive as the C++ of torch 1.3 wrote it: view metadata (None) behind each persistent id, fewer records."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith(("byteorder", "serialization_id", "format_version", "storage_alignment")):
                continue
            if info.filename.endswith(".pkl"):
                ops = [(op.name, at) for op, _, at in pickletools.genops(data) if "PUT" not in op.name]
                ids = [at for (_, at), (after, _) in itertools.pairwise(ops) if after == "BINPERSID"]
                for at in reversed(ids):
                    data = data[:at] + b"N" + data[at:]
            new.writestr(info.filename, b"1\n" if info.filename.endswith("/version") else data)
    return out


def test_archives_of_torch_1_2_to_1_4_are_read_and_converted_as_torch_reads_them(tmp_path: Path) -> None:
    for name in ("scripted", "of several types"):
        file, expected = script_file(name, tmp_path / f"{name}.new")
        old = of_torch_1_3(file, tmp_path / f"{name}.ptl")
        loaded = torch.jit.load(str(old)).state_dict()
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)
        assert ckptool.verify(old).fine and "__torch__" in str(ckptool.show(f"{old}#code").to_dict())
        ckptool.convert(old, tmp_path / f"{name}.pt", verify=True)
        again = load(tmp_path / f"{name}.pt")
        assert list(again) == list(loaded) and all(torch.equal(again[key], loaded[key]) for key in loaded)
        assert ckptool.diff(file, old).same


def test_what_the_cpp_of_torch_1_4_pickled_beside_no_program(tmp_path: Path) -> None:
    """Python's loader refuses these, C++ reads them; what is written from them is read by both."""
    tree = {"w": torch.arange(6.0).view(2, 3), "t": torch.ones(3, dtype=torch.int64)}
    tree["tied"] = tree["w"]
    torch.save(tree, tmp_path / "new.pt")
    old = of_torch_1_3(tmp_path / "new.pt", tmp_path / "old.pt")
    assert ckptool.verify(old).fine and ckptool.diff(old, tmp_path / "new.pt").same
    ckptool.rename(old, ["w => v"], out=tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["v"], tree["w"])


def test_the_code_is_shown_as_text_and_never_run(tmp_path: Path) -> None:
    file, _ = script_file("scripted", tmp_path / "model.jit")
    seen: list[str] = []
    armed = [True]
    watched = ("import", "exec", "compile", "os.system", "subprocess.Popen", "socket.connect")
    sys.addaudithook(lambda event, args: seen.append(f"{event} {args}") if armed[0] and event in watched else None)
    opened = read(file)
    code = opened.extras["code"]()
    armed[0] = False
    assert not [event for event in seen if "__torch__" in event or not event.startswith("import")]
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".py") and "linear" in name]
        text = archive.read(name).decode()
    place = name.partition("/")[2]
    shown = ckptool.show(f"{file}#{place}")
    assert shown.entry == text and str(shown).startswith("class Linear(Module):\n  __parameters__")
    assert find({"code": code}, place)[1] == text
    assert f"{place.rpartition('/')[2]}: a string of" in str(ckptool.show(file, at="code"))


def test_what_stands_beside_a_traced_module(tmp_path: Path) -> None:
    file, _ = script_file("traced", tmp_path / "model.jit")
    beside = read(file).extras
    assert set(beside) == {"code", "constants", "traced_inputs"}
    assert all(isinstance(part, TensorEntry) for part in beside["constants"]())
    model = torch.jit.script(nn.Linear(1, 1))
    torch.jit.save(model, str(tmp_path / "extra.jit"), _extra_files={"labels.txt": "cat\ndog"})
    assert read(tmp_path / "extra.jit").extras["extra"]() == {"labels.txt": "cat\ndog"}


def test_mobile_bytecode(tmp_path: Path) -> None:
    model = torch.jit.script(net())
    model._save_for_lite_interpreter(str(tmp_path / "model.ptl"))
    opened = read(tmp_path / "model.ptl")
    assert list(opened.tree["state_dict"]) == list(model.state_dict()) and "bytecode" in opened.extras
    assert opened.extras["bytecode"]()[1][0].startswith("__torch__.")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_of_attributes_loads_and_what_is_printed_runs(name: str, tmp_path: Path, run: Run) -> None:
    file, expected = script_file(name, tmp_path / "model.jit")
    done = run("convert", f"{file}#attributes", "-o", tmp_path / "out.pt")
    assert (done.code == 0) == (tmp_path / "out.pt").exists()
    if done.code == 0:
        torch.load(tmp_path / "out.pt")
    else:
        assert "made by its program alone" in done.err
        kept = tmp_path / "kept.safetensors"  # what ckptool keeps there is no more of a torch file on its way back
        assert run("convert", f"{file}#attributes", "-o", kept, "--all").code == 0
        back = run("convert", kept, "-o", tmp_path / "out.pt", "--all")
        assert back.code == 2 and "made by its program alone" in back.err and not (tmp_path / "out.pt").exists()
    printed = [line.partition("ckptool ")[2] for line in run("doctor", file).out.split("\n") if " convert " in line]
    assert len(printed) == (name not in ("frozen", "mostly quantized"))
    assert all(run(*shlex.split(line)).code == 0 for line in printed)
    fix = run("bundle", f"a={file}", "-o", tmp_path / "out.tar").err.rpartition(": ckptool ")[2]
    assert run(*shlex.split(fix.replace("OUT", str(tmp_path / "weights")))).code == 0, fix
    assert (tmp_path / "weights.safetensors").exists() == bool(expected)


@pytest.mark.parametrize("verb", ["remap", "add_module", "rename", "cast", "edit"])
def test_changes_that_would_lose_the_program_are_refused(verb: str, tmp_path: Path) -> None:
    file, _ = script_file("scripted", tmp_path / "model.jit")
    rules = str(written(b"- a.w => b.w\n", tmp_path / "rules.yaml"))
    given: dict[str, Any] = {"remap": {"to": "cuda:0"}, "add_module": {}, "rename": {"rules_file": rules}}
    options = (given | {"cast": {"dtype": "bf16"}, "edit": {"drop": ["attributes"]}})[verb]
    for out, in_place in ((tmp_path / "out.pt", False), (None, True)):
        with pytest.raises((Unsupported, UsageError)) as refused:
            getattr(ckptool, verb)(file, out=out, in_place=in_place, **options)
        assert "torchscript" in refused.value.what or "ckptool convert" in refused.value.fix
    assert {path.name for path in tmp_path.iterdir()} <= {"model.jit", "rules.yaml"}


# Files that are made to mislead ---------------------------------------------------------------------------------------


def test_two_modules_in_one_archive_are_ambiguous(tmp_path: Path) -> None:
    file, _ = script_file("linear", tmp_path / "model.jit")
    out = with_record(file, tmp_path / "out.pt", "other/data.pkl", b"\x80\x02).")
    with pytest.raises(Ambiguous, match="two"):
        read(out)


def test_code_that_inflates_without_end_is_refused(tmp_path: Path) -> None:
    file, _ = script_file("linear", tmp_path / "model.jit")
    out = tmp_path / "out.jit"
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(out, "w") as again:
        for info in archive.infolist():
            again.writestr(info.filename, archive.read(info))
        for n in range(3):
            again.writestr(f"{file.stem}/code/{n}.py", b" " * (20 << 20), zipfile.ZIP_DEFLATED)
    assert out.stat().st_size < 1 << 20
    with pytest.raises(LimitExceeded, match="of code"):
        read(out)


HEADER = b"class Linear(Module):\n  __parameters__ = [%s]\n  __buffers__ = [%s]\n"


def with_code(text: bytes, tmp_path: Path) -> Path:
    file, _ = script_file("linear", tmp_path / "model.jit")
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".py")]
    return with_record(file, tmp_path / "out.jit", name, text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (HEADER % (b'"weight", ', b""), ["weight"]),
        (HEADER % (b"", b'"weight", '), ["weight"]),
        (HEADER % (b"", b'"other", '), []),
        (b'class Linear(Module):\n  __parameters__ = ["weight", ]\n', ["weight"]),
        (b"class Linear(Module):\n  __parameters__ = []\n", ["weight"]),  # before 1.6 buffers were not told
        (b"class Linear:\n  pass\n", []),
        (b"class Linear(NamedTuple):\n  pass\n", []),
        (b"\xff\xfe not a program", ["weight"]),
        (b"", ["weight"]),
    ],
)
def test_the_headers_of_classes_say_what_the_state_dict_has(text: bytes, names: list[str], tmp_path: Path) -> None:
    opened = read(with_code(text, tmp_path))
    assert list(opened.tree["state_dict"]) == names and sum(1 for _ in tensors(opened.tree)) == 1


def test_attributes_without_a_name_or_with_one_name_twice_are_corrupt(tmp_path: Path) -> None:
    file, _ = script_file("linear", tmp_path / "model.jit")
    for state in (
        b"}(K\x01K\x02u",
        b"}(X\x03\0\0\0a.bK\x01X\x01\0\0\0a" + b"c__torch__.m\nM\n)\x81}(X\x01\0\0\0bK\x02ubu",
    ):
        pickle = b"\x80\x02c__torch__\nNet\n)\x81" + state + b"b."
        out = with_record(file, tmp_path / "out.jit", f"{file.stem}/data.pkl", pickle)
        with pytest.raises(Corrupt):
            read(out)


def test_names_of_code_that_stand_in_each_others_way_are_ambiguous(tmp_path: Path) -> None:
    file, _ = script_file("linear", tmp_path / "model.jit")
    for name in ("/".join("a" * 99) + ".py", "__torch__.py/b.py", "__torch__/torch.py"):
        out = with_record(file, tmp_path / "out.jit", f"{file.stem}/code/{name}", b"text")
        twice = with_record(out, tmp_path / "twice.jit", f"{file.stem}/code/{name}/b.py", b"below")
        with pytest.raises(Ambiguous, match="is a file and a folder"):
            read(twice).extras["code"]()


def test_a_program_is_never_written() -> None:
    from ckptool import formats

    assert not formats.named("torchscript").writable
    with pytest.raises(UsageError, match="read but not written"):
        formats.by_name("torchscript")
