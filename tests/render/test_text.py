"""What reports look like as text: sizes, bars, outlines, differences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from ckptool.analysis.diff import diff
from ckptool.analysis.inspect import listing
from ckptool.analysis.outline import like_others, outline
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.commands import arg
from ckptool.errors import quoted
from ckptool.facts import Note, Table, bar, dim, facts_of, green, short, size
from ckptool.pickles.plain import to_json
from ckptool.render.lines import PLAIN, Style, error_text, lines
from ckptool.render.lines import text as report_text
from ckptool.verbs._save import Written

F32 = by_name("f32")


def tensor(*shape: int, storage: Storage | None = None, dtype: str = "f32") -> TensorEntry:
    kind = by_name(dtype)
    count = 1
    for length in shape:
        count *= length
    return TensorEntry(
        storage or Storage(InlineBytes(bytes(count * kind.itemsize))), kind, shape, row_major_strides(shape)
    )


def checkpoint(tree: Any) -> Checkpoint:
    return Checkpoint(tree, "torch-zip")


def text_of(tree: Any, **options: Any) -> str:
    return report_text(listing(checkpoint(tree)), **options)


def labels(tree: Mapping[str, Any], **options: Any) -> list[str]:
    """The names of the outline, with their indentation."""
    block = text_of(tree, **options).split("\n\n")[1]
    return [re.split(r"  +(?=[\d…])", line)[0].rstrip() for line in block.split("\n")]


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (44_700_000, "44.7 MB"),
        (999_999, "1.00 MB"),
        (2**31, "2.15 GB"),
        (10**14, "100 TB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_counts_and_bars() -> None:
    assert [short(n) for n in (0, 950, 78_200, 11_200_000, 7_000_000_000)] == ["0", "950", "78.2k", "11.2M", "7.00B"]
    assert bar(10, 10) == "█" * 12 and bar(5, 10, 4) == "██" and bar(0, 10) == bar(1, 10**6) == bar(0, 0) == ""


def test_columns_are_as_wide_as_they_need() -> None:
    assert list(lines([Table([("a", "1"), ("bbb", "22")], right=(1,), indent=0)])) == ["a     1", "bbb  22"]
    long = list(lines([Table([("x" * 200, "1"), ("y", "2")])]))
    assert long[0] == f"  {'x' * 200}  1" and len(long[1]) < 90


def test_repeated_layers_are_folded_only_where_they_are_the_same() -> None:
    layers = {f"layers.{i}.{name}": tensor(4, 4) for i in range(12) for name in ("q.weight", "k.weight")}
    assert labels(layers) == ["(the whole file)", "  layers.{0..11} ×12", "    q.weight", "    k.weight"]
    assert "12 × f32 [4, 4]" in text_of(layers)
    other = layers | {"layers.5.q.weight": tensor(4, 5)}
    both = ["    q.weight", "    k.weight"]
    assert labels(other)[1:] == ["  layers.{0..4} ×5", *both, "  layers.5", *both, "  layers.{6..11} ×6", *both]
    gap = {f"layers.{i}.weight": tensor(4) for i in (0, 1, 2, 4, 5)}
    assert (
        labels(gap)[1:] == ["  layers.{0..2}.weight", "  layers.4.weight", "  layers.5.weight"]
        or labels(gap)[1] == "  layers.{0..2} ×3"
    )


def test_an_outline_fits_a_screen_whatever_the_file() -> None:
    wide = {f"part{'abcdefghij'[i % 10]}{i}x.weight": tensor(i + 1) for i in range(3_000)}
    lines = text_of(wide).split("\n")
    assert len(lines) <= 45 and any("2,988 more (--all lists them)" in line for line in lines)
    deep = {".".join(f"{'abcdef'[(i >> n) % 3]}{n}" for n in range(9)) + f".w{i}x": tensor(i + 1) for i in range(500)}
    assert len(text_of(deep).split("\n")) <= 46


def test_a_name_that_is_a_tensor_and_a_module() -> None:
    assert labels({"a": tensor(2), "a.b": tensor(2), "a.c": tensor(3)}) == [
        "(the whole file)",
        "  a",
        "  a",
        "    b",
        "    c",
    ]


def test_keys_with_slashes_dots_and_numbers() -> None:
    tree = {"state_dict": {"a/b.weight": tensor(2), "..": tensor(2), "": tensor(1), "x.weight": tensor(5)}}
    assert "a~1b.weight" in text_of(tree) and text_of(tree, all=True).count("state_dict/") == 4


def test_tied_tensors_count_once_and_say_so() -> None:
    shared = Storage(InlineBytes(bytes(64)))
    tree = {
        "embed.weight": tensor(4, 4, storage=shared),
        "head.weight": tensor(4, 4, storage=shared),
        "view.weight": tensor(4, storage=shared),
    }
    (part,) = listing(checkpoint(tree)).parts
    assert (part.bytes, part.elements, part.tied) == (64 + 16, 20, {1: 0})
    assert "tied to embed.weight" in text_of(tree)


def test_parts_that_look_alike_are_shown_once() -> None:
    model = {"fc.weight": tensor(3, 3), "fc.bias": tensor(3)}
    ema = {f"module.{key}": tensor(*entry.shape) for key, entry in model.items()}
    tree = {"model": model, "ema": ema, "teacher_model": {"fc.weight": tensor(9, 9)}}
    divided = listing(checkpoint(tree)).parts
    assert like_others(divided) == {divided[1]: divided[0]}
    assert text_of(tree).count("names but for a prefix and shapes as in model") == 1
    for same in (dict(model), {"n_averaged": tensor(), **model}):
        assert text_of(tree | {"ema": same}).count("; names and shapes as in model") == 1


def test_many_parts_that_look_alike_share_a_line() -> None:
    """Federated training keeps the weights of a hundred clients."""

    def weights() -> dict[str, Any]:
        return {"fc.weight": tensor(3, 3), "fc.bias": tensor(3)}

    tree = {"model": weights(), "clients": [weights() for _ in range(100)], "last_model": {"fc.weight": tensor(9, 9)}}
    text = text_of(tree)
    (line,) = [line for line in text.splitlines() if "clients/" in line]
    assert line.startswith("clients/0 … clients/99  4.80 kB") and "100 × model weights: 2 tensors" in line
    assert "names and shapes as in model" in line and "last_model" in text
    few = text_of({"model": weights(), "clients": [weights() for _ in range(3)]})
    assert few.count("names and shapes as in model") == 3


def test_outline_depth_is_exact() -> None:
    (part,) = listing(checkpoint({"a.b.weight": tensor(1), "a.c.weight": tensor(2), "d.bias": tensor(3)})).parts
    top = outline(part, 40, 1)
    assert [child.label for child in top.expanded] == ["a", "d.bias"] and not top.expanded[0].expanded


def test_files_of_plain_values() -> None:
    assert "lr  0.1" in " ".join(text_of({"lr": 0.1, "more": {"a": 1}}).split("\n")).replace("    ", "  ")
    assert "no tensors" in text_of([1, 2]) and "3" in text_of(3)


def test_a_narrow_terminal_cuts_no_name_and_wraps_parts() -> None:
    tree = {
        "state_dict": {f"{'long' * 20}.{i}x.weight": tensor(i + 1) for i in range(3)},
        "config": {"text": "y " * 50},
    }
    style = Style(width=80)
    text = style.page(text_of(tree, style=style))
    assert "long" * 20 in text and "…" not in text.replace("y …}", "")  # a long value is shortened anywhere
    assert max(len(line) for line in text.split("\n") if "long" not in line) <= 80


def test_the_last_column_hangs_where_a_line_is_too_long() -> None:
    text = "one two three four five six seven"
    table = Table([("a" * 9, "1", dim(text)), ("b", "22", "x")], right=(1,), indent=0, hang=5)
    assert list(lines([table])) == [f"aaaaaaaaa   1  {text}", "b      22  x"]
    first, second, last = lines([table], Style(True, 38))
    assert first == "aaaaaaaaa   1  \x1b[2mone two three four five\x1b[0m" and last == "b      22  x"
    assert second == " " * 15 + "\x1b[2msix seven\x1b[0m"


def test_a_table_unfolds_just_where_it_is_wider_than_the_terminal() -> None:
    table = Table([("a" * 10, "1"), ("b", "22")], heads=("name", "size"), indent=0)
    usual = ["name        size", "aaaaaaaaaa  1", "b           22"]
    assert list(lines([table])) == list(lines([table], Style(width=16))) == usual
    assert list(lines([table], Style(width=15))) == ["a" * 10, "    size 1", "b", "    size 22"]


def test_differences_in_groups() -> None:
    shared = Storage(InlineBytes(bytes(64)))
    left = {
        "m": {
            "a.weight": tensor(4),
            "b.weight": tensor(2),
            "c.weight": tensor(2, storage=shared),
            "d.weight": tensor(2, storage=shared),
        },
        "epoch": 1,
    }
    right = {
        "m": {
            "b.weight": tensor(3),
            "c.weight": TensorEntry(Storage(InlineBytes(b"\1\0\0\0" * 2), "cuda:0"), F32, (2,), (1,)),
            "d.weight": tensor(2),
            "e.weight": tensor(1),
        },
        "epoch": 2,
    }
    found = diff(checkpoint(left), checkpoint(right))
    text = report_text(found)
    for expected in (
        "b.weight",
        "shape [2] → [3]",
        "device cpu → cuda:0",
        "only in the left one (1)",
        "1 → 2",
        "100 %",
        "tied only in",
    ):
        assert expected in text, expected
    assert text.startswith("differ: 2 of 3 tensors changed, 1 entry changed, 1 only in")
    assert "\x1b" in report_text(found, style=Style(colour=True)) and "\x1b" not in text
    assert "values of tensors" in report_text(found, counts=True)


def test_errors_have_three_lines() -> None:
    from ckptool.errors import NoMatch

    assert error_text(NoMatch("what\x1b", "why", "fix")) == "error[no-match]: what\\x1b\n  why\n  fix\n"
    assert error_text(NoMatch("what"), PLAIN) == "error[no-match]: what\n"


def test_prose_is_cut_between_words_on_a_narrow_terminal() -> None:
    from ckptool.errors import CkptoolError
    from ckptool.render.lines import Style, error_text

    error = CkptoolError(
        "nothing was found in /a/very/long/path/of/some/file.pt " * 3, "It means this. " * 12, "Type that."
    )
    for width in (20, 40, 80, 300):
        told = error_text(error, Style(False, width))
        assert told.split() == error_text(error).split()
        assert all(len(line) <= width or " " not in line.strip() for line in told.split("\n")), told
    assert "\x1b[1;31merror[error]\x1b[0m: nothing" in error_text(error, Style(True, 40))


def test_a_cell_that_ends_in_blanks_is_coloured_like_others() -> None:
    rows = [("a.weight ", "f32"), (dim("b "), "tied to a "), ("", green("  x  "))]
    table = Table(rows, heads=("name", "what"))
    plain, coloured = ("\n".join(lines([table], Style(colour))) for colour in (False, True))
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain and "\x1b[1;32m  x\x1b[0m" in coloured


def test_a_command_names_a_key_that_no_file_can_be_called() -> None:
    assert quoted("st\ud800") == r"$'st\xed\xa0\x80'" and quoted("a\udcff") == r"$'a\xff'"


def test_no_key_of_another_type_takes_the_place_of_one_in_json() -> None:
    assert to_json({1: 2, "1": 3, "1 (int)": 9}) == {"1 (int) (int)": 2, "1": 3, "1 (int)": 9}


def test_heads_of_a_table_are_escaped_at_every_width() -> None:
    table = Table([("1", "0.5")], heads=("step", "loss\x1b[31m\n"))  # a metric is called as a run's files say
    for width in (None, 10):
        assert r"loss\x1b[31m\n" in "\n".join(lines([table], Style(width=width)))


def test_units_are_those_of_the_module_whatever_else_is_loaded() -> None:
    import ckptool.output.hashing  # where Bytes is another type
    from ckptool.formats.damaged import LostRecord

    assert ckptool.output.hashing.Bytes is not int and facts_of(LostRecord)["nbytes"].unit.show is size


def test_python_reads_arguments_where_a_shell_reads_options() -> None:
    note = Note("large", f"there is more: {arg(dry_run=True)}")
    report = Written("cast", "a.pt", "b.pt", "torch-zip", "new file", 1, 1, "done", notes=(note,))
    assert "large: there is more: dry_run=True" in str(report) and "more: -n\n" in report_text(report)
    assert report.to_dict()["notes"][0]["message"] == "there is more: -n"
