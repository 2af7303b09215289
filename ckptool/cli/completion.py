r"""Completion: what can stand where somebody types, quoted for the shell that asks.

The shell hands over the line up to the cursor; what comes back continues its last word: verbs, options and their values
from what the verbs declare, and names in files. These are quoted as the shell's own quoting at the cursor demands: `"`,
`'`, `\`, or none. Only headers are read, in bounded time, and no error is told: whoever presses TAB is in the middle of
a sentence.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckptool.commands import VERBS, Parameter, Use, with_verb
from ckptool.errors import counted, printable

SECONDS = 3
FILES = 1  # the exit code that asks the shell for names of files


class Candidate(NamedTuple):
    """A continuation of a word.  text: the word, as a program gets it.  about: shown beside it.  final: a space may
    follow."""

    text: str
    about: str = ""
    final: bool = True


class Word(NamedTuple):
    """A word of a line.  raw: as it was typed.  text: as a program gets it.  quote: the one that is open."""

    raw: str
    text: str
    quote: str


def complete(arguments: Sequence[str]) -> int:
    """Answers a shell: prints what may follow in `SHELL LINE [REPLACED [KEY]]`, and returns the exit code.

    replaced: of the last word, the part that bash puts its choice in place of.  key: `?` only lists them.
    """
    signal.signal(signal.SIGALRM, lambda *_: os._exit(FILES))
    signal.alarm(SECONDS)
    answer = sys.stdout.buffer
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        shell, line, *more = arguments
        *before, current = words_of(line, fish=shell == "fish")
        found = candidates(with_verb([word.text for word in before[1:]]), current.text)
        fitting = {each.text: each for each in found or () if _can_follow(each.text, current.text, shell)}
        answer.write(_answer(shell, current, [fitting[text] for text in sorted(fitting)], more))
        answer.flush()
    except Exception:  # noqa: BLE001 (the file is somebody's, and so is the line)
        return FILES
    return FILES if found is None else 0


def _can_follow(text: str, typed: str, shell: str) -> bool:
    """True for a word that goes on from what was typed, and can stand on a command line."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return text.startswith(typed) and "\0" not in text and not (shell == "fish" and "\t" in text)


def _answer(shell: str, current: Word, found: list[Candidate], more: Sequence[str]) -> bytes:
    """Lines for bash, each with what is put in place of the part that it replaces; for the others pieces that end with
    NUL."""
    if shell == "fish":  # which quotes by itself
        return b"".join(os.fsencode(f"{each.text}\t{printable(each.about)}\0") for each in found)
    ends = [current.raw + quoted_on(each.text[len(current.text) :], current.quote) for each in found]
    if current.quote:  # bash closes it, but not behind the same character
        close = current.quote[-1]
        closed = [each.final and (shell == "zsh" or end.endswith(close)) for end, each in zip(ends, found, strict=True)]
        ends = [end + close * is_closed for end, is_closed in zip(ends, closed, strict=True)]
    if shell == "zsh":
        listed = [_short(each.text) + (f"  -- {printable(each.about)}" if each.about else "") for each in found]
        pieces = zip(ends, found, listed, strict=True)
        return b"".join(os.fsencode(f"{end}\0{' ' * each.final}\0{text}\0") for end, each, text in pieces)
    start = len(current.raw) - len(more[0])
    lines = [end[start:] + " " * (each.final and not current.quote) for end, each in zip(ends, found, strict=True)]
    if more[1:] == ["63"] and len(found) > 1:  # TAB for the second time: they are only listed
        lines = [_short(each.text) for each in found]
    return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


def _short(text: str) -> str:
    """An address without the file and what is above it."""
    return printable(re.sub(r".*[#/](?=.)", "", text, flags=re.DOTALL) if "#" in text else text)


# Words ----------------------------------------------------------------------------------------------------------------

_ANY = r"(?P<space>\s+)|(?P<plain>[^\s'\"\\$]+|\$(?!'))|"
_POSIX = re.compile(
    _ANY + r"""\\(?P<escape>.?)|\$'(?P<ansi>(?:[^'\\]|\\.?)*)'?|'(?P<single>[^']*)'?|"(?P<double>(?:[^"\\]|\\.?)*)"?""",
    re.DOTALL,
)
_FISH = re.compile(
    _ANY.replace("(?!')", "")
    + r"""(?P<codes>(?:\\[xX][0-9a-fA-F]{1,2})+|\\u[0-9a-fA-F]{1,4}|\\c?.?)"""
    + r"""|'(?P<single>(?:[^'\\]|\\.?)*)'?|"(?P<double>(?:[^"\\]|\\.?)*)"?""",
    re.DOTALL,
)
_OPENING = {"ansi": "$'", "single": "'", "double": '"'}
_CODE = re.compile(r"((?:\\[xX][0-9a-fA-F]{1,2})+)|\\u([0-9a-fA-F]{1,4})|\\c(.)|\\(.)", re.DOTALL)
_CONTROLS = dict(zip("abefnrtv", "\a\b\x1b\f\n\r\t\v", strict=True))


