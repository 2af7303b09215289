"""The table of verbs; what is typed for each, declared with its function; and what texts say to type.

    @verb(("ckptool strip-module model.pt -o clean.pt", "module.fc.weight becomes fc.weight"))
    def strip_module(file: Files, out: Out = None, *, partial: Annotated[bool, option("--partial", "…")] = False): …

From this come a command, its help and completion. A parameter without `option` or `argument` is Python's alone.

    OutputExists(f"{path} already exists", fix=f"Overwrite it: {arg(overwrite=True)}, or choose another name.")

A shell reads `Overwrite it: -f`, Python `Overwrite it: overwrite=True`. Both are made from the names that the verb's
function has; a test holds them to its signature. File names are filled in by `analysis.findings`.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, partial, wraps
from importlib import import_module
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ckptool.errors import INTO as INTO
from ckptool.errors import Command as Command
from ckptool.errors import Slot as Slot
from ckptool.errors import UsageError


class Use(Enum):
    """The meaning of an address (`FILE#ADDRESS`, `--at`) to a verb."""

    CHANGES = "changed there; the whole file is written"
    TAKES = "only that part is taken"
    REFUSES = "the verb is about whole files"


class Verb(NamedTuple):
    """Facts about a verb. group: of the help.  address: None for verbs without files.  about: its line of help.
    function: the name of its function, which stands in `module`.  in_python: it is also `ckptool.NAME`; only a shell
    needs the others."""

    group: str
    address: Use | None
    about: str
    function: str
    module: str
    in_python: bool


# Every verb, in the order of the help: its command, `ckptool.NAME` and `verbs/NAME.py` follow from its line here. Two
# words are typed as two, and are one to the parser. Those that only a shell needs are the group `setup`, and stand in
# `verbs/_NAME.py`. In brackets stand the group of the lines below, and what they make of an address.
_TABLE = """
[look takes]
inspect: Show what is in a checkpoint: parts, sizes, notes with the commands that fix them; or a run's checkpoints.
show: Show the values of one tensor, or any other entry: show model.pt#state_dict/fc.weight
diff: Compare two checkpoints, in any containers. Exit 0: same. 1: they differ.
verify: Read everything and report damage: checksums, headers, missing data. Exit 0: fine. 1: problems found.
doctor: Explain why a checkpoint does not load, and what fixes it. Exit 1: something keeps it from loading.
[look refuses]
scan: List a folder's checkpoints (--latest-good: the newest), or a file's unsafe calls. Exit 1: damaged or unsafe.
[look takes]
report: Write an HTML page about checkpoints: contents, histograms, health, changes. Opens in any browser, offline.
browse: Walk through a checkpoint in the terminal: its tree, values, histograms, and what differs in another.
[change changes]
strip-module: Remove the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed from the keys.
add-module: Add 'module.' in front of the keys, as DataParallel does.
rename: Rename keys by rules: rename model.pt 'blocks.{n}.* => layers.{n}.*' -o OUT. The first that matches wins.
remap: Change the device that tensors were saved on, so that they load on this machine: --to cpu.
cast: Convert the weights to another dtype (half the size: --dtype bf16), and report which values were rounded.
edit: Drop entries (--drop optimizer) and set plain values (--set epoch=0).
slim: Drop optimizer state and the unused bytes behind slices, and report what each saved.
translate: Translate one library's layout into another's by rules: rename, split, join, transpose and reorder tensors.
[change takes]
convert: Convert between .pt, .safetensors, shards and .dcp: one set of weights, or --all. .pt to .pt: a compact file.
[change refuses]
recover: Salvage what is intact in a damaged file; undo an interrupted in-place edit. Exit 1: something is lost.
[change changes]
bake: Fold weight norm and pruning into plain weights.
[combine takes]
bundle: Put several models, optimizers and values into one file: bundle -o gan.tar generator=G.pt epoch:=3.
unbundle: Write each member of a bundle to its own file, and bundle.json, which says how they belong together.
average: Average the weights of several checkpoints, or merge models. Counters are copied from the last file.
lora merge: Merge an adapter into its base, as PEFT's merge_and_unload does. Every key is used, or exit 1.
lora extract: Write the difference of a fine-tuned model from its base as a low-rank adapter for PEFT.
lora resize: Reduce the rank of an adapter by truncated SVD. Its scale is kept.
lora convert: Rename an adapter's keys for another library; its factors stay as they are.
[use takes]
warm-start: Show what of a checkpoint fits a new model or head; -o writes it under the model's keys. Exit 1: refused.
spec: Write a model's names, shapes, types and ties (-o model.spec.json), for warm-start without torch.
[use]
train: Train a model from a configuration. Exit 130, 143: stopped by a signal, after saving.
resume: Resume a run from its newest intact checkpoint. Exit 3: there are checkpoints, but none is intact.
eval: Evaluate a checkpoint of a run; nothing is written to it.
prove: Prove that a run killed anywhere ends with the same bytes as an unbroken one. Exit 1: it does not.
[use refuses]
plot: Draw a run's loss, learning rate and metrics over its steps, even while it is training.
prune: Delete the checkpoints of a run that its configuration does not keep, never the newest whole one.
[setup]
demo: Write two small checkpoints to try things on, one of them with the usual problems. Needs no torch.
explain: Explain a note, an error code or an error message, and say what fixes it. Exit 1: unknown.
schema: Print the JSON Schema (draft 2020-12) of what a command prints with --json.
completion: Print a shell's completion script: commands, options, values, and after model.pt# the names in the file.
git-setup: Make git diff, git log -p and git difftool compare checkpoints by their tensors, with or without git-lfs.
git-check: Check files before a commit: intact, finite, no code to run, git-lfs for large ones. Exit 1: problems found.
"""
VERBS: dict[str, Verb] = {}
for _line in _TABLE.strip().split("\n"):
    if _line[0] == "[":
        _group, _, _use = _line[1:-1].partition(" ")
    else:
        _name, _, _about = _line.partition(": ")
        _function, _in_python = re.sub("[- ]", "_", _name), _group != "setup"
        _module = f"ckptool.verbs.{'' if _in_python else '_'}{_function}"
        VERBS[_name] = Verb(_group, Use[_use.upper()] if _use else None, _about, _function, _module, _in_python)

# What people type for them. Only the command line knows these.
ALIASES = dict(
    pair.split(":") for pair in "ls:inspect info:inspect cat:show compare:diff check:verify strip:strip-module".split()
)

# Options that are not called as their parameter is. What a verb takes without a flag has none.
_FLAGS = "out:-o folder:-d overwrite:-f dry_run:-n container:--to moves:--map rules_file:--rules from_folder:--from"
FLAGS = dict(pair.split(":") for pair in f"{_FLAGS} latest_only:--latest-good file: members: values:".split())
# Options of verbs that are functions, but not of these: answers of another kind; and what is printed of a report that
# has all of it, which a call leaves out.
SHELL_ONLY, PRINTED_ONLY = {("translate", "list"), ("translate", "find")}, {("inspect", "all")}


def function_of(verb: str) -> Any:
    """The function of a verb; imports its module."""
    return getattr(import_module(VERBS[verb].module), VERBS[verb].function)


def with_verb(words: Sequence[str]) -> list[str]:
    """The words of a command line, the verb as one word and an alias replaced; `help VERB` becomes `VERB --help`."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    joined = " ".join(words[:2])
    if joined in VERBS:
        return [joined, *words[2:]]
    return [ALIASES.get(word, word) for word in words[:1]] + list(words[1:])


