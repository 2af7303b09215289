"""Hostile names on the page of `report`: modules that are chosen, and the cells of CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch

import ckptool
from tests.support.browser import Browser

ODD = (
    *("re:x.w", "a.w", "a.w2", "ba.w", "b;=1+1|c", "\uff1d1", " =1", "c\x01d.w", "\ufeffx.w", "!x", "+A1"),
    *('q"=1', "[a", "*"),
)


def test_no_cell_of_csv_is_a_formula(browser: Browser, tmp_path: Path) -> None:
    torch.save({name: torch.ones(8, 8) for name in ODD}, tmp_path / "m.pt")
    ckptool.report(tmp_path / "m.pt", out=tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.js("document.getElementById('csv').click()")
    text = browser.downloaded("tensors.csv")
    rows = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in rows} == {14} and len(rows) == len(ODD) + 1
    for delimiter in ",;\t":
        cells_of_it = [cell for row in csv.reader(io.StringIO(text), delimiter=delimiter) for cell in row]
        assert not [cell for cell in cells_of_it if cell.strip()[:1] in {*"=+-@\uff1d\uff0b\uff0d\uff20"}]
