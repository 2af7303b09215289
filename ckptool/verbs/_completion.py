"""`completion`: the script that makes a shell ask ckptool what can follow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from ckptool.commands import argument, verb
from ckptool.facts import Page


@verb(
    ("ckptool completion bash", 'in ~/.bashrc: eval "$(ckptool completion bash)"'),
    ("ckptool completion zsh", 'in ~/.zshrc: eval "$(ckptool completion zsh)"'),
    ("ckptool completion fish", "to ~/.config/fish/completions/ckptool.fish"),
)
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], argument("SHELL", "bash, zsh or fish.")]) -> Page:
    """The completion script of a shell."""
    return Page((Path(__file__).with_name("shells") / shell).read_text())
