"""The checkpoints of a folder, one row each; and the names that one file's pickles would call."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timezone
from functools import partial
from operator import attrgetter
from typing import Annotated, Any

from ckptool import formats
from ckptool.analysis.inspect import WEIGHTS_ONLY, listing
from ckptool.checkpoint import PartOf
from ckptool.checkpoint.files import Folder, Source, entries_of, folder_at, open_input, size_at
from ckptool.checkpoint.jobs import Jobs
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.paths import TEMPORARY, is_url, may_exist, named_urls
from ckptool.checkpoint.tree import children
from ckptool.checkpoint.workers import in_turn
from ckptool.commands import command, option
from ckptool.conventions.state_dicts import kinds_of
from ckptool.errors import CkptoolError, Corrupt, NotACheckpoint, Unsupported, UsageError, counted, listed, printable
from ckptool.facts import LIVE, Bytes, Report, Table, Told, Unit, age, bold, dataclass, dim, green, red, size, yellow
from ckptool.formats import PathLike, marks, members, sharded, unwritten
from ckptool.formats.folder import MEMBERS, is_set_aside, plain_name
from ckptool.formats.layouts import deepspeed, megatron, torch_checkpointing
from ckptool.formats.members import all_uses, is_pickled
from ckptool.formats.unrecognized import OtherProgram
from ckptool.pickles.calls import CALLED, CUSTOM, MADE, NAMED
from ckptool.pickles.decode import reaches_a_call

GOOD, PART, MEMBER, UNSAFE = "good", "part", "member", "unsafe-global"
WORDS = {CALLED: "calls", MADE: "makes objects of", NAMED: "imports"}
MAX_FILES, MAX_PLACES = 100_000, 5
MAX_DEPTH = 32  # levels of folders on a web server
NO_SUMS = "no-checksums"  # the code of a checkpoint, all read, some of whose data have none
MANY = 40  # files of a table below which those that are not good are named again

# What people call checkpoints. Pickles of other names in a folder are judged, and shown if they would run something;
# other files are counted.
_NAMES = "pt pth pt2 ckpt bin safetensors sft tar pkl pickle model th npz npy jit ptl pts t7 weights"
SUFFIXES = frozenset(f".{name}" for name in _NAMES.split())
ARCHIVES = (".zip", ".nemo")
OTHERS = (".bin", ".model")  # tokenizers and weights of other programs, too
# Files that belong to a run and are no checkpoints, whatever their suffix.
_BESIDE = frozenset({"training_args.bin"})

# Where training scripts keep how far they have come: the keys, the most exact first, then what stands in file names.
_STEPS = """global_step global_steps step steps iteration iterations iter iter_num num_updates trainer_step
    training_step n_total_iter number_training_updates global_timestep it""".split()
_EPOCHS = "epoch epochs current_epoch global_epoch start_epoch epoch_num epochs_trained iepoch".split()
_SETTINGS = re.compile(r"(?:.*_)?(?:args|arguments|config|cfg|conf|(?:h|hyper_?)?param(?:eter)?s|opts?|options)")
_STEP_IN_NAME = re.compile(  # a word and a number, or nothing but a number
    r"(?:(?:global_?step|checkpoint|ckpt|step|iter(?:ation)?)[-_=]?|^(?=\d{3,7}$))0*(\d{1,15})(?!\d)(k(?![a-z]))?",
    re.IGNORECASE,
)
_EPOCH_IN_NAME = re.compile(r"(?:epoch|(?<![a-z])ep)[-_=]?0*(\d{1,9})(?!\d)", re.IGNORECASE)  # but not in `step-2`

_UTC = Unit(
    json=lambda seconds: datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds"),
    schema={"type": "string", "format": "date-time"},
)


@dataclass(frozen=True, slots=True)
class Call:
    """A name that is not known to be inert. how: `called` (or a class with arguments), `made`, `named` (by itself).
    is_custom: an object of a class of the file's own, filled with plain values; else it would run unknown code.
    places: addresses in the tree, the first of `count`."""

    name: str
    how: str
    places: tuple[str, ...]
    count: int
    is_custom: bool = False

    @property
    def name_in_folder(self) -> Annotated[str, LIVE]:
        """With the file that makes it, where its place names one."""
        file, colon, _ = self.places[0].partition(": ")
        return f"{self.name} in {file}" if file and colon else self.name


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A checkpoint of a folder.
    state: `good`, `part` (whole bytes of an incomplete checkpoint), `member` (what lies beside weights: optimizer,
    random states), `recovered-file`, `unsafe-global` (loading it would run unknown code), or the code of the error that
    opening or verifying it gave; in `problem` the sentence.  part: of what it is only a part.
    members: of how many files it is, where those are a folder of several kinds.
    step, epoch: how far the training was; null where neither the file nor its name says.
    holds: what its parts are.  notes: codes of what one should know.  calls: names that ckptool does not know."""

    path: str
    state: str
    problem: str
    part: PartOf | None
    members: int
    container: str
    step: int | None
    epoch: int | None
    bytes: Bytes
    modified: Annotated[float, _UTC]
    holds: tuple[str, ...]
    notes: tuple[str, ...]
    calls: tuple[Call, ...]
    is_model: Annotated[bool, LIVE] = False

    @property
    def is_good(self) -> bool:
        return self.state == GOOD

    @property
    def extent(self) -> Annotated[tuple[int, int, float], LIVE]:
        """Orders checkpoints of one step: by how much each holds, then by time."""
        return len(self.holds) + self.members, self.bytes, self.modified

    @property
    def is_wrong(self) -> Annotated[bool, LIVE]:
        return self.state not in (GOOD, MEMBER)

    def row(self, name: str) -> tuple[str, ...]:
        """Its cells in a table; red where something is wrong."""
        if self.is_good:
            members = [f"{self.members:,} of {counted(self.members, 'member')}"] if self.members else []
            detail = ", ".join((*([self.part.label] if self.part else members), *self.holds, *self.notes))
        else:  # without its name, which stands at the beginning of the row
            path = printable(self.path)
            detail = self.problem[len(path) :].lstrip(f": {os.sep}") if self.problem.startswith(path) else self.problem
        progress = ("" if number is None else f"{number:,}" for number in (self.step, self.epoch))
        since = age(time.time() - self.modified) if self.modified else ""
        cells = (name, self.state, *progress, size(self.bytes), since, detail)
        return tuple(map(red, cells)) if self.is_wrong else cells

    def told(self) -> Told:
        """What loading it would do."""
        kind = f"{self.container}, {self.part.label}" if self.part else self.container
        recovered = [yellow(self.problem), "; "] if self.state == marks.RECOVERED_NOTE else []
        head = (bold(self.path), f" ({kind}): ", *recovered)
        if (is_program := formats.named(self.container).is_program) and not self.calls:
            yield *head, yellow("it holds a program"), ", which runs when the model is called, not when it is loaded"
        elif not self.calls:
            refused = f"torch.load refuses it by default (weights_only=True): see  {command('inspect', self.path)}"
            only = refused if WEIGHTS_ONLY in self.notes else "functions of torch and plain data only"
            yield *head, green("nothing in it would run"), f": {only}"
        elif all(call.is_custom for call in self.calls):
            needs = ", which pickle imports and creates on loading; ckptool runs none of it"
            yield *head, yellow("it needs classes of its own"), needs
        else:
            what = f"loading it {'' if is_program else 'with pickle '}would run unknown code"
            yield *head, red(what), "; ckptool runs none of it"
        rows = []
        for call in self.calls:
            times = f" ({counted(call.count, 'time')})" if call.count > len(call.places) else ""
            places = listed([place or "the top" for place in call.places], 3)
            rows.append((WORDS[call.how], call.name, f"at {places}{times}"))
        yield Table(rows)


