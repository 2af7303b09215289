"""`demo`: a small checkpoint with the problems that checkpoints have, and one that was fine-tuned from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

from ckptool.checkpoint import Checkpoint, Storage, TensorEntry
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.commands import Command, argument, as_argument, command, verb
from ckptool.errors import printable
from ckptool.facts import Page, replace
from ckptool.formats import torch_zip
from ckptool.output.folders import replace_folder
from ckptool.pickles.reduce import array_entry, from_live
from ckptool.verbs._options import Overwrite

if TYPE_CHECKING:
    import numpy

    Weights = Mapping[str, numpy.ndarray[Any, Any]]

MODEL, TUNED, CLEAN, WEIGHTS, PAGE = "model.pt", "finetuned.pt", "clean.pt", "finetuned.safetensors", "report.html"
LAYERS, WIDTH, WORDS = 6, 32, 100


@verb(("ckptool demo playground", "two checkpoints in a new folder, and what to try"))
def demo(
    folder: Annotated[str, argument("FOLDER", "The new folder (ckptool-demo).")] = "ckptool-demo",
    *,
    overwrite: Overwrite = False,
) -> Page:
    """Writes the two checkpoints into a new folder, and says what to try on them. Needs no torch.

    `model.pt` is a GPT of 6 layers as a training script saves it: from DataParallel on a GPU, with an average of its
    weights, Adam's state, and a number of numpy's among the plain ones. `finetuned.pt` has its weights alone, of which
    the upper layers were trained on. With `overwrite` a folder of an earlier demo is replaced. Raises `OutputExists`.
    """
    import numpy

    random = numpy.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (WORDS, WIDTH)}
    layer_shapes = {"ln_1": (WIDTH,), "attn.c_attn": (3 * WIDTH, WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
    layer_shapes |= {"mlp.c_fc": (4 * WIDTH, WIDTH), "mlp.c_proj": (WIDTH, 4 * WIDTH)}
    for layer, (name, shape) in product(range(LAYERS), layer_shapes.items()):
        shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[:1]}
    weights = {name: random.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    tuned = {}  # after some more training of the upper half, the more the higher
    for name, value in weights.items():
        layer = int(name.split(".")[1]) if name.startswith("h.") else 0
        amount = 0.01 * max(layer - LAYERS // 2 + 1, 0)
        tuned[name] = (value * (1 + amount * random.standard_normal(value.shape)) if amount else value).astype("f4")
    trees = {MODEL: _training(weights, random), TUNED: OrderedDict({k: array_entry(v) for k, v in tuned.items()})}
    files: dict[str, Any] = {}
    for name, tree in trees.items():
        (files[name],) = torch_zip.write(Checkpoint(from_live(tree), torch_zip.NAME)).files.values()
    replace_folder(Plan(files), folder, overwrite=overwrite, replaceable=[CLEAN, WEIGHTS, PAGE])
    lines = [f"demo: {printable(folder)} holds {MODEL} and {TUNED}. To try:", ""]
    return Page("\n".join([*lines, *(f"  {line!s}" for line in commands(folder))]) + "\n")


def commands(folder: str) -> list[Command]:
    """Commands to try on the files in the folder of a demo, in this order."""
    names = (MODEL, TUNED, CLEAN, WEIGHTS, PAGE)
    model, tuned, clean, weights, page = (as_argument(os.path.join(folder, name)) for name in names)
    return [
        command("inspect", model),
        command("doctor", model),
        command("strip-module", model, out=clean),
        command("diff", f"{clean}#state_dict", tuned, ignore="device"),
        command("convert", tuned, out=weights),
        command("verify", weights, finite=True),
        *([command("report", clean, tuned, out=page)] if find_spec("jinja2") else []),
    ]


def _training(weights: Weights, random: Any) -> dict[str, Any]:
    """What a training script saves: everything is on the GPU, except the steps."""
    import numpy

    state = {
        number: {
            "step": array_entry(numpy.float32(1000)),
            "exp_avg": _on_gpu(0.01 * random.standard_normal(value.shape)),
            "exp_avg_sq": _on_gpu(0.0001 * random.random(value.shape)),
        }
        for number, value in enumerate(weights.values())
    }
    adam = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
    group = {**adam, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
    return {
        "epoch": 10,
        "best_loss": numpy.float64(2.7183),
        "state_dict": OrderedDict({f"module.{name}": _on_gpu(value) for name, value in weights.items()}),
        "ema_state_dict": {name: _on_gpu(0.999 * value) for name, value in weights.items()},
        "optimizer": {"state": state, "param_groups": [{**group, "params": list(state)}]},
    }


def _on_gpu(value: Any) -> TensorEntry:
    entry = array_entry(value.astype("f4"))
    return replace(entry, storage=Storage(entry.storage.data, "cuda:0"))
