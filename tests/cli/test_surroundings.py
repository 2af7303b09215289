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
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptool.commands import VERBS as COMMANDS
from tests.support.processes import HANG
from tests.support.small_files import HARNESS, kinds_and_bytes, options_of, plain_words

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="the surroundings are made by bash")

# Streams that are closed or full, odd variables, folders that are gone or may not be written.

SCRIPT = [str(Path(sys.executable).with_name("ckptool"))]
MODULE = [sys.executable, "-m", "ckptool"]
TERMINAL = [sys.executable, "-c", "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"]


def _unprivileged() -> tuple[str, ...] | None:
    """What starts root as everybody else, who may not write where the modes of a folder forbid it; None where nothing
    does."""
    if os.geteuid():
        return ()
    words = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    try:
        return words if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0 else None
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Surroundings:
    """A shell script around a command.

    after: what follows the command (a redirection, a pipe).  before: what is run before it.
    variables: set, or unset where None.  wrapper: the program that starts it.
    harmless: the command ends and writes as it does without all this.  quiet: it also says on stderr what it says
    without. absolute: files are named by whole paths.  names: how a word of the command is spelled. options: that are
    given, too, to commands that have them.
    """

    after: str = ""
    before: str = ":"
    variables: Mapping[str, str | None] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    harmless: bool = True
    quiet: bool = False
    absolute: bool = False
    names: Callable[[str], str] = str
    options: tuple[str, ...] = ()

    def script(self) -> str:
        """A shell script whose arguments are the command. Its exit status is written to `$CODE`."""
        return f'{{ ( {self.before}; "$@" ); echo $? >"$CODE"; }} {self.after}'


def _variables(**variables: str | None) -> Surroundings:
    return Surroundings(variables=variables)


def _foreign(word: str) -> str:
    """The word with every file called by a name of other letters."""
    return word.replace("m.pt", "模é.pt").replace("out", "çà où")


def _raw(word: str) -> str:
    """The word with every file called by a name that is no text."""
    return word.replace("m.pt", "\udcff\udcfe.pt").replace("out", "\udce9")


STREAMS = {
    after: Surroundings(after, quiet="2" not in after)
    for after in (
        *(">&-", "2>&-", ">&- 2>&-", "<&-", "<&- >&- 2>&-", "</dev/null", "0>/dev/null", "2>/dev/full"),
        *("| head -1", "| head -c 1", "| true", "2>&1 | head -c 1", "2>&1 | true", "| cat"),
    )
}
FULL = (">/dev/full", ">/dev/full 2>&1")
LOST = {
    **{after: Surroundings(after, harmless=False) for after in FULL},
    **{f"{after}, JSON": Surroundings(after, harmless=False, options=("--json",)) for after in FULL},
}
NOTHING_THERE = "rm -rf *.pt *.safetensors *.yaml there run"
ODD_ENDS = {
    **{f"{after}, JSON": Surroundings(after, options=("--json",)) for after in ("| head -c 1", "2>&1 | true", ">&-")},
    **{
        f"{after}, nothing is there{', '.join(('', *options))}": Surroundings(
            after, before=NOTHING_THERE, harmless=False, options=options
        )
        for after in (*FULL, "| head -c 1", "2>&1 | head -c 1", "2>/dev/full", ">&- 2>&-", "| cat")
        for options in ((), ("--json",))
    },
}
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOCALES = {
    f"{called}, {names.__name__.strip('_')}": Surroundings(variables=variables, names=names)
    for called, variables in {
        "LC_ALL=C": {"LC_ALL": "C"},
        "LC_ALL=C, ASCII": C,
        "LANG=": {"LANG": "", "LC_ALL": None, "LC_CTYPE": None},
        "no such locale": {"LC_ALL": "xx_YY.nonsense"},
        "ASCII streams": {"PYTHONIOENCODING": "ascii"},
        "Latin-1 streams": {"PYTHONIOENCODING": "latin-1:strict"},
    }.items()
    for names in (str, _foreign, *((_raw,) if sys.platform == "linux" else ()))  # others' file systems take text alone
}
VARIABLES = {
    "no HOME": _variables(HOME=None),
    "HOME is nowhere": _variables(HOME="/nowhere/at/all"),
    "HOME is a file": _variables(HOME="/etc/passwd"),
    "HOME is empty": _variables(HOME=""),
    "no TMPDIR": _variables(TMPDIR="/nowhere", TEMP="/nowhere", TMP="/nowhere"),
    "TMPDIR is a file": _variables(TMPDIR="/etc/passwd"),
    "nothing is set": Surroundings(wrapper=("env", "-i")),
    "no PATH": _variables(PATH=None),
    "NO_COLOR": _variables(NO_COLOR="1"),
    "FORCE_COLOR": _variables(FORCE_COLOR="1"),
    "both colours": _variables(NO_COLOR="1", FORCE_COLOR="3"),
    "no docstrings": _variables(PYTHONOPTIMIZE="2"),
    "no user": _variables(USER=None, LOGNAME=None, LNAME=None, USERNAME=None),
    "a time zone": _variables(TZ="nonsense/zone"),
    **{f"COLUMNS={text}": _variables(COLUMNS=text) for text in ("0", "-3", "1", "20", "300", "9" * 30, "²", "many")},
}
TERMINALS = {
    f"a terminal, {' '.join(f'{name}={value}' for name, value in variables.items())}": Surroundings(
        wrapper=tuple(TERMINAL), variables=variables
    )
    for variables in (
        *({"COLUMNS": columns} for columns in ("1", "20", "80", "300", "-1")),
        *({"TERM": term} for term in ("dumb", "", "nonsense")),
        {"NO_COLOR": "1", "COLUMNS": "80"},
    )
}
PROCESS = {
    "umask 077": Surroundings(before="umask 077"),
    "umask 000": Surroundings(before="umask 000"),
    "umask 777": Surroundings(before="umask 777", harmless=False),
    "signals are ignored": Surroundings(before="trap '' PIPE INT HUP TERM CHLD"),
    "pipes are ignored": Surroundings("| true", before="trap '' PIPE", quiet=True),
    "nohup": Surroundings(wrapper=("nohup",)),
    "short files": Surroundings(before="ulimit -f 1", harmless=False),
    "no files": Surroundings(before="ulimit -f 0", harmless=False),
    "few open files": Surroundings(before="ulimit -n 14", harmless=False),
    "hardly any open files": Surroundings(before="ulimit -n 6", harmless=False),
}
PLACES = {
    "a folder that is gone": Surroundings(before='mkdir gone; cd gone; rmdir "$OLDPWD/gone"', harmless=False),
    "a folder that is gone, whole paths": Surroundings(
        before='mkdir gone; cd gone; rmdir "$OLDPWD/gone"', harmless=False, absolute=True
    ),
    "outputs below a file": Surroundings(names=lambda word: word.replace("out", "text.txt/out"), harmless=False),
    "outputs below nothing": Surroundings(names=lambda word: word.replace("out", "none/out"), harmless=False),
    "outputs in /proc": Surroundings(names=lambda word: word.replace("out", "/proc/out"), harmless=False),
    "outputs in /sys": Surroundings(names=lambda word: word.replace("out", "/sys/out"), harmless=False),
}
if (_wrapper := _unprivileged()) is not None:
    PLACES |= {
        "unprivileged": Surroundings(wrapper=_wrapper),
        "read-only folder": Surroundings(before="chmod a-w .", wrapper=_wrapper, harmless=False),
        "unreadable folder": Surroundings(before="chmod a-r .", wrapper=_wrapper, harmless=False),
        "locked folder": Surroundings(before="chmod 0 .", wrapper=_wrapper, harmless=False),
        "unreadable files": Surroundings(before="chmod 0 *.pt *.yaml there run", wrapper=_wrapper, harmless=False),
        "read-only files": Surroundings(before="chmod -R a-w *.pt *.yaml there run", wrapper=_wrapper, harmless=False),
        "HOME is locked": Surroundings(before='chmod 0 "$HOME"', wrapper=_wrapper),
        "TMPDIR is locked": Surroundings(before='chmod 0 "$TMPDIR"', wrapper=_wrapper),
    }
