"""A verb's parameters as they are typed: what the command line, its help and completion need to know of a function.

    @verb(("ckptool strip-module model.pt -o clean.pt", "module.fc.weight becomes fc.weight"))
    def strip_module(file: Files, out: Out = None, *, partial: Annotated[bool, option("--partial", "…")] = False): …

A parameter without `option` or `argument` is Python's alone. Nothing here imports a parser, for those who use Python.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ckptool.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[..., Any]


class Option(NamedTuple):
    """A parameter on the command line.  flags: its names; none for an argument.  metavar: what stands for its value.

    panel: the part of the help that it stands in.  least: the smallest number.  choices: those of a `Literal`.
    parse: makes the value of what was typed.  several: a list of texts.  each: the same, and the function is called for
    each of them.  needed: must be given, although Python has a default for it; optional: the reverse.  hidden: not in
    the help.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    panel: str | None = None
    least: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    several: bool = False
    each: bool = False
    needed: bool = False
    optional: bool = False
    hidden: bool = False
    show_default: bool = True


class Watched(NamedTuple):
    """A parameter that the program gives: something to tell how far the work is.  how: `bar`, `status`, `training`."""

    how: str


class Parameter(NamedTuple):
    """A parameter of a verb, or of its view.  kind: its type on the command line."""

    name: str
    kind: Any
    default: Any
    option: Option

    @property
    def is_needed(self) -> bool:
        return self.option.needed or (self.default is inspect.Parameter.empty and not self.option.optional)


class Declared(NamedTuple):
    """What `@verb` says of a function.  examples: lines to type, and what each is for.

    words: makes arguments of the function of what was typed, or a report in place of calling it.  instead: tried for
    each call; its report, if it gives one, is the answer. Both are given the options that they name, and add those that
    they declare.  one_output: the places for the one output of a verb that takes several inputs.  without: options of
    writing that it does not take.  apart: a blank line stands between the answers on several files.
    exits: with the code of its report; else always with 0.  also: reports that a hook gives without saying so.
    """

    examples: tuple[tuple[str, str], ...]
    words: Hook | None = None
    instead: Hook | None = None
    one_output: str = ""
    without: tuple[str, ...] = ()
    apart: bool = False
    exits: bool = True
    also: tuple[str, ...] = ()


def option(names: str, text: str, **more: Any) -> Option:
    """An option as its help prints it, its names and what stands for its value (`-o --out OUT`), then the text."""
    flags = tuple(word for word in names.split() if word.startswith("-"))
    return Option(text, flags, names.removeprefix(" ".join(flags)).strip(), **more)


def argument(metavar: str, text: str, show_default: bool = False, **more: Any) -> Option:
    """An argument as its help prints it: what stands for its value, then the text."""
    return Option(text, (), metavar, show_default=show_default, **more)


def verb(*examples: tuple[str, str], **more: Any) -> Callable[[Function], Function]:
    """Makes a command of a function, which stays as it is; see `Declared`."""

    def declare(function: Function) -> Function:
        vars(function)["verb"] = Declared(examples, **more)
        return function

    return declare


@cache
def signature_of(function: Any) -> inspect.Signature:
    """The signature of a verb, its types evaluated, with the options that `**options: Unpack[…]` stands for."""
    given, parameters = inspect.signature(function), list[inspect.Parameter]()
    for each in given.parameters.values():
        if (options := _options_of(function, each)) is None:
            parameters.append(each.replace(annotation=_evaluated(function, each.annotation)))
            continue
        for name, kind in get_type_hints(options, include_extras=True).items():
            default = None if type(None) in get_args(_plain(kind)) else False
            parameters.append(inspect.Parameter(name, each.KEYWORD_ONLY, default=default, annotation=kind))
    return inspect.Signature(parameters, return_annotation=_evaluated(function, given.return_annotation))


def _options_of(function: Any, parameter: inspect.Parameter) -> Any:
    """The options that a parameter stands for, where it is `**options: Unpack[…]`."""
    found = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
    return function.__globals__[found[1]] if found else None


def _evaluated(function: Any, annotation: Any) -> Any:
    return eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation


def _plain(kind: Any) -> Any:
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


def parameters_of(function: Any) -> Iterator[Parameter]:
    """The parameters of a verb, a hook or a view that are typed, each with its type on the command line: flags and
    numbers as they are, one of a few words, lists of texts; anything else is a text."""
    for name, each in signature_of(function).parameters.items():
        for option in getattr(each.annotation, "__metadata__", ()):
            if isinstance(option, Option):
                whole = each.annotation.__origin__
                kinds = get_args(whole) or (whole,)
                choices = next((get_args(kind) for kind in (whole, *kinds) if get_origin(kind) is Literal), ())
                kind: Any = next((kind for kind in (bool, int, float) if kind in kinds and str not in kinds), str)
                kind = list[str] if option.several or option.each else str if option.parse else kind
                yield Parameter(name, kind, each.default, option._replace(choices=choices))


def watched(function: Any) -> dict[str, str]:
    """The parameters of a verb that the program gives, and how each shows what it is told."""
    annotations = ((name, each.annotation) for name, each in signature_of(function).parameters.items())
    metas = ((name, meta) for name, kind in annotations for meta in getattr(kind, "__metadata__", ()))
    return {name: meta.how for name, meta in metas if isinstance(meta, Watched)}


_FLAG = re.compile(r"--[a-z-]+")


class _Shown(str):
    """A type as `help()` prints it: without the modules of its names."""

    def __new__(cls, kind: Any) -> _Shown:
        return super().__new__(cls, re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(kind)))

    __repr__ = str.__str__


def for_python(function: Any) -> Any:
    """A verb with the signature that `help()` shows: plain types, and every option by its name, with what its help
    says."""
    if "verb" not in vars(function):
        return function
    whole, typed = signature_of(function), list(parameters_of(function))
    names = {flag: each.name for each in typed for flag in each.option.flags}
    options = [_options_of(function, each) for each in inspect.signature(function).parameters.values()]
    plain = [each.replace(annotation=_Shown(_plain(each.annotation))) for each in whole.parameters.values()]
    function.__signature__ = whole.replace(parameters=plain)
    about = [f"{each.name}: {_FLAG.sub(lambda flag: names.get(flag[0], flag[0]), each.option.help)}" for each in typed]
    about += [each.__doc__.strip() for each in options if each is not None]
    function.__doc__ = "\n    ".join([function.__doc__.rstrip() + "\n", *about, ""])
    return function


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
