"""Runs the cases on some processes, and keeps what comes, or prints how it differs; exit 1 where something does."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from tests.golden import __doc__ as usage
from tests.golden import cases, commands, compare, record, worker

WORK = cases.ROOT / "build" / "golden"
SHOWN = 60  # kinds of differences
MAKING = Lock()  # torch has one generator


class Side:
    """A process that runs command lines with one version of the program."""

    def __init__(self, python: Path, home: Path, folder: Path) -> None:
        self.folder = folder
        self.package = str(home / "ckptool") + "/"  # where the layouts that ship lie
        odd = {"COLUMNS": "80", "PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        odd["PYTHONDONTWRITEBYTECODE"] = "1"  # what user code of a case leaves is not for the record
        skipped = ("CKPTOOL", "PYTEST", "PYTHONPATH")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(skipped)}
        if (home / "ckptool").is_dir():  # two checkouts may share a .venv, in which one of them is installed
            environment["PYTHONPATH"] = str(home)
        self.process = subprocess.Popen(
            [python, worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            env={**environment, **odd},
        )

    def run(self, case: str, lines: list[commands.Words]) -> list[dict[str, Any]]:
        """The answers to command lines in the case's folder."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"folder": str(self.folder / case), "commands": lines}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{case}: the process ended with {self.process.wait()}")
        line = line.replace(str(self.folder / case), "FOLDER").replace(str(self.folder), "ABOVE")
        line = line.replace(self.package, "PACKAGE/")
        return json.loads(line)  # type: ignore[no-any-return]


class Slot:
    """A place where cases run one after the other: on one side, or on two."""

    def __init__(self, number: int, versions: list[tuple[Path, Path]], only: list[str], facts: dict[str, Any]) -> None:
        self.only, self.facts = only, facts
        self.sides = [Side(*version, WORK / f"{number}{'ab'[i]}") for i, version in enumerate(versions)]

    def run(self, case: cases.Case) -> tuple[list[Any], list[commands.Words], list[list[dict[str, Any]]]]:
        """The facts of a case with the digest of its input, its commands, and the answers of each side."""
        folders = [side.folder / case.name for side in self.sides]
        with MAKING:
            file = case.prepare(folders[0])
        for other in folders[1:]:
            shutil.copytree(folders[0], other, symlinks=True)
        made = record.digest(json.dumps(worker.settle(str(folders[0]), worker.FIRST)).encode())[:12]
        facts = self.facts.get(case.name) or [made, asdict(self._facts(case, file))]
        lines = chosen(list(case.lines(commands.Facts(**facts[1]))), self.only)
        answers = [side.run(case.name, lines) for side in self.sides]
        for folder in folders:
            shutil.rmtree(folder)
        return [made, facts[1]], lines, answers

    def _facts(self, case: cases.Case, file: str) -> commands.Facts:
        out = self.sides[0].run(case.name, [["inspect", file, "--json"]])[0]["out"]
        return commands.facts_of(file, json.loads(out) if out else None, case.model)


def version_at(place: str) -> tuple[Path, Path]:
    """The python of a checkout, or a python, and the folder where the package lies."""
    path = Path(place).absolute()
    python = path / ".venv" / "bin" / "python" if path.is_dir() else path
    return python, python.parents[2]


def chosen(found: list[commands.Words], only: list[str]) -> list[commands.Words]:
    """The lines of these verbs, and those that make files for them; all, if none is named."""
    if not only:
        return found
    last = max((number for number, words in enumerate(found) if words[0] in only), default=-1)
    return [words for words in found[: last + 1] if words[0] in only or words[-1] != "--json" or "-o" in words]


def ran(options: argparse.Namespace, facts: dict[str, Any]) -> Iterator[tuple[cases.Case, Any]]:
    """Each case with what came of it, in order."""
    versions = [*map(version_at, filter(None, [options.against])), (Path(sys.executable), cases.ROOT)]
    slots = SimpleQueue[Slot]()
    for number in range(options.jobs):
        slots.put(Slot(number, versions, options.only, facts))

    def one(case: cases.Case) -> Any:
        slot = slots.get()
        try:
            return slot.run(case)
        finally:
            slots.put(slot)

    found = [case for case in cases.cases() if options.cases in case.name][:: options.every]
    with ThreadPoolExecutor(options.jobs) as pool:
        yield from zip(found, pool.map(one, found), strict=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the record anew")
    parser.add_argument("--against", metavar="OLD", help="a checkout with a .venv, or a python")
    parser.add_argument("--only", metavar="VERB", action="append", default=[], help="only this verb; repeatable")
    parser.add_argument("--cases", metavar="TEXT", default="", help="only the cases with this in their names")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="only every N-th case")
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument("-v", action="store_true", help="every difference, not one of each kind")
    options = parser.parse_args(arguments)
    if options.write and (options.only or options.cases or options.every > 1):
        parser.error("--write makes the whole record")
    if options.only and not options.against:
        parser.error("--only needs --against: the record is compared by all verbs of a case")
    shutil.rmtree(WORK, ignore_errors=True)
    subprocess.run(["git", "init", "--quiet", WORK], check=True)  # what git-setup sets up, and not this repository
    folders = {False: record.HERE / "record", True: record.HERE / "record-corpus"}
    old = {corpus: record.read(folder) for corpus, folder in folders.items()}
    new: dict[bool, record.Record] = {False: {}, True: {}}
    known = {} if options.write else {name: facts for each in old.values() for name, facts in record.facts(each)}
    found: list[compare.Difference] = []
    counts, start = Counter[str](), time.monotonic()
    for case, (facts, lines, answers) in ran(options, known):
        counts["cases"] += 1
        counts["commands"] += len(lines)
        counts["refused"] += sum(answer["code"] not in (0, 1) for answer in answers[-1])
        into = new[case.of_corpus]
        into.setdefault("cases", {})[case.name] = [record.packed(facts)]
        for words, *sides in zip(lines, *answers, strict=True):
            into.setdefault(words[0], {}).setdefault(case.name, []).append(record.word(sides[-1]))
            if options.against:
                found += compare.answers(f"{case.name}: {' '.join(words)}", *sides)
        if not (options.against or options.write or options.only):
            if known.get(case.name, facts)[0] == facts[0]:
                found += record.differences(case.name, lines, old[case.of_corpus], into)
            else:
                counts["made otherwise on this machine, and left out"] += 1
    if options.write:
        for corpus, made in new.items():
            if made:
                record.write(folders[corpus], made)
    shown = [difference for difference in found if difference.matters or options.v or options.against]
    groups = Counter(difference.group for difference in shown)
    first = {difference.group: difference for difference in reversed(shown)}
    for group, count in groups.most_common(None if options.v else SHOWN):
        print(*([each for each in shown if each.group == group] if options.v else [first[group]]), sep="\n")
        print(*([f"    {count:,} like it"] if count > 1 and not options.v else []), sep="\n")
    kinds = Counter(difference.kind for difference in found)
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()), end="; ")
    print(", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "no difference", end="; ")
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if found and (options.v or shown) else 0


if __name__ == "__main__":
    sys.exit(main())
