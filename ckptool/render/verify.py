"""Renders `verify` as text and JSON."""

from __future__ import annotations

from typing import Annotated

from ckptool.analysis.digests import Compared
from ckptool.analysis.verify import ALL, NONE, Problem, Verification
from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, form, listed, printable, quoted
from ckptool.facts import short, size
from ckptool.options import option
from ckptool.render.json import Json, fields_json
from ckptool.render.style import PLAIN, WHOLE, Style, columns, notes_text

SHOWN = 20


@provides("text", Verification)
def verify_text(
    found: Verification,
    *,
    digest: bool = False,
    quiet: Annotated[bool, option("-q --quiet", "Print only the names of files that are not fine.")] = False,
    style: Style = PLAIN,
) -> str:
    """The verdict in one line; below it what is wrong, with the tensors concerned; then the command that helps.

    quiet: only the name of the file, where it is not fine.
    """
    if quiet:
        return "" if found.fine else f"{printable(found.file)}\n"
    lines = [_verdict(found, style)]
    if found.checksums == NONE and found.container:
        lines.append("  no checksums stored: damage to the data cannot be noticed, only what is missing or misplaced")
    groups: dict[tuple[str, str] | int, list[Problem]] = {}
    for number, problem in enumerate(found.problems):  # a cut loses hundreds of records for one reason
        groups.setdefault((problem.code, problem.why) if problem.code == "lost" else number, []).append(problem)
    for group in list(groups.values())[:SHOWN]:
        lines += _problem_lines(group, style)
    if len(groups) > SHOWN:
        lines.append(f"  … {counted(len(groups) - SHOWN, 'more problem')} (--json lists them)")
    lines += _values(found, style)
    lines += _kept(found, style)
    if digest and found.digests is not None:
        lines += _digests(found, style)
    lines += [f"  {style.cyan(' '.join(map(quoted, fix)))}" for fix in found.fixes]
    notes = notes_text(found.notes, style)
    return "\n".join([*lines, *([notes] if notes else [])]) + "\n"


_WORDS = {"recovered-file": "recovered, not intact", "part": "incomplete"}  # of the only kind of problem


def _verdict(found: Verification, style: Style) -> str:
    name = style.bold(printable(found.file) or "in memory")
    facts = [counted(found.tensors, "tensor"), size(found.bytes)]
    facts += [counted(found.files, "file")] if found.files > 1 else []
    if found.checked:
        which = "" if found.checksums == ALL else " (not all data has one)"
        facts.append(
            f"{counted(found.checked, 'record')} checked against {form(found.checked, 'its', 'their')} checksums{which}"
        )
    about = ", ".join(facts)
    what = "" if found.part is None else printable(found.part.label)
    whole = (
        f"fine: {what}"
        if found.part and found.part.is_complete
        else f"fine, but only a part: {what}"
        if what
        else "fine"
    )
    if found.problems:
        codes = {problem.code for problem in found.problems}
        word = _WORDS.get(codes.pop() if len(codes) == 1 else "", "damaged")
        return f"{name}: {style.red(word)}, {counted(len(found.problems), 'problem')} ({about})"
    if not found.fine:
        return f"{name}: {style.yellow('intact, but see below' if found.part else 'whole, but see below')} ({about})"
    return f"{name}: {style.green(whole)} ({about})"


def _problem_lines(group: list[Problem], style: Style) -> list[str]:
    problem = group[0]
    at = f", at byte {problem.offset:,}" if problem.offset is not None else ""
    more = f", and {counted(len(group) - 1, 'other record')}" if len(group) > 1 else ""
    lines = [f"  {style.yellow(problem.code)}: {printable(problem.what)}{at}{more}"]
    if names := [printable(name) or WHOLE for problem in group for name in problem.tensors]:
        lines.append(f"    {listed(names, 5)}")
    return lines + ([f"    {style.dim(printable(problem.why))}"] if problem.why else [])


def _values(found: Verification, style: Style) -> list[str]:
    if found.non_finite is None:
        return ["  NaN and Inf were not looked for (--finite)"] if found.fine else []
    lines = []
    if found.non_finite:
        lines.append(style.bold(f"not finite ({len(found.non_finite):,} of {counted(found.tensors, 'tensor')})"))
        rows = [
            (
                printable(row.address) or WHOLE,
                f"{short(row.nans)} NaN",
                f"{short(row.infs)} Inf",
                f"of {short(row.count)}",
            )
            for row in found.non_finite[:SHOWN]
        ]
        lines += columns(rows, right=(1, 2, 3))
        left = len(found.non_finite) - SHOWN
        lines += [f"  … {left:,} more (--json lists them)"] if left > 0 else []
    elif not found.unsearched:
        lines.append("  all values are finite")
    if found.unsearched:
        lines.append(f"  not searched for NaN: {listed([printable(name) for name in found.unsearched], 5)}")
    return lines


def _kept(found: Verification, style: Style) -> list[str]:
    lines = [f"  {printable(found.remark)}"] if found.remark else []
    if found.written:
        lines.append(f"  digests kept in {printable(found.written)}")
    if found.compared is None:
        return lines
    if found.compared.same:
        count = len(found.digests.tensors) if found.digests is not None else 0
        return [*lines, f"  same as {printable(found.against)}: {counted(count, 'tensor')}, by their digests"]
    return [*lines, *_differences(found.compared, found.against, style)]


def _differences(compared: Compared, against: str, style: Style) -> list[str]:
    lines = [style.bold(f"not as in {printable(against)}")]
    for word, names in (
        ("differs", [f"{printable(name)} ({printable(how)})" for name, how in compared.differing]),
        ("missing", [printable(name) for name in compared.missing]),
        ("new", [printable(name) for name in compared.new]),
    ):
        lines += [f"  {word}: {name}" for name in names[:SHOWN]]
        lines += [f"  … {len(names) - SHOWN:,} more" for _ in names[SHOWN : SHOWN + 1]]
    return lines


def _digests(found: Verification, style: Style) -> list[str]:
    assert found.digests is not None
    rows = [
        (tensor.sha256, tensor.dtype, "" if tensor.shape is None else str(list(tensor.shape)), printable(tensor.name))
        for tensor in found.digests.tensors
    ]
    head = f"{found.digests.root}  {printable(found.root) or WHOLE}"
    return [style.bold(head), *columns(rows, indent="")]


# JSON -----------------------------------------------------------------------------------------------------------------


@provides("json", Verification)
def verify_json(found: Verification) -> Json:
    """`ckptool.verification/1`: every problem with its place; offsets and sizes in bytes."""
    fact: Json = {
        "schema": "ckptool.verification/1",
        **fields_json(found, "file container fine part bytes files tensors storages checksums checked checked_bytes"),
        **fields_json(found, "problems non_finite unsearched notes fixes"),
    }
    if found.digests is not None:
        tensors = [fields_json(tensor, "key dtype shape sha256") for tensor in found.digests.tensors]
        fact["digest"] = {"at": found.root, "remark": found.remark, "root": found.digests.root, "tensors": tensors}
    if found.compared is not None:
        fact["against"] = {"file": found.against, **fields_json(found.compared, "same differing:key,in missing new")}
    return fact