@dataclass(frozen=True, slots=True, repr=False)
class Scan(Report):
    """The checkpoints of a folder, or one file.
    other_files: how many are no checkpoints.  latest_by: what the newest good one was judged by; empty for none.
    full: the data was read and compared with its checksums; otherwise good means that tables and structure are whole.
    latest_only: the question was which is the newest good one, and whether there is one."""

    verdict = "findings"

    path: str
    is_folder: bool
    other_files: int
    latest: Annotated[ScannedFile | None, LIVE]
    latest_by: str
    full: bool
    latest_only: bool
    files: tuple[ScannedFile, ...]

    @property
    def latest_good(self) -> str | None:
        return self.latest.path if self.latest else None

    @property
    def findings(self) -> int:
        """Files that are not good, or whose pickles would call something unknown; of one named file only the latter."""
        return sum(1 for file in self.files if (file.is_wrong and self.is_folder) or file.calls)

    def exit(self) -> int:
        """1 where something is damaged or would run code; with `latest_only` where none is good."""
        return int(self.latest is None if self.latest_only else bool(self.findings))

    def told(
        self,
        *,
        quiet: Annotated[
            bool, option("-q --quiet", "With --latest-good print only its path; otherwise only set the exit code.")
        ] = False,
    ) -> Told:
        """A folder: one line per checkpoint. A file: what its pickles would call."""
        last = self.latest if self.latest_only else None
        if quiet:
            yield last.path if last else None
            return
        if last:
            progress = [f"{name} {n:,}" for name, n in (("step", last.step), ("epoch", last.epoch)) if n is not None]
            read = [] if self.full else ["its data was not read: --full"]
            read += ["damage to data without checksums cannot be seen"] if NO_SUMS in last.notes else []
            yield f"{last.path} ({', '.join([*progress, size(last.bytes), *read])})"
            return
        if self.latest_only:
            yield f"{self.path}: no good checkpoint"
            return
        if not self.is_folder:
            yield from self.files[0].told()
            return
        count = sum(file.state != MEMBER for file in self.files)
        wrong = [f"{self._relative(file)} ({file.state})" for file in self.files if file.is_wrong]
        damage = [", ", red(f"{len(wrong):,} not good")] if wrong else []
        others = f", {counted(self.other_files, 'other file')}" if self.other_files else ""
        yield bold(self.path), f": {counted(count, 'checkpoint')}", *damage, others
        if self.latest is not None and len(self.files) > 1:
            yield f"latest good: {self._relative(self.latest)} (by {self.latest_by})"
        yield ""
        heads = ("file", "state", "step", "epoch", "size", "age", "what")
        yield Table([file.row(self._relative(file)) for file in self.files], heads=heads, right=(2, 3, 4, 5), indent=0)
        yield ""
        if len(self.files) > 1:
            states = Counter(file.state for file in self.files)
            facts = ", ".join(f"{states[state]:,} {state}" for state in sorted(states, key=lambda state: state != GOOD))
            nbytes = size(sum(file.bytes for file in self.files))
            yield bold(f"{counted(len(self.files), 'file')}, {nbytes}: {facts}")
            yield f"not good: {listed(wrong, 6)}" if wrong and len(self.files) > MANY else None
        if not self.full and any(file.is_good for file in self.files):
            yield dim("good: tables and structure are whole; data checksums were not verified (--full does)")
        for what, is_custom in (("would run unknown code", False), ("needs classes of its own", True)):
            calls = [(file, [call for call in file.calls if call.is_custom is is_custom]) for file in self.files]
            if any(file_calls for _, file_calls in calls):
                yield ""
                first = next(file.path for file, file_calls in calls if file_calls)
                yield yellow(what), f" when loaded with pickle; details: {command('scan', first)}"
                for file, file_calls in calls:
                    names = [call.name_in_folder if folder_at(file.path) else call.name for call in file_calls]
                    yield f"  {self._relative(file)}: {listed(names, 4)}" if file_calls else None

    def _relative(self, file: ScannedFile) -> str:
        return os.path.relpath(file.path, self.path)