def words_of(line: str, fish: bool = False) -> list[Word]:
    """The words of a line as a shell takes them apart; the last, which is being typed, is empty after a space."""

    def decoded(code: re.Match[str]) -> str:
        if code[1]:
            return os.fsdecode(bytes(int(each, 16) for each in re.split(r"\\[xX]", code[1])[1:]))
        if code[2]:
            return chr(int(code[2], 16))
        return chr(ord(code[3]) & 31) if code[3] else _CONTROLS.get(code[4], code[4])

    words = [Word("", "", "")]
    for found in (_FISH if fish else _POSIX).finditer(line.lstrip()):
        kind = found.lastgroup or ""
        if kind == "space":
            words.append(Word("", "", ""))
            continue
        text, opening = found[kind], _OPENING.get(kind, "")
        is_open = opening and len(found[0]) == len(opening) + len(text)
        if kind in ("ansi", "codes"):
            text = _CODE.sub(decoded, text)
        elif kind == "double" or (kind == "single" and fish):
            text = re.sub(r"\\([$`\"\\\n])" if kind == "double" else r"\\([\\'])", r"\1", text)
        words[-1] = Word(words[-1].raw + found[0], words[-1].text + text, opening if is_open else "")
    return words


def quoted_on(text: str, quote: str = "") -> str:
    """A text as bash and zsh take it literally where a quote is open, or none is; control characters as codes."""
    return "".join(c if (c.isascii() and c.isalnum()) or c in "_./-" else _quoted(c, quote) for c in text)


def _quoted(c: str, quote: str) -> str:
    if not c.isprintable() or quote == "$'":
        code = "".join(f"\\x{byte:02x}" for byte in os.fsencode(c))
        return code if quote == "$'" else f"{quote}$'{code}'{quote}"
    if quote == "'":
        return c if c != "'" else r"'\''"
    if quote:  # a backslash would stay before the `!`, which means history even there
        return '"\\!"' if c == "!" else f"\\{c}" if c in '$`"\\' else c
    return c if c.isalnum() or c in "+%@,:" else f"\\{c}"


# What can stand there -------------------------------------------------------------------------------------------------


def _of(module: str) -> Any:
    return import_module(f"ckptool.{module}")


# The values of options and arguments that take a text, by what stands for it in the help.
VALUES: dict[str, Callable[[], Sequence[str]]] = {
    "DTYPE": lambda: [dtype.name for dtype in _of("checkpoint.dtypes").DTYPES if dtype.kind == "float"],
    "CONTAINER": lambda: [each.name for each in _of("formats").FORMATS if each.writable],
    "DEVICE": lambda: ["cpu", "cuda:0", "cuda:1", "mps"],
    "KIND": lambda: list(_of("analysis.diff").IGNORABLE),
    "SCHEME": lambda: list(_of("transforms.lora.schemes").SCHEMES),
    "FILE.yaml|LAYOUT": lambda: list(_of("names.layout").shipped()),
    "[CODE|-]": lambda: list(_of("verbs._explain").all_codes()),
    "[VERB]": lambda: [verb for verb in VERBS if " " not in verb],
}
NUMBERS = {"N", "X", "D", "R", "T", "SHARE", "SECONDS", "STEP", "SIZE", "DECAY", "RxC", "W,W,…", "SLICE"}


def candidates(words: Sequence[str], typed: str) -> list[Candidate] | None:
    """The continuations of a word after others, of which the first is the verb; None where a file is meant."""
    for text in (typed, typed.partition("=")[2]) if "#" in typed else ():  # FILE#ADDRESS, NAME=FILE#ADDRESS
        path, at = _of("formats.opening").split(text)
        path = path if os.path.lexists(path) else os.path.expanduser(os.path.expandvars(path))
        if at is not None and os.path.lexists(path):
            refuses = words and words[0] in VERBS and VERBS[words[0]].address is Use.REFUSES
            before = typed[: len(typed) - len(at)]
            return [] if refuses else [each._replace(text=before + each.text) for each in addresses(path, at)]
    if not words or words[0] not in VERBS:
        return _verbs(words, typed)
    cli = _of("cli.verb")
    parameters: list[Parameter] = cli.typed_parameters(cli.function_of(words[0]))
    flags = {name: each for each in parameters for name in each.option.flags}
    asked: Parameter | None = None  # the option whose value comes next
    used: list[Parameter] = []
    options = words[1 : words.index("--")] if "--" in words else words[1:]
    for word in options:
        flag = flags.get(word.partition("=")[0]) if asked is None else None
        used += [flag] if flag is not None else []
        asked = None if flag is None or flag.kind is bool or "=" in word else flag
    name, equals, value = typed.partition("=")
    if asked is None and equals and name in flags:
        found = _values(flags[name], value, words)
        return found and [each._replace(text=f"{name}={each.text}") for each in found]
    if asked is None and typed.startswith("-") and "--" not in words:
        left = [(flag, each.option) for flag, each in flags.items() if each.option.several or each not in used]
        told = [Candidate(flag, _first_sentence(option.help)) for flag, option in left if not option.hidden]
        return [Candidate("-h", "Show the help."), Candidate("--help", "Show the help."), *told]
    asked = asked or next((each for each in parameters if not each.option.flags), None)
    return [] if asked is None else _values(asked, typed, words)


