"""The checkpoints of a run, each with a sidecar of facts about it; which of them are kept; and files of JSON lines.

A checkpoint is a file, `step-N.pt`, or what several processes wrote, a folder `step-N.dcp` of files. The size of a
folder is that of its files together, and its sha256 that of the list of theirs.

Commit order: the checkpoint is written under another name and synced; its sidecar is written, synced and renamed; then
the checkpoint gets its name, which is the commit; the folder is synced; only then old ones are pruned. Resume takes the
newest whole one, by step.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool import formats
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Source, open_regular, read_small
from ckptool.checkpoint.paths import file_problem
from ckptool.commands import Command, command
from ckptool.errors import CkptoolError, Conflict, Corrupt, FileProblem, NoneValid, counted, listed
from ckptool.output import make_folder, replace_file, sweep_folder
from ckptool.output.folders import NewFolder, remove_folder
from ckptool.output.hashing import StreamingSha256, digest_of
from ckptool.training import CHANGED, CHECKPOINTS, HISTORY
from ckptool.training.lock import OTHER_RUN

if TYPE_CHECKING:
    from ckptool.training.parallel import World

_NAME = re.compile(r"step-(\d{8,})\.(?:pt|dcp)")
_FILE = re.compile(r"step-(\d{8,})\.(?:pt|dcp|json)")
_PART = re.compile(r"\.metadata|__\d+_\d+\.distcp")  # a file of torch.distributed.checkpoint


@dataclass(frozen=True, slots=True)
class SavedState:
    """A checkpoint of a run. sidecar: the facts recorded with it; None where they are missing or damaged."""

    step: int
    path: str
    sidecar: dict[str, Any] | None

    @property
    def metrics(self) -> dict[str, float]:
        found = (self.sidecar or {}).get("metrics")
        numbers = found.items() if isinstance(found, dict) else ()
        return {key: value for key, value in numbers if isinstance(value, (int, float))}

    @property
    def is_stop(self) -> bool:
        """True where it was saved only because the run was asked to stop."""
        return (self.sidecar or {}).get("stop") is True


Skip = Callable[[SavedState, CkptoolError], Any]


@dataclass(frozen=True, slots=True)
class Retention:
    """The checkpoints to keep: the newest, the `last`, the `best` by a metric, and those at a multiple of `every`.

    One that was saved only to stop is kept while it is the newest, and takes no other's place: a run that was stopped
    ends with the checkpoints of one that was not.
    """

    last: int
    best: int
    every: int
    metric: str
    mode: str

    def reasons(self, there: Iterable[SavedState]) -> dict[int, list[str]]:
        """The steps to keep, in order, each with the names of the rules that want it."""
        everything = sorted(there, key=lambda saved: saved.step)
        ordered = [saved for saved in everything if not saved.is_stop]
        # The best first; 0.0 counts, NaN and missing values never rank, and of equal ones the older comes first.
        sign = 1 if self.mode == "min" else -1
        measured = [saved for saved in ordered if not math.isnan(saved.metrics.get(self.metric, math.nan))]
        wanted = {
            "newest": everything[-1:],
            "last": ordered[-self.last :] if self.last else [],
            "best": sorted(measured, key=lambda saved: sign * saved.metrics[self.metric])[: self.best],
            "every": [saved for saved in ordered if self.every and saved.step % self.every == 0],
        }
        reasons: dict[int, list[str]] = {}
        for name, chosen in wanted.items():
            for saved in chosen:
                reasons.setdefault(saved.step, []).append(name)
        return dict(sorted(reasons.items()))

    def divide(self, there: Iterable[SavedState]) -> tuple[dict[int, list[str]], list[SavedState]]:
        """The steps to keep, each with why, and the checkpoints that no rule keeps.

        Damaged ones stay and do not count: they are for a person to look at.
        """
        whole = [saved for saved in there if has_its_size(saved)]
        kept = self.reasons(whole)
        return kept, [saved for saved in whole if saved.step not in kept]


def name_of(step: int, ending: str = ".pt") -> str:
    """The name of the file, or folder, of the state after `step` steps."""
    return f"step-{step:08d}{ending}"


def sidecar_of(path: str) -> str:
    return os.path.splitext(path)[0] + ".json"


class Store:
    """The checkpoints of one run. run: its id; files of another one are passed over.  elsewhere: see `RunFolder`."""

    def __init__(self, folder: str, run: str, elsewhere: str | Command = OTHER_RUN) -> None:
        self.elsewhere = elsewhere
        self.folder = os.path.join(folder, CHECKPOINTS)
        self.run = run
        self.history = Lines(os.path.join(folder, HISTORY))

    def make(self) -> None:
        """Makes the folder; raises `FileProblem` where it cannot."""
        make_folder(self.folder)

    # Writing -----------------------------------------------------------------------------------------------------

    def commit(self, step: int, tree: Any, facts: dict[str, Any]) -> SavedState:
        """Writes the state after `step` steps, and facts about it (metrics, epoch, environment) in its sidecar.

        Raises `DiskFull`, `FileProblem`, or `Conflict` over a file of something else; older checkpoints stay.
        """
        self.refuse_others(step - 1, step)
        path = os.path.join(self.folder, name_of(step))
        saved = commit_file(tree, path, sidecar_of(path), self._sidecar(step, 0), facts)
        self._remove_path(os.path.join(self.folder, name_of(step, ".dcp")))
        return saved

    def commit_together(self, step: int, tree: Any, facts: dict[str, Any], world: World) -> SavedState:
        """Writes the state after `step` steps as a folder, every process its part; all of them call this.

        What goes wrong in one is raised in all: what `commit` raises, or `RunFailed`.
        """
        from ckptool.training.shards import write

        made: list[NewFolder] = []

        def begin() -> str:
            self.refuse_others(step - 1, step)
            made.append(NewFolder(os.path.join(self.folder, name_of(step, ".dcp"))))
            made[0].begin()
            return made[0].path

        try:
            folder = world.first(begin)
            write(tree, folder, world.group)
            own = world.each(lambda: _described(folder, world.rank))
            files = {name: known for part in own for name, known in part.items()}
            saved: SavedState = world.first(lambda: self._named(step, made[0], files, {"world": world.size, **facts}))
            return saved
        finally:
            for each in made:
                each.close()

    def _named(self, step: int, made: NewFolder, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> SavedState:
        """Gives a folder that is whole its sidecar and its name. files: as the processes know them that wrote them."""
        if different := sorted(set(files) ^ set(files_of(made.path))):
            raise FileProblem(
                f"{made.target}: not all processes see {listed(different, 3)}",
                "They write into one folder, which all of their machines have to share.",
            )
        sidecar = self._sidecar(step, sum(known["bytes"] for known in files.values()))
        digest = _digest_of_list({name: known["sha256"] for name, known in files.items()})
        sidecar |= {"sha256": digest, "files": files, **facts}
        write_json(sidecar_of(made.target), sidecar, sync_folder=False)
        made.commit(_PART.fullmatch)
        self._remove_path(os.path.join(self.folder, name_of(step)))
        return SavedState(step, made.target, sidecar)

    def _sidecar(self, step: int, nbytes: int) -> dict[str, Any]:
        """The first facts of a sidecar, which until the checkpoint has its name belongs to the one it replaces, too."""
        sidecar: dict[str, Any] = {"run": self.run, "step": step, "bytes": nbytes}
        places = [os.path.join(self.folder, name_of(step, ending)) for ending in (".pt", ".dcp")]
        replaced = read_json(sidecar_of(places[0])) if any(map(os.path.lexists, places)) else None
        if replaced is not None:
            sidecar["replaces"] = {key: replaced.get(key) for key in ("bytes", "sha256")}
        return sidecar

    def remove(self, saved: SavedState) -> None:
        """Deletes a checkpoint before its sidecar: a sidecar alone is no checkpoint."""
        self._remove_path(saved.path)
        remove_file(sidecar_of(saved.path))

    def _remove_path(self, path: str) -> None:
        if os.path.isdir(path):
            remove_folder(path, _PART.fullmatch)
        else:
            remove_file(path)

    def sweep(self) -> None:
        """Removes what saves that were killed left."""
        sweep_folder(self.folder)

    def refuse_others(self, after: int, last: int) -> None:
        """Raises `Conflict` where a checkpoint of these steps would be written over a file that is not this run's."""
        try:
            found = [(name, _FILE.fullmatch(name)) for name in os.listdir(self.folder)]
        except OSError:
            return  # the error is raised when the folder is written to
        names = [name for name, match in found if match and after < int(match[1]) <= last]
        if foreign := sorted(name for name in names if not self._wrote(os.path.join(self.folder, name))):
            files = listed(foreign, 3)
            raise Conflict(
                f"{self.folder} holds {files}, which this run did not write",
                "A checkpoint of this run would overwrite it. Nothing was changed.",
                f"Move such files away, or start the run in another folder: {self.elsewhere}",
            )

    def _wrote(self, path: str) -> bool:
        """True where this run wrote a checkpoint or its sidecar, by the sidecar, or if that was lost, the history."""
        sidecar = read_json(sidecar_of(path))
        if sidecar is not None and "run" in sidecar:
            return bool(sidecar["run"] == self.run)
        step = int(os.path.splitext(os.path.basename(path))[0].removeprefix("step-"))
        return any(fact.get("event") == "save" and fact.get("step") == step for fact in self.history.read())

    # Reading -----------------------------------------------------------------------------------------------------

    def all(self) -> list[SavedState]:
        """The checkpoints that are there, oldest first, whole or not; those of another run left out."""
        found = []
        for name in _names(self.folder):
            if match := _NAME.fullmatch(name):
                path = os.path.join(self.folder, name)
                saved = SavedState(int(match[1]), path, read_json(sidecar_of(path)))
                if (saved.sidecar or {}).get("run", self.run) == self.run:
                    found.append(saved)
        return sorted(found, key=lambda saved: saved.step)

    def newest_valid(self, verify: str, damaged: Skip) -> SavedState | None:
        """The newest whole checkpoint; None where there are none at all. `damaged` is called with each one skipped.

        verify: `full` compares the sha256 too, `size` only the size. Raises `NoneValid` where all are damaged.
        """
        return newest_whole(self.folder, self.all(), lambda saved: check(saved, verify), damaged)


