"""The folder, the variables and the locale that the program runs in decide nothing."""

import os
import random
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.commands import VERBS
from tests.support.files import saved, weights
from tests.support.small_files import PLAIN, make_small_files

# Every way to start it: as it is installed; and those that have the working directory on the path, with their words
# before the command, PYTHONPATH, and the folder.
SCRIPT = "import re\nimport sys\nfrom ckptool.__main__ import main\nsys.exit(main())\n"  # as pip makes it
INSTALLED = [str(Path(sys.executable).with_name("ckptool"))]
WAYS = {
    "installed": (INSTALLED, None, "full"),
    "-m": ([sys.executable, "-m", "ckptool"], None, "full"),
    "an empty part": ([sys.executable, "../script"], os.pathsep + "/nowhere", "full"),
    "a dot": ([sys.executable, "../script"], ".", "full"),
    "a neighbour": ([sys.executable, "../script"], "/nowhere" + os.pathsep + "../full", "full"),
    "a link, -m": ([sys.executable, "-m", "ckptool"], os.pathsep, "link"),
    "a link, a dot": ([sys.executable, "../script"], "/nowhere" + os.pathsep + ".", "link"),
}
# Those of `small_files`, and with what else is read: code of the user's own, rules, arrays.
LINES = PLAIN | {
    "inspect": "m.pt --stats --json",
    "show": "m.pt#sd/module.a.weight",
    "doctor": "m.pt --against model.py:build",
    "scan": "m.pt",
    "strip-module": "m.pt -o out.pt --verify",
    "rename": "m.pt --rules rules.yaml -o out.pt",
    "edit": "m.pt --set epoch=3 -o out.pt",
    "translate": "m.pt --rules rules.yaml -o out.pt",
    "convert": "m.pt --all -o out.safetensors",
    "warm-start": "m.pt --against model.py:build",
    "spec": "model.py:build -o out.json",
    "train": "run.yaml -n",
    **dict.fromkeys(("browse", "resume", "eval", "prove"), "none"),
    "git-setup": "--textconv m.pt",
}
ENDS_BADLY = {"browse", "resume", "eval", "prove"}
SETTINGS = ["ckptool.toml", ".ckptool.toml", "pyproject.toml", ".env", ".ckptoolrc", "ckptool.ini", "setup.cfg"]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a module of every name that the program could ever import, each of which leaves a trace,
    and settings that cannot be read."""
    folder = tmp_path_factory.mktemp("decoys") / "full"
    folder.mkdir()
    (folder.parent / "link").symlink_to(folder)
    (folder.parent / "script").write_text(SCRIPT)
    make_small_files(folder)
    (folder / "model.py").write_text("def build():\n    import torch\n    return torch.nn.Linear(3, 2)\n")
    for package in ("torch", "numpy", "ckptool"):
        (folder / f"{package}_pkg").mkdir()
    for name in SETTINGS:
        (folder / name).write_text("this is no setting that anyone could read = = =\n")
        (folder / name).chmod(0)
    for name in importable() - loaded_by_python_itself(folder.parent):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'TRACE')!r}, 'a').write({name!r} + ' ')\n")
    return folder


def importable() -> set[str]:
    """The names of all modules outside packages: the standard library's and those of everything that is installed."""
    found = set(sys.stdlib_module_names) | {"__future__", "models", "tests", "fixtures", "conftest"}
    return found | {name for name in packages_distributions() if name.isidentifier()}


def loaded_by_python_itself(folder: Path) -> set[str]:
    """What is imported before the first line of ours can run: beyond reach for a decoy beside the checkpoint."""
    blank = folder / "blank"
    (blank / "ckptool").mkdir(parents=True)
    (blank / "ckptool" / "__init__.py").touch()
    for place in (blank / "ckptool" / "__main__.py", blank / "script"):
        place.write_text("import re\nimport sys\nprint(*sys.modules)\n")
    found = {"ckptool", "sitecustomize", "usercustomize", "__main__", "model"}
    for words in (["-m", "ckptool"], ["script"]):
        ended = subprocess.run([sys.executable, *words], cwd=blank, capture_output=True, text=True, check=True)
        found |= {name.partition(".")[0] for name in ended.stdout.split()}
    return found


