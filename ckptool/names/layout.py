"""The layouts that ship: one YAML file each in `names/layouts/`, a file of rules with a header.

layout: names of the two sides, `old` and `new`, and the keys that identify a set of weights of each:

title: timm ViT ↔ transformers ViT
source: where the facts are from
old: {name: timm, has: [blocks.0.attn.qkv.weight], refuse: {'*.q_norm.*': normalised queries have no place there}}
new: {name: transformers, base: vit., has: [vit.embeddings.cls_token]}
notes: [what the new side's configuration needs]
models: [vit]  # that they are for, as `model_type` of a config.json says it
rules: [...]

`has`, `lacks` and `refuse` also take equations of sizes, with = or !=: "size('NAME', 0) = 3 * size('NAME', 1)"; those
in `refuse` also of numbers in the configuration. `needs` has fields of the configuration with the values for which the
rules are right, `{hidden_act: [silu]}`; of `a|b` the first that is there counts, and neither has to be.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Annotated, Any, NamedTuple

from ckptool.checkpoint.paths import matcher
from ckptool.commands import FILE, OUT, Command, arg, command
from ckptool.conventions.state_dicts import without_wrappers
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError, counted, listed
from ckptool.facts import LIVE, Report, Table, Told, bold, dataclass, dim, replace
from ckptool.names.pattern import Name, Unbound, parse_arithmetic, parse_name
from ckptool.names.rule_files import FUNCTIONS, dropping, items, rules_tree, scalar_text, translation_of
from ckptool.names.rules import LOOK, Translation
from ckptool.names.steps import Scope

FOLDER = "layouts"
LIST = Command(("ckptool", "translate", "--list"), "ckptool.layouts()")
_HEADER = ("title", "source", "old", "new", "notes", "models", "same_config")


class Refused(NamedTuple):
    """A pattern of keys, or an equation, that the rules have no place for."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class LayoutSide:
    """One side of a layout. has: names that match a key each, and equations that hold.  lacks: those that must not.

    base: a prefix that all names may lack: in a model without its head, or in a file of its own.
    needs: fields of the configuration, and the values that each may have, as texts.
    """

    name: str
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    refuse: tuple[Refused, ...] = ()
    base: str = ""
    needs: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def is_of(self, node: Mapping[Any, Any]) -> bool:
        """True for a set of weights with the names of this side."""
        has = bool(self.has) and all(_holds(text, node) for text in self.has)
        return has and not any(_holds(text, node) for text in self.lacks)

    def check(self, node: Mapping[Any, Any], config: Mapping[str, Any]) -> None:
        """Raises `Conflict` for what the rules have no place for."""
        for pattern, why in self.refuse:
            matches = matcher(pattern)
            keys = [key for key in node if type(key) is str and matches(key)]
            if keys or (_EQUATION.fullmatch(pattern) and _holds(pattern, node, config)):
                what = f"{listed(keys, 2) or pattern}: {why}"
                raise Conflict(what, f"The layout refuses {pattern}. Nothing was written.")
        for names, values in self.needs:
            name = next((field for field in names.split("|") if _field(config, field)), "")
            if name and not _is_one_of(_field(config, name)[0], values):
                what = f"{name} is {json.dumps(_field(config, name)[0], default=str)[:60]} in the configuration"
                why = f"Values with which the layout is right: {listed(values)}. Nothing was written."
                fix = "If that configuration belongs to another model, translate the weights without it."
                raise Conflict(what, why, fix)

    def bare(self) -> LayoutSide:
        """The side with its names without the base."""
        has, lacks = (tuple(map(self._without_base, texts)) for texts in (self.has, self.lacks))
        refuse = tuple(Refused(self._without_base(pattern), why) for pattern, why in self.refuse)
        return replace(self, has=has, lacks=lacks, refuse=refuse)

    def _without_base(self, text: str) -> str:
        return text.replace(f"'{self.base}", "'") if _EQUATION.fullmatch(text) else text.removeprefix(self.base)


