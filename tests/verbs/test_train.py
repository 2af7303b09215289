"""The commands, as a user types them: exit codes, what is said, what is left as it was."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from ckptool.cli.output import _pace
from ckptool.training.store import name_of
from tests.support.programs import python
from tests.support.small_runs import Typed, contents_but_lock, flip_a_bit, train_typed

pytestmark = pytest.mark.usefixtures("harness")


# The everyday ---------------------------------------------------------------------------------------------------------


def test_a_run_that_stops_before_its_first_step_claims_no_save(typed: Typed, tmp_path: Path) -> None:
    text = (
        "import os, signal\nclass Stop:\n    def attach(self, trainer):\n        os.kill(os.getpid(), signal.SIGINT)\n"
    )
    (tmp_path / "hook.py").write_text(text)
    code, out, _ = train_typed(typed, "hooks=[hook.py:Stop]")
    assert (code, out.splitlines()[0]) == (130, "stopped before the first step: runs/x")
    assert typed("resume", "runs/x", "--set", "hooks=[]")[1] == "done: 20 steps → runs/x\n"


def test_only_the_first_process_tells(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun all of them end alike; one says so."""
    monkeypatch.setenv("RANK", "1")
    assert train_typed(typed)[:2] == (0, "")
    monkeypatch.setenv("RANK", "0")
    assert typed("resume", "runs/x", "-q")[1] == "done: 20 steps → runs/x\n"


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


def test_no_configuration(typed: Typed) -> None:
    code, _, err = typed("train")
    assert code == 2
    assert "ckptool train --init DIR" in err


class Terminal(io.StringIO):
    """What stands for stderr; as wide as COLUMNS says."""

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_stays(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", "60")
    train_typed(typed)
    drawn = stderr.getvalue().split("\r\x1b[K")[1:]
    assert len(drawn) == 4
    assert re.match("████████         step 10  [0-9.]+ steps/s(, 0:00:[0-9]{2} left)?  loss ", drawn[1])
    assert re.match("████████████████ step 20  [0-9.]+ steps/s  loss ", drawn[3])
    assert drawn[3].endswith("…\n")  # what comes next begins a line
    assert {len(line.rstrip("\n")) for line in drawn} == {60}


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
