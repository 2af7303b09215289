"""What a program can be started in: streams that are closed or full, odd variables, folders that are gone or may not be
written."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
