"""Every error that ckptool raises on purpose, each class with its code and its exit code where that is not 2.

An error has three parts: what happened (it names the path and the thing), what it means, and what to type.
Each is one line: characters that cannot be printed are escaped where they enter it.
Only `why` may be several lines, as `TextLines`. Where a raise gives no `why`, it is what the class means.
Commands and options that stand in them (`commands.py`) are read as a shell takes them, and in `str()` as Python does.
Library users catch `CkptoolError`; `error.code` is stable across versions.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from errno import EEXIST
from typing import Any

SHORT = 12  # lines of an error in a notebook


class CkptoolError(Exception):
    """Something that ckptool could not do, told in three parts.

    `what` happened, with the path and the thing; `why`, what it means; `fix`, what to type or do next, as on the
    command line. `exit_code` is what the command line ends with. Names are given as they are, and escaped here.
    """

    code = "error"
    exit_code = 2
    meaning = ""  # `why`, where the raise does not give one
    what: str
    why: str
    fix: str

    def __init_subclass__(cls, code: str = "", exit_code: int = 0, why: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.exit_code, cls.meaning = exit_code or cls.exit_code, why or cls.meaning
        if code:
            cls.code = code

    def __init__(self, what: str, why: str = "", fix: str | Command = "") -> None:
        self.what, self.why, self.fix = map(escaped, (what, why or self.meaning, fix))
        # An OSError would take them for its number and file.
        Exception.__init__(self, self.what, self.why, self.fix)

    def __str__(self) -> str:
        """The three parts for people who write Python: options are called as the arguments that they are there."""
        return "\n".join(in_python(part) for part in (self.what, self.why, self.fix) if part)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sends its three parts to another process, its code, and the number and file of the system's error."""
        system = {name: value for name, value in vars(self).items() if name in ("code", "errno", "filename")}
        return type(self), (self.what, self.why, self.fix), system

    def fill(self, words: Mapping[str, str]) -> None:
        """Fills in the slots of its commands: a slot called NAME becomes `words[NAME]`."""
        for name, text in list(vars(self).items()):
            if isinstance(text, Text) and text.parts:
                program = ("ckptool",)  # options without a command are about another file
                parts = (
                    part.with_words(words) if isinstance(part, Command) and part[:1] == program else part
                    for part in text.parts
                )
                setattr(self, name, Text(*parts))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback of sixty lines: where the caller stood, and the three parts."""
        from traceback import extract_tb

        frames = [frame for frame in extract_tb(self.__traceback__) if f"{os.sep}IPython{os.sep}" not in frame.filename]
        inner = (number for number, frame in enumerate(frames) if frame.filename.startswith(os.path.dirname(__file__)))
        callers = [f"  line {frame.lineno} of {frame.name}: {frame.line}" for frame in frames[: next(inner, None)][-3:]]
        lines = [*callers, *f"{type(self).__name__}: {self}".split("\n")]
        return lines if len(lines) <= SHORT else [*lines[: SHORT - 4], "…", *lines[-3:]]

    def within(self, place: str) -> CkptoolError:
        """The same error, saying where it happened when its first part does not yet."""
        if printable(place) in self.what:
            return self
        error = copy(self)
        CkptoolError.__init__(error, Text(f"{place}: ", self.what), self.why, self.fix)
        return error


class UsageError(CkptoolError, ValueError, code="usage"):
    """The request makes no sense: an unknown option value, a malformed rule. A `ValueError`, too."""


class MissingKey(UsageError, KeyError):
    """Nothing has that name or address. A `KeyError`, too; what was meant is looked for when somebody asks."""

    _lookup: tuple[str, Callable[[], Sequence[str]], Callable[[], str]]

    @classmethod
    def among(
        cls, name: str, names: Callable[[], Sequence[str]], where: str, deeper: Callable[[], str] = str
    ) -> MissingKey:
        """The error for a name that is not among those that exist. where: `at the top`, `in state_dict`.
        deeper: finds the place further down that has one of that name."""
        error = cls(f"there is no {name} {where}")
        del error.why, error.fix
        error._lookup = name, names, deeper
        return error

    def __getattr__(self, attribute: str) -> str:
        if attribute not in ("why", "fix"):
            raise AttributeError(attribute)
        from difflib import get_close_matches

        (name, names, deeper), dotted = self._lookup, ""
        if keys := names():
            dotted = next((f"{key}/{name[len(key) + 1 :]}" for key in keys if name.startswith(f"{key}.")), "")
        longer = [key for key in keys if key.startswith((f"{name}.", f"{name}/"))]
        meant = dotted or next(iter(longer), "") or deeper() or next(iter(get_close_matches(name, keys[:2000], 1)), "")
        self.why = printable(f"Available: {listed(keys, 12)}.") if keys else "There is nothing below it."
        self.fix = printable(f"Did you mean {meant}?") if meant else ""
        if len(longer) > 1 and not dotted:
            only = Command(("--only", f"{name}.*"), f"only={f'{name}.*'!r}")
            self.fix = escaped(f"{self.fix} For all {len(longer):,} that begin so, if the command has it: {only}")
        return self.why if attribute == "why" else self.fix


class NoMatch(CkptoolError, code="no-match", exit_code=1):
    """A rule, pattern or prefix that the user named matches nothing."""


class FileProblem(CkptoolError, OSError, code="io"):
    """The operating system refused: missing, a folder, no permission, a read error. An `OSError`, too."""

    errno: int | None = None
    filename: str | None = None

    def about(self, number: int | None, path: str | os.PathLike[str]) -> FileProblem:
        """The same error, with the `errno` and `filename` of the system's."""
        self.errno, self.filename = number, os.fspath(path)
        return self


