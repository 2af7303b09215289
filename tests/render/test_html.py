"""HTML for notebooks: well-formed, escaped, without scripts."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import torch

import ckptool


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
