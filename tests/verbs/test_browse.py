"""`browse`, driven by textual's own pilot and, as a program, behind a terminal."""

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import textual._wait
import torch

import ckptool
from ckptool.checkpoint.tree import find
from ckptool.errors import MissingExtra, UsageError
from ckptool.formats import open_file
from ckptool.verbs.browse import PAUSE, browser, line_of
from fixtures.make import make
from tests.support.cli import Run, done
from tests.support.files import saved
from tests.support.processes import shown_in
from tests.support.programs import programs
from tests.support.range_server import RangeServer

# Of the pilot's own: how long it sleeps after each key, and how much work in that time is none.
textual._wait.SLEEP_GRANULARITY, textual._wait.SLEEP_IDLE = 0.004, 0.0005

NAMED = {"slash": "/", "full_stop": ".", "underscore": "_", "minus": "-", "number_sign": "#"}
KEYS = {sign: name for name, sign in NAMED.items()}


def walked(file: Any, *steps: Any, size: tuple[int, int] = (80, 24)) -> list[Any]:
    """What functions of the app say after the keys before them: words are typed, `<names>` of keys pressed."""
    said = []

    async def walk() -> None:
        app = browser(open_file(file))
        async with app.run_test(size=size) as pilot:
            await settled(app, pilot)
            for step in steps:
                if callable(step):
                    said.append(step(app))
                    continue
                keys = step[1:-1].split() if step.startswith("<") else [KEYS.get(sign, sign) for sign in step]
                await pilot.press(*keys)
                await settled(app, pilot)

    asyncio.run(walk())
    return said


async def settled(app: Any, pilot: Any) -> None:
    """Waits until everything that was asked for is read and shown."""
    await pilot.pause(2 * PAUSE if app.purpose == "filter" else None)
    await asyncio.wrap_future(app.worker.submit(lambda: None))
    await pilot.pause()


def screen(app: Any) -> list[str]:
    return ["".join(part.text for part in row).rstrip() for row in app.screen._compositor.render_strips()]


def told(app: Any) -> str:
    """All that stands in the place for values, above and below what is seen of it."""
    return str(app.text.content)


def lines(app: Any) -> list[Any]:
    """Every tensor and value of the tree, unfolded or not."""

    def below(branch: Any) -> Iterator[Any]:
        if (line := line_of(branch)) is not None:
            yield branch.address, line
        for child in branch.below if line is None else ():
            yield from below(child)

    return list(below(app.names.root.data))


@pytest.fixture
def training(tmp_path: Path) -> Path:
    return make("training.pt", tmp_path)


@pytest.mark.long  # a whole program runs in it, several times
def test_every_line_has_the_address_of_what_it_is(training: Path, run: Run) -> None:
    tree = ckptool.open(training).tree
    (found,) = walked(training, lines)
    assert [name for name, _ in found if find(tree, name)[0] != dict(found)[name].path] == []
    names = done(run("inspect", training, "-q")).splitlines()
    assert {name for name, _ in found} >= {each.address for each in ckptool.inspect(training).tensors}
    assert {name for name, _ in found} <= set(names)


def test_the_cursor_shows_values_as_numpy_prints_them_and_their_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"a.w": torch.randn(5, 3), "a.b": torch.arange(4.0), "half": torch.ones(2).half(), "f": torch.tensor(True)}
    file = saved(state, tmp_path / "a.pt")
    here: Callable[[Any], Any] = lambda app: (app.here.address, told(app))  # noqa: E731
    steps: list[Any] = [part for _ in range(7) for part in ("<down>", here)]
    said = dict(walked(file, *steps))
    assert {*said} >= {*state}
    for name, value in state.items():
        array = value.numpy()
        assert re.sub(r"\s", "", numpy.array2string(array, separator=",")) in re.sub(r"\s", "", said[name]), said[name]
        assert f"mean {array.astype('f8').mean():.5g}" in said[name]
    bars = [line for line in said["a.w"].splitlines() if re.fullmatch("[ ▁▂▃▄▅▆▇█]{48}", line)]
    counts = numpy.histogram(state["a.w"].numpy(), 24)[0]
    assert len(bars) == 4 and [bars[-1][2 * place] != " " for place in range(24)] == [count > 0 for count in counts]


