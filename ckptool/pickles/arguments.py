"""Rules for the arguments of known calls, one for each kind of call in the table of `known`.

A rule looks at the arguments themselves. What is inside of them (names, objects, further calls) is judged where it stands, by `calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptool.checkpoint import Blob, LongBytes
from ckptool.nodes import ByteString, Global, Object, Set

Arguments = tuple[Any, ...]

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, ByteString, Blob, LongBytes})
_SEQUENCES = (list, tuple, Set)


def anything(_: Arguments) -> bool:
    """Any number of arguments of any kind."""
    return True


def nothing(args: Arguments) -> bool:
    return not args


def scalars(args: Arguments) -> bool:
    """Numbers, texts, None."""
    return all(type(arg) in _SCALARS for arg in args)


def one_scalar(args: Arguments) -> bool:
    """The value of a member of an enumeration."""
    return len(args) == 1 and scalars(args)


def texts(args: Arguments) -> bool:
    return all(isinstance(arg, (str, bytes, Blob)) for arg in args)


def text_or_bytes(args: Arguments) -> bool:
    """Anything that `bytes` takes but a number, which would be a size, and fill the memory."""
    return all(type(arg) not in (int, float, bool) and not isinstance(arg, Object) for arg in args)


def scalars_and_dates(args: Arguments) -> bool:
    """Numbers, bytes, and time zones and differences."""
    return all(type(arg) in _SCALARS or (isinstance(arg, Object) and _module(arg) == "datetime") for arg in args)


def sequence(args: Arguments) -> bool:
    """At most one list, tuple or set: anything else would be asked for its items."""
    return not args or (len(args) == 1 and isinstance(args[0], _SEQUENCES))


def bounded_sequence(args: Arguments) -> bool:
    """A sequence, and how many items there may be (a `deque`)."""
    return sequence(args[:1]) and len(args) <= 2 and all(arg is None or type(arg) is int for arg in args[1:])


def mapping(args: Arguments) -> bool:
    """At most one dictionary, or sequence of pairs."""
    return not args or (len(args) == 1 and isinstance(args[0], (dict, *_SEQUENCES)))


def factory(args: Arguments) -> bool:
    """The factory of a `defaultdict`: None, or a known class or function, which is judged where it stands."""
    return len(args) <= 1 and all(arg is None or isinstance(arg, (Global, Object)) for arg in args)


def type_of_constant(args: Arguments) -> bool:
    """`type(None)`, `type(...)`: how the classes of constants are spelled."""
    return len(args) == 1 and (args[0] is None or (type(args[0]) is Global and args[0].name in _CONSTANTS))


_CONSTANTS = frozenset({"Ellipsis", "NotImplemented"})


def name_first(args: Arguments) -> bool:
    """A function or class by name, which is judged where it stands, then what it will be given: `functools.partial(torch.add, 1)`."""
    return bool(args) and type(args[0]) is Global


def pattern(args: Arguments) -> bool:
    """A regular expression and its flags."""
    return len(args) == 2 and isinstance(args[0], (str, bytes)) and type(args[1]) is int


def type_expression(args: Arguments) -> bool:
    """`typing.Dict[str, int]`, `int | None`: names, None, and such expressions, in tuples and lists."""
    stack: list[Any] = list(args)
    for _ in range(_MOST):
        if not stack:
            return bool(args)
        part = stack.pop()
        if isinstance(part, (tuple, list)):
            stack += part
        elif isinstance(part, Object):
            if _module(part) not in _EXPRESSIONS:
                return False
        elif not (part is None or type(part) in (str, Global)):
            return False
    return False


_MOST = 1_000
_EXPRESSIONS = ("operator", "_operator", "types", "typing", "functools", "builtins", "__builtin__")


def getattr_of_known(args: Arguments) -> bool:
    """`getattr(torch._C._VariableFunctionsClass, "relu")`: how torch's own functions are spelled; or a method of a module."""
    if len(args) != 2 or type(args[1]) is not str or not args[1].isidentifier() or args[1].startswith("__"):
        return False
    of = args[0]
    if type(of) is Global:
        return of.module == "torch._C" and of.name == "_VariableFunctionsClass"
    return isinstance(of, Object) and of.how == "new" and not of.args and _module(of).startswith("torch.nn.modules.")


# torch ---------------------------------------------------------------------------------------------------------------


def without_hooks(at: int) -> Callable[[Arguments], bool]:
    """Any arguments with no backward hooks at this place: hooks are functions that torch calls when gradients are computed."""

    def rule(args: Arguments) -> bool:
        return len(args) <= at or no_hooks(args[at])

    return rule


def no_hooks(hooks: Any) -> bool:
    """True for the empty dictionary of backward hooks that torch writes."""
    if isinstance(hooks, Object):
        ordered = type(hooks.fn) is Global and hooks.fn.name == "OrderedDict" and hooks.fn.module == "collections"
        return ordered and not hooks.items and not any(hooks.args)
    return hooks is None or (isinstance(hooks, dict) and not hooks)


def rebuild_and_class(args: Arguments) -> bool:
    """`_rebuild_from_type_v2(function, class, arguments, state)` calls the function and views the result as the class."""
    return (
        len(args) in (3, 4)
        and type(args[0]) is Global
        and args[0].module in _REBUILDERS
        and args[0].name.startswith("_rebuild_")
        and type(args[1]) is Global
        and type(args[2]) is tuple
    )


_REBUILDERS = ("torch._utils", "torch.nested._internal.nested_tensor")


# numpy ---------------------------------------------------------------------------------------------------------------


def array_class(args: Arguments) -> bool:
    """`_reconstruct(ndarray, (0,), b"b")`: a class of arrays in memory, an empty shape, a type."""
    return len(args) == 3 and type(args[0]) is Global and args[0].name in _ARRAYS and type(args[1]) is tuple


_ARRAYS = frozenset({"ndarray", "matrix", "recarray", "chararray"})


def of_numpy_random(args: Arguments) -> bool:
    """The name of a bit generator, its class or itself, and the function that makes it."""
    return all(
        type(arg) in _SCALARS
        or isinstance(arg, tuple)
        or (type(arg) is Global and arg.module.startswith("numpy.random"))
        or (isinstance(arg, Object) and _module(arg).startswith("numpy.random"))
        for arg in args
    )


def _module(node: Object) -> str:
    return node.fn.module if type(node.fn) is Global else ""
