"""Paths, URLs and patterns as people give them: what is wrong with a path, in words, its parts, and secrets in URLs;
the keys that a pattern matches."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from itertools import count, islice
from types import MappingProxyType
from typing import NoReturn

from ckptool.commands import FILE, arg, command, other_program
from ckptool.errors import (
    GIVEN,
    BrokenLink,
    CkptoolError,
    FileMissing,
    FileProblem,
    IsAFolder,
    NoMatch,
    NoPermission,
    NotAFolder,
    Unsupported,
    UsageError,
    without_secrets,
)

_NO_PERMISSION = "The permissions of the file or its folder do not allow it."
# By the system's error number: the class of our error, and what it means.
TEMPORARY = re.compile(r"\.ckptool-[0-9a-f]{16}-[0-9a-f]{16}\.tmp")  # the names of temporary files and folders
KINDS: dict[int | None, tuple[type[FileProblem], str]] = {
    errno.ENOENT: (FileMissing, ""),
    errno.EISDIR: (IsAFolder, ""),
    errno.EACCES: (NoPermission, _NO_PERMISSION),
    errno.EPERM: (NoPermission, _NO_PERMISSION),
    errno.ENOTDIR: (NotAFolder, "Part of the path is a file, not a folder."),
    errno.ELOOP: (FileProblem, "The name is a link that leads to itself."),
    errno.ENXIO: (FileProblem, "It is a socket, or a device that is not there."),
    errno.ENAMETOOLONG: (FileProblem, "The name is longer than this file system allows."),
    errno.EROFS: (FileProblem, "The file system is mounted read-only."),
    errno.EIO: (FileProblem, "The disk reported an error; what is on it may be damaged."),
}
MANY_NAMES = 2_000  # of a folder, that are compared with a missing one
_URL = "(?:[A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+:///*[^/]"


def is_url(path: object) -> bool:
    """True for the path of something remote: `hf://org/repo/file`, `https://…`."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    return isinstance(name, str) and "://" in name and re.match(_URL, name) is not None


def may_exist(path: str | os.PathLike[str]) -> bool:
    """True if something is at a path; always for a URL, which is only looked up when it is opened."""
    return is_url(path) or os.path.lexists(path)


def refused_place(path: str | os.PathLike[str], writing: bool = False) -> FileProblem | None:
    """The error for a path that cannot be a place on this machine (remote, `-`, empty), or None."""
    name = os.fspath(path)
    if os.path.lexists(name) or (is_url(name) and not writing):
        return None
    if not name:
        return FileMissing("the file name is empty", "Perhaps a shell variable is not set.")
    if name == "-":
        what = f"- stands for standard {'output' if writing else 'input'}, which is not a file"
        why = "Checkpoints need random access and a name for the finished file; a stream has neither."
        fix = f"Name a file: {arg(out=FILE)}" if writing else "Save it first: cat > FILE; then name FILE"
        return FileProblem(what, why, fix)
    if is_url(name):
        what, why = (f"{name} is not on this machine", "A run is written step by step, which takes a local folder.")
        return FileMissing(what, why, "Write to a local folder, then upload it.").about(errno.ENOENT, name)
    scheme = re.match("([A-Za-z][A-Za-z0-9+.-]+):/{1,2}", name)
    if scheme is None:
        return None
    if not name[scheme.end() :].strip("/"):
        return FileProblem(f"{name} names no file", "Put it after the slashes: hf://org/repo/model.safetensors")
    what, why = f"{name} is not a file on this machine", "A URL has two slashes; pathlib keeps only one."
    return FileMissing(what, why, f"Name it as {scheme[1]}://{name[scheme.end() :]}").about(errno.ENOENT, name)


