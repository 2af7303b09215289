"""`bundle.json` is not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.errors import Ambiguous, CkptoolError, Conflict, Corrupt, LimitExceeded, Unsupported


def member(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record["members"].append(fields)


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], Any], type[CkptoolError], str]] = {
    "climbs": (member(name="x", file="../G.pt"), Corrupt, "outside its folder"),
    "absolute": (member(name="x", file="/etc/passwd"), Corrupt, "outside its folder"),
    "missing": (member(name="x", file="none.pt"), CkptoolError, "none.pt"),
    "twice": (member(name="ema", value=1), Corrupt, "twice"),
    "both": (member(name="x", file="ema.pt", value=1), Corrupt, "not exactly one"),
    "neither": (member(name="x"), Corrupt, "not exactly one"),
    "no-name": (member(file="ema.pt"), Corrupt, "damaged"),
    "odd-name": (member(name=[1], value=1), Corrupt, "damaged"),
    "truth": (member(name=True, value=1), Corrupt, "damaged"),
    "no-file-name": (member(name="a/b", file="ema.pt"), Conflict, "cannot be called"),
    "no-object": (lambda record: record["members"].append(3), Corrupt, "damaged"),
    "no-list": (lambda record: record.update(members={}), Corrupt, "damaged"),
    "no-members": (lambda record: record.pop("members"), Corrupt, "damaged"),
    "ties": (lambda record: record.update(ties=[[1]]), Corrupt, "damaged"),
    "newer": (lambda record: record.update(schema="ckptool.bundle/2"), Unsupported, "ckptool.bundle/2"),
    "no-schema": (lambda record: record.pop("schema"), Unsupported, "None"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_record(gan_bundle: Path, case: str) -> None:
    ckptool.unbundle(gan_bundle, "parts")
    record = json.loads(Path("parts/bundle.json").read_text())
    spoil, error, words = SPOILED[case]
    spoil(record)
    Path("parts/bundle.json").write_text(json.dumps(record))
    with pytest.raises(error) as caught:
        ckptool.bundle(out="out.pt", from_folder="parts")
    assert words in str(caught.value) and not Path("out.pt").exists()


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"a":1,"a":2}', b"[" * 100_000, b'{"schema":"\\ud800"}'])
def test_a_record_that_is_no_json(gan_bundle: Path, raw: bytes) -> None:
    Path("parts").mkdir()
    Path("parts/bundle.json").write_bytes(raw)
    with pytest.raises((Corrupt, Ambiguous)):
        ckptool.bundle(out="out.pt", from_folder="parts")


def test_a_record_of_any_size(gan_bundle: Path) -> None:
    Path("parts").mkdir()
    with Path("parts/bundle.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LimitExceeded):
        ckptool.bundle(out="out.pt", from_folder="parts")


def test_addresses_that_lead_nowhere_are_passed_over(gan_bundle: Path) -> None:
    ckptool.unbundle(gan_bundle, "parts")
    record = json.loads(Path("parts/bundle.json").read_text())
    record |= {"ties": [["gone/a", "ema/0.weight"]], "twins": [[["gone"], ["nowhere"]]]}
    Path("parts/bundle.json").write_text(json.dumps(record))
    ckptool.bundle(out="again.tar", from_folder="parts")
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()
