"""`bake`: parametrisations folded into plain weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from ckptool.checkpoint.tree import rebuild
from ckptool.commands import option, verb
from ckptool.conventions.state_dicts import model_state_dicts
from ckptool.errors import NoMatch, counted, listed
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
    replaced: dict[int, Any] = {}
    folded, left, lines = list[str](), dict[str, str](), list[str]()
    for root in roots:
        replaced[id(root.node)], kinds, alone = folding.bake(root.node, form)
        folded, left = folded + list(kinds), left | alone
        for kind in (folding.WEIGHT_NORM, folding.PRUNING):
            names = [name for name, of in kinds.items() if of == kind]
            lines += [f"{kind}: {listed(names, 4)}"] if names else []
        lines += [f"left alone: {name} ({why})" for name, why in alone.items()]
    if not folded and not left:
        raise NoMatch(
            f"{checkpoint.source or 'the checkpoint'} has no parametrized weights",
            "ckptool knows weight norm (weight_g, weight_v, parametrizations.*), pruning (weight_orig, weight_mask) "
            "and spectral norm.",
        )
    tree = rebuild(checkpoint.tree, replaced=replaced)
    saved = change.save(replace(checkpoint, tree=tree), changes=bool(folded))
    word = "folded into plain weights" if form == "plain" else f"renamed to the {form} names"
    return saved.about(f"{counted(len(folded), 'weight')} {word}", *lines, folded=folded, left=left)
