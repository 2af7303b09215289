"""Which names go into which steps: the rules that rename, change, join or leave out tensors are all matched here.

The numbers that names stand for are in a scope: those that were set, the rules' variables, the model's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from math import isqrt, prod
from typing import Any

from ckptool.commands import arg
from ckptool.errors import Conflict, UsageError, counted, listed
from ckptool.facts import dataclass, field
from ckptool.names.pattern import Arithmetic, Functions, Groups, Lookup, Unbound, parse_name, unbound
from ckptool.names.rules import WHOLE_KEY, Rule, refuse_idle

Number = Callable[[Arithmetic], int]
"""The value of an expression, with the variables of one match and of the rules."""


@dataclass(slots=True)
class Scope:
    """Names and their numbers for one set of weights. given: by `--set`.  variables: of the rules, each of which is
    computed from the configuration, the shapes (`size('NAME', AXIS)`), how many keys there are
    (`count('NAME.{n}.*')`), and the variables before it.
    """

    given: Mapping[str, int]
    variables: Mapping[str, Arithmetic]
    config: Mapping[str, Any]
    node: Mapping[Any, Any]
    used: set[str] = field(default_factory=set)
    _found: dict[str, int | UsageError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, expression in self.variables.items():
            try:
                self._found[name] = expression.value(self.lookup, self.functions)
            except Unbound as error:  # a name that the variable is computed from: the variable itself can be set
                self._found[name] = error if error.of_rules else unbound(name, expression.text, error.name)
            except UsageError as error:
                self._found[name] = error

    def lookup(self, name: str) -> int | None:
        """The number of a name; None where it has none. Raises what computing a variable raised."""
        if name in self.given:
            self.used.add(name)
            return self.given[name]
        if (value_or_error := self._found.get(name)) is not None:
            if isinstance(value_or_error, UsageError):
                raise value_or_error
            return value_or_error
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return int(value) if isinstance(value, int) else None

    @property
    def functions(self) -> Functions:
        def size(name: Any = None, axis: Any = None, *extra: Any) -> int | None:
            shape = getattr(self.node.get(name), "shape", None) or ()
            return shape[axis] if not extra and type(axis) is int and -len(shape) <= axis < len(shape) else None

        def count(name: Any = "", *extra: Any) -> int | None:
            """How many values the first variable of a name has among the keys; None where no key matches."""
            parsed = parse_name(str(name))
            group = next(iter(parsed.variables), None)
            matches = ((key, parsed.pattern.fullmatch(key)) for key in self.node if type(key) is str)
            values = {match[group] if group else key for key, match in matches if match is not None}
            return None if extra else len(values) or None

        def root(number: Any = None, *extra: Any) -> int | None:
            return isqrt(number) if not extra and type(number) is int and number >= 0 else None

        return {"size": size, "count": count, "root": root}

    def ranges(self, ranges: Mapping[str, Arithmetic]) -> dict[str, int]:
        """How many values each variable with a range has, as far as that is known."""
        return {name: min(1 << 16, max(0, size.value(self.lookup, self.functions))) for name, size in ranges.items()}

    def number(self, groups: Groups) -> Number:
        """A function that evaluates expressions where the variables of names stand for these texts."""

        def lookup(name: str) -> int | None:
            text = groups.get(f"v_{name}", "")
            return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else self.lookup(name)

        return lambda expression: expression.value(lookup)

    def refuse_unused(self, names: Collection[str]) -> None:
        """Raises `UsageError` for a name that was set and is in no rule. names: those in the rules."""
        if idle := [name for name in self.given if name not in names]:
            what = f"{arg(set=idle[0])}: no rule has a variable of that name"
            raise UsageError(what, f"The rules have {listed(sorted(names)) or 'none'}.")


# Steps ---------------------------------------------------------------------------------------------------------------

Overs = tuple[tuple[str, int], ...]
"""The variables that a step puts together, with their numbers for one of its tensors."""
_TOGETHER = "They become one tensor, but one of them is missing. Nothing was written."


@dataclass(slots=True)
class Step:
    """One use of a rule: for one value of the variables that its sides share.

    inputs: the keys, for each value of the variables that are put together.  outputs: the new keys.  shapes: of the
    tensors, in the order of `keys`.  lost: what `--reverse` would not restore.
    """

    rule: Rule
    groups: Groups
    inputs: dict[Overs, list[str | None]]
    outputs: list[str] = field(default_factory=list)
    shapes: tuple[tuple[int, ...], ...] = ()
    lost: str = ""

    @property
    def keys(self) -> list[str]:
        return [key for _, keys in sorted(self.inputs.items()) for key in keys if key is not None]

    def with_numbers(self, overs: Overs) -> dict[str, str]:
        """The groups of one of the tensors that it puts together, or that come out of it."""
        return {**self.groups, **{f"v_{name}": str(number) for name, number in overs}}

    def names(self, lookup: Lookup, overs: Overs = ()) -> list[str]:
        """The new names; those of one of the tensors that come out of it, where each has numbers of its own."""
        groups = self.with_numbers(overs)
        return [name.fill(groups, lookup) for name in self.rule.new]


def steps_of(
    rules: Iterable[Rule],
    names: Iterable[str],
    scope: Scope | None = None,
    *,
    ranges: Mapping[str, int] = {},
    all_names: Collection[object] = (),
) -> tuple[list[Step], list[str]]:
    """The steps for some names, each taken by the first rule that matches it, and the names that no rule takes.

    scope, ranges: of the numbers in names.  all_names: as some rules want another name beside theirs.
    Raises `Conflict` for a step that lacks one of its names, `UsageError`, which points at the rule, where one has two.
    """
    scope = scope or Scope({}, {}, {}, {})
    # Rules for one key each, of which there may be as many as keys, are found by it; the others are tried in turn.
    exact, general = dict[str, list[tuple[int, str, str, Rule, int]]](), list[tuple[int, str, str, Rule, int]]()
    old_names = ((rule, number, name) for rule in rules for number, name in enumerate(rule.old))
    for place, (rule, number, name) in enumerate(old_names):
        begin, end = name.ends
        candidates = exact.setdefault(begin, []) if name.pieces == (begin,) else general
        candidates.append((place, begin, end, rule, number))
    steps, rest = dict[object, Step](), list[str]()
    for key in names:
        for _, begin, end, rule, number in sorted([*exact[key], *general]) if key in exact else general:
            if not (key.startswith(begin) and key.endswith(end)):
                continue
            try:
                groups = rule.old[number].match(key, scope.lookup, ranges)
                if groups is None or (rule.beside[0] and rule.beside[0].fill(groups, scope.lookup) not in all_names):
                    continue
            except UsageError as error:
                raise rule.within(error) from None
            overs = tuple((name, int(groups[f"v_{name}"])) for name in sorted(rule.over)) if rule.over else ()
            if overs:
                groups = {group: text for group, text in groups.items() if group[2:] not in rule.over}
            step_key = (id(rule), *sorted(groups.items()))
            if step_key not in steps:
                steps[step_key] = Step(rule, groups, {})
            keys = steps[step_key].inputs.setdefault(overs, [None] * len(rule.old))
            if keys[number] is not None:
                what = f"{keys[number]} and {key} are both {rule.old[number].text}"
                raise rule.error(what, "The rule takes only one.")
            keys[number] = key
            break
        else:
            rest.append(key)
    for step in steps.values():  # one may lack some of the tensors that belong together
        rule = step.rule
        for overs, keys in step.inputs.items():
            if None in keys:
                lacking = rule.old[keys.index(None)].fill(step.with_numbers(overs))
                present = listed([key for key in keys if key is not None], 3)
                raise rule.error(f"there is {present}, but no {lacking}", _TOGETHER, kind=Conflict)
        over = sorted(rule.over)
        counts = [1 + max(dict(overs)[name] for overs in step.inputs) for name in over]
        if over and len(step.inputs) != prod(counts):
            spans = (range(min(count, len(step.inputs) + 1)) for count in counts)  # among which one is missing
            possible = (tuple(zip(over, values, strict=True)) for values in product(*spans))
            absent = next(overs for overs in possible if overs not in step.inputs)
            missing = ", ".join(f"{name} = {number}" for name, number in absent)
            what = f"there is nothing for {missing}, of {counted(prod(counts), 'tensor')}"
            raise rule.error(what, _TOGETHER, kind=Conflict)
    return [*steps.values()], rest


def renamed(rules: Sequence[Rule], names: Iterable[str]) -> dict[str, tuple[Rule, str]]:
    """The rule that takes each of the names, of rules that only rename, and its new name; nothing for the others.

    Raises `UsageError`, which points at the rule, where a number would be below zero.
    """
    renames = {}
    for step in steps_of(rules, names)[0]:
        (name,) = step.keys
        try:
            renames[name] = step.rule, step.rule.new[0].fill(step.groups)
        except UsageError as error:
            raise step.rule.within(error, [name]) from None
    return renames


def by_rules(rules: Sequence[Rule], keys: Collection[str]) -> Callable[[str], str]:
    """A function from a key to its new one by the first rule that matches it, also for keys that are not among these.

    Raises `NoMatch` for a rule that takes none of the keys.
    """
    renames = renamed(rules, keys)
    used = {rule.origin for rule, _ in renames.values()}
    idle = [rule for rule in rules if rule.origin not in used]
    hidden = renamed(idle[:1], keys)
    refuse_idle(idle, "no key", "Earlier rules matched all of its keys." if hidden else WHOLE_KEY, keys)

    def rename(key: str) -> str:
        return (renames if key in keys else renamed(rules, [key])).get(key, (None, key))[1]

    return rename
