"""The keys that the text of a group stands for."""

import itertools
import re

_PIECE = re.compile(r"\\(.)|\{((?:\\.|[^\\}])*)\}|([^\\{}]+)", re.DOTALL)
_ALTERNATIVE = re.compile(r"((?:\\.|[^\\,])*)(?:, |$)", re.DOTALL)


def expand(text: str) -> list[str]:
    """All that a group's text stands for, by the description in the module alone."""
    pieces: list[list[str]] = []
    at = 0
    while at < len(text):
        match = _PIECE.match(text, at)
        assert match is not None, text[at:]
        pieces.append([match[1] or match[3]] if match[2] is None else alternatives(match[2]))
        at = match.end()
    return ["".join(choice) for choice in itertools.product(*pieces)]


def alternatives(inside: str) -> list[str]:
    result: list[str] = []
    at = 0
    while True:
        match = _ALTERNATIVE.match(inside, at)
        assert match is not None
        if ends := re.fullmatch(r"([0-9]+)\.\.([0-9]+)", match[1]):
            result += map(str, range(int(ends[1]), int(ends[2]) + 1))
        else:
            result.append(re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL))
        at = match.end()
        if not match[0].endswith(", ") or len(match[0]) != len(match[1]) + 2:
            return result
