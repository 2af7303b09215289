"""Random trees of names with random new names, of which it is known which is which."""

import string
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Shapes = dict[str, tuple[int, ...]]
SIZES = [(4, 4), (4, 4), (4,), (8, 4), (3, 4), (), (2, 2, 2)]
Part = str | tuple[int, int]  # a name, or the numbers from .. to


@st.composite
def trees(draw: Callable[[Any], Any]) -> dict[tuple[Part, ...], tuple[int, ...]]:
    """Shapes by path; few words and few shapes, so that much can be taken for something else."""
    tree: dict[tuple[Part, ...], tuple[int, ...]] = {}

    def grow(path: tuple[Part, ...], depth: int) -> None:
        kind = draw(st.sampled_from(["leaves", "names", "numbers"] if depth else ["leaves"]))
        if kind == "leaves":
            leaves = st.lists(st.sampled_from(["weight", "bias", "gain"]), min_size=1, max_size=2, unique=True)
            tree.update({(*path, leaf): draw(st.sampled_from(SIZES)) for leaf in draw(leaves)})
        elif kind == "names":
            for name in draw(st.lists(st.sampled_from(["fox", "owl", "elk"]), min_size=1, max_size=3, unique=True)):
                grow((*path, name), depth - 1)
        else:
            start, count, alike = draw(st.integers(0, 1)), draw(st.integers(1, 3)), draw(st.booleans())
            spans = [(start, start + count)] if alike else [(n, n + 1) for n in range(start, start + count)]
            for span in spans:
                grow((*path, span), depth - 1)

    for name in draw(st.lists(st.sampled_from(["fox", "owl", "elk", "bee"]), min_size=1, max_size=4, unique=True)):
        grow((name,), 3)
    return tree


def spelled_out(path: tuple[Part, ...]) -> list[str]:
    keys = [""]
    for part in path:
        choices = [part] if isinstance(part, str) else [str(number) for number in range(*part)]
        keys = [f"{key}.{choice}" if key else choice for key in keys for choice in choices]
    return keys


@st.composite
def renamings(draw: Callable[[Any], Any]) -> tuple[dict[str, str], Shapes]:
    """Keys with their true new names, and their shapes: names stay or become ones that are nowhere else, numbers
    stay."""
    fresh = (f"z{a}{b}" for a in string.ascii_lowercase for b in string.ascii_lowercase)
    often, wrapper = draw(st.sampled_from([0, 1, 2, 4])), draw(st.sampled_from([(), ("model",)]))
    names: dict[tuple[Part, ...], Part] = {}
    truth: dict[str, str] = {}
    shapes: Shapes = {}
    for path, shape in draw(trees()).items():
        for depth, part in enumerate(path):
            new = isinstance(part, str) and draw(st.integers(0, 4)) < often
            names.setdefault(path[: depth + 1], next(fresh) if new else part)
        goal = (*wrapper, *(names[path[: depth + 1]] for depth in range(len(path))))
        for key, name in zip(spelled_out(path), spelled_out(goal), strict=True):
            truth[key], shapes[key] = name, shape
    if draw(st.booleans()):
        shapes = {truth[key]: shape for key, shape in shapes.items()}
        truth = {name: key for key, name in truth.items()}
    return truth, shapes
