"""`prove -- COMMAND`: planted faults are named, a correct script is proved, an unstable one is told first."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
import ckptool.training.prove as module
from ckptool.errors import RunFailed, UsageError
from ckptool.training.prove.trace import NOT_RESTORED, Divergence, Life, Reference, TracedStep
from ckptool.training.prove.tracer import Tracer
from ckptool.training.reports import Proof
from tests.support.files import written

WATCHED = sys.platform == "linux" and any(map(shutil.which, ("cc", "gcc", "clang")))

# A program without torch, so that it starts at once: what is killed and what is found there needs no steps.
PLAIN = """
import json, os, struct, sys, time
out, fault = sys.argv[1:]
path = os.path.join(out, "last.safetensors")
def save(step, path):
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    if step == 10:
        os.makedirs(os.path.join(out, "half"), exist_ok=True)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + bytes([step]) * 4096)
        file.flush()
        os.fsync(file.fileno())
step = 0
if os.path.exists(path):
    data = open(path, "rb").read()
    if len(data) < 4096:
        sys.exit("it is torn")
    step = data[-1]
    if fault == "stops":
        sys.exit(0)
with open(os.path.join(out, "log.jsonl"), "a") as log:
    while step < 20:
        time.sleep(0.02)
        step += 1
        print(step, file=log, flush=True)
        if step % 2 == 0:
            save(step, path + ".tmp" if fault != "torn" else path)
            if fault != "torn":
                os.replace(path + ".tmp", path)
