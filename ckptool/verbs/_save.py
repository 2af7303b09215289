"""What every verb that writes has in common: where to, how, and what is reported of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from ckptool import formats
from ckptool.checkpoint import Checkpoint, FileRange, Note, Storage
from ckptool.checkpoint.commands import OUT_SAFETENSORS, Advice, command, input_of
from ckptool.checkpoint.files import Folder, Input
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.plan import Plan
from ckptool.checkpoint.tree import address, holders, replaced_at, storages, stored_parts, tensors, walk
from ckptool.errors import (
    CkptoolError,
    Conflict,
    FileProblem,
    Unsupported,
    UsageError,
    VerifyFailed,
    counted,
    listed,
    printable,
)
from ckptool.formats import Format, members, no_collection, tree_record
from ckptool.formats.opening import Opened, PathLike, open_to_change
from ckptool.formats.parts import MEMBERS, refuse_placeholders
from ckptool.output import Progress, append_in_place, check_folder, check_target, replace_file, replace_folder
from ckptool.output.append import refuse_links
from ckptool.output.durable import make_folder
from ckptool.pickles.calls import refuse_unknown
from ckptool.pickles.decode import OLD_GRADIENTS
from ckptool.reports.diff import Diff, diff
from ckptool.reports.verify import refuse_damaged
from ckptool.reports.written import Saved, Written


class SaveOptions(TypedDict, total=False):
    """in_place: change the input itself.  overwrite: an existing output is replaced.  dry_run: report the plan, write nothing.

    verify: check the stored checksums of the input, then re-read the output and compare every tensor before it takes its name.
    keep_unknown: pass calls of unknown functions on.
    container: the container to write, instead of the one that the suffix of the output stands for.  progress: told bytes done and in all.
    make_folder: the folder of the output is made if there is none.
    """

    in_place: bool
    overwrite: bool
    dry_run: bool
    verify: bool
    keep_unknown: bool
    container: str | None
    progress: Progress | None
    make_folder: bool


def save(
    verb: str,
    original: Checkpoint,
    changed: Checkpoint,
    out: str | os.PathLike[str] | None,
    options: SaveOptions,
    *,
    changes: bool = True,
    expected: Checkpoint | None = None,
    inputs: Sequence[Input] = (),
) -> Saved:
    """Writes `changed` where the options say. `changes=False`: it is the original, so the output is a copy of the file.

    expected: what reading the output gives, where that is not `changed`.  inputs: what it was made from beside the original.
    Raises `UsageError` unless there is exactly one of `out` and `in_place`, and everything that writing raises.
    """
    check_options(verb, options)
    source = original.source
    inputs = [*([source] if source is not None else []), *inputs]
    if (out is None) == (not options.get("in_place", False)):
        raise UsageError(
            f"{verb} needs a place to write to" if out is None else f"{verb} was given both an output and --in-place",
            "Nothing is written unless one is named.",
            "A new file: -o OUT; the file itself: --in-place",
        )
    if options.get("verify", False) and not options.get("dry_run", False):
        refuse_damaged(original)
    if out is None:
        if source is None:
            raise UsageError("only a checkpoint that was read from a file can be changed in place")
        return _save_in_place(original, changed, options, changes, inputs)
    target = os.fspath(out)
    if any(given.is_at(target) for given in inputs) and not options.get("overwrite", False):
        raise Conflict(
            f"{printable(target)} is the input itself",
            "It was left as it is.",
            f"{'Change the file itself: --in-place; or replace' if source else 'Replace'} it by a new one: -f",
        )
    container = _container(changed, target, options)
    keep_unknown = options.get("keep_unknown", False)
    if not changes and source is not None and _stays(original, container, options):
        notes = refuse_unknown(original, keep_unknown, as_it_is=True)
        plan, how = _copy_of(source), "copy"
    else:
        refuse_beside(changed, container)
        _refuse_placeholders(original, changed, container)
        notes = () if container.tensors_only else refuse_unknown(changed, keep_unknown)
        with no_collection():
            plan, how = container.write(changed, keep_unknown=keep_unknown), "new file"
    expected = changed if expected is None else expected
    overwrite = options.get("overwrite", False)
    saved = _replace(target, container, plan, how, expected, options, inputs, overwrite=overwrite)
    return replace(saved, notes=(*notes, *saved.notes))


def check_options(verb: str, options: SaveOptions) -> None:
    """Raises `TypeError` for an option that there is not: `dryrun=True` must not write."""
    known = SaveOptions.__annotations__
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"{verb.replace('-', '_')}() got an unexpected keyword argument {unknown[0]!r}; for its output it takes {', '.join(known)}"
        )


def _refuse_placeholders(original: Checkpoint, changed: Checkpoint, container: Format) -> None:
    """Raises `OnlyAPart` where tensors without values would be written by themselves, without what says where their values are."""
    if changed.part is None or tree_record.KEY in changed.metadata:
        return
    before, after = (each.tree if isinstance(each.tree, dict) else {} for each in (original, changed))
    if container.tensors_only or not before.keys() <= after.keys():
        refuse_placeholders(changed, ((address(path), value) for path, value in tensors(changed.tree)))


def refuse_beside(checkpoint: Checkpoint, container: Format) -> None:
    """Raises `Unsupported` where the file holds what no container that is written here can: a program."""
    if checkpoint.extras:
        source = checkpoint.source or "the checkpoint"
        raise Unsupported(
            f"{source} holds {listed(sorted(checkpoint.extras))} beside its tensors; {container.name} cannot",
            "Without its program the file would no longer be that model. Nothing was written.",
            Advice(
                "Write its weights alone, then change those: ",
                command("convert", input_of(checkpoint.source), out=OUT_SAFETENSORS),
            ),
        )


def _container(checkpoint: Checkpoint, target: str, options: SaveOptions) -> Format:
    name = options.get("container")
    container = formats.by_name(name) if name else formats.for_output(target, checkpoint.container)
    if not name:
        formats.refuse_suffix(target, container, checkpoint.container, str(checkpoint.source or ""))
    formats.refuse_index(target, container)
    return container


def _stays(checkpoint: Checkpoint, container: Format, options: SaveOptions) -> bool:
    """True if a file that nothing was to be changed in can be copied: its container is the one to write, or is not written at all."""
    as_asked = options.get("container") is None and container.name == formats.DEFAULT
    only_read = formats.writer(checkpoint.container) is None and not isinstance(checkpoint.source, Folder)
    return checkpoint.container == container.name or (only_read and as_asked)


def _copy_of(source: Input) -> Plan:
    files = source.files if isinstance(source, Folder) else {"": source}
    return Plan({name: [FileRange(file, 0, file.size)] for name, file in files.items()})


def _save_in_place(
    original: Checkpoint, changed: Checkpoint, options: SaveOptions, changes: bool, inputs: Sequence[Input]
) -> Saved:
    source = original.source
    assert source is not None
    if isinstance(source, Folder) or formats.writer(original.container) is None:
        raise UsageError(
            f"{source} cannot be changed in place: it is of the container {original.container}",
            "Files of one checkpoint that change one after the other are at times those of two."
            if isinstance(source, Folder)
            else "That is read here, not written.",
            "Write a new one: -o OUT",
        )
    refuse_links(source.path)
    if options.get("container") not in (None, original.container):
        raise UsageError(
            f"--in-place keeps the container ({original.container})",
            "Another container is another file.",
            "Write a new file with -o.",
        )
    container = formats.by_name(original.container)
    if not changes:
        notes = refuse_unknown(original, True, as_it_is=True)  # nothing is written, so nothing is passed on
        return Saved(source.path, container.name, "nothing", 0, source.size, notes)
    known = () if container.tensors_only else refuse_unknown(changed, options.get("keep_unknown", False))
    plan = container.append(changed, keep_unknown=options.get("keep_unknown", False))
    if plan is None:
        plan = container.write(changed, keep_unknown=options.get("keep_unknown", False))
        saved = _replace(source.path, container, plan, "new file", changed, options, inputs, overwrite=True)
        return replace(saved, notes=(*known, *saved.notes))
    if not options.get("dry_run", False):
        if not os.access(source.path, os.W_OK):
            raise FileProblem(
                f"cannot change {source}: no permission to write to it", "It is as it was.", "Write a new file with -o."
            )
        # The old records were checked before, and stay where they are.
        verify = verifier(changed, checksums=False) if options.get("verify", False) else None

        def confirm(path: str) -> None:
            for given in inputs:
                if given is not source:
                    given.check_unchanged()
            if verify is not None:
                verify(path)

        append_in_place(plan, source, verify=confirm, progress=options.get("progress"))
    return Saved(source.path, container.name, "in place", plan.nbytes, plan.keep + plan.nbytes, known)


def _replace(
    target: str,
    container: Format,
    plan: Plan,
    how: str,
    changed: Checkpoint,
    options: SaveOptions,
    inputs: Sequence[Input],
    *,
    overwrite: bool,
) -> Saved:
    if options.get("make_folder", False) and not os.path.lexists(os.path.dirname(target) or "."):
        _make_folder(target, options)
    elif options.get("dry_run", False):
        _check(target, plan, overwrite)
    notes: tuple[Note, ...] = ()
    if not options.get("dry_run", False):
        verify = verifier(changed) if options.get("verify", False) else None
        progress = options.get("progress")
        notes = put_in_place(plan, target, overwrite=overwrite, inputs=inputs, verify=verify, progress=progress)
    return Saved(target, container.name, how, plan.nbytes, plan.nbytes, notes)


def put_in_place(plan: Plan, target: str | os.PathLike[str], *, overwrite: bool, **options: Any) -> tuple[Note, ...]:
    """Writes a plan to `target`, a file or a folder, with the options of `replace_file`. Returns what its user should know of it."""
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
    source = (
        found.source if formats.named(found.container).joined else None
    )  # several checkpoints are not replaced by one
    return set(source.files) if isinstance(source, Folder) else {os.path.basename(source.path)} if source else set()


def _make_folder(target: str, options: SaveOptions) -> None:
    if not options.get("dry_run", False):
        make_folder(os.path.dirname(target))


def verifier(expected: Checkpoint, *, checksums: bool = True) -> Any:
    """Re-reads what was written and compares every tensor and entry with what was meant, and its data with its checksums if asked to."""

    def verify(path: str) -> None:
        written = formats.read(path)
        container = formats.named(written.container)
        found = diff(expected, written, identity=container.keeps_tree and not container.tensors_only)
        problem = "" if found.same else _first(found)
        if not problem and (names := unreadable_names(written)) and not unreadable_names(expected):
            problem = names
        if problem:
            raise VerifyFailed(
                f"what was written to {printable(path)} is not what was meant: {problem}",
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
        return f"{printable(change.address)} differs in {', '.join(change.aspects)}"
    return (
        f"{counted(len(found.only_left), 'entry is', 'entries are')} missing, "
        f"{len(found.only_right):,} are new, the order or ties differ"
    )


def written(verb: str, original: Checkpoint, saved: Saved, options: SaveOptions, summary: str, **more: Any) -> Written:
    """The report of a verb that has saved."""
    file = original.source.path if original.source else ""
    dry = options.get("dry_run", False)
    verified = options.get("verify", False) and not dry and saved.how != "nothing"
    where = (saved.output, saved.container, saved.how, saved.bytes_written, saved.file_bytes)
    left = [note for note in original.notes if note.code == OLD_GRADIENTS and saved.how == "new file"]
    left += _members_left(original) if saved.how != "nothing" and not options.get("in_place", False) else []
    more["notes"] = (*more.get("notes", ()), *left, *saved.notes)
    return Written(verb, file, *where, summary, dry_run=dry, verified=verified, **more)


def _members_left(original: Checkpoint) -> list[Note]:
    """What to say where weights were taken for the folder that holds them: the optimizer's file beside them is not in the output."""
    names = [printable(name) for name in members.beside(original)]
    return [Note(MEMBERS, f"left behind, as weights alone are written: {listed(names, 6)}")] if names else []


