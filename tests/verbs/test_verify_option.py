"""`--verify` of the verbs that write: a damaged input is told before anything is written, and so is a pickle that torch
cannot load."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Corrupt, VerifyFailed
from ckptool.formats import read, torch_zip
from ckptool.pickles import encode
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.zips import record_starts

Change = Callable[..., Any]

# Verbs that change something, and (a second time, of what they wrote) those that find nothing to do.
VERBS: dict[str, Change] = {
    "strip-module": lambda file, out, **o: ckptool.strip_module(file, out, **o),
    "strip-module of what has none": lambda file, out, **o: ckptool.strip_module(file, out, at="ema", **o),
    "add-module": lambda file, out, **o: ckptool.add_module(file, out, at="ema", **o),
    "rename": lambda file, out, **o: ckptool.rename(file, ["w => v"], out, at="ema", **o),
    "cast": lambda file, out, **o: ckptool.cast(file, out, dtype="bf16", at="ema", **o),
    "remap": lambda file, out, **o: ckptool.remap(file, out, to="cuda:0", **o),
    "remap to where it is": lambda file, out, **o: ckptool.remap(file, out, to="cpu", **o),
    "edit": lambda file, out, **o: ckptool.edit(file, out, set={"epoch": 4}, **o),
    "slim": lambda file, out, **o: ckptool.slim(file, out, **o),
}


def damaged(path: Path, record: str) -> None:
    """Turns a bit in the data of a record."""
    data, at = bytearray(path.read_bytes()), record_starts(path)[record]
    data[at + 5] ^= 16
    path.write_bytes(data)


def checkpoint() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weights = {f"module.{name}": torch.randn(40, 50, generator=generator) for name in ("a", "b")}
    return {"model": weights, "ema": {"w": torch.randn(3, generator=generator)}, "epoch": 3}


RECORDS = {0: "model/module.a", 2: "ema/w"}  # and what is in them


@looped(("verb", "number"), product(VERBS, RECORDS))
def test_a_damaged_record_is_told_and_nothing_is_written(verb: str, number: int, tmp_path: Path) -> None:
    path = saved(checkpoint(), tmp_path / "a.pt")
    damaged(path, f"archive/data/{number}")
    before = path.read_bytes()
    for options in ({"out": tmp_path / "out.pt"}, {"out": None, "in_place": True}):
        if verb == "slim" and "in_place" in options:
            continue  # it writes new files only
        with pytest.raises(Corrupt, match=RECORDS[number]) as error:
            VERBS[verb](path, **options, verify=True)
        assert "damaged" in error.value.what and f"ckptool verify {path}" in error.value.fix
        assert path.read_bytes() == before and sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("record", ["data/0", "data/2"])
def test_verbs_that_combine_tell_it_too(record: str, tmp_path: Path) -> None:
    path, good = saved(checkpoint(), tmp_path / "a.pt"), saved(checkpoint(), tmp_path / "b.pt")
    damaged(path, f"archive/{record}")
    part = "model" if record == "data/0" else "ema"
    calls: list[Callable[[], Any]] = [
        lambda: ckptool.convert(path, tmp_path / "o.pt", all=True, verify=True),
        lambda: ckptool.convert(f"{path}#{part}", tmp_path / "o.safetensors", verify=True),
        lambda: ckptool.bundle({"one": path, "two": good}, tmp_path / "o.pt", verify=True),
        lambda: ckptool.unbundle(path, tmp_path / "folder", verify=True),
        lambda: ckptool.average([f"{path}#{part}", f"{good}#{part}"], tmp_path / "o.pt", verify=True),
        lambda: ckptool.average([f"{good}#{part}", f"{path}#{part}"], tmp_path / "o.pt", verify=True),
        lambda: ckptool.warm_start(f"{path}#{part}", f"{good}#{part}", tmp_path / "o.pt", verify=True),
    ]
    for call in calls:
        with pytest.raises(CkptoolError) as error:
            call()
        assert "checksum" in error.value.what, error.value
        assert sorted(tmp_path.iterdir()) == [path, good]


def test_whole_files_pass(tmp_path: Path) -> None:
    path = saved(checkpoint(), tmp_path / "a.pt")
    for number, (verb, change) in enumerate(VERBS.items()):
        found = change(path, tmp_path / f"{number}.pt", verify=True)
        assert found.verified, verb
        assert not ckptool.verify(tmp_path / f"{number}.pt").problems


class Outer:
    class Inner:
        pass


def test_a_name_that_the_pickle_cannot_say_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 0.2: names of nested classes in protocol 2, which torch cannot load."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "kind": Outer.Inner}, path, pickle_protocol=4)
    assert load(path, weights_only=False)["kind"] is Outer.Inner

    class AtTwo(encode._Encoder):
        def run(self, tree: Any) -> bytes:
            data = bytearray(super().run(tree))
            data[1], self.protocol = 2, 2
            return bytes(data)

    with monkeypatch.context() as patched:
        patched.setattr(encode, "_Encoder", AtTwo)
        for options in ({"out": tmp_path / "b.pt"}, {"in_place": True}):
            before = path.read_bytes()
            with pytest.raises(VerifyFailed, match=r"Outer\.Inner"):
                ckptool.edit(path, set={"x": 1}, keep_unknown=True, verify=True, **options)
            assert path.read_bytes() == before and not (tmp_path / "b.pt").exists()
        ckptool.edit(path, tmp_path / "bad.pt", set={"x": 1}, keep_unknown=True)
    with pytest.raises(AttributeError, match=r"Outer\.Inner"):
        load(tmp_path / "bad.pt", weights_only=False)
    (note,) = (note for note in read(tmp_path / "bad.pt").notes if note.code == "nested-name")
    assert note.fix[:2] == ("ckptool", "convert")
    ckptool.convert(tmp_path / "bad.pt", tmp_path / "mended.pt", all=True, keep_unknown=True, verify=True)
    assert load(tmp_path / "mended.pt", weights_only=False)["kind"] is Outer.Inner


def test_what_was_one_object_and_is_two_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"lr": 0.1}
    path = saved({"w": torch.ones(2), "one": shared, "two": [shared]}, tmp_path / "a.pt")

    class Forgetful(encode._Encoder):
        def _recalled(self, *_: Any) -> bool:
            return False

    monkeypatch.setattr(encode, "_Encoder", Forgetful)
    with pytest.raises(VerifyFailed, match=r"two/0 differs in identity"):
        ckptool.edit(path, tmp_path / "b.pt", set={"x": 1}, verify=True)
    assert sorted(tmp_path.iterdir()) == [path]


def test_what_is_not_verified_is_copied_with_its_damage(tmp_path: Path) -> None:
    """Without `--verify` copied records are not read; their checksums go along, so that the damage can still be
    found."""
    path = saved(checkpoint(), tmp_path / "a.pt")
    damaged(path, "archive/data/0")
    ckptool.strip_module(path, tmp_path / "b.pt")
    assert [problem.code for problem in ckptool.verify(tmp_path / "b.pt").problems] == ["checksum"]
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() == "archive/data/0"
    assert read(tmp_path / "b.pt").container == torch_zip.NAME
