"""What reports look like as text: sizes, bars, outlines, differences; every report as a value of each form."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len

import ckptool
from ckptool.analysis.curves import Curve
from ckptool.analysis.inspect import listing
from ckptool.analysis.outline import like_others
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.commands import VERBS as COMMANDS
from ckptool.commands import arg, function_of
from ckptool.errors import NotACheckpoint
from ckptool.facts import Note, Page, Report, Table, bar, cyan, dim, percent
from ckptool.render.html import markdown
from ckptool.render.lines import Style, error_text, lines
from ckptool.render.lines import text as report_text
from ckptool.training.reports import Evaluated, Outcome, Proof, Rehearsal, RunHistory, RunReport
from ckptool.verbs._explain import explain
from ckptool.verbs._git_check import git_check
from ckptool.verbs._git_setup import GitSetup
from ckptool.verbs._save import Written
from ckptool.verbs._schema import schema
from ckptool.verbs.prune import Gone, Kept, Pruned
from ckptool.verbs.translate import layouts
from tests.support.cli import Run
from tests.support.looped import looped
from tests.support.small_files import options_of


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
    assert list(lines([table])) == [f"aaaaaaaaa   1  {text}", "b  22  x"]
    first, second, third, last = lines([table], Style(True, 28))
    assert first == "aaaaaaaaa" and last == "b  22  x"
    assert (second, third) == ("    1  \x1b[2mone two three four\x1b[0m", " " * 7 + "\x1b[2mfive six seven\x1b[0m")


@pytest.mark.parametrize("width", [None, 60, 80, 200])
def test_columns_are_those_of_a_terminal(width: int | None) -> None:
    names = [
        "plain.weight",
        "宽字符层.重量",
        "emoji🔥.bias",
        "e\u0301.weight",
        "层" * 5,
        "long." * 30,
        "a, long. " * 12 + "z",
    ]
    rows = [(name, "12", dim("f32 [3]")) for name in names]
    for hang in (None, 20):
        shown = list(lines([Table(rows, right=(1,), hang=hang)], Style(width=width)))
        last = [line[: line.index("f32")] for line in shown if "f32" in line]
        assert len(last) == len(names) and set(names) <= {re.split("  +", line.strip())[0] for line in shown}
        starts = {cell_len(start) for start in last if not start.lstrip().startswith(("long.", "a, "))}
        assert len(starts) == 1 and max(starts) < 60  # of rich, and few long names do not push the others


def test_units_and_shapes_stay_with_their_numbers() -> None:
    words = ["is", "44.8 MB", "(16 B);", "f32 [64, 3, 7]", "[1, 2],", "9 kB,", "Big", "and 5"]
    text = " ".join(words * 9)
    for width in range(20, 90):
        shown = Style(width=width).page(text).split("\n")
        assert max(map(len, shown)) <= width and " ".join(line.strip() for line in shown) == text
        assert not [line for line in shown if re.match(r" *(?:[kMGT]?B\b|\[\d+, \d+, )", line)]


@given(st.integers(0, 10**7), st.integers(1, 10**7))
def test_only_all_is_100_percent(part: int, total: int) -> None:
    text = percent(min(part, total) / total)
    assert (text == "100%") is (part >= total) and (text == "0%") is (part == 0)
    assert abs(float(text[:-1]) - 100 * min(part, total) / total) <= 0.1 and text.endswith("%")


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(1, 40))
@example(0, 0, 12)
def test_a_bar_is_as_long_as_its_share_in_eighths_of_a_letter(part: int, total: int, width: int) -> None:
    drawn = bar(min(part, total), total, width)
    eighths = sum(8 - ("█▉▊▋▌▍▎▏".index(sign)) for sign in drawn)
    assert abs(eighths - (8 * width * min(part, total) / total if total else 0)) <= 0.5
    assert len(drawn) <= width and set(drawn[:-1]) <= {"█"}


def test_heads_of_a_table_are_escaped_at_every_width() -> None:
    table = Table([("1", "0.5")], heads=("step", "loss\x1b[31m\n"), right=(1,))  # a metric's name in a run's files
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


@given(st.lists(st.text("ab ,;{}$", min_size=1, max_size=30), min_size=1, max_size=3))
def test_a_command_in_a_sentence_stays_whole(names: list[str]) -> None:
    lightning = "model.pt#callbacks/{'monitor': None, 'mode': 'min', 'every_n_epochs': 1}"
    commands = [shlex.join(["ckptool", "show", name]) for name in (*names, lightning)]
    sentence = f"It is too long for one line: {', or '.join(commands)}, and nothing else."
    for width in (20, 60, 80):
        page = Style(width=width).page(sentence)
        assert all(command in page for command in commands), page
        assert re.sub(r"\n +", " ", page) == sentence or any("  " in name for name in names)


def test_lists_of_names_and_meanings_are_two_columns() -> None:
    for report, indent in ((explain(), 2), (layouts(), 0)):
        shown, column, below = report_text(report, style=Style(width=80)).splitlines(), 0, 0
        for line in shown:
            if match := re.match(" " * indent + r"[a-z][\w-]*  +(?=\S)", line):
                column = match.end()
            elif line.startswith(" " * 10):
                below += 1
                assert len(line) - len(line.lstrip()) == column, line
        assert below > 2 and max(map(len, shown[:-1])) <= 80


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
    told = [("  1. ", cyan(typed[0])), ("All in one pass: ", cyan(typed[1])), f"see {typed[2]}"]
    told += [("  2. ", cyan(unpack), "   (another program: gzip)")] if colour else []
    for width in range(20, 90, 7):
        style = Style(colour, width)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", style.page("\n".join(lines(told, style)))).split("\n")
        for line in (*typed, *([unpack] if colour else [])):
            assert sum(line in each for each in shown) == 1, width


NASTY = "<script>alert('x')</script>\x1b[31m"
REPORTS: dict[str, Callable[[], Any]] = {
    "inspect": lambda: ckptool.inspect("a.pt", stats=True),
    "show": lambda: ckptool.show("a.pt", at="w"),
    "diff": lambda: ckptool.diff("a.pt", "b.pt"),
    "verify": lambda: ckptool.verify("a.pt"),
    "doctor": lambda: ckptool.doctor("a.pt"),
    "scan": lambda: ckptool.scan("."),
    "scan of a file": lambda: ckptool.scan("a.pt"),
    "report": lambda: ckptool.report("a.pt", "b.pt"),
    "written": lambda: ckptool.strip_module("a.pt", "out.pt"),
    "dry run": lambda: ckptool.cast("a.pt", "none.pt", dtype="bf16", dry_run=True),
    "recover": lambda: ckptool.recover("cut.pt", "back.pt", dry_run=True),
    "spec": lambda: ckptool.spec("a.pt"),
    "find_rules": lambda: ckptool.find_rules("a.pt", "a.pt"),
    "layouts": lambda: ckptool.layouts(),
    "warm_start": lambda: ckptool.warm_start("a.pt", "b.pt", "w.pt", dry_run=True),
    "outcome": lambda: Outcome("done", 3, 0, "runs/x"),
    "page": lambda: Page("text\n"),
    "pruned": lambda: Pruned("runs/x", (Gone(1, 10),), (Kept(2, ("newest",)),), False),
    "run": lambda: RunReport("runs/x", "id", "loss", "min", "done", 3, 3, ()),
    "plot": lambda: RunHistory("runs/x", {NASTY: Curve((1, 2, 3), (1.0, float("nan"), 2.0), 3, 1)}, (2,), kills=(2,)),
    "evaluated": lambda: Evaluated("runs/x", 3, "newest", "val", False, {"val_loss": float("nan")}),
    "rehearsal": lambda: Rehearsal({"m": 1}, 1, 1, 1, float("nan"), 0.1, 0.1, 10, "cpu"),
    "explanation": lambda: explain("non-finite"),
    "schema": lambda: schema("inspect"),
    "schemas": lambda: schema(),
    "git setup": lambda: GitSetup((("git", NASTY),), NASTY, (NASTY,), False, False),
    "git check": lambda: git_check("cut.pt"),
    "proof": lambda: Proof(("python", NASTY), "time", differs="w", causes=[NASTY]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.randn(3, 4), "b": torch.tensor([float("inf"), float("nan"), 1.0]), NASTY: torch.ones(2)}
    torch.save(state, "a.pt")
    torch.save({**state, "w": torch.zeros(3, 4), "extra": 1}, "b.pt")
    Path("cut.pt").write_bytes(Path("a.pt").read_bytes()[:-300])
    return tmp_path


@pytest.fixture(params=REPORTS)
def report(request: pytest.FixtureRequest, folder: Path) -> Report:
    made: Report = REPORTS[request.param]()
    return made


def test_every_kind_of_report_is_among_them(folder: Path) -> None:
    def below(kind: type) -> set[type]:
        return {kind, *(found for each in kind.__subclasses__() for found in below(each))}

    made = {type(make()).__name__ for make in REPORTS.values()}
    assert {kind.__name__ for kind in below(Report) - {Report} if kind.__module__.startswith("ckptool.")} == made


def test_a_notebook_shows_it_without_scripts(report: Report) -> None:
    html = report._repr_html_()
    assert len(html.encode()) <= 30_000
    assert "<script" not in html and "\x1b" not in html
    assert html.count("<div") == html.count("</div>") == 1 and html.count("<pre") == html.count("</pre>")


LONG = ("é" * 400 + "{}", "<" * 3000 + "{}")


@pytest.mark.parametrize("key", ["layer.{}.weight", *(pytest.param(long, marks=pytest.mark.soak) for long in LONG)])
def test_a_notebook_stays_small_however_many_tensors_there_are(key: str, folder: Path) -> None:
    tensor = torch.zeros(1)
    torch.save({key.format(i): tensor for i in range(1500)}, "many.pt")
    torch.save({f"{key.format(i)}x": tensor for i in range(1500)}, "others.pt")
    for report in (
        ckptool.inspect("many.pt"),
        ckptool.open("many.pt"),
        ckptool.diff("many.pt", "others.pt"),
        ckptool.report("many.pt", "others.pt"),
        ckptool.warm_start("many.pt", "others.pt", "out.pt", dry_run=True),
        ckptool.show("many.pt"),
        ckptool.doctor("many.pt", against="others.pt"),
        ckptool.verify("many.pt", finite=True),
        ckptool.scan("many.pt"),
        ckptool.rename("many.pt", ["* => y*"], "out.pt", dry_run=True),
        ckptool.report("many.pt", "others.pt"),
        ckptool.spec("many.pt"),
    ):
        assert len(report._repr_html_().encode()) <= 30_000


def test_a_page_says_that_values_are_the_same_beside_what_differs(folder: Path) -> None:
    for name, grad in (("a.pt", False), ("b.pt", True)):
        torch.save({f"w{number}": torch.ones(2, requires_grad=grad) for number in range(3)}, name)
    assert "3 of 3 tensors have the same values, byte for byte." in ckptool.report("a.pt", "b.pt").html()


# Markdown -------------------------------------------------------------------------------------------------------------
# Answers as Markdown, judged by a parser of CommonMark: whatever a file calls things, it stays text.


BREAKING = ["```\n# heading\n<script>alert(1)</script>", "`` ` ````", "</pre><img src=x onerror=alert(1)>"]
BREAKING += ["| a | b |\n|---|---|", "~~~\n[link](javascript:alert(1))", "@team #1 ![](http://x/y.png)", "\\`\n\\```"]
BREAKING += ["    ```\n>```"]


def texts_in(page: str) -> list[str]:
    """The heading and the block of each answer on a page. Anything else on it is a failure."""
    found = []
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(page):
        if token.type == "inline":
            (code,) = token.children or ()
            assert code.type == "code_inline", page
            found.append(code.content)
        elif token.type == "fence":
            assert token.info == "text", page
            found.append(token.content)
        else:
            assert token.type in ("heading_open", "heading_close"), page
    return found


LINE = st.text(st.sampled_from("`~<>|#*_[]()&;\\ !-=abc\t\"'é→"), min_size=1, max_size=30).filter(str.strip)


@given(st.lists(LINE, min_size=1, max_size=6))
@example(["`"])
@example(["a`", "```", "x"])
@example(["x", "````text", "```"])
def test_no_text_ends_its_block(lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    title, *rest = texts_in(markdown(text))
    assert title.replace("\t", " ").strip() == lines[0].replace("\t", " ").strip()
    assert rest == (["\n".join(lines[1:]) + "\n"] if lines[1:] else [])


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        state = {text: torch.full((2,), value) for text in BREAKING}
        torch.save({"state_dict": state, **{text: text for text in BREAKING}}, name)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-200])
    return tmp_path


LINES = """inspect a.pt --all|inspect a.pt b.pt --stats --jobs 2|show a.pt#state_dict|diff a.pt b.pt
verify a.pt cut.pt --finite --digest|doctor a.pt --against b.pt|scan .|strip-module a.pt -n -o out.pt
cast a.pt b.pt --dtype bf16 -d out|inspect cut.pt|inspect nothing.pt|inspect""".replace("\n", "|").split("|")


@pytest.mark.parametrize("line", LINES)
def test_every_answer_is_headings_and_blocks(line: str, files: Path, run: Run) -> None:
    words = line.split()
    found = run(*words, "--format", "markdown")
    assert texts_in(found.out), found
    assert found.code == run(*words, *(["-f"] if "-d" in words else [])).code


@looped("command", COMMANDS)
def test_every_command_with_json_has_the_other_forms(command: str) -> None:
    flags = {option.flag for option in options_of(command)}
    assert ("--format" in flags) == ("--json" in flags) and function_of(command).verb.examples


# HTML -----------------------------------------------------------------------------------------------------------------
# HTML for notebooks: well-formed, escaped, without scripts.


class Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        assert {name for name, _ in attrs} <= {"style", "class"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_escaped_and_well_formed(tmp_path: Path) -> None:
    path = tmp_path / "<i>.pt"
    state = {
        "module.<script>alert(1)</script>.weight": torch.ones(2),
        "module.\x1bb.weight": torch.ones(3),
        "module.n": torch.ones(()),
    }
    torch.save({"state_dict": state, "note": "<b>&\x1b"}, path)
    found = ckptool.inspect(path)
    for html in (found._repr_html_(), ckptool.open(path)._repr_html_()):
        checker = Checker()
        checker.feed(html)
        assert not checker.open and "script" not in checker.seen and checker.seen >= {"table", "tr", "td"}
        assert "\x1b" not in html and "&lt;script&gt;" in html and "colour" not in html
    assert "strip-module" in found._repr_html_()


def test_every_row_of_a_usual_model_is_shown_whole(tmp_path: Path) -> None:
    state = {f"layers.{n}.{'name_' * 12}{end}": torch.ones(2) for n in range(20) for end in "ab"}
    torch.save(state, tmp_path / "a.pt")
    html = ckptool.inspect(tmp_path / "a.pt", stats=True)._repr_html_()
    assert all(name in html for name in state) and len(html.encode()) <= 30_000
