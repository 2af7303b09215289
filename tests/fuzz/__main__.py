"""Fuzzes the readers for a time: `python -m tests.fuzz [--seconds N] [--target pickle|zip|legacy|tar|safetensors|all]
[--jobs N]`.

Each target gets its share of the time in a process of its own. What was learnt is kept in `build/fuzz/corpus` and gone
on from; an input that crashes, hangs or takes too much is kept in `build/fuzz/crashes` and told, and the exit code is
then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.seeds import LARGEST, TARGETS, seeds

HOME = Path("build/fuzz")
LIMITS = ("-rss_limit_mb=1024", "-timeout=120", f"-max_len={LARGEST}", "-print_final_stats=1", "-verbosity=1")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=300, help="in all, shared by the targets")
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--input", type=Path, help="run this one file through, and nothing else")
    given = parser.parse_args()
    if given.input:
        from tests.fuzz.exercise import cut_off_sooner, exercise

        cut_off_sooner()
        exercise(os.fspath(given.input))
        return 0
    chosen = list(TARGETS) if given.target == "all" else [given.target]
    jobs = min(given.jobs, len(chosen))
    share = max(1, given.seconds * jobs // len(chosen))
    crashed = _all(chosen, jobs, share)
    told = "findings in " + ", ".join(crashed) if crashed else "no findings"
    print(f"{len(chosen)} targets, {share} s each: {told}")
    return 1 if crashed else 0


def _all(chosen: list[str], jobs: int, share: int) -> list[str]:
    crashed, waiting, running = [], list(chosen), dict[str, subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            target = waiting.pop(0)
            running[target] = _start(target, share)
        for target, process in list(running.items()):
            if process.poll() is not None:
                del running[target]
                crashed += [target] if process.returncode else []
                _tell(target, process.returncode)
        time.sleep(0.2)
    return crashed


def _start(target: str, share: int) -> subprocess.Popen[bytes]:
    folder = HOME / "seeds" / target
    folder.mkdir(parents=True, exist_ok=True)
    for _, data in seeds(target):
        (folder / hashlib.sha256(data).hexdigest()[:20]).write_bytes(data)
    corpus, crashes = HOME / "corpus" / target, HOME / "crashes"
    for made in (corpus, crashes):
        made.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.one", target, os.fspath(corpus), os.fspath(folder), *LIMITS]
    command += [f"-max_total_time={share}", f"-artifact_prefix={crashes}/{target}-"]
    with _log(target).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _log(target: str) -> Path:
    return HOME / f"{target}.log"


def _tell(target: str, code: int) -> None:
    lines = _log(target).read_text("utf-8", "replace").splitlines()
    wanted = (
        lines[-40:] if code else [line for line in lines if "number_of_executed_units" in line or "peak_rss" in line]
    )
    print(f"{target}: {'a finding' if code else 'done'} ({_log(target)})", *wanted, sep="\n  ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
