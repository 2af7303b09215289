"""`run.yaml`: read with line numbers, changed by `--set`, written with every default; the configuration of a run as it
was last changed; and what `train --init` explains.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ckptool.checkpoint.files import read_small_text
from ckptool.checkpoint.jobs import signals_held
from ckptool.commands import arg, command
from ckptool.errors import OutputExists, TextLines, UsageError, counted, printable
from ckptool.formats import PathLike
from ckptool.output import make_folder
from ckptool.training import CONFIG, LOOP, is_run, run_folder
from ckptool.training.config import Config, Place, descend, is_named, keys_of, rooted, section_in
from ckptool.training.store import Retention, RunFolder, write_text

MAX_FILE = 1 << 20
_WORDS = {  # for pydantic's errors by type; the others keep its words, without how they begin
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "should be a section, {KEY: VALUE}"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "should be true or false"),
    "list_type": "should be a list",
    "string_type": "should be a string",
    "string_pattern_mismatch": "should be the name of a file, like profile.json",
}
_KINDS: dict[type, str] = {list: "a list", dict: "a section", type(None): "null"}
_HABITS = {"learning_rate": "lr", **dict.fromkeys(("amp", "bf16", "fp16"), "precision")}  # of other programs
_BEGIN = re.compile("^(Input|String|Value error,) ")
MAX_DEPTH, MAX_VALUES, MAX_BITS = 64, 100_000, 1_024  # more than any real configuration has


def read(source: PathLike | Mapping[str, Any], changes: Sequence[str] = ()) -> Config:
    """The configuration in a file, or a dictionary of the same keys, with `KEY=VALUE` changes.

    Raises `UsageError` with the line of everything wrong.
    """
    if isinstance(source, Mapping):
        return changed(source, changes)
    if is_run(path := os.fspath(source)):
        fix = f"Resume it: {command('resume', path)}"
        raise UsageError(f"{path} is a run, not a configuration", "It was started before.", fix)
    values, lines = loaded(read_small_text(path, "a configuration", MAX_FILE), path)
    return checked(rooted(values, os.path.dirname(path) or os.curdir), path, lines, changes)


def changed(values: Mapping[str, Any], changes: Sequence[str], path: str = "the configuration") -> Config:
    """The configuration that a dictionary makes, with `KEY=VALUE` changes."""
    return checked(rooted(plain(values), os.curdir), path, changes=changes)


def checked(values: Any, path: str, lines: Mapping[Place, int] | None = None, changes: Sequence[str] = ()) -> Config:
    """The configuration that plain values make, with changes, whose paths are relative to the working directory.

    One error has all problems: a sentence for each place where something is wrong, in the order of lines: where, what,
    and what may be meant. path: the name of the configuration in them.
    """
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a configuration", "It has no KEY: VALUE lines.", "See: ckptool train --init")
    for change in changes:
        place, value = assignment(change)
        _set(values, place, rooted(value, os.curdir, place))
    for section, key in (values, "cudnn_benchmark"), (values.get("log"), "csv"):  # keys of older runs, always false
        if isinstance(section, dict) and section.get(key) is False:
            del section[key]
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
    by_place: dict[Place, list[Any]] = {}
    for problem in problems:
        by_place.setdefault(_place(problem["loc"], values, problem["type"] == "missing"), []).append(problem)
    lines = lines or {}
    numbered: list[tuple[int, str]] = []
    for place, causes in by_place.items():
        if any(len(other) > len(place) and other[: len(place)] == place for other in by_place if place):
            continue  # another branch of a union; the problem with the branch that was meant is below this place
        key, kind, value = dotted(place), causes[0]["type"], causes[0].get("input")
        if kind == "extra_forbidden":
            words = f"unknown key {key}{_meant(place, values)}"
        elif kind == "missing":
            words = f"{key} is missing"
        else:  # several problems are several branches of a union
            expectations = dict.fromkeys(_WORDS.get(cause["type"]) or _BEGIN.sub("", cause["msg"]) for cause in causes)
            words = (f"{key}: " if key else "") + ", or ".join(expectations).replace(", or should be ", ", or ")
            words += f" (it is {_KINDS.get(type(value)) or repr(value)[:80]})" if kind != "value_error" else ""
        line = next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 0)
        numbered.append((line, f"{path}{f':{line}' if line else ''}: {words}"))
    sentences = [sentence for _, sentence in sorted(numbered, key=lambda entry: entry[0])]
    what = sentences[0] if len(sentences) == 1 else f"{path}: {counted(len(sentences), 'problem')}"
    why = TextLines(*(sentences if len(sentences) > 1 else ()), "Nothing was started.")
    raise UsageError(what, why, "All keys with what they mean: ckptool train --init")


def _meant(place: Place, values: dict[str, Any]) -> str:
    """What may be meant by an unknown key: that of another section, one like it or a word of it, or an argument."""
    *_, (_, section) = ((None, Config), *descend(place[:-1]))
    name, beside = _HABITS.get(name := str(place[-1]).lower(), name), keys_of(section)
    elsewhere: dict[str, str] = {}  # by their places
    for key, field in keys_of(Config).items():
        owners = values[key] if isinstance(values.get(key), dict) else field.default
        for prefix in [f"{key}.{owner}" for owner in owners] if is_named(field) else [key]:
            elsewhere |= {f"{prefix}.{inner}": inner for inner in keys_of(section_in(field.annotation))}

    siblings = {dotted((*place[:-1], key)): key for key in beside}
    one, words = [name], name.split("_")
    tries = [(one, siblings, 1), (one, elsewhere, 1), (one, siblings, 0.6), (words, siblings, 0.6)]
    tries += [(one, elsewhere, 0.75), (words, elsewhere, 1)] if "args" not in beside else []
    for parts, keys, cutoff in tries:
        close = {match for part in parts for match in difflib.get_close_matches(part, keys.values(), 1, cutoff)}
        if meant := [other for other, key in keys.items() if key in close]:
            return f"; did you mean {', or '.join(meant)}?"
    return f"; arguments go into {dotted((*place[:-1], 'args'))}" if "args" in beside else ""


def _place(loc: Place, values: Any, missing: bool) -> Place:
    """The keys that lead to a problem. pydantic names the branches of a union between them, which are no keys."""
    place: Place = ()
    for number, part in enumerate(loc):
        inside = part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int)
        if inside or (missing and number == len(loc) - 1):
            place = (*place, part)
        values = values[part] if inside else values
    return place


# --set ---------------------------------------------------------------------------------------------------------------


def assignment(text: str) -> tuple[Place, Any]:
    """The place and value of an assignment, `optim.main.lr=3e-4`. Raises `UsageError` for any other text."""
    key, separator, value = text.partition("=")
    key = key.removesuffix(":")  # `:=`, as for values of JSON
    if not separator or not key.strip("."):
        fix = f"For example: {arg(set='train.steps=3000')}"
        raise UsageError(f"{arg('set')} {text!r} is not of the form KEY=VALUE", "", fix)
    place = tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in key.strip().split("."))
    try:
        return place, loaded(value, "its value")[0]
    except UsageError as error:
        what = f"{arg('set')} {text!r}: the value cannot stand in a configuration"
        raise UsageError(what, f"{error.what}.") from None


def _set(values: Any, place: Place, value: Any) -> None:
    for index, part in enumerate(place):
        if isinstance(values, list) and (not isinstance(part, int) or part >= len(values)):
            raise UsageError(f"{arg(set=dotted(place))}: there is no {part} in a list of {len(values)}")
        if not isinstance(values, (dict, list)):
            raise UsageError(f"{arg(set=dotted(place))}: {dotted(place[:index])} is a value, not a section")
        if index == len(place) - 1:
            values[part] = value
        elif isinstance(values, dict) and values.get(part) is None:
            values[part] = {}
        values = values[part]


# YAML ----------------------------------------------------------------------------------------------------------------


class Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, where PyYAML takes a string; `2024-13-45` is a string."""


