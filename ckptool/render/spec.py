"""A target's names, shapes, types and ties, as text and JSON."""

from __future__ import annotations

from ckptool.analysis.spec import Spec, spec_of
from ckptool.analysis.targets import BUFFER, PARAMETER, tie_groups
from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, printable
from ckptool.facts import short
from ckptool.render.json import Json, dumps
from ckptool.render.style import PLAIN, Style


@provides("text", Spec)
def spec_text(found: Spec, *, style: Style = PLAIN) -> str:
    """The size of a spec, and where it was written."""
    target = found.target
    unique = target.unique
    kinds = [
        counted(sum(e.kind == kind for e in unique), kind)
        for kind in (PARAMETER, BUFFER)
        if any(e.kind == kind for e in unique)
    ]
    ties = tie_groups(target.tensors.values())
    facts = [
        counted(len(target.tensors), "name"),
        *kinds,
        counted(sum(e.numel for e in unique), "value", shown=short),
    ]
    facts += [counted(len(ties), "tied tensor")] if ties else []
    lines = [f"{style.bold(printable(target.name))}: {', '.join(facts)}"]
    lines += [f"  {style.dim(printable(remark))}" for remark in target.remarks]
    if found.output:
        lines.append(f"{'would write' if found.dry_run else 'wrote'} {printable(found.output)}")
    return "\n".join(lines) + "\n"


@provides("json", Spec)
def spec_json(found: Spec) -> Json:
    """`ckptool.spec/1`: the spec itself, as it is written to a file."""
    return spec_of(found.target)


def spec_file(found: Spec) -> bytes:
    """The spec as a file: a line for each tensor, so that two of them can be compared line by line."""
    facts = spec_of(found.target)
    lines = [f'{{"schema": {dumps(facts["schema"])},', f' "kinds": {dumps(facts["kinds"])},']
    for key, end in (("tensors", ","), ("ties", "}")):
        rows = [f"  {dumps(row)}" for row in facts[key]]
        lines += [f' "{key}": [' + ("\n" if rows else "") + ",\n".join(rows) + f"]{end}"]
    return ("\n".join(lines) + "\n").encode()
