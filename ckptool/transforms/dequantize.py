"""Quantized weights as the numbers that they stand for: (codes - zero points) · scale in f32, rounded once at the end.

`conventions.quantized` presents every format as strided views by the weight's own rows; `_codes` unpacks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

from ckptool.analysis.quantization import quantized_in
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.arrays import Numbers, TensorValues, computed_rows
from ckptool.checkpoint.dtypes import Array, DType
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.tree import address, rebuild
from ckptool.conventions.quantized import QuantizedWeight, parsed
from ckptool.conventions.state_dicts import StateDict
from ckptool.errors import Ambiguous, Corrupt, NoMatch, Unsupported, counted, listed

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INT8 = 7.874015718698502e-3  # 1 / 127 as bitsandbytes has it
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds a row


def weight_of(weight: QuantizedWeight, dtype: DType) -> TensorEntry:
    """The weight itself in a floating type, computed while it is read. Reads nothing yet.

    Reading raises `Corrupt` for an index outside its table, `Ambiguous` for zero points of GPTQ that the
    configuration does not say.
    """
    inputs, location, shape = tuple(weight.parts.values()), weight.parts["codes"].location, weight.shape
    matrix: tuple[int, ...] = prod(shape[:-1]), shape[-1]
    if weight.codes == "bitsandbytes":  # whose blocks run across rows: single elements
        matrix, rows = (prod(shape),), _bitsandbytes(weight)
    elif weight.codes == "gpt-oss":  # whose last two dimensions are exchanged: rows of [experts · groups, 32 · rows]
        matrix, width, scale = (matrix[0] // 32, 32 * matrix[1]), shape[2], weight.parts["scale"]
        grid, parts = (scale.numel, 1), dict(weight.parts) | {"scale": scale.reshape((scale.numel, 1))}
        groups = _scaled(replace(weight, codes="fp4", parts=parts, shape=(scale.numel, 32), grid=grid, block=(1, 32)))

        def rows(start: int, stop: int) -> Array:
            return groups(start * width, stop * width).reshape(-1, width, 32).transpose(0, 2, 1)
    else:
        rows = _scaled(weight)
    return computed_rows(dtype, matrix, rows, inputs, location).reshape(shape)


def _scaled(weight: QuantizedWeight) -> Numbers:
    """Rows of (codes - zero points) · scale."""
    import numpy

    single, parts = numpy.float32, weight.parts
    codes, zeros = _codes(weight, "codes"), _codes(weight, "zeros") if "zeros" in parts else None
    middle = 1 << weight.bits - 1 if weight.codes == "bits" and zeros is None else 0
    offset = cache(lambda: _gptq_offset(weight) if weight.facts.get("stored") == "gptq" else 0)

    def rows(start: int, stop: int) -> Array:
        # For each of these rows of the weight, the row of the table of scales that it needs.
        block, grid = weight.block[:-1], weight.grid[:-1]
        places = numpy.unravel_index(numpy.arange(start, stop), weight.shape[:-1])
        groups = numpy.ravel_multi_index(tuple(place // size for place, size in zip(places, block, strict=True)), grid)
        first, last = int(groups.min()), int(groups.max()) + 1
        with numpy.errstate(all="ignore"):
            values: Array = codes(start, stop).astype(single)
            if zeros is not None:
                points = zeros(first, last).astype(single)[groups - first] + single(offset())
                values -= _per_column(weight, points)
            elif middle:
                values -= single(middle)
            scales = _table_rows(parts["scale"], first, last)
            if "global" in parts:
                scales = scales / TensorValues(parts["global"]).read(0, 1)
            values *= _per_column(weight, scales[groups - first])
            if weight.codes == "int8":
                values *= single(_INT8)
        return values

    return rows


def _per_column(weight: QuantizedWeight, table: Array) -> Array:
    """A number for each column, from one for each group of columns."""
    import numpy

    columns, groups, index = weight.shape[-1], table.shape[-1], weight.parts.get("g_idx")
    if groups == 1:
        return table
    if index is not None:
        column_groups = TensorValues(index).read(0, columns)
        if (column_groups >= 0).all():  # -1: not in use, the groups follow the order of the columns
            if column_groups.max() >= groups:
                raise Corrupt(f"{weight.name}: its index of groups reaches {int(column_groups.max())} of {groups}")
            return table[:, column_groups]
    return numpy.repeat(table, weight.block[-1], axis=1)[:, :columns]


# Codes ---------------------------------------------------------------------------------------------------------------


def _table_rows(entry: TensorEntry, start: int, stop: int) -> Array:
    """Some rows of a small table, which may be seen transposed."""
    part = entry.narrow(0, start, stop - start)
    return TensorValues(part).read(0, part.numel).reshape(part.shape)


def _codes(weight: QuantizedWeight, role: str) -> Numbers:
    """Rows of the codes of a weight, or of its zero points, as numbers."""
    part, bits, awq = weight.parts[role], weight.bits, weight.codes == "awq"
    matrix = part.reshape((prod(part.shape[:-1]), part.shape[-1]))
    raw = partial(_table_rows, part) if role == "zeros" else TensorValues(matrix).rows
    if weight.codes == "fp4":
        return lambda start, stop: e2m1(raw(start, stop))
    if awq or (weight.codes == "bits" and role == "zeros"):
        return partial(_unpacked_rows, raw, part.shape[0], bits, awq)
    return raw if weight.codes != "bits" else lambda start, stop: unpacked(raw(start, stop), bits, weight.shape[-1])


def _unpacked_rows(raw: Numbers, height: int, bits: int, awq: bool, start: int, stop: int) -> Array:
    """Numbers packed down the columns: 32 rows take as many words as a number has bits."""
    import numpy

    words = raw(start // 32 * bits, min(-(-stop // 32) * bits, height))
    if 32 % bits == 0:
        shifts = numpy.array(_AWQ if awq else range(32 // bits), numpy.uint32)[:, None] * bits
        codes = (words.view(numpy.uint32)[:, None] >> shifts & (1 << bits) - 1).reshape(-1, words.shape[1])
    else:
        codes = unpacked(words.T, bits, len(words) * 32 // bits).T
    return codes[start % 32 :][: stop - start]


def unpacked(words: Array, bits: int, count: int) -> Array:
    """The first numbers of `bits` bits in each row of int32 words, the lowest bits first, across words."""
    import numpy

    words = numpy.ascontiguousarray(words).view(numpy.uint32)
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        parts = words.view(numpy.uint8)[..., None] >> numpy.arange(0, 8, bits, dtype=numpy.uint8)
        return (parts & numpy.uint8(mask)).reshape(len(words), -1)[:, :count]
    word, shift = numpy.divmod(numpy.arange(count) * bits, 32)
    pairs = words[:, numpy.minimum(word + 1, words.shape[1] - 1)].astype(numpy.uint64)
    pairs <<= 32
    pairs |= words[:, word]
    pairs >>= shift.astype(numpy.uint64)
    pairs &= mask
    return pairs.astype(numpy.uint8)


def e2m1(raw: Array) -> Array:
    """The 4-bit floats in bytes, the low nibble first; the last dimension becomes twice as long."""
    import numpy

    table = numpy.array([*_E2M1, *(-value for value in _E2M1)], numpy.float32)
    return table[numpy.stack((raw & 15, raw >> 4), axis=-1)].reshape(*raw.shape[:-1], -1)


def _gptq_offset(weight: QuantizedWeight) -> int:
    """The number to add to GPTQ's stored zero points: 1 in its first version, 0 in its second.

    The field for it is sometimes wrong, so symmetric weights, whose zero point is known, decide first.
    """
    zeros, middle, largest = weight.parts["zeros"], 1 << weight.bits - 1, (1 << weight.bits) - 1
    low, high, rows = largest, 0, weight.shape[0]
    points, step = _codes(weight, "zeros"), max(32, (1 << 18) // zeros.shape[1] // 32 * 32)
    for row in range(0, rows, step):
        zero_points = points(row, min(row + step, rows))
        low, high = min(low, int(zero_points.min())), max(high, int(zero_points.max()))
    name, symmetric, forms = weight.name, weight.facts["symmetric"], weight.facts["forms"]
    if symmetric is not False and low == high and low in (middle - 1, middle):
        return middle - low
    if not symmetric and "gptq_v2" in forms:
        return 0
    if not symmetric and forms and high < largest:
        return 1
    what = f"{name}: zero points of {low} to {high}, and a configuration that does not say what they mean"
    why = f"Symmetric weights have {middle}. GPTQ's first version stores them minus one, its second as is."
    fix = 'Set it in quantization_config of its config.json: "checkpoint_format": "gptq" for the first, else "gptq_v2".'
    raise Ambiguous(what, why, fix)


# bitsandbytes --------------------------------------------------------------------------------------------------------


def _bitsandbytes(weight: QuantizedWeight) -> Numbers:
    """Nibbles over the flat weight, the high one first; blocks of them share the largest value."""
    import numpy

    parts, facts = {role: TensorValues(part).read for role, part in weight.parts.items()}, weight.facts
    codes, offset = weight.parts["codes"].row_major(), numpy.float32(facts.get("nested_offset") or 0)

    def nested(start: int, stop: int) -> Array:
        scale = _per_element(parts["nested_absmax"], facts["nested_blocksize"], start, stop)
        return parts["nested_map"](0, 256)[parts["absmax"](start, stop)] * scale + offset

    largest = nested if "nested_absmax" in parts else parts["absmax"]

    def read(start: int, stop: int) -> Array:
        raw = numpy.frombuffer(codes.read(start // 2, -(-stop // 2) - start // 2), numpy.uint8)
        nibbles = numpy.stack((raw >> 4, raw & 15), axis=-1).reshape(-1)[start % 2 :][: stop - start]
        with numpy.errstate(all="ignore"):
            return parts["map"](0, 16)[nibbles] * _per_element(largest, facts["blocksize"], start, stop)

    return read


def _per_element(read: Numbers, size: int, start: int, stop: int) -> Array:
    """The number for each element, from one for each block of `size`."""
    import numpy

    first = start // size
    return read(first, -(-stop // size))[numpy.arange(start, stop) // size - first]


# The checkpoint ------------------------------------------------------------------------------------------------------


def dequantize(
    checkpoint: Checkpoint, roots: Sequence[StateDict], dtype: DType
) -> tuple[Checkpoint, list[tuple[str, QuantizedWeight]], list[str]]:
    """The checkpoint with the weights themselves, in this type, in place of their codes; those weights with their
    addresses; and the addresses of what is left out, such as scales.

    Raises `Unsupported` naming everything whose layout is not known, and `NoMatch` where nothing is quantized. Reads
    nothing.
    """
    by_root = [(root, quantized_in(checkpoint, root.node)) for root in roots]
    where = checkpoint.source or "the checkpoint"
    if problems := [problem for _, codes in by_root for problem in codes.problems]:
        what = f"{where}: {counted(len(problems), 'part')} cannot be dequantized: {listed(problems, 4)}"
        raise Unsupported(what, "Codes cannot be used as weights without knowing their format. Nothing was written.")
    weights = [
        (address((*root.base, *root.path, weight.name)), weight) for root, codes in by_root for weight in codes.weights
    ]
    if not weights:
        raise NoMatch(f"{where} has no quantized weights of a known format", "None of its names and types match one.")
    entries: dict[tuple[Any, ...], TensorEntry] = {}  # by views of their parts: ties stay
    replaced: dict[int, Any] = {}
    for root, codes in by_root:
        by_codes_key = {weight.keys[0]: weight for weight in codes.weights}
        removed = {key for weight in codes.weights for key in weight.keys} | set(codes.left_out)
        items: dict[Any, Any] = {}
        for key, value in root.node.items():
            if (weight := by_codes_key.get(key)) is not None:
                view = tuple((role, part.view) for role, part in sorted(weight.parts.items()))
                items[weight.name] = entries.setdefault(view, weight_of(weight, dtype))
            elif key not in removed:
                items[key] = value
        replaced[id(root.node)] = same_kind(root.node, items)
    left_out = [address((*root.base, *root.path, key)) for root, codes in by_root for key in codes.left_out]
    typed_names = {*parsed(checkpoint.metadata.get("tensor_names"), list), "tensor_names"}  # torchao's
    typed_names = typed_names if any(weight.name in typed_names for _, weight in weights) else set()
    metadata = {key: text for key, text in checkpoint.metadata.items() if key not in typed_names}
    tree = rebuild(checkpoint.tree, replaced=replaced)
    return replace(checkpoint, tree=tree, metadata=metadata), weights, left_out
