"""Names in rules: text with variables, as the pattern of a side that is matched and as the template of the other.

`*` stands for anything, dots included; `{name}` for something without a dot; `{n+1}` is arithmetic on digits;
`{q,k,v}` is several names, one for each. `\\*`, `\\{`, `\\,` and `\\:` are those characters. `re:` begins a regular
expression.

Arithmetic is of whole numbers, also in operations and variables: `(heads + 2 * groups) * size`, `kv_heads or heads`. It
is parsed by Python's own parser and checked node by node: numbers, names, `+ - * / // %`, `or`, and the functions
that the caller gives. Nothing is executed. `/` has to divide without a remainder.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from itertools import product
from math import comb, prod
from typing import Any, NamedTuple

from ckptool.checkpoint.paths import Matcher
from ckptool.commands import arg
from ckptool.errors import CkptoolError, UsageError, counted
from ckptool.facts import dataclass

# Arithmetic ----------------------------------------------------------------------------------------------------------

MAX_TEXT = 300  # characters
MAX_NUMBER = 1 << 53

Lookup = Callable[[str], int | None]
"""The number of a name; None where it has none."""
Functions = Mapping[str, Callable[..., int | None]]


class Unbound(UsageError):
    """A name in an expression has no number. name: that name.  of_rules: it is a variable of the rules."""

    name = ""
    of_rules = False


def unbound(name: str, text: str, inner: str = "") -> Unbound:
    """The error for a name without a number in `text`; or, if `name` is a variable that is `text`, for `inner`."""
    within = f" in {text!r}" if text != name else ""
    either = f", or what it is computed of: {arg(set=f'{inner}=NUMBER')}" if inner else ""
    error = Unbound(
        f"{name!r}{f', which is {text!r},' if inner else within} has no value",
        "It is not a variable of the names, the rules or the model's configuration.",
        f"Give it: {arg(set=f'{name}=NUMBER')}{either}",
    )
    error.name, error.of_rules = name, bool(inner)
    return error


class Arithmetic(NamedTuple):
    """An expression. `names`: the variables in it, dotted ones (`text_config.num_attention_heads`) as one."""

    text: str
    names: frozenset[str]
    tree: Any

    def value(self, lookup: Lookup, functions: Functions | None = None) -> int:
        """Its value. Raises `Unbound` for a name without one, `UsageError` for an uneven division or one by zero."""
        return _value(self.tree, self.text, lookup, functions or {})


def parse_arithmetic(text: str, functions: tuple[str, ...] = ()) -> Arithmetic:
    """The expression in a text. Raises `UsageError` for anything else."""
    shown = text[:60]
    try:
        tree = ast.parse(text.strip(), mode="eval").body if len(text) <= MAX_TEXT else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None or (wrong := _wrong(tree, functions)):
        reason = f": {wrong}" if tree is not None and wrong else ""
        why = "It is made of whole numbers, names, + - * / // %, brackets and `or`."
        fix = "For example: (heads + 2 * kv_heads) * head_dim"
        raise UsageError(f"{shown!r} is not an expression{reason}", why, fix)
    names = {_dotted(node) for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute))}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    inner = {_dotted(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return Arithmetic(text.strip(), frozenset(names - called - inner), tree)


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def _wrong(node: ast.AST, functions: tuple[str, ...]) -> str:
    """The part of an expression that is not allowed in one, in words; empty if there is none."""
    match node:
        case ast.Constant(value=value) if type(value) is int and value <= MAX_NUMBER:
            return ""
        case ast.Name():
            return ""
        case ast.Attribute(value=value):
            return "" if _dotted(value) else "a dot after something that is not a name"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _wrong(operand, functions)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in (*_OPERATORS, ast.Div):
            return _wrong(left, functions) or _wrong(right, functions)
        case ast.BoolOp(op=ast.Or(), values=values):
            return next(filter(None, (_wrong(part, functions) for part in values)), "")
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in functions:
            expressions = [part for part in args if not (isinstance(part, ast.Constant) and type(part.value) is str)]
            return next(filter(None, (_wrong(part, functions) for part in expressions)), "")
        case ast.Call():
            return f"the functions are {', '.join(functions)}" if functions else "there are no functions"
    return f"{type(node).__name__.lower()} is not allowed in one"


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (prefix := _dotted(node.value)):
        return f"{prefix}.{node.attr}"
    return ""


def _value(node: Any, text: str, lookup: Lookup, functions: Functions) -> int:
    def number(node: Any) -> int:
        return _value(node, text, lookup, functions)

    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name() | ast.Attribute():
            looked_up = lookup(name := _dotted(node))
            if looked_up is None:
                raise unbound(name, text)
            return _bounded(looked_up, text)
        case ast.UnaryOp(operand=operand):
            return -number(operand)
        case ast.BoolOp(values=values):  # the first that has a value; the error names what can be set
            errors = list[Unbound]()
            for part in values:
                try:
                    return number(part)
                except Unbound as error:
                    errors.append(error)
            raise next((error for error in errors if error.of_rules), errors[-1])
        case ast.Call(func=ast.Name(id=called), args=args):
            are_strings = [isinstance(part, ast.Constant) and isinstance(part.value, str) for part in args]
            pairs: Any = zip(args, are_strings, strict=True)
            result = functions[called](*(part.value if is_string else number(part) for part, is_string in pairs))
            if result is None:
                raise unbound(ast.unparse(node), text)
            return _bounded(result, text)
    left, right, exact = number(node.left), number(node.right), isinstance(node.op, ast.Div)
    if (exact or isinstance(node.op, (ast.FloorDiv, ast.Mod))) and (right == 0 or (exact and left % right)):
        what = f"{left:,} cannot be divided by {right:,} in {text!r}"
        raise UsageError(what, "The numbers do not fit each other, or do not fit this checkpoint. Nothing was written.")
    return _bounded(left // right if exact else _OPERATORS[type(node.op)](left, right), text)


def _bounded(value: int, text: str) -> int:
    if abs(value) > MAX_NUMBER:
        raise UsageError(f"{text!r} is {value:.3g}", "No tensor has such a size.")
    return value


def solved(expression: Arithmetic, result: int, unknown: str, lookup: Lookup) -> int | None:
    """The number of the one unknown name with which a linear expression has the result; None where there is none."""

    def at(number: int) -> int:
        return expression.value(lambda name: number if name == unknown else lookup(name))

    try:
        intercept, slope = at(0), at(1) - at(0)
        if not slope or (result - intercept) % slope:
            return None
        number = (result - intercept) // slope
        return number if number >= 0 and at(number) == result else None
    except Unbound:
        raise
    except CkptoolError:  # a division with a remainder
        return None


# Names ---------------------------------------------------------------------------------------------------------------

MAX_WAYS = 128  # that are tried where arithmetic on the left side has several unknown numbers
MAX_NAMES = 4096  # that one side may stand for
MANY_OPEN, MANY_WAYS = 8, 1 << 27  # variables that may end anywhere, and ways to divide a key among them: two seconds
_TOKEN = re.compile(r"\*|\{([^{}]*)\}|\\(.)|(\{)", re.DOTALL)
_WORD = re.compile(r"\w+")
_CHOICE = re.compile(r"(?<!\\)\{([^{}]*,[^{}]*)\}")

Groups = Mapping[str, str]
"""The texts that the variables of a name stand for, by `v_NAME`, and its stars by `star1`, `star2`, …"""


class Variable(NamedTuple):
    """A `*` (without a name) or a `{name}`. group: the name of its group in a match."""

    text: str
    name: str
    group: str


@dataclass(frozen=True)
class Name:
    """One name of a rule. digits: the variables of the rule that are numbers, since arithmetic is done with them.

    expression: the regular expression of a rule with `re:`, also on the side that is filled in.  matches: the test of a
    name that is only matched, as in `--only`: `*` crosses dots, `re:` is searched for.
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
        """How many variables may end in several places: each `*`, and those not followed by a dot or the end."""
        pairs = zip(self.pieces, (*self.pieces[1:], "."), strict=False)
        return sum(
            isinstance(piece, Variable) and not (piece.name and isinstance(after, str) and after.startswith("."))
            for piece, after in pairs
        )

    def match(self, key: str, lookup: Lookup = lambda name: None, ranges: Mapping[str, int] = {}) -> Groups | None:
        """The texts of the variables in a key; None where it has another name.

        ranges: how many values a variable has, where arithmetic has several. Raises `UsageError` where that has two
        solutions and for a key that is too long, and what evaluating it raises.
        """
        if self.matches is not None:
            return {"": key} if self.matches(key) else None
        if self.open_ended > 2 and comb(len(key), self.open_ended) > MANY_WAYS:
            what = (
                f"{key[:60]}… has {counted(len(key), 'character')}, and {self.text!r} {self.open_ended} places for them"
            )
            raise UsageError(what, "They could match it in too many ways: use fewer *.")
        match = self.pattern.fullmatch(key)
        if match is None:
            return None
        if self.expression is not None:
            return {"": key}
        if not self.sums:
            return match.groupdict()
        solutions = list(self._solutions(match, lookup, ranges))
        if len(solutions) > 1:
            what = f"{key} is {self.text} in {counted(len(solutions), 'way')}"
            raise UsageError(what, "The rules have to give the ranges of its variables: `ranges`.")
        return solutions[0] if solutions else None

    def _solutions(self, match: re.Match[str], lookup: Lookup, ranges: Mapping[str, int]) -> Iterator[dict[str, str]]:
        """The ways to bind the unknown names in its sums so that these have the numbers in a match."""
        groups = {group: match[group] for group in self.variables}
        sums = [(sum_, int(match[f"e{number}"])) for number, sum_ in enumerate(self.sums)]
        names = dict.fromkeys(name for sum_ in self.sums for name in sorted(sum_.names))
        unknown = [name for name in names if f"v_{name}" not in groups and lookup(name) is None]
        ranged = [name for name in unknown if name in ranges]
        if (ways := prod(ranges[name] for name in ranged)) > MAX_WAYS:
            what = f"{counted(ways, 'way')} to solve {self.sums[0].text}"
            raise UsageError(what, f"At most {MAX_WAYS:,} are tried: no model has that many blocks.")
        for values in product(*(range(ranges[name]) for name in ranged)):
            numbers = {group[2:]: int(text) for group, text in groups.items() if group[2:] in names}
            numbers |= zip(ranged, values, strict=True)
            number = partial(_number, numbers, lookup)
            for sum_, result in sums * (len(unknown) + 1):  # those without a range, where a sum has only one left
                unsolved = [name for name in sum_.names if name in unknown and name not in numbers]
                if len(unsolved) == 1 and (solution := solved(sum_, result, unsolved[0], number)) is not None:
                    numbers[unsolved[0]] = solution
            if numbers.keys() >= {*unknown} and all(sum_.value(number) == result for sum_, result in sums):
                yield groups | {f"v_{name}": str(numbers[name]) for name in unknown}

    def fill(self, groups: Groups, lookup: Lookup = lambda name: None) -> str:
        """The key with these texts in place of the variables. Raises `UsageError` for a number below zero."""
        if self.expression is not None:
            match = self.expression.fullmatch(groups[""])
            return match.expand(self.text) if match else groups[""]
        texts, bound = list[str](), dict[str, str]()

        def number_of(name: str) -> int | None:
            return int(bound[name]) if name in bound else lookup(name)

        for piece in self.pieces:
            if isinstance(piece, str):
                texts.append(piece)
            elif isinstance(piece, Variable) and piece.group in groups:
                texts.append(groups[piece.group])
            else:
                sum_ = parse_arithmetic(piece.name) if isinstance(piece, Variable) else piece
                bound = {name: groups[f"v_{name}"] for name in sum_.names if f"v_{name}" in groups}
                if (number := sum_.value(number_of)) < 0:
                    shown = sum_.text
                    for name, text in bound.items() if len(bound) == 1 else ():
                        shown = shown.replace(name, text)
                    raise UsageError(f"{shown} is below zero", "Layer numbers start at 0. Nothing was written.")
                widths = [len(text) for text in bound.values() if text.startswith("0")]
                texts.append(str(number).zfill(widths[0] if len(bound) == 1 and widths else 0))
        return "".join(texts)