def start(folder: Path, way: str, verb: str) -> None:
    program, path, name = WAYS[way]
    words = [
        f"{list(WAYS).index(way)}{verb.replace(' ', '')}-{word}"
        if word.startswith(("out", "adapter", "playground"))
        else word
        for word in LINES[verb].split("," if "," in LINES[verb] else None)
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [*program, *verb.split(), *words],
        cwd=folder.parent / name,
        env=environment | ({"PYTHONPATH": path} if path is not None else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    trace = folder / "TRACE"
    assert not trace.exists(), (way, verb, trace.read_text())
    assert "Traceback" not in ended.stderr and "[bug]" not in ended.stderr, (verb, ended.stderr)
    assert ended.returncode == 2 if verb in ENDS_BADLY else ended.returncode in (0, 1), (verb, ended.stderr)


@pytest.mark.permissions
@pytest.mark.parametrize("way", WAYS)
def test_nothing_beside_the_checkpoint_is_imported_or_read(way: str, full: Path) -> None:
    """Some verb in each way; `make soak` has each in each way."""
    assert set(LINES) == set(VERBS)
    start(full, way, random.Random(f"{way}, once").choice(sorted({*VERBS} - ENDS_BADLY)))


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", LINES)
def test_soak_no_module_of_the_working_directory_is_imported(verb: str, way: str, full: Path) -> None:
    start(full, way, verb)


def test_a_path_that_names_the_working_directory_in_full_is_kept(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build():\n    import torch\n    return torch.nn.Linear(2, 2)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", "from ckptool.__main__ import *; forget_working_directory(); import own"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)


ODD = dict(
    each.split("=", 1)
    for each in (
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 TORCH_FORCE_WEIGHTS_ONLY_LOAD=1 PYTHONINSPECT= "
        "CKPTOOL_CONFIG=/nowhere COLUMNS=\x1b[31m TERM=\x1b TMPDIR=/nowhere HOME=/nowhere LC_ALL=C "
        "LANG=xx_YY.nonsense PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    ).split(" ")
)


def traced(path: Path, trace: Path) -> Path:
    """A checkpoint whose pickle would touch `trace` when it is loaded the unsafe way."""

    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    torch.save({"model": weights("module.a"), "evil": Touch()}, path)
    return path


def test_environment_variables_have_no_effect(tmp_path: Path) -> None:
    trace = tmp_path / "TRACE"
    startup = tmp_path / "startup.py"
    startup.write_text(f"open({str(trace)!r}, 'w')")
    traced(tmp_path / "in.pt", trace)
    results = []
    for environment in ({}, ODD | {"PYTHONSTARTUP": str(startup)}):
        outputs = []
        for words in (["inspect", "in.pt", "--json"], ["strip-module", "in.pt", "-o", "out.pt", "--keep-unknown"]):
            ended = subprocess.run(
                [*INSTALLED, *words], cwd=tmp_path, env=os.environ | environment, capture_output=True, check=False
            )
            assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr
            outputs.append(ended.stdout.replace(b"\xe2\x86\x92", b"\\u2192"))
        results.append((outputs, (tmp_path / "out.pt").read_bytes()))
        (tmp_path / "out.pt").unlink()
        assert not trace.exists()
    assert results[0] == results[1]


def test_file_names_that_no_locale_can_spell_work(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/\xff\xfe-\xe9.pt"
    path = saved(weights("module.é"), tmp_path / "in.pt")
    try:
        os.rename(os.fsencode(path), raw)
    except OSError:  # a file system that takes only UTF-8: then such a name is simply not there
        os.rename(path, os.fsencode(tmp_path) + b"/in.pt")
    for environment in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C.UTF-8"}):
        for words in (
            [b"inspect", raw, b"--json"],
            [b"strip-module", raw, b"-o", raw + b".out.pt", b"-f"],
            [b"inspect", b"\xff\x1b[31m.pt"],
            [b"show", raw + b"#\xff"],
        ):
            ended = subprocess.run(
                [*map(os.fsencode, INSTALLED), *words], env=os.environ | environment, capture_output=True, check=False
            )
            assert ended.returncode in (0, 1, 2) and b"Traceback" not in ended.stderr, ended.stderr
            assert b"error[bug]" not in ended.stderr, (words, ended.stderr)
            assert b"\x1b" not in ended.stdout + ended.stderr
            if words[0] == b"inspect" and raw in words and os.path.exists(raw):
                assert ended.returncode == 0 and b"module." in ended.stdout, ended.stderr
