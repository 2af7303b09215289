"""A grammar of what people save: random graphs of everything that `torch.save` and pickle take, made from a seed.

`saved_graph(seed)` gives a checkpoint: a dictionary with weights under `model` (every key begins with `module.`) and
anything under `extra`: containers with keys of every kind, shared and cyclic, tensors of every type and layout, arrays,
dates, paths, whole modules, people's own classes. The same seed gives the same graph.
"""

import argparse
import collections
import dataclasses
import datetime
import decimal
import fractions
import functools
import io
import pathlib
import random
import types
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

from tests.support.own_classes import Colour, Items, Names, Net, Outer, Plain, Point, Record, Slotted, Stateful

STRINGS = ["", "a", "model.weight", "ключ", "重み", "\U0001f525", "a/b~c", "with space", "tab\tline\nend",
           "\x00\x1b[31m", "'quote\"", "é" * 40, "x" * 300]  # fmt: skip
NUMBERS = [0, 1, -1, 255, 256, 65535, 65536, -(1 << 31), (1 << 31) - 1, 1 << 31, -(1 << 63), 1 << 64, 10**40, -(10**40),
           0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 5e-324, 1.7976931348623157e308, 0.1,
           True, False, None, 1 + 2j, complex(float("nan"), -0.0)]  # fmt: skip