def commit_file(tree: Any, path: str, sidecar: str, known: dict[str, Any], facts: dict[str, Any]) -> SavedState:
    """Writes a tree, and facts about it in a sidecar, which gets its name first. known: begins it, with the `step`."""
    from ckptool.bridge import from_torch

    running = StreamingSha256()
    plan = formats.by_name(formats.DEFAULT).write(Checkpoint(from_torch(tree), formats.DEFAULT))
    record = {**known, "bytes": plan.nbytes}

    def describe(temporary: str) -> None:
        record.update({"sha256": running.result(temporary), **facts})
        write_json(sidecar, record, sync_folder=False)  # its name is synced with the checkpoint's

    replace_file(plan, path, overwrite=True, verify=describe, digest=running)
    return SavedState(known["step"], path, record)


def newest_whole(folder: str, there: list[SavedState], check: Callable[..., Any], damaged: Skip) -> SavedState | None:
    """The newest of a folder's checkpoints, oldest first, that `check` does not refuse; see `Store.newest_valid`."""
    for saved in reversed(there):
        try:
            check(saved)
            return saved
        except CkptoolError as error:
            damaged(saved, error)
    if there:
        raise NoneValid(
            f"{folder} holds {counted(len(there), 'checkpoint')}, and none of them is whole",
            "Nothing was deleted, and nothing was started from the beginning.",
            f"See what is wrong with them: {command('scan', folder)}",
        )
    return None


