"""A model's tensors as its library has them in memory, from those in its files, and back.

transformers 5 renames, stacks, joins and splits tensors on loading, and undoes that on saving. What it does for which
class is in `memory_names.json`, generated from the library's own mapping and classes by
`tests/engines/scripts/make_memory_names.py`.

Source: transformers/conversion_mapping.py and core_model_loading.py (`WeightTransform.rename_source_key`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.nodes import same_kind
from ckptool.conventions.state_dicts import StateDict
from ckptool.errors import Conflict, Unsupported, UsageError, listed
from ckptool.facts import dataclass, field, replace
from ckptool.formats.model_folder import configuration
from ckptool.names.pattern import Arithmetic
from ckptool.names.rules import Operation, parse_operation
from ckptool.transforms.translate.apply import applied

UNKNOWN = "?"  # an operation that is not known here


class _Group(NamedTuple):
    """Tensors of a file that together become tensors in memory. old: a list for each input of the operation."""

    operations: tuple[Operation, ...]
    old: list[list[str]]
    new: list[str]


@dataclass()
class MemoryTree:
    """A state dict with the names and tensors that its library has in memory.

    names: of tensors that are only renamed, by the file's names.  odd: the ends of modules whose weights are of no
    layer that PEFT wraps, though their names look so.  ties: names that a file may lack, each with another name of the
    same tensor; None where they are not known.  unknown: the file's names of tensors that are changed in a way not
    known here; nothing is renamed then.
    """

    tree: dict[Any, Any]
    names: dict[Any, Any] = field(default_factory=dict)
    groups: list[_Group] = field(default_factory=list)
    odd: tuple[str, ...] = ()
    ties: dict[str, str] | None = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def on_disk(self, changed: Mapping[Any, Any], file: Mapping[Any, Any]) -> dict[Any, Any]:
        """The file's tensors for a tree in memory with changed and new tensors; unchanged ones stay the same."""
        file_tensors = {old: changed[new] for old, new in self.names.items()}
        for group in self.groups:
            tensors = [changed[name] for name in group.new]
            if all(tensor is self.tree[name] for tensor, name in zip(tensors, group.new, strict=True)):
                continue
            for op in reversed(group.operations):
                undo = replace(op.inverse() or op, parts=len(group.old))
                batches = [[tensor] for tensor in tensors] if undo.name == "unstack" else [tensors]
                tensors = [part for batch in batches for part in applied(undo, batch, _value)]
            old = [name for names in group.old for name in names]
            file_tensors |= {name: resolved(tensor) for name, tensor in zip(old, tensors, strict=True)}
        placed: set[Any] = {*self.names.values(), *(name for group in self.groups for name in group.new)}
        added = {name: value for name, value in changed.items() if name not in placed}
        tree: dict[Any, Any] = same_kind(file, {})
        tree.update({name: file_tensors.get(name, value) for name, value in file.items()} | added)
        return tree

    def refuse_unknown(self, name: str) -> None:
        """Raises `Unsupported` where names in memory are not known."""
        if self.unknown:
            shown = listed(self.unknown)
            what = f"{name}: it is unknown what transformers makes of {shown} in memory"
            fix = "Load it with transformers, save its state_dict() with torch.save, and name that file"
            raise Unsupported(what, "PEFT uses the names in memory, which differ from those in the files.", fix)


