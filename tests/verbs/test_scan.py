"""`scan`: the state of a folder of checkpoints, without torch, whatever is in it, and which is the newest good one;
what a file's pickles would call."""

from __future__ import annotations

import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.analysis import scan as module
from ckptool.output.durable import hidden_name
from tests.support.cli import Run
from tests.support.engine_folders import write_zero
from tests.support.files import saved, weights, written
from tests.support.looped import looped
from tests.support.small_models import OTHER_MODELS


class Foreign:
    """A class that ckptool does not know."""

    def __init__(self) -> None:
        self.value = 1


def leave_a_trace(path: str) -> None:
    Path(path).write_text("it ran")


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return leave_a_trace, (str(self.path),)


def checkpoint(path: Path, step: int | None = None, **more: Any) -> Path:
    tree = {"model": {"fc.weight": torch.ones(4, 4)}, **({} if step is None else {"step": step}), **more}
    torch.save(tree, path)
    return path


@pytest.fixture
def some_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "old").mkdir(parents=True)
    for name, step in (("a.pt", 100), ("old/b.pt", 50), ("c.pt", 300), ("d.pt", 200)):
        checkpoint(folder / name, step)
    os.truncate(folder / "c.pt", 900)
    (folder / "empty.pt").touch()
    (folder / "notes.txt").write_text("text")
    (folder / ".hidden.pt").write_text("not looked at")
    return folder


