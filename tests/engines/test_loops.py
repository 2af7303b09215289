"""Loops of other libraries with the adapters, and `ckptool.Run` around their models and data: killed anywhere and
started again, they end with the same bytes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.killed_scripts import Scripts
from tests.support.same import first_difference

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Scripts]]:
    """The script of a name, in a process that has imported its library."""
    made: dict[str, Scripts] = {}

    def script(name: str) -> Scripts:
        if name not in made:
            made[name] = Scripts(f"{name}.py", tmp_path_factory.mktemp(name))
        return made[name]

    yield script
    for each in made.values():
        each.close()


def assert_same_end(*outs: Path) -> None:
    ends = []
    for out in outs:
        runs = [*out.glob("checkpoints/step-*.pt"), *out.glob("final*")]  # of `Run`; of an adapter
        path = max(runs, key=lambda path: path.name)
        ends.append((path / "model.safetensors").read_bytes() if path.is_dir() else torch.load(path))
    assert first_difference(*ends) == ""


def newest(name: str, out: Path) -> tuple[int, list[str]]:
    """The step of the newest whole checkpoint by the adapter's word, and what it says of others."""
    from ckptool.integrations import accelerate, lightning, shared, transformers
    from ckptool.training.store import newest_whole

    said: list[str] = []
    if name == "lightning_fit":
        found = lightning.newest_checkpoint(out, said.append)
    else:
        pattern = accelerate._NAME if name == "accelerate_loop" else transformers._NAME
        there = shared.saved_folders(str(out / "checkpoints" if name == "accelerate_loop" else out), pattern)
        newest = newest_whole(str(out), there, said.append)
        found = newest and newest.path
    assert found is not None
    return int(re.findall(r"\d+", Path(found).name)[-1]), said


def steps_of(out: Path) -> list[int]:
    """The steps of the checkpoint folders that are visible."""
    names = [path.name for folder in (out, out / "checkpoints") for path in folder.glob("checkpoint[-_]*")]
    return sorted(int(name[len("checkpoint_") :]) for name in names)


KILLED: list[tuple[str, dict[str, Any], list[int]]] = [  # and the checkpoint folders that are left
    ("accelerate_loop", {}, [40]),
    ("lightning_fit", {"stateful": False, "draws": True}, []),
    ("lightning_fit", {"draws": True, "accumulate": 2}, []),
    ("trainer", {}, [35, 40]),
    ("trainer", {"best": True, "patience": 3, "limit": 9}, [5, 10, 15, 20]),  # stopped early, also when started again
    ("own_loop", {}, []),
    ("own_loop", {"stateful": True}, []),
    ("own_loop", {"stateful": True, "stream": True}, []),
    ("gymnasium_loop", {"name": "reinforce"}, []),
    ("gymnasium_loop", {"name": "ppo"}, []),
]


@pytest.mark.parametrize(("name", "options", "left"), KILLED, ids=str)
def test_killed_at_random_it_ends_with_the_same_bytes(
    scripts: Callable[[str], Scripts], tmp_path: Path, name: str, options: dict[str, Any], left: list[int]
) -> None:
    script, killed = scripts(name), tmp_path / "killed"
    seconds = script.finish(tmp_path / "whole", options=options)["seconds"]
    assert script.killed_at_random(5, seconds, 1, killed, options=options)
    for _ in "a killed one", "one that had ended":
        script.finish(killed, options=options)
        assert_same_end(tmp_path / "whole", killed)
        assert steps_of(killed) == left and not list(killed.rglob(".ckptool-staging"))
        for path in [*killed.rglob("checkpoint*40")]:  # as one killed before its last rotation has it
            shutil.copytree(path, str(path).replace("40", "30"), dirs_exist_ok=True)


