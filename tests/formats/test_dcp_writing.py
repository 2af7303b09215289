"""Folders for torch.distributed.checkpoint: torch loads them on any number of ranks, and ckptool gives back what
torch's format cannot say."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool
from ckptool.errors import Conflict, OutputExists, Unsupported
from ckptool.formats import read
from ckptool.formats.dcp import save_plan
from tests.support.engine_folders import save_dcp, training_state
from tests.support.errors import refused
from tests.support.files import saved
from tests.support.looped import looped
from tests.support.same import assert_same_tree

DIVISIONS: list[dict[str, Any]] = [{}, {"ranks": 3}, {"ranks": 4, "shard_dim": 1}]


def odd_state() -> dict[str, Any]:
    """A state with all that torch's format cannot say: ties, ordered dictionaries, integer keys, empties, strides."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    weights["tied.weight"] = weights["0.weight"]
    fused = torch.randn(6, 4)
    return {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "views": [fused[:2], fused[2:4], fused[1:3]],
        "transposed": torch.randn(3, 5).t(),
        "column": torch.randn(6, 3)[:, :2],
        "expanded": torch.ones(1).expand(100),
        "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(5)),
        "tuple": (1, fused, {"x": torch.ones(2)}),
        "empty": {"of all": {}, "list": []},
        3: "an integer as a key",
        "shared": weights["0.bias"],
    }


def written(state: Any, folder: Path, **options: Any) -> Path:
    ckptool.convert(saved(state, folder / "in.pt"), folder / "out.dcp", verify=True, **options)
    return folder / "out.dcp"