# What is typed for a verb ---------------------------------------------------------------------------------------------


Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[..., Any]


class Option(NamedTuple):
    """A parameter on the command line.  flags: its names; none for an argument.  metavar: what stands for its value.
    panel: the part of the help that it stands in; rare: in the last one, whatever the panel.
    least: the smallest number.  choices: those of a `Literal`.
    parse: makes the value of the flag and what was typed.  several: a list of texts.  each: the same, and the function
    is called for each of them.  needed: must be given, although Python has a default for it; optional: the reverse.
    hidden: not in the help."""

    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    panel: str | None = None
    rare: bool = False
    least: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str, Any], Any] | None = None
    several: bool = False
    each: bool = False
    needed: bool = False
    optional: bool = False
    hidden: bool = False


class Watched(str):
    """A parameter through which the program is told of progress, and how it shows that: `bar`, `status`, …"""


class Parameter(NamedTuple):
    """A parameter of a verb, or of its view.  kind: its type on the command line.  is_needed: it has to be typed."""

    name: str
    kind: Any
    default: Any
    option: Option
    is_needed: bool


class Declared(NamedTuple):
    """What `@verb` says of a function.  examples: lines to type, and what each is for.

    from_words: makes arguments of the function of what was typed, or a report in place of calling it.  first_try: is
    called for each file before the function; its report, if it gives one, is the answer. Both are given the options
    that they name, and add those that they declare.  other_reports: those that they give without saying so.
    one_output: the places for the one output of a verb that takes several inputs.
    blank_between: stands between the answers on several files.  exits: with the code of its report; else always with 0.
    """

    examples: tuple[tuple[str, str], ...]
    from_words: Hook | None = None
    first_try: Hook | None = None
    one_output: str = ""
    blank_between: bool = False
    exits: bool = True
    other_reports: tuple[str, ...] = ()


