"""The modules that a state dict belongs to, as `print(model)` would show them, inferred from names and shapes alone.

What names and shapes do not tell apart is given with the alternatives, and what they do not tell is left out. The
layouts are those of `torch.nn`, `Conv1D` that of transformers (a linear layer with its weight transposed), and LoRA's
those of PEFT and kohya.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product

from ckptool.checkpoint.quantized import find_quantized, may_be_quantized
from ckptool.checkpoint.quantized_formats import QuantizedWeight
from ckptool.checkpoint.tree import address
from ckptool.reports.folds import label, runs, structure
from ckptool.reports.inspect import PartSummary

INFERRED = (
    "inferred from names and shapes, convolutions as of one group; "
    "strides, padding, heads, activations and the order of calls are not in the file"
)
DEEPEST = 100  # modules inside each other, before the rest of a name is one

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A module or a tensor. level: of the modules around it.  text: its class, as far as that can be told; empty for a
    module that only holds others.  times: how many equal ones it stands for, each with the lines below it."""

    level: int
    name: str
    text: str
    times: int = 1


@dataclass(slots=True, eq=False)
class _Module:
    """depth: pieces of the names of its rows that lead to it.  key: these, as text.  of: names of tensors to rows."""

    name: str = ""
    key: str = ""
    depth: int = 0
    rows: list[int] = field(default_factory=list)
    of: dict[str, int] = field(default_factory=dict)
    below: dict[str, _Module] = field(default_factory=dict)
    quantized: QuantizedWeight | None = None


def code_view(part: PartSummary, most: int | None = None) -> tuple[CodeLine, ...]:
    """The modules of a set of weights, equal numbered ones folded; the first `most` lines."""
    return tuple(islice(_ModuleTree(part).lines(), most)) if part.root.is_model else ()


