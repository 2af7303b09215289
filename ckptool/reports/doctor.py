"""Why a checkpoint does not load, and what fixes it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.commands import FILE, OUT, OUT_PT, OUT_SAFETENSORS, Advice, Command, command
from ckptool.checkpoint.state_dicts import StateDict, kinds_of, wrappers
from ckptool.checkpoint.tree import address
from ckptool.errors import CkptoolError, listed, printable
from ckptool.formats.members import MEMBERS
from ckptool.formats.parts import CODE as PART
from ckptool.reports.commands import Chain
from ckptool.reports.error_texts import MAX_TEXT, KnownError, recognised
from ckptool.reports.findings import Finding, Found
from ckptool.reports.fits import Way, best_root, find_way, of_target
from ckptool.reports.inspect import Listing
from ckptool.reports.layouts import mains, of_layout
from ckptool.reports.scan import ScannedFile
from ckptool.reports.targets import Target
from ckptool.transforms.flatten import packed
from ckptool.transforms.weights_only import weights_only

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".th", ".pkl")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A file's kind, and its problems. `file` is empty where only an error text was given.

    unread: the command that reads the data of the tensors, which was not looked at; empty where nothing was opened.
    against: the model that it was compared with.
    """

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
    """Values of a checkpoint that `weights_only` refuses, in words. lossy: plain values in its place would lose some of it.

    dropped: the addresses of what `convert --weights-only` leaves out, as it has no plain form.
    """

    refused: tuple[str, ...]
    lossy: bool
    dropped: tuple[str, ...] = ()


# From an error text --------------------------------------------------------------------------------------------------


def of_error_text(text: str, file: str = "") -> Diagnosis:
    """What an error message means, from that alone. Without a file its commands speak of FILE and OUT."""
    known = recognised(text)
    if known is None:
        what = "this message is not in ckptool's table" if text.strip() else "there is no message to read"
        advice = Advice("Look at the file instead: ", command("doctor", FILE))
        return Diagnosis(file, "", (Finding("unknown-error", what, _first_line(text), advice=advice),))
    chain, words = Chain(file), known.found(text)
    wanted = [fix.with_words(words) for fix in known.fixes]
    fixes = tuple(str(chain.fill(fix) if file else fix) for fix in wanted)
    says = _first_line(text, known)
    return Diagnosis(file, "", (Finding(known.code, known.meaning, says, True, fixes, known.advice),))


def _first_line(text: str, known: KnownError | None = None) -> str:
    """The line of a traceback that says what happened: of those that are known, else that begin as errors do, the first."""
    lines = [line.strip() for line in text[:MAX_TEXT].splitlines() if line.strip()]
    named = [line for line in lines if known is not None and known.pattern.search(line)]
    told = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)]
    return printable((named or told or lines or [""])[0])[:200]


# From a file ---------------------------------------------------------------------------------------------------------


def of_problem(error: CkptoolError, file: str) -> Diagnosis:
    """A file that cannot be opened: what it is instead, or what is wrong with it."""
    fixes: tuple[str, ...] = ()
    advice = error.fix
    if isinstance(error.fix, Advice) and error.fix.commands:
        fixes, advice = (str(Chain(file).fill(error.fix.commands[0])),), error.fix.otherwise
    what = error.what if not error.why else f"{error.what}. {error.why}"
    said = _said_of(error, file)
    return Diagnosis(file, "", (Finding(error.code, printable(what), said, True, fixes, printable(advice)),))


def of_folder(error: CkptoolError, folder: str, is_run: bool, newest: ScannedFile | None) -> Diagnosis:
    """A folder that is no checkpoint itself: a run, or several checkpoints. newest: the latest good one in it."""
    if newest is None and not is_run:
        return of_problem(error, folder)
    if is_run:
        code, what = "run", "it is the folder of a run, not a checkpoint; its checkpoints are in it"
        look = command("inspect", folder)
    else:
        code, what = "folder-of-checkpoints", "it is a folder of checkpoints, and not one itself; the commands name one"
        look = command("scan", folder)
    fixes = [look] + ([command("doctor", newest.path)] if newest is not None else [])
    said = "IsADirectoryError: [Errno 21] Is a directory"
    return Diagnosis(folder, "", (Finding(code, what, said, True, tuple(map(str, fixes))),))


