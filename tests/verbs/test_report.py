"""`report`: what it gathers, what it gives of files that are broken, and that a page replaces no checkpoint."""

import base64
import itertools
import json
import re
import zlib
from collections.abc import Callable
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

import ckptool
from ckptool.errors import Conflict, OutputExists, UsageError
from ckptool.training.trainer import start
from ckptool.verbs.report import CheckpointReport
from tests.support.cli import Run
from tests.support.files import CORPUS, contents, saved, written
from tests.support.looped import looped
from tests.support.small_runs import config, cut_short


def state(seed: int = 0, prefix: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"{prefix}fc{number}.weight": torch.randn(6, 5) for number in range(3)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    saved({"sd": state(), "epoch": 3}, tmp_path / "a.pt")
    saved({"sd": state(1), "epoch": 4}, tmp_path / "b.pt")
    return tmp_path


@pytest.mark.parametrize("unread", [torch.eye(3).to_sparse(), torch.ones(2, device="meta"), torch.ones(0), None])
def test_values_are_good_only_where_all_were_read(unread: torch.Tensor | None, folder: Path) -> None:
    saved({"a": torch.ones(2)} | ({} if unread is None else {"b": unread}), folder / "c.pt")
    tone = "good" if unread is None or (not unread.numel() and not unread.is_meta) else "warn"
    assert f'<dt>Are the values finite?</dt><dd class="{tone}">All that were read' in ckptool.report("c.pt").html()


@pytest.mark.parametrize("least", [-1e308, 1e308, float("nan")])
def test_a_sum_that_overflows_leaves_a_page(least: float, folder: Path) -> None:
    weight = torch.full((64, 64), 1e308, dtype=torch.float64)
    weight[3] = least
    page = ckptool.report(saved({"fc.weight": weight}, folder / "huge.pt")).html()
    assert "1 of 1 tensor read" in page


def test_a_part_of_a_file(folder: Path) -> None:
    found = ckptool.report("a.pt#sd", "b.pt#sd").to_dict()
    assert found["files"][0]["inspection"] == ckptool.inspect("a.pt#sd", stats=True).to_dict()
    assert found["diff"] == ckptool.diff("a.pt#sd", "b.pt#sd").to_dict()
    with pytest.raises(UsageError):
        ckptool.report("a.pt#nothing")


NO_MODEL: dict[str, Callable[[int], Any]] = {
    "number": int,
    "list": lambda n: [n],
    "tensors": lambda n: [torch.ones(3) * n],
    "empty": lambda n: [],
    "two of one address": lambda n: {0: torch.ones(2), "0": torch.ones(3) * n},
}


@looped("kind", NO_MODEL)
def test_a_page_of_what_is_no_model(kind: str, folder: Path) -> None:
    for number in (1, 2):
        saved({"o": NO_MODEL[kind](number)}, folder / f"{number}.pt")
    assert ckptool.report("1.pt").html().count("</html>") == ckptool.report("1.pt", "2.pt").html().count("</html>") == 1


FORMS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "bare": lambda model: model.state_dict(),
    "nested": lambda model: {"model": model.state_dict(), "epoch": 1},
    "wrapped": lambda model: {f"module.{name}": value for name, value in model.state_dict().items()},
    "module": lambda model: model,
    "nested module": lambda model: {"model": model, "epoch": 1},
}