def has_checkpoints(folder: str) -> bool:
    """True for a folder with a checkpoint of any run in it, whole or not. Raises `FileProblem`."""
    return any(map(_NAME.fullmatch, _names(os.path.join(folder, CHECKPOINTS))))


def _names(folder: str) -> list[str]:
    """The names in a folder; none where there is no folder."""
    with _problems(folder, "read"), suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def check(saved: SavedState, verify: str) -> None:
    """Raises `Corrupt` unless a checkpoint is what its sidecar says."""
    sidecar = saved.sidecar
    if sidecar is None:
        raise Corrupt(f"{saved.path} has no sidecar", "It was not committed, or the sidecar was lost.")
    size = size_of(saved.path)
    if sidecar.get("step") != saved.step:
        raise Corrupt(f"the sidecar of {saved.path} belongs to another step", "Files were renamed, or mixed up.")
    if not (same := [known for known in _known(sidecar) if size == known.get("bytes")]):
        raise Corrupt(
            f"{saved.path} has {size:,} bytes; its sidecar says {sidecar.get('bytes')!s}",
            "It was truncated, or overwritten.",
        )
    if verify == "full" and digest_of_files(saved.path) not in [known.get("sha256") for known in same]:
        raise Corrupt(f"{saved.path} does not match its sha256", "Its bytes were damaged after it was written.")