_SAID = {
    "truncated": "PytorchStreamReader failed reading zip archive: failed finding central directory; or: unexpected EOF",
    "not-a-checkpoint": "invalid load key; or: Weights only load failed … Unsupported operand",
    "unsupported": "invalid load key; or: Invalid magic number; corrupt file?",
    "corrupt": "PytorchStreamReader failed",
}
_SAFETENSORS_SAID = {
    "truncated": "Error while deserializing header: MetadataIncompleteBuffer; or: incomplete metadata, file not fully covered",
    "not-a-checkpoint": "Error while deserializing header: HeaderTooLarge",
    "corrupt": "Error while deserializing header",
}


def _said_of(error: CkptoolError, file: str) -> str:
    """What the programs say that people open such a file with."""
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
) -> Diagnosis:
    """The reasons why an opened checkpoint does not load. found: its listing.  values: what in it `weights_only` refuses.

    against: the model that it is for.
    """
    chain = Chain(file, address(checkpoint.base))
    candidates = mains(found)
    chosen = best_root(candidates, against) if against is not None else None
    taken = _taken_alone(found, chosen, values)
    way = find_way(chosen, against) if chosen is not None and against is not None else None
    findings = [
        *_of_container(found, file, values),
        *_of_values(values, found, taken),
        *_of_notes(found.notes, way),
        *(_of_modules(found) if way is None or way.unwraps else ()),
        *of_layout(found, chosen, against is None, taken, values.dropped if taken is None and not values.lossy else ()),
        *(of_target(chosen, against, way) if chosen is not None and against is not None and way is not None else ()),
    ]
    if found.part is not None:  # no verb that writes takes a part, so none of those fixes it
        findings = [(each, fixes if each.code == PART else ()) for each, fixes in findings if each.code != "folder"]
    refused = any(note.code == "unsafe-global" for note in found.notes)
    # Verbs that write would refuse it.
    if refused and not any(fixes for each, fixes in findings if each.code in _PLAIN):
        findings = [(each, tuple(fix for fix in fixes if not fix.writes)) for each, fixes in findings]
    unread = str(command("verify", file))
    ordered = _ordered(findings, found.container != "torch-zip")
    filled = tuple(_filled(finding, fixes, chain) for finding, fixes in ordered)
    return Diagnosis(file, _is_a(found), filled, unread, against.name if against is not None else "")


# Findings whose commands leave out what loading would call.
_PLAIN = (
    "unsafe-global",
    "bare-pickle",
    "legacy-tar",
    "torchscript",
)


def _filled(finding: Finding, fixes: tuple[Command, ...], chain: Chain) -> Finding:
    lines = tuple(str(chain.fill(fix)) for fix in fixes)
    advice = finding.advice.filled(chain.fill) if isinstance(finding.advice, Advice) else finding.advice
    return replace(finding, fixes=lines, advice=advice)


# What is done first: the container, then values, then names all over the file; then the part, and names in it; then what is only better.
_ORDER = (
    "misnamed torchscript numpy-archive legacy-tar bare-pickle folder pickle-protocol",
    "unsafe-global",
    "prefix-module prefix-compiled",
    "cuda-location device-location",
    "nested-weights",
    "unnamed-weights no-weights not-a-tensor averaged-counter several-weights prefix",
    "tied-weights keys-differ shape-mismatch",
)
_STAGES = {code: stage for stage, codes in enumerate(_ORDER) for code in codes.split()}


def _ordered(findings: Iterable[Found], anew: bool) -> list[Found]:
    """In the order in which things are done; commands of later findings work on what the earlier ones wrote, and none is there twice.

    anew: whatever is written is a new file in another container, so that to write it once more fixes nothing.
    """
    compact = command("convert", FILE, out=OUT)
    ordered, seen = (
        sorted(findings, key=lambda found: _STAGES.get(found[0].code, len(_ORDER))),
        set[tuple[Command, ...]](),
    )
    told: list[Found] = []
    for finding, fixes in ordered:
        if fixes not in seen and anew and fixes == (compact,) and any(before[-1].writes for before in seen if before):
            told.append((replace(finding, advice="The commands above fix this as well."), ()))
        elif not fixes or fixes not in seen:
            told.append((finding, fixes))
        elif not any(finding.code == other.code for other, _ in told):
            told.append((replace(finding, advice="The same command fixes it."), ()))
        seen.add(fixes)
    return told


