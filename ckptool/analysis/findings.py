"""What `doctor` says: why a file does not load, in the order in which to run the commands; what an error message means.

Their sentences and commands are rows of `findings.yaml` and `error_texts.yaml`. File names are filled in by a chain:
each command works on what the one before it wrote.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from enum import IntEnum
from functools import cache
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ckptool.checkpoint.paths import absolute, is_url, literal, parted
from ckptool.commands import FILE, VERBS, Command, Slot, Use, as_argument, command
from ckptool.errors import listed, printable
from ckptool.facts import LIVE, Note, Report, Told, bold, cyan, dataclass, dim, field, green, red, replace, yellow
from ckptool.formats import NOT_WRITTEN, SUFFIXES
from ckptool.formats.folder import ADAPTER, CONFIG, is_in

# File names in commands -----------------------------------------------------------------------------------------------


class Fix(NamedTuple):
    """A command that writes, and works on what the one before it wrote.
    command: its slots not filled in.  at: the address of the part that it is about.  line: it, as a shell runs it.
    out: the name that its output has there."""

    command: Command
    at: str
    line: Command
    out: str


class Chain:
    """Fills in `FILE` and `OUT` so that each command works on the output of the one before, under a free name.
    steps: the commands that were filled in and write, for who does them without a shell."""

    def __init__(self, file: str, at: str = "", container: str = "") -> None:
        """at: the part of the file that the commands are about, for as long as what they write is the whole of it.
        container: of the file, whose suffix may promise another that cannot hold all of it."""
        self.original = self.current = as_argument(file)
        self.container = container
        self.at = at
        self.steps: list[Fix] = []
        self._taken: set[str] = set()
        self._suffix: str | None = None  # of the last output, where that differs from the input's

    def fill(self, command: Command) -> Command:
        """The command for the file as the commands before left it; for a checkpoint in memory, the command itself."""
        words, output, place = list[str](), "", ""
        for word in command:
            if isinstance(word, Slot) and word.startswith("OUT"):
                suffix = self._suffix_of(words[2]) if command[1] == "recover" else ""  # of a file, perhaps in a folder
                word = output = self._free_name(word[3:] or suffix or None)
            elif isinstance(word, Slot) and word.startswith("FILE"):
                place = "/".join(part for part in (self.at, word.partition("#")[2]) if part)
                word = f"{self.current}#{place}" if place else self.current
            words.append(word)
        line = Command(words) if self.original else command
        if output:
            self.steps.append(Fix(command, place, line, output))
            self.current = output
            self.at = self.at if command[1] in VERBS and VERBS[command[1]].address is Use.CHANGES else ""
        return line

    def aside(self, command: Command) -> Command:
        """The command filled in for a reader who chooses it; those that follow do not build on it."""
        branch = copy(self)
        branch.steps = []
        return branch.fill(command)

    def _free_name(self, suffix: str | None) -> str:
        self._suffix = suffix or self._suffix
        path = self.original or "checkpoint"
        if is_url(path):  # a name in the working directory; for `runs/` and `.` one beside the folder
            path = os.path.basename(path.rstrip("/"))
        elif os.path.basename(path) in ("", ".", ".."):
            path = os.path.normpath(path)
            if os.path.basename(path) in (".", ".."):
                path = os.path.normpath(os.path.join(path, "..", os.path.basename(absolute(path))))
        stem, ending = parted(path)[0], self._suffix_of(path)
        ending = "" if ending.endswith(".index.json") else ending  # the output for an index is a folder
        ending = ending if self._suffix is None else self._suffix
        stem += ".fixed" if ending not in ("", "/") else "-fixed"  # which is no suffix
        names = (f"{stem}{number if number > 1 else ''}{ending}" for number in count(1))
        name = next(name for name in names if name not in self._taken and not os.path.lexists(name))
        self._taken.add(name)
        return name

    def _suffix_of(self, path: str) -> str:
        """The suffix for an output in the same container: the file's own, where that container is written under it."""
        suffix = parted(path)[1]
        promised = SUFFIXES.get(suffix)
        is_misnamed = promised is not None and promised.tensors_only and self.container not in ("", promised.name)
        is_safe = self.container == "safetensors"  # of which a folder is written with the configuration, too
        is_model = is_safe and any(is_in(path, name) for name in (CONFIG, ADAPTER))
        return ".pt" if suffix in NOT_WRITTEN or is_misnamed else suffix or "/" * is_model


