"""`plot`: a run's curves are those of its lines, at any length, while it is written, and whatever is in them."""

import json
import math
import random
import re
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.analysis.curves import MOST_POINTS, Curve, CurveBuilder, braille
from ckptool.errors import NoMatch, UsageError
from ckptool.render.lines import Style
from ckptool.render.lines import text as text_of
from ckptool.training.reports import RunHistory
from ckptool.training.trainer import start
from tests.support.cli import Run, done
from tests.support.errors import refused
from tests.support.looped import examples
from tests.support.small_runs import config

NAN = float("nan")


def run_of(folder: Path, lines: list[Any], events: list[Any] = []) -> Path:  # noqa: B006
    """A run's folder with these lines; texts are written as they are."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.yaml").write_text("# ckptool run 0\n")
    for name, facts in (("metrics", lines), ("history", events)):
        texts = [fact if isinstance(fact, str) else json.dumps(fact) + "\n" for fact in facts]
        (folder / f"{name}.jsonl").write_text("".join(texts))
    return folder


@pytest.mark.usefixtures("harness")
def test_a_run_of_the_harness(tmp_path: Path) -> None:
    made = config("eval.metric=val_acc", "eval.mode=max", run=tmp_path / "run")
    start(made)
    found = ckptool.plot(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "lr", "val_loss", "val_acc"):
        expected = {line["step"]: line[name] for line in lines if name in line}
        assert (found.curves[name].steps, found.curves[name].values) == (tuple(expected), tuple(expected.values()))
    assert "epoch" not in found.curves and list(ckptool.plot(tmp_path / "run", only="epoch").curves) == ["epoch"]
    assert found.saves[-1] == 20 and found.done == (20,) and not found.stops and found.resumes == () == found.kills


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0 / step} for step in range(1, 31)]
    begun = [{"event": "start", "step": 0}, {"event": "save", "step": 10}]
    running = ckptool.plot(run_of(tmp_path / "a", lines[:17], begun))  # while it is being written
    assert running.event == "save" and running.saves == (10,) and running.curves["loss"].points == 17
    ended = [{"event": "save", "step": 20}, {"event": "save", "step": 30}, {"event": "done", "step": 30}]
    found = ckptool.plot(run_of(tmp_path / "b", lines, [*begun, {"event": "resume", "step": 10}, *ended]))
    assert (found.saves, found.resumes, found.kills, found.stops) == ((10, 20, 30), (10,), (10,), ())
    assert found.curves["loss"].points == 30


def test_a_line_that_is_cut_off_and_what_is_no_number(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 2.0, "ok": True, "name": "x", "list": [1], "none": None, "count": 3},
        {"step": 2, "loss": "nan"},
        {"step": "2", "loss": 5.0},
        {"step": 1 << 80, "loss": 5.0},
        {"loss": 5.0},
        "[1, 2]\n",
        '{"step": 3, "loss": "-inf"}\n{"step": 4, "loss": NaN}\n{"step": 5, "loss": 1e999}\n',
        '{"step": 6, "loss": 0.',
    ]
    found = ckptool.plot(run_of(tmp_path / "r", lines))
    loss = found.curves["loss"]
    assert loss.steps == (1, 2, 3, 4, 5) and loss.values[0] == 2.0 and loss.not_finite == 4
    assert list(found.curves) == ["loss", "count"]
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["curves"]["loss"]["values"][2] == "-Infinity"


def test_curves_by_name_and_pattern(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "r", [{"step": 1, "loss": 1.0, "val_a": 1.0, "val_b": 2.0, "a[0]": 3.0}])
    assert list(ckptool.plot(folder, only=["val_*", "loss"]).curves) == ["loss", "val_a", "val_b"]
    assert list(ckptool.plot(folder, only="a[0]").curves) == ["a[0]"]
    error = refused(NoMatch, tmp_path, lambda: ckptool.plot(folder, only=["loss", "nothing"]), "no curve 'nothing'")
    assert error.exit_code == 1 and "val_b" in error.why


def test_what_is_no_run_and_what_logged_nothing(tmp_path: Path, run: Run) -> None:
    refused(UsageError, tmp_path, lambda: ckptool.plot(tmp_path), "is not a run")
    assert "No such file or directory" in run("plot", str(tmp_path / "none")).err
    empty = run_of(tmp_path / "r", [])
    assert "nothing was logged yet" in done(run("plot", str(empty)))
    refused(NoMatch, tmp_path, lambda: ckptool.plot(empty, only="loss"), "no curve")


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32), st.integers(1, 40_000), st.sampled_from([1, 7, 10**6]), st.booleans())
def test_a_thinned_curve_keeps_what_is_drawn(seed: int, count: int, far: int, in_order: bool) -> None:
    dice = random.Random(seed)
    values = [dice.choice([dice.gauss(0, 1), dice.gauss(0, 1), NAN]) for _ in range(min(count, 20_000))]
    points = [(step * far, value) for step, value in enumerate(values)]
    points = points if in_order else dice.sample(points, len(points))
    builder = CurveBuilder()
    for step, value in points:
        builder.add(step, value)
    curve = builder.curve()
    finite = [value for _, value in points if value == value]
    assert len(curve.steps) <= MOST_POINTS and list(curve.steps) == sorted(curve.steps)
    assert curve.points == len(points) and curve.not_finite == len(points) - len(finite)
    kept = [value for _, value in curve.finite]
    assert min(kept, default=0) == min(finite, default=0) and max(kept, default=0) == max(finite, default=0)
    by_step = dict(points)
    assert all(value == by_step[step] or value != value for step, value in zip(curve.steps, curve.values, strict=True))
    assert curve.steps[-1] == max(by_step)
    first_odd = min((step for step, value in points if value != value), default=None)
    assert (curve.odd_steps or [None])[0] == first_odd
    other = CurveBuilder()
    for step, value in reversed(points):
        other.add(step, value)
    assert repr(other.curve()) == repr(curve)  # in any order


@pytest.mark.parametrize("points", [3 * 10**4, pytest.param(10**6, marks=pytest.mark.soak)])
def test_many_points_take_bounded_memory(points: int, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "r", [])
    losses = (math.sin(i / 1e5) + (i % 97) / 500 for i in range(points))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {i}, "loss": {loss}, "lr": 0.1}}\n' for i, loss in enumerate(losses))
    tracemalloc.start()
    before = time.process_time()
    try:
        found = ckptool.plot(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20 and time.process_time() - before < 120
    assert found.curves["loss"].points == points and len(found.curves["loss"].steps) <= MOST_POINTS


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 1.0, -1e308, 1e308, 5e-324]))
curves = st.dictionaries(st.integers(-(2**61), 2**61) | st.integers(0, 300), numbers, min_size=1, max_size=60).map(
    lambda points: [(step, points[step]) for step in sorted(points)]
)


def history(points: list[tuple[int, float]], steps: list[int]) -> RunHistory:
    builder = CurveBuilder()
    for step, value in points:
        builder.add(step, value)
    return RunHistory("runs/x", {"loss": builder.curve()}, tuple(sorted(steps)), event="save", step=1)


@given(curves, st.lists(st.integers(0, 400), max_size=5), st.sampled_from([None, 40, 80, 200]))
def test_any_curve_can_be_drawn_within_the_width(
    points: list[tuple[int, float]], steps: list[int], width: int | None
) -> None:
    found = history(points, steps)
    text = text_of(found, style=Style(width=width))
    drawn = [line for line in text.split("\n") if re.search("[┤│└]", line)]
    assert drawn and all(len(line) <= (width or 80) for line in drawn)
    assert any(0x2800 < ord(c) < 0x2900 for c in text) == bool(found.curves["loss"].finite)
    assert ("!" in "".join(drawn)) == bool(found.curves["loss"].not_finite)
    assert len(found._repr_html_().encode()) <= 30_000


@given(st.integers(2, 100), st.integers(2, 100), st.integers(1, 6))
def test_a_rising_line_goes_from_corner_to_corner_through_every_column(count: int, width: int, height: int) -> None:
    curve = Curve(tuple(range(count)), tuple(map(float, range(count))), count)
    rows = braille(curve, 0, count - 1, width, height)
    dots = {
        (2 * at + side, 4 * (height - 1 - row) + up)
        for row, text in enumerate(rows)
        for at, sign in enumerate(text)
        for side, bits in enumerate(((6, 2, 1, 0), (7, 5, 4, 3)))  # of Unicode's eight dots, from below
        for up, bit in enumerate(bits)
        if sign != " " and (ord(sign) - 0x2800) >> bit & 1
    }
    assert {at for at, _ in dots} == {*range(2 * width)}
    assert min(dots) == (0, 0) and max(dots) == (2 * width - 1, 4 * height - 1)


@given(st.integers(2, 200), st.integers(2, 100))
def test_the_highest_and_lowest_of_every_column_are_drawn(count: int, width: int) -> None:
    dice = random.Random(count)
    values = [dice.random() for _ in range(count)]
    (line,) = Curve(tuple(range(count)), tuple(values), count).pieces(0, count - 1, width)
    low, high = min(values), max(values)
    for at in range(width):
        here = [value for step, value in enumerate(values) if step * (width - 1) // (count - 1) == at]
        there = [(value - low) / (high - low) for value in here]
        drawn = [height for place, height in line if place == at]
        assert (not there and not drawn) or (min(drawn), max(drawn)) == pytest.approx((min(there), max(there)))


def test_no_torch_is_imported_and_many_curves_stay_small(tmp_path: Path, run: Run) -> None:
    folder = run_of(tmp_path / "r", [{"step": i, **{f"layer{k}": i * 1.0 for k in range(150)}} for i in range(300)])
    code = f"import sys, ckptool; ckptool.plot({str(folder)!r})._repr_html_(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert len(ckptool.plot(folder)._repr_html_().encode()) <= 30_000
    assert "not drawn: 50 more curves" in done(run("plot", folder))
