"""The options that several verbs have, each declared once, and the values of those that are pairs or numbers."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ckptool.checkpoint import jobs
from ckptool.checkpoint.paths import file_problem, may_exist, refused_place
from ckptool.commands import OUT, Watched, arg, argument, command, option, repeated
from ckptool.errors import COLOURS, Conflict, LimitExceeded, UsageError
from ckptool.formats import SUFFIXES, CheckpointLike, PathLike, open_whole, shown, split

if TYPE_CHECKING:
    from ckptool.analysis.targets import Target

# An address means one thing to all verbs of a kind (`commands.Use`): those that read take the part, those that
# change a file act there.
_ONE = "A checkpoint, or FILE#ADDRESS for a part of it."
File = Annotated[CheckpointLike, argument("FILE", _ONE)]
Files = Annotated[CheckpointLike, argument("FILE", "Checkpoints, or FILE#ADDRESS for a part of one.", each=True)]
_PART = "Take only this part: state_dict/fc.weight. The same as FILE#ADDRESS."
At = Annotated[str | None, option("--at ADDRESS", _PART, rare=True)]
_CHANGED = "Checkpoints. FILE#ADDRESS changes only that part, and writes the whole file."
ChangedFiles = Annotated[CheckpointLike, argument("FILE", _CHANGED, each=True)]
_CHANGED_PART = "Change only this part, and write the whole file. The same as FILE#ADDRESS."
ChangedAt = Annotated[str | None, option("--at ADDRESS", _CHANGED_PART, rare=True)]
_PAYS = "Work on N files at a time, each in its own process, or on a cluster: dask://HOST:PORT. Good for many files."
Jobs = Annotated[jobs.Jobs, option("--jobs N", _PAYS, rare=True, parse=lambda _, text: jobs.checked_jobs(text))]
Texts = str | Sequence[str]
_MATCH = "Only keys that match; * also matches dots, re: starts a regular expression."
Only = Annotated[Texts, repeated("--only PATTERN", _MATCH)]
Exclude = Annotated[Texts, repeated("--exclude PATTERN", "Skip keys that match.")]
AGAINST = option("--against TARGET", "The model: a checkpoint, spec, or code as file.py:factory or pkg.module:factory.")
LIKE = option("--like DIR", "Copy an output folder's config and tokenizer from this one, of the same model.", rare=True)
Size = str | int | None
SHARD_SIZE = option("--shard-size SIZE", "Write a folder of shards of at most 5GB, 500MiB, … each, with an index.")
_PARTIAL = "Accept what is only a part of a checkpoint: one rank's file, one shard of several."
IsPart = Annotated[bool, option("--part", _PARTIAL, rare=True)]
Bar = Annotated[Callable[[int, int], None] | None, Watched("bar")]

_OUTPUT = "Where to"
_output = partial(option, panel=_OUTPUT)
Out = Annotated[PathLike | None, _output("-o --out OUT", "Write this new file (s3://, gs://, hf:// too).")]
Folder = Annotated[PathLike | None, _output("-d --dir DIR", "Into this folder, under the same names; created if new.")]
InPlace = Annotated[bool, _output("--in-place", "Change the files themselves; killed at any time, they stay intact.")]
Overwrite = Annotated[bool, _output("-f --force", "Replace existing outputs.")]
DryRun = Annotated[bool, _output("-n --dry-run", "Show what would be done; write nothing.")]
_CHECKED = "Check the input's checksums, then re-read the output and compare every tensor before putting it in place."
Verify = Annotated[bool, _output("--verify", _CHECKED)]
_KEPT = "Keep calls of unknown functions; whoever loads the file will run them."
KeepUnknown = Annotated[bool, _output("--keep-unknown", _KEPT, rare=True)]
_CONTAINERS = "Write this container (torch-zip, safetensors, sharded, dcp, npz), whatever the suffix."
Container = Annotated[str | None, _output("--to CONTAINER", _CONTAINERS)]
SkipRefused = Annotated[bool, _output("--skip-refused", "If a file is refused, write the others. Exit 1.", rare=True)]
Extract = Annotated[bool, _output("--extract", "Write only the part at the address, changed.", rare=True)]

_FORMS = "text, json, or markdown: for a job summary or a comment."


def program_options(
    *,
    folder: Folder = None,
    skip_refused: SkipRefused = False,
    jobs: Jobs = 1,
    quiet: Annotated[bool, option("-q --quiet", "Show no progress.")] = False,
    as_json: Annotated[bool, option("--json", "Print one JSON object.")] = False,
    as_form: Annotated[Literal["text", "json", "markdown"] | None, option("--format", _FORMS, rare=True)] = None,
) -> None:
    """The options of the program: the first three for many files, the next for runs, the last for all."""


QUOTE_RULES = (
    "In an unquoted rule, the shell redirects the output to a file named after the >.",
    "Put the rule in quotes: 'OLD => NEW'. See what the shell created: ls -lt",
)


def was_redirected(words: Iterable[str]) -> bool:
    """True where a word is the rest of a rule `OLD => NEW` of which the shell took `> NEW` for itself."""
    return any(word.endswith("=") and not os.path.lexists(word) for word in words)


def pairs(
    example: str, split: Callable[[str, str], tuple[str, str, str]] = str.rpartition
) -> Callable[[str, Iterable[str]], dict[str, str]]:
    """A parser of `OLD=NEW` texts into a dictionary; `split` separates, by default at the last `=`, so that addresses
    may have one."""

    def parse(flag: str, texts: Iterable[str]) -> dict[str, str]:
        items: list[tuple[str, str]] = []
        for text in texts:
            old, _, new = split(text, "=")
            if not (old and new):
                what = f"{flag} {text!r} is not of the form OLD=NEW"
                raise UsageError(what, "Both sides are needed.", f"For example: {flag} {example}")
            items.append((old, new))
        return once(flag, items)

    return parse


def assignments(flag: str, texts: Iterable[str]) -> dict[str, Any]:
    """The values of texts `path=value` by their addresses."""
    return once(flag, list(map(assignment, texts)))


def assignment(text: str) -> tuple[str, Any]:
    """The address and value of `path=value`: JSON where it parses, else text; after `:=` nothing but JSON.
    Raises `UsageError` where it is neither."""
    place, separator, value = text.partition("=")
    place, is_json = place.removesuffix(":"), place.endswith(":")
    if not separator or not place:
        raise UsageError(f"{text!r} is not of the form PATH=VALUE", "", f"For example: {arg(set={'epoch': 3})}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        if names.total() > len(names):
            raise ValueError(f"the name {names.most_common(1)[0][0]!r} is there twice")
        return dict(pairs)

    try:
        return place, json.loads(value, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and not is_json:
            return place, value
        why = "JSON strings need double quotes inside the shell's, and names in an object are unique."
        raise UsageError(f"{value!r} is not JSON: {error!s}", why, f"For example: '{place}=text'") from None


def once(option: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dictionary; raises `UsageError` for a name that was given twice."""
    names = [name for name, _ in pairs]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            raise UsageError(f"{option} was given {name!r} twice", "Only one can apply.")
    return dict(pairs)