def file_problem(error: OSError | ValueError, path: str | os.PathLike[str], doing: str) -> CkptoolError:
    """The system's error as one of ours (one of ours is returned as it is). doing: the verb that failed (`read`)."""
    if isinstance(error, CkptoolError):
        return error
    if isinstance(error, FileNotFoundError) and (problem := refused_place(path, doing != "read")):
        return problem
    name = os.fspath(path)
    number = getattr(error, "errno", None)
    if number == errno.ENOENT and is_url(path):
        missing = FileMissing(f"cannot {doing} {name}: {os.strerror(number)}", "Nothing is at this URL.")
        return missing.about(number, path)
    if number == errno.ENOENT and os.path.islink(path):
        what = f"cannot {doing} {name}: it is a link to {os.readlink(path)}, which does not exist"
        why = "Hubs keep files as links into a cache: its target was deleted, not copied along, or is elsewhere."
        fix = f"See its target: {other_program('ls -l', name)}; then download the file again, or copy with cp -L."
        return BrokenLink(what, why, fix).about(number, path)
    reason = os.strerror(number) if number else str(error)
    kind, why = KINDS.get(number, (FileProblem, ""))
    fix = ""
    if "null byte" in reason:
        why = "File names cannot contain that."
    elif number == errno.ENOENT:
        folder = os.path.dirname(absolute(path))
        why = f"There is no folder {folder}."
        if name.startswith("~"):
            why = f"Only a shell expands ~, and not in quotes: {os.path.expanduser(name)}"
        elif os.path.isdir(folder):
            import difflib

            why, names = "There is no such name in its folder.", list[str]()
            with suppress(OSError), os.scandir(folder) as entries:
                names = [entry.name for entry in islice(entries, MANY_NAMES)]
            if close := difflib.get_close_matches(os.fsdecode(os.path.basename(path)), names, 1, 0.75):
                why = f"{why[:-1]}; did you mean {close[0]}?"
            fix = f"Look at what is there: {other_program('ls', os.fsdecode(folder))}"
        elif re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not name.endswith(_INNER_SUFFIXES):
            fix = f"If it is a model on the Hugging Face hub: {command('inspect', f'hf://{name}')}"
    return kind(f"cannot {doing} {name}: {reason}", why, fix).about(number, path)


_DASHES, _QUOTES = "‐‑‒–—―−﹣－", "‘‚“„«"


def as_typed(words: list[str]) -> list[str]:
    """The words of a command line without a comment after them, which zsh passes on.

    Raises `UsageError` for a word that begins with a dash or quotation mark that no shell knows as one, unless there is
    such a file. Word processors, chats and web pages make them of `--` and `"`.
    """
    words = words[: words.index("#")] if "#" in words else words
    for word in (word for word in words if word[:1] and word[0] in _DASHES + _QUOTES):
        if os.path.lexists(word.partition("#")[0]):
            continue
        rest = word.lstrip(f"{_DASHES}-")
        if word[0] in _DASHES and rest:
            what = f"{word} begins with a dash that is no hyphen"
            fix = f"Type {'-' * min(len(rest), 2)}{rest}"
            raise UsageError(what, "Word processors, chats and web pages put it in the place of hyphens.", fix)
        if word[0] in _QUOTES and words[0] not in ("explain", "doctor"):  # whose messages may begin with one
            what = f"{word} begins with a quotation mark that no shell knows"
            why = "Word processors, chats and web pages put it in the place of ' and \"; a shell takes it for a letter."
            raise UsageError(what, why, "Type ' or \" around it.")
    return words


@contextmanager
def temporary_files() -> Iterator[None]:
    """Raises `FileProblem` in place of the system's error where there is no folder for temporary files, or no room in
    it."""
    import tempfile

    try:
        yield
    except OSError as error:
        places, folder = [place for place in (error.filename, error.filename2) if place], tempfile.tempdir
        is_elsewhere = folder and places and not any(str(place).startswith(folder) for place in places)
        if isinstance(error, CkptoolError) or is_elsewhere:
            raise
        problem: CkptoolError = FileProblem("there is no folder for temporary files", "None can be written to.")
        if folder is not None:
            problem = file_problem(error, folder, "write temporary files to")
        problem.fix = "Make room there, or set TMPDIR to another folder."
        raise problem from error


def free_name(name: str, ending: str) -> str:
    """The name that nothing has yet: this one, or with the ending, as often as it takes."""
    while os.path.lexists(name):
        name += ending
    return name


def absolute(path: str | os.PathLike[str]) -> str:
    """The path from the root on. Raises `FileProblem` for a name that no file can have, and for a relative one where
    the working directory was removed.
    """
    if is_url(path):
        return os.fspath(path)
    if "\0" in os.fspath(path):
        raise FileProblem(f"cannot use {os.fspath(path)}: it has a NUL character", "File names cannot contain that.")
    try:
        return os.path.abspath(path)
    except OSError as error:
        what = f"cannot find {os.fspath(path)}: the working directory is gone"
        why = "The current folder was removed, or replaced by a new one of the same name."
        raise FileProblem(what, why, 'Change to it again: cd "$PWD"; or use absolute paths.') from error


_INNER_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".th", ".pkl", ".safetensors", ".index")


def parted(path: str) -> tuple[str, str]:
    """The path without its suffix, and the suffix: `.pth.tar` is one, and so is `.safetensors.index.json`."""
    stem, suffix = os.path.splitext(path)
    while os.path.splitext(stem)[1] in _INNER_SUFFIXES and suffix in (".tar", ".json", ".index.json"):
        stem, before = os.path.splitext(stem)
        suffix = before + suffix
    return stem, suffix


# URLs, and what is secret in them -------------------------------------------------------------------------------------