Loader.yaml_implicit_resolvers = {
    key: [(tag, pattern) for tag, pattern in value if not tag.endswith(":timestamp")]
    for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def loaded(text: str, where: str) -> tuple[Any, dict[Place, int]]:
    """The plain values of a YAML text, and the line of every key. A `UsageError` begins with `where` and the line."""
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        lines = dict(_lines(root, (), set())) if root is not None else {}
        values = loader.construct_document(root) if root is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageError(f"{place}: not valid YAML: {problem}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        raise UsageError(f"{where}: a value does not fit its type or is nested too deep") from None
    return plain(values), lines


def _lines(node: yaml.Node, place: Place, seen: set[int]) -> Iterator[tuple[Place, int]]:
    """The line of every key. Raises `MarkedYAMLError` for a repeated key, of which YAML would take the last."""
    if id(node) in seen:
        return  # an alias
    seen.add(id(node))
    children: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):  # the loader refuses keys that are no scalars
        children = [(key.value, key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
        for _, key, _ in children:
            key.tag = key.tag if key.tag.endswith(":merge") else "tag:yaml.org,2002:str"  # `on` is no `True`
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    keys = set()
    for part, key_node, value in children:
        if part in keys:
            raise yaml.MarkedYAMLError(problem=f"{part} is given twice", problem_mark=key_node.start_mark)
        keys.add(part)
        yield (*place, part), key_node.start_mark.line + 1
        yield from _lines(value, (*place, part), seen)


def plain(value: Any, place: Place = (), budget: list[int] | None = None) -> Any:
    """A copy of plain values: strings, paths as strings, finite numbers, lists, dictionaries. Else a `UsageError`.

    budget: how many more values there may be, in a list of one.
    """
    budget = [MAX_VALUES] if budget is None else budget
    budget[0] -= 1
    if budget[0] < 0 or len(place) > MAX_DEPTH or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        limits = f"{MAX_VALUES:,} values, lists in lists {MAX_DEPTH} deep, numbers of {MAX_BITS:,} bits"
        raise UsageError("the configuration is too large", f"It has at most {limits}.")
    if isinstance(value, float) and not math.isfinite(value):
        what = f"{dotted(place) or 'a number'} is {value}, and not finite"
        raise UsageError(what, "What is saved beside checkpoints is JSON, which has no such numbers.")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, (*place, key), budget) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, (*place, index), budget) for index, item in enumerate(value)]
    what = f"{dotted(place) or 'the configuration'} is of type {type(value).__qualname__}, and not a plain value"
    raise UsageError(what, "It could not be written to run.yaml.", "Name code of your own by its place: file.py:NAME")


