"""No file that a run did not write is ever changed or deleted, whatever it is called; and no run is begun over
another's checkpoints."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptool import cli
from ckptool.errors import CkptoolError, Conflict
from ckptool.training.store import name_of
from ckptool.training.trainer import resume, start
from tests.support.files import contents
from tests.support.looped import looped
from tests.support.small_runs import MLP, config, create, events, last

NAMES = (
    "run.yaml",
    "history.jsonl",
    "metrics.jsonl",
    "lock",
    "profile.json",
    "checkpoints/step-00000010.pt",
    "checkpoints/step-00000010.json",
)
CONTENTS = {
    "a configuration": yaml.safe_dump(MLP).encode(),
    "a text": b"mine\n",
    "a text without an end": b"mine",
    "nothing": b"",
    "json": b'{"mine": 1, "bytes": 3}\n',
    "bytes": bytes(range(256)) * 10,
    "lines": b'{"iteration": 1}\n{"iteration": 2}\n',
}
PROFILE: dict[str, Any] = {"profile": {"wait": 1, "active": 1}}


def attempt(*ways: Any) -> list[CkptoolError]:
    """Does several things, of which each may be refused."""
    found = []
    for way in ways:
        try:
            way()
        except CkptoolError as error:
            found.append(error)
    return found


@looped(("name", "content"), itertools.product(NAMES, CONTENTS), here=12, at_once=12)
def test_a_users_file_in_the_folder_of_a_new_run(tmp_path: Path, name: str, content: str) -> None:
    """It is there before the run, or in its place when the run goes on: refused, or left as it was."""
    made = config("save.every=10", run=tmp_path / "run", **PROFILE)
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENTS[content])
    (path.parent / "other").write_bytes(b"mine too")
    errors = attempt(lambda: start(made), lambda: start(made, resume="auto"), lambda: resume(str(tmp_path / "run")))
    assert contents(tmp_path / "run")[name] == CONTENTS[content] or (name, content) == ("lock", "nothing")
    assert (path.parent / "other").read_bytes() == b"mine too"
    if len(errors) == 3:  # nothing else was made
        left = contents(tmp_path / "run")
        assert left.keys() <= {
            name,
            str((path.parent / "other").relative_to(tmp_path / "run")),
            "lock",
            "run.yaml",
            "history.jsonl",
        }
    assert errors or name == "lock"  # which works without a name in it, or may have one where it is empty


def test_what_a_run_left_that_never_saved_is_its_own(tmp_path: Path) -> None:
    """It begins again over its own files."""
    made = create(config(run=tmp_path / "run"))
    made.note("start", step=0)
    made.metrics.add({"step": 1})
    assert made.lock is not None
    made.lock.release()
    for _ in range(2):
        shutil.copytree(tmp_path / "run", tmp_path / "again", dirs_exist_ok=True)
        start(config(run=tmp_path / "again"))
        shutil.rmtree(tmp_path / "again")


def test_the_folder_that_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run: .`, with the configuration that is being read and files of another program's."""
    monkeypatch.chdir(tmp_path)
    for run in (".", str(tmp_path), "../" + tmp_path.name):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(MLP | {"run": run}))
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        before = contents(tmp_path)
        for how in ("never", "auto", "must"):
            assert cli.main(["train", "run.yaml", "--resume", how]) == 2
            assert "run.yaml" in capsys.readouterr().err
            assert contents(tmp_path) == before
    (tmp_path / "mine.yaml").write_text((tmp_path / "run.yaml").read_text())
    for name in ("run.yaml", "metrics.jsonl"):
        (tmp_path / name).unlink()
    assert cli.main(["train", "mine.yaml", "-q"]) == 0
    assert cli.main(["train", "run.yaml", "-q", "--resume", "auto"]) == 0  # the run's own


# Checkpoints without their run ----------------------------------------------------------------------------------------


def without(run: Path) -> None:
    (run / "run.yaml").unlink()


def empty(run: Path) -> None:
    (run / "run.yaml").write_text("")


def other(run: Path) -> None:
    """run.yaml of another run."""
    start(config("seed=9", run=run.parent / "other"))
    shutil.copy(run.parent / "other" / "run.yaml", run / "run.yaml")


def alone(run: Path) -> None:
    """Nothing but the checkpoints, without their sidecars."""
    for path in [*run.glob("*.*"), *(run / "checkpoints").glob("*.json")]:
        path.unlink()


