"""Reasons why a checkpoint does not load, and the commands that fix it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptool.analysis.findings import Diagnosis, Finding, Stage, in_order
from ckptool.analysis.fit import LOAD_MODEL, TranslationTo, Way, best_root, find_way, mains, of_layout, of_target
from ckptool.analysis.fixes import Chain
from ckptool.analysis.inspect import WEIGHTS_ONLY, Listing, engine_of
from ckptool.analysis.scan import ScannedFile
from ckptool.analysis.targets import Target
from ckptool.checkpoint import Checkpoint, PartKind
from ckptool.checkpoint.state_dicts import StateDict, kinds_of, quantized_outside, wrappers
from ckptool.checkpoint.tree import address
from ckptool.commands import FILE, OUT, OUT_PT, OUT_SAFETENSORS, Advice, Command, command
from ckptool.errors import CkptoolError, listed
from ckptool.formats import named
from ckptool.formats.parts import CODE as PART
from ckptool.formats.parts import MEMBERS

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".th", ".pkl")
FOLDER = "folder"  # code of a finding
# What keeps stock torch from loading values: they would run unknown code, need their class, or are refused by default.
UNSAFE, CUSTOM_CLASS = "unsafe-global", "custom-class"

_ANEW = command("convert", FILE, out=OUT)
_TO_FILE = command("convert", FILE, out=OUT_PT)
_TO_WEIGHTS = command("convert", FILE, out=OUT_SAFETENSORS)

# The messages of torch, and of safetensors for a file that is named so, by the code of ckptool's own.
_SAID = {
    "truncated": (
        "PytorchStreamReader failed reading zip archive: failed finding central directory; or: unexpected EOF",
        "Error while deserializing header: MetadataIncompleteBuffer; or: incomplete metadata, file not fully covered",
    ),
    "not-a-checkpoint": (
        "invalid load key; or: Weights only load failed … Unsupported operand",
        "Error while deserializing header: HeaderTooLarge",
    ),
    "unsupported": ("invalid load key; or: Invalid magic number; corrupt file?", ""),
    "corrupt": ("PytorchStreamReader failed", "Error while deserializing header"),
}
_IS_A_FOLDER = "IsADirectoryError: [Errno 21] Is a directory"
_OF_NO_FOLDER = "OSError: … does not appear to have a file named …; or: FileNotFoundError"
_ONE_IS_TAKEN = ""  # by transformers, without a word


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a checkpoint that `weights_only` refuses, in words.

    lossy: plain values would lose some of it; plain_parts: the addresses of the sets of weights without such values.
    dropped: the addresses of what `convert --weights-only` leaves out, as it has no plain form.
    """

    refused: tuple[str, ...]
    lossy: bool
    dropped: tuple[str, ...] = ()
    plain_parts: frozenset[str] = frozenset()


def of_problem(error: CkptoolError, file: str) -> Diagnosis:
    """A file that cannot be opened: what it is instead, or what is wrong with it."""
    says = _SAID.get(error.code, ("", ""))[file.endswith(".safetensors")]
    if os.path.isdir(file):
        says = _ONE_IS_TAKEN if error.code == "ambiguous" else _OF_NO_FOLDER
    elif error.code == "truncated" and " is empty" in error.what:
        says = "EOFError: Ran out of input"
    commands = error.fix.commands[:1] if isinstance(error.fix, Advice) else ()
    advice = error.fix.otherwise if isinstance(error.fix, Advice) and commands else error.fix
    what = f"{error.what}. {error.why}" if error.why else error.what
    finding = Finding(error.code, what, says, True, commands, str(advice))
    return Diagnosis(file, "", (finding.filled(Chain(file)),))


def of_folder(error: CkptoolError, folder: str, is_run: bool, newest: ScannedFile | None) -> Diagnosis:
    """A folder that is not a checkpoint itself: a run, or several checkpoints. newest: the latest good one in it."""
    if newest is None and not is_run:
        return of_problem(error, folder)
    fixes = (command("doctor", newest.path),) if newest is not None else ()
    if is_run:
        what = "it is the folder of a run, not a checkpoint; its checkpoints are in it"
        finding = Finding("run", what, _IS_A_FOLDER, commands=(command("inspect", folder), *fixes))
    else:
        what = "it is a folder of checkpoints, and not one itself; the commands name one"
        finding = Finding("folder-of-checkpoints", what, _IS_A_FOLDER, commands=(command("scan", folder), *fixes))
    return Diagnosis(folder, "", (finding,))


