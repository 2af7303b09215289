"""Pickles that hide something unknown: every known name, every way to hide something in its use, every kind of unknown
thing.

A case is three choices. What is hidden would leave a trace if it ran: functions of a decoy module, or of Python's that
an audit hook sees.
"""

import faulthandler
import fractions
import io
import logging
import os
import random
import re
import resource
import shutil
import signal
import sys
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct, scalar
from torch import nn

from ckptool.pickles import known
from tests.support.hostile_inputs import integer, name, program, storage, tensor, text

DECOY = "ckptool_marker"
RUN = name(DECOY, "run")


def _stacked(module: str, attribute: str) -> bytes:
    """STACK_GLOBAL: may be dotted."""
    return text(module) + text(attribute) + b"\x93"


# What is hidden: the opcodes that leave it on the stack, and the words of which one must be in every mention of it.
UNKNOWN: dict[str, tuple[bytes, str]] = {
    "a call": (RUN + text("trace") + b"\x85R", DECOY),
    "a call without arguments": (RUN + b")R", DECOY),
    "a name": (RUN, DECOY),
    "a name of Python's": (name("posix", "system"), "posix.system"),
    "an object with arguments": (RUN + text("trace") + b"\x85\x81", DECOY),
    "an object with keywords": (RUN + b")}" + text("a") + text("trace") + b"s\x92", DECOY),
    "INST": (b"(" + text("trace") + f"i{DECOY}\nrun\n".encode(), DECOY),
    "INST without arguments": (f"(i{DECOY}\nrun\n".encode(), DECOY),
    "OBJ": (b"(" + RUN + text("trace") + b"o", DECOY),
    "OBJ without arguments": (b"(" + RUN + b"o", DECOY),
    "map": (name("builtins", "map") + b"(" + name("posix", "system") + b"](" + text("trace") + b"et\x81",
        "posix.system"),
    "a dotted name": (_stacked("collections", "OrderedDict.fromkeys") + b"]\x85R", "OrderedDict.fromkeys"),
    "a dotted name of a known module": (_stacked("omegaconf.nodes", "Path.write_text") + b")R", "Path.write_text"),
    "a name that a known module imports": (name("omegaconf.nodes", "Path") + text("trace") + b"\x85R",
        "omegaconf.nodes"),
    "a class that touches files": (name("numpy", "memmap") + text("trace") + text("w+") + b"\x86\x81", "numpy.memmap"),
    "an unlisted class of torch": (name("torch.package", "PackageImporter") + b")\x81", "torch.package"),
    "an unlisted class of Python's": (name("zipfile", "ZipFile") + b")\x81", "zipfile"),
    "getattr": (name("builtins", "getattr") + RUN + text("__call__") + b"\x86R", DECOY),
    "eval": (name("builtins", "eval") + text("1") + b"\x85R", "builtins.eval"),
    "a codec": (name("_codecs", "encode") + text("trace") + text("rot13") + b"\x86R", "_codecs.encode"),
    "a function that is called": (RUN + b")R)R", DECOY),
    "a nested pickle": (name("pickle", "loads") + b"C\x03K\x01.\x85R", "pickle.loads"),
    "a partial": (name("functools", "partial") + RUN + b"\x85R", DECOY),
    "a state with a class": (name("models", "Net") + b")\x81N}" + text("__class__") + RUN + b"s\x86b", DECOY),
}  # fmt: skip

