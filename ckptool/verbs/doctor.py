"""`doctor`: what a file is, why it does not load, and the commands that fix it; or the fixed file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ckptool import commands
from ckptool.analysis.findings import Diagnosis, Finding, Fix, Stage, of_error_text
from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.tree import tensors
from ckptool.commands import FILE, OUT, VERBS, Command, Slot, Use, arg, argument, as_argument, command, option, verb
from ckptool.errors import CkptoolError, Unsupported, UsageError, counted, quoted
from ckptool.formats import CheckpointLike, Opened, for_output, marks, named, open_file, shown
from ckptool.formats.folder import CODE as PART
from ckptool.verbs._options import AGAINST, Out, find_target, standard_input
from ckptool.verbs._save import Change, Row, SaveInPlace, Unpack, Written, change_of, lines_of

if TYPE_CHECKING:
    from ckptool.analysis.targets import Target

ROUNDS = 4  # of diagnosing the result, as a user does after running the commands


def _message(_: str, text: str) -> str:
    return standard_input() if text == "-" else text


@verb(
    ("ckptool doctor model.pt", "why it does not load, and what to type"),
    ("ckptool doctor model.pt --against other.pt", "and why it does not fit this model"),
    ("ckptool doctor model.pt --fix -o fixed.pt", "only its weights, in a file that loads anywhere"),
    ("python train.py 2>&1 | ckptool doctor --error -", "what an error message means"),
    blank_between=True,
)
def doctor(
    file: Annotated[
        CheckpointLike | None,
        argument("FILE", "Checkpoints that do not load, or FILE#ADDRESS for a part of one.", each=True),
    ] = None,
    out: Out = None,
    *,
    fix: Annotated[bool, option("--fix", "Apply all fixes, and write weights that load; -n shows the steps.")] = False,
    dtype: Annotated[object, option("--dtype DTYPE", "With --fix: cast them, too; bf16 halves the size.")] = None,
    against: Annotated[CheckpointLike | None, AGAINST] = None,
    error: Annotated[
        str | None,
        option("--error TEXT|-", "Explain this error message; -: read it from standard input.", parse=_message),
    ] = None,
    **options: Unpack[SaveInPlace],
) -> Diagnosis | Written | Any:
    """Diagnoses a checkpoint: what it is, why stock `torch.load` or a model refuses it, and the commands that fix it.

    `fix` does what these commands do, and writes the result once: the weights at the top of a file that
    `torch.load(weights_only=True)` loads, and with `against` only if the model takes them. In place the file keeps its
    tree. An error message is explained without a file, too. The model may be a module.
    Raises `FileProblem` where the file cannot be read at all; what is wrong with its contents is a finding, or, with
    `fix` and no command that fixes it, `Unsupported`.
    """
    from ckptool.verbs._diagnosis import of_opened, of_unopened  # what only the work needs, and not the help

    path = shown(file) if isinstance(file, (str, os.PathLike)) else ""
    if error is not None:
        if fix:
            what = f"doctor was given both {arg('error')} and {arg('fix')}"
            raise UsageError(what, "A message has no values to write.", "Give only the file.")
        devices: list[str] | None = None  # of the file's tensors, but for the CPU, where it can be opened
        with suppress(CkptoolError):
            places = {tensor.location for _, tensor in tensors(open_file(file).taken.tree)} if file else None
            devices = None if places is None else sorted(places - {"cpu"})
        return of_error_text(error, path, devices)
    if file is None or (isinstance(file, str) and not file):
        raise UsageError("doctor was given nothing to look at", "", f"For example: {command('doctor', 'model.pt')}")
    fix_options: Any = {"out": out, "dtype": dtype, **options}
    if not fix and (unused := [name for name, value in fix_options.items() if value and name != "progress"]):
        what = f"doctor was given {arg(unused[0])} without {arg('fix')}"
        raise UsageError(what, "It only looks.", f"To write: {command('doctor', FILE, fix=True, out=OUT)}")
    change = change_of("doctor", out, options, file, in_place=True) if fix else None
    target = find_target(against).as_it_loads if against is not None else None
    if change is not None:
        return fixed(file, change, target, {"against": against, "dtype": dtype})
    try:
        return of_opened(open_file(file), target)
    except CkptoolError as problem:
        return of_unopened(problem, path)


class Done(NamedTuple):
    """A step that was done, for a finding with this code. summary, rows, facts: its verb's report of it."""

    step: Fix
    code: str
    summary: str
    rows: Sequence[Row | str]
    facts: Mapping[str, Any]

    def lines(self, number: int) -> Iterator[str]:
        """What it did; called when all is written, since only then values have been read."""
        arguments = self.step.command[1:-2]
        words = [word.removeprefix(FILE) if isinstance(word, Slot) else quoted(word) for word in arguments]
        code, summary = f" [{self.code}]" if self.code else "", f": {self.summary}" if self.summary else ""
        yield f"{number}. {' '.join(filter(None, words))}{code}{summary}"
        yield from (f"   {line}" for line in lines_of(self.rows))


