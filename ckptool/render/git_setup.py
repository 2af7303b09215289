"""Renders `git-setup` and `git-check` as text and JSON."""

from __future__ import annotations

from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, listed, printable, quoted
from ckptool.render.json import Json, fields_json, notes_json
from ckptool.render.style import PLAIN, Style, notes_text
from ckptool.reports.git_setup import GitCheck, GitSetup


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


@provides("json", GitSetup)
def git_setup_json(found: GitSetup) -> Json:
    """`ckptool.git-setup/1`: the commands as argv, and the patterns of the attributes."""
    facts = fields_json(found, "commands attributes patterns removed dry_run")
    return {"schema": "ckptool.git-setup/1", **facts, "notes": notes_json(found.notes)}


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


@provides("json", GitCheck)
def git_check_json(found: GitCheck) -> Json:
    """`ckptool.git-check/1`: problems by code."""
    problems = [fields_json(problem) for problem in found.problems]
    facts = fields_json(found, "file fine pointer")
    return {"schema": "ckptool.git-check/1", **facts, "problems": problems}
