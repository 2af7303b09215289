"""Every verb that writes, stopped or failing at every file-system event: the old file or the new one, and nothing that
stays.

A sample here; `make soak` goes through all points.
"""

from __future__ import annotations

import errno
import io
import json
import pickle
import random
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from ckptool.formats import SHARDED, WRITERS
from tests.support.faults import TEMPORARY, Bench, Ended, FaultPoint, error_points, kill_points, signal_points
from tests.support.files import load, torch_bytes
from tests.support.looped import looped
from tests.support.power_loss import after_power_loss
from tests.support.same import assert_same_objects

Files = dict[str, bytes]


def training(prefix: str = "module.", device: str = "cpu") -> dict[str, Any]:
    w = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
    state = {f"{prefix}fc.weight": w, f"{prefix}tied.weight": w, f"{prefix}fc.bias": torch.ones(200).half()}
    return {"state_dict": state, "epoch": 3, "best": 0.5}


def model(prefix: str = "module.") -> Files:
    state = {f"{prefix}fc.weight": torch.arange(40_000, dtype=torch.float32), f"{prefix}fc.bias": torch.ones(200)}
    return {"m.safetensors": safetensors.torch.save(state)}


def pt(**more: bytes) -> Files:
    return {"in.pt": torch_bytes(training())} | more


def heavy() -> Files:
    """With optimizer state, and a small tensor that is a view of a large one."""
    state = training() | {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(9_000)}}, "param_groups": [{"params": [0]}]}
    }
    state["state_dict"]["module.part"] = torch.arange(20_000.0)[:7]
    return {"in.pt": torch_bytes(state)}


def two() -> Files:
    """Two checkpoints of one model."""
    other = training(prefix="")
    other["state_dict"]["fc.weight"] = other["state_dict"]["tied.weight"] = torch.ones(200, 200)
    return {"in.pt": torch_bytes(training(prefix=""))} | {"other.pt": torch_bytes(other)}


def normed() -> Files:
    """With weight norm."""
    return {"in.pt": torch_bytes({"fc.weight_g": torch.ones(200, 1), "fc.weight_v": torch.ones(200, 200)})}


INDEX = "out/model.safetensors.index.json"


def shards() -> Files:
    """A folder of shards, as another program left it: one of a name that the new ones do not have."""
    names = ["out/model-00001-of-00001.safetensors"]
    state = {"old.weight": torch.full((9_000,), 7.0)}
    index = {"metadata": {"total_size": 36_000}, "weight_map": {"old.weight": names[0].rpartition("/")[2]}}
    return {names[0]: safetensors.torch.save(state), INDEX: json.dumps(index).encode()}