# How it is hidden in the use of a known name. {0}: the name, {1}: what is hidden.
_WAYS: dict[str, tuple[bytes, ...]] = {
    "argument": (b"{0}", b"{1}", b"\x85R"),
    "second argument": (b"{0}", text("a"), b"{1}", b"\x86R"),
    "third argument": (b"{0}", text("a"), b"K\x01", b"{1}", b"\x87R"),
    "argument of NEWOBJ": (b"{0}", b"{1}", b"\x85\x81"),
    "keyword": (b"{0}", b")}", text("k"), b"{1}", b"s\x92"),
    "argument of INST": (b"(", b"{1}", b"{2}"),
    "argument of OBJ": (b"(", b"{0}", b"{1}", b"o"),
    "in a list": (b"{0}", b"](", b"{1}", b"e\x85R"),
    "in a tuple in a list": (b"{0}", b"](", text("k"), b"{1}", b"\x86e\x85R"),
    "in a dictionary": (b"{0}", b"}", text("k"), b"{1}", b"s\x85R"),
    "in a set": (b"{0}", b"\x8f(", b"{1}", b"\x90\x85R"),
    "state": (b"{0}", b")\x81", b"{1}", b"b"),
    "in its state": (b"{0}", b")\x81}", text("k"), b"{1}", b"sb"),
    "in the state of its slots": (b"{0}", b")\x81N}", text("k"), b"{1}", b"s\x86b"),
    "in a state in a tuple": (b"{0}", b")\x81(K\x01", b"{1}", b"Ntb"),
    "state of a call": (b"{0}", b")R}", text("k"), b"{1}", b"sb"),
    "item": (b"{0}", b")\x81", text("k"), b"{1}", b"s"),
    "item of a call": (b"{0}", b")R", text("k"), b"{1}", b"s"),
    "element": (b"{0}", b")\x81", b"{1}", b"a"),
    "element that is added": (b"{0}", b")\x81(", b"{1}", b"\x90"),
    "thrown away": (b"{1}", b"0", b"{0}", b")\x81"),
    "thrown away with it": (b"{0}", b"{1}", b"\x85R0K\x01"),
    "beside it in a list": (b"](", b"{0}", b"{1}", b"e"),
    "in an object of somebody's own": (name("models", "Net"), b")\x81}", text("k"), b"{0}", text("h"), b"{1}",
        b"\x86\x86sb"),
}  # fmt: skip

# Ways that need no known name.
_ALONE: dict[str, tuple[bytes, ...]] = {
    "value": (b"{1}",),
    "key": (b"}", b"{1}", b"K\x01s"),
    "key in a tuple": (b"}", b"{1}", b"\x85K\x01s"),
    "hooks of a tensor": (
        name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage() + integer(0) + b"K\x04\x85K\x01\x85\x89}K\x00",
        b"{1}", b"stR"),
    "attribute of a parameter": (
        name("torch._utils", "_rebuild_parameter_with_state") + b"(" + tensor((4,), (1,)) + b"\x88",
        name("collections", "OrderedDict") + b")R}" + text("k"), b"{1}", b"stR"),
    "class of a tensor": (
        name("torch._tensor", "_rebuild_from_type_v2") + b"(" + name("torch._utils", "_rebuild_tensor_v2"), b"{1}",
        b"(" + storage() + integer(0) + b"K\x04\x85K\x01\x85\x89" + name("collections", "OrderedDict") + b")Rt}tR"),
    "function of a tensor": (name("torch._tensor", "_rebuild_from_type_v2") + b"(", b"{1}",
        name("torch", "Tensor") + b")}tR"),
    "attribute of an OrderedDict": (name("collections", "OrderedDict") + b")R}" + text("_metadata"), b"{1}", b"sb"),
}  # fmt: skip


class HiddenCall(NamedTuple):
    """A pickle of `{"state_dict": {"a.weight": …}, "x": …}` whose last entry hides something; `word` is in its name."""

    title: str
    pickle: bytes
    word: str


def known_names() -> list[tuple[str, str]]:
    """Every name of the table, with the module that it is listed under."""
    return sorted(known._KINDS)


def combinations() -> int:
    """How many cases there are."""
    return (len(_ALONE) + len(_WAYS) * len(known_names())) * len(UNKNOWN)


def hidden_calls(rng: random.Random) -> Iterator[HiddenCall]:
    """Cases without end. Every way comes as often as any other, and so does every kind of known name, whatever their
    numbers."""
    kinds: dict[known.Kind, list[tuple[str, str]]] = {}
    for listed in known_names():
        kinds.setdefault(known._KINDS[listed], []).append(listed)
    ways = [*_ALONE, *_WAYS]
    while True:
        way, what = rng.choice(ways), rng.choice([*UNKNOWN])
        hidden, word = UNKNOWN[what]
        if way in _ALONE:
            yield _case(f"{what} as {way}", _ALONE[way], b"", hidden, word, ("", ""))
        else:
            module, attribute = rng.choice(kinds[rng.choice([*kinds])])
            title = f"{what} as {way} of {module}.{attribute}"
            yield _case(title, _WAYS[way], name(module, attribute), hidden, word, (module, attribute))


