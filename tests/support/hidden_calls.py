"""Pickles that hide something unknown: every known name, every way to hide something in its use, every kind of unknown
thing.

A case is three choices. What is hidden would leave a trace if it ran: functions of a decoy module, or of Python's that
an audit hook sees.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

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
