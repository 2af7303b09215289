"""The folder, the variables and the locale that the program runs in decide nothing."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from ckptool.commands import VERBS as COMMANDS_OF_THE_PROGRAM
from tests.support.files import saved, weights

DECOYS = [
    "torch.py", "numpy.py", "yaml.py", "safetensors.py", "typer.py", "rich.py", "ml_dtypes.py", "models.py",
    "ckptool.py",
    "sitecustomize.py", "usercustomize.py", "conftest.py", "json.py", "pickle.py", "struct.py",
]  # fmt: skip


SETTINGS = ["ckptool.toml", ".ckptool.toml", "pyproject.toml", ".env", ".ckptoolrc", "ckptool.ini", "setup.cfg"]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which every module leaves a trace when it is imported, and every settings file is
    broken."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in DECOYS:
        (folder / name).write_text(f"open({str(folder / 'TRACE')!r}, 'a').write({name!r} + '\\n')\n")
    for package in ("torch", "numpy", "ckptool"):
        (folder / f"{package}_pkg").mkdir()
    for name in SETTINGS:
        (folder / name).write_text("this is no setting that anyone could read = = =\n")
        (folder / name).chmod(0)
    model = torch.nn.Linear(2, 2)
    saved({"model": {f"module.{k}": v for k, v in model.state_dict().items()}, "epoch": 1}, folder / "in.pt")
    (folder / "rules.yaml").write_text("- 'module.* => m.*'\n")
    numpy.save(folder / "b.npy", numpy.zeros(2, numpy.float32))
    return folder


COMMANDS = [
    "inspect in.pt --stats",
    "show in.pt#model/module.weight",
    "diff in.pt in.pt",
    "strip-module in.pt -o a.pt --verify",
    "rename in.pt --rules rules.yaml -o b.pt",
    "cast in.pt --dtype bf16 -o c.pt",
    "edit in.pt --tensor model/module.bias=b.npy -o d.pt",
    "convert in.pt --all -o e.safetensors",
    "--help",
]


def program() -> list[str]:
    """The installed program, as a user starts it."""
    return [str(Path(sys.executable).with_name("ckptool"))]


@pytest.mark.permissions
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_beside_the_checkpoint_is_imported_or_read(command: str, trap: Path) -> None:
    ended = subprocess.run([*program(), *command.split()], cwd=trap, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not (trap / "TRACE").exists(), (trap / "TRACE").read_text()


# Every way to start it that has the working directory on the path: its words before the command, PYTHONPATH, and the
# folder.
SCRIPT = "import re\nimport sys\nfrom ckptool.__main__ import main\nsys.exit(main())\n"  # as pip makes it
WAYS = {
    "-m": (["-m", "ckptool"], None, "full"),
    "an empty part": (["SCRIPT"], os.pathsep + "/nowhere", "full"),
    "a dot": (["SCRIPT"], ".", "full"),
    "a neighbour": (["SCRIPT"], "/nowhere" + os.pathsep + "../full", "full"),
    "a link, -m": (["-m", "ckptool"], os.pathsep, "link"),
    "a link, a dot": (["SCRIPT"], "/nowhere" + os.pathsep + ".", "link"),
}
VERBS = {
    "inspect": "inspect in.pt --stats --json",
    "show": "show in.pt#model/module.weight",
    "diff": "diff in.pt other.pt",
    "verify": "verify in.pt",
    "doctor": "doctor in.pt --against model.py:build",
    "scan": "scan in.pt",
    "report": "report in.pt other.pt -o r.html",
    "browse": "browse none.pt",
    "strip-module": "strip-module in.pt -o a.pt --verify",
    "add-module": "add-module other.pt -o b.pt",
    "rename": "rename in.pt --rules rules.yaml -o c.pt",
    "remap": "remap other.pt --to cpu -o l.pt",
    "cast": "cast in.pt --dtype bf16 -o d.pt",
    "edit": "edit in.pt --tensor model/module.bias=b.npy -o e.pt",
    "slim": "slim in.pt -o f.pt",
    "translate": "translate in.pt --rules rules.yaml -o t.pt",
    "convert": "convert in.pt --all -o g.safetensors",
    "recover": "recover in.pt -o h.pt",
    "bundle": "bundle -o i.pt a=in.pt b=other.pt",
    "unbundle": "unbundle in.pt -d members",
    "average": "average in.pt in.pt -o j.pt",
    "lora merge": "lora merge in.pt lora.safetensors -o n.pt",
    "lora extract": "lora extract tuned.pt base.pt --rank 1 -o adapter/",
    "lora resize": "lora resize lora.safetensors --rank 1 -o nl.safetensors",
    "lora convert": "lora convert lora.safetensors --to kohya -o nl.safetensors",
    "bake": "bake other.pt -o k.pt",
    "warm-start": "warm-start in.pt --against model.py:build",
    "spec": "spec model.py:build -o m.spec.json",
    "train": "train run.yaml -n",
    "resume": "resume runs/none",
    "eval": "eval runs/none",
    "prove": "prove none.yaml",
    "prune": "prune runs/none",
    "plot": "plot runs/none",
    "explain": "explain io",
    "demo": "demo playground",
    "schema": "schema inspect",
    "completion": "completion zsh",
    "git-setup": "git-setup --textconv in.pt",
    "git-check": "git-check in.pt",
}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a module of every name that the program could ever import; each leaves a trace."""
    folder = tmp_path_factory.mktemp("decoys") / "full"
    folder.mkdir()
    (folder.parent / "link").symlink_to(folder)
    (folder.parent / "script").write_text(SCRIPT)
    model = torch.nn.Linear(2, 2)
    saved({"model": {f"module.{k}": v for k, v in model.state_dict().items()}, "epoch": 1}, folder / "in.pt")
    saved(model.state_dict(), folder / "other.pt")
    for name, more in (("base.pt", 0), ("tuned.pt", 1)):
        saved({"model": {f"fc.{k}": v + more for k, v in model.state_dict().items()}, "epoch": 1}, folder / name)
    halves = {f"lora_unet_module.lora_{half}.weight": torch.ones(2, 2) for half in ("down", "up")}
    save_file(halves, folder / "lora.safetensors")
    (folder / "rules.yaml").write_text("- 'module.* => m.*'\n")
    (folder / "run.yaml").write_text(
        "run: runs/new\ndata: {name: blobs}\nmodels: {main: {name: mlp}}\ntrain: {steps: 2}\n"
    )
    (folder / "model.py").write_text("def build():\n    import torch\n    return torch.nn.Linear(2, 2)\n")
    numpy.save(folder / "b.npy", numpy.zeros(2, numpy.float32))
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


