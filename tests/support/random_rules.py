"""Random rules that change tensors, weights that they fit, and what torch makes of those."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16]
Shape = tuple[int, ...]
Tensors = list[Tensor]
Function = Callable[[Tensor], Tensor]


class Change(NamedTuple):
    """One rule without its prefix: names, shapes of the old ones, operations, and what torch makes of the tensors.

    overs: how many values the variable `e` has, if it is in the old names."""

    old: list[str]
    new: list[str]
    shapes: list[Shape]
    text: str
    made: Callable[[Tensors], Tensors]
    overs: int = 0


class Use(NamedTuple):
    """The keys of one use of a rule, the new ones, and what torch makes of the tensors."""

    old: list[str]
    new: list[str]
    made: Callable[[Tensors], Tensors]


@dataclass
class RandomRules:
    """rules: to give.  state: weights that they fit.  numbers: of their variables.  lossy: some cannot be undone."""

    seed: int
    dtypes: list[torch.dtype] = field(default_factory=lambda: DTYPES)
    lossy: bool = False
    rules: list[str] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        torch.manual_seed(self.seed)
        for number in range(self.random.randrange(1, 6)):
            self.rule(f"r{number}")

    def translated(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What torch makes of weights, or of moments, of these names."""
        found: dict[str, Tensor] = {}
        for use in self.uses:
            if use.old[0] in state:
                found |= zip(use.new, use.made([state[key] for key in use.old]), strict=True)
        return found

    def rule(self, prefix: str) -> None:
        """A rule, and tensors for it: of several layers, sometimes of twins that share storages."""
        kinds = [self.each, self.each, self.divided, self.joined, self.stacked, self.unstacked, self.experts]
        change: Change = self.random.choice(kinds)()
        twins = self.random.choice(["a", "a", "ab"])
        shift = self.random.choice([0, 0, 1])
        layer = "{n + 1}" if shift else "{n}"
        sides = [", ".join(f"{prefix}.{{t}}.{{n}}.{name}" for name in change.old)]
        sides.append(", ".join(f"new.{prefix}.{layer}.{{t}}.{name}" for name in change.new))
        self.rules.append(" => ".join(sides) + (f" : {change.text}" if change.text else ""))
        width = self.random.choice([1, 1, 2]) if self.lossy else 1
        for number in self.random.sample(range(12), self.random.choice([1, 1, 2, 3])):
            dtype = self.random.choice(self.dtypes)
            old = _filled(change.old, change.overs, width)
            tensors = self.views([self.tensor(shape, dtype) for shape in change.shapes * max(1, change.overs)])
            count = len(change.made(tensors))
            new = _filled(change.new, count if "{e}" in change.new[0] else 0)
            for twin in twins:
                keys = [f"{prefix}.{twin}.{number:0{width}}.{name}" for name in old]
                self.state |= zip(keys, tensors, strict=True)
                names = [f"new.{prefix}.{number + shift:0{width}}.{twin}.{name}" for name in new]
                self.uses.append(Use(keys, names, change.made))

    def views(self, tensors: Tensors) -> Tensors:
        """The tensors, which sometimes share a storage, lossy ones where that gets lost."""
        if self.lossy and len({each.shape for each in tensors}) == 1 and self.random.random() < 0.2:
            return list(torch.stack(tensors))
        return tensors

    def tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Values, sometimes transposed, in the middle of a storage, repeated or conjugated."""
        way = self.random.randrange(8)
        if way == 0 and len(shape) > 1:
            return values((*shape[:-2], shape[-1], shape[-2]), dtype).transpose(-1, -2)
        if way == 1 and shape:
            return values((shape[0] + 2, *shape[1:]), dtype)[1:-1]
        if way == 2 and shape and shape[0]:
            return values((1, *shape[1:]), dtype).expand(shape)
        made = values(shape, dtype)
        return made.conj() if dtype.is_complex and way == 3 else made

    # Rules -----------------------------------------------------------------------------------------------------------

    def shape(self, least: int = 0) -> Shape:
        sizes = [1, 2, 3, 4, 6, 8] + [0] * (self.random.random() < 0.1)
        return tuple(self.random.choice(sizes) for _ in range(self.random.randrange(least, 5)))

    def few(self) -> int:
        return self.random.randrange(3)

    def each(self) -> Change:
        """Tensors by themselves, also without any operation."""
        names = [f"w{n}" for n in range(self.random.choice([1, 1, 2]))]
        shape = self.shape()
        text, function, _ = self.chain(shape, self.random.randrange(4))
        return Change(names, names, [shape] * len(names), text, lambda given: [function(each) for each in given])

    def divided(self) -> Change:
        """One tensor that becomes several, with operations on the whole and on the parts."""
        shape = self.shape(1)
        head, before, whole = self.chain(shape, self.few())
        if not whole:
            return self.each()
        axis = self.random.randrange(len(whole))
        sizes = self.sizes(whole[axis])
        equal = len(set(sizes)) == 1
        bare = equal and self.random.random() < 0.5
        tail, after = "", Function
        part = (*whole[:axis], sizes[0], *whole[axis + 1 :])
        tail, after, _ = self.chain(part, self.few() if equal else 0)
        names = [f"p{n}" for n in range(len(sizes))]
        text = _chain(head, f"split {axis}" + ("" if bare else f" [{self.written(sizes)}]"), tail)
        return Change(
            ["w"], names, [shape], text, lambda given: [after(each) for each in before(given[0]).split(sizes, axis)]
        )

    def joined(self) -> Change:
        """Several tensors that become one; without their sizes, where that loses nothing."""
        shape = self.shape(1)
        axis = self.random.randrange(len(shape))
        sizes = self.sizes(shape[axis])
        bare = self.random.random() < 0.5 and (len(set(sizes)) == 1 or self.lossy)
        tail, after, _ = self.chain(shape, self.few())
        names = [f"p{n}" for n in range(len(sizes))]
        shapes = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
        text = _chain(f"cat {axis}" + ("" if bare else f" [{self.written(sizes)}]"), tail)
        return Change(names, ["w"], shapes, text, lambda given: [after(torch.cat(given, axis))])

    def stacked(self) -> Change:
        """Tensors on top of each other: those of names, or of the values of a variable."""
        shape, count = self.shape(), self.random.randrange(1, 5)
        axis, over = self.random.randrange(-len(shape) - 1, len(shape) + 1), self.random.random() < 0.6
        head, before, each = self.chain(shape, self.few())
        axis = self.random.randrange(-len(each) - 1, len(each) + 1)
        names = ["{e}.w"] if over else [f"p{n}" for n in range(count)]
        text = _chain(head, f"stack {axis}" + " over e" * over)
        shapes = [shape] if over else [shape] * count

        def made(given: Tensors) -> Tensors:
            return [torch.stack([before(one) for one in given], axis)]

        return Change(names, ["all"], shapes, text, made, count * over)

    def unstacked(self) -> Change:
        shape = self.shape(1)
        axis, over = self.random.randrange(-len(shape), len(shape)), self.random.random() < 0.6
        if not shape[axis]:
            return self.each()
        names = ["{e}.w"] if over else [f"p{n}" for n in range(shape[axis])]
        return Change(
            ["all"], names, [shape], f"unstack {axis}" + " over e" * over, lambda given: list(given[0].unbind(axis))
        )

    def experts(self) -> Change:
        """Two tensors of each expert: those of all are stacked, and one behind the other."""
        shape = (self.random.randrange(1, 5), self.random.randrange(1, 5))

        def made(given: Tensors) -> Tensors:
            return [torch.cat([torch.stack(given[::2]), torch.stack(given[1::2])], 1)]

        count = self.random.randrange(1, 13)
        return Change(["{e}.w1", "{e}.w3"], ["all"], [shape] * 2, "stack 0 over e | cat 1", made, count)

    def sizes(self, total: int) -> list[int]:
        """Sizes of parts that make up a dimension."""
        if total and self.random.random() < 0.5:
            count = self.random.choice([n for n in range(1, total + 1) if total % n == 0])
            return [total // count] * count
        cuts = sorted(self.random.randrange(total + 1) for _ in range(self.few()))
        return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]

    def written(self, sizes: list[int]) -> str:
        """Sizes as numbers, or one as a variable that is set, or as -1."""
        texts, at = list(map(str, sizes)), self.random.randrange(len(sizes))
        way = self.random.randrange(3)
        if way == 1:
            self.numbers[name := f"v{len(self.numbers)}"] = sizes[at]
            texts[at] = self.random.choice([name, f"2 * {name} - {name}", f"({name} + 1) // 1 - 1"])
        if way == 2:
            texts[at] = "-1"
        return ", ".join(texts)

    # Operations ------------------------------------------------------------------------------------------------------

    def chain(self, shape: Shape, length: int) -> tuple[str, Function, Shape]:
        """Operations on a tensor of a shape, and the shape after them."""
        texts, functions, probe = list[str](), list[Function](), torch.zeros(shape)
        for _ in range(length):
            text, function = self.random.choice(list(self.operations(tuple(probe.shape))))
            texts.append(text)
            functions.append(function)
            probe = function(probe)

        def run(tensor: Tensor) -> Tensor:
            for function in functions:
                tensor = function(tensor)
            return tensor

        return " | ".join(texts), run, tuple(probe.shape)

    def operations(self, shape: Shape) -> Iterator[tuple[str, Function]]:
        """Operations that fit a shape."""
        rank, pick = len(shape), self.random
        at = pick.randrange(rank + 1)
        yield f"unsqueeze {at - (rank + 1) * pick.randrange(2)}", lambda t: t.unsqueeze(at)
        if 1 in shape:
            one = shape.index(1)
            yield f"squeeze {one - rank * pick.randrange(2)}", lambda t: t.squeeze(one)
        if rank > 1:
            a, b = pick.sample(range(rank), 2)
            order = pick.sample(range(rank), rank)
            yield f"transpose {a - rank * pick.randrange(2)} {b}", lambda t: t.transpose(a, b)
            yield f"permute {' '.join(map(str, order))}", lambda t: t.permute(order)
            yield "transpose", lambda t: t.transpose(-1, -2)
        if rank and all(shape):
            yield from self._of_dimension(shape, pick.randrange(rank))

    def _of_dimension(self, shape: Shape, axis: int) -> Iterator[tuple[str, Function]]:
        rank, size, pick = len(shape), shape[axis], self.random
        first = pick.choice([n for n in range(1, size + 1) if size % n == 0])
        lead, sizes, rest = shape[:axis], (first, size // first), shape[axis + 1 :]
        word, place = f"[{pick.choice([first, -1])}, {sizes[1]}]", axis - rank * pick.randrange(2)
        yield f"unflatten {place} {word}", lambda t: t.reshape(*lead, *sizes, *rest)
        other = pick.sample([*lead, *sizes, *rest], rank + 1)
        yield f"reshape {other} from {list(shape)}", lambda t: t.reshape(other)
        yield f"interleave {place} {first}", lambda t: woven(t, axis, 1, first)
        yield f"deinterleave {place} {first}", lambda t: woven(t, axis, 1, size // first)
        if axis < rank - 1:
            whole = size * shape[axis + 1]
            text = f"flatten {axis} [{size}, {shape[axis + 1]}]"
            yield text, lambda t: t.reshape(*lead, whole, *rest[1:])
        if shape[0] % 2 == 0:
            heads = pick.choice([n for n in range(1, shape[0] // 2 + 1) if shape[0] // 2 % n == 0])
            yield f"rope {heads}", lambda t: woven(t, 0, heads, shape[0] // heads // 2)
            yield f"unrope {heads}", lambda t: woven(t, 0, heads, 2)
        if self.lossy:
            kept, more = pick.randrange(size), pick.randrange(3)
            yield f"slice {place} {kept}:", lambda t: t.narrow(axis, kept, size - kept)
            yield f"pad {place} {size + more}", lambda t: torch.cat([t, t.new_zeros(*lead, more, *rest)], axis)


def _chain(*texts: str) -> str:
    return " | ".join(filter(None, texts))


def _filled(names: list[str], overs: int, width: int = 1) -> list[str]:
    return [name.replace("{e}", f"{e:0{width}}") for e in range(overs) for name in names] if overs else names


def values(shape: Any, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


def woven(tensor: Tensor, axis: int, groups: int, parts: int) -> Tensor:
    """Of each of equal groups of a dimension, cut into parts: their first elements, then their second, ..."""
    shape = tensor.shape
    inner = shape[axis] // groups // parts
    cut = tensor.reshape(*shape[:axis], groups, parts, inner, *shape[axis + 1 :])
    return cut.transpose(axis + 1, axis + 2).reshape(shape)