def dotted(place: Place) -> str:
    return ".".join(map(str, place))


# Runs ----------------------------------------------------------------------------------------------------------------


def reopen_to_prune(folder: str, changes: Sequence[str], *, write: bool) -> RunFolder:
    """An existing run of the harness or of `ckptool.Run`, with changes of its retention for this time only."""
    _, values = run_folder.recorded(folder)
    if LOOP in values:  # a run of `ckptool.Run` records its rules in the form of a configuration
        sections = {"train": {"steps": 1}, "save": values.get("save", {}), "eval": values.get("eval", {})}
    else:
        sections = recorded_config(folder)[1].dumped()
    config = changed({**sections, "run": folder}, changes, os.path.join(folder, CONFIG))
    return run_folder.reopen(folder, retention_of(config), write=write)


def retention_of(config: Config) -> Retention:
    """The rules of a configuration for which checkpoints to keep."""
    save, evaluation = config.save, config.eval
    return Retention(save.keep_last, save.keep_best, save.keep_every, evaluation.metric, evaluation.mode)


def recorded_config(folder: str) -> tuple[str, Config]:
    """The id of a run, and its configuration as last changed.

    Raises `UsageError` for a folder that is no run of the harness.
    """
    run_id, values = run_folder.recorded(folder)
    if script := values.get(LOOP):
        what = f"{folder} is a run of ckptool.Run in {script!s}, not of `ckptool train`"
        why = "Only that script can make its model and data."
        raise UsageError(what, why, "Run the script again: it resumes by itself.")
    return run_id, checked({**values, "run": folder}, os.path.join(folder, CONFIG))


