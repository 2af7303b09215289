"""Renders the reports of training as text and JSON: runs, rehearsals, proofs, and checkpoints that were deleted."""

from __future__ import annotations

from ckptool.analysis.train import Evaluated, Outcome, Page, Proof, Pruned, Rehearsal, RunCheckpoint, RunReport
from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, printable, quoted
from ckptool.facts import age, short, size
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style, columns


@provides("text", Outcome)
def train_text(found: Outcome, *, style: Style = PLAIN) -> str:
    """One line of how a run ended, and what to type next; where the profiler's table is."""
    return _end(found, style) + (f"  profile: {printable(found.profile)}\n" if found.profile else "")


def _end(found: Outcome, style: Style) -> str:
    path = printable(found.path)
    if found.status == "done":
        return f"{style.green('done')}: {counted(found.step, 'step')} → {path}\n"
    if found.why:
        on = f"ckptool resume {quoted(found.path)} --set stop.patience=null"
        head = f"{style.green('stopped early')}: {counted(found.step, 'step')} → {path}"
        return f"{head}\n  {printable(found.why)}; go on all the same: {style.cyan(on)}\n"
    where = f"after {counted(found.step, 'step')}, saved → {path}" if found.step else f"before the first step: {path}"
    return f"{style.yellow('stopped')} {where}\n  {style.cyan(f'ckptool resume {quoted(found.path)}')}\n"


@provides("text", Rehearsal)
def dry_run_text(found: Rehearsal, *, style: Style = PLAIN) -> str:
    """The outcome of a rehearsal."""
    models = ", ".join(
        f"{printable(name)} {counted(count, 'parameter', shown=short)}" for name, count in found.parameters.items()
    )
    kept = size(found.activations)
    if found.without:
        saved = f"{1 - found.activations / found.without:.0%} saved"
        kept += f", {size(found.without)} without activation checkpointing ({saved})"
    lines = [
        f"{style.green('it runs')}: one step, saved, loaded again, the same to the last bit; nothing was left behind",
        f"  models        {models}, on {found.device}",
        (
            f"  data          {counted(found.train_samples, 'sample')} to train on, {found.val_samples:,} held out; "
            f"{counted(found.steps, 'step')}"
        ),
        f"  step          {found.step_seconds:.3f} s (the first, with all set-up), loss {found.loss:.5g}",
        f"  checkpoint    {size(found.checkpoint_bytes)} in {found.save_seconds:.3f} s",
        f"  activations   {kept}",
    ]
    return "\n".join(lines) + "\n"


@provides("text", Proof)
def prove_text(found: Proof, *, style: Style = PLAIN) -> str:
    """The reference, the kills, what was resumed from, the result, and what each part of the state is needed for."""
    same = "identical" if found.result == found.reference else "another"
    kills = ", ".join(f"{kill.at} ({kill.signal})" for kill in found.kills)
    resumed = ", ".join("the beginning" if kill.resumed is None else str(kill.resumed) for kill in found.kills)
    rows = [("processes", f"{found.processes}, which train together")] if found.processes > 1 else []
    rows += [
        ("reference", f"{counted(found.steps, 'step')}  sha256 {found.reference[:8]}…"),
        ("killed at", kills or "it ended before it could be killed"),
        ("resumed from", resumed or "nothing"),
        ("result", f"{counted(found.steps, 'step')}  sha256 {found.result[:8]}…   {same} file"),
    ]
    if found.events is not None:
        rows.append(("every event", f"{counted(found.events, 'kill')}, each ended with the same bytes"))
    for part, differs in found.without.items():
        if differs is not None:
            words = "differs (so it is needed)" if differs else "ends the same: it is saved, but has no effect"
            rows.append((f"without {part}", words))
    lines = [f"{name:<22}{value}" for name, value in rows]
    if found.lost:
        lines.append(
            "a run resumed from a step before its newest checkpoint: it deletes old ones before new ones are safe"
        )
    if found.proved:
        lines.append(style.green("proved: a run killed anywhere ends with the same bytes."))
    else:
        lines.append(style.red("disproved") + (f": {printable(found.differs)}" if found.differs else ""))
        lines.append(f"  its runs are kept in {printable(found.kept)}")
    return "\n".join(lines) + "\n"


