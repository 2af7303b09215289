"""`doctor --fix`: the commands that doctor prints, done one after the other in memory, and written once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptool.analysis.findings import Diagnosis, Finding, Stage
from ckptool.analysis.fixes import Fix
from ckptool.analysis.targets import Target
from ckptool.checkpoint import Checkpoint, Note
from ckptool.commands import FILE, OUT, VERBS, Command, Slot, Use, arg, as_argument, called, command
from ckptool.errors import CkptoolError, Unsupported, UsageError, counted, quoted
from ckptool.formats import CheckpointLike, Opened, for_output, marks, named, open_file, shown
from ckptool.formats.folder import CODE as PART
from ckptool.verbs._diagnosis import of_opened, of_unopened
from ckptool.verbs._save import Change, Row, Written, lines_of

ROUNDS = 4  # of looking at what was made, as one does who runs the commands


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
    the file or the result does not fit the model, and what the verbs raise.
    """
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
            made = _applied(step, current, file, given, container)
        except CkptoolError as error:  # of a verb that was not told what the file is called
            error.fill({FILE: as_argument(path)} if path else {})
            raise error.within(path) from error.__cause__
        if made is None:
            raise _refusal(seen, path, in_place, "A part of it is lost. ")
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
    notes = [*_choices(seen, path), *(Note(each.code, each.what) for each in found.findings if not each.commands)]
    lines = (line for number, each in enumerate(done, 1) for line in each.lines(number))
    facts = [{"code": each.code, "command": str(each.step.line), "summary": each.summary} for each in done]
    behind = [name for each in done for name in each.facts.get("left_behind", ())]
    summary = counted(len(done), "step") if done else "nothing to fix"
    return saved.about(summary, Row("steps", facts, lines), notes=notes, left_behind=behind)


def _steps(found: Diagnosis, in_place: bool) -> Iterator[tuple[Finding, Fix]]:
    """The commands that doctor prints and that write, as far as they can be done in the file itself.

    In place weights stay where they are, and what follows is about them there; anything else that needs another file
    ends it.
    """
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


def _applied(
    step: Fix, checkpoint: Checkpoint | None, file: Any, given: Mapping[str, Any], container: str
) -> Checkpoint | Written | None:
    """What a command makes of a checkpoint; of a damaged file what is in it, and None where that is not all."""
    if step.command[1] == "recover":
        from ckptool.verbs.recover import all_of

        return all_of(file)
    function, options = called(step.command)
    options |= {name: value for name, value in given.items() if name in options}  # the model itself, not its name
    options |= {"out": None, **({"at": step.at} if step.at else {})}
    if step.command[1] == "convert" and named(container).writable:  # else writing it refuses what is in place
        options["container"] = container
    written: Written = function(checkpoint, **options)
    return written


def _as_it_reads(made: Checkpoint, container: str) -> Checkpoint:
    """The checkpoint as it is when it is read again from a container."""
    tensors_only = made.tensors_only and named(container).tensors_only
    kept = made.metadata if container == made.container else (marks.PICKLE, marks.RECOVERED)
    metadata = {key: value for key, value in made.metadata.items() if key in kept}
    notes = tuple(note for note in made.notes if note.code == PART)  # it is no less of one
    return replace(made, container=container, metadata=metadata, notes=notes, tensors_only=tensors_only)


def _choices(seen: Sequence[Diagnosis], path: str) -> Iterator[Note]:
    """What was decided for the user: which weights are taken, which prefix goes, which values are the model's."""
    for each in (each for found in seen for each in found.findings):
        if each.code == "several-weights" and each.steps[:1] and each.steps[0].at:
            other = command("doctor", f"{path or FILE}#ADDRESS", fix=True, out=OUT)
            yield Note(each.code, f"{each.what}. {each.steps[0].at} was taken; for another: {other}")
        elif each.steps and each.advice and (each.stage is Stage.ENTRIES or each.code == "shape-mismatch"):
            yield Note(each.code, f"{each.what}. {each.advice}")


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
    way = "; then ".join(first.fixes) or advice
    way = f"Write a new file: {arg(out=OUT)}" if in_place and first.steps else way
    refused = Unsupported(what, f"{why}Nothing was written.", way)
    refused.code = first.code
    return refused
