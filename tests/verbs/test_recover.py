"""`recover`: what is whole comes back in a checkpoint that others open, numpy and torch; what is lost is left out and
named, what is filled says so."""

import pickle
import random
import re
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.errors import CkptoolError, Conflict, FileProblem, NotACheckpoint, OutputExists, UsageError
from ckptool.formats import marks, read
from ckptool.verbs.recover import recover
from fixtures.traps import TRAPS
from tests.support.cli import Run, command_lines
from tests.support.files import load, saved, torch_bytes, weights, written
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.zips import PLAIN, damaged, record_starts


def cut(path: Path, share: float, out: Path) -> Path:
    data = path.read_bytes()
    return written(data[: int(len(data) * share)], out)


def notes(path: Path) -> list[str]:
    return [note.code for note in ckptool.inspect(path).notes]


NUMBERS = torch.arange(12.0).reshape(3, 4)
TIED = {"gone": torch.ones(2), "w": NUMBERS, "t": NUMBERS.t(), "part": NUMBERS[1:], "again": NUMBERS}
A, B, C, D, E, F = (torch.full((2,), float(number)) for number in range(6))
SIX = {"list": [A, B, C], "tuple": (D, 5, E), "deep": [{"x": (F,)}]}


@looped(
    ("tree", "records", "whole", "lost"),
    [
        (
            {"m": {"a": A, "b": B}, "n": {"a": C, "b": D}, "step": 7},
            [1, 2],
            {"m": {"a": A}, "n": {"b": D}, "step": 7},
            "m/b n/a",
        ),
        (TIED, [0], {key: value for key, value in TIED.items() if key != "gone"}, "gone"),
        (TIED, [1], {"gone": TIED["gone"]}, "w t part again"),
        (
            SIX,
            [1, 3, 5],
            {"list": [A, None, C], "tuple": (None, 5, E), "deep": [{"x": (None,)}]},
            "list/1 tuple/0 deep/0/x/0",
        ),
        ({"s": torch.eye(3).to_sparse(), "w": A}, [1], {"w": A}, "s"),
    ],
)
def test_flipped_bits_lose_only_what_they_hit(tree: Any, records: Any, whole: Any, lost: str, tmp_path: Path) -> None:
    """Ties and views stay so, in lists None stands in the place of what is lost, composites are lost as a whole."""
    done = recover(damaged(saved(tree, tmp_path / "a.pt"), *records), tmp_path / "out.pt")
    assert_same_objects(load(tmp_path / "out.pt"), whole)
    assert [item.address for item in done.lost] == lost.split()
    assert {item.record for item in done.lost} == {f"archive/data/{number}" for number in records}
    assert all("checksum" in item.why and item.offset and item.nbytes for item in done.lost)