def runnable(notes: Iterable[Note], path: str, container: str) -> tuple[Note, ...]:
    """The notes with commands that can be run one after the other: on this file, to free names beside it.
    A repeated command is left out the second time, as is a fix that is no command."""
    notes = list(notes)
    chain, seen, filled = Chain(path, container=container), set[tuple[str, ...]](), list[Note]()
    # Verbs that write refuse such a file; doctor says what to do first.
    refused = any(note.code == "unsafe-global" for note in notes)
    for note in notes:
        fix = note.fix
        is_runnable = isinstance(fix, Command) and not (refused and fix.writes) and fix not in seen
        filled.append(replace(note, fix=chain.fill(fix) if isinstance(fix, Command) and is_runnable else ()))
        seen.add(fix)
    return tuple(filled)


FIXED_ABOVE = "The commands above fix this as well."

# Findings -------------------------------------------------------------------------------------------------------------


# The turn of a finding's commands: those of an earlier stage write the file that the later ones work on.
Stage = IntEnum("Stage", "CONTAINER VALUES WRAPPERS DEVICES PLACE ENTRIES MODEL BETTER")


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why a checkpoint does not load, or loads as something else than one expects.
    says: the message that people see.  blocks: stock `torch.load` (or the model of `--against`) refuses it here or on
    another machine.  certain: False for the likely meaning of a message that has others.  fixes: command lines that can
    be run as they stand, in order; each is ckptool's unless its first word is another program.
    advised: a command at the end of the advice.  inert: its commands leave out what loading would call.
    steps: those of its commands that write, for who does them without a shell."""

    code: str
    what: str
    says: str = ""
    blocks: bool = True
    commands: Annotated[tuple[Command, ...], LIVE] = field(default=(), repr=False)
    advice: str = ""
    advised: Annotated[tuple[Command, ...], LIVE] = field(default=(), repr=False)
    stage: Annotated[Stage, LIVE] = field(default=Stage.BETTER, repr=False)
    inert: Annotated[bool, LIVE] = field(default=False, repr=False)
    certain: bool = True
    steps: Annotated[tuple[Fix, ...], LIVE] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("what", "says", "advice"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    @property
    def fixes(self) -> tuple[str, ...]:
        return tuple(map(str, self.commands))

    def filled(self, chain: Chain) -> Finding:
        """The finding with commands for the file as the commands before left it."""
        before = len(chain.steps)
        commands = tuple(map(chain.fill, self.commands))
        advice = self.advice + "".join(str(chain.aside(command)) for command in self.advised)
        return replace(self, commands=commands, advice=advice, advised=(), steps=tuple(chain.steps[before:]))


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Report):
    """A file's kind, and its problems. `file` is empty where only an error text was given.
    unread: the command that reads the data of the tensors, which was not looked at; empty where nothing was opened.
    against: the model that it was compared with.  at_once: one command for all of them."""

    schema = "doctor/2"
    verdict = "loads"

    file: str
    is_a: str
    findings: tuple[Finding, ...]
    unread: str = ""
    against: str = ""
    at_once: Annotated[str, LIVE] = ""

    @property
    def loads(self) -> bool:
        """True if nothing was found that would keep it from loading."""
        return not any(finding.blocks for finding in self.findings)

    def told(self) -> Told:
        yield (bold(self.file or "in memory"), f": {self.is_a}") if self.is_a else None
        if not self.findings:
            yield green("nothing found that would keep it from loading")
            yield "To check these names and shapes against a model: --against MODEL" if not self.against else None
        number = count(1)
        for finding in self.findings:
            yield ""
            mark = yellow("likely") if not finding.certain else red("problem") if finding.blocks else yellow("note")
            yield mark, f" [{finding.code}] {finding.what}"
            yield ("  seen as: ", dim(finding.says)) if finding.says else None
            for fix in finding.fixes:
                program = fix.partition(" ")[0]
                remark = f"   (another program: {program})" if program != "ckptool" else ""
                yield f"  {next(number)}. ", cyan(fix), remark
            yield f"  {finding.advice}" if finding.advice else None
        if self.at_once:
            yield ""
            yield "All in one pass: ", cyan(self.at_once)
        if self.unread:
            yield ""
            yield "Only names, shapes and tables were read, not the tensors' data: ", cyan(self.unread)


_SLOTS = {word: Slot(word) for word in "FILE FOLDER MODEL OUT OUT.pt OUT.safetensors PREFIX".split()}


@cache
def table(name: str) -> Any:
    """The table in `NAME.yaml`, which lies beside this module."""
    import yaml

    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def commands_of(lines: Iterable[str], facts: Mapping[str, str]) -> tuple[Command, ...]:
    """The commands of a row: `ckptool convert FILE#{place} -o OUT`, each word filled in by itself."""
    return tuple(Command(_filled_word(word, facts) for word in shlex.split(line)) for line in lines)


def _filled_word(word: str, facts: Mapping[str, str]) -> str:
    """A word of a command, its facts filled in; in a pattern they stand for themselves."""
    if word in _SLOTS:
        return _SLOTS[word]
    filled = word.format_map({name: literal(fact) for name, fact in facts.items()} if word.endswith("*") else facts)
    return FILE / filled[5:] if word.startswith("FILE#") else filled


def finding(name: str, **facts: str) -> Finding:
    """The finding of a row, its facts filled in. name: its code, and which of several it is."""
    row = table("findings")["findings"][name]
    what, says, advice = (row.get(key, "").format_map(facts) for key in ("what", "says", "advice"))
    fixes, advised = (commands_of(row.get(key, ()), facts) for key in ("fixes", "advised"))
    stage = Stage[row.get("stage", "BETTER")]
    code, blocks = name.partition(",")[0], not row.get("notes")
    return Finding(code, what, says, blocks, fixes, advice, advised, stage, bool(row.get("inert")))


def in_order(findings: Iterable[Finding], compact: Command | None, chain: Chain) -> Iterator[Finding]:
    """The findings in the order of their fixes, no command twice, their commands filled in by the chain.
    compact: the command that only writes the file anew; it is left out where another writes a new file anyway."""
    codes: set[str] = set()
    seen: set[tuple[Command, ...]] = set()
    for finding in sorted(findings, key=lambda finding: finding.stage):
        is_repeated, commands = finding.commands in seen, finding.commands
        if commands and is_repeated and finding.code in codes:
            continue
        if commands and is_repeated:
            finding = replace(finding, advice="The same command fixes it.", commands=())
        elif commands == (compact,) and any(before[-1].writes for before in seen if before):
            finding = replace(finding, advice=FIXED_ABOVE, commands=())
        seen.add(commands)
        codes.add(finding.code)
        yield finding.filled(chain)


# Messages of errors --------------------------------------------------------------------------------------------------

MAX_TEXT = 100_000  # characters that are looked at
UNKNOWN, LOOK = "unknown-error", "Examine the file instead: "

_SHORT = {
    "<begin>": r"\A(?:(?!missing key)(?s:.))*missing key\(s\) in state_dict:\s*",  # once, however often it is there
    "<q>": "[\"']",
}
# Lines of a traceback that are no message: of Python, behind `[rank0]:`, too; of IPython; of rich. What stands in them,
# such as `weights_only=True`, says nothing of what went wrong.
_FRAMES = re.compile(
    r'^(?P<indent>.*?)File "[^"\n]*", line \d+.*\n(?:(?P=indent)[ \t].*\n?)*'
    r"|^(?:Cell In|File \S+:\d|-+> ?\d|[ \t]+\d+ |[│╭╰]|.*Traceback \(most recent call last\)).*\n?",
    re.MULTILINE,
)


def message_of(text: str) -> str:
    """What a log says from its first traceback on, without the lines of source in it; of pytest's, the lines with E."""
    text = text[-MAX_TEXT:]  # the error ends it
    if failed := re.findall(r"^E  ( .*\n?)", text, re.MULTILINE):
        return "".join(failed)
    return _FRAMES.sub("", text[max(text.find("Traceback (most recent call last)"), 0) :])


