"""Tensors and storages that contradict themselves, or ask for more than there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import ckptool
from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.nodes import Object
from ckptool.errors import BadTensor, CkptoolError, Conflict, Corrupt, Unsupported
from ckptool.formats import read
from fixtures.sparse import make_sparse
from tests.support.files import load, torch_bytes, written
from tests.support.hostile_inputs import HOOKS, name, pickle_zip, state_pickle, storage, tensor
from tests.support.hostile_tensors import ACCEPTED, REFUSED, W
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.watched import LOOKING, Seen, Watched, watched


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("watched")) as process:
        yield process


@pytest.fixture
def see(watch: Watched, tmp_path: Path) -> Callable[..., Seen]:
    def seen(contents: bytes, *commands: str) -> Seen:
        found = watch.run(written(contents, tmp_path / "seen.pt"), *((commands,) if commands else ()))
        found.assert_bounded()
        assert not found.violations
        return found

    return seen


def opened_input(title: str, folder: Path) -> ckptool.Checkpoint:
    return read(written(pickle_zip(*ACCEPTED[title]), folder / "input.pt"))


@looped("title", REFUSED)
def test_impossible_tensors_are_refused_in_words(title: str, see: Callable[..., Seen], tmp_path: Path) -> None:
    pickle, records, error = REFUSED[title]
    contents = pickle_zip(pickle, records)
    codes = set(see(contents, "inspect", "convert", "remap").codes().values())
    assert codes <= {"corrupt", "bad-tensor", "unsupported"} and len(codes) == 1
    with pytest.raises(error) as caught:
        read(written(contents, tmp_path / "input.pt"))
    assert str(tmp_path / "input.pt") in caught.value.what and len(str(caught.value)) < 4_000


@pytest.mark.parametrize("title", ACCEPTED)
def test_odd_tensors_are_shown(title: str, see: Callable[..., Seen]) -> None:
    codes = see(pickle_zip(*ACCEPTED[title])).codes()
    assert {codes[command] for command in LOOKING} <= {"ok"}
    assert set(codes.values()) <= {"ok", "conflict", "unsupported", "usage"}, codes


def test_a_tensor_beyond_its_storage_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(BadTensor, match=r"shape \[5\].*needs 20 bytes.*has 16"):
        read(written(pickle_zip(state_pickle({"w": tensor((5,), (1,))})), tmp_path / "a.pt"))


def test_an_expanded_tensor_of_4_tb_is_not_written_out(see: Callable[..., Seen], tmp_path: Path) -> None:
    codes = see(pickle_zip(*ACCEPTED["92-expanded"])).codes()
    assert codes["convert"] == "conflict" and codes["convert --all"] == codes["convert to pt"] == "ok"
    file = written(pickle_zip(*ACCEPTED["92-expanded"]), tmp_path / "a.pt")
    with pytest.raises(Conflict, match=r"4\.00 TB to write, 4 B stored") as caught:
        ckptool.convert(file, tmp_path / "out.safetensors")
    assert "--exclude" in caught.value.fix and not (tmp_path / "out.safetensors").exists()
    ckptool.convert(file, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").stat().st_size < 5_000


def test_overlapping_views_are_copied(tmp_path: Path) -> None:
    x = torch.arange(4.0).as_strided((3, 2), (1, 1))
    file = written(torch_bytes({"w": x, "base": x.as_strided((4,), (1,))}), tmp_path / "a.pt")
    done = ckptool.convert(file, tmp_path / "out.safetensors")
    assert [note.code for note in done.notes] == ["sharing-lost", "resolved-views"]
    assert read(tmp_path / "out.safetensors")["w"].numpy().tolist() == x.tolist()


def test_storage_keys_are_never_paths(tmp_path: Path) -> None:
    """The records of an archive are found in its directory; what stands on the disk under such a name is not looked
    at."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0").write_bytes(bytes(16))
    for key in ("../data/0", str(tmp_path / "data" / "0"), "0"):
        contents = pickle_zip(state_pickle({"w": tensor((4,), (1,), of=storage(key=key))}), {})
        with pytest.raises(Corrupt, match="has no record"):
            read(written(contents, tmp_path / "a.pt"))


def test_smuggled_bytes_are_counted(tmp_path: Path) -> None:
    notes = [note.message for note in opened_input("98-smuggled", tmp_path).notes if note.code == "unused-record"]
    assert len(notes) == 1 and "200 bytes" in notes[0]


def test_a_big_endian_file_is_byte_swapped(tmp_path: Path) -> None:
    swapped = {"data/0": torch.arange(4.0).numpy().astype(">f4").tobytes(), "byteorder": b"big"}
    entry = read(written(pickle_zip(state_pickle({"w": W}), swapped), tmp_path / "a.pt"))["w"]
    assert entry.numpy().tolist() == [0, 1, 2, 3]
    with pytest.raises(Corrupt, match="byteorder"):
        read(written(pickle_zip(state_pickle({"w": W}), swapped | {"byteorder": b"middle"}), tmp_path / "b.pt"))