class FileMissing(FileProblem, FileNotFoundError):
    """There is no such file. A `FileNotFoundError`, too."""


class NoPermission(FileProblem, PermissionError):
    """It may not be read or written. A `PermissionError`, too."""


class IsAFolder(FileProblem, IsADirectoryError):
    """It is a folder. An `IsADirectoryError`, too."""


class NotAFolder(FileProblem, NotADirectoryError):
    """It lies below a file. A `NotADirectoryError`, too."""


class BrokenLink(FileProblem, FileNotFoundError, code="broken-link"):
    """The name is a link whose target does not exist."""


class FileChanged(FileProblem, code="file-changed"):
    """The input was changed by someone else while it was being read."""


class DiskFull(FileProblem, code="disk-full"):
    """There is not enough room for the output."""


class NotACheckpoint(CkptoolError, code="not-a-checkpoint"):
    """The bytes are something else than a checkpoint."""


class NoCheckpointInside(NotACheckpoint, IsADirectoryError):
    """It is a folder, and no checkpoint. An `IsADirectoryError`, too."""


class Unsupported(CkptoolError, code="unsupported"):
    """The thing is known by name, but cannot be read or written here."""


class Truncated(CkptoolError, EOFError, code="truncated", why="The file was cut off, or bytes of it were changed."):
    """The file ends before the data that it promises."""


class Corrupt(CkptoolError, code="corrupt", why="It was damaged, or another program wrote it."):
    """The bytes contradict themselves."""


class BadTensor(Corrupt, code="bad-tensor"):
    """A tensor's shape, strides or offset do not fit its storage."""


class Ambiguous(CkptoolError, code="ambiguous", why="Different readers would see different things in it."):
    """Different programs would read different things from this file."""


_TOO_MUCH = "No real checkpoint has so much of it; the file is probably malicious."


class LimitExceeded(CkptoolError, MemoryError, code="limit-exceeded", why=_TOO_MUCH):
    """The file asks for more work or memory than its size justifies. A `MemoryError`, too."""


