"""On a terminal of 80 columns nothing is cut: every verb that looks prints the words that it prints into a pipe."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import ckptool
from ckptool.cli.output import answer_of
from ckptool.errors import CkptoolError
from ckptool.render.lines import PLAIN, Style
from fixtures.make import PRODUCERS, make
from tests.support.looped import examples

WIDTH = 80
LOOKS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "inspect": (ckptool.inspect, {}, {}),
    "inspect --all": (ckptool.inspect, {}, {"all": True}),
    "inspect --depth": (ckptool.inspect, {}, {"depth": 9}),
    "inspect --stats": (ckptool.inspect, {"stats": True}, {}),
    "inspect --only": (ckptool.inspect, {"only": "*"}, {}),
    "verify": (ckptool.verify, {"finite": True}, {}),
    "verify --digest": (ckptool.verify, {"digest": True}, {"digest": True}),
    "doctor": (ckptool.doctor, {}, {}),
    "scan": (ckptool.scan, {}, {}),
    "spec": (ckptool.spec, {}, {}),
    "show": (ckptool.show, {}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixtures")
    for name in PRODUCERS:
        make(name, folder)
    return folder


def words(text: str) -> Counter[str]:
    """Bars are shorter on a narrow terminal; a colour is no word, nor are the commas between the cells of a row."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[█▏▎▍▌▋▊▉]", "", text)
    plain = re.sub(r"\b\d+\s+(?:s|min|h|d)\b", "age", plain)  # a file grows older between the two
    return Counter(word.rstrip(",") for word in plain.split())


def check(report: Any, options: dict[str, Any]) -> None:
    wide = answer_of(report, PLAIN, options, 0).content
    for style in (Style(width=WIDTH), Style(colour=True, width=WIDTH)):
        text = answer_of(report, style, options, 0).content
        # The heads of a table may stand in each of its rows, but for that of the names.
        assert not words(wide) - words(text) - Counter(["file"])
        for line in re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n"):
            whole = line.split()
            command = re.search(r"(^|\s)ckptool [a-z-]+ ", line)
            assert len(line) <= WIDTH or len(whole) == 1 or command or len(whole[0]) > WIDTH // 2, line


@pytest.mark.parametrize("name", PRODUCERS)
def test_nothing_is_cut_at_80_columns(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for verb, (function, arguments, options) in LOOKS.items():
        for file in Path().glob(f"{name}*"):
            try:
                report = function(str(file), **arguments)
            except CkptoolError:
                assert verb in ("show", "spec", "verify --digest"), (verb, file)  # of the one part that they take
                continue
            check(report, options)


@settings(max_examples=examples(300))
@given(st.lists(st.text("ab \x1b-,", max_size=60), max_size=5), st.integers(1, 100))
def test_pages_keep_every_word_and_the_width(lines: list[str], width: int) -> None:
    text = "\n".join(lines).replace("\x1b", "\x1b[1mx\x1b[0m")
    page = Style(width=width).page(text)
    assert words(page) == words(text) and Style().page(text) == text
    for line in re.sub(r"\x1b\[[0-9;]*m", "", page).split("\n"):
        assert len(line) <= width or len(line.split()) <= 1