class KnownError(NamedTuple):
    """A message.  finding: what is said of it, whose commands have slots for what the pattern names."""

    pattern: re.Pattern[str]
    finding: Finding

    def commands(self, text: str) -> tuple[Command, ...]:
        """Those that fix it, with the pattern's named groups in a message in the slots of their names: `PREFIX`."""
        match = self.pattern.search(text[:MAX_TEXT])
        words = {name.upper(): value for name, value in match.groupdict().items() if value} if match else {}
        return tuple(fix.with_words(words) for fix in self.finding.commands)


@cache
def known_errors() -> tuple[KnownError, ...]:
    """The rows of the table; the first that matches a message counts."""
    errors = []
    for row in table("error_texts"):
        pattern = row["seen"] if isinstance(row["seen"], str) else "|".join(row["seen"])
        for name, expression in _SHORT.items():
            pattern = pattern.replace(name, expression)
        fixes, advised = (commands_of(row.get(key, ()), {}) for key in ("fixes", "advised"))
        advice, is_certain = row.get("advice", ""), not row.get("likely")
        finding = Finding(row["code"], row["means"], "", True, fixes, advice, advised, certain=is_certain)
        errors.append(KnownError(re.compile(pattern, re.IGNORECASE), finding))
    return tuple(errors)


def recognised(text: str) -> KnownError | None:
    """The first entry of the table that matches the beginning of a message."""
    return next((error for error in known_errors() if error.pattern.search(text[:MAX_TEXT])), None)


