"""Real shells at a terminal: what is typed at their prompt, and what the programs that they start are given."""

import os
import pty
import select
import shlex
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.programs import programs as quick_programs

STARTED = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
QUIET = {
    "bash": "PS1='> '; bind 'set enable-bracketed-paste off'; bind 'set bell-style none'\r",
    "zsh": "PS1='> '; unsetopt BEEP PROMPT_SP; zstyle ':completion:*' menu no\r",
    "fish": "function fish_prompt; echo '> '; end; set -g fish_greeting; set -g fish_autosuggestion_enabled 0\r",
}
PROGRAM = """#!/bin/sh
if [ "$1" = --complete ]; then exec {ckptool} "$@"; fi
for word in "$@"; do printf '%s\\0' "$word"; done > given.part; mv given.part given
"""


class Shell:
    """An interactive shell in a folder, in which `ckptool` completes, and otherwise only notes what it was given."""

    def __init__(self, name: str, folder: Path) -> None:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        self.name, self.folder, self.shown = name, folder, ""
        programs, own = folder / ".programs", quick_programs() / "ckptool"
        programs.mkdir(exist_ok=True)
        (programs / "ckptool").write_text(PROGRAM.format(ckptool=own))
        (programs / "ckptool").chmod(stat.S_IRWXU)
        script = subprocess.run([own, "completion", name], check=True, capture_output=True)
        (programs / "script").write_bytes(script.stdout)
        self.process, self.terminal = pty.fork()
        if self.process == 0:  # pragma: no cover (the shell)
            os.chdir(folder)
            home = {"HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}", "TERM": "dumb", "LANG": "C.UTF-8"}
            os.execvpe(STARTED[name][0], STARTED[name], {**home, "COLUMNS": "200", "PYTHONPATH": os.getcwd()})
        self.read(until=">")
        self.type(QUIET[name])
        self.type(f"source {shlex.quote(str(programs))}/script; echo rea''dy\r")
        self.read(until="ready")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode(errors="surrogateescape"))

    def read(self, seconds: float = 20, until: str = "", quiet: float = 60) -> str:
        """What the terminal shows, until it shows a text, or nothing new for a while."""
        end, text = time.monotonic() + seconds, ""
        while time.monotonic() < end and not (until and until in text):
            if not select.select([self.terminal], [], [], quiet if not until else 0.2)[0]:
                if not until:
                    break
                continue
            try:
                text += os.read(self.terminal, 65536).decode(errors="replace")
            except OSError:
                break
        self.shown += text
        return text

    def given(self, typed: str) -> list[str]:
        """What the program is given where a text is typed, and Enter pressed."""
        given = self.folder / "given"
        given.unlink(missing_ok=True)
        self.type(typed + "\r")
        end = time.monotonic() + 20
        while not given.exists() and time.monotonic() < end:
            self.read(0.05, quiet=0.05)
        assert given.exists(), self.shown[-2000:]
        return [os.fsdecode(word) for word in given.read_bytes().split(b"\0")[:-1]]

    def close(self) -> None:
        os.close(self.terminal)
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)
