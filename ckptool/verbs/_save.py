"""The common parts of the verbs that write: where to, how, and what is reported of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from ckptool import formats
from ckptool.analysis.save import SaveResult, Written
from ckptool.checkpoint import Checkpoint, FileRange, Note
from ckptool.checkpoint.files import Folder, Input, Source
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.plan import Plan
from ckptool.checkpoint.tree import address, storages, tensors
from ckptool.commands import OUT_SAFETENSORS, Advice, command, function_name, input_of
from ckptool.errors import (
    CkptoolError,
    Conflict,
    FileProblem,
    Unsupported,
    UsageError,
    VerifyFailed,
    counted,
    listed,
)
from ckptool.formats import Format, members, sidecar, tree_record
from ckptool.formats.in_memory import LIVE, Memory, in_objects
from ckptool.formats.marks import RECOVERED_NOTE
from ckptool.formats.model_folder import ModelFolder, model_folder
from ckptool.formats.opening import PathLike, in_memory
from ckptool.formats.parts import MEMBERS, refuse_placeholders
from ckptool.output import Progress, append_in_place, check_folder, check_target, replace_file, replace_folder
from ckptool.output.append import refuse_links
from ckptool.output.durable import make_folder
from ckptool.pickles.calls import refuse_unknown
from ckptool.pickles.decode import OLD_GRADIENTS, REPEATED_KEY
from ckptool.verbs._options import Bar, Container, DryRun, Extract, InPlace, KeepUnknown, Overwrite, Verify

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack

    from ckptool.analysis.diff import Diff
else:
    Unpack = None  # of `**options: Unpack[SaveOptions]`, which nobody evaluates


class SaveOptions(TypedDict, total=False):
    """in_place: change the input itself.  overwrite: replace an existing output.  dry_run: only report the plan.

    verify: check the stored checksums of the input, then read the output again and compare every tensor before it takes
    its name.  keep_unknown: pass calls of unknown functions on.
    container: the container to write, instead of the one that the suffix of the output stands for.
    progress: told bytes done and in all.  make_folder: make the folder of the output if there is none.
    """

    in_place: InPlace
    overwrite: Overwrite
    dry_run: DryRun
    verify: Verify
    keep_unknown: KeepUnknown
    container: Container
    progress: Bar
    make_folder: bool


class ChangeOptions(SaveOptions, total=False):
    """extract: write the part at the address alone, changed, in place of the whole file."""

    extract: Extract


ChangeOptions.__doc__ = f"{ChangeOptions.__doc__}\n\n    {(SaveOptions.__doc__ or '').strip()}"


@dataclass(frozen=True, slots=True)
class Output:
    """Where a verb writes, and how: `SaveOptions` with their defaults.  path: None where none was named.

    live: nothing is written: something in memory was given, and so is the result.
    """

    verb: str
    path: str | None
    in_place: bool = False
    overwrite: bool = False
    dry_run: bool = False
    verify: bool = False
    keep_unknown: bool = False
    container: str | None = None
    progress: Progress | None = None
    make_folder: bool = False
    live: bool = False

    def format(self, default: str) -> Format:
        """The container asked for, else that of the suffix, else shards for tensors in `DIR/`, or the default."""
        if self.container:
            return formats.by_name(self.container)
        path = self.path or ""
        as_folder = path.endswith("/") and formats.named(default).tensors_only
        return formats.for_output(path, formats.SHARDED if as_folder else default)


def output_of(verb: str, path: PathLike | None, options: SaveOptions, *inputs: object) -> Output:
    """The output of a verb. inputs: what it was given to read.

    Raises `TypeError` for an option that does not exist: `dryrun=True` must not write; `UsageError` for objects in
    memory that are to be changed in place, and where an output for them looks like an option.
    """
    known = SaveOptions.__annotations__
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"{function_name(verb)}() got an unexpected keyword argument {unknown[0]!r}; "
            f"for its output it takes {', '.join(known)}"
        )
    memory = any(map(in_memory, inputs))
    if options.get("in_place") and not all(isinstance(each, (str, os.PathLike)) for each in inputs):
        what = f"{verb} was to change in place what was not given by its path"
        raise UsageError(what, "What is in memory stays as it is; the result is returned.", "Leave out --in-place")
    if memory and isinstance(path, str) and options.get("container") is None and verb != "unbundle":
        _refuse_suffix(verb, path)
    return Output(verb, None if path is None else path_of(verb, path), live=memory and path is None, **options)


def path_of(verb: str, path: Any) -> str:
    """The path of an output. Raises `UsageError` for anything else that stands in its place."""
    if isinstance(path, (str, os.PathLike)):
        return os.fspath(path)
    what = f"{verb} was given {type(path).__name__} in the place of its output's path"
    fix = "Several inputs are one list: ckptool.average([A, B])" if verb == "average" else "For example: -o new.pt"
    raise UsageError(what, "Only files are written, so that they are whole whatever happens.", fix)


def _refuse_suffix(verb: str, text: str) -> None:
    """Raises `UsageError` where an output for objects in memory looks like an option."""
    if "/" not in text and not formats.has_suffix(text):
        option = _OPTIONS.get(verb)
        raise UsageError(
            f"{verb} would write a file called {text!r}",
            "That is where the output is named, and this is the suffix of no container.",
            (f"An option is given by its name: {option}={text!r}; " if option else "")
            + f"to write it all the same: container={formats.DEFAULT!r}",
        )


def out_first(out: Any, option: Any) -> tuple[PathLike | None, Any]:
    """An output and an option as they were meant: a dtype or device in the output's place is the option."""
    return (out, option) if out is None or isinstance(out, (str, os.PathLike)) else (option, out)


