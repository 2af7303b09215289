"""Pickles that would run something, in files, through the verbs.

Callables named in these pickles are those of a decoy module that would leave a trace if they ran.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptool
from ckptool.errors import UnsafeObject
from ckptool.pickles.calls import uses_of
from tests.support.hostile_inputs import CALL, Decoy, name, opened_pickle, pickle_zip, program, text
from tests.support.hostile_pickles import CALLS, INERT
from tests.support.looped import looped
from tests.support.watched import LOOKING, Seen

# Rows 53 to 60 and 85: what would run. Each opens, is named, and is neither loaded nor written.


@looped("title", CALLS)
def test_calls_are_shown_and_never_passed_on(title: str, see: Callable[..., Seen], tmp_path: Path) -> None:
    found = see(pickle_zip(CALLS[title]))
    codes = found.codes()
    assert all(codes[command] == "ok" for command in LOOKING), codes
    assert codes["convert to pt"] == "unsafe-global", codes
    checkpoint = opened_pickle(CALLS[title], tmp_path)
    assert list(uses_of(checkpoint))
    file = tmp_path / "input.pt"
    notes = [note.message for note in ckptool.inspect(file).notes if note.code == "unsafe-global"]
    assert len(notes) == 1 and "ckptool does not" in notes[0]
    for refused in (lambda: ckptool.load(file), lambda: ckptool.convert(file, tmp_path / "out.pt")):
        with pytest.raises(UnsafeObject):
            refused()
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("title", INERT)
def test_objects_of_foreign_classes_stay_inert(title: str, see: Callable[..., Seen], tmp_path: Path) -> None:
    found = see(pickle_zip(INERT[title]))
    assert all(found.codes()[command] == "ok" for command in LOOKING), found.codes()
    opened_pickle(INERT[title], tmp_path)
    if title != "57-build-of-a-device":
        with pytest.raises(UnsafeObject):
            ckptool.load(tmp_path / "input.pt")


def test_pythons_own_pickle_would_run_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle
    import sys

    found = Decoy(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pickle.loads(program(CALL))
    sys.modules.pop("ckptool_marker")
    assert found.trace.exists()


@pytest.mark.parametrize(
    "pickle",
    [
        program(b"\x8c\x0eckptool_marker" + CALL + b"\x93)R", 4),
        program(text("ckptool_marker") + name("builtins", "str") + text("run") + b"\x85R\x93)R", 4),
        program(b"K\x01K\x02\x93", 4),
        program(b"](" + text("a") + b"e" + text("run") + b"\x93)R", 4),
    ],
    ids=["call", "str", "numbers", "list"],
)
def test_a_computed_name_is_refused(pickle: bytes, see: Callable[..., Seen]) -> None:
    found = see(pickle_zip(pickle), "inspect")
    assert found.steps[0].code in ("unsafe-global", "corrupt") and "name is computed" in found.steps[0].message


def test_discarded_calls_are_listed(tmp_path: Path) -> None:
    for title in ("60-pop", "60-pop-mark", "60-memo", "60-overwritten-memo"):
        calls = list(uses_of(opened_pickle(CALLS[title], tmp_path)))
        assert [use.name for use, _ in calls] == ["ckptool_marker.run"], title
        assert "ckptool_marker.run" in str(ckptool.inspect(tmp_path / "input.pt"))
