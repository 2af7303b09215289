"""The memory that a verb takes, in a process of its own."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

from ckptool.verbs.convert import convert

PROMISED = 64_000_000  # `make bench` measures against this
LIMIT = PROMISED * 4 // 3  # a third of room: allocators, pages of libraries and the machine move what a process takes


REWRITING = {
    "strip-module": "ckptool.strip_module(file, out)",
    "strip-module, verified": "ckptool.strip_module(file, out, verify=True)",
    "strip-module, in place": "ckptool.strip_module(file, in_place=True)",
    "add-module": "ckptool.add_module(file, out)",
    "rename": "ckptool.rename(file, ['module.* => net.*'], out)",
    "remap": "ckptool.remap(file, out, to='cpu')",
    "cast": "ckptool.cast(file, out, dtype='bf16')",
    "edit": "ckptool.edit(file, out, drop=['module.layer0.*'], set={'epoch': 1})",
    "convert to safetensors": "ckptool.convert(file, out + '.safetensors')",
    "convert --all": "ckptool.convert(file, out + '.safetensors', all=True)",
    "convert to a compact file": "ckptool.convert(file, out)",
}


READING = {
    "inspect": "ckptool.inspect(file)",
    "inspect --stats": "ckptool.inspect(file, stats=True)",
    "diff": "assert ckptool.diff(file, file).same",
    "convert back": "ckptool.convert(carried, out)",
}


def peak(verb: str, file: Path, folder: Path) -> int:
    """The most memory, in bytes, that a process took which ran `verb` on `file`; what it wrote is removed."""
    folder = folder / "outputs"
    folder.mkdir()
    out, carried = folder / "out.pt", folder / "carried.safetensors"
    if verb == "convert back":
        convert(file, carried, all=True)
    program = f"""
file, out, carried = {str(file)!r}, {str(out)!r}, {str(carried)!r}
{(REWRITING | READING)[verb]}
"""
    try:
        return peak_of(program, folder)
    finally:
        shutil.rmtree(folder)


def peak_of(program: str, folder: Path, *arguments: str) -> int:
    """The most memory, in bytes, of a Python process that runs a program in a folder, where `sys` and `ckptool` are
    imported."""
    tell = """
import resource
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""
    # A shell between: a process begins with the peak of the one that it was forked from.
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" -c "$@"; exit $?', sys.executable, f"import sys, ckptool\n{program}{tell}", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(ast.literal_eval(done.stdout))