class UnsafeObject(CkptoolError, code="unsafe-global"):
    """The file calls functions that ckptool does not know; passing them on was not asked for."""


class Conflict(CkptoolError, code="conflict"):
    """Carrying on would lose data or mix two things."""


class OutputExists(Conflict, FileExistsError, code="output-exists", why="It was left as it is."):
    """The target is there already and was not to be overwritten. A `FileExistsError`, too."""

    errno = EEXIST


class OnlyAPart(CkptoolError, code="part"):
    """A part of a checkpoint (a rank's share, one shard, placeholders) was given where a whole one is needed."""


class VerifyFailed(CkptoolError, code="verify-failed"):
    """The output differs from what was to be written."""


class MissingExtra(CkptoolError, ImportError, code="missing-extra"):
    """An optional package that the verb needs is not installed."""


class UserCodeFailed(CkptoolError, code="user-code"):
    """The user's own module raised an error; its traceback is in the message."""


class PlanRefused(CkptoolError, code="plan-refused", exit_code=1):
    """The plan of a warm start was not accepted; nothing was changed. `report` says what it was."""

    report: Any = None


class NoneValid(CkptoolError, code="none-valid", exit_code=3):
    """Checkpoints exist, and none of them is whole: starting again from 0 would throw the run away."""


class NotFinite(CkptoolError, code="non-finite"):
    """The loss or a gradient is NaN or infinite, and the run is to stop at that."""


class RunFailed(CkptoolError, code="run-failed"):
    """A process that ckptool started ended in an error of its own, or was killed."""


def listed(items: Sequence[object], limit: int = 5) -> str:
    """At most `limit` items in one line, then how many were left out."""
    shown = ", ".join(str(item) for item in items[:limit])
    omitted = len(items) - limit
    return f"{shown} and {omitted:,} more" if omitted > 0 else shown


def counted(count: int, word: str, plural: str = "", shown: Callable[[int], str] = "{:,}".format) -> str:
    """`1 tensor`, `62 tensors`; with a verb: `counted(n, "name is", "names are")`. shown: how the number is written."""
    return f"{shown(count)} {word if count == 1 else plural or word + 's'}"


def form(count: int, one: str, many: str) -> str:
    """The word that goes with a count: `form(n, "is", "are")`."""
    return one if count == 1 else many


def is_text(text: str) -> bool:
    """True unless it has halves of surrogate pairs, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def quoted(path: str) -> str:
    """A path as a shell takes it, in one line: what cannot be printed stands as an escape in `$'…'`, which bash and zsh
    read."""
    path = without_secrets(path) if "://" in path else path
    if path.isprintable():
        return shlex.quote(path)
    escapes = {char: f"\\{char}" for char in "\\'"}
    for char in (char for char in set(path) if not char.isprintable()):
        try:
            data = os.fsencode(char)
        except UnicodeEncodeError:  # of a key: half of a surrogate pair, which no file has
            data = char.encode("utf-8", "surrogatepass")
        escapes[char] = "".join(f"\\x{byte:02x}" for byte in data)
    return "$'" + "".join(escapes.get(char, char) for char in path) + "'"


GIVEN: dict[str, str] = {}  # URLs as they were given, by the names that stand for those with secrets in them


def without_secrets(text: str) -> str:
    """A text in which the URLs that were given with secrets stand by their names."""
    for name, url in sorted(GIVEN.items(), key=lambda pair: -len(pair[1])):
        text = text.replace(url, name)
    return text


def printable(text: str) -> str:
    r"""The text with control characters, line breaks, bidi marks and surrogates as `\x1b`-style escapes.
    Names in a checkpoint are chosen by whoever made it; none reaches a terminal raw. Escaped text stays as it is."""
    text = without_secrets(text) if GIVEN and "://" in text else text
    if text.isprintable():
        return text
    if _MARKED.search(text):
        return str(Text(text))
    # As Python's `unicode_escape`, a module that may no longer be importable where memory has run out.
    return text.translate({ord(char): repr(char)[1:-1] for char in set(text) if not char.isprintable()})


# A command or option in a text is held apart by this until the text enters an error; no name in a file can have it.
_MARK = f"\ue000{os.urandom(8).hex()}"
_MARKED = re.compile(rf"{_MARK}\((.*?){_MARK}\)", re.DOTALL)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # as terminals read them


class Slot(str):
    """A word that is filled in when the file is known; until then it reads as what it stands for: FILE#fc, or OUT.pt,
    an output with a suffix other than the input's."""

    __slots__ = ()

    def __truediv__(self, address: str) -> Slot:
        """The part of the input at an address; the whole for the empty one."""
        return Slot(f"{self}#{address}") if address else self


