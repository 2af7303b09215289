"""Rules for the arguments of known functions and classes, for the table of `known`.

Most rows give the number of arguments (`every`, `up_to`, `exactly`) and the kind of each by a word; where arguments
depend on each other, a rule looks at all of them. What is inside the arguments (names, objects, further calls) is
judged where it is, by `calls`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from ckptool.checkpoint import Composite, StorageRef, TensorEntry
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.numpy_arrays import LongValue

Arguments = tuple[Any, ...]
Rule = Callable[[Arguments], bool]  # for all arguments of a call

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, ByteString, LongValue})
_SEQUENCES = (list, tuple, Set)

# How many arguments, and of what kind --------------------------------------------------------------------------------

Word = Literal[
    "anything", "scalar", "sequence", "pairs", "content", "number", "path", "codec", "in date", "constant",
    "expression", "device", "attributes", "class of arrays", "class of tensordict", "of random",
]  # fmt: skip


def every(word: Word) -> Rule:
    """Any number of arguments, each of one kind."""
    return lambda args: all(_is_kind(word, arg) for arg in args)


def up_to(*words: Word) -> Rule:
    """Arguments of these kinds, in this order; the later ones may be missing."""
    return lambda args: len(args) <= len(words) and all(map(_is_kind, words, args))


def exactly(*words: Word) -> Rule:
    """Arguments of these kinds, in this order, and all of them."""
    return lambda args: len(args) == len(words) and all(map(_is_kind, words, args))


none = up_to()


def _is_kind(word: Word, arg: Any) -> bool:
    """True for an argument of the kind that the word means."""
    match word:
        case "anything":  # its contents are judged where they are
            return True
        case "scalar":  # a number, a text, None
            return type(arg) in _SCALARS
        case "sequence":  # of anything else, iteration would run code
            return isinstance(arg, _SEQUENCES)
        case "pairs":  # or a dictionary; but one with attributes may have a `keys` that would be called
            return isinstance(arg, (dict, *_SEQUENCES)) and not (isinstance(arg, OrderedDict) and arg.attributes)
        case "content":  # of bytes: a number would be a size to allocate
            return isinstance(arg, (str, bytes, LongValue, *_SEQUENCES))
        case "number" if type(arg) in (str, bytes):  # its text, if not so long that parsing it takes for ever
            text = re.fullmatch(_NUMBER, _as_text(arg), re.IGNORECASE | re.ASCII) if len(arg) <= 400 else None
            return text is not None and abs(int(text[1] or 0)) <= 9_999  # its exponent
        case "number":
            return type(arg) in (bool, int, float, complex)
        case "path":  # or the name of a logger
            return isinstance(arg, (str, bytes)) and len(arg) <= 4_096
        case "codec":  # a common one that runs no code of its own; or an error handler
            return type(arg) is str and arg.lower() in _CODECS
        case "in date":  # a number, bytes, a time zone, a timedelta
            return type(arg) in _SCALARS or (isinstance(arg, Object) and _module(arg) == "datetime")
        case "constant":  # an object whose class has no other spelling: `type(None)`, `type(...)`
            return arg is None or (type(arg) is Global and arg.name in ("Ellipsis", "NotImplemented"))
        case "expression":  # a regular one; Python enumerates the characters of its ranges where it ignores case
            if not isinstance(arg, (str, bytes)) or len(arg) > 1_000:
                return False
            pattern = _as_text(arg)
            return (pattern.isascii() and "\\u" not in pattern.lower()) or pattern.count("-") <= 64
        case "device":  # or its name
            return type(arg) is str or _is_torch_value(arg)
        case "attributes":  # names and values, no name with a meaning to Python
            return type(arg) is dict and all(type(name) is str for name in arg) and not _dunder(arg)
        case "class of arrays":  # of numpy's, in memory
            return type(arg) is Global and arg.name in ("ndarray", "matrix", "recarray", "chararray")
        case "class of tensordict":
            return type(arg) is Global and arg.module.startswith("tensordict.")
        case "of random":  # numpy's bit generators: a name, a class, an object, and the function that makes one
            module = arg.module if type(arg) is Global else _module(arg) if isinstance(arg, Object) else ""
            return type(arg) in _SCALARS or isinstance(arg, tuple) or module.startswith("numpy.random")


_CODECS = (
    *("latin1", "latin-1", "iso-8859-1", "ascii", "us-ascii", "utf8", "utf-8"),
    *("strict", "ignore", "replace", "surrogateescape", "surrogatepass"),
)
_NUMBER = r"[-+\d./j()]*(?:[eE]([-+]?\d{1,9}))?|[-+]?s?(?:nan|inf|infinity)\d*"


def _as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


# Several arguments that depend on each other --------------------------------------------------------------------------


def application(args: Arguments) -> bool:
    """`functools.partial`: a function or class that does no more than compute, and plain values for it.

    Layers, optimizers, losses, functions of numbers: no call of them changes anything outside of the process.
    """
    match args:
        case (Global(module="builtins" | "__builtin__", name=name), *values):
            return name in _CONVERSIONS and _is_plain(values)
        case (Global(module=module), *values):
            return (module in _COMPUTING or module.startswith(_COMPUTING_BELOW)) and _is_plain(values)
    return False


_CONVERSIONS = frozenset("int long float bool complex str unicode list tuple dict set frozenset len abs round".split())
_COMPUTING = ("math", "torch.nn.functional", "torch.nn.init", "torch._C._nn", "transformers.activations")
_COMPUTING_BELOW = ("torch.nn.modules.", "torch.optim.", "torch.ao.nn.", "torch.nn.quantized.", "torch.distributions.")


def _is_plain(value: Any) -> bool:
    """Numbers, texts, names, tensors, sizes and devices, in lists, tuples and dictionaries."""
    return all(type(part) is Global or _is_torch_value(part) for part in _inside(value))


def _inside(value: Any) -> Iterator[Any]:
    """What containers hold besides scalars and tensors; and a container that has attributes or too many parts, itself.

    Not written with `visit`: every rebuild call comes here, and only a limited number of parts is looked at.
    """
    stack, budget = [value], _MOST_PARTS
    while stack:
        part = stack.pop()
        if isinstance(part, _CONTAINERS):
            inside = part.items if isinstance(part, Set) else part
            budget -= 1 + len(inside)
            if budget < 0 or (isinstance(part, OrderedDict) and part.attributes):
                yield part
                return
            inside = [*inside.keys(), *inside.values()] if isinstance(inside, dict) else inside
            stack += () if _SCALARS.issuperset(map(type, inside)) else inside
        elif type(part) not in _SCALARS and not isinstance(part, _TENSORS):
            yield part


_CONTAINERS = (dict, *_SEQUENCES)
_MOST_PARTS = 256  # in the arguments of a call: sizes, strides, a few options
_TENSORS = (TensorEntry, Composite, StorageRef)


def _is_torch_value(value: Any) -> bool:
    """True for sizes, devices, layouts."""
    return isinstance(value, Object) and _module(value) in ("torch", "torch.serialization") and value.state is MISSING


def type_expression(args: Arguments) -> bool:
    """`typing.Dict[str, int]`, `int | None`: names, None, and such expressions, in tuples and lists."""
    stack: list[Any] = list(args)
    literal = bool(args) and _name(args[0]) == "typing.Literal"
    budget = _MOST
    while stack:
        part = stack.pop()
        if isinstance(part, (tuple, list)):
            budget -= 1 + len(part)
            if budget < 0:
                return False
            stack += part
        elif isinstance(part, Object):
            if _name(part.fn) not in _EXPRESSIONS or part.state is not MISSING:
                return False
        elif type(part) is str:  # a forward reference, which is evaluated when it is resolved
            if not literal and not part.replace(".", "").isidentifier():
                return False
        elif not (part is None or type(part) is Global or (literal and type(part) in _SCALARS)):
            return False
    return bool(args)


def union(args: Arguments) -> bool:
    """`functools.reduce(operator.or_, [int, str])`; any other function would be called."""
    return len(args) == 2 and _name(args[0]) in ("operator.or_", "_operator.or_") and type_expression(args[1:])


_MOST = 64  # parts of one type
_EXPRESSIONS = frozenset(
    "operator.getitem operator.or_ _operator.getitem _operator.or_ types.GenericAlias functools.reduce"
    " _functools.reduce __builtin__.reduce builtins.type __builtin__.type".split()
)


def getattr_of_known(args: Arguments) -> bool:
    """`getattr(torch._C._VariableFunctionsClass, "relu")`, a function of torch's own; or a method of a module."""
    match args:
        case (Global() as owner, str(name)) if name.isidentifier() and not name.startswith("__"):
            return str(owner) == "torch._C._VariableFunctionsClass" and name.rstrip("_") in _FUNCTIONS
        case (Object(how="new", args=()) as owner, str(name)) if name.isidentifier() and not name.startswith("__"):
            return _module(owner).startswith("torch.nn.modules.")
    return False