def of_checkpoint(
    checkpoint: Checkpoint,
    found: Listing,
    file: str,
    values: Values,
    against: Target | None = None,
    translation: TranslationTo = lambda weights, model: None,
) -> Diagnosis:
    """The reasons why an opened checkpoint does not load. found: its listing.  values: those `weights_only` refuses.

    against: the model that it is for.  translation: what makes weights of another layout the model's.
    """
    chosen = best_root(mains(found), against) if against is not None else None
    taken = _taken_alone(found, chosen, values)
    way = find_way(chosen, against) if chosen is not None and against is not None else None
    gone = values.dropped if taken is None and not values.lossy else ()
    findings = [
        *_of_container(found, file, values, taken),
        *_of_values(values, found, taken),
        *_of_notes(found, way),
        *of_layout(found, chosen, against is None, taken, gone),
        *(of_target(chosen, against, way, translation) if chosen is not None and against and way is not None else ()),
    ]
    if (part := found.part) is not None:  # no verb that writes takes one, so only the look at the whole helps
        others = [each for each in findings if each.code != FOLDER]
        findings = [each if each.code == PART else replace(each, commands=()) for each in others]
        if part.kind is PartKind.MEMBERS and not part.is_complete:
            advice = "Copy again what is missing or does not belong to it; or take what is there: "
            take = (command("convert", FILE, part=True, out=OUT_PT),)
            incomplete = {"advice": advice, "advised": take, "says": ""}
            findings = [replace(each, **incomplete) if each.code == PART else each for each in findings]
    elif any(note.code == UNSAFE for note in found.notes) and not any(e.inert and e.commands for e in findings):
        # No verb writes such a file again, and none of these leaves the calls out.
        findings = [replace(each, commands=tuple(c for c in each.commands if not c.writes)) for each in findings]
    compact = None if named(found.container).appendable else _ANEW
    ordered = tuple(in_order(findings, compact, Chain(file, address(checkpoint.base))))
    unread = str(command("verify", file or FILE, finite=True))
    return Diagnosis(file, _is_a(found), ordered, unread, against.name if against is not None else "")


def _is_a(found: Listing) -> str:
    engine, parts = engine_of(found.metadata), kinds_of(found.roots)
    article = "an" if found.container[0] in "aeiou" else "a"
    made_by = f" ({engine})" if engine else ""
    return f"{article} {found.container} checkpoint{made_by}" + (f" with {listed(parts)}" if parts else "")


# The container --------------------------------------------------------------------------------------------------------


def _container(code: str, what: str, says: str, fix: Command, blocks: bool = True, inert: bool = False) -> Finding:
    return Finding(code, what, says, blocks, (fix,), stage=Stage.CONTAINER, inert=inert)


_NO_DIRECTORY = "file in archive is not in a subdirectory; or: "
_ARRAYS = _container(
    "numpy-archive",
    "it is numpy's file of arrays, which neither torch.load nor load_file reads",
    _NO_DIRECTORY + "invalid load key, '\\x93'",
    _TO_FILE,
)
_OF_FOLDERS = _container(
    FOLDER, "it is a folder of several files, which torch.load does not read", _IS_A_FOLDER, _TO_FILE, blocks=False
)
# The containers that stock `torch.load` does not read as it reads its own.
_CONTAINERS = {
    "torchscript": _container(
        "torchscript",
        "it is a program with its tensors, not a state dict",
        "Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``",
        _TO_WEIGHTS,
        inert=True,
    ),
    "torch-tar": _container(
        "legacy-tar",
        "it was saved by a torch before 0.1.10",
        "Cannot use ``weights_only=True`` with files saved in the legacy .tar format.",
        _TO_FILE,
        inert=True,
    ),
    "pickle": _container(
        "bare-pickle",
        "it is a bare pickle, which torch.load does not read",
        "Invalid magic number; corrupt file? or: Unsupported operand 149",
        _TO_FILE,
        inert=True,
    ),
    "archive": _container(
        "archive",
        "it is an archive of several files, which torch.load does not read",
        _NO_DIRECTORY + "Invalid magic number; corrupt file?",
        _TO_FILE,
        blocks=False,
    ),
    "npz": _ARRAYS,
    "npy": _ARRAYS,
    "torch-legacy": Finding(
        "legacy-format",
        "it is in torch's format before 1.6: no mmap, no checksums",
        "mmap can only be used with files saved with `torch.save(_use_new_zipfile_serialization=True)`",
        False,
        (_ANEW,),
    ),
}


