"""The program as a process: pipes, signals, colours, encodings, what it imports; Ctrl-C in every verb; 80 columns, on
which nothing is cut."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import ckptool
from ckptool.checkpoint import progress
from ckptool.cli import output
from ckptool.cli.output import answer_of, progress_line
from ckptool.errors import CkptoolError
from ckptool.render.lines import Style
from fixtures.make import PRODUCERS, make
from fixtures.sparse import make_sparse
from tests.support.forks import Forks
from tests.support.looped import examples
from tests.support.processes import HANG, default_signals, shown_in
from tests.support.programs import programs
from tests.support.small_files import PLAIN, kinds_and_bytes, plain_words

PROGRAM = [sys.executable, "-c", "import sys; from ckptool.cli import main; sys.exit(main())"]


def run_program(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    settings = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    program = PROGRAM if "PYTHONIOENCODING" in environment else [programs() / "ckptool"]
    return subprocess.run([*program, *words], env=settings | environment, capture_output=True, check=False)


def on_terminal(columns: int, *words: str, program: Sequence[str | Path] = (), **environment: str) -> tuple[int, str]:
    """What a terminal of so many columns shows, and the exit code."""
    import fcntl
    import struct
    import termios

    argv = [*map(str, program or [programs() / "ckptool"]), *words]
    child, fd = pty.fork()
    if not child:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.unsetenv("COLUMNS")  # which `readline` sets, unseen by `os.environ`
        os.environ.pop("COLUMNS", None)
        os.environ.pop("NO_COLOR", None)
        os.environ.update({"TERM": "xterm-256color"} | environment)
        os.execv(argv[0], argv)
    shown = b"".join(shown_in(fd))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode()


def test_head_is_silent(files: Path) -> None:
    silent = "inspect training.pt --all", "inspect training.pt --json", "--help", "convert --help"
    for command, code in {**dict.fromkeys(silent, 0), "diff dp.pt compiled.pt": 1}.items():
        script = f"set -o pipefail; {programs() / 'ckptool'} {command} | head -c 1; exit ${{PIPESTATUS[0]}}"
        ended = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
        assert (ended.returncode, ended.stderr, len(ended.stdout)) == (code, b"", 1)
    for command in ("inspect training.pt --all", "--version", "--help", "diff --help"):
        early = f"{programs() / 'ckptool'} {command} | true; exit ${{PIPESTATUS[0]}}"
        ended = subprocess.run(["bash", "-c", early], capture_output=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, b""), command


# Without a device that is always full: the same program, which may not make any file longer.
NO_ROOM = """
import resource, sys
from ckptool.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.exit(main())
"""
FULL_DISKS = {"a file that may not grow": ([sys.executable, "-c", NO_ROOM], "stdout")} | (
    {"a full device": (PROGRAM, "/dev/full")} if os.path.exists("/dev/full") else {}
)


@pytest.mark.parametrize("disk", FULL_DISKS)
def test_an_answer_that_is_lost_is_told(disk: str, files: Path, tmp_path: Path) -> None:
    """In words, whatever its form, and without denying outputs that are there."""
    program, place = FULL_DISKS[disk]
    lost = b"cannot write to standard output"
    for line, told in (
        ("inspect dp.pt", lost),
        ("inspect dp.pt --json", lost),
        ("inspect nothing.pt --json", b"cannot read nothing.pt"),
        *((f"strip-module dp.pt -o out.pt -f{form}", b"files that were written are") for form in ("", " --json")),
    ):
        if disk == "a file that may not grow" and "-o" in line:
            continue  # nor may the output
        with open(tmp_path / place, "wb") as full:
            ended = subprocess.run([*program, *line.split()], stdout=full, stderr=subprocess.PIPE, check=False)
        assert ended.returncode == 2 and told in ended.stderr, line
        assert b"Traceback" not in ended.stderr and b"as they were" not in ended.stderr, line


def test_a_working_directory_that_is_gone(files: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for words, code, told in (
        (["strip-module", tmp_path / "dp.pt", "-o", "out.pt"], 2, b"working directory is gone"),
        (["inspect", "dp.pt"], 2, b"working directory is gone"),
        (["strip-module", tmp_path / "dp.pt", "-d", "out"], 2, b"working directory is gone"),
        (["bundle", "a=dp.pt", "-o", tmp_path / "out.pt"], 2, b"working directory is gone"),
        (["verify", tmp_path / "dp.pt", tmp_path / "dp.pt", "--jobs", "2"], 2, b"working directory is gone"),
        (["strip-module", tmp_path / "dp.pt", "-o", tmp_path / "out.pt"], 0, b""),
    ):
        gone.mkdir()
        script = 'cd "$0"; rmdir "$0"; exec "$@"'
        ended = subprocess.run(
            ["bash", "-c", script, gone, *PROGRAM, *words], cwd=tmp_path, capture_output=True, check=False
        )
        assert ended.returncode == code and told in ended.stderr, (words, ended.stderr)


def test_colours_only_on_a_terminal(files: Path) -> None:
    code, shown = on_terminal(100, "inspect", "dp.pt")
    assert code == 0 and "\x1b[1mdp.pt\x1b[0m" in shown
    assert "\x1b" not in on_terminal(100, "inspect", "dp.pt", NO_COLOR="1")[1]
    assert "\x1b" not in on_terminal(100, "inspect", "dp.pt", NO_COLOR="1", FORCE_COLOR="1")[1]
    assert b"\x1b" not in run_program("inspect", "dp.pt").stdout
    assert b"\x1b[1m" in run_program("inspect", "dp.pt", FORCE_COLOR="1").stdout
    assert b"\x1b[1;31merror" in run_program("inspect", "nothing.pt", FORCE_COLOR="1").stderr
    assert b"\x1b" not in run_program("inspect", "dp.pt", "--json", FORCE_COLOR="1").stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_fit_the_terminal(columns: int, files: Path) -> None:
    for name in ("training.pt", "numpy_values.pt"):
        shown = on_terminal(columns, "inspect", name, NO_COLOR="1")[1]
        assert max(map(len, shown.replace("\r", "").split("\n"))) <= columns


def test_the_help_is_printed_whatever_the_width() -> None:
    plain = on_terminal(80, "convert", "--help")
    assert plain[0] == 0 and "--shard-size" in plain[1]
    for width in ("0", "1", "-5", "many", "", "²", "9" * 30, "9" * 5000):
        assert on_terminal(80, "convert", "--help", COLUMNS=width) == plain, width
    for width in (40, 60, 80, 120):
        shown = on_terminal(width, "convert", "--help", NO_COLOR="1")[1].replace("\r", "")
        assert max(len(line) for line in shown.split("\n") if not re.match(" +(ckptool|#) ", line)) <= width


def test_other_encodings(files: Path) -> None:
    os.rename("dp.pt", "modèle.pt")
    ended = run_program("strip-module", "modèle.pt", "-o", "ça.pt", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert ended.returncode == 0 and ended.stdout.isascii() and b"\\u2192 \\xe7a.pt" in ended.stdout


def test_nothing_heavy_is_imported(files: Path) -> None:
    heavy = "torch", "numpy", "yaml", "rich", "safetensors"
    for words in (["--version"], ["--help"], ["inspect", "nothing.pt"], ["inspect", "training.pt"]):
        code = (
            f"import sys; from ckptool.cli import main; main({words}); sys.exit(str({{*{heavy}}} & {{*sys.modules}}))"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ended.stderr.strip().split("\n")[-1] == "set()", (words, ended.stderr)


@pytest.mark.parametrize(
    ("number", "code", "wrapper"),
    [(signal.SIGTERM, 143, []), (signal.SIGHUP, 129, []), (signal.SIGINT, 130, []), (signal.SIGHUP, 0, ["nohup"])],
)
def test_a_stopped_write_leaves_nothing_and_under_nohup_it_goes_on(
    number: signal.Signals, code: int, wrapper: list[str], tmp_path: Path
) -> None:
    make_sparse(tmp_path / "big.pt", 3 << 30 if code else 1 << 28)
    command = [*wrapper, *PROGRAM, "cast", "big.pt", "--dtype", "bf16", "-o", "out.pt"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, preexec_fn=default_signals)
    while process.poll() is None and not any(path.stat().st_size for path in tmp_path.glob(".ckptool-*")):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == code and b"Traceback" not in err
    assert {path.name for path in tmp_path.iterdir()} == ({"big.pt"} if code else {"big.pt", "out.pt"})


# The program, with progress that does not wait for a second, and misses no pass.
AT_ONCE = (
    "from ckptool import cli; from ckptool.cli import output as o; o.SHOWN_AFTER = o.SHOWN_EVERY = 0.01; cli.main()"
)
READING = {
    "verify": "big.pt",
    "verify all": "big.pt other.pt",
    "verify on processors": "big.pt other.pt --jobs 2",
    "verify with digests": "big.pt --digest --finite",
    "inspect": "big.pt --stats",
    "diff": "big.pt other.pt",
    "scan": ". --full",
    "report": "big.pt -o page.html",
    "convert": "big.pt -o out.safetensors --verify",
    "average": "big.pt other.pt -o out.pt",
}
DRAWN = re.compile(
    r"(\w+)( [\w.]+)? +(\d+)% [█▏▎▍▌▋▊▉]* +([\d.]+ [kMG]?B of [\d.]+ [MG]B|\d of \d files)(, 0:\d\d:\d\d left)?"
)


@pytest.mark.long("reads some gigabytes of holes")
def test_what_reads_values_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("big.pt", "other.pt"):
        make_sparse(name, 300 << 20)
    for line, words in READING.items():
        code, shown = on_terminal(80, line.split()[0], *words.split(), program=[programs() / "python", "-c", AT_ONCE])
        *drawn, answer = [each for each in shown.split("\r\x1b[K") if each]  # where a line was wiped, and none followed
        assert code == 0 and drawn and not shown.endswith("left") and "█" not in answer, (line, code, shown)
        odd = [each for each in drawn if "%" in each and not (DRAWN.fullmatch(each) and len(each) < 80)]
        assert not odd, (line, odd)
        for path in tmp_path.glob("out.*"):
            path.unlink()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["model.pt", "a-long-name" * 20, "日本語" * 30, "e\u0301" * 90])
@pytest.mark.parametrize("columns", [20, 39, 40, 80])
def test_a_drawn_line_leaves_room_for_the_interrupt_that_a_terminal_shows(
    columns: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setattr(progress, "is_watched", True)
    with output.status_line() as show, progress.reading(4 << 30):
        for text in (name, progress_line(f"verify {name}", columns)):
            show(text)
    for line in shown.getvalue().split("\r\x1b[K")[1:-1]:
        wide = sum(unicodedata.east_asian_width(each) in "WF" for each in line)
        marks = sum(unicodedata.combining(each) > 0 for each in line)
        assert line and len(line) + wide - marks + len("^C") < columns, line


def test_what_is_written_never_follows_progress_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread draws whenever it can: also between the wipe of a line and the answer that takes its place."""
    screen, drawers = Terminal(), []

    def tell_and_draw(text: str, live: bool = False) -> None:
        tell(text, live)
        drawers.append(threading.Thread(target=tell, args=("verify  45%", True)))
        drawers[-1].start()
        drawers[-1].join(0.05)  # which it does not end in while the answer is being written

    tell = output.tell
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, screen)
    monkeypatch.setattr(output, "tell", tell_and_draw)
    for number in range(3):
        output.say(f"{number}.pt: fine\n")
    for each in drawers:
        each.join()
    tell("")
    assert "fine" in screen.getvalue() and not re.search("%[^\r]", screen.getvalue()), screen.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_line_has_room(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_watched", True)
    with progress.reading(4 << 30) as here, progress.reading(1 << 30) as inner:
        here.done = here.step = 1 << 30
        inner.counted, here.began = 1 << 29, here.began - 3
        line = progress_line("verify a-checkpoint-with-a-long-name.safetensors", width)
    assert len(line) < width and (("38% " in line and "0:00:05 left" in line) or width < 60), line
    assert progress.passes == []


# Those that train end what they are at, save, and say so; the others are over before a file is opened.
OTHERS = {"train", "resume", "explain", "schema", "completion", "git-setup"}
VERBS = [verb for verb in PLAIN if verb not in OTHERS]
IN_PLACE = ["strip-module", "add-module", "rename", "remap", "cast", "edit", "bake"]
EARLY = 2  # a moment at which no verb has written anything
Ended = tuple[int, str, int, dict[str, bytes | str]]  # exit code, what was shown, moments, files


@pytest.fixture(scope="module")
def ended(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ended]]:
    """Runs a command line in a terminal, on a fresh copy of the files, and interrupts it at the moment of a number."""
    place = tmp_path_factory.mktemp("interrupted") / "made" / "work"
    forks = Forks("-m", "tests.support.interrupted")

    def run(words: list[str], at: int = 0) -> Ended:
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        subprocess.run(["cp", "-a", str(small), str(place)], check=True)
        return (*forks.ask([words, str(place), at]), kinds_and_bytes(place))

    yield run
    forks.close()