def option(names: str, text: str, **fields: Any) -> Option:
    """An option as its help prints it, its names and what stands for its value (`-o --out OUT`), then the text."""
    flags = tuple(word for word in names.split() if word.startswith("-"))
    return Option(text, flags, names.removeprefix(" ".join(flags)).strip(), **fields)


repeated = partial(option, several=True)
"""An option that may be given several times, as its help says."""


def argument(metavar: str, text: str, **fields: Any) -> Option:
    """An argument as its help prints it: what stands for its value, then the text."""
    return Option(text, (), metavar, **fields)


def verb(*examples: tuple[str, str], **fields: Any) -> Callable[[Function], Function]:
    """Declares a function as a command, without changing it; see `Declared`."""

    def declare(function: Function) -> Function:
        vars(function)["verb"] = Declared(examples, **fields)
        return function

    return declare


@cache
def signature_of(function: Any) -> inspect.Signature:
    """The signature of a verb, its types evaluated, with the options that `**options: Unpack[…]` stands for."""
    signature = inspect.signature(function, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for param in signature.parameters.values():
        if param.kind is not param.VAR_KEYWORD or not hasattr(param.annotation, "__required_keys__"):
            parameters.append(param)
            continue
        for name, kind in get_type_hints(param.annotation, include_extras=True).items():
            default = None if type(None) in get_args(getattr(kind, "__origin__", kind)) else False
            parameters.append(inspect.Parameter(name, param.KEYWORD_ONLY, default=default, annotation=kind))
    return signature.replace(parameters=parameters)


def parameters_of(function: Any) -> Iterator[Parameter]:
    """The parameters of a verb, a hook or a view that can be typed, each with its type on the command line: flags and
    numbers as they are, one of a few words, lists of texts; anything else is a text."""
    for name, param in signature_of(function).parameters.items():
        for option in getattr(param.annotation, "__metadata__", ()):
            if isinstance(option, Option):
                hint = param.annotation.__origin__
                kinds = get_args(hint) or (hint,)
                kind: Any = next((kind for kind in (bool, int, float) if kind in kinds and str not in kinds), str)
                if option.several or option.each:
                    kind = list[str]
                elif option.parse:
                    kind = str
                is_needed = option.needed or (param.default is param.empty and not option.optional)
                yield Parameter(name, kind, param.default, option._replace(choices=choices_in(hint)), is_needed)


def takes_several(function: Any) -> bool:
    """True for a verb that is called for each of several files."""
    words = getattr(getattr(function, "verb", None), "from_words", None)
    return any(param.option.each for source in (function, words) if source for param in parameters_of(source))


def choices_in(hint: Any) -> tuple[str, ...]:
    """The words of a `Literal`, or of one that may be None; none of any other type."""
    return next((get_args(kind) for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal), ())


def watched(function: Any) -> dict[str, str]:
    """The parameters of a verb that the program passes to be told of progress, and how each is shown."""
    annotations = ((name, param.annotation) for name, param in signature_of(function).parameters.items())
    metas = ((name, meta) for name, kind in annotations for meta in getattr(kind, "__metadata__", ()))
    return {name: meta for name, meta in metas if isinstance(meta, Watched)}


class _Shown(str):
    """A type as `help()` prints it: without the modules of its names."""

    def __new__(cls, kind: Any) -> _Shown:
        return super().__new__(cls, re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(kind)))

    __repr__ = str.__str__