def _is_of_folder(found: Listing) -> bool:
    return named(found.container).is_folder and found.container not in _CONTAINERS


def _is_rewritten(found: Listing) -> bool:
    """True for a container whose own finding has the command that leaves out what is refused."""
    return found.container in _CONTAINERS and _CONTAINERS[found.container].inert


def _of_container(found: Listing, file: str, values: Values, taken: StateDict | None) -> Iterator[Finding]:
    suffix, container = os.path.splitext(file)[1].lower(), named(found.container)
    what = f"it is a {found.container} file, though its name ends in {suffix}"
    if suffix in TORCH_SUFFIXES and container.tensors_only and container.keeps_tree:
        yield _container("misnamed", what, _SAID["not-a-checkpoint"][0], _ANEW)
    elif suffix in (".safetensors", ".sft") and not (container.tensors_only and container.suffixes):
        # The suffix's own container holds one set of weights and nothing else.
        weights_alone = any(root.path == () and root.is_model for root in found.roots)
        fix = _ANEW if weights_alone else _TO_FILE
        yield _container("misnamed", what, _SAID["not-a-checkpoint"][1], fix)
    finding = _CONTAINERS.get(found.container) or (_OF_FOLDERS if _is_of_folder(found) else None)
    if finding is None:
        return
    if container.is_program and not any(root.is_model for root in found.roots):
        finding = replace(finding, commands=(), advice="It has no weights: run it with torch.jit.load.")
    elif finding is _ARRAYS and not found.tensors:
        finding = replace(finding, commands=())
    elif finding is _OF_FOLDERS and taken is not None:
        take = command("convert", FILE / address(taken.path), out=OUT_PT)
        advice = f"It takes the weights alone; without #{address(taken.path)}, everything."
        finding = replace(finding, commands=(take,), advice=advice)
    elif not container.is_program and finding.inert and values.refused:
        plain = command("convert", FILE, weights_only=True, out=OUT_PT)
        finding = replace(finding, commands=() if values.lossy else (plain,))
    yield finding


# Values ---------------------------------------------------------------------------------------------------------------


def _taken_alone(found: Listing, chosen: StateDict | None, values: Values) -> StateDict | None:
    """The weights that are written alone, because plain values in place of what is refused would lose tensors."""
    candidates = mains(found)
    root = chosen or next(iter(candidates), None)
    is_plain = root is not None and root.address in values.plain_parts
    if root is not None and root.path and _is_of_folder(found):  # once, and not the whole folder first
        alone = chosen is not None or len(candidates) == 1
        return root if alone and (not values.refused or is_plain) else None
    if not values.lossy or root is None or _is_rewritten(found):
        return None
    if root.module is not None:
        return None if quantized_outside(root) else root
    return root if root.path and is_plain else None


