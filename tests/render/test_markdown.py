"""Answers as Markdown, judged by a parser of CommonMark: whatever a file calls things, it stays text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ckptool.commands import VERBS as COMMANDS
from ckptool.commands import function_of
from ckptool.render.html import markdown
from tests.support.cli import Run
from tests.support.looped import looped
from tests.support.small_files import options_of

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
