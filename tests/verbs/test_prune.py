"""`prune`: what is deleted of a run, and what stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptool.training.store import name_of
from tests.support.small_runs import Typed, contents_but_lock, train_typed

pytestmark = pytest.mark.usefixtures("harness")


def test_prune(typed: Typed) -> None:
    train_typed(typed, "save.every=2", "save.keep_last=9", "save.keep_best=0")
    before = contents_but_lock("runs/x")
    code, out, _ = typed("prune", "runs/x", "-n", "--set", "save.keep_last=2")
    assert code == 0
    assert out.startswith("runs/x: would delete 7 checkpoints")
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