def in_memory(file: Mapping[Any, Any], config: Mapping[str, Any], name: str) -> MemoryTree:
    """The state dict of a file as the library that wrote its configuration has it in memory. Reads nothing.

    Raises `Conflict` where two tensors have the same name in memory, or some that belong together are missing.
    """
    steps, kind, names = _steps(config), config.get("model_type"), dict[Any, Any]()
    memory = MemoryTree({}, odd=_tables()[1].get(kind, ()) if isinstance(kind, str) else ())
    groups: dict[tuple[int, str], tuple[_Step, list[str], list[list[str]]]] = {}
    for key, value in file.items():
        new = key
        for number, step in enumerate(steps if type(key) is str and isinstance(value, TensorEntry) else ()):
            new_names, source = step.renamed(new)
            if new_names and step.operations:
                memory.unknown += [key] if step.operations == UNKNOWN else []
                empty = step, new_names, [list[str]() for _ in range(step.sources)]
                groups.setdefault((number, new_names[0]), empty)[2][source].append(key)
                break
            new = new_names[0] if new_names else new
        else:
            names[key] = new
    if memory.unknown:
        return replace(memory, tree=dict(file), names={key: key for key in file}, ties=_ties(config, file))
    memory.tree.update((new, file[key]) for key, new in names.items())
    if len(memory.tree) < len(names):
        counts = Counter(names.values())
        twice = [key for key, new in names.items() if counts[new] > 1]
        what = f"{name}: {listed(twice)} have the same name in memory"
        raise Conflict(what, "config.json belongs to a different model, or written by another version.")
    for step, new_names, old in groups.values():
        operations = tuple(replace(parse_operation(op), parts=len(new_names)) for op in step.operations.split(" | "))
        group = _Group(operations, [sorted(keys, key=_natural_order) for keys in old if keys], new_names)
        memory.groups.append(group)
        parts = [[file[key] for key in keys] for keys in group.old]
        try:
            for op in operations:
                batches = parts if op.name == "stack" else [[tensor for part in parts for tensor in part]]
                parts = [applied(op, tensors, _value) for tensors in batches]
        except UsageError as error:
            what = f"{name}: {new_names[0]} cannot be made of {listed(group.old[0], 2)}"
            raise Conflict(what, f"{error.what}: tensors are missing, or config.json is another model's.") from None
        memory.tree |= dict(zip(new_names, (tensor for part in parts for tensor in part), strict=True))
    return replace(memory, names=names, ties=_ties(config, memory.tree))


def as_named(root: StateDict, checkpoint: Checkpoint, names: Container[str]) -> StateDict:
    """The weights of a file as its library has them in memory, if more of those names are among `names`."""
    try:
        memory = in_memory(root.node, configuration(checkpoint), str(checkpoint.source))
    except Conflict:
        return root  # the misfit is reported with the file's own names
    matches, own_matches = (sum(key in names for key in tree) for tree in (memory.tree, root.node))
    return replace(root, node=same_kind(root.node, memory.tree)) if matches > own_matches else root


def _value(value: Arithmetic) -> int:
    return value.value(lambda _: None)


def _natural_order(key: Any) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(key))]


class _Step(NamedTuple):
    """One transformation of names below a prefix. operations: on the tensors; empty where only the name changes."""

    pattern: re.Pattern[str]
    targets: list[str]
    operations: str
    prefixes: tuple[str, ...]

    @property
    def sources(self) -> int:
        return sum(name[0] == "g" for name in self.pattern.groupindex) or 1

    def renamed(self, key: str) -> tuple[list[str], int]:
        """The names that a name becomes, with the index of the source that it is; no names where it is none."""
        prefix = next((start for start in self.prefixes if key.startswith(start)), None)
        inner = "" if prefix is None else key[len(prefix) :]
        match = None if prefix is None else self.pattern.search(inner)
        if match is None or prefix is None:
            return [], 0
        group = next((name for name, text in match.groupdict().items() if text is not None), "")
        captured = self.pattern.groupindex.get(group, 0) + 1
        texts = [target.replace(r"\1", match[captured]) if r"\1" in target else target for target in self.targets]
        return [prefix + inner.replace(match[0], text, 1) for text in texts], int(group[1:] or 0)


@cache
def _tables() -> Any:
    """For each model type its classes and the ends of odd modules' names; all mappings by name; and each class's ties.

    A class without a name stands for all of its type, and `*` for a beginning that names of tied tensors share.
    """
    table = json.loads(files("ckptool.transforms").joinpath("memory_names.json").read_text("utf-8"))
    del table["version"]
    tied = [(text.replace("*", b), names) for text, item in table.pop("ties").items() for b, names in item.items()]
    ties = {name: text.split() for text, names in tied for name in names.split()}
    kinds = {kind: item for names, item in table.items() for kind in names.split()}
    rows = {kind: {n: row for names, row in item[0].items() for n in names.split(" ")} for kind, item in kinds.items()}
    odd = {kind: tuple(item[1]) for kind, item in kinds.items()}
    steps = {name: steps for item in table.values() for name, steps in item[2].items()}
    return rows, odd, steps, ties


