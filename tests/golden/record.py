"""A line for each case and verb, with a word for each command: what is kept, and how it differs from what is found."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.golden import compare

HERE = Path(__file__).parent
KINDS = ("exit code", "json", "words", "files")

Lines = dict[str, list[str]]  # case -> a word for each command
Record = dict[str, Lines]  # verb -> its lines


def word(answer: Mapping[str, Any]) -> str:
    """What is kept of the answer to a command."""
    structure, texts = _parted(answer["out"])
    texts.append(compare.normal(answer["err"]))
    parts = (structure, "\n".join(texts).strip(), json.dumps(answer["written"]) if answer["written"] else "")
    error = f"[{answer['error']}]" if answer["error"] else ""
    return ":".join([f"{answer['code']}{error}", *(digest(part.encode())[:6] if part else "-" for part in parts)])


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _parted(out: str) -> tuple[str, list[str]]:
    """JSON without texts of several words, and those; other output is all words."""
    document = compare.document(out)
    if document is None:
        return "", [compare.normal(out)]
    texts: list[str] = []
    return (json.dumps(_bare(document, texts)) if document != "" else ""), texts


def _bare(value: Any, texts: list[str]) -> Any:
    """The value without texts of several words, which go to `texts`; numbers as far as all machines agree."""
    if isinstance(value, dict):
        return {key: _bare(each, texts) for key, each in value.items()}
    if isinstance(value, list):
        return [_bare(each, texts) for each in value]
    if isinstance(value, str) and " " in value:
        texts.append(value)
        return "…"
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(folder: Path) -> Record:
    """The record in a folder; empty where there is none."""
    return {
        path.stem: {case: words for case, *words in map(str.split, path.read_text().splitlines())}
        for path in sorted(folder.glob("*.txt"))
    }


def write(folder: Path, record: Record) -> None:
    """Replaces the record in a folder."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.txt"):
        path.unlink()
    for verb, lines in record.items():
        text = "".join(f"{' '.join([case, *words])}\n" for case, words in sorted(lines.items()))
        (folder / f"{verb}.txt").write_text(text)


def packed(facts: Any) -> str:
    """Facts as a word."""
    return json.dumps(facts, separators=(",", ":")).replace(" ", "\\u0020")


def facts(record: Record) -> Iterator[tuple[str, Any]]:
    """Each case with the facts that were kept of it."""
    return ((case, json.loads(word)) for case, (word,) in record.get("cases", {}).items())


def differences(case: str, commands: Iterable[list[str]], old: Record, new: Record) -> Iterator[compare.Difference]:
    """What a case's words say that the record does not. commands: the case's, in order."""
    by_verb: dict[str, list[str]] = {}
    for words in commands:
        by_verb.setdefault(words[0], []).append(" ".join(words))
    for verb, texts in by_verb.items():
        one, other = (record.get(verb, {}).get(case, []) for record in (old, new))
        if len(one) != len(other):
            yield compare.Difference("commands", f"{case}: {verb}", f"{len(one)} commands", f"{len(other)}")
            continue
        for text, before, after in zip(texts, one, other, strict=True):
            for kind, left, right in zip(KINDS, before.split(":"), after.split(":"), strict=True):
                if left != right:
                    yield compare.Difference(kind, f"{case}: {text}", left, right)