# Types of parameters that are checked in Python: what each accepts, and what messages call it.
_ACCEPTED: dict[Any, tuple[Any, str]] = {str: (str, "a string"), os.PathLike: (os.PathLike, "a path")}
_ACCEPTED |= {int: (Integral, "a whole number"), float: (Real, "a number"), Sequence: (Iterable, "a list")}
_ACCEPTED |= {bool: (Integral, "True or False"), Callable: (Callable, "a function")}  # "no" would be true
_ACCEPTED |= {dict: (Mapping, "a dictionary"), Mapping: (Mapping, "a dictionary"), type(None): (type(None), "")}
_ITEMS: dict[Any, tuple[type, str]] = {str: (str, "strings"), float: (Real, "numbers")}
OF_LISTS = "A list of paths gives a list of reports; jobs=N or an executor works on several at a time."


def for_python(function: Any) -> Any:
    """A public function as `ckptool.NAME`: it checks the types of its arguments. A verb also takes a list of paths
    where several files can be typed, and returns what it made of a checkpoint in memory. `help()` shows plain types,
    and every option by its name with its help."""
    if not inspect.isfunction(function):
        return function
    sig, typed = signature_of(function), list(parameters_of(function))
    hints = {param.name: param.annotation for param in sig.parameters.values()}
    kinds = {name: hint.__origin__ if hasattr(hint, "__metadata__") else hint for name, hint in hints.items()}
    taken = _check_of_types(function, kinds)
    is_for_each = takes_several(function)

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        options = {name: taken(name, value) for name, value in options.items()}
        if is_for_each and args and isinstance(args[0], (list, tuple, Iterator)) and not hasattr(args[0], "read"):
            first, *others = sig.bind_partial(*args).arguments
            options |= {name: taken(name, value) for name, value in zip(others, args[1:], strict=True)}
            files = [taken(first, file) for file in args[0]]
            return import_module("ckptool.verbs._many_files").of_list(function, files, options)
        report = function(*map(taken, sig.parameters, args), *args[len(sig.parameters) :], **options)
        if not getattr(report, "made", ()):
            return report
        for note in report.notes:  # nobody sees the report of a result in memory
            warnings.warn(f"{note.message} ({note.code})", stacklevel=2)
        return report.made[0]

    called.__module__ = "ckptool"  # where processes that it is pickled to find it
    shown = [param.replace(annotation=_Shown(kinds[param.name])) for param in sig.parameters.values()]
    vars(called)["__signature__"] = sig.replace(parameters=shown)
    if not hasattr(function, "verb"):
        return called
    names = {flag: param.name for param in typed for flag in param.option.flags}
    rest = [each for each in typed if f"\n    {each.name}: " not in (function.__doc__ or "")]
    lines = [f"{each.name}: {re.sub('--[a-z-]+', lambda f: names.get(f[0], f[0]), each.option.help)}" for each in rest]
    declared = inspect.signature(function, eval_str=True).parameters.values()
    writes = [param.annotation.__doc__ or "" for param in declared if hasattr(param.annotation, "__required_keys__")]
    lines += writes
    if is_for_each:
        lines.append(OF_LISTS + f" Into: folder=DIR{', or in_place=True' * ('in_place' in kinds)}." * bool(writes))
    called.__doc__ = "\n    ".join([(function.__doc__ or "").rstrip() + "\n", *lines, ""])
    return called


