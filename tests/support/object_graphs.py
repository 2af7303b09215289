"""A grammar of what people save: random graphs of everything that `torch.save` and pickle take, made from a seed.

`saved_graph(seed)` gives a checkpoint: a dictionary with weights under `model` (every key begins with `module.`) and
anything under `extra`: containers with keys of every kind, shared and cyclic, tensors of every type and layout, arrays,
dates, paths, whole modules, people's own classes. The same seed gives the same graph. Others may take parts of it:
`Grammar(seed).value()`, `.tensor()`, `.array()`.
"""

from __future__ import annotations

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

from tests.support.own_classes import Colour, Items, Names, Net, Outer, Plain, Point, Record, Slotted, Stateful
from tests.support.random_tensors import Piece, TensorGrammar

# The grammar ---------------------------------------------------------------------------------------------------------

NUMPY_CODES = [
    "f8",
    "f4",
    "f2",
    "i8",
    "i4",
    "i2",
    "i1",
    "u8",
    "u4",
    "u2",
    "u1",
    "c8",
    "c16",
    "?",
    "M8[D]",
    "m8[s]",
    "U5",
    "S4",
]


class Grammar(TensorGrammar):
    """Makes the graph of one seed. `kinds`: the names of the rules that were used."""

    def __init__(self, seed: int, protocol: int = 2, legacy: bool = False) -> None:
        super().__init__(seed, protocol, legacy)
        self.pool: list[Any] = []  # what may stand in another place too
        self.left = 60  # values, so that no graph is very large

    def value(self, depth: int = 0) -> Any:
        """Anything: made now, or one that stands in another place already."""
        self.left -= 1
        if self.pool and self.chance(0.12):
            return self.used("shared", self.pick(self.pool))
        rules = (
            _LEAVES
            if depth > 4 or self.left < 0 or self.chance(0.35)
            else _CONTAINERS
            if self.chance(0.55)
            else _OTHERS
        )
        name = self.pick(sorted(rules))
        self.kinds.add(name)
        made = rules[name](self, depth + 1)
        if name not in _LEAVES or self.chance(0.3):
            self.pool.append(made)
        return made

    def values(self, depth: int, most: int = 4) -> list[Any]:
        return [self.value(depth) for _ in range(self.count(most))]

    def attributes(self, depth: int) -> dict[str, Any]:
        return {name: self.value(depth) for name in self.random.sample(["a", "b", "_c", "lr"], self.count(3))}

    # Leaves ---------------------------------------------------------------------------------------------------------

    def raw(self, _: int = 0) -> Any:
        made = self.random.randbytes(self.pick([0, 1, 5, 300]))
        return bytearray(made) if self.chance(0.4) else made

    def key(self) -> Any:
        """A dictionary key; equal ones of several types are not made."""
        kind = self.count(9)
        if kind < 4:
            return self.text()
        if kind == 4:
            return self.pick([2, 7, 1 << 40, -5])
        if kind == 5:
            return self.pick([True, None, 0.5, float("inf")])
        if kind == 6:
            return ("t", self.pick([3, 4]), (self.text(), None))
        if kind == 7:
            return self.random.randbytes(3)
        if kind == 8:
            return frozenset({"f", self.pick([1, 2])})
        return self.used("people", self.pick([torch.float16, Colour.RED, datetime.date(2024, 1, 2)]))

    # Containers -----------------------------------------------------------------------------------------------------

    def mapping(self, depth: int) -> Any:
        made = self.pick([dict, collections.OrderedDict, Names])()
        self.pool.append(made)  # it may come to stand in itself
        for _ in range(self.count(5)):
            made[self.key()] = self.value(depth)
        if type(made) is not dict and self.chance(0.3):
            vars(made).update(self.attributes(depth))
        return made

    def other_mapping(self, depth: int) -> Any:
        if self.chance(0.3):
            return collections.Counter({self.text(): self.count(5) for _ in range(self.count(3))})
        factory = self.pick([None, list, int, dict, collections.OrderedDict])
        made: Any = collections.defaultdict(factory)
        self.pool.append(made)
        made.update((self.key(), self.value(depth)) for _ in range(self.count(4)))
        return made

    def sequence(self, depth: int) -> Any:
        made = self.pick([list, list, Items])()
        self.pool.append(made)
        made.extend(self.values(depth))
        if type(made) is Items:
            vars(made).update(self.attributes(depth))
        return made

    def long_sequence(self, _: int) -> Any:
        many = self.pick([999, 1000, 1001, 2000])
        return list(range(many)) if self.chance(0.5) else dict.fromkeys(range(many), "v")

    def tuple_of(self, depth: int) -> Any:
        return tuple(self.values(depth, 5))

    def deque(self, depth: int) -> Any:
        return collections.deque(self.values(depth), maxlen=self.pick([None, 7]))

    def set_of(self, _: int) -> Any:
        return self.pick([set, frozenset])(self.key() for _ in range(self.count(4)))

    # Arrays ---------------------------------------------------------------------------------------------------------

    def array(self, _: int = 0) -> Any:
        code, order = self.pick(NUMPY_CODES), self.pick("<>")
        kind = numpy.dtype(code).newbyteorder(order)
        if kind.kind in "US":
            return numpy.array(["ab", "", "xyz"], kind)
        count = self.pick([0, 1, 6, 12])
        made = (
            numpy.frombuffer(self.random.randbytes(count * kind.itemsize), kind).copy()
            if code != "?"
            else numpy.arange(count) % 2 == 0
        )
        if count >= 6:
            made = self.pick(
                [
                    lambda: made,
                    lambda: numpy.asfortranarray(made.reshape(2, -1)),
                    lambda: made[::2],
                    lambda: made.reshape(3, -1),
                ]
            )()
        return made.reshape(()) if count == 1 and self.chance(0.5) else made

    def odd_array(self, _: int) -> Any:
        choices: list[Piece] = [
            lambda: numpy.array([None, "x", 3], object),
            lambda: numpy.zeros(2, [("a", ">i4"), ("b", "<f8", (2,)), ("c", "U3")]),
            lambda: numpy.float64(self.count(9)),
            lambda: numpy.float32("nan"),
            lambda: numpy.str_("text"),
            lambda: numpy.datetime64("2024-01-01"),
            lambda: numpy.dtype(">i4"),
            lambda: numpy.random.RandomState(3),
            lambda: numpy.random.default_rng(3),
            lambda: numpy.random.RandomState(3).get_state(),
            lambda: numpy.ma.masked_array([1, 2], [True, False]),
        ]
        return self.pick(choices)()

    # Objects --------------------------------------------------------------------------------------------------------

    def of_python(self, depth: int) -> Any:
        choices: list[Piece] = [
            lambda: datetime.datetime(2024, 2, 29, 12, 30, tzinfo=self.pick([None, datetime.timezone.utc])),
            lambda: datetime.timedelta(days=-1, microseconds=5),
            lambda: decimal.Decimal("-1.50"),
            lambda: fractions.Fraction(1, 3),
            lambda: uuid.UUID(int=5),
            lambda: pathlib.PurePosixPath("/a/b.pt"),
            lambda: pathlib.Path("runs") / "x",
            lambda: argparse.Namespace(**self.attributes(depth)),
            lambda: types.SimpleNamespace(**self.attributes(depth)),
            lambda: functools.partial(int, base=self.pick([2, 16])),
            lambda: range(1, 9, 2),
            lambda: slice(None, 3),
            lambda: self.pick([int, dict, collections.OrderedDict, torch.nn.Linear, torch.optim.SGD, len, torch.relu]),
            lambda: ...,
        ]
        return self.pick(choices)()

    def of_people(self, depth: int) -> Any:
        kind = self.count(7)
        if kind == 0:
            made: Any = Slotted()
            self.pool.append(made)
            made.one, made.extra = self.value(depth), self.value(depth)
            return made
        if kind == 1:
            return Stateful(self.value(depth))
        if kind == 2:
            return Record(self.text(), self.values(depth))
        if kind == 3:
            return Point(self.value(depth), self.value(depth))
        if kind == 4:
            return self.pick(list(Colour))
        if kind == 5:
            return self.used("name", self.pick([Plain, Point, Net, Colour]))
        made = Plain()
        self.pool.append(made)
        vars(made).update(self.attributes(depth))
        return made

    def nested_class(self, depth: int) -> Any:
        choices = [Outer.Inner, Outer.Inner.Innermost, Outer.function]
        return self.pick(choices) if self.chance(0.4) else self.pick(choices[:2])(**self.attributes(depth))

    def module(self, depth: int) -> Any:
        torch.manual_seed(self.count(1000))
        choices: list[Piece] = [
            Net,
            lambda: torch.nn.LSTM(2, 3),
            lambda: torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.LayerNorm(3), torch.nn.Dropout()),
            lambda: torch.nn.MultiheadAttention(4, 2),
            lambda: torch.nn.ModuleDict({"e": torch.nn.Embedding(3, 2, padding_idx=0)}),
            lambda: torch.nn.GRU(2, 2),
        ]
        made = self.pick(choices)()
        if self.chance(0.4):
            made.extra = self.value(depth)
        if self.chance(0.2):
            made.eval()
        return made

    def training(self, _: int) -> Any:
        """The state of an optimizer or a schedule after a step, or a whole one."""
        model = torch.nn.Linear(2, 2)
        optimizer: Any = self.pick([torch.optim.SGD, torch.optim.Adam])(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return self.pick([optimizer.state_dict, schedule.state_dict, lambda: optimizer])()

    # The whole ------------------------------------------------------------------------------------------------------

    def weights(self) -> collections.OrderedDict[str, Any]:
        """A state dict as DataParallel leaves it: every key with its prefix, `_metadata`, ties and views."""
        state: Any = collections.OrderedDict()
        for number in range(1 + self.count(4)):
            state[f"module.layer{number}.weight"] = self.finite(self.pick([torch.float32, torch.bfloat16]), 12).reshape(
                3, 4
            )
        first = state["module.layer0.weight"]
        if self.chance(0.4):
            state["module.tied.weight"] = first
        if self.chance(0.4):
            state["module.part.weight"] = first.t()[1:]
        if self.chance(0.3):
            state["module.steps"] = torch.tensor(self.count(100))
        if self.chance(0.3):
            state["module.minus"] = torch._neg_view(self.finite(torch.float32, 4))
        if self.chance(0.3):
            state["module.kept"] = torch.nn.Parameter(self.finite(torch.float32, 2))
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


Rule = Callable[[Grammar, int], Any]

_LEAVES: dict[str, Rule] = {
    "number": Grammar.number,
    "text": Grammar.text,
    "raw": Grammar.raw,
    "strided": Grammar.tensor,
}
_CONTAINERS: dict[str, Rule] = {
    "mapping": Grammar.mapping,
    "other mapping": Grammar.other_mapping,
    "sequence": Grammar.sequence,
    "tuple": Grammar.tuple_of,
    "set": Grammar.set_of,
    "deque": Grammar.deque,
}
_OTHERS: dict[str, Rule] = {
    "long sequence": Grammar.long_sequence,
    "strided again": Grammar.tensor,
    "quantized": Grammar.quantized,
    "sparse": Grammar.sparse,
    "nested": Grammar.nested,
    "torch": Grammar.of_torch,
    "array": Grammar.array,
    "odd array": Grammar.odd_array,
    "python": Grammar.of_python,
    "people": Grammar.of_people,
    "nested class": Grammar.nested_class,
    "module": Grammar.module,
    "training": Grammar.training,
}
KINDS = {*_LEAVES, *_CONTAINERS, *_OTHERS}


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
