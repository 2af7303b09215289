"""Why a checkpoint does not load, and the commands that fix it: for `doctor`, and the page of `report`."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptool.analysis.findings import FIXED_ABOVE, Chain, Diagnosis, Finding, Stage, finding, in_order, table
from ckptool.analysis.fit import Way, find_way, mains, of_layout, of_target
from ckptool.analysis.inspect import NUMPY, WEIGHTS_ONLY, Listing, engine_of, listing
from ckptool.analysis.targets import Target
from ckptool.analysis.verify import header_damage
from ckptool.checkpoint import Checkpoint, PartKind
from ckptool.checkpoint.files import Source, folder_at
from ckptool.checkpoint.paths import parted
from ckptool.checkpoint.tree import address
from ckptool.commands import FILE, OUT, OUT_PT, Command, Slot, command
from ckptool.conventions.state_dicts import COUNTER, PEELED, StateDict, kinds_of, quantized_outside, wrappers
from ckptool.errors import CkptoolError, Conflict, FileProblem, NotACheckpoint, Text, listed
from ckptool.formats import PROGRAMS, Opened, named
from ckptool.formats.folder import CODE as PART
from ckptool.formats.folder import MEMBERS
from ckptool.pickles.weights_only import weights_only
from ckptool.training import is_run
from ckptool.transforms.flatten import lost_tensors

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".th", ".pkl")
FOLDER = "folder"  # code of a finding
# What keeps stock torch from loading values: they would run unknown code, need their class, or are refused by default.
UNSAFE, CUSTOM_CLASS = "unsafe-global", "custom-class"

# The findings on containers that stock torch.load does not read as it reads its own.
_CONTAINERS = {name: name for name in ("archive", *PROGRAMS)} | dict.fromkeys(("npy", "npz"), "numpy-archive")
_CONTAINERS |= {"pickle": "bare-pickle", "torch-legacy": "legacy-format", "torch-tar": "legacy-tar"}


class RefusedValues(NamedTuple):
    """Values of a checkpoint that `weights_only` refuses, in words.
    lossy: `convert --weights-only` would write nothing, or lose a tensor; plain_parts: the addresses of the sets of
    weights without such values.  dropped: the addresses of what it leaves out, as it has no plain form."""

    refused: tuple[str, ...]
    lossy: bool
    dropped: tuple[str, ...]
    plain_parts: frozenset[str]


def of_unopened(problem: CkptoolError, path: str) -> Diagnosis:
    """The diagnosis of a path that could not be opened: what it is instead, or what is wrong with it.
    Raises the problem where the file cannot be read at all."""
    if isinstance(problem, FileProblem) and not os.path.islink(path):
        raise problem
    if folder_at(path) and isinstance(problem, NotACheckpoint):  # a run, or several checkpoints
        from ckptool.analysis.scan import scan

        newest, run = scan(path).latest, is_run(path)
        if newest is not None or run:
            fixes = [command("inspect", path) if run else command("scan", path)]
            fixes += [command("doctor", newest.path)] if newest is not None else []
            reason = finding("run" if run else "folder-of-checkpoints")
            return Diagnosis(path, "", (replace(reason, commands=tuple(fixes)),))
    return Diagnosis(path, "", (_of_problem(problem, path).filled(Chain(path)),))


def _of_problem(error: CkptoolError, file: str) -> Finding:
    says = table("findings")["errors"].get(error.code, ("", ""))[file.endswith(".safetensors")]
    if folder_at(file):  # where several are there, transformers silently takes one
        missing = "OSError: … does not appear to have a file named …; or: FileNotFoundError"
        says = "" if error.code == "ambiguous" else missing
    elif error.code == "truncated" and " is empty" in error.what:
        says = "EOFError: Ran out of input"
    commands, advice = error.fix.commands[:1] if isinstance(error.fix, Text) else (), str(error.fix)
    if isinstance(error.fix, Text) and commands:  # what stands after the first command, as a sentence of its own
        after = error.fix.parts[error.fix.parts.index(commands[0]) + 1 :]
        advice = "".join(map(str, after)).lstrip("; .")
        advice = advice[:1].upper() + advice[1:]
    what = f"{error.what}. {error.why}" if error.why else error.what
    return Finding(error.code, what, says, True, commands, advice, stage=Stage.CONTAINER)


def of_opened(opened: Opened, target: Target | None = None, known: Listing | None = None) -> Diagnosis:
    """The diagnosis of a checkpoint that is open already. target: the model that it is for.  known: its listing, if
    it was made already."""
    checkpoint, file = opened.taken, opened.path
    contents = known if known is not None and opened.at is None else listing(checkpoint)
    values = _refused_values(checkpoint, contents)
    candidates = mains(contents, target)
    sole = _sole_weights(contents, candidates, values)
    way = find_way(candidates[0], target) if candidates and target is not None else None
    dropped = values.dropped if sole is None and not values.lossy else ()
    damage = []
    if (header := header_damage(checkpoint)) is not None:  # damage that the other verbs find when they copy the data
        error, blocks = header
        reason = _of_problem(error, file)
        can_be = isinstance(checkpoint.source, Source) and named(checkpoint.container).recoverable
        fixes = (command("recover", FILE, out=OUT),) if can_be else reason.commands
        damage = [replace(reason, says=reason.says if blocks else "", blocks=blocks, commands=fixes)]
    container = list(_of_container(contents, file, values, sole))
    refused = list(_of_values(values, contents, sole))
    rewritten = {"ties-recorded"} if any(reason.commands for reason in container) else set[str]()
    rewritten |= {"pickle-protocol"} if any(reason.commands for reason in refused) else set()
    findings = [
        *damage,
        *container,
        *refused,
        *_of_notes(contents, way, rewritten),
        *of_layout(contents, candidates, "" if target is None else target.name, sole, dropped),
    ]
    if target is not None and way is not None:
        findings += of_target(candidates[0], target, way)
    if contents.part is not None:
        part, unfiltered, findings = contents.part, findings, []
        for reason in unfiltered:  # no verb that writes takes a part: only commands on the whole help
            if reason.code == PART and part.kind is PartKind.MEMBERS and not part.is_complete:
                advice = "Copy what is missing or does not belong again; or take what is there: "
                take = command("convert", FILE, part=True, out=OUT_PT)
                reason = replace(reason, advice=advice, advised=(take,), says="")
            elif reason.code != PART:
                reason = replace(reason, commands=(), advised=(), advice="")
            findings += [reason] if reason.code != FOLDER else []
    elif any(not reason.commands for reason in damage) or (
        any(note.code == UNSAFE for note in contents.notes) and not any(e.inert and e.commands for e in findings)
    ):  # No verb writes such a file again, and none of these leaves out what is wrong with it.
        findings = [replace(item, commands=tuple(c for c in item.commands if not c.writes)) for item in findings]
    compact = None if named(contents.container).appendable else command("convert", FILE, out=OUT)
    chain = Chain(file, address(checkpoint.base), contents.container)
    ordered = tuple(in_order(findings, compact, chain))
    at_once, model = "", target.name if target is not None else ""
    unfixed = [reason for reason in findings if not reason.commands and reason.advice != FIXED_ABOVE]
    is_mended = not any(item.blocks or item.stage in (Stage.PLACE, Stage.ENTRIES) for item in unfixed)  # else refused
    if file and len(chain.steps) > 1 and is_mended and not damage:  # what `recover` loses only it finds, and refuses
        fix_all = command("doctor", FILE, fix=True, against=model, out=Slot(f"OUT{parted(chain.steps[-1].out)[1]}"))
        at_once = str(Chain(file, address(checkpoint.base), contents.container).fill(fix_all))
    name = f"{file}#{place}" if file and (place := address(checkpoint.base)) else file
    unread = str(command("verify", name or FILE, finite=True))
    engine, parts = engine_of(contents.metadata), kinds_of(contents.roots)
    is_a = f"{'an' if contents.container.startswith((*'aeiou', 'np')) else 'a'} {contents.container} checkpoint"
    is_a += (f" ({engine})" if engine else "") + (f": {listed(parts)}" if parts else "")
    return Diagnosis(name, is_a, ordered, unread, model, at_once)


# The container --------------------------------------------------------------------------------------------------------


def _is_of_folder(contents: Listing) -> bool:
    return named(contents.container).is_folder and contents.container not in _CONTAINERS


def _is_rewritten(contents: Listing) -> bool:
    """True for a container whose own finding has a command that leaves out the refused values."""
    return contents.container in _CONTAINERS and finding(_CONTAINERS[contents.container]).inert


def _of_container(contents: Listing, file: str, values: RefusedValues, sole: StateDict | None) -> Iterator[Finding]:
    suffix, container = os.path.splitext(file)[1].lower(), named(contents.container)
    facts = {"container": contents.container, "suffix": suffix}
    if suffix in TORCH_SUFFIXES and container.tensors_only and container.keeps_tree:
        yield finding("misnamed, torch", **facts)
    elif suffix in (".safetensors", ".sft") and not (container.tensors_only and container.suffixes):
        # The suffix's own container holds one set of weights and nothing else.
        weights_alone = any(root.path == () and root.is_model for root in contents.roots)
        yield finding("misnamed, weights" if weights_alone else "misnamed, safetensors", **facts)
    code = FOLDER if _is_of_folder(contents) else _CONTAINERS.get(contents.container)
    if code is None:
        return
    reason = finding(code)
    models = [part.bytes for part in contents.parts if part.root.is_model]
    if container.is_program and (len(models) != 1 or contents.tensor_bytes > 2 * models[0]):  # which `convert` refuses
        most = "Most of it is in its program, not in a state dict: only torch itself loads that."
        several = "Name one of its sets of weights: FILE#ADDRESS."
        reason = replace(reason, commands=(), advice=several if len(models) > 1 else most)
    elif code == "numpy-archive" and not contents.tensors:
        reason = replace(reason, commands=())
    elif code == FOLDER and sole is not None:
        take = command("convert", FILE / address(sole.path), out=OUT_PT)
        advice = f"It takes only the weights; without #{address(sole.path)}, everything."
        reason = replace(reason, commands=(take,), advice=advice)
    elif not container.is_program and reason.inert and values.refused:
        plain = command("convert", FILE, weights_only=True, out=OUT_PT)
        reason = replace(reason, commands=() if values.lossy else (plain,))
    yield reason


# Values ---------------------------------------------------------------------------------------------------------------


def _refused_values(checkpoint: Checkpoint, contents: Listing) -> RefusedValues:
    try:
        plain = weights_only(checkpoint)
    except Conflict:
        refused, lossy = ["keys that would become the same text"], True
        dropped: tuple[str, ...] = ()
    else:
        refused, dropped = plain.refused, tuple(place for place, _ in plain.dropped)
        is_empty = plain.checkpoint.tree is None and checkpoint.tree is not None
        lossy = is_empty or bool(lost_tensors(checkpoint.tree, plain.checkpoint.tree))
    is_needed = lossy or named(contents.container).is_folder
    weights = [root for root in contents.roots if root.is_model and root.module is None] if is_needed else []
    parts = [(root.address, weights_only(Checkpoint(root.node, contents.container))) for root in weights]
    plain_parts = frozenset(place for place, part in parts if not (part.converted or part.dropped))
    return RefusedValues(tuple(refused), lossy, dropped, plain_parts)


def _sole_weights(contents: Listing, candidates: Sequence[StateDict], values: RefusedValues) -> StateDict | None:
    """The weights that are written alone: with plain values in place of what is refused, tensors would be lost."""
    root = next(iter(candidates), None)
    is_plain = root is not None and root.address in values.plain_parts
    if root is not None and root.path and _is_of_folder(contents):  # written once, without the whole folder before
        return root if len(candidates) == 1 and (not values.refused or is_plain) else None
    if not values.lossy or root is None or _is_rewritten(contents):
        return None
    if root.module is not None:
        return None if quantized_outside(root) else root
    return root if root.path and is_plain else None


def _of_values(values: RefusedValues, contents: Listing, sole: StateDict | None) -> Iterator[Finding]:
    if not values.refused or _is_rewritten(contents):
        calls = [note.message for note in contents.notes if note.code == UNSAFE and not values.refused]
        yield from (Finding(UNSAFE, what, stage=Stage.VALUES, inert=True) for what in calls)  # beside it
        return
    has_module = any(root.module is not None for root in contents.roots)
    holds = "a whole model, pickled with its class, which" if has_module else "values that"
    messages = {note.code: note.message for note in contents.notes}
    code = next((code for code in (UNSAFE, CUSTOM_CLASS) if code in messages), WEIGHTS_ONLY)
    what = messages[UNSAFE] if code == UNSAFE else f"it holds {holds} weights_only refuses: {listed(values.refused, 4)}"
    if sole is not None and _is_of_folder(contents):
        reason = finding("weights-only, beside the weights of a folder", what=what)
    elif sole is not None:
        reason = finding("weights-only, beside the weights", what=what, place=address(sole.path) or "/")
    else:
        reason = finding("weights-only, of which plain ones lose some" if values.lossy else "weights-only", what=what)
        arrays = tuple(note.fix for note in contents.notes if note.code == NUMPY and isinstance(note.fix, Command))
        reason = replace(reason, commands=arrays or reason.commands)
    # Engines read their folders with loaders of their own.
    yield replace(reason, code=code, blocks=not named(contents.container).is_folder or code == UNSAFE)


# Notes ----------------------------------------------------------------------------------------------------------------


def _of_notes(contents: Listing, way: Way | None, rewritten: Container[str]) -> Iterator[Finding]:
    """The notes on the file. way: how its names become the model's, where that is known; then a wrapper's prefix may be
    right.  rewritten: the codes of notes on what another finding's command writes anew."""
    handled = {UNSAFE, CUSTOM_CLASS, WEIGHTS_ONLY, MEMBERS}  # said among the values, or of no consequence
    for note in contents.notes:
        row = table("findings")["notes"].get(note.code, {"notes": True})
        stage = Stage[row.get("stage", "BETTER")]
        if note.code in handled or (stage is Stage.WRAPPERS and way is not None and not way.unwraps):
            continue
        handled.add(note.code)
        fixes = (note.fix,) if isinstance(note.fix, Command) else ()
        reason = Finding(note.code, note.message, row.get("says", ""), not row.get("notes"), fixes, stage=stage)
        if note.code == "ties-recorded":  # `load_file` gives one name of each, and strict loading misses the rest
            reason = replace(finding("tied-weights, recorded", what=note.message), blocks=way is not None)
        elif stage is Stage.WRAPPERS and way is None and ("--partial" in note.fix or not fixes):
            row_name = "prefix-module, of some keys" if fixes else "prefix-module, with and without"
            reason = replace(finding(row_name, what=note.message, says=reason.says), advised=fixes)
            # A module may have a child called module, but none is called as compiling calls it.
            reason = replace(reason, code=note.code, blocks=note.code == "prefix-compiled" and not fixes)
        yield replace(reason, commands=(), advice=FIXED_ABOVE) if note.code in rewritten else reason
    kinds = set[str]()
    for names in (root.names() for root in contents.roots if root.module is not None):
        wrapped = [PEELED in wrappers(name) for name in names if name != COUNTER]
        kinds |= {wrappers(name) for name in names} if all(wrapped) or not any(wrapped) else set()  # else a submodule's
    kinds -= {""}
    if kinds and (way is None or way.unwraps) and not named(contents.container).is_program:
        yield finding("prefix-module, of a pickled model", wrappers=listed(sorted(kinds)))