class _ModuleTree:
    """A part on its way to lines."""

    def __init__(self, part: PartSummary) -> None:
        base = len(part.root.path)
        self.part = part
        self.pieces = [address(row.path[base:]).split(".", DEEPEST) for row in part.rows]
        node = part.root.node
        found = find_quantized(node, {}, {}).weights if part.root.module is None and may_be_quantized(node) else []
        self.quantized = {weight.name.removesuffix(".weight"): weight for weight in found if len(weight.shape) == 2}
        self.top = self._tree()

    def _tree(self) -> _Module:
        top = _Module()
        parts_of = {key: name for name, weight in self.quantized.items() for key in weight.keys}
        for row, pieces in enumerate(self.pieces):
            owner = parts_of.get(".".join(pieces))
            module, depth = top, len(pieces) - 1 if owner is None else owner.count(".") + 1
            module.rows.append(row)
            for number, name in enumerate(pieces[:depth]):
                module = module.below.setdefault(name, _Module(name, ".".join(pieces[: number + 1]), number + 1))
                module.rows.append(row)
            if owner is None:
                module.of[pieces[-1]] = row
            else:
                module.quantized = self.quantized[owner]
        return top

    def lines(self) -> Iterator[CodeLine]:
        text, left, below = self._told(self.top, None)
        if text:
            yield CodeLine(0, "", text)
        yield from self._below(left, below, 1 if text else 0)

    def _below(self, left: list[int], below: list[_Module], level: int) -> Iterator[CodeLine]:
        """The lines of tensors and modules that stand side by side, in the order of the file."""
        sides: list[int | _Module] = sorted(
            [*left, *below], key=lambda side: side if isinstance(side, int) else side.rows[0]
        )
        names = [self.pieces[side][-1] if isinstance(side, int) else side.name for side in sides]

        def alike(one: int, other: int) -> bool:
            return self._structure(sides[one]) == self._structure(sides[other])

        for run in runs(names, alike):
            first, name = sides[run[0]], names[run[0]]
            name = label(name, names[run[-1]]) if len(run) > 1 else name
            if isinstance(first, int):
                tensor = self.part.rows[first].tensor
                kind = f"tensor {tensor.dtype or ''}".rstrip()
                yield CodeLine(level, name, f"{kind} {list(tensor.shape or ())}", len(run))
                continue
            after = sides[run[-1] + 1] if run[-1] + 1 < len(sides) else None
            yield from self._module(first, name, len(run), after if isinstance(after, _Module) else None, level)

    def _module(self, module: _Module, name: str, times: int, after: _Module | None, level: int) -> Iterator[CodeLine]:
        text, left, below = self._told(module, after)
        inside = list(self._below(left, below, level + 1))
        if not text and times == 1 and inside and sum(line.level == level + 1 for line in inside) == 1:
            name, first, *inside = f"{name}.{inside[0].name}", inside[0], *inside[1:]
            yield CodeLine(level, name, first.text, first.times)
            yield from (CodeLine(line.level - 1, line.name, line.text, line.times) for line in inside)
        else:
            yield CodeLine(level, name, text, times)
            yield from inside

    def _structure(self, side: int | _Module) -> list[tuple[object, ...]]:
        if isinstance(side, int):
            return structure(self.part, [side], [""])
        return structure(self.part, side.rows, [self.pieces[row][side.depth :] for row in side.rows])

    def _told(self, module: _Module, after: _Module | None) -> tuple[str, list[int], list[_Module]]:
        """The class of a module, and the tensors and modules in it that this does not explain."""
        shapes = self._shapes(module)
        below = list(module.below.values())
        if module.quantized is not None:
            rows, columns = module.quantized.shape
            text = f"Linear({columns}, {rows}), {module.quantized.words}"
            taken = {"bias"} if shapes.get("bias") == (rows,) else set()
        else:
            text = layer(module.key, shapes) if len(shapes) == len(module.of) else ""
            text = _settled(text, module, after, shapes, self._shapes(after)) if after is not None else text
            taken = set(shapes) if text else set()
        adapter, pair = self._adapter(module)
        if adapter:
            text, below = f"{text} + {adapter}" if text else adapter, [each for each in below if each.name not in pair]
            taken |= {"alpha"} if shapes.get("alpha") == () else set()
        return text, [row for name, row in module.of.items() if name not in taken], below

    def _shapes(self, module: _Module) -> dict[str, tuple[int, ...]]:
        """The shapes of its own tensors of numbers; counters are 0-dimensional."""
        tensors = {name: self.part.rows[row].tensor for name, row in module.of.items()}
        return {
            name: tensor.shape
            for name, tensor in tensors.items()
            if tensor.shape is not None
            and tensor.dtype is not None
            and (tensor.dtype.kind in ("float", "complex") or name == "num_batches_tracked")
        }

    def _adapter(self, module: _Module) -> tuple[str, tuple[str, ...]]:
        """The pairs of factors below a module, one for each adapter: `LoRA(4096, 4096, r=8)`."""
        for pair in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
            if not all(name in module.below for name in pair):
                continue
            first, second = (self._factors(module.below[name]) for name in pair)
            if first and first.keys() == second.keys():
                both = [(a, second[name]) for name, a in first.items()]
                if all(len(a) == len(b) >= 2 and a[0] == b[1] for a, b in both):
                    texts = [f"LoRA({a[1]}, {b[0]}, r={a[0]}{_kernel(a[2:])})" for a, b in both]
                    return " + ".join(texts), pair
        return "", ()

    def _factors(self, module: _Module) -> dict[str, tuple[int, ...]]:
        """The factors of each adapter by its name; empty where something else is there as well."""
        found = {"": module} if module.of else module.below
        if any(set(each.of) != {"weight"} or (each.below and not module.below) for each in found.values()):
            return {}
        return {name: shape for name, each in found.items() for shape in self._shapes(each).values()}


# Layers --------------------------------------------------------------------------------------------------------------


