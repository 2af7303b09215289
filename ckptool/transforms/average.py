"""Models merged into one, in bounded memory as the result is written: each formula computes a piece of one tensor from
the same piece of that tensor in every model.

`mean` and `slerp` add up weighted tensors; `task-arithmetic`, `ties` and `dare` add up weighted differences from a
base, of which TIES (arXiv:2306.01708) keeps the largest and DARE (arXiv:2311.03099) a random choice:

    ties  as mergekit has it: the sign that most of the weighted differences have, divided by the agreeing weights
    dare  as in the paper and in peft: the differences kept are divided by the density

Means are summed in f64, those of 8- and 16-bit floats in f32; differences are computed in f32 (in f64 for f64), where
mergekit uses the tensors' own type. Every result is rounded once, at the end, as torch rounds. Counters have no
mean: they are the last file's; integers and other values of more than one number have to be the same in all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, cast

from ckptool.analysis.diff import diff
from ckptool.checkpoint import Checkpoint, Composite, Note, TensorEntry
from ckptool.checkpoint.arrays import elementwise, fold
from ckptool.checkpoint.dtypes import Array, numbers, part_type, rounded, scratch
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.numpy_arrays import array_entry
from ckptool.checkpoint.paths import literal
from ckptool.checkpoint.tree import tensors
from ckptool.commands import FILE, OUT, Command, arg, command
from ckptool.conventions.adapter_keys import adapter_key, is_factor
from ckptool.conventions.state_dicts import bare, differences
from ckptool.errors import Conflict, Unsupported, UsageError, counted, listed
from ckptool.formats import DEFAULT
from ckptool.formats.folder import ADAPTER, CONFIG
from ckptool.formats.model_folder import config_beside

_PARALLEL = 0.9995  # of two directions; beyond, slerp is a straight line
_DIGIT = 16  # bits of a pattern that are counted in one pass
_SMALL = 1 << 14  # up to so many patterns are sorted instead
_HELP = Command(("ckptool", "average", "--help"), "help(ckptool.average)")
_LAMBDA = Command(("--lambda",), "scale")  # another verb has --scale

Read = Callable[[int, str], "Array"]
"""`(number, name)`: the piece of source `number` as numbers, in the scratch array called `name`."""
Piece = Callable[[Read, int], "Array"]
"""`(read, start)`: the piece of the result that begins at element `start`."""
Select = Callable[["Array", int, int], "Array"]
"""`(delta, number, start)`: a file's differences from element `start` on, with zeros for those that are left out."""
Deltas = Callable[[int], "Array"]
"""`(number)`: a file's differences from the base, zeros for those left out; every call reuses the same array."""


class Method(NamedTuple):
    """A formula, the options that it takes, and the element size in bytes from which on it computes in f64."""

    formula: Callable[[_Merged], Piece]
    takes: tuple[str, ...]
    wide: int


class Merge(NamedTuple):
    """How models are merged. weights: one for each file.  densities: the fraction of each file's differences that is
    kept.  scale: factor of their sum."""

    method: str
    weights: Sequence[float]
    densities: Sequence[float] = (0.5,)
    scale: float = 1.0
    seed: int = 0

    @property
    def settings(self) -> list[str]:
        """The options that count for its method, as text."""
        density = ", ".join(f"{density:g}" for density in self.densities)
        texts = {"scale": f"lambda {self.scale:g}", "density": f"density {density}", "seed": f"seed {self.seed}"}
        return [text for name, text in texts.items() if name in METHODS[self.method].takes]

    def density(self, number: int) -> float:
        return self.densities[number % len(self.densities)]


