"""What the sheet on the harness promises of commits, resuming, retention, signals and exit codes: the test of each."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Conflict
from ckptool.training.store import SavedState, check, name_of, read_json
from tests.support.own_loops import parts, train, trained
from tests.support.small_runs import cut_short

TESTS = Path(__file__).parents[1]

# Each sentence, and below it the tests of it, without their `test_`.
PROMISES = """
`step` is the number of completed optimizer steps; the file `step-N` is the state after N
    a_file_is_the_state_after_as_many_updates_as_its_name_says
A checkpoint exists when its name exists, and names appear by `rename` after `fsync`
    the_order_of_a_commit a_sidecar_that_cannot_be_written_is_no_commit a_full_disk_leaves_the_older_ones
write a temporary file through the sink, hashing in a thread on the way
    the_digest_is_added_up_on_the_way leftovers_of_a_killed_save_are_swept
sync; sidecar, synced and renamed; rename the `.pt` (the commit); sync the folder
    the_order_of_a_commit a_checkpoint_is_whole_while_it_is_replaced
then prune
    old_ones_go_when_the_new_one_has_its_name a_file_is_deleted_before_its_sidecar
opens with torch.load(weights_only=True) on any machine; CPU tensors; no clock inside
    the_file_opens_everywhere_and_the_sidecar_says_where_it_ran a_checkpoint_and_its_sidecar
sidecar: sha256, bytes, step, epoch, metrics, run id, environment, parent step
    a_checkpoint_and_its_sidecar what_a_sidecar_says
run.yaml: written once
    the_record_of_a_run_is_written_once
metrics.jsonl: one line per logged step; cut back to the resumed step
    a_damaged_one_is_written_again_and_metrics_are_cut_back_to_where_it_goes_on
    lines_are_cut_back_to_a_size_or_where_that_is_none_to_a_step
    a_torn_line_is_cut_off_and_left_out
lock: pid and host; two writers refuse each other
    two_writers_refuse_each_other
newest first by step within this run id, never by mtime
    steps_are_what_counts_and_not_times_or_other_runs
verify size and sha256
    only_the_size_is_looked_at_where_that_is_wanted a_damaged_one_is_named_and_kept_and_the_older_one_used
a damaged one is named, kept, and the next older one used
    a_damaged_one_is_named_and_kept_and_the_older_one_used a_damaged_checkpoint_is_named_and_the_older_one_used
    a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used
    a_folder_in_the_place_of_a_checkpoint_is_passed_over
if some exist and none is valid, exit 3, never restart from 0
    a_damaged_one_is_named_and_kept_and_the_older_one_used all_are_damaged all_are_damaged
    a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used
Retention is a union of pure functions `last(n)`, `best(n, metric, mode)`, `every(n)`
    each_rule_wants_its_own a_union_with_the_reasons retention_keeps_the_best_and_the_last prune
never delete the newest valid or the best
    the_newest_and_the_best_always_stay the_newest_whole_one_is_never_deleted
a metric of 0.0 counts and NaN never ranks
    each_rule_wants_its_own
a run that was stopped ends with the checkpoints of one that was not
    a_run_that_was_stopped_ends_with_the_checkpoints_of_one_that_was_not
    a_loop_stopped_at_any_line_ends_with_the_same_files a_save_that_only_a_signal_asked_for
a step is atomic: signals, saves and evaluation happen only between steps
    a_signal_saves_at_the_boundary a_loop_stopped_at_any_line_ends_with_the_same_files
a handler only sets a flag
    the_first_signal_is_the_one_that_is_answered a_person_who_asks_twice_is_obeyed_at_once
SIGTERM to the process group kills loader workers first: they must ignore it
    a_signal_saves_at_the_boundary
exit 0 done
    train_and_resume time_that_is_over_stops_a_run_with_exit_code_0
exit 2 could not do it (usage, a changed fixed key, an error)
    a_changed_fixed_key_is_refused_with_both_values a_run_that_is_there an_unknown_key a_disk_that_is_full
130 and 143 stopped by INT and TERM after saving
    a_signal_saves_and_leaves_the_program
    after_a_signal_to_all_processes_a_validation_with_workers_is_done_and_the_run_stopped
    a_signal_saves_at_the_boundary
