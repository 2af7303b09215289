"""Renders `git-setup` as text and JSON."""

from __future__ import annotations

from ckptool.analysis.git_setup import GitSetup
from ckptool.checkpoint.registry import provides
from ckptool.errors import listed, printable, quoted
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style, notes_text


@provides("text", GitSetup)
def git_setup_text(found: GitSetup, *, style: Style = PLAIN) -> str:
    """The commands that were run, and the patterns in the file of attributes."""
    if not found.commands and not found.patterns:
        head = "nothing to remove" if found.removed else "set up already"
    else:
        verb = "would remove" if found.removed else "would set up"
        head = verb if found.dry_run else "removed" if found.removed else "git compares checkpoints by their tensors"
    lines = [f"{style.bold('git-setup')}: {head}"]
    lines += [f"  {' '.join(map(quoted, command))}" for command in found.commands]
    if found.patterns:
        what = "without" if found.removed else "with"
        text = f"{printable(found.attributes)}: {what} diff=ckptool for {listed([*map(printable, found.patterns)], 99)}"
        lines += [f"  {line}" for line in style.prose(text)]
    return "\n".join([*lines, *filter(None, [notes_text(found.notes, style)])]) + "\n"


document(GitSetup, "git-setup", "commands attributes patterns removed dry_run notes")
