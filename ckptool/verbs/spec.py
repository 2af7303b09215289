"""`spec`: a model's names, shapes, types and ties, to check checkpoints against without its values or its code."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from ckptool.analysis.targets import BUFFER, PARAMETER, SPEC_SCHEMA, SPEC_VERSION, Expected, Target, tie_groups
from ckptool.commands import argument, verb
from ckptool.errors import Unsupported, counted
from ckptool.facts import LIVE, Report, Told, bold, dataclass, dim, short
from ckptool.formats import CheckpointLike
from ckptool.output import replace_file
from ckptool.verbs._options import At, DryRun, IsPart, Out, Overwrite, check_text, find_target


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Spec(Report):
    """Names, dtypes and shapes of a model, as the file of a spec holds them."""

    schema = SPEC_SCHEMA.removeprefix("ckptool.") + SPEC_VERSION  # of the file, which is read again

    target: Annotated[Target, LIVE]
    output: Annotated[str, LIVE] = ""
    dry_run: Annotated[bool, LIVE] = False

    @property
    def kinds(self) -> Literal["stated", "by name"]:
        return "stated" if self.target.kinds_known else "by name"

    @property
    def tensors(self) -> tuple[Expected, ...]:
        return tuple(self.target.tensors.values())

    @property
    def ties(self) -> list[list[str]]:
        return list(tie_groups(self.tensors).values())

    def told(self) -> Told:
        unique = self.target.unique
        numbers = [(kind, sum(tensor.kind == kind for tensor in unique)) for kind in (PARAMETER, BUFFER)]
        facts = [counted(len(self.tensors), "name"), *(counted(number, kind) for kind, number in numbers if number)]
        facts += [counted(sum(tensor.numel for tensor in unique), "value", shown=short)]
        facts += [counted(len(self.ties), "tied tensor")] if self.ties else []
        yield bold(self.target.name), f": {', '.join(facts)}"
        yield from (("  ", dim(remark)) for remark in self.target.remarks)
        yield f"{'would write' if self.dry_run else 'wrote'} {self.output}" if self.output else None


@verb(("ckptool spec net.py:build -o model.spec.json", "for warm-start --against, without torch"))
def spec(
    target: Annotated[
        CheckpointLike,
        argument("TARGET", "A checkpoint, FILE#ADDRESS for a part, or your code: file.py:factory or pkg.mod:factory."),
    ],
    out: Out = None,
    *,
    at: At = None,
    part: IsPart = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Spec:
    """Names, shapes, types, ties and kinds of a model's tensors, written to `out` as JSON (`ckptool.spec/1`).

    The model may also be a module, or another spec. Raises `UserCodeFailed` with the traceback where the factory
    raises, and what opening a checkpoint raises.
    """
    from ckptool.render.json import dumps

    record = Spec(find_target(target, at, part=part), os.fspath(out) if out is not None else "", dry_run)
    for entry in record.tensors:
        if entry.dtype is None or entry.shape is None:
            raise Unsupported(f"{entry.name} has no dtype and shape to record", "Only torch knows this kind of tensor.")
    facts = record.to_dict()
    lines = [f'{{"schema": {dumps(facts["schema"])},', f' "kinds": {dumps(facts["kinds"])},']
    for key, end in (("tensors", ","), ("ties", "}")):  # a line for each, so that two specs can be compared
        rows = ",\n".join(f"  {dumps(row)}" for row in facts[key])
        lines += [f' "{key}": [' + ("\n" if rows else "") + rows + f"]{end}"]
    if out is not None:
        check_text(out, overwrite=overwrite)
    if out is not None and not dry_run:
        replace_file(("\n".join(lines) + "\n").encode(), out, overwrite=overwrite)
    return record