# What --init and --schema give ----------------------------------------------------------------------------------------

# What --init prints: a configuration that is a good example. Where a value is not the default, the line says what is.
_EXAMPLE: dict[str, Any] = {
    "run": "runs/digits",
    "seed": 7,
    "models": {"main": {"args": {"hidden": [64, 64], "dropout": 0.1}}},
    "optim": {"main": {"args": {"weight_decay": 0.01}}},
    "train": {"steps": 2000},
    "eval": {"metric": "val_acc", "mode": "max"},
}
# What --init DIR writes beside its model.py.
_OWN = {
    "run": "runs/first",
    "train": {"steps": 500},
    "data": {"name": "model.py:Points"},
    "models": {"main": {"name": "model.py:Net", "args": {"width": 32}}},
    "optim": {"main": {"args": {"weight_decay": 0.01}, "schedule": {"name": "model.py:warmup"}}},
}
_HEAD = """\
# A run of ckptool's training harness, with every key. One left out has the value below, or the default in its comment.
# Start it: ckptool train run.yaml    Resume it: ckptool resume {run}    Prove it: ckptool prove run.yaml
"""
_COMMENTS = 30  # the column in which comments begin


def schema_text() -> str:
    """The JSON Schema of a configuration, for editors."""
    return json.dumps(Config.model_json_schema(by_alias=True), indent=2) + "\n"


def example(**sections: Any) -> str:
    """A configuration with every key explained. sections: replace those of the example."""
    values = Config.model_validate(_EXAMPLE | sections).dumped()
    del values["train"]["epochs"]
    return _HEAD.format(run=values["run"]) + "".join(f"{line}\n" for line in _explained(Config, values, ""))


def begun(folder: str) -> str:
    """Writes a run.yaml, and a model.py that it names, into a folder; returns what was written, and what to type next.

    Raises `OutputExists` if one of them exists.
    """
    model, run = os.path.join(folder, "model.py"), os.path.join(folder, "run.yaml")
    if existing := [path for path in (model, run) if os.path.lexists(path)]:
        raise OutputExists(f"{existing[0]} already exists", "Nothing was written.", "Name another folder.")
    with signals_held():  # a second try is refused where one of them was left
        make_folder(folder)
        write_text(model, Path(__file__).with_name("model.py.txt").read_text(encoding="utf-8"))
        write_text(run, example(**_OWN))
    return f"wrote {printable(model)} and {printable(run)}\ntrain it: {command('train', run)}\n"


def _explained(section: type[BaseModel], values: dict[str, Any], indent: str) -> Iterator[str]:
    """A line for each key that has a value; for a section without words of its own, a line for each of its keys."""
    for key, field in keys_of(section).items():
        words, below = field.description or "", section_in(field.annotation)
        if key not in values:
            continue
        if words or below is None:
            line, default = indent + _flow({key: values[key]}), ""
            if not field.is_required() and field.default not in (values[key], None):
                default = f" (default: {_flow({'': field.default}).partition(': ')[2]})"
            yield f"{line.ljust(_COMMENTS - 2)}  # {words}{default}"
            continue
        yield f"{indent}{key}:"
        named = is_named(field)
        for name, nested in (values[key] if named else {"": values[key]}).items():
            if named:
                yield f"{indent}  {name}:"
            yield from _explained(below, nested, indent + "  " * (1 + named))


def _flow(values: dict[str, Any]) -> str:
    """Values on one line."""
    text: str = yaml.safe_dump(values, sort_keys=False, default_flow_style=True, width=1000)
    return text.strip()[1:-1]