def problems(words: list[str], ended: Callable[..., Ended], small: Path, most: int) -> Iterator[object]:
    """What is wrong with how a command line ends that is interrupted at so many of its moments."""
    before = {f"work/{path.relative_to(small)}": path for path in small.rglob("*")}
    if most > 1:
        ended(words)  # which compiles what it imports: later ones have fewer moments
    code, shown, count, after = ended(words) if most > 1 else (0, "", EARLY, {})
    if code not in (0, 1) or not count:
        yield words, code, shown, count
    for at in sorted({count - number * (count - 1) // most for number in range(min(most, count))}):
        code, shown, _, files = ended(words, at)
        if code != 130 or not shown.endswith("interrupted\r\n") or "Traceback" in shown:
            yield words, at, count, code, shown
        for name, content in files.items():
            old = before.get(name)
            is_old = old is not None and (not old.is_file() or old.is_symlink() or old.read_bytes() == content)
            if name not in ("work", "work/run/lock") and not is_old and after.get(name) != content:
                yield words, at, count, name


@pytest.mark.long("a process for each verb, with torch in it")
def test_every_verb(ended: Callable[..., Ended], small: Path) -> None:
    assert [wrong for verb in VERBS for wrong in problems([*verb.split(), *plain_words(verb)], ended, small, 1)] == []


@pytest.mark.soak
def test_every_verb_at_every_moment(ended: Callable[..., Ended], small: Path) -> None:
    # `browse` goes on until it is told to end: tests/verbs/test_browse.py.
    lines = [[*verb.split(), *plain_words(verb)] for verb in VERBS if verb not in ("prove", "browse")]
    lines += [[*line[:-2], "--in-place"] for line in lines if line[0] in IN_PLACE]
    assert [wrong for line in lines for wrong in problems(line, ended, small, 40)] == []


WIDTH = 80
LOOKS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "inspect": (ckptool.inspect, {}, {}),
    "inspect --all": (ckptool.inspect, {}, {"all": True}),
    "inspect --depth": (ckptool.inspect, {}, {"depth": 9}),
    "inspect --stats": (ckptool.inspect, {"stats": True}, {}),
    "inspect --only": (ckptool.inspect, {"only": "*"}, {}),
    "verify": (ckptool.verify, {"finite": True}, {}),
    "verify --digest": (ckptool.verify, {"digest": True}, {"digest": True}),
    "doctor": (ckptool.doctor, {}, {}),
    "scan": (ckptool.scan, {}, {}),
    "spec": (ckptool.spec, {}, {}),
    "show": (ckptool.show, {}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixtures")
    for name in PRODUCERS:
        make(name, folder)
    return folder


def words(text: str) -> Counter[str]:
    """Bars are shorter on a narrow terminal; a colour is no word, nor are the commas between the cells of a row."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[█▏▎▍▌▋▊▉]", "", text)
    plain = re.sub(r"\b\d+\s+(?:s|min|h|d)\b", "age", plain)  # a file grows older between the two
    return Counter(word.rstrip(",") for word in plain.split())


def check(report: Any, options: dict[str, Any]) -> None:
    wide = answer_of(report, Style(), options, 0).content
    for style in (Style(width=WIDTH), Style(colour=True, width=WIDTH)):
        text = answer_of(report, style, options, 0).content
        # The heads of a table may stand in each of its rows, but for those of texts, which say what they are.
        assert not words(wide) - words(text) - Counter(["file", "state", "what", "dtype", "shape"])
        for line in re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n"):
            whole = line.split()
            command = re.search(r"(^|\s)ckptool [a-z-]+ ", line)
            assert len(line) <= WIDTH or len(whole) == 1 or command or len(whole[0]) > WIDTH // 2, line


@pytest.mark.parametrize("name", PRODUCERS)
def test_nothing_is_cut_at_80_columns(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for verb, (function, arguments, options) in LOOKS.items():
        for file in Path().glob(f"{name}*"):
            try:
                report = function(str(file), **arguments)
            except CkptoolError:
                assert verb in ("show", "spec", "verify --digest"), (verb, file)  # of the one part that they take
                continue
            check(report, options)


@settings(max_examples=examples(300))
@given(st.lists(st.text("ab \x1b-,", max_size=60), max_size=5), st.integers(1, 100))
def test_pages_keep_every_word_and_the_width(lines: list[str], width: int) -> None:
    text = "\n".join(lines).replace("\x1b", "\x1b[1mx\x1b[0m")
    page = Style(width=width).page(text)
    assert words(page) == words(text) and Style().page(text) == text
    for line in re.sub(r"\x1b\[[0-9;]*m", "", page).split("\n"):
        assert len(line) <= width or len(line.split()) <= 1