# What is looked at ----------------------------------------------------------------------------------------------------


def scan(path: PathLike, *, latest_only: bool = False, full: bool = False, jobs: Jobs = 1, again: int = 3) -> Scan:
    """The state of every checkpoint below a folder, or of one file; see the verb. again: lists that may be outdated."""
    name = named_urls(os.fspath(path))
    if not folder_at(name):
        row = _file_row(full, name)
        return Scan(name, False, 0, row if row.is_good else None, "", full, latest_only, (row,))
    entries = list(_files(name))
    files = {file: is_named for file, is_named in entries if is_named is not None}
    rows = []
    nbytes = (lambda file: size_at(file)[0]) if full else (lambda _: 1)
    with closing(in_turn(partial(_file_row, full), list(files), jobs, nbytes)) as tasks:
        for file, task in zip(files, tasks, strict=True):
            try:
                rows.append(task())
            except CkptoolError as error:
                files[file] = files[file] and not (isinstance(error, OtherProgram) and file.endswith(OTHERS))
                is_gone = isinstance(error, FileNotFoundError) if is_url(file) else not may_exist(file)
                if latest_only and is_url(file) and isinstance(error, OSError) and not is_gone:
                    raise  # it could not be read, and may be the newest
                rows += [] if is_gone else [_damaged_row(file, error)]
            except Exception as bug:  # noqa: BLE001 (whatever goes wrong in one file says nothing about the others)
                rows.append(_damaged_row(file, Corrupt(f"ckptool could not judge it ({type(bug).__name__}: {bug!s})")))
    gone = len(files) - len(rows)  # meanwhile, as by a run that keeps the last few
    torn = ("corrupt", "truncated", "unsupported")  # before the damage, there may be a call
    judged, rows = rows, []
    for row in judged:
        with suppress(FileNotFoundError):  # what was being written under another name has its own now
            if files[row.path] or row.calls or (row.state in torn and reaches_a_call(Source(row.path))):
                rows.append(row)
    good = [row for row in rows if row.is_good and files[row.path]]
    good = [row for row in good if row.is_model] or good  # rather than an optimizer or a data loader by itself
    good = [row for row in good if not is_set_aside(row.path[len(name) :].rstrip("/"))] or good
    if latest_only and gone and again and not good:
        return scan(path, latest_only=latest_only, full=full, jobs=jobs, again=again - 1)
    latest, by = _newest(good)
    shown = ((latest,) if latest else ()) if latest_only else tuple(rows)
    return Scan(name, True, len(entries) - gone - len(rows), latest, by, full, latest_only, shown)


