"""Every example of the README and of docs/ is run as a reader pastes it, page by page, and prints what the page says.

    CKPTOOL_UPDATE_README=1 pytest tests/test_readme.py     puts the real output into the pages

A line of output that ends in `…` may go on differently (times, versions); a line that is `…` alone stands for any
lines. The README works on what `ckptool demo` writes; its consoles are a terminal of 120 columns without torch.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptool.cli.parser import typed_parameters
from ckptool.commands import VERBS, function_of
from fixtures.readme import make_readme_files
from tests.support.looped import looped
from tests.support.processes import shown_in
from tests.support.programs import TORCH, path_with, python

HOME = Path(__file__).parent.parent
README = HOME / "README.md"
PAGES = [README, *sorted((HOME / "docs").glob("*.md")), HOME / "docs" / "llms.txt"]
BLOCK = re.compile(r"```(console|python|sh)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each page, with the files that its examples work on."""
    folders = {page.stem: tmp_path_factory.mktemp(page.stem) for page in PAGES}
    for page in PAGES:
        if page != README and BLOCK.search(page.read_text()):
            make_readme_files(folders[page.stem])
    return folders


def environment(*, torch: bool = False, **more: str) -> dict[str, str]:
    own = {"PATH": path_with(*TORCH if torch else ()), "NO_COLOR": "1", **more}
    return {name: value for name, value in os.environ.items() if name != "COLUMNS"} | own


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of a shell block as it is pasted into zsh, which knows no comments: its words are arguments. What installs
    is not run."""
    command = re.sub(r"(?<=\s)#(?=\s)", "'#'", line) if not line.startswith("pip ") else "true"
    given = environment(torch="ckptool train" in line or "ckptool resume" in line, COLUMNS="100")
    return subprocess.run(command, shell=True, cwd=folder, env=given, capture_output=True, text=True, check=False)


def printed_by(command: str, folder: Path) -> str:
    done = run_line(command, folder)
    return done.stdout + done.stderr


def shown_by(command: str, folder: Path, no_torch: Path) -> str:
    """What a terminal of 120 columns shows, where torch is not installed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    given = environment(PYTHONPATH=str(no_torch), TERM="xterm")
    with subprocess.Popen(command, shell=True, cwd=folder, env=given, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b"".join(shown_in(ours))
    return shown.decode().replace("\r\n", "\n")


def commands(block: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that follows it."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def agrees(printed: str, promised: str) -> bool:
    lines = [
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in promised.rstrip("\n").split("\n")
    ]
    pattern = "".join(lines) if promised.strip() else ""
    return re.fullmatch(pattern, printed.rstrip("\n") + "\n" if printed.strip() else "") is not None


SLOW = dict.fromkeys(("combine", "harness", "own-loop"), pytest.mark.soak) | {
    "README": pytest.mark.long("its training run is killed and goes on")
}


@pytest.mark.parametrize("page", [pytest.param(page, marks=SLOW.get(page.stem, ()), id=page.stem) for page in PAGES])
def test_every_example_prints_what_its_page_says(page: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    text = page.read_text()
    folder = folders[page.stem]
    update = os.environ.get("CKPTOOL_UPDATE_README")
    wrong: list[str] = []

    def checked(match: re.Match[str]) -> str:
        nonlocal folder
        kind, block = match[1], match[2]
        if kind == "python":
            done = python("-W", "error", "-c", block, cwd=folder)
            if done.returncode:
                wrong.append(f"{block}\n{done.stderr}")
            return match[0]
        if kind == "sh":
            for line in block.replace("&\n", "& ").splitlines():  # what runs beside the next line
                if line.startswith("cd "):
                    folder /= line.removeprefix("cd ")
                    continue
                done = run_line(line, folder)
                # 1 is an answer: it does not load, it does not fit.
                if done.returncode > 1 or done.stderr.startswith("error["):
                    wrong.append(f"{line}\n{done.stdout}{done.stderr}")
            return match[0]
        shown = ""
        for command, promised in commands(block):
            printed = shown_by(command, folder, tmp_path) if page == README else printed_by(command, folder)
            if not agrees(printed, promised):
                wrong.append(f"$ {command}\n{printed}")
            shown += f"$ {command}\n{printed if update and not agrees(printed, promised) else promised}"
        return f"```console\n{shown}```"

    renewed = BLOCK.sub(checked, text)
    if update:
        page.write_text(renewed)
    else:
        assert not wrong, "\n\n".join(wrong)
    if page == README:
        what_was_made_loads_in_torch(folder)


def what_was_made_loads_in_torch(folder: Path) -> None:
    state_dict = torch.load(folder / "clean.pt", weights_only=True)
    assert not any(key.startswith("module.") for key in state_dict)
    assert all(tensor.device.type == "cpu" for tensor in state_dict.values())


def test_the_readme_is_short_and_shows_the_first_minute() -> None:
    text = README.read_text()
    assert text.count("\n") <= 250
    assert text.count("```console") >= 4


def test_the_glossary_is_short_and_has_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (HOME / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [word for word in rows if word not in ("word", "---")]
    assert len(words) == len(set(words)) <= 25


def test_the_page_of_codes_is_in_the_package_itself() -> None:
    """A link, so that the text lives once; a wheel holds a copy."""
    assert (HOME / "ckptool" / "verbs" / "codes.md").resolve() == HOME / "docs" / "codes.md"


def test_a_code_is_explained_once() -> None:
    """`explain` would show only the last row."""
    codes = re.findall(r"^\| `([^`]+)` \|", (HOME / "docs" / "codes.md").read_text(), re.MULTILINE)
    assert len(codes) > 50 and len(codes) == len(set(codes))


# Links ----------------------------------------------------------------------------------------------------------------

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> Iterator[tuple[Path, str]]:
    for page in [*PAGES, HOME / "CHANGELOG.md", *HOME.glob("*/README.md")]:
        for target in LINK.findall(page.read_text().replace("\n", " ")):
            if "://" not in target:
                yield page, target


def test_links_lead_somewhere() -> None:
    for page, target in links():
        name, _, anchor = target.partition("#")
        aim = page.parent / name if name else page
        assert aim.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(aim), f"{page.name}: {target}"


def test_the_readme_leads_to_every_page() -> None:
    reached = {(page.parent / target.partition("#")[0]).resolve() for page, target in links() if page == README}
    assert {page for page in PAGES if page != README} <= reached


def test_the_design_names_files_that_there_are() -> None:
    names = re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", (HOME / "docs" / "design.md").read_text())
    assert len(names) > 15
    assert [name for name in names if not (HOME / "ckptool" / name).exists() and not (HOME / name).exists()] == []


# Commands -------------------------------------------------------------------------------------------------------------


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the third level."""
    parts = re.split(r"^#{2,3} (.*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_readme_has_a_line_for_every_command() -> None:
    table = sections(README.read_text())["Commands"]
    assert [name for name in VERBS if not re.search(rf"`{name} ", table)] == []


@looped("name", sorted(VERBS))
def test_the_page_of_commands_has_every_option(name: str) -> None:
    text = sections(re.sub(r"```.*?```", "", (HOME / "docs" / "commands.md").read_text(), flags=re.DOTALL))
    shared = set(re.findall(r"`(-[a-z-]+)", text["Options of many commands"]))
    options = {flag for parameter in typed_parameters(function_of(name)) for flag in parameter.option.flags}
    said = set(re.findall(r"(?<![\w-])(-{1,2}[a-z][a-z-]*)", text[name]))
    assert options - shared - said == set()
    assert {option for option in said if option.startswith("--")} - options == set(), "options that there are not"