def _is_a(found: Listing) -> str:
    parts = kinds_of(found.roots)
    return f"a {found.container} checkpoint" + (f" with {listed(parts)}" if parts else "")


def _of_container(found: Listing, file: str, values: Values) -> Iterator[Found]:
    suffix = os.path.splitext(file)[1].lower()
    convert = command("convert", FILE, out=OUT)
    kind = found.container
    if kind == "safetensors" and suffix in TORCH_SUFFIXES:
        what = f"it is a safetensors file, though its name ends in {printable(suffix)}"
        yield (
            Finding("misnamed", what, "invalid load key; or: Weights only load failed … Unsupported operand"),
            (convert,),
        )
    elif kind not in ("safetensors", "npz") and suffix in (".safetensors", ".sft"):
        says = "Error while deserializing header: HeaderTooLarge"
        weights_alone = any(root.path == () and root.is_model for root in found.roots)
        # The suffix's own container holds one set of weights and nothing else.
        as_named = convert if weights_alone else _to_file()
        yield (
            Finding("misnamed", f"it is a {kind} file, though its name ends in {printable(suffix)}", says),
            (as_named,),
        )
    if kind == "torchscript":
        says = "Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``"
        weights = any(root.is_model for root in found.roots)
        fixes = (_to_weights(),) if weights else ()
        advice = "" if weights else "It has no weights: run it with torch.jit.load."
        yield Finding("torchscript", "it is a program with its tensors, not a state dict", says, advice=advice), fixes
    elif kind == "torch-tar":
        says = "Cannot use ``weights_only=True`` with files saved in the legacy .tar format."
        yield Finding("legacy-tar", "it was saved by a torch before 0.1.10", says), _to_plain_file(values)
    elif kind == "torch-legacy":
        says = "mmap can only be used with files saved with `torch.save(_use_new_zipfile_serialization=True)`"
        yield (
            Finding("legacy-format", "it is in torch's format before 1.6: no mmap, no checksums", says, False),
            (convert,),
        )
    elif kind in ("dcp", "sharded"):
        what = "it is a folder of several files, which torch.load does not read"
        yield Finding("folder", what, "IsADirectoryError: [Errno 21] Is a directory", kind == "dcp"), (_to_file(),)
    elif kind in ("npz", "npy"):
        what = "it is numpy's file of arrays, which neither torch.load nor load_file reads"
        says = "file in archive is not in a subdirectory; or: invalid load key, '\\x93'"
        yield (
            Finding("numpy-archive", what, says),
            ((_to_file(),) if found.tensors else ()),
        )
    elif kind == "pickle":
        says = "Invalid magic number; corrupt file? or: Unsupported operand 149"
        finding = Finding("bare-pickle", "it is a bare pickle, which torch.load does not read", says)
        yield finding, _to_plain_file(values)


def _to_weights() -> Command:
    return command("convert", FILE, out=OUT_SAFETENSORS)


def _to_plain_file(values: Values) -> tuple[Command, ...]:
    """The command that writes a torch file of it, where that loses nothing."""
    if not values.refused:
        return (_to_file(),)
    return () if values.lossy else (command("convert", FILE, weights_only=True, out=OUT_PT),)


def _to_file() -> Command:
    return command("convert", FILE, out=OUT_PT)


def _taken_alone(found: Listing, chosen: StateDict | None, values: Values) -> StateDict | None:
    """The weights that are written alone, because with plain values in place of what is refused tensors would be lost."""
    root = chosen or next(iter(mains(found)), None)
    if not values.lossy or root is None or found.container in ("pickle", "torchscript", "torch-tar"):
        return None
    if root.module is not None:
        return None if packed(root) else root
    plain = weights_only(Checkpoint(root.node, found.container))
    return root if root.path and not (plain.converted or plain.dropped) else None


