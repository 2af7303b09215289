"""Why a checkpoint does not load, and what mends it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Note, TensorEntry
from ckptool.commands import FILE, OUT, OUT_PT, OUT_SAFETENSORS, Advice, Chain, Command, command
from ckptool.errors import CkptoolError, listed, printable
from ckptool.formats.parts import CODE as PART
from ckptool.prefixes import COUNTER, without_wrappers, wrappers
from ckptool.reports.error_texts import MAX_TEXT, KnownError, recognised
from ckptool.reports.listing import Listing
from ckptool.reports.targets import SPEC, Target
from ckptool.roots import WEIGHTS, kinds_of, one_root
from ckptool.tree import address

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".th", ".pkl")


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a checkpoint does not load, or loads as something else than one expects.

    says: the message that people see.  blocks: stock `torch.load` (or the model of `--against`) refuses it here or on another machine.
    fixes: command lines that can be run as they stand, in order; each is ckptool's unless its first word is another program.
    """

    code: str
    what: str
    says: str = ""
    blocks: bool = True
    fixes: tuple[str, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a file is, and what is the matter with it. `file` is empty where only an error text was given."""

    file: str
    is_a: str
    findings: tuple[Finding, ...]

    @property
    def loads(self) -> bool:
        """True if nothing was found that would keep it from loading."""
        return not any(finding.blocks for finding in self.findings)


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
        return "OSError: … does not appear to have a file named …; or: FileNotFoundError"
    if error.code == "truncated" and " is empty" in error.what:
        return "EOFError: Ran out of input"
    said = _SAFETENSORS_SAID if file.endswith(".safetensors") else _SAID
    return said.get(error.code, "")


def of_checkpoint(
    checkpoint: Checkpoint,
    found: Listing,
    file: str,
    refused: Sequence[str],
    against: Target | None = None,
) -> Diagnosis:
    """What keeps an opened checkpoint from loading. found: its listing.  refused: what `weights_only` would refuse in it, in words.

    against: the model that it is for.
    """
    chain = Chain(file, address(checkpoint.base))
    findings = [
        *_of_container(found, file, bool(refused)),
        *_of_values(refused, found),
        *_of_notes(found.notes),
        *_of_modules(found),
        *_of_layout(found),
        *(_of_target(checkpoint, against) if against is not None else ()),
    ]
    if found.part is not None:  # no verb that writes takes a part, so none of those mends it
        findings = [(each, fixes if each.code == PART else ()) for each, fixes in findings if each.code != "folder"]
    return Diagnosis(file, _is_a(found), tuple(_filled(finding, fixes, chain) for finding, fixes in _ordered(findings)))


def _filled(finding: Finding, fixes: tuple[Command, ...], chain: Chain) -> Finding:
    lines = tuple(str(chain.fill(fix)) for fix in fixes)
    advice = finding.advice.filled(chain) if isinstance(finding.advice, Advice) else finding.advice
    return replace(finding, fixes=lines, advice=advice)


Found = tuple[Finding, tuple[Command, ...]]


def _ordered(findings: Iterable[Found]) -> list[Found]:
    """What blocks goes first; commands of later findings work on what the earlier ones wrote, and none is there twice."""
    ordered, seen = sorted(findings, key=lambda found: not found[0].blocks), set[tuple[Command, ...]]()
    told: list[Found] = []
    for finding, fixes in ordered:
        if not fixes or fixes not in seen:
            told.append((finding, fixes))
        elif not any(finding.code == other.code for other, _ in told):
            told.append((replace(finding, advice="The same command mends it."), ()))
        seen.add(fixes)
    return told


def _is_a(found: Listing) -> str:
    parts = kinds_of(found.roots)
    return f"a {found.container} checkpoint" + (f" with {listed(parts)}" if parts else "")


def _of_container(found: Listing, file: str, values: bool) -> Iterator[Found]:
    suffix = os.path.splitext(file)[1].lower()
    convert = command("convert", FILE, out=OUT)
    kind = found.container
    if kind == "safetensors" and suffix in TORCH_SUFFIXES:
        what = f"it is a safetensors file, though its name ends in {printable(suffix)}"
        yield (
            Finding("misnamed", what, "invalid load key; or: Weights only load failed … Unsupported operand"),
            (convert,),
        )
    elif kind != "safetensors" and suffix in (".safetensors", ".sft"):
        says = "Error while deserializing header: HeaderTooLarge"
        yield Finding("misnamed", f"it is a {kind} file, though its name ends in {printable(suffix)}", says), (convert,)
    if kind == "torchscript":
        says = "Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``"
        weights = any(root.is_model for root in found.roots)
        fixes = (_to_weights(),) if weights else ()
        advice = "" if weights else "It has no weights: run it with torch.jit.load."
        yield Finding("torchscript", "it is a program with its tensors, not a state dict", says, advice=advice), fixes
    elif kind == "torch-tar":
        says = "Cannot use ``weights_only=True`` with files saved in the legacy .tar format."
        yield Finding("legacy-tar", "it was saved by a torch before 0.1.10", says), (convert,)
    elif kind == "torch-legacy":
        says = "mmap can only be used with files saved with `torch.save(_use_new_zipfile_serialization=True)`"
        yield (
            Finding("legacy-format", "it is in torch's format before 1.6: no mmap, no checksums", says, False),
            (convert,),
        )
    elif kind in ("dcp", "sharded"):
        what = "it is a folder of several files, which torch.load does not read"
        yield Finding("folder", what, "IsADirectoryError: [Errno 21] Is a directory", kind == "dcp"), (_to_file(),)
    elif kind == "pickle":
        says = "Invalid magic number; corrupt file? or: Unsupported operand 149"
        plain = command("convert", FILE, weights_only=True, out=OUT_PT)
        finding = Finding("bare-pickle", "it is a bare pickle, which torch.load does not read", says)
        yield finding, (plain if values else _to_file(),)


def _to_weights() -> Command:
    return command("convert", FILE, out=OUT_SAFETENSORS)


def _to_file() -> Command:
    return command("convert", FILE, out=OUT_PT)


def _of_values(refused: Sequence[str], found: Listing) -> Iterator[Found]:
    if not refused or found.container in ("pickle", "torchscript", "torch-tar"):
        return
    whole = any(root.module is not None for root in found.roots)
    holds = "a whole model, pickled with its class, which" if whole else "values that"
    what = f"it holds {holds} weights_only refuses: {listed(refused, 4)}"
    says = "Weights only load failed … Unsupported global; with weights_only=False: No module named …"
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


def _of_notes(notes: Iterable[Note]) -> Iterator[Found]:
    seen: set[str] = set()
    for note in notes:
        if note.code == "unsafe-global" or note.code in seen:
            continue  # said among the values
        seen.add(note.code)
        says, blocks = _NOTES.get(note.code, ("", False))
        yield Finding(note.code, note.message, says, blocks), ((note.fix,) if isinstance(note.fix, Command) else ())


def _of_modules(found: Listing) -> Iterator[Found]:
    """A model that was pickled inside its wrapper: the keys of the state dict that it becomes begin with the wrapper's."""
    kinds = {wrappers(key) for root in found.roots if root.module is not None for key in root.node} - {""}
    if kinds and found.container != "torchscript":
        what = f"the model was pickled inside a wrapper: the keys of its state dict begin with {listed(sorted(kinds))}"
        says = _NOTES["prefix-module"][0]
        yield Finding("prefix-module", what, says), (command("strip-module", FILE, out=OUT),)


def _of_layout(found: Listing) -> Iterator[Found]:
    """Weights that are an entry of the file, or several: `load_state_dict` takes neither file as it is."""
    models = [root for root in found.roots if root.is_model]
    mains = [root for root in models if root.kind == WEIGHTS] or models
    if found.container == "torchscript" or not isinstance(found.tree, dict):
        return
    if not mains or not all(root.path for root in models):
        return
    root = mains[0]
    inside = f"checkpoint{''.join(f'[{segment!r}]' for segment in root.path)}"
    take = command("convert", FILE / root.address, out=OUT)
    others = [printable(str(key)) for key in found.tree if key != root.path[0]]
    if len(mains) > 1:
        names = listed([printable(each.address) for each in mains], 4)
        what = f"it holds {len(mains):,} sets of weights, and a model takes one: {names}"
        says = f'Unexpected key(s) in state_dict: "{printable(str(root.path[0]))}"'
        advice = f"And so on for each. Or in Python: model.load_state_dict({inside})"
        yield Finding("several-weights", what, says, False, advice=advice), (take,)
    elif others:
        what = f"the weights are the entry {printable(root.address)}, beside {listed(others, 3)}"
        says = f'Unexpected key(s) in state_dict: "{others[0]}"'
        advice = f"Or in Python: model.load_state_dict({inside})"
        yield Finding("nested-weights", what, says, False, advice=advice), (take,)


# Against the model that it is for ------------------------------------------------------------------------------------


def _of_target(checkpoint: Checkpoint, target: Target) -> Iterator[Found]:
    ours, theirs, name = _weights(checkpoint), target.tensors, target.name
    missing, extra = [k for k in theirs if k not in ours], [k for k in ours if k not in theirs]
    if missing or extra:
        yield _naming(ours, theirs, missing, extra, name)
    shapes = [
        f"{printable(key)} {_shape(ours[key])} against {_shape(theirs[key])}"
        for key in ours
        if key in theirs and ours[key].shape != theirs[key].shape
    ]
    if shapes:
        what = f"{len(shapes):,} tensors have another shape than in {printable(name)}: {listed(shapes, 3)}"
        says = "size mismatch for …: copying a param with shape … from checkpoint"
        start = command("warm-start", FILE, against=name, on_mismatch="skip", out=OUT)
        advice = f"It takes what fits, and the values of {printable(name)} for the rest."
        fits = any(key in theirs and ours[key].shape == theirs[key].shape for key in ours)
        if target.kind == SPEC or not fits:  # a spec has no values to fill up with
            yield Finding("shape-mismatch", what, says), ()
        else:
            yield Finding("shape-mismatch", what, says, advice=advice), (start,)


def _naming(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], missing: Sequence[str], extra: Sequence[str], name: str
) -> Found:
    says = "Missing key(s) in state_dict: … Unexpected key(s) in state_dict: …"
    bare = {without_wrappers(key) for key in ours}
    if bare == set(theirs):
        return Finding(
            "prefix-module", f"its keys carry a wrapper's prefix, those of {printable(name)} do not", says
        ), (command("strip-module", FILE, out=OUT),)
    for longer, shorter, verb in ((ours, theirs, "strip-module"), (theirs, ours, "add-module")):
        prefix = _common_prefix(longer, shorter)
        if prefix:
            which = "its keys begin" if longer is ours else f"the keys of {printable(name)} begin"
            rename = command(verb, FILE, prefix=prefix, out=OUT)
            return Finding("prefix", f"{which} with {printable(prefix)}, the others do not", says), (rename,)
    parts = [
        f"{len(names):,} {word} ({listed([printable(key) for key in names], 2)})"
        for word, names in (("are missing", missing), ("are unexpected", extra))
        if names
    ]
    what = f"of {len(theirs):,} keys of {printable(name)} {' and '.join(parts)}"
    advice = Advice("What fits, and rules for other names: ", command("warm-start", FILE, against=name))
    return Finding("keys-differ", what, says, advice=advice), ()


def _common_prefix(longer: Mapping[str, Any], shorter: Mapping[str, Any]) -> str:
    """What every key of one has before a key of the other; the empty text where there is no such thing."""
    if not shorter or len(longer) != len(shorter):
        return ""
    key = next(iter(longer))
    for end in (i + 1 for i, c in enumerate(key) if c == "."):
        if {key[:end] + name for name in shorter} == set(longer):
            return key[:end]
    return ""


def _weights(checkpoint: Checkpoint) -> dict[str, Any]:
    root = one_root(checkpoint)[0]
    return {
        key: value
        for key, value in root.node.items()
        if type(key) is str and key != COUNTER and isinstance(value, (TensorEntry, Composite))
    }


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if tensor.shape is not None else "[?]"