# What may be a secret in a URL: a password before the host, on the web a token too, and the query, as of a signed one.
# A chained one has its host behind other links: `zip://model.pt::https://user:password@host/a.zip`.
_USER = r"[^\s/?#]*:[^\s/?#]*@|(?:(?<=http://)|(?<=https://))[^\s/?#]+@"
_LINKS = r"(?:[A-Za-z][A-Za-z0-9+.-]+(?:://(?:(?!::)[^\s?#])*)?::)*"
_SECRETS = rf"({_LINKS}[A-Za-z][A-Za-z0-9+.-]+://)({_USER})?([^\s?#]*)(\?[^\s#]*)?"


def named_urls(text: str) -> str:
    """A text with a name in place of each URL that may have a secret in it; `given_url` resolves the name."""

    def name_of(match: re.Match[str]) -> str:
        scheme, user, place, query = match.groups()
        if match[0] in GIVEN or not (user or query):
            return match[0]
        if user:
            GIVEN.setdefault(scheme + place.partition("/")[0], scheme + user + place.partition("/")[0])
        names = (f"{scheme}{place}{f'?{n}' if n else ''}" for n in count())
        return next(name for name in names if GIVEN.setdefault(name, match[0]) == match[0])

    return re.sub(_SECRETS, name_of, text) if "://" in text else text


# The page of a file on a hub, as it is copied from a browser, and where the file is.
_PAGES = re.compile(r"(https://(?:huggingface\.co/(?:(?:datasets|spaces)/)?|github\.com/)[^/?#]+/[^/?#]+)/blob/")


def given_url(name: str) -> str:
    """The URL that a name stands for; with the password for its host, if another URL came with one."""
    host = "/".join(name.split("/", 3)[:3])
    url = GIVEN.get(name) or GIVEN.get(host, host) + name[len(host) :]
    return _PAGES.sub(r"\1/raw/" if "://github.com/" in url else r"\1/resolve/", url, count=1)


def given_urls(urls: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """All URLs with secrets, by name, for another process; `urls`: those of the process that started this one."""
    GIVEN.update(urls)
    return GIVEN


def foreign(text: str) -> str:
    """What another program says, without the secrets in its URLs: a redirect brings URLs of its own."""
    return re.sub(_SECRETS, r"\1\3", without_secrets(text))


# Patterns for keys: globs in which `*` crosses dots, and `re:` for regular expressions --------------------------------

LIMIT = 3.0  # seconds of processor time for one key

Matcher = Callable[[str], bool]


def matcher(pattern: str) -> Matcher:
    """A test of whole keys for `pattern`. Raises `UsageError` for an invalid regular expression."""
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            what = f"{pattern!r} is not a regular expression: {error}"
            raise UsageError(what, "The expression is what follows re:.") from None
        return lambda key: expression.search(key) is not None
    compiled = re.compile(fnmatch.translate(pattern))
    return lambda key: compiled.match(key) is not None


def literal(key: object) -> str:
    """The pattern that matches this key alone."""
    return re.sub(r"^re:", "[r]e:", escape(str(key)))


def selected(keys: Iterable[str], only: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    """The keys that match one of `only` (all, if there is none) and none of `exclude`.

    Raises `NoMatch` naming a pattern that matches nothing.
    """
    keys = list(keys)
    matches = {pattern: list(filter(matcher(pattern), keys)) for pattern in (*only, *exclude)}
    if unmatched := [pattern for pattern in matches if not matches[pattern]]:
        why = "Patterns match whole keys (`*` matches dots, too); for a part of a file, use FILE#ADDRESS."
        fix = f"See the keys: {command('inspect', FILE, all=True)}"
        raise NoMatch(f"the pattern {unmatched[0]!r} matches no key", why, fix)
    chosen = {key for pattern in only for key in matches[pattern]} if only else set(keys)
    return chosen.difference(*(matches[pattern] for pattern in exclude))


def match_within_limit(pattern: re.Pattern[str], key: str) -> bool:
    """Whether an expression from a file matches a whole key; raises `Unsupported` after 3 s of processor time.

    Some expressions try exponentially many ways to match a name of 40 letters. The limit is a timer, which Python has
    in the main thread only; in other threads, and where the timer is already in use, the match runs until it is done.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_VIRTUAL) != (0, 0):
        return pattern.fullmatch(key) is not None

    def expired(number: int, frame: object) -> NoReturn:
        what = f"the pattern {pattern.pattern!r} was still being tried on {key[:60]!r} after {LIMIT:g} seconds"
        raise Unsupported(what, "Nested quantifiers can match in exponentially many ways. Nothing was written.")

    previous_handler = signal.signal(signal.SIGVTALRM, expired)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
        return pattern.fullmatch(key) is not None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous_handler or signal.SIG_DFL)
