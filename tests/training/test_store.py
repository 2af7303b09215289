"""A run's folder: what is written in which order, what is taken for whole, who may write, lines that were cut."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import save as benchmark_of_saving
from ckptool.errors import Conflict, DiskFull, FileProblem, NoneValid
from ckptool.output import durable
from ckptool.training import store as store_module
from ckptool.training.run_folder import Lock
from ckptool.training.store import Lines, Retention, RunFolder, SavedState, StreamingSha256, name_of
from tests.support.looped import looped
from tests.support.small_runs import cut_short, flip_a_bit, forget_record

STATE = {"model_state_dict": {"w": torch.arange(6.0)}, "step": 3}


def made(path: Path, *steps: int, run: str = "a" * 32) -> RunFolder:
    store = RunFolder(str(path), run)
    os.makedirs(store.checkpoints, exist_ok=True)
    for step in steps:
        store.commit(step, STATE | {"step": step}, {"metrics": {"val_acc": step / 10}})
    return store


def newest(store: RunFolder, verify: str = "full") -> tuple[int | None, list[int]]:
    """The newest whole checkpoint, and the steps of those that were passed over."""
    said: list[str] = []
    found = store.newest_valid(verify, said.append)
    return found and found.step, [int(text.partition("step-")[2][:8]) for text in said]


# What is written ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_and_its_sidecar(tmp_path: Path) -> None:
    """The same state gives the same bytes."""
    (saved,), (other,) = (made(tmp_path / name, 3).all() for name in ("one", "other"))
    data = Path(saved.path).read_bytes()
    assert data == Path(other.path).read_bytes()
    assert saved.sidecar is not None
    assert saved.sidecar["sha256"] == hashlib.sha256(data).hexdigest()
    assert (saved.sidecar["bytes"], saved.sidecar["step"], saved.sidecar["run"]) == (len(data), 3, "a" * 32)
    assert saved.metrics == {"val_acc": 0.3}
    assert torch.equal(torch.load(saved.path, weights_only=True)["model_state_dict"]["w"], torch.arange(6.0))


@pytest.mark.parametrize("size", [1000, 3 << 20])
def test_the_digest_is_added_up_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The file is not read again, however large; and the digest is that of its bytes."""

    def never(path: str) -> str:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(store_module, "file_digest", never)
    store = made(tmp_path)
    saved = store.commit(1, {"w": torch.rand(size // 4), "v": torch.rand(7)}, {})
    assert saved.sidecar is not None
    assert saved.sidecar["sha256"] == hashlib.sha256(Path(saved.path).read_bytes()).hexdigest()


def test_what_a_save_costs_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: None)
    _, ours, theirs, _, _ = benchmark_of_saving(1, "full", 1, tmp_path)
    assert ours > 0 and theirs > 0


def test_a_digest_out_of_order_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    for pieces in ([(0, b"abc"), (4, b"ef")], [(0, b"abc")], [(0, b"abcdeX"), (3, b"d")], [(0, b"abcdef")]):
        digest = StreamingSha256()
        for at, data in pieces:
            digest.feed(at, data)
        assert digest.result(str(path)) == hashlib.sha256(b"abcdef").hexdigest()


def test_a_full_disk_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the new file is written when the disk is full."""
    store = made(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    write = os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        write(fd, memoryview(data)[: len(data) // 2], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFull):
        store.commit(2, STATE, {})
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == before
    assert newest(store) == (1, [])


def test_a_sidecar_that_cannot_be_written_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = made(tmp_path, 1)

    def refused(path: str, value: Any, **options: Any) -> None:
        raise FileProblem(f"cannot write {path}: no", "")

    monkeypatch.setattr(store_module, "write_json", refused)
    with pytest.raises(FileProblem):
        store.commit(2, STATE, {})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001.json", "step-00000001.pt"]


def test_the_order_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is synced before any of it has its name, the checkpoint's name comes last, and then the folder,
    once."""
    store, seen = made(tmp_path, 1), []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        seen.append(f"sync {'folder' if stat.S_ISDIR(os.fstat(fd).st_mode) else 'file'}")
        fsync(fd)

    def renamed(one: str, other: str) -> None:
        seen.append(f"rename {os.path.basename(other)}")
        replace(one, other)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    store.commit(2, STATE, {})
    names = ["rename step-00000002.json", "rename step-00000002.pt"]
    assert seen == ["sync file", "sync file", *names, "sync folder"]


# What is whole --------------------------------------------------------------------------------------------------------


def garble(path: Path) -> None:
    path.with_suffix(".json").write_text('{"run": ')


def rename(path: Path) -> None:
    """A sidecar of another step."""
    path.with_suffix(".json").write_text(path.with_suffix(".json").read_text().replace('"step": ', '"step": 7'))


def gone(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "does not match its sha256": flip_a_bit,
    "bytes; its sidecar says": cut_short,
    "has no sidecar": forget_record,
    "belongs to another step": rename,
    "is a folder": gone,
}


@pytest.mark.parametrize(("words", "damage"), [*DAMAGES.items(), ("has no sidecar", garble)])
def test_a_damaged_one_is_named_and_kept_and_the_older_one_used(tmp_path: Path, words: str, damage: Any) -> None:
    """And if none is whole, it is an error."""
    store, said = made(tmp_path, 2, 3), list[str]()
    damage(tmp_path / "checkpoints" / name_of(3))
    left = sorted(os.listdir(tmp_path / "checkpoints"))
    found = store.newest_valid("full", said.append)
    assert found and found.step == 2 and len(said) == 1
    assert said[0].startswith("skipped: ") and said[0].count(str(tmp_path)) == 1 and words in said[0]
    damage(tmp_path / "checkpoints" / name_of(2))
    with pytest.raises(NoneValid, match="2 checkpoints, and none of them is whole") as raised:
        newest(store)
    assert raised.value.exit_code == 3
    assert {*left} - {*os.listdir(tmp_path / "checkpoints")} <= {"step-00000002.json"}


def test_only_the_size_is_looked_at_where_that_is_wanted(tmp_path: Path) -> None:
    store = made(tmp_path, 1, 2)
    flip_a_bit(tmp_path / "checkpoints" / name_of(2))
    assert newest(store, "size") == (2, [])
    assert newest(store, "full") == (1, [2])


def test_steps_are_what_counts_and_not_times_or_other_runs(tmp_path: Path) -> None:
    store = made(tmp_path, 1, 2, 100_000_000)
    os.utime(tmp_path / "checkpoints" / name_of(1), (2e9, 2e9))
    assert newest(store) == (100_000_000, [])
    other = RunFolder(str(tmp_path), "b" * 32)
    other.commit(200_000_000, STATE, {})
    (tmp_path / "checkpoints" / "step-latest.pt").write_bytes(b"")
    (tmp_path / "checkpoints" / "step-1.pt").write_bytes(b"")
    assert newest(store) == (100_000_000, [])
    assert [saved.step for saved in store.all()] == [1, 2, 100_000_000]
    assert newest(RunFolder(str(tmp_path / "nowhere"), "a")) == (None, [])


def test_a_file_is_deleted_before_its_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, order = made(tmp_path, 1, 2), list[str]()
    monkeypatch.setattr(os, "unlink", order.append)
    assert [saved.step for saved in store.prune()] == [1]
    assert [os.path.basename(path) for path in order] == ["step-00000001.pt", "step-00000001.json"]


def test_leftovers_of_a_killed_save_are_swept(tmp_path: Path) -> None:
    store = made(tmp_path, 1)
    Path(durable.hidden_name(str(tmp_path / "checkpoints" / name_of(1)))).write_bytes(b"half")
    store.commit(1, STATE, {})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001.json", "step-00000001.pt"]


def test_a_checkpoint_is_whole_while_it_is_replaced(tmp_path: Path) -> None:
    """Between the two renames the sidecar is that of the new file and the name that of the old one: both are whole."""
    store = made(tmp_path, 1, 2)
    path = tmp_path / "checkpoints" / name_of(2)
    old = path.read_bytes()
    store.commit(2, {"other": torch.ones(9), "more": torch.ones(3)}, {})
    assert newest(store) == (2, [])
    path.write_bytes(old)
    assert newest(store) == (2, [])
    flip_a_bit(path)
    assert newest(store) == (1, [2])


@looped("seed", range(40))
def test_the_only_whole_one_is_never_deleted(seed: int, tmp_path: Path) -> None:
    """Whatever is damaged and whatever the rules: what stays satisfies them with whole checkpoints, by their sha256."""
    rng = random.Random(seed)
    store = made(tmp_path, *range(1, 7))
    for step in rng.sample(range(1, 7), rng.randint(0, 6)):
        rng.choice([flip_a_bit, flip_a_bit, *DAMAGES.values()])(tmp_path / "checkpoints" / name_of(step))
    rules = Retention(
        rng.randint(0, 2), rng.randint(0, 2), rng.choice([0, 2, 3]), "val_acc", rng.choice(["min", "max"])
    )
    whole = []
    for saved in store.all():
        file, facts = Path(saved.path), saved.sidecar or {}
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        whole += [saved] if (facts.get("sha256"), facts.get("step")) == (digest, saved.step) else []
    reasons, unwanted = rules.divide(store.all(), "full")
    gone = {saved.step for saved in unwanted}
    expected = rules.reasons(whole)
    assert {step: why for step, why in reasons.items() if why != ["damaged"]} == expected
    assert {saved.step for saved in whole} - gone == expected.keys()
    assert not whole or {saved.step for saved in whole} - gone


# Lines ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "left"),
    [(24, [1, 1]), (36, [1, 1, 2]), (0, []), (None, [1, 1]), (-1, [1, 1]), ("24", [1, 1]), (99, [1, 1])],
)
def test_lines_are_cut_back_to_a_size_or_where_that_is_none_to_a_step(
    tmp_path: Path, size: Any, left: list[int]
) -> None:
    lines = Lines(str(tmp_path / "metrics.jsonl"))
    for step in (1, 1, 2):
        lines.add({"step": step})
    lines.cut_back(1, size)
    assert [fact["step"] for fact in lines.read()] == left
    lines.add({"loss": float("nan")})
    assert [*lines.read()][-1] == {"loss": "nan"}


# What a file holds, and which of it is read; the next line comes behind that.
TORN: list[tuple[bytes, list[dict[str, Any]]]] = [
    (b'{"step": 1}\n{"st', [{"step": 1}]),
    (b'{"step": 1}\n{"step": 2}', [{"step": 1}]),
    (b'\xff\xfe\n[1]\n{"step": 2}\n', [{"step": 2}]),
    (b'{"step": 1}\n' + b"x" * 200_000, [{"step": 1}]),
]


@pytest.mark.parametrize(("text", "whole"), TORN, ids=range(4))
def test_a_torn_line_is_cut_off_and_left_out(tmp_path: Path, text: bytes, whole: list[dict[str, Any]]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(text)
    Lines(str(path)).add({"step": 3})
    assert [*Lines(str(path)).read()] == [*whole, {"step": 3}]
    Lines(str(path)).cut_back(2)
    assert [*Lines(str(path)).read()] == whole
    assert path.read_bytes().endswith(b"}\n")


TO_THE_LIMIT = """
import json, resource, sys
from ckptool.errors import FileProblem
from ckptool.training.store import Lines
lines = Lines(sys.argv[1])
lines.add({"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
try:
    lines.add({"step": 2, "text": "x" * 100})
except FileProblem as error:
    print(error.what)
print(open(sys.argv[1]).read().count("xx"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.add({"step": 3})
"""


def test_a_line_for_which_there_is_no_room(tmp_path: Path) -> None:
    """The system takes a part of it: it is an error, and the next line does not follow half of one."""
    path = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", TO_THE_LIMIT, str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [f"cannot write to {path}: File too large", "3"]
    assert [fact["step"] for fact in Lines(str(path)).read()] == [1, 3]
    with pytest.raises(FileProblem, match="cannot write to /dev/full: No space left on device"):
        Lines("/dev/full").add({"step": 1})


# The lock -------------------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from ckptool.training.run_folder import Lock
Lock(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_two_writers_refuse_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is that of a process: it goes with it, however it ends."""
    monkeypatch.setattr("ckptool.training.run_folder.PATIENCE", 0.05)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(Conflict, match=f"written by another process .pid {process.pid} on ") as raised:
        Lock(str(tmp_path))
    assert "--set run=OTHER" in raised.value.fix
    process.kill()
    process.wait()
    process.stdout.close()
    Lock(str(tmp_path)).release()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(FileProblem, match=r"cannot write .*lock: Read-only file system"):
        Lock(str(tmp_path))


def test_the_store_is_known_without_torch() -> None:
    """`inspect` and `scan` look at runs where torch is not installed."""
    code = "import sys, ckptool.training.store; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# Which stay -----------------------------------------------------------------------------------------------------------


def kept_steps(step: int, value: float | None) -> SavedState:
    return SavedState(step, "", {"metrics": {} if value is None else {"acc": value}})


def rules(last: int = 0, best: int = 0, every: int = 0, metric: str = "acc", mode: str = "max") -> Retention:
    return Retention(last, best, every, metric, mode)


# A rule, its name, the metrics of the checkpoints at 10, 20, …, and the steps that it wants.
NAN, NONE = math.nan, None
WANTED: list[tuple[Retention, str, list[float | None], set[int]]] = [
    (rules(last=2), "last", [1, 2, 3], {20, 30}),
    (rules(last=9), "last", [1], {10}),
    (rules(last=0), "last", [1, 2], set()),
    (rules(best=1), "best", [0.2, 0.9, 0.5], {20}),
    (rules(best=2, mode="min"), "best", [0.2, 0.9, 0.5], {10, 30}),
    (rules(best=1, metric="other"), "best", [0.2, 0.9], set()),
    (rules(best=1, mode="min"), "best", [0.5, 0.0, NAN], {20}),  # zero counts; NaN and missing ones never rank
    (rules(best=3), "best", [NAN, 0.0, NONE], {20}),
    (rules(best=1), "best", [-1.0, 0.0], {20}),
    (rules(best=1), "best", [0.5, 0.5], {10}),  # of equal ones the older
    (rules(best=1, mode="min"), "best", [0.5, 0.5], {10}),
    (rules(every=20), "every", [1, 1, 1, 1], {20, 40}),
    (rules(every=0), "every", [1, 1], set()),
]


@pytest.mark.parametrize(("rule", "name", "values", "steps"), WANTED, ids=str)
def test_each_rule_wants_its_own(rule: Retention, name: str, values: list[float | None], steps: set[int]) -> None:
    reasons = rule.reasons([kept_steps(10 * (i + 1), value) for i, value in enumerate(values)])
    assert {step for step, names in reasons.items() if name in names} == steps


def test_a_union_with_the_reasons() -> None:
    there = [kept_steps(10, 0.9), kept_steps(20, 0.1), kept_steps(30, 0.5)]
    assert rules(1, 1, 20).reasons(there) == {10: ["best"], 20: ["every"], 30: ["newest", "last"]}
    assert rules(1, 1, 20).reasons([]) == {}


def kept(rule: Retention, saves: list[SavedState]) -> list[SavedState]:
    """What is left of saves one after the other. The newest is always there to resume from, whatever it is."""
    left: list[SavedState] = []
    for saved in saves:
        stay = rule.reasons([*left, saved])
        assert saved.step in stay
        left = [one for one in (*left, saved) if one.step in stay]
    return left


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_and_the_best_always_stay(seed: int) -> None:
    """Whatever the policies; and what was kept before a new one came is all that is needed to choose again."""
    dice = random.Random(seed)
    rule = rules(dice.randrange(3), 1, dice.choice((0, 30)))
    saves = [kept_steps(10 * i, dice.choice((0.0, 0.5, 1.0, NAN, dice.random()))) for i in range(1, 13)]
    for count in range(1, 13):
        ranked = [one.metrics["acc"] for one in saves[:count] if not math.isnan(one.metrics["acc"])]
        assert not ranked or max(ranked) in [one.metrics["acc"] for one in kept(rule, saves[:count])]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_was_stopped_ends_with_the_checkpoints_of_one_that_was_not(seed: int) -> None:
    """Saves that only a signal asked for come between the others, also several in a row, also with the best metric."""
    dice = random.Random(seed)
    rule = rules(dice.randrange(4), dice.randrange(3), dice.choice((0, 30)))
    saves = [kept_steps(10 * number, dice.choice((0.0, 0.5, NAN, dice.random()))) for number in range(1, 12)]
    stops = [
        SavedState(each.step - dice.randrange(1, 10), "", {"metrics": {"acc": 9.0}, "stop": True}) for each in saves
    ]
    mixed = sorted([*saves, *dice.sample(stops, 6)], key=lambda saved: saved.step)
    assert kept(rule, mixed) == kept(rule, saves)


@pytest.mark.parametrize("away", ["deleted", "moved", "replaced", "cut back"])
def test_a_file_of_lines_that_somebody_takes_away(tmp_path: Path, away: str) -> None:
    """Lines go where the name is, which is where readers look."""
    path, lines = tmp_path / "metrics.jsonl", Lines(str(tmp_path / "metrics.jsonl"))
    lines.add({"step": 1})
    if away == "deleted":
        path.unlink()
    elif away == "cut back":
        Lines(str(path)).cut_back(0)
    else:
        path.rename(tmp_path / "metrics.jsonl.1")
    if away == "replaced":
        path.write_text('{"step": 7}\n{"st')
    lines.add({"step": 2})
    assert [fact["step"] for fact in Lines(str(path)).read()] == ([7, 2] if away == "replaced" else [2])


def test_a_line_is_there_for_readers_at_once(tmp_path: Path) -> None:
    lines = Lines(str(tmp_path / "metrics.jsonl"))
    for step in range(9):
        lines.add({"step": step})
        assert [fact["step"] for fact in Lines(lines.path).read()] == list(range(step + 1))
