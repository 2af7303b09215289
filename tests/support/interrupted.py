"""Runs command lines in terminals of their own, each interrupted at one moment: `python -m tests.support.interrupted`.

Reads lines of JSON, `[words, folder, at]`, and writes one for each: exit code, what the terminal showed, and how many
moments there were. Moments are those at which the program asks the system about files, from the first in the folder on.
This is a process of its own, which imports once what all of them need, and has no threads when it forks.
"""

import os
import pty
import signal
import sys
from typing import Any

from ckptool import cli
from tests.support.forks import serve_forked
from tests.support.processes import shown_in

EVENTS = {"open", *(f"os.{call}" for call in "rename remove mkdir rmdir scandir listdir truncate link".split())}


def ended(request: list[Any]) -> tuple[int, str, int]:
    words, folder, at = request
    reading, writing = os.pipe()
    child, terminal = pty.fork()
    if not child:
        os._exit(in_terminal(words, folder, at, writing))
    os.close(writing)
    shown = b"".join(shown_in(terminal))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, shown.decode(errors="replace"), len(os.read(reading, 1 << 16))


def in_terminal(words: list[str], folder: str, at: int, writing: int) -> int:
    os.chdir(folder)
    os.environ["COLUMNS"] = "80"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli._as_program()
    count = 0

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        place = arguments[0] if event in EVENTS and arguments else None
        if isinstance(place, (str, bytes)) and (count or folder in os.path.abspath(os.fsdecode(place))):
            count += 1
            os.write(writing, b".")
            if count == at:
                os.kill(os.getpid(), signal.SIGINT)

    sys.addaudithook(look)
    return cli.main(words)


if __name__ == "__main__":
    import torch  # noqa: F401

    import ckptool.cli
    import ckptool.verbs.convert  # noqa: F401

    serve_forked(ended, lambda status, _: [status, "", 0])