def numbers(flag: str, text: str) -> list[float]:
    """The numbers in `0.5,0.3,0.2`."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not a list of numbers", "", f"For example: {flag} 0.5,0.3,0.2") from None


def files_and_rules(verb: str, words: Sequence[str], has_rules: bool) -> tuple[list[str], list[str]]:
    """The words that are files, and those that are rules.  has_rules: there are rules beside them."""

    rules = [word for word in words if "=>" in word and not os.path.lexists(word)]
    files = [word for word in words if word not in rules]
    if was_redirected(files):
        raise UsageError(f"{verb} was given only part of a rule: it ends at its =", *QUOTE_RULES)
    ruled = bool(rules) or has_rules or len(files) == 1
    example = f"For example: {command(verb, 'model.pt', 'a.* => b.*', out=OUT)}"
    for word in files:
        looks_like_rule = any(sign in word for sign in ("->", "=", "*", "{", " "))
        if (looks_like_rule or not ruled) and not may_exist(split(word)[0]) and not refused_place(word):
            why = "A rule is 'OLD => NEW', in quotes and with => between them."
            raise UsageError(f"'{word}' is neither a file nor a rule", why, example)
    if not files:
        raise UsageError(f"{verb} was given no file", "All of its arguments are rules.", example)
    return files, rules


def check_text(path: PathLike, *, overwrite: bool) -> None:
    """As `check_target`, for an output that is text: nobody looks for text under a checkpoint's name, where it would
    replace a checkpoint. Raises `Conflict`."""
    from ckptool.output import check_target  # which no look needs

    name = os.fspath(path)
    check_target(name, overwrite=overwrite)
    suffixes = {os.path.splitext(text)[1].lower() for text in (name, os.path.realpath(name))}
    if reserved := sorted(suffixes & SUFFIXES.keys()):
        what = f"{name} has the name of a checkpoint ({reserved[0]})"
        raise Conflict(what, "This output is text, not a checkpoint. Nothing was written.", "Choose another name.")


MAX_TEXT = 1 << 20  # bytes


def standard_input() -> str:
    """The end of the text that is piped in, without its colours: torch's own messages have some."""
    end = b""
    try:
        while block := sys.stdin.buffer.read(MAX_TEXT):  # all of it: what writes into the pipe is not broken off
            end = (end + block)[-MAX_TEXT:]
        return COLOURS.sub("", end.decode("utf-8", "replace"))
    except (OSError, AttributeError) as problem:
        raise file_problem(OSError(str(problem)), "standard input", "read") from problem


