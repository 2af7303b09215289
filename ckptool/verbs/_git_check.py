"""`git-check`: whether a file may be committed."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Annotated

from ckptool.analysis.git import POINTER, SMALL, git
from ckptool.analysis.scan import scan
from ckptool.analysis.verify import Problem, Verification, problem_lines, problem_of, verified
from ckptool.checkpoint.files import Source
from ckptool.commands import argument, option, repeated, verb
from ckptool.errors import CkptoolError, counted, listed, quoted
from ckptool.facts import WHOLE, Report, Told, bold, dataclass, green, red
from ckptool.facts import size as size_text


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GitCheck(Report):
    """A file to be committed, and its problems. pointer: it is a git-lfs pointer, not the file itself."""

    schema = "git-check/2"
    verdict = "fine"

    file: str
    pointer: bool
    problems: tuple[Problem, ...]

    @property
    def fine(self) -> bool:
        return not self.problems

    def told(self) -> Told:
        """A line for a file that may be committed; for any other its problems."""
        verdict = green("fine") if self.fine else red(counted(len(self.problems), "problem"))
        yield bold(self.file), ": ", verdict, ", a git-lfs pointer" if self.pointer and self.fine else ""
        yield from problem_lines(self.problems)


@verb(
    ("ckptool git-check model.pt", "whether it may be committed"),
    ("ckptool git-check model.pt --allow non-finite", "NaN and Inf are accepted"),
)
def git_check(
    file: Annotated[str, argument("FILE", "Files to be committed.", each=True)],
    *,
    max_size: Annotated[float, option("--max-size MB", "Largest file git may store without git-lfs.", least=0)] = 10,
    allow: Annotated[Collection[str], repeated("--allow CODE", "Accept this problem.")] = (),
) -> GitCheck:
    """Checks a file before a commit: intact, finite, no code to run, stored with git-lfs where it is large.

    max_size: megabytes that git may store of a file without git-lfs.  allow: codes of problems to accept.
    Of a file outside of a repository only the contents are checked.
    """
    source = Source(file)
    pointer = POINTER.match(source.read(0, min(source.size, SMALL))) is not None
    problems: list[Problem] = []
    # Where git would store it: what is staged takes precedence over what the attributes promise.
    for at, name in (("", file), os.path.split(file)):  # the command may stand outside of the file's repository
        if (attributes := git("check-attr", "-z", "filter", "--", name, ok=(0, 128), at=at)) is None:
            continue
        in_lfs = attributes.split("\0")[2] == "lfs"
        staged = (git("--literal-pathspecs", "ls-files", "-s", "-z", "--", name, ok=(0, 128), at=at) or "").split()
        track = f"To store it with git-lfs: git lfs track {quoted('*' + os.path.splitext(file)[1])}"
        stored = int(git("cat-file", "-s", staged[1], at=at) or 0) if staged else SMALL if in_lfs else source.size
        if pointer and not in_lfs:
            why = "No attribute assigns it to git-lfs (filter=lfs): a clone of the repository has only the pointer."
            problems.append(Problem("lfs-pointer", "a git-lfs pointer in place of the checkpoint", f"{why} {track}"))
        if stored > max(max_size * 10**6, SMALL):
            why = "By its attributes git-lfs should have stored it: git lfs install; git add --renormalize ."
            why = why if in_lfs else f"Every version of it would stay in the repository forever. {track}"
            problems.append(Problem("large-file", f"git itself would store {size_text(stored)}", why))
        break
    try:
        report = verified(source, finite=True)[0] if not pointer else Verification(file)
        problems += report.problems
        for row in (row for row in report.non_finite or () if not row.unset):
            what = f"{row.address or WHOLE}: {row.nans:,} NaN, {row.infs:,} Inf of {row.count:,}"
            problems.append(Problem("non-finite", what))
        files = () if pointer or report.problems else scan(source.path).files
        if calls := [call.name for scanned in files for call in scanned.calls]:
            problems.append(Problem("unsafe-global", f"loading it with pickle would run {listed(calls)}"))
    except CkptoolError as error:
        problems.append(problem_of(error))
    return GitCheck(file, pointer, tuple(problem for problem in problems if problem.code not in allow))