def test_an_optimizers_broken_entries_go_as_a_whole(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    data = bytearray(path.read_bytes())
    data[read(path).tree["optimizer"]["state"][1]["exp_avg"].storage.data.offset] ^= 1
    done = recover(written(bytes(data), path), tmp_path / "out.pt")
    found = load(tmp_path / "out.pt")
    assert list(found["optimizer"]["state"]) == [0] and done.dropped == ("optimizer/state/1",)
    assert_same_objects(found["optimizer"]["state"][0], optimizer.state_dict()["state"][0])
    assert "1 lost, 2 dropped with them" in str(done) and "optimizer/state/1" in str(done)
    torch.optim.Adam(model.parameters()).load_state_dict(found["optimizer"])


def test_a_lost_pickle_gives_the_records_as_bytes(tmp_path: Path) -> None:
    path = saved(weights("a", "b"), tmp_path / "a.pt")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    done = recover(written(bytes(data), path), tmp_path / "out.pt")
    assert done.raw and not done.complete and "bytes only" in str(done) and done.tensors is None
    found = load(tmp_path / "out.pt")
    assert bytes(found["archive/data/1"].tolist()) == weights("a", "b")["b"].numpy().tobytes()
    assert "archive/data.pkl" not in found and "recovered-file" in notes(tmp_path / "out.pt")


def test_a_file_that_lost_its_mark_of_an_earlier_recovery_is_marked_all_the_same(tmp_path: Path) -> None:
    written(PLAIN[: 2 * len(PLAIN) // 3], tmp_path / "cut.pt")
    recover(tmp_path / "cut.pt", tmp_path / "r.pt")
    data = bytearray((tmp_path / "r.pt").read_bytes())
    data[data.index(b'"lost_count"') + 1] ^= 1
    written(bytes(data), tmp_path / "d.pt")
    recover(tmp_path / "d.pt", tmp_path / "again.pt")
    assert [note.code for note in ckptool.inspect(tmp_path / "again.pt").notes] == ["recovered-file"]


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
        assert done.complete and "is not whole" in str(done), number


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
    chain = [tmp_path / name for name in "out.pt 1.pt 2.safetensors 3.pt 4.npz 5.npz 6 7 8.safetensors 9.pt".split()]
    ckptool.add_module(chain[0], chain[1])
    for one, other in pairwise(chain[1:]):
        if other.name == "7":
            ckptool.add_module(one, other)
        else:
            ckptool.convert(one, other, all=one == chain[1], shard_size="30B" if other.name == "6" else None)
    ckptool.strip_module(chain[-1], in_place=True)
    for step in chain:
        (note,) = [note for note in ckptool.inspect(step).notes if note.code == "recovered-file"]
        assert re.search("1 tensor was filled in from another file: (model/)?b", note.message), step
        found = ckptool.verify(step)
        assert [each.code for each in found.problems] == ["recovered-file"] and not found.fine and not found.fixes
        assert found.problems[0].tensors[0][-1] == "b" and "recovered, not intact" in str(found), step
    with np.load(chain[5]) as archive:
        found = {key[-1]: torch.from_numpy(archive[key]) for key in archive.files if key[:-1].endswith("module.")}
        assert_same_objects(found, expected["model"])
    with zipfile.ZipFile(chain[0]) as archive:
        assert archive.testzip() is None and f"archive/{marks.RECOVERED_RECORD}" in archive.namelist()


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


LETTERS = weights(*"abcd")
OTHERS = {key: -value for key, value in LETTERS.items()}


@looped(
    ("tree", "other", "part", "expected"),
    [
        (LETTERS, {"runs": {"ema": OTHERS}, "a": torch.ones(9)}, "#runs/ema", {**LETTERS, "a": OTHERS["a"]}),
        ({"model": LETTERS, "epoch": 1}, OTHERS, "", {"model": {**LETTERS, "a": OTHERS["a"]}, "epoch": 1}),
        ({"p": torch.nn.Parameter(torch.ones(2)), "w": A}, {"p": B, "w": B}, "", {"p": torch.nn.Parameter(B), "w": A}),
    ],
)
def test_a_part_bare_weights_and_a_plain_tensor_fill_in(
    tree: Any, other: Any, part: str, expected: Any, tmp_path: Path
) -> None:
    """Flags and devices are those of what was lost."""
    filler = saved(other, tmp_path / "b.pt")
    done = recover(damaged(saved(tree, tmp_path / "a.pt"), 0), tmp_path / "out.pt", fill_from=f"{filler}{part}")
    assert not done.lost and len(done.filled) == 1
    assert_same_objects(load(tmp_path / "out.pt"), expected)


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
    assert [item.address for item in done.lost] == [*"abcd"] and not done.filled and "not filled in (4)" in str(done)
    assert list(load(tmp_path / "out.pt")) == ["e"]


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
            assert all(found[one].data_ptr() == found[two].data_ptr() for one, two in (("a", "b"), ("part", "whole")))
            assert torch.equal(found["b"], x + 1)


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


def test_refusals(tmp_path: Path) -> None:
    path = cut(saved(weights(*"abc"), tmp_path / "a.pt"), 0.8, tmp_path / "cut.pt")
    (tmp_path / "there.pt").write_bytes(b"keep")
    for action, error in (
        (lambda: recover(path), UsageError),
        (lambda: recover(path, path, overwrite=True), Conflict),
        (lambda: recover(path, tmp_path / "there.pt"), OutputExists),
        (lambda: recover(tmp_path / "nothing.pt", tmp_path / "out.pt"), FileProblem),
        (lambda: recover(tmp_path, tmp_path / "out.pt"), UsageError),
        (lambda: recover(path, tmp_path / "out.dcp"), UsageError),
        (lambda: recover(written(b"text of a reader", tmp_path / "x.txt"), tmp_path / "out.pt"), NotACheckpoint),
        (lambda: recover(written(b"PK\x03\x04" + bytes(99), tmp_path / "x.pt"), tmp_path / "out.pt"), CkptoolError),
        (lambda: recover(written(pickle.dumps({"a": 1}), tmp_path / "x.pkl"), tmp_path / "out.pt"), UsageError),
    ):
        with pytest.raises(error) as caught:
            action()
        assert caught.value.what and caught.value.why
    assert not (tmp_path / "out.pt").exists() and (tmp_path / "there.pt").read_bytes() == b"keep"


def test_unknown_calls_are_passed_on_only_when_told_to(tmp_path: Path) -> None:
    data = torch_bytes({"x": TRAPS["20-unknown-call"](), "w": torch.ones(2)})
    path = written(data[:-30], tmp_path / "a.pt")
    with pytest.raises(CkptoolError, match="calls"):
        recover(path, tmp_path / "out.pt")
    assert recover(path, tmp_path / "out.pt", keep_unknown=True).complete


def test_the_command(tmp_path: Path, run: Run) -> None:
    path, out = (
        cut(saved({"model": weights(*"abcdefgh")}, tmp_path / "a.pt"), 0.6, tmp_path / "cut.pt"),
        tmp_path / "o.pt",
    )
    tried = run("recover", path, "-o", out, "-n")
    assert tried.code == 1 and "dry run" in tried.out and not out.exists()
    done = run("recover", path, "-o", out, "--json")
    assert done.code == 1 and done.json["schema"] == "ckptool.recovery/2" and not done.json["complete"]
    assert done.json["back"] + len(done.json["lost"]) == done.json["tensors"] == 8
    assert done.json == recover(path, out, overwrite=True).to_dict()
    assert run("recover", path, "-o", out).code == 2
    filled = run("recover", path, "-o", out, "-f", "--fill-from", tmp_path / "a.pt")
    assert filled.code == 1 and f"filled in from {tmp_path / 'a.pt'}" in filled.out
    whole = run("recover", tmp_path / "a.pt", "-o", tmp_path / "whole.pt")
    assert whole.code == 0 and "nothing is missing" in whole.out and "nothing says how many" not in whole.out
    assert (tmp_path / "whole.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()
    np.savez(tmp_path / "a.npz", a=np.zeros(9), b=np.ones(9))
    done = run("recover", cut(tmp_path / "a.npz", 0.6, tmp_path / "cut.npz"), "-o", tmp_path / "some.npz")
    assert done.code == 1 and "nothing says how many there were" in done.out  # its directory is gone


def test_every_verb_says_that_a_file_was_recovered(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"state_dict": {f"l{i}.weight": torch.randn(500) for i in range(8)}, "epoch": 2}, tmp_path / "good.pt")
    state = {"state_dict": {f"module.l{i}.weight": torch.randn(500) for i in range(8)}, "epoch": 3}
    recover(damaged(saved(state, tmp_path / "cut.pt"), 2, 3), tmp_path / "back.pt")
    (tmp_path / "cut.pt").unlink()
    found = ckptool.scan(tmp_path)
    assert {Path(row.path).name: row.state for row in found.files} == {"good.pt": "good", "back.pt": "recovered-file"}
    assert run("scan", tmp_path, "--latest-good", "-q").out.strip() == str(tmp_path / "good.pt")
    monkeypatch.chdir(tmp_path)
    lines = (
        "inspect B|doctor B|scan B|verify B|strip-module B -o a.pt|remap B --to cpu -o b.pt|convert B -o c.safetensors|"
    )
    lines += (
        "convert B --all -o d.safetensors|cast B --dtype bf16 -o e.pt|slim B -o f.pt|verify c.safetensors|scan f.pt"
    )
    for line in command_lines(lines.replace("B", "back.pt")):
        done = run(*line.split())
        assert "recovered" in done.out + done.err, (line, done)


# A damaged `.npz`.
@looped("seed", range(12))
def test_the_whole_arrays_of_a_damaged_npz_come_back(seed: int, tmp_path: Path, run: Run) -> None:
    """Numpy is the judge of what came back; the file is cut, or a byte of one array's numbers is another."""
    rng = random.Random(seed)
    arrays = {
        f"layer.{i}": np.asarray(np.random.default_rng(seed + i).normal(size=(rng.randint(1, 5), 3)), kind)
        for i, kind in enumerate(rng.choices(["f4", "f8", "i2", "?"], k=rng.randint(2, 6)))
    }
    whole, out = tmp_path / f"{seed}.npz", tmp_path / f"back{seed}.npz"
    rng.choice([np.savez, np.savez_compressed])(whole, **arrays)
    data = bytearray(whole.read_bytes())
    with zipfile.ZipFile(whole) as archive:
        records = archive.infolist()
    gone = rng.randrange(1, len(records))  # of the first, nothing is lost
    end = records[gone + 1].header_offset if gone + 1 < len(records) else archive.start_dir
    if rng.random() < 0.5:
        data[end - 1] ^= 1
        lost = {records[gone].filename[:-4]}
    else:
        del data[end - 1 :]
        lost = {each.filename[:-4] for each in records[gone:]}
    whole.write_bytes(data)
    ran = run("recover", whole, "-o", out, "--json")
    assert ran.code == 1, ran.err
    assert {each["address"] for each in ran.json["lost"]} <= lost and ran.json["back"] == len(arrays) - len(lost)
    back = np.load(out)
    assert {name for name in back.files if isinstance(back[name], np.ndarray)} == arrays.keys() - lost
    for name in arrays.keys() - lost:
        assert back[name].dtype == arrays[name].dtype and np.array_equal(back[name], arrays[name])


COPY = "data[begins[4] : begins[5]] = data[begins[2] : begins[3]]; "  # only the directory knows `l4` then
# What is done to an archive of `l0` to `l5`, and which of them are lost, or how many come back under some name.
DAMAGES: dict[str, set[str] | int] = {
    "data[data.index(b'l0.npy')] ^= 2": 5,
    "data[data.index(b'l5.npy')] ^= 2": 5,
    "data[data.rindex(b'l0.npy')] ^= 2": 5,
    "del data[begins[5] :]": 5,
    "del data[begins[1] : begins[2]]": 5,
    f"{COPY}del data[-30:]": 5,
    f"{COPY}data[begins[5]] ^= 1": {"l4", "l5"},
    f"{COPY}data[begins[5]] ^= 1; data[begins[1] + 20] ^= 1": {"l4", "l5"},
    "data[data.rindex(b'l4.npy') + 3] ^= 1": 6,  # a name without `.npy` may be a damaged one
    # Half a directory does not say how many there were.
    "data[begins[4]] ^= 1; data[data.rindex(b'PK', 0, data.rindex(b'l4.npy'))] ^= 1": 4,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_of_an_npz_is_under_another_name_or_missing_in_silence(damage: str, tmp_path: Path, run: Run) -> None:
    arrays = {f"l{i}": np.arange(float(size)) + i for i, size in enumerate((3, 4, 5, 6, 5, 7))}
    np.savez(tmp_path / "a.npz", **arrays)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        begins = [each.header_offset for each in archive.infolist()]
    exec(damage, {"data": data, "begins": begins})
    (tmp_path / "a.npz").write_bytes(data)
    said = run("recover", tmp_path / "a.npz", "-o", tmp_path / "b.npz", "-n")
    assert said.code == 1 and "incomplete" in said.out and "everything" not in said.out
    ran = run("recover", tmp_path / "a.npz", "-o", tmp_path / "b.npz", "--json")
    assert ran.code == 1 and DAMAGES[damage] in ({each["address"] for each in ran.json["lost"]}, ran.json["back"])
    back = np.load(tmp_path / "b.npz")
    whole = {name: back[name] for name in back.files if isinstance(back[name], np.ndarray)}
    assert all(np.array_equal(array, arrays[name]) for name, array in whole.items())
    assert len(whole) == ran.json["back"]
    assert "recovered" in run("inspect", tmp_path / "b.npz").out


def test_what_was_recovered_once_is_recovered_again(tmp_path: Path, run: Run) -> None:
    """An archive with ckptool's own record beside the arrays."""
    np.savez(tmp_path / "a.npz", a=np.arange(9.0), b=np.arange(9.0), c=np.arange(9.0))
    for number, (old, new) in enumerate((("a", "b"), ("b", "c")), 1):
        data = bytearray((tmp_path / f"{old}.npz").read_bytes())
        with zipfile.ZipFile(tmp_path / f"{old}.npz") as archive:
            first = archive.infolist()[0].header_offset
        size, more = int.from_bytes(data[first + 26 : first + 28], "little"), data[first + 28]
        data[first + 30 + size + more + 130] ^= 1  # of the numbers of the first array
        (tmp_path / f"{old}.npz").write_bytes(data)
        ran = run("recover", tmp_path / f"{old}.npz", "-o", tmp_path / f"{new}.npz")
        back = np.load(tmp_path / f"{new}.npz")
        whole = [name for name in back.files if isinstance(back[name], np.ndarray)]
        assert ran.code == 1 and "incomplete" in ran.out and len(whole) == 3 - number, ran.out
        assert all(np.array_equal(back[name], np.arange(9.0)) for name in whole)
    assert "recovered" in run("inspect", tmp_path / "c.npz").out
