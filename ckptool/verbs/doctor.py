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

ROUNDS = 4  # of looking at what was made, as one does who runs the commands


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
    tree. For input in memory, returns the result.
    An error message is explained without a file, too. The model may be a module.
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
    if file is None or file == "":
        raise UsageError("doctor was given nothing to look at", "", f"For example: {command('doctor', 'model.pt')}")
    asked: Any = {"out": out, "dtype": dtype, **options}
    if not fix and (unused := [name for name, value in asked.items() if value and name != "progress"]):
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
    """A step that was done, for a finding of the code. summary, rows, facts: what its verb says that it did."""

    step: Fix
    code: str
    summary: str
    rows: Sequence[Row | str]
    facts: Mapping[str, Any]

    def lines(self, number: int) -> Iterator[str]:
        """What it did; asked for when all is written, since only then values were read."""
        said = self.step.command[1:-2]
        words = [word.removeprefix(FILE) if isinstance(word, Slot) else quoted(word) for word in said]
        code, summary = f" [{self.code}]" if self.code else "", f": {self.summary}" if self.summary else ""
        yield f"{number}. {' '.join(filter(None, words))}{code}{summary}"
        yield from (f"   {line}" for line in lines_of(self.rows))


def fixed(file: CheckpointLike, change: Change, target: Target | None, given: Mapping[str, Any]) -> Written | Any:
    """Does what doctor prints of a file, looks at the result as doctor does, and writes it if nothing is wrong with it.
    given: the model and the dtype, as they were given. Raises `Unsupported` with doctor's words where no command mends
    the file or the result does not fit the model, and what the verbs raise."""
    from ckptool.verbs._diagnosis import of_opened, of_unopened

    in_place, path = bool(change.asked["in_place"]), shown(file) if isinstance(file, (str, os.PathLike)) else ""
    original: Checkpoint | None = None
    current: Checkpoint | None = None
    place: str | None = None
    try:
        opened = open_file(file)
        path, found = opened.path, of_opened(opened, target)
        original, place = opened.checkpoint, opened.at
        current = replace(original, memory=None)  # of which verbs make a checkpoint, whatever was given
    except CkptoolError as problem:
        found = of_unopened(problem, path)
    seen, done = [found], list[Done]()

    def do(step: Fix, code: str, container: str) -> None:
        nonlocal current, place
        try:
            if step.command[1] == "recover":
                from ckptool.verbs.recover import all_of

                made = all_of(file)
            else:
                function, _, options = commands.called(step.command)
                # The model itself, not its name.
                options |= {name: value for name, value in given.items() if name in options}
                options |= {"out": None, **({"at": step.at} if step.at else {})}
                if step.command[1] == "convert" and named(container).writable:
                    options["container"] = container  # else writing it refuses what is in place
                made = function(current, **options)
        except CkptoolError as error:  # of a verb that was not told what the file is called
            error.fill({FILE: as_argument(path)} if path else {})
            raise error.within(path) from error.__cause__
        if made is None:
            raise _refusal(seen, path, in_place, "Part of it is lost. ")
        about = ("", (), dict[str, Any]())  # what `recover` did is its note
        if isinstance(made, Written):
            about, made = (made.summary, made.rows, made.facts), made.made[0]
        done.append(Done(step, code, *about))
        current = _as_it_reads(made, container)
        place = place if VERBS[step.command[1]].address is Use.CHANGES else None

    for _ in range(ROUNDS):
        before = len(done)
        for each, step in _steps(found, in_place):
            before_it = current.container if current is not None else ""
            do(step, each.code, before_it if in_place else for_output(step.out, before_it).name)
        if len(done) == before or current is None:
            break
        found = of_opened(Opened(current, place, path if in_place else done[-1].step.out), target)
        seen.append(found)
    if current is None:
        raise _refusal(seen, path, in_place)
    original = current if original is None else original  # else it could not be opened as it was
    usual = original.container if (change.path or "").endswith("/") else current.container
    container = named(current.container) if in_place else change.format(usual)
    last: list[Command] = []
    if container.tensors_only and not current.tensors_only:
        last.append(command("convert", FILE / (place or ""), ties="copy", out=OUT))
    elif place and not in_place:  # the part that was named
        last.append(command("convert", FILE / place, out=OUT))
    last += [command("cast", FILE, dtype=str(given["dtype"]), out=OUT)] if given["dtype"] is not None else []
    for line in last:
        try:
            do(Fix(line, place or "", line, ""), "", container.name)
        except UsageError as error:  # of a verb whose options these are not
            raise (_refusal(seen, path, in_place) if found.findings else error) from error
    if last or container.name != current.container:
        current = _as_it_reads(current, container.name)
        found = of_opened(Opened(current, place, change.path or path), target)
        seen.append(found)
    if any(each.blocks or (not in_place and each.stage in (Stage.PLACE, Stage.ENTRIES)) for each in found.findings):
        raise _refusal(seen, path, in_place)
    saved = replace(change.write(original, current, changes=bool(done)), file=path)
    notes = []  # what was decided for the user: which weights, which prefix goes, which values are the model's
    for one in (one for diagnosis in seen for one in diagnosis.findings):
        if one.code == "several-weights" and one.steps[:1] and one.steps[0].at:
            other = command("doctor", f"{path or FILE}#ADDRESS", fix=True, out=OUT)
            notes.append(Note(one.code, f"{one.what}. {one.steps[0].at} was taken; for another: {other}"))
        elif one.steps and one.advice and (one.stage is Stage.ENTRIES or one.code == "shape-mismatch"):
            notes.append(Note(one.code, f"{one.what}. {one.advice}"))
    notes += [Note(one.code, one.what) for one in found.findings if not one.commands]
    lines = (line for number, each in enumerate(done, 1) for line in each.lines(number))
    facts = [{"code": each.code, "command": str(each.step.line), "summary": each.summary} for each in done]
    behind = [name for each in done for name in each.facts.get("left_behind", ())]
    summary = counted(len(done), "step") if done else "nothing to fix"
    return saved.about(summary, Row("steps", facts, lines), notes=notes, left_behind=behind)


