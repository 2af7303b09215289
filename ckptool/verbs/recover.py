"""`recover`: a new file with everything of a damaged one that is whole, and nothing else."""

from __future__ import annotations

import os
from typing import Annotated

from ckptool import formats
from ckptool.checkpoint import Checkpoint, FileRange, Note
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.files import Input, Source
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.tree import tensors
from ckptool.commands import OUT, arg, argument, verb
from ckptool.errors import CkptoolError, Conflict, FileProblem, LimitExceeded, UsageError, counted, listed
from ckptool.facts import WHOLE, Bytes, Report, Table, Told, bold, dataclass, green, replace, size, yellow
from ckptool.formats import CheckpointLike, open_source, refuse_address
from ckptool.formats.damaged import LostRecord, LostTensor, Salvaged, salvage
from ckptool.formats.folder import as_part, refuse_placeholders
from ckptool.output import check_target, replace_file
from ckptool.verbs._options import Bar, DryRun, KeepUnknown, Out, Overwrite

SHOWN = 20  # of a kind


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Recovery(Report):
    """The parts of a damaged file that were written to `output`, and those that were not.
    damage: what was wrong when it was opened; empty if nothing was.  how: what was done.
    tensors: how many there were.  back: how many came back.  records, whole: the same of records.
    lost: tensors that are not in the output.  dropped: what had to go along with them.
    proven: by checksums.  notes: on the writing."""

    schema = "recovery/2"
    verdict = "complete"

    damage: str
    how: str
    tensors: int
    back: int
    records: int
    whole: int
    lost: tuple[LostTensor, ...]
    dropped: tuple[str, ...]
    lost_records: tuple[LostRecord, ...]
    proven: bool
    file: str = ""
    output: str = ""
    container: str = ""
    file_bytes: Bytes = 0
    dry_run: bool = False
    notes: tuple[Note, ...] = ()

    @property
    def complete(self) -> bool:
        """True if every tensor came back."""
        return not self.lost

    def told(self) -> Told:
        records = f"{self.whole:,} of {counted(self.records, 'record')} {'verified' if self.proven else 'present'}"
        tensors = f"{counted(self.tensors, 'tensor')} ({records})"
        if self.complete:
            verdict = "nothing is missing"
            if self.whole < self.records:
                verdict = "every tensor was recovered"
            elif self.damage or self.how:
                verdict = "everything was recovered"
            yield bold(self.file), ": ", green(verdict), f", {tensors}"
        else:
            also_dropped = self.tensors - self.back - len(self.lost) if self.dropped else 0
            along = f", {also_dropped:,} dropped with them" if also_dropped else ""
            summary = f"{self.back:,} of {counted(self.tensors, 'tensor')} recovered, {len(self.lost):,} lost{along}"
            yield bold(self.file), ": ", yellow("incomplete"), f", {summary} ({records})"
        yield f"  found: {self.damage}" if self.damage else None
        yield f"  {self.how}" if self.how else None
        yield "  no checksums stored: changed bytes cannot be detected" if not self.proven else None
        if self.complete:
            missing = [(record.name, size(record.nbytes), record.why) for record in self.lost_records]
        else:
            missing = [(tensor.address or WHOLE, size(tensor.nbytes), tensor.why) for tensor in self.lost]
        yield Table(missing, f"lost ({len(missing):,})", right=(1,), limit=SHOWN)
        if self.dropped:
            names = listed(self.dropped, SHOWN)
            yield f"  dropped with them, as half of an optimizer's state is worse than none: {names}"
        where = f"{self.output} ({self.container}, {size(self.file_bytes)})"
        yield f"would be written to {where}; dry run: nothing was written" if self.dry_run else f"→ {where}"
        yield from self.notes


@verb(("ckptool recover cut.pt -o saved.pt", "salvage a file that was cut off"))
def recover(
    file: Annotated[CheckpointLike, argument("FILE", "A truncated or damaged checkpoint, not FILE#ADDRESS.")],
    out: Out = None,
    *,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    keep_unknown: KeepUnknown = False,
    progress: Bar = None,
) -> Recovery:
    """Writes what is intact in a truncated or damaged file to a new one; undoes an interrupted in-place edit.

    Of a zip, every record comes back whose checksum proves it (without its directory, up to a damaged header); of a
    safetensors file, which has no checksums, every tensor that is inside it. Lost tensors are left out and listed.
    Raises what opening raises where nothing can be recovered, and everything that writing raises.
    """
    refuse_address("recover", file)
    source, _ = open_source(file)
    if out is None or formats.for_output(out, formats.DEFAULT).writes_folder:
        what = "recover needs an output" if out is None else f"{os.fspath(out)} would be a folder"
        why = "It writes a new file and leaves the damaged one alone."
        raise UsageError(what, why, f"For example: {arg(out='recovered.pt')}")
    target = os.fspath(out)
    if source.is_at(target):
        why = "More may yet be recovered from it."
        raise Conflict(f"{target} is the damaged file itself", why, f"Choose another name: {arg(out=OUT)}")
    check_target(target, overwrite=overwrite)
    salvaged, damage = _salvaged(source)
    restored, lost, dropped = salvaged.restored()
    original = salvaged.checkpoint.container
    container = formats.for_output(target, original)
    if container.tensors_only:
        values = restored.tree.items() if isinstance(restored.tree, dict) else ()
        refuse_placeholders(replace(restored, part=as_part(restored)), values)
    formats.refuse_name(target, container, original, str(source))
    if salvaged.prefix is not None and original == container.name and isinstance(source, Source):
        plan = Plan({"": [FileRange(source, 0, salvaged.prefix)]})  # intact up to there
    else:
        try:  # without its source: no other verb opens that, so none can drop what would run
            with no_collection():
                plan = container.write(replace(restored, source=None), keep_unknown=keep_unknown)
        except CkptoolError as error:
            raise error.within(source.path) from None
    notes: tuple[Note, ...] = ()
    if not dry_run:
        notes = replace_file(plan, target, overwrite=overwrite, inputs=[source], progress=progress)
    return Recovery(
        damage=damage.what if damage is not None else "",
        tensors=sum(1 for _ in tensors(salvaged.checkpoint.tree)),
        back=sum(1 for _ in tensors(restored.tree)),
        lost=tuple(lost),
        dropped=tuple(dropped),
        how=salvaged.how,
        records=salvaged.records,
        whole=salvaged.whole,
        lost_records=salvaged.lost_records,
        proven=salvaged.proven,
        file=source.path,
        output=target,
        container=container.name,
        file_bytes=plan.nbytes,
        dry_run=dry_run,
        notes=notes,
    )


def _salvaged(source: Input) -> tuple[Salvaged, CkptoolError | None]:
    """The salvaged contents of a file, and the error that opening it raises."""
    damage: CkptoolError | None = None
    try:
        formats.read_source(source)
    except (FileProblem, LimitExceeded, UsageError):
        raise  # what is whole could not be read, either
    except CkptoolError as error:
        damage = error.with_traceback(None)  # which would keep all frames, and what they hold
    return salvage(source, damage), damage


def all_of(file: CheckpointLike) -> Checkpoint | None:
    """The checkpoint in a damaged file; None where a part of it is lost."""
    salvaged, _ = _salvaged(open_source(file)[0])
    restored, lost, _ = salvaged.restored()
    return replace(restored, source=None) if not lost else None
