"""`bake`: parametrisations folded into plain weights: weight norm (old and new) and pruning.

    weight norm    weight_g, weight_v                 v * g / ‖v‖, over the axes where g has one element
                   parametrizations.weight.original0, original1           the same (torch.nn.utils.parametrizations)
    pruning        weight_orig, weight_mask           weight_orig * weight_mask, exact

Spectral norm is recognised and left alone (weight_orig, weight_u, weight_v; parametrizations.weight.original, 0._u,
0._v): the weight depends on vectors that change with every step in training.
Sources: torch/nn/utils/{weight_norm,spectral_norm,prune,parametrizations}.py. Norms are summed in f64 and the result is
rounded once, so it may differ from what torch computes in f32 in the last bit. The old names of weight norm and the new
ones turn into each other exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from ckptool.checkpoint import Note, TensorEntry
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.tree import rebuild
from ckptool.commands import FILE, OUT, command, option, verb
from ckptool.conventions.optimizer_keys import nested
from ckptool.conventions.state_dicts import model_state_dicts, optimizers
from ckptool.errors import Conflict, NoMatch, counted, printable
from ckptool.transforms.rename import apply
from ckptool.transforms.views import pruned, weight_normed
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change

Form = Literal["plain", "old", "new"]
_WEIGHT_NORM, _PRUNING, _SPECTRAL = "weight norm", "pruning", "spectral norm"
_ROLES = {_WEIGHT_NORM: {"g", "v"}, _PRUNING: {"orig", "mask"}, _SPECTRAL: {"orig", "u", "v"}}
_NEW = {"original0": "g", "original1": "v", "original": "orig", "0._u": "u", "0._v": "v"}
_PART = re.compile(
    rf"(?P<module>(?:.*\.)?)parametrizations\.(?P<name>[^.]+)\.(?P<new>{'|'.join(map(re.escape, _NEW))})"
    r"|(?P<weight>.+)_(?P<old>g|v|orig|mask|u)",
    re.DOTALL,
)


@verb(("ckptool bake normed.pt -o plain.pt", "weight_g and weight_v become weight"))
def bake(
    file: ChangedFiles,
    out: Out = None,
    *,
    at: ChangedAt = None,
    form: Annotated[Form, option("--form", "plain folds; old and new rename the parts of weight norm.")] = "plain",
    **options: Unpack[SavePart],
) -> Written | Any:
    """Folds weight norm and pruning into plain weights, in all model weights of a file or the part `at`.

    `old` and `new` give weight norm its other names (`weight_g` or `parametrizations.weight.original0`), exactly.
    Spectral norm is named and left alone.
    Raises `NoMatch` where there is nothing of the kind.
    """
    change = begin_change("bake", file, out, at, options)
    checkpoint = change.part
    roots = model_state_dicts(checkpoint, named=change.named)
    replaced, renamed = dict[int, Any](), dict[Any, Any]()
    folded, skipped, lines = list[str](), dict[str, str](), list[str]()
    for root in roots:
        tree, kinds, root_skipped = _bake_weights(root.node, form)
        replaced[id(root.node)] = tree
        renamed |= {old: new for old, new in zip(root.node, tree, strict=False) if old != new}
        folded, skipped = folded + list(kinds), skipped | root_skipped
        for kind in (_WEIGHT_NORM, _PRUNING):
            names = [name for name, its_kind in kinds.items() if its_kind == kind]
            lines += Row.named("", names, f"{kind}:", 4).lines
        lines += [f"left alone: {name} ({why})" for name, why in root_skipped.items()]
    if not folded and not skipped:
        why = "ckptool knows weight norm (weight_g, weight_v, parametrizations.*), pruning (weight_orig, weight_mask) "
        why += "and spectral norm."
        raise NoMatch(f"{checkpoint.source or 'the checkpoint'} has no parametrized weights", why)
    if form == "plain":
        word, baked = "folded into plain weights", replace(checkpoint, tree=rebuild(checkpoint.tree, replaced=replaced))
        is_stale = folded and any(True for _ in optimizers(nested(change.original.tree)))
        message, fix = "the optimizer's state is still that of the parts", command("slim", change.path or FILE, out=OUT)
        notes = [Note("optimizer-differs", message, fix)] if is_stale else []
    else:  # what refers to the names changes along
        word = f"renamed to the {form} names"
        baked = apply(checkpoint, roots, lambda key: renamed.get(key, key)).checkpoint
        notes = [*change.left_outside(renamed)]
    saved = change.save(baked, changes=bool(folded))
    return saved.about(f"{counted(len(folded), 'weight')} {word}", *lines, notes=notes, folded=folded, left=skipped)


def _bake_weights(node: Mapping[Any, Any], form: str) -> tuple[dict[Any, Any], dict[str, str], dict[str, str]]:
    """The state dict with plain weights in place of parametrisations; or, with `form`, weight norm by its other names.
    The weights that were folded, with their kinds; and those that were recognised and left alone, with why.

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
        elif form != "plain" and kind != _WEIGHT_NORM:
            skipped[weight] = f"{kind} has only one form"
        else:
            folded[weight] = kind
            if form == "plain":
                parts = {role: node[key] for role, key in keys.items()}
                fold = weight_normed if kind == _WEIGHT_NORM else pruned
                first, *others = keys.values()
                replacements |= {first: (weight, fold(weight, **parts)), **dict.fromkeys(others)}
            else:
                module, dot, name = weight.rpartition(".")  # of the old or the new names
                base = f"{weight}_" if form == "old" else f"{module}{dot}parametrizations.{name}."
                roles = {"g": "g", "v": "v"} if form == "old" else {"g": "original0", "v": "original1"}
                replacements |= {key: (base + roles[role], node[key]) for role, key in keys.items()}
    tree = same_kind(node, {})
    for key, value in node.items():
        if (replacement := replacements.get(key, (key, value)) if type(key) is str else (key, value)) is None:
            continue
        if replacement[0] in tree:
            what = f"{replacement[0]!s} already exists next to the parts that it is made from"
            raise Conflict(what, "One of the two would be lost.")
        tree[replacement[0]] = replacement[1]
    return tree, folded, skipped
