"""Completion of verbs, options and their values, from the parser itself: it cannot go stale."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ckptool.cli.help import FLAGS
from ckptool.cli.verb import function_of, typed_parameters
from ckptool.commands import VERBS
from ckptool.options import Parameter
from ckptool.verbs._complete import Candidate, addresses, keys


def _dtypes() -> list[str]:
    from ckptool.checkpoint.dtypes import DTYPES

    return [dtype.name for dtype in DTYPES if dtype.kind == "float"]


def _containers() -> list[str]:
    from ckptool.formats import FORMATS

    return [each.name for each in FORMATS if each.writable]


def _differences() -> Sequence[str]:
    from ckptool.analysis.diff import IGNORABLE

    return IGNORABLE


def _schemes() -> Sequence[str]:
    from ckptool.transforms.lora.schemes import SCHEMES

    return list(SCHEMES)


def _shipped_layouts() -> Sequence[str]:
    from ckptool.transforms.translate.layouts import shipped

    return list(shipped())


def _codes() -> Sequence[str]:
    from ckptool.verbs._explain import all_codes

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
    parameters = typed_parameters(function_of(words[0]))
    flags = {name: each for each in parameters for name in each.option.flags}
    asked, used = _asked(words[1:], flags)
    name, equals, value = typed.partition("=")
    if asked is None and equals and name in flags:
        found = _values(flags[name], value, words)
        return found and [each._replace(text=f"{name}={each.text}") for each in found]
    if asked is None and typed.startswith("-") and "--" not in words:
        help_of_all = [Candidate(each, "Show the help.") for each in FLAGS]
        return help_of_all + [
            Candidate(flag, _first_sentence(each.option.help))
            for flag, each in flags.items()
            if not each.option.hidden and (each.option.several or each not in used)
        ]
    if asked is None:
        asked = next((each for each in parameters if not each.option.flags), None)
    return [] if asked is None else _values(asked, typed, words)


def _verbs(words: list[str], typed: str) -> list[Candidate]:
    if typed.startswith("-"):
        return [] if words else [Candidate("--help"), Candidate("--version")]
    depth = len(words)
    found = {}
    for verb in VERBS:
        if verb.split()[:depth] == words:
            last = len(verb.split()) == depth + 1
            about = _first_sentence(VERBS[verb].about) if last else "…"
            found[verb.split()[depth]] = Candidate(verb.split()[depth], about)
    return list(found.values())


def _asked(words: Sequence[str], flags: dict[str, Parameter]) -> tuple[Parameter | None, list[Parameter]]:
    """The option whose value comes next, if one's does, and the options that are there already."""
    used: list[Parameter] = []
    asked: Parameter | None = None
    for word in words:
        if asked is not None:
            asked = None
        elif word == "--":
            break
        elif (option := flags.get(word.partition("=")[0])) is not None:
            used.append(option)
            asked = None if option.kind is bool or "=" in word else option
    return asked, used


def _values(parameter: Parameter, typed: str, words: Sequence[str]) -> list[Candidate] | None:
    option = parameter.option
    choices = list(option.choices or (VALUES[option.metavar]() if option.metavar in VALUES else ()))
    if choices and not ("FILE" in option.metavar and not any(each.startswith(typed) for each in choices)):
        done = typed[: typed.rfind(",") + 1] if option.several else ""
        return [Candidate(done + each) for each in choices]
    if option.metavar in IN_FILES:
        file = next((word for word in words[1:] if os.path.lexists(word)), None)
        return IN_FILES[option.metavar](file, typed) if file else []
    return [] if option.metavar in NUMBERS else None


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".:")