def _known(sidecar: dict[str, Any]) -> list[dict[str, Any]]:
    """The sizes and digests that a checkpoint may have: its own, and those of one that it was to replace."""
    return [each for each in (sidecar, sidecar.get("replaces")) if isinstance(each, dict)]


def has_its_size(saved: SavedState) -> bool:
    """True for a checkpoint that is as long as its sidecar says: the quick check, for retention."""
    sizes = [known.get("bytes") for known in _known(saved.sidecar or {})]
    with suppress(CkptoolError):
        return saved.sidecar is not None and size_of(saved.path) in sizes
    return False


# Files of a checkpoint -----------------------------------------------------------------------------------------------


def files_of(path: str) -> dict[str, str]:
    """The files of a checkpoint by their names in its folder; itself, without a name, where it is one file."""
    if not os.path.isdir(path):
        return {"": path}
    return {name: os.path.join(path, name) for name in sorted(_names(path)) if _PART.fullmatch(name)}


def size_of(path: str) -> int:
    """The bytes of a checkpoint. Raises `FileProblem`."""
    return sum(Source(file).size for file in files_of(path).values())


def digest_of_files(path: str) -> str:
    """The sha256 of a checkpoint, in hexadecimal; of a folder that of the list of its files. Raises `FileProblem`."""
    return _digest_of_list({name: file_digest(file) for name, file in files_of(path).items()})


def _digest_of_list(digests: dict[str, str]) -> str:
    if list(digests) == [""]:
        return digests[""]
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))  # as `sha256sum` prints them
    return hashlib.sha256(lines.encode()).hexdigest()


def _described(folder: str, rank: int) -> dict[str, dict[str, Any]]:
    """The size and the digest of each file that a process wrote into a folder; the table is the first one's."""
    own = {name: path for name, path in files_of(folder).items() if (name.strip("_").partition("_")[0] == str(rank))}
    if not rank:
        own[".metadata"] = os.path.join(folder, ".metadata")
    return {name: {"bytes": Source(path).size, "sha256": file_digest(path)} for name, path in own.items()}


# Small files ---------------------------------------------------------------------------------------------------------


def remove_file(path: str) -> None:
    """Deletes a file, if it is there. Raises `FileProblem`."""
    with _problems(path, "delete"), suppress(FileNotFoundError):
        os.unlink(path)


def file_digest(path: str) -> str:
    """The sha256 of a file, in hexadecimal. Raises `FileProblem`."""
    with _problems(path, "read"):
        return digest_of(path)


@contextmanager
def _problems(path: str, verb: str) -> Iterator[None]:
    """Raises what the system refuses as `FileProblem`."""
    try:
        yield
    except CkptoolError:
        raise
    except (OSError, ValueError) as error:
        raise file_problem(error, path, verb) from error


def write_text(path: str, text: str, *, sync_folder: bool = True) -> None:
    """Replaces a small file, durably; with `sync_folder` false, once another name in its folder is synced."""
    replace_file(text.encode(), path, overwrite=True, sync_folder=sync_folder)


