"""`average`: the weighted mean of several checkpoints of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from ckptool.analysis.quantization import refuse_quantized
from ckptool.checkpoint import Note
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.tree import address
from ckptool.commands import argument, option, verb
from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import UsageError, counted, listed, printable
from ckptool.facts import replace
from ckptool.formats import CheckpointLike, open_whole
from ckptool.formats.folder import refuse_placeholders
from ckptool.formats.in_memory import together
from ckptool.transforms import average as means
from ckptool.transforms.flatten import Behind, around, left_behind, weights_alone
from ckptool.verbs._options import At, IsPart, Out, numbers
from ckptool.verbs._save import Row, Save, Unpack, Written, change_of

Method = Literal["mean", "slerp", "task-arithmetic", "ties", "dare"]
Weights = Sequence[float] | None
Numbers = float | Sequence[float] | None


@verb(
    ("ckptool average a.pt b.pt c.pt -o mean.pt", "a model soup"),
    ("ckptool average a.pt b.pt --ema 0.99 -o ema.pt", "later files count more"),
    ("ckptool average a.pt b.pt --method ties --base c.pt -o ties.pt", "what two fine-tuned models learned"),
    one_output="For example: -o mean.pt",
)
def average(
    files: Annotated[
        Sequence[CheckpointLike] | Iterator[CheckpointLike],
        argument("FILE…", "Checkpoints of one model, two or more, or FILE#ADDRESS for a part of one.", several=True),
    ],
    out: Out = None,
    *,
    weights: Annotated[Weights, option("--weights W,W,…", "Weight of each file: 0.5,0.3,0.2.", parse=numbers)] = None,
    ema: Annotated[float | None, option("--ema DECAY", "An exponential moving average of the files in order.")] = None,
    method: Annotated[Method, option("--method HOW", "mean, slerp, task-arithmetic, ties or dare.")] = "mean",
    base: Annotated[
        CheckpointLike | None,
        option("--base FILE", "The model that task-arithmetic, ties and dare add the differences to."),
    ] = None,
    density: Annotated[Numbers, option("--density D", "Fraction that ties and dare keep (0.5).", parse=numbers)] = None,
    scale: Annotated[float | None, option("--lambda X", "Scale of the sum of the differences (1).")] = None,
    t: Annotated[float | None, option("--t T", "For slerp: 0 is the first file, 1 the second (0.5).")] = None,
    seed: Annotated[int | None, option("--seed N", "Seed for choosing what dare keeps (0).")] = None,
    at: At = None,
    part: IsPart = False,
    **options: Unpack[Save],
) -> Written | Any:
    """Writes the mean of one set of weights over several files: equal shares, `weights`, or a moving average (`ema`).

    Counters are the last file's, and listed. Other integers, and values that hold tensors, have to be the same in all.
    `slerp` is between two files, at `t`, 0 to 1; `task-arithmetic`, `ties` (mergekit's) and `dare` add differences from
    `base`, times `scale`; the density is that of all files, or of each.
    weights: a list with a number for each file.
    Raises `Conflict` naming the keys, shapes and types that do not agree, `UsageError` for fewer than two files.
    """
    if isinstance(files, str) or not isinstance(files, (Sequence, Iterator)):
        what = f"average takes its inputs as one list, and was given {type(files).__name__}"
        raise UsageError(what, "", "For example: ckptool.average([A, B])")
    files = list(files)
    count = len(files)
    change = change_of("average", out, options, base, *files)
    settings = {"base": base, "density": density, "scale": scale, "t": t, "seed": seed, "ema": ema, "weights": weights}
    merge = means.merge_of(method, count, settings)
    inputs = [open_whole(file, at, part=part) for file in ([] if base is None else [base]) + files]
    roots = [one_state_dict(file.checkpoint, file.at) for file in inputs]
    names = [file.argument or f"checkpoint {number}" for number, file in enumerate(inputs, count + 1 - len(inputs))]
    taken = {(file.path, root.address) for file, (root, _) in zip(inputs, roots, strict=True)}
    for file, (root, _) in zip(inputs, roots, strict=True):
        refuse_placeholders(file.checkpoint, root.node.items())
        refuse_quantized(file.checkpoint, [root.node], "Averaged")
    # What belongs to the training between the weights, an optimizer of torchtitan, stays behind.
    training = [{key for key in root.node if type(key) is str}.difference(root.names()) for root, _ in roots]
    nodes = [
        same_kind(root.node, {key: value for key, value in root.node.items() if key not in keys}) if keys else root.node
        for (root, _), keys in zip(roots, training, strict=True)
    ]
    tree, averaged, copied = means.average(nodes, names, merge)
    last = inputs[-1].checkpoint
    pairs = [(file.checkpoint, root) for file, (root, _) in zip(inputs, roots, strict=True)]
    changed = weights_alone(last, tree, ((checkpoint.metadata, root.path) for checkpoint, root in pairs))
    leftovers = []
    for file, (checkpoint, root), keys in zip(inputs, pairs, training, strict=True):
        addresses = [address((*root.base, *root.path, key)) for key in root.node if key in keys]
        addresses += [place for place in around(checkpoint, root) if (file.path, place) not in taken]
        leftovers.append(left_behind(checkpoint, addresses, tree, chosen=file.at is not None))
    original = together(replace(last, base=(*root.base, *root.path)), (file.checkpoint for file in inputs))
    saved = change.write(original, changed, inputs=[each.source for each, _ in pairs if each.source is not None])
    # Of all inputs, each name once.
    weighing, plain, addresses = (
        list(dict.fromkeys(chain.from_iterable(lists)))
        for lists in zip(*((item.weighing, item.plain, item.facts["left_behind"]) for item in leftovers), strict=True)
    )
    paths = [printable(name) for name in names[-count:]]
    listing = listed([f"{name} ({why})" for name, why in copied.items()], 4)
    message = f"the weights add up to {sum(merge.weights):.6g}, not 1, which scales the result"
    notes = [Note("weights-sum", message)] if merge.method == "mean" and abs(sum(merge.weights) - 1) >= 1e-6 else []
    notes += means.doubts(tree, [checkpoint for checkpoint, _ in pairs])
    place = f" of {roots[-1][0].address}" if roots[-1][0].address and len({place for _, place in taken}) == 1 else ""
    remark = next((remark for _, remark in roots if remark), "")
    merged = "the mean" if merge.method == "mean" else f"the {merge.method} merge"
    return saved.about(
        f"{merged} of {counted(count, 'file')}: {counted(averaged, 'tensor')}{place}{f' ({remark})' if remark else ''}",
        *[f"{share:.6g} × {path}" for share, path in zip(merge.weights, paths, strict=True)][:8],
        Row("settings", merge.settings, merge.settings),
        Row("kept", copied, [f"copied from {paths[-1]}: {listing}"] if listing else []),
        Row("left_behind", addresses, Behind(weighing, plain, {}).lines),
        notes=notes + [Note("root", remark)] * (change.live and bool(remark)),
        files=paths,
        weights=list(merge.weights),
        method=merge.method,
        base=None if base is None else printable(names[0]),
        averaged=averaged,
    )
