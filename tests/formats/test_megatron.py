"""Folders of Megatron-Core's `torch_dist`, written by it: its run, its iterations, what is missing or mixed in them."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import torch

import ckptool
from ckptool.errors import Conflict, Corrupt, LimitExceeded, Truncated, Unsupported
from tests.support.cli import Run
from tests.support.engine_cases import ROOT
from tests.support.errors import unreadable
from tests.support.looped import looped
from tests.support.part_files import megatron_folder

ITERATION = ROOT / "megatron-torch-dist" / "checkpoint"


def run_folder(path: Path, tracker: str = "100\n") -> Path:
    """The folder of a run whose one iteration is 100."""
    shutil.copytree(ITERATION, path / "iter_0000100")
    (path / "latest_checkpointed_iteration.txt").write_text(tracker)
    return path


def test_a_run_is_its_last_iteration_and_scan_lists_each(tmp_path: Path, run: Run) -> None:
    folder = run_folder(tmp_path / "run")
    shutil.copytree(ITERATION, folder / "release")
    found = ckptool.open(folder)
    assert found.metadata["step"] == 100 and found.source is not None and found.source.path == str(folder)
    done = run("convert", str(folder), "-o", str(tmp_path / "a.safetensors"))
    assert done.code == 0, done
    assert run("diff", str(tmp_path / "a.safetensors"), str(ROOT / "megatron-torch-dist/weights.safetensors")).code == 0
    rows = json.loads(run("scan", str(folder), "--json").out)["files"]
    assert [Path(row["path"]).name for row in rows] == ["iter_0000100", "release"]
    assert [row["step"] for row in rows] == [100, 100]
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert ckptool.open(folder).metadata["step"] == 100
    shutil.rmtree(folder / "release")
    megatron_folder(folder / "release")
    done = run("convert", str(folder), "-o", str(tmp_path / "b.safetensors"))
    assert done.code == 2 and f"ame one of its files: {folder / 'release' / 'mp_rank_00'};" in done.err


@looped("tracker", ["../iter_0000100", "/etc", "iter_0000100", "-1", "", "1" * 30, "200", "release", "7" * 100])
def test_a_tracker_that_leads_elsewhere_is_named(tracker: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", tracker)
    (folder / "iter_0000007").symlink_to(".")
    if len(tracker) == 100:
        unreadable(folder, LimitExceeded)
        return
    unreadable(
        folder, Corrupt, f"says {tracker!r}, an iteration that is not there", "latest_checkpointed_iteration.txt"
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    unreadable(folder, Corrupt, "says '7'")  # the folder of the run again


def test_the_zarr_backend_is_said(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (tmp_path / "embedding.weight").mkdir()
    unreadable(tmp_path, Unsupported, "zarr")


def test_what_does_not_belong_to_the_iteration_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run") / "iter_0000100"
    (folder / "common.pt").unlink()
    unreadable(folder, Truncated, "no common.pt")
    torch.save([1], folder / "common.pt")
    unreadable(folder, Corrupt, "not a dictionary")
    torch.save({"iteration": 200}, folder / "common.pt")
    unreadable(folder, Conflict, "iteration 200", "100")


def test_an_entry_that_both_have_is_noted(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run") / "iter_0000100"
    torch.save({"model": {"output_layer.weight": torch.ones(1), "x": 1}, "iteration": 100}, folder / "common.pt")
    found = ckptool.open(folder)
    assert found["model"]["output_layer.weight"].shape == (20, 8) and found["model"]["x"] == 1
    assert [note.code for note in found.notes] == ["common-collides"]
    assert "model/output_layer.weight" in found.notes[0].message


def test_settings_of_the_optimizer_may_be_nested(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run") / "iter_0000100"
    groups = [{"lr": 1.0}, {"lr": 2.0}]
    inner = {"optimizer": {"param_groups": groups}, "grad_scaler": {"scale": 2.0}}
    torch.save({"optimizer": inner, "args": Namespace(a=1), "iteration": 100}, folder / "common.pt")
    found = ckptool.open(folder)["optimizer"]
    assert set(found) == {"optimizer", "grad_scaler"}
    assert len(found["optimizer"]["state"]) == 4 and list(found["optimizer"]["param_groups"]) == groups


def test_another_programs_metadata_is_not_taken_for_it(tmp_path: Path) -> None:
    for text in ("[1]", "{", '{"sharded_backend": 1}', "[" * 5000):
        (tmp_path / "metadata.json").write_text(text)
        unreadable(tmp_path, ckptool.CkptoolError, "is a folder, not a checkpoint")
