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


# A rule, its name, the metrics of the checkpoints at 10, 20, …, and the steps that it wants.
NAN, NONE = math.nan, None
WANTED: list[tuple[Retention, str, list[float | None], set[int]]] = [
    (rules(last=2), "last", [1, 2, 3], {20, 30}),
    (rules(last=9), "last", [1], {10}),
    (rules(last=0), "last", [1, 2], set()),
    (rules(best=1), "best", [0.2, 0.9, 0.5], {20}),
    (rules(best=2, mode="min"), "best", [0.2, 0.9, 0.5], {10, 30}),
    (rules(best=1, metric="other"), "best", [0.2, 0.9], set()),
    (rules(best=1, mode="min"), "best", [0.5, 0.0, NAN], {20}),  # zero counts; NaN and missing ones never rank
    (rules(best=3), "best", [NAN, 0.0, NONE], {20}),
    (rules(best=1), "best", [-1.0, 0.0], {20}),
    (rules(best=1), "best", [0.5, 0.5], {10}),  # of equal ones the older
    (rules(best=1, mode="min"), "best", [0.5, 0.5], {10}),
    (rules(every=20), "every", [1, 1, 1, 1], {20, 40}),
    (rules(every=0), "every", [1, 1], set()),
]


@pytest.mark.parametrize(("rule", "name", "values", "steps"), WANTED, ids=str)
def test_each_rule_wants_its_own(rule: Retention, name: str, values: list[float | None], steps: set[int]) -> None:
    reasons = rule.reasons([kept_steps(10 * (i + 1), value) for i, value in enumerate(values)])
    assert {step for step, names in reasons.items() if name in names} == steps


def test_a_union_with_the_reasons() -> None:
    there = [kept_steps(10, 0.9), kept_steps(20, 0.1), kept_steps(30, 0.5)]
    assert rules(1, 1, 20).reasons(there) == {10: ["best"], 20: ["every"], 30: ["newest", "last"]}
    assert rules(1, 1, 20).reasons([]) == {}


def kept(rule: Retention, saves: list[SavedState]) -> list[SavedState]:
    """What is left of saves one after the other. The newest is always there to resume from, whatever it is."""
    left: list[SavedState] = []
    for saved in saves:
        stay = rule.reasons([*left, saved])
        assert saved.step in stay
        left = [one for one in (*left, saved) if one.step in stay]
    return left


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_and_the_best_always_stay(seed: int) -> None:
    """Whatever the policies; and what was kept before a new one came is all that is needed to choose again."""
    dice = random.Random(seed)
    rule = rules(dice.randrange(3), 1, dice.choice((0, 30)))
    saves = [kept_steps(10 * i, dice.choice((0.0, 0.5, 1.0, NAN, dice.random()))) for i in range(1, 13)]
    for count in range(1, 13):
        ranked = [one.metrics["acc"] for one in saves[:count] if not math.isnan(one.metrics["acc"])]
        assert not ranked or max(ranked) in [one.metrics["acc"] for one in kept(rule, saves[:count])]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_was_stopped_ends_with_the_checkpoints_of_one_that_was_not(seed: int) -> None:
    """Saves that only a signal asked for come between the others, also several in a row, also with the best metric."""
    dice = random.Random(seed)
    rule = rules(dice.randrange(4), dice.randrange(3), dice.choice((0, 30)))
    saves = [kept_steps(10 * number, dice.choice((0.0, 0.5, NAN, dice.random()))) for number in range(1, 12)]
    stops = [
        SavedState(each.step - dice.randrange(1, 10), "", {"metrics": {"acc": 9.0}, "stop": True}) for each in saves
    ]
    mixed = sorted([*saves, *dice.sample(stops, 6)], key=lambda saved: saved.step)
    assert kept(rule, mixed) == kept(rule, saves)