open(os.path.join(out, "done"), "w").close()
"""


def proved(words: list[str], **options: Any) -> Proof:
    found = ckptool.prove(command=[sys.executable, *words[:1], "{run}", *words[1:]], **options)
    if found.kept:
        shutil.rmtree(found.kept)
    assert found.starts <= 3 + options.get("kills", 5) + len(found.confirmed) + 2, found
    return found


# Two scripts of the shapes that people write, each with one thing that is not restored, and what is said of it.
SCRIPTS = Path(__file__).parent / "scripts"
NAMED = {
    "scheduler": ("scheduler: `scheduler` (", "the learning rate of step "),
    "generator": ("samples differ: the batch of step ", "`{generator}`, a generator, is in a different state"),
    "augmentation": ("samples differ: the batch of step ", "`{masks}`, a generator, is in a different state"),
    "ema": ("EMA: the weights of `{ema}` (",),
    "ema in no file": ("EMA: the weights of `{ema}` (",),
    "rng": ("the global generator of torch is in a different state",),
    "prefetch": ("samples differ: the batch of step ",),
}
NAMES = {
    "gpt": {"generator": "offsets", "masks": "masks", "ema": "ema.module"},
    "images": {"generator": "generator", "masks": "train_set.rng", "ema": "ema"},
}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", NAMED)
@pytest.mark.parametrize("script", NAMES)
def test_what_was_not_restored_is_named_and_confirmed(script: str, fault: str, seed: int) -> None:
    found = proved([str(SCRIPTS / f"{script}.py"), fault], kills=1, seed=seed)
    assert found.exit() == 1 and found.kills[0].resumed, found
    assert found.causes == found.confirmed, found
    for begin in NAMED[fault]:
        begin = begin.format(**NAMES[script])
        assert any(cause.startswith(begin) for cause in found.causes), (begin, found.causes)
    assert found.causes[0].startswith(NAMED[fault][0].format(**NAMES[script])) or fault == "rng"
    if "ema" not in fault:
        assert found.differs.startswith("the first step that differs is "), found.differs


HABITS = {
    "mode": ("`model.training` (module attribute) is False in the unbroken run and True", False),
    "number": ("`noise` (value) is 0.", True),
    "memory": ("`memory` (value) is list of ", True),
    "stop": ("`left` (value) is ", True),
    "frozen": ("`model.requires_grad` (module attribute) is True for 2 of 4, ", False),
    "window": ("gradients: those of step ", False),
}


@pytest.mark.soak
@pytest.mark.parametrize("fault", HABITS)
def test_a_habit_by_which_a_script_does_not_resume_is_named(fault: str) -> None:
    words, is_confirmed = HABITS[fault]
    found = proved([str(SCRIPTS / "habits.py"), fault], kills=2, seed=1)
    assert found.exit() == 1 and any(cause.startswith(words) for cause in found.causes), found
    assert bool(found.confirmed) == is_confirmed, found


@pytest.mark.soak
@pytest.mark.parametrize("script", NAMES)
def test_a_torn_file_and_a_generator_without_a_seed_are_named(script: str) -> None:
    """The generator before anything is killed."""
    torn = proved([str(SCRIPTS / f"{script}.py"), "torn"], kills=1)
    assert torn.exit() == 1 and " is torn: the program was killed after step " in torn.findings[0], torn
    assert ", half way through a write, and writes it in place (" in torn.findings[0]
    found = proved([str(SCRIPTS / f"{script}.py"), "unseeded"])
    assert (found.exit(), found.starts, found.kills, found.unstable[1]) == (2, 2, [], "from step 1 on")
    assert f"`{NAMES[script]['masks']}`, a generator, is in a different state" in found.unstable


LOOPS = Path(__file__).parents[2] / "examples" / "loops"
GOOD = [*((str(SCRIPTS / f"{name}.py"),) for name in NAMES), (str(SCRIPTS / "images.py"), "", "2")]
GOOD += [(str(SCRIPTS / "habits.py"),)]
GOOD += [(str(path),) for path in sorted(LOOPS.glob("*.py"))]


@pytest.mark.soak
@pytest.mark.parametrize("words", GOOD, ids=lambda words: Path(words[0]).stem + "-".join(words[1:]))
def test_a_correct_script_is_proved(words: tuple[str, ...]) -> None:
    found = proved([*words], kills=4)
    has_optimizer = "word_language_model" not in words[0]  # it subtracts the gradients itself, so no step is seen
    assert found.proved and found.kills and bool(found.steps) == has_optimizer, found


@pytest.mark.soak
def test_the_programs_own_sitecustomize_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'theirs')!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert proved([str(SCRIPTS / "gpt.py")], kills=1).steps and (tmp_path / "theirs").exists()


# Without torch --------------------------------------------------------------------------------------------------------


def plain(path: Path, fault: str, **options: Any) -> Proof:
    (path / "train.py").write_text(PLAIN)
    return proved([str(path / "train.py"), fault], **options)


def test_a_script_without_torch_is_proved(tmp_path: Path) -> None:
    found = plain(tmp_path, "", kills=3)
    assert found.proved and not found.steps, found
    assert found.remarks == [
        "2 other files in the folder: not compared",
        "no torch optimizer step was seen: kills come by events, and no cause can be named",
    ]
    assert "proved for 3 kills" in str(found)


@pytest.mark.skipif(not WATCHED, reason="calls are counted by a compiled library")
def test_a_torn_file_and_a_restart_that_stops_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill comes at the first event of its kind, whatever the time is."""
    monkeypatch.setattr(module.CommandRuns, "plan", lambda *_: [(0.0, "half of a write")])
    torn = plain(tmp_path, "torn")
    assert torn.kills[-1].place == "half of a write" and torn.watched == "preload"
    assert torn.findings[0].startswith(
        "last.safetensors is torn: the program was killed half way through a write, and writes it in place"
    )
    assert torn.findings[1] == "killed half way through a write, it ended with exit code 1: it is torn"
    assert torn.events["fsync"] == 10 and torn.events["half of a write"] >= 10
    monkeypatch.setattr(module.CommandRuns, "plan", lambda *_: [(0.0, "mkdir")])
    stops = plain(tmp_path, "stops", kills=1)
    assert stops.kills[0].place == "mkdir"
    assert stops.exit() == 1 and stops.differs == "the first tensor at the end is w in last.safetensors"


# As a program with torch and the tracer looks from outside: it tells its steps, waits, keeps values, puts them back.
TOLD = """
import json, os, struct, sys, time
out, fault = sys.argv[1:]
path, traces = os.path.join(out, "last.safetensors"), os.environ["CKPTOOL_PROVE_TRACE"]
def plan(key):
    with open(os.path.join(traces, "plan.json")) as file:
        return json.load(file)[key]
def save():
    header = json.dumps({"state": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    with open(path + ".tmp", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + bytes([weight, step, noise]) + bytes(4093))
    os.replace(path + ".tmp", path)
weight, step, noise = 0, 0, 1
if os.path.exists(path):
    with open(path, "rb") as file:
        weight, step, before = file.read()[-4096:-4093]
    noise = noise if fault in ("noise", "both") else before
    weight += fault == "both"
count, saved = 0, False
with open(os.path.join(traces, "0-1.jsonl"), "w") as trace:
    while step < 20:
        noise = batch = (noise * 5 + 3) % 64
        values = os.path.join(traces, f"values-{count}")
        if count in plan("keep"):
            open(values, "w").write(str(noise))
        if count == 0 and "generator:noise" in plan("put"):
            noise = batch = int(open(plan("values")).read())
        found = {"noise": f"generator: {noise}", "step": f"value: {step}"}
        line = {"optimizer": "sgd", "weights": str(weight), "inputs": [str(batch)], "state": "", "lr": [1.0]}
        line |= {"random": {}, "found": found, "gone": [], "saved": saved, "time": time.time(), "age": 0}
        print(json.dumps(line), file=trace, flush=True)
        count += 1
        while count >= (plan("hold") or 10**9):
            time.sleep(0.001)
        weight, step, saved = (weight + batch) % 251, step + 1, False
        if step % 4 == 0:
            save()
            saved = True
"""