def start(folder: Path, way: str, command: str) -> None:
    words, path, name = WAYS[way]
    words = [str(folder.parent / "script") if word == "SCRIPT" else word for word in words]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, *words, *command.split()],
        cwd=folder.parent / name,
        env=environment | ({"PYTHONPATH": path} if path is not None else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    trace = folder / "TRACE"
    assert not trace.exists(), (way, command, trace.read_text())
    assert ended.returncode in (0, 1, 2) and "Traceback" not in ended.stderr and "[bug]" not in ended.stderr, (
        ended.stderr
    )
    assert "none" in command or ended.returncode < 2, (command, ended.stderr)


def numbered(command: str, number: int) -> str:
    """The command line with an output of its own."""
    return command.replace("-o ", f"-o {number}").replace("-d ", f"-d {number}")


@pytest.mark.parametrize("way", WAYS)
def test_no_module_of_the_working_directory_is_imported_however_the_program_is_started(way: str, full: Path) -> None:
    start(full, way, VERBS["inspect"])


def test_no_module_of_the_working_directory_is_imported_by_any_verb(full: Path) -> None:
    """Some here; `make soak` has each in each way."""
    assert set(VERBS) == set(COMMANDS_OF_THE_PROGRAM)
    some = random.Random(len(VERBS)).sample(sorted(VERBS), 6)
    for (number, verb), way in zip(enumerate(some), itertools.cycle(WAYS), strict=False):
        start(full, way, numbered(VERBS[verb], number))


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_soak_no_module_of_the_working_directory_is_imported(verb: str, way: str, full: Path) -> None:
    start(full, way, numbered(VERBS[verb], list(WAYS).index(way)))


def test_a_path_that_names_the_working_directory_in_full_is_kept(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build():\n    import torch\n    return torch.nn.Linear(2, 2)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", "from ckptool.__main__ import *; forget_working_directory(); import own"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)


ODD = {
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    "PYTHONINSPECT": "",
    "CKPTOOL_CONFIG": "/nowhere",
    "COLUMNS": "\x1b[31m",
    "TERM": "\x1b",
    "TMPDIR": "/nowhere",
    "HOME": "/nowhere",
    "LC_ALL": "C",
    "LANG": "xx_YY.nonsense",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}


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
        for words in (
            ["inspect", "in.pt", "--json"],
            ["strip-module", "in.pt", "-o", "out.pt", "-f", "--keep-unknown"],
        ):
            ended = subprocess.run(
                [*program(), *words], cwd=tmp_path, env=os.environ | environment, capture_output=True, check=False
            )
            assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr
            outputs.append(ended.stdout.replace(b"\xe2\x86\x92", b"->"))
        results.append((outputs, (tmp_path / "out.pt").read_bytes()))
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
                [*map(os.fsencode, program()), *words], env=os.environ | environment, capture_output=True, check=False
            )
            assert ended.returncode in (0, 1, 2) and b"Traceback" not in ended.stderr, ended.stderr
            assert b"error[bug]" not in ended.stderr, (words, ended.stderr)
            assert b"\x1b" not in ended.stdout + ended.stderr
            if words[0] == b"inspect" and raw in words and os.path.exists(raw):
                assert ended.returncode == 0 and b"module." in ended.stdout, ended.stderr
