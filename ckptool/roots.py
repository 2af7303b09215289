"""What the parts of a checkpoint are: model weights, their average, optimizer state, plain values.

A *model root* is a dictionary of names to tensors that are weights. Verbs on keys act on all of them; verbs that take one root choose
it here, and say so, or list the candidates: picking one in silence is how people train on the wrong weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.errors import UsageError, listed, printable
from ckptool.tree import Path, address, find

WEIGHTS, AVERAGE, OPTIMIZER, PLAIN = "model weights", "EMA weights", "optimizer state", "plain values"

# Words in a name by which people call weights, their running average, and things that hold tensors but no weights.
_MODEL_WORDS = re.compile(
    r"(^|_|\b)(model|module|net|network|state_?dict|weights?|params?|generator|discriminator|encoder|decoder|backbone|teacher|student|actor|critic|policy"
    r"|unet|vae|classifier|head|embedder|lora|adapter|pretrained|ema|swa|[a-z]*net|[gd])(_?[a-z0-9])?($|_|\b)",
    re.IGNORECASE,
)
_AVERAGE_WORDS = re.compile(
    r"(^|_|\b)(ema|swa|averaged?|shadow|polyak|moving_average)($|_|\b|\d|(?-i:(?=[A-Z])))", re.IGNORECASE
)
_OTHER_WORDS = re.compile(
    r"optim|scheduler|scaler|(^|_)rng|random|(^|_)(args|config|hparams|hyper_parameters|loops?|callbacks|history|metrics|loss(es)?|data_state|sampler)($|_)",
    re.IGNORECASE,
)
# What modules call their parameters and buffers: one of these as the last part of a key makes a dictionary look like a state dict.
_PARAMETER_NAMES = frozenset(
    "weight bias running_mean running_var num_batches_tracked in_proj_weight in_proj_bias "
    "weight_g weight_v weight_orig weight_mask gamma beta scale "
    "embedding kernel weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0".split()
)


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """A part of a checkpoint and what it looks like. `detail`: more about it, for people (`Adam state for 12 parameters`)."""

    path: Path
    node: Any
    kind: str
    detail: str = ""

    @property
    def address(self) -> str:
        return address(self.path)

    @property
    def is_model(self) -> bool:
        return self.kind in (WEIGHTS, AVERAGE)

    def __str__(self) -> str:
        return f"{printable(self.address) or 'the whole file'} ({self.detail or self.kind})"


def is_optimizer(node: Any) -> bool:
    """True for what `Optimizer.state_dict()` returns: a state, and parameter groups."""
    return isinstance(node, dict) and isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def find_roots(checkpoint: Checkpoint) -> list[Root]:
    """The parts of a checkpoint, in order: every model root and optimizer at any depth, and the top-level entries that hold none."""
    tree = checkpoint.tree
    special = list(_special(tree))
    if not isinstance(tree, dict) or any(root.path == () for root in special):
        return special or [Root((), tree, PLAIN)]
    roots: list[Root] = []
    for key, value in tree.items():
        below = [root for root in special if root.path[0] is key or root.path[0] == key]
        roots += below or [Root((key,), value, PLAIN)]
    return roots


def model_roots(checkpoint: Checkpoint, at: str | None = None) -> list[Root]:
    """The model roots that a verb on keys acts on: all, or the dictionary at the address `at`.

    Raises `UsageError` if there is none, or if `at` is not a dictionary.
    """
    if at is not None:
        path, node = find(checkpoint.tree, at)
        if not isinstance(node, dict):
            raise UsageError(
                f"{printable(at) or 'the whole file'} is not a dictionary of tensors", f"It is {_article(node)}."
            )
        return [Root(path, node, WEIGHTS)]
    roots = [root for root in find_roots(checkpoint) if root.is_model]
    if not roots:
        where = checkpoint.source or "the checkpoint"
        raise UsageError(
            f"{where} has no dictionary that looks like model weights",
            "Verbs on keys act on those.",
            f"See what it has: ckptool inspect {where}; then name the part: --at ADDRESS",
        )
    return roots


def one_root(checkpoint: Checkpoint, at: str | None = None) -> tuple[Root, str]:
    """The one model root of a verb that takes one, and a remark where a choice was made: the only one, or the model beside its EMA.

    Raises `UsageError` listing the candidates where there are several.
    """
    roots = model_roots(checkpoint, at)
    if len(roots) == 1:
        return roots[0], ""
    models = [root for root in roots if root.kind == WEIGHTS]
    if len(models) == 1:
        averages = listed([printable(root.address) for root in roots if root.kind == AVERAGE])
        return models[0], f"took {printable(models[0].address)}, the model; {averages} is its average"
    where = checkpoint.source or "the checkpoint"
    raise UsageError(
        f"{where} has {len(roots)} sets of model weights: {', '.join(map(str, roots))}",
        "This verb takes one; choosing for you could take the wrong one.",
        f"Name it: {where}#{printable(roots[0].address)}",
    )


def _article(node: Any) -> str:
    return "a tensor" if isinstance(node, (TensorEntry, Composite)) else f"of type {type(node).__name__}"


def _special(tree: Any) -> Iterator[Root]:
    """Model roots and optimizers, outermost first, without looking into what they hold."""
    seen: set[int] = set()
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if id(node) in seen or not isinstance(node, (dict, list, tuple)):
            continue
        seen.add(id(node))
        if is_optimizer(node):
            yield Root(path, node, OPTIMIZER, optimizer_detail(node))
        elif isinstance(node, dict) and _is_weights(path, node):
            kind = AVERAGE if any(isinstance(key, str) and _AVERAGE_WORDS.search(key) for key in path) else WEIGHTS
            yield Root(path, node, kind)
        else:
            below = node.items() if isinstance(node, dict) else enumerate(node)
            stack += reversed([((*path, key), value) for key, value in below])


def _is_weights(path: Path, node: dict[Any, Any]) -> bool:
    if not all(type(key) is str for key in node):
        return False
    members = {key: value for key, value in node.items() if not key.endswith("_extra_state")}
    tensor_keys = [key for key, value in members.items() if isinstance(value, (TensorEntry, Composite))]
    if not tensor_keys or 2 * len(tensor_keys) < len(members):
        return False
    if any(isinstance(key, str) and _OTHER_WORDS.search(key) for key in path):
        return False
    dotted = any("." in key for key in tensor_keys)
    nested = sum(1 for value in members.values() if isinstance(value, (dict, list, tuple)) and _holds_tensors(value))
    if nested and not (dotted and nested < len(tensor_keys)):
        return False  # a few tensors beside the weights: random states, a loss, class weights
    looks = dotted or any(key in _PARAMETER_NAMES for key in tensor_keys)
    return looks or not path or (isinstance(path[-1], str) and bool(_MODEL_WORDS.search(path[-1])))


def _holds_tensors(node: Any, depth: int = 3) -> bool:
    """True if there are tensors in a container, or in containers that it holds, so many levels down."""
    if is_optimizer(node):
        return True
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return any(
        isinstance(part, (TensorEntry, Composite)) or (depth > 1 and _holds_tensors(part, depth - 1)) for part in parts
    )


_OPTIMIZERS = (
    ({"exp_avg", "exp_avg_sq"}, "Adam"),
    ({"exp_avg", "exp_inf"}, "Adamax"),
    ({"square_avg", "acc_delta"}, "Adadelta"),
    ({"square_avg"}, "RMSprop"),
    ({"prev", "step_size"}, "Rprop"),
    ({"sum"}, "Adagrad"),
    ({"momentum_buffer"}, "SGD momentum"),
    ({"exp_avg"}, "Lion"),
)


def optimizer_detail(node: Any) -> str:
    """What an optimizer's state dict holds, in words: `Adam state for 12 parameters`."""
    state = node["state"]
    slots = {key for slot in list(state.values())[:8] if isinstance(slot, dict) for key in slot}
    name = next((name for signs, name in _OPTIMIZERS if signs <= slots), "optimizer")
    groups = [group for group in node["param_groups"] if isinstance(group, dict)]
    count = sum(len(group["params"]) for group in groups if isinstance(group.get("params"), (list, tuple)))
    if not state:
        return f"optimizer without state yet, {count:,} parameters"
    return f"{name} state for {len(state):,} parameter{'s' * (len(state) != 1)}"


def optimizers(tree: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every optimizer's state dict in a tree, with its path."""
    for root in _special(tree):
        if root.kind == OPTIMIZER:
            yield root.path, root.node
