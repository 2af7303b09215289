"""What the verbs that write have in common: their options (`Save`), and their report (`Written`).

`change_of` knows where to and how, `begin_change` opens a file that is changed, or what is at an address in it. Their
`write` and `save` write what a verb made, and report it; `Written.about` adds what the verb did.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypedDict

from ckptool import commands, errors, formats
from ckptool.checkpoint import Checkpoint, FileRange, Note, TensorEntry
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.dtypes import TOO_LARGE
from ckptool.checkpoint.files import Folder, Input
from ckptool.checkpoint.graph import no_collection, visit
from ckptool.checkpoint.nodes import Object, fields
from ckptool.checkpoint.paths import is_url, may_exist, named_urls
from ckptool.checkpoint.tree import address, holders, replaced_at, storages, stored_parts, tensors, walk
from ckptool.commands import FILE, NAME, OUT, OUT_SAFETENSORS, VERBS, Command, Slot, arg, command, input_of
from ckptool.conventions.optimizer_keys import nested
from ckptool.conventions.state_dicts import MANY_STATE_DICTS, optimizers
from ckptool.errors import CkptoolError, Conflict, FileProblem, Unsupported, UsageError, counted, escaped, form, listed
from ckptool.facts import LIVE, Bytes, Report, Told, bold, dataclass, field, replace, size
from ckptool.formats import CheckpointLike, Format, Opened, PathLike, changeable, is_in_memory, marks, open_file
from ckptool.formats.folder import MEMBERS, refuse_placeholders
from ckptool.formats.marks import CHOSEN, RECOVERED_NOTE
from ckptool.output import check_target, new_folder, replace_file
from ckptool.pickles.calls import refuse_unknown
from ckptool.pickles.decode import OLD_GRADIENTS, REPEATED_KEY
from ckptool.verbs._options import Bar, Container, DryRun, Extract, InPlace, KeepUnknown, Overwrite, Verify

if TYPE_CHECKING:
    from typing_extensions import Self
    from typing_extensions import Unpack as Unpack

    from ckptool.formats.model_folder import ModelFolder
    from ckptool.transforms.rename import Renamed
else:

    class Unpack:
        """Stands for `typing.Unpack`, which Python 3.10 lacks: `Unpack[Save]` is the options themselves."""

        __class_getitem__ = staticmethod(lambda options: options)


_FOLDERS = {formats.SHARDED: arg(out=Slot("DIR"), shard_size="5GB"), formats.DCP: arg(out="model.dcp", ranks=8)}
_OUTPUT_NEXT = ("unbundle", "lora extract", "lora convert")  # in Python their output is given without its name
LOADED_BY_TORCH = ("torch-legacy", "torchscript")  # under any name of a torch file; other read-only containers are not


class Row(NamedTuple):
    """One thing that a verb did. key, value: for programs, among the facts.  lines: for people, among the details."""

    key: str
    value: Any
    lines: Iterable[str] = ()

    @classmethod
    def named(cls, key: str, names: Sequence[str], label: str, limit: int = 8) -> Row:
        """Names, listed in one line behind the label where there are any."""
        return cls(key, list(names), [f"{label} {listed(names, limit)}"] if names else [])


def lines_of(rows: Iterable[Row | str]) -> list[str]:
    """The lines that rows have for people."""
    return [line for row in rows for line in ([row] if isinstance(row, str) else row.lines)]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Written(Report):
    """The result of a verb that writes, or would. `how`: `new file`, `in place`, `copy`, `nothing`.
    summary: one sentence of what was changed.  facts: the same for programs.  details: lines worth reading below it.
    bytes_written counts what was added to the disk; file_bytes is the size of the result.
    made: what the verb gives in place of this report, where nothing was to be written; rows: what it did then, whose
    lines may read values.  left: notes on what of the original is not in the output.  replaced: it took the place of
    what was there."""

    is_written: ClassVar[bool] = True

    verb: str
    file: str
    output: str
    container: str
    how: str
    bytes_written: Bytes
    file_bytes: Bytes
    summary: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    dry_run: bool = False
    verified: bool = False
    made: Annotated[tuple[Any, ...], LIVE] = ()
    rows: Annotated[tuple[Any, ...], LIVE] = ()
    left: Annotated[tuple[Note, ...], LIVE] = ()
    replaced: Annotated[bool, LIVE] = False

    def about(self, summary: str, *rows: Row | str, notes: Iterable[Note] = (), **facts: Any) -> Written:
        """The same report with what the verb did, in rows, lines and facts."""
        if self.made:
            return replace(self, summary=summary, rows=rows, facts=facts, notes=(*notes, *self.left, *self.notes))
        facts |= {row.key: row.value for row in rows if isinstance(row, Row)}
        details, notes = (*map(escaped, lines_of(rows)), *self.details), (*notes, *self.left, *self.notes)
        return replace(self, summary=escaped(summary), facts=facts, details=details, notes=notes, made=(), left=())

    def told(self) -> Told:
        how = {"nothing": "unchanged"}.get(self.how, self.how)
        if self.how == "in place":
            how = f"in place, {size(self.bytes_written)} {'to be ' if self.dry_run else ''}added"
        elif self.how == "new file" and formats.named(self.container).writes_folder:
            how = "new folder"
        suffix = formats.SUFFIXES.get(os.path.splitext(self.output)[1].lower())
        is_misnamed = self.output and how in ("new file", "copy") and (suffix is None or suffix.name != self.container)
        how = f"{how.removeprefix('new ')} replaced" if self.replaced and how != "copy" else how
        words = [self.container if is_misnamed else "", size(self.file_bytes), how, "verified" if self.verified else ""]
        facts = ", ".join(filter(None, words))
        where = f"written to {self.output}" if self.output else "returned"
        if self.dry_run:
            what = f"{self.output} would stay as it is" if self.how == "nothing" else f"would be {where} ({facts})"
            yield bold(self.verb), f": {self.summary}; {what}"
            yield "  dry run: nothing was written"
        else:
            yield bold(self.verb), f": {self.summary} → {self.output or where} ({facts})"
        yield from (f"  {line}" for line in self.details)
        yield from self.notes


class Save(TypedDict, total=False):
    """progress: told bytes done and in all.  make_folder: make the folder of the output if there is none.
    Returns a report; in its place, for input in memory and without an output, what would be written."""

    overwrite: Overwrite
    dry_run: DryRun
    verify: Verify
    keep_unknown: KeepUnknown
    container: Container
    progress: Bar
    make_folder: bool


class SaveInPlace(Save, total=False):
    in_place: InPlace


class SavePart(SaveInPlace, total=False):
    extract: Extract


SaveInPlace.__doc__ = SavePart.__doc__ = Save.__doc__


@dataclass(frozen=True, slots=True)
class Change:
    """Where a verb writes, and how.  path: None where none was named.  options: all of `Save`, or of `SaveInPlace`.
    live: nothing is written: something in memory was given, and the result is returned."""

    verb: str
    path: str | None
    options: SaveInPlace
    live: bool

    def format(self, default: str) -> Format:
        """The container option, else that of the suffix, else shards for `DIR/`, or the default."""
        if self.options["container"]:
            return formats.by_name(self.options["container"])
        path = self.path or ""
        return formats.for_output(path, formats.SHARDED if path.endswith("/") else default)

    def into(self, container: str) -> Self:
        """The same change, into this container."""
        return replace(self, options={**self.options, "container": container})

    def into_folder(self, name: str, option: Command) -> Self:
        """The change into the container of the output, which has to be a folder of the kind of `name`. Raises
        `UsageError` otherwise."""
        container, expected = self.format(name), formats.by_name(name)
        if not container.writes_folder or container.tensors_only != expected.tensors_only:
            what = f"{option} writes a folder ({name}), but {self.path or ''} would be {container.name}"
            raise UsageError(what, "Only a folder has several files.", f"For example: {_FOLDERS[name]}")
        return self.into(container.name)

    def write(
        self,
        original: Checkpoint,
        changed: Checkpoint,
        *,
        changes: bool = True,
        expected: Checkpoint | None = None,
        inputs: Sequence[Input] = (),
        beside: ModelFolder | None = None,
    ) -> Written:
        """Writes `changed`. `changes=False`: it is the original, so the output is a copy of the file.
        expected: what reading the output gives, if not `changed`.  inputs: what it was made from beside the original.
        beside: the files that go into a folder of weights, if not those beside the original.
        Raises `UsageError` unless there is exactly one of a path and `in_place`, and everything that writing raises."""
        options, path, source = self.options, self.path, original.source
        inputs = [*([source] if source is not None else []), *inputs]
        if (path is None) != bool(options.get("in_place")) and not self.live:
            conflict = f"{self.verb} was given both an output and {arg(in_place=True)}"
            what = f"{self.verb} needs an output" if path is None else conflict
            why, itself = "Nothing is written unless you name an output.", f"; the file itself: {arg(in_place=True)}"
            raise UsageError(what, why, f"A new file: {arg(out=OUT)}{itself if 'in_place' in options else ''}")
        if self._has_members(original):
            from ckptool.formats.members import refuse_other_models

            refuse_other_models(original)
        if options["verify"] and not options["dry_run"]:
            from ckptool.analysis.verify import refuse_damaged

            refuse_damaged(original)
        if self.live:
            nbytes = sum(storage.nbytes for storage in storages(changed.tree))
            written = self.written(original, "", formats.LIVE, "in memory", 0, nbytes)
            if options["dry_run"]:
                return written
            memory = original.memory  # in the form in which the original was given
            TOO_LARGE.set(types := set[str]())
            result = replace(changed, base=(), source=None) if memory is None else memory.objects(changed.tree)
            return replace(written, made=(result,), notes=_infinite(types))
        if path is None:
            return self._in_place(original, changed, changes, inputs)
        replaced = os.path.exists(path)
        if original.memory is not None:
            original.memory.refuse_unsaved(changed.tree)
        if any(file.is_at(path) for file in inputs) and not options["overwrite"]:
            fix = f"To replace it: {arg(overwrite=True)}"
            if source is not None and not is_url(path) and "in_place" in options:
                fix += f"; to change the file itself: {arg(in_place=True)}"
            raise Conflict(f"{path} is the input itself", "It was left as it is.", fix)
        container, keep_unknown = self.format(changed.container), bool(options["keep_unknown"])
        origin = changed.container, str(changed.source or "")
        formats.refuse_name(path, container, *origin, asked=bool(options["container"]))
        # An unchanged file can be copied if it is of the container to write, or of one that torch loads, too.
        same_container = container.name == original.container or (
            options["container"] is None and container.name == formats.DEFAULT and original.container in LOADED_BY_TORCH
        )
        if isinstance(source, Folder) and any(name.endswith("__0.metadata") for name in source.names):
            same_container = False  # torch reads tables of ranks only with as many processes
        if not (container.writes_folder and container.tensors_only):
            beside = None
        elif beside is None:
            from ckptool.formats.model_folder import model_folder

            beside = model_folder(original, changed.tree)
        if same_container and not changes and source is not None:
            notes = refuse_unknown(original, keep_unknown, as_it_is=True)
            files = source.files if isinstance(source, Folder) else {"": source}
            files = dict(reversed(files.items()))  # the index, opened first, is written last
            plan, how = Plan({name: [FileRange(file, 0, file.size)] for name, file in files.items()}), "copy"
        else:
            refuse_extras(changed, container)
            _refuse_repeated(original)
            if changed.part is not None and marks.PICKLE not in changed.metadata:
                before, after = (side.tree if isinstance(side.tree, dict) else {} for side in (original, changed))
                all_there = before.keys() <= after.keys() or {*map(id, before.values())} <= {*map(id, after.values())}
                if container.tensors_only or not all_there:
                    refuse_placeholders(changed, ((address(path), value) for path, value in tensors(changed.tree)))
            notes = () if container.tensors_only else refuse_unknown(changed, keep_unknown, original=original)
            if beside is not None and changed.origin is None:  # with the names that the configuration's library seeks
                from ckptool.formats.sharded import divided

                changed = divided(changed, None, beside.stem)
            with no_collection():
                plan, how = container.write(changed, keep_unknown=keep_unknown), "new file"
            if original.container == "safetensors" != container.name:
                notes += marks.omitted_notes(original.metadata, origin[1])
            if container.tensors_only and not changed.tensors_only and marks.PICKLE not in changed.metadata:
                from ckptool.transforms.flatten import lost_views

                entries = {key: value for key, value in changed.tree.items() if isinstance(value, TensorEntry)}
                notes += tuple(lost_views(entries, not container.keeps_ties))
        details: list[str] = []
        if beside is not None:
            plan = replace(plan, files={**{name: [data] for name, data in beside.files.items()}, **plan.files})
            inputs, details = [*inputs, *beside.inputs], beside.lines()
        tree = changed.tree if isinstance(changed.tree, dict) and not container.writes_folder else {}
        bytewise = (value.dtype.itemsize == 1 for value in tree.values() if isinstance(value, TensorEntry))
        if any(".lora_A." in str(key) or ".qweight" in str(key) for key in tree) or any(bytewise):
            from ckptool.formats.model_folder import left_meaning

            notes += left_meaning(original, changed, path)
        intended = changed if expected is None else expected
        notes += plan.notes + self.put(plan, path, inputs, partial(check_written, intended))
        written = self.written(original, path, container.name, how, plan.nbytes, plan.nbytes, notes, details)
        return replace(written, replaced=replaced)

    def _has_members(self, original: Checkpoint) -> bool:
        return original.part is not None or any(note.code == MEMBERS for note in original.notes)

    def written(
        self,
        original: Checkpoint,
        path: str,
        container: str,
        how: str,
        added: int,
        nbytes: int,
        notes: tuple[Note, ...] = (),
        details: Iterable[str] = (),
    ) -> Written:
        """The report of what was written, or would be; with notes on what the output lacks of the original."""
        dry_run = bool(self.options["dry_run"])
        verified = bool(self.options["verify"]) and not dry_run and how != "nothing"
        codes = (RECOVERED_NOTE, OLD_GRADIENTS, *CHOSEN) if how == "new file" else (RECOVERED_NOTE,)
        left_behind = [note for note in original.notes if note.code in codes]
        if self._has_members(original) and how != "nothing" and not self.options.get("in_place"):
            from ckptool.formats.members import left_beside

            left_behind += left_beside(original)
        head = self.verb, original.source.path if original.source else "", path, container
        report = Written(*head, how, added, nbytes, dry_run=dry_run, verified=verified)
        return replace(report, details=tuple(details), notes=notes, left=tuple(left_behind))

    def _in_place(self, original: Checkpoint, changed: Checkpoint, changes: bool, inputs: Sequence[Input]) -> Written:
        """Changes the file itself. Raises `UsageError` where that cannot be done."""
        source, options = original.source, self.options
        if source is None:
            raise UsageError("only a checkpoint that was read from a file can be changed in place")
        if isinstance(source, Folder) or not formats.named(original.container).writable:
            what = f"{source} cannot be changed in place: its container is {original.container}"
            why = "That container can be read, but not written."
            if isinstance(source, Folder):
                why = "While its files are replaced one by one, the folder would be a mix of two checkpoints."
            raise UsageError(what, why, f"Write a new one: {arg(out=OUT)}")
        from ckptool.output.edits import append_in_place, refuse_links

        refuse_links(source.path)
        if options["container"] not in (None, original.container):
            what = f"{arg(in_place=True)} keeps the container ({original.container})"
            raise UsageError(what, "Another container needs a new file.", f"Write a new file with {arg('out')}.")
        container, keep_unknown = formats.by_name(original.container), bool(options["keep_unknown"])
        if not changes:
            notes = refuse_unknown(original, True, as_it_is=True)  # nothing is written, so nothing is passed on
            return self.written(original, source.path, container.name, "nothing", 0, source.size, notes)
        _refuse_repeated(original)
        notes = () if container.tensors_only else refuse_unknown(changed, keep_unknown, original=original)
        plan = container.append(changed, keep_unknown=keep_unknown)
        if plan is None:
            plan = container.write(changed, keep_unknown=keep_unknown)
            replacing = replace(self, options={**options, "overwrite": True})
            notes += replacing.put(plan, source.path, inputs, partial(check_written, changed))
            written = self.written(original, source.path, container.name, "new file", plan.nbytes, plan.nbytes, notes)
            return replace(written, replaced=True)
        if not options["dry_run"]:
            if not os.access(source.path, os.W_OK):
                what = f"cannot change {source}: no permission to write to it"
                raise FileProblem(what, "It is unchanged.", f"Write a new file with {arg('out')}.")

            def confirm(path: str) -> None:
                for file in inputs:
                    if file is not source:
                        file.check_unchanged()
                if options["verify"]:  # the old records were checked before, and stay where they are
                    check_written(changed, path, checksums=False)

            append_in_place(plan, source, verify=confirm, progress=options["progress"])
        nbytes = plan.keep + plan.nbytes
        return self.written(original, source.path, container.name, "in place", plan.nbytes, nbytes, notes)

    def put(
        self,
        plan: Plan,
        target: str,
        inputs: Sequence[Input],
        verify: Callable[[str], None] | None = None,
        replaceable: Iterable[str] | None = None,
    ) -> tuple[Note, ...]:
        """Writes a plan under its name, or checks that it could be written; returns the notes on that.
        A plan of several files, or of one with a name of its own, is a folder. verify: proves it.  replaceable: files
        in a folder of that name, if not those of a checkpoint."""
        options, folder, is_file = self.options, os.path.dirname(target), set(plan.files) == {""}
        check: Callable[..., Any] = check_target
        write: Callable[..., tuple[Note, ...]] = replace_file
        keywords: Any = {"overwrite": bool(options["overwrite"])}
        if options["make_folder"] and options["dry_run"] and not may_exist(folder or "."):
            return ()
        if not is_file:
            from ckptool.output import folders

            check, write = folders.check_folder, folders.replace_folder
            keywords["replaceable"] = {*(_files_at(target) if replaceable is None else replaceable), *plan.files}
        if options["dry_run"]:
            check(target, **keywords)
            return ()
        proof = verify if options["verify"] else None
        TOO_LARGE.set(types := set[str]())
        with new_folder(folder or ".") if options["make_folder"] else nullcontext():
            notes = write(plan, target, inputs=inputs, progress=options["progress"], verify=proof, **keywords)
        return notes + _infinite(types, command("verify", target, finite=True))


def _infinite(types: set[str], fix: tuple[()] | Command = ()) -> tuple[Note, ...]:
    """The note on values that were too large for these types; none for no type."""
    what = f"computed values are too large for {listed(sorted(types))} and became infinite"
    return (Note("non-finite", what, fix),) if types else ()


@dataclass(frozen=True, slots=True)
class FileChange(Change):
    """A file that is being changed. `part`: the part that the verb acts on.  named: an address named it.
    outside: the tree around it, with nothing in its place.  extract: the part is written alone."""

    original: Checkpoint
    part: Checkpoint
    named: bool
    outside: Any
    extract: bool

    def save(self, changed: Checkpoint, *, changes: bool = True, beside: ModelFolder | None = None) -> Written:
        """Writes the file with the changed part in its place, or that part alone.

        beside: the files that go into a folder of weights, if not those beside the original.
        Raises `Conflict` where a tensor of the part would lose its tie to one outside of it, and what writing raises.
        """
        base = self.part.base
        if self.extract:
            return self.write(self.part, replace(changed, base=()), beside=beside)
        if base:
            shared = {*map(id, storages(self.outside))} & {*map(id, storages(self.part.tree))}
            walked = walk(changed.tree) if shared else ()
            after = {path: [id(part.storage) for part in stored_parts(node)] for path, node in walked}
            for path, node in walk(self.part.tree) if shared else ():
                tied = {id(part.storage) for part in stored_parts(node)} & shared
                if tied and not tied.issubset(after.get(path) or tied):
                    views = ((place, part) for place, outer in walk(self.outside) for part in stored_parts(outer))
                    neighbour = address(next((place for place, part in views if id(part.storage) in tied), ()))
                    name = address((*base, *path))
                    what = f"{name} shares its storage with {neighbour}, which is not in {address(base)}"
                    why = "Both would change, or no longer be tied. Nothing was written."
                    fix = f"Change the whole file, without the address; or write the part alone: {arg(extract=True)}"
                    raise Conflict(what, why, fix)
            changed = replace(self.original, tree=replaced_at(self.original.tree, base, changed.tree))
        return self.write(self.original, changed, changes=changes, beside=beside)

    def old_names(self, changed: Checkpoint, names: Collection[str], *, moved: bool = False) -> Iterator[Note]:
        """Notes on what still has these old names of weights: lists, tables, and optimizers outside of the part.

        changed: the part, where optimizers have the new names.  moved: it is not the names alone that changed, so that
        it concerns optimizers outside that have numbers, too.
        """
        outside = nested(self.outside)
        for path, optimizer in optimizers(outside) if moved else ():
            if any(type(slot) is int for slot in optimizer["state"]):
                yield Note("old-names", f"{address(path)} is outside the changed part and stays as it was")
        places, old = list[str](), dict[str, None]()
        for base, tree in ((self.part.base, changed.tree), ((), None if self.extract else outside)):
            for path, node in walk(tree) if names else ():
                texts: Iterable[Any] = node if isinstance(node, (list, tuple)) else ()
                if isinstance(node, dict) and "_metadata" not in path:  # which has modules, not weights
                    texts = [key for key, value in node.items() if not isinstance(value, TensorEntry)]
                if stale := [text for text in texts if type(text) is str and "." in text and text in names]:
                    places.append(address((*base, *path)))
                    old |= dict.fromkeys(stale)
        if places:
            what = f"{listed(places, 3)} {form(len(places), 'keeps', 'keep')} the old names of weights"
            yield Note("old-names", f"{what}: {listed([*old], 3)}")


def change_of(verb: str, path: PathLike | None, options: Save, *inputs: object, in_place: bool = False) -> Change:
    """The target and options of a verb that writes. inputs: what it reads.  in_place: it may change a file itself.
    Raises `TypeError` for an unknown option (`dryrun=True` must not write), `UsageError` for options without sense."""
    accepted = (SaveInPlace if in_place else Save).__annotations__
    if unknown := [name for name in options if name not in accepted]:
        function = commands.function_of(verb)
        typed = {flag.strip("-"): each.name for each in commands.parameters_of(function) for flag in each.option.flags}
        typed["folder"] = "a list of paths" if commands.takes_several(function) else "out"
        meant = typed.get(unknown[0]) or commands.nearest(unknown[0], commands.signature_of(function).parameters)
        hint = f"did you mean {meant}?" if meant else f"for its output it takes {', '.join(accepted)}"
        raise TypeError(f"{VERBS[verb].function}() got an unexpected keyword argument {unknown[0]!r}; {hint}")
    memory = any(map(is_in_memory, inputs))
    if options.get("in_place") and (remote := next((source for source in inputs if is_url(source)), None)):
        what = f"{verb} cannot change {remote} in place"
        raise UsageError(what, "A remote file can only be replaced as a whole.", f"Write a new one: {arg(out=OUT)}")
    if options.get("in_place") and not all(isinstance(source, (str, os.PathLike)) for source in inputs):
        what = f"{verb} can change only files in place"
        why = "What is in memory stays as it is; the result is returned."
        raise UsageError(what, why, f"Leave out {arg(in_place=True)}")
    is_word = isinstance(path, str) and "/" not in path and os.path.splitext(path)[1].lower() not in formats.SUFFIXES
    names = [container.name for container in formats.WRITERS if not container.writes_folder]
    is_word = is_word and (memory or path in names) and verb not in _OUTPUT_NEXT
    if is_word and options.get("container") is None:
        why = f"This is the output, and no container has that suffix. Options have names: {arg(container='npz')}."
        fix = f"To write it all the same: {arg(container=formats.DEFAULT)}"
        raise UsageError(f"{verb} would write a file called {path!r}", why, fix)
    if (path is None and verb == "save") or (path is not None and not isinstance(path, (str, os.PathLike))):
        what = f"{verb} was given {type(path).__name__} as its output's path"
        fix = "Pass several inputs as one list: ckptool.average([A, B])" if verb == "average" else "For example: 'm.pt'"
        raise UsageError(what, "Only files can be written, so that they are whole whatever happens.", fix)
    filled: Any = dict.fromkeys(accepted) | options
    return Change(verb, None if path is None else named_urls(os.fspath(path)), filled, memory and path is None)


def checkpoint_of(tree: Any, *, arrays_as_tensors: bool = False, keep_unknown: bool = False) -> Checkpoint:
    """A checkpoint of live objects; an opened one is returned as it is."""
    if isinstance(tree, Checkpoint):
        return tree
    if "torch" in sys.modules:
        from ckptool.bridge.from_live import from_torch as read
    else:  # then no torch tensor can be in the tree
        from ckptool.pickles.reduce import from_live as read
    return Checkpoint(read(tree, arrays_as_tensors=arrays_as_tensors, keep_unknown=keep_unknown), formats.LIVE)


def out_first(out: Any, option: Any) -> tuple[PathLike | None, Any]:
    """An output and an option as they were meant: a dtype or device in the output's place is the option."""
    return (out, option) if out is None or isinstance(out, (str, os.PathLike)) else (option, out)