MAX_SPEC = 64 << 20  # bytes


def find_target(target: CheckpointLike, at: str | None = None, *, part: bool | None = None) -> Target:
    """The target that `TARGET` names: a spec file, a checkpoint, or the user's own code; a file that exists wins."""
    from ckptool.analysis.targets import is_spec, names_code, of_checkpoint, of_spec  # what no help needs
    from ckptool.checkpoint.files import Source, open_input

    if not isinstance(target, (str, os.PathLike)):
        if hasattr(target, "named_modules") and not isinstance(target, type):
            from ckptool.bridge.modules import target_of

            return target_of(target, shown(target))
        opened = open_whole(target, at, part=part)
        return of_checkpoint(opened.checkpoint, opened.name, opened.at)
    name = shown(target)
    path, _ = split(name)
    if refusal := refused_place(path):
        raise refusal
    if not may_exist(path) and names_code(name):
        if at is not None:
            raise UsageError(f"{arg('at')} names a part of a checkpoint", f"{name} is code that builds one model.")
        from ckptool.bridge.modules import target_of_code

        return replace(target_of_code(name), name=name)
    if not may_exist(path) and "::" not in name and ":" in name:
        what = f"{name} is neither a file nor code of your own"
        why = "Your own code is file.py:factory or pkg.module:factory."
        raise UsageError(what, why, f"For example: {arg(against='model.py:build')}")
    if path.endswith(".py") and os.path.isfile(path):
        what = f"{path} is a Python file; name what builds the model in it"
        why = "It can be a function without arguments, a class, or a module."
        raise UsageError(what, why, f"For example: {path}:build_model")
    source = open_input(path) if may_exist(path) else None
    if isinstance(source, Source) and is_spec(source.read(0, min(4096, source.size))):
        if source.size > MAX_SPEC:
            raise LimitExceeded(f"{source} is a spec of {source.size:,} bytes", f"ckptool reads at most {MAX_SPEC:,}.")
        return of_spec(source.read(0, source.size), name)
    opened = open_whole(target, at, part=part)
    return of_checkpoint(opened.checkpoint, name, opened.at)


Say = Callable[[str], Any]
Set = Annotated[str | Sequence[str], repeated("--set KEY=VALUE", "Change a key of the configuration: train.steps=300.")]
Run = Annotated[PathLike, argument("RUN", "The folder of a run.")]
RunFolder = Annotated[PathLike, argument("RUN", "The folder of a run, not FILE#ADDRESS.")]
Logged = Annotated[Any, Watched("training")]
Lines = Annotated[Say | None, Watched("lines")]


def report_of_run(path: PathLike, full: bool = False) -> Any:
    """The report on a run; None where the path is no run. Imports the store of runs only for one."""
    from ckptool.training import is_run

    return import_module("ckptool.training.run_folder").inspect_run(path, full=full) if is_run(path) else None