def test_a_pattern_is_looked_for_when_no_more_letters_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilding a tree of 50,000 tensors takes a second: not for each letter."""
    state = {f"model.layers.{n}.{part}": torch.zeros(1) for n in range(30) for part in ("weight", "bias")}
    app = browser(open_file(saved(state, tmp_path / "a.pt")))
    shown: list[str] = []
    monkeypatch.setattr(app, "show", lambda show=app.show: [shown.append(app.pattern), show()])

    async def walk() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("slash", *"weight")
            await settled(app, pilot)
            assert shown[-1] == "weight" and len(shown) < 4 and "30 tensors" in screen(app)[0]
            await pilot.press("enter")

    asyncio.run(walk())


@pytest.mark.parametrize("width", [40, 80, 120])
def test_names_that_differ_at_their_ends_differ_on_the_screen(width: int, tmp_path: Path) -> None:
    state = {f"{first}{'name_' * 50}{last}": torch.zeros(3) for first in ("a_", "名_") for last in "xyz"}
    (shown,) = walked(saved(state, tmp_path / "a.pt"), screen, size=(width, 24))
    names = {line.split("f32")[0].strip() for line in shown if "f32" in line and "─ " in line}
    assert len(names) == len(state) and all("…" in name for name in names)


@pytest.mark.parametrize("size", [(40, 10), (80, 12), (120, 8)])
def test_in_a_low_terminal_half_of_it_is_the_tree(tmp_path: Path, size: tuple[int, int]) -> None:
    state = {f"name{'x' * n}": torch.zeros(n) for n in range(1, 9)}
    (shown,) = walked(saved(state, tmp_path / "a.pt"), screen, size=size)
    assert sum("namex" in line and "f32" in line for line in shown) >= size[1] // 2 - 2


def test_values_of_large_tensors_are_read_at_their_corners_alone(tmp_path: Path) -> None:
    """A sparse file of 8 GB: who reads it has no time, and no memory, for the test."""
    shape = [50_000, 40_000]
    header = f'{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{4 * shape[0] * shape[1]}]}}}}'.encode()
    with open(tmp_path / "big.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * shape[0] * shape[1])
    (said,) = walked(tmp_path / "big.safetensors", "<down>", told)
    assert "s to read all 8.00 GB" in said and "[[0., 0., 0., ..., 0., 0., 0.]," in said


@pytest.mark.long  # a whole program runs in it, several times
def test_a_filter_is_a_part_of_a_name_or_a_pattern(training: Path, run: Run) -> None:
    for typed, pattern in (("fc1.w", "*fc1.w*"), ("*.bias", "*.bias"), ("re:w.*t$", "re:w.*t$")):
        keys = [{"*": "asterisk", ":": "colon", "$": "dollar_sign"}.get(sign, KEYS.get(sign, sign)) for sign in typed]
        found, everything = walked(training, f"<slash {' '.join(keys)} enter>", lines, "<escape>", lines)
        names = done(run("inspect", training, "-q", "--only", pattern)).splitlines()
        assert sorted(name for name, _ in found) == sorted(names) and len(everything) > len(found) > 0
    assert "training.pt, /nothing" in walked(training, "/nothing", screen)[0][0]


@pytest.mark.long  # a whole program runs in it, several times
def test_what_differs_is_what_diff_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # each letter that the pilot types takes 50 ms
    state = {"m": {f"l.{n}.w": torch.ones(2, 2) * n for n in range(6)}, "epoch": 1, "old": 2}
    left = saved(state, tmp_path / "left.pt")
    for number in (2, 4):
        state["m"][f"l.{number}.w"] = state["m"][f"l.{number}.w"] + torch.tensor([[0.0, 1.5], [0.0, 0.0]])
    state |= {"epoch": 2, "new": torch.ones(1)}
    del state["old"]
    right = saved(state, tmp_path / "right.pt")
    found, text, back = walked(left, "dright.pt", "<enter>", lines, screen, "<escape>", lines)
    changes = {name: line.change for name, line in found}
    assert changes == {
        "m/l.2.w": "1 of 4 changed, max |a-b| 1.5",
        "m/l.4.w": "1 of 4 changed, max |a-b| 1.5",
        "epoch": "1 → 2",
        "old": "only here",
        "new": "only in the other",
    }
    report = ckptool.diff(left, right)
    assert {*changes} == {each.address for each in (*report.changed, *report.only_left, *report.only_right)}
    assert "left.pt, what differs in right.pt" in text[0] and len(back) == 8
    assert "the same as left.pt" in walked(left, "dleft.pt", "<enter>", screen)[0][0]
    assert "cannot read nothing.pt" in walked(left, "dnothing.pt", "<enter>", told)[0]


def test_a_copied_address_is_one_word_to_a_shell(tmp_path: Path) -> None:
    names = ["plain.w", "a b.w", "it's; touch ran.w", "$(touch ran)", "[bold]x[/]", "模型", "a/b~c"]
    names += ["\x1b]0;x\x07.w", "line\nbreak"]
    file = saved({name: torch.ones(1) for name in names}, tmp_path / "my model.pt")
    seen: Callable[[Any], Any] = lambda app: ([*app.copied], app.clipboard, screen(app))  # noqa: E731
    steps = [part for _ in names for part in ("<down>", "<right>", "y")]
    copied, clipboard, shown = walked(file, *steps, *["<down>", "y"] * len(names), seen, size=(80, 50))[0]
    assert clipboard == copied[-1] and "─ [bold]x[~1] " in "\n".join(shown)
    assert not any(re.search(r"[\x00-\x1f\x7f]", row) for row in shown)
    for text in dict.fromkeys(copied):
        ran = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, cwd=tmp_path, check=True)
        (word,) = ran.stdout.decode().split("\0")[:-1]
        if word.endswith(".*"):
            assert len(ckptool.inspect(file, only=word).tensors) > 0
        else:
            assert word.startswith(f"{file}") and (word == str(file) or ckptool.show(word).address)
    assert len({*copied}) >= len(names) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_the_screen_holds_names_sizes_and_values(size: tuple[int, int], training: Path) -> None:
    (start,) = walked(training, screen, size=size)
    assert len(start) == size[1] and max(map(len, start)) <= size[0]
    assert re.search(r"▼ training.pt +\d+ tensors +[\d.]+ kB", start[0]) and start[-1].startswith(" / Filter  d Diff")
    for row in start[1:4]:
        assert re.search(r"(├─|└─) [▶▼ ]?.* [\d.]+ k?B\b", row), row


def test_of_very_many_siblings_the_first_are_shown_and_a_filter_finds_the_others(tmp_path: Path) -> None:
    file = saved({f"{chr(97 + n % 26)}{n}x": torch.ones(1) for n in range(1203)}, tmp_path / "flat.pt")
    count: Callable[[Any], int] = lambda app: len(app.names.root.children)  # noqa: E731
    more: Callable[[Any], str] = lambda app: app.names.root.children[-1].label.plain  # noqa: E731
    assert walked(file, count, more, "<end>", "/1202", count) == [1001, "… 203 more (/ filters)", 1]


def test_behind_a_url_only_what_the_cursor_is_on_is_read(tmp_path: Path) -> None:
    value = torch.arange(500_000.0)
    saved({name: value + number for number, name in enumerate("abcd")}, tmp_path / "m.pt")
    with RangeServer(tmp_path) as server:
        sent: Callable[[Any], int] = lambda app: server.sent["m.pt"]  # noqa: E731
        opened, said, read, asked = walked(f"{server.url}m.pt", sent, "<down down>", told, sent, "s", told)
    assert "s to read all 2.00 MB" in said and "min 1  max 5e+05  mean 2.5e+05" in asked
    assert opened < 300_000 and read < 700_000


def test_without_a_terminal_or_textual_it_is_refused(training: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = subprocess.run([programs() / "ckptool", "browse", training], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert f"without one, use ckptool inspect {training}" in ran.stderr
    with pytest.raises(UsageError, match=r"ckptool\.inspect\("):
        ckptool.browse(training)
    terminal = type("Terminal", (), {"isatty": lambda self: True})()
    monkeypatch.setattr(sys, "__stdin__", terminal)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ckptool\[browse\]'"):
        ckptool.browse(training)


@pytest.mark.parametrize(
    ("keys", "code", "last"),
    [
        ("yq", 0, "training.pt"),
        ("\x03", 130, "interrupted"),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_the_terminal_is_given_back(keys: str | int, code: int, last: str, training: Path) -> None:
    child, terminal = pty.fork()
    if not child:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "ckptool", "browse", str(training)])
    shown, typed = "", False
    for part in shown_in(terminal):
        shown += part.decode(errors="replace")
        if not typed and "Filter" in shown and "training" in shown:
            typed = True
            os.write(terminal, keys.encode()) if isinstance(keys, str) else os.kill(child, keys)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    after = shown.rpartition("\x1b[?1049l")[2]  # the screen from before
    assert "\x1b[?1049h" in shown and last in after and "Traceback" not in shown
