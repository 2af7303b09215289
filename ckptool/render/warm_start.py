"""Renders a warm start as text, JSON and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ckptool.analysis.fold import grouped
from ckptool.analysis.targets import BUFFER
from ckptool.analysis.warm_start import (
    AS_IT_IS,
    Absent,
    DtypeChange,
    LoadReport,
    Mismatch,
    OptimizerReport,
    described,
    percent,
)
from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, form, printable
from ckptool.facts import short, size
from ckptool.render.html import page_html
from ckptool.render.json import Json, fields_json, finite, picked_of
from ckptool.render.style import PLAIN, Style

_LINES = 16  # of one kind on a terminal; elsewhere, all

Row = tuple[str, int, list[str]]  # what, how many, and which, a line each


@provides("text", LoadReport)
def warm_start_text(report: LoadReport, *, style: Style = PLAIN) -> str:
    """The share of the target that is loaded, each kind of name, grouped, then the refusals or the output."""
    lines = [_head(report, style)]
    for what, count, names in _rows(report):
        lines.append(f"{style.bold(what)} {count:,}")
        shown = names if style.width is None else names[:_LINES]
        lines += [f"  {line}" for line in shown]
        lines += [style.dim(f"  … {counted(len(names) - len(shown), 'more line')}")] if len(shown) < len(names) else []
    lines += [f"{style.dim(note.code)}: {note.message}" for note in report.normalised]
    lines += _suggestions(report, style)
    lines += _optimizer(report)
    lines += _end(report, style)
    return "\n".join(lines) + "\n"


def _head(report: LoadReport, style: Style) -> str:
    share = f"{percent(report.share)} of {counted(report.total, 'value', shown=short)}"
    names = f"{len(report.loaded) + len(report.tied):,} of {counted(_names(report), 'name')}"
    colour = style.green if report.accepted else style.red
    place = f"#{printable(report.root)}" if report.root else ""
    sides = f"{style.bold(printable(report.source) + place)} into {style.bold(printable(report.target))}"
    return f"{sides}: {colour(share)}, {names}"


def _names(report: LoadReport) -> int:
    fits = {fact.target for fact in report.loaded} | {name for name, _ in report.tied}
    return len(
        fits | {fact.name for fact in report.missing} | {fact.target for fact in report.mismatched} | {*report.excluded}
    )


def _rows(report: LoadReport) -> Iterable[Row]:
    whole = [fact for fact in report.loaded if fact.how == AS_IT_IS]
    parameters = [fact.target for fact in whole if fact.kind != BUFFER]
    buffers = [fact.target for fact in whole if fact.kind == BUFFER]
    every = [
        ("loaded", len(parameters), _groups(parameters)),
        ("loaded buffers", len(buffers), _groups(buffers)),
        ("tied", len(report.tied), [f"{printable(name)} is {printable(other)}" for name, other in report.tied]),
        ("missing", *_absent([fact for fact in report.missing if fact.kind != BUFFER])),
        ("missing buffers", *_absent([fact for fact in report.missing if fact.kind == BUFFER])),
        ("unexpected", len(report.unexpected), _groups([fact.source for fact in report.unexpected])),
        ("do not fit", len(report.mismatched), _mismatches(report.mismatched)),
        ("other type", len(report.dtype_changes), _changes(report.dtype_changes)),
        ("left out", len(report.excluded), _groups(report.excluded)),
        ("from the target", len(report.taken), _groups(report.taken)),
    ]
    return [row for row in every if row[1]]


def _absent(facts: Sequence[Absent]) -> tuple[int, list[str]]:
    return len(facts), _groups([fact.name for fact in facts])


def _groups(names: Sequence[str]) -> list[str]:
    """The names grouped exactly, with how many each line stands for where that is more than one."""
    return [
        printable(group.text) + (f"  ({len(group.keys):,})" if len(group.keys) > 1 else "") for group in grouped(names)
    ]


def _mismatches(facts: Sequence[Mismatch]) -> list[str]:
    """A line for each group of names that differ in the same way, with their sources where these have other names."""
    alike: dict[str, dict[str, str]] = {}
    for fact in facts:
        done = f"{fact.done} by {printable(fact.how)}" if fact.how else fact.done
        difference = f"{described(fact.have)} against {described(fact.want)}, {done}"
        alike.setdefault(difference, {})[fact.target] = fact.source
    return [
        f"{printable(group.text)}: {difference}{_from([sources[key] for key in group.keys], group.keys)}"
        for difference, sources in alike.items()
        for group in grouped(list(sources))
    ]


def _from(sources: Sequence[str], targets: Sequence[str]) -> str:
    count = f"  ({len(targets):,})" if len(targets) > 1 else ""
    if list(sources) == list(targets):
        return count
    return f" (from {', '.join(printable(group.text) for group in grouped(sources))}){count}"


def _changes(facts: Sequence[DtypeChange]) -> list[str]:
    """A line for each pair of types and what that does to values."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for fact in facts:
        kinds.setdefault((fact.old.name, fact.new.name, _loss(fact)), []).append(fact.target)
    return [f"{old} → {new}, {loss}: {', '.join(_groups(names))}" for (old, new, loss), names in kinds.items()]


