"""Layouts between real libraries: a random model of the one, translated, is loaded by the other, with equal outputs.

A layout's test has a `Side` for each library and calls `prove`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool.errors import OnlyAPart

CLOSE = 1e-5


@dataclass(frozen=True)
class Side:
    """One library's half of a layout.

    write: puts a random model under a path, as the library itself does.  prepare: puts beside the path what the library
    needs to load it (its configuration).  run: the outputs of the model loaded strictly from it, on inputs that are the
    same for both sides.  name: of the file or folder, below the folder of the test.
    """

    write: Callable[[Path], None]
    run: Callable[[Path], Sequence[torch.Tensor]]
    prepare: Callable[[Path], None] = lambda path: None
    name: str = "model.pt"


def randomised(model: Any, seed: int = 0) -> Any:
    """The model in eval mode with every value random, also biases, norms, statistics and class tokens."""
    generator = torch.Generator().manual_seed(seed)
    seen = set()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point() or tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            middle = 1.0 if bool((tensor == 1).all()) else 0.0
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            tensor.copy_(noise.abs() * 0.5 + 0.5 if name.endswith("running_var") else noise * 0.2 + middle)
    return model.eval()


def torch_side(
    make: Callable[[], Any], forward: Callable[[Any], Sequence[torch.Tensor]], name: str = "model.pt"
) -> Side:
    """A library whose files are a state dict, by `torch.save`; it is loaded with `strict=True`."""

    def write(path: Path) -> None:
        torch.save(randomised(make()).state_dict(), path)

    def run(path: Path) -> Sequence[torch.Tensor]:
        model = make().eval()
        model.load_state_dict(torch.load(path, weights_only=True), strict=True)
        with torch.no_grad():
            return list(forward(model))

    return Side(write, run, name=name)


def pretrained_side(kind: Any, config: Any, forward: Callable[[Any], Sequence[torch.Tensor]], **options: Any) -> Side:
    """A model of transformers: a folder that `from_pretrained` loads with nothing missing, unexpected or mismatched.

    options: of the model.
    """

    def write(path: Path) -> None:
        randomised(kind(config, **options)).save_pretrained(path.parent)

    def run(path: Path) -> Sequence[torch.Tensor]:
        model, said = kind.from_pretrained(path.parent, output_loading_info=True, **options)
        assert not any(said.values()), said
        with torch.no_grad():
            return list(forward(model.eval()))

    return Side(write, run, lambda path: config.save_pretrained(path.parent), "hf/model.safetensors")


def prove(layout: str, old: Side, new: Side, tmp_path: Path, base: str = "", **options: Any) -> None:
    """Both ways, each from a random model that its own library wrote: the other one gives the same outputs, and the
    way back the same bytes; the direction is told by the weights.

    base: a prefix that the library leaves out, which loads with it as well.  options: of `translate`.
    """
    for here, there, back in ((old, new, False), (new, old, True)):
        folder = tmp_path / ("back" if back else "forth")
        first, second, third = (
            folder / str(number) / side.name for number, side in enumerate((here, there, here), start=1)
        )
        for path in (first, second, third):
            path.parent.mkdir(parents=True)
        here.write(first)
        ckptool.translate(first, out=second, rules_file=layout, **options)
        there.prepare(second)
        close(here.run(first), there.run(second))
        found_again(first, second, tmp_path / f"{folder.name}.yaml")
        ckptool.translate(second, out=third, rules_file=layout, reverse=not back, **options)
        here.prepare(third)
        assert same_weights(first, third, base), f"{layout}: not the same weights again"
        close(here.run(first), here.run(third), 0.0)


def found_again(old: Path, new: Path, rules: Path) -> None:
    """`translate --find` finds rules for both ways, which give the same bytes."""
    for one, other in ((old, new), (new, old)):
        try:
            found = ckptool.find_rules(one, other, rules, overwrite=True)
        except OnlyAPart:  # the file of a rank: rules act on what is joined
            return
        assert found.by_value + len(found.missing) == found.total, found
        assert all(note.code == "second-name" for note in found.notes)
        ckptool.translate(one, out=rules.with_suffix(".pt"), rules_file=rules, overwrite=True)
        made, wanted = ckptool.load(rules.with_suffix(".pt")), ckptool.load(other)
        assert all(torch.equal(made[key], wanted[key]) for key in wanted if key not in found.missing)


def close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], most: float = CLOSE) -> None:
    """Raises `AssertionError` unless the outputs are as many and as close, and none is constant."""
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape
        assert a.numel() < 2 or a.std() > 1e-3, "an output that says nothing"
        difference = (a - b).abs().max().item()
        assert difference <= most * max(1.0, a.abs().max().item()), difference


def same_weights(one: Path, other: Path, base: str = "") -> bool:
    """True for the same names (without the base), types, shapes and bytes, in whatever order."""
    loaded = [ckptool.load(path) for path in (one, other)]
    first, second = ({name.removeprefix(base): value for name, value in each.items()} for each in loaded)
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]) for key in first
    )