def fixed(file: CheckpointLike, change: Change, target: Target | None, settings: Mapping[str, Any]) -> Written | Any:
    """Runs the commands that doctor prints for a file, diagnoses the result, and writes it if nothing is wrong with it.
    settings: the model and the dtype, as options. Raises `Unsupported` with doctor's words where no command mends
    the file or the result does not fit the model, and what the verbs raise."""
    from ckptool.verbs._diagnosis import of_opened, of_unopened

    in_place, path = bool(change.options["in_place"]), shown(file) if isinstance(file, (str, os.PathLike)) else ""
    original: Checkpoint | None = None
    current: Checkpoint | None = None
    place: str | None = None
    try:
        opened = open_file(file)
        path, diagnosis = opened.path, of_opened(opened, target)
        original, place = opened.checkpoint, opened.at
        current = replace(original, memory=None)  # so that the verbs return a checkpoint, whatever was given
    except CkptoolError as problem:
        diagnosis = of_unopened(problem, path)
    diagnoses, applied, notes = [diagnosis], list[Done](), list[Note]()

    def do(step: Fix, code: str, container: str) -> None:
        nonlocal current, place
        try:
            if step.command[1] == "recover":
                from ckptool.verbs.recover import all_of

                result = all_of(file)
            else:
                function, _, options = commands.called(step.command)
                # The model itself, not its name.
                options |= {name: value for name, value in settings.items() if name in options}
                options |= {"out": None, **({"at": step.at} if step.at else {})}
                if step.command[1] == "convert" and named(container).writable:
                    options["container"] = container  # else writing it refuses what is in place
                result = function(current, **options)
        except CkptoolError as error:  # of a verb that does not know the file's name
            error.fill({FILE: as_argument(path)} if path else {})
            raise error.within(path) from error.__cause__
        if result is None:
            raise _refusal(diagnoses, path, in_place, "Part of it is lost. ")
        outcome = ("", (), dict[str, Any]())  # what `recover` did is its note
        if isinstance(result, Written):
            notes.extend(note for note in result.notes if in_place and note.code == "old-names")
            outcome, result = (result.summary, result.rows, result.facts), result.made[0]
        applied.append(Done(step, code, *outcome))
        current = _as_it_reads(result, container)
        place = place if VERBS[step.command[1]].address is Use.CHANGES else None

    for _ in range(ROUNDS):
        count = len(applied)
        for finding, step in _steps(diagnosis, in_place):
            source_container = current.container if current is not None else ""
            do(step, finding.code, source_container if in_place else for_output(step.out, source_container).name)
        if len(applied) == count or current is None:
            break
        diagnosis = of_opened(Opened(current, place, path if in_place else applied[-1].step.out), target)
        diagnoses.append(diagnosis)
    if current is None:
        raise _refusal(diagnoses, path, in_place)
    original = current if original is None else original  # else the file could not be opened before
    default = original.container if (change.path or "").endswith("/") else current.container
    container = named(current.container) if in_place else change.format(default)
    last: list[Command] = []
    if container.tensors_only and not current.tensors_only:
        last.append(command("convert", FILE / (place or ""), ties="copy", out=OUT))
    elif place and not in_place:  # the part that was named
        last.append(command("convert", FILE / place, out=OUT))
    last += [command("cast", FILE, dtype=str(settings["dtype"]), out=OUT)] if settings["dtype"] is not None else []
    for line in last:
        try:
            do(Fix(line, place or "", line, ""), "", container.name)
        except UsageError as error:  # of a verb that has no such option
            raise (_refusal(diagnoses, path, in_place) if diagnosis.findings else error) from error
    if last or container.name != current.container:
        current = _as_it_reads(current, container.name)
        diagnosis = of_opened(Opened(current, place, change.path or path), target)
        diagnoses.append(diagnosis)
    if any(item.blocks or (not in_place and item.stage in (Stage.PLACE, Stage.ENTRIES)) for item in diagnosis.findings):
        raise _refusal(diagnoses, path, in_place)
    saved = replace(change.write(original, current, changes=bool(applied)), file=path)
    # What was decided for the user: which weights, which prefix goes, which values are the model's.
    for finding in (finding for earlier in diagnoses for finding in earlier.findings):
        if finding.code == "several-weights" and finding.steps[:1] and finding.steps[0].at:
            model = target.name if target else ""
            choose = command("doctor", f"{path or FILE}#ADDRESS", fix=True, against=model, out=OUT)
            notes.append(Note(finding.code, f"{finding.what}. {finding.steps[0].at} was taken; for another: {choose}"))
        elif finding.steps and finding.advice and (finding.stage is Stage.ENTRIES or finding.code == "shape-mismatch"):
            notes.append(Note(finding.code, f"{finding.what}. {finding.advice}"))
    notes += [Note(finding.code, finding.what) for finding in diagnosis.findings if not finding.commands]
    lines = (line for number, item in enumerate(applied, 1) for line in item.lines(number))
    facts = [{"code": item.code, "command": str(item.step.line), "summary": item.summary} for item in applied]
    behind = [name for item in applied for name in item.facts.get("left_behind", ())]
    summary = counted(len(applied), "step") if applied else "nothing to fix"
    return saved.about(summary, Row("steps", facts, lines), notes=notes, left_behind=behind)