def _of_values(values: Values, found: Listing, taken: StateDict | None) -> Iterator[Finding]:
    if not values.refused or _is_rewritten(found):
        calls = [note.message for note in found.notes if note.code == UNSAFE and not values.refused]
        yield from (Finding(UNSAFE, what, stage=Stage.VALUES, inert=True) for what in calls)  # beside it
        return
    whole = any(root.module is not None for root in found.roots)
    holds = "a whole model, pickled with its class, which" if whole else "values that"
    said = {note.code: note.message for note in found.notes}
    code = next((code for code in (UNSAFE, CUSTOM_CLASS) if code in said), WEIGHTS_ONLY)
    what = said[UNSAFE] if code == UNSAFE else f"it holds {holds} weights_only refuses: {listed(values.refused, 4)}"
    says = "Weights only load failed … Unsupported global; with weights_only=False: No module named …"
    fixes: tuple[Command, ...] = (command("convert", FILE, weights_only=True, out=OUT),)
    advice = ""
    if taken is not None and _is_of_folder(found):
        fixes, advice = (), "The weights alone have none of them."
    elif taken is not None:
        fixes = (command("convert", FILE / (address(taken.path) or "/"), out=OUT_PT),)
        advice = "It takes the weights alone, and lists what it leaves behind."
    elif values.lossy:
        fixes, advice = (), "Plain values would lose some of it, so no command is offered: "
        advice += "load it where these classes are installed, if you trust it."
    # Engines read their folders with loaders of their own.
    blocks = not named(found.container).is_folder or code == UNSAFE
    yield Finding(code, what, says, blocks, fixes, advice, stage=Stage.VALUES, inert=True)


# Notes ----------------------------------------------------------------------------------------------------------------

_WRAPPED = 'Missing key(s) in state_dict: "conv.weight" … Unexpected key(s): "module.conv.weight"'
_COMPILED = 'Unexpected key(s) in state_dict: "_orig_mod.conv.weight"'
_CUDA = "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False"
_DEVICE = "don't know how to restore data location of torch.storage.UntypedStorage (tagged with …)"
_A_PART = "Missing key(s) in state_dict: …; or: size mismatch for …: copying a param with shape torch.Size([0])"
# The message that people see for a note, whether it keeps a file from loading, and its stage.
_NOTES = {
    "prefix-module": (_WRAPPED, True, Stage.WRAPPERS),
    "prefix-compiled": (_COMPILED, True, Stage.WRAPPERS),
    "cuda-location": (_CUDA, True, Stage.DEVICES),
    "device-location": (_DEVICE, True, Stage.DEVICES),
    "torchscript": ("", False, Stage.CONTAINER),
    "pickle-protocol": ("Weights only load failed … Unsupported operand 149", True, Stage.CONTAINER),
    "deflated": ("mmap=True: RuntimeError", False, Stage.BETTER),
    PART: (_A_PART, True, Stage.BETTER),
}


def _of_notes(found: Listing, way: Way | None) -> Iterator[Finding]:
    """The notes on the file. way: how it becomes what the model wants, where that is known; then a wrapper's prefix may
    be right."""
    seen = {UNSAFE, CUSTOM_CLASS, WEIGHTS_ONLY, MEMBERS}  # said among the values, or of no consequence
    for note in found.notes:
        says, blocks, stage = _NOTES.get(note.code, ("", False, Stage.BETTER))
        if note.code in seen or (stage is Stage.WRAPPERS and way is not None and not way.unwraps):
            continue
        seen.add(note.code)
        fixes = (note.fix,) if isinstance(note.fix, Command) else ()
        if note.code == "ties-recorded":  # `load_file` gives one name of each, and strict loading misses the rest
            says = 'Missing key(s) in state_dict: "lm_head.weight"'
            copies = (command("convert", FILE, ties="copy", out=OUT),)
            yield Finding("tied-weights", note.message, says, way is not None, copies, LOAD_MODEL, stage=Stage.MODEL)
        elif stage is Stage.WRAPPERS and way is None and "--partial" in note.fix:
            advice = "A submodule may be called module; with --against MODEL the model decides. If it is a wrapper: "
            yield Finding(note.code, note.message, says, False, (), advice, fixes, stage)
        else:
            yield Finding(note.code, note.message, says, blocks, fixes, stage=stage)
    if way is not None and not way.unwraps:
        return
    kinds = {wrappers(key) for root in found.roots if root.module is not None for key in root.node} - {""}
    if kinds and not named(found.container).is_program:
        what = f"the model was pickled inside a wrapper: the keys of its state dict begin with {listed(sorted(kinds))}"
        strip = command("strip-module", FILE, out=OUT)
        yield Finding("prefix-module", what, _WRAPPED, commands=(strip,), stage=Stage.WRAPPERS)
