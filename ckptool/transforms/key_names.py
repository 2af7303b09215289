"""Names in rules: text with variables, as the pattern of a side that is matched and as the template of the other.

`*` stands for anything, dots included; `{name}` for something without a dot; `{n+1}` is arithmetic, of digits;
`{q,k,v}` is several names, one for each. `\\*`, `\\{`, `\\,` and `\\:` are those characters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from ckptool.checkpoint.patterns import SHORT, match_within_limit
from ckptool.errors import UsageError, counted
from ckptool.transforms.arithmetic import Arithmetic, Lookup, parse_arithmetic, solved

MAX_WAYS = 128  # that are tried where arithmetic on the left side has several unknown numbers
MAX_NAMES = 4096  # that one side may stand for
_TOKEN = re.compile(r"\*|\{([^{}]*)\}|\\(.)|(\{)", re.DOTALL)
_WORD = re.compile(r"\w+")

Groups = Mapping[str, str]
"""The texts that the variables of a name stand for, by `v_NAME`, and its stars by `star1`, `star2`, …"""


@dataclass(frozen=True, slots=True)
class Variable:
    """A `*` (without a name) or a `{name}`. group: the name of its group in a match."""

    text: str
    name: str
    group: str


@dataclass(frozen=True)
class KeyName:
    """One name of a rule. `numbers`: the variables of the rule that are digits, since arithmetic is done with them."""

    text: str
    pieces: tuple[str | Variable | Arithmetic, ...]

    @cached_property
    def variables(self) -> dict[str, str]:
        """The groups that a match of this name alone has, and the texts of their variables."""
        return {piece.group: piece.text for piece in self.pieces if isinstance(piece, Variable)}

    @cached_property
    def expressions(self) -> list[Arithmetic]:
        return [piece for piece in self.pieces if isinstance(piece, Arithmetic)]

    def pattern(self, numbers: Collection[str]) -> re.Pattern[str]:
        """The regular expression for whole keys; arithmetic is digits, in groups `e0`, `e1`, …"""
        text, seen, count = "", set[str](), 0
        for piece in self.pieces:
            if isinstance(piece, str):
                text += re.escape(piece)
            elif isinstance(piece, Arithmetic):
                text += f"(?P<e{count}>[0-9]{{1,15}})"
                count += 1
            elif piece.group in seen:
                text += f"(?P={piece.group})"
            else:
                seen.add(piece.group)
                content = ".*" if not piece.name else "[0-9]+" if piece.name in numbers else "[^.]+"
                text += f"(?P<{piece.group}>{content})"
        return re.compile(text, re.DOTALL)

    def fill(self, groups: Groups, lookup: Lookup = lambda name: None) -> str:
        """The key with these in the places of the variables. Raises `UsageError` for a number below zero."""
        return "".join([piece if isinstance(piece, str) else _filled(piece, groups, lookup) for piece in self.pieces])


def _filled(piece: Variable | Arithmetic, groups: Groups, lookup: Lookup) -> str:
    if isinstance(piece, Variable):
        if piece.group in groups:
            return groups[piece.group]
        piece = parse_arithmetic(piece.name)
    texts = {name: groups[f"v_{name}"] for name in piece.names if f"v_{name}" in groups}
    number = piece.value(lambda name: int(texts[name]) if name in texts else lookup(name))
    if number < 0:
        key = piece.text if len(texts) != 1 else piece.text.replace(next(iter(texts)), next(iter(texts.values())))
        raise UsageError(f"{key} is below zero", "Layers are not numbered like that. Nothing was written.")
    widths = [len(text) for text in texts.values() if text.startswith("0")]
    return str(number).zfill(widths[0] if len(texts) == 1 and widths else 0)


def split_names(side: str) -> list[str]:
    """The names of a side: those between commas, each `{a,b}` in one of its ways."""
    depth, parts = 0, [""]
    for token in re.findall(r"\\.|.", side, re.DOTALL):
        depth += (token == "{") - (token == "}")
        if token == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += token
    return [name for part in parts for name in _ways(part.strip())]


_CHOICE = re.compile(r"(?<!\\)\{([^{}]*,[^{}]*)\}")


def _ways(text: str) -> Iterator[str]:
    fixed, choices = _CHOICE.split(text)[::2], [group.split(",") for group in _CHOICE.split(text)[1::2]]
    ways = 1
    for choice in choices:
        ways *= len(choice)
    if ways > MAX_NAMES:
        raise UsageError(f"{counted(ways, 'name')} on one side", f"At most {MAX_NAMES:,} are possible.")
    for words in product(*choices):
        yield "".join([fixed[0], *(word.strip() + after for word, after in zip(words, fixed[1:], strict=True))])


def parse_name(text: str) -> KeyName:
    """The name in a text without choices. Raises `UsageError` for a brace that is neither variable nor expression."""
    pieces: list[str | Variable | Arithmetic] = []
    at = stars = 0
    for match in _TOKEN.finditer(text):
        inner, escaped, brace = match.groups()
        if brace is not None or inner == "":
            raise UsageError("a { begins a variable, {n}, or a sum, {n+1}; a brace itself is \\{")
        pieces.append(text[at : match.start()])
        at = match.end()
        if escaped is not None:
            pieces.append(escaped)
        elif inner is None:
            stars += 1
            pieces.append(Variable("*", "", f"star{stars}"))
        elif _WORD.fullmatch(inner):
            pieces.append(Variable(match[0], inner, f"v_{inner}"))
        else:
            pieces.append(_arithmetic(inner))
    return KeyName(text, tuple(piece for piece in (*pieces, text[at:]) if piece != ""))


def _arithmetic(inner: str) -> Arithmetic:
    try:
        return parse_arithmetic(inner)
    except UsageError:
        what = f"a {{ begins a variable, {{n}}, or a sum, {{n+1}}, not {{{inner[:40]}}}; a brace is \\{{"
        raise UsageError(what) from None


# Matching ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyPattern:
    """A name that keys are matched with. ranges: how many values a variable has, where arithmetic has several."""

    name: KeyName
    numbers: frozenset[str]

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return self.name.pattern(self.numbers)

    @cached_property
    def ends(self) -> tuple[str, str]:
        """The texts with which every key of this name begins and ends."""
        texts = [_literal(piece) for piece in self.name.pieces] or [""]
        return texts[0], texts[-1]

    @cached_property
    def is_quick(self) -> bool:
        """True where a key can be matched in few ways: but for two, variables end at a dot and have none."""
        pieces = self.name.pieces
        followed = zip(pieces, (*map(_literal, pieces[1:]), "."), strict=True)
        open_ended = [piece for piece, after in followed if not _literal(piece) and not after.startswith(".")]
        return len(open_ended) + sum(isinstance(each, Variable) and not each.name for each in pieces) <= 2

    def match(self, key: str, lookup: Lookup, ranges: Mapping[str, int]) -> dict[str, str] | None:
        """The texts of the variables in a key; None where it has another name.

        Raises `UsageError` where arithmetic has two solutions, and what evaluating it raises.
        """
        if self.is_quick and len(key) <= SHORT:
            match = self.compiled.fullmatch(key)
        else:
            match = match_within_limit(self.compiled.fullmatch, key, self.compiled)
        if match is None:
            return None
        groups = {group: text for group, text in match.groupdict().items() if group in self.name.variables}
        if not self.name.expressions:
            return groups
        results = [int(match[f"e{number}"]) for number in range(len(self.name.expressions))]
        ways = list(_solutions(self.name.expressions, results, groups, lookup, ranges))
        if len(ways) > 1:
            what = f"{key} is {self.name.text} in {counted(len(ways), 'way')}"
            raise UsageError(what, "The rules have to say how many values its variables have: `ranges`.")
        return ways[0] if ways else None


def _literal(piece: str | Variable | Arithmetic) -> str:
    return piece if isinstance(piece, str) else ""


def _solutions(
    expressions: list[Arithmetic], results: list[int], groups: dict[str, str], lookup: Lookup, ranges: Mapping[str, int]
) -> Iterator[dict[str, str]]:
    """The ways to bind the unknown names of the expressions so that they have their results."""
    names = dict.fromkeys(name for each in expressions for name in sorted(each.names))
    unknown = [name for name in names if f"v_{name}" not in groups and lookup(name) is None]
    free = [name for name in unknown if name not in ranges]
    if (ways := prod(ranges[name] for name in unknown if name in ranges)) > MAX_WAYS:
        what = f"{counted(ways, 'way')} to solve {expressions[0].text}"
        raise UsageError(what, f"At most {MAX_WAYS:,} are tried: no model has as many blocks.")
    for values in product(*(range(ranges[name]) for name in unknown if name in ranges)):
        bound = dict(zip((name for name in unknown if name in ranges), values, strict=True))
        known = {group[2:]: int(text) for group, text in groups.items() if group[2:] in names} | bound
        if _bind_free(free, expressions, results, known, lookup):
            yield groups | {f"v_{name}": str(known[name]) for name in unknown}


def _bind_free(
    free: list[str], expressions: list[Arithmetic], results: list[int], known: dict[str, int], lookup: Lookup
) -> bool:
    """Adds the names without a range to those that are known, each from an expression that has only it left."""

    def number(name: str) -> int | None:
        return known.get(name) if name in known else lookup(name)

    for _ in range(len(free) + 1):
        for expression, result in zip(expressions, results, strict=True):
            left = [name for name in expression.names if name in free and name not in known]
            if len(left) == 1:
                value = solved(expression, result, left[0], number)
                if value is None:
                    return False
                known[left[0]] = value
    if any(name not in known for name in free):
        return False
    return all(each.value(number) == result for each, result in zip(expressions, results, strict=True))
