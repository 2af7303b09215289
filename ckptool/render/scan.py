"""Renders `scan` as text and JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Annotated

from ckptool.analysis.inspect import WEIGHTS_ONLY
from ckptool.analysis.scan import MEMBER, Call, Scan, ScannedFile
from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, listed, printable
from ckptool.facts import age, size
from ckptool.formats import marks
from ckptool.options import option
from ckptool.render.json import document, picked_of
from ckptool.render.style import PLAIN, Style, columns


@provides("text", Scan)
def scan_text(
    found: Scan,
    *,
    quiet: Annotated[
        bool, option("-q --quiet", "With --latest-good print only its path; otherwise only set the exit code.")
    ] = False,
    style: Style = PLAIN,
) -> str:
    """A folder: one line per checkpoint. A file: what its pickles would call.

    quiet: of the newest good one only its path, or nothing.
    """
    if quiet:
        return f"{_shown_path(found.latest.path)}\n" if found.latest_only and found.latest else ""
    if found.latest_only:
        return _latest(found) + "\n"
    if not found.is_folder:
        return _file_text(found.files[0], style)
    lines = [_summary(found, style)]
    if found.files:
        lines += ["", *_table(found, style)]
    if not found.full and any(file.is_good for file in found.files):
        lines += [
            "",
            style.dim(
                "good: tables and structure are whole; the data was not compared with its checksums (--full does)"
            ),
        ]
    for what, is_custom in (("would run unknown code", False), ("needs classes of its own", True)):
        calls = [(file, [call for call in file.calls if call.is_custom is is_custom]) for file in found.files]
        named = [f"  {_relative(found, file)}: {_names(file, some)}" for file, some in calls if some]
        if named:
            lines += ["", f"{style.yellow(what)} when loaded with pickle: see  ckptool scan FILE", *named]
    return "\n".join(lines) + "\n"


def _shown_path(path: str) -> str:
    """A path that a script can use as it is; only one that would forge lines is escaped."""
    return path if path.isprintable() else printable(path)


def _latest(found: Scan) -> str:
    if found.latest is None:
        return f"{printable(found.path)}: no good checkpoint"
    facts = [
        f"{name} {value:,}"
        for name, value in (("step", found.latest.step), ("epoch", found.latest.epoch))
        if value is not None
    ]
    return f"{_shown_path(found.latest.path)} ({', '.join([*facts, size(found.latest.bytes)])})"


def _summary(found: Scan, style: Style) -> str:
    count = sum(file.state != MEMBER for file in found.files)
    head = f"{style.bold(printable(found.path))}: {counted(count, 'checkpoint')}"
    bad = sum(1 for file in found.files if not file.is_good and file.state != MEMBER)
    if bad:
        head += f", {style.red(f'{bad:,} not good')}"
    if found.others:
        head += f", {counted(found.others, 'other file')}"
    if found.latest is not None and len(found.files) > 1:
        head += f"\nlatest good: {_relative(found, found.latest)} (by {found.by})"
    return head


def _table(found: Scan, style: Style) -> list[str]:
    now = time.time()
    rows = [("file", "state", "step", "epoch", "size", "age", "what")]
    for file in found.files:
        whole = (
            [file.part.label]
            if file.part
            else [f"{file.members:,} of {counted(file.members, 'member')}"]
            if file.members
            else []
        )
        about = ", ".join((*whole, *file.holds, *file.notes)) if file.is_good else _reason(file)
        rows.append(
            (
                _relative(found, file),
                file.state,
                "" if file.step is None else f"{file.step:,}",
                "" if file.epoch is None else f"{file.epoch:,}",
                size(file.bytes),
                age(now - file.modified),
                printable(about),
            )
        )
    head, *lines = columns(rows, right=(2, 3, 4, 5), indent="")
    return [
        style.dim(head),
        *(
            line if file.is_good or file.state == MEMBER else style.red(line)
            for line, file in zip(lines, found.files, strict=True)
        ),
    ]


def _reason(file: ScannedFile) -> str:
    """The problem of a file, without its name, which stands at the beginning of the row."""
    own, said = printable(file.path), file.problem
    return said[len(own) :].lstrip(": ") if said.startswith(own) else said


def _relative(found: Scan, file: ScannedFile) -> str:
    return printable(os.path.relpath(file.path, found.path) if found.is_folder else file.path)


def _names(file: ScannedFile, calls: Sequence[Call]) -> str:
    """What it names; of a folder, with the file in which that is, where it is beside the checkpoint itself."""
    beside = os.path.isdir(file.path)
    first = (call.places[0].partition(": ")[0] if beside and ": " in call.places[0] else "" for call in calls)
    pairs = zip(calls, first, strict=True)
    return listed([printable(call.name) + (f" in {printable(name)}" if name else "") for call, name in pairs], 4)


def _file_text(file: ScannedFile, style: Style) -> str:
    kind = f"{file.container}, {printable(file.part.label)}" if file.part else file.container
    head = f"{style.bold(printable(file.path))} ({kind}): "
    if file.state == marks.RECOVERED_NOTE:
        head += f"{style.yellow(file.problem)}; "
    if not file.calls and "torchscript" in file.notes:
        what = style.yellow("it holds a program")
        return f"{head}{what}, which runs when the model is called; loading it only makes the model\n"
    if not file.calls:
        if WEIGHTS_ONLY in file.notes:
            only = "torch.load refuses it by default (weights_only=True): see  ckptool inspect FILE"
        else:
            only = "functions of torch and plain data only"
        return f"{head}{style.green('nothing in it would run')}: {only}\n"
    words = {"called": "calls", "made": "makes objects of", "named": "imports"}
    if all(call.is_custom for call in file.calls):
        head += style.yellow("it needs classes of its own") + ", which loading with pickle imports and creates"
    else:
        head += style.red("loading it with pickle would run unknown code")
    lines = [f"{head}; ckptool runs none of it"]
    rows = [(words[call.how], printable(call.name), _places(call)) for call in file.calls]
    return "\n".join([*lines, *columns(rows)]) + "\n"


def _places(call: Call) -> str:
    shown = listed([printable(place) or "the top" for place in call.places], 3)
    return f"at {shown}" + (f" ({counted(call.count, 'time')})" if call.count > len(call.places) else "")


# JSON ----------------------------------------------------------------------------------------------------------------


document(
    Scan,
    "scan",
    "path folder=is_folder findings latest_good=latest.path latest_by=by? other_files=others full files",
)
picked_of(
    ScannedFile,
    "path state problem? part members? container? step epoch bytes modified=modified_at holds notes calls",
)
