"""Every pickle of a folder is judged, whatever it is called; one that cannot be judged does not hide the others."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from tests.support.cli import Run
from tests.support.engine_folders import save_dcp
from tests.support.files import torch_bytes
from tests.support.hostile_inputs import CALL, MARKER, integer, name, pickle_zip, program, state_pickle, text

BESIDE = (
    "optimizer.bin scheduler.pt scaler.pt rng_state_1.pth training_args.bin random_states_0.pkl sampler.bin "
    "custom_checkpoint_0.pkl notes.txt state extra/more.dat a.npy meta.json tokenizer/merges"
).split()


def zip_of(name: str) -> bytes:
    with zipfile.ZipFile(made := io.BytesIO(), "w") as archive:
        archive.writestr(name, "text")
    return made.getvalue()


WEIGHTS = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}


def sharded(folder: Path) -> None:
    table = {"metadata": {}, "weight_map": {}}
    for number, (key, value) in enumerate(WEIGHTS.items(), 1):
        table["weight_map"][key] = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: value}, folder / table["weight_map"][key], {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


def trainer(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors", {"format": "pt"})
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    torch.save({"python": 1}, folder / "rng_state.pth")


def dcp(folder: Path) -> None:
    folder.rmdir()
    save_dcp(dict(WEIGHTS), folder)


@pytest.mark.parametrize("kind", [sharded, trainer, dcp], ids=lambda kind: kind.__name__)
def test_a_call_in_any_file_of_a_folder_is_said(kind, tmp_path: Path, run: Run) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "x"
    folder.mkdir()
    kind(folder)
    assert not any(row.calls for row in ckptool.scan(folder).files)
    assert "unsafe-global" not in str(ckptool.inspect(folder).notes)
    for number, beside in enumerate(BESIDE):
        file = folder / beside
        before = file.read_bytes() if file.exists() else None
        file.parent.mkdir(exist_ok=True)
        for planted in (pickle_zip(state_pickle({"x": CALL})), program(CALL)):
            file.write_bytes(planted)
            if file.suffix == ".json" and planted[:2] == b"PK":
                continue
            rows = ckptool.scan(folder).files
            calls = [call for row in rows for call in row.calls]
            assert {call.name for call in calls} == {"ckptool_marker.run"}, beside
            if file.parent == folder:
                places = [place for call in calls for place in call.places]
                own = any(row.calls and row.path.endswith(beside) for row in rows)
                assert own or any(beside in place for place in places), beside
            if number < 2:
                said = {note.code: note.message for note in ckptool.inspect(folder).notes}
                assert beside in said["unsafe-global"] and "ckptool_marker.run" in said["unsafe-global"]
                assert "unsafe-global" in {each.code for each in ckptool.doctor(folder).findings}
                assert "unsafe-global" in {note.code for note in ckptool.verify(folder).notes}
                assert "ckptool_marker.run" in run("scan", str(folder)).out
        file.unlink() if before is None else file.write_bytes(before)


def test_every_field_of_a_persistent_id_of_every_type(tmp_path: Path) -> None:
    """Once as the first mention of a storage, once after a right one; a folder shows its other files all the same."""
    right = (text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), integer(4))
    values = (b"N", b"\x88", integer(-1), integer(1 << 70), b"G" + bytes(8), text("x"), b")", b"]", b"}", b"C\x01x",
              name("torch", "Size"), MARKER + b")R", b"\x8f")  # fmt: skip
    torch.save(WEIGHTS, tmp_path / "good.pt")
    for place in range(5):
        for value in values:
            wrong = b"".join(value if index == place else field for index, field in enumerate(right))
            for first in (b"", text("a") + b"(" + b"".join(right) + b"tQ"):
                content = program(b"}(" + first + text("b") + b"(" + wrong + b"tQu", 4)
                (tmp_path / "bad.pt").write_bytes(pickle_zip(content))
                try:
                    ckptool.inspect(tmp_path / "bad.pt")
                except ckptool.CkptoolError as error:
                    assert error.code != "bug"
    found = ckptool.scan(tmp_path)
    assert found.latest is not None and found.latest.path.endswith("good.pt")


def test_what_is_unexpected_in_one_file_is_the_row_of_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptool import formats

    read = formats.read

    def failing(path: str) -> object:
        if "bad" in str(path):
            raise TypeError("no number")
        return read(path)

    for title in ("bad", "good"):
        torch.save(WEIGHTS, tmp_path / f"{title}.pt")
    monkeypatch.setattr(formats, "read", failing)
    found = ckptool.scan(tmp_path)
    assert [row.state for row in found.files] == ["corrupt", "good"] and "TypeError" in found.files[0].problem


def test_a_file_that_cannot_be_judged_is_said(tmp_path: Path) -> None:
    trainer(tmp_path)
    assert "not-judged" not in str(ckptool.inspect(tmp_path).notes)
    whole = torch_bytes({"a": torch.ones(300)})
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0 a picture")
    (tmp_path / "archive.zip").write_bytes(zip_of("readme.txt"))
    assert "not-judged" not in str(ckptool.inspect(tmp_path).notes)
    (tmp_path / "custom_checkpoint_3.pkl").write_bytes(whole[: len(whole) // 2])
    for report in (ckptool.inspect(tmp_path), ckptool.verify(tmp_path), ckptool.scan(tmp_path).files[0]):
        assert "not-judged" in str(report.notes)
    (tmp_path / "vocab.json").symlink_to("nowhere")
    (said,) = (note.message for note in ckptool.inspect(tmp_path).notes if note.code == "not-judged")
    assert "2 files of its folder cannot be read" in said and "custom_checkpoint_3.pkl, vocab.json" in said


def test_files_are_judged_however_deep_and_more_than_are_judged_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path)
    (deep := tmp_path / "a" / "b" / "c" / "d" / "e" / "f").mkdir(parents=True)
    (deep / "state").write_bytes(program(CALL))
    assert [note.code for note in ckptool.inspect(tmp_path).notes if "a/b/c/d/e/f/state" in note.message] == [
        "unsafe-global"
    ]
    monkeypatch.setattr("ckptool.formats.members.MAX_FILES", 2)
    assert "and all after it" in str(ckptool.inspect(tmp_path).notes)


@pytest.mark.parametrize("name", ["notes.txt", "weird.xyz", "below/state"])
def test_a_pickle_of_any_name_is_judged_where_the_folder_is_no_checkpoint(name: str, tmp_path: Path, run: Run) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "below").mkdir()
    (tmp_path / name).write_bytes(torch_bytes({"a": 1}))
    assert run("scan", tmp_path).code == 0 and name not in run("scan", tmp_path).out
    (tmp_path / name).write_bytes(program(CALL))
    judged = run("scan", tmp_path)
    assert judged.code == 1 and f"{name}: " in judged.out
    (row,) = (row for row in ckptool.scan(tmp_path).files if row.path.endswith(name))
    assert row.state == "unsafe-global"
    assert run("scan", tmp_path, "--latest-good", "-q").out.strip().endswith("model.safetensors")