def _case(
    title: str, parts: tuple[bytes, ...], listed: bytes, hidden: bytes, word: str, of: tuple[str, str]
) -> HiddenCall:
    inst = b"i" + "\n".join(of).encode() + b"\n"
    body = b"".join({b"{0}": listed, b"{1}": hidden, b"{2}": inst}.get(part, part) for part in parts)
    weights = name("collections", "OrderedDict") + b")R" + text("a.weight") + tensor((4,), (1,)) + b"s"
    return HiddenCall(title, program(b"}(" + text("state_dict") + weights + text("x") + body + b"u", 4), word)


# Effects --------------------------------------------------------------------------------------------------------------
# Files of kinds that everybody has, with one effect hidden where only what loads them would meet it; and real torch's
# word on them, in a process of its own.
# A case is an object for `torch.save`, or a whole file; what runs leaves a file behind, crashes, or goes on for ever.


class Call:
    """What pickles as a call with any arguments, state, items and elements. Nothing is called here."""

    def __init__(self, fn: Any, args: Any = (), state: Any = None, items: Any = None, elements: Any = None) -> None:
        self.parts = (fn, args, state, iter(elements) if elements else None, iter(items) if items else None)

    def __reduce__(self) -> Any:
        return self.parts

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What the pickler compares with the class of NEWOBJ."""
        function, args = self.parts[:2]
        return args[0] if function.__name__ == "__newobj__" else Call


def new(cls: Any) -> tuple[Any, ...]:
    """What makes an object of a class without arguments, as NEWOBJ."""
    return _newobj, (cls,)


def _newobj(cls: Any) -> Any:
    return cls.__new__(cls)


_newobj.__name__ = "__newobj__"


class HiddenEffect(NamedTuple):
    title: str
    content: bytes
    fine: bool  # as the library itself writes it


def torch_saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save({"w": torch.ones(2), "x": value}, stream)
    return stream.getvalue()


# numpy ---------------------------------------------------------------------------------------------------------------

_PLAIN = ("i1", "f4", ">f8", "S3", "U2", "O", "M8[ns]", "c8", "?")


def _element_type(rng: random.Random, depth: int = 0) -> np.dtype[Any]:
    how = rng.randrange(4 if depth < 2 else 1)
    if how == 0:
        return np.dtype(rng.choice(_PLAIN))
    if how == 1:
        return np.dtype((_element_type(rng, depth + 1), (rng.randint(1, 3),)))
    fields = [(f"f{n}", _element_type(rng, depth + 1)) for n in range(rng.randint(1, 3))]
    return np.dtype(fields, align=rng.random() < 0.4)


def _spelled(dtype: np.dtype[Any], change: Callable[[np.dtype[Any], list[Any], list[Any]], None]) -> Call:
    """The type with what it is made of, each a call whose parts `change` may change."""
    function, args, state = dtype.__reduce__()  # type: ignore[misc]
    args, state = list(args), list(state)  # type: ignore[call-overload]
    if state[2] is not None:
        state[2] = (_spelled(state[2][0], change), state[2][1])
    if state[4] is not None:
        state[4] = {name: (_spelled(field[0], change), *field[1:]) for name, field in state[4].items()}
    change(dtype, args, state)
    return Call(function, tuple(args), tuple(state))


_INTS = (-1, 0, 1, 7, 8, 27, 63, 64, 1 << 20, (1 << 31) - 1, 1 << 40)


def _one_lie(rng: random.Random, args: list[Any], state: list[Any]) -> None:
    """One part of a state is another."""
    match rng.randrange(9):
        case 0 if state[4]:
            name = rng.choice([*state[4]])
            state[4][name] = (state[4][name][0], rng.choice(_INTS), *state[4][name][2:])
        case 1 if state[4]:
            name = rng.choice([*state[4]])
            other = rng.choice((b"O", "O", "f8", np.float64, None, Call(np.dtype, ("O8", False, True)), 3))
            state[4][name] = (other, *state[4][name][1:])
        case 2:
            state[rng.choice((5, 6, 7))] = rng.choice(_INTS)
        case 3:
            del state[rng.randint(4, 7) :]
        case 4:
            args[0] = rng.choice(("O8", "V8", "V0", "S8", "f8", "O,O", "V2147483647"))
        case 5:
            state[2] = (Call(np.dtype, (rng.choice(("O8", "f8")), False, True)), rng.choice(((1 << 20,), (3, -1), 2)))
        case 6:
            state[3] = rng.choice((None, (), ("f0",), ("a", "a"), ("f0", 3), "f0"))
        case 7:
            state[3], state[4] = ("a",), {"a": (Call(np.dtype, ("O8", False, True)), 0)}
        case _:
            state.append(rng.choice((None, {"a": 1}, (None, (b"ns", 1, 1, 1)))))


def numpy_state(rng: random.Random) -> HiddenEffect:
    dtype = _element_type(rng)
    fine = rng.random() < 0.2 and dtype.subdtype is None  # an array has no type with a shape of its own
    at = rng.randrange(3)
    seen = [0]

    def change(_: Any, args: list[Any], state: list[Any]) -> None:
        if not fine and seen[0] == at:
            _one_lie(rng, args, state)
        seen[0] += 1

    kind = _spelled(dtype, change)
    lied = not fine and seen[0] > at
    shape: Any = (rng.randint(0, 3),)
    array = np.zeros(shape, dtype)
    data = array.__reduce__()[2][4]  # type: ignore[index]
    if not lied and not fine:
        shape, data = rng.choice(
            [(shape, b"\1" * 8), ((1 << 40,), data), ((-1,), data), (shape, [3]), ((3, 1 << 62), data), (shape, None)]
        )
    if rng.random() < 0.15 and not dtype.hasobject and dtype.subdtype is None:
        return HiddenEffect(f"scalar {dtype}", torch_saved(Call(scalar, (kind, bytes(dtype.itemsize)))), fine)
    made = Call(_reconstruct, (np.ndarray, (0,), b"b"), (1, shape, kind, False, data))
    return HiddenEffect(f"array {dtype}", torch_saved(made), fine)


# Constructors --------------------------------------------------------------------------------------------------------


def constructor(rng: random.Random) -> HiddenEffect:
    """Something small whose argument asks for a lot; and the same as people have it."""
    many = rng.choice((10_000, 1_000_000, 100_000_000))
    kind, args, fine = rng.choice(
        [
            (fractions.Fraction, (f"1e{many}",), False),
            (fractions.Fraction, (f"-1.5E+{many}",), False),
            (fractions.Fraction, (3, 4), True),
            (fractions.Fraction, ("-3/4",), True),
            (Decimal, ("1.50E-7",), True),
            (int, ("9" * 300_000,), False),
            (bytearray, (many * 100,), False),
            (bytes, (many * 100,), False),
            (deque, ([1, 2], 3), True),
            (complex, ("1+2j",), True),
            (range, (0, many, 2), True),
            (torch.Generator, (), True),
            (_reconstruct, (np.ndarray, (many, 100), b"b"), False),
            (scalar, (np.dtype(f"V{many}"),), False),
            (re._compile, ("[a-z]+", 34), True),
            (re._compile, ("[\0-\U0010ffff]" * 20_000, 34), False),
            (logging.getLogger, ("a.b",), True),
            (logging.getLogger, ("a." * 60_000,), False),
        ]
    )
    return HiddenEffect(f"{kind.__name__} {str(args)[:40]}", torch_saved(Call(kind, args)), fine)


# torch ---------------------------------------------------------------------------------------------------------------

_ODD = (None, (), {}, 1, "x", (1, None, None), (None, None), (1, 2, 3), ((), ""), (torch.ones(2), None))


def backend_state(rng: random.Random) -> HiddenEffect:
    """States of objects whose C++ code takes them at their word."""
    generator = torch.Generator().manual_seed(rng.randrange(99))
    packed = torch.ops.quantized.linear_prepack(
        torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8), torch.ones(2)
    )
    if rng.random() < 0.2:
        layers = rng.choice((2, 10**8))
        state = {**nn.LSTM(2, 2, 2).__getstate__(), "num_layers": layers, "_all_weights": [[1]]}
        return HiddenEffect(f"LSTM of {layers}", torch_saved(Call(*new(nn.LSTM), state)), layers == 2)
    value = rng.choice((generator, packed))
    function, args, state = value.__reduce_ex__(2)[:3]
    if rng.random() < 0.25:
        return HiddenEffect(f"a {type(value).__name__}", torch_saved(value), True)
    state = rng.choice(_ODD) if rng.random() < 0.6 else (rng.choice(_ODD), *state[1:])
    return HiddenEffect(f"{type(value).__name__} with {state!r}", torch_saved(Call(function, args, state)), False)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x))  # type: ignore[no-any-return]


@cache
def _script() -> bytes:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(_Net()), stream)
    return stream.getvalue()


TRACE = "TRACE-"  # replaced by the path of the file that is left behind, of the same length


def script_program(rng: random.Random) -> HiddenEffect:
    """A TorchScript archive in which a class has a `__setstate__` that writes a file; or only methods that would."""
    runs = rng.random() < 0.8
    kind = rng.choice(("Any", "Dict[str, Tensor]", "Tuple[int, Tensor]", "int"))
    where = rng.choice(("linear", "container", "activation", "hidden"))
    deflated = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    own = rng.choice(("", "    x = 1\n", "    if True:\n      pass\n    else:\n      pass\n"))
    name = "__setstate__" if runs else "setstate"
    body = f"{own}    ops.aten.save(torch.zeros([1]), {TRACE!r})\n    return None\n".replace("'", '"')
    done = False
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_script())) as archive, zipfile.ZipFile(out, "w", deflated) as made:
        for record in archive.namelist():
            data = archive.read(record)
            if re.search(rf"/code/.*\b{where}(/___torch_mangle_\d+)?\.py$", record) and not done:
                owner = ".".join(record.partition("/code/")[2].removesuffix(".py").split("/"))
                found = re.search(rb"class (\w+)\(Module\)", data)
                assert found is not None
                of = f"{owner}.{found[1].decode()}"
                both = f"  def __getstate__(self: {of}) -> {kind}:\n    return uninitialized({kind})\n" * runs
                method = f"{both}  def {name}(self: {of},\n    state: {kind}) -> NoneType:\n{body}".encode()
                data = data.replace(b"  def forward", method + b"  def forward", 1)
                done = True
            made.writestr(record, data)
    assert done, where
    return HiddenEffect(f"program in {where}: {kind}", out.getvalue(), not runs)


def required(rng: random.Random) -> HiddenEffect:
    """Items and elements set on classes of what torch installs."""
    import fsspec
    import sympy

    value = rng.choice(
        [
            Call(*new(fsspec.mapping.FSMap), {"fs": fsspec.filesystem("file"), "root": TRACE}, [("a", b"x")]),
            Call(*new(sympy.Matrix), {"_flat": [0], "_rep": None}, [((0, 0), f"open({TRACE!r}, 'w')")]),
            Call(*new(rng.choice((sympy.Symbol, sympy.Dict))), {"a": 1}, [("a", 1)]),
        ]
    )
    return HiddenEffect("items of a required library", torch_saved(OrderedDict(a=value)), False)


FAMILIES = (numpy_state, numpy_state, constructor, backend_state, script_program, required)


def hidden_effects(rng: random.Random) -> Iterator[HiddenEffect]:
    while True:
        yield rng.choice(FAMILIES)(rng)


# The judge -----------------------------------------------------------------------------------------------------------

SECONDS, BYTES = 1, 3 << 30


def fate(content: bytes, folder: Path) -> str:
    """What stock torch does with a file: `ran`, `crashed`, `took for ever`, `took all memory`; else an empty text."""
    trace, file = folder / "t", folder / "in.pt"
    file.write_bytes(content)
    trace.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _load_and_leave(file, trace)
    _, status = os.waitpid(child, 0)
    if any(trace.parent.glob("TRACE*")) or trace.exists():
        for left in trace.parent.glob("TRACE*"):
            left.unlink() if left.is_file() else shutil.rmtree(left)
        return "ran"
    if os.WIFSIGNALED(status):
        return "took for ever" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL) else "crashed"
    return "took all memory" if os.WEXITSTATUS(status) == 3 else ""


def _load_and_leave(file: Path, trace: Path) -> None:
    code = 0
    try:
        faulthandler.disable()
        os.chdir(trace.parent)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        if sys.platform == "linux":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(20)
        found = torch.load(file, weights_only=False)
        if isinstance(found, dict):
            value = found["x"]
            if isinstance(value, np.ndarray):
                repr(value.copy()), value.tolist()
            repr(value)
    except MemoryError:
        code = 3
    except BaseException:  # noqa: BLE001 (anything may be raised; what matters is what ran)
        code = 1
    finally:
        os._exit(code)
