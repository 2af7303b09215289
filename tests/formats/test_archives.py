"""Archives of torch files: zips as stable-baselines3 writes them (a real one lies in fixtures/engines), tars as NeMo
does. The judges: zipfile and tarfile, which unpack them, and torch, which loads what they unpacked."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import ckptool
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, NotACheckpoint, Truncated, Unsupported
from tests.support.cli import Run
from tests.support.errors import unreadable
from tests.support.looped import looped

WEIGHTS = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.ones(2)}


def saved(value: Any, **how: Any) -> bytes:
    torch.save(value, buffer := io.BytesIO(), **how)
    return buffer.getvalue()


def zipped(path: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def in_tar(path: Path, files: dict[str, bytes], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


POLICY = {
    "data": b'{"n_steps": 8, "policy_class": {":type:": "x", ":serialized:": "gAWVOwAAAA=="}}',
    "policy.pth": saved(WEIGHTS),
    "policy.optimizer.pth": saved({"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}),
    "pytorch_variables.pth": saved({}),
    "system_info.txt": b"- OS: Linux",
}


def test_a_policy_is_one_checkpoint_of_its_files(tmp_path: Path, run: Run) -> None:
    path = zipped(tmp_path / "policy.zip", POLICY)
    found = ckptool.open(path)
    assert list(found) == list(POLICY) and found.container == "archive"
    assert found["data"]["n_steps"] == 8 and found["system_info.txt"] == "- OS: Linux"
    assert "embedded-pickles" in [note.code for note in found.notes]
    for address, out in (("#policy.pth", "a.pt"), ("", "a.safetensors"), ("#policy.pth", "b.safetensors")):
        done = run("convert", f"{path}{address}", "-o", str(tmp_path / out))
        assert done.code == 0, done
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in WEIGHTS.items())
    assert run("diff", str(tmp_path / "a.safetensors"), str(tmp_path / "a.pt")).code == 0
    assert run("show", f"{path}#policy.pth/fc.bias").code == 0
    for verb in ("inspect", "verify", "doctor", "scan"):
        assert run(verb, str(path)).code == 0, verb


def test_files_in_folders_have_addresses(tmp_path: Path, run: Run) -> None:
    path = zipped(
        tmp_path / "run.zip", {"a/b/model.pth": saved(WEIGHTS), "a/notes.txt": b"x", "a/image.png": b"\x89\0"}
    )
    found = ckptool.open(path)
    assert list(found["a"]) == ["b", "notes.txt"]
    assert [note.code for note in found.notes] == ["other-records"] and "a/image.png" in found.notes[0].message
    assert run("convert", f"{path}#a/b/model.pth", "-o", str(tmp_path / "x.pt")).code == 0


def test_older_files_and_safetensors_are_read_in_place(tmp_path: Path) -> None:
    legacy = saved(WEIGHTS, _use_new_zipfile_serialization=False)
    path = zipped(
        tmp_path / "a.zip", {"hf/config.json": b"{}", "hf/model.safetensors": save(WEIGHTS), "old.pth": legacy}
    )
    found = ckptool.open(path)
    for state in (found["hf"]["model.safetensors"], found["old.pth"]):
        assert state["fc.weight"].bytes() == WEIGHTS["fc.weight"].numpy().tobytes()


def test_damage_to_a_file_inside_is_noticed(tmp_path: Path, run: Run) -> None:
    path = zipped(tmp_path / "policy.zip", POLICY)
    data = bytearray(path.read_bytes())
    data[data.index(WEIGHTS["fc.weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    done = run("verify", str(path))
    assert done.code == 1 and "fc.weight" in done.out, done


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_a_nemo_file(tmp_path: Path, run: Run, mode: str) -> None:
    files = {"./model_config.yaml": b"a: 1\n", "./model_weights.ckpt": saved(WEIGHTS)}
    path = in_tar(tmp_path / "model.nemo", files, mode)
    if mode == "w:gz":
        unreadable(path, Unsupported, "gzip", "gzip -dc")
        return
    found = ckptool.open(path)
    assert found["model_config.yaml"] == "a: 1\n"
    done = run("convert", str(path), "-o", str(tmp_path / "a.safetensors"))
    assert done.code == 0 and run("verify", str(path)).code == 0, done
    rows = json.loads(run("scan", str(tmp_path), "--json").out)["files"]
    assert [Path(row["path"]).name for row in rows] == ["a.safetensors", "model.nemo"]
    path.write_bytes(path.read_bytes() + b"more" * 128)
    unreadable(path, Ambiguous, "after its end")


def test_a_folder_of_dcp_inside_is_said(tmp_path: Path) -> None:
    path = in_tar(tmp_path / "m.nemo", {"./model_weights/__0_0.distcp": b"x", "./model_weights/.metadata": b"y"}, "w:")
    unreadable(path, Unsupported, "model_weights", "tar xkf")


def test_links_in_a_tar_are_said(tmp_path: Path) -> None:
    path = in_tar(tmp_path / "m.nemo", {"model_weights.ckpt": saved(WEIGHTS)}, "w:")
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("x")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    unreadable(path, Unsupported, "a symbolic link")


# Hidden contents ---------------------------------------------------------------------------------------------------


def hostile_zip(path: Path, names: list[str]) -> Path:
    """A zip of equal torch files under these names, which may repeat."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, saved(WEIGHTS))
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@looped(
    ("names", "kind"),
    [
        (["a.pth", "a.pth"], Ambiguous),
        (["a.pth", "A.pth"], Ambiguous),
        (["a.pth", "./a.pth"], CkptoolError),
        (["a.pth", "a.pth/b.pth"], Ambiguous),
        (["../a.pth", "b.pth"], Corrupt),
        (["a/../../b.pth", "b.pth"], Corrupt),
        (["/etc/a.pth", "b.pth"], Corrupt),
        (["a//b.pth"], Corrupt),
        (["a.pth", "/".join("a" * 30_000) + ".pth"], LimitExceeded),  # each folder would be looked up by its whole name
        (["C:a.pth"], Corrupt),
        (["policy.pth", "archive/data.pkl"], Ambiguous),
        (["policy.pth", "archive/DATA.pkl"], Ambiguous),
        (["archive/data.pkl", "policy.pth"], CkptoolError),
        (["policy.pth", "code/constants.pkl"], CkptoolError),
    ],
)
def test_a_zip_that_could_be_read_in_two_ways_is_refused(
    tmp_path: Path, names: list[str], kind: type[CkptoolError]
) -> None:
    unreadable(hostile_zip(tmp_path / "h.zip", names), kind)


def test_nothing_is_inflated(tmp_path: Path) -> None:
    path = zipped(tmp_path / "b.zip", {"policy.pth": bytes(64 << 20)}, zipfile.ZIP_DEFLATED)
    unreadable(path, Unsupported, "policy.pth is compressed", "unzip")


def test_a_file_that_is_cut_or_none_is_named_with_its_place(tmp_path: Path) -> None:
    unreadable(zipped(tmp_path / "a.zip", {"policy.pth": saved(WEIGHTS)[:200]}), Truncated, "policy.pth")
    unreadable(zipped(tmp_path / "b.zip", {"policy.pth": b"hello"}), Unsupported, "policy.pth", "unzip")
    unreadable(zipped(tmp_path / "c.zip", {"x.txt": b"x", "y.png": b"y"}), NotACheckpoint, "zip archive")
