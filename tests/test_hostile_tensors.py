"""Tensors and storages that contradict themselves, or ask for more than there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
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
from tests.support.hostile_inputs import (
    HOOKS,
    ONE,
    integer,
    integers,
    name,
    pickle_zip,
    state_pickle,
    storage,
    tensor,
    text,
)
from tests.support.same import assert_same_objects
from tests.support.watched import LOOKING, Seen, Watched, watched

QINT = b"(" + text("storage") + name("torch", "QInt8Storage") + text("0") + text("cpu") + integer(16) + b"tQ"
INDEX = storage("LongStorage", "i", numel=4)
SCHEME = name("torch", "per_tensor_affine")
CHANNELS = name("torch", "per_channel_affine")


def quantized(shape: tuple[int, ...], stride: tuple[int, ...], parameters: bytes, offset: int = 0) -> bytes:
    """A call of `_rebuild_qtensor`."""
    call = b"(" + QINT + integer(offset) + integers(shape) + integers(stride) + parameters + b"\x89" + HOOKS + b"tR"
    return name("torch._utils", "_rebuild_qtensor") + call


def layout(kind: str) -> bytes:
    return name("torch.serialization", "_get_layout") + text(f"torch.{kind}") + b"\x85R"


def sparse(kind: str, *parts: bytes) -> bytes:
    """A call of `_rebuild_sparse_tensor`."""
    return name("torch._utils", "_rebuild_sparse_tensor") + layout(kind) + b"(" + b"".join(parts) + b"t\x86R"


def longs(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


W = tensor((4,), (1,))
I22 = tensor((2, 2), (2, 1), of=INDEX)
I4 = tensor((4,), (1,), of=INDEX)
V2 = tensor((2,), (1,))
SPARSE = ONE | {"data/i": longs(0, 1, 1, 0)}

# What is refused when the file is opened: pickle, records, error.
REFUSED: dict[str, tuple[bytes, Mapping[str, bytes], type[CkptoolError]]] = {
    "87-missing": (state_pickle({"w": W}), {}, Corrupt),
    "88-short": (state_pickle({"w": W}), {"data/0": bytes(15)}, Corrupt),
    "88-long": (state_pickle({"w": W}), {"data/0": bytes(17)}, Corrupt),
    "88-empty": (state_pickle({"w": W}), {"data/0": b""}, Corrupt),
    "89-negative": (state_pickle({"w": tensor((4,), (1,), of=storage(numel=-4))}), ONE, Corrupt),
    "89-2-62": (state_pickle({"w": tensor((4,), (1,), of=storage(numel=1 << 62))}), ONE, Corrupt),
    "89-product-wraps": (state_pickle({"w": tensor((4,), (1,), of=storage(numel=(1 << 62) + 4))}), ONE, Corrupt),
    "89-shape-wraps": (state_pickle({"w": tensor((1 << 33, 1 << 33), (1, 1))}), ONE, BadTensor),
    "89-shape-of-2-64": (state_pickle({"w": tensor((1 << 64,), (1,))}), ONE, BadTensor),
    "89-expanded-beyond-all": (state_pickle({"w": tensor((1 << 62,) * 60, (0,) * 60)}), ONE, BadTensor),
    "89-stride-of-2-64": (state_pickle({"w": tensor((1,), (1 << 64,))}), ONE, BadTensor),
    "89-meta": (state_pickle({"w": name("torch._utils", "_rebuild_meta_tensor_no_storage") + b"(" + name("torch", "float32")
                       + integers((1 << 40, 1 << 40)) + integers((1, 1)) + b"\x89tR"}), ONE, BadTensor),
    "90-size-beyond": (state_pickle({"w": tensor((5,), (1,))}), ONE, BadTensor),
    "90-offset-beyond": (state_pickle({"w": tensor((1,), (1,), 4)}), ONE, BadTensor),
    "90-offset-of-2-64": (state_pickle({"w": tensor((1,), (1,), 1 << 64)}), ONE, BadTensor),
    "90-offset-negative": (state_pickle({"w": tensor((1,), (1,), -1)}), ONE, BadTensor),
    "90-stride-negative": (state_pickle({"w": tensor((2,), (-1,), 1)}), ONE, BadTensor),
    "90-stride-beyond": (state_pickle({"w": tensor((2,), (4,))}), ONE, BadTensor),
    "90-size-negative": (state_pickle({"w": tensor((-1,), (1,))}), ONE, BadTensor),
    "90-empty-with-a-negative-offset": (state_pickle({"w": tensor((0,), (1,), -1)}), ONE, BadTensor),
    "91-rank": (state_pickle({"w": tensor((2, 2), (1,))}), ONE, BadTensor),
    "91-rank-100": (state_pickle({"w": tensor((1,) * 100, (1,) * 100)}), ONE, BadTensor),
    "91-float": (state_pickle({"w": tensor((), ()).replace(b"(t(t", b"G\x40\0\0\0\0\0\0\0\x85K\x01\x85")}), ONE, BadTensor),
    "91-bool": (state_pickle({"w": tensor((), ()).replace(b"(t(t", b"\x88\x85K\x01\x85")}), ONE, BadTensor),
    "91-text": (state_pickle({"w": tensor((), ()).replace(b"(t(t", text("4") + b"\x85K\x01\x85")}), ONE, BadTensor),
    "94-other-type": (state_pickle({"w": W, "v": tensor((8,), (1,), of=storage("HalfStorage", numel=8))}), ONE, Corrupt),
    "94-other-count": (state_pickle({"w": W, "v": tensor((2,), (1,), of=storage(numel=2))}), ONE, Corrupt),
    "94-other-place": (state_pickle({"w": W, "v": tensor((4,), (1,), of=storage(location="cuda:0"))}), ONE, Corrupt),
    "95-storage": (state_pickle({"w": tensor((4,), (1,), of=storage("FancyStorage"))}), ONE, Unsupported),
    "95-quantized-place": (state_pickle({"w": tensor((4,), (1,), of=storage("cuda.FloatStorage"))}), ONE, Unsupported),
    "97-up": (state_pickle({"w": tensor((4,), (1,), of=storage(key="../../../etc/passwd"))}), ONE, Corrupt),
    "97-absolute": (state_pickle({"w": tensor((4,), (1,), of=storage(key="/etc/passwd"))}), ONE, Corrupt),
    "97-long": (state_pickle({"w": tensor((4,), (1,), of=storage(key="k" * 900_000))}), ONE, Corrupt),
    "97-zero": (state_pickle({"w": tensor((4,), (1,), of=storage(key="0\0"))}), ONE, Corrupt),
    "100-values-beyond": (state_pickle({"w": sparse("sparse_coo", I22, tensor((9,), (1,)), integers((2, 2)))}), SPARSE,
        BadTensor),
    "100-count-lies": (state_pickle({"w": sparse("sparse_coo", I22, W, integers((2, 2)))}), SPARSE, BadTensor),
    "100-too-few-rows": (state_pickle({"w": sparse("sparse_coo", tensor((1, 2), (2, 1), of=INDEX), V2, integers((2, 2)))}),
        SPARSE, BadTensor),
    "100-too-many-rows": (state_pickle({"w": sparse("sparse_coo", I22, V2, integers((4,)))}), SPARSE, BadTensor),
    "100-flat-indices": (state_pickle({"w": sparse("sparse_coo", I4, V2, integers((2, 2)))}), SPARSE, BadTensor),
    "100-negative-size": (state_pickle({"w": sparse("sparse_coo", I22, V2, integers((-2, 2)))}), SPARSE, BadTensor),
    "100-csr-rows": (state_pickle({"w": sparse("sparse_csr", I4, tensor((2,), (1,), of=INDEX), V2, integers((2, 2)))}), SPARSE,
        BadTensor),
    "100-csr-count": (state_pickle({"w": sparse("sparse_csr", tensor((3,), (1,), of=INDEX), I4, V2, integers((2, 2)))}),
        SPARSE, BadTensor),
    "101-beyond": (state_pickle({"w": quantized((17,), (1,), b"(" + SCHEME + b"G\x3f\xf0\0\0\0\0\0\0K\x00t")}), ONE,
        BadTensor),
    "101-scales": (state_pickle({"w": quantized((4, 4), (4, 1), b"(" + CHANNELS
        + tensor((2,), (1,), of=storage("FloatStorage", "s"))
                                         + tensor((4,), (1,), of=INDEX)
                                         + b"K\x00t")}), SPARSE | {"data/s": bytes(16)}, BadTensor),
    "101-zero-points": (state_pickle({"w": quantized((4, 4), (4, 1), b"(" + CHANNELS
        + tensor((4,), (1,), of=storage("FloatStorage", "s"))
                                              + tensor((3,), (1,), of=INDEX)
                                              + b"K\x00t")}), SPARSE | {"data/s": bytes(16)}, BadTensor),
    "101-axis": (state_pickle({"w": quantized((4, 4), (4, 1), b"(" + CHANNELS
        + tensor((4,), (1,), of=storage("FloatStorage", "s"))
                                       + I4 + b"K\x02t")}), SPARSE | {"data/s": bytes(16)}, BadTensor),
    "101-nan-scale": (state_pickle({"w": quantized((4, 4), (4, 1), b"(" + SCHEME + b"G\x7f\xf8\0\0\0\0\0\0K\x00t")}), ONE,
        BadTensor),
    "101-infinite-scale": (state_pickle({"w": quantized((4, 4), (4, 1), b"(" + SCHEME + b"G\x7f\xf0\0\0\0\0\0\0K\x00t")}), ONE,
        BadTensor),
}  # fmt: skip

BIG = tensor((1_000_000, 1_000_000), (0, 0), of=storage(numel=1))
ACCEPTED: dict[str, tuple[bytes, Mapping[str, bytes]]] = {
    "92-expanded": (state_pickle({"w": BIG}), {"data/0": bytes(4)}),
    "93-overlapping": (state_pickle({"w": tensor((3, 2), (1, 1))}), ONE),
    "96-location": (state_pickle({"w": tensor((4,), (1,), of=storage(location="banana:7\x1b[31m"))}), ONE),
    "96-long-location": (state_pickle({"w": tensor((4,), (1,), of=storage(location="x" * 900_000))}), ONE),
    "97-record-named-so": (state_pickle({"w": tensor((4,), (1,), of=storage(key="weird key"))}),
        {"data/weird key": bytes(16)}),
    "98-smuggled": (state_pickle({"w": W}), ONE | {"data/77": bytes(range(200))}),
    "100-sparse": (state_pickle({"w": sparse("sparse_coo", I22, V2, integers((2, 2)), b"\x89")}), SPARSE),
    "100-indices-out-of-range": (state_pickle({"w": sparse("sparse_coo", I22, V2, integers((1, 1)), b"\x88")}), SPARSE),
    "101-quantized": (state_pickle({"w": quantized((4, 4), (4, 1), b"(" + SCHEME + b"G\x3f\xf0\0\0\0\0\0\0K\x00t")}), ONE),
    "104-nothing": (state_pickle({}), {}),
    "104-none": (b"\x80\x02N.", {}),
    "104-no-dimensions": (state_pickle({"w": tensor((), (), 3)}), ONE),
    "104-no-elements": (state_pickle({"w": tensor((0,), (1,), of=storage(numel=0))}), {"data/0": b""}),
    "106-optimizer": (state_pickle({
        "model": b"}" + text("a.weight") + W + b"s",
        "optimizer": b"}(" + text("state") + b"}(K\x00}" + text("exp_avg") + W + b"sK\x07}" + text("exp_avg") + W
            + b"su"
                     + text("param_groups") + b"]}(" + text("lr") + b"G\x3f\xf0\0\0\0\0\0\0" + text("params")
                     + b"](K\x00K\x01eua" + b"u",
    }), ONE),
}  # fmt: skip


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


@pytest.mark.parametrize("title", REFUSED)
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
    with pytest.raises(Conflict, match=r"4,000,000,000,000 bytes to write, 4 stored") as caught:
        ckptool.convert(file, tmp_path / "out.safetensors")
    assert "--exclude" in caught.value.fix and not (tmp_path / "out.safetensors").exists()
    ckptool.convert(file, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").stat().st_size < 5_000


def test_overlapping_views_are_copied_when_asked_for(tmp_path: Path) -> None:
    x = torch.arange(4.0).as_strided((3, 2), (1, 1))
    file = written(torch_bytes({"w": x, "base": x.as_strided((4,), (1,))}), tmp_path / "a.pt")
    with pytest.raises(Conflict, match="expanded view"):
        ckptool.convert(file, tmp_path / "out.safetensors")
    done = ckptool.convert(file, tmp_path / "out.safetensors", materialize=True)
    assert [note.code for note in done.notes] == ["sharing-lost"]
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


def test_100000_tensors_are_listed_in_linear_time(tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        make_sparse(tmp_path / "many.pt", 4 * count, count)
        began = time.process_time()
        assert len(ckptool.inspect(tmp_path / "many.pt").listing.tensors) == count
        return time.process_time() - began

    few = min(seconds(10_000) for _ in range(2))
    assert seconds(100_000) < 25 * few + 1


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


INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    **{f"row {title}": pickle_zip(pickle, records) for title, (pickle, records, _) in REFUSED.items()},
    **{f"row {title}": pickle_zip(pickle, records) for title, (pickle, records) in ACCEPTED.items()},
}