def _newest(good: list[ScannedFile]) -> tuple[ScannedFile | None, str]:
    """The newest of these checkpoints, and what that was judged by.

    By those that state a step (where all of them state their epoch, too, by that first), unless one that states none
    was changed after them all; else by epochs in the same way; else by time, which a copy or a download changes. Of two
    of the same step, the one that holds more: kinds of contents and members, then bytes.
    """
    for by in ("step", "epoch"):
        stating = [row for row in good if getattr(row, by) is not None]
        if stating and max(row.modified for row in stating) == max(row.modified for row in good):
            orders = ["epoch", by] if all(row.epoch is not None for row in stating) else [by]
            return max(stating, key=attrgetter(*orders, "extent")), by
    return max(good, key=lambda row: row.modified, default=None), "time" if good else ""


def _files(folder: str) -> Iterator[tuple[str, bool | None]]:
    """The files of a folder and below it: True for checkpoints, by name, False for other pickles, None for the rest.
    Links are not followed."""
    count = 0
    stack = [folder]
    while stack:
        current = stack.pop()
        # The checkpoints of this folder (as a rule the folder itself), and the names in it that belong to them.
        entries, checkpoints, claimed = [], list[str](), set[str]()
        try:
            entries = entries_of(current)
            if _is_checkpoint(current) and not megatron.is_run(source := Folder(current)):  # each iteration of one is
                candidates = sharded.candidates(source)
                claimed = sharded.belonging(source) | members.claimed(source)
                with suppress(CkptoolError):  # of a file that cannot be read, as a link that leads nowhere
                    claimed |= deepspeed.belonging(source)
                    claimed -= deepspeed.other_tags(source)
                claimed |= torch_checkpointing.belonging(source)
                unclaimed = {*source.names} - claimed
                has_others = any(name.lower().endswith((".pt", ".pth", ".ckpt", ".safetensors")) for name in unclaimed)
                is_single = (current == folder or has_others) and len(claimed) == 1  # a file among others
                names = candidates if is_single or len(candidates) > 1 else ()
                checkpoints = [os.path.join(current, name) for name in names] or [current]
        except CkptoolError:
            if current == folder or (entries and may_exist(current)):
                raise
            continue  # it may not be read, or is gone
        count += len(entries)
        if count > MAX_FILES:
            raise UsageError(f"{folder} holds more than {MAX_FILES:,} files", "Name a folder below it.")
        if is_url(folder) and current.count("/") > folder.count("/") + MAX_DEPTH:
            why = "The server probably answers any name with the same page."
            raise UsageError(f"{folder} has more than {MAX_DEPTH} levels of folders", why, "Name a file in it.")
        yield from ((path, True) for path in checkpoints)
        subfolders: list[str] = []
        for name, is_folder, is_file in entries:
            path = os.path.join(current, name, *[""] * (is_folder and is_url(current)))  # as web servers want it
            if name in claimed or TEMPORARY.fullmatch(name):
                continue
            if is_folder:
                if not name.startswith(".") or _is_checkpoint(path):
                    subfolders.append(path)
            elif is_file:
                by_name = os.path.splitext(name)[1].lower() in SUFFIXES and name not in _BESIDE and name[0] != "."
                is_named: bool | None = by_name or None
                with suppress(CkptoolError):
                    if not by_name and is_pickled(Source(path)):
                        is_named = name.endswith(ARCHIVES)
                yield path, is_named
        stack.extend(reversed(subfolders))


