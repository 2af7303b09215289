"""Files of rules: YAML, whose errors name the line.

rules:                                   # the first that matches a key counts
  - 'blocks.{n}.attn.qkv.{p} => layers.{n}.attn.{q,k,v}_proj.{p} : split 0'
  - 'experts.{e}.w1.weight => experts.w1 : stack 0 over e'
variables: {heads: num_attention_heads}  # by --set, else of these, else of config.json beside the file
ranges: {l: layers_per_block}            # how many values a variable has, where arithmetic in names has to be solved
drop: ['*.rotary_emb.inv_freq']          # keys that are left out
tied: {lm_head.weight: wte.weight}       # second names of the old side's tensors, which the new side's files leave out
fill: ['h.{n}.ln.bias => zeros [d0] like h.{n}.ln.weight']   # tensors that only the new side has
optional: ['head.{p} => classifier.{p}', [RULE, RULE]]       # rules that may match nothing; in a list, all or none

How tensor and pipeline parallelism divide a model:

join:                                  # patterns of whole keys; the first that matches counts
  '*.word_embeddings.weight': {vocab: 50257}
  '*.linear_qkv.*': {qkv: {heads: n_heads, kv_heads: n_kv_heads or n_heads, head_dim: 128}}  # of config.json, too
  '*.linear_fc1.*': glu
  '*.linear_proj.weight': row
  '*': replicated
layers: [decoder.layers]               # a pipeline stage counts its own layers from 0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ckptool.checkpoint.paths import matcher
from ckptool.commands import FILE, FOLDER, OUT, Slot, command
from ckptool.errors import UsageError, listed, printable
from ckptool.names.pattern import Arithmetic, Name, parse_arithmetic, parse_name, split_names
from ckptool.names.rules import JOIN_WAYS, LOOK, Operation, Rule, Translation, parse_rules

JOIN_LOOK = "A file of them: join: {'*.linear_fc1.*': glu, '*.linear_fc2.weight': row, '*': replicated}"
FUNCTIONS = ("size", "count", "root")
MAX_RULES = 16 << 20  # bytes of a file of them


def rules_tree(path: str, look: str) -> Any:
    """The tree of a YAML file of rules, with its lines; no object is constructed. look: an example, for errors.

    Raises `UsageError` that points at the line, `FileProblem` if the file cannot be read.
    """
    import yaml

    from ckptool.checkpoint.files import read_small_text

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # with which a few lines stand for millions
                what = "an alias (names that begin with * are in quotes)"
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(None, None, what, mark)
            return super().compose_node(parent, index)

    text = read_small_text(path, "a file of rules", MAX_RULES)
    try:
        return yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        line, problem = 1, str(error)
        if (mark := getattr(error, "problem_mark", None)) is not None:
            line, problem = mark.line + 1, str(getattr(error, "problem", ""))
        elif isinstance(at := getattr(error, "position", None), int):  # of an invalid character: the offset only
            line, problem = text.count("\n", 0, at) + 1, f"the character {text[at : at + 1]!r} cannot be in YAML"
        raise UsageError(f"{path}, line {line}: {problem}", "The rules file is not valid YAML.", look) from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deep", "Rules are not nested like this.", look) from None


def scalar_text(node: Any) -> str:
    """The text of a YAML scalar as it was written; empty for a list or mapping, which no rule can be."""
    return node.value if isinstance(node.value, str) else ""


def line_of(node: Any, path: str) -> str:
    """Where a part of a file stands: `rules.yaml, line 3`."""
    return f"{printable(path)}, line {node.start_mark.line + 1}"


def items(node: Any, path: str, kind: str, look: str = LOOK) -> list[Any]:
    """What is in a list or mapping of a YAML file. Raises `UsageError` for something else in its place."""
    if getattr(node, "id", "") != kind:
        where = line_of(node, path) if node is not None else f"{printable(path)}, line 1"
        raise UsageError(f"{where}: not a {'list' if kind == 'sequence' else 'mapping'}", "", look)
    return list(node.value)


def _mapping(node: Any, path: str, allowed: Collection[str] = (), look: str = LOOK) -> dict[str, Any]:
    """The values of a mapping by their keys, none of which may be there twice. allowed: the keys that may be there."""
    values: dict[str, Any] = {}
    for key, value in items(node, path, "mapping", look):
        name = _name(key, path, look)
        if name in values:
            raise UsageError(f"{line_of(key, path)}: {name!r} appears twice", "Only one can count.", look)
        if allowed and name not in allowed:
            raise UsageError(f"{line_of(key, path)}: {name!r} is none of {listed(list(allowed))}", "", look)
        values[name] = value
    return values


def _name(node: Any, path: str, look: str = JOIN_LOOK) -> str:
    if getattr(node, "id", "") != "scalar":
        raise UsageError(f"{line_of(node, path)}: a list or mapping where a name should be", "", look)
    return str(node.value)


# Rules that change tensors -------------------------------------------------------------------------------------------


def all_rules(texts: Iterable[str], path: str | None = None) -> Translation:
    """The rules in texts, then those of a file with what goes with them."""
    translation = Translation(()) if path is None else read_rules(path)
    return replace(translation, rules=(*(rule for text in texts for rule in parse_rules(text)), *translation.rules))


def renaming(texts: Iterable[str], path: str | None = None) -> tuple[Rule, ...]:
    """The rules in texts, then those of a file, that give keys other names and leave the tensors as they are.

    Raises `UsageError` for one that does more, or that has a variable on the right side alone.
    """
    translation = all_rules(texts, path)
    for rule in translation.rules:
        if not rule.only_renames:
            raise rule.error("it changes tensors", "Here rules can only rename.", _TRANSLATE)
        (old,), (new,) = rule.old, rule.new
        bound = {*old.variables.values()} | {f"{{{name}}}" for sum_ in old.sums for name in sum_.names}
        used = [*new.variables.values(), *(f"{{{name}}}" for sum_ in new.sums for name in sorted(sum_.names))]
        if unbound := [variable for variable in used if variable not in bound]:
            raise rule.error(f"{unbound[0]} is not on the left side", "Every variable on the right must be bound.")
    if not translation.only_renames:
        raise UsageError(f"{path} has rules that do more than rename", "Here rules can only rename.", _TRANSLATE)
    return translation.rules


_TRANSLATE = f"Change tensors: {command('translate', FILE, rules_file=Slot('RULES'), out=OUT)}"


def read_rules(path: str) -> Translation:
    """The rules of a YAML file, also a plain list of them, or a mapping of OLD to NEW. Raises `UsageError` that points
    at the line, `FileProblem`."""
    node = rules_tree(path, LOOK)
    pairs = node.value if getattr(node, "id", "") == "mapping" else []
    if pairs and scalar_text(pairs[0][0]) not in _SECTIONS:
        return Translation(_rules(node, path))
    return translation_of(node, path)


def translation_of(node: Any, path: str, other: Sequence[str] = ()) -> Translation:
    """The rules in a YAML tree. other: sections that others read."""
    if getattr(node, "id", "") == "sequence":
        return Translation(_rules(node, path))
    if getattr(node, "id", "") != "mapping":
        raise UsageError(f"{path}, line 1: no rules", "A file of rules is a list, or has `rules:`.", LOOK)
    sections = _mapping(node, path, (*_SECTIONS, *other))
    parts = {name: _SECTIONS[name](value, path) for name, value in sections.items() if name in _SECTIONS}
    parts["rules"] = (*parts.get("rules", ()), *parts.pop("optional", ()))
    return Translation(path=path, **parts)


def _rules(node: Any, path: str) -> tuple[Rule, ...]:
    """The rules of a list, or of a mapping of OLD to NEW."""
    if getattr(node, "id", "") == "mapping":
        texts = [(f"{scalar_text(old)} => {scalar_text(new)}", line_of(old, path)) for old, new in node.value]
    else:
        texts = [(_rule_text(item), line_of(item, path)) for item in items(node, path, "sequence")]
    return tuple(rule for text, place in texts for rule in parse_rules(text, place))


def _rule_text(node: Any) -> str:
    if getattr(node, "id", "") == "mapping" and len(node.value) == 1:  # `- a => b : transpose`, without quotes
        return " : ".join(scalar_text(part) for part in node.value[0])
    return scalar_text(node)


def _optional(node: Any, path: str) -> tuple[Rule, ...]:
    groups: list[list[Rule]] = []
    for item in items(node, path, "sequence"):
        is_group = getattr(item, "id", "") == "sequence"
        rules = _rules(item, path) if is_group else parse_rules(_rule_text(item), line_of(item, path))
        groups += [[*rules]] if is_group else [[rule] for rule in rules]
    return tuple(replace(rule, group=group) for group, rules in enumerate(groups, start=1) for rule in rules)


def _expressions(node: Any, path: str) -> dict[str, Arithmetic]:
    expressions = {}
    for key, value in items(node, path, "mapping"):
        try:
            expressions[scalar_text(key)] = parse_arithmetic(scalar_text(value), FUNCTIONS)
        except UsageError as error:
            raise error.within(line_of(key, path)) from None
    return expressions


def _patterns(node: Any, path: str) -> tuple[Rule, ...]:
    return tuple(dropping(scalar_text(item), line_of(item, path)) for item in items(node, path, "sequence"))


def dropping(pattern: str, place: str = "") -> Rule:
    """The rule that leaves out the keys of a pattern. Raises `UsageError` for an invalid expression."""
    return Rule(pattern, place, (Name(pattern, matches=matcher(pattern)),), ())


def _ties(node: Any, path: str) -> tuple[tuple[str, str], ...]:
    return tuple((scalar_text(name), scalar_text(other)) for name, other in items(node, path, "mapping"))


_FILL = re.compile(r"(\S+)\s+=>\s+zeros\s+\[([^\]]*)\]\s+like\s+(\S+)")


def _fills(node: Any, path: str) -> tuple[Rule, ...]:
    rules = []
    for item in items(node, path, "sequence"):
        match, place = _FILL.fullmatch(text := scalar_text(item)), line_of(item, path)
        if match is None:
            what = f"{place}: {text!r} is not of the form NEW => zeros [SIZE, …] like OLD"
            raise UsageError(what, "d0, d1, … are the sizes of the old tensor.", LOOK)
        new, sizes, old = match.groups()
        try:
            zeros = Operation("zeros", tuple(parse_arithmetic(size) for size in sizes.split(",") if size.strip()))
            rules += [Rule(text, place, (parse_name(old),), (parse_name(name),), (zeros,)) for name in split_names(new)]
        except UsageError as error:
            raise error.within(place) from None
    return tuple(rules)


# Rules that join ranks -----------------------------------------------------------------------------------------------


def read_join_rules(path: str) -> Translation:
    """The rules of a YAML file that only join ranks. Raises as `read_rules`, and `UsageError` for others."""
    node = rules_tree(path, JOIN_LOOK)
    if "rules" in [scalar_text(key) for key, _ in items(node, path, "mapping", JOIN_LOOK)]:
        what = f"{path} has rules that change tensors, and convert only joins ranks"
        fix = f"Join and change in one step: {command('translate', FOLDER, rules_file=FILE, out=OUT)}"
        raise UsageError(what, "", fix)
    sections = _mapping(node, path, _JOIN, JOIN_LOOK)
    return Translation((), path=path, **{name: _JOIN[name](value, path) for name, value in sections.items()})


def _join(pattern: str, node: Any, path: str) -> Rule:
    """`PATTERN: WAY`, `PATTERN: {WAY: NUMBER}` or `PATTERN: {WAY: {NAME: NUMBER, …}}`."""
    place, argument = line_of(node, path), None
    if getattr(node, "id", "") == "mapping" and len(node.value) == 1:
        ((way, argument),) = _mapping(node, path, look=JOIN_LOOK).items()
    else:
        way = _name(node, path)
    if way not in JOIN_WAYS:
        raise UsageError(f"{place}: cannot join by {way!r}", f"There are {listed(list(JOIN_WAYS))}.", JOIN_LOOK)
    needed = JOIN_WAYS[way].numbers
    values = {}
    if getattr(argument, "id", "") == "mapping":
        values = _mapping(argument, path, look=JOIN_LOOK)
    elif argument is not None:
        values = {needed[0] if len(needed) == 1 else "": argument}
    texts = {name: _name(value, path) for name, value in values.items()}
    if texts.keys() != set(needed) or not all(text if name == "like" else _COUNT(text) for name, text in texts.items()):
        what = f"{place}: {way} takes {listed(needed) if needed else 'no numbers'}"
        raise UsageError(what, "Each is a whole number above zero." if needed else "", JOIN_LOOK)
    counts = {name: int(text) for name, text in texts.items() if name != "like" and text.isdigit()}
    if counts.get("heads", 0) % counts.get("kv_heads", 1):
        raise UsageError(f"{place}: heads is not a multiple of kv_heads", "Each serves the same number.")
    try:
        numbers = tuple(parse_arithmetic(texts[name]) for name in needed if name != "like")
        matched = Name(pattern, matches=matcher(pattern))
    except UsageError as error:
        raise error.within(place) from None
    return Rule(f"{pattern}: {way}", place, (matched,), (), (Operation(way, numbers, like=texts.get("like", "")),))


_COUNT = re.compile("[1-9][0-9]{0,11}|.*[^0-9].*", re.DOTALL).fullmatch  # a number above zero, or an expression


def _prefixes(node: Any, path: str) -> tuple[str, ...]:
    """The names in a list, or one by itself."""
    names = node.value if getattr(node, "id", "") == "sequence" else [node]
    return tuple(_name(item, path).removesuffix(".") for item in names)


_JOIN: dict[str, Callable[[Any, str], Any]] = {
    "join": lambda node, path: tuple(_join(*item, path) for item in _mapping(node, path, look=JOIN_LOOK).items()),
    "layers": _prefixes,
}
_SECTIONS: dict[str, Callable[[Any, str], Any]] = {
    "rules": _rules,
    "optional": _optional,
    "variables": _expressions,
    "ranges": _expressions,
    "drop": _patterns,
    "drop_new": _patterns,
    "tied": _ties,
    "tied_new": _ties,
    "fill": _fills,
    **_JOIN,
}