def begin_change(
    verb: str,
    file: CheckpointLike,
    out: PathLike | None,
    at: str | None,
    options: SavePart,
    opening: Callable[[CheckpointLike, str | None], Opened] | None = None,
    in_place: bool = True,
) -> FileChange:
    """Opens what a verb is to change (in_place: maybe the file). Raises `UsageError` for a part that cannot go back."""
    save_options: Any = {**options}
    extract = bool(save_options.pop("extract", False))
    change = change_of(verb, out, save_options, file, in_place=in_place)
    opened = changeable(open_file(file, at)) if opening is None else opening(file, at)
    original, part = opened.checkpoint, opened.taken
    if extract and opened.at is None:
        what = f"{verb} {arg(extract=True)} was given no address"
        why = f"Without {arg(extract=True)} the whole file is written."
        raise UsageError(what, why, f"Name it: {command(verb, FILE / 'ADDRESS', extract=True, out=OUT)}")
    if extract and change.options.get("in_place"):
        what = f"{verb} was given both {arg(extract=True)} and {arg(in_place=True)}"
        why = "The file itself would lose everything but that part."
        raise UsageError(what, why, f"Write the part to a new file: {arg(out=OUT)}")
    outside: Any = None
    if part.base and not extract:
        ancestors = {id(holder) for holder in holders(original.tree, part.base)}
        if any(id(node) in ancestors for node in visit(part.tree)):  # a copy put back would change the rest
            what = f"{address(part.base)} contains itself"
            raise UsageError(what, "It cannot be changed on its own.", "Change the whole file, without the address.")
        outside = replaced_at(original.tree, part.base, None)
    head = change.verb, change.path, change.options, change.live
    return FileChange(*head, original, part, opened.at is not None, outside, extract)


