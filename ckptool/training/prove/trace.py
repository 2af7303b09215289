"""The lines that `tracer` wrote, and why, by them, a resumed process diverged."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ckptool.errors import printable
from ckptool.training.moving import ATTRIBUTE, BUFFER, GENERATOR, MODULE_ATTRIBUTE, NOT_PERSISTENT, VALUE, kind_of
from ckptool.training.prove.tracer import SCALER, SCHEDULER, WEIGHTS
from ckptool.training.reports import ANY

BATCH, STATE, RATE, RANDOM = "batch", "optimizer", "lr", "random"
_EFFECTS = (BUFFER, VALUE)  # as a rule
_MEMORY = re.compile(r"value: \w+ of \d+")  # a container and its length: no effect
_VALUE = "{average}`{name}` ({kind}) is {here} in the unbroken run and {there} after the restart"
_WORDS = {  # each kind may cause those after it
    BATCH: "samples differ: the batch of step {step} is not that of the unbroken run",
    SCHEDULER: "scheduler: `{name}` ({of}) has a different state than in the unbroken run",
    RATE: "the learning rate of step {step} is {here} in the unbroken run and {there} after the restart",
    SCALER: "scaler: `{name}` ({of}) has a different state than in the unbroken run",
    STATE: "optimizer: the state of `{name}` is not that of the unbroken run",
    **dict.fromkeys((MODULE_ATTRIBUTE, NOT_PERSISTENT), _VALUE),
    WEIGHTS: "{average}the weights of `{name}` ({of}), which no optimizer trains, differ from the unbroken run's",
    RANDOM: "the global generator of {name} is in a different state",
    GENERATOR: "`{name}`, a generator, is in a different state",
    **dict.fromkeys((ATTRIBUTE, *_EFFECTS), _VALUE),
}
_WINDOW = "gradients: those of step {step} lack the batches before the save, which was inside gradient accumulation"
MOST = 3  # sentences on one cause
FIRST = 8  # steps of a process that tell where it began: each optimizer has its own weights
_AVERAGES = ("ema", "average", "avg", "swa", "shadow")
NOT_RESTORED = (
    "the weights it resumed from match no step: a torn file, not all were restored, or the unbroken run had ended there"
)

Key = tuple[str, str]
"""The kind and the name of a fact."""


class Cause(NamedTuple):
    """Something that was not restored. keys: the facts to put back, to see whether it is the cause."""

    sentences: list[str]
    keys: list[Key]


class Divergence(NamedTuple):
    """Where a process diverged. step: the first, from 1, whose result differs.  causes: the likeliest first."""

    step: int
    causes: list[Cause]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The state before an optimizer step: digests, and the entries that `moving.reachable` found.

    inputs: of the models since the step before.  saved: a file of the run's folder was written since then, other than
    by appending to it.  time: in seconds.  age: of `found`, in steps.
    """

    optimizer: str
    weights: str
    inputs: list[str]
    state: str
    lr: list[float]
    random: dict[str, str]
    found: dict[str, str]
    saved: bool
    time: float
    age: int

    def facts(self) -> dict[Key, str]:
        """(kind, name) -> entry, for everything but the weights."""
        facts = {(kind_of(entry), name): entry for name, entry in self.found.items()}
        facts |= {(BATCH, ""): str(self.inputs), (STATE, self.optimizer): self.state, (RATE, ""): str(self.lr)}
        return facts | {(RANDOM, library): state for library, state in self.random.items()}