def _is_checkpoint(path: str) -> bool:
    """True for a folder whose files together are one checkpoint."""
    try:
        source = open_input(path)
        return any(container.detect(b"", source) for container in formats.FORMATS)
    except (NotACheckpoint, Unsupported):
        return False
    except CkptoolError:
        return may_exist(path)  # it is one, and something is wrong with it, which has to be reported; or it is gone


# Rows -----------------------------------------------------------------------------------------------------------------


def _file_row(full: bool, path: str) -> ScannedFile:
    """The row of a checkpoint, with the step that its metadata or a file beside it states."""
    checkpoint = formats.read(path)
    contents = listing(checkpoint)
    codes = dict.fromkeys(note.code for note in contents.notes if note.code not in (UNSAFE, PART, MEMBERS))
    notes = [*marks.recovered_notes(checkpoint.metadata), *(n for n in contents.notes if n.code == UNSAFE)]
    if full:
        from ckptool.analysis.verify import ALL, verified

        report = verified(checkpoint)[0]
        notes = [*(note for note in report.notes if note.code == unwritten.HALF_WAY), *notes]
        if report.checksums != ALL:
            codes[NO_SUMS] = None
        if problems := report.problems:
            more = f" and {counted(len(problems) - 1, 'more problem')}" if len(problems) > 1 else ""
            raise Corrupt(f"{problems[0].what}{more}", problems[0].why)
    part = checkpoint.part
    is_model, name = any(root.is_model for root in contents.roots), plain_name(os.path.basename(path))
    if part is not None and not part.is_complete:
        state, problem = PART, f"{part.label}: {part.meaning}"
    elif members.BESIDE_WEIGHTS.fullmatch(name) and (name.startswith(members.NO_WEIGHTS) or not is_model):
        state, problem = MEMBER, "belongs to weights, and is not a checkpoint by itself"
    else:
        state, problem = (notes[0].code, notes[0].message) if notes else (GOOD, "")
    step_facts = {key: value for key, value in checkpoint.metadata.items() if key == "step"}
    count = 0
    if folder_at(path):
        layout = members.members_of(checkpoint, Folder(path))
        count = layout.count if layout is not None else 0
        step_facts |= members.step_of(path)
    source: Any = checkpoint.source
    nbytes, modified = size_at(path)
    if isinstance(source, Folder) or source.far or not modified:  # elsewhere a listing has no sizes; or it is gone
        nbytes = source.size
    if source.far:
        opened = source.files.values() if isinstance(source, Folder) else [source]
        modified = max((file.modified for file in opened), default=0.0)
    tree = {**step_facts, "": checkpoint.tree} if step_facts else checkpoint.tree
    # Every name that is not known to be inert where it stands, the most dangerous use first.
    places: dict[tuple[str, str, str], list[str]] = {}
    counts = Counter[tuple[str, str, str]]()
    for use, place in all_uses(checkpoint):
        counts[kind := (use.name, use.how, use.verdict)] += 1
        addresses = places.setdefault(kind, [])
        if len(addresses) < MAX_PLACES and place not in addresses:
            addresses.append(place)
    calls = [Call(*kind[:2], tuple(addresses), counts[kind], kind[2] == CUSTOM) for kind, addresses in places.items()]
    calls.sort(key=lambda call: (call.is_custom, (CALLED, MADE, NAMED).index(call.how)))
    facts = *_progress(tree, path), nbytes, modified, tuple(kinds_of(contents.roots)), tuple(codes), tuple(calls)
    return ScannedFile(path, state, problem, part, count, checkpoint.container, *facts, is_model)


