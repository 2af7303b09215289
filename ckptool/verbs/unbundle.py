"""`unbundle`: the members of a bundle as files of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from ckptool import formats
from ckptool.analysis.save import SaveResult, Written
from ckptool.analysis.verify import refuse_damaged
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage
from ckptool.checkpoint.files import Folder, Input
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.plan import Plan
from ckptool.commands import FILE, OUT, Advice, command, several
from ckptool.errors import CkptoolError, Conflict, UsageError, counted
from ckptool.formats import Format, bundle_json, marks
from ckptool.formats.opening import PathLike, open_whole
from ckptool.options import option, verb
from ckptool.output import check_folder, replace_folder
from ckptool.transforms.bundles import check_names, is_plain, key_of, members_of, refuse_unnamed, separated, table
from ckptool.verbs._options import File, IsPart, Texts
from ckptool.verbs._save import Output, SaveOptions, Unpack, output_of, refuse_extras, save, verifier, written
from ckptool.verbs.bundle import CONTAINERS, facts_of, lines_of


@verb(("ckptool unbundle gan.pt -d parts", "one file per member"), without=("in_place",))
def unbundle(
    file: File,
    folder: Annotated[
        PathLike | None, option("-d --dir DIR", "Write the members and bundle.json into this new folder.")
    ] = None,
    *,
    only: Annotated[Texts, option("--only NAME", "Write only this member. Repeatable.", several=True)] = (),
    part: IsPart = False,
    **options: Unpack[SaveOptions],
) -> Written | Any:
    """Writes every member of a bundle to a file of its own in a new folder, and `bundle.json`, which `bundle` reads.

    A bundle is any file whose top is a dictionary of several parts. Plain values (numbers, texts, short lists) go into
    `bundle.json`, the rest into files in the bundle's container, or the one that is asked for. Tensors that one member
    shared with another are written for each. In memory, and without
    a folder, the members are given back.  only: these members.  part: take also a file that is only a part.
    Raises `UsageError` for an unknown member or a file that is no bundle, `Conflict` for names that no file can have.
    """
    output = output_of("unbundle", folder, options, file)
    if output.in_place or (folder is None and not output.live):
        raise UsageError("unbundle writes a folder", "Each member becomes a file in it.", "For example: -d gan")
    only = several(only)
    opened = open_whole(file, part=part)
    checkpoint = opened.taken
    container = _container(checkpoint, output)
    refuse_extras(checkpoint, container)
    members = members_of(checkpoint)
    refuse_unnamed(checkpoint.tree)
    chosen = {key_of(members, name) for name in only} if only else set(members)
    tree, shared = separated({name: value for name, value in members.items() if name in chosen})
    files = _files(tree, container)
    rows = table(tree, files)
    record = bundle_json.BundleRecord(
        checkpoint.container if checkpoint.container in CONTAINERS else formats.DEFAULT,
        tuple(_part(name, tree[name], files.get(name, ""), row.kind) for name, row in zip(tree, rows, strict=True)),
        shared.ties,
        shared.twins,
        isinstance(checkpoint.tree, OrderedDict),
    )
    parts = {files[name]: _member(checkpoint, name, tree[name]) for name in files}
    result = (
        save(output, opened.checkpoint, replace(checkpoint, tree=tree))
        if folder is None
        else _save(parts, bundle_json.text(record), os.fspath(folder), container, checkpoint, output)
    )
    summary = f"{counted(len(files), 'file')} and {bundle_json.NAME}"
    if values := len(tree) - len(files):
        summary += f", with {counted(values, 'plain value')}"
    facts = {"members": facts_of(rows)}
    return written(output, opened.checkpoint, result, summary, facts=facts, details=lines_of(rows))


def _container(checkpoint: Checkpoint, output: Output) -> Format:
    name = output.container or (checkpoint.container if checkpoint.container in CONTAINERS else formats.DEFAULT)
    if (container := formats.by_name(name)).name not in CONTAINERS:
        raise UsageError(
            f"members cannot be written as {container.name}",
            f"They are {' or '.join(CONTAINERS)}: those also hold values that are not tensors.",
            "For example: --to safetensors",
        )
    return container


def _files(tree: Mapping[Any, Any], container: Format) -> dict[Any, str]:
    """The name of the file for each member that gets one."""
    names = [name for name, value in tree.items() if not is_plain(value)]
    check_names(names)
    if odd := [name for name in tree if type(name) not in (str, int)]:
        raise Conflict(
            f"the bundle has an entry under {repr(odd[0])[:80]}, which is neither a string nor a number",
            f"{bundle_json.NAME} cannot express that.",
            Advice("Drop it: ", command("edit", FILE, drop="ADDRESS", out=OUT), "; or take others: --only NAME"),
        )
    return {name: f"{name}{container.suffixes[0]}" for name in names}


def _part(name: Any, value: Any, file: str, kind: str) -> bundle_json.BundleMember:
    return bundle_json.BundleMember(name, file, None, kind) if file else bundle_json.BundleMember(name, value=value)


def _member(checkpoint: Checkpoint, name: Any, tree: Any) -> Checkpoint:
    """A member as a checkpoint of its own; of the mark of a recovered file, what is about it."""
    metadata = marks.recovered_in_part(checkpoint.metadata, (name,))
    return replace(checkpoint, tree=tree, origin=None, metadata=metadata, tensors_only=False, notes=())


def _save(
    parts: Mapping[str, Checkpoint],
    record: bytes,
    folder: str,
    container: Format,
    checkpoint: Checkpoint,
    output: Output,
) -> SaveResult:
    """Writes all files as one folder, or looks whether that could be done."""
    plan = _plan(parts, record, container, output.keep_unknown)
    replaceable = {*_files_of(folder), *plan.files}
    if output.dry_run:
        check_folder(folder, overwrite=output.overwrite, replaceable=replaceable)
        return SaveResult(folder, container.name, "new folder", plan.nbytes, plan.nbytes)
    inputs: list[Input] = [checkpoint.source] if checkpoint.source is not None else []
    if output.verify:
        refuse_damaged(checkpoint)
    notes = replace_folder(
        plan,
        folder,
        overwrite=output.overwrite,
        replaceable=replaceable,
        inputs=inputs,
        verify=_verifier(parts) if output.verify else None,
        progress=output.progress,
    )
    return SaveResult(folder, container.name, "new folder", plan.nbytes, plan.nbytes, notes)


def _plan(parts: Mapping[str, Checkpoint], record: bytes, container: Format, keep_unknown: bool) -> Plan:
    files: dict[str, Any] = {}
    checks: dict[int, Storage] = {}
    with no_collection():
        for name, part in parts.items():
            plan = container.write(replace(part, container=container.name), keep_unknown=keep_unknown)
            files[name] = plan.files[""]
            checks.update((id(storage), storage) for storage in plan.checks)
    files[bundle_json.NAME] = [InlineBytes(record)]
    return Plan(files, list(checks.values()))


def _files_of(folder: str) -> set[str]:
    """The files in a folder that an earlier `unbundle` wrote: they may be replaced."""
    if not os.path.isdir(folder):
        return set()
    try:
        record = bundle_json.read(Folder(folder))
    except CkptoolError:
        return set()
    return {bundle_json.NAME, *(part.file for part in record.parts if part.file)}


def _verifier(parts: Mapping[str, Checkpoint]) -> Callable[[str], None]:
    """Re-reads every file of the folder and compares it with what was meant."""

    def verify(path: str) -> None:
        for name, part in parts.items():
            verifier(part)(os.path.join(path, name))

    return verify
