"""The command line of a verb, read by the declarations of its parameters; and what it does not take, in words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ckptool.cli.help import usage
from ckptool.commands import nearest
from ckptool.errors import UsageError, quoted
from ckptool.options import Parameter
from ckptool.verbs._options import QUOTE_RULES, was_redirected


def parse(verb: str, parameters: Sequence[Parameter], words: Sequence[str]) -> dict[str, Any]:
    """What was typed, by the names of the parameters, else their defaults; None where there is none.

    `--name VALUE`, `--name=VALUE`, `-o VALUE`, `-oVALUE`; flags in one word, `-nf`. Options stand anywhere, and may be
    repeated: the last one counts, unless it takes several. After `--` there are none. Raises `UsageError`.
    """
    command, line = f"ckptool {verb}", usage(verb, parameters)

    def refused(what: str, why: str = line) -> UsageError:
        file = next((word for word in words if word.startswith("-") and os.path.lexists(word)), "")
        fix = f"For the file: {quoted(os.path.join('.', file))}" if file else f"See: {command} --help"
        return UsageError(what, why, fix)

    options = {flag: each for each in parameters for flag in each.option.flags}
    typed: dict[str, list[str]] = {}
    plain: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            plain += rest
            break
        if word == "-" or not word.startswith("-"):
            plain.append(word)
            continue
        is_long = word.startswith("--")
        name, sign, value = word.partition("=") if is_long else (word[:2], word[2:], word[2:])
        option = options.get(name)
        if option is None:
            meant = nearest(name, options)
            raise refused(f"{command} has no option {name}", f"Did you mean {meant}?" if meant else line)
        if option.kind is bool:
            if sign and is_long:
                raise refused(f"{name} takes no value")
            rest[:0] = [f"-{value}"] if sign else []
        elif not sign:
            if not rest:
                raise refused(f"{name} needs a value, and was given none")
            value = rest.pop(0)
        typed.setdefault(option.name, []).append(value)
    for each in (each for each in parameters if not each.option.flags):
        count = len(plain) if each.kind == list[str] else 1
        typed |= {each.name: plain[:count]} if plain else {}
        plain = plain[count:]
    known = {each.name: each for each in parameters}
    found = {name: each.default for name, each in known.items() if type(each.default) in (bool, int, float, str)}
    for name, texts in typed.items():
        found[name] = texts if known[name].kind == list[str] else _value(known[name], texts[-1])
        if found[name] is None:
            raise refused(f"{_called(known[name])} takes {_allowed(known[name])}, not {texts[-1]!r}")
    for each in parameters:
        if each.is_needed and each.name not in typed:
            metavar = each.option.metavar or each.name.upper()
            raise refused(f"{command} needs {f'{_called(each)} {metavar}' if each.option.flags else metavar}")
    if was_redirected(plain):
        raise UsageError(f"{command} was given {' '.join(plain)}, which is a part of a rule", *QUOTE_RULES)
    if plain:
        raise refused(f"{command} was given too many arguments: {' '.join(plain)}")
    return {name: found.get(name) for name in known}


def _called(parameter: Parameter) -> str:
    """The long name of an option; of an argument what its help calls it."""
    return parameter.option.flags[-1] if parameter.option.flags else parameter.option.metavar


def _value(parameter: Parameter, text: str) -> Any:
    """The value that a text stands for; None where it is not allowed."""
    _, kind, _, option = parameter
    if kind in (bool, str):
        return True if kind is bool else text if not option.choices or text in option.choices else None
    try:
        number = kind(text)
    except ValueError:
        return None
    return number if option.least is None or number >= option.least else None


def _allowed(parameter: Parameter) -> str:
    """The values that a parameter takes, in words."""
    _, kind, _, option = parameter
    if option.choices:
        return f"{', '.join(option.choices[:-1])} or {option.choices[-1]}"
    number = "a whole number" if kind is int else "a number"
    return number + (f" of at least {option.least:g}" if option.least is not None else "")