def _ties(config: Mapping[str, Any], tree: Mapping[Any, Any]) -> dict[str, str] | None:
    """See `MemoryTree.ties`. In an unknown class, config.json ties the head to the only embedding."""
    table, name, row = _tables()[3], _class_name(config), _class_row(config.get("model_type"), _class_name(config))
    below = [(path, config.get(part)) for path, (part, _) in dict(row[2:] and row[2]).items()]
    parts = [("", config), *((f"{at}.", part) for path, part in below for at in (path, _dotted(row[0], path)) if at)]
    pairs = [path + suffix for path, part in parts for suffix in table.get(_class_name(part), ())]
    says = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    is_tied = any(part.get("tie_word_embeddings") is True for part in says)
    if name not in table and is_tied and (name is None or re.search("LM(Head|$)|Generation", name)):
        matches = [match for key in tree if type(key) is str and (match := _HEAD.fullmatch(key))]
        if any(match["head"] for match in matches):
            return {}
        if len(matches) != 1:
            return None
        pairs = ["lm_head.weight", matches[0][0]]
    tied = zip(pairs[::2], pairs[1::2], strict=True)
    return {a if b in tree else b: b if b in tree else a for a, b in tied if a in tree or b in tree}


_EMBEDDING = "embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared"
_HEAD = re.compile(rf"(?:.*\.)?(?:{_EMBEDDING}|(?P<head>lm_head|output|embed_out))\.weight")


def _class_name(config: Any) -> Any:
    classes = config.get("architectures") if isinstance(config, Mapping) else None
    return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else None


def _steps(config: Mapping[str, Any]) -> list[_Step]:
    """The steps for a configuration, those that only rename first."""
    steps, kind, name = list[_Step](), config.get("model_type"), _class_name(config)
    row = _class_row(kind, name)
    if row == UNKNOWN:
        return [_Step(re.compile(""), [""], UNKNOWN, ("",))]
    for scope, mapping in _scopes(row, config):
        below, prefix = f"{scope}." if scope else "", f"{row[0]}." if row[0] else ""
        prefixes = ("",) if scope is None else (prefix + below, below)
        for pattern, target, *operations in _tables()[2][mapping]:
            names = target if isinstance(target, list) else [target]
            steps.append(_Step(re.compile(pattern), names, "".join(operations), prefixes))
    if row[3:] and row is _tables()[0][kind].get(name):  # the model without its head, whose names have no prefix
        steps.append(_Step(re.compile(rf"^{row[0]}\."), [""], "", ("",)))
    return sorted(steps, key=lambda step: bool(step.operations))


def _class_row(kind: Any, name: Any = None) -> Any:
    """What is known of a class, or of the first class of a type: a prefix, mappings and parts; then 1 where the model
    has no head, so that its own names lack the prefix."""
    rows = _tables()[0].get(kind, {}) if isinstance(kind, str) else {}
    return rows.get(name) or next(iter(rows.values()), ("", {}, {}))


def _scopes(row: Any, config: Mapping[str, Any]) -> Iterator[tuple[str | None, str]]:
    """The mappings of a class and its parts, each with the prefix that it is for: None for all names.

    A part whose configuration is of another type than usual has the mappings of that type.
    """
    _, mappings, parts, *_ = row
    replaced = {}
    for path, (part, usual) in parts.items():
        inner = config.get(part)
        if isinstance(inner, Mapping) and inner.get("model_type", usual) != usual:
            replaced[path] = inner
    for place, mapping in mappings.items():
        if not any(f"{place}.".startswith(f"{path}.") for path in replaced):
            yield None if place == "" else place.removeprefix("."), mapping
    for path, inner in replaced.items():
        below = _class_row(inner.get("model_type"))
        for scope, mapping in _scopes(below, inner) if below != UNKNOWN else ():
            yield _dotted(path, scope), mapping


def _dotted(path: str, name: str | None) -> str:
    return ".".join(filter(None, [path, name]))