@pytest.mark.parametrize(
    ("fault", "kills", "starts", "exit_code"),
    [("", 3, 6, 0), ("noise", 1, 5, 1), ("noise", 3, 7, 1), ("both", 1, 4, 1)],
)
def test_a_cause_is_put_back_in_one_more_start_and_nothing_in_one_if_that_was_not_seen(
    tmp_path: Path, fault: str, kills: int, starts: int, exit_code: int
) -> None:
    (tmp_path / "train.py").write_text(TOLD)
    found = proved([str(tmp_path / "train.py"), fault], kills=kills)
    assert (found.steps, found.starts, found.exit()) == (20, starts, exit_code), found
    assert len(found.kills) == min(kills, 2 if fault else 3)  # it went another way: it is killed no more
    resumed = found.kills[0].resumed
    assert found.kills[0].step and (resumed is None) == (fault == "both")
    if fault == "noise":
        batch = f"samples differ: the batch of step {(resumed or 0) + 1} is not that of the unbroken run"
        assert found.causes[0].startswith(batch) and found.causes[1] == "`noise`, a generator, is in a different state"
        assert found.confirmed == found.causes
    assert fault != "both" or (found.causes == [NOT_RESTORED] and not found.confirmed)


def test_without_a_compiler_kills_come_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compiled", lambda tools: "")
    found = plain(tmp_path, "", kills=2)
    assert found.watched == "time" and not found.events and not found.findings and not found.differs, found
    assert {kill.place for kill in found.kills} <= {"any moment"}


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"command": ["true"]}, UsageError, r"has no \{run\}"),
    ({"command": ["no-such-program", "{run}"]}, UsageError, "there is no program"),
    ({"config": "run.yaml", "command": ["true", "{run}"]}, UsageError, "no configuration"),
    ({"command": ["true", "{run}"]}, RunFailed, "no checkpoint"),
    ({"command": ["sh", "-c", "exit 3", "{run}"]}, RunFailed, "exit code 3 before anything was killed"),
    ({"command": ["sh", "-c", "sleep 60", "{run}"], "timeout": 0.2}, RunFailed, "took more than 0 s"),
]


