"""The page of two files tells what changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.support.browser import Browser

PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "NaN": (dict, lambda s: s | {"l.0.w": s["l.0.w"] / 0 * 0}, "NaN or Inf only in B: l.0.w; 1 of 4 tensors changed"),
    "cast": (dict, lambda s: {k: v.half() for k, v in s.items()}, "4 of 4 tensors changed."),
    "larger": (dict, lambda s: s | {"l.0.w": torch.ones(5, 4)}, "changed; 3 tensors the same, byte for byte."),
    "one value": (dict, lambda s: s | {"l.3.w": s["l.3.w"] + ONE}, "1 of 4 tensors changed"),
    "prefix": (dict, lambda s: {f"module.{k}": v for k, v in s.items()}, "prefix, and by nothing else."),
    "prefix and values": (
        dict,
        lambda s: {f"module.{k}": v + ONE for k, v in s.items()},
        "changed; the names differ by a",
    ),
    "part": (lambda s: {"sd": s, "n": 1}, lambda s: s | {"l.3.w": s["l.3.w"] + ONE}, "1 of 4 tensors changed"),
    "entry": (lambda s: {"sd": s, "n": 1}, lambda s: {"sd": s, "n": 2}, "1 entry changed"),
    "optimizer": (lambda s: {"sd": s, "o": {"n": 1}}, lambda s: {"sd": s}, "1 only in A"),
    "same": (dict, dict, "Nothing: they are the same."),
}
ONE = torch.zeros(4, 4).index_put((torch.tensor([1]), torch.tensor([2])), torch.tensor(0.5))


@pytest.mark.parametrize("kind", PAIRS)
def test_the_page_begins_with_what_changed(browser: Browser, tmp_path: Path, kind: str) -> None:
    """And its table, its heatmap and its sentence agree, whichever part of a file was compared."""
    state = {f"l.{i}.w": torch.full((4, 4), i + 0.25) for i in range(4)}
    before, after, sentence = PAIRS[kind]
    torch.save(before(state), tmp_path / "a.pt")
    torch.save(after(state), tmp_path / "b.pt")
    found = ckptool.report(tmp_path / "a.pt", tmp_path / "b.pt", out=tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert sentence in browser.js("return document.querySelector('.lead').textContent")
    assert found.diff is not None
    changed = sum(1 for each in found.diff.changed if "values" in each.aspects)
    words = browser.js("return columns.change.map((c) => c[0])")
    assert sum(1 for word in words if "values" in word) == 2 * changed, words
    titles = browser.js("return [...document.querySelectorAll('svg.h title')].map((t) => t.textContent)")
    assert sum(1 for title in titles if ": 0.0%" not in title) == changed