def renamed_file(change: FileChange, renamed: Renamed, clean: str) -> Written | Any:
    """Saves new keys and reports them.  clean: what to say where no key changes."""
    saved = change.save(renamed.checkpoint, changes=renamed.changed > 0)
    roots = [{"root": root, "changed": changed, "keys": keys} for root, changed, keys in renamed.roots]
    of = [f"{root or 'the whole file'}: {changed:,} of {counted(keys, 'key')}" for root, changed, keys in renamed.roots]
    of = [*of[:MANY_STATE_DICTS], f"… {len(of) - MANY_STATE_DICTS:,} more"] if len(of) > MANY_STATE_DICTS else of
    names = [f"{old} → {new}" for old, new in renamed.names.items()]
    return saved.about(
        f"{renamed.changed:,} of {counted(renamed.total, 'key')} renamed" if renamed.changed else clean,
        Row("roots", roots, of if len(of) > 1 else []),
        *names[:3],
        *([f"… {len(names) - 3:,} more"] if len(names) > 3 else []),
        changed=renamed.changed,
        keys=renamed.total,
        notes=change.old_names(renamed.checkpoint, renamed.names.keys() - renamed.names.values()),
    )


# Refusals, and the proof that an output was written ------------------------------------------------------------------


def _refuse_repeated(checkpoint: Checkpoint) -> None:
    """Raises `Conflict` where a dictionary of the file has a key twice with two values: one would be lost."""
    for note in checkpoint.notes:
        if note.code == REPEATED_KEY:
            python = "torch.save(torch.load(FILE, map_location='cpu'), OUT)"
            what = f"{checkpoint.source or 'the checkpoint'}: {note.message}"
            why = "A new file can hold only one of the values. Nothing was written."
            raise Conflict(what, why, f"If you trust the file, and the last value is right: {python}")


