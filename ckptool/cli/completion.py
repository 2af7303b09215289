"""Completion: what may follow what has been typed.

The shell hands over the line up to the cursor; what comes back goes on from its last word: verbs, options and their
values from what the verbs declare, and names in files. What a shell would take apart is not offered: nothing that a
file calls its tensors is run. Only headers are read, in bounded time, and no error is shown: whoever presses TAB is in
the middle of a sentence.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckptool.commands import VERBS, Parameter, Use, function_of, with_verb
from ckptool.errors import counted, printable

SECONDS = 3
FILES = 1  # the exit code that asks the shell for names of files
_PLAIN = re.compile(r"[\w./+@%,:=-]*")  # means itself to every shell, anywhere in a word


class Candidate(NamedTuple):
    """A continuation of a word.  text: the word, as a program gets it.  about: shown beside it.  final: a space may
    follow."""

    text: str
    about: str = ""
    final: bool = True


def complete(arguments: Sequence[str]) -> int:
    """Answers a shell: prints what may follow in `SHELL LINE [REPLACED [KEY]]`, and returns the exit code.
    replaced: the part of the last word that bash replaces by its choice.  key: `?` only lists them."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(FILES))
    signal.alarm(SECONDS)
    answer = sys.stdout.buffer
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        shell, line, *replaced = arguments
        (*words, typed), is_open = words_of(line)
        choices = candidates(with_verb(words[2 if words[1:2] == ["help"] else 1 :]), typed)
        by_rest = {word.text[len(typed) :]: word for word in choices or () if word.text.startswith(typed)}
        plain = {rest: by_rest[rest] for rest in sorted(by_rest) if _PLAIN.fullmatch(rest)}
        only_lists = replaced[1:] == ["63"] and len(plain) > 1  # TAB for the second time
        pieces = []
        for rest, word in plain.items():
            name = printable(re.sub(r".*[#/](?=.)", "", word.text, flags=re.DOTALL) if "#" in word.text else word.text)
            about = printable(word.about)
            space = " " if word.final and (shell == "zsh" or not is_open) else ""  # zsh closes the quote before it
            if shell == "fish":
                pieces.append(f"{word.text}\t{about}\0")
            elif shell == "zsh":
                pieces.append(f"{rest}\0{space}\0{f'{name}  -- {about}' if about else name}\0")
            else:
                pieces.append(f"{name}\n" if only_lists else f"{replaced[0]}{rest}{space}\n")
        answer.write(os.fsencode("".join(pieces)))
        answer.flush()
    except Exception:  # noqa: BLE001 (the file is somebody's, and so is the line)
        return FILES
    return FILES if choices is None else 0