def ranks() -> Files:
    """A folder of torch.distributed.checkpoint, with what a larger run left in it."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: one process saves
        dcp.save({"old": torch.full((9_000,), 7.0)}, checkpoint_id=folder, no_dist=True)
        files = {f"out.dcp/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}
    return files | {"out.dcp/__7_0.distcp": b"of a run on eight ranks"}


def cut() -> Files:
    """A file of which the end is missing."""
    data = pt()["in.pt"]
    return {"in.pt": data[: len(data) * 9 // 10]}


def bias() -> bytes:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.zeros(200, numpy.float16))
    return buffer.getvalue()


@dataclass(frozen=True)
class Case:
    """A command, what lies in its folder before, and which of that it may change."""

    words: str
    files: Callable[[], Files] = pt
    changes: tuple[str, ...] = ("out.pt",)
    old: bytes | None = None  # what stands at the output before
    again: str = " -f"  # what the next run needs to be let write
    link: dict[str, str] = field(default_factory=dict)
    folder: str = ""  # whose files all change at once
    code: int = 0  # of success
    judges: bool = False  # what it cannot read of its input, it reports, and goes on


OLD = b"a file that was there"
SAME = ("in.pt",)
SHARDS = (INDEX, "out/model-00001-of-00002.safetensors", "out/model-00002-of-00002.safetensors")
ST = ("m.safetensors",)
RANKS = ("out.dcp/.metadata", "out.dcp/__0_0.distcp")
CASES = {
    "strip, new": Case("strip-module in.pt -o out.pt"),
    "strip, over another": Case("strip-module in.pt -o out.pt -f", old=OLD),
    "strip, over itself": Case("strip-module in.pt -o in.pt -f", changes=SAME),
    "strip, in place": Case("strip-module in.pt --in-place", changes=SAME, again=""),
    "strip, through a link": Case("strip-module in.pt -o link.pt -f", old=OLD, link={"link.pt": "out.pt"}),
    "strip, into a folder": Case("strip-module in.pt -d new", changes=("new/in.pt",)),
    "strip, verified": Case("strip-module in.pt -o out.pt -f --verify", old=OLD),
    "strip, in place, verified": Case("strip-module in.pt --in-place --verify", changes=SAME, again=""),
    "add": Case("add-module in.pt -o out.pt -f", old=OLD),
    "add, in place": Case("add-module in.pt --in-place", changes=SAME, again=""),
    "rename": Case("rename in.pt '*fc.{n} => *lin.{n}' -o out.pt"),
    "rename, in place": Case("rename in.pt '*fc.{n} => *lin.{n}' --in-place", changes=SAME, again=""),
    "remap": Case("remap in.pt --to cuda:0 -o out.pt -f", old=OLD),
    "remap, in place": Case("remap in.pt --to cuda:0 --in-place", changes=SAME, again=""),
    "cast": Case("cast in.pt --dtype bf16 -o out.pt -f", old=OLD),
    "cast, in place": Case("cast in.pt --dtype bf16 --in-place", changes=SAME, again=""),
    "cast, safetensors, in place": Case("cast m.safetensors --dtype f16 --in-place", model, ST, again=""),
    "strip, safetensors, in place": Case("strip-module m.safetensors --in-place", model, ST, again=""),
    "edit": Case("edit in.pt --set epoch:=4 --drop best -o out.pt"),
    "edit, in place": Case("edit in.pt --set epoch:=4 --in-place", changes=SAME, again=""),
    "edit, a tensor": Case(
        "edit in.pt --tensor state_dict/module.fc.bias=b.npy -o out.pt -f", lambda: pt() | {"b.npy": bias()}, old=OLD
    ),
    "convert": Case("convert in.pt -o out.safetensors -f", changes=("out.safetensors",), old=OLD),
    "convert, all": Case("convert in.pt --all -o out.safetensors", changes=("out.safetensors",)),
    "convert back": Case("convert m.safetensors -o out.pt -f", model, old=OLD),
    "convert, compact": Case("convert in.pt -o out.pt"),
    "fix": Case("doctor in.pt --fix -o out.pt -f", old=OLD),
    "fix, half the size": Case("doctor in.pt --fix --dtype bf16 -o out.pt"),
    "fix, in place": Case("doctor in.pt --fix --in-place", changes=SAME, again=""),
    "slim": Case("slim in.pt -o out.pt -f", heavy, old=OLD),
    "slim, tied": Case("slim in.pt --dedup -o out.pt", heavy),
    "plain values": Case("convert in.pt --weights-only -o out.pt -f", old=OLD),
    "recover": Case("recover in.pt -o out.pt", cut, code=1, judges=True),
    "recover, over another": Case("recover in.pt -o out.pt -f", cut, old=OLD, code=1, judges=True),
    "digests": Case("verify in.pt --write-digest d.json", changes=("d.json",), judges=True),
    "digests, over others": Case("verify in.pt --write-digest d.json -f", changes=("d.json",), old=OLD, judges=True),
    "average": Case("average in.pt other.pt -o out.pt -f", two, old=OLD),
    "average, new": Case("average in.pt other.pt -o out.pt --ema 0.9 --verify", two),
    "bake": Case("bake in.pt -o out.pt -f", normed, old=OLD),
    "bundle": Case("bundle -o out.pt a=in.pt b=m.safetensors epoch:=4 -f", lambda: pt() | model(), old=OLD),
    "bundle, of two": Case("bundle -o out.pt a=in.pt b=other.pt", two),
    "bundle, changed": Case("bundle in.pt --drop best -o out.pt", pt),
    "unbundle": Case("unbundle in.pt -d out", changes=("out/bundle.json", "out/state_dict.pt"), folder="out"),
    "warm start": Case("warm-start in.pt --against other.pt -o out.pt -f", two, old=OLD),
    "spec": Case("spec in.pt -o spec.json -f", changes=("spec.json",), old=OLD),
    "shards, new": Case("convert in.pt --shard-size 100KB -o out", changes=SHARDS, folder="out"),
    "shards, over others": Case(
        "convert in.pt --shard-size 100KB -o out -f", lambda: pt() | shards(), changes=SHARDS, folder="out"
    ),
    "dcp, new": Case("convert in.pt -o out.dcp --ranks 2", changes=(*RANKS, "out.dcp/__1_0.distcp"), folder="out.dcp"),
    "dcp, over others": Case("convert in.pt -o out.dcp -f", lambda: pt() | ranks(), changes=RANKS, folder="out.dcp"),
    "dcp, over others, verified": Case(
        "strip-module in.pt -o out.dcp -f --verify", lambda: pt() | ranks(), changes=RANKS, folder="out.dcp"
    ),
    "dcp to a file": Case("convert out.dcp -o out.pt -f", ranks, old=OLD),
}


class Trial:
    """One case in a folder of its own: what was there, what a run without faults makes of it, and what is there after
    one with."""

    def __init__(self, case: Case, bench: Bench, folder: Path) -> None:
        import shlex

        self.case, self.bench, self.folder = case, bench, folder
        self.words = shlex.split(case.words)
        self.before = case.files() | ({case.changes[0]: case.old} if case.old is not None else {})
        self.reset()
        ended = bench.run(folder, self.words, "trace")
        assert ended.code == case.code, ended
        self.events, self.trace = bench.recorded()
        self.after = self.found()
        assert not temporaries_among(self.after) and set(case.changes) <= set(self.after)
        assert self.others(self.after) == self.others(self.before)
        for name, data in [*self.before.items(), *self.after.items()]:
            if data != OLD and (self.case.code == 0 or name != "in.pt"):
                opens(name, data, self.folder)

    def reset(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, data in self.before.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(data)
        for name, target in self.case.link.items():
            (self.folder / name).symlink_to(target)

    def found(self) -> Files:
        """What is there, but for links, which must be as they were."""
        for name, target in self.case.link.items():
            assert (self.folder / name).readlink() == Path(target)
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def run(self, point: FaultPoint) -> Ended:
        self.reset()
        return self.bench.run(self.folder, self.words, point.how, point.at, point.number)

    def others(self, files: Files) -> Files:
        """What no run may change."""
        inside = f"{self.case.folder or '?'}/"
        return {
            name: data for name, data in files.items() if name not in self.case.changes and not name.startswith(inside)
        }

    def states(self, files: Files) -> set[str]:
        """Whether each changed file is `old` or `new`; fails where one is neither, or anything else is not as it
        was."""
        kept = {name: data for name, data in files.items() if not is_temporary(name)}
        assert self.others(kept) == self.others(self.before)
        if self.case.folder:
            old, new, now = (
                {n: d for n, d in some.items() if n not in self.others(some)}
                for some in (self.before, self.after, kept)
            )
            assert now in (old, new), f"the folder is neither the old one nor the new one: {list(now)}"
            return {"new" if now == new else "old"}
        return {self.state(name, kept.get(name)) for name in self.case.changes}

    def state(self, name: str, data: bytes | None) -> str:
        if data == self.after[name]:
            return "new"
        if data == self.before.get(name):
            return "old"
        assert data is not None and name in SAME, f"{name} is neither the old file nor the new one"
        found = opens(name, data, self.folder)  # an edit in place that was stopped: readers find one of the two
        for state, whole in (("old", self.before[name]), ("new", self.after[name])):
            if same(found, opens(name, whole, self.folder)):
                return state
        raise AssertionError(f"{name} opens as neither the old file nor the new one")

    def finish(self) -> None:
        """The next run works, and nothing is left over."""
        if self.found() == self.after:
            return
        ended = self.bench.run(self.folder, [*self.words, *self.case.again.split()])
        assert ended.code == self.case.code, ended
        files = self.found()
        assert not temporaries_among(files) and self.states(files) == {"new"}


def is_temporary(name: str) -> bool:
    return any(part.startswith(TEMPORARY) for part in name.split("/"))


def temporaries_among(files: Files) -> set[str]:
    """The temporary files and folders."""
    return {name[: name.find("/", name.index(TEMPORARY)) + 1] or name for name in files if is_temporary(name)}


def opens(name: str, data: bytes, folder: Path) -> Any:
    """What stock torch or safetensors finds in a file of these bytes."""
    if name.endswith((".json", ".npy")):
        return json.loads(data) if name.endswith("n") else numpy.load(io.BytesIO(data))
    if name.endswith(".safetensors"):
        return safetensors.torch.load(data)
    if name.endswith(".metadata"):
        return pickle.loads(data).state_dict_metadata
    if name.endswith(".distcp"):
        return data  # as many zips as the table says, one after the other
    path = folder.with_name("opened.pt")
    path.write_bytes(data)
    return load(path)


def same(a: Any, b: Any) -> bool:
    try:
        assert_same_objects(a, b)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    yield bench
    bench.close()


def killed(trial: Trial, point: FaultPoint) -> None:
    ended = trial.run(point)
    files = trial.found()
    if ended.code == trial.case.code:  # threads of checksums were quicker this time: that event was one too far
        assert trial.states(files) == {"new"}
        return
    assert ended.code == -signal.SIGKILL, ended
    assert len(temporaries_among(files)) <= 1
    trial.states(files)
    trial.finish()


def failed(trial: Trial, point: FaultPoint) -> None:
    ended = trial.run(point)
    files = trial.found()
    states = trial.states(files)
    assert ended.code in (trial.case.code, 2), ended
    if point.how == "error" or "could not be undone" not in ended.err:
        assert states == ({"old"} if ended.code == 2 else {"new"}), (ended, states)
    if point.how == "error":
        events, _ = trial.bench.recorded()  # of this run: sums in threads let it write earlier or later
        event = events[point.at] if point.at < len(events) else point.event
        sweeping = event.startswith(("unlink", "remove", "flock", "listdir", "open TEMPORARY"))
        assert sweeping or not temporaries_among(files), "a temporary file was left"
    assert "Traceback" not in ended.err and "error[bug]" not in ended.err, ended
    if ended.code == 2:
        assert ended.err.startswith("error["), ended
        if point.number in FULL_WORDS and "cannot write" in ended.err:
            assert FULL_WORDS[point.number] in ended.err and "is as it was" in ended.err
        trial.finish()


FULL_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota is used up",
    errno.EFBIG: "the limit on file sizes was reached",
}


def stopped(trial: Trial, point: FaultPoint) -> None:
    ended = trial.run(point)
    files = trial.found()
    (state,) = trial.states(files)
    assert not temporaries_among(files) and "Traceback" not in ended.err, ended
    assert ended.code in (128 + point.number, trial.case.code), ended
    if ended.code == trial.case.code:
        assert state == "new"
    elif state == "old":
        assert all(files.get(name) == trial.before.get(name) for name in trial.case.changes), (
            "bytes were left in the file"
        )


KINDS = {"killed": (killed, kill_points), "failed": (failed, error_points), "stopped": (stopped, signal_points)}


def sweep(kind: str, trial: Trial, at_most: int | None = None) -> int:
    """Tries the points of one kind, or so many of them, chosen by a seed; returns how many."""
    check, points_of = KINDS[kind]
    points = points_of(trial.events)
    if trial.case.judges:
        points = [point for point in points if not (point.how == "error" and point.event.startswith("pread"))]
    if at_most is not None:
        points = random.Random(f"{kind} {trial.case.words}").sample(points, at_most)
    for point in points:
        try:
            check(trial, point)
        except AssertionError as error:
            raise AssertionError(f"{trial.case.words}: {point}: {error}") from error
    return len(points)


@looped("case", CASES)
def test_a_fault_at_a_sample_of_points_leaves_old_or_new(case: str, bench: Bench, tmp_path: Path) -> None:
    trial = Trial(CASES[case], bench, tmp_path / "work")
    for kind in KINDS:
        sweep(kind, trial, 1)
    power_lost(trial, 10)
    assert trial.run(FaultPoint("short", -1, "")).code == trial.case.code and trial.found() == trial.after


def test_every_container_that_is_a_folder_is_written_here_with_faults() -> None:
    """A new one, and over another: add its two cases above."""
    for container in (each for each in WRITERS if each.writes_folder):
        asks = {SHARDED: "--shard-size"}.get(container.name, (*container.suffixes, f"--to {container.name}")[0])
        over = {" -f" in case.words for case in CASES.values() if case.folder and asks in case.words}
        assert over == {False, True}, container.name


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_a_fault_at_every_point_leaves_old_or_new(case: str, bench: Bench, tmp_path: Path) -> None:
    """Over all commands some 8,000: a kill at, within and after every event, every error at every event, every
    signal."""
    trial = Trial(CASES[case], bench, tmp_path / "work")
    counts = {kind: sweep(kind, trial) for kind in KINDS}
    power_lost(trial, 500)
    print(f"{case}: {counts}")
    assert counts["killed"] >= 20 and sum(counts.values()) >= 100


def power_lost(trial: Trial, times: int) -> None:
    """Row 157: after a power cut at any operation, with any of what was not synced lost, the file is the old one or the
    new."""
    assert not [operation for operation in trial.trace if operation[0] == "unknown"]
    chosen = random.Random(trial.case.words)
    stops = [*range(len(trial.trace) + 1)]
    names = dict(trial.before)
    for _ in range(times):
        files = after_power_loss(names, trial.trace, chosen.choice(stops), chosen)
        trial.states({name: data for name, data in files.items() if not is_temporary(name)})
    assert trial.states(after_power_loss(names, trial.trace, len(trial.trace), chosen)) == {"new"}, "synced to the end"


@pytest.mark.soak
def test_a_thousand_kills_at_random_leave_old_or_new(bench: Bench, tmp_path: Path) -> None:
    chosen = random.Random(1000)
    trials = [Trial(case, bench, tmp_path / f"{number}") for number, case in enumerate(CASES.values())]
    landed = 0
    for number in range(1000):
        trial = trials[number % len(trials)]
        trial.reset()
        ended = bench.run(trial.folder, trial.words, "shot", chosen.uniform(0, 0.06))
        landed += ended.code == -signal.SIGKILL
        assert ended.code in (trial.case.code, -signal.SIGKILL), ended
        files = trial.found()
        assert len(temporaries_among(files)) <= 1
        trial.states(files)
        trial.finish()
    print(f"{landed} of 1000 kills landed before the end")
    assert landed >= 300