def _check_of_types(function: Any, kinds: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    """A function that gives a parameter's value, numbers as Python's own; raises `UsageError` for a type that the
    parameter does not take.  kinds: the types of the parameters."""
    accepted: dict[str, list[tuple[Any, str]]] = {}
    items: dict[str, tuple[type, str]] = {}  # what those of a list have to be, or the keys of a dictionary
    for name, kind in kinds.items():  # verbs that write look at `out` themselves
        choices = get_args(kind) if isinstance(kind, UnionType) else [kind]
        types = [get_origin(hint) or hint for hint in choices]
        if _ACCEPTED.keys() >= set(types) and (name != "out" or "make_folder" not in kinds):
            accepted[name] = [_ACCEPTED[hint] for hint in types]
            firsts = [get_args(hint)[0] for hint in choices if get_args(hint)]
            items.update((name, _ITEMS[first]) for first in firsts if first in (str, float))
    words = {name: choices for name, kind in kinds.items() if (choices := choices_in(kind))}

    def taken(name: str, value: Any) -> Any:
        problem = f"{function.__name__} was given {type(value).__name__} as {name}"
        is_word = isinstance(value, str) and value in words.get(name, ())
        if name in words and not (is_word or (value is None and type(None) in get_args(kinds[name]))):
            what = f"{function.__name__} was given {value!r:.80} as {name}"
            raise UsageError(what, f"It has to be {' or '.join(map(repr, words[name]))}.")
        if name in accepted and not isinstance(value, tuple(kind for kind, _ in accepted[name])):
            raise UsageError(problem, f"It has to be {' or '.join(text for _, text in accepted[name] if text)}.")
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, os.PathLike) and not isinstance(item.__fspath__(), str):
                raise UsageError(f"{problem}, whose path is not a string", "Give a string, or a path that is one.")
        kind, word = items.get(name, (object, ""))
        if isinstance(value, Iterable) and not isinstance(value, (kind, os.PathLike)):
            part = "keys" if isinstance(value, Mapping) else "items"
            each = value if part == "keys" else value.tolist() if hasattr(value, "tolist") else list(value)
            if not (isinstance(each, Iterable) and all(isinstance(item, kind) for item in each)):
                raise UsageError(problem, f"Its {part} have to be {word}.")
            return each
        return value.item() if isinstance(value, Real) and hasattr(value, "item") else value  # numpy's

    return taken


