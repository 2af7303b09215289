"""Reasons why a checkpoint does not load, and the commands that fix it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptool.analysis.error_texts import MAX_TEXT, KnownError, recognised
from ckptool.analysis.findings import Finding, Stage, in_order
from ckptool.analysis.fit import LOAD_MODEL, TranslationTo, Way, best_root, find_way, mains, of_layout, of_target
from ckptool.analysis.fixes import Chain
from ckptool.analysis.inspect import WEIGHTS_ONLY, Listing, engine_of
from ckptool.analysis.scan import ScannedFile
from ckptool.analysis.targets import Target
from ckptool.checkpoint import Checkpoint, Note, PartKind, PartOf
from ckptool.checkpoint.registry import Report
from ckptool.checkpoint.state_dicts import StateDict, kinds_of, quantized_outside, wrappers
from ckptool.checkpoint.tree import address
from ckptool.commands import FILE, MODEL, OUT, OUT_PT, OUT_SAFETENSORS, Advice, Command, arg, command
from ckptool.errors import CkptoolError, Text, listed, printable
from ckptool.formats import named
from ckptool.formats.parts import CODE as PART
from ckptool.formats.parts import MEMBERS

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".th", ".pkl")
FOLDER, UNKNOWN = "folder", "unknown-error"  # codes of findings
# What keeps stock torch from loading values: they would run unknown code, need their class, or are refused by default.
UNSAFE, CUSTOM_CLASS = "unsafe-global", "custom-class"
_IS_A_FOLDER = "IsADirectoryError: [Errno 21] Is a directory"


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Report):
    """A file's kind, and its problems. `file` is empty where only an error text was given.

    unread: the command that reads the data of the tensors, which was not looked at; empty where nothing was opened.
    against: the model that it was compared with.
    """

    verdict = "loads"

    file: str
    is_a: str
    findings: tuple[Finding, ...]
    unread: str = ""
    against: str = ""

    @property
    def loads(self) -> bool:
        """True if nothing was found that would keep it from loading."""
        return not any(finding.blocks for finding in self.findings)


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


# From an error text --------------------------------------------------------------------------------------------------


# The device that a message is about: torch's own words where it names the tag.
_DEVICE = re.compile(r"tagged with ([a-zA-Z]+)|\b(cuda|mps|xpu|hpu|npu)\b", re.IGNORECASE)


def of_error_text(text: str, file: str = "", devices: Sequence[str] | None = None) -> Diagnosis:
    """The meaning of an error message, from that alone, but for the devices that the file's tensors are tagged with.
    Without a file its commands speak of FILE and OUT."""
    known = recognised(text)
    if known is None:
        what = "ckptool does not know this message" if text.strip() else "the message is empty"
        advice = Advice("Look at the file instead: ", command("doctor", FILE))
        return Diagnosis(file, "", (Finding(UNKNOWN, what, _first_line(text), advice=advice),))
    chain, words = Chain(file), known.found(text)
    wanted = [fix.with_words(words) for fix in known.fixes]
    fixes = tuple(str(chain.fill(fix) if file else fix) for fix in wanted)
    says = _first_line(text, known)
    found = Finding(known.code, known.meaning, says, True, fixes, known.advice, certain=known.certain)
    if devices is not None and known.code in ("cuda-location", "device-location", "gpu-memory"):
        says = f"tagged {printable(listed(devices, 3))}" if devices else "tagged with no device but the CPU"
        tags = f"{printable(file) or 'the checkpoint'} is {says}"
        meant = _DEVICE.search(text)
        kind = (meant[1] or meant[2]).lower() if meant else ""
        found = replace(found, what=f"{found.what} {tags}.")
        if known.code != "gpu-memory" and not any(device.partition(":")[0] == kind for device in devices):
            what = f"{tags}: the message is of another file, or the code itself asks for the device."
            found = replace(found, what=what, fixes=(), advice="Name the file that the code loads.", certain=False)
    return Diagnosis(file, "", (found,))


def _first_line(text: str, known: KnownError | None = None) -> str:
    """The line of a traceback that says what happened: a known one, else one that begins as errors do."""
    lines = [line.strip() for line in text[:MAX_TEXT].splitlines() if line.strip()]
    named = [line for line in lines if known is not None and known.pattern.search(line)]
    told = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)]
    return printable((named or told or lines or [""])[0])[:200]


# From a file ---------------------------------------------------------------------------------------------------------


def of_problem(error: CkptoolError, file: str) -> Diagnosis:
    """A file that cannot be opened: what it is instead, or what is wrong with it."""
    fixes: tuple[str, ...] = ()
    advice = error.fix
    if isinstance(error.fix, Text) and error.fix.commands:
        first = error.fix.commands[0]
        fixes, advice = (str(Chain(file).fill(first)),), error.fix.partition(str(first))[2].lstrip("; .")
        advice = advice[:1].upper() + advice[1:]
    what = error.what if not error.why else f"{error.what}. {error.why}"
    said = _said_of(error, file)
    return Diagnosis(file, "", (Finding(error.code, printable(what), said, True, fixes, advice),))


def of_folder(error: CkptoolError, folder: str, is_run: bool, newest: ScannedFile | None) -> Diagnosis:
    """A folder that is not a checkpoint itself: a run, or several checkpoints. newest: the latest good one in it."""
    if newest is None and not is_run:
        return of_problem(error, folder)
    if is_run:
        code, what = "run", "it is the folder of a run, not a checkpoint; its checkpoints are in it"
        look = command("inspect", folder)
    else:
        code, what = "folder-of-checkpoints", "it is a folder of checkpoints, and not one itself; the commands name one"
        look = command("scan", folder)
    fixes = [look] + ([command("doctor", newest.path)] if newest is not None else [])
    return Diagnosis(folder, "", (Finding(code, what, _IS_A_FOLDER, True, tuple(map(str, fixes))),))


_SAID = {
    "truncated": "PytorchStreamReader failed reading zip archive: failed finding central directory; or: unexpected EOF",
    "not-a-checkpoint": "invalid load key; or: Weights only load failed … Unsupported operand",
    "unsupported": "invalid load key; or: Invalid magic number; corrupt file?",
    "corrupt": "PytorchStreamReader failed",
}
_SAFETENSORS_SAID = {
    "truncated": "Error while deserializing header: MetadataIncompleteBuffer; or: incomplete metadata, file not "
    "fully covered",
    "not-a-checkpoint": "Error while deserializing header: HeaderTooLarge",
    "corrupt": "Error while deserializing header",
}


def _said_of(error: CkptoolError, file: str) -> str:
    """The messages of the programs that people open such a file with."""
    if os.path.isdir(file):
        if error.code == "ambiguous":
            return ""  # transformers takes one of them without a word
        return "OSError: … does not appear to have a file named …; or: FileNotFoundError"
    if error.code == "truncated" and " is empty" in error.what:
        return "EOFError: Ran out of input"
    said = _SAFETENSORS_SAID if file.endswith(".safetensors") else _SAID
    return said.get(error.code, "")


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
    findings = [
        *_of_container(found, file, values, taken),
        *_of_values(values, found, taken),
        *_of_notes(found.notes, way),
        *(_of_modules(found) if way is None or way.unwraps else ()),
        *of_layout(found, chosen, against is None, taken, values.dropped if taken is None and not values.lossy else ()),
        *(of_target(chosen, against, way, translation) if chosen is not None and against and way is not None else ()),
    ]
    if found.part is not None:
        findings = _of_a_part(findings, found.part)
    elif any(note.code == UNSAFE for note in found.notes):
        findings = _of_refused(findings)
    chain = Chain(file, address(checkpoint.base))
    compact = None if named(found.container).appendable else command("convert", FILE, out=OUT)
    filled = tuple(each.filled(chain) for each in in_order(findings, compact))
    against_name = against.name if against is not None else ""
    return Diagnosis(file, _is_a(found), filled, str(command("verify", file or FILE, finite=True)), against_name)


def _of_a_part(findings: Iterable[Finding], part: PartOf) -> list[Finding]:
    """Findings on a part of a checkpoint: no verb that writes takes one, so only the look at the whole helps."""
    said = [each for each in findings if each.code != FOLDER]
    advice: Advice | str = ""
    if part.kind is PartKind.MEMBERS and not part.is_complete:
        take = command("convert", FILE, part=True, out=OUT_PT)
        advice = Advice("Copy again what is missing or does not belong to it; or take what is there: ", take)
    return [
        replace(each, advice=advice or each.advice, says="" if advice else each.says)
        if each.code == PART
        else replace(each, commands=())
        for each in said
    ]


def _of_refused(findings: list[Finding]) -> list[Finding]:
    """Findings on a file that no verb writes again: without writing commands, unless one leaves the calls out."""
    if any(each.inert and each.commands for each in findings):
        return findings
    return [replace(each, commands=tuple(fix for fix in each.commands if not fix.writes)) for each in findings]


def _is_a(found: Listing) -> str:
    parts = kinds_of(found.roots)
    engine = engine_of(found.metadata)
    article = "an" if found.container[0] in "aeiou" else "a"
    return f"{article} {found.container} checkpoint{f' ({engine})' * bool(engine)}" + (
        f" with {listed(parts)}" if parts else ""
    )


# The container --------------------------------------------------------------------------------------------------------

_CONVERT = command("convert", FILE, out=OUT)
_TO_FILE = command("convert", FILE, out=OUT_PT)
_TO_WEIGHTS = command("convert", FILE, out=OUT_SAFETENSORS)
_TO_PLAIN_FILE = command("convert", FILE, weights_only=True, out=OUT_PT)


def _container(code: str, what: str, says: str, *fixes: Command, blocks: bool = True, inert: bool = False) -> Finding:
    return Finding(code, what, says, blocks, commands=fixes, stage=Stage.CONTAINER, inert=inert)


_FOLDER = "it is a folder of several files, which torch.load does not read"
_ARRAYS = _container(
    "numpy-archive",
    "it is numpy's file of arrays, which neither torch.load nor load_file reads",
    "file in archive is not in a subdirectory; or: invalid load key, '\\x93'",
    _TO_FILE,
)
_OF_FOLDERS = _container(FOLDER, _FOLDER, _IS_A_FOLDER, _TO_FILE, blocks=False)
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
        "file in archive is not in a subdirectory; or: Invalid magic number; corrupt file?",
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
        commands=(_CONVERT,),
    ),
}


def _of_container(found: Listing, file: str, values: Values, taken: StateDict | None) -> Iterator[Finding]:
    yield from _misnamed(found, os.path.splitext(file)[1].lower())
    finding = _CONTAINERS.get(found.container) or (_OF_FOLDERS if _is_of_folder(found) else None)
    if finding is None:
        return
    is_program = named(found.container).is_program
    if is_program and not any(root.is_model for root in found.roots):
        finding = replace(finding, commands=(), advice="It has no weights: run it with torch.jit.load.")
    elif finding is _ARRAYS and not found.tensors:
        finding = replace(finding, commands=())
    elif finding is _OF_FOLDERS and taken is not None:
        take = command("convert", FILE / address(taken.path), out=OUT_PT)
        advice = f"It takes the weights alone; without #{printable(address(taken.path))}, everything."
        finding = replace(finding, commands=(take,), advice=advice)
    elif not is_program and finding.inert and values.refused:
        finding = replace(finding, commands=() if values.lossy else (_TO_PLAIN_FILE,))
    yield finding


def _misnamed(found: Listing, suffix: str) -> Iterator[Finding]:
    what = f"it is a {found.container} file, though its name ends in {printable(suffix)}"
    container = named(found.container)
    if suffix in TORCH_SUFFIXES and container.tensors_only and container.keeps_tree:
        says = "invalid load key; or: Weights only load failed … Unsupported operand"
        yield _container("misnamed", what, says, _CONVERT)
    elif suffix in (".safetensors", ".sft") and not (container.tensors_only and container.suffixes):
        # The suffix's own container holds one set of weights and nothing else.
        weights_alone = any(root.path == () and root.is_model for root in found.roots)
        says = "Error while deserializing header: HeaderTooLarge"
        yield _container("misnamed", what, says, _CONVERT if weights_alone else _TO_FILE)


# Values --------------------------------------------------------------------------------------------------------------


def _taken_alone(found: Listing, chosen: StateDict | None, values: Values) -> StateDict | None:
    """The weights that are written alone, because plain values in place of what is refused would lose tensors."""
    root = chosen or next(iter(mains(found)), None)
    if root is not None and root.path and _is_of_folder(found):  # once, and not the whole folder first
        alone = chosen is not None or len(mains(found)) == 1
        return root if alone and (not values.refused or root.address in values.plain_parts) else None
    if not values.lossy or root is None or _is_rewritten(found):
        return None
    if root.module is not None:
        return None if quantized_outside(root) else root
    return root if root.path and root.address in values.plain_parts else None


def _is_of_folder(found: Listing) -> bool:
    return named(found.container).is_folder and found.container not in _CONTAINERS


def _is_rewritten(found: Listing) -> bool:
    """True for a container whose own finding has the command that leaves out what is refused."""
    finding = _CONTAINERS.get(found.container)
    return finding is not None and finding.inert


def _of_values(values: Values, found: Listing, taken: StateDict | None) -> Iterator[Finding]:
    if not values.refused or _is_rewritten(found):
        calls = [note.message for note in found.notes if note.code == UNSAFE and not values.refused]
        yield from (Finding(UNSAFE, what, stage=Stage.VALUES, blocks=True, inert=True) for what in calls)  # beside it
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
        fixes = ()
        advice = "The weights alone have none of them."
    elif taken is not None:
        fixes = (command("convert", FILE / (address(taken.path) or "/"), out=OUT_PT),)
        advice = "It takes the weights alone, and lists what it leaves behind."
    elif values.lossy:
        fixes = ()
        advice = (
            "Plain values would lose some of it, so no command is offered: load it where these classes are installed, "
            "if you trust it."
        )
    # Engines read their folders with loaders of their own.
    blocks = not named(found.container).is_folder or code == UNSAFE
    yield Finding(code, what, says, blocks, advice=advice, commands=fixes, stage=Stage.VALUES, inert=True)


# Notes ---------------------------------------------------------------------------------------------------------------

_WRAPPED = 'Missing key(s) in state_dict: "conv.weight" … Unexpected key(s): "module.conv.weight"'
# The message that people see for a note, whether it keeps a file from loading, and its stage.
_NOTES = {
    "prefix-module": (_WRAPPED, True, Stage.WRAPPERS),
    "prefix-compiled": ("Unexpected key(s) in state_dict: \"_orig_mod.conv.weight\"", True, Stage.WRAPPERS),
    "cuda-location": (
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False", True, Stage.DEVICES
    ),
    "device-location": (
        "don't know how to restore data location of torch.storage.UntypedStorage (tagged with …)", True, Stage.DEVICES
    ),
    "torchscript": ("", False, Stage.CONTAINER),
    "pickle-protocol": ("Weights only load failed … Unsupported operand 149", True, Stage.CONTAINER),
    "deflated": ("mmap=True: RuntimeError", False, Stage.BETTER),
    PART: (
        "Missing key(s) in state_dict: …; or: size mismatch for …: copying a param with shape torch.Size([0])",
        True,
        Stage.BETTER,
    ),
}  # fmt: skip
_OTHER_NOTES = ("", False, Stage.BETTER)
_SAID_ELSEWHERE = (UNSAFE, CUSTOM_CLASS, WEIGHTS_ONLY, MEMBERS)  # among the values, or of no consequence


def _of_notes(notes: Iterable[Note], way: Way | None) -> Iterator[Finding]:
    """The notes on the file. way: how it becomes what the model wants, where that is known; then a wrapper's prefix may
    be right."""
    seen = set(_SAID_ELSEWHERE)
    for note in notes:
        wrapped = _NOTES.get(note.code, _OTHER_NOTES)[2] is Stage.WRAPPERS
        if note.code in seen or (wrapped and way is not None and not way.unwraps):
            continue
        seen.add(note.code)
        yield _of_note(note, way)


def _of_note(note: Note, way: Way | None) -> Finding:
    says, blocks, stage = _NOTES.get(note.code, _OTHER_NOTES)
    fixes = (note.fix,) if isinstance(note.fix, Command) else ()
    if note.code == "ties-recorded":
        return _tied(note, way)
    if stage is Stage.WRAPPERS and way is None and "--partial" in note.fix:
        return _partly_wrapped(note, says, fixes)
    return Finding(note.code, note.message, says, blocks, commands=fixes, stage=stage)


def _tied(note: Note, way: Way | None) -> Finding:
    """Ties that only the metadata records: `load_file` gives one name of each, and strict loading misses the rest."""
    says = 'Missing key(s) in state_dict: "lm_head.weight"'
    copy = command("convert", FILE, ties="copy", out=OUT)
    return Finding("tied-weights", note.message, says, way is not None, (), LOAD_MODEL, (copy,), Stage.MODEL)


def _partly_wrapped(note: Note, says: str, fixes: tuple[Command, ...]) -> Finding:
    """Some keys begin with `module.`: a submodule, or wrapped keys among others; the model decides."""
    advice = Advice(
        f"A submodule may be called module; with {arg(against=MODEL)} the model decides. If it is a wrapper: ", *fixes
    )
    return Finding(note.code, note.message, says, False, advice=advice, stage=Stage.WRAPPERS)


def _of_modules(found: Listing) -> Iterator[Finding]:
    """A model that was pickled inside its wrapper: the keys of its state dict begin with the wrapper's."""
    kinds = {wrappers(key) for root in found.roots if root.module is not None for key in root.node} - {""}
    if kinds and not named(found.container).is_program:
        what = f"the model was pickled inside a wrapper: the keys of its state dict begin with {listed(sorted(kinds))}"
        strip = command("strip-module", FILE, out=OUT)
        yield Finding("prefix-module", what, _WRAPPED, commands=(strip,), stage=Stage.WRAPPERS)
