"""`recover`: what is whole comes back in a checkpoint that others open; what is lost is left out and named, what is
filled says so."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.cli import main
from ckptool.errors import CkptoolError, Conflict, FileProblem, NotACheckpoint, OutputExists, UsageError
from ckptool.formats import marks, read
from ckptool.verbs.recover import recover
from fixtures.make import make
from tests.support.cli import Run
from tests.support.files import load, saved, torch_bytes, weights, written
from tests.support.same import assert_same_objects
from tests.support.zips import record_starts


def damaged(path: Path, *records: int) -> Path:
    """The file with a flipped bit in the data of these storages."""
    starts, data = record_starts(path), bytearray(path.read_bytes())
    for record in records:
        data[starts[f"archive/data/{record}"]] ^= 1
    path.write_bytes(data)
    return path


def cut(path: Path, share: float, out: Path) -> Path:
    data = path.read_bytes()
    return written(data[: int(len(data) * share)], out)


def notes(path: Path) -> list[str]:
    return [note.code for note in ckptool.inspect(path).notes]


# What comes back ------------------------------------------------------------------------------------------------------


def test_a_64_tensor_zip_cut_at_half(tmp_path: Path) -> None:
    """Every whole record comes back, byte for byte, and nothing wrong does; stock torch opens what is written."""
    torch.manual_seed(1)
    model = {f"layer{i}.weight": torch.randn(50 + i, 16) for i in range(64)}
    path = cut(saved({"model": model, "epoch": 3}, tmp_path / "a.pt"), 0.5, tmp_path / "cut.pt")
    before = path.read_bytes()
    done = recover(path, tmp_path / "out.pt")
    ends = {name: start for name, start in record_starts(tmp_path / "a.pt").items() if "/data/" in name}
    whole = [i for i in range(64) if ends[f"archive/data/{i}"] + 64 * (50 + i) + 16 <= len(before)]
    for mmap in (False, True):
        found = load(tmp_path / "out.pt", mmap=mmap)
        assert_same_objects(
            found, {"model": {f"layer{i}.weight": model[f"layer{i}.weight"] for i in whole}, "epoch": 3}
        )
    assert (done.tensors, done.back, len(done.lost)) == (64, len(whole), 64 - len(whole)) and not done.complete
    assert [item.address for item in done.lost] == [f"model/layer{i}.weight" for i in range(64) if i not in whole]
    assert path.read_bytes() == before and done.proven
    assert "incomplete" in str(done) and "recovered-file" in notes(tmp_path / "out.pt")


def test_flipped_bits_lose_only_what_they_hit(tmp_path: Path) -> None:
    tree = {"model": weights(*"abcdef"), "step": 7}
    path = damaged(saved(tree, tmp_path / "a.pt"), 1, 4)
    done = recover(path, tmp_path / "out.pt")
    assert_same_objects(
        load(tmp_path / "out.pt"), {"model": {k: v for k, v in tree["model"].items() if k not in "be"}, "step": 7}
    )
    assert [(item.address, item.record, item.nbytes) for item in done.lost] == [
        ("model/b", "archive/data/1", 24),
        ("model/e", "archive/data/4", 24),
    ]
    assert all("checksum" in item.why and item.offset for item in done.lost)


@pytest.mark.parametrize("remove", [1, 22, 42, 98, 200])
def test_a_lost_directory_loses_nothing(remove: int, tmp_path: Path) -> None:
    path = make("training.pt", tmp_path)
    expected = load(path)
    short = written(path.read_bytes()[:-remove], tmp_path / "short.pt")
    done = recover(short, tmp_path / "out.pt")
    assert done.complete and not done.lost and done.proven and "everything was recovered" in str(done)
    assert_same_objects(load(tmp_path / "out.pt"), expected)
    assert "recovered-file" not in notes(tmp_path / "out.pt") and ckptool.verify(tmp_path / "out.pt").fine
    assert main(["recover", str(short), "-o", str(tmp_path / "again.pt")]) == 0


def test_a_file_that_nothing_is_wrong_with_is_copied(tmp_path: Path) -> None:
    path = saved({"model": weights("a.w")}, tmp_path / "a.pt")
    done = recover(path, tmp_path / "out.pt")
    assert done.complete and "nothing is missing" in str(done)
    assert (tmp_path / "out.pt").read_bytes() == path.read_bytes()


def test_ties_and_views_stay_so(tmp_path: Path) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    tree = {"gone": torch.ones(2), "w": x, "t": x.t(), "part": x[1:], "again": x}
    done = recover(damaged(saved(tree, tmp_path / "a.pt"), 0), tmp_path / "out.pt")
    found = load(tmp_path / "out.pt")
    assert (
        list(found) == ["w", "t", "part", "again"]
        and len({v.untyped_storage().data_ptr() for v in found.values()}) == 1
    )
    assert_same_objects(found, {k: v for k, v in tree.items() if k != "gone"})
    assert [item.address for item in done.lost] == ["gone"]
    path = damaged(saved(tree, tmp_path / "b.pt"), 1)
    lost = recover(path, tmp_path / "out.pt", overwrite=True).lost
    assert [item.address for item in lost] == ["w", "t", "part", "again"]


def test_in_lists_none_stands_in_the_place_of_what_is_lost(tmp_path: Path) -> None:
    ones = [torch.full((2,), float(i)) for i in range(6)]
    tree = {"list": ones[:3], "tuple": (ones[3], 5, ones[4]), "deep": [{"x": (ones[5],)}]}
    done = recover(damaged(saved(tree, tmp_path / "a.pt"), 1, 3, 5), tmp_path / "out.pt")
    assert_same_objects(
        load(tmp_path / "out.pt"),
        {"list": [ones[0], None, ones[2]], "tuple": (None, 5, ones[4]), "deep": [{"x": (None,)}]},
    )
    assert [item.address for item in done.lost] == ["list/1", "tuple/0", "deep/0/x/0"]


def test_an_optimizers_broken_entries_go_as_a_whole(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    places = {
        (key, slot): entry.storage.data.offset
        for key, slots in read(path).tree["optimizer"]["state"].items()
        for slot, entry in slots.items()
    }
    data = bytearray(path.read_bytes())
    data[places[1, "exp_avg"]] ^= 1
    done = recover(written(bytes(data), path), tmp_path / "out.pt")
    found = load(tmp_path / "out.pt")
    assert list(found["optimizer"]["state"]) == [0] and done.dropped == ("optimizer/state/1",)
    assert_same_objects(found["optimizer"]["state"][0], optimizer.state_dict()["state"][0])
    assert "dropped with them" in str(done) and "optimizer/state/1" in str(done)
    torch.optim.Adam(model.parameters()).load_state_dict(found["optimizer"])


def test_composites_are_lost_as_a_whole(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    path = saved({"s": sparse, "w": torch.ones(2)}, tmp_path / "a.pt")
    done = recover(damaged(path, 1), tmp_path / "out.pt")
    assert [item.address for item in done.lost] == ["s"] and list(load(tmp_path / "out.pt")) == ["w"]


def test_a_lost_pickle_gives_the_records_as_bytes(tmp_path: Path) -> None:
    path = saved(weights("a", "b"), tmp_path / "a.pt")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    done = recover(written(bytes(data), path), tmp_path / "out.pt")
    assert done.raw and not done.complete and "bytes only" in str(done) and done.tensors is None
    found = load(tmp_path / "out.pt")
    assert bytes(found["archive/data/1"].tolist()) == weights("a", "b")["b"].numpy().tobytes()
    assert "archive/data.pkl" not in found and "recovered-file" in notes(tmp_path / "out.pt")


def test_a_cut_safetensors_file(tmp_path: Path) -> None:
    tree = weights(*"abcdef")
    ckptool.convert(saved(tree, tmp_path / "a.pt"), tmp_path / "a.safetensors", at="")
    path = cut(tmp_path / "a.safetensors", 0.9, tmp_path / "cut.safetensors")
    done = recover(path, tmp_path / "out.safetensors")
    assert 0 < done.back < 6 and not done.proven and "no checksums" in str(done)
    found = load_file(tmp_path / "out.safetensors")
    assert sorted(found) == sorted(set(tree) - {item.address for item in done.lost})
    assert all(torch.equal(value, tree[name]) for name, value in found.items())
    assert "recovered-file" in notes(tmp_path / "out.safetensors")


def test_another_container_may_be_written(tmp_path: Path) -> None:
    path = damaged(saved(weights(*"abc"), tmp_path / "a.pt"), 1)
    recover(path, tmp_path / "out.safetensors")
    assert sorted(load_file(tmp_path / "out.safetensors")) == ["a", "c"]
    assert ckptool.verify(tmp_path / "out.safetensors").problems[0].code == "recovered-file"


# In-place edits -------------------------------------------------------------------------------------------------------


def test_an_interrupted_edit_is_undone_byte_for_byte(tmp_path: Path) -> None:
    path = saved({"model": weights("module.a.w", "module.b.w"), "epoch": 1}, tmp_path / "a.pt")
    before = path.read_bytes()
    ckptool.strip_module(path, in_place=True)
    after = path.read_bytes()
    guard = before[-42:]
    states = [before + guard[:10], before + bytes(500), before + bytes(500) + guard, after + guard]
    states += [before + after[len(before) :][:at] for at in (10, 400, len(after) - len(before) - 1)]
    states += [after[: len(before) + 300] + bytes(len(after) - len(before) - 300) + guard]
    for number, state in enumerate(states):
        done = recover(written(state, tmp_path / "torn.pt"), tmp_path / "out.pt", overwrite=True)
        assert (tmp_path / "out.pt").read_bytes() == before, number
        assert done.complete and "was not finished" in str(done), number


# Filled in ------------------------------------------------------------------------------------------------------------


def test_lost_tensors_are_filled_in_and_the_output_says_so_for_ever(tmp_path: Path) -> None:
    tree = {"model": weights(*"abcd"), "epoch": 3}
    path = saved(tree, tmp_path / "a.pt")
    other = saved({"model": {key: -value for key, value in tree["model"].items()}, "epoch": 9}, tmp_path / "b.pt")
    done = recover(damaged(path, 1), tmp_path / "out.pt", fill_from=other)
    expected = tree | {"model": tree["model"] | {"b": -tree["model"]["b"]}}
    for mmap in (False, True):
        assert_same_objects(load(tmp_path / "out.pt", mmap=mmap), expected)
    assert not done.complete and not done.lost and done.filled == (("model/b", "model/b"),)
    assert "filled in from" in str(done) and "model/b" in str(done)
    chain = [tmp_path / name for name in ("out.pt", "1.pt", "2.safetensors", "3.pt", "4.safetensors", "5.pt")]
    ckptool.add_module(chain[0], chain[1])
    ckptool.convert(chain[1], chain[2], all=True)
    ckptool.convert(chain[2], chain[3])
    ckptool.convert(chain[3], chain[4])
    ckptool.convert(chain[4], chain[5])
    ckptool.strip_module(chain[5], in_place=True)
    for step in chain:
        (note,) = [note for note in ckptool.inspect(step).notes if note.code == "recovered-file"]
        assert "1 tensor was filled in from another file: model/b" in note.message, step
        assert not ckptool.verify(step).fine
    with zipfile.ZipFile(chain[0]) as archive:
        assert archive.testzip() is None and f"archive/{marks.RECOVERED_RECORD}" in archive.namelist()


def test_a_part_of_a_file_fills_in(tmp_path: Path) -> None:
    tree = weights(*"abcd")
    other = saved(
        {"runs": {"ema": {key: -value for key, value in tree.items()}}, "b": torch.ones(9)}, tmp_path / "b.pt"
    )
    done = recover(damaged(saved(tree, tmp_path / "a.pt"), 1), tmp_path / "out.pt", fill_from=f"{other}#runs/ema")
    assert not done.lost and torch.equal(load(tmp_path / "out.pt")["b"], -tree["b"])


def test_the_mark_goes_along_into_every_container_and_back(tmp_path: Path) -> None:
    path = saved(weights(*"abcd"), tmp_path / "a.pt")
    other = saved({key: -value for key, value in load(path).items()}, tmp_path / "b.pt")
    recover(damaged(path, 1), tmp_path / "out.npz", fill_from=other)
    ckptool.convert(tmp_path / "out.npz", tmp_path / "1.npz")
    ckptool.convert(tmp_path / "1.npz", tmp_path / "2", container="sharded", shard_size="30B")
    ckptool.add_module(tmp_path / "2", tmp_path / "3")
    ckptool.convert(tmp_path / "3", tmp_path / "4.safetensors")
    for step in ("out.npz", "1.npz", "2", "3", "4.safetensors"):
        (note,) = [note for note in ckptool.inspect(tmp_path / step).notes if note.code == "recovered-file"]
        assert "1 tensor was filled in from another file: b" in note.message, step
        assert not ckptool.verify(tmp_path / step).fine
    with np.load(tmp_path / "1.npz") as archive:
        assert_same_objects(
            {key: torch.from_numpy(archive[key]) for key in "abcd"}, load(path) | {"b": load(other)["b"]}
        )


def test_what_is_made_of_a_filled_file_is_marked(tmp_path: Path) -> None:
    other = saved({"model": weights(*"abcd")}, tmp_path / "b.pt")
    recover(damaged(saved({"model": weights(*"abcd")}, tmp_path / "a.pt"), 1), tmp_path / "filled.pt", fill_from=other)
    filled = tmp_path / "filled.pt"
    ckptool.average([filled, other], tmp_path / "mean.pt")
    ckptool.average([other, filled], tmp_path / "mean2.pt", at="model")
    ckptool.warm_start(filled, other, tmp_path / "start.pt")
    ckptool.warm_start(other, filled, tmp_path / "start2.pt", only="a")  # the rest is the target's
    ckptool.warm_start(other, filled, tmp_path / "clean.pt")  # nothing is
    for name in ("mean.pt", "mean2.pt", "start.pt", "start2.pt"):
        assert "recovered-file" in notes(tmp_path / name), name
    assert "recovered-file" not in notes(tmp_path / "clean.pt")


def test_the_mark_of_one_shard_is_that_of_all(tmp_path: Path) -> None:
    ckptool.convert(saved(weights(*"abcd"), tmp_path / "a.pt"), tmp_path / "s", container="sharded", shard_size="30B")
    shard = sorted((tmp_path / "s").glob("*.safetensors"))[0]
    (name,) = load_file(shard)
    whole = shard.rename(tmp_path / "whole.safetensors")
    recover(cut(whole, 0.99, tmp_path / "cut.safetensors"), shard, fill_from=whole)
    (note,) = [note for note in ckptool.inspect(tmp_path / "s").notes if note.code == "recovered-file"]
    assert f"filled in from another file: {name}" in note.message
    ckptool.convert(tmp_path / "s", tmp_path / "whole.pt")
    assert "recovered-file" in notes(tmp_path / "whole.pt")


def test_only_the_same_key_shape_and_type_fill_in(tmp_path: Path) -> None:
    path = damaged(saved(weights(*"abcde"), tmp_path / "a.pt"), 0, 1, 2, 3)
    there = {"b": torch.zeros(3, 2), "c": torch.zeros(2, 3).half(), "d": torch.eye(2, 3).to_sparse()}
    done = recover(path, tmp_path / "out.pt", fill_from=saved(there, tmp_path / "b.pt"))
    assert dict(done.refused) == {
        "a": "the other checkpoint has none of that name",
        "b": "it is f32 [3, 2] there, not f32 [2, 3]",
        "c": "it is f16 [2, 3] there, not f32 [2, 3]",
        "d": "it is another kind of value there",
    }
    assert (
        [item.address for item in done.lost] == [*"abcd"]
        and not done.filled
        and list(load(tmp_path / "out.pt")) == ["e"]
    )
    assert "not filled in (4)" in str(done)


def test_filled_from_bare_weights_of_another_container(tmp_path: Path) -> None:
    path = saved({"model": weights("a.w", "b.w"), "epoch": 1}, tmp_path / "a.pt")
    ckptool.convert(path, tmp_path / "w.safetensors")
    done = recover(damaged(path, 0), tmp_path / "out.pt", fill_from=tmp_path / "w.safetensors")
    assert done.filled == (("model/a.w", "a.w"),)
    assert_same_objects(load(tmp_path / "out.pt"), {"model": weights("a.w", "b.w"), "epoch": 1})


def test_what_was_tied_is_filled_in_tied_or_not_at_all(tmp_path: Path) -> None:
    x, y = torch.arange(6.0), torch.arange(6.0) + 1
    tied = {"a": x, "b": x, "part": y[:3], "whole": y}
    for name, other, filled in (
        ("the same", {"a": x + 1, "b": x + 1, "part": y[:3], "whole": y}, ["a", "b", "part", "whole"]),
        ("others", {"a": x, "b": x + 1, "part": y[:3].clone(), "whole": y}, []),
    ):
        path = damaged(saved(tied, tmp_path / "a.pt"), 0, 1)
        done = recover(path, tmp_path / "out.pt", fill_from=saved(other, tmp_path / "b.pt"), overwrite=True)
        assert [here for here, _ in done.filled] == filled, name
        found = load(tmp_path / "out.pt")
        assert sorted(found) == sorted(filled)
        if filled:
            assert (
                found["a"].data_ptr() == found["b"].data_ptr() and found["part"].data_ptr() == found["whole"].data_ptr()
            )
            assert torch.equal(found["b"], x + 1)


def test_flags_and_devices_are_those_of_the_lost_tensor(tmp_path: Path) -> None:
    tree = {"p": torch.nn.Parameter(torch.ones(2)), "w": torch.ones(1)}
    other = {"p": torch.zeros(2), "w": torch.zeros(1)}
    recover(damaged(saved(tree, tmp_path / "a.pt"), 0), tmp_path / "out.pt", fill_from=saved(other, tmp_path / "b.pt"))
    found = load(tmp_path / "out.pt")["p"]
    assert isinstance(found, torch.nn.Parameter) and found.requires_grad and not found.any()


def test_a_damaged_filler_is_refused(tmp_path: Path) -> None:
    path, other = saved(weights("a", "b"), tmp_path / "a.pt"), damaged(saved(weights("a", "b"), tmp_path / "b.pt"), 0)
    with pytest.raises(CkptoolError, match="checksum"):
        recover(damaged(path, 0), tmp_path / "out.pt", fill_from=other)
    assert not (tmp_path / "out.pt").exists()


def test_a_mark_that_counts_more_than_it_names_keeps_its_count(tmp_path: Path) -> None:
    """A thousand lost tensors are named, the others counted: in a bundle of the file, too."""
    whole = saved({f"t{i}": torch.ones(1) for i in range(1_300)}, tmp_path / "a.pt")
    share = record_starts(whole)["archive/data/100"] / whole.stat().st_size
    lost = len(recover(cut(whole, share, tmp_path / "cut.pt"), tmp_path / "back.pt").lost)
    ckptool.bundle({"a": tmp_path / "back.pt"}, tmp_path / "bundle.pt")
    for name in ("back.pt", "bundle.pt"):
        (note,) = [note for note in ckptool.inspect(tmp_path / name).notes if note.code == "recovered-file"]
        assert lost > 1_000 and f"{lost:,} tensors were lost" in note.message, name


def test_marks_add_up() -> None:
    text = marks.recovered_mark(["b"], ["c"], marks.recovered_mark(["a"], []))
    assert marks.recovered_facts(text) == {"lost": ["a", "b"], "filled": ["c"], "lost_count": 2, "filled_count": 1}
    many = marks.recovered_mark([f"w{i}" + "x" * 500 for i in range(5000)], [])
    assert marks.recovered_facts(many)["lost_count"] == 5000 and len(many) < marks.MAX_RECORD
    for odd in ("", "[", "[]", "3", '{"lost": 1, "filled": [2], "lost_count": -1}', "[" * 100_000):
        assert marks.recovered_facts(odd)["lost"] == [] and len(marks.recovered_notes({marks.RECOVERED: odd})) == 1
    assert marks.recovered_notes({}) == ()


# Refusals and the command ---------------------------------------------------------------------------------------------


def test_refusals(tmp_path: Path) -> None:
    path = cut(saved(weights(*"abc"), tmp_path / "a.pt"), 0.8, tmp_path / "cut.pt")
    (tmp_path / "there.pt").write_bytes(b"keep")
    for action, error in (
        (lambda: recover(path), UsageError),
        (lambda: recover(path, path, overwrite=True), Conflict),
        (lambda: recover(path, tmp_path / "there.pt"), OutputExists),
        (lambda: recover(tmp_path / "nothing.pt", tmp_path / "out.pt"), FileProblem),
        (lambda: recover(tmp_path, tmp_path / "out.pt"), UsageError),
        (lambda: recover(written(b"text of a reader", tmp_path / "x.txt"), tmp_path / "out.pt"), NotACheckpoint),
        (lambda: recover(written(b"PK\x03\x04" + bytes(99), tmp_path / "x.pt"), tmp_path / "out.pt"), CkptoolError),
        (lambda: recover(written(pickle.dumps({"a": 1}), tmp_path / "x.pkl"), tmp_path / "out.pt"), UsageError),
    ):
        with pytest.raises(error) as caught:
            action()
        assert caught.value.what and caught.value.why
    assert not (tmp_path / "out.pt").exists() and (tmp_path / "there.pt").read_bytes() == b"keep"


def test_unknown_calls_are_passed_on_only_when_told_to(tmp_path: Path) -> None:
    from fixtures.traps import TRAPS

    data = torch_bytes({"x": TRAPS["20-unknown-call"](), "w": torch.ones(2)})
    path = written(data[:-30], tmp_path / "a.pt")
    with pytest.raises(CkptoolError, match="calls"):
        recover(path, tmp_path / "out.pt")
    assert recover(path, tmp_path / "out.pt", keep_unknown=True).complete


Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def run(*words: str) -> tuple[int, str]:
        code = main(words)
        return code, capsys.readouterr().out

    return run


def test_the_command(tmp_path: Path, said: Said) -> None:
    path = cut(saved({"model": weights(*"abcdefgh")}, tmp_path / "a.pt"), 0.6, tmp_path / "cut.pt")
    code, text = said("recover", str(path), "-o", str(tmp_path / "out.pt"), "-n")
    assert code == 1 and "dry run" in text and not (tmp_path / "out.pt").exists()
    code, text = said("recover", str(path), "-o", str(tmp_path / "out.pt"), "--json")
    fact: dict[str, Any] = json.loads(text)
    assert code == 1 and fact["schema"] == "ckptool.recovery/2" and not fact["complete"]
    assert fact["back"] + len(fact["lost"]) == fact["tensors"] == 8
    assert fact == recover(path, tmp_path / "out.pt", overwrite=True).to_dict()
    assert said("recover", str(path), "-o", str(tmp_path / "out.pt"))[0] == 2
    other = str(tmp_path / "a.pt")
    code, text = said("recover", str(path), "-o", str(tmp_path / "out.pt"), "-f", "--fill-from", other)
    assert code == 1 and f"filled in from {other}" in text
    code, text = said("recover", other, "-o", str(tmp_path / "whole.pt"))
    assert code == 0 and "nothing is missing" in text and "nothing says how many" not in text
    np.savez(tmp_path / "a.npz", a=np.zeros(9), b=np.ones(9))
    of_many = cut(tmp_path / "a.npz", 0.6, tmp_path / "cut.npz")  # its directory is gone
    code, text = said("recover", str(of_many), "-o", str(tmp_path / "some.npz"))
    assert code == 1 and "nothing says how many there were" in text


def test_names_from_the_file_are_escaped(tmp_path: Path) -> None:
    path = damaged(saved({"\x1b[31mred\n": torch.ones(2), "b": torch.ones(2)}, tmp_path / "a.pt"), 0)
    done = recover(path, tmp_path / "out.pt")
    assert "\x1b" not in str(done) and "\\x1b[31mred\\n" in str(done)


def test_the_command_that_errors_and_verify_print_works(tmp_path: Path, said: Said) -> None:
    whole = saved({"model": weights(*"abcd")}, tmp_path / "a name.pt")
    path = written(whole.read_bytes()[: record_starts(whole)["archive/data/2"]], tmp_path / "cut name.pt")
    code, text = said("verify", str(path))
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith("ckptool recover")]
    import shlex

    assert code == 1 and said(*shlex.split(line)[1:])[0] == 1
    assert ckptool.inspect(tmp_path / "cut name.fixed.pt").tensors


def test_every_verb_says_that_a_file_was_recovered(tmp_path: Path, run: Run) -> None:
    torch.save({"state_dict": {f"l{i}.weight": torch.randn(500) for i in range(8)}, "epoch": 2}, tmp_path / "good.pt")
    state = {"state_dict": {f"module.l{i}.weight": torch.randn(500) for i in range(8)}, "epoch": 3}
    recover(damaged(saved(state, tmp_path / "cut.pt"), 2, 3), tmp_path / "back.pt")
    (tmp_path / "cut.pt").unlink()
    found = ckptool.scan(tmp_path)
    assert {Path(row.path).name: row.state for row in found.files} == {"good.pt": "good", "back.pt": "recovered-file"}
    assert run("scan", tmp_path, "--latest-good", "-q").out.strip() == str(tmp_path / "good.pt")
    back, out = tmp_path / "back.pt", tmp_path / "out"
    for words in (
        *((verb, back) for verb in ("inspect", "doctor", "scan", "verify")),
        ("strip-module", back, "-o", out / "a.pt"),
        ("remap", back, "--to", "cpu", "-o", out / "b.pt"),
        ("convert", back, "-o", out / "c.safetensors"),
        ("convert", back, "--all", "-o", out / "d.safetensors"),
        ("cast", back, "--dtype", "bf16", "-o", out / "e.pt"),
        ("slim", back, "-o", out / "f.pt"),
        ("verify", out / "c.safetensors"),
        ("scan", out / "f.pt"),
    ):
        out.mkdir(exist_ok=True)
        done = run(*words)
        assert "recovered" in done.out + done.err, (words, done)
