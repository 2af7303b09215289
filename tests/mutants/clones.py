"""Clones of the checkout with an environment of their own, where the package can be edited."""

import json
import os
import resource
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.mutants import seen, watch
from tests.mutants.edits import Edit

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutants"
SECONDS = 120  # of processor time for an edit's tests
MEMORY = 8 << 30


def commit() -> str:
    """The beginning of the commit's name."""
    words = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def clone(number: int) -> Path:
    """A clone of the commit, and of the environment by links: its package is the clone's."""
    root = WORK / str(number) / "ckptool"
    shutil.rmtree(root.parent, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", "--shared", ROOT, root], check=True)
    with suppress(OSError):
        (root.parent / "shared").symlink_to(ROOT.parent / "shared")
    subprocess.run(["cp", "-al", ROOT / ".venv", root / ".venv"], check=True)
    old, new = str(ROOT / ".venv"), str(root / ".venv")
    for script in (root / ".venv" / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and old.encode() in script.read_bytes()[:200]:
            _replaced(script, script.read_bytes().replace(old.encode(), new.encode()))
    for link in (root / ".venv").rglob("_editable_impl_ckptool.pth"):
        _replaced(link, str(root).encode())
    return root


def _replaced(path: Path, data: bytes) -> None:
    """Gives a path other bytes, and other names of its file none."""
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(data)
    path.chmod(mode)


def run(root: Path, tests: list[str], seconds: float) -> tuple[int, str]:
    """Runs tests in a clone until one fails: the exit code of pytest, or -9 after the time; and what it printed."""
    listed = root.parent / "tests.txt"
    listed.write_text("\n".join(tests))
    process = subprocess.Popen(
        [root / ".venv" / "bin" / "python", "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-n0", f"@{listed}"],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_limited,
        env={**os.environ, "TMPDIR": str(_temporary(root)), "PYTEST_ADDOPTS": "-p no:cacheprovider -p no:guard"},
    )
    try:
        out = process.communicate(timeout=seconds)[0]
        return process.returncode, out
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def _temporary(root: Path) -> Path:
    """An empty folder for temporary files, with a short name, as sockets need."""
    folder = Path("/tmp") / f"mutants-{os.getpid()}-{root.parent.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def collected() -> set[str]:
    """The names of all tests."""
    words = [ROOT / ".venv" / "bin" / "python", "-m", "pytest", "-q", "-n0", "--collect-only", "-p", "no:guard"]
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in out.splitlines() if "::" in line}


def measured(edits: list[Edit], *some: str) -> list[list[tuple[float, str]]]:
    """For each edit the tests that run its function, with their seconds; from one run of all tests, or of some.

    A run of all is kept, for as long as the commit and the edits are these.
    """
    kept = WORK / f"map-{commit()}-{len(edits)}.json"
    if kept.exists() and not some:
        return [[(seconds, name) for seconds, name in tests] for tests in json.loads(kept.read_text())]
    root = clone(0)
    site = next((root / ".venv" / "lib").glob("python*/site-packages"))
    shutil.copyfile(seen.__file__, site / "mutants_seen.py")
    (site / "mutants_seen.pth").write_text("import mutants_seen\n")
    for path in {edit.path for edit in edits}:
        watched = {number: edit for number, edit in enumerate(edits) if edit.path == path}
        _replaced(root / path, _with_hits((root / path).read_bytes(), watched))
    table, tests, most = root.parent / "map", root.parent / "tests.jsonl", 100_000
    with table.open("wb") as file:
        file.truncate(most * len(edits))
    subprocess.run(
        [root / ".venv" / "bin" / "python", "-m", "pytest", "-q", "-n2", "-p", "tests.mutants.watch", *some],
        cwd=root,
        env={
            **os.environ,
            seen.MAP: f"{table}:{len(edits)}",
            watch.TESTS: str(tests),
            "PYTEST_ADDOPTS": "-p no:guard -p no:cacheprovider",
        },
        check=False,
    )
    hits = np.memmap(table, np.uint8, "r", shape=(most, len(edits)))
    found: list[list[tuple[float, str]]] = [[] for _ in edits]
    for line in tests.read_text().splitlines():
        test, name, seconds, passed = json.loads(line)
        for number in np.flatnonzero(hits[test]) if passed else ():
            found[int(number)].append((seconds, name))
    if not some:
        kept.write_text(json.dumps(found))
    return found


def _with_hits(data: bytes, edits: dict[int, Edit]) -> bytes:
    """A file in which the functions of these edits say that they are run."""
    lines = data.splitlines(keepends=True)
    for number, edit in sorted(edits.items(), key=lambda each: -each[1].lines[0]):
        at, line = edit.lines[0] - 1, lines[edit.lines[0] - 1]
        hit = b"__import__('mutants_seen').hit(%d)" % number
        start = edit.first
        if line[:start].strip():  # all in one line, after the `def`
            lines[at] = line[:start] + hit + b"; " + line[start:]
        else:
            lines[at] = line[: len(line) - len(line.lstrip())] + hit + b"\n" + line
    return b"".join(lines)
