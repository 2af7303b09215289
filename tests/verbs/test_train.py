"""The commands `train`, `resume` and `prune` as a user types them: exit codes, what is said, what is left as it was;
from which checkpoint a run goes on, with which configuration, and what is noted."""

import errno
import gc
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Corrupt, UsageError
from ckptool.training import configfile
from ckptool.training.reports import Outcome, line_of
from ckptool.training.store import Lines, name_of
from ckptool.training.toys import MLP
from ckptool.training.trainer import resume, start
from tests.support.errors import refused
from tests.support.fork_server import ForkServer
from tests.support.programs import python
from tests.support.small_runs import (
    Typed,
    config,
    contents_but_lock,
    cut_short,
    events,
    flip_a_bit,
    forget_record,
    last,
    own,
    train_typed,
)

pytestmark = pytest.mark.usefixtures("harness")


HOOK = "class Mine:\n    def {}:\n        {}\n"


def test_train_and_resume(typed: Typed) -> None:
    code, out, err = train_typed(typed)
    assert (code, out) == (0, "done: 20 steps → runs/x\n")
    assert err.splitlines()[0].startswith("step 5  loss ")  # where it was evaluated, else every ten steps
    assert [line.split()[1] for line in err.splitlines()] == ["5", "10", "15", "20"]
    assert typed("resume", "runs/x", "-q", "--set", "train.steps=22") == (0, "done: 22 steps → runs/x\n", "")
    code, out, _ = typed("resume", "runs/x", "-q", "--json")
    told = {"schema": "ckptool.train/2", "status": "done", "step": 22, "exit_code": 0, "path": "runs/x", "why": ""}
    assert json.loads(out) == told


def test_a_run_that_stops_before_its_first_step_claims_no_save(typed: Typed, tmp_path: Path) -> None:
    text = "import os, signal\n" + HOOK.format("attach(self, trainer)", "os.kill(os.getpid(), signal.SIGINT)")
    (tmp_path / "hook.py").write_text(text)
    code, out, _ = train_typed(typed, "hooks=[hook.py:Mine]")
    assert (code, out.splitlines()[0]) == (130, "stopped before the first step: runs/x")
    assert typed("resume", "runs/x", "--set", "hooks=[]")[1] == "done: 20 steps → runs/x\n"