@pytest.mark.parametrize(("given", "error", "words"), REFUSED, ids=range(6))
def test_what_cannot_be_tried(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ckptool.prove(**given)


# Traces ---------------------------------------------------------------------------------------------------------------


def step(number: int, **facts: Any) -> TracedStep:
    """A step of a run in which everything moves."""
    found = {"a.rng": f"generator: {number}", "m.count": f"module attribute: {number}", "i": f"value: {number}"}
    found |= {
        "bank": f"value: list of {number}",
        "ema": f"weights: EMA {number}",
        "rates": f"scheduler: StepLR {number}",
        "scaler": f"scaler: GradScaler {number}",
        "env.x": f"attribute: {number}",
    }
    values: dict[str, Any] = {"inputs": [f"batch {number}"], "state": str(number), "lr": [1.0]}
    values |= {"optimizer": "opt", "weights": str(number), "random": {"torch": str(number)}}
    values |= {"saved": False, "time": 0.0, "age": 0}
    return TracedStep(**values | {"found": found | facts.pop("found", {})} | facts)


STEPS = [step(number) for number in range(10)]
REFERENCE = Reference(STEPS, STEPS)


def life(start: int, *steps: TracedStep) -> Life:
    return Life("", start=start, steps=[*steps])


def sentences(found: Divergence | None) -> tuple[int, list[str]] | None:
    return found and (found.step, [text for cause in found.causes for text in cause.sentences])


def test_variables_are_those_of_the_programs_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Tracer(str(tmp_path)).is_own
    written(b"", tmp_path / "train.py")
    assert not own("train.py")
    monkeypatch.chdir(tmp_path)
    assert own("/home/me/train.py") and own("train.py") and own("<string>") and not own("_ops.py")
    assert not any(map(own, (None, 3, json.__file__, torch.__file__, module.__file__, "<frozen importlib._bootstrap>")))


def test_a_restart_is_placed_by_its_weights() -> None:
    assert REFERENCE.place_of(step(4, state="x")) == 4
    assert REFERENCE.place_of(step(4, weights="x")) is None
    still = [step(number, weights="0") for number in range(5)]  # lr is 0 at first
    assert Reference(still, still).place_of(still[3]) == 3


def test_the_variables_of_a_program_are_its_own_and_few(tmp_path: Path) -> None:
    """Of thousands of modules some say that they are of a file beside the program: `_ops.py` for all of `torch.ops`."""
    file = written(b"import numpy, torch\nown_variable_of_a_program = 3\n", tmp_path / "own_module_of_a_program.py")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None and not os.path.isabs(torch.ops.__file__)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        tool = Tracer(str(tmp_path))
        for _ in range(2):
            assert tool.roots()["own_variable_of_a_program"] == 3 and "aten" not in tool.roots()
    finally:
        del sys.modules[spec.name]
    assert "own_variable_of_a_program" not in tool.roots()


BATCH = "samples differ: the batch of step 6 is not that of the unbroken run"
CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"found": {"a.rng": "generator: x"}, "inputs": ["x"]}, [BATCH, "`a.rng`, a generator, is in a different state"]),
    (
        {"found": {"env.x": "attribute: 0"}, "inputs": ["x"]},  # a simulator that is saved nowhere
        [BATCH, "`env.x` (attribute) is 5 in the unbroken run and 0 after the restart"],
    ),
    ({"inputs": ["batch 6"]}, [BATCH]),
    (
        {"found": {"rates": "scheduler: StepLR x"}},
        ["scheduler: `rates` (StepLR) has a different state than in the unbroken run"],
    ),
    ({"found": {"ema": "weights: EMA x"}}, ["EMA: the weights of `ema` (EMA), which no optimizer trains, differ"]),
    ({"state": "x"}, ["optimizer: the state of `opt` is not that of the unbroken run"]),
    (
        {"found": {"m.count": "module attribute: 0"}, "random": {"torch": "x"}},
        ["`m.count` (module attribute) is 5 in the unbroken run and 0 after", "the global generator of torch is in"],
    ),
    ({"found": {"i": "value: 0"}}, ["`i` (value) is 5 in the unbroken run and 0 after the restart"]),
    (
        {"found": {"scaler": "scaler: GradScaler x"}},
        ["scaler: `scaler` (GradScaler) has a different state than in the unbroken run"],
    ),
    (
        {"found": {"bank": "value: list of 0"}, "inputs": ["x"]},
        [BATCH, "`bank` (value) is list of 5 in the unbroken run and list of 0 after the restart"],
    ),
    ({"found": {"i": "value: 0"}, "state": "x"}, ["optimizer: the state of `opt` is not"]),  # `i` is an effect
    (
        {"found": {"i": "value: 0", "x": "value: [4] abc"}, "inputs": ["x"]},  # but may be a cause of a batch
        [BATCH, "`i` (value) is 5 in the unbroken run and 0 after the restart"],
    ),
    (
        {"found": {"m.count": "module attribute: 0"}, "inputs": []},  # in evaluation mode
        ["`m.count` (module attribute) is 5 in the unbroken run and 0 after"],
    ),
]


@pytest.mark.parametrize(("change", "causes"), CHANGES)
def test_causes_come_before_effects(change: dict[str, Any], causes: list[str]) -> None:
    found = REFERENCE.divergence(life(4, step(4), step(5, **change), step(6, weights="x", state="x")))
    told = sentences(found)
    assert told and told[0] == 6 and len(told[1]) == len(causes), told
    assert all(text.startswith(begin) for text, begin in zip(told[1], causes, strict=True)), told
    if "a generator" in causes[-1]:
        assert found and len(found.causes) == 1  # it is put back together with the batch that was drawn with it
    assert REFERENCE.divergence(life(4, step(4), step(5))) is None


def test_a_save_inside_gradient_accumulation_is_named() -> None:
    steps = [step(number, inputs=[f"{number} a", f"{number} b"]) for number in range(10)]
    found = Reference(steps, steps).divergence(
        life(4, steps[4], step(5, inputs=["5 b"]), step(6, weights="x", state="x", inputs=["6 a", "6 b"]))
    )
    assert found and [cause.sentences[0][:38] for cause in found.causes] == ["gradients: those of step 6 lack the ba"]


