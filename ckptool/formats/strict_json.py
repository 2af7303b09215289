"""JSON as two readers cannot understand it in two ways: no name twice, no NaN, no -0, nothing but Unicode text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ckptool.errors import Ambiguous, Corrupt, LimitExceeded, is_text

MAX_VALUE = 1 << 16  # characters of one member, where members are read one by one
MAX_TEXTS = 1_000_000
_USUAL_VALUE = 1 << 9
_BATCH = 1 << 15

Pairs = tuple[tuple[str, Any], ...]

_OPEN = re.compile(r"[ \t\n\r]*\{[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_SPACE = re.compile(r"[ \t\n\r]*")
_NEXT = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
_END = re.compile(r"\}[ \t\n\r]*")
_MINUS_ZERO = re.compile(r"[\[:,][ \t\n\r]*-0")
_CUT = "It is truncated, or was edited by hand."


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `raw`. `what` names it in errors (`model.safetensors: its header`).

    Raises `Ambiguous` for a name that is there twice, `Corrupt` for anything that is not an object in strict JSON.
    """

    try:
        value = _decoder(what).decode(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what} is not valid JSON ({str(error)[:100]})", _CUT) from None
    if not isinstance(value, dict):
        raise Corrupt(f"{what} is not a JSON object", _CUT)
    if b"\\u" in raw and not is_text(json.dumps(value, ensure_ascii=False)):
        raise _half_a_pair(what)
    return value


def members(raw: bytes, what: str, texts: str, take: Callable[[Pairs], bool]) -> Iterator[tuple[str, Any]]:
    """Name and value of each member of the JSON object in `raw`, one after the other.

    take: is offered many members at once where they can be, objects in them as tuples of pairs, and answers whether it
    took them all; those are not given again. What it does not take comes one by one.

    However many values `raw` has, only one is in memory as an object: a hostile header would take thirty times its
    size. A value may have 65,536 characters; the one of the member called `texts` may be larger, and is an object of
    nothing but texts. Raises `Corrupt` for anything that is not strict JSON, `Ambiguous` for a name that is there twice
    in a value (whether `members` gave one twice is for the caller to see), `LimitExceeded` for more than a million
    texts.
    """
    try:
        cursor = _Cursor(raw.decode("utf-8"), what)
    except ValueError as error:
        raise Corrupt(f"{what} is not valid JSON ({str(error)[:100]})") from None
    for name in cursor.names(take):
        yield name, cursor.texts() if name == texts else cursor.value()
    if cursor.at != len(cursor.text):
        raise cursor.wrong("it goes on after its end")


class _Cursor:
    """A place in a JSON text."""

    def __init__(self, text: str, what: str) -> None:
        self.text, self.what, self.at, self.offered = text, what, 0, 0
        self.decoder = _decoder(what)
        self.escapes = "\\u" in text  # only these can spell half a surrogate pair
        self.one_by_one = self.escapes or ("-0" in text and _MINUS_ZERO.search(text) is not None)

    def names(self, take: Callable[[Pairs], bool] | None = None) -> Iterator[str]:
        """The names of the object that begins here; whoever takes one reads its value before the next.

        take: see `members`.
        """
        if not self.skip(_OPEN):
            raise self.wrong("it is not an object")
        if self.skip(_END):
            return
        while True:
            while take is not None and self.batch(take):
                pass
            name = self.string()
            if not self.skip(_COLON):
                raise self.wrong("a name without a value")
            yield name
            if (end := self.skip(_NEXT)) is None:
                raise self.wrong("a member that does not end")
            if end == "}":
                return

    def batch(self, take: Callable[[Pairs], bool]) -> bool:
        """Offers the members that begin here and end within `_BATCH` characters, and steps over those that were taken.

        What is cut out is JSON by itself only where it ends between two members, so that no text is read in two ways.
        Members that were offered in vain are not offered again.
        """
        end = -1 if self.one_by_one or self.at < self.offered else self.text.rfind("},", self.at, self.at + _BATCH)
        if end < 0:
            return False
        self.offered = end
        try:
            pairs = _PAIRS.decode(f"{{{self.text[self.at : end + 1]}}}")
        except (ValueError, RecursionError):
            return False
        if not take(pairs):
            return False
        self.at = end + 2
        self.skip(_SPACE)
        return True

    def skip(self, pattern: re.Pattern[str]) -> str | None:
        """Steps over what the pattern matches; gives its group, or an empty text if it has none."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[1] if pattern.groups else " "

    def string(self) -> str:
        if not self.text.startswith('"', self.at):
            raise self.wrong("a string was expected")
        try:
            value, self.at = self.decoder.raw_decode(self.text, self.at)
        except ValueError as error:
            raise self.wrong(str(error)) from None
        if self.escapes and not is_text(value):
            raise _half_a_pair(self.what)
        return str(value)

    def value(self) -> Any:
        for limit in (_USUAL_VALUE, MAX_VALUE):
            try:
                value, length = self.decoder.raw_decode(self.text[self.at : self.at + limit])
            except (ValueError, RecursionError) as error:
                problem = str(error)
            else:
                self.at += length
                return value
        raise self.wrong(problem)

    def texts(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name in self.names():
            if name in texts:
                raise Ambiguous(f"{self.what} names {name} twice")
            texts[name] = self.string()
            if len(texts) > MAX_TEXTS:
                raise LimitExceeded(f"{self.what} holds more than {MAX_TEXTS:,} strings")
        return texts

    def wrong(self, why: str) -> Corrupt:
        return Corrupt(f"{self.what} is not valid JSON at character {self.at:,} ({why[:100]})")


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _integer(text: str) -> int:
    if text == "-0":  # an integer to Python, and none to Rust
        raise ValueError("-0 is not an integer")
    return int(text)


_PAIRS = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=_no_constant)


def _decoder(what: str) -> json.JSONDecoder:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_name = dict(pairs)
        if len(by_name) != len(pairs):
            repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise Ambiguous(f"{what} names {repeated} twice")
        return by_name

    return json.JSONDecoder(object_pairs_hook=unique, parse_constant=_no_constant, parse_int=_integer)


def _half_a_pair(what: str) -> Corrupt:
    return Corrupt(f"{what} has strings that are not Unicode (half a surrogate pair)")
