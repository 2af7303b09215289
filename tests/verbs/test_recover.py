"""`recover`: what is whole comes back in a checkpoint that others open, numpy and torch; what is lost is left out and
named."""

import contextlib
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
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import (
    CkptoolError,
    Conflict,
    Corrupt,
    FileProblem,
    NotACheckpoint,
    OutputExists,
    Truncated,
    UsageError,
)
from ckptool.formats import marks, read
from ckptool.verbs.recover import recover
from fixtures.traps import TRAPS
from tests.support.cli import Run, command_lines
from tests.support.engine_folders import bins
from tests.support.errors import refused
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


def test_a_lost_pickle_leaves_bytes_that_nothing_names(tmp_path: Path, run: Run) -> None:
    """Another program unpacks the records: the error has its line."""
    path = saved(weights("a", "b"), tmp_path / "a.pt")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    written(bytes(data), path)
    said = run("recover", path, "-o", tmp_path / "out.pt")
    assert said.code == 2 and "its pickle is lost" in said.err and not (tmp_path / "out.pt").exists()
    assert f"unzip -d {path}.unpacked {path}" in said.err
    assert "ckptool recover" not in run("verify", path).out.partition("checksum")[2]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_program_is_not_recovered(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "program.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 4)), path)
    data = bytearray(path.read_bytes())
    data[record_starts(path)["program/data/0"] + 3] ^= 1
    said = run("recover", written(bytes(data), path), "-o", tmp_path / "out.pt")
    assert said.code == 2 and "a program of TorchScript" in said.err and not (tmp_path / "out.pt").exists()
    assert "ckptool recover" not in run("verify", path).out + run("doctor", path).out
    path.write_bytes(bytes(4) + path.read_bytes()[4:])
    assert "ckptool recover" not in run("inspect", path).err + run("doctor", path).out


def test_a_file_that_lost_its_mark_of_an_earlier_recovery_is_marked_all_the_same(tmp_path: Path) -> None:
    written(PLAIN[: 2 * len(PLAIN) // 3], tmp_path / "cut.pt")
    recover(tmp_path / "cut.pt", tmp_path / "r.pt")
    data = bytearray((tmp_path / "r.pt").read_bytes())
    data[data.index(b'"lost":') + 1] ^= 1
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
    states += [after[: len(before) + 300] + bytes(len(after) - len(before) - 300) + guard]
    for number, state in enumerate(states):
        done = recover(written(state, tmp_path / "torn.pt"), tmp_path / "out.pt", overwrite=True)
        assert (tmp_path / "out.pt").read_bytes() == before, number
        assert done.complete and "is not whole" in str(done), number


def test_the_first_bytes_of_an_edited_file_are_made_right_though_its_records_begin_elsewhere(tmp_path: Path) -> None:
    path, out = saved({"model": weights("module.a.w"), "epoch": 1}, tmp_path / "a.pt"), tmp_path / "out.pt"
    ckptool.strip_module(path, in_place=True)
    data = path.read_bytes()
    for at in range(2, 6):
        broken = written(data[:at] + bytes([data[at] ^ 0x59]) + data[at + 1 :], tmp_path / "broken.pt")
        assert recover(broken, out, overwrite=True).complete
        assert_same_objects(load(out), load(path))


def test_what_is_made_of_a_recovered_file_says_so_for_ever(tmp_path: Path) -> None:
    tree = {"model": weights(*"abcd"), "epoch": 3}
    recover(damaged(saved(tree, tmp_path / "a.pt"), 1), tmp_path / "out.pt")
    expected = {key: value for key, value in tree["model"].items() if key != "b"}
    for mmap in (False, True):
        assert_same_objects(load(tmp_path / "out.pt", mmap=mmap), tree | {"model": expected})
    chain = [tmp_path / name for name in "out.pt 1.pt 2.safetensors 3.pt 4.npz 5.npz 6 7 8 9.dcp 10.pt".split()]
    ckptool.add_module(chain[0], chain[1])
    for one, other in pairwise(chain[1:]):
        if other.name == "7":
            ckptool.add_module(one, other)
        else:
            size = {"6": "30B", "8": "5GB"}.get(other.name)  # folders of several shards, and of one without an index
            ckptool.convert(one, other, all=one == chain[1], shard_size=size)
    ckptool.strip_module(chain[-1], in_place=True)
    for step in chain:
        (note,) = [note for note in ckptool.inspect(step).notes if note.code == "recovered-file"]
        assert re.search("1 tensor was lost: (model/)?b", note.message), step
        found = ckptool.verify(step)
        assert [each.code for each in found.problems] == ["recovered-file"] and not found.fine and not found.fixes
        assert found.problems[0].tensors[0][-1] == "b" and "recovered, not intact" in str(found), step
    with np.load(chain[5]) as archive:
        found = {key[-1]: torch.from_numpy(archive[key]) for key in archive.files if key[:-1].endswith("module.")}
        assert_same_objects(found, expected)
    with zipfile.ZipFile(chain[0]) as archive:
        assert archive.testzip() is None and f"archive/{marks.RECOVERED_RECORD}" in archive.namelist()


def test_what_a_recovered_file_has_a_part_in_is_marked(tmp_path: Path) -> None:
    """A warm start takes what it lacks from another: that is marked, too."""
    whole = saved({"model": weights(*"abcd")}, tmp_path / "b.pt")
    back = tmp_path / "back.pt"
    recover(damaged(saved({"model": weights(*"abcd")}, tmp_path / "a.pt"), 1), back)
    ckptool.warm_start(back, whole, tmp_path / "start.pt")
    ckptool.warm_start(whole, back, tmp_path / "start2.pt", only="a")  # the rest is the target's
    ckptool.warm_start(whole, back, tmp_path / "clean.pt")  # nothing is
    ckptool.average([back, back], tmp_path / "mean.pt")
    for name in ("start.pt", "start2.pt", "mean.pt"):
        assert "recovered-file" in notes(tmp_path / name), name
    assert sorted(load(tmp_path / "start.pt")) == [*"abcd"]
    assert "recovered-file" not in notes(tmp_path / "clean.pt")


def test_the_mark_of_one_shard_is_that_of_all(tmp_path: Path) -> None:
    ckptool.convert(saved(weights(*"abcd"), tmp_path / "a.pt"), tmp_path / "s", container="sharded", shard_size="60B")
    shard = sorted((tmp_path / "s").glob("*.safetensors"))[0]
    state = load_file(shard)
    mark = marks.recovered_mark(["lost"])
    save_file(state, shard, {"format": "pt", marks.RECOVERED: mark})
    (note,) = [note for note in ckptool.inspect(tmp_path / "s").notes if note.code == "recovered-file"]
    assert "1 tensor was lost: lost" in note.message
    ckptool.convert(tmp_path / "s", tmp_path / "whole.pt")
    assert "recovered-file" in notes(tmp_path / "whole.pt")


def test_a_mark_names_a_thousand_tensors_and_says_that_there_may_be_more(tmp_path: Path) -> None:
    """In a bundle of the file, too."""
    whole = saved({f"t{i}": torch.ones(1) for i in range(1_300)}, tmp_path / "a.pt")
    share = record_starts(whole)["archive/data/100"] / whole.stat().st_size
    lost = len(recover(cut(whole, share, tmp_path / "cut.pt"), tmp_path / "back.pt").lost)
    ckptool.bundle({"a": tmp_path / "back.pt"}, tmp_path / "bundle.pt")
    for name in ("back.pt", "bundle.pt"):
        (note,) = [note for note in ckptool.inspect(tmp_path / name).notes if note.code == "recovered-file"]
        assert lost > 1_000 and "1,000 tensors or more were lost" in note.message, name


def test_marks_add_up() -> None:
    text = marks.recovered_mark(["b"], marks.recovered_mark(["a"], '{"filled": ["c"]}'))
    assert marks.lost_by(text) == ["c", "a", "b"]
    many = marks.recovered_mark([f"w{i}" + "x" * 500 for i in range(5000)])
    assert len(marks.lost_by(many)) == marks.MOST and len(many) < marks.MAX_RECORD
    for odd in ("", "[", "[]", "3", '{"lost": 1, "filled": [2], "lost_count": -1}', "[" * 100_000):
        assert marks.lost_by(odd) == [] and len(marks.recovered_notes({marks.RECOVERED: odd})) == 1
    assert marks.recovered_notes({}) == ()


def test_the_first_bytes_of_a_file_prove_nothing_that_the_rest_does_not(tmp_path: Path) -> None:
    """Where the header of the first record is changed or zero, the file cannot be read, and nothing of it is lost."""
    whole = torch.load(written(PLAIN, tmp_path / "whole.pt"))
    flipped = [PLAIN[:at] + bytes([PLAIN[at] ^ 1 << at % 8]) for at in range(4)]
    for number, first in enumerate((*flipped, *map(bytes, (4, 9, 30)))):
        path, out = written(first + PLAIN[len(first) :], tmp_path / "first.pt"), tmp_path / f"{number}.pt"
        with pytest.raises(Corrupt, match="its first bytes were damaged") as error:
            ckptool.inspect(path)
        assert str(error.value.fix) == f"Save what is whole: ckptool recover {path} -o OUT"
        assert recover(path, out).complete
        assert_same_objects(torch.load(out), whole)


def _some_damage(chosen: random.Random, data: bytes) -> bytes:
    at, size = chosen.randrange(400, len(data)), chosen.choice([1, 2, 100, 512])
    return chosen.choice([
        data[:at], data[:at] + bytes(len(data) - at), data[:at] + bytes(2_000), data[: at + size] + data[at:],
        data[:at] + data[at + size :], data[: at - at % 512] + bytes(len(data) - at + at % 512),
        data[: -chosen.randrange(1, 20)] + bytes(chosen.randrange(1, 5)),
        data[: -chosen.randrange(18, 98)] + data[-17:], bytes(at) + data[at:],
    ])  # fmt: skip


def test_what_a_damaged_file_is_told_to_do_can_be_done_and_no_cause_is_made_up(tmp_path: Path) -> None:
    """`recover` is named where, and only where, it gives a file that torch reads. No file is called cut off without a
    word on what else it may be."""
    chosen, told = random.Random(5), 0
    for number in range(200):
        data = _some_damage(chosen, PLAIN)
        path, out = written(data, tmp_path / ("a.pt", "a.safetensors")[number % 2]), tmp_path / f"{number}.pt"
        with contextlib.suppress(CkptoolError):
            ckptool.inspect(path)
            continue
        with pytest.raises(CkptoolError) as caught:
            ckptool.inspect(path)
        error = caught.value
        assert "cut off" not in error.why or " or " in error.why, (number, error)
        if "directory is missing" in error.what and data.endswith(bytes(512)):
            assert "bytes are zero" in error.why, (number, error)
        if "recover" in error.fix:
            told += 1
            assert ("OUT.pt" in error.fix) is (path.suffix == ".safetensors")
            recover(path, out)
            torch.load(out)
        elif isinstance(error, (Corrupt, Truncated)):
            with pytest.raises(CkptoolError):
                recover(path, out)
    assert told > 60


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_conversion_that_a_checksum_stops_names_the_shard(suffix: str, tmp_path: Path) -> None:
    """The same for large records, which are copied, and for small ones, which are read."""
    for size in (2_000, 200_000):
        folder = tmp_path / str(size)
        bins(folder, [{"a": torch.ones(size)}, {"b": torch.ones(size)}])
        shard = sorted(folder.glob("*.bin"))[1]
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        written(bytes(data), shard)
        with pytest.raises(Corrupt, match=re.escape(f"{shard}: ")):
            ckptool.convert(folder, tmp_path / f"out{suffix}")


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
    refused(CkptoolError, tmp_path, lambda: recover(path, tmp_path / "out.pt"), "calls")
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
    whole = run("recover", tmp_path / "a.pt", "-o", tmp_path / "whole.pt")
    assert whole.code == 0 and "nothing is missing" in whole.out
    assert (tmp_path / "whole.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()
    np.savez(tmp_path / "a.npz", a=np.zeros(9), b=np.ones(9))
    done = run("recover", cut(tmp_path / "a.npz", 0.6, tmp_path / "cut.npz"), "-o", tmp_path / "some.npz")
    assert done.code == 2 and "directory is missing" in done.err


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
