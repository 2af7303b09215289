"""Tries the edits in clones, and compares with the list."""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import __doc__ as usage
from tests.mutants import clones, edits
from tests.mutants.edits import Edit

LIST = Path(__file__).with_name("list.jsonl")
SURVIVED, UNTESTED = "survived", "no test runs it"
FIRST = 40  # tests that are tried before the others: most edits need no more
FALL = 3  # points

Row = tuple[Edit, str]  # an edit, and what killed it


def chosen(tests: list[tuple[float, str]]) -> list[str]:
    """The quickest tests, as many as take the time that an edit has."""
    left, names = float(clones.SECONDS), []
    for seconds, name in sorted(tests):
        left -= seconds + 0.02
        if left < 0:
            break
        names.append(name)
    return names


def tried(edit: Edit, tests: list[str], root: Path) -> str:
    """The test that fails with an edit; SURVIVED if none does."""
    if not tests:
        return UNTESTED
    path = root / edit.path
    whole = path.read_bytes()
    path.write_bytes(edit.made(whole))
    try:
        for some in (tests[:FIRST], tests[FIRST:]):
            code, out = clones.run(root, some, 2 * clones.SECONDS) if some else (0, "")
            if code:
                failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", out, re.M)
                return failed[1] if failed else ("out of time" if code < 0 else f"exit {code}")
        return SURVIVED
    finally:
        path.write_bytes(whole)


def all_tried(found: list[Edit], tests: list[list[str]], jobs: int, name: str) -> list[str]:
    """What came of each edit with its tests; goes on with what was tried of this commit under this name before."""
    kept = clones.WORK / f"tried-{clones.commit()}-{name}-{len(found)}.jsonl"
    done: dict[int, str] = dict(map(json.loads, kept.read_text().splitlines())) if kept.exists() else {}
    left = [number for number in range(len(found)) if number not in done]
    random.Random(edits.SEED).shuffle(left)  # so that a part of them says something of all
    roots = SimpleQueue[Path]()
    for number in range(jobs):
        roots.put(clones.clone(number))

    def one(number: int) -> None:
        edit, root = found[number], roots.get()
        try:
            done[number] = tried(edit, tests[number], root)
        finally:
            roots.put(root)
        with kept.open("a") as file:
            file.write(json.dumps([number, done[number]]) + "\n")
        what = f"{edit.old[:60]!r} -> {edit.new[:60]!r}: {done[number]}"
        print(f"{len(done)}/{len(found)} {edit.path}:{edit.line} {edit.function}: {what}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, left))
    for number in range(jobs):
        shutil.rmtree(clones.WORK / str(number), ignore_errors=True)
    return [done[number] for number in range(len(found))]


def by_all(found: list[Edit], jobs: int) -> list[str]:
    """What came of each edit, with all tests that run its function."""
    return all_tried(found, [chosen(tests) for tests in clones.measured(found)] if found else [], jobs, "all")


def again(rows: list[Row], jobs: int) -> list[str]:
    """What came of each edit, first with the test that killed it; only for the others all tests are run."""
    found, names = [edit for edit, _ in rows], clones.collected()
    killers = [[how] if how in names else [] for _, how in rows]
    now = all_tried(found, killers, jobs, "again")
    others = [number for number, how in enumerate(now) if how in (SURVIVED, UNTESTED)]
    for number, how in zip(others, by_all([found[number] for number in others], jobs), strict=True):
        now[number] = how
    return now


def read() -> list[Row]:
    rows = (json.loads(line) for line in LIST.read_text().splitlines()) if LIST.exists() else ()
    return [(Edit(**{**row[0], "lines": tuple(row[0]["lines"])}), row[1]) for row in rows]


def shares(rows: list[Row]) -> dict[str, tuple[int, int]]:
    """For each room how many edits were killed, and how many there are."""
    killed = Counter(edit.room for edit, how in rows if how not in (SURVIVED, UNTESTED))
    return {room: (killed[room], count) for room, count in sorted(Counter(edit.room for edit, _ in rows).items())}


def less(before: list[Row], now: list[Row], fall: float) -> Iterator[str]:
    """The rooms of which so many points less are killed than before; prints all."""
    old = shares(before)
    for room, (killed, count) in shares(now).items():
        was = "" if room not in old else f", before {old[room][0]} of {old[room][1]}"
        print(f"{room:12} {killed:4} of {count:4} killed, {killed / count:.0%}{was}")
        if room in old and 100 * killed / count < 100 * old[room][0] / old[room][1] - fall:
            yield room


def main() -> int:
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="draw anew, and write the list")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="clones at a time")
    options = parser.parse_args()
    changed = ["git", "diff", "--quiet", "HEAD", "--", "ckptool", "tests"]
    if subprocess.run(changed, cwd=clones.ROOT, check=False).returncode:
        parser.error("commit first: clones are made of the commit")
    before = read()
    killed = [(edit, how) for edit, how in before if how not in (SURVIVED, UNTESTED)]
    now_at = edits.placed([edit for edit, _ in killed], clones.ROOT)
    if options.write:
        found = edits.drawn(clones.ROOT)
        now = list(zip(found, by_all(found, options.jobs), strict=True))
    else:
        before = [(edit, how) for edit, (_, how) in zip(now_at, killed, strict=True) if edit is not None]
        print(f"{len(killed) - len(before)} of {len(killed)} edits are of code that is no longer there")
        now = [(edit, how) for (edit, _), how in zip(before, again(before, options.jobs), strict=True)]
    worse = list(less(before, now, FALL if options.write else 0))
    if options.write:
        LIST.write_text("".join(json.dumps([vars(edit), how]) + "\n" for edit, how in now))
    print("killed less than before: " + ", ".join(worse) if worse else "nowhere less than before")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