# torch's functions that models hold as activations; `torch.from_file`, which creates files, is in the same class.
_FUNCTIONS = frozenset(
    "abs add cat celu clamp cos dropout elu exp gelu hardshrink log logit log_softmax matmul max mean min mul prelu"
    " relu relu6 rrelu selu sigmoid sign sin softmax sqrt square sub sum tan tanh threshold".split()
)


# torch ---------------------------------------------------------------------------------------------------------------


def of_tensors(args: Arguments) -> bool:
    """Arguments of tensors: storages, tensors, sizes, numbers, element types, arrays.

    On anything else torch would look up attributes and methods (`data.detach()`) and call them.
    """
    return all(type(part) is Global or _is_torch_value(part) or _is_tensor_call(part) for part in _inside(args))


def _is_tensor_call(part: Any) -> bool:
    """True for a call of a tensor, an array, a storage or a dictionary that no builder understood."""
    if not isinstance(part, Object):
        return False
    module = _module(part)
    return (
        part.how == "persistent"
        or module.startswith(
            ("torch._utils", "torch._tensor", "torch.nn.parameter", "torch.storage", "numpy.", "torch.nested.")
        )
        or module in ("numpy", "torch.tensor", "torch.autograd.variable", "torch.cuda")
        or (_name(part.fn) == "collections.OrderedDict" and part.state is MISSING)
    )