def test_the_time_of_a_run_begins_with_its_first_step(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short it is, and however long a hook or a model takes to start, the run gets on."""
    monkeypatch.setattr("time.monotonic", time.monotonic)  # which the hook replaces
    text = HOOK.format("attach(self, trainer)", "time.monotonic = lambda: now() + 1000")
    (tmp_path / "hook.py").write_text(f"import time\nnow = time.monotonic\n{text}")
    code, out, _ = train_typed(typed, "stop.after=0.0001", "hooks=[hook.py:Mine]")
    assert (code, out.splitlines()[0]) == (0, "stopped after 1 step, saved → runs/x")
    out = train_typed(typed, "stop.after=900", "hooks=[hook.py:Mine]", "run=runs/y", "train.steps=2")[1]
    assert out.startswith("done: 2")


def test_only_the_first_process_tells(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun all of them end alike; one says so. Where nobody reads the progress, the run goes on."""
    monkeypatch.setenv("RANK", "1")
    assert train_typed(typed)[:2] == (0, "")
    monkeypatch.setenv("RANK", "0")
    assert typed("resume", "runs/x", "-q")[1] == "done: 20 steps → runs/x\n"
    monkeypatch.setattr(sys, "stderr", Closed())  # as `ckptool train run.yaml 2>&1 | head`
    assert train_typed(typed, "run=runs/y")[0] == 0


def test_the_example_runs(typed: Typed, tmp_path: Path) -> None:
    """As it is where scikit-learn is; here with other data."""
    code, out, _ = typed("train", "--init")
    assert code == 0
    (tmp_path / "run.yaml").write_text(out)
    assert train_typed(typed, "data.name=blobs", "train.steps=3")[:2] == (0, "done: 3 steps → runs/digits\n")
    assert json.loads(typed("train", "--schema")[1])["title"] == "Config"


def test_a_run_to_begin_with_trains_and_resumes_as_it_is(typed: Typed, tmp_path: Path) -> None:
    code, out, _ = typed("train", "--init", "new/first")
    assert (code, out.splitlines()[1]) == (0, "train it: ckptool train new/first/run.yaml")
    first = ("train", "new/first/run.yaml", "--set", "train.steps=6", "--set", "save.every=3")
    assert typed(*first, "-q") == (0, "done: 6 steps → runs/first\n", "")
    assert typed("resume", "runs/first", "-q", "--set", "train.steps=9")[:2] == (0, "done: 9 steps → runs/first\n")
    assert typed(*first[:2], "-q", "--set", "train.steps=9", "--set", "save.every=3", "--set", "run=b")[0] == 0
    whole, parts = (Path(run) / "checkpoints/step-00000009.pt" for run in ("b", "runs/first"))
    assert whole.read_bytes() == parts.read_bytes()
    code, _, err = typed("train", "--init", "new/first")
    assert (code, "new/first/model.py already exists" in err) == (2, True)
    assert all(len(line) <= 120 for line in Path("new/first/model.py").read_text().splitlines())


def test_a_run_to_begin_with_is_there_as_a_whole_or_not_at_all(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("s3://bucket/first", "simplecache::s3://bucket/first"):
        code, _, err = typed("train", "--init", url)
        assert (code, f"{url} is not on this machine" in err) == (2, True)
    monkeypatch.setattr(configfile, "example", lambda **_: "run: first\n"[signal.raise_signal(signal.SIGINT) or 0 :])
    assert typed("train", "--init", "first")[0] == 130
    assert sorted(os.listdir("first")) == ["model.py", "run.yaml"]


def test_an_unknown_key(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: runs/x\ntrain:\n  stepz: 20\n")
    code, out, err = typed("train", "run.yaml")
    assert (code, out) == (2, "")
    assert "run.yaml:3: unknown key train.stepz; did you mean train.steps?" in err
    assert not (tmp_path / "runs").exists()
    assert "ckptool train --init DIR" in typed("train")[2]
    (tmp_path / "run.yaml").write_text("run: runs/x\nsede: 3\ntrain:\n  stepz: 20\n")
    assert typed("train", "run.yaml")[2].splitlines() == [
        "error[usage]: run.yaml: 2 problems",
        "  run.yaml:2: unknown key sede; did you mean seed?",
        "  run.yaml:4: unknown key train.stepz; did you mean train.steps?",
        "  Nothing was started.",
        "  All keys with what they mean: ckptool train --init",
    ]


def test_garbage_is_collected_while_a_run_trains(typed: Typed, tmp_path: Path) -> None:
    """The command line does without it elsewhere, but a run lives long."""
    (tmp_path / "hook.py").write_text("import gc\n" + HOOK.format("facts(self)", "return {'gc': gc.isenabled()}"))
    gc.disable()
    try:
        assert train_typed(typed, "hooks=[hook.py:Mine]")[0] == 0
    finally:
        gc.enable()
    assert json.loads(Path("runs/x/metrics.jsonl").read_text().splitlines()[-1])["gc"] == 1.0


class Terminal(io.StringIO):
    """What stands for stderr; as wide as COLUMNS says."""

    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    """What stands for a pipe that nobody reads from."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_progress_on_a_terminal_is_one_line_that_stays(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", "60")
    train_typed(typed)
    drawn = stderr.getvalue().split("\r\x1b[K")[1:]
    assert len(drawn) == 5
    assert re.match("████████         step 10  [0-9.]+ steps/s(, 0:00:[0-9]{2} left)?  loss ", drawn[1])
    assert re.match("████████████████ step 20  [0-9.]+ steps/s  loss ", drawn[3])
    # The one that stays is whole, without the bar, and what comes next begins another; before, there is room for a ^C.
    assert all(len(line) <= 57 for line in drawn[:4])  # a lower rate has fewer digits
    assert re.fullmatch("step 20  loss .*  val_loss .*  val_acc .*  lr 0.01  [0-9.]+ steps/s\n", drawn[4])


@pytest.mark.parametrize(
    ("step", "rate", "words"),
    [
        (1_000, 12.34, "  12.3 steps/s, 1:43:34 left"),
        (0, 0.05, "  20.0 s/step, 17 days, 23:33:20 left"),
        (77_680, 3.0, "  3.0 steps/s"),
        (10, 0.0, ""),  # an evaluation that is done again when a run is resumed
    ],
)
def test_the_rate_and_the_time_left(step: int, rate: float, words: str) -> None:
    _, _, told = line_of({"step": step, "steps": 77_680}, rate, drawn=True).partition(f"step {step:,}")
    assert told.rstrip() == words


def test_a_run_that_is_there(typed: Typed) -> None:
    train_typed(typed)
    before = contents_but_lock("runs/x")
    code, _, err = train_typed(typed)
    assert (code, "runs/x is a run already" in err, "ckptool resume runs/x" in err) == (2, True, True)
    code, _, err = typed("resume", "runs/x", "--set", "train.accumulate=2")
    assert (code, "train.accumulate was 1, and is now 2" in err) == (2, True)
    assert contents_but_lock("runs/x") == before
    assert typed("train", "run.yaml", "--resume", "auto", "-q")[0] == 0


def test_a_run_folder_that_is_a_file_or_on_a_disk_that_became_read_only(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, err = train_typed(typed, "run=file")
    assert (code, "cannot make the run file: it is a file" in err) == (2, True)
    assert (tmp_path / "file").read_text() == "mine"
    assert "file/x" in train_typed(typed, "run=file/x")[2]
    train_typed(typed)
    before = contents_but_lock("runs/x")
    opened = os.open

    def refused(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        told = [typed("resume", "runs/x", "--set", "train.steps=30"), train_typed(typed, "run=runs/new")]
    assert all((code, "Read-only file system" in err) == (2, True) for code, _, err in told)
    assert contents_but_lock("runs/x") == before


def test_all_are_damaged(typed: Typed) -> None:
    train_typed(typed)
    for path in Path("runs/x/checkpoints").glob("*.pt"):
        flip_a_bit(path)
    before = contents_but_lock("runs/x/checkpoints")
    for words in (("resume", "runs/x"), ("train", "run.yaml", "--resume", "auto")):
        code, _, err = typed(*words)
        assert (code, "none of them is whole" in err, "Nothing was deleted" in err) == (3, True, True)
    assert contents_but_lock("runs/x/checkpoints") == before


def test_a_user_module_that_raises(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def model(inputs):\n    return 1 / 0\n")
    code, _, err = train_typed(typed, "models.main.name=mine.py:model", "models.main.args={}")
    assert (code, "mine.py" in err, "ZeroDivisionError" in err) == (2, True, True)
    assert train_typed(typed)[0] == 0  # mended, it begins by the same command
    before = contents_but_lock("runs/x/checkpoints")
    code, _, err = typed("resume", "runs/x", "--set", "train.steps=30", "--set", f"hooks=[{own('raises')}]")
    assert (code, "out of ideas" in err) == (2, True)
    assert contents_but_lock("runs/x/checkpoints") == before


def test_what_a_users_code_prints_is_no_part_of_an_answer_for_programs(typed: Typed, tmp_path: Path) -> None:
    text = "import torch\ndef model():\n    print('hello')\n    return torch.nn.Linear(4, 4)\n"
    (tmp_path / "mine.py").write_text(text)
    own_model = ("models.main.name=mine.py:model", "models.main.args={}", "data.args={inputs: 4}")
    for more in (["-n"], []):
        sets = [word for change in own_model for word in ("--set", change)]
        code, out, err = typed("train", "run.yaml", "--json", *sets, *more)
        assert (code, "hello" in err) == (0, True), err
        assert json.loads(out)["schema"] in ("ckptool.dry_run/2", "ckptool.train/2")


def test_checkpoints_that_are_gone_are_said(typed: Typed) -> None:
    """They were deleted; the run that begins again ends as it did."""
    train_typed(typed)
    whole = contents_but_lock("runs/x/checkpoints")[name_of(20)]
    shutil.rmtree("runs/x/checkpoints")
    code, _, err = typed("resume", "runs/x", "-q")
    assert (code, err) == (0, "runs/x has lost all its checkpoints: it begins again at step 0\n")
    assert contents_but_lock("runs/x/checkpoints")[name_of(20)] == whole


def test_two_trainers_on_one_run(
    typed: Typed, tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptool.training.run_folder.PATIENCE", 0.05)
    path = str(tmp_path / "run.yaml")
    process = server.start(["train", path, "--set", "train.steps=1000000", "--set", f"run={tmp_path / 'runs' / 'x'}"])
    while not list((tmp_path / "runs").rglob("*.pt")):
        time.sleep(0.02)
    os.kill(process, signal.SIGSTOP)  # it holds the run; that it goes on takes a core
    before = (tmp_path / "runs" / "x" / "run.yaml").read_bytes()
    for words in (("resume", "runs/x"), ("train", "run.yaml", "--resume", "auto", "--set", "train.steps=1000000")):
        code, _, err = typed(*words)
        assert (code, f"written by another process (pid {process} on " in err) == (2, True)
    code, _, err = typed("prune", "runs/x")
    assert (code, "written by another process" in err) == (2, True)
    assert typed("prune", "runs/x", "-n")[0] == 0
    os.kill(process, 9)
    assert server.wait() == -9
    assert (tmp_path / "runs" / "x" / "run.yaml").read_bytes() == before


def test_a_disk_that_is_full(typed: Typed, tmp_path: Path) -> None:
    """The checkpoint does not fit below the limit of a process; those that are there stay."""
    train_typed(typed)
    before = contents_but_lock("runs/x/checkpoints")
    size = (Path("runs/x/checkpoints") / name_of(20)).stat().st_size
    code = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({size - 100}, {size - 100}))\n"
    code += "from ckptool import cli; sys.exit(cli.main(['resume', 'runs/x', '-q', '--set', 'train.steps=25']))"
    done = python(code)
    assert done.returncode == 2 and "the file size limit was reached" in done.stderr
    assert "Make room, then resume: ckptool resume runs/x" in done.stderr and "Exception" not in done.stderr
    assert contents_but_lock("runs/x/checkpoints") == before
    assert typed("resume", "runs/x", "-q", "--set", "train.steps=25")[0] == 0


# Going on.
def begun(path: Path, *changes: str, steps: int = 10, **sections: Any) -> Path:
    """A run that stopped after so many steps."""
    start(config(f"train.steps={steps}", *changes, run=path / "run", **sections))
    return path / "run"


def on(run: Path, *changes: str) -> Outcome:
    return resume(str(run), ["train.steps=20", *changes])


def whole(path: Path, *changes: str) -> bytes:
    """The last file of a run that never stopped."""
    start(config("train.steps=20", *changes, run=path / "whole"))
    return (path / "whole" / "checkpoints" / name_of(20)).read_bytes()


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, forget_record], ids=lambda made: made.__name__)
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(typed: Typed, tmp_path: Path, damage: Any) -> None:
    run, path = begun(tmp_path), tmp_path / "run" / "checkpoints" / name_of(10)
    damage(path)
    code, out, _ = typed("scan", "--full", "run")
    assert code == 1 and "1 damaged" in out and "resumes from step 5" in out and name_of(10) in out.splitlines()[-1]
    code, _, err = typed("resume", str(run), "-q", "--set", "train.steps=20")
    assert (code, f"skipped: {path}" in err) == (0, True)
    noted = {fact["event"]: fact for fact in events(run)}
    assert (noted["skip-damaged"]["step"], noted["skip-damaged"]["path"], noted["resume"]["step"]) == (10, str(path), 5)
    assert last(tmp_path) == whole(tmp_path)


def test_a_damaged_one_is_written_again_and_metrics_are_cut_back_to_where_it_goes_on(tmp_path: Path) -> None:
    """And a run that is done stays done."""
    run = begun(tmp_path, "log.every=1")
    good = (run / "checkpoints" / name_of(10)).read_bytes()
    flip_a_bit(run / "checkpoints" / name_of(10))
    for _ in range(2):
        done = resume(str(run))
        assert (done.status, done.step, done.exit_code) == ("done", 10, 0)
        assert (run / "checkpoints" / name_of(10)).read_bytes() == good
    on(run)
    assert [fact["step"] for fact in Lines(str(run / "metrics.jsonl")).read()] == list(range(1, 21))


def test_a_change_holds_for_the_next_time_too(tmp_path: Path) -> None:
    """run.yaml is written once; what was changed since is in the history. A change that fails is not kept, and the run
    may be moved."""
    begun(tmp_path).rename(run := tmp_path / "elsewhere")
    text = (run / "run.yaml").read_text()
    refused(UsageError, tmp_path, lambda: on(run, "device=nonsense"))
    resume(str(run), ["train.steps=15", "optim.main.lr=0.1"])
    (noted,) = [fact for fact in events(run) if fact["event"] == "changed"]
    assert noted["changes"] == {"train.steps": [10, 15], "optim.main.lr": [0.01, 0.1]}
    resume(str(run), ["train.steps=20"])
    assert resume(str(run)).step == 20
    state = torch.load(run / "checkpoints" / name_of(20), weights_only=True)
    assert state["optimizer_state_dict"]["param_groups"][0]["lr"] == 0.1
    assert (run / "run.yaml").read_text() == text and os.listdir(tmp_path) == ["elsewhere"]
    assert [fact["event"] for fact in events(run)].count("changed") == 2


def test_resume_must_have_something(tmp_path: Path) -> None:
    refused("usage", tmp_path, lambda: resume(str(tmp_path)), "is not a run: it has no run.yaml")
    for use in (resume, ckptool.eval, ckptool.prune, ckptool.plot):
        refused(FileNotFoundError, tmp_path, lambda: use(str(tmp_path / "nowhere")), "no such name")  # noqa: B023
    refused("io", tmp_path, lambda: start(config(run=tmp_path / "none"), resume="must"), "no such name")
    run = begun(tmp_path)
    for inside in ("run.yaml", "checkpoints", "checkpoints/step-00000010.pt"):
        refused("usage", tmp_path, lambda: resume(str(run / inside)), f"It is a part of a run: name {run}")  # noqa: B023
    (run / "run.yaml").write_text((run / "run.yaml").read_text().partition("\n")[2])
    refused(Corrupt, tmp_path, lambda: on(run), "is not a run's configuration")


def test_other_conditions_are_said_in_one_line(tmp_path: Path) -> None:
    run = begun(tmp_path)
    threads, said = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        resume(str(run), ["train.steps=12"], say=said.append)
    finally:
        torch.set_num_threads(threads)
    assert len([line for line in said if "threads 1 → 2" in line]) == 1


def test_the_file_opens_everywhere_and_the_sidecar_says_where_it_ran(tmp_path: Path) -> None:
    """Stock torch.load, load_state_dict, and ckptool's own verbs: the weights and their average are clean roots."""
    run = begun(tmp_path, "train.ema=0.9")
    path = run / "checkpoints" / name_of(10)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    assert (sidecar["step"], sidecar["parent"], set(sidecar["metrics"])) == (10, 5, {"val_loss", "val_acc"})
    assert {"torch", "host", "device", "threads", "argv", "git"} <= set(sidecar["environment"])
    assert [fact["event"] for fact in events(run)] == ["start", "save", "save", "done"]
    assert {"torch", "host", "argv", "git", "step"} <= set(events(run)[0])
    state = torch.load(path, weights_only=True)
    for key in ("model_state_dict", "ema_state_dict"):
        MLP(inputs=[4], classes=4, hidden=[6], dropout=0.2).load_state_dict(state[key])
    parts = "epoch step loss model_state_dict optimizer_state_dict ema_state_dict rng_state data_state best config"
    assert list(state) == parts.split()
    assert state["optimizer_state_dict"]["param_groups"][0]["param_names"][0] == "1.weight"
    for root in (None, "model_state_dict", "ema_state_dict"):
        found = ckptool.strip_module(path, at=root, in_place=True)
        assert (found.how, found.summary) == ("nothing", "already clean: no wrapper prefix on any key")


def test_the_best_by_another_metric_is_chosen_anew(tmp_path: Path) -> None:
    """What was the best by one number says nothing of another, which a run may be judged by from a resume on."""
    run = begun(tmp_path)
    on(run, "eval.metric=val_acc", "eval.mode=max")
    best = torch.load(run / "checkpoints" / name_of(20), weights_only=True)["best"]
    later = {fact["step"]: fact["val_acc"] for fact in Lines(str(run / "metrics.jsonl")).read() if fact["step"] > 10}
    assert (best["metric"], best["value"]) == ("val_acc", max(later.values()))


def test_prune(typed: Typed) -> None:
    train_typed(typed, "save.every=2", "save.keep_last=9", "save.keep_best=0")
    before = contents_but_lock("runs/x")
    code, out, _ = typed("prune", "runs/x", "-n", "--set", "save.keep_last=2")
    assert (code, out.startswith("runs/x: would delete 7 checkpoints")) == (0, True)
    assert contents_but_lock("runs/x") == before
    assert typed("prune", "runs/x", "--set", "save.keep_last=2")[1].startswith("runs/x: deleted 7 checkpoints")
    assert sorted(path.name for path in Path("runs/x/checkpoints").glob("*.pt")) == [name_of(18), name_of(20)]
    assert typed("prune", "runs/x")[1].startswith("runs/x: deleted 0 checkpoints")
    assert json.loads(typed("prune", "runs/x", "--json")[1])["kept"][-1] == {"step": 20, "why": ["newest", "last"]}


def test_a_save_that_only_a_signal_asked_for(typed: Typed) -> None:
    """It stays while it is the newest, in the place of no other; then `prune` deletes it, as a run does."""
    train_typed(typed, "save.every=5", "save.keep_last=2", "save.keep_best=0")
    sidecars = {step: Path(f"runs/x/checkpoints/{name_of(step, '.json')}") for step in (15, 20)}
    marked = {path: json.loads(path.read_text()) | {"stop": True} for path in sidecars.values()}

    def kept(*options: str) -> list[int]:
        return [each["step"] for each in json.loads(typed("prune", "runs/x", "--json", *options)[1])["kept"]]

    sidecars[20].write_text(json.dumps(marked[sidecars[20]]))
    assert kept("-n", "--set", "save.keep_last=1") == [15, 20]
    sidecars[15].write_text(json.dumps(marked[sidecars[15]]))
    assert kept() == [20]