def _damaged_row(path: str, error: CkptoolError) -> ScannedFile:
    """The row of a file that could not be opened, or is damaged."""
    return ScannedFile(path, error.code, error.what, None, 0, "", *_progress(None, path), *size_at(path), (), (), ())


def _progress(tree: Any, path: str) -> tuple[int | None, int | None]:
    """The step and the epoch that a tree says it was saved at, at the top or one level below it, else those in the
    file's name."""

    def named(node: Any) -> dict[str, Any]:
        pairs = children(node) if isinstance(node, (dict, Object)) else ()
        return {key: value for key, value in pairs if type(key) is str and "." not in key}

    top = named(tree)
    levels = [top, *(named(value) for key, value in top.items() if not _SETTINGS.fullmatch(key.lower()))]

    def stated(keys: Iterable[str]) -> int | None:
        values = (level.get(key) for level in levels for key in keys)
        return next((value for value in values if type(value) is int and value >= 0), None)

    *_, folder, base = os.path.abspath(path).split(os.sep)
    step, epoch, name = stated(_STEPS), stated(_EPOCHS), os.path.splitext(base)[0]
    match = _STEP_IN_NAME.search(name) or (None if folder.isdigit() else _STEP_IN_NAME.fullmatch(folder))
    if step is None and match is not None:
        # `checkpoint-12` of timm has epoch 12 in it, and that of many scripts the next one: no step.
        is_epoch = epoch is not None and match[0].lower().startswith("checkpoint") and abs(int(match[1]) - epoch) <= 1
        step = None if is_epoch else int(match[1]) * (1_000 if match[2] else 1)
    if epoch is None and (match := _EPOCH_IN_NAME.search(name)) is not None:
        epoch = int(match[1])
    return step, epoch
