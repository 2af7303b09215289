"""What torch says of the files of the lab is what `explain -` knows, and means what `doctor` finds in them; and a
message means the same in whatever traceback it stands."""

import io
import shlex
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType

import pytest
import rich.console
import rich.traceback
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.analysis.findings import of_error_text, recognised
from ckptool.cli import main
from ckptool.errors import COLOURS
from fixtures.lab import SPECIMENS, make
from tests.support.looped import looped

Raised = tuple[type[BaseException], BaseException, TracebackType | None]
MESSAGES = [
    line.split("\t")[2]
    for line in (Path(__file__).parents[2] / "docs" / "messages.txt").read_text().splitlines()
    if line[0] != "#"
]
# A line of source that has words of other messages in it.
SOURCE = "load('a', map_location='cuda:0', weights_only=True)  # BadZipFile, float8, shared memory, file is empty"

# What a message cannot tell apart, and `doctor FILE` does: names of classes, first bytes, what is in a folder or tar.
LESS = {*"weights-only not-a-checkpoint numpy-values pickle-protocol corrupt truncated folder legacy-tar io".split()}


def test_the_message_of_every_file_that_does_not_load(tmp_path: Path) -> None:
    wrong, messages = [], 0
    for name, specimen in SPECIMENS.items():
        (folder := tmp_path / name).mkdir()
        file = make(specimen, folder)
        codes = {each.code for each in ckptool.doctor(file).findings}
        for load in (torch.load, lambda path: torch.load(path, mmap=True), torch.jit.load):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    load(str(file))
            except Exception as error:  # noqa: BLE001
                said, messages = f"{type(error).__name__}: {error}", messages + 1
                known = recognised(said)
                if known is None or (load is torch.load and known.finding.code not in codes | LESS):
                    wrong.append((name, sorted(codes), known and known.finding.code, said))
    assert not wrong, "\n".join(map(str, wrong))
    assert messages > 60


def raised(message: str, folder: Path) -> Raised:
    """An error with this message, raised by SOURCE."""
    name, _, said = message.partition(": ")
    if not name.replace(".", "").replace("_", "").isalnum():
        name, said = "RuntimeError", message
    home, _, name = name.rpartition(".")
    error = type(name, (Exception,), {"__module__": home or "builtins"})(said)
    (script := folder / "train.py").write_text(f"def load(*_, **__):\n    raise error\n\n\n{SOURCE}\n")
    try:
        exec(compile(script.read_text(), str(script), "exec"), {"error": error})
    except Exception as caught:  # noqa: BLE001
        return type(caught), caught, caught.__traceback__
    raise AssertionError


def of_rich(error: Raised) -> str:
    text = io.StringIO()
    rich.console.Console(file=text, width=2_000).print(rich.traceback.Traceback.from_exception(*error))
    return text.getvalue()


def of_ipython(error: Raised) -> str:
    ultratb = pytest.importorskip("IPython.core.ultratb")
    return COLOURS.sub("", ultratb.VerboseTB(include_vars=False).text(*error))


def of_python(error: Raised) -> str:
    return "".join(traceback.format_exception(*error))


def of_pytest(error: Raised) -> str:
    said = "".join(traceback.format_exception_only(error[1])).splitlines()
    return "\n".join([f"    def test_it():\n>       {SOURCE}", *(f"E       {line}" for line in said), "", "x.py:2: E"])


STYLES = {
    "python": of_python,
    "a rank's": lambda error: "".join(f"[rank0]: {line}" for line in of_python(error).splitlines(keepends=True)),
    "below a log": lambda error: "float8: weights_only, file is empty\n" * 2_000 + of_python(error),
    "rich": of_rich,
    "ipython": of_ipython,
    "pytest": of_pytest,
}


@looped(("style", "message"), [(style, message) for style in STYLES for message in MESSAGES])
def test_a_message_means_the_same_in_any_traceback(style: str, message: str, tmp_path: Path) -> None:
    (alone,) = of_error_text(message).findings
    (found,) = of_error_text(STYLES[style](raised(message, tmp_path))).findings
    assert (found.code, found.what, found.fixes) == (alone.code, alone.what, alone.fixes)


def test_a_program_that_says_much_before_it_fails_is_read_to_its_end() -> None:
    program = "for _ in range(200_000): print('step 1, loss 0.5')\nopen('none.pt').read()"
    python = shlex.quote(sys.executable)
    line = f'{python} -c "{program}" 2>&1 | {python} -m ckptool explain -; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert "There is no file of that name" in done.stdout and done.stdout.splitlines()[-1] == "1", done


def test_of_a_models_folder_the_commands_write_a_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    save_file({"_orig_mod.fc.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (line,) = (line.strip() for line in str(ckptool.inspect(folder)).splitlines() if "ckptool strip-module" in line)
    assert line.endswith("-fixed/") and f"1. {line}" in str(ckptool.doctor(folder))
    subprocess.run(["bash", "-c", f"{shlex.quote(sys.executable)} -m {line}"], check=True)
    assert sorted(path.name for path in Path(f"{folder}-fixed").iterdir()) == ["config.json", "model.safetensors"]


def test_weights_that_are_only_called_safetensors_become_what_its_library_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(kept := {"w": torch.ones(2)}, "model.safetensors")
    (fix,) = ckptool.doctor("model.safetensors").findings[0].fixes
    assert main(shlex.split(fix)[1:]) == 0
    assert torch.equal(load_file(shlex.split(fix)[-1])["w"], kept["w"])