def _loss(fact: DtypeChange) -> str:
    if fact.exact is None:
        return "values may be rounded (too many to read)"
    if fact.exact:
        return "no value changes"
    return "values overflow" if fact.overflowed else "values are rounded"


def _suggestions(report: LoadReport, style: Style) -> list[str]:
    if not report.suggestions:
        return []
    lines = [style.bold("perhaps")]
    for suggestion in report.suggestions:
        lines += [f"  {style.cyan('--rename ' + _quoted(rule))}" for rule in suggestion.rules]
        agree = form(suggestion.agree, "agrees", "agree")
        count = f"{suggestion.agree:,} of {counted(suggestion.total, 'shape')} {agree}"
        texts = [count] if suggestion.rules else []
        texts += [printable(suggestion.why)] if suggestion.why else []
        texts += [] if suggestion.unambiguous or not suggestion.rules else ["ambiguous: check it before you use it"]
        lines.append(("    " if suggestion.rules else "  ") + "; ".join(texts))
    return lines


def _quoted(rule: str) -> str:
    return "'" + printable(rule).replace("'", "'\\''") + "'"


def _optimizer(report: LoadReport) -> list[str]:
    found = report.optimizer
    if found is None:
        return []
    place = printable(found.address) or "the optimizer"
    lines = [f"{place}: state of {counted(len(found.carried), 'parameter')}, known by {found.known_by}"]
    lines += [f"  starts without state: {line}" for line in _groups(found.fresh)]
    reasons: dict[str, list[str]] = {}
    for name, why in found.left_out:
        reasons.setdefault(why, []).append(name)
    return lines + [f"  left out: {line}, {why}" for why, names in reasons.items() for line in _groups(names)]


def _end(report: LoadReport, style: Style) -> list[str]:
    lines = [f"rules written to {printable(report.rules_file)}"] if report.rules_file else []
    for reason in report.refused:
        lines.append(f"{style.red('refused')}: {printable(reason.what)}")
        lines += [f"  {style.cyan(printable(reason.fix))}"] if reason.fix else []
    if report.output is not None:
        word = "wrote" if report.applied else "would write"
        saved = report.output
        lines.append(f"{word} {printable(saved.output)} ({saved.container}, {size(saved.file_bytes)})")
        lines += [f"  {printable(line)}" for line in saved.details]
    return lines


# JSON ----------------------------------------------------------------------------------------------------------------


@provides("json", LoadReport)
def warm_start_json(report: LoadReport) -> Json:
    """`ckptool.warm_start/1`: every name of both sides, and what becomes of it."""
    return {
        "schema": "ckptool.warm_start/1",
        **fields_json(report, "source root"),
        "target": fields_json(report, "name=target kind=target_kind"),
        **fields_json(report, "accepted refused share elements total loaded tied:target,through"),
        "missing": [fields_json(fact, "name kind dtype shape") for fact in report.missing],
        "unexpected": [fields_json(fact, "source name kind dtype shape") for fact in report.unexpected],
        **fields_json(report, "mismatched dtype_changes excluded from_target=taken normalised suggestions optimizer"),
        "output": None
        if report.output is None
        else fields_json(report.output, "file=output container bytes=file_bytes") | {"written": report.applied},
        **fields_json(report, "rules_file?"),
    }


def _mismatch_json(fact: Mismatch) -> Json:
    sides = {name: dict(zip(("dtype", "shape"), finite(getattr(fact, name)), strict=True)) for name in ("have", "want")}
    return {**fields_json(fact, "source target kind about done how"), **sides}


picked_of(Mismatch, _mismatch_json)
picked_of(DtypeChange, "source target from=old to=new exact changed overflowed")
picked_of(OptimizerReport, "address known_by carried fresh left_out:name,why")


# HTML ----------------------------------------------------------------------------------------------------------------


@provides("html", LoadReport)
def warm_start_html(report: LoadReport) -> str:
    """The report as a table for notebooks."""
    rows = [(escape(what), f"{count:,}", "<br>".join(map(escape, lines))) for what, count, lines in _rows(report)]
    rest = [*(f"{note.code}: {note.message}" for note in report.normalised), *_suggestions(report, PLAIN)]
    rest += [*_optimizer(report), *_end(report, PLAIN)]
    return page_html(_head(report, PLAIN), "", rows, "\n".join(rest))
