"""Ctrl-C in every verb: `interrupted`, exit code 130, and nothing half done is left."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.small_files import PLAIN, kinds_and_bytes, plain_words

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