def _of_values(values: Values, found: Listing, taken: StateDict | None) -> Iterator[Found]:
    if not values.refused or found.container in ("pickle", "torchscript", "torch-tar"):
        return
    whole = any(root.module is not None for root in found.roots)
    holds = "a whole model, pickled with its class, which" if whole else "values that"
    what = f"it holds {holds} weights_only refuses: {listed(values.refused, 4)}"
    says = "Weights only load failed … Unsupported global; with weights_only=False: No module named …"
    if taken is not None:
        alone = command("convert", FILE / (address(taken.path) or "/"), out=OUT_PT)
        yield (
            Finding(
                "unsafe-global",
                what,
                says,
                advice="It takes the weights alone, and lists what it leaves behind.",
            ),
            (alone,),
        )
    elif values.lossy:
        advice = "Plain values would lose some of it, so no command is offered: load it where these classes are installed, if you trust it."
        yield Finding("unsafe-global", what, says, advice=advice), ()
    else:
        yield Finding("unsafe-global", what, says), (command("convert", FILE, weights_only=True, out=OUT),)


_NOTES = {
    "prefix-module": ("Missing key(s) in state_dict: \"conv.weight\" … Unexpected key(s): \"module.conv.weight\"", True),
    "prefix-compiled": ("Unexpected key(s) in state_dict: \"_orig_mod.conv.weight\"", True),
    "cuda-location": (
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False", True
    ),
    "device-location": ("don't know how to restore data location of torch.storage.UntypedStorage (tagged with …)", True),
    "pickle-protocol": ("Weights only load failed … Unsupported operand 149", True),
    "deflated": ("mmap=True: RuntimeError", False),
    "interrupted-edit": ("", False),
    PART: ('Missing key(s) in state_dict: …; or: size mismatch for …: copying a param with shape torch.Size([0])', True),
}  # fmt: skip


def _of_notes(notes: Iterable[Note], way: Way | None) -> Iterator[Found]:
    """The notes on the file. way: how it becomes what the model wants, where that is known; then a wrapper's prefix may be right."""
    seen: set[str] = set()
    for note in notes:
        wrapped = note.code in ("prefix-module", "prefix-compiled")
        if (
            note.code in ("unsafe-global", "custom-class", MEMBERS)
            or note.code in seen
            or (wrapped and way is not None and not way.unwraps)
        ):
            continue  # said among the values
        seen.add(note.code)
        if note.code == "ties-recorded":
            yield _tied(note, way)
            continue
        says, blocks = _NOTES.get(note.code, ("", False))
        if wrapped and way is None and "--partial" in note.fix:
            yield _partly_wrapped(note, says)
            continue
        yield Finding(note.code, note.message, says, blocks), ((note.fix,) if isinstance(note.fix, Command) else ())


def _tied(note: Note, way: Way | None) -> Found:
    """Ties that only the metadata tells: `load_file` gives one name of each, and a strict `load_state_dict` misses the others."""
    says = 'Missing key(s) in state_dict: "lm_head.weight"'
    advice = "Or in Python: safetensors.torch.load_model(model, FILE)"
    return Finding("tied-weights", note.message, says, way is not None, advice=advice), (
        command("convert", FILE, ties="copy", out=OUT),
    )


def _partly_wrapped(note: Note, says: str) -> Found:
    """Only some keys begin with `module.`: a submodule of that name, or wrapped ones among others. Only the model tells."""
    strip = note.fix if isinstance(note.fix, Command) else Command()
    advice = Advice(
        "A submodule may be called module; with --against MODEL the model decides. If it is a wrapper: ", strip
    )
    return Finding(note.code, note.message, says, False, advice=advice), ()


def _of_modules(found: Listing) -> Iterator[Found]:
    """A model that was pickled inside its wrapper: the keys of the state dict that it becomes begin with the wrapper's."""
    kinds = {wrappers(key) for root in found.roots if root.module is not None for key in root.node} - {""}
    if kinds and found.container != "torchscript":
        what = f"the model was pickled inside a wrapper: the keys of its state dict begin with {listed(sorted(kinds))}"
        says = _NOTES["prefix-module"][0]
        yield Finding("prefix-module", what, says), (command("strip-module", FILE, out=OUT),)
