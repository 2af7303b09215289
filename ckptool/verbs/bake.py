"""`bake`: parametrisations folded into plain weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from ckptool.checkpoint.tree import rebuild
from ckptool.commands import option, verb
from ckptool.conventions.state_dicts import model_state_dicts
from ckptool.errors import NoMatch, counted
from ckptool.transforms import bake as folding
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out
from ckptool.verbs._save import SavePart, Unpack, Written, begin_change

Form = Literal["plain", "old", "new"]


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
    baked = {id(root.node): folding.bake(root.node, form=form) for root in roots}
    folded = [weight for found in baked.values() for weight in found.folded]
    left = {weight: why for found in baked.values() for weight, why in found.left.items()}
    if not folded and not left:
        raise NoMatch(
            f"{checkpoint.source or 'the checkpoint'} has no parametrized weights",
            "ckptool knows weight norm (weight_g, weight_v, parametrizations.*), pruning (weight_orig, weight_mask) "
            "and spectral norm.",
        )
    tree = rebuild(checkpoint.tree, replaced={number: found.tree for number, found in baked.items()})
    saved = change.save(replace(checkpoint, tree=tree), changes=bool(folded))
    word = "folded into plain weights" if form == "plain" else f"renamed to the {form} names"
    return saved.about(
        f"{counted(len(folded), 'weight')} {word}",
        *(line for found in baked.values() for line in found.lines()),
        folded=folded,
        left=left,
    )