class ChangeOptions(SaveOptions, total=False):
    """extract: write the part at the address alone, changed, in place of the whole file."""

    extract: bool


@dataclass(frozen=True, slots=True)
class Change:
    """A file that is being changed. `part`: what the verb acts on.  named: it was named by an address.

    outside: the tree around it, with nothing in its place.  kept: the storages in there, which stay as they are.
    """

    verb: str
    original: Checkpoint
    part: Checkpoint
    named: bool
    outside: Any
    kept: tuple[Storage, ...]
    options: SaveOptions
    extract: bool

    def save(self, changed: Checkpoint, out: PathLike | None, *, changes: bool = True) -> Saved:
        """Writes the file with the changed part in its place, or that part alone.

        Raises `Conflict` where a tensor of the part would no longer be tied to one outside of it, and what saving raises.
        """
        if self.extract:
            return save(self.verb, self.original, replace(changed, base=()), out, self.options)
        return save(self.verb, self.original, self._whole(changed), out, self.options, changes=changes)

    def _whole(self, changed: Checkpoint) -> Checkpoint:
        base = self.part.base
        if not base:
            return changed
        self._refuse_untied(changed.tree)
        return replace(self.original, tree=replaced_at(self.original.tree, base, changed.tree))

    def _refuse_untied(self, changed: Any) -> None:
        kept = {id(storage) for storage in self.kept}
        if not any(id(storage) in kept for storage in storages(self.part.tree)):
            return
        after = {path: [id(part.storage) for part in stored_parts(node)] for path, node in walk(changed)}
        for path, node in walk(self.part.tree):
            tied = [part.storage for part in stored_parts(node) if id(part.storage) in kept]
            if tied and any(id(storage) not in after[path] for storage in tied if after.get(path)):
                name, other = address((*self.part.base, *path)), self._place_outside(tied)
                raise Conflict(
                    f"{printable(name)} shares its storage with {printable(other)}, which is not in "
                    f"{printable(address(self.part.base))}",
                    "Both would change, or no longer be tied. Nothing was written.",
                    "Change the whole file, without the address; or write the part alone: --extract",
                )

    def _place_outside(self, tied: list[Storage]) -> str:
        numbers = {id(storage) for storage in tied}
        places = (
            path for path, node in walk(self.outside) for part in stored_parts(node) if id(part.storage) in numbers
        )
        return address(next(places, ()))