def layer(key: str, shapes: Shapes) -> str:
    """The class of a module whose own tensors have these names and shapes; empty where there is none that has."""
    name = key.rpartition(".")[2].lower()
    for rule in (_batch_norm, _attention, _recurrent):
        if text := rule(shapes):
            return text
    if "weight" not in shapes or not shapes.keys() <= {"weight", "bias"} or 0 in shapes["weight"]:
        return ""
    weight, bias = shapes["weight"], shapes.get("bias")
    if bias == weight and weight:
        return _norm(name, weight)
    if len(weight) == 1 and bias is None:
        return _scale(name, weight[0])
    if len(weight) == 2:
        return _matrix(key.lower(), weight, bias)
    return _convolution(name, weight, bias) if 3 <= len(weight) <= 5 else ""


def _batch_norm(shapes: Shapes) -> str:
    size = shapes.get("running_mean", ())
    affine = {name: size for name in ("weight", "bias") if name in shapes}
    counter = {"num_batches_tracked": ()} if "num_batches_tracked" in shapes else {}
    whole = {"running_mean": size, "running_var": size} | affine | counter == shapes and len(affine) != 1
    return f"BatchNorm({size[0]}{'' if affine else ', affine=False'})" if whole and len(size) == 1 else ""


def _attention(shapes: Shapes) -> str:
    width = shapes.get("in_proj_weight", shapes.get("q_proj_weight", ()))[-1:]
    if not width:
        return ""
    (size,) = width
    kdim, vdim = (shapes.get(f"{each}_proj_weight", (0, size))[-1] for each in "kv")
    joined = {"in_proj_weight": (3 * size, size)}
    apart = {"q_proj_weight": (size, size), "k_proj_weight": (size, kdim), "v_proj_weight": (size, vdim)}
    more = {"in_proj_bias": (3 * size,), "bias_k": (1, 1, size), "bias_v": (1, 1, size)}
    there = {name: shape for name, shape in more.items() if name in shapes}
    if shapes not in (joined | there, apart | there) or ("bias_k" in there) != ("bias_v" in there):
        return ""
    options = "" if "in_proj_bias" in there else ", bias=False"
    options += ", add_bias_kv=True" if "bias_k" in there else ""
    options += f", kdim={kdim}, vdim={vdim}" if "q_proj_weight" in shapes else ""
    return f"MultiheadAttention({size}, heads unknown{options})"


