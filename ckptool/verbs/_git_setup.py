"""`git-setup`: the configuration with which git compares checkpoints by their tensors."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from typing import Annotated

from ckptool.analysis.git import CACHE, git, text_for_git
from ckptool.checkpoint.files import Source
from ckptool.commands import option, verb
from ckptool.errors import Conflict, listed
from ckptool.errors import quoted as shell_word
from ckptool.facts import Note, Page, Report, Told, bold, dataclass
from ckptool.output import check_target, make_folder, replace_file
from ckptool.verbs._options import DryRun

# What is never anything but a checkpoint or an array, and the names that trainers give to `.bin` and `.tar`.
PATTERNS = (
    *("*.pt", "*.pth", "*.ckpt", "*.th", "*.safetensors", "*.sft", "*.npz", "*.npy", "*.pt.tar", "*.pth.tar"),
    *("pytorch_model*.bin", "adapter_model.bin", "diffusion_pytorch_model*.bin"),
)
_OURS = b" diff=ckptool"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GitSetup(Report):
    """Changes to git's configuration and to a file of attributes.
    commands: those that change the configuration, as argv.  attributes: the file.  patterns: that were put in it,
    or taken out of it.  removed: this was the way back.  dry_run: nothing was changed."""

    schema = "git-setup/2"

    commands: tuple[tuple[str, ...], ...]
    attributes: str
    patterns: tuple[str, ...]
    removed: bool
    dry_run: bool
    notes: tuple[Note, ...] = ()

    def told(self) -> Told:
        heads = ("git compares checkpoints by their tensors", "removed")
        heads = ("would set up", "would remove") if self.dry_run else heads
        heads = heads if self.commands or self.patterns else ("set up already", "nothing to remove")
        yield bold("git-setup"), f": {heads[self.removed]}"
        yield from (f"  {' '.join(map(shell_word, command))}" for command in self.commands)
        if self.patterns:
            what = "without" if self.removed else "with"
            yield f"  {self.attributes}: {what} diff=ckptool for {listed(self.patterns, 99)}"
        yield from self.notes


def _of_git(textconv: Annotated[str | None, option("--textconv FILE", "For git.", hidden=True)] = None) -> Page | None:
    return None if textconv is None else Page("\n".join([*text_for_git(textconv), ""]))


@verb(
    ("ckptool git-setup -n", "what it would do"),
    ("ckptool git-setup --remove", "git as it was before"),
    first_try=_of_git,
)
def git_setup(
    *,
    everywhere: Annotated[bool, option("--global", "Set up all your repositories, not only this one.")] = False,
    remove: Annotated[bool, option("--remove", "Remove exactly what git-setup added.")] = False,
    dry_run: DryRun = False,
) -> GitSetup:
    """Makes git compare checkpoints by their tensors, in this repository or everywhere; or undoes that.

    Raises `RunFailed` outside of a repository, `Conflict` where git would not read our lines.
    """
    scope = "--global" if everywhere else "--local"
    if everywhere:
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        configured = git("config", "--type=path", "--get", "core.attributesFile", ok=(0, 1), at="/")
        path = configured.removesuffix("\n") if configured else os.path.join(config, "git", "attributes")
    else:
        path = os.path.join((git("rev-parse", "--show-toplevel") or "").removesuffix("\n"), ".gitattributes")
    if not os.path.isabs(path):
        raise Conflict(f"core.attributesFile is {path}", "To git that is a different file in each repository.")
    # This program by its full path: git is also started where it is on no path.
    program = shutil.which("ckptool", path=sysconfig.get_path("scripts")) or shutil.which("ckptool") or "ckptool"
    commands: list[tuple[str, ...]] = []
    for key, value in {
        "diff.ckptool.textconv": f"{shlex.quote(program)} git-setup --textconv",
        "diff.ckptool.cachetextconv": "true",
        "diff.ckptool.binary": "true",
        "difftool.ckptool.cmd": f'{shlex.quote(program)} diff "$LOCAL" "$REMOTE"',
    }.items():
        old = git("config", scope, "--get-all", key, ok=(0, 1))
        if remove and old is not None:
            commands.append(("git", "config", scope, "--unset-all", key))
        elif not remove and old != f"{value}\n":
            commands.append(("git", "config", scope, "--replace-all", key, value))
    if remove and not everywhere and git("rev-parse", "-q", "--verify", CACHE, ok=(0, 1)) is not None:
        commands.append(("git", "update-ref", "-d", CACHE))
    if not everywhere and not remove and os.path.islink(path):
        why = "git does not follow such a link, and would not see the lines added."
        raise Conflict(f"{path} is a link", why, "For all your repositories: ckptool git-setup --global")
    before = b""
    if os.path.lexists(path):
        check_target(path, overwrite=True)
        before = (source := Source(path)).read(0, source.size)
    our_lines = [pattern.encode() + _OURS for pattern in PATTERNS]
    lines = [line.strip() for line in before.splitlines() if line.strip() in our_lines]
    after = b"".join(line for line in before.splitlines(keepends=True) if line.strip() not in our_lines)
    if not remove:  # at the end, where they win over `diff=lfs` before them
        after += b"" if after.endswith(b"\n") or not after else b"\n"
        lines, after = our_lines, after + b"\n".join([*our_lines, b""])
    notes: tuple[Note, ...] = ()
    for words in () if dry_run else commands:
        git(*words[1:])
    if after == before:
        lines = []
    elif not after and not dry_run:
        os.unlink(path)
    elif not dry_run:
        make_folder(os.path.dirname(path))
        notes = replace_file(after, path, overwrite=True)
    patterns = tuple(os.fsdecode(line.removesuffix(_OURS)) for line in lines)
    return GitSetup(tuple(commands), path, patterns, remove, dry_run, notes)
