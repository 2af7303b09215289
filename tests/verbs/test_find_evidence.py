"""`translate --find` of values that differ: a fine-tune is accepted; another order, and another model, are not."""

from __future__ import annotations

import numpy
import pytest

import ckptool

Weights = dict[str, numpy.ndarray]
KINDS = ("heads", "rows", "columns", "transposed", "halves", "tuned", "lora", "unrelated", "other tensor", "same")


def model(rng: numpy.random.Generator, wide: int) -> Weights:
    made = {"embed.weight": rng.standard_normal((3 * wide, wide)), "head.bias": rng.standard_normal(4)}
    for i in range(2):
        made |= {f"layers.{i}.{name}.weight": rng.standard_normal((wide, wide)) for name in ("q", "k", "up")}
        made |= {f"layers.{i}.norm.weight": numpy.ones(wide), f"layers.{i}.norm.bias": numpy.zeros(wide)}
    return {key: (value * 0.1).astype("f4") if "norm" not in key else value.astype("f4") for key, value in made.items()}


def changed(rng: numpy.random.Generator, kind: str, base: Weights) -> tuple[Weights, list[str]]:
    """Another model, and the tensors of it that are wrong."""
    key = str(rng.choice([key for key in base if key.endswith(("q.weight", "k.weight", "up.weight"))]))
    value, wide = base[key], len(base[key])
    if kind in ("tuned", "lora"):
        step = 10 ** rng.uniform(-3, -0.52)
        made = {k: v + step * (v.std() or 0.1) * rng.standard_normal(v.shape).astype("f4") for k, v in base.items()}
        low = rng.standard_normal((wide, 2)) @ rng.standard_normal((2, wide))
        lora = {**base, key: value + (step * value.std() / low.std() * low).astype("f4")}
        return (made if kind == "tuned" else lora), []
    if kind == "unrelated":
        other = model(rng, wide)
        return other, [k for k in base if "norm" not in k and k != "head.bias"]
    orders = {
        "heads": lambda: value.reshape(4, -1, wide)[[2, 0, 3, 1]].reshape(wide, wide),
        "rows": lambda: value[rng.permutation(wide)],
        "columns": lambda: value[:, rng.permutation(wide)],
        "transposed": lambda: value.T[rng.permutation(wide)],
        "halves": lambda: value.reshape(4, -1, 2, wide).swapaxes(1, 2).reshape(wide, wide)[:, rng.permutation(wide)],
        "other tensor": lambda: rng.standard_normal((wide, wide)).astype("f4") * 0.1,
        "same": lambda: value,
    }
    return {**base, key: numpy.ascontiguousarray(orders[kind]())}, [] if kind == "same" else [key]


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_fine_tune_may_differ(kind: str) -> None:
    for seed in range(6):
        rng = numpy.random.default_rng(seed)
        base = model(rng, int(rng.choice([16, 32, 64])))
        other, wrong = changed(rng, kind, base)
        found = ckptool.find_rules(base, other)
        named = {*found.reordered, *found.unrelated} - {"head.bias"}
        assert named == {*wrong} and found.complete == (not wrong), (seed, found)
        assert not wrong or bool(found.reordered) == (kind not in ("unrelated", "other tensor"))
        differ = [line for line in str(found).splitlines() if "values differ: " in line]
        assert not any(name in line for name in named for line in differ), str(found)


def test_equal_values_under_names_that_stay_are_not_doubtful() -> None:
    base = model(numpy.random.default_rng(0), 16)
    moved = {f"net.{key}": value for key, value in base.items()}
    turned = {key: value.T.copy() if "up" in key else value for key, value in base.items()}
    for other, doubtful in ((base, 0), (turned, 0), (moved, 4)):  # four norms, two of ones and two of zeros
        found = ckptool.find_rules(base, other)
        assert found.complete and sum(rule.alike for rule in found.rules) == doubtful, str(found)
