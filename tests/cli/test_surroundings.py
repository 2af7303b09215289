"""Every command in all surroundings, as real processes: how they end and what they write is what it is elsewhere, or
they say why not.

The commands are the program's own, so that a new one is tried, too. A seeded part is tried in the normal run.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptool.commands import VERBS as COMMANDS
from tests.support.processes import HANG
from tests.support.small_files import HARNESS, kinds_and_bytes, options_of, plain_words
from tests.support.surroundings import ALL, FULL, MODULE, SCRIPT, Surroundings

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="the surroundings are made by bash")

TORCH = (*HARNESS, "warm-start")  # they take longer to start
BAD = (
    "Traceback",
    "error[bug]",
    "Exception ignored",
    "BrokenPipe",
    "Errno",
    "UnicodeEncode",
    "lost sys.stderr",
    "core dumped",
)
FILES = re.compile(r"(?<![\w./])([mng]\.pt|out\b|there|run\b)")
Trial = tuple[str, str]  # a command, and the name of the surroundings


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, what it said, and the files that were there then."""

    code: int
    out: str
    err: str
    files: dict[str, bytes | str]


def run_in(command: str, around: Surroundings, small: Path, folder: Path, program: list[str]) -> Ended:
    """Runs a command's plain line in surroundings, in a fresh copy of the small files."""
    place = folder / "made" / "work"
    _made_new(small, folder / "made")
    (place / "m.pt").rename(place / around.names("m.pt"))
    known = {option.flag for option in options_of(command)}
    words = [around.names(word) for word in plain_words(command)] + [flag for flag in around.options if flag in known]
    if command == "train":
        shutil.rmtree(place / "run")
    if around.absolute:
        words = [FILES.sub(lambda found: f"{place}/{found[1]}", word) for word in words]
    for name in ("home", "tmp"):
        (folder / "made" / name).mkdir()
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("CKPTOOL", "PYTEST", "PYTHON", "LC_"))
    }
    own = {name: value for name, value in own.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    own |= {"HOME": str(folder / "made" / "home"), "TMPDIR": str(folder / "made" / "tmp"), "CODE": str(folder / "code")}
    own |= {name: value for name, value in around.variables.items() if value is not None}
    for name in around.variables.keys() & own.keys():
        if around.variables[name] is None:
            del own[name]
    waiting, never = os.pipe()  # a standard input on which nothing comes
    try:
        ended = subprocess.run(
            ["/bin/bash", "-c", around.script(), "bash", *around.wrapper, *program, command, *words],
            cwd=place,
            env=own,
            stdin=waiting,
            capture_output=True,
            check=False,
            timeout=HANG,
        )
    finally:
        os.close(waiting)
        os.close(never)
        subprocess.run(["chmod", "-R", "u+rwX", str(folder / "made")], check=True)
    code = int((folder / "code").read_text() or -1)
    out, err = (os.fsdecode(said).replace(str(place), ".") for said in (ended.stdout, ended.stderr))
    return Ended(code, out, err, kinds_and_bytes(place))


def _made_new(small: Path, made: Path) -> None:
    if made.exists():
        shutil.rmtree(made)
    made.mkdir()
    subprocess.run(["cp", "-a", str(small), str(made / "work")], check=True)
    (made.parent / "code").write_text("")


def problem_of(command: str, around: Surroundings, plain: Ended, ended: Ended) -> str:
    """What is wrong with how a command ended, beside how it ends without the surroundings; empty where nothing is."""
    told = ended.out + ended.err
    if ended.code not in ((0, 1, 2, 3, 130, 143) if command in HARNESS else (0, 1, 2)):
        return f"ends with {ended.code}: {told[:600]}"
    if bad := [word for word in BAD if word in told]:
        return f"says {bad}: {told[:600]}"
    if left := [name for name in ended.files if "/.ckptool-" in name or name.startswith(("home/", "tmp/"))]:
        return f"leaves {left}"
    if ended.code == 2 and not told.strip() and not re.search("[<>]", around.after):
        return "says nothing"
    if around.harmless and ended.code != plain.code:
        return f"ends with {ended.code}, elsewhere with {plain.code}: {told[:600]}"
    if command in HARNESS:
        return ""
    written = {name.replace(around.names("out"), "out"): data for name, data in ended.files.items()}
    written = {name.replace(around.names("m.pt"), "m.pt"): data for name, data in written.items()}
    new = {
        name
        for name in plain.files | written
        if written.get(name) != plain.files.get(name) and not (name.endswith(".html") and name in written)
    }  # a page names the files as they were typed
    if (around.harmless or ended.code == 0) and new:
        return f"writes other files than elsewhere: {sorted(new)} {told[:300]}"
    if ended.code == 2 and any("/out" in name for name in written) and (around.after not in FULL or new):
        return f"leaves an output, though it ends with 2: {told[:600]}"
    if around.after in FULL and "as they were" in ended.err:
        return f"says that it wrote nothing: {ended.err}"
    if around.quiet and ended.err != plain.err:
        return f"says {ended.err[:600]!r}, elsewhere {plain.err!r}"
    return ""


class Elsewhere:
    """How each command ends with nothing odd around it; found out once."""

    def __init__(self, small: Path, folder: Path) -> None:
        self.small, self.folder, self.known = small, folder, dict[str, Ended]()

    def __getitem__(self, command: str) -> Ended:
        if command not in self.known:
            self.known[command] = run_in(command, Surroundings(), self.small, self.folder, SCRIPT)
        return self.known[command]


def tried(trials: Iterator[Trial], small: Path, folder: Path) -> int:
    elsewhere, wrong, count = Elsewhere(small, folder), [], 0
    for command, name in trials:
        count += 1
        try:
            ended = run_in(command, ALL[name], small, folder, MODULE if count % 4 == 0 else SCRIPT)
            problem = problem_of(command, ALL[name], elsewhere[command], ended)
        except subprocess.TimeoutExpired:
            problem = "hangs"
        if problem:
            wrong.append(f"{command}, {name}\n    {problem}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
    return count


@pytest.mark.permissions
@pytest.mark.long("starts the program itself, in shells of all kinds")
def test_a_seeded_part_of_all_surroundings(small: Path, tmp_path: Path) -> None:
    """A twelfth of them, one with each of the commands that are quick to start in turn."""
    names = random.Random(4).sample(sorted(ALL), len(ALL) // 12)
    commands = itertools.cycle(command for command in COMMANDS if command not in TORCH)
    assert tried(zip(commands, names, strict=False), small, tmp_path) >= 8


@pytest.mark.soak
@pytest.mark.parametrize("name", ALL)
def test_every_command_in_all_surroundings(name: str, small: Path, tmp_path: Path) -> None:
    tried(((command, name) for command in COMMANDS), small, tmp_path)