@looped(("form", "other"), itertools.product(FORMS, FORMS))
def test_each_tensor_is_said_to_be_changed_just_where_it_is(form: str, other: str, folder: Path) -> None:
    """Whichever way the same model was saved, and whatever of a file is compared with the other."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    torch.save(FORMS[form](model), "one.pt")
    with torch.no_grad():
        model[0].bias += 1
        model[2].weight[0, 0] += 1
    torch.save(FORMS[other](model), "two.pt")
    found = ckptool.report("one.pt", "two.pt")
    data = re.search(r'<script type="text/plain" id="data">([^<]*)<', found.html())
    assert data is not None
    columns = json.loads(zlib.decompress(base64.b64decode(data[1])))["columns"]
    words = dict.fromkeys(("0.bias", "2.weight"), "values")
    for name, (word, *_) in zip(columns["name"], columns["change"], strict=True):
        bare = re.sub(r"^(model[/.])?(module\.)?", "", name)
        apart = {form, other} == {"nested", "nested module"}  # `model` is a dictionary here, a module there
        assert word == ("not compared" if apart else words.get(bare, "same: bytes")), (name, word)


def test_the_words_and_squares_of_a_page_of_two(folder: Path) -> None:
    layers = {f"{block}.{n}.{kind}": torch.ones(n + 2) for block in "xy" for n in range(3) for kind in ("w", "b")}
    two = {name: value.clone() for name, value in layers.items()}
    two["x.0.w"][0], two["x.1.w"][:], two["y.2.b"][0] = torch.nan, 5, torch.inf
    saved({"model": {**layers, "lone": torch.ones(4)}, "extra": torch.ones(9)}, folder / "one.pt")
    saved({"model": {**two, "new": torch.ones(2)}, "extra": torch.ones(9)}, folder / "two.pt")
    page, alone = (unescape(ckptool.report(*files).html()) for files in (("one.pt", "two.pt"), ("one.pt",)))
    told = "NaN or Inf only in B: 2 tensors (model/x.0.w, model/y.2.b); values changed in 3 tensors "
    told += (
        "(model/x.{0, 1}.w, model/y.2.b): 5 of 9 elements, by up to inf; only in A: model/lone; only in B: model/new."
    )
    assert told in page
    shares = dict(re.findall(r"<title>(\S+ \S+): (\S+)% of its elements moved", page))
    moved = {place: float(share) for place, share in shares.items() if float(share)}
    assert moved == {"model/x.0 w": 50, "model/x.1 w": 100, "model/y.2 b": 25}
    assert "<h2>Modules of A</h2>" in page and "<h2>Modules</h2>" in alone
    for each in (page, alone):
        hues = dict(re.findall(r'data-glob="([^"]+)">\s*<rect class="q(\d)"', each))
        assert [hues[f"model/{name}[./]*"] for name in ("x.0", "x.1", "y.0", "y.2")] == ["0", "0", "1", "1"]
        assert hues["[e]xtra"] == "6", "of no model"


def test_more_kinds_of_changes_than_a_few_are_counted(folder: Path) -> None:
    for count in (3, 4, 7):
        sides = [{f"{n}.weight": torch.ones(n + 2, 2 + side) for n in range(count)} for side in (0, 1)]
        page = ckptool.report(*(saved(each, folder / f"{at}.pt") for at, each in enumerate(sides))).html()
        words = {3: "", 4: "1 more change of that kind", 7: "4 more changes of that kind"}[count]
        assert words in page and ("of that kind" in page) is (count > 3)


def test_a_page_replaces_no_input(folder: Path, run: Run) -> None:
    Path("model.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(1, 1)\n")
    cut = written((folder / "a.pt").read_bytes()[:-400], folder / "cut.pt")
    for words in (
        ("a.pt", "-o", "a.pt"),
        ("a.pt#sd", "-o", "a.pt"),
        ("b.pt", "a.pt", "-o", "a.pt"),
        ("b.pt", "--against", "a.pt", "-o", "a.pt"),
        ("b.pt", "--against", "model.py:build", "-o", "model.py"),
        (str(cut), "-o", str(cut)),
    ):
        target = Path(words[-1])
        before = target.read_bytes()
        for force in ((), ("-f",)):
            ran = run("report", *words, *force)
            assert ran.code == 2 and "is an input of the report" in ran.err, (words, ran)
            assert target.read_bytes() == before
    Path("link.html").symlink_to("a.pt")
    with pytest.raises(Conflict):
        ckptool.report("a.pt", out="link.html", overwrite=True)


def test_a_page_replaces_only_pages(folder: Path) -> None:
    Path("model").mkdir()
    save_file(state(), "model/model.safetensors")
    Path("model/link.html").symlink_to("model.safetensors")
    with pytest.raises(OutputExists):
        ckptool.report("a.pt", out=saved(state(), folder / "page.html"))
    for _ in range(2):
        found = ckptool.report("model", out="page.html", overwrite=True)
        assert found.bytes == Path("page.html").stat().st_size
    before = contents(folder)
    for out in ("model/model.safetensors", "model/link.html", "b.pt"):
        with pytest.raises(Conflict, match="is not a page"):
            ckptool.report("model", out=out, overwrite=True)
    assert contents(folder) == before


def test_without_jinja2_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    ran = run("report", "a.pt", "-o", "page.html")
    assert ran.code == 2 and "pip install 'ckptool[report]'" in ran.err and not Path("page.html").exists()
    assert run("report", "a.pt", "--json").code == 0


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    start(config("save.keep_last=10", run=tmp_path / "run"))
    return tmp_path / "run"


def test_norms_are_what_numpy_computes(a_run: Path) -> None:
    found = ckptool.report(a_run)
    assert found.norms is not None and found.run is not None
    trees = [ckptool.load(one.path) for one in found.run.checkpoints]
    states = [tree["models"]["main"] if "models" in tree else tree["model_state_dict"] for tree in trees]
    layers: dict[str, list[str]] = {}
    for name in states[0]:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    assert found.norms.norms.keys() == layers.keys()
    for layer, names in layers.items():
        rows = [torch.cat([one[name].double().flatten() for name in names]) for one in states]
        assert found.norms.norms[layer] == pytest.approx([row.norm().item() for row in rows], rel=1e-9)
        moved = [(after - before).norm().item() / before.norm().item() for before, after in pairwise(rows)]
        assert found.norms.moved[layer] == pytest.approx(moved, rel=1e-9)


def test_a_damaged_checkpoint_of_a_run_is_named_and_the_rest_is_shown(
    a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ckptool.report(a_run)
    assert before.run is not None and before.norms is not None
    cut_short(Path(before.run.checkpoints[-1].path))
    found = ckptool.report(a_run)
    assert found.norms is not None and found.run is not None and found.run.damaged == 1
    assert list(found.norms.unread) == [before.run.checkpoints[-1].step]
    assert found.norms.steps == before.norms.steps[:-1]
    path = Path(next(one.path for one in found.run.checkpoints if one.step == before.norms.steps[1]))
    content = path.read_bytes()
    at = content.index(b"/data/0FB")  # of the first record, not of its entry in the directory: its data cannot be read
    path.write_bytes(content[:at] + b"/dxta" + content[at + 5 :])
    norms = ckptool.report(a_run).norms
    assert norms is not None and [*norms.unread] == [before.norms.steps[-1], before.norms.steps[1]]
    assert norms.norms == {name: (each[0], *each[2:-1]) for name, each in before.norms.norms.items()}
    monkeypatch.setattr("ckptool.verbs.report.MOST_STEPS", 2)
    norms = ckptool.report(a_run).norms
    assert norms is not None and any("left out: 2 of " in why for why in norms.unread.values())
    path.write_bytes(content)
    for one in found.run.checkpoints:
        if one.state == "good":
            cut_short(Path(one.path))
    with pytest.raises(UsageError, match="no intact checkpoint"):
        ckptool.report(a_run)


@looped("path", sorted(CORPUS.iterdir()) if CORPUS.is_dir() else [], ids=lambda path: path.name, here=1 / 3)
def test_every_file_of_others_gives_a_report(path: Path) -> None:
    found = ckptool.report(path)
    assert isinstance(found, CheckpointReport)
    (one,) = found.files
    if one.inspection is None:
        assert one.diagnosis.findings and not found.files[0].pictures
    else:
        rows = {row.address for row in one.inspection.tensors}
        assert one.pictures.keys() == (one.inspection.statistics or {}).keys()
        assert one.pictures.keys() | one.health.skipped.keys() == rows and one.health.tensors >= one.health.read
    json.dumps(found.to_dict(), allow_nan=False)
    assert len(found._repr_html_().encode()) <= 30_000 and "<title>" in found.html()
