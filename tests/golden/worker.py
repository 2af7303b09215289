"""One side: runs command lines in this process as they come on standard input, with whichever ckptool this Python has.

A line is JSON: a folder to work in, and command lines. The answer is one line: for each the exit code, what it printed
and what it wrote. `:copy A B`, `:cut A B SHARE` and `:flip A B SHARE` are commands of the worker's own, which make
files for the others.
"""

import hashlib
import io
import json
import os
import re
import shutil
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any


def copy(source: str, out: str) -> None:
    if os.path.isdir(source):
        shutil.copytree(source, out)
    else:
        shutil.copy2(source, out)


def cut(source: str, out: str, share: str) -> None:
    with open(source, "rb") as file:
        data = file.read()
    with open(out, "wb") as file:
        file.write(data[: int(len(data) * float(share))])


def flip(source: str, out: str, share: str) -> None:
    with open(source, "rb") as file:
        data = bytearray(file.read())
    data[int(len(data) * float(share))] ^= 0x10
    with open(out, "wb") as file:
        file.write(data)


# What a run of the harness says of the moment and the place: its own name, times, its process.
MOMENT = re.compile(
    rb'\b[0-9a-f]{32}\b|\b\d{4}-\d\d-\d\dT[\d:+]+|(?<=seconds": )[\d.e-]+|\bpid \d+|"argv": \[.*?\]', re.DOTALL
)
OWN = {":copy": copy, ":cut": cut, ":flip": flip}


FIRST = 1_600_000_000  # the time of what is there before the first command


class Standard(io.TextIOWrapper):
    """A stream in memory that can also be written bytes to, as a standard one."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]


def answer_to(words: list[str]) -> dict[str, Any]:
    """Exit code, both outputs, and the code of the error that was printed."""
    from ckptool.cli import main

    if words[0] in OWN:
        try:
            OWN[words[0]](*words[1:])
        except OSError as error:
            return {"code": 9, "out": "", "err": "", "error": type(error).__name__}
        return {"code": 0, "out": "", "err": "", "error": None}
    out, err = Standard(), Standard()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(words)
    found = re.search(r"^error\[([\w-]+)\]", err.text(), re.MULTILINE)
    found = found or re.match(r'\{"schema": "ckptool\.error/\d+", "code": "([\w-]+)"', out.text())
    return {"code": code, "out": out.text(), "err": err.text(), "error": found and found[1]}


def settle(folder: str, moment: int) -> list[str]:
    """Gives everything that was written since the last call one time, so that no answer depends on the clock.

    What that was: path, permissions and digest of each, and how many there are in all.
    """
    written, count = [], 0
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(base, name)
            found = os.lstat(path)
            count += 1
            if found.st_mtime > FIRST + 100_000:
                written.append(f"{os.path.relpath(path, folder)} {found.st_mode:o} {content_digest(path)}")
                os.utime(path, (moment, moment), follow_symlinks=False)
    return [*sorted(written), str(count)] if written else []


def content_digest(path: str) -> str:
    """Of the bytes of a file, without moments and places where it is text."""
    if os.path.islink(path) or not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        data = file.read()
    text = path.endswith((".json", ".jsonl", ".yaml")) or "." not in os.path.basename(path)
    return hashlib.sha256(MOMENT.sub(b"*", data) if text else data).hexdigest()


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what is printed past sys.stdout is no answer
    for line in sys.stdin:
        task = json.loads(line)
        os.chdir(task["folder"])
        settle(task["folder"], FIRST)
        done = []
        for number, words in enumerate(task["commands"]):
            done.append(answer_to(words))
            done[-1]["written"] = settle(task["folder"], FIRST + number)
        json.dump(done, answers)
        answers.write("\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its names are not for import
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    serve()