_OPTIONS = {"add-module": "prefix", "cast": "dtype", "remap": "to", "strip-module": "prefix"}  # that habit puts second


def save(
    output: Output,
    original: Checkpoint,
    changed: Checkpoint,
    *,
    changes: bool = True,
    expected: Checkpoint | None = None,
    inputs: Sequence[Input] = (),
    beside: ModelFolder | None = None,
) -> SaveResult:
    """Writes `changed` to the output. `changes=False`: it is the original, so the output is a copy of the file.

    expected: what reading the output gives, if not `changed`.  inputs: what it was made from beside the original.
    beside: the files that go into a folder of weights, if not those beside the original.
    Raises `UsageError` unless there is exactly one of a path and `in_place`, and everything that writing raises.
    """
    source = original.source
    inputs = [*([source] if source is not None else []), *inputs]
    if (output.path is None) != output.in_place and not output.live:
        raise UsageError(
            f"{output.verb} needs to know where to write"
            if output.path is None
            else f"{output.verb} was given both an output and --in-place",
            "Nothing is written unless you name an output.",
            "A new file: -o OUT; the file itself: --in-place",
        )
    if output.verify and not output.dry_run:
        from ckptool.analysis.verify import refuse_damaged

        refuse_damaged(original)
    if output.live:
        return _in_memory(output, original, changed)
    if output.path is None:
        return _save_in_place(output, original, changed, changes, inputs)
    if isinstance(original.origin, Memory):
        original.origin.refuse_unsaved(changed.tree)
    _refuse_input(output, output.path, inputs, source)
    container = _container(changed, output, output.path)
    if not changes and source is not None and _stays(original, container, output):
        notes = refuse_unknown(original, output.keep_unknown, as_it_is=True)
        plan, how = _copy_of(source), "copy"
    else:
        refuse_extras(changed, container)
        _refuse_repeated(original)
        _refuse_placeholders(original, changed, container)
        notes = () if container.tensors_only else refuse_unknown(changed, output.keep_unknown)
        with no_collection():
            plan, how = container.write(changed, keep_unknown=output.keep_unknown), "new file"
    details: tuple[str, ...] = ()
    if container.writes_folder and container.tensors_only:
        beside = beside or model_folder(original, changed.tree)
        plan = replace(plan, files={**{name: [data] for name, data in beside.files.items()}, **plan.files})
        inputs, details = [*inputs, *beside.inputs], tuple(beside.lines())
    if sidecar.NAME in plan.files and not plan.notes:
        details += (f"{sidecar.NAME} keeps what {container.name} has no place for, and ckptool gives it back",)
    saved = _replace(output, output.path, plan, changed if expected is None else expected, inputs)
    notes = (*notes, *plan.notes, *saved.notes)
    return replace(saved, container=container.name, how=how, notes=notes, details=details)


