"""A file of rules that says how tensor and pipeline parallelism divide a model: YAML, the rules of `join` in order.

join:                                  # patterns of whole keys; the first that matches counts
  '*.word_embeddings.weight': {vocab: 50257}
  '*.linear_qkv.*': {qkv: {heads: 32, kv_heads: 8, head_dim: 128}}
  '*.linear_fc1.*': glu
  '*.linear_proj.weight': row
  '*': replicated
layers: [decoder.layers]               # a pipeline stage counts its own layers from 0
unstack: [decoder.layers]              # one tensor for all layers becomes one for each

A number may be an expression of the names in the model's configuration: `{heads: n_kv_heads or n_heads}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint.patterns import Matcher, matcher
from ckptool.commands import FILE, FOLDER, OUT, command
from ckptool.errors import UsageError, listed
from ckptool.names.arithmetic import Arithmetic, Lookup, parse_arithmetic
from ckptool.names.rule_files import rules_tree

JOIN_LOOK = "A file of them: join: {'*.linear_fc1.*': glu, '*.linear_fc2.weight': row, '*': replicated}"
# The numbers that a way of joining needs.
KINDS: dict[str, tuple[str, ...]] = {
    "column": (),
    "row": (),
    "vocab": ("rows",),
    "glu": (),
    "qkv": ("heads", "kv_heads", "head_dim"),
    "qkv_blocks": ("heads", "kv_heads"),
    "heads": ("heads",),
    "width": ("like",),
    "replicated": (),
    "first": (),
    "skip": (),
}
JOIN_SECTIONS = ("join", "layers", "unstack")
_NUMBER = re.compile("[1-9][0-9]{0,11}").fullmatch


@dataclass(frozen=True, slots=True)
class JoinRule:
    """The way in which the tensors whose names match a pattern are divided. place: where it was read.

    named: numbers that are expressions, until `bound`.  like: the name of a tensor that the rule is about.
    """

    pattern: str
    kind: str
    numbers: Mapping[str, int]
    place: str
    matches: Matcher
    named: Mapping[str, Arithmetic] = field(default_factory=dict)
    like: str = ""

    def bound(self, lookup: Lookup) -> JoinRule:
        """The rule with all of its numbers. Raises `UsageError` for a name without one."""
        try:
            numbers = {**self.numbers, **{key: each.value(lookup) for key, each in self.named.items()}}
        except UsageError as error:
            raise error.within(self.place) from None
        if any(number < 1 for number in numbers.values()):
            raise UsageError(f"{self} has {numbers}", "Each is a whole number above zero.", JOIN_LOOK)
        return replace(self, numbers=numbers, named={})

    def __str__(self) -> str:
        return f"the rule {self.pattern!r}: {self.kind} ({self.place})"


@dataclass(frozen=True, slots=True)
class JoinRules:
    """A file of rules. layers, unstack: prefixes of names, after which the number of a layer stands or is to stand.

    optional: rules need not match, as those for any model of a kind.
    """

    path: str
    join: tuple[JoinRule, ...] = ()
    layers: tuple[str, ...] = ()
    unstack: tuple[str, ...] = ()
    optional: bool = False


def read_join_rules(path: str) -> JoinRules:
    """The rules of a YAML file. Raises `UsageError` that points at the line, `FileProblem` for an unreadable file."""
    found = _pairs(rules_tree(path, JOIN_LOOK), f"{path}, line 1")
    if "rules" in [key for key, _, _ in found]:
        what = f"{path} has rules that change tensors, and convert only joins ranks"
        raise UsageError(
            what, "", f"Join and change in one step: {command('translate', FOLDER, rules_file=FILE, out=OUT)}"
        )
    for key, _, place in found:
        if key not in JOIN_SECTIONS:
            raise UsageError(f"{place}: {key!r} is none of {listed(JOIN_SECTIONS)}", "", JOIN_LOOK)
    return join_sections({key: node for key, node, _ in found}, path)


def join_sections(sections: Mapping[str, Any], path: str) -> JoinRules:
    """The rules in the sections `join`, `layers` and `unstack` of a file."""
    parts: dict[str, Any] = {}
    for key, node in sections.items():
        place = f"{path}, line {node.start_mark.line + 1}"
        parts[key] = tuple(_rule(*each) for each in _pairs(node, place)) if key == "join" else _texts(node, place)
    return JoinRules(path, **parts)


def _pairs(node: Any, place: str) -> list[tuple[str, Any, str]]:
    """The keys of a mapping, each once, with their values and where they stand."""
    if getattr(node, "id", "") != "mapping":
        raise UsageError(f"{place}: not a mapping of names", "", JOIN_LOOK)
    file = place.rpartition(", line ")[0]
    found = [(_text(key, place), value, f"{file}, line {key.start_mark.line + 1}") for key, value in node.value]
    seen: set[str] = set()
    for key, _, where in found:
        if key in seen:
            raise UsageError(f"{where}: {key!r} stands there twice", "Only one can count.", JOIN_LOOK)
        seen.add(key)
    return found


def _text(node: Any, place: str) -> str:
    if getattr(node, "id", "") != "scalar":
        raise UsageError(f"{place}: a list or mapping where a name should be", "", JOIN_LOOK)
    return str(node.value)


def _texts(node: Any, place: str) -> tuple[str, ...]:
    """The names in a list, or one by itself."""
    nodes = node.value if getattr(node, "id", "") == "sequence" else [node]
    return tuple(_text(each, place).removesuffix(".") for each in nodes)


def _expression(text: str, place: str) -> Arithmetic:
    try:
        return parse_arithmetic(text)
    except UsageError as error:
        raise error.within(place) from None


def _rule(pattern: str, node: Any, place: str) -> JoinRule:
    """`PATTERN: KIND`, `PATTERN: {KIND: NUMBER}` or `PATTERN: {KIND: {NAME: NUMBER, …}}`."""
    given: Any = None
    if getattr(node, "id", "") == "mapping" and len(node.value) == 1:
        ((kind, given, _),) = _pairs(node, place)
    else:
        kind = _text(node, place)
    if kind not in KINDS:
        raise UsageError(f"{place}: {kind!r} is no way of joining", f"There are {listed(list(KINDS))}.", JOIN_LOOK)
    needed = KINDS[kind]
    texts = {} if given is None else {needed[0] if len(needed) == 1 else "": given}
    if getattr(given, "id", "") == "mapping":
        texts = {key: value for key, value, _ in _pairs(given, place)}
    words = {key: _text(value, place) for key, value in texts.items()}
    numbers = {key: int(text) for key, text in words.items() if _NUMBER(text)}
    like = words.get("like", "")
    named = {
        key: _expression(text, place) for key, text in words.items() if key != "like" and re.search("[^0-9]", text)
    }
    if {*numbers, *named, *["like"] * bool(like)} != set(needed) or len(texts) != len(needed):
        what = f"{place}: {kind} takes {listed(needed) if needed else 'no numbers'}"
        raise UsageError(what, "Each is a whole number above zero." if needed else "", JOIN_LOOK)
    if numbers.get("heads", 0) % numbers.get("kv_heads", 1):
        raise UsageError(f"{place}: heads is not a multiple of kv_heads", "Each of those serves equally many.")
    try:
        return JoinRule(pattern, kind, numbers, place, matcher(pattern), named, like)
    except UsageError as error:
        raise UsageError(f"{place}: {error.what}", "It is what stands after re:.", JOIN_LOOK) from None