WITH_GRADIENTS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
DTYPES = [
    *(*WITH_GRADIENTS, torch.complex32, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
ARRAYS = "f8 f4 f2 i8 i4 i2 i1 u8 u4 u2 u1 c8 c16 ? M8[D] m8[s] U5 S4".split()


class Grammar:
    """Makes the graph of one seed. kinds: the names of the rules that were used.  pool: what may stand in another place
    too.  bases: tensors whose storages others may share.  left: values, so that no graph is very large."""

    def __init__(self, seed: int, protocol: int = 2, legacy: bool = False) -> None:
        self.random = random.Random(seed)
        self.protocol, self.legacy, self.left = protocol, legacy, 60
        self.kinds: set[str] = set()
        self.pool: list[Any] = []
        self.bases: list[torch.Tensor] = []

    def pick(self, choices: Any) -> Any:
        return self.random.choice(choices)

    def one_of(self, *makers: Callable[[], Any]) -> Any:
        return self.pick(makers)()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def count(self, most: int) -> int:
        return self.random.randrange(most + 1)

    def used(self, kind: str, value: Any) -> Any:
        self.kinds.add(kind)
        return value

    def pooled(self, made: Any) -> Any:
        """A container that may come to stand in itself: put into the pool before it is filled."""
        self.pool.append(made)
        return made

    def value(self, depth: int = 0) -> Any:
        """Anything: made now, or one that stands in another place already."""
        self.left -= 1
        if self.pool and self.chance(0.12):
            return self.used("shared", self.pick(self.pool))
        is_leaf = depth > 4 or self.left < 0 or self.chance(0.35)
        rules = LEAVES if is_leaf else CONTAINERS if self.chance(0.55) else OTHERS
        name = self.pick(sorted(rules))
        made = self.used(name, rules[name](self, depth + 1))
        if name not in LEAVES or self.chance(0.3):
            self.pool.append(made)
        return made

    def values(self, depth: int, most: int = 4) -> list[Any]:
        return [self.value(depth) for _ in range(self.count(most))]

    def attributes(self, depth: int) -> dict[str, Any]:
        return {name: self.value(depth) for name in self.random.sample(["a", "b", "_c", "lr"], self.count(3))}

    def text(self) -> str:
        return self.pick(STRINGS) + (str(self.count(99)) if self.chance(0.5) else "")

    def key(self) -> Any:
        """A dictionary key; equal ones of several types are not made."""
        people = [torch.float16, Colour.RED, datetime.date(2024, 1, 2)]
        return self.one_of(
            *[self.text] * 4,
            lambda: self.pick([2, 7, 1 << 40, -5]),
            lambda: self.pick([True, None, 0.5, float("inf")]),
            lambda: ("t", self.pick([3, 4]), (self.text(), None)),
            lambda: self.random.randbytes(3),
            lambda: frozenset({"f", self.pick([1, 2])}),
            lambda: self.used("people", self.pick(people)),
        )

    def weights(self) -> collections.OrderedDict[str, Any]:
        """A state dict as DataParallel leaves it: every key with its prefix, `_metadata`, ties and views."""

        def finite(dtype: torch.dtype, count: int) -> torch.Tensor:
            made = random_bits(self, dtype, count)
            return made.where(made.isfinite(), torch.ones((), dtype=dtype))

        state: Any = collections.OrderedDict()
        for number in range(1 + self.count(4)):
            made = finite(self.pick([torch.float32, torch.bfloat16]), 12)
            state[f"module.layer{number}.weight"] = made.reshape(3, 4)
        first = state["module.layer0.weight"]
        for share, name, make in (
            (0.4, "tied.weight", lambda: first),
            (0.4, "part.weight", lambda: first.t()[1:]),
            (0.3, "steps", lambda: torch.tensor(self.count(100))),
            (0.3, "minus", lambda: torch._neg_view(finite(torch.float32, 4))),
            (0.3, "kept", lambda: nn.Parameter(finite(torch.float32, 2))),
        ):
            if self.chance(share):
                state[f"module.{name}"] = make()
        if self.chance(0.6):
            state._metadata = {"": {"version": 1}, "module": {"version": 2}, "module.layer0": {"version": 1}}
        return state

    def graph(self) -> dict[Any, Any]:
        made: dict[Any, Any] = {"model": self.weights(), "epoch": self.count(9)}
        self.pool += [made, made["model"], made["model"]["module.layer0.weight"]]
        if self.chance(0.5):
            self.bases += [value for value in made["model"].values() if value.dim() == 1 or value.numel() == 12][:1]
        made["extra"] = [self.value() for _ in range(3 + self.count(5))]
        return made


# Containers, leaves -------------------------------------------------------------------------------------------------


def raw(g: Grammar, _: int) -> Any:
    made = g.random.randbytes(g.pick([0, 1, 5, 300]))
    return bytearray(made) if g.chance(0.4) else made


def mapping(g: Grammar, depth: int) -> Any:
    made = g.pooled(g.pick([dict, collections.OrderedDict, Names])())
    for _ in range(g.count(5)):
        made[g.key()] = g.value(depth)
    if type(made) is not dict and g.chance(0.3):
        vars(made).update(g.attributes(depth))
    return made


def other_mapping(g: Grammar, depth: int) -> Any:
    if g.chance(0.3):
        return collections.Counter({g.text(): g.count(5) for _ in range(g.count(3))})
    factory = g.pick([None, list, int, dict, collections.OrderedDict])
    made = g.pooled(collections.defaultdict(factory))
    made.update((g.key(), g.value(depth)) for _ in range(g.count(4)))
    return made


def sequence(g: Grammar, depth: int) -> Any:
    made = g.pooled(g.pick([list, list, Items])())
    made.extend(g.values(depth))
    if type(made) is Items:
        vars(made).update(g.attributes(depth))
    return made


def long_sequence(g: Grammar, _: int) -> Any:
    many = g.pick([999, 1000, 1001, 2000])
    return list(range(many)) if g.chance(0.5) else dict.fromkeys(range(many), "v")


# Tensors, arrays ----------------------------------------------------------------------------------------------------


def random_bits(g: Grammar, dtype: torch.dtype, count: int) -> torch.Tensor:
    """A flat tensor of random bits; of truths and numbers."""
    if dtype is torch.bool:
        return torch.tensor([g.chance(0.5) for _ in range(count)], dtype=torch.bool)
    size = count * dtype.itemsize
    content = bytearray(g.random.randbytes(size)) or bytearray(1)
    return torch.frombuffer(content, dtype=torch.uint8)[:size].clone().view(dtype)


def view(g: Grammar, base: torch.Tensor) -> torch.Tensor:
    base = base.flatten() if base.dim() > 1 and base.is_contiguous() else base
    count = base.numel()
    if count < 6 or base.dim() != 1:
        scalar = [lambda: base.reshape(())] if count == 1 else []
        return g.one_of(*scalar, lambda: base, lambda: base.unsqueeze(-1))  # type: ignore[no-any-return]
    return g.one_of(  # type: ignore[no-any-return]
        lambda: base.reshape(2, -1).t(),
        lambda: base[2:5],
        lambda: base[::2],
        lambda: base[:3].reshape(3, 1).expand(3, 4),
        lambda: base.reshape(2, 3, -1).permute(2, 0, 1),
        lambda: base[:0].reshape(0, 3),
        lambda: base,
        lambda: base.reshape(3, -1)[1],
    )


def strided(g: Grammar, _: int) -> torch.Tensor:
    """A strided tensor of any type: some share a storage, some see it turned, repeated, conjugated or from its
    middle."""
    if g.bases and g.chance(0.4):
        base = g.used("shared storage", g.pick(g.bases))
    else:
        base = random_bits(g, g.pick(DTYPES), g.pick([0, 1, 6, 12, 24]))
        g.bases.append(base)
    made = view(g, base)
    if base.dtype.is_complex and base.dtype is not torch.complex32 and g.chance(0.3):
        made = g.used("conjugate", made.conj())
    if (base.dtype.is_floating_point or base.dtype.is_complex) and base.dtype.itemsize > 1 and g.chance(0.15):
        made = g.used("negative", torch._neg_view(made))
    kind = g.count(9)
    if kind > 4 or (kind in (0, 1, 4) and base.dtype not in WITH_GRADIENTS):
        return made
    made = made.detach()
    if kind in (1, 4):
        made = nn.Parameter(made, requires_grad=g.chance(0.7))
    if kind in (3, 4):
        made.note, made.other = g.text(), [g.pick(NUMBERS)]  # type: ignore[attr-defined]
        g.used("tensor with attributes" if kind == 3 else "parameter with attributes", made)
    return made.requires_grad_() if kind == 0 else nn.Buffer(made) if kind == 2 else made


def quantized_tensor(g: Grammar, _: int) -> Any:
    dtype, values = g.pick([torch.quint8, torch.qint8, torch.qint32]), torch.arange(6.0).reshape(2, 3)
    scales = torch.tensor([0.5, 0.25]).double()
    return g.one_of(
        lambda: torch.quantize_per_tensor(values, 0.25, 3, dtype),
        lambda: torch.quantize_per_channel(values, scales, torch.tensor([0, 1]), 0, dtype),
    )


def sparse_tensor(g: Grammar, _: int) -> Any:
    values = torch.tensor([[1.0, 0, 2], [0, 0, 3]], dtype=g.pick([torch.float32, torch.int64, torch.complex64]))
    return g.one_of(
        values.to_sparse,
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 3)),
        values.to_sparse_csc,
        values.to_sparse_csr,
        lambda: torch.ones(4, 4).to_sparse_bsr((2, 2)),
    )