@provides("text", Pruned)
def prune_text(found: Pruned, *, style: Style = PLAIN) -> str:
    """The deleted checkpoints, then those that stay, with the reasons."""
    freed = sum(nbytes for _, nbytes in found.deleted)
    verb = "would delete" if found.dry_run else "deleted"
    lines = [f"{style.bold(printable(found.run))}: {verb} {counted(len(found.deleted), 'checkpoint')}, {size(freed)}"]
    rows = [(f"step {step:,}", "deleted" if not found.dry_run else "would go") for step, _ in found.deleted]
    rows += [(f"step {step:,}", f"kept: {', '.join(why)}") for step, why in found.kept.items()]
    return "\n".join([*lines, *columns(sorted(rows, key=lambda row: int(row[0][5:].replace(",", ""))))]) + "\n"


@provides("text", Evaluated)
def eval_text(found: Evaluated, *, style: Style = PLAIN) -> str:
    """The checkpoint, then a line for each metric."""
    which = f" ({printable(found.chosen)})" if found.chosen else ""
    data = "test data" if found.on == "test" else "validation data"
    head = f"{style.bold(printable(found.run))}: step {found.step:,}{which} on {data}"
    rows = [(printable(name), f"{value:.5g}") for name, value in found.metrics.items()]
    return "\n".join([head + (", the average of its weights" if found.ema else ""), *columns(rows)]) + "\n"


@provides("text", RunReport)
def inspect_run_text(found: RunReport, *, quiet: bool = False, style: Style = PLAIN) -> str:
    """The state of a run, where it resumes, and one line for each checkpoint. quiet: only the paths of these."""
    if quiet:
        return "".join(f"{printable(one.path)}\n" for one in found.checkpoints)
    total = size(sum(one.bytes for one in found.checkpoints))
    head = f"{style.bold(printable(found.path))}: a run, {counted(len(found.checkpoints), 'checkpoint')}, {total}"
    if found.damaged:
        head += f", {style.red(f'{found.damaged:,} damaged')}"
    if found.seconds:
        head += f", {age(found.seconds)} of training"
    lines = [head, f"  {_state(found)}"]
    if found.checkpoints:
        lines += ["", *_table(found, style)]
    return "\n".join(lines) + "\n"


def _state(found: RunReport) -> str:
    words = {
        "stop": "stopped",
        "early-stop": "stopped early",
        "start": "started",
        "save": "saved",
        "resume": "resumed",
        "prune": "pruned",
        "skip-damaged": "skipped",
    }
    event = printable(words.get(found.event, found.event) or "nothing has happened yet")
    when = f" at step {found.step:,}" if found.step is not None else ""
    if not found.checkpoints:
        return f"{event}{when}"
    if found.event == "done" and found.resumes == found.step and found.step:
        length = f"train.epochs={2 * found.epochs}" if found.epochs else f"train.steps={2 * found.step}"
        return f"{event}{when}; make it longer: ckptool resume {quoted(found.path)} --set {length}"
    if found.event == "early-stop":
        return f"{event}{when}; go on all the same: ckptool resume {quoted(found.path)} --set stop.patience=null"
    goes = "none of them is whole" if found.resumes is None else f"resumes from step {found.resumes:,}"
    return f"{event}{when}; {goes}: ckptool resume {quoted(found.path)}"


def _table(found: RunReport, style: Style) -> list[str]:
    metric = printable(found.metric)
    rows: list[tuple[str, ...]] = [("step", "epoch", "loss", metric, "size", "kept")]
    rows += [_row(one, found.metric) for one in found.checkpoints]
    head, *lines = columns(rows, right=(0, 1, 2, 3, 4))
    shown = zip(map(style.fit, lines), found.checkpoints, strict=True)
    return [style.dim(head), *(style.red(line) if one.problem else line for line, one in shown)]


def _row(one: RunCheckpoint, metric: str) -> tuple[str, ...]:
    value = one.metrics.get(metric)
    return (
        f"{one.step:,}",
        "" if one.epoch is None else f"{one.epoch:,}",
        "" if one.loss is None else f"{one.loss:.5g}",
        "" if value is None else f"{value:.5g}",
        size(one.bytes),
        printable(one.problem) if one.problem else ", ".join(one.kept) or "not: prune would delete it",
    )


@provides("text", Page)
def page_text(found: Page, *, style: Style = PLAIN) -> str:
    """The text as it is."""
    return found.text


document(Outcome, "train")
document(Rehearsal, "dry_run")
document(Proof, "prove", "proved *")
document(Pruned, "prune", "run dry_run deleted:step,bytes kept:step,why")
document(Evaluated, "eval")
document(RunReport, "run")
document(Page, "text")