def _steps(found: Diagnosis, in_place: bool) -> Iterator[tuple[Finding, Fix]]:
    """The commands that doctor prints and that write. In place weights stay where they are, what follows is about them
    there, and anything else that needs another file ends it."""
    kept = ""
    for each in found.findings:
        for step in each.steps:
            verb, *words = step.command[1:]
            changes = VERBS[verb].address is Use.CHANGES and verb != "slim"
            if not in_place or changes or "--weights-only" in words or "--ties" in words:
                yield each, step._replace(at=step.at or kept)
            elif verb == "convert" and step.at:
                kept = step.at
            else:
                return


def _as_it_reads(made: Checkpoint, container: str) -> Checkpoint:
    """The checkpoint as it is when it is read again from a container."""
    tensors_only = made.tensors_only and named(container).tensors_only
    kept = made.metadata if container == made.container else (marks.PICKLE, marks.RECOVERED)
    metadata = {key: value for key, value in made.metadata.items() if key in kept}
    notes = tuple(note for note in made.notes if note.code == PART)  # it is no less of one
    return replace(made, container=container, metadata=metadata, notes=notes, tensors_only=tensors_only)


def _refusal(seen: Sequence[Diagnosis], path: str, in_place: bool, why: str = "") -> Unsupported:
    """What is wrong and not mended, in doctor's words, of the file itself where it says so of that."""
    wrong = sorted(seen[-1].findings, key=lambda each: (each.code != PART, not each.blocks))
    found = next((each for each in seen[0].findings if each.code == wrong[0].code), None)
    first, whose = found or replace(wrong[0], commands=()), path or "the checkpoint"
    whose = whose if found else f"{whose}, fixed"  # its file is not there
    what = first.what if path and f" {path}" in f" {first.what}" else f"{whose}: {first.what}"
    advice = first.advice
    for step in (step for each in seen for finding in each.findings for step in finding.steps):
        advice = advice.replace(step.out, as_argument(path) or FILE)  # a file that was never written
    way = "; then ".join(f"{each}" for each in first.commands) or advice
    way = f"Write a new file: {arg(out=OUT)}" if in_place and first.steps else way
    refused = Unsupported(what, f"{why}Nothing was written.", way)
    refused.code = first.code
    return refused