def _number(numbers: Mapping[str, int], lookup: Lookup, name: str) -> int | None:
    return numbers[name] if name in numbers else lookup(name)


def split_names(side: str) -> list[str]:
    """The names of a side, which commas separate, with each `{a,b}` written out."""
    if "," not in side:
        return [side.strip()]
    depth, parts = 0, [""]
    for token in re.findall(r"\\.|.", side, re.DOTALL):
        depth += (token == "{") - (token == "}")
        if token == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += token
    names = list[str]()
    for part in parts:
        fixed, groups = _CHOICE.split(part.strip())[::2], _CHOICE.split(part.strip())[1::2]
        choices = [group.split(",") for group in groups]
        if (ways := prod(map(len, choices))) > MAX_NAMES:
            raise UsageError(f"{counted(ways, 'name')} on one side", f"At most {MAX_NAMES:,} are possible.")
        for words in product(*choices):
            names.append("".join([fixed[0], *(w.strip() + after for w, after in zip(words, fixed[1:], strict=True))]))
    return names


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
    if braces := re.search(r"(?<!\\)\{\w+\s*([+-]\s*\w+\s*)?\}", new):  # which would become text
        raise UsageError(f"{braces[0]} is for rules without re:; what a regular expression matched is \\1 or \\g<name>")
    try:
        expression = re.compile(old)
        probe = re.compile(f"{old}\n|", expression.flags).fullmatch("")  # the line break ends a comment of (?x)
        if probe is not None:
            probe.expand(new)
    except (re.error, IndexError) as error:
        raise UsageError(str(error)) from None
    return Name(f"re:{old}", expression=expression), Name(new, expression=expression)
