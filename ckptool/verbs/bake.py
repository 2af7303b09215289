"""`bake`: parametrisations folded into plain weights: weight norm (old and new) and pruning.

    weight norm    weight_g, weight_v                 v * g / ‖v‖, over the axes where g has one element
                   parametrizations.weight.original0, original1           the same (torch.nn.utils.parametrizations)
    pruning        weight_orig, weight_mask           weight_orig * weight_mask, exact

Spectral norm is recognised and left alone (weight_orig, weight_u, weight_v; parametrizations.weight.original, 0._u,
0._v): the weight depends on vectors that change with every step in training.
Sources: torch/nn/utils/{weight_norm,spectral_norm,prune,parametrizations}.py. Norms are summed in f64 and the result is
rounded once, so it may differ from what torch computes in f32 in the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Note, TensorEntry
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.tree import rebuild
from ckptool.commands import FILE, OUT, command, verb
from ckptool.conventions.optimizer_keys import nested
from ckptool.conventions.state_dicts import model_state_dicts, optimizers
from ckptool.errors import Conflict, NoMatch, counted, printable
from ckptool.transforms.views import pruned, weight_normed
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change

_WEIGHT_NORM, _PRUNING, _SPECTRAL = "weight norm", "pruning", "spectral norm"
_ROLES = {_WEIGHT_NORM: {"g", "v"}, _PRUNING: {"orig", "mask"}, _SPECTRAL: {"orig", "u", "v"}}
_NEW = {"original0": "g", "original1": "v", "original": "orig", "0._u": "u", "0._v": "v"}
_PART = re.compile(
    rf"(?P<module>(?:.*\.)?)parametrizations\.(?P<name>[^.]+)\.(?P<new>{'|'.join(map(re.escape, _NEW))})"
    r"|(?P<weight>.+)_(?P<old>g|v|orig|mask|u)",
    re.DOTALL,
)


@verb(("ckptool bake normed.pt -o plain.pt", "weight_g and weight_v become weight"))
def bake(file: ChangedFiles, out: Out = None, *, at: ChangedAt = None, **options: Unpack[SavePart]) -> Written | Any:
    """Folds weight norm and pruning into plain weights, in all model weights of a file or the part `at`.

    Spectral norm is named and left alone.
    Raises `NoMatch` where there is nothing of the kind.
    """
    change = begin_change("bake", file, out, at, options)
    checkpoint = change.part
    roots = model_state_dicts(checkpoint, named=change.named)
    replaced, folded, skipped, lines = dict[int, Any](), list[str](), dict[str, str](), list[str]()
    for root in roots:
        replaced[id(root.node)], kinds, root_skipped = _bake_weights(root.node)
        folded, skipped = folded + list(kinds), skipped | root_skipped
        for kind in (_WEIGHT_NORM, _PRUNING):
            names = [name for name, its_kind in kinds.items() if its_kind == kind]
            lines += Row.named("", names, f"{kind}:", 4).lines
        lines += [f"left alone: {name} ({why})" for name, why in root_skipped.items()]
    if not folded and not skipped:
        why = "ckptool knows weight norm (weight_g, weight_v, parametrizations.*), pruning (weight_orig, weight_mask) "
        why += "and spectral norm."
        raise NoMatch(f"{checkpoint.source or 'the checkpoint'} has no parametrized weights", why)
    saved = change.save(replace(checkpoint, tree=rebuild(checkpoint.tree, replaced=replaced)), changes=bool(folded))
    is_stale = folded and any(True for _ in optimizers(nested(change.original.tree)))
    message, fix = "the optimizer's state is still that of the parts", command("slim", change.path or FILE, out=OUT)
    notes = [Note("optimizer-differs", message, fix)] if is_stale else []
    summary = f"{counted(len(folded), 'weight')} folded into plain weights"
    return saved.about(summary, *lines, notes=notes, folded=folded, left=skipped)


def _bake_weights(node: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, str], dict[str, str]]:
    """The state dict with plain weights in place of parametrisations; the weights that were folded, with their kinds;
    and those that were recognised and left alone, with why.

    Raises `Conflict` where the plain weight is there already or its parts do not fit each other, `Unsupported` for
    types that have no product, `LimitExceeded` for rows that are too wide.
    """
    groups: dict[tuple[str, bool], dict[str, str]] = {}  # the keys of a weight's parts, by role
    for key, value in node.items():
        if type(key) is str and isinstance(value, TensorEntry) and (match := _PART.fullmatch(key)):
            weight, role = match["weight"] or match["module"] + match["name"], match["old"] or _NEW[match["new"]]
            groups.setdefault((weight, match["new"] is not None), {})[role] = key
    folded, skipped = dict[str, str](), dict[str, str]()
    replacements: dict[str, tuple[str, TensorEntry] | None] = {}  # by key, the new name and tensor; None: dropped
    for (weight, new), keys in groups.items():
        kind = next((kind for kind, roles in _ROLES.items() if keys.keys() == roles), None)
        if kind == _SPECTRAL:
            vectors = f"{printable(keys['u'])} and {printable(keys['v'])}"
            skipped[weight] = f"spectral norm: {vectors} change with every training step"
        elif kind is None:
            skipped |= {weight: "an unknown parametrization"} if new else {}
        else:
            folded[weight] = kind
            parts = {role: node[key] for role, key in keys.items()}
            fold = weight_normed if kind == _WEIGHT_NORM else pruned
            first, *others = keys.values()
            replacements |= {first: (weight, fold(weight, **parts)), **dict.fromkeys(others)}
    tree = same_kind(node, {})
    for key, value in node.items():
        if (replacement := replacements.get(key, (key, value)) if type(key) is str else (key, value)) is None:
            continue
        if replacement[0] in tree:
            what = f"{replacement[0]!s} already exists next to the parts that it is made from"
            raise Conflict(what, "One of the two would be lost.")
        tree[replacement[0]] = replacement[1]
    return tree, folded, skipped
