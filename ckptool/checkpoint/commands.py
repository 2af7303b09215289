"""The commands that notes, errors and `doctor` print: argv that the program's parser takes, quoted for a shell once.

`command` makes them from a verb and its options, which a test holds to the parser; an `Advice` is the last part of an
error, a text that knows which commands are in it. File names are filled in by `reports.fixes`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from ckptool.errors import UsageError, printable, quoted

Words = tuple[str, ...]


class Use(Enum):
    """The meaning of an address (`FILE#ADDRESS`, `--at`) to a verb."""

    CHANGES = "changed there; the whole file is written"
    TAKES = "only that part is taken"
    REFUSES = "the verb is about whole files"


class Verb(NamedTuple):
    """Facts about a verb. group: of the help, and its module in `cli/`.  address: None for verbs without files.

    in_python: it is also a function, `ckptool.NAME`; only a shell needs the others.
    """

    group: str
    address: Use | None = None
    in_python: bool = True


# Every verb, in the order of the help: its command, `ckptool.NAME` and `verbs/NAME.py` follow from its line here. Two
# words are typed as two, and are one to the parser. Those that only a shell needs are the group `setup`.
VERBS = {
    "inspect": Verb("look", Use.TAKES),
    "show": Verb("look", Use.TAKES),
    "diff": Verb("look", Use.TAKES),
    "verify": Verb("look", Use.TAKES),
    "doctor": Verb("look", Use.TAKES),
    "scan": Verb("look", Use.REFUSES),
    "report": Verb("look", Use.TAKES),
    "strip-module": Verb("change", Use.CHANGES),
    "add-module": Verb("change", Use.CHANGES),
    "rename": Verb("change", Use.CHANGES),
    "remap": Verb("change", Use.CHANGES),
    "cast": Verb("change", Use.CHANGES),
    "edit": Verb("change", Use.CHANGES),
    "slim": Verb("change", Use.CHANGES),
    "translate": Verb("change", Use.CHANGES),
    "convert": Verb("change", Use.TAKES),
    "recover": Verb("change", Use.REFUSES),
    "bake": Verb("change", Use.CHANGES),
    "bundle": Verb("combine", Use.TAKES),
    "unbundle": Verb("combine", Use.TAKES),
    "average": Verb("combine", Use.TAKES),
    "lora merge": Verb("combine", Use.TAKES),
    "lora extract": Verb("combine", Use.TAKES),
    "lora resize": Verb("combine", Use.TAKES),
    "lora convert": Verb("combine", Use.TAKES),
    "warm-start": Verb("use", Use.TAKES),
    "spec": Verb("use", Use.TAKES),
    "train": Verb("use"),
    "resume": Verb("use"),
    "eval": Verb("use"),
    "prove": Verb("use"),
    "plot": Verb("use", Use.REFUSES),
    "prune": Verb("use", Use.REFUSES),
    "demo": Verb("setup", in_python=False),
    "explain": Verb("setup", in_python=False),
    "schema": Verb("setup", in_python=False),
    "completion": Verb("setup", in_python=False),
    "git-setup": Verb("setup", in_python=False),
    "git-check": Verb("setup", in_python=False),
}

# What people type for them. Only the command line knows these.
ALIASES = {
    "ls": "inspect",
    "info": "inspect",
    "cat": "show",
    "compare": "diff",
    "check": "verify",
    "strip": "strip-module",
}

_FLAGS = {"out": "-o", "dir": "-d"}


def function_name(verb: str) -> str:
    """The name of a verb's function and module."""
    return verb.replace("-", "_").replace(" ", "_")


def with_verb(words: Sequence[str]) -> list[str]:
    """The words of a command line with its verb as one word, in the place of an alias, too."""
    joined = " ".join(words[:2])
    if joined in VERBS:
        return [joined, *words[2:]]
    return [ALIASES.get(word, word) for word in words[:1]] + list(words[1:])


class Slot(str):
    """A word that is filled in when the file is known; until then it reads as what it stands for: FILE, OUT.

    suffix: that of an output, where it is another than the input's.  address: of the part of the input that is meant.
    """

    __slots__ = ("address", "suffix")
    suffix: str | None
    address: str

    def __new__(cls, text: str, suffix: str | None = None, address: str = "") -> Slot:
        slot = super().__new__(cls, text)
        slot.suffix, slot.address = suffix, address
        return slot

    @property
    def is_output(self) -> bool:
        return self.startswith("OUT")

    def __truediv__(self, address: str) -> Slot:
        """The part of the input at an address; the whole for the empty one."""
        return Slot(f"{self}#{address}", self.suffix, address) if address else self


