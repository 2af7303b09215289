"""`convert`: from one container to another, and to a compact file of the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from ckptool import formats
from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.files import Folder, folder_at, unchanged
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import Object, fields, same_kind
from ckptool.checkpoint.paths import literal, selected
from ckptool.checkpoint.tree import address, module_attributes, tensors
from ckptool.commands import ADDRESS, OUT, arg, command, option, several, verb
from ckptool.conventions.state_dicts import StateDict, find_state_dicts, one_state_dict, wrappers
from ckptool.errors import NoMatch, Unsupported, UsageError, counted
from ckptool.formats import DCP, SHARDED, CheckpointLike, Format, Opened, PathLike, open_whole, shown, split
from ckptool.transforms import flatten
from ckptool.verbs._options import LIKE, SHARD_SIZE, At, Exclude, Files, IsPart, Only, Out, Size, find_target
from ckptool.verbs._save import Row, Save, Unpack, Written, change_of

Ties = Literal["record", "copy"]
OptimizerForm = Literal["names", "ids", "flat"] | None
_RULES = "Rules to join model-parallel ranks (Megatron's mp_rank_XX, Llama)."
MANY_LOST = 6  # tensors, up to which a command names each


@verb(
    ("ckptool convert model.pt -o model.safetensors", "the weights"),
    ("ckptool convert model.pt --all -o all.safetensors", "everything, so that converting back restores it"),
    ("ckptool convert model.pt --weights-only -o plain.pt", "for torch.load as it is by default, with weights_only"),
    ("ckptool convert model.pt --shard-size 5GB -o shards", "in shards, as on the Hugging Face Hub"),
    ("ckptool convert model.pt -o model.dcp --ranks 8", "for torch.distributed.checkpoint, sharded as FSDP2 does"),
)
def convert(
    file: Files,
    out: Out = None,
    *,
    at: At = None,
    all: Annotated[bool, option("--all", "Keep everything, so that converting back restores it.")] = False,
    only: Only = (),
    exclude: Exclude = (),
    ties: Annotated[Ties, option("--ties", "Tied tensors: stored once and recorded, or a copy for each.")] = "record",
    weights_only: Annotated[
        bool, option("--weights-only", "Write plain values in place of what torch.load(weights_only=True) refuses.")
    ] = False,
    shard_size: Annotated[Size, SHARD_SIZE] = None,
    part: IsPart = False,
    optimizer_as: Annotated[
        OptimizerForm,
        option("--optimizer-as", "Optimizer state by parameter name, by number, or as state.NAME.KEY.", rare=True),
    ] = None,
    against: Annotated[
        CheckpointLike | None,
        option(
            "--against MODEL",
            "A model, its spec or code: names for --optimizer-as, shapes for FSDP's flat parameters.",
            rare=True,
        ),
    ] = None,
    like: Annotated[PathLike | None, LIKE] = None,
    rules_file: Annotated[PathLike | None, option("--rules FILE.yaml", _RULES, rare=True)] = None,
    ranks: Annotated[int | None, option("--ranks N", "Shard a .dcp folder as N ranks would.", rare=True)] = None,
    shard_dim: Annotated[int | None, option("--shard-dim D", "Dimension that --ranks divides (0).", rare=True)] = None,
    **options: Unpack[Save],
) -> Written | Any:
    """Writes a checkpoint in the container of `out`'s suffix, or in `container`.

    To safetensors: one set of weights, listing what is left out; or the whole tree (`all`), which converting back
    restores bit for bit. To `.pt`: everything, in a compact file without unused or superseded records; of a whole
    module that `at` names, and of a program, the state dict. A folder of weights gets the configuration and tokenizer
    of `like`, else those beside the input. `against` is any model that `warm_start` takes. Input in memory without an
    output takes `only`, `exclude`, `at`, `weights_only` and `optimizer_as`.
    Raises `Unsupported` naming what the container cannot hold, `OnlyAPart`.
    """
    folder = isinstance(file, (str, os.PathLike)) and folder_at(split(file)[0])
    if against is not None and optimizer_as is None and not folder:
        what = f"{arg('against')} names an optimizer's parameters, or FSDP's flat parameters in a folder"
        raise UsageError(what, "There is nothing to name here.", f"For example: {arg(optimizer_as='names')}")
    if isinstance(out, (str, os.PathLike)) and os.path.isdir(out) and formats.for_output(out, SHARDED).writes_folder:
        out = os.path.join(out, "")  # an existing folder is written as a folder
    change = change_of("convert", out, options, file)
    only, exclude = several(only), several(exclude)
    opened = _open_input(file, at, part, rules_file, against if optimizer_as is None else None)
    if all and opened.at is None:
        from ckptool.formats.members import with_all

        opened = replace(opened, checkpoint=with_all(opened.checkpoint))
    taken, named = opened.taken, opened.at is not None
    rows: list[Row | str] = []
    unsaved: list[str] = []
    if weights_only:
        taken, lines, unsaved = _plain_values(taken, opened.path)
        rows += lines
    if shard_size is not None or like is not None:
        change = change.into_folder(SHARDED, arg("like" if shard_size is None else "shard_size"))
    if ranks is not None:
        change = change.into_folder(DCP, arg("ranks"))
    elif shard_dim is not None:
        fix = f"For example: {arg(ranks=8, shard_dim=0)}"
        raise UsageError(f"{arg('shard_dim')} was given without {arg('ranks')}", "Nothing would be sharded.", fix)
    container = change.format(opened.checkpoint.container)
    if optimizer_as is not None:
        if container.tensors_only and not all:
            what = f"{arg('optimizer_as')} is about the optimizer, but {container.name} holds only weights"
            fix = f"For example: {arg(out='checkpoint.pt')}; or {arg(all=True)}"
            raise UsageError(what, "No optimizer state would be written.", fix)
        from ckptool.transforms.optimizers import with_optimizers

        target = None if against is None else find_target(against)
        taken, lines = with_optimizers(taken, optimizer_as, opened.checkpoint, target)
        rows += lines
    expected = beside = None
    if ties == "copy" and (all or not container.tensors_only):
        raise UsageError(f"{arg(ties='copy')} is for weights only, as in safetensors", "Here all ties are kept.")
    if not container.tensors_only:
        compact = not (container.writes_folder or change.live)
        changed, summary, behind, notes = _to_pickle(taken, named, compact, only, exclude, opened.path)
    elif all:
        if not container.keeps_tree:
            what = f"{arg(all=True)} writes safetensors, not {container.name}"
            why = "A safetensors file, a .dcp folder and a torch file can keep a whole tree."
            raise UsageError(what, why, f"For example: {arg(out='model.safetensors')}")
        if only or exclude:
            what = f"{arg(all=True)} keeps everything; {arg('only')} and {arg('exclude')} leave something out"
            raise UsageError(what, "", f"Drop entries first: {command('edit', opened.path, drop=ADDRESS, out=OUT)}")
        from ckptool.formats.whole_tree import pack

        # Extras cannot be written: writing them says so.
        changed, expected = replace(pack(taken), extras=taken.extras), taken
        summary = f"the whole tree, {counted(len(changed.tree), 'tensor')}; converting it back restores it"
        behind, notes = [], ()
    else:
        changed, summary, behind, notes = _to_tensors(taken, named, container, only, exclude, ties == "copy")
    if exclude and not changed.tree:
        raise NoMatch("nothing is left to write", f"{arg('exclude')} leaves out every key.")
    behind += unsaved + flatten.siblings(opened.checkpoint.tree, taken.base)
    if container.tensors_only and container.writes_folder:
        from ckptool.formats.model_folder import model_folder
        from ckptool.formats.sharded import divided

        beside = model_folder(taken, changed.tree, None if like is None else os.fspath(like))
        changed = divided(changed, shard_size, beside.stem)
        names = [name for name in changed.tree if type(name) is str]
        prefix = next(filter(None, map(wrappers, names)), "")
        lightning = "pytorch-lightning_version" in fields(opened.checkpoint.tree)
        if lightning and not prefix and len({name.split(".")[0] for name in names}) == 1:
            prefix = f"{names[0].split('.')[0]}."
        if prefix and beside.library:  # which would not find its weights
            path = (change.path or "").rstrip("/")
            fixed = command("strip-module", path, prefix=prefix if lightning else "", out=f"{path}-bare/")
            notes += (Note("prefix-module", f"{beside.library} does not find names that begin with {prefix}", fixed),)
    if ranks is not None:
        from ckptool.formats.dcp.save_plan import RankDivision

        changed = replace(changed, origin=RankDivision(ranks, shard_dim or 0))
    leftovers = flatten.left_behind(opened.checkpoint, behind, changed.tree, chosen=named or bool(only or exclude))
    saved = change.write(opened.checkpoint, replace(changed, base=()), expected=expected, beside=beside)
    if against is not None and optimizer_as is None:
        remark = f"flat parameters are split by the order and shapes in {shown(against)}"
        rows.append(f"{remark}; the files only say how many elements there are")
    count = sum(1 for _ in tensors(changed.tree))
    return saved.about(summary, *rows, *leftovers.lines, notes=notes, tensors=count, **leftovers.facts)


def _open_input(
    file: CheckpointLike, at: str | None, part: bool, rules_file: PathLike | None, against: CheckpointLike | None
) -> Opened:
    if rules_file is not None:
        if not isinstance(file, (str, os.PathLike)):
            what = f"{arg('rules_file')} joins the files of ranks, but was given {shown(file)}"
            raise UsageError(what, "Those are in a folder.", "Name the folder.")
        if against is not None:
            what = f"{arg('against')} splits FSDP's flat parameters; {arg('rules_file')} joins other files"
            raise UsageError(what, "No folder needs both.", "Leave out one of them.")
        from ckptool.names.rule_files import read_join_rules
        from ckptool.transforms.join_ranks import open_joined

        return open_joined(file, read_join_rules(os.fspath(rules_file)), at)
    if against is None or not isinstance(file, (str, os.PathLike)):
        return open_whole(file, at, part=part)
    from ckptool.formats.layouts.rank_files import of_flat_parameters

    path, place = split(file)
    target = find_target(against)
    shapes = {expected.name: expected.shape for expected in target.unique if expected.shape is not None}
    ties = {tensor.name: tensor.tied_to for tensor in target.tensors.values() if tensor.tied_to is not None}
    folder = Folder(path)
    with unchanged(folder):
        ordered = target.checkpoint is None or not target.checkpoint.tensors_only
        return Opened(of_flat_parameters(folder, shapes, ties, ordered=ordered), at if at is not None else place, path)


def _plain_values(part: Checkpoint, path: str) -> tuple[Checkpoint, list[str], list[str]]:
    """The part with plain values only; a line for each value changed or dropped; and the addresses left behind."""
    from ckptool.pickles.weights_only import weights_only

    plain = weights_only(part)
    if plain.checkpoint.tree is None and part.tree is not None:
        what = f"nothing of {part.source or 'the checkpoint'} can be written with plain values: {plain.dropped[0][1]}"
        raise Unsupported(what, "It is an object that only its own code can create. Nothing was written.")
    lost = flatten.lost_tensors(part.tree, plain.checkpoint.tree)
    places = dict.fromkeys(flatten.droppable(part.tree, place) for place, _ in lost)
    patterns = [literal(address((*part.base, *place))) for place in places if place]
    fix = "Write only the weights of one model, by its address: FILE#ADDRESS"
    if 0 < len(patterns) <= MANY_LOST:
        fix = f"Leave them out first: {command('edit', path, drop=patterns, out=OUT)}"
    flatten.refuse_lost(part, lost, "torch.load(weights_only=True) cannot load them in any form.", fix)
    lines = [f"converted {place or 'the whole file'}: {word}" for place, word in plain.converted]
    lines += [f"dropped {place or 'the top'}: {word}" for place, word in plain.dropped]
    return plain.checkpoint, lines, [address((*part.base, *place)) for place, _ in flatten.transient(part.tree)]


Outcome = tuple[Checkpoint, str, list[str], tuple[Note, ...]]
"""What is written, in words, the addresses of what stays behind, and notes."""


def _to_tensors(
    part: Checkpoint, named: bool, container: Format, only: Sequence[str], exclude: Sequence[str], copy_ties: bool
) -> Outcome:
    """One set of weights, for a container of tensors alone."""
    if part.tensors_only and not named and isinstance(part.tree, dict):
        root, remark = StateDict((), part.tree, "model weights"), ""
    else:
        root, remark = one_state_dict(part, "" if named else None)
    exported = flatten.export(part, root, container, only, exclude, copy_ties=copy_ties)
    place = f" of {root.address}" if root.address else ""
    summary = f"{counted(len(exported.checkpoint.tree), 'tensor')}{place}" + (f" ({remark})" if remark else "")
    return exported.checkpoint, summary, list(exported.left_behind), exported.notes


def _to_pickle(
    part: Checkpoint, named: bool, compact: bool, only: Sequence[str], exclude: Sequence[str], path: str
) -> Outcome:
    weights_only = bool(part.extras) and not named  # of a program, only its weights can be written
    is_module = named and module_attributes(part.tree) is not None
    if not (only or exclude or weights_only or is_module):
        from ckptool.formats.members import beside

        what = "the weights" if beside(part) else "everything"
        what = f"all of {address(part.base)}" if part.base else what
        what += ", in a compact file" if compact else ""
        holds_objects = any(isinstance(node, Object) for node in visit(part.tree))
        modules = [root for root in find_state_dicts(part) if root.module is not None] if holds_objects else []
        if not modules:
            return part, what, [], ()
        message = f"{modules[0]} stays an object of its class, which loading needs; its weights alone do not"
        fix = command("convert", f"{path}#{modules[0].address or '/'}", out="weights.pt")
        return part, what, [], (Note("whole-module", message, fix),)
    root, _ = one_state_dict(part, "" if named else None)
    keys = selected([key for key in root.node if type(key) is str], only, exclude)
    behind = [address((*root.base, *root.path, key)) for key in root.node if key not in keys]
    flatten.refuse_packed(part, root)
    behind += flatten.around(part, root)
    if is_module or weights_only:
        what = f"a {part.container}, without its code" if weights_only else f"a {root.detail}, without its class"
        summary = f"the {counted(len(keys), 'tensor')} of {what}"
    else:
        summary = f"{len(keys):,} of {counted(len(root.node), 'key')}" + (f" of {root.address}" if root.address else "")
    tree = same_kind(root.node, {key: value for key, value in root.node.items() if key in keys})
    return replace(part, tree=tree, extras={}), summary, behind, ()
