"""`recover`: a new file with everything of a damaged one that is whole, and nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from ckptool import formats
from ckptool.checkpoint import Checkpoint, FileRange, Note, StorageRef
from ckptool.checkpoint.files import Input, Source, open_input
from ckptool.checkpoint.plan import Plan
from ckptool.checkpoint.tree import find, tensors
from ckptool.errors import CkptoolError, Conflict, FileProblem, UsageError, printable
from ckptool.formats import marks
from ckptool.formats.damaged import Salvaged, salvage
from ckptool.formats.opening import Opened, PathLike, open_file, refuse_address
from ckptool.formats.parts import refuse_placeholders, with_part
from ckptool.output import Progress, check_target, replace_file
from ckptool.reports.recover import LostTensorRow, Recovery
from ckptool.transforms.recover import Fill, LostTensor, fill, lost_tensors, restored


def recover(
    file: PathLike,
    out: PathLike | None = None,
    *,
    fill_from: PathLike | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    keep_unknown: bool = False,
    progress: Progress | None = None,
) -> Recovery:
    """Writes what is whole of a cut or damaged file to a new one; undoes an in-place edit that was not finished.

    Of a zip, every record comes back whose checksum proves it, wherever the file was cut or damaged; of a safetensors file, which has no
    checksums, every tensor that is inside it. Lost tensors are left out and listed.
    fill_from: another checkpoint, whose tensors of the same key, type and shape take the place of lost ones; the output then says so for
    ever.  keep_unknown: pass calls of unknown functions on.
    Raises what opening the file raises where nothing can be told of it, and everything that writing raises.
    """
    refuse_address("recover", file)
    source = open_input(file)
    target = _target(source, out, overwrite)
    damage = _damage(source)
    done = salvage(source, damage)
    found = _restored(done, _other(fill_from))
    container = formats.for_output(target, done.checkpoint.container)
    if formats.tensors_only(container):
        tree = found.checkpoint.tree
        refuse_placeholders(with_part(found.checkpoint, source), tree.items() if isinstance(tree, dict) else ())
    formats.refuse_suffix(target, container, done.checkpoint.container, str(source))
    if done.prefix is not None and done.checkpoint.container == container.NAME and isinstance(source, Source):
        plan = Plan({"": [FileRange(source, 0, done.prefix)]})  # good as it is, up to there
    else:
        with formats.no_collection():
            plan = container.write(found.checkpoint, keep_unknown=keep_unknown)
    notes: tuple[Note, ...] = ()
    if not dry_run:
        notes = replace_file(plan, target, overwrite=overwrite, inputs=[source, *found.inputs], progress=progress)
    report = _report(os.fspath(file), target, container.NAME, damage, done, found, plan.nbytes, dry_run)
    return replace(report, notes=notes)


@dataclass(frozen=True, slots=True, eq=False)
class _Restored:
    checkpoint: Checkpoint
    lost: list[LostTensor]
    still: list[LostTensor]
    dropped: list[str]
    given: Fill
    inputs: list[Input]


def _restored(done: Salvaged, other: Opened | None) -> _Restored:
    """The tree to write: lost tensors taken from the other checkpoint or left out; marked if there were any."""
    checkpoint = done.checkpoint
    lost = lost_tensors(checkpoint.tree, lambda storage: done.lost_of(storage) is not None)
    given, inputs = Fill(), list[Input]()
    if other is not None:
        there = other.checkpoint
        if other.at is not None:
            there = replace(there, tree=find(there.tree, other.at)[1])
        given = fill(checkpoint, lost, there)
        inputs = [there.source] if there.source else []
    still = [item for item in lost if id(item.node) not in given.new]
    tree, dropped = restored(checkpoint.tree, lost, given.new) if lost else (checkpoint.tree, [])
    metadata = dict(checkpoint.metadata)
    if lost or done.raw:
        names = [place for place, _ in given.filled]
        metadata[marks.RECOVERED] = marks.recovered_mark(
            [item.address for item in still], names, str(metadata.get(marks.RECOVERED, ""))
        )
    marked = replace(checkpoint, tree=tree, metadata=metadata, origin=None)
    return _Restored(marked, lost, still, dropped, given, inputs)


def _target(source: Input, out: PathLike | None, overwrite: bool) -> str:
    if out is None:
        raise UsageError(
            "recover needs an output",
            "It writes a new file, and leaves the damaged one as it is.",
            "For example: -o recovered.pt",
        )
    if source.is_at(out):
        raise Conflict(
            f"{printable(os.fspath(out))} is the damaged file itself",
            "It is the only thing that more could be recovered from; it was left as it is.",
            "Choose another name: -o OUT",
        )
    check_target(out, overwrite=overwrite)
    return os.fspath(out)


def _damage(source: Input) -> CkptoolError | None:
    """What is wrong with the file, as far as opening it shows; `FileProblem` is raised."""
    try:
        formats.read_source(source)
    except (FileProblem, UsageError):
        raise
    except CkptoolError as error:
        return error
    return None


def _other(fill_from: PathLike | None) -> Opened | None:
    return open_file(fill_from) if fill_from is not None else None


def _report(
    file: str,
    target: str,
    container: str,
    damage: CkptoolError | None,
    done: Salvaged,
    found: _Restored,
    nbytes: int,
    dry_run: bool,
) -> Recovery:
    known = not done.raw
    there = sum(1 for _ in tensors(done.checkpoint.tree)) if known else None
    gone = sum(1 for item in found.lost if not isinstance(item.node, StorageRef))
    other = found.inputs[0].path if found.inputs else ""
    return Recovery(
        file=file,
        output=target,
        container=container,
        damage=damage.what if damage is not None else "",
        how=done.how,
        tensors=there,
        back=there - gone if there is not None else 0,
        records=done.records,
        whole=done.whole,
        lost=tuple(_told(item, done) for item in found.still),
        dropped=tuple(found.dropped),
        filled=tuple(found.given.filled),
        filled_from=other,
        refused=tuple(found.given.refused),
        lost_records=done.lost_records,
        proven=done.proven,
        raw=done.raw,
        file_bytes=nbytes,
        dry_run=dry_run,
    )


def _told(item: LostTensor, done: Salvaged) -> LostTensorRow:
    record = done.lost_of(item.storage)
    assert record is not None
    nbytes = item.storage.nbytes if isinstance(item.node, StorageRef) else item.node.nbytes
    return LostTensorRow(item.address, record.name, record.offset, nbytes, record.why)