ALL = {
    name: around
    for group in (STREAMS, LOST, ODD_ENDS, LOCALES, VARIABLES, TERMINALS, PROCESS, PLACES)
    for name, around in group.items()
    if "/dev/full" not in around.after or os.path.exists("/dev/full")
}


# The trials ----------------------------------------------------------------------------------------------------------


TORCH = (*HARNESS, "warm-start")  # they take longer to start
SLOW = ("train", "resume", "eval", "prove")
BAD = ("Traceback", "error[bug]", "Exception ignored", "BrokenPipe", "Errno", "UnicodeEncode")
BAD += ("lost sys.stderr", "core dumped")
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
        line = ["/bin/bash", "-c", around.script(), "bash", *around.wrapper, *program, command, *words]
        ended = subprocess.run(line, cwd=place, env=own, stdin=waiting, capture_output=True, check=False, timeout=HANG)
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
    if around.harmless and ended.code != plain.code and "fatal: $HOME not set" not in ended.err:  # which is git's
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
    if around.before == NOTHING_THERE:
        new &= written.keys()
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
    """How each command ends with nothing odd around it; found out once for all surroundings."""

    def __init__(self, small: Path, folder: Path) -> None:
        self.small, self.folder, self.known = small, folder, dict[str, Ended]()

    def __getitem__(self, command: str) -> Ended:
        if command not in self.known:
            self.known[command] = run_in(command, Surroundings(), self.small, self.folder, SCRIPT)
        return self.known[command]


@pytest.fixture(scope="module")
def elsewhere(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    return Elsewhere(small, tmp_path_factory.mktemp("elsewhere"))


def tried(trials: Iterator[Trial], elsewhere: Elsewhere, folder: Path) -> int:
    small, wrong, count = elsewhere.small, [], 0
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
def test_a_seeded_part_of_all_surroundings(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """A sixteenth of them, one with each of the commands that are quick to start in turn."""
    names = random.Random(4).sample(sorted(ALL), len(ALL) // 16)
    commands = itertools.cycle(command for command in COMMANDS if command not in TORCH)
    assert tried(zip(commands, names, strict=False), elsewhere, tmp_path) >= 6


@pytest.mark.soak
@pytest.mark.parametrize("name", ALL)
def test_every_command_in_all_surroundings(name: str, elsewhere: Elsewhere, tmp_path: Path) -> None:
    """Those that take many seconds in turn: half an hour, where each in all would be three. In a terminal `browse`
    waits for its user."""
    skipped = {*SLOW} - {SLOW[list(ALL).index(name) % len(SLOW)]} | ({"browse"} if name in TERMINALS else set())
    tried(((command, name) for command in COMMANDS if command not in skipped), elsewhere, tmp_path)