@pytest.mark.parametrize("taken", [without, empty, other, alone], ids=lambda made: made.__name__)
@pytest.mark.parametrize("steps", [20, 4])
def test_checkpoints_are_never_begun_over(tmp_path: Path, taken: Any, steps: int) -> None:
    made = config("save.every=2", f"train.steps={steps}", run=tmp_path / "run")
    start(config("save.every=5", run=tmp_path / "run"))
    taken(tmp_path / "run")
    before = contents(tmp_path / "run" / "checkpoints")
    ways = [lambda: start(made), lambda: start(made, resume="auto"), lambda: start(made, resume="must")]
    errors = attempt(*ways, lambda: resume(str(tmp_path / "run")))
    assert len(errors) == 4
    assert taken is empty or all("checkpoints" in error.what for error in errors)
    assert contents(tmp_path / "run" / "checkpoints") == before


def test_a_checkpoint_of_another_run_that_would_be_written_over(tmp_path: Path) -> None:
    """Told before the first step, not hours later; one that is not in the way is passed over."""
    start(config("train.steps=5", run=tmp_path / "run"))
    start(config("train.steps=5", run=tmp_path / "other"))
    for suffix in (".pt", ".json"):
        shutil.copy(
            tmp_path / "other/checkpoints" / f"step-00000005{suffix}",
            tmp_path / "run/checkpoints" / f"step-00000010{suffix}",
        )
    before = contents(tmp_path / "run" / "checkpoints")
    with pytest.raises(Conflict, match=r"step-00000010\.json, step-00000010\.pt, which this run did not write"):
        resume(str(tmp_path / "run"), ["train.steps=20"])
    assert contents(tmp_path / "run" / "checkpoints") == before
    resume(str(tmp_path / "run"), ["train.steps=9"])
    start(config("train.steps=9", run=tmp_path / "whole"))
    assert (tmp_path / "run/checkpoints" / name_of(9)).read_bytes() == (
        tmp_path / "whole/checkpoints" / name_of(9)
    ).read_bytes()


# What the history knew ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", ["deleted", "as it is", "cut"])
def test_changes_outlive_the_history(tmp_path: Path, history: str) -> None:
    """Each checkpoint knows with what it was trained: a change that was made by --set does not go back."""
    for name in ("a", "b"):
        run = tmp_path / name / "run"
        start(config("train.steps=5", run=run))
        resume(str(run), ["train.steps=10", "optim.main.lr=0.3", "save.keep_last=7"])
        if name == "b" and history != "as it is":
            lines = (run / "history.jsonl").read_text().splitlines(keepends=True)
            (run / "history.jsonl").unlink()
            if history == "cut":
                (run / "history.jsonl").write_text("".join(lines[:3]))
        resume(str(run), ["train.steps=15"])
        resume(str(run), ["train.steps=20", "train.on_nonfinite=stop"])
    assert last(tmp_path / "a") == last(tmp_path / "b")
    found = yaml.safe_load((tmp_path / "b/run/run.yaml").read_text())
    assert found["optim"]["main"]["lr"] == 0.01


def test_code_and_data_that_changed_are_told(tmp_path: Path) -> None:
    text = (
        "from ckptool.training.toys import MLP\ndef model(inputs, classes):\n    return MLP(inputs, classes=classes)\n"
    )
    data = "from ckptool.training.toys import blobs\ndef data():\n    return blobs(samples=60)\n"
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "set.py").write_text(data)
    sections = {
        "models": {"main": {"name": f"{tmp_path / 'own.py'}:model"}},
        "data": {"name": f"{tmp_path / 'set.py'}:data", "batch": 8},
    }
    start(config("train.steps=5", run=tmp_path / "run", **sections))
    said: list[str] = []
    resume(str(tmp_path / "run"), ["train.steps=10"], say=said.append)
    assert said == []
    (tmp_path / "own.py").write_text(text + "# more\n")
    (tmp_path / "set.py").write_text(
        data.replace("60", "160")
    )  # of another size: within a second, bytecode would be taken for current
    for name in ("own", "set"):  # as a new process reads them
        __import__("sys").modules.pop(f"_ckptool_user_{name}")
    resume(str(tmp_path / "run"), ["train.steps=15"], say=said.append)
    (told,) = said
    assert "own.py, set.py changed" in told
    assert "the number of samples is 160, and was 60" in told
    assert [fact.get("changed") for fact in events(tmp_path / "run") if fact["event"] == "resume"][-1]


# Lines and times ------------------------------------------------------------------------------------------------------


def test_pipes_among_the_files_of_a_run_are_not_waited_for(tmp_path: Path) -> None:
    for name in NAMES:
        run = tmp_path / name.replace("/", "-") / "run"
        start(config("train.steps=5", run=run))
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        attempt(lambda run=run: resume(str(run), ["train.steps=20"]), lambda run=run: start(config(run=run, **PROFILE)))
        assert (run / name).is_fifo()
