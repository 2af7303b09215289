"""The commands, as a user types them: exit codes, what is said, what is left as it was."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli.output import _pace
from ckptool.training.store import name_of
from tests.support.fork_server import ForkServer
from tests.support.programs import python
from tests.support.small_runs import Typed, contents_but_lock, flip_a_bit, own, train_typed

pytestmark = pytest.mark.usefixtures("harness")


# The everyday ---------------------------------------------------------------------------------------------------------


def test_train_and_resume(typed: Typed) -> None:
    code, out, err = train_typed(typed)
    assert (code, out) == (0, "done: 20 steps → runs/x\n")
    assert err.splitlines()[0].startswith("step 5  loss ")  # where it was evaluated, else every ten steps
    assert [line.split()[1] for line in err.splitlines()] == ["5", "10", "15", "20"]
    assert typed("resume", "runs/x", "-q", "--set", "train.steps=22") == (0, "done: 22 steps → runs/x\n", "")
    code, out, _ = typed("resume", "runs/x", "-q", "--json")
    told = {"schema": "ckptool.train/2", "status": "done", "step": 22, "exit_code": 0, "path": "runs/x", "why": ""}
    told["profile"] = ""
    assert json.loads(out) == told


def test_a_run_that_stops_before_its_first_step_claims_no_save(typed: Typed, tmp_path: Path) -> None:
    text = (
        "import os, signal\nclass Stop:\n    def attach(self, trainer):\n        os.kill(os.getpid(), signal.SIGINT)\n"
    )
    (tmp_path / "hook.py").write_text(text)
    code, out, _ = train_typed(typed, "hooks=[hook.py:Stop]")
    assert (code, out.splitlines()[0]) == (130, "stopped before the first step: runs/x")
    assert typed("resume", "runs/x", "--set", "hooks=[]")[1] == "done: 20 steps → runs/x\n"


def test_the_time_of_a_run_begins_with_its_first_step(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short it is, and however long a hook or a model takes to start, the run gets on."""
    monkeypatch.setattr("time.monotonic", time.monotonic)  # which the hook replaces
    (tmp_path / "hook.py").write_text(
        "import time\nnow = time.monotonic\nclass Slow:\n    def attach(self, trainer):\n"
        "        time.monotonic = lambda: now() + 1000\n"
    )
    code, out, _ = train_typed(typed, "stop.after=0.0001", "hooks=[hook.py:Slow]")
    assert (code, out.splitlines()[0]) == (0, "stopped after 1 step, saved → runs/x")
    assert train_typed(typed, "stop.after=900", "hooks=[hook.py:Slow]", "run=runs/y", "train.steps=2")[1].startswith(
        "done: 2"
    )


def test_only_the_first_process_tells(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun all of them end alike; one says so."""
    monkeypatch.setenv("RANK", "1")
    assert train_typed(typed)[:2] == (0, "")
    monkeypatch.setenv("RANK", "0")
    assert typed("resume", "runs/x", "-q")[1] == "done: 20 steps → runs/x\n"


def test_a_rehearsal_leaves_nothing(typed: Typed, tmp_path: Path) -> None:
    code, out, _ = typed("train", "run.yaml", "-n")
    assert code == 0
    assert out.startswith("it runs: one step, saved, loaded again, the same to the last bit")
    assert os.listdir(tmp_path) == ["run.yaml"]
    assert json.loads(typed("train", "run.yaml", "-n", "--json")[1])["schema"] == "ckptool.dry_run/2"


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
    assert (code, "new/first/model.py exists already" in err) == (2, True)
    assert all(len(line) <= 120 for line in Path("new/first/model.py").read_text().splitlines())


# What goes wrong ------------------------------------------------------------------------------------------------------


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
    (tmp_path / "hook.py").write_text(
        "import gc\nclass Look:\n    def facts(self):\n        return {'gc': gc.isenabled()}\n"
    )
    gc.disable()
    try:
        assert train_typed(typed, "hooks=[hook.py:Look]")[0] == 0
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
    assert drawn[4] == drawn[3] + "\n"  # what comes next begins a line
    assert {len(line.rstrip("\n")) for line in drawn} == {60}


def test_early_stopping(typed: Typed) -> None:
    code, out, _ = train_typed(typed, "stop.patience=1", "optim.main.lr=1e-30")
    assert code == 0
    assert out.splitlines() == [
        "stopped early: 10 steps → runs/x",
        (
            "  val_loss has not improved in 1 evaluation, best at step 5; go on all the same: "
            "ckptool resume runs/x --set stop.patience=null"
        ),
    ]
    assert "stopped early at step 10; go on all the same: ckptool resume runs/x" in typed("inspect", "runs/x")[1]
    assert typed("resume", "runs/x", "--set", "stop.patience=null", "-q")[1] == "done: 20 steps → runs/x\n"


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
    assert _pace({"step": step, "steps": 77_680}, rate) == words


def test_nobody_reads_the_progress(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ckptool train run.yaml 2>&1 | head`: the run goes on."""
    monkeypatch.setattr(sys, "stderr", Closed())
    assert train_typed(typed)[0] == 0


def test_a_run_that_is_there(typed: Typed) -> None:
    train_typed(typed)
    before = contents_but_lock("runs/x")
    code, _, err = train_typed(typed)
    assert code == 2
    assert "runs/x is a run already" in err
    assert "ckptool resume runs/x" in err
    assert contents_but_lock("runs/x") == before
    assert typed("train", "run.yaml", "--resume", "auto", "-q")[0] == 0


def test_a_changed_fixed_key(typed: Typed) -> None:
    train_typed(typed)
    before = contents_but_lock("runs/x")
    code, _, err = typed("resume", "runs/x", "--set", "train.accumulate=2")
    assert (code, "train.accumulate was 1, and is now 2" in err) == (2, True)
    assert contents_but_lock("runs/x") == before


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
        assert code == 3
        assert "none of them is whole" in err
        assert "Nothing was deleted" in err
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


def test_two_trainers_on_one_run(
    typed: Typed, tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptool.training.run_folder.PATIENCE", 0.05)
    path = str(tmp_path / "run.yaml")
    process = server.start(["train", path, "--set", "train.steps=1000000", "--set", f"run={tmp_path / 'runs' / 'x'}"])
    while not list((tmp_path / "runs").rglob("*.pt")):
        pass
    before = (tmp_path / "runs" / "x" / "run.yaml").read_bytes()
    for words in (("resume", "runs/x"), ("train", "run.yaml", "--resume", "auto", "--set", "train.steps=1000000")):
        code, _, err = typed(*words)
        assert code == 2
        assert f"written by another process (pid {process} on " in err
    code, _, err = typed("prune", "runs/x")
    assert code == 2
    assert "written by another process" in err
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
    assert done.returncode == 2
    assert "the limit on file sizes was reached" in done.stderr
    assert "Make room, then resume: ckptool resume runs/x" in done.stderr
    assert contents_but_lock("runs/x/checkpoints") == before
    assert typed("resume", "runs/x", "-q", "--set", "train.steps=25")[0] == 0