INTO = Slot(">")  # the shell's own


class Command(tuple[str, ...]):
    """The words of a command, or of options. `str()` is what a shell takes, `python` what Python does; in an f-string
    it is both, until the text enters an error."""

    python: str

    def __new__(cls, words: Iterable[str] = (), python: str = "") -> Command:
        new = super().__new__(cls, words)
        new.python = python or str(new)
        return new

    def __str__(self) -> str:
        return " ".join(word if word == INTO and isinstance(word, Slot) else quoted(word) for word in self)

    def __format__(self, _: str) -> str:
        words = ("-+"[isinstance(word, Slot)] + word for word in self)
        return f"{_MARK}({_MARK.join([self.python, *words])}{_MARK})"

    @property
    def writes(self) -> bool:
        return any(isinstance(word, Slot) and word.startswith("OUT") for word in self)

    def with_words(self, words: Mapping[str, str]) -> Command:
        """The command with a word in place of each slot of that name, and of the name in FILE#ADDRESS."""

        def filled(word: str) -> str:
            name, sign, at = word.partition("#")
            return words[name] + sign + at if isinstance(word, Slot) and name in words else word

        return Command(map(filled, self))


class Text(str):
    """A text as people who use a shell read it, escaped; `python` is the same for those who write Python.
    parts: texts and the commands between them."""

    __slots__ = ("parts", "python")
    parts: tuple[str | Command, ...]
    python: str

    def __new__(cls, *parts: str | Command, python: str | None = None) -> Text:
        pieces = [piece for part in parts for piece in _parts(part)]
        text = super().__new__(cls, "".join(map(str, pieces)))
        text.parts = tuple(pieces) if python is None else ()
        text.python = "".join(map(in_python, pieces)) if python is None else python
        return text

    @property
    def commands(self) -> tuple[Command, ...]:
        return tuple(part for part in self.parts if isinstance(part, Command) and not part[0].startswith("-"))


class TextLines(Text):
    """Several lines, each escaped: the one text of an error that has line breaks."""

    __slots__ = ()

    def __new__(cls, *lines: str) -> TextLines:
        escapes = list(map(escaped, lines))
        text = str.__new__(cls, "\n".join(escapes))
        text.parts, text.python = (), "\n".join(map(in_python, escapes))
        return text

    def __getnewargs__(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.split("\n"))


def in_python(text: str | Command) -> str:
    """The text with commands and options spelled as in Python."""
    return getattr(text, "python", str(text))


def escaped(text: str | Command) -> str:
    """A text as `printable`, but with both spellings of its commands; escaped text is returned as it is."""
    if isinstance(text, Text):
        return text
    return Text(text) if isinstance(text, Command) or _MARK in text else printable(text)


def _parts(text: str | Command) -> Iterator[str | Command]:
    if isinstance(text, Command):
        yield text
    elif isinstance(text, Text):
        yield from text.parts or (text,)
    else:
        for number, part in enumerate(_MARKED.split(text)):
            if number % 2:
                python, *words = part.split(_MARK)
                yield Command((Slot(word[1:]) if word[0] == "+" else word[1:] for word in words), python)
            elif part:
                yield printable(part)
