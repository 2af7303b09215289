"""`bundle`: several models, optimizers and values in one file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from ckptool import formats
from ckptool.analysis.findings import Chain
from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.files import Folder, Input
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.paths import absolute
from ckptool.checkpoint.tree import Path, find
from ckptool.commands import FILE, OUT, arg, argument, command, option, repeated, several, verb
from ckptool.errors import Conflict, UsageError, counted, listed
from ckptool.formats import CheckpointLike, PathLike, bundle_json, marks, open_whole, shown, split
from ckptool.formats.in_memory import checkpoint_in_memory, together
from ckptool.formats.members import left_beside
from ckptool.transforms import bundles
from ckptool.verbs._options import IsPart, Out, Texts, assignment, pairs
from ckptool.verbs._save import Row, SaveInPlace, Unpack, Written, change_of, checkpoint_of, refuse_extras

_MEMBERS = {"generator": "G.pt", "discriminator": "D.pt#state_dict"}
_MEMBER = "Members: files (NAME=FILE#ADDRESS for a part of one), plain values. Or one bundle to change."
Names = Mapping[str, str] | None
_renamed = pairs("G=generator", str.partition)
_EXAMPLE = f"For example: {command('bundle', out='gan.tar', members=_MEMBERS, values={'epoch': 3})}"


def _words(
    words: Annotated[Sequence[str], argument("NAME=FILE|NAME:=JSON|FILE", _MEMBER, several=True)] = (),
    add: Annotated[Sequence[str], repeated("--add NAME=FILE", "Add a member (or NAME:=JSON) to the bundle.")] = (),
    **options: Any,
) -> dict[str, Any]:
    base = None
    if len(words) == 1 and ("=" not in words[0] or os.path.lexists(words[0])):
        (base,), words = words, ()
    elif words and (add or {"drop", "rename"} & {*options} or options["in_place"]):
        what = f"bundle was given {counted(len(words), 'word')} besides its changes"
        why = "--add, --drop and --rename change one bundle."
        raise UsageError(what, why, "For example: ckptool bundle gan.tar --add epoch:=4 -o new.tar")
    files: dict[str, str] = {}
    values: dict[str, Any] = {}
    for word in (*words, *add):
        name, _, file = word.partition("=")
        if not (name and file):
            raise UsageError(f"{word!r} names no member", "Write NAME=FILE or NAME:=JSON.", _EXAMPLE)
        bundles.check_names([name.removesuffix(":")], [*files, *values])
        if name.endswith(":"):
            values[name[:-1]] = assignment(word)[1]
        elif not os.path.lexists(split(file)[0]) and assignment(word)[1] != file:
            what = f"{word!r} names the file {file}, which is not there"
            raise UsageError(what, f"{file} looks like a plain value.", f"For the value: '{name}:={file}'")
        else:
            files[name] = file
    return {"file": base, "members": files, "values": values}


@verb(
    ("ckptool bundle G=a.pt D=b.pt epoch:=3 -o gan.pt", "several models in one file"),
    from_words=_words,
    one_output="A new file: -o gan.tar or -o gan.safetensors; the bundle that is changed: --in-place",
)
def bundle(
    members: Mapping[str, CheckpointLike] | None = None,
    out: Out = None,
    *,
    values: Mapping[str, Any] | None = None,
    file: CheckpointLike | None = None,
    drop: Annotated[Texts, repeated("--drop NAME", "Drop a member of the bundle.")] = (),
    rename: Annotated[Names, repeated("--rename OLD=NEW", "Rename a member of the bundle.", parse=_renamed)] = None,
    from_folder: Annotated[PathLike | None, option("--from DIR", "Reassemble what unbundle wrote to DIR.")] = None,
    part: IsPart = False,
    **options: Unpack[SaveInPlace],
) -> Written | Any:
    """Writes one file that holds several: `{name: FILE or FILE#ADDRESS}`, then plain `values` by name (`{"epoch": 3}`).

    To `.pt` or `.tar`: a dictionary with exactly these names, which `torch.load` reads. To `.safetensors`: tensors
    called `name/key`, and a record from which ckptool restores everything. file: a bundle to change instead: members
    and values are added, `drop` and `rename` (old: new) name some of its own; no tensor of the others is touched.
    Raises `Conflict` for names that clash or cannot be those of files, `UsageError` for an unknown member.
    """
    change = change_of("bundle", out, options, file, *(members or {}).values(), in_place=True)
    if from_folder is not None:
        if file is not None:
            raise UsageError("bundle was given both a bundle to change and a folder", "Give one of the two.")
        parts = _unbundled(from_folder, part)
    else:
        path, at = split(file) if isinstance(file, (str, os.PathLike)) else (file, None)
        if at is not None and file is not None:
            what, take = f"{shown(file)} is a part of a file", command("bundle", members={"NAME": shown(file)}, out=OUT)
            raise UsageError(what, "A bundle is changed as a whole.", f"Take the part as a member: {take}")
        original = Checkpoint({}, formats.DEFAULT) if path is None else open_whole(path, part=part).checkpoint
        parts = _Members(original, part)
        if file is not None:
            parts.checkpoint = replace(original, tree=bundles.members_of(original))
            refuse_extras(original, formats.by_name(formats.DEFAULT))
    parts.checkpoint = replace(parts.checkpoint, tree=bundles.changed(parts.checkpoint.tree, several(drop), rename))
    parts.add(members or {}, {**(values or {})} if change.live else checkpoint_of({**(values or {})}).tree)
    if not parts.checkpoint.tree or (file is not None and not (drop or rename or members or values)):
        what = "bundle was given no members" if file is None else f"bundle was given nothing to do with {shown(file)}"
        raise UsageError(what, "It puts several files into one.", _EXAMPLE)
    container = change.format(bundles.container_of(parts.checkpoint))
    bundles.refuse_container("a bundle cannot be", container.name, f"{arg(out='g.tar')}; {arg(out='g.safetensors')}")
    tree = bundles.bundled(parts.checkpoint.tree, parts.original.tree, live=change.live)
    # A new file is laid out afresh: the same members give the same bytes. An edit in place keeps what is there.
    origin = parts.original.origin if change.options["in_place"] else None
    bundled = replace(parts.checkpoint, tree=tree, source=parts.original.source, origin=origin, tensors_only=False)
    bundled = replace(bundled, container=container.name)
    if thing := bundles.one_thing(bundled):
        what, why = f"these members together would be {thing}", "They could not be told apart. Nothing was written."
        raise Conflict(what, why, "Give a member that is a dictionary of tensors, or save these as one: ckptool.save")
    written = change.write(together(parts.original, parts.memories), bundled, inputs=parts.inputs)
    if drop and written.how == "in place":
        message = f"the bytes of {listed(several(drop), 3)} stay inside the file, unused"
        fix = Chain(written.output).fill(command("convert", FILE, out=OUT))
        parts.notes.append(Note("unused-record", message, fix))
    rows = bundles.table(bundled.tree, parts.origins)
    return written.about(counted(len(rows), "member"), Row("members", rows, bundles.lines_of(rows)), notes=parts.notes)


class _Members:
    """The contents of a bundle, as it is put together.

    original: the bundle that is changed, or an empty one.  checkpoint: the members so far.  part: they may be parts of
    checkpoints.  inputs: the files of the members, beside the original.  readings: of each file, with the taken paths.
    """

    def __init__(self, original: Checkpoint, part: bool) -> None:
        self.original, self.checkpoint, self.part = original, original, part
        self.inputs: list[Input] = []
        self.origins: dict[Any, str] = {}
        self.notes: list[Note] = []
        self.memories: list[Checkpoint] = []
        self.readings: dict[str | int, list[tuple[Checkpoint, list[Path]]]] = {}

    def add(self, files: Mapping[str, CheckpointLike], values: Mapping[str, Any]) -> None:
        bundles.check_names([*files, *values], self.checkpoint.tree)
        candidates = ((name, source) for name, source in files.items() if not isinstance(source, Checkpoint))
        live = {name: source for name, source in candidates if formats.is_in_memory(source)}
        memory = checkpoint_in_memory(live, members=True)
        self.memories += [memory] if live else []
        for name, file in files.items():
            part = replace(memory, tree=memory.tree[name]) if name in live else self._member_part(file, files)
            self.member(name, part, shown(file))
        self.checkpoint = replace(self.checkpoint, tree={**self.checkpoint.tree, **values})

    def member(self, name: str | int, part: Checkpoint, origin: str) -> None:
        """Adds the contents of a file under a name, with the notes on the file."""
        refuse_extras(part, formats.by_name(formats.DEFAULT))
        self.origins[name] = origin
        self.notes += marks.recovered_notes(part.metadata)
        self.notes += marks.omitted_notes(part.metadata, origin) if part.tensors_only else ()
        before = self.checkpoint.metadata
        metadata = {**before, **marks.recovered(part.metadata, to=(name,), before=before)}
        tree, discarded = {**self.checkpoint.tree, name: part.tree}, (*self.checkpoint.discarded, *part.discarded)
        self.checkpoint = replace(self.checkpoint, tree=tree, metadata=metadata, discarded=discarded)

    def _member_part(self, file: CheckpointLike, files: Mapping[str, CheckpointLike]) -> Checkpoint:
        """The part of a file that is a member. Parts of one file keep their ties; what is taken twice becomes two."""
        path, at = split(file) if isinstance(file, (str, os.PathLike)) else (file, "")
        readings = self.readings.setdefault(os.path.realpath(absolute(path)) if type(path) is str else id(file), [])
        for checkpoint, taken in readings:
            place, node = find(checkpoint.tree, at or "")
            if not any(place[: len(other)] == other[: len(place)] for other in taken):
                break
        else:
            checkpoint, taken = open_whole(path, part=self.part).checkpoint, []
            place, node = find(checkpoint.tree, at or "")
            readings.append((checkpoint, taken))
            self.memories.append(checkpoint)
            self.inputs += [checkpoint.source] if checkpoint.source is not None else []
        taken.append(place)
        if not place:
            self.notes += left_beside(checkpoint, shown(file), [*map(shown, files.values())])
            return checkpoint
        metadata = marks.recovered(checkpoint.metadata, place)
        return replace(checkpoint, tree=node, discarded=(), extras={}, metadata=metadata)


def _unbundled(path: PathLike, part: bool) -> _Members:
    """The members that an unbundled folder holds. Raises `Corrupt` for a record that leads out of the folder."""
    folder = Folder(path)
    record = bundle_json.read(folder)
    bundles.check_names(entry.name for entry in record.parts if entry.file)
    parts = _Members(Checkpoint(OrderedDict() if record.ordered else {}, record.container), part)
    for entry in record.parts:
        if entry.file:
            parts.member(entry.name, formats.read_alone(folder.open(entry.file)), os.path.join(folder.path, entry.file))
        else:
            parts.checkpoint = replace(parts.checkpoint, tree={**parts.checkpoint.tree, entry.name: entry.value})
    parts.inputs.append(folder)
    if record.was_tied:
        message = f"members that shared tensors, by {bundle_json.NAME}, have them for each now"
        parts.notes.append(Note("sharing-lost", message))
    parts.checkpoint = replace(parts.checkpoint, tree=bundles.bundled(parts.checkpoint.tree))
    return parts
