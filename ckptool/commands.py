"""The commands that notes, errors and `doctor` print: argv that the program's parser takes, quoted for a shell once.

`command` makes them from a verb and its options, which a test holds to the parser; an `Advice` is the last part of an
error, a text that knows which commands are in it. File names are filled in by `analysis.fixes`.
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
    """Facts about a verb. group: of the help.  address: None for verbs without files.  about: its line of help."""

    group: str
    address: Use | None
    about: str

    @property
    def in_python(self) -> bool:
        """True for one that is also a function, `ckptool.NAME`; only a shell needs the others."""
        return self.group != "setup"


# Every verb, in the order of the help: its command, `ckptool.NAME` and `verbs/NAME.py` follow from its line here. Two
# words are typed as two, and are one to the parser. Those that only a shell needs are the group `setup`, and stand in
# `verbs/_NAME.py`.
VERBS = {
    "inspect": Verb(
        "look",
        Use.TAKES,
        "Show what is in a checkpoint: parts, sizes, notes with the commands that fix them; or a run's checkpoints.",
    ),
    "show": Verb(
        "look", Use.TAKES, "Show the values of one tensor, or any other entry: show model.pt#state_dict/fc.weight"
    ),
    "diff": Verb("look", Use.TAKES, "Compare two checkpoints, in any containers. Exit 0: same. 1: they differ."),
    "verify": Verb(
        "look",
        Use.TAKES,
        "Read everything and report damage: checksums, headers, missing data. Exit 0: fine. 1: problems found.",
    ),
    "doctor": Verb(
        "look",
        Use.TAKES,
        "Explain why a checkpoint does not load, and what fixes it. Exit 1: something keeps it from loading.",
    ),
    "scan": Verb(
        "look",
        Use.REFUSES,
        "List a folder's checkpoints, or what a file's pickles would call. Exit 1: damaged, or would run code.",
    ),
    "report": Verb(
        "look",
        Use.TAKES,
        "Write an HTML page about checkpoints: contents, histograms, health, changes. Opens in any browser, offline.",
    ),
    "strip-module": Verb(
        "change",
        Use.CHANGES,
        "Remove the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed from the keys.",
    ),
    "add-module": Verb("change", Use.CHANGES, "Add module. in front of the keys, as DataParallel does."),
    "rename": Verb(
        "change",
        Use.CHANGES,
        "Rename keys by rules: rename model.pt 'blocks.{n}.* => layers.{n}.*' -o OUT. The first that matches wins.",
    ),
    "remap": Verb(
        "change",
        Use.CHANGES,
        "Change the devices that a checkpoint's tensors are tagged with, so that it loads on this machine.",
    ),
    "cast": Verb(
        "change",
        Use.CHANGES,
        "Convert the floating-point tensors of the weights to another dtype, and report which lose values.",
    ),
    "edit": Verb("change", Use.CHANGES, "Drop entries, set plain values, replace the values of tensors."),
    "slim": Verb(
        "change", Use.CHANGES, "Drop optimizer state and the unused bytes behind slices, and report what each saved."
    ),
    "translate": Verb(
        "change",
        Use.CHANGES,
        "Change tensors by rules: split, join, transpose, reorder and rename them. One layout becomes another.",
    ),
    "convert": Verb(
        "change",
        Use.TAKES,
        "Convert between .pt, .dcp and .safetensors: one set of weights, or --all. From .pt to .pt: a compact file.",
    ),
    "recover": Verb(
        "change",
        Use.REFUSES,
        "Salvage what is intact of a damaged file; undo an interrupted in-place edit. Exit 1: something is lost.",
    ),
    "bake": Verb("change", Use.CHANGES, "Fold weight norm and pruning into plain weights."),
    "bundle": Verb(
        "combine",
        Use.TAKES,
        "Put several models, optimizers and values into one file: bundle -o gan.tar generator=G.pt epoch:=3.",
    ),
    "unbundle": Verb(
        "combine",
        Use.TAKES,
        "Write each member of a bundle to its own file, and bundle.json, which says how they belong together.",
    ),
    "average": Verb(
        "combine",
        Use.TAKES,
        "Average the weights of several checkpoints, or merge models, in bounded memory. Counters are the last file's.",
    ),
    "lora merge": Verb(
        "combine",
        Use.TAKES,
        "Merge an adapter into its base, with the bits of PEFT's merge_and_unload. Every key is used, or exit 1.",
    ),
    "lora extract": Verb(
        "combine",
        Use.TAKES,
        "Write what one model changed of another as an adapter of PEFT, of low rank, in bounded memory.",
    ),
    "lora resize": Verb(
        "combine",
        Use.TAKES,
        "Write an adapter in another rank: truncated by SVD, or filled up with zeros. Its scale stays.",
    ),
    "lora convert": Verb(
        "combine", Use.TAKES, "Write an adapter with the names of another library; its factors stay as they are."
    ),
    "warm-start": Verb(
        "use",
        Use.TAKES,
        "Show what of a checkpoint fits a model; -o writes one with exactly the model's keys. Exit 1: not accepted.",
    ),
    "spec": Verb(
        "use",
        Use.TAKES,
        "Write a model's names, shapes, types and ties (-o model.spec.json), for warm-start without torch.",
    ),
    "train": Verb("use", None, "Train a model from a configuration. Exit 130, 143: stopped by a signal, after saving."),
    "resume": Verb(
        "use",
        None,
        "Resume a run from its newest intact checkpoint. Exit 3: there are checkpoints, but none is intact.",
    ),
    "eval": Verb("use", None, "Evaluate a checkpoint of a run; nothing is written to it."),
    "prove": Verb(
        "use",
        None,
        "Prove that a run killed anywhere ends with the same bytes as one that was not. Exit 1: it does not.",
    ),
    "plot": Verb(
        "use", Use.REFUSES, "Draw a run's loss, learning rate and metrics over its steps, even while it is training."
    ),
    "prune": Verb(
        "use",
        Use.REFUSES,
        "Delete the checkpoints of a run that its configuration does not keep: never the newest, never the best.",
    ),
    "demo": Verb(
        "setup",
        None,
        "Write two small checkpoints to try things on, one of them with the usual problems. Needs no torch.",
    ),
    "explain": Verb(
        "setup", None, "Explain a note, an error code or an error message, and say what fixes it. Exit 1: unknown."
    ),
    "schema": Verb("setup", None, "Print the JSON Schema (draft 2020-12) of what a command prints with --json."),
    "completion": Verb(
        "setup",
        None,
        "Print a shell's completion script: commands, options, values, and after model.pt# the names in the file.",
    ),
    "git-setup": Verb(
        "setup",
        None,
        "Make git diff, git log -p and git difftool compare checkpoints by their tensors, with or without git-lfs.",
    ),
    "git-check": Verb(
        "setup",
        None,
        "Check files before a commit: intact, finite, no code to run, git-lfs for large ones. Exit 1: problems found.",
    ),
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


def module_of(verb: str) -> str:
    """The module with a verb's function."""
    return f"ckptool.verbs.{'' if VERBS[verb].in_python else '_'}{function_name(verb)}"


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