def words_of(line: str) -> tuple[list[str], bool]:
    """The words of a line as a program gets them, and whether a quote is open in the last, which is being typed."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:  # a quote is open, or nothing follows a backslash
        return [*words, lexer.token], True
    return [*words, ""] if line[-1:].isspace() and not line.endswith("\\ ") else words, False


def _module(module: str) -> Any:
    return import_module(f"ckptool.{module}")


# The values of options and arguments that take a text, by what stands for it in the help.
VALUES: dict[str, Callable[[], Sequence[str]]] = {
    "DTYPE": lambda: [dtype.name for dtype in _module("checkpoint.dtypes").DTYPES if dtype.kind == "float"],
    "CONTAINER": lambda: [format.name for format in _module("formats").FORMATS if format.writable],
    "DEVICE": lambda: ["cpu", "cuda:0", "cuda:1", "mps"],
    "KIND": lambda: list(_module("analysis.diff").IGNORABLE),
    "SCHEME": lambda: list(_module("transforms.lora.adapters").SCHEMES),
    "FILE.yaml|LAYOUT": lambda: list(_module("names.layout").shipped()),
    "[CODE|-]": lambda: list(_module("verbs._explain").all_codes()),
    "[VERB]": lambda: [verb for verb in VERBS if " " not in verb],
}
# Values that only a person knows.
NOT_OFFERED = {*"N X D R T FRACTION SECONDS STEP SIZE DECAY RxC W,W,… SLICE PATTERN".split()}


def candidates(words: Sequence[str], typed: str) -> list[Candidate] | None:
    """The continuations of the last word; `words`, before it, begin with the verb. None where a file is meant."""
    for text in (typed, typed.partition("=")[2]) if "#" in typed else ():  # FILE#ADDRESS, NAME=FILE#ADDRESS
        path, at = _module("formats").split(text)
        path = path if os.path.lexists(path) else os.path.expanduser(os.path.expandvars(path))
        if at is not None and os.path.lexists(path):
            refuses = words and words[0] in VERBS and VERBS[words[0]].address is Use.REFUSES
            before = typed[: len(typed) - len(at)]
            return [] if refuses else [choice._replace(text=before + choice.text) for choice in addresses(path, at)]
    if words and words[0] not in VERBS and _module("checkpoint.paths").may_exist(_module("formats").split(words[0])[0]):
        words = ["inspect", *words]
    if not words or words[0] not in VERBS:
        if typed.startswith("-"):
            return [] if words else [Candidate("--help"), Candidate("--version")]
        verbs = {}
        for verb, facts in VERBS.items():
            *parents, last = verb.split()[: len(words) + 1]
            if parents == [*words]:
                verbs[last] = Candidate(last, _first_sentence(facts.about) if verb.endswith(last) else "…")
        is_file = bool(not words and typed and not any(verb.startswith(typed) for verb in verbs))
        return None if is_file else list(verbs.values())
    parameters: list[Parameter] = _module("cli.parser").typed_parameters(function_of(words[0]))
    flags = {name: param for param in parameters for name in param.option.flags}
    pending: Parameter | None = None  # the option whose value comes next
    used: list[Parameter] = []
    options = words[1 : words.index("--")] if "--" in words else words[1:]
    for word in options:
        flag = flags.get(word.partition("=")[0]) if pending is None else None
        used += [flag] if flag is not None else []
        pending = None if flag is None or flag.kind is bool or "=" in word else flag
    name, equals, value = typed.partition("=")
    if pending is None and equals and name in flags:
        values = _values(flags[name], value, words)
        return values and [choice._replace(text=f"{name}={choice.text}") for choice in values]
    if pending is None and typed.startswith("-") and "--" not in words:
        unused = [(flag, param.option) for flag, param in flags.items() if param.option.several or param not in used]
        offered = [Candidate(flag, _first_sentence(option.help)) for flag, option in unused if not option.hidden]
        return [Candidate("-h", "Show the help."), Candidate("--help", "Show the help."), *offered]
    pending = pending or next((param for param in parameters if not param.option.flags), None)
    return [] if pending is None else _values(pending, typed, words)


def _values(parameter: Parameter, typed: str, words: Sequence[str]) -> list[Candidate] | None:
    option = parameter.option
    choices = list(option.choices or (VALUES[option.metavar]() if option.metavar in VALUES else ()))
    if choices and not ("FILE" in option.metavar and not any(choice.startswith(typed) for choice in choices)):
        return [Candidate(typed[: typed.rfind(",") + 1] * option.several + choice) for choice in choices]
    if option.metavar == "ADDRESS":
        file = next((word for word in words[1:] if os.path.lexists(word)), None)
        return addresses(file, typed) if file else []
    return [] if option.metavar in NOT_OFFERED else None


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".:")


def addresses(path: str, typed: str) -> list[Candidate]:
    """The addresses in a file that go on from a typed one, each up to the next `/` or `.` that others share.
    Raises `CkptoolError` for what cannot be opened, and where nothing is at the part before the last `/`."""
    from ckptool.analysis.words import tensor_text, value_text
    from ckptool.checkpoint import Composite, TensorEntry
    from ckptool.checkpoint.tree import children, find, module_state_dict, segment_text
    from ckptool.formats import open_file

    parents, slash, start = typed.rpartition("/")
    node = find(open_file(path).checkpoint.tree, parents)[1]
    parts = [(segment_text(key), part) for key, part in children(node)]
    counts = Counter(name for name, _ in parts)
    parts += [(str(key), part) for key, part in (module_state_dict(node) or {}).items() if str(key) not in counts]
    parts_by_name = {name: part for name, part in parts if name and counts[name] < 2}  # 0 and '0' read the same
    names, candidates = [name for name in parts_by_name if name.startswith(start)], list[Candidate]()
    while True:  # up to the next dot; while there is only one continuation, further
        groups = Counter(name[: name.find(".", len(start)) + 1] or name for name in names)
        only = next(iter(groups), "")
        if len(groups) != 1 or only in parts_by_name:
            break
        start = only
    for group, count in groups.items():
        entry: Any = parts_by_name.get(group)
        text = parents + slash + group
        is_tensor = isinstance(entry, (TensorEntry, Composite))
        child_count = 0 if is_tensor else sum(1 for _ in children(entry))
        if group not in parts_by_name or count > 1:
            candidates.append(Candidate(text, counted(count, "entry", "entries"), final=False))
        elif child_count:
            candidates.append(Candidate(f"{text}/", counted(child_count, "entry", "entries"), final=False))
        else:
            candidates.append(Candidate(text, tensor_text(entry) if is_tensor else value_text(entry, 40)))
    return candidates