def test_a_counter_that_alone_differs_at_the_restart_is_named_after_what_it_led_to() -> None:
    entries = [{"i": "value: 0"}, {"i": "value: 0", "a.rng": "generator: x"}]
    found = REFERENCE.divergence(life(4, step(4, found=entries[0]), step(5, found=entries[1]), step(6, weights="x")))
    assert sentences(found) == (
        6,
        [
            "`a.rng`, a generator, is in a different state",
            "`i` (value) is 4 in the unbroken run and 0 after the restart",
        ],
    )


def test_of_two_optimizers_the_one_whose_step_differs_is_looked_at() -> None:
    def gan(number: int, **facts: Any) -> TracedStep:
        return replace(step(number, **facts), optimizer=f"opt{number % 2}")

    reference = Reference([gan(number) for number in range(10)], [gan(number) for number in range(10)])
    for later in ([gan(6), gan(7, weights="x")], [gan(6, inputs=["x"]), gan(7), gan(8, weights="x")]):
        found = reference.divergence(life(4, gan(4), gan(5, state="x"), *later))
        assert sentences(found) == (6, ["optimizer: the state of `opt1` is not that of the unbroken run"])
    assert sentences(reference.divergence(life(4, gan(4), gan(5, weights="x")))) == (5, [NOT_RESTORED])


def test_what_differs_by_chance_or_never_moves_is_no_cause() -> None:
    again = [step(number, random={"torch": f"{number} of another run"}) for number in range(10)]
    resumed = life(5, step(5, random={"torch": "x"}, lr=[2.0]), step(6, weights="x"))
    assert sentences(Reference(STEPS, again).divergence(resumed)) == (6, [])


def test_variables_that_were_looked_at_in_other_steps_are_not_compared() -> None:
    """They are older; what is noted at each step is compared all the same."""
    change: dict[str, Any] = {"found": {"a.rng": "generator: x", "i": "value: x"}, "random": {"torch": "x"}}
    told = sentences(REFERENCE.divergence(life(4, step(4), step(5, **change, age=3), step(6, weights="x"))))
    assert told == (6, ["the global generator of torch is in a different state"])
    old = Reference([step(number, age=number % 4) for number in range(10)], STEPS)
    told = sentences(old.divergence(life(4, step(4), step(5, **change, age=1), step(6, weights="x"))))
    assert told and "`a.rng`, a generator, is in a different state" in told[1]


def test_an_average_that_no_checkpoint_holds_is_found_at_the_end() -> None:
    """One that changes with every step, or has such a name; not the best model so far, which changes now and then."""
    lost = {"ema": "weights: EMA x"}
    assert REFERENCE.unsaved_averages(life(9, step(9, found=lost)))[0].keys == [("weights", "ema")]
    assert not REFERENCE.unsaved_averages(life(8, step(8, found=lost)))  # not yet at the end
    found = []
    for entry in (
        "best weights: Net {}",
        "one weights: AveragedModel {}",
        "shadow value: [2] {}",
        "swa_count value: {}",
    ):
        name, _, text = entry.partition(" ")
        rare = [step(number, found={name: text.format(number // 8)}) for number in range(10)]
        for start in ("", "x"):  # or it stays as it was loaded
            later = [step(at, found={name: text.format(value)}) for at, value in ((8, start), (9, "x"))]
            found += [name + start] * bool(Reference(rare, rare).unsaved_averages(life(8, *later)))
    assert found == ["one", "onex", "shadow"]


def test_a_line_that_a_kill_cut_off_does_not_count(tmp_path: Path) -> None:
    first = asdict(step(0, found={})) | {"found": {"a": "x: 1", "c": "x: 3"}, "gone": []}
    later = first | {"found": {"b": "x: 2"}, "gone": ["c"]}
    (tmp_path / "1-7.jsonl").write_text("another rank\n")
    (tmp_path / "0-9.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(later)}\n{json.dumps(later)[:20]}")
    found = Life(str(tmp_path))
    found.read(REFERENCE)
    assert [each.found for each in found.steps] == [{"a": "x: 1", "c": "x: 3"}, {"a": "x: 1", "b": "x: 2"}]


@pytest.mark.parametrize(("second", "start"), [(1, 0), (7, None)])
def test_a_process_with_the_first_weights_of_one_optimizer_and_later_ones_of_another(
    tmp_path: Path, second: int, start: int | None
) -> None:
    """It did not begin again: some of its weights were not restored."""
    steps = [replace(step(number), optimizer=f"opt{number % 2}") for number in range(10)]
    lines = [json.dumps(asdict(steps[number]) | {"gone": []}) + "\n" for number in (0, second)]
    (tmp_path / "0-9.jsonl").write_text("".join(lines))
    found = Life(str(tmp_path))
    found.read(Reference(steps, steps))
    assert found.start == start