@dataclass(frozen=True, slots=True)
class InMemory(SaveResult):
    """The outcome of a verb that writes nothing: `made` is the result, as its input was given."""

    made: Any = None


def _in_memory(output: Output, original: Checkpoint, changed: Checkpoint) -> InMemory:
    nbytes = sum(storage.nbytes for storage in storages(changed.tree))
    made = None if output.dry_run else in_objects(original, changed)
    return InMemory("", LIVE, "in memory", 0, nbytes, made=made)


def _refuse_input(output: Output, target: str, inputs: Sequence[Input], source: Input | None) -> None:
    """Raises `Conflict` where one of the inputs would be replaced, unless that is wanted."""
    if any(given.is_at(target) for given in inputs) and not output.overwrite:
        raise Conflict(
            f"{target} is the input itself",
            "It was left as it is.",
            f"{'Change the file itself: --in-place; or replace' if source else 'Replace'} it with a new one: -f",
        )


def _refuse_placeholders(original: Checkpoint, changed: Checkpoint, container: Format) -> None:
    """Raises `OnlyAPart` where tensors would be written without their values and without what says where those are."""
    if changed.part is None or tree_record.KEY in changed.metadata:
        return
    before, after = (each.tree if isinstance(each.tree, dict) else {} for each in (original, changed))
    if container.tensors_only or not before.keys() <= after.keys():
        refuse_placeholders(changed, ((address(path), value) for path, value in tensors(changed.tree)))


def _refuse_repeated(checkpoint: Checkpoint) -> None:
    """Raises `Conflict` where a dictionary of the file has a key twice with two values: one would be lost."""
    for note in checkpoint.notes:
        if note.code == REPEATED_KEY:
            python = "torch.save(torch.load(FILE, map_location='cpu'), OUT)"
            what = f"{checkpoint.source or 'the checkpoint'}: {note.message}"
            why = "A new file can hold one of the values only. Nothing was written."
            raise Conflict(what, why, f"If you trust the file, and the last value is right: {python}")


def refuse_extras(checkpoint: Checkpoint, container: Format) -> None:
    """Raises `Unsupported` where the file holds what no container that is written here can: a program."""
    if checkpoint.extras:
        source = checkpoint.source or "the checkpoint"
        raise Unsupported(
            f"{source} holds {listed(sorted(checkpoint.extras))} beside its tensors; {container.name} cannot",
            "Without its program the file would no longer be that model. Nothing was written.",
            Advice(
                "Write only its weights, then change those: ",
                command("convert", input_of(checkpoint.source), out=OUT_SAFETENSORS),
            ),
        )


def _container(checkpoint: Checkpoint, output: Output, target: str) -> Format:
    container = output.format(checkpoint.container)
    if not output.container:
        formats.refuse_suffix(target, container, checkpoint.container, str(checkpoint.source or ""))
    formats.refuse_index(target, container)
    return container


def _stays(checkpoint: Checkpoint, container: Format, output: Output) -> bool:
    """True if an unchanged file can be copied: it is of the container to write, or of one that torch loads as well."""
    if isinstance(checkpoint.source, Folder) and any(name.endswith("__0.metadata") for name in checkpoint.source.names):
        return False  # torch reads tables of ranks with as many processes alone
    as_asked = output.container is None and container.name == formats.DEFAULT
    return checkpoint.container == container.name or (as_asked and checkpoint.container in LOADED_BY_TORCH)


