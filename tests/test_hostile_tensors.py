"""Tensors and storages that contradict themselves, or ask for more than there is."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.errors import CkptoolError, Corrupt
from ckptool.formats import read
from fixtures.sparse import make_sparse
from tests.support.files import written
from tests.support.hostile_inputs import pickle_zip, state_pickle, storage, tensor
from tests.support.hostile_tensors import ACCEPTED, REFUSED
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


@looped("title", [title for title in ACCEPTED if not title.startswith(("96", "100", "101"))])
def test_odd_tensors_are_those_that_torch_reads(title: str, tmp_path: Path) -> None:
    file = written(pickle_zip(*ACCEPTED[title]), tmp_path / "a.pt")
    assert_same_objects(torch.load(file, weights_only=True), ckptool.load(file))


def test_storage_keys_are_never_paths(tmp_path: Path) -> None:
    """The records of an archive are found in its directory; what stands on the disk under such a name is not looked
    at."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0").write_bytes(bytes(16))
    for key in ("../data/0", str(tmp_path / "data" / "0"), "0"):
        contents = pickle_zip(state_pickle({"w": tensor((4,), (1,), of=storage(key=key))}), {})
        with pytest.raises(Corrupt, match="has no record"):
            read(written(contents, tmp_path / "a.pt"))


def test_sparse_indices_are_checked_when_the_tensor_is_built(tmp_path: Path) -> None:
    """To look at them all on opening would be to read the data; what torch builds of them is checked by torch."""
    opened_input("100-indices-out-of-range", tmp_path)
    with pytest.raises(CkptoolError, match="sparse"):
        ckptool.load(tmp_path / "input.pt")
    opened_input("100-sparse", tmp_path)
    found = ckptool.load(tmp_path / "input.pt")["w"]
    assert found.is_sparse and found._nnz() == 2


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
