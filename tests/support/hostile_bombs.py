"""Pickles that would exhaust their reader."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.decoys import MARKER
from tests.support.hostile_inputs import HOOKS, integer, name, pickle_zip, program, state_pickle, tensor, text


def laughs(levels: int, begin: bytes, made: Callable[[bytes], bytes], protocol: int = 2) -> bytes:
    """A value that refers to one below it ten times, which does so too."""
    body = begin + b"q\x00"
    for level in range(levels):
        body += b"0" + made(b"h" + bytes([level])) + b"q" + bytes([level + 1])
    return program(body, protocol)


def keys(get: bytes) -> bytes:
    return b"}(" + b"".join(text(f"k{i}") + get for i in range(10)) + b"u"


BOMBS: dict[str, Callable[[], bytes]] = {
    "70-million-lists": lambda: program(b"]" * 1_000_000),
    "70-500000-lists": lambda: program(b"]" * 500_000 + b"a" * 499_999),
    "70-999-lists": lambda: program(b"]" * 999 + b"a" * 998),
    "70-999-dicts": lambda: program((b"}" + text("k")) * 990 + b"N" + b"s" * 990),
    "70-990-tuples": lambda: program(b"N" + b"\x85" * 990),
    "70-300-calls": lambda: program(MARKER * 300 + b")" + b"R\x85" * 299 + b"R"),
    "70-fractions-of-fractions": lambda: program(name("fractions", "Fraction") * 300 + b"K\x01" + b"\x85R" * 300),
    "70-deep-then-wide": lambda: program(b"]" * 980 + b"](" + b"K\x01" * 200_000 + b"e" + b"a" * 980),
    "70-deep-then-wide-dict": lambda: program(
        (b"}" + text("k" * 40)) * 900 + b"}(" + b"".join(text(f"{i}") + b"N" for i in range(50_000)) + b"u" + b"s" * 900
    ),
    "70-deep-then-many-tensors": lambda: program(
        (b"}" + text("k" * 40)) * 900 + tensor((4,), (1,)) + b"q\x000}("
        + b"".join(text(f"{i}") + b"h\x00" for i in range(40_000)) + b"u" + b"s" * 900
    ),
    "71-million-marks": lambda: b"\x80\x02" + b"(" * 1_000_000,
    "71-marks-and-pops": lambda: program(b"(0" * 499_000 + b"N"),
    "71-tuples": lambda: program(b"(" * 300_000 + b"t" * 300_000),
    "71-memo": lambda: program(b"N" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(190_000))),
    "71-empty-lists": lambda: program(b"](" + b"]" * 900_000 + b"e"),
    "71-empty-dicts": lambda: program(b"](" + b"}" * 900_000 + b"e"),
    "71-empty-sets": lambda: program(b"](" + b"\x8f" * 900_000 + b"e", 4),
    "71-small-tuples": lambda: program(b"](" + b"N\x85" * 450_000 + b"e"),
    "71-calls": lambda: program(MARKER + b"q\x000](" + b"h\x00)R" * 240_000 + b"e"),
    "71-known-calls": lambda: program(name("collections", "OrderedDict") + b"q\x000](" + b"h\x00)R" * 240_000 + b"e"),
    "71-few-calls": lambda: program(MARKER + b"q\x000](" + b"h\x00)R" * 90_000 + b"e"),
    "71-few-objects": lambda: program(MARKER + b"q\x000](" + b"h\x00)\x81}" * 60_000 + b"e"),
    "71-few-tuples": lambda: program(b"](" + b"N\x85" * 110_000 + b"e"),
    "71-weights": lambda: program(b"}(" + tensor((4,), (1,)) + b"q\x000" + b"".join(
        text(f"{i}") + b"}" + text("a.w") + b"h\x00s" for i in range(40_000)) + b"u"),
    "71-models-that-differ": lambda: program(b"}(" + tensor((4,), (1,)) + b"q\x000" + b"".join(
        text(f"{i}") + b"}" + text(f"a.w{i}") + b"h\x00s" for i in range(30_000)) + b"u"),
    "71-names": lambda: program(b"](" + b"".join(b"ca\n%x\n" % i for i in range(110_000)) + b"e"),
    "71-tensors": lambda: program(tensor((4,), (1,)) + b"q\x000](" + b"h\x00" * 480_000 + b"e"),
    "72-lists": lambda: laughs(100, b"]", lambda get: b"](" + get * 10 + b"e"),
    "72-tuples": lambda: laughs(100, b"N", lambda get: b"(" + get * 10 + b"t"),
    "72-dicts": lambda: laughs(60, b"N", keys),
    "72-dup": lambda: program(b"]" + b"2\x86" * 300),
    "72-tensors": lambda: laughs(30, tensor((4,), (1,)), keys),
    "72-objects": lambda: laughs(60, b"N", lambda get: MARKER + b"(" + get * 10 + b"tR"),
    "72-states": lambda: laughs(60, b"N", lambda get: MARKER + b")\x81" + keys(get) + b"b"),
    "72-namespaces": lambda: laughs(60, b"N", lambda get: name("argparse", "Namespace") + b")\x81" + keys(get) + b"b"),
    "72-sets": lambda: laughs(60, b"N", lambda get: b"(" + get * 10 + b"\x91", 4),
    "72-sizes": lambda: laughs(60, b"K\x01", lambda get: name("torch", "Size") + b"(" + get * 10 + b"t\x85R"),
    "72-texts": lambda: program(text("x" * 100_000) + b"q\x000](" + b"h\x00" * 100_000 + b"e"),
    "72-bytes": lambda: program(b"B\xa0\x86\1\0" + bytes(100_000) + b"q\x000](" + b"h\x00" * 100_000 + b"e"),
    "72-integers": lambda: program(b"\x8b\0\2\0\0" + b"\x7f" * 512 + b"q\x000](" + b"h\x00" * 100_000 + b"e"),
    "72-long-keys": lambda: program(
        (text("k" * 100_000) + b"q\x000") + b"}q\x01" * 1 + (b"0}h\x00h\x01sq\x01") * 900
    ),
    "72-modules": lambda: laughs(60, b"N", lambda get: MARKER + b")\x81}(" + text("_modules") + keys(get)
                                 + text("_parameters") + b"}" + text("_buffers") + b"}ub"),
    "73-list": lambda: program(b"]q\x00h\x00a"),
    "73-dict": lambda: program(b"}q\x00" + text("me") + b"h\x00s"),
    "73-tuple": lambda: program(b"]q\x00h\x00\x85q\x01ah\x01"[:-2]),
    "73-state": lambda: program(MARKER + b")\x81q\x00}" + text("me") + b"h\x00sb"),
    "73-namespace": lambda: program(name("argparse", "Namespace") + b")\x81q\x00}" + text("me") + b"h\x00sb"),
    "73-object-in-its-arguments": lambda: program(b"]q\x00" + MARKER + b"h\x00\x85Rq\x01a"[:-1] + b"q\x02ah\x02"[:-2]
        + b""),
    "73-metadata": lambda: program(HOOKS + b"q\x00}" + text("_metadata") + b"h\x00sb"),
    "73-optimizer": lambda: program(b"}q\x00(" + text("state") + b"h\x00" + text("param_groups") + b"]q\x01h\x01au"),
    "73-weights": lambda: program(b"}q\x00(" + text("a.weight") + tensor((4,), (1,)) + text("me") + b"h\x00u"),
    "73-module": lambda: program(MARKER + b")\x81q\x00}(" + text("_modules") + b"}" + text("me") + b"h\x00s"
        + text("_parameters") + b"}"
                                 + text("w") + tensor((4,), (1,)) + b"s" + text("_buffers") + b"}ub"),
    "73-counter": lambda: program(b"}q\x00" + text("me") + name("collections", "Counter") + b"h\x00\x85Rs"),
    "74-tuples-as-a-key": lambda: program(b"})" + b"2\x86" * 32 + b"Ns"),
    "74-five-levels": lambda: program(b"}N" + b"\x85" * 5 + b"Ns"),
    "74-wide-and-shared": lambda: program(b"}(" + b"N" * 5_000 + b"tq\x00" + b"0(" + b"h\x00" * 5_000 + b"tq\x00"
        + b"Ns"),
    "74-frozensets": lambda: program(b"}(\x91q\x00" + b"0(h\x00h\x00\x91q\x00" * 40 + b"Ns", 4),
    "75-colliding": lambda: program(
        b"}(" + b"".join(b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for i in range(1, 30_001))
            + b"u"
    ),
    "75-colliding-tuples": lambda: program(
        b"}(" + b"".join(b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little")
            + b"\x85N" for i in range(1, 20_001)) + b"u"
    ),
    "75-colliding-floats": lambda: program(
        b"}(" + b"".join(integer(i * ((1 << 61) - 1)) + b"N" for i in range(1, 60_001)) + b"u"
    ),
    "75-colliding-one-by-one": lambda: program(
        b"}" + b"".join(b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little") + b"Ns" for i in range(1, 30_001))
    ),
    "75-colliding-pairs": lambda: program(name("collections", "OrderedDict") + b"(" + b"".join(
        b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little") + b"N\x86" for i in range(1, 30_001)) + b"l\x85R"),
    "75-a-little-colliding": lambda: program(b"](" + b"".join(b"}(" + b"".join(
        b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little")
        + b"N" for i in range(1, 90)) + b"u" for _ in range(700)) + b"e"),
    "fraction-of-a-long-exponent": lambda: state_pickle({"x": name("fractions", "Fraction") + text("1e999999999")
        + b"\x85R"}),
    "fraction-of-a-long-text": lambda: state_pickle({"x": name("fractions", "Fraction") + text("1" * 500_000)
        + b"\x85R"}),
    "decimal-of-a-long-exponent": lambda: state_pickle({"x": name("decimal", "Decimal") + text("1e999999999999999")
        + b"\x85R"}),
    "decimal-of-a-long-text": lambda: state_pickle({"x": name("decimal", "Decimal") + text("1" * 900_000) + b"\x85R"}),
    "range-of-everything": lambda: state_pickle({"x": name("builtins", "range") + integer(1 << 200) + b"\x85R"}),
    "size-of-many": lambda: state_pickle({"x": name("torch", "Size") + b"(" + b"K\x01" * 400_000 + b"t\x85R"}),
    "texts-of-control-characters": lambda: program(b"](" + (text("\x1b[31m\u202e" * 10) * 9_000) + b"e"),
    "long-text-of-control-characters": lambda: program(text("\x1b" * 990_000)),
    "many-long-numbers": lambda: program(b"](" + integer(1 << 2000) * 3_900 + b"e"),
    "many-dotted-keys": lambda: program(b"}(" + tensor((4,), (1,)) + b"q\x00" + b"0" + b"".join(
        text(".".join("ab" * 20) + str(i)) + b"h\x00" for i in range(9_000)) + b"u"),
    "one-key-of-many-dots": lambda: state_pickle({"." * 450_000: tensor((4,), (1,)), "." * 450_000
        + "a": tensor((4,), (1,))}),
    "one-key-of-many-slashes": lambda: state_pickle({"/" * 900_000: tensor((4,), (1,))}),
    "keys-like-one-another": lambda: program(b"}(" + tensor((4,), (1,)) + b"q\x000" + b"".join(
        text("a." * depth + "w") + b"h\x00" for depth in range(1, 900)) + b"u"),
}  # fmt: skip


INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    f"row {title}": lambda make=make: pickle_zip(make())
    for title, make in BOMBS.items()  # type: ignore[misc]
}