LOADED_BY_TORCH = ("torch-legacy", "torchscript")  # under any name of a torch file; what is only read otherwise is not


def _copy_of(source: Input) -> Plan:
    files = source.files if isinstance(source, Folder) else {"": source}
    return Plan({name: [FileRange(file, 0, file.size)] for name, file in files.items()})


def _save_in_place(
    output: Output, original: Checkpoint, changed: Checkpoint, changes: bool, inputs: Sequence[Input]
) -> SaveResult:
    source, container = _writable(output, original)
    if not changes:
        notes = refuse_unknown(original, True, as_it_is=True)  # nothing is written, so nothing is passed on
        return SaveResult(source.path, container.name, "nothing", 0, source.size, notes)
    _refuse_repeated(original)
    notes = () if container.tensors_only else refuse_unknown(changed, output.keep_unknown)
    plan = container.append(changed, keep_unknown=output.keep_unknown)
    if plan is None:
        plan = container.write(changed, keep_unknown=output.keep_unknown)
        saved = _replace(replace(output, overwrite=True), source.path, plan, changed, inputs)
        return replace(saved, container=container.name, notes=(*notes, *saved.notes))
    if not output.dry_run:
        _append(output, plan, source, changed, inputs)
    return SaveResult(source.path, container.name, "in place", plan.nbytes, plan.keep + plan.nbytes, notes)


def _writable(output: Output, original: Checkpoint) -> tuple[Source, Format]:
    """The file that is changed in place, and its container. Raises `UsageError` where that cannot be done."""
    source = original.source
    if source is None:
        raise UsageError("only a checkpoint that was read from a file can be changed in place")
    if isinstance(source, Folder) or formats.writer(original.container) is None:
        raise UsageError(
            f"{source} cannot be changed in place: it is of the container {original.container}",
            "While its files were replaced one by one, the folder would be a mix of two checkpoints."
            if isinstance(source, Folder)
            else "That container can be read, not written.",
            "Write a new one: -o OUT",
        )
    refuse_links(source.path)
    if output.container not in (None, original.container):
        raise UsageError(
            f"--in-place keeps the container ({original.container})",
            "Another container needs a new file.",
            "Write a new file with -o.",
        )
    return source, formats.by_name(original.container)


def _append(output: Output, plan: Plan, source: Source, changed: Checkpoint, inputs: Sequence[Input]) -> None:
    if not os.access(source.path, os.W_OK):
        raise FileProblem(
            f"cannot change {source}: no permission to write to it", "It is as it was.", "Write a new file with -o."
        )
    # The old records were checked before, and stay where they are.
    verify = verifier(changed, checksums=False) if output.verify else None

    def confirm(path: str) -> None:
        for given in inputs:
            if given is not source:
                given.check_unchanged()
        if verify is not None:
            verify(path)

    append_in_place(plan, source, verify=confirm, progress=output.progress)


def _replace(output: Output, target: str, plan: Plan, expected: Checkpoint, inputs: Sequence[Input]) -> SaveResult:
    folder = os.path.dirname(target)
    makes_folder = output.make_folder and not os.path.lexists(folder or ".")
    notes: tuple[Note, ...] = ()
    if not output.dry_run:
        if makes_folder:
            make_folder(folder)
        verify = verifier(expected) if output.verify else None
        notes = put_in_place(
            plan, target, overwrite=output.overwrite, inputs=inputs, verify=verify, progress=output.progress
        )
    elif not makes_folder:
        _check(target, plan, output.overwrite)
    return SaveResult(target, "", "new file", plan.nbytes, plan.nbytes, notes)


