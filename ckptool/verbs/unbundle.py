"""`unbundle`: the members of a bundle as files of their own."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from ckptool import formats
from ckptool.analysis.verify import refuse_damaged
from ckptool.checkpoint import InlineBytes, Note
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.commands import ADDRESS, FILE, NAME, OUT, arg, command, option, repeated, several, verb
from ckptool.errors import CkptoolError, Conflict, UsageError, counted, listed
from ckptool.formats import PathLike, bundle_json, marks, open_whole
from ckptool.pickles.calls import refuse_unknown
from ckptool.transforms import bundles
from ckptool.verbs._options import File, IsPart, Texts
from ckptool.verbs._save import Row, Save, Unpack, Written, change_of, check_written, refuse_extras


@verb(("ckptool unbundle gan.pt -d parts", "one file per member"))
def unbundle(
    file: File,
    folder: Annotated[PathLike | None, option("-d --dir DIR", "A new folder for the members and bundle.json.")] = None,
    *,
    only: Annotated[Texts, repeated("--only NAME", "Write only this member.")] = (),
    part: IsPart = False,
    **options: Unpack[Save],
) -> Written | Any:
    """Writes every member of a bundle to a file of its own in a new folder, and `bundle.json`, which `bundle` reads.

    A bundle is any file whose top is a dictionary of several parts. Plain values (numbers, strings, short lists) go
    into `bundle.json`, the rest into files in the bundle's container, or the one that is asked for. Tensors that one
    member shared with another are written for each.
    Raises `UsageError` for an unknown member or a file that is not a bundle, `Conflict` for impossible file names.
    """
    change = change_of("unbundle", folder, options, file)
    if folder is None and not change.live:
        raise UsageError("unbundle writes a folder of files", "", f"For example: {arg(folder='gan')}")
    only = several(only)
    opened = open_whole(file, part=part)
    checkpoint = opened.taken
    container = formats.by_name(change.options["container"] or bundles.container_of(checkpoint))
    bundles.refuse_container("members cannot be written as", container.name, str(arg(container="safetensors")))
    refuse_extras(checkpoint, container)
    members = bundles.members_of(checkpoint)
    bundles.refuse_unnamed(checkpoint.tree)
    chosen = {bundles.key_of(members, name) for name in only} if only else set(members)
    tree = {name: value for name, value in members.items() if name in chosen}
    files = {name: f"{name}{container.suffixes[0]}" for name, value in tree.items() if not bundles.is_plain(value)}
    bundles.check_names(files)
    if unnamed := [name for name in tree if type(name) not in (str, int)]:
        what = f"the bundle has an entry under {repr(unnamed[0])[:80]}, which is neither a string nor a number"
        fix = f"Drop it: {command('edit', FILE, drop=ADDRESS, out=OUT)}; or take others: {arg(only=NAME)}"
        raise Conflict(what, f"{bundle_json.NAME} cannot express that.", fix)
    rows = bundles.table(tree, files)
    if folder is None:
        written = change.write(opened.checkpoint, replace(checkpoint, tree=tree))
    else:
        entries = tuple(
            bundle_json.BundleMember(name, files.get(name, ""), None if name in files else tree[name], row["kind"])
            for name, row in zip(tree, rows, strict=True)
        )
        ordered = isinstance(checkpoint.tree, OrderedDict)
        record = bundle_json.BundleRecord(bundles.container_of(checkpoint), entries, ordered)
        template = replace(checkpoint, container=container.name, origin=None, tensors_only=False, notes=())
        marked = {name: marks.recovered(checkpoint.metadata, (name,)) for name in files}
        parts = {file: replace(template, tree=tree[name], metadata=marked[name]) for name, file in files.items()}
        keep_unknown = bool(change.options["keep_unknown"])
        refuse_unknown(replace(checkpoint, tree={name: tree[name] for name in files}), keep_unknown)  # as named here
        with no_collection():
            plans = {file: container.write(part, keep_unknown=keep_unknown) for file, part in parts.items()}
        checks = {id(storage): storage for plan in plans.values() for storage in plan.checks}
        record_file = {bundle_json.NAME: [InlineBytes(bundle_json.text(record))]}
        plan = Plan({name: plan.files[""] for name, plan in plans.items()} | record_file, list(checks.values()))
        if change.options["verify"] and not change.options["dry_run"]:
            refuse_damaged(checkpoint)

        def verify(path: str) -> None:
            for name, part in parts.items():
                check_written(part, os.path.join(path, name))

        path = os.fspath(folder)
        replaced, replaceable = os.path.exists(path), set[str]()  # what an earlier `unbundle` wrote
        with suppress(CkptoolError):
            earlier = bundle_json.read(Folder(path)) if os.path.isdir(path) else None
            if earlier is not None:
                replaceable = {bundle_json.NAME, *(part.file for part in earlier.parts if part.file)}
        inputs, size = [checkpoint.source] if checkpoint.source is not None else [], plan.nbytes
        put_notes = change.put(plan, path, inputs, verify, replaceable)
        written = change.written(opened.checkpoint, path, container.name, "new folder", size, size, put_notes)
        written = replace(written, replaced=replaced)
    values = len(tree) - len(files)
    what = f"{counted(len(files), 'file')} and {bundle_json.NAME}"
    what += f", with {counted(values, 'plain value')}" if values else ""
    shared = bundles.shared_members(tree)
    message = f"members that share tensors have them for each in their files: {listed(shared, 4)}"
    notes = [Note("sharing-lost", message)] if shared and folder is not None else []
    return written.about(what, Row("members", rows, bundles.lines_of(rows)), notes=notes)
