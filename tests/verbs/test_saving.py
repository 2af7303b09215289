"""Where the output goes, what is never overwritten, what a dry run says: one test for all verbs that write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Conflict, FileProblem, OutputExists, UnsafeObject, UsageError, VerifyFailed
from ckptool.formats import read
from ckptool.pickles import calls
from ckptool.verbs._save import Written
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.errors import three_parts
from tests.support.files import contents, load, saved
from tests.support.same import assert_same_objects

Verb = Callable[..., Written]
VERBS: dict[str, Verb] = {
    "strip-module": ckptool.strip_module,
    "add-module": ckptool.add_module,
    "rename": lambda file, out=None, **options: ckptool.rename(file, ["module.* => net.*"], out, **options),
    "remap": lambda file, out=None, **options: ckptool.remap(file, out, to="cuda:5", **options),
    "cast": lambda file, out=None, **options: ckptool.cast(file, out, dtype="bf16", **options),
    "edit": lambda file, out=None, **options: ckptool.edit(file, out, set={"epoch": 1}, drop=["optimizer"], **options),
    "convert": ckptool.convert,
}
each = pytest.mark.parametrize("verb", VERBS)
in_place = pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "convert"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make("training_sgd.pt", tmp_path)


@each
def test_the_same_bytes_every_time(verb: str, file: Path, tmp_path: Path) -> None:
    VERBS[verb](file, tmp_path / "a.pt")
    VERBS[verb](file, tmp_path / "b.pt", verify=True)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


@each
def test_a_dry_run_writes_nothing_and_says_the_same(verb: str, file: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    plan = VERBS[verb](file, tmp_path / "out.pt", dry_run=True, verify=True)
    assert contents(tmp_path) == before and plan.dry_run and not plan.verified
    done = VERBS[verb](file, tmp_path / "out.pt")
    assert (plan.summary, plan.how, plan.file_bytes) == (done.summary, done.how, done.file_bytes)


@each
def test_an_output_that_exists_is_refused(verb: str, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    out.write_bytes(b"precious")
    for options in ({}, {"dry_run": True}):
        with pytest.raises(OutputExists) as caught:
            VERBS[verb](file, out, **options)
        assert three_parts(caught.value)[0] == "output-exists" and out.read_bytes() == b"precious"
    assert VERBS[verb](file, out, overwrite=True).how == "new file" and len(contents(tmp_path)) == 2


@each
def test_the_input_as_output_is_refused(verb: str, file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    os.link(file, tmp_path / "link.pt")
    for out in (file, tmp_path / "." / file.name, tmp_path / "link.pt"):
        with pytest.raises(Conflict) as caught:
            VERBS[verb](file, out)
        assert file.read_bytes() == before
    (tmp_path / "link.pt").unlink()
    with pytest.raises(Conflict, match="is the input itself") as caught:
        VERBS[verb](file, file)
    assert "--in-place" in caught.value.fix
    done = VERBS[verb](file, file, overwrite=True, verify=True)
    assert done.how == "new file" and len(contents(tmp_path)) == 1
    assert (file.read_bytes() == before) == (verb == "convert")  # the file is compact already
    load(file)


@in_place
def test_in_place(verb: str, file: Path, tmp_path: Path) -> None:
    VERBS[verb](file, tmp_path / "out.pt")
    size = file.stat().st_size
    plan = VERBS[verb](file, in_place=True, dry_run=True)
    assert file.stat().st_size == size
    done = VERBS[verb](file, in_place=True, verify=True)
    assert done.how == plan.how and done.output == str(file) and done.verified
    assert done.file_bytes == file.stat().st_size
    if verb != "cast":  # whose values are new
        assert done.how == "in place" and done.bytes_written == file.stat().st_size - size == plan.bytes_written
    assert_same_objects(load(tmp_path / "out.pt"), load(file))
    assert sorted(contents(tmp_path)) == ["out.pt", "training_sgd.pt"]


@in_place
def test_in_place_keeps_the_container(verb: str, file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in_place=True keeps the container"):
        VERBS[verb](file, in_place=True, container="safetensors")
    assert len(contents(tmp_path)) == 1


@each
def test_a_cut_off_file(verb: str, file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CkptoolError) as caught:
        VERBS[verb](file, tmp_path / "out.pt")
    assert caught.value.exit_code == 2 and len(contents(tmp_path)) == 1


@each
def test_a_damaged_tensor_is_not_passed_on_as_good(verb: str, tmp_path: Path) -> None:
    """Copies carry the stored checksum along; what reads the values checks it."""
    raw = torch.arange(1000.0)
    path = saved({"net": {"module.a.w": raw}, "epoch": 0, "optimizer": 1}, tmp_path / "in.pt")
    path.write_bytes(path.read_bytes().replace(raw.numpy().tobytes(), raw.numpy().tobytes()[:-1] + b"\xff"))
    if verb == "cast":
        with pytest.raises(CkptoolError, match="does not match its checksum"):
            VERBS[verb](path, tmp_path / "out.pt")
        assert list(contents(tmp_path)) == ["in.pt"]
        return
    VERBS[verb](path, tmp_path / "out.pt")
    import zipfile

    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is not None


@each
def test_unknown_calls(verb: str, tmp_path: Path) -> None:
    value = {
        "state_dict": {"module.a.w": torch.ones(2)},
        "danger": TRAPS["20-unknown-call"]()["danger"],
        "optimizer": 1,
    }
    path = saved(value, tmp_path / "in.pt")
    with pytest.raises(UnsafeObject, match=r"calls fixtures\.traps\.classes\.add_up at danger") as caught:
        VERBS[verb](path, tmp_path / "out.pt")
    assert "--keep-unknown" in caught.value.fix and list(contents(tmp_path)) == ["in.pt"]
    VERBS[verb](path, tmp_path / "out.pt", keep_unknown=True)
    assert [place for _, place in calls.uses_of(read(tmp_path / "out.pt"))] == ["danger"]


def test_already_clean_is_a_copy_byte_for_byte(tmp_path: Path) -> None:
    for name in ("rezipped_deflated.pt", "crc_off.pt", "old_zip.pt", "model.safetensors"):
        file, out = make(name, tmp_path), tmp_path / f"out-{name}"
        done = ckptool.strip_module(file, out, verify=True)
        assert done.how == "copy" and done.summary.startswith("already clean") and out.read_bytes() == file.read_bytes()
        before = os.stat(file)
        nothing = ckptool.strip_module(file, in_place=True)
        assert (nothing.how, nothing.bytes_written, nothing.verified) == ("nothing", 0, False)
        assert os.stat(file).st_mtime_ns == before.st_mtime_ns


def test_shards_are_not_called_like_their_index(tmp_path: Path) -> None:
    for options in ({"shard_size": "1MB"}, {"container": "sharded"}):
        with pytest.raises(UsageError, match="is the name of an index"):
            ckptool.convert(make("dp.pt", tmp_path), tmp_path / "D" / "model.safetensors.index.json", **options)


def test_in_place_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make("dp.pt", tmp_path)
    before = file.read_bytes()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileProblem, match="no permission"):
        ckptool.strip_module(file, in_place=True)
    assert file.read_bytes() == before


@pytest.mark.parametrize("how", ["new file", "in place"])
def test_verify_finds_what_is_not_what_was_meant(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that sees one bit differently stands for a disk that lies."""
    from ckptool import formats

    file = saved({"module.a.w": torch.zeros(3)}, tmp_path / "in.pt")
    wrong = saved({"a.w": torch.tensor([0.0, -0.0, 0.0])}, tmp_path / "wrong.pt")
    right, before = formats.read, contents(tmp_path)
    out = tmp_path / "out.pt"
    monkeypatch.setattr(formats, "read", lambda path: right(wrong))  # with which outputs are read again
    with pytest.raises(VerifyFailed, match=r"a\.w differs in values"):
        ckptool.strip_module(file, out if how == "new file" else None, in_place=how == "in place", verify=True)
    assert contents(tmp_path) == before, "nothing is left, and the input is as it was"


@pytest.mark.parametrize("option", ["dryrun", "force", "in_place_"])
def test_an_option_that_there_is_not_writes_nothing(option: str, tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    calls: dict[str, Any] = {
        "strip_module": {},
        "convert": {},
        "remap": {"to": "cpu"},
        "slim": {},
        "edit": {"set": {"x": 1}},
        "warm_start": {"against": file},
        "unbundle": {},
    }
    for verb, more in calls.items():
        with pytest.raises(TypeError, match=f"{option}.*overwrite, dry_run"):
            getattr(ckptool, verb)(
                file, **{"folder" if verb == "unbundle" else "out": tmp_path / "out"}, **more, **{option: True}
            )
    assert os.listdir(tmp_path) == ["dp.pt"]