def refuse_extras(checkpoint: Checkpoint, container: Format) -> None:
    """Raises `Unsupported` where the file holds what no container that is written here can: a program, or in a torch
    file objects that only a program can make."""
    source = checkpoint.source or "the checkpoint"
    if checkpoint.extras:
        fix = f"See what it has: {command('inspect', input_of(checkpoint.source))}"
        if fields(checkpoint.tree).get("state_dict"):
            weights = command("convert", input_of(checkpoint.source, "state_dict"), out=OUT_SAFETENSORS)
            fix = f"Write only its weights, then change those: {weights}"
        what = f"{container.name} cannot hold what {source} has beside its tensors: {listed(sorted(checkpoint.extras))}"
        raise Unsupported(what, "Without its program the file would no longer be that model. Nothing was written.", fix)
    if checkpoint.container != container.name == formats.DEFAULT:
        classes = [node.name for node in visit(checkpoint.tree) if type(node) is Object]
        if scripted := [name for name in dict.fromkeys(classes) if name.startswith("__torch__.")]:
            what = f"{source}: {listed(scripted, 3)} {form(len(scripted), 'is', 'are')} made by its program alone"
            why = "torch.load would fail on a file without the program. Nothing was written."
            fix = f"Leave it out: {arg(exclude=NAME)}; or keep it for ckptool, in a .safetensors: {arg(all=True)}"
            raise Unsupported(what, why, fix)


