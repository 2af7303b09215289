"""Which checkpoints stay: a union of pure functions, in which the newest always is."""

from __future__ import annotations

import math
import random

import pytest

from ckptool.training.store import Candidate, keep_best, keep_every, keep_last, retained


def there(*values: float | None) -> list[Candidate]:
    return [Candidate(10 * (i + 1), {} if value is None else {"acc": value}) for i, value in enumerate(values)]


def test_the_last() -> None:
    assert keep_last(2)(there(1, 2, 3)) == {20, 30}
    assert keep_last(9)(there(1)) == {10}
    assert keep_last(0)(there(1, 2)) == set()


def test_the_best_by_the_least_and_by_the_most() -> None:
    assert keep_best(1, "acc", "max")(there(0.2, 0.9, 0.5)) == {20}
    assert keep_best(2, "acc", "min")(there(0.2, 0.9, 0.5)) == {10, 30}
    assert keep_best(1, "other", "max")(there(0.2, 0.9)) == set()


def test_zero_counts_and_nan_and_missing_ones_never_rank() -> None:
    assert keep_best(1, "acc", "min")(there(0.5, 0.0, math.nan)) == {20}
    assert keep_best(3, "acc", "max")(there(math.nan, 0.0, None)) == {20}
    assert keep_best(1, "acc", "max")(there(-1.0, 0.0)) == {20}


def test_of_equal_ones_the_older() -> None:
    assert keep_best(1, "acc", "max")(there(0.5, 0.5)) == {10}
    assert keep_best(1, "acc", "min")(there(0.5, 0.5)) == {10}


def test_every_so_many_steps() -> None:
    assert keep_every(20)(there(1, 1, 1, 1)) == {20, 40}
    assert keep_every(0)(there(1, 1)) == set()


def test_a_union_with_the_reasons() -> None:
    policies = {"last": keep_last(1), "best": keep_best(1, "acc", "max"), "every": keep_every(20)}
    assert retained(there(0.9, 0.1, 0.5), policies) == {30: ["newest", "last"], 10: ["best"], 20: ["every"]}
    assert retained([], policies) == {}


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_and_the_best_always_stay(seed: int) -> None:
    """Whatever the policies; and what was kept before a new one came is all that is needed to choose again."""
    dice = random.Random(seed)
    policies = {
        "last": keep_last(dice.randrange(3)),
        "best": keep_best(1, "acc", "max"),
        "every": keep_every(dice.choice((0, 30))),
    }
    left: list[Candidate] = []
    values = [dice.choice((0.0, 0.5, 1.0, math.nan, dice.random())) for _ in range(12)]
    for number, value in enumerate(values):
        left.append(Candidate(10 * (number + 1), {"acc": value}))
        kept = retained(left, policies)
        left = [one for one in left if one.step in kept]
        assert left[-1].step == 10 * (number + 1)
        ranked = [v for v in values[: number + 1] if not math.isnan(v)]
        assert not ranked or max(ranked) in [one.metrics["acc"] for one in left]