def nested(g: Grammar, _: int) -> Any:
    parts = [random_bits(g, torch.float32, 3 * n).reshape(n, 3) for n in (2, 1)]
    # Torch looks at their sizes before it has read them, in old files.
    is_strided = not g.legacy and g.chance(0.5)
    return torch.nested.nested_tensor(parts, layout=torch.strided if is_strided else torch.jagged)


def of_torch(g: Grammar, _: int) -> Any:
    return g.one_of(
        lambda: g.pick(DTYPES), lambda: torch.device(g.pick(["cpu", "cuda:1", "meta"])), lambda: torch.Size([2, 3]),
        torch.get_rng_state, lambda: torch.sparse_coo, lambda: torch.per_channel_affine,
        lambda: torch.UntypedStorage(g.count(5)), lambda: torch.empty(2, 3, device="meta"),
        lambda: g.used("memory format", torch.channels_last) if g.protocol >= 4 else torch.strided,
    )  # fmt: skip


def array(g: Grammar, _: int) -> Any:
    code = g.pick(ARRAYS)
    kind = numpy.dtype(code).newbyteorder(g.pick("<>"))
    if kind.kind in "US":
        return numpy.array(["ab", "", "xyz"], kind)
    count = g.pick([0, 1, 6, 12])
    made = numpy.frombuffer(g.random.randbytes(count * kind.itemsize), kind).copy()
    made = numpy.arange(count) % 2 == 0 if code == "?" else made
    if count < 6:
        return made.reshape(()) if count == 1 and g.chance(0.5) else made
    two = made.reshape(2, -1)
    return g.one_of(lambda: made, lambda: numpy.asfortranarray(two), lambda: made[::2], lambda: made.reshape(3, -1))


def odd_array(g: Grammar, _: int) -> Any:
    return g.one_of(
        lambda: numpy.array([None, "x", 3], object),
        lambda: numpy.zeros(2, [("a", ">i4"), ("b", "<f8", (2,)), ("c", "U3")]),
        lambda: numpy.float64(g.count(9)),
        lambda: numpy.float32("nan"),
        lambda: numpy.str_("text"),
        lambda: numpy.datetime64("2024-01-01"),
        lambda: numpy.dtype(">i4"),
        lambda: numpy.random.RandomState(3),
        lambda: numpy.random.default_rng(3),
        lambda: numpy.random.RandomState(3).get_state(),
        lambda: numpy.ma.masked_array([1, 2], [True, False]),
    )


# Objects ------------------------------------------------------------------------------------------------------------


