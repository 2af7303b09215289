"""Which checkpoints stay: a union of pure functions, in which the newest always is."""

from __future__ import annotations

import math
import random

import pytest

from ckptool.training.store import Retention, SavedState


def kept_steps(step: int, value: float | None) -> SavedState:
    return SavedState(step, "", {"metrics": {} if value is None else {"acc": value}})


def rules(last: int = 0, best: int = 0, every: int = 0, metric: str = "acc", mode: str = "max") -> Retention:
    return Retention(last, best, every, metric, mode)


def kept(rule: Retention, name: str, *values: float | None) -> set[int]:
    """The steps that a rule wants, of checkpoints at 10, 20, …"""
    reasons = rule.reasons([kept_steps(10 * (i + 1), value) for i, value in enumerate(values)])
    return {step for step, names in reasons.items() if name in names}


def test_the_last() -> None:
    assert kept(rules(last=2), "last", 1, 2, 3) == {20, 30}
    assert kept(rules(last=9), "last", 1) == {10}
    assert kept(rules(last=0), "last", 1, 2) == set()


def test_the_best_by_the_least_and_by_the_most() -> None:
    assert kept(rules(best=1), "best", 0.2, 0.9, 0.5) == {20}
    assert kept(rules(best=2, mode="min"), "best", 0.2, 0.9, 0.5) == {10, 30}
    assert kept(rules(best=1, metric="other"), "best", 0.2, 0.9) == set()


def test_zero_counts_and_nan_and_missing_ones_never_rank() -> None:
    assert kept(rules(best=1, mode="min"), "best", 0.5, 0.0, math.nan) == {20}
    assert kept(rules(best=3), "best", math.nan, 0.0, None) == {20}
    assert kept(rules(best=1), "best", -1.0, 0.0) == {20}


def test_of_equal_ones_the_older() -> None:
    assert kept(rules(best=1), "best", 0.5, 0.5) == {10}
    assert kept(rules(best=1, mode="min"), "best", 0.5, 0.5) == {10}


def test_every_so_many_steps() -> None:
    assert kept(rules(every=20), "every", 1, 1, 1, 1) == {20, 40}
    assert kept(rules(every=0), "every", 1, 1) == set()


def test_a_union_with_the_reasons() -> None:
    there = [kept_steps(10, 0.9), kept_steps(20, 0.1), kept_steps(30, 0.5)]
    assert rules(1, 1, 20).reasons(there) == {10: ["best"], 20: ["every"], 30: ["newest", "last"]}
    assert rules(1, 1, 20).reasons([]) == {}


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_and_the_best_always_stay(seed: int) -> None:
    """Whatever the policies; and what was kept before a new one came is all that is needed to choose again."""
    dice = random.Random(seed)
    rule = rules(dice.randrange(3), 1, dice.choice((0, 30)))
    left: list[SavedState] = []
    values = [dice.choice((0.0, 0.5, 1.0, math.nan, dice.random())) for _ in range(12)]
    for number, value in enumerate(values):
        left.append(kept_steps(10 * (number + 1), value))
        stay = rule.reasons(left)
        left = [one for one in left if one.step in stay]
        assert left[-1].step == 10 * (number + 1)
        ranked = [v for v in values[: number + 1] if not math.isnan(v)]
        assert not ranked or max(ranked) in [one.metrics["acc"] for one in left]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_was_stopped_ends_with_the_checkpoints_of_one_that_was_not(seed: int) -> None:
    """Saves that only a signal asked for come between the others, also several in a row, also with the best metric."""
    dice = random.Random(seed)
    rule = rules(dice.randrange(4), dice.randrange(3), dice.choice((0, 30)))
    saves = [kept_steps(10 * number, dice.choice((0.0, 0.5, math.nan, dice.random()))) for number in range(1, 12)]
    stops = [
        SavedState(each.step - dice.randrange(1, 10), "", {"metrics": {"acc": 9.0}, "stop": True}) for each in saves
    ]
    ends = []
    for every in (saves, sorted([*saves, *dice.sample(stops, 6)], key=lambda saved: saved.step)):
        left: list[SavedState] = []
        for saved in every:
            stay = rule.reasons([*left, saved])
            assert saved.step in stay  # whatever it is, the newest is there to resume from
            left = [one for one in (*left, saved) if one.step in stay]
        ends.append(left)
    assert ends[0] == ends[1]