def first_line(text: str, error: KnownError | None = None) -> str:
    """The line of a traceback that says what happened: a known one, else one that begins as errors do."""
    lines = [line.strip() for line in text[:MAX_TEXT].splitlines() if line.strip()]
    matches = [line for line in lines if error is not None and error.pattern.search(line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)]
    line = printable((matches or errors or lines or [""])[0])
    return line if len(line) <= 400 else f"{line[:399]}…"


def of_error_text(text: str, file: str = "", devices: Sequence[str] | None = None) -> Diagnosis:
    """The meaning of an error message. No file is looked at; without a name its commands speak of FILE and OUT.
    devices: those that the file's tensors were saved on, where they are known."""
    error = recognised(text := message_of(text))
    if error is None:
        what = "ckptool does not know this message" if text.strip() else "the message is empty"
        finding = Finding(UNKNOWN, what, first_line(text), advice=LOOK, advised=(command("doctor", FILE),))
        return Diagnosis(file, "", (finding.filled(Chain(file)),))
    finding = replace(error.finding, says=first_line(text, error), commands=error.commands(text))
    if devices is not None and finding.code in ("cuda-location", "device-location", "gpu-memory"):
        what = f"{file or 'the checkpoint'} was saved on {listed(devices, 3) or 'the CPU'}"
        finding = replace(finding, what=f"{finding.what} {what}.")
        device_kind = (re.findall(r"(?i)\b(?:cuda|mps|xpu|hpu|npu)\b", text) or [""])[0].lower()
        if finding.code != "gpu-memory" and not any(device.startswith(device_kind) for device in devices):
            what += ": the message is about another file, or the code asks for that device. Name the file it loads."
            finding = replace(finding, what=what, commands=(), advised=(), certain=False, advice="")
    return Diagnosis(file, "", (finding.filled(Chain(file)),))