@dataclass(slots=True)
class Life:
    """A process of the command, and its steps (of several processes those of rank 0), read as they are written.

    traces: the folder of its lines.  start: the steps that the reference had done when it had the same weights; None
    if it never had them.  code: its exit code; None if it was killed, at `place`, or `late`, as it took too long.
    """

    traces: str
    code: int | None = None
    place: str = ANY
    late: bool = False
    start: int | None = None
    seconds: float = 0.0
    steps: list[TracedStep] = field(default_factory=list)
    _file: str = ""
    _offset: int = 0  # the bytes of it that were read

    @property
    def reached(self) -> int:
        """The step of the reference that it has reached."""
        return (self.start or 0) + len(self.steps)

    def read(self, reference: Reference) -> None:
        """Reads new lines, and finds where in the reference it began. A line that a kill cut short does not count."""
        self._file = self._file or min(map(str, Path(self.traces).glob("0-*")), default="")
        if not self._file:
            return
        with open(self._file, "rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self._offset += len(line) + 1
            values = json.loads(line)
            changed, gone, before = values["found"], values.pop("gone"), self.steps[-1].found if self.steps else {}
            base = {key: entry for key, entry in before.items() if key not in gone} if gone or changed else before
            values["found"] = base | changed if changed else base
            self.steps.append(TracedStep(**values))
            place = reference.place_of(self.steps[-1]) if len(self.steps) <= FIRST else None
            if len(self.steps) == 1:
                self.start = place
            elif self.start == 0 and place is not None and place >= len(self.steps):
                self.start = None  # the weights of one optimizer are those of the beginning, another's are later ones


class Reference:
    """The steps of an unbroken run. repeated: those of a second; what differs there, or never changes, is no cause."""

    def __init__(self, steps: list[TracedStep], repeated: list[TracedStep]) -> None:
        self.steps = steps
        self.facts = [step.facts() for step in steps]
        pairs = zip(self.facts, repeated, strict=False)
        self.chance = {key for one, other in pairs for key, _ in one.items() ^ other.facts().items()}
        self.moved = {key for one, other in pairwise(self.facts) for key, _ in one.items() ^ other.items()}

    def place_of(self, first: TracedStep) -> int | None:
        """The number of steps before the one that begins with the same weights; None where none does."""
        facts, identity = first.facts(), (first.optimizer, first.weights)
        indices = [index for index, step in enumerate(self.steps) if (step.optimizer, step.weights) == identity]
        return max(indices, key=lambda index: len(facts.items() & self.facts[index].items()), default=None)

    def differing(self, index: int, other: TracedStep) -> set[Key]:
        """The facts in which a step differs from another at the same place, of those that change, and not by chance."""
        mine, theirs = self.facts[index], other.facts()
        before = self.facts[index - 1].items() if index else ()
        # A global generator that nothing drew from is no cause.
        idle = {key for key, entry in mine.items() if key[0] == RANDOM and (key, entry) in before}
        keys = (self.moved - self.chance - idle) & mine.keys() & theirs.keys()
        if self.steps[index].age != other.age:  # the variables were looked at in other steps
            keys = {key for key in keys if key[1] not in other.found or key[0] != kind_of(other.found[key[1]])}
        keys -= set() if self.steps[index].inputs and other.inputs else {(BATCH, "")}  # no model was trained, or seen
        return {key for key in keys if mine[key] != theirs[key]}

    def divergence(self, life: Life, *, ended: bool = False) -> Divergence | None:
        """Where a process diverged, and what differed there; None if it did not.

        ended: its last step counts as one whose result differs.
        """
        start = life.start or 0
        pairs = list(zip(self.steps[start:], life.steps, strict=False))
        until = next((count for count, (one, other) in enumerate(pairs) if one.weights != other.weights), None)
        if until is None:
            return self.elsewhere(pairs, start) if ended and pairs else None
        optimizer = pairs[until][0].optimizer  # the last step before that of the same optimizer led there
        index = max((index for index, (one, _) in enumerate(pairs[:until]) if one.optimizer == optimizer), default=-1)
        if index < 0:
            return Divergence(start + (until or 0), [Cause([NOT_RESTORED], [])])
        # The weights of another optimizer show in this one's batch before it steps again; its state was there earlier.
        states = [(STATE, one.optimizer) in self.differing(start + at, other) for at, (one, other) in enumerate(pairs)]
        index = states[:index].index(True) if True in states[:index] else index
        causes = self.causes(start + index, pairs[index][1])
        initial = self.differing(start, pairs[0][1])
        if index and all(key[0] in _EFFECTS for key in initial):  # all objects were restored: a counter was not
            causes += [cause for cause in self.causes(start, pairs[0][1], initial) if cause not in causes]
        return Divergence(start + index + 1, causes)

    def elsewhere(self, pairs: list[tuple[TracedStep, TracedStep]], start: int) -> Divergence:
        """Where the facts that differ at the end, beside the weights, began to differ."""
        final = self.differing(start + len(pairs) - 1, pairs[-1][1])
        candidates = [(index, final & self.differing(start + index, other)) for index, (_, other) in enumerate(pairs)]
        index, keys = next((candidate for candidate in candidates if candidate[1]), candidates[-1])
        return Divergence(start + index + 1, self.causes(start + index, pairs[index][1], keys))

    def unsaved_averages(self, life: Life) -> list[Cause]:
        """Weights that differ at the end and that no optimizer trains: those that change with every step (unlike the
        best model so far), or have an average's name; by that name also tensors in a dictionary of the script, unless
        they stay as they are, as in one that was loaded."""
        if not life.steps or life.reached != (length := len(self.steps)):
            return []
        last, looks = self.facts[-1], sum(not step.age for step in self.steps)
        averages = set()
        for key in self.differing(length - 1, life.steps[-1]):
            moves = sum(one.get(key) != other.get(key) for one, other in pairwise(self.facts))
            first, final = (step.found.get(key[1], "") for step in (life.steps[0], life.steps[-1]))
            is_tensor = final.partition(": ")[2].startswith("[") and final != first
            is_named = _is_average(f"{key[1]} {last[key]}") and (key[0] == WEIGHTS or is_tensor)
            if is_named or (key[0] == WEIGHTS and 2 * moves > looks):
                averages.add(key)
        return self.causes(length - 1, life.steps[-1], averages)

    # Causes ---------------------------------------------------------------------------------------------------------

    def causes(self, index: int, other: TracedStep, keys: set[Key] | None = None) -> list[Cause]:
        """The causes of a step's difference, the likeliest first; effects only if there is nothing else."""
        keys = self.differing(index, other) if keys is None else keys
        prefixes = tuple(f"{name}." for kind, name in keys if kind in (SCHEDULER, WEIGHTS))
        keys = {key for key in keys if not key[1].startswith(prefixes)}
        kinds = list(_WORDS)
        mine, theirs = self.facts[index], other.facts()
        relevant = {key for key in keys if key[0] not in _EFFECTS or _MEMORY.fullmatch(mine[key])} or keys
        if relevant == {(BATCH, "")}:  # a number of the script may be the cause, but no tensor: that is of the batch
            relevant |= {key for key in keys if key[0] == VALUE and not mine[key].startswith(f"{VALUE}: [")}
        ranked = sorted(relevant, key=lambda key: (kinds.index(key[0]), key[1].count("."), key[1]))
        groups: dict[Key, list[Key]] = {}  # what is put back together
        drawing = {name.split(".")[0] for kind, name in ranked if kind == GENERATOR and "." in name}
        for key in ranked:
            kind, owner = key[0], re.split(r"[.\[#]", key[1])[0]
            group = kind, owner
            if kind in (BATCH, GENERATOR, RANDOM) or (kind == ATTRIBUTE and owner in drawing):
                group = BATCH, ""  # with the generators that it was drawn with, and the objects that have them
            elif kind in (RATE, SCHEDULER):
                group = RATE, ""
            groups.setdefault(group, []).append(key)
        causes = list[Cause]()
        for members in groups.values():
            words = [self.sentence(key, mine[key], theirs[key], index) for key in members[:MOST]]
            is_fixed = words[0].startswith(_WINDOW[:10]) or members[0][1].endswith(".requires_grad")
            causes.append(Cause(words, [] if is_fixed else members))  # gradients cannot be put back, nor what is frozen
        return causes

    def sentence(self, key: Key, mine: str, theirs: str, index: int) -> str:
        """What differs, in words."""
        kind, name = key[0], printable(key[1])
        expected, actual = (printable(text.partition(": ")[2]) for text in (mine, theirs))
        if kind == RATE:
            expected, actual = mine.strip("[]"), theirs.strip("[]")
        if kind == BATCH and mine != theirs and mine.endswith(theirs[1:]):  # the last of several
            return _WINDOW.format(step=index + 1)
        average = "EMA: " if _is_average(f"{name} {expected}") else ""
        values = {"here": expected, "there": actual, "of": expected.partition(" ")[0], "average": average}
        return _WORDS[kind].format(kind=kind, name=name, step=index + 1, **values)


def _is_average(text: str) -> bool:
    return any(word in text.lower() for word in _AVERAGES)


def sentences(causes: list[Cause]) -> list[str]:
    return [text for cause in causes for text in cause.sentences]