# Where it is stopped on the way: after the first save, after a later one, inside an epoch, at its end.
RESUMED: list[tuple[str, list[int], dict[str, Any]]] = [
    *(("accelerate_loop", [8, 15, 24], each) for each in (
        {"draws": True}, {"draws": True, "workers": 2}, {"seedable": True},
        {"stateful": True, "draws": True, "workers": 2}, {"accumulate": 3, "every": 5, "limit": 9},
    )),
    *(("accelerate_loop", [8, 16, 24], each) for each in ({"every": 4, "accumulate": 2}, {"every": 8})),
    ("accelerate_loop", [11, 16, 24], {"flags": True}),
    ("lightning_fit", [6, 14, 22], {"plateau": True, "stateful": False}),
    *(("lightning_fit", [8, 16, 24], {**each, "stateful": stateful}) for stateful in (False, True) for each in (
        {}, {"workers": 2}, {"draws": True, "workers": 2}, {"draws": True, "stream": True},
        {"draws": True, "stream": True, "workers": 1, "persist": True}, {"every": 8}, {"every": 0, "draws": True},
    )),
    ("lightning_fit", [18, 22], {"every": 2, "scheduled": True, "stateful": False}),
    *(("lightning_fit", [8, 12], {"every": 3, "accumulate": 2, "stateful": stateful}) for stateful in (False, True)),
    *(("trainer", [5, 12, 20], {"draws": True, **each}) for each in (
        {}, {"workers": 2}, {"accumulate": 1}, {"accumulate": 5, "every": 3},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stops", "options"), RESUMED, ids=str)
def test_data_of_all_kinds_go_on_where_they_were(
    scripts: Callable[[str], Scripts], tmp_path: Path, name: str, stops: list[int], options: dict[str, Any]
) -> None:
    script = scripts(name)
    script.finish(tmp_path / "whole", stops[-1], options=options)
    for steps in stops:
        said = script.finish(tmp_path / "broken", steps, options=options)["stderr"]
    assert_same_end(tmp_path / "broken", tmp_path / "whole")
    assert "accumulation" not in said
    if options.get("limit") == 9:  # windows end at 6, 8 (the epoch), 11, 14, 16, …
        assert steps_of(tmp_path / "whole") == [6, 11, 16, 22]


@pytest.mark.parametrize("name", ["accelerate_loop", "lightning_fit", "trainer"])
def test_two_processes_of_a_data_set_that_draws(scripts: Callable[[str], Scripts], tmp_path: Path, name: str) -> None:
    """And one alone does not go on with what two have saved."""
    options = {"draws": True} | ({"devices": 2, "stateful": False} if name == "lightning_fit" else {})
    for out, ends in {"whole": [20], "broken": [7, 20]}.items():
        for steps in ends:
            scripts(name).finish(tmp_path / out, steps, options=options, world=2)
    assert_same_end(tmp_path / "broken", tmp_path / "whole")
    options |= {"devices": 1} if "devices" in options else {}
    answer = scripts(name).run(tmp_path / "broken", 30, options=options)
    assert answer["status"] == 1 and "was saved by 2 processes, and this run has 1" in answer["stderr"]


# Two steps that are saved one after the other, of which one checkpoint is kept; the end.
SAVES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "accelerate_loop": (10, 15, 20, {"limit": 1}),
    "lightning_fit": (8, 16, 24, {"every": 8, "stateful": False, "keep": 1}),
    "trainer": (10, 15, 20, {"limit": 1}),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_kill_at_any_change_in_the_folder_leaves_the_older_or_the_newer_checkpoint(
    scripts: Callable[[str], Scripts], tmp_path: Path, name: str
) -> None:
    """Where accelerate and Trainer delete the only one before the new one is known to be whole."""
    script, out, (older, newer, end, options) = scripts(name), tmp_path / "out", SAVES[name]
    script.finish(tmp_path / "begun", older, options=options)

    def save(event: int) -> dict[str, Any]:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "begun", out)
        return script.run(out, newer, event=event, folder=str(out), options=options)

    events = save(1 << 30)["events"]
    assert events >= 16
    found = []
    for event in range(1, events, 3):
        assert save(event)["status"] == -9
        found.append(newest(name, out))
    steps = [step for step, _ in found]
    assert set(steps) == {older, newer} and steps == sorted(steps)
    assert not any(said for _, said in found), "an incomplete checkpoint was visible"
    for folder in (out, tmp_path / "whole"):
        script.finish(folder, end, options=options)
    assert_same_end(out, tmp_path / "whole")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "accelerate_loop": ("checkpoints/checkpoint_15/random_states_0.pkl", Path.unlink, "states_0.pkl is missing"),
    "lightning_fit": ("epoch=1-step=16.ckpt", lambda path: path.write_bytes(b""), "step=16.ckpt has 0 bytes; its si"),
    "trainer": ("checkpoint-15/model.safetensors", flip, "model.safetensors does not match its sha256"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_newest_checkpoint_is_skipped_and_named(
    scripts: Callable[[str], Scripts], tmp_path: Path, name: str
) -> None:
    """And where none is whole, it is an error and not a new beginning."""
    script, out, (older, newer, end, options) = scripts(name), tmp_path / "out", SAVES[name]
    file, damage, words = DAMAGED[name]
    options = {**options, "keep": 2} if "keep" in options else {**options, "limit": 2}
    script.finish(tmp_path / "whole", end, options=options)
    script.finish(out, newer, options=options)
    damage(out / file)
    assert newest(name, out)[0] == older
    said = script.finish(out, end, options=options)["stderr"]
    assert "skipped" in said and words in said
    assert_same_end(out, tmp_path / "whole")
    for path in [*out.rglob("ckptool.json"), *out.glob("*.ckpt.json")]:
        path.write_text("{}")
    answer = script.run(out, end, options=options)
    assert answer["status"] == 1 and "none of them is whole" in answer["stderr"]


# What one of them has alone -------------------------------------------------------------------------------------------


def test_another_object_of_accelerate_is_refused(scripts: Callable[[str], Scripts], tmp_path: Path) -> None:
    scripts("accelerate_loop").finish(tmp_path, 10)
    answer = scripts("accelerate_loop").run(tmp_path, 15, options={"more": True})
    assert "holds no state of other" in answer["stderr"]


def test_a_checkpoint_of_lightning_inside_accumulation_is_noted(
    scripts: Callable[[str], Scripts], tmp_path: Path
) -> None:
    options = {"accumulate": 3, "inside": True, "stateful": False}
    said = scripts("lightning_fit").finish(tmp_path, 4, options=options)["stderr"]
    assert said.count("saved inside gradient accumulation") == 1 and "every_n_train_steps" in said


def test_a_checkpoint_of_lightning_at_the_end_of_an_epoch_before_a_plateau_is_noted(
    scripts: Callable[[str], Scripts], tmp_path: Path
) -> None:
    """Or before the hooks of a callback."""
    for every, option, noted in ((8, "plateau", 1), (5, "plateau", 0), (8, "ends", 1), (0, "ends", 0)):
        options = {"every": every, option: True, "stateful": False}
        said = scripts("lightning_fit").finish(tmp_path / f"{every} {option}", 20, options=options)["stderr"]
        what = {"plateau": "ReduceLROnPlateau", "ends": "on_train_epoch_end of Draws"}[option]
        assert said.count(f"an epoch, before {what}, which a run that resumes from it leaves out") == noted


def test_what_is_written_for_lightning_it_and_torch_read(scripts: Callable[[str], Scripts], tmp_path: Path) -> None:
    scripts("lightning_fit").finish(tmp_path, 8, options={"every": 8, "stateful": False})
    found = torch.load(tmp_path / "epoch=0-step=8.ckpt", weights_only=True)
    assert found["global_step"] == 8 and found["hyper_parameters"] == {"width": 16, "plateau": False}


def test_a_kill_while_a_file_of_lightning_is_replaced_leaves_a_step_that_is_true(tmp_path: Path) -> None:
    """last.ckpt, of which the sidecar is newer than the file."""
    from ckptool.integrations.lightning import DurableCheckpointIO, newest_checkpoint

    plugin, last, said = DurableCheckpointIO(), tmp_path / "last.ckpt", list[str]()
    plugin.save_checkpoint({"global_step": 10}, last)
    old = last.read_bytes()
    plugin.save_checkpoint({"global_step": 15}, tmp_path / "a.ckpt")
    plugin.save_checkpoint({"global_step": 20}, last)
    assert newest_checkpoint(tmp_path, said.append) == str(last)
    last.write_bytes(old)
    assert newest_checkpoint(tmp_path, said.append) == str(tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert newest_checkpoint(tmp_path, said.append) == str(last) and not said


def test_a_finished_run_of_trainer_trains_no_further_step_and_a_new_one_overwrites_none(
    scripts: Callable[[str], Scripts], tmp_path: Path
) -> None:
    script = scripts("trainer")
    script.finish(tmp_path, 15)
    before = (tmp_path / "final/model.safetensors").read_bytes()
    script.finish(tmp_path, 15)
    assert (tmp_path / "final/model.safetensors").read_bytes() == before
    answer = script.run(tmp_path, 10, options={"resume": False})
    assert "holds checkpoints already" in answer["stderr"] and "resume_from_checkpoint=True" in answer["stderr"]


def test_the_best_checkpoint_of_trainer_is_known_by_its_visible_path(
    scripts: Callable[[str], Scripts], tmp_path: Path
) -> None:
    scripts("trainer").finish(tmp_path, 15, 1, options={"best": True})
    (state,) = [json.loads(path.read_text()) for path in tmp_path.glob("checkpoint-15/trainer_state.json")]
    best = Path(state["best_model_checkpoint"])
    assert best == tmp_path / f"checkpoint-{state['best_global_step']}" and best.is_dir()


def test_what_a_stock_trainer_saved_is_resumed_by_its_path(scripts: Callable[[str], Scripts], tmp_path: Path) -> None:
    script = scripts("trainer")
    script.finish(tmp_path / "whole", 20)
    script.finish(tmp_path / "broken", 15, options={"mixin": False, "resume": None})
    stock = str(tmp_path / "broken/checkpoint-15")
    assert (
        f"resume_from_checkpoint={stock!r}" in script.run(tmp_path / "broken", 20, options={"resume": False})["stderr"]
    )
    script.finish(tmp_path / "broken", 20, options={"resume": stock})
    assert_same_end(tmp_path / "broken", tmp_path / "whole")