def as_torch_reads(folder: Path) -> dict[str, Any]:
    """What stock torch makes of a folder."""
    out = folder.with_name("by-torch.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process loads
        dcp_to_torch_save(folder, out)
    values: dict[str, Any] = torch.load(out, weights_only=False)
    return values


def same_values(a: Any, b: Any) -> bool:
    """True for the same values, whatever the types of keys, kinds of dictionaries and empties."""
    if isinstance(a, torch.Tensor):
        raw = [x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and raw[0].equal(raw[1])
    if isinstance(a, dict):
        a = {str(key): value for key, value in a.items() if not (isinstance(value, dict) and not value)}
        return a.keys() == b.keys() and all(same_values(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_values, a, b))
    return bool(a == b)


# Torch reads it ------------------------------------------------------------------------------------------------------


@looped(("state", "division"), [(state, each) for state in (training_state, odd_state) for each in DIVISIONS])
def test_torch_reads_the_same_values(state: Callable[[], Any], division: Any, tmp_path: Path) -> None:
    folder = written(made := state(), tmp_path, **division)
    if state is odd_state:
        made["empty"].pop("of all")
    found = as_torch_reads(folder)
    assert same_values(made, {key: value for key, value in found.items() if not key.startswith("ckptool.pickle")})
    table = FileSystemReader(folder).read_metadata()
    assert {info.relative_path for info in table.storage_data.values()} == {p.name for p in folder.glob("*.distcp")}
    for index, info in table.storage_data.items():
        raw = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        records = zipfile.ZipFile(io.BytesIO(raw))
        assert records.testzip() is None
        value = torch.load(io.BytesIO(raw), weights_only=True)
        described = table.state_dict_metadata[index.fqn]
        if index.offset is not None:
            sizes = {chunk.offsets: chunk.sizes for chunk in described.chunks}
            assert value.shape == sizes[index.offset] and value.dtype is described.properties.dtype
            at = next(record.header_offset for record in records.infolist() if record.filename.endswith("/0"))
            lengths = [int.from_bytes(raw[at + field :][:2], "little") for field in (26, 28)]
            assert (at + 30 + sum(lengths)) % 64 == 0


# ckptool gives it back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["state.fc.weight.exp_avg", "plain"])
def test_flat_keys_of_an_optimizer_stay_flat(key: str, tmp_path: Path) -> None:
    state = {key: torch.ones(2), "param_groups.fc.weight.lr": 0.1, "state": {"0": {"step": torch.ones(())}}}
    folder = written({"optimizer": state | {"param_groups": [{"params": [0]}]}}, tmp_path)
    assert ckptool.diff(tmp_path / "in.pt", folder).same


def test_what_torch_flattened_has_the_same_names_again(tmp_path: Path) -> None:
    """As torchtitan saves it, which loads no others."""
    groups = {f"param_groups.{name}.{key}": [0.9, 0.95] for name in ("fc.weight", "fc.bias") for key in ("betas", "lr")}
    slots = {f"state.{name}.exp_avg": torch.ones(2) for name in ("fc.weight", "fc.bias")}
    state = {"fc.weight": torch.ones(2), "fc.bias": torch.ones(2), "optimizer": slots | groups}
    folder = save_dcp(state, tmp_path / "step-1")
    out, names = tmp_path / "out.dcp", {*FileSystemReader(folder).read_metadata().state_dict_metadata}
    for change in (partial(ckptool.convert, ranks=2), partial(ckptool.edit, set={"note": "x"})):
        change(folder, out, overwrite=True)
        assert {*FileSystemReader(out).read_metadata().state_dict_metadata} - {"note"} == names
    ckptool.convert(folder, out, optimizer_as="names", overwrite=True)  # as somebody wants it
    assert "optimizer.param_groups.0.betas" in FileSystemReader(out).read_metadata().state_dict_metadata
    ckptool.rename(folder, ["fc.* => head.*"], out, overwrite=True, verify=True)
    loaded = {"optimizer": {"param_groups.head.bias.betas": None}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(loaded, checkpoint_id=out)
    assert loaded == {"optimizer": {"param_groups.head.bias.betas": [0.9, 0.95]}}


VERBS: dict[str, Callable[[Path, Path], Any]] = {
    "rename": lambda file, out: ckptool.rename(file, ["0.* => first.*"], out, verify=True),
    "strip-module": lambda file, out: ckptool.strip_module(file, out, verify=True),
    "cast": lambda file, out: ckptool.cast(file, out, dtype="bf16", exclude=["0.bias"], verify=True),
    "remap": lambda file, out: ckptool.remap(file, out, to="cuda:0", verify=True),
    "edit": lambda file, out: ckptool.edit(file, out, set={"note": "x"}, verify=True),
    "slim": lambda file, out: ckptool.slim(file, out, verify=True),
}


@looped("verb", VERBS)
def test_verbs_on_a_folder_and_on_the_file_that_it_was(verb: str, tmp_path: Path) -> None:
    folder = written(odd_state(), tmp_path, ranks=2)
    VERBS[verb](folder, tmp_path / "changed.dcp")
    VERBS[verb](tmp_path / "in.pt", tmp_path / "changed.pt")
    assert ckptool.diff(tmp_path / "changed.dcp", tmp_path / "changed.pt").same


# A pickle that does not fit ------------------------------------------------------------------------------------------


def exchanged(one: bytes, other: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(one, b"\0").replace(other, one).replace(b"\0", other, 99)


BAD: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda content: b"",
    "no pickle": lambda content: b"no pickle",
    "cut off": lambda content: content[:-9],
    "another root": lambda content: pickle.dumps(1),
    "no tree": lambda content: pickle.dumps({"tree": 1, "recovered": None}),
    "a tree without values": lambda content: pickle.dumps({"tree": {}, "recovered": None}),
    "a name less": lambda content: content.replace(b"parameter", b"meter.par"),
    "a storage of no name": lambda content: content.replace(b'["parameter"', b'["../../etc"'),
    "a storage of an object": lambda content: content.replace(b'["tuple#0"', b'["tuple#9"'),
    "axes that are none": lambda content: content.replace(b'["parameter", null]', b'["parameter", [7]]'[:19] + b" "),
    "tensors beyond their storage": exchanged(b"model.0.weight", b"model.1.weight"),
    "values of another name": exchanged(b"state.1.exp_avg", b"state.3.exp_avg"),
    "another text": lambda content: content.replace(b"an integer as a key", b"a number for the key"[:19]),
}


@looped("change", BAD)
def test_a_pickle_that_does_not_fit_is_passed_over(change: str, tmp_path: Path) -> None:
    """In what torch makes of the folder."""
    state, folder = as_torch_reads(written(odd_state(), tmp_path)), tmp_path / "again"
    content = BAD[change](state["ckptool.pickle"].numpy().tobytes())
    state["ckptool.pickle"] = torch.tensor(list(content), dtype=torch.uint8)
    save_dcp(state, folder)
    found = ckptool.open(folder)
    assert [note.code for note in found.notes if note.code == "side-car-ignored"], found.notes
    assert type(read(folder).tree["model"]) is dict and "of all" not in found["empty"] and "3" in found


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [{}, {1: torch.zeros(2)}])
@pytest.mark.parametrize("mine", [{"ckptool.pickle": torch.ones(3)}, {"ckptool.pickle": {"0": torch.ones(3)}}])
def test_a_name_of_our_own_is_refused_or_comes_back(mine: Any, others: Any, tmp_path: Path) -> None:
    state = {**mine, "w": torch.zeros(2), **others}
    torch.save(state, tmp_path / "a.pt")
    try:
        ckptool.convert(tmp_path / "a.pt", tmp_path / "a.dcp")
    except Unsupported as error:
        assert "ckptool.pickle" in error.what and not (tmp_path / "a.dcp").exists()
    else:
        assert_same_tree(read(tmp_path / "a.pt"), read(tmp_path / "a.dcp"))


class Opaque:
    def __reduce__(self) -> Any:
        return print, ("run",)


def in_itself() -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(2), "in": {}}
    state["in"]["again"] = state["in"]
    return state


W = {"w": torch.ones(2)}
REFUSED: list[tuple[Any, str, dict[str, Any], str]] = [
    *((state, "x.dcp", {}, "unsupported") for state in ({"a.b": W["w"], "a": {"b": W["w"]}}, {0: W["w"], "0": W["w"]},
        [W["w"]], W["w"])),
    *((in_itself(), "x.dcp", {}, "conflict"), (W | {"x": Opaque()}, "x.dcp", {}, "unsafe-global")),
    *((W, out, {"ranks": 2}, "usage") for out in ("x.pt", "x.safetensors")),
    *((W, "x.dcp", options, "usage") for options in ({"shard_dim": 1}, {"ranks": 0}, {"ranks": 1 << 20},
        {"ranks": 2, "shard_dim": -1}, {"shard_size": "1MB"})),
    *((W, "x", {"shard_size": "1MB", "ranks": 2}, "usage"), (W, "x.distcp", {}, "usage")),
]  # fmt: skip


@looped(("state", "out", "options", "code"), REFUSED)
def test_what_it_cannot_hold_or_makes_no_sense(
    state: Any, out: str, options: dict[str, Any], code: str, tmp_path: Path
) -> None:
    file = saved(state, tmp_path / "in.pt")
    refused(code, tmp_path, lambda: ckptool.convert(file, tmp_path / out, **options))


def test_unknown_calls_are_kept_when_asked(tmp_path: Path) -> None:
    folder = written(W | {"x": Opaque()}, tmp_path, keep_unknown=True)
    ckptool.convert(folder, tmp_path / "back.pt", keep_unknown=True)
    assert ckptool.diff(tmp_path / "in.pt", tmp_path / "back.pt").same


def test_an_old_folder_is_replaced_with_what_larger_runs_left(tmp_path: Path) -> None:
    folder = written(training_state(), tmp_path, ranks=4)
    (folder / "__7_0.distcp").write_bytes(b"of a run on eight ranks")
    refused(OutputExists, tmp_path, lambda: written(training_state(), tmp_path))
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(Conflict, match=r"notes\.txt would be deleted"):
        written(training_state(), tmp_path, overwrite=True)
    assert len(list(folder.iterdir())) == 7
    (folder / "notes.txt").unlink()
    written(training_state(), tmp_path, overwrite=True, ranks=2)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_many_views_of_one_storage_are_written_once_each(ranks: int, tmp_path: Path) -> None:
    """A column of a matrix touches all of its storage: as many columns would be as many matrices on disk."""
    matrix = torch.arange(200.0 * 300).reshape(200, 300)
    state = {f"column{number}": matrix[:, number] for number in range(300)} | {"turned": matrix.T, "rows": matrix[::2]}
    file, folder = saved(state, tmp_path / "in.pt"), tmp_path / "out.dcp"
    ckptool.convert(file, folder, ranks=ranks)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16 * file.stat().st_size
    found = ckptool.load(folder)
    assert all(
        torch.equal(found[name], value) and found[name].stride() == value.stride() for name, value in state.items()
    )
    assert len({value.untyped_storage().data_ptr() for value in found.values()}) == 1
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    theirs = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert all(torch.equal(theirs[name], value) for name, value in state.items())


@pytest.mark.parametrize("depth", range(3))
def test_what_contains_itself_is_left_out_by_the_command_that_says_so(depth: int, tmp_path: Path) -> None:
    ring: list[Any] = [torch.ones(1)]
    inner: Any = ring
    for _ in range(depth):
        inner = [torch.zeros(1), inner]
    ring.append(inner)
    file = saved({"a": {"kept": torch.ones(2), "ring": ring}}, tmp_path / "m.pt")
    error = refused("conflict", tmp_path, lambda: ckptool.convert(file, tmp_path / "m.dcp"), "contains itself")
    (command,) = error.fix.commands
    assert command[1:] == ("edit", "FILE", "--drop", "a/ring", "-o", "OUT")
    ckptool.edit(file, tmp_path / "left.pt", drop="a/ring")
    ckptool.convert(tmp_path / "left.pt", tmp_path / "m.dcp")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more bytes of objects are written without a look at what they share."""
    monkeypatch.setattr(save_plan, "MAX_OBJECTS", 1 << 18)


def test_entries_that_share_objects_are_written_sixteen_times_at_most(few: None, tmp_path: Path) -> None:
    """Each entry is by itself in such a folder: what a thousand share would be there a thousand times."""
    shared = SimpleNamespace(words={f"key {number}" for number in range(500)})
    for count in (15, 200):
        file = saved({"w": torch.ones(2), **{f"part {number}": shared for number in range(count)}}, tmp_path / "m.pt")
        if count == 15:
            ckptool.convert(file, tmp_path / "m.dcp", keep_unknown=True)
        else:
            command = partial(ckptool.convert, file, tmp_path / "n.dcp", keep_unknown=True)
            refused("limit-exceeded", tmp_path, command, "share objects")
    own = {f"part {number}": SimpleNamespace(words={str(number) * 1_000}) for number in range(300)}
    ckptool.convert(saved(own, tmp_path / "m.pt"), tmp_path / "n.dcp", keep_unknown=True)


def test_a_vocabulary_has_an_object_for_each_word(few: None, tmp_path: Path) -> None:
    """What torch puts around each is not what entries share."""
    tree = {"w": torch.ones(2), "vocabulary": {f"word {number}": number for number in range(400)}}
    ckptool.convert(saved(tree, tmp_path / "m.pt"), tmp_path / "m.dcp", all=True)
    dcp_to_torch_save(tmp_path / "m.dcp", tmp_path / "torch.pt")
    assert torch.load(tmp_path / "torch.pt")["vocabulary"] == tree["vocabulary"]
