"""Whole-number arithmetic in rules: `n + 1`, `(heads + 2 * groups) * head_dim`, `num_key_value_heads or heads`.

Parsed by Python's own parser and checked node by node: numbers, names, `+ - * / // %`, `or`, and the functions that the
caller gives. Nothing is executed. `/` has to divide without a rest.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.commands import arg
from ckptool.errors import CkptoolError, UsageError

MAX_TEXT = 300  # characters
MAX_NUMBER = 1 << 53

Lookup = Callable[[str], int | None]
"""The number of a name; None where it has none."""
Functions = Mapping[str, Callable[..., int | None]]


class Unbound(UsageError):
    """A name in an expression has no number. name: that.  of_rules: it is a variable of the rules."""

    name = ""
    of_rules = False


def unbound(name: str, text: str, inner: str = "") -> Unbound:
    """The error for a name in an expression; for a variable that stands for one, with the name in that."""
    within = f" in {text!r}" if text != name else ""
    either = f", or what it is computed of: {arg(set=f'{inner}=NUMBER')}" if inner else ""
    found = Unbound(
        f"{name!r}{f', which is {text!r},' if inner else within} has no value",
        "It is no variable of the names, not in the variables of the rules, and not in the model's configuration.",
        f"Give it: {arg(set=f'{name}=NUMBER')}{either}",
    )
    found.name = name
    return found


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """An expression. `names`: the variables in it, dotted ones (`text_config.num_attention_heads`) as one."""

    text: str
    names: frozenset[str]
    tree: Any

    def value(self, lookup: Lookup, functions: Functions | None = None) -> int:
        """Its value. Raises `Unbound` for a name without one, `UsageError` for a division with a rest or by zero."""
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
        raise UsageError(
            f"{shown!r} is not an expression{reason}",
            "It is made of whole numbers, names, + - * / // %, brackets and `or`.",
            "For example: (heads + 2 * kv_heads) * head_dim",
        )
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
    """A part of an expression that has no place in one; empty where all have."""
    match node:
        case ast.Constant(value=value) if type(value) is int and value <= MAX_NUMBER:
            return ""
        case ast.Name():
            return ""
        case ast.Attribute(value=value):
            return "" if _dotted(value) else "a dot after what is no name"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _wrong(operand, functions)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in (*_OPERATORS, ast.Div):
            return _wrong(left, functions) or _wrong(right, functions)
        case ast.BoolOp(op=ast.Or(), values=values):
            return next(filter(None, (_wrong(each, functions) for each in values)), "")
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in functions:
            strings = [each for each in args if not (isinstance(each, ast.Constant) and type(each.value) is str)]
            return next(filter(None, (_wrong(each, functions) for each in strings)), "")
        case ast.Call():
            return f"the functions are {', '.join(functions)}" if functions else "there are no functions"
    return f"{type(node).__name__.lower()} has no place in one"


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _value(node: Any, text: str, lookup: Lookup, functions: Functions) -> int:
    def number(node: Any) -> int:
        return _value(node, text, lookup, functions)

    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name() | ast.Attribute():
            found = lookup(name := _dotted(node))
            if found is None:
                raise unbound(name, text)
            return _bounded(found, text)
        case ast.UnaryOp(operand=operand):
            return -number(operand)
        case ast.BoolOp(values=values):
            return _first(values, text, lookup, functions)
        case ast.Call(func=ast.Name(id=called), args=args):
            strings = [isinstance(each, ast.Constant) and isinstance(each.value, str) for each in args]
            pairs: Any = zip(args, strings, strict=True)
            result = functions[called](*(each.value if is_string else number(each) for each, is_string in pairs))
            if result is None:
                raise unbound(ast.unparse(node), text)
            return _bounded(result, text)
    left, right, exact = number(node.left), number(node.right), isinstance(node.op, ast.Div)
    if (exact or isinstance(node.op, (ast.FloorDiv, ast.Mod))) and (right == 0 or (exact and left % right)):
        what = f"{left:,} cannot be divided by {right:,} in {text!r}"
        raise UsageError(what, "The numbers do not fit each other, or not this checkpoint. Nothing was written.")
    return _bounded(left // right if exact else _OPERATORS[type(node.op)](left, right), text)


def _first(nodes: list[Any], text: str, lookup: Lookup, functions: Functions) -> int:
    """The value of the first alternative that has one. The error names what can be set, where something of it can."""
    errors = []
    for node in nodes:
        try:
            return _value(node, text, lookup, functions)
        except Unbound as error:
            errors.append(error)
    raise next((error for error in errors if error.of_rules), errors[-1])


def _bounded(value: int, text: str) -> int:
    if abs(value) > MAX_NUMBER:
        raise UsageError(f"{text!r} is {value:.3g}", "No tensor has such a size.")
    return value


def solved(expression: Arithmetic, result: int, unknown: str, lookup: Lookup) -> int | None:
    """The number of the one unknown name with which a linear expression has the result; None where there is none."""

    def at(number: int) -> int:
        return expression.value(lambda name: number if name == unknown else lookup(name))

    try:
        begin, slope = at(0), at(1) - at(0)
        if not slope or (result - begin) % slope:
            return None
        number = (result - begin) // slope
        return number if number >= 0 and at(number) == result else None
    except Unbound:
        raise
    except CkptoolError:  # a division with a rest
        return None
