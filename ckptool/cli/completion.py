"""Completion of verbs, options and their values, from the parser itself: it cannot go stale."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ckptool.checkpoint.commands import VERBS
from ckptool.cli import HELP, function_of, parser
from ckptool.cli.output import choices_among, declared
from ckptool.verbs._completion import Candidate, addresses, keys


def _dtypes() -> list[str]:
    from ckptool.checkpoint.dtypes import DTYPES

    return [dtype.name for dtype in DTYPES if dtype.kind == "float"]


def _containers() -> list[str]:
    from ckptool.formats import FORMATS

    return [each.name for each in FORMATS if each.writable]


def _differences() -> Sequence[str]:
    from ckptool.reports.diff import IGNORABLE

    return IGNORABLE


def _schemes() -> Sequence[str]:
    from ckptool.transforms.lora.schemes import SCHEMES

    return list(SCHEMES)


def _shipped_layouts() -> Sequence[str]:
    from ckptool.transforms.translate.layouts import shipped

    return list(shipped())


def _codes() -> Sequence[str]:
    from ckptool.reports.explain import all_codes

    return list(all_codes())


# The values of options and arguments that take a text, by what stands for it in the help.
VALUES: dict[str, Callable[[], Sequence[str]]] = {
    "DTYPE": _dtypes,
    "CONTAINER": _containers,
    "DEVICE": lambda: ["cpu", "cuda:0", "cuda:1", "mps"],
    "KIND": _differences,
    "SCHEME": _schemes,
    "FILE.yaml|LAYOUT": _shipped_layouts,
    "[CODE|-]": _codes,
    "[VERB]": lambda: [verb for verb in VERBS if " " not in verb],
}
IN_FILES = {"ADDRESS": addresses, "PATTERN": keys}
NUMBERS = {"N", "X", "D", "R", "T", "SHARE", "SECONDS", "STEP", "SIZE", "DECAY", "RxC", "W,W,…", "SLICE"}


def candidates(words: list[str], typed: str) -> list[Candidate] | None:
    """The continuations of a word after others, of which the first is the verb; None where a file is meant."""
    if not words or words[0] not in VERBS:
        return _verbs(words, typed)
    command = parser(words[:1]).commands[words[0]]
    flags = {name: option for option in command.params for name in option.opts if name.startswith("-")}
    asked, used = _asked(words[1:], flags)
    name, equals, value = typed.partition("=")
    if asked is None and equals and name in flags:
        found = _values(flags[name], value, words)
        return found and [each._replace(text=f"{name}={each.text}") for each in found]
    if asked is None and typed.startswith("-") and "--" not in words:
        help_of_all = [Candidate(each, "Show this message and exit.") for each in HELP]
        return help_of_all + [
            Candidate(flag, _first_sentence(option.help))
            for flag, option in flags.items()
            if not option.hidden and (option.multiple or option not in used)
        ]
    if asked is None:
        asked = next((each for each in command.params if each.param_type_name == "argument"), None)
    return [] if asked is None else _values(asked, typed, words)


def _verbs(words: list[str], typed: str) -> list[Candidate]:
    if typed.startswith("-"):
        return [] if words else [Candidate("--help"), Candidate("--version")]
    depth = len(words)
    found = {}
    for verb in VERBS:
        if verb.split()[:depth] == words:
            last = len(verb.split()) == depth + 1
            about = _first_sentence(function_of(verb).__doc__) if last else "…"
            found[verb.split()[depth]] = Candidate(verb.split()[depth], about)
    return list(found.values())


def _asked(words: Sequence[str], flags: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The option whose value comes next, if one's does, and the options that are there already."""
    used: list[Any] = []
    asked = None
    for word in words:
        if asked is not None:
            asked = None
        elif word == "--":
            break
        elif (option := flags.get(word.partition("=")[0])) is not None:
            used.append(option)
            asked = None if option.is_flag or "=" in word else option
    return asked, used


def _values(parameter: Any, typed: str, words: Sequence[str]) -> list[Candidate] | None:
    choices = choices_among(declared(words[0], parameter.name)[0])
    if not choices and parameter.metavar in VALUES:
        choices = list(VALUES[parameter.metavar]())
    if choices and not ("FILE" in (parameter.metavar or "") and not any(each.startswith(typed) for each in choices)):
        done = typed[: typed.rfind(",") + 1] if parameter.multiple else ""
        return [Candidate(done + each) for each in choices]
    if parameter.metavar in IN_FILES:
        file = next((word for word in words[1:] if os.path.lexists(word)), None)
        return IN_FILES[parameter.metavar](file, typed) if file else []
    return [] if parameter.metavar in NUMBERS else None


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".:")
