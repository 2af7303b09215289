"""Every report as a value: text, one line, plain values of JSON, a block of text for notebooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.analysis.curves import Curve
from ckptool.facts import Page, Report
from ckptool.training.reports import Evaluated, Outcome, Proof, Rehearsal, RunHistory, RunReport
from ckptool.verbs._explain import explain
from ckptool.verbs._git_check import git_check
from ckptool.verbs._git_setup import GitSetup
from ckptool.verbs._schema import schema
from ckptool.verbs.prune import Gone, Kept, Pruned

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
    "rehearsal": lambda: Rehearsal({"m": 1}, 1, 1, 1, float("nan"), 0.1, 0.1, 10, 10, None, "cpu"),
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