def begin_change(verb: str, file: PathLike, at: str | None, options: ChangeOptions) -> Change:
    """Opens what a verb is to change. Raises `UsageError` where nothing is at the address, or what is there cannot be put back."""
    given: dict[str, Any] = {**options}
    extract = bool(given.pop("extract", False))
    own: SaveOptions = given  # type: ignore[assignment]
    check_options(verb, own)
    opened = open_to_change(file, at)
    part = opened.taken
    _refuse_extract(verb, opened, extract, own)
    outside: Any = None
    if part.base and not extract:
        _refuse_loop(opened.checkpoint.tree, part)
        outside = replaced_at(opened.checkpoint.tree, part.base, None)
    kept = tuple(storages(outside))
    return Change(verb, opened.checkpoint, part, opened.at is not None, outside, kept, own, extract)


def _refuse_extract(verb: str, opened: Opened, extract: bool, options: SaveOptions) -> None:
    if extract and opened.at is None:
        raise UsageError(
            f"{verb} was to write a part alone, and no part was named",
            "The whole file is written without --extract.",
            f"Name it: ckptool {verb} FILE#ADDRESS --extract -o OUT",
        )
    if extract and options.get("in_place", False):
        raise UsageError(
            f"{verb} was given both --extract and --in-place",
            "The file itself would lose everything but the part.",
            "Write the part to a new file: -o OUT",
        )


def _refuse_loop(tree: Any, part: Checkpoint) -> None:
    """Raises `UsageError` for a part that holds what it is in: no copy of it could be put back without changing the rest."""
    around = {id(holder) for holder in holders(tree, part.base)}
    if any(id(node) in around for node in visit(part.tree)):
        raise UsageError(
            f"{printable(address(part.base))} holds what it is itself a part of",
            "It cannot be changed without the rest.",
            "Change the whole file, without the address.",
        )
