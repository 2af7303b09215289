"""Renders `git-setup` and `git-check` as text and JSON."""

from __future__ import annotations

from ckptool.analysis.git_setup import GitCheck, GitSetup
from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, listed, printable, quoted
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


@provides("text", GitCheck)
def git_check_text(found: GitCheck, *, style: Style = PLAIN) -> str:
    """A line for a file that may be committed; for any other its problems."""
    name = style.bold(printable(found.file))
    if found.fine:
        return f"{name}: {style.green('fine')}{', a git-lfs pointer' if found.pointer else ''}\n"
    lines = [f"{name}: {style.red(counted(len(found.problems), 'problem'))}"]
    for problem in found.problems:
        lines.append(f"  {style.yellow(problem.code)}: {printable(problem.what)}")
        lines += [f"    {printable(problem.why)}"] if problem.why else []
    return "\n".join(lines) + "\n"


document(GitSetup, "git-setup", "commands attributes patterns removed dry_run notes")
document(GitCheck, "git-check", "file fine pointer problems")