def write_json(path: str, value: dict[str, Any], *, sync_folder: bool = True) -> None:
    """Replaces a small JSON file, as `write_text` does; keys in their own order."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, default=str) + "\n", sync_folder=sync_folder)


def read_json(path: str) -> dict[str, Any] | None:
    """A small JSON object; None where it is missing or damaged."""
    try:
        value = json.loads(read_small(path, "a sidecar", 1 << 24))
    except (CkptoolError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Lines:
    """A file of JSON lines that only grows, except when a run goes on from an earlier step.

    It stays open once something was added. Each line is one write: readers see it at once, and a kill tears no other.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd, self._status = -1, os.stat_result(range(10))

    def add(self, fact: dict[str, Any], *, sync: bool = False) -> None:
        """Adds a line. Raises `FileProblem`, on a full disk too; what was written of the line is cut off by the next.

        Where the file was deleted or moved away meanwhile, it begins anew under its name.
        """
        line = (json.dumps(_finite(fact), allow_nan=False, default=str) + "\n").encode()
        with _problems(self.path, "write to"):
            try:
                fd = self._open()
                while line:
                    line = line[os.write(fd, line) :]
                if sync:
                    os.fsync(fd)
            except BaseException:  # half a line may be there
                self.close()
                raise

    def _open(self) -> int:
        """The file that has the name now, after its last whole line."""
        with suppress(FileNotFoundError):
            if self._fd >= 0 and os.path.samestat(self._status, os.stat(self.path)):
                return self._fd
        self.close()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        _cut_torn(self._fd)
        self._status = os.fstat(self._fd)
        return self._fd

    def close(self) -> None:
        """Closes the file; the next line opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    __del__ = close

    def read(self) -> Iterator[dict[str, Any]]:
        """Every whole line."""
        for _, fact in self._lines():
            yield fact

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not os.path.lexists(self.path):
            return
        with (
            _problems(self.path, "read"),
            open(open_regular(self.path, "a file of lines"), encoding="utf-8", errors="replace") as file,
        ):
            for line in file:
                with suppress(ValueError, RecursionError):
                    fact = json.loads(line)
                    if isinstance(fact, dict):
                        yield line, fact

    def cut_back(self, step: int) -> None:
        """Leaves the whole lines up to a step; the later ones will be written again."""
        kept = "".join(line for line, fact in self._lines() if _step_of(fact) <= step and line.endswith("\n"))
        if os.path.lexists(self.path) and kept.encode() != self._bytes():
            write_text(self.path, kept)

    def _bytes(self) -> bytes:
        with _problems(self.path, "read"), open(open_regular(self.path, "a file of lines"), "rb") as file:
            return file.read()


def _step_of(fact: dict[str, Any]) -> float:
    step = fact.get("step", 0)
    return step if isinstance(step, (int, float)) else 0


def _cut_torn(fd: int) -> None:
    """Cuts off what follows the last whole line."""
    end = size = os.fstat(fd).st_size
    while end and (part := os.pread(fd, min(end, 1 << 16), end - min(end, 1 << 16))):
        if (at := part.rfind(b"\n")) >= 0:
            end += at + 1 - len(part)
            break
        end -= len(part)
    if end < size:
        os.ftruncate(fd, end)


def _finite(value: Any) -> Any:
    """Numbers that JSON has no name for, as texts."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def last_config(folder: str, number: str, config: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of the last change of a run's configuration, and the configuration since; 0 and `config` without one.

    `run.yaml` is written once. Each change is in the history, and in the sidecar of every checkpoint that was saved
    since; the highest number decides, so a history that was deleted takes nothing with it.
    """
    revision, count = 0, 0
    for saved in Store(folder, number).all():
        facts = saved.sidecar or {}
        found, held = facts.get("revision"), facts.get("config")
        if isinstance(found, int) and isinstance(held, dict) and found > revision:
            revision, config = found, held
    for fact in Lines(os.path.join(folder, HISTORY)).read():
        if fact.get("event") == CHANGED and isinstance(fact.get("config"), dict):
            count += 1
            found = fact.get("revision", count)
            if isinstance(found, int) and found >= revision:
                revision, config = found, fact["config"]
    return revision, config