def _recurrent(shapes: Shapes) -> str:
    """An LSTM, a GRU or an RNN of any number of layers, or a cell of one; every tensor must be as torch makes it."""
    cell = "" if "weight_ih" in shapes else "_l0"
    rows, inputs = (*shapes.get(f"weight_ih{cell}", ()), 0, 0)[:2]
    state = (*shapes.get(f"weight_hh{cell}", ()), 0, 0)[1]
    projected = bool(cell) and "weight_hr_l0" in shapes
    hidden = rows // 4 if projected else state
    kind = {4: "LSTM", 3: "GRU", 1: "RNN"}.get(rows // hidden if hidden else 0)
    if kind is None:
        return ""
    layers = sum(bool(re.fullmatch("weight_ih_l[0-9]+", name)) for name in shapes) if cell else 1
    ways, bias = ("", "_reverse") if "weight_ih_l0_reverse" in shapes else ("",), f"bias_ih{cell}" in shapes
    expected: dict[str, tuple[int, ...]] = {}
    for number, way in product(range(layers), ways):
        end = f"_l{number}{way}" if cell else ""
        expected |= {
            f"weight_ih{end}": (rows, len(ways) * state if number else inputs),
            f"weight_hh{end}": (rows, state),
        }
        expected |= {f"bias_ih{end}": (rows,), f"bias_hh{end}": (rows,)} if bias else {}
        expected |= {f"weight_hr{end}": (state, hidden)} if projected else {}
    options = f", num_layers={layers}" if layers > 1 else ""
    options += "" if bias else ", bias=False"
    options += ", bidirectional=True" if len(ways) > 1 else ""
    options += f", proj_size={state}" if projected else ""
    return f"{kind}{'' if cell else 'Cell'}({inputs}, {hidden}{options})" if expected == shapes else ""


def _norm(name: str, shape: tuple[int, ...]) -> str:
    size = str(shape[0] if len(shape) == 1 else list(shape))
    if len(shape) > 1 or re.search(r"(^|_)ln|layer_?norm", name):
        return f"LayerNorm({size})"
    return f"GroupNorm({size})" if re.search(r"(^|_)gn|group_?norm", name) else f"LayerNorm or GroupNorm ({size})"


def _scale(name: str, size: int) -> str:
    if re.search(r"norm|(^|_)ln|rms", name):
        return f"RMSNorm({size}) or LayerNorm({size}, bias=False)"
    return f"PReLU({size})" if "relu" in name else f"RMSNorm, LayerNorm without bias or PReLU ({size})"


_EMBEDDING = re.compile(r"emb|wte|wpe|token")
_LINEAR = re.compile(r"proj|linear|dense|head|gate|query|key|value|qkv|out|(^|_)(fc|w|q|k|v|o)[0-9]?($|_)")


def _matrix(key: str, weight: tuple[int, ...], bias: tuple[int, ...] | None) -> str:
    rows, columns = weight
    name = key.rpartition(".")[2]
    if bias is None:
        linear, embedding = f"Linear({columns}, {rows}, bias=False)", f"Embedding({rows}, {columns})"
        words = bool(_LINEAR.search(name)), bool(_EMBEDDING.search(name))
        return linear if words == (True, False) else embedding if words == (False, True) else f"{linear} or {embedding}"
    if bias == (rows,):
        return f"Linear({columns}, {rows})" + (" or Conv1D" if rows == columns and name.startswith("c_") else "")
    return f"Conv1D({columns}, {rows})" if bias == (columns,) else ""


def _convolution(name: str, weight: tuple[int, ...], bias: tuple[int, ...] | None) -> str:
    """A convolution of one group, unless the shapes tell; where they fit a transposed one as well, both."""
    one, other, *kernel = weight
    kind = f"{len(kernel)}d"
    named = "conv" in name
    if len(kernel) == 1 and kernel[0] > 64 and not named:
        return ""  # rather a stack of matrices
    if bias not in (None, (one,)):
        groups = bias[0] // other if bias and len(bias) == 1 else 0
        if not groups or groups * other != bias[0] or one % groups:
            return ""
        more = f", groups={groups}" if groups > 1 else ""
        return f"ConvTranspose{kind}({one}, {bias[0]}{_kernel(kernel)}{more})"
    text = f"Conv{kind}({other}, {one}{_kernel(kernel)}{'' if bias else ', bias=False'})"
    text += " or depthwise" if other == 1 < one else ""
    text += TRANSPOSED if bias is None or other in (one, 1) else ""
    return text + (" or Bilinear" if len(kernel) == 1 and not named else "")


TRANSPOSED = " or transposed"


def _kernel(sizes: tuple[int, ...] | list[int]) -> str:
    return f", {'×'.join(map(str, sizes))}" if sizes else ""


def _settled(text: str, module: _Module, after: _Module, shapes: Shapes, others: Shapes) -> str:
    """The text of a convolution that cannot be transposed, as the norm of its output follows: `conv1`, `bn1`."""
    if TRANSPOSED not in text or not _batch_norm(others):
        return text
    one, other = shapes["weight"][:2]
    numbers = [re.search(r"[0-9]*$", each.name)[0] for each in (module, after)]  # type: ignore[index]
    in_turn = after.name.isdecimal() and module.name.isdecimal() and int(after.name) == int(module.name) + 1
    named = module.name.lower().startswith("conv") and numbers[0] == numbers[1]
    straight = one != other or (named and not re.search("up|trans|deconv|dec|gen", module.key.lower()))
    follows = others["running_mean"] == (one,) and straight and (in_turn or named)
    return text.replace(TRANSPOSED, "") if follows else text