def put_in_place(plan: Plan, target: str | os.PathLike[str], *, overwrite: bool, **options: Any) -> tuple[Note, ...]:
    """Writes a plan to a file or a folder, with the options of `replace_file`; returns the notes of that."""
    if _is_folder(plan):
        return replace_folder(plan, target, overwrite=overwrite, replaceable=_files_at(target), **options)
    return replace_file(plan, target, overwrite=overwrite, **options)


def _is_folder(plan: Plan) -> bool:
    """True for a plan of several files, or of one with a name of its own: they are a folder."""
    return set(plan.files) != {""}


def _check(target: str, plan: Plan, overwrite: bool) -> None:
    """Raises what writing the plan to `target` would."""
    if _is_folder(plan):
        check_folder(target, overwrite=overwrite, replaceable={*_files_at(target), *plan.files})
    else:
        check_target(target, overwrite=overwrite)


def _files_at(target: str | os.PathLike[str]) -> set[str]:
    """The names of the files in a folder that together are the checkpoint in it; none where it holds none."""
    if not os.path.isdir(target):
        return set()
    try:
        found = formats.read(target)
    except CkptoolError:
        return set()
    if not isinstance(found.source, Folder):
        return {os.path.basename(found.source.path), sidecar.NAME} if found.source else set()
    left = (name for name in found.source.names if re.fullmatch(formats.named(found.container).leftovers, name))
    names = {*found.source.files, *left}
    return {*names, sidecar.NAME} if not any("/" in name for name in names) else set()  # folders are not replaced


def verifier(expected: Checkpoint, *, checksums: bool = True) -> Any:
    """Reads the output again, compares every tensor and entry with what was meant, and data with its checksums."""

    from ckptool.analysis.diff import diff
    from ckptool.analysis.verify import refuse_damaged

    def verify(path: str) -> None:
        written = formats.read(path)
        container = formats.named(written.container)
        found = diff(expected, written, identity=container.keeps_tree and not container.tensors_only)
        problem = "" if found.same else _first(found)
        if not problem and (names := unreadable_names(written)) and not unreadable_names(expected):
            problem = names
        if problem:
            raise VerifyFailed(
                f"{path} did not read back as it was written: {problem}",
                "The disk or the memory may be failing. The output was not kept.",
            )
        if checksums:
            refuse_damaged(written)

    return verify


def unreadable_names(checkpoint: Checkpoint) -> str:
    """The note on names that torch cannot find; empty where it finds them all."""
    return next((note.message for note in checkpoint.notes if note.code == "nested-name"), "")


def _first(found: Diff) -> str:
    for change in found.changed:
        return f"{change.address} differs in {', '.join(change.aspects)}"
    return (
        f"{counted(len(found.only_left), 'entry is', 'entries are')} missing, "
        f"{len(found.only_right):,} are new, the order or ties differ"
    )


def written(
    output: Output,
    original: Checkpoint,
    saved: SaveResult,
    summary: str,
    *,
    facts: dict[str, Any],
    details: Iterable[str] = (),
    notes: Iterable[Note] = (),
) -> Written | Any:
    """The report of a verb that has saved; what it made, where nothing was to be written."""
    if isinstance(saved, InMemory) and not output.dry_run:
        return saved.made
    left = [note for note in original.notes if note.code == OLD_GRADIENTS and saved.how == "new file"]
    left += [note for note in original.notes if note.code == RECOVERED_NOTE]
    left += _members_left(original) if saved.how != "nothing" and not output.in_place else []
    return Written(
        output.verb,
        original.source.path if original.source else "",
        saved.output,
        saved.container,
        saved.how,
        saved.bytes_written,
        saved.file_bytes,
        summary,
        facts,
        (*details, *saved.details),
        (*notes, *left, *saved.notes),
        output.dry_run,
        output.verify and not output.dry_run and saved.how != "nothing",
    )


def _members_left(original: Checkpoint) -> list[Note]:
    """The note on an optimizer's file beside the weights, which is not in the output."""
    names = list(members.beside(original))
    return [Note(MEMBERS, f"left behind, since only weights are written: {listed(names, 6)}")] if names else []
