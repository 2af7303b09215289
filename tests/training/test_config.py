"""The configuration: lines and suggestions in errors, numbers, changes, what may change in a run, the example and the
schema."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shlex
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ckptool.errors import Conflict, FileProblem, LimitExceeded, UsageError
from ckptool.training import config as keys_module
from ckptool.training import configfile, run_folder
from ckptool.training.config import Config
from ckptool.training.configfile import example, schema_text
from tests.support.looped import looped
from tests.support.small_runs import config

BASE = "run: r\ntrain: {steps: 5}\n"


def parsed(text: str, *changes: str) -> Config:
    values, lines = configfile.loaded(text, "run.yaml")
    return configfile.checked(values, "run.yaml", lines, changes)


def configuration_error(text: str, *changes: str) -> str:
    with pytest.raises(UsageError) as raised:
        parsed(text, *changes)
    return raised.value.what


# What is wrong, and where ---------------------------------------------------------------------------------------------


# What is added, as lines or as `--set`, and what is said of it.
WRONG_LINES = {
    "sede: 3": "run.yaml:3: unknown key sede; did you mean seed?",
    "optim:\n  main:\n    lrr: 1": "run.yaml:5: unknown key optim.main.lrr; did you mean optim.main.lr?",
    "models:\n  Main: {nmae: mlp}": "run.yaml:4: unknown key models.Main.nmae; did you mean models.Main.name?",
    "save:\n  evry: 3": "run.yaml:4: unknown key save.evry; did you mean save.every?",
    "profile: {wiat: 3}": "run.yaml:3: unknown key profile.wiat; did you mean profile.wait?",
    "steps: 3": "run.yaml:3: unknown key steps; did you mean train.steps?",  # not `stop`
    "ema: 0.9": "run.yaml:3: unknown key ema; did you mean train.ema, or eval.ema?",
    "zzz: 3": "run.yaml:3: unknown key zzz",
    "a: 3": "run.yaml:3: unknown key a",  # not `split.at`
    "SAVE: 3": "run.yaml:3: unknown key SAVE; did you mean save?",
    "data: {Name: blobs}": "run.yaml:3: unknown key data.Name; did you mean data.name?",
    "lr: 3": "run.yaml:3: unknown key lr; did you mean optim.main.lr?",
    "learning_rate: 3": "run.yaml:3: unknown key learning_rate; did you mean optim.main.lr?",
    "batch_size: 3": "run.yaml:3: unknown key batch_size; did you mean data.batch?",
    "grad_clip: 3": "run.yaml:3: unknown key grad_clip; did you mean models.main.clip, or optim.main.clip?",
    "save: {every_n_steps: 3}": "run.yaml:3: unknown key save.every_n_steps; did you mean save.every?",
    "data: {shuffle: true}": "run.yaml:3: unknown key data.shuffle; arguments go into data.args",
    "optim: {a: {weight_decay: 0}}": "run.yaml:3: unknown key optim.a.weight_decay; arguments go into optim.a.args",
    "yes: 3": "run.yaml:3: unknown key yes",
    "run2: \x00": "run.yaml: not valid YAML: unacceptable character #x0000: special characters are not allowed",
    "data: {batch: 0}": "run.yaml:3: data.batch: should be greater than 0 (it is 0)",
    "data: {batch: many}": "run.yaml:3: data.batch: should be a whole number (it is 'many')",
    "data:": "run.yaml:3: data: should be a section, {KEY: VALUE} (it is null)",
    "save: [3]": "run.yaml:3: save: should be a section, {KEY: VALUE} (it is a list)",
    "save: {every: true}": "run.yaml:3: save.every: should be a number (it is True)",
    "eval: {every: true}": "run.yaml:3: eval.every: should be a number, or 'epoch' (it is True)",
    "deterministic: maybe": "run.yaml:3: deterministic: should be true or false, or 'warn' (it is 'maybe')",
    "models:\n  main: {freeze: [{match: a}]}": "run.yaml:4: models.main.freeze.0: should be a string (it is a section)",
    "optim: {main: {groups: [{lr: 1}]}}": "run.yaml:3: optim.main.groups.0.match is missing",
    "optim: {main: {clip: {}}}": (
        "run.yaml:3: optim.main.clip: give norm or value, exactly one of the two (null is none)"
    ),
    "optim: {main: {args: {lr: 1}}}": "run.yaml:3: optim.main: give lr itself, not in args",
    "optim: {other: {}}": (
        "run.yaml: models are ['main'], optimizers for ['other']; each model needs one, and each optimizer a "
        "model (its own name, or `model`)"
    ),
    "strategy: split": "run.yaml: strategy: split needs the section split, and the section needs the strategy",
    "eval: {every: 0}\nstop: {patience: 2}": (
        "run.yaml: stop.patience counts evaluations, and there are none: eval.every is 0"
    ),
    "eval: {ema: true}": "run.yaml: eval.ema needs train.ema: there is no average of the weights",
    "train: {steps: 6}": "run.yaml:3: not valid YAML: train is given twice",
    "a: [1": "run.yaml:4: not valid YAML: expected ',' or ']', but got '<stream end>'",
    "? [1, 2]\n: 3": "run.yaml:3: not valid YAML: found unhashable key",
    'data: {"\\e[31m": 3}': r"run.yaml:3: unknown key data.\x1b[31m; arguments go into data.args",
}
WRONG_CHANGES = {
    "train.stepz=3": "run.yaml:2: unknown key train.stepz; did you mean train.steps?",
    "train.steps.x=1": "--set train.steps.x: train.steps is a value, not a section",
    "=3": "--set '=3' is not of the form KEY=VALUE",
    "seed": "--set 'seed' is not of the form KEY=VALUE",
    "seed=[": "--set 'seed=[': the value cannot stand in a configuration",
    "hooks.3=x": "run.yaml: hooks: should be a list (it is a section)",
    "train.epochs=1": "run.yaml:2: train: give steps or epochs, exactly one of the two (null is none)",
    "run=''": "run.yaml:1: run: should have at least 1 character (it is '')",
    "train.steps=null": "run.yaml:2: train: give steps or epochs, exactly one of the two (null is none)",
}


def test_errors_name_line_and_key() -> None:
    assert {added: configuration_error(f"{BASE}{added}\n") for added in WRONG_LINES} == WRONG_LINES
    assert {change: configuration_error(BASE, change) for change in WRONG_CHANGES} == WRONG_CHANGES


def test_what_is_no_configuration(tmp_path: Path) -> None:
    for text in ("", "- 1\n", "word\n", "3\n"):
        assert configuration_error(text) == "run.yaml is not a configuration"
    made = "task: !!python/object/apply:os.system ['true']\n"
    assert "could not determine a constructor" in configuration_error(BASE + made)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "run.yaml").write_text("run: x\n")
    (tmp_path / "binary").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "long").write_text("run: x\n" + "# more\n" * 200_000)
    os.mkfifo(tmp_path / "pipe")
    for name, kind, words in (
        ("none", FileProblem, "No such file"),
        ("run", UsageError, r"is a run, not a configuration(?s:.*)ckptool.resume"),
        ("binary", UsageError, "is not a text file"),
        ("long", LimitExceeded, "larger than a configuration can be"),
        ("pipe", UsageError, "is a pipe, not a configuration"),
    ):
        with pytest.raises(kind, match=words):
            configfile.read(str(tmp_path / name))


# Values ---------------------------------------------------------------------------------------------------------------

VALUES = {
    "optim.main.lr=1e-3": 0.001,
    "optim.main.lr=3E4": 3e4,
    "data.args.spread=1.5e-3": 0.0015,
    "data.args.spread=2": 2,
    "data.args.spread=.5": 0.5,
    "stop.after=90": 90,
    "stop.after=30s": 30,
    "stop.after=30m": 1800,
    "save.seconds=2h": 7200,
    "stop.after=1.5h": 5400,
    "optim.main.clip.norm=1.5": 1.5,
    "hooks=[grad_norm]": ["grad_norm"],
    "models.main.args.hidden=[3]": [3],
    "train.steps:=7": 7,
    "train.steps=7": 7,
}


def test_any_key_can_be_set_and_numbers_are_as_people_write_them() -> None:
    def found(made: Config, change: str) -> Any:
        return functools.reduce(
            lambda value, key: value[key], change.split("=")[0].strip(":").split("."), made.dumped()
        )

    assert {change: found(parsed(BASE, change), change) for change in VALUES} == VALUES
    for change, value in VALUES.items():
        *above, last = change.split("=")[0].strip(":").split(".")
        lines = [f"{'  ' * depth}{key}:" for depth, key in enumerate(above)]
        lines.append(f"{'  ' * len(above)}{last}: {change.partition('=')[2]}")
        base = BASE if above != ["train"] else "run: r\n"
        assert found(parsed(base + "\n".join(lines)), change) == value, change
    assert parsed("run: r\ntrain: {epochs: 2}\n").train.epochs == 2
    grouped = BASE + "optim: {main: {groups: [{match: a, lr: 1}]}}\n"
    assert parsed(grouped, "optim.main.groups.0.lr=2").optim["main"].groups[0].model_extra == {"lr": 2}


def test_what_is_written_is_read_again() -> None:
    made = parsed(example())
    text = run_folder.dumped(made.dumped())
    assert parsed(text) == made
    older = text.replace("{every: 10, ", "{every: 10, csv: false, ") + "cudnn_benchmark: false\n"  # of 0.2.0
    assert older.count("false") == text.count("false") + 2
    assert parsed(older) == made


# Values that no configuration can have -----------------------------------------------------------------------------

LAUGHS = (
    "[&a [1,1,1,1,1,1,1,1,1,1], "
    + ", ".join(f"&{n} [{','.join(['*' + b] * 10)}]" for b, n in pairwise("abcdefg"))
    + "]"
)
ODD_YAML = [
    *("9" * 5000, "-" + "9" * 5000, "0x" + "f" * 9000, "!!int x", "!!int ''", "!!float x", "!!bool x", "!!timestamp x"),
    *("!!timestamp 2024-13-45", "!!binary x", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "!!null x"),
    *("2024-13-45", "&a [*a]", "&a {x: *a}", "{[1]: 2}", "? {}", "*b", "\x00", "\x1b", "[" * 300 + "]" * 300),
    *("[" * 600, "{a: " * 600),  # deeper than PyYAML can go, which is quadratic in the depth
    *("!!python/name:os.system ''", "<<: 3", "12:99:99", ".nan", "-.inf", "1e999", LAUGHS),
]
PLACES = ("seed", "run", "data", "data.name", "data.args.x", "models.main.freeze", "optim.main.lr", "stop.after")


@looped("odd", ODD_YAML, ids=range(len(ODD_YAML)), here=10, at_once=5)
def test_odd_yaml_is_taken_or_told_with_its_line(odd: str) -> None:
    """In a file, and as the value of a key; never another error than one with words."""
    for place in PLACES:
        *above, last = place.split(".")
        indents = "".join(f"{'  ' * depth}{key}:\n" for depth, key in enumerate(above))
        text = f"{indents}{'  ' * len(above)}{last}: {odd}\n"
        for trial in (lambda text=text: parsed(text), lambda place=place: config(f"{place}={odd}")):
            try:
                made = trial()
            except UsageError as error:
                assert not LEAKS.search(str(error)), error
            else:
                json.dumps(made.dumped(), allow_nan=False)  # it is saved beside every checkpoint


LEAKS = re.compile(r"(?i)value error|input |pydantic|parse|instance|convert")
WRONG: list[Any] = [
    *(None, True, -1, 0, 0.5, 10**30, "x", "", [], ["x"], [3], {}, {"x": 1}, [[1]], float("nan"), float("inf"), "3x"),
    *("1h30m", "²", [None], {"main": None}, {"main": {"name": 3}}),
]


def leaves(values: Any, place: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [place]
    return [found for key, item in values.items() for found in leaves(item, f"{place}.{key}" if place else key)]


def test_wrong_values_are_told_in_words_of_ours() -> None:
    """Every key of the example, given every kind of value."""
    every = parsed(example()).dumped()
    places = {*leaves(every), *every, "optim.main.clip", "optim.main.schedule"}
    for place in sorted(places):
        for value in WRONG:
            values = json.loads(json.dumps(every))
            configfile._set(values, tuple(place.split(".")), value)
            try:
                configfile.checked(values, "run.yaml")
            except UsageError as error:
                assert not LEAKS.search(str(error)), error


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan"])
def test_numbers_that_json_does_not_have_are_refused_wherever_they_stand(number: str) -> None:
    """The configuration is saved beside every checkpoint, as JSON: the run would end at its first save."""
    base, value = {"run": "r", "train": {"steps": 5}}, float(number.replace(".", ""))
    within = {"models.main.clip.norm", "optim.main.clip.value", "optim.main.schedule.args.gamma", "data.args.x"}
    for place in {*leaves(parsed(example()).dumped()), *within, "optim.main.args.eps", "save.seconds"}:
        values: Any = json.loads(json.dumps(base))
        *above, last = place.split(".")
        functools.reduce(lambda section, key: section.setdefault(key, {}), above, values)[last] = value
        for given, changes in ((values, []), (base, [f"{place}={number}"])):
            with pytest.raises(UsageError, match=f"is {value}, and not finite"):
                configfile.changed(given, changes)


# What may change ------------------------------------------------------------------------------------------------------


RULES = {
    "fixed": """seed task data.name data.batch data.args.samples models.main.args.hidden optim.main.name
        optim.main.groups.0.match optim.main.args.weight_decay train.precision train.accumulate train.ema""",
    "free": """train.steps train.epochs eval.every save.keep_last stop.after log.every hooks profile.wait device
        data.workers strategy""",
    "declared": "optim.main.lr optim.main.schedule optim.main.schedule.args.gamma models.main.freeze",
    "start": "models.main.init models.main.from models.main.strict",
}


def test_fixed_free_and_declared_keys() -> None:
    wanted = {key: rule for rule, keys in RULES.items() for key in keys.split()}
    assert {key: keys_module.rule_of(key) for key in wanted} == wanted


def test_a_checkpoint_records_the_keys_that_are_not_free() -> None:
    every = parsed(example()).dumped()
    held = leaves(keys_module.recorded(every))
    assert set(held) == {key for key in leaves(every) if keys_module.rule_of(key) != "free"}
    assert {"models.main.from", "models.main.freeze", "optim.main.schedule", "train.ema"} <= set(held)


def refusal(*changes: str, asked: tuple[str, ...] = ()) -> Conflict:
    with pytest.raises(Conflict) as raised:
        keys_module.refuse_fixed(keys_module.changes(config(), config(*changes)), asked, "runs/x")
    return raised.value


def test_a_changed_fixed_key_is_refused_with_both_values() -> None:
    error = refusal("data.batch=16", "models.main.args.dropout=0.5")
    assert "runs/x cannot continue with a changed configuration" in error.what
    assert "data.batch was 8, and is now 16" in error.what
    assert "models.main.args.dropout was 0.2, and is now 0.5" in error.what
    command = "ckptool train runs/x/run.yaml --set data.batch=16 --set models.main.args.dropout=0.5 --set run=OTHER"
    assert str(error.fix) == f"Start another run: {command}"


def test_a_declared_key_changes_only_when_it_is_asked_for() -> None:
    error = refusal("optim.main.lr=0.1")
    assert "optim.main.lr was 0.01, and is now 0.1" in error.what
    assert error.fix == "Confirm the change: --set optim.main.lr=0.1"
    found = keys_module.changes(config(), config("optim.main.lr=0.1", "train.steps=99"))
    keys_module.refuse_fixed(found, ["optim.main.lr"], "runs/x")
    keys_module.refuse_fixed(found, ["optim.main"], "runs/x")
    keys_module.refuse_fixed(found, ["optim.main.lr:=0.1"], "runs/x")
    assert {change.key: change.rule for change in found} == {"optim.main.lr": "declared", "train.steps": "free"}


STEPS = "{name: step, args: {step_size: 2}, per: epoch}"
DECLARED = {
    "optim.main.schedule": ["null", "{name: 'a #b.py:f', args: {gamma: 0.9}}", "{name: 'c #d.py:f'}", STEPS],
    "optim.main.lr": ["1e-05", "0.3"],
    "models.main.freeze": ["[]", "['*.bias', \"it's\"]", "['*']"],
    "data.val": ["null", "{name: blobs}", "{name: blobs, args: {samples: 9}}"],
}


@pytest.mark.parametrize("seed", range(12))
def test_the_command_that_is_printed_confirms_all_of_a_change(seed: int) -> None:
    """Also where a section comes, goes or loses a key, as bash runs it."""
    rng = random.Random(seed)
    before, after = (
        config("data.val_fraction=0", *(f"{key}={rng.choice(values)}" for key, values in DECLARED.items()))
        for _ in range(2)
    )
    changed = keys_module.changes(before, after)
    with pytest.raises(Conflict) as raised:
        keys_module.refuse_fixed(changed, (), "runs/x")
    words = shlex.split(str(raised.value.fix).partition("Confirm the change: ")[2])
    assert words[::2] == ["--set"] * (len(words) // 2)
    confirmed = configfile.changed(before.dumped(), words[1::2])
    assert confirmed == after
    keys_module.refuse_fixed(keys_module.changes(before, confirmed), words[1::2], "runs/x")


# The example and the schema -------------------------------------------------------------------------------------------


def test_the_example_has_every_key_at_its_default() -> None:
    """Of what differs from a configuration that says nothing, each is there to be a good example."""
    least = parsed("run: runs/digits\ntrain: {steps: 2000}\n")
    made = parsed(example())
    assert {change.key for change in keys_module.changes(least, made)} == {
        "seed",
        "models.main.args.hidden",
        "models.main.args.dropout",
        "optim.main.args.weight_decay",
        "eval.metric",
        "eval.mode",
    }
    assert keys_module.changes(least, parsed(example(), *[f"{key}={value}" for key, value in BACK.items()])) == []


BACK = {"seed": 0, "models.main.args": "{}", "optim.main.args": "{}", "eval.metric": "val_loss", "eval.mode": "min"}


def test_the_example_shows_every_key() -> None:
    import yaml

    def keys(value: Any, place: str = "") -> set[str]:
        found = set()
        for key, below in value.items() if isinstance(value, dict) else ():
            found |= {f"{place}{key}"} | keys(below, f"{place}{key}.")
        return found

    shown = keys(yaml.safe_load(example()))
    assert {key for key in keys(parsed(example()).dumped()) if ".args." not in key} - shown == {"train.epochs"}


TIMES = (90, 0.5, "90s", "30m", "1.5h", "2. d")


def test_the_schema_is_one_that_editors_take() -> None:
    schema = json.loads(schema_text())
    assert schema["additionalProperties"] is False
    assert {"run", "train"} <= set(schema["required"])
    assert schema["$defs"]["Model"]["properties"]["from"]
    assert schema["$defs"]["Saving"]["properties"]["async"]
    assert all("description" in section for section in schema["$defs"].values())
    judge = jsonschema.Draft202012Validator(schema)
    for path in Path(__file__).parents[2].glob("examples/*.yaml"):
        judge.validate(configfile.loaded(path.read_text(), path.name)[0])
    base = {"run": "r", "train": {"steps": 5}}
    for place, time in product(("stop.after", "save.seconds"), (*TIMES, "1h30m", "soon", "-5m", "", "m", -1, 0, True)):
        section, key = place.split(".")
        values = {**base, section: {key: time}}
        try:
            configfile.changed(values, [])
            taken = True
        except UsageError:
            taken = False
        assert judge.is_valid(values) == taken == (time in TIMES), time