def _verbs(words: Sequence[str], typed: str) -> list[Candidate]:
    if typed.startswith("-"):
        return [] if words else [Candidate("--help"), Candidate("--version")]
    found = {}
    for verb, facts in VERBS.items():
        *above, last = verb.split()[: len(words) + 1]
        if above == [*words]:
            found[last] = Candidate(last, _first_sentence(facts.about) if verb.endswith(last) else "…")
    return list(found.values())


def _values(parameter: Parameter, typed: str, words: Sequence[str]) -> list[Candidate] | None:
    option = parameter.option
    choices = list(option.choices or (VALUES[option.metavar]() if option.metavar in VALUES else ()))
    if choices and not ("FILE" in option.metavar and not any(each.startswith(typed) for each in choices)):
        done = typed[: typed.rfind(",") + 1] if option.several else ""
        return [Candidate(done + each) for each in choices]
    if option.metavar in ("ADDRESS", "PATTERN"):
        file = next((word for word in words[1:] if os.path.lexists(word)), None)
        return (addresses if option.metavar == "ADDRESS" else keys)(file, typed) if file else []
    return [] if option.metavar in NUMBERS else None


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".:")


def addresses(path: str, typed: str) -> list[Candidate]:
    """The addresses in a file that go on from a typed one, each up to the next `/` or `.` that others share.

    Raises `CkptoolError` for what cannot be opened, and where nothing is at the part before the last `/`.
    """
    from ckptool.checkpoint.pickled_modules import module_state_dict
    from ckptool.checkpoint.tree import children, find, segment_text
    from ckptool.formats.opening import open_file

    above, slash, begun = typed.rpartition("/")
    node = find(open_file(path).checkpoint.tree, above)[1]
    parts = [(segment_text(key), part) for key, part in children(node)]
    known = Counter(name for name, _ in parts)
    parts += [(str(key), part) for key, part in (module_state_dict(node) or {}).items() if str(key) not in known]
    there = {name: part for name, part in parts if name and known[name] < 2}  # 0 and '0' read the same
    return [each._replace(text=above + slash + each.text) for each in _next(there, begun)]


def keys(path: str, typed: str) -> list[Candidate]:
    """The keys of the weights in a file, for a pattern; without those in which a letter would be part of one."""
    from ckptool.conventions.state_dicts import find_state_dicts
    from ckptool.formats.opening import open_file

    roots = [root for root in find_state_dicts(open_file(path).checkpoint) if root.is_model]
    return list(_next({name: root.node[name] for root in roots for name in root.names() if "*" not in name}, typed))


def _next(there: Mapping[str, Any], begun: str) -> Iterator[Candidate]:
    """The names that begin so, up to the next dot: where there is only one way, up to where there are several."""
    names = [name for name in there if name.startswith(begun)]
    while True:
        groups = Counter(name[: name.find(".", len(begun)) + 1] or name for name in names)
        only = next(iter(groups), "")
        if len(groups) != 1 or only in there:
            break
        begun = only
    for group, count in groups.items():
        if group in there and count == 1:
            yield _entry(group, there[group])
        else:
            yield Candidate(group, counted(count, "entry", "entries"), final=False)


def _entry(name: str, node: Any) -> Candidate:
    from ckptool.analysis.words import tensor_text, value_text
    from ckptool.checkpoint import Composite, TensorEntry
    from ckptool.checkpoint.tree import children

    if isinstance(node, (TensorEntry, Composite)):
        return Candidate(name, tensor_text(node))
    if any(True for _ in children(node)):
        return Candidate(f"{name}/", counted(sum(1 for _ in children(node)), "entry", "entries"), final=False)
    return Candidate(name, value_text(node, 40))