def several(texts: str | Iterable[str], pair: str = "") -> list[str]:
    """The texts as a list; a single text is a list of one. Every option that takes several is read through this.

    pair: what stands between the two of a dictionary's item, where one is taken. Raises `UsageError` for anything else.
    """
    if isinstance(texts, str):
        return [texts]
    if pair and isinstance(texts, Mapping):
        return [f"{old}{pair}{new}" for old, new in texts.items()]
    value: Any = texts
    strings: list[Any] = [None] if isinstance(value, Mapping) or not isinstance(value, Iterable) else list(value)
    if not all(isinstance(string, str) for string in strings):
        raise UsageError(f"{value!r} was given where strings are needed", "", "Give a string, or a list of them.")
    return strings


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was most likely meant: one that it begins, else the most similar; empty for none."""
    names = sorted(known)
    longer = [word for word in names if len(name) > 1 and word.startswith(name)]
    close = longer or difflib.get_close_matches(name, names, 1, 0.6)
    return min(close, key=len) if close else ""


# What texts say to type -----------------------------------------------------------------------------------------------

FILE, MODEL, FOLDER, DIR, NAME, ADDRESS, PATTERN = map(Slot, "FILE MODEL FOLDER DIR NAME ADDRESS PATTERN".split())
OUT, OUT_NPZ, OUT_PT, OUT_SAFETENSORS = map(Slot, ("OUT", "OUT.npz", "OUT.pt", "OUT.safetensors"))
RULES = Slot("RULES.yaml")

Value = str | bool | float | Sequence[str] | Mapping[str, Any]


def command(verb: str, *arguments: str, **options: Value) -> Command:
    """`ckptool VERB ARGUMENTS… OPTIONS…`, with the options called as in Python: `weights_only=True`, `out=OUT`.
    True is a flag; an option with several values is repeated; `False` and "" are left out."""
    present = {name: value for name, value in options.items() if value is not False and value != ""}
    words = (word for name, value in present.items() for word in _option_words(name, value))
    line = Command(("ckptool", *verb.split(), *map(as_argument, arguments), *words))
    present = {name: value for name, value in present.items() if (verb, name) not in PRINTED_ONLY}
    if not VERBS[verb].in_python or any((verb, name) in SHELL_ONLY for name in present):
        return line
    positional = [_literal(arguments)] if verb == "average" else map(_literal, arguments)
    return Command(line, f"ckptool.{VERBS[verb].function}({', '.join([*positional, *_keywords(present)])})")


def arg(name: str = "", /, **options: Value) -> Command:
    """An option that a text names, `arg("rules_file")`, or options with their values, `arg(rank=32, dtype="bf16")`."""
    if name:
        return Command((flag(name),), name)
    words = (word for option, value in options.items() for word in _option_words(option, value))
    return Command(words, ", ".join(_keywords(options)))


def called(line: Command) -> tuple[Any, list[str], dict[str, Any]]:
    """The function of a command, and the files and options typed in it, as Python passes them."""
    verb, *words = with_verb(line[1:])
    function, options = function_of(verb), dict[str, Any]()
    typed: dict[str, Parameter] = {}
    for param in parameters_of(function):
        typed = {**dict.fromkeys(param.option.flags, param), **typed}  # as typed: `--to DEVICE` before `--to CONTAINER`
    remaining, files = iter(words), list[str]()
    for word in remaining:
        if (option := typed.get(word)) is None:
            files.append(word)
        else:
            value = True if option.kind is bool else next(remaining)
            options[option.name] = [*options.get(option.name, ()), value] if option.option.several else value
    return function, files, options


def flag(name: str) -> str:
    """The option of a parameter; empty for an argument."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def _option_words(name: str, value: Value) -> Iterator[str]:
    """The words of an option: `{"a": "b"}` is `a=b`, and so is `{"epoch": 3}`, except for `bundle`, where it is
    `epoch:=3`."""
    if isinstance(value, Mapping):
        sign = ":=" if name == "values" else "="
        value = [f"{key}={item}" if isinstance(item, str) else f"{key}{sign}{item}" for key, item in value.items()]
    option = [flag(name)] if flag(name) else []
    for item in [value] if isinstance(value, (str, bool, float, int)) else value:
        yield from option if item is True else [*option, item if isinstance(item, str) else str(item)]


def _keywords(options: Mapping[str, Value]) -> Iterator[str]:
    return (f"{name}={_literal(value)}" for name, value in options.items())


def _literal(value: Any) -> str:
    """The value as Python has it; what is filled in later stays a name."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    return str(value) if isinstance(value, Slot) and value.isidentifier() else repr(value)


def as_argument(path: str) -> str:
    """A path in a form that no parser takes for an option."""
    return os.path.join(".", path) if path.startswith("-") and not isinstance(path, Slot) else path


def input_of(source: Any, address: str = "") -> str:
    """The file that a checkpoint was read from, or a part of it, as an argument; FILE where there is none."""
    if source is None:
        return FILE / address
    path: str = getattr(source, "shown", None) or source.file.path
    return f"{path}#{address}" if address else path


def other_program(program: str, *files: str, into: str = "") -> Command:
    """A command of another program, with its own options, for these files; `into`: the file that its output goes to.
    For `ls` of a URL it is our own `scan`."""
    if program == "ls" and "://" in files[0]:
        return command("scan", *files)
    return Command((*program.split(), *map(as_argument, files), *((INTO, as_argument(into)) if into else ())))
