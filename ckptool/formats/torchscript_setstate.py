"""Which classes of a TorchScript program run something when an object of theirs is loaded: their `__setstate__`.

torch calls it for any object in a pickle of the archive, whatever its state is (import.cpp, `obj_loader`). That of
torch's quantized layers takes the state apart and packs the weights; of such a one each statement is looked at.
"""

from __future__ import annotations

import ast
import re
from itertools import chain

from ckptool.pickles.arguments import CLASSES, PACKED

NAME = "__setstate__"
_MOST = 1 << 15  # characters of a class whose program is looked at
MOST_TEXT = 1 << 19  # of all files with one: of quantized models some hundred thousand
_STATEMENTS = (ast.Assign, ast.Expr, ast.If, ast.Return, ast.Pass, ast.expr_context)
_VALUES = (ast.Attribute, ast.Subscript, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Call)
_CALLS = re.compile(r"ops\.quantized\.\w+_prepack(_fp16)?|ops\.prim\.RaiseException|torch\.(eq|ne)")
_OWN = "set_weight_bias"  # the one method that torch's layers call there
_TYPES = {"Tuple", "List", "Optional", "Tensor", "NoneType", "None", "int", "bool", "float", "str"}
_TYPES |= {f"{PACKED}.{name}" for name in CLASSES}


def owners(text: str, look: bool) -> set[str]:
    """The classes in a file of code whose `__setstate__` may do more than to pack quantized parameters.

    look: whether what it does is looked at, or any does more.
    """
    classes = [part for part in re.split(r"(?m)^class ", text) if NAME in part]
    return {re.split(r"\W", part)[0] for part in classes if not (look and _only_packs(f"class {part}"))}


def _only_packs(text: str) -> bool:
    if len(text) > _MOST or any(odd in text for odd in ("#", "\t", "\\\n", "\r", "\f")):
        return False  # which torch's parser may see otherwise, and its printer does not write
    try:
        return _is_packing(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_packing(body: list[ast.stmt]) -> bool:
    first, *functions = body
    if not isinstance(first, ast.ClassDef) or not all(isinstance(each, ast.FunctionDef) for each in functions):
        return False
    methods = [each for each in first.body if isinstance(each, ast.FunctionDef)]
    called = {each.name: each for each in methods if each.name in (NAME, _OWN)}
    fields = [each.annotation for each in first.body if isinstance(each, ast.AnnAssign)]
    rest = [each for each in first.body if not isinstance(each, (ast.FunctionDef, ast.AnnAssign))]
    return (
        len({each.name for each in methods}) == len(methods)
        and all(isinstance(each, ast.Assign) for each in rest)
        and NAME in called
        and all(map(_is_type, fields))
        and all(_is_harmless(method, calls_own=name == NAME) for name, method in called.items())
    )


def _is_type(node: ast.expr | None) -> bool:
    """True for a type of Python's own values, tensors and packed parameters: of no class of the program."""
    return node is not None and set(re.findall(r"[\w.]+", ast.unparse(node))) <= _TYPES


def _is_harmless(method: ast.FunctionDef, calls_own: bool) -> bool:
    own, *given = method.args.args or [ast.arg("")]
    names = {each.arg for each in given}
    for node in chain.from_iterable(map(ast.walk, method.body)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if node.keywords or not (_CALLS.fullmatch(name) or (calls_own and name == f"self.{_OWN}")):
                return False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif not isinstance(node, (*_STATEMENTS, *_VALUES)):
            return False
    return (
        own.arg == "self" and names.isdisjoint({"self", "ops", "torch"}) and all(_is_type(a.annotation) for a in given)
    )