def test_sparse_indices_are_checked_when_the_tensor_is_built(tmp_path: Path) -> None:
    """To look at them all on opening would be to read the data; what torch builds of them is checked by torch."""
    opened_input("100-indices-out-of-range", tmp_path)
    with pytest.raises(CkptoolError, match="sparse"):
        ckptool.load(tmp_path / "input.pt")
    opened_input("100-sparse", tmp_path)
    found = ckptool.load(tmp_path / "input.pt")["w"]
    assert found.is_sparse and found._nnz() == 2


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_read_and_converted(tmp_path: Path) -> None:
    w = torch.quantize_per_channel(torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8)
    found = read(written(torch_bytes({"w": w}), tmp_path / "a.pt"))["w"]
    assert isinstance(found, Composite) and (found.kind, found.shape) == ("quantized", (2, 3))
    ckptool.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert_same_objects(load(tmp_path / "a.pt"), load(tmp_path / "b.pt"))


@pytest.mark.filterwarnings("ignore")
def test_meta_nested_and_lazy_tensors_are_read(tmp_path: Path) -> None:
    values = {
        "meta": torch.empty(2, 3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch._neg_view(torch.ones(2)),
    }
    file = written(torch_bytes(values), tmp_path / "a.pt")
    found = read(file)
    assert isinstance(found["meta"], Composite) and found["meta"].shape == (2, 3)
    assert isinstance(found["nested"], Composite)
    assert found["conj"].numpy().tolist() == [1 - 2j] and found["neg"].numpy().tolist() == [-1, -1]
    with pytest.raises(Unsupported, match=r"meta|nested"):
        ckptool.convert(file, tmp_path / "out.safetensors")


def test_every_bit_of_a_number_is_kept(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800000, 1, -(1 << 31), 0x7F800001], dtype=torch.int32)
    file = written(torch_bytes({"model": {"w": bits.view(torch.float32)}}), tmp_path / "a.pt")
    raw = bits.numpy().tobytes()
    for out in ("b.pt", "c.safetensors"):
        ckptool.convert(file, tmp_path / out)
        root = read(tmp_path / out)
        assert (root["w"] if "w" in root else root["model"]["w"]).bytes() == raw
    assert "non-finite" in {note.code for note in ckptool.inspect(file, stats=True).notes}


@pytest.mark.parametrize("title", ["104-nothing", "104-none"])
def test_a_checkpoint_without_tensors_says_so(title: str, tmp_path: Path) -> None:
    assert opened_input(title, tmp_path).tree in ({}, None)
    assert "no tensors" in str(ckptool.inspect(tmp_path / "input.pt"))


@pytest.mark.parametrize("many", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_many_tensors_are_listed_in_linear_time(many: int, tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        make_sparse(tmp_path / "many.pt", 4 * count, count)
        began = time.process_time()
        assert len(ckptool.inspect(tmp_path / "many.pt").tensors) == count
        return time.process_time() - began

    few = min(seconds(many // 10) for _ in range(2))
    assert seconds(many) < 25 * few + 1


def test_more_than_2_31_elements_are_read_and_renamed(tmp_path: Path) -> None:
    make_sparse(tmp_path / "long.pt", (1 << 33) + (1 << 32), 1)
    entry = read(tmp_path / "long.pt")["module.layer0.weight"]
    assert isinstance(entry, TensorEntry) and entry.numel == 3 << 30
    shown = ckptool.show(tmp_path / "long.pt", at="module.layer0.weight", slice="3221225470:")
    assert shown.values is not None and shown.values.tolist() == [0, 0]
    done = ckptool.strip_module(tmp_path / "long.pt", tmp_path / "out.pt", dry_run=True)
    assert done.file_bytes > 12 << 30


def test_optimizer_state_of_missing_parameters_is_noted(tmp_path: Path) -> None:
    opened_input("106-optimizer", tmp_path)
    notes = {note.code: note.message for note in ckptool.inspect(tmp_path / "input.pt").notes}
    assert "1 of 2 states belongs to no parameter: 7" in notes["optimizer-mismatch"]
    good = written(torch_bytes(_trained()), tmp_path / "good.pt")
    assert "optimizer-mismatch" not in {note.code for note in ckptool.inspect(good).notes}


def _trained() -> dict[str, object]:
    net = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    return {"model": net.state_dict(), "optimizer": adam.state_dict()}


def test_ties_are_recorded_and_restored(tmp_path: Path) -> None:
    w = torch.ones(2, 2)
    file = written(torch_bytes({"a.weight": w, "b.weight": w}), tmp_path / "a.pt")
    ckptool.convert(file, tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as stored:
        assert list(stored.keys()) == ["a.weight"] and stored.metadata()["b.weight"] == "a.weight"
    ckptool.convert(tmp_path / "out.safetensors", tmp_path / "back.pt")
    found = load(tmp_path / "back.pt")
    assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_the_container_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    w = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    file = written(torch_bytes({"model": {"fine": torch.ones(2), "odd.weight": w}}), tmp_path / "a.pt")
    with pytest.raises(Unsupported, match=r"odd\.weight"):
        ckptool.convert(file, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_an_unknown_dtype_stays_a_call(tmp_path: Path) -> None:
    call = (
        b"(" + storage("FloatStorage") + b"K\x00K\x04\x85K\x01\x85\x89" + HOOKS + name("torch", "float9_e9m9") + b"tR"
    )
    found = read(
        written(pickle_zip(state_pickle({"w": name("torch._utils", "_rebuild_tensor_v3") + call})), tmp_path / "a.pt")
    )
    assert isinstance(found["w"], Object) and "float9_e9m9" in str(ckptool.show(tmp_path / "a.pt", at="w"))