def of_python(g: Grammar, depth: int) -> Any:
    names = [int, dict, collections.OrderedDict, nn.Linear, torch.optim.SGD, len, torch.relu]
    return g.one_of(
        lambda: datetime.datetime(2024, 2, 29, 12, 30, tzinfo=g.pick([None, datetime.timezone.utc])),
        lambda: datetime.timedelta(days=-1, microseconds=5),
        lambda: decimal.Decimal("-1.50"),
        lambda: fractions.Fraction(1, 3),
        lambda: uuid.UUID(int=5),
        lambda: pathlib.PurePosixPath("/a/b.pt"),
        lambda: pathlib.Path("runs") / "x",
        lambda: argparse.Namespace(**g.attributes(depth)),
        lambda: types.SimpleNamespace(**g.attributes(depth)),
        lambda: functools.partial(int, base=g.pick([2, 16])),
        lambda: range(1, 9, 2),
        lambda: slice(None, 3),
        lambda: g.pick(names),
        lambda: ...,
    )


def slotted(g: Grammar, depth: int) -> Any:
    made: Any = g.pooled(Slotted())
    made.one, made.extra = g.value(depth), g.value(depth)
    return made


def plain_object(g: Grammar, depth: int) -> Any:
    made = g.pooled(Plain())
    vars(made).update(g.attributes(depth))
    return made


def of_people(g: Grammar, depth: int) -> Any:
    return g.one_of(
        lambda: slotted(g, depth),
        lambda: Stateful(g.value(depth)),
        lambda: Record(g.text(), g.values(depth)),
        lambda: Point(g.value(depth), g.value(depth)),
        lambda: g.pick(list(Colour)),
        lambda: g.used("name", g.pick([Plain, Point, Net, Colour])),
        *[lambda: plain_object(g, depth)] * 2,
    )


def nested_class(g: Grammar, depth: int) -> Any:
    choices = [Outer.Inner, Outer.Inner.Innermost, Outer.function]
    return g.pick(choices) if g.chance(0.4) else g.pick(choices[:2])(**g.attributes(depth))


def whole_module(g: Grammar, depth: int) -> Any:
    torch.manual_seed(g.count(1000))
    made = g.one_of(
        Net,
        lambda: nn.LSTM(2, 3),
        lambda: nn.Sequential(nn.Conv1d(1, 2, 3), nn.LayerNorm(3), nn.Dropout()),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.ModuleDict({"e": nn.Embedding(3, 2, padding_idx=0)}),
        lambda: nn.GRU(2, 2),
    )
    if g.chance(0.4):
        made.extra = g.value(depth)
    return made.eval() if g.chance(0.2) else made


def trained_state(g: Grammar, _: int) -> Any:
    """The state of an optimizer or a schedule after a step, or a whole one."""
    model = nn.Linear(2, 2)
    optimizer: Any = g.pick([torch.optim.SGD, torch.optim.Adam])(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return g.one_of(optimizer.state_dict, schedule.state_dict, lambda: optimizer)


Rule = Callable[[Grammar, int], Any]
LEAVES: dict[str, Rule] = {
    "number": lambda g, _: g.pick([*NUMBERS, g.random.getrandbits(80)]),
    "text": lambda g, _: g.text(),
    "raw": raw,
    "strided": strided,
}
CONTAINERS: dict[str, Rule] = {
    "mapping": mapping,
    "other mapping": other_mapping,
    "sequence": sequence,
    "tuple": lambda g, depth: tuple(g.values(depth, 5)),
    "set": lambda g, _: g.pick([set, frozenset])(g.key() for _ in range(g.count(4))),
    "deque": lambda g, depth: collections.deque(g.values(depth), maxlen=g.pick([None, 7])),
}
OTHERS: dict[str, Rule] = {
    "long sequence": long_sequence, "quantized": quantized_tensor, "sparse": sparse_tensor, "nested": nested,
    "torch": of_torch, "array": array, "odd array": odd_array, "python": of_python, "people": of_people,
    "nested class": nested_class, "module": whole_module, "training": trained_state,
}  # fmt: skip
KINDS = {*LEAVES, *CONTAINERS, *OTHERS}


@dataclasses.dataclass(frozen=True)
class Graph:
    """A saved graph. `data`: the file.  legacy: written as torch did before 1.6."""

    seed: int
    data: bytes
    kinds: frozenset[str]
    protocol: int
    legacy: bool


def saved_graph(seed: int) -> Graph | None:
    """The graph of a seed as torch saves it; None where torch itself cannot (it cannot load it, or refuses to save
    it)."""
    protocol, legacy = random.Random(-seed).choice([2, 2, 3, 4, 5]), random.Random(~seed).random() < 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grammar = Grammar(seed, protocol, legacy)
        graph, buffer = grammar.graph(), io.BytesIO()
        try:
            torch.save(graph, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
            buffer.seek(0)
            torch.load(buffer, weights_only=False)  # our own, just made
        except Exception:  # noqa: BLE001 (what torch cannot do says nothing of ckptool)
            return None
    return Graph(seed, buffer.getvalue(), frozenset(grammar.kinds), protocol, legacy)