def _field(config: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """The value of a field, `text_config.hidden_act`, if it is there."""
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ()
        value = value[part]
    return (value,)


def _is_one_of(value: Any, texts: Sequence[str]) -> bool:
    if isinstance(value, (list, tuple)):  # one for each block
        return all(_is_one_of(item, texts) for item in value)
    for text in texts if type(value) in (int, float) else ():
        with suppress(ValueError):
            if float(text) == value:
                return True
    return (value if isinstance(value, str) else json.dumps(value, default=str)) in texts


_RANKED = re.compile(r"(.+) \[(\d{1,3})\]")
_EQUATION = re.compile(r"(.+) (!?=) (.+)")


def _holds(text: str, node: Mapping[Any, Any], config: Mapping[str, Any] | None = None) -> bool:
    """True where a key has the name, or the equation of sizes holds. `NAME [3]`: and has so many dimensions."""
    if (equation := _EQUATION.fullmatch(text)) is not None:
        scope = Scope({}, {}, config or {}, node)
        try:
            sides = (parse_arithmetic(side, FUNCTIONS) for side in equation.group(1, 3))
            left, right = (side.value(scope.lookup, scope.functions) for side in sides)
        except Unbound:
            return False
        return (left == right) == (equation[2] == "=")
    name, rank = match.groups() if (match := _RANKED.fullmatch(text)) else (text, None)
    pattern = parse_name(name).pattern
    keys = [name] if name in node else [key for key in node if type(key) is str and pattern.fullmatch(key)]
    return any(rank is None or len(getattr(node[key], "shape", None) or ()) == int(rank) for key in keys)


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """A file of rules between two layouts of one model. name: of the file, for `--rules`.  source: of its facts.

    notes: what the new side needs beside the weights. The names of both sides are empty in a file that has no header.
    same_config: one library loads both sides, with one configuration.
    """

    name: str
    title: str
    source: str
    old: LayoutSide
    new: LayoutSide
    notes: tuple[str, ...]
    translation: Annotated[Translation, LIVE]
    file: str
    models: tuple[str, ...] = ()
    same_config: bool = False

    def side_of(self, node: Mapping[Any, Any], back: bool, config: Mapping[str, Any]) -> int:
        """The index in `sides` of the side that a set of weights is of. back: it must not be the first.
        config: the one beside them.

        Raises `NoMatch` for weights of neither side, or of the side that they would become, `Conflict` for those that
        the rules have no place for.
        """
        if not self.old.has and not self.new.has:
            return int(back)
        sides = enumerate(self.sides())
        matches = [(number, side) for number, (side, is_new) in sides if is_new >= back and side.is_of(node)]
        if not matches:
            raise self._not_of(node, self.sides()[back][0])
        model = config.get("model_type")
        if self.models and isinstance(model, str) and model not in self.models:
            what = f"{self.name} is for {listed(self.models)}, and config.json says {model[:60]!r}"
            why = "Models with the same names may compute something else with them. Nothing was written."
            fix = f"If they do not, use the weights without that config.json, and {arg('set')} numbers"
            raise Conflict(what, why, fix)
        matches[0][1].check(node, config)
        return matches[0][0]

    def rules_for(self, side: int) -> Translation:
        """The rules for weights of a side, by its index in `sides`."""
        is_new = self.sides()[side][1]
        rules = self.translation.reversed() if is_new else self.translation
        base = (self.new if is_new else self.old).base if side > 1 else ""

        def bare(name: Name) -> Name:  # names that do not begin with the base are as they were
            return replace(parse_name(name.text.removeprefix(base)), digits=name.digits)

        if not base:
            return rules
        return replace(
            rules,
            rules=tuple(replace(rule, old=tuple(map(bare, rule.old))) for rule in rules.rules),
            drop=tuple(dropping(dropped.text.removeprefix(base), dropped.place) for dropped in rules.drop),
            unfill=tuple(replace(fill, new=tuple(map(bare, fill.new))) for fill in rules.unfill),
            tied=tuple((name.removeprefix(base), other.removeprefix(base)) for name, other in rules.tied),
        )

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of the rules: of the configuration, or `--set`."""
        return tuple(self.translation.variables)

    def sides(self) -> list[tuple[LayoutSide, bool]]:
        """The old side, the new one, and those with a base also without it; True for those of the new."""
        with_base = [(self.old, False), (self.new, True)]
        return with_base + [(side.bare(), is_new) for side, is_new in with_base if side.base]

    def _not_of(self, node: Mapping[Any, Any], side: LayoutSide) -> CkptoolError:
        """The error for weights of another layout, or of this one below a wrapper."""
        if any(candidate.is_of(node) for candidate, _ in self.sides()):  # of the first side, which it must not be
            what, reverse = f"the weights are already those of {self.old.name}", arg(reverse=True)
            return NoMatch(what, f"{reverse} converts from {self.new.name}.", f"Leave out {reverse}.")
        bare = {without_wrappers(key): value for key, value in node.items() if type(key) is str}
        if bare.keys() != node.keys() and any(side.is_of(bare) for side, _ in self.sides()):
            what, why = "the keys begin with a wrapper's prefix", "Without it they fit the layout."
            return Conflict(what, why, f"Remove it first: {command('strip-module', FILE, out=OUT)}")
        lacking = next((text for text in side.has if not _holds(text, node)), "")
        without = f": there is no {lacking}" if lacking else ""
        what = f"the weights do not have the layout {self.name}{without}"
        sentences = (f"{each.name} weights have {listed(each.has, 4)}" for each in (self.old, self.new))
        return NoMatch(what, f"{'; '.join(sentences)}. Nothing was written.")


def read_layout(path: str) -> LayoutRules:
    """The rules of a YAML file, with or without a header. Raises `UsageError` that points at the line."""
    node = rules_tree(path, LOOK)
    name = os.path.splitext(os.path.basename(path))[0]
    header = {}
    if getattr(node, "id", "") == "mapping":
        header = {scalar_text(key): value for key, value in node.value if scalar_text(key) in _HEADER}
    old, new = (_side(header[side], path) if side in header else LayoutSide("") for side in ("old", "new"))
    notes, models = (
        tuple(map(scalar_text, items(header[section], path, "sequence"))) if section in header else ()
        for section in ("notes", "models")
    )
    translation = translation_of(node, path, _HEADER)
    if old.has or new.has:
        translation = replace(translation, of_layout=True, complete=True)
    title, source = (scalar_text(header[section]) if section in header else "" for section in ("title", "source"))
    return LayoutRules(name, title, source, old, new, notes, translation, path, models, "same_config" in header)


def _side(node: Any, path: str) -> LayoutSide:
    try:
        parts = {scalar_text(key): value for key, value in node.value}
        has, lacks, refuse, needs = (
            parts[name].value if name in parts else () for name in ("has", "lacks", "refuse", "needs")
        )
        refused = tuple(Refused(scalar_text(key), scalar_text(why)) for key, why in refuse)
        base = scalar_text(parts["base"]) if "base" in parts else ""
        needed = tuple((scalar_text(key), tuple(map(scalar_text, values.value))) for key, values in needs)
        names = tuple(map(scalar_text, has)), tuple(map(scalar_text, lacks))
        return LayoutSide(scalar_text(parts["name"]), *names, refused, base, needed)
    except (KeyError, TypeError, ValueError, AttributeError):
        where = f"{path}, line {node.start_mark.line + 1}"
        raise UsageError(f"{where}: a side has name, has, lacks, refuse, needs and base", "", LOOK) from None


@dataclass(frozen=True, slots=True, repr=False)
class LayoutList(Report):
    """The layouts that ship, by name."""

    schema = "layouts/2"

    layouts: tuple[LayoutRules, ...]

    def told(self) -> Told:
        """A line for each layout; of one alone, what identifies its sides, and what the rules refuse or need."""
        if len(self.layouts) != 1:
            yield Table([(bold(each.name), each.title) for each in self.layouts], indent=0, hang=24)
            hint = "what one needs and refuses: ckptool translate --list --rules NAME"
            yield (dim(f"{counted(len(self.layouts), 'layout')}: translate FILE --rules NAME -o OUT; {hint}"),)
            return
        (layout,) = self.layouts
        yield bold(layout.name), f": {layout.title}"
        for side in (layout.old, layout.new):
            without = f", without {', '.join(side.lacks)}" if side.lacks else ""
            yield f"  {side.name}: {', '.join(side.has)}{without}"
            yield from dict.fromkeys(f"    refused: {why}" for _, why in side.refuse)
        if layout.variables:
            yield f"  of the configuration, or --set: {', '.join(layout.variables)}"
        yield from (f"  {note}" for note in layout.notes)
        yield (dim(f"  facts: {layout.source}"),)


@cache
def shipped() -> dict[str, str]:
    """The layouts that ship: name -> path of the file."""
    folder = str(resources.files("ckptool.names").joinpath(FOLDER))
    names = sorted(name.removesuffix(".yaml") for name in os.listdir(folder) if name.endswith(".yaml"))
    return {name: os.path.join(folder, f"{name}.yaml") for name in names}


@cache
def shipped_layout(name: str) -> LayoutRules:
    """The layout of that name. Raises `UsageError` for an unknown one."""
    if name not in shipped():
        what = f"{name!r} is neither a file nor a shipped layout"
        raise UsageError(what, f"There are {listed(list(shipped()), 20)}.", f"See them: {LIST}")
    return read_layout(shipped()[name])


def layout_or_file(name: str | os.PathLike[str]) -> LayoutRules:
    """The rules in a file, or the layout of that name. Raises `FileProblem` for what is neither."""
    path = os.fspath(name)
    is_name = path in shipped() or not (os.path.lexists(path) or os.sep in path or "." in path)
    return shipped_layout(path) if is_name and not os.path.isfile(path) else read_layout(path)


def layouts_of(node: Mapping[Any, Any]) -> list[tuple[LayoutRules, bool]]:
    """The layouts whose names a set of weights has, and whether it is the new side of each."""
    layouts = map(shipped_layout, shipped())
    return [(layout, is_new) for layout in layouts for side, is_new in layout.sides() if side.is_of(node)]


def translation_to(weights: Mapping[Any, Any], model: Mapping[str, Any]) -> tuple[str, Command] | None:
    """The command that turns weights of one side of a layout into those of a model of the other, and why; None if there
    is no such layout.  model: its names, with whatever has a shape."""
    for layout, is_new in layouts_of(weights):
        if any(side.is_of(model) for side, other in layout.sides() if is_new != other):
            names = (layout.new.name, layout.old.name) if is_new else (layout.old.name, layout.new.name)
            why = f"names and shapes are those of {names[0]}, and the model has those of {names[1]} ({layout.title})"
            return why, command("translate", FILE, rules_file=layout.name, out=OUT)
    return None