def without_hooks(index: int) -> Rule:
    """Arguments of tensors; at this index no backward hooks, which torch would call when it computes gradients; and
    after it a state that sets no attribute that tensors have."""
    return lambda args: (
        of_tensors(args[:index]) and all(map(no_hooks, args[index : index + 1])) and new_attributes(args[index + 1 :])
    )


def no_hooks(hooks: Any) -> bool:
    """True for the empty dictionary of backward hooks that torch writes."""
    if isinstance(hooks, Object):
        ordered = type(hooks.fn) is Global and hooks.fn.name == "OrderedDict" and hooks.fn.module == "collections"
        return ordered and not hooks.items and not any(hooks.args)
    return hooks is None or (isinstance(hooks, dict) and not hooks)


def rebuild_and_class(args: Arguments) -> bool:
    """`_rebuild_from_type_v2(function, class, arguments, state)`: calls the function, casts the result to the class."""
    match args:
        case (Global(module=module, name=name), Global(), tuple(inner), *state) if len(state) <= 1:
            rebuilds = module in _REBUILDERS and name.startswith("_rebuild_")
            return rebuilds and of_tensors(inner) and new_attributes(args[3:])
    return False


def new_attributes(states: Arguments) -> bool:
    """True if a state sets no attribute that tensors have: `data` would change its values, `__class__` its type.

    A state is a dictionary or a pair of them; others are for classes with `__setstate__`.
    """
    pairs = (state if type(state) is tuple and len(state) == 2 else (state,) for state in states)
    return not any(
        isinstance(part, Object)
        or (isinstance(part, dict) and (not _OF_TENSORS.isdisjoint(part) or _dunder(part)))
        or getattr(part, "attributes", None)  # an `items` among them would be called
        for pair in pairs
        for part in pair
    )


def _dunder(names: Iterable[Any]) -> bool:
    return any(type(name) is str and name.startswith("__") for name in names)


# The attributes that can be set, except `requires_grad`, which torch itself writes this way. Source: torch 2.13,
# torch/_tensor.py and torch/csrc/autograd/python_variable.cpp
_OF_TENSORS = frozenset(
    "data grad _grad grad_dtype real imag names volatile _backward_hooks _post_accumulate_grad_hooks".split()
)
_REBUILDERS = ("torch._utils", "torch.nested._internal.nested_tensor")