@pytest.mark.parametrize("victim", ["b.pt", "rest", ".rest", "b.pkl"])
def test_what_is_gone_by_the_time_it_is_read_is_no_error(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prune deletes, and a file is written under another name first."""
    checkpoint(tmp_path / "a.pt", 3)
    if victim.startswith("b"):
        torch.save({"w": torch.ones(2)}, tmp_path / victim, _use_new_zipfile_serialization=victim != "b.pkl")
    else:
        ckptool.convert(tmp_path / "a.pt", tmp_path / victim, container="sharded")
    real = module.entries_of

    def emptied(folder: str) -> Any:
        found = real(folder)
        shutil.rmtree(tmp_path / victim, ignore_errors=True)
        (tmp_path / victim).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(module, "entries_of", emptied)
    found = ckptool.scan(tmp_path)
    assert [Path(file.path).name for file in found.files] == ["a.pt"] and found.latest is not None


def test_a_folder_that_is_gone_before_it_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptool.convert(checkpoint(tmp_path / "a.pt", 3), tmp_path / "b", container="sharded")
    real = module.Folder

    def opened(folder: str) -> Any:
        shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(module, "Folder", opened)
    found = ckptool.scan(tmp_path)
    assert [Path(file.path).name for file in found.files] == ["a.pt"] and found.other_files == 0


def test_a_file_that_gets_its_name_while_the_folder_is_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.save` to another name, then a rename: what was torn when it was read is not there any more."""
    checkpoint(tmp_path / "step-1.pt", 1)
    torn = checkpoint(tmp_path / "step-2.pt.tmp", 2)
    os.truncate(torn, 900)
    real = module._damaged_row

    def renamed(path: str, error: Any) -> Any:
        row = real(path, error)
        torn.rename(tmp_path / "step-2.pt")
        return row

    monkeypatch.setattr(module, "_damaged_row", renamed)
    found = ckptool.scan(tmp_path)
    assert [Path(file.path).name for file in found.files] == ["step-1.pt"] and found.other_files == 1


@pytest.mark.parametrize("moves", [1, 3, 4])
def test_a_run_that_keeps_the_last_one_has_one_at_any_time(
    moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the folder's list knows nothing: it is listed once more, but not for ever."""
    newest, real = checkpoint(tmp_path / "step-0.pt"), module.entries_of

    def moved(folder: str) -> Any:
        nonlocal newest, moves
        found = real(folder)
        if moves:
            moves, newest = moves - 1, newest.rename(tmp_path / f"step-{moves}0.pt")
        return found

    monkeypatch.setattr(module, "entries_of", moved)
    is_seen = moves < 4
    found = ckptool.scan(tmp_path, latest_only=True)
    assert (found.latest_good, found.exit()) == ((str(newest), 0) if is_seen else (None, 1))
    assert found.other_files == 0


def test_temporary_files_and_folders_are_nobodys_newest(tmp_path: Path) -> None:
    old = checkpoint(tmp_path / "a.pt", 1)
    new = ckptool.convert(checkpoint(tmp_path / "b.pt", 9), tmp_path / "ranks.dcp")
    (tmp_path / "b.pt").rename(hidden_name(str(tmp_path / "b.pt")))
    Path(new.output).rename(hidden_name(new.output))
    found = ckptool.scan(tmp_path)
    assert [file.path for file in found.files] == [str(old)] and found.latest is found.files[0]


def test_a_folder_is_listed_with_states_steps_and_sizes(some_folder: Path) -> None:
    found = ckptool.scan(some_folder)
    rows = {os.path.relpath(file.path, some_folder): file for file in found.files}
    assert {name: (file.state, file.step) for name, file in rows.items()} == {
        "a.pt": ("good", 100),
        "c.pt": ("truncated", None),
        "d.pt": ("good", 200),
        "empty.pt": ("truncated", None),
        "old/b.pt": ("good", 50),
    }
    assert rows["a.pt"].bytes == (some_folder / "a.pt").stat().st_size and rows["a.pt"].holds == ("model weights",)
    assert (found.findings, found.other_files, found.latest_by) == (2, 2, "step")
    assert found.latest is not None and found.latest.path == str(some_folder / "d.pt")


def test_the_newest_by_time_where_no_file_says_its_step(tmp_path: Path) -> None:
    for number, name in enumerate(("late.pt", "early.pt")):
        os.utime(checkpoint(tmp_path / name), (1_000_000 - number, 1_000_000 - number))
    found = ckptool.scan(tmp_path)
    assert found.latest_by == "time" and found.latest is not None and found.latest.path.endswith("late.pt")


@pytest.mark.parametrize(
    ("name", "tree", "expected"),
    [
        ("model.pt", {"global_step": 7, "epoch": 2}, (7, 2)),
        ("model.pt", {"trainer": {"step": 9}}, (9, None)),
        ("ckpt.pt", {"iter_num": 9, "config": {"max_iters": 20}}, (9, None)),  # nanoGPT
        ("model_step.pt", {"optim": {"training_step": 9}}, (9, None)),  # OpenNMT-py
        ("latest_ckpt.pth", {"start_epoch": 4}, (None, 4)),  # YOLOX
        ("checkpoint-500.pt", None, (500, None)),
        ("checkpoint-500.pt", {"epoch": 2}, (500, 2)),
        ("checkpoint-12.pth.tar", {"epoch": 12}, (None, 12)),  # timm
        ("checkpoint_0199.pth.tar", {"epoch": 200}, (None, 200)),  # MoCo
        ("step_2.pt", {"epoch": 2}, (2, 2)),
        ("epoch=3-step=1000.ckpt", None, (1000, 3)),
        ("model_epoch_50.pth", None, (None, 50)),
        ("resnet50.pt", None, (None, None)),
        ("model.pt", {"step": True, "epoch": -1}, (None, None)),
        ("epoch_5.pt", {"args": {"epochs": 300, "steps": 9}, "train_config": {"step": 7}}, (None, 5)),  # how far to go
        ("best.pt", {"epoch": -1, "opt": {"epochs": 300}}, (None, None)),  # YOLOv5
        ("step_500/model.pt", None, (500, None)),
        ("512/model.pt", None, (None, None)),
        ("0050000.pt", None, (50_000, None)),  # DiT
        ("step_20k.pt", None, (20_000, None)),
        ("ckpt-7.pt", None, (7, None)),
    ],
)  # fmt: skip
def test_how_far_a_checkpoint_was(name: str, tree: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(1), **(tree or {})}, tmp_path / name)
    (file,) = ckptool.scan(tmp_path).files
    assert (file.step, file.epoch) == expected


@looped("seed", range(60))
def test_the_latest_good_is_the_last_of_those_that_torch_loads(seed: int, tmp_path: Path) -> None:
    """Where steps stand inside, in the name or the folder's, for all or within an epoch; whatever the times say."""
    rng = random.Random(seed)
    names = ["step_{}.pt", "step-{:08}.pt", "{:07}.pt", "ckpt_{}.pth", "checkpoint-{}/model.pt", "iter_{:06}/w.bin", ""]
    name, epochs = rng.choice(names), rng.random() < 0.4
    places = [(number // 3, 100 * (number % 3 + 1)) if epochs else (0, 500 * number) for number in range(1, 7)]
    files: dict[tuple[int, int], Path] = {}
    for epoch, step in places:
        inside = {"args": {"steps": 10_000, "epochs": 40}, "optimizer_config": {"step": 3}}
        inside |= {"epoch": epoch} if epochs else {}
        inside |= {"step": step} if epochs or not name else {}
        file = tmp_path / (rng.randbytes(4).hex() + ".pt" if epochs or not name else name.format(step))
        file.parent.mkdir(exist_ok=True)
        torch.save({"model": {"a.weight": torch.randn(40, 9), "a.bias": torch.ones(9)}, **inside}, file)
        files[epoch, step] = file
    for place in rng.sample(places[1:], rng.randint(0, 4)):
        damage = rng.choice(["cut", "empty", "pointer", "flipped"])
        data = files[place].read_bytes()
        middle = data.index(torch.load(files[place])["model"]["a.weight"].numpy().tobytes()) + 99
        files[place].write_bytes(
            {
                "cut": data[: rng.randrange(len(data))],
                "empty": b"",
                "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n",
                "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            }[damage]
        )
        if damage != "flipped":  # torch looks at no sums
            with pytest.raises(Exception):  # noqa: B017 -- of any kind
                torch.load(files[place])
        del files[place]
    (tmp_path / "tmp-step_90000.pt").write_bytes(files[places[0]].read_bytes())
    if rng.random() < 0.5:  # older than all that say their step
        os.utime(saved({"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2)}, tmp_path / "best.pt"), (1.0, 1.0))
    for file in files.values():
        time = rng.choice([5e8, 1e9 + rng.random()])
        os.utime(file, (time, time))
    found = ckptool.scan(tmp_path, full=True)
    assert found.latest_good == str(files[max(files)]) and found.latest_by == "step"


def test_the_command(some_folder: Path, tmp_path: Path, run: Run) -> None:
    bad, empty, files = (tmp_path / name for name in ("bad", "empty", "files"))
    for folder in (bad, empty, files):
        folder.mkdir()
    (bad / "a.pt").touch()
    clean, foreign = checkpoint(files / "clean.pt"), checkpoint(files / "foreign.pt", config=Foreign())
    unread = "data checksums were not verified"
    for words, code, said in (
        ((some_folder, "--latest-good", "-q"), 0, f"{some_folder / 'd.pt'}\n"),
        ((some_folder, "--latest-good"), 0, "its data was not read: --full)"),
        ((some_folder, "--latest-good", "--full"), 0, f"{some_folder / 'd.pt'} (step 200, "),
        ((bad, "--latest-good", "-q"), 1, ""),
        ((bad,), 1, "1 not good"),
        ((empty,), 0, "0 checkpoints"),
        ((clean,), 0, "nothing in it would run"),
        ((foreign,), 1, f"makes objects of  {__name__}.Foreign  at config"),
        ((clean, foreign, "-q"), 1, ""),
        ((files,), 1, unread),
        ((files, "--full"), 1, ""),
    ):
        found = run("scan", *map(str, words))
        assert found.code == code and (said in found.out if said else unread not in found.out), (words, found)
        assert "-q" not in words or found.out == said, (words, found)


def test_what_no_checksum_covers_is_said(tmp_path: Path, run: Run) -> None:
    ckptool.convert(checkpoint(tmp_path / "a.pt"), tmp_path / "b.safetensors")
    for full, said in ((True, [False, True]), (False, [False, False])):
        assert ["no-checksums" in file.notes for file in ckptool.scan(tmp_path, full=full).files] == said
    (tmp_path / "a.pt").unlink()
    assert "data without checksums cannot be seen" in run("scan", tmp_path, "--latest-good", "--full").out


def test_what_is_wrong_in_a_long_list_is_named_at_its_end(tmp_path: Path, run: Run) -> None:
    for number in range(45):
        checkpoint(tmp_path / f"{number}.pt")
    (tmp_path / "7.pt").write_bytes((tmp_path / "8.pt").read_bytes()[:-30])
    assert "\nnot good: 7.pt (truncated)\n" in run("scan", tmp_path).out
    for number in range(8, 45):
        (tmp_path / f"{number}.pt").unlink()
    assert "not good: " not in run("scan", tmp_path).out  # the list above shows it
    (tmp_path / "7.pt").unlink()
    assert "not good" not in run("scan", tmp_path).out


def test_what_a_pickle_would_call_is_named_with_its_place(tmp_path: Path, run: Run) -> None:
    trace = tmp_path / "trace"
    path = checkpoint(tmp_path / "a.pt", hooks=[Runs(trace)], config=Foreign(), cls={Foreign: 1})
    (file,) = ckptool.scan(path).files
    home = __name__
    assert [(call.name, call.how, call.places, call.is_custom) for call in file.calls] == [
        (f"{home}.leave_a_trace", "called", ("hooks/0",), False),
        (f"{home}.Foreign", "named", ("cls",), False),
        (f"{home}.Foreign", "made", ("config",), True),
    ]
    code, custom = run("scan", tmp_path).out.partition("needs classes of its own")[::2]
    assert "would run unknown code" in code and "leave_a_trace" in code and "leave_a_trace" not in custom, custom
    assert "Foreign" in custom
    assert not trace.exists()


def test_what_is_wrong_inside_a_folder_is_told_by_its_name_there(tmp_path: Path, run: Run) -> None:
    tag = write_zero(tmp_path / "run" / "global_step2", 2, 2)
    next(tag.glob("*rank_1_*_optim_states.pt")).unlink()
    (tmp_path / "run" / "latest").write_text("global_step2")
    assert "  global_step2 lacks the files" in run("scan", str(tmp_path)).out


def test_latest_may_be_a_link_to_the_folder_of_a_tag(tmp_path: Path) -> None:
    for step in (2, 4):
        write_zero(tmp_path / "run" / f"global_step{step}", 2, 2)
    (tmp_path / "run" / "latest").symlink_to("global_step2")
    rows = [Path(row.path).name for row in ckptool.scan(tmp_path / "run").files]
    assert rows == ["run", "global_step4"]


def test_a_call_that_is_thrown_away_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        archive.writestr("b/data.pkl", b"\x80\x02cbuiltins\nbreakpoint\n)R0}.")
        archive.writestr("b/version", "3\n")
    (file,) = ckptool.scan(tmp_path / "b.pt").files
    assert [(call.name, call.how) for call in file.calls] == [("builtins.breakpoint", "called")]


def test_links_to_folders_to_themselves_and_to_nothing_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "itself.pt").symlink_to("itself.pt")
    (tmp_path / "nothing.pt").symlink_to("gone.pt")
    checkpoint(tmp_path / "a.pt")
    assert len(ckptool.scan(tmp_path).files) == 1


def test_a_folder_with_other_checkpoints_beside_its_weights_is_not_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    for name in ("model.safetensors", "a.pt"):
        ckptool.save(weights("a.w"), tmp_path / "demo" / name)
    found = ckptool.scan(tmp_path)
    assert [Path(file.path).name for file in found.files] == ["model.safetensors", "a.pt"]
    assert sum(file.bytes for file in found.files) == sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    (tmp_path / "demo" / "a.pt").rename(tmp_path / "demo" / "a.txt")
    assert [Path(file.path).name for file in ckptool.scan(tmp_path).files] == ["demo"]


@pytest.mark.parametrize("suffix", [".bin", ".model", ".pt"])
def test_files_of_other_programs_are_no_damaged_checkpoints(suffix: str, tmp_path: Path) -> None:
    """Beside weights lie tokenizers and the same model for other programs; but a pickle may look like one of those."""
    saved({"w": torch.ones(2)}, tmp_path / "model.pt")
    for number, data in enumerate(OTHER_MODELS.values()):
        written(data, tmp_path / f"{number}{suffix}")
    found = ckptool.scan(tmp_path)
    assert (len(found.files), found.exit()) == ((1, 0) if suffix != ".pt" else (1 + len(OTHER_MODELS), 1))
    written(b"GGUF" + bytes(5) + b"0cos\nsystem\n(S'true'\ntR.", tmp_path / f"evil{suffix}")
    written(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", tmp_path / f"pointer{suffix}")
    wrong = {Path(row.path).stem for row in ckptool.scan(tmp_path).files if row.is_wrong}
    assert {"evil", "pointer"} <= wrong