class _Merged:
    """One tensor in all sources: what a formula may read before its first piece, and then the pieces.

    count: how many numbers it has.  name: its name in all of them.  Not a closure: a checkpoint may have one of these
    for each of its tensors.
    """

    __slots__ = ("count", "dtype", "entries", "formula", "how", "kind", "name")

    def __init__(self, entries: Sequence[TensorEntry], how: Merge, name: str) -> None:
        self.entries, self.how, self.name = entries, how, name
        self.dtype = part_type(entries[0].dtype)
        self.count = entries[0].nbytes // self.dtype.itemsize
        self.kind = "f8" if self.dtype.itemsize >= METHODS[how.method].wide else "f4"
        self.formula: Piece | None = None

    def __reduce__(self) -> Any:
        return _Merged, (self.entries, self.how, self.name)  # the formula is made again where it is needed

    def piece(self, index: int, *blocks: Array) -> Array:
        if self.formula is None:
            self.formula = METHODS[self.how.method].formula(self)
        start = index * (self.entries[0].dtype.itemsize // self.dtype.itemsize)
        total = self.formula(lambda number, name: self._numbers(blocks[number], name), start)
        # Whole numbers are rounded by whoever reads them; those of complex ones here.
        return total if self.dtype is self.entries[0].dtype else rounded(total, self.dtype)

    def _numbers(self, raw: Array, name: str) -> Array:
        """The elements of a block, widened first: numpy multiplies half as fast while it converts."""
        import numpy

        values = scratch(name, self.kind, len(raw) // self.dtype.itemsize)
        numpy.copyto(values, numbers(raw, self.dtype, "merge values"))
        return values

    def fold(self, take: Callable[..., Any], *sources: int) -> None:
        """Calls `take` with the numbers of these sources side by side, a piece at a time, until it returns True."""

        def take_numbers(_: int, *blocks: Array) -> Any:
            return take(*(self._numbers(block, f"merge source {number}") for number, block in enumerate(blocks)))

        fold(take_numbers, *(self.entries[number] for number in sources))


# Formulas ------------------------------------------------------------------------------------------------------------


def _mean(merged: _Merged, other_weights: Sequence[float] = ()) -> Piece:
    """The weighted sum. other_weights: used in place of the merge's own."""
    import numpy

    weights = other_weights or merged.how.weights

    def piece(read: Read, start: int) -> Array:
        total = read(0, "merge total")
        # The mean of equal values is that value, but in f64 nothing rounds away the error of weights such as 1/n.
        exact = total.dtype.itemsize == 8 and abs(math.fsum(weights) - 1) < 1e-12
        first = total.copy() if exact else total
        equal = numpy.full(len(first), exact)
        numpy.multiply(total, weights[0], out=total)
        for number, weight in enumerate(weights[1:], 1):
            term = read(number, "merge term")
            if exact:
                equal &= term.view("i8") == first.view("i8")
            numpy.add(total, numpy.multiply(term, weight, out=term), out=total)
        numpy.copyto(total, first, where=equal)
        return total

    return piece


def _slerp(merged: _Merged) -> Piece:
    """The point on the arc between two tensors, at the second one's fraction of the weights."""
    import numpy

    sums = [0.0, 0.0, 0.0]

    def add(x: Array, y: Array) -> None:
        for number, (a, b) in enumerate(((x, x), (y, y), (x, y))):
            sums[number] += float(numpy.add.reduce(numpy.multiply(a, b, dtype=numpy.float64)))

    merged.fold(add, 0, 1)
    norms = [math.sqrt(total) if math.sqrt(total) > 1e-8 else 1.0 for total in sums[:2]]
    cosine = sums[2] / norms[0] / norms[1]
    t = merged.how.weights[1] / sum(merged.how.weights)
    weights = [1 - t, t]
    if abs(cosine) <= _PARALLEL:
        angle = math.acos(cosine)
        # To as many digits as all mathematical libraries agree on.
        weights = [round(math.sin(weight * angle) / math.sin(angle), 12) for weight in weights]
    return _mean(merged, weights)


def _weighted_sum(delta: Deltas, weights: Sequence[float]) -> Array:
    total: Any = sum(delta(number) * weight for number, weight in enumerate(weights))
    return cast(Array, total)


def _task_arithmetic(
    merged: _Merged, combine: Callable[[Deltas, Sequence[float]], Array] = _weighted_sum, select: Select | None = None
) -> Piece:
    """The base plus the scaled combination of the files' differences from it. select: leaves some of them out."""
    import numpy

    def piece(read: Read, start: int) -> Array:
        base = read(0, "merge base")

        def delta(number: int) -> Array:
            values = read(number + 1, "merge delta")
            numpy.subtract(values, base, out=values)
            return select(values, number, start) if select else values

        total = combine(delta, [base.dtype.type(weight) for weight in merged.how.weights])
        numpy.multiply(total, base.dtype.type(merged.how.scale), out=total)
        return numpy.add(base, total, out=total)

    return piece


def _dare(merged: _Merged) -> Piece:
    """Random differences of each file, chosen by the tensor's name alone, scaled up to make up for those left out."""
    import numpy

    def select(delta: Array, number: int, start: int) -> Array:
        density = merged.how.density(number)
        if density < 1:  # random bits by a counter, the element's place (Philox, 32 bits each)
            text = f"{merged.how.seed}\0{number}\0{merged.name}".encode("utf-8", "surrogatepass")
            key = int.from_bytes(hashlib.sha256(text).digest()[:16], "little")
            counter, skip = divmod(start, 8)
            random = numpy.random.Philox(key=key, counter=counter).random_raw(-(-(skip + len(delta)) // 2))
            words = random.astype("<u8", copy=False).view("<u4")[skip : skip + len(delta)]
            keep = words < numpy.uint32(min(round(density * 2**32), 2**32 - 1))
            numpy.multiply(delta, keep, out=delta)
            numpy.divide(delta, delta.dtype.type(density), out=delta)
        return delta

    return _task_arithmetic(merged, select=select)


def _ties(merged: _Merged) -> Piece:
    """The largest differences of each file, and of those the ones that have the elected sign."""
    import numpy

    # For each file the bit pattern of the smallest magnitude that is kept, and the last place where it is kept.
    thresholds = [
        _threshold(merged, number, max(1, int(merged.how.density(number) * merged.count)))
        for number in range(len(merged.how.weights))
    ]

    def select(delta: Array, number: int, start: int) -> Array:
        smallest, last = thresholds[number]
        patterns = _magnitudes(delta)
        keep = patterns > smallest
        end = min(len(patterns), max(0, last + 1 - start))
        keep[:end] |= patterns[:end] == smallest
        return numpy.multiply(delta, keep, out=delta)

    return _task_arithmetic(merged, _elected_sum, select)


def _elected_sum(delta: Deltas, weights: Sequence[float]) -> Array:
    """The sum of the weighted differences that have the sign of the total, divided by their weights."""
    import numpy

    weighted = [delta(number) * weight for number, weight in enumerate(weights)]
    votes: Any = sum(weighted)
    sign = numpy.where(votes >= 0, votes.dtype.type(1), votes.dtype.type(-1))
    agree = [term * sign > 0 for term in weighted]
    total: Any = sum(term * mask for term, mask in zip(weighted, agree, strict=True))
    divisors: Any = sum(mask * weight for weight, mask in zip(weights, agree, strict=True))
    divisors[divisors == 0] = 1
    total /= divisors
    numpy.copyto(total, votes, where=votes != votes)  # NaN in one file is NaN in the result
    return cast(Array, total)


def _threshold(merged: _Merged, number: int, count: int) -> tuple[int, int]:
    """The bit pattern of the smallest of a file's `count` largest differences, and the last place where it is kept: of
    equal ones, the first are.

    Unless the tensor is small, the pattern is found digit by digit, with one pass for each.
    """
    import numpy

    if count >= merged.count:
        return 0, merged.count

    def scan(take: Callable[[Array], Any]) -> None:
        merged.fold(lambda base, values: take(_magnitudes(numpy.subtract(values, base, out=values))), 0, number + 1)

    if merged.count <= _SMALL:
        copies: list[Array] = []
        scan(lambda magnitudes: copies.append(magnitudes.copy()))
        index = int(numpy.argsort(~copies[0], kind="stable")[count - 1])
        return int(copies[0][index]), index
    threshold, remaining, index, width = 0, count, 0, 64 if merged.kind == "f8" else 32
    for shift in range(width - _DIGIT, -1, -_DIGIT):
        counts = numpy.zeros(1 << _DIGIT, numpy.int64)

        def add(magnitudes: Array, shift: int = shift, threshold: int = threshold, counts: Array = counts) -> None:
            matches = magnitudes if shift + _DIGIT == width else magnitudes[magnitudes >> (shift + _DIGIT) == threshold]
            digits = scratch("merge digits", "i8", len(matches))
            numpy.right_shift(matches, shift, out=digits, casting="unsafe")
            digits &= (1 << _DIGIT) - 1
            counts += numpy.bincount(digits, minlength=1 << _DIGIT)

        scan(add)
        larger = counts[::-1].cumsum()[::-1] - counts  # those with a larger digit
        digit = int(numpy.flatnonzero(larger < remaining)[0])
        threshold, remaining = threshold << _DIGIT | digit, remaining - int(larger[digit])

    def last(magnitudes: Array) -> bool:
        nonlocal index, remaining
        equal = numpy.flatnonzero(magnitudes == threshold)
        is_last = len(equal) >= remaining
        index, remaining = index + int(equal[remaining - 1] if is_last else len(magnitudes)), remaining - len(equal)
        return is_last

    scan(last)
    return threshold, index


def _magnitudes(delta: Array) -> Array:
    """Integers in the order of the magnitudes: the bit patterns without their signs. NaN is the largest."""
    import numpy

    patterns = delta.view(f"u{delta.itemsize}")
    mask = patterns.dtype.type((1 << (8 * delta.itemsize - 1)) - 1)
    bits: Array = numpy.bitwise_and(patterns, mask, out=scratch("merge magnitudes", patterns.dtype.str, len(patterns)))
    return bits


METHODS = {
    "mean": Method(_mean, ("ema",), 4),
    "task-arithmetic": Method(_task_arithmetic, ("base", "scale"), 8),
    "slerp": Method(_slerp, ("t",), 4),
    "ties": Method(_ties, ("base", "scale", "density"), 8),
    "dare": Method(_dare, ("base", "scale", "density", "seed"), 8),
}


# Options -------------------------------------------------------------------------------------------------------------


def merge_of(method: str, files: int, arguments: Mapping[str, Any]) -> Merge:
    """How to merge that many files. Raises `UsageError` for options that do not go together or are out of range.

    arguments: `base`, `density`, `scale`, `t`, `seed`, `ema` and `weights`, None where the user gave none.
    """
    options = {name: value for name, value in arguments.items() if value is not None}
    density, t, decay = options.get("density", 0.5), options.get("t"), options.get("ema")
    densities = (density,) if isinstance(density, (int, float)) else tuple(density)
    for what, why in _problems(method, files, options, densities):
        raise UsageError(what, why, f"See {_HELP}")
    weights = options.get("weights", [1.0 if "base" in METHODS[method].takes else 1 / files] * files)
    if t is not None:
        weights = [1 - t, t]
    if decay is not None:  # a moving average over the files in order
        weights = [decay ** (files - 1), *((1 - decay) * decay ** (files - 1 - n) for n in range(1, files))]
    return Merge(method, list(weights), densities, options.get("scale", 1.0), options.get("seed", 0))


def _problems(
    method: str, files: int, options: Mapping[str, Any], densities: Sequence[float]
) -> Iterator[tuple[str, str]]:
    """What is wrong with the options for merging that many files, and why."""
    scale, t = options.get("scale", 1.0), options.get("t", 0.5)
    has_base = "base" in METHODS[method].takes
    if has_base and "base" not in options:
        yield f"{arg(method=method)} needs {arg('base')}", "It merges differences from a base."
    if method == "slerp" and files != 2:
        yield f"{arg(method='slerp')} was given {counted(files, 'file')}", "It takes two."
    if files < 2 - has_base:
        yield "average needs at least two files", f"With {arg('base')}, one is enough."
    if not math.isfinite(scale):
        yield f"{_LAMBDA} {scale} is not a finite number", ""
    if not 0 <= t <= 1:
        yield f"{arg(t=t)} is not from 0 to 1", "0 is the first file, 1 the second."
    if len(densities) not in (1, files):
        yield f"{arg('density')} gives {counted(len(densities), 'value')}", "Give one, or one per file."
    if not all(1e-9 <= density <= 1 for density in densities):
        yield f"{arg('density')} {','.join(f'{density:g}' for density in densities)} is not from 1e-9 to 1", ""
    for name in (name for name in options if name != "weights" and name not in METHODS[method].takes):
        methods = listed([other for other, way in METHODS.items() if name in way.takes])
        yield f"{arg(method=method)} does not take {_LAMBDA if name == 'scale' else arg(name)}", f"It is for {methods}."
    for name in options.keys() & {"t", "ema"} if "weights" in options else ():
        yield f"{arg(name)} and {arg('weights')} were both given", "They are mutually exclusive."
    if not 0 <= options.get("ema", 0.5) < 1:
        yield f"a decay of {options['ema']} is not from 0 to 1", f"For example: {arg(ema=0.999)}"
    weights = options.get("weights", [1.0] * files)
    if len(weights) != files:
        what = f"{counted(len(weights), 'weight was', 'weights were')} given for {counted(files, 'file')}"
        yield what, "Give one per file, in the same order."
    if not math.isfinite(sum(weights)):
        yield f"the weights add up to {sum(weights)}", "Each has to be a finite number, and so does their sum."
    if method == "slerp" and not (min(weights, default=0) >= 0 and sum(weights) > 0):
        yield (
            "slerp was given weights that are negative or add up to 0",
            "The second's share is the place on the arc.",
        )


# State dicts ---------------------------------------------------------------------------------------------------------


def average(
    nodes: Sequence[Mapping[Any, Any]], names: Sequence[str], how: Merge
) -> tuple[dict[Any, Any], int, dict[str, str]]:
    """The merged state dict of several with the same keys, shapes and types; how many tensors were averaged; and
    which entries are the last one's, each with the reason. Reads nothing yet.

    nodes: where `how` has a base, it comes first.
    Raises `Conflict` naming what they disagree on, `Unsupported` for tensors that have no plain values.
    """
    last = nodes[-1]
    others = zip(nodes[:-1], names, strict=False)
    if problems := [line for node, name in others for line in differences((node, last), (name, names[-1]))]:
        what = f"the files do not hold the same weights: {listed(problems, 6)}"
        why = "The mean of different models is not a model. Nothing was written."
        fix = f"See all differences: {command('diff', names[0], names[-1])}"
        plain = [{*bare((*node,))} for node in nodes]
        wrapped = [name for node, name, keys in zip(nodes, names, plain, strict=False) if {*node} != keys]
        if not any(any(differences((node, last), ("", ""), types=False)) for node in nodes):
            why = "Each type rounds in its own way. Nothing was written."
            fix = f"Only their types differ; cast them first: {command('cast', FILE, dtype='f32', out=OUT)}"
        elif wrapped and all(keys == plain[-1] for keys in plain):
            fix = f"Only a prefix differs; remove it: {command('strip-module', wrapped[0], out=OUT)}"
        raise Conflict(what, why, fix)
    first_names: dict[Any, str] = {}  # of a tensor with several names the first by sorting, whatever order they are in
    largest: dict[tuple[int, ...], list[TensorEntry]] = {}  # by the storages in all files: the largest tensor on them
    names_of = ((str(key), key) for key, value in last.items() if isinstance(value, TensorEntry))
    for name, key in sorted(names_of, key=itemgetter(0)):
        entries = [node[key] for node in nodes]
        first_names.setdefault(last[key].view, name)
        if all(entry.is_contiguous and not any(entry.flags.lazy) for entry in entries):
            current = largest.setdefault(tuple(id(entry.storage) for entry in entries), entries)
            current[:] = entries if entries[-1].numel > current[-1].numel else current
    results: dict[tuple[Any, ...], TensorEntry] = {}
    by_object: dict[int, TensorEntry] = {}
    tree = same_kind(last, {})
    from_last, averaged = dict[str, str](), 0
    for key, value in last.items():
        entry = value if isinstance(value, TensorEntry) else array_entry(value)
        kind = type(value).__name__ if entry is None else "a numpy array"
        if isinstance(value, (TensorEntry, Composite)):
            kind = f"of type {value.dtype.name}" if isinstance(value, TensorEntry) else f"a {value.kind} tensor"
        is_number = entry is not None and entry.dtype.kind in ("float", "complex")
        has_mean = is_number and entry is value
        # A counter is one number, and may differ; codes, indices and what holds tensors belong to the other tensors.
        belongs = any(tensors(value)) if entry is None else is_number or entry.numel > 1
        if belongs and not has_mean and not all(alike(node[key], value) for node in nodes[:-1]):
            what = f"{key!s} has no mean ({kind}), and differs between the files"
            fix = f"Leave it out of each: {command('convert', names[0], exclude=literal(key), out=OUT)}"
            if entry is not value and not isinstance(value, Mapping):
                ways = "tensor.detach().as_subclass(torch.Tensor), to_dense(), dequantize(), torch.from_numpy(array)"
                fix = f"Give it as a plain tensor: {ways}. {fix}"
            raise Unsupported(what, "The last file's values would end up among the means. Nothing was written.", fix)
        tree[key] = value
        if not has_mean:
            from_last[str(key)] = kind
        else:  # names of one tensor in every file stay tied; so does what is the same part of one in every file
            averaged += 1
            entries = [node[key] for node in nodes]
            sources = largest.get(tuple(id(entry.storage) for entry in entries), [])
            places = {_place_inside(*pair) for pair in zip(entries, sources, strict=False)}
            is_part = len(places) == 1 and None not in places
            sources = sources if is_part else entries
            view = tuple(entry.view for entry in sources)
            if view not in results:
                merged = _Merged(sources, how, first_names[sources[-1].view])
                results[view] = elementwise(merged.piece, *sources, dtype=value.dtype)
            entry = results[view]
            if is_part:
                entry = replace(entry, shape=value.shape, stride=value.stride, offset=value.offset - sources[-1].offset)
            # What is one object stays one.
            flags = value.flags._replace(conj=False, neg=False)
            tree[key] = by_object.setdefault(id(value), replace(entry, flags=flags))
    return tree, averaged, from_last


def alike(a: Any, b: Any) -> bool:
    """True for two values between which `diff` finds no difference."""
    return diff(Checkpoint({"": a}, DEFAULT), Checkpoint({"": b}, DEFAULT), statistics=False).same


def _place_inside(part: TensorEntry, whole: TensorEntry) -> tuple[Any, ...] | None:
    """The stride and offset of a tensor in a contiguous one on the same storage; None if not all of it is inside."""
    (begin, end), (first, last) = part.span(), whole.span()
    is_inside = first <= begin and end <= last and part.dtype is whole.dtype and part.flags.lazy == whole.flags.lazy
    return (part.stride, part.offset - whole.offset) if is_inside else None


_NAMES = {"_name_or_path", "base_model_name_or_path", "peft_version", "revision", "transformers_version"}


def doubts(tree: Mapping[Any, Any], checkpoints: Sequence[Checkpoint]) -> Iterator[Note]:
    """What may be wrong with the weights that checkpoints were merged into."""
    keys = [key for key in tree if type(key) is str]
    if any(key.endswith("running_var") for key in keys):
        message = "statistics of BatchNorm are merged like weights: torch.optim.swa_utils.update_bn computes new ones"
        yield Note("batch-statistics", message)
    if any(is_factor(adapter_key(key).role) for key in keys):
        message = "an adapter's factors are merged one by one: their product is not the mean of the changes"
        yield Note("factors-apart", message)
    # PEFT's lists of names come from sets, in any order.
    *others, last = (
        {name: sorted(map(str, x)) if isinstance(x, list) else x for name, x in config.items() if name not in _NAMES}
        for config in (config_beside(checkpoint, ADAPTER, CONFIG) or {} for checkpoint in checkpoints)
    )
    pairs = ((config, name) for config in others if config and last for name in {*config, *last})
    if differing := {name for config, name in pairs if config.get(name) != last.get(name)}:
        message = f"the files' configurations differ in {listed(sorted(differing))}; the last one's is used"
        yield Note("configs-differ", message)