FILE = Slot("FILE")
OUT = Slot("OUT")
OUT_PT = Slot("OUT.pt", ".pt")
OUT_SAFETENSORS = Slot("OUT.safetensors", ".safetensors")
MODEL = Slot("MODEL")
RULES = Slot("RULES.yaml")
FOLDER = Slot("FOLDER")
INTO = Slot(">")  # the shell's own


class Command(tuple[str, ...]):
    """The words of a command; `str()` is the line to type."""

    __slots__ = ()

    def __str__(self) -> str:
        return " ".join(word if isinstance(word, Slot) and word == INTO else quoted(word) for word in self)

    @property
    def writes(self) -> bool:
        return any(isinstance(word, Slot) and word.is_output for word in self)

    def with_words(self, words: Mapping[str, str]) -> Command:
        """The command with a word in place of each slot of that name."""
        return Command(words.get(word, word) if isinstance(word, Slot) else word for word in self)


def command(verb: str, *arguments: str, **options: str | bool | Sequence[str]) -> Command:
    """`ckptool VERB ARGUMENTS… OPTIONS…`, with the options called as in Python: `weights_only=True`, `out=OUT`.

    True is a flag; an option with several values is repeated; `False` and "" are left out.
    """
    words = ["ckptool", *verb.split(), *map(as_argument, arguments)]
    for name, value in sorted(options.items(), key=lambda item: item[0] == "out"):  # the output stands last
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        if value is True:
            words.append(flag)
        elif value:
            for each in [value] if isinstance(value, str) else value:
                words += [flag, each]
    return Command(words)


def as_argument(path: str) -> str:
    """A path that no parser takes for an option."""
    return os.path.join(".", path) if path.startswith("-") and not isinstance(path, Slot) else path


def input_of(source: Any, address: str = "") -> str:
    """The file that a checkpoint was read from, or a part of it, as an argument; FILE where there is none."""
    if source is None:
        return FILE / address
    path: str = getattr(source, "shown", None) or source.file.path
    return f"{path}#{address}" if address else path


def other_program(program: str, *files: str, into: str = "") -> Command:
    """A command of another program, with its own options, for these files; `into`: the file that its output goes to."""
    return Command((*program.split(), *map(as_argument, files), *((INTO, as_argument(into)) if into else ())))


class Advice(str):
    """The last part of an error, escaped: what to type. A text that knows which commands are in it."""

    __slots__ = ("parts",)
    parts: tuple[str | Command, ...]

    def __new__(cls, *parts: str | Command) -> Advice:
        shown = tuple(printable(part) if isinstance(part, str) else part for part in parts)
        advice = super().__new__(cls, "".join(map(str, shown)))
        advice.parts = shown
        return advice

    @property
    def commands(self) -> tuple[Command, ...]:
        return tuple(part for part in self.parts if isinstance(part, Command))

    def filled(self, fill: Callable[[Command], Command]) -> Advice:
        """The same text with its commands filled in."""
        return Advice(*(fill(part) if isinstance(part, Command) else part for part in self.parts))

    @property
    def otherwise(self) -> str:
        """The text after the first command, as a sentence of its own."""
        first = next((number for number, part in enumerate(self.parts) if isinstance(part, Command)), len(self.parts))
        text = "".join(map(str, self.parts[first + 1 :])).lstrip("; .")
        return text[:1].upper() + text[1:]


# Arguments as people give them ----------------------------------------------------------------------------------------


def several(texts: str | Iterable[str], pair: str = "") -> list[str]:
    """The texts as a list, of which a single text is one: every option that takes several is read through this.

    pair: what stands between the two of a dictionary's item, where one is taken. Raises `UsageError` for anything else.
    """
    if isinstance(texts, str):
        return [texts]
    if pair and isinstance(texts, Mapping):
        return [f"{old}{pair}{new}" for old, new in texts.items()]
    given: Any = texts
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"{given!r} was given where texts are needed", "", "Give a text, or a list of them.")
    return list(given)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was most likely meant: one that it begins, else the most similar; empty for none."""
    names = sorted(known)
    begun = [each for each in names if len(name) > 1 and each.startswith(name)]
    close = begun or difflib.get_close_matches(name, names, 1, 0.6)
    return min(close, key=len) if close else ""
