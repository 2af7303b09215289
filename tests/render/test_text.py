"""What reports look like as text: sizes, bars, outlines, differences."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckptool.analysis.inspect import listing
from ckptool.analysis.outline import like_others
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.commands import arg
from ckptool.errors import NotACheckpoint
from ckptool.facts import Note, Table, cyan, dim
from ckptool.render.lines import Style, error_text, lines
from ckptool.render.lines import text as report_text
from ckptool.verbs._save import Written


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


def test_an_outline_fits_a_screen_whatever_the_file() -> None:
    wide = {f"part{'abcdefghij'[i % 10]}{i}x.weight": tensor(i + 1) for i in range(3_000)}
    lines = text_of(wide).split("\n")
    assert len(lines) <= 45 and any("2,988 more (--all lists them)" in line for line in lines)
    deep = {".".join(f"{'abcdef'[(i >> n) % 3]}{n}" for n in range(9)) + f".w{i}x": tensor(i + 1) for i in range(500)}
    assert len(text_of(deep).split("\n")) <= 46


def test_parts_that_look_alike_are_shown_once() -> None:
    model = {"fc.weight": tensor(3, 3), "fc.bias": tensor(3)}
    ema = {f"module.{key}": tensor(*entry.shape) for key, entry in model.items()}
    tree = {"model": model, "ema": ema, "teacher_model": {"fc.weight": tensor(9, 9)}}
    divided = listing(checkpoint(tree)).parts
    assert like_others(divided) == {divided[1]: divided[0]}
    assert text_of(tree).count("; like model, but for a prefix") == 1
    for same in (dict(model), {"n_averaged": tensor(), **model}):
        assert text_of(tree | {"ema": same}).count("; like model") == 1


def test_the_last_column_hangs_where_a_line_is_too_long() -> None:
    text = "one two three four five six seven"
    table = Table([("a" * 9, "1", dim(text)), ("b", "22", "x")], right=(1,), indent=0, hang=5)
    assert list(lines([table])) == [f"aaaaaaaaa   1  {text}", "b      22  x"]
    first, second, last = lines([table], Style(True, 38))
    assert first == "aaaaaaaaa   1  \x1b[2mone two three four five\x1b[0m" and last == "b      22  x"
    assert second == " " * 15 + "\x1b[2msix seven\x1b[0m"


def test_heads_of_a_table_are_escaped_at_every_width() -> None:
    table = Table([("1", "0.5")], heads=("step", "loss\x1b[31m\n"))  # a metric is called as a run's files say
    for width in (None, 10):
        assert r"loss\x1b[31m\n" in "\n".join(lines([table], Style(width=width)))


def test_python_reads_arguments_where_a_shell_reads_options() -> None:
    note = Note("large", f"there is more: {arg(dry_run=True)}")
    report = Written("cast", "a.pt", "b.pt", "torch-zip", "new file", 1, 1, "done", notes=(note,))
    assert "large: there is more: dry_run=True" in str(report) and "more: -n\n" in report_text(report)
    assert report.to_dict()["notes"][0]["message"] == "there is more: -n"


def test_a_table_wider_than_the_terminal_keeps_its_columns() -> None:
    rows = [(name, "good", "1.2 kB", "model weights, optimizer state") for name in ("a.pt", "checkpoints/step-1.pt")]
    shown = list(lines([Table(rows, heads=("file", "state", "size", "what"), indent=0)], Style(width=50)))
    assert max(map(len, shown)) <= 50 and "checkpoints/step-1.pt" in shown
    starts = {line.index("good") for line in shown if "good" in line}
    assert starts == {shown[0].index("state")} and sum("model weights" in line for line in shown) == 2


def test_only_commands_stay_whole() -> None:
    """A sentence that begins with ckptool is wrapped; what is typed is not."""
    typed = "ckptool convert checkpoints/first.pt -o second.safetensors"
    error = NotACheckpoint(
        "x", "ckptool looked for an index of shards and files like model.safetensors", f"Do: {typed}"
    )
    shown = error_text(error, Style(width=40)).split("\n")
    assert [line.strip() for line in shown if len(line) > 40] == [typed]


@pytest.mark.parametrize("colour", [False, True])
def test_commands_stay_whole_wherever_they_stand_in_a_line(colour: bool) -> None:
    typed = [f"ckptool verify 'a long name {number}.pt' --finite" for number in range(3)]
    unpack = "gzip -dc 'a long name.pt.gz' > 'a long name.pt'"
    told = [("  1. ", cyan(typed[0])), ("All of it in one pass: ", cyan(typed[1])), f"see {typed[2]}"]
    told += [("  2. ", cyan(unpack), "   (another program: gzip)")] if colour else []
    for width in range(20, 90, 7):
        style = Style(colour, width)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", style.page("\n".join(lines(told, style)))).split("\n")
        for line in (*typed, *([unpack] if colour else [])):
            assert sum(line in each for each in shown) == 1, width