def _files_at(target: str | os.PathLike[str]) -> set[str]:
    """The names of the files that make up the checkpoint in a folder; none where it holds none."""
    opened = None
    with suppress(CkptoolError):
        opened = formats.read(target) if os.path.isdir(target) else None
    if opened is None or not isinstance(opened.source, Folder):
        return {os.path.basename(opened.source.path)} if opened and opened.source else set()
    leftovers = (name for name in opened.source.names if re.fullmatch(formats.named(opened.container).leftovers, name))
    names = {*opened.source.files, *leftovers}
    return names if not any("/" in name for name in names) else set()  # folders are not replaced


def check_written(expected: Checkpoint, path: str, *, checksums: bool = True) -> None:
    """Reads an output again, and compares every tensor and entry with `expected`, and data with its checksums.
    Raises `VerifyFailed` where they differ, also where torch cannot find a name that it finds in `expected`."""
    from ckptool.analysis.diff import diff
    from ckptool.analysis.verify import refuse_damaged

    written = formats.read(path)
    container = formats.named(written.container)
    report = diff(expected, written, identity=container.keeps_tree and not container.tensors_only)
    problems = [f"{change.address} differs in {', '.join(change.aspects)}" for change in report.changed]
    if not problems and not report.same:
        missing = counted(len(report.only_left), "entry is", "entries are")
        new = counted(len(report.only_right), "entry is", "entries are")
        also = ", the order or ties differ" if report.order_differs or report.ties else ""
        problems = [f"{missing} missing, {new} new{also}"]
    after, prior = ([note.message for note in side.notes if note.code == "nested-name"] for side in (written, expected))
    if not prior:
        problems += after
    if problems:
        what = f"{path} does not read back as written: {problems[0]}"
        raise errors.VerifyFailed(what, "The disk or the memory may be failing. The output was discarded.")
    if checksums:
        refuse_damaged(written)