def class_first(args: Arguments) -> bool:
    """`_rebuild_wrapper_subclass(class, …)`: a class by name, judged where it is, and facts of a tensor."""
    return bool(args) and type(args[0]) is Global and of_tensors(args[1:])


# Objects with their state --------------------------------------------------------------------------------------------


def same_application(node: Object) -> bool:
    """False where the state of a `functools.partial` has another function, or something that is not plain."""
    match node.state:
        case tuple((function, *values)) if len(values) == 3:
            return function is node.args[0] and _is_plain(values)
    return node.state is MISSING


def few_layers(node: Object) -> bool:
    """False for a module with impossibly many layers: a recurrent one loops over them when its state is set.

    Also for a state that is not a dictionary of attributes, which every layer has but the quantized convolutions: of
    these it is a tuple, whose weights are packed again.
    """
    state = node.state
    if not isinstance(state, dict):
        is_convolution = _module(node).endswith("nn.quantized.modules.conv") and _is_of(state, _CONVOLUTION)
        return state is MISSING or state is None or is_convolution
    layers = state.get("num_layers")
    named = len(state) <= _MOST_ATTRIBUTES and all(type(name) is str for name in state)
    return named and (type(layers) is not int or layers <= 10_000)


_MOST_ATTRIBUTES = 1_000  # of one module: every one of each object is looked at


def generated(node: Object) -> bool:
    """True for the state that Python gives a `random.Random`: a version, 625 numbers, a number or None."""
    match node.state:
        case tuple((_, tuple(numbers), _)):
            return len(numbers) == 625 and all(type(number) is int for number in numbers)
    return node.state is MISSING


def seeded(node: Object) -> bool:
    """True for the state that torch gives a `torch.Generator`: its seed, its offset, its bytes."""
    match node.state:
        case tuple((seed, offset, TensorEntry(shape=(_,)) as state)):
            return state.dtype.name == "u8" and type(seed) is int and (offset is None or type(offset) is int)
    return node.state is MISSING


def packed(node: Object) -> bool:
    """True for parameters packed by a backend with the state of their class (ATen/native/quantized).

    In a pickled module they are in a `torch.ScriptObject` with the name of the class.
    """
    state, name = node.state, _name(node.fn)
    if name == "torch.ScriptObject":
        state, name = state if type(state) is tuple and len(state) == 2 else (None, "")
    kinds = _PACKED.get(str(name).removeprefix(PACKED + "."))
    return kinds is not None and type(state) is tuple and any(_is_of(state, kind) for kind in kinds)


def _is_of(value: Any, kind: Any) -> bool:
    """True for a value that matches a pattern of types, tuples and lists; `None` matches a tensor or None."""
    if isinstance(kind, (tuple, list)):
        same = type(value) is type(kind) and len(value) == len(kind)
        return same and all(map(_is_of, value, kind))
    is_tensor = isinstance(value, (TensorEntry, Composite))
    return (value is None or is_tensor) if kind is None else is_tensor if kind is TensorEntry else type(value) is kind


PACKED = "__torch__.torch.classes"
_T = TensorEntry
_CONV = (str, [_T, _T], [None])
_PACKED: dict[str, list[Any]] = {
    "quantized.LinearPackedParamsBase": [(_T, None)],
    "quantized.Conv2dPackedParamsBase": [_CONV],
    "quantized.Conv3dPackedParamsBase": [_CONV],
    "quantized.EmbeddingPackedParamsBase": [(int, [_T], [], [int]), (int, [_T], [float], [int])],
    "rnn.CellParamsBase": [(str, [_T, _T], [], [int], [Object, Object]), (str, [], [], [], [Object, Object])],
}
CLASSES = tuple(_PACKED)
# Its shape and settings, its weight and bias, scale, zero point and mode. Source: torch/ao/nn/quantized/modules/conv.py
_CONVOLUTION = (int, int, *[tuple] * 4, bool, tuple, int, str, TensorEntry, None, float, int, bool)


def _module(node: Object) -> str:
    return node.fn.module if type(node.fn) is Global else ""


def _name(value: Any) -> str:
    return str(value) if type(value) is Global else ""