def _steps(diagnosis: Diagnosis, in_place: bool) -> Iterator[tuple[Finding, Fix]]:
    """The commands of a diagnosis that write. In place, weights stay where they are and later steps act on them there;
    any other step that needs another file ends it."""
    kept_at = ""
    for finding in diagnosis.findings:
        for step in finding.steps:
            verb, *words = step.command[1:]
            changes = VERBS[verb].address is Use.CHANGES and verb != "slim"
            if not in_place or changes or "--weights-only" in words or "--ties" in words:
                yield finding, step._replace(at=step.at or kept_at)
            elif verb == "convert" and step.at:
                kept_at = step.at
            else:
                return


def _as_it_reads(checkpoint: Checkpoint, container: str) -> Checkpoint:
    """The checkpoint as it would be read back from a container."""
    tensors_only = checkpoint.tensors_only and named(container).tensors_only
    keys = checkpoint.metadata if container == checkpoint.container else (marks.PICKLE, marks.RECOVERED)
    metadata = {key: value for key, value in checkpoint.metadata.items() if key in keys}
    notes = tuple(note for note in checkpoint.notes if note.code == PART)  # it stays a part
    return replace(checkpoint, container=container, metadata=metadata, notes=notes, tensors_only=tensors_only)


def _refusal(diagnoses: Sequence[Diagnosis], path: str, in_place: bool, why: str = "") -> Unsupported:
    """The error for what is wrong and not mended, in doctor's words: those on the file itself where it has any."""
    unmended = sorted(diagnoses[-1].findings, key=lambda finding: (finding.code != PART, not finding.blocks))
    original = next((finding for finding in diagnoses[0].findings if finding.code == unmended[0].code), None)
    first, whose = original or replace(unmended[0], commands=()), path or "the checkpoint"
    whose = whose if original else f"{whose}, fixed"  # the fixed file does not exist
    what = first.what if path and f" {path}" in f" {first.what}" else f"{whose}: {first.what}"
    advice = first.advice
    for step in (step for diagnosis in diagnoses for finding in diagnosis.findings for step in finding.steps):
        advice = advice.replace(step.out, as_argument(path) or FILE)  # a file that was never written
    fix = "; then ".join(f"{line}" for line in first.commands) or advice
    fix = f"Write a new file: {arg(out=OUT)}" if in_place and first.steps else fix
    error = Unsupported(what, f"{why}Nothing was written.", fix)
    error.code = first.code
    return error
