"""Names in rules: text with variables, as the pattern of a side that is matched and as the template of the other.

`*` stands for anything, dots included; `{name}` for something without a dot; `{n+1}` is arithmetic, of digits;
`{q,k,v}` is several names, one for each. `\\*`, `\\{`, `\\,` and `\\:` are those characters. `re:` begins a regular
expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import comb, prod

from ckptool.checkpoint.paths import Matcher
from ckptool.errors import UsageError, counted
from ckptool.names.arithmetic import Arithmetic, Lookup, parse_arithmetic, solved

MAX_WAYS = 128  # that are tried where arithmetic on the left side has several unknown numbers
MAX_NAMES = 4096  # that one side may stand for
MANY_OPEN, MANY_WAYS = 8, 1 << 27  # variables that may end anywhere, and ways to divide a key among them: two seconds
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
class Name:
    """One name of a rule. digits: the variables of the rule that are numbers, since arithmetic is done with them.

    expression: the regular expression of a rule with `re:`, of the side that is filled in, too.  matches: the test of a
    name that is only matched, as those of `--only`: `*` crosses dots, `re:` is searched for.
    """

    text: str
    pieces: tuple[str | Variable | Arithmetic, ...] = ()
    digits: frozenset[str] = frozenset()
    expression: re.Pattern[str] | None = None
    matches: Matcher | None = None

    @cached_property
    def variables(self) -> dict[str, str]:
        """The groups that a match of this name alone has, and the texts of their variables."""
        return {piece.group: piece.text for piece in self.pieces if isinstance(piece, Variable)}

    @cached_property
    def sums(self) -> list[Arithmetic]:
        return [piece for piece in self.pieces if isinstance(piece, Arithmetic)]

    @cached_property
    def ends(self) -> tuple[str, str]:
        """The texts with which every key of this name begins and ends."""
        literals = [piece if isinstance(piece, str) else "" for piece in self.pieces] or [""]
        return literals[0], literals[-1]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The regular expression for whole keys; arithmetic is digits, in groups `e0`, `e1`, …"""
        if self.expression is not None:
            return self.expression
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
                content = ".*" if not piece.name else "[0-9]+" if piece.name in self.digits else "[^.]+"
                text += f"(?P<{piece.group}>{content})"
        return re.compile(text, re.DOTALL)

    @cached_property
    def open_ended(self) -> int:
        """How many variables may end in several places: each `*`, and those that neither a dot nor the end follows."""
        pairs = zip(self.pieces, (*self.pieces[1:], "."), strict=False)
        return sum(
            isinstance(each, Variable) and not (each.name and isinstance(after, str) and after.startswith("."))
            for each, after in pairs
        )

    def match(self, key: str, lookup: Lookup = lambda name: None, ranges: Mapping[str, int] = {}) -> Groups | None:
        """The texts of the variables in a key; None where it has another name.

        ranges: how many values a variable has, where arithmetic has several. Raises `UsageError` where it has two
        solutions, for a key that is too long, and what evaluating it raises.
        """
        if self.matches is not None:
            return {"": key} if self.matches(key) else None
        if self.open_ended > 2 and comb(len(key), self.open_ended) > MANY_WAYS:
            what = (
                f"{key[:60]}… has {counted(len(key), 'character')}, and {self.text!r} {self.open_ended} places for them"
            )
            raise UsageError(what, "They could match it in too many ways: write fewer of *.")
        match = self.pattern.fullmatch(key)
        if match is None:
            return None
        if self.expression is not None:
            return {"": key}
        if not self.sums:
            return match.groupdict()
        ways = list(self._solutions(match, lookup, ranges))
        if len(ways) > 1:
            what = f"{key} is {self.text} in {counted(len(ways), 'way')}"
            raise UsageError(what, "The rules have to say how many values its variables have: `ranges`.")
        return ways[0] if ways else None

    def _solutions(self, match: re.Match[str], lookup: Lookup, ranges: Mapping[str, int]) -> Iterator[dict[str, str]]:
        """The ways to bind the unknown names of its sums so that these have the numbers of a match."""
        groups = {group: match[group] for group in self.variables}
        sums = [(each, int(match[f"e{number}"])) for number, each in enumerate(self.sums)]
        names = dict.fromkeys(name for each in self.sums for name in sorted(each.names))
        unknown = [name for name in names if f"v_{name}" not in groups and lookup(name) is None]
        tried = [name for name in unknown if name in ranges]
        if (ways := prod(ranges[name] for name in tried)) > MAX_WAYS:
            what = f"{counted(ways, 'way')} to solve {self.sums[0].text}"
            raise UsageError(what, f"At most {MAX_WAYS:,} are tried: no model has as many blocks.")
        for values in product(*(range(ranges[name]) for name in tried)):
            known = {group[2:]: int(text) for group, text in groups.items() if group[2:] in names}
            known |= zip(tried, values, strict=True)
            number = partial(_number, known, lookup)
            for each, result in sums * (len(unknown) + 1):  # those without a range, where a sum has only one left
                left = [name for name in each.names if name in unknown and name not in known]
                if len(left) == 1 and (found := solved(each, result, left[0], number)) is not None:
                    known[left[0]] = found
            if known.keys() >= {*unknown} and all(each.value(number) == result for each, result in sums):
                yield groups | {f"v_{name}": str(known[name]) for name in unknown}

    def fill(self, groups: Groups, lookup: Lookup = lambda name: None) -> str:
        """The key with these in the places of the variables. Raises `UsageError` for a number below zero."""
        if self.expression is not None:
            match = self.expression.fullmatch(groups[""])
            return match.expand(self.text) if match else groups[""]
        return "".join([piece if isinstance(piece, str) else _filled(piece, groups, lookup) for piece in self.pieces])


def _number(known: Mapping[str, int], lookup: Lookup, name: str) -> int | None:
    return known[name] if name in known else lookup(name)


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
    if "," not in side:
        return [side.strip()]
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


def parse_name(text: str) -> Name:
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
            try:
                pieces.append(parse_arithmetic(inner))
            except UsageError:
                what = f"a {{ begins a variable, {{n}}, or a sum, {{n+1}}, not {{{inner[:40]}}}; a brace is \\{{"
                raise UsageError(what) from None
    name = Name(text, tuple(piece for piece in (*pieces, text[at:]) if piece != ""))
    if name.open_ended > MANY_OPEN:
        raise UsageError(f"{text!r} has {stars:,} *", "They could match a key in too many ways.")
    return name


def parse_expressions(old: str, new: str) -> tuple[Name, Name]:
    """A regular expression without its `re:`, and its template. Raises `UsageError` where they do not fit."""
    if found := re.search(r"(?<!\\)\{\w+\s*([+-]\s*\w+\s*)?\}", new):  # which would become text
        raise UsageError(f"{found[0]} is for rules without re:; what a regular expression matched is \\1 or \\g<name>")
    try:
        expression = re.compile(old)
        probe = re.compile(f"{old}\n|", expression.flags).fullmatch("")  # the line break ends a comment of (?x)
        if probe is not None:
            probe.expand(new)
    except (re.error, IndexError) as error:
        raise UsageError(str(error)) from None
    return Name(f"re:{old}", expression=expression), Name(new, expression=expression)
