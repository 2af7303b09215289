"""Clones of the checkout with an environment of their own, where the package can be edited."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutants"
SECONDS = 120  # of processor time for an edit's tests
MEMORY = 8 << 30


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


def measured() -> Path:
    """The folder with `coverage` and `tests.jsonl` for this commit; runs all tests if it is not there."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder = WORK / f"map-{commit[:12]}"
    if (folder / "tests.jsonl").exists():
        return folder
    root = clone(0)
    folder.mkdir(parents=True)
    rc = folder / "coveragerc"
    rc.write_text(
        f"[run]\nsource_pkgs = ckptool\nparallel = true\npatch = subprocess\ndata_file = {folder}/data/c\n"
        "context = ${MUTANTS_TEST-}\ndisable_warnings = no-data-collected,module-not-imported,module-not-measured\n"
    )
    (folder / "data").mkdir()
    tests = folder / "running.jsonl"
    command = ["-m", "coverage", "run", f"--rcfile={rc}", "-m", "pytest", "-q", "-n2", "-p", "tests.mutants.watch"]
    subprocess.run(
        [root / ".venv" / "bin" / "python", *command],
        cwd=root,
        env={**os.environ, "MUTANTS_TESTS": str(tests), "PYTEST_ADDOPTS": "-p no:guard"},
        check=False,
    )
    combine = ["-m", "coverage", "combine", "-q", f"--rcfile={rc}", f"--data-file={folder}/coverage", f"{folder}/data"]
    subprocess.run([sys.executable, *combine], check=True)
    tests.rename(folder / "tests.jsonl")
    return folder