"""


def test_every_promise_has_its_tests() -> None:
    files = [path for room in ("training", "verbs") for path in (TESTS / room).glob("test_*.py")]
    there = {name for path in files for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)}
    assert not {name for line in PROMISES.splitlines() if line[:1] == " " for name in line.split()} - there
    assert not re.search(r"\n\S.*\n(?! )", PROMISES)  # one without a test


# Those that no other file has ----------------------------------------------------------------------------------------


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in (folder / "checkpoints").glob("*.pt"))


def test_a_file_is_the_state_after_as_many_updates_as_its_name_says(tmp_path: Path) -> None:
    trained(tmp_path, 4, keep_last=9)
    for step in steps_of(tmp_path):
        tree = torch.load(tmp_path / "checkpoints" / name_of(step), weights_only=True)
        updates = {int(state["step"]) for state in tree["optimizer_state_dict"]["state"].values()}
        assert (tree["step"], updates) == (step, {step})


def test_old_ones_go_when_the_new_one_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, 1, keep_last=1)
    seen: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("replace", "unlink")}

    def watched(name: str) -> Any:
        def call(*paths: Any, **options: Any) -> None:
            real[name](*paths, **options)
            seen.append((name, os.path.basename(paths[-1])))

        return call

    for name in real:
        monkeypatch.setattr(os, name, watched(name))
    trained(tmp_path, 2, keep_last=1)
    commit = [event for event in seen if "step-" in event[1]]
    assert commit == [("replace", name_of(2, ".json")), ("replace", name_of(2)), ("unlink", name_of(1)),
                      ("unlink", name_of(1, ".json"))]  # fmt: skip


def test_what_a_sidecar_says(tmp_path: Path) -> None:
    run = trained(tmp_path, 2)
    path = tmp_path / "checkpoints" / name_of(2)
    found = read_json(str(path.with_suffix(".json")))
    assert found is not None
    check(SavedState(2, str(path), found), "full")
    assert (found["run"], found["step"], found["epoch"], found["parent"]) == (run.folder.id, 2, 0, 1)
    assert found["metrics"] == {"acc": 0.5}
    assert found["environment"]["torch"] == torch.__version__


def test_the_record_of_a_run_is_written_once(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    before = (tmp_path / "run.yaml").stat()
    trained(tmp_path, 3, keep_last=7)
    assert os.path.samestat(before, (tmp_path / "run.yaml").stat())
    events = [json.loads(line)["event"] for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert events == ["start", "save", "done", "resume", "save", "save", "done"]


@pytest.mark.parametrize("sidecar", ["its sidecar", "no sidecar", "parts"])
def test_a_folder_in_the_place_of_a_checkpoint_is_passed_over(tmp_path: Path, sidecar: str) -> None:
    """By resuming, retention, inspect and scan; it is named, and stays with what is in it. A checkpoint that would
    have to take its place is refused, with what to do."""
    trained(tmp_path, 4, keep_last=9)
    for path in (tmp_path / "checkpoints").glob("step-00000003.*"):
        path.unlink()
    place = tmp_path / "checkpoints" / name_of(4)
    size = place.stat().st_size
    place.unlink()
    place.mkdir()
    (place / ("__0_0.distcp" if sidecar == "parts" else "mine")).write_bytes(bytes(size))
    if sidecar == "no sidecar":
        place.with_suffix(".json").unlink()
    report = ckptool.inspect_run(tmp_path)
    assert (report.resumes, report.checkpoints[-1].problem) == (2, f"{place} is a folder")
    assert (report.damaged, report.exit()) == (1, 1)
    assert f"latest good: checkpoints/{name_of(2)}" in str(ckptool.scan(tmp_path))
    assert [step for step, _ in ckptool.prune(tmp_path, ["save.keep_last=1"], dry_run=True).deleted] == [1]
    said: list[str] = []
    own = parts()
    with ckptool.Run(tmp_path, say=said.append, keep_last=9, **own) as run:
        assert (run.step, said[0]) == (2, f"skipped: {place} is a folder")
        with pytest.raises(Conflict, match=f"{name_of(4)}, which this run did not write") as refused:
            for _ in run.steps(4):
                train(torch.rand(4, 4), **own)
                run.save()
        assert "or move it away" in refused.value.fix
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert len(list(place.iterdir())) == 1


def test_the_newest_whole_one_is_never_deleted(tmp_path: Path) -> None:
    """Where newer ones are damaged, which stay and take no place."""
    trained(tmp_path, 4, keep_last=9)
    for step in (3, 4):
        cut_short(tmp_path / "checkpoints" / name_of(step))
    ckptool.prune(tmp_path, ["save.keep_last=1", "save.keep_best=0"])
    assert steps_of(tmp_path) == [2, 3, 4]
