"""Runs both sides case by case and prints what differs; exit 1 where something does."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.same_bytes import __doc__ as usage
from tests.support.same_bytes import cases, commands, compare, worker

WORK = cases.ROOT / "build" / "same_bytes"
SHOWN = 40  # differences


class Side:
    """A process that runs command lines with one version of the program."""

    def __init__(self, name: str, python: Path) -> None:
        self.folder = WORK / name
        self.process = subprocess.Popen(
            [python, worker.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def send(self, case: str, lines: list[commands.Words]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"folder": str(self.folder / case), "commands": lines}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> list[dict[str, Any]]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.folder.name}: the process ended with {self.process.wait()}")
        return json.loads(line.replace(str(self.folder), "FOLDER"))  # type: ignore[no-any-return]

    def ask(self, case: str, *words: str) -> dict[str, Any]:
        self.send(case, [list(words)])
        return self.receive()[0]


def python_of(place: str) -> Path:
    path = Path(place).absolute()
    return path / ".venv" / "bin" / "python" if path.is_dir() else path


def chosen(lines: Iterator[commands.Words], only: list[str]) -> list[commands.Words]:
    """The lines of these verbs, and those that make files for them; all, if none is named."""
    found = list(lines)
    if not only:
        return found
    last = max((number for number, words in enumerate(found) if words[0] in only), default=-1)
    return [words for words in found[: last + 1] if words[0] in only or words[-1] != "--json" or "-o" in words]


def lines_of(case: cases.Case, file: str, old: Side) -> Iterator[commands.Words]:
    if case.trains:
        return commands.training()
    out = old.ask(case.name, "inspect", file, "--json")["out"]
    return commands.commands(commands.facts_of(file, json.loads(out) if out else None, case.model), case.few)


def differences(case: cases.Case, sides: tuple[Side, Side], only: list[str], counts: Counter[str]) -> Iterator[Any]:
    """Runs a case on both sides."""
    folders = [side.folder / case.name for side in sides]
    file = case.prepare(folders[0])
    shutil.copytree(*folders, symlinks=True)
    lines = chosen(lines_of(case, file, sides[0]), only)
    for side in sides:
        side.send(case.name, lines)
    for words, old, new in zip(lines, *(side.receive() for side in sides), strict=True):
        counts["commands"] += 1
        counts["refused"] += old["code"] not in (0, 1)
        yield from compare.answers(f"{case.name}: {' '.join(words)}", old, new)
    counts["files"] += sum(path.is_file() for path in folders[0].rglob("*"))
    yield from compare.folders(case.name, *folders)
    for folder in folders:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="a checkout with a .venv, or a python")
    parser.add_argument("--new", metavar="NEW", default=sys.executable, help="the other side (default: this python)")
    parser.add_argument("--only", metavar="VERB", action="append", default=[], help="only this verb; repeatable")
    parser.add_argument("--cases", metavar="TEXT", default="", help="only the cases with this in their names")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="only every N-th case")
    parser.add_argument("-v", action="store_true", help="every difference, those of words too")
    options = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    sides = Side("old", python_of(options.old)), Side("new", python_of(options.new))
    found: list[compare.Difference] = []
    counts, start = Counter[str](), time.monotonic()
    for case in [case for case in cases.cases() if options.cases in case.name][:: options.every]:
        counts["cases"] += 1
        found += differences(case, sides, options.only, counts)
    shown = [difference for difference in found if difference.matters or options.v]
    print(*shown[: None if options.v else SHOWN], sep="\n", end="\n" if shown else "")
    kinds = Counter(difference.kind for difference in found)
    print(", ".join(f"{counts[what]:,} {what}" for what in ("cases", "commands", "files", "refused")), end="; ")
    print(", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "no difference", end="; ")
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if any(difference.matters for difference in found) else 0


if __name__ == "__main__":
    sys.exit(main())
