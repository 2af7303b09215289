"""The numbers that names in rules stand for: those that were set, the rules' variables, the model's configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from ckptool.commands import arg
from ckptool.errors import UsageError, listed
from ckptool.names.arithmetic import Arithmetic, Functions, Unbound, unbound
from ckptool.names.pattern import Groups, parse_name

Number = Callable[[Arithmetic], int]
"""The value of an expression, with the variables of one match and of the rules."""

MAX_DEPTH = 64  # of variables that are computed of each other


@dataclass(slots=True)
class Scope:
    """Names and their numbers for one set of weights. given: by `--set`.  variables: of the rules, which are computed
    of the configuration, of the shapes (`size('NAME', AXIS)`) and of how many keys there are (`count('NAME.{n}.*')`).
    """

    given: Mapping[str, int]
    variables: Mapping[str, Arithmetic]
    config: Mapping[str, Any]
    node: Mapping[Any, Any]
    used: set[str] = field(default_factory=set)
    _pending: list[str] = field(default_factory=list)
    _found: dict[str, int | Unbound] = field(default_factory=dict)

    def lookup(self, name: str) -> int | None:
        """The number of a name; None where it has none. Raises `UsageError` for variables that are each other."""
        if name in self.given:
            self.used.add(name)
            return self.given[name]
        if name in self.variables and name not in self._pending[-1:]:
            if len(self._pending) > MAX_DEPTH:
                raise UsageError(f"{name} is computed of more than {MAX_DEPTH} variables in turn")
            if name in self._pending:
                cycle = " → ".join([*self._pending[self._pending.index(name) :], name])
                raise UsageError(f"the variables are computed of each other: {cycle}", "None has a value.")
            if name not in self._found:
                self._pending.append(name)
                try:
                    self._found[name] = self.variables[name].value(self.lookup, self.functions)
                except Unbound as error:  # of what the variable is computed of: the variable itself can be set
                    error = error if error.of_rules else unbound(name, self.variables[name].text, error.name)
                    error.of_rules = True
                    self._found[name] = error
                finally:
                    self._pending.pop()
            if isinstance(found := self._found[name], Unbound):
                raise found
            return found
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return int(value) if isinstance(value, int) else None

    @property
    def functions(self) -> Functions:
        def size(name: Any = None, axis: Any = None, *more: Any) -> int | None:
            shape = getattr(self.node.get(name), "shape", None) or ()
            return shape[axis] if not more and type(axis) is int and -len(shape) <= axis < len(shape) else None

        def count(name: Any = "", *more: Any) -> int | None:
            """How many values the first variable of a name has among the keys; None where no key matches."""
            parsed = parse_name(str(name))
            group = next(iter(parsed.variables), None)
            matches = ((key, parsed.pattern.fullmatch(key)) for key in self.node if type(key) is str)
            found = {match[group] if group else key for key, match in matches if match is not None}
            return None if more else len(found) or None

        def root(number: Any = None, *more: Any) -> int | None:
            return isqrt(number) if not more and type(number) is int and number >= 0 else None

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

    def refuse_unused(self, known: Collection[str]) -> None:
        """Raises `UsageError` for what was set and no rule names. known: the names in the rules."""
        if idle := [name for name in self.given if name not in known]:
            what = f"{arg(set=idle[0])}: no rule has a variable of that name"
            raise UsageError(what, f"The rules have {listed(sorted(known)) or 'none'}.")
