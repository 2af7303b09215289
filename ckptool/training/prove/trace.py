"""The lines that `tracer` wrote, and what they say about why a resumed process went another way."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ckptool.errors import printable
from ckptool.training.moving import ATTRIBUTE, BUFFER, GENERATOR, MODULE_ATTRIBUTE, NOT_PERSISTENT, VALUE, kind_of
from ckptool.training.prove.tracer import SCHEDULER, WEIGHTS
from ckptool.training.reports import ANY

BATCH, STATE, RATE, RANDOM = "batch", "optimizer", "lr", "random"
# What is a cause of what comes later here; the last two are effects, as a rule.
_ORDER = (BATCH, SCHEDULER, RATE, STATE, MODULE_ATTRIBUTE, NOT_PERSISTENT, WEIGHTS, RANDOM, GENERATOR, ATTRIBUTE)
_EFFECTS = (BUFFER, VALUE)
_MEMORY = re.compile(r"value: \w+ of \d+")  # objects that a variable holds, and how many: no effect
_VALUE = "{average}`{name}` ({kind}) is {here} in the unbroken run and {there} after the restart"
_WORDS = {
    BATCH: "samples differ: the batch of step {step} is not that of the unbroken run",
    SCHEDULER: "scheduler: `{name}` ({of}) has a different state than in the unbroken run",
    RATE: "the learning rate of step {step} is {here} in the unbroken run and {there} after the restart",
    STATE: "optimizer: the state of `{name}` is not that of the unbroken run",
    WEIGHTS: "{average}the weights of `{name}` ({of}), which no optimizer trains, differ from the unbroken run's",
    RANDOM: "the global generator of {name} is in a different state",
    GENERATOR: "`{name}`, a generator, is in a different state",
}
MOST = 3  # sentences on one cause
_AVERAGES = ("ema", "average", "avg", "swa", "shadow")
NOT_RESTORED = "the weights it resumed from match no step: a torn file, or not all were restored"

Key = tuple[str, str]
"""The kind and the name of a fact."""


class Cause(NamedTuple):
    """Something that was not restored. keys: all that is put back to see whether it is the cause."""

    sentences: list[str]
    keys: list[Key]


class Divergence(NamedTuple):
    """Where a process went another way. step: the first, from 1, whose result differs.  causes: the likeliest first."""

    step: int
    causes: list[Cause]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The state before an optimizer step: digests, and what `moving.snapshot` found.

    inputs: of what the models were given since the step before.  saved: a file of the run's folder was written since
    then, other than by adding to it.  time: in seconds.  age: of `found`, in steps.
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
    where it never had them.  code: its exit code; None where it was killed, at `place`, or `late`, as it took too long.
    """

    traces: str
    code: int | None = None
    place: str = ANY
    late: bool = False
    start: int | None = None
    seconds: float = 0.0
    steps: list[TracedStep] = field(default_factory=list)
    _file: str = ""
    _done: int = 0  # bytes of it

    @property
    def reached(self) -> int:
        """The step of the reference that it came to."""
        return (self.start or 0) + len(self.steps)

    def read(self, reference: Reference) -> None:
        """Reads what is new, and finds where in the reference it began. A line that a kill cut off does not count."""
        self._file = self._file or min(map(str, Path(self.traces).glob("0-*")), default="")
        if not self._file:
            return
        with open(self._file, "rb") as file:
            file.seek(self._done)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self._done += len(line) + 1
            values = json.loads(line)
            found, gone, before = values["found"], values.pop("gone"), self.steps[-1].found if self.steps else {}
            kept = {key: entry for key, entry in before.items() if key not in gone} if gone or found else before
            values["found"] = kept | found if found else kept
            self.steps.append(TracedStep(**values))
            if len(self.steps) == 1:
                self.start = reference.place_of(self.steps[0])


class Reference:
    """The steps of an unbroken run. again: those of another; what differs in it, or never changes, is no cause."""

    def __init__(self, steps: list[TracedStep], again: list[TracedStep]) -> None:
        self.steps = steps
        self.facts = [step.facts() for step in steps]
        pairs = zip(self.facts, again, strict=False)
        self.chance = {key for one, other in pairs for key, _ in one.items() ^ other.facts().items()}
        self.moved = {key for one, other in pairwise(self.facts) for key, _ in one.items() ^ other.items()}

    def place_of(self, first: TracedStep) -> int | None:
        """The number of steps before the one that begins with the same weights; None where none does."""
        facts, found = first.facts(), (first.optimizer, first.weights)
        same = [place for place, step in enumerate(self.steps) if (step.optimizer, step.weights) == found]
        return max(same, key=lambda place: len(facts.items() & self.facts[place].items()), default=None)

    def differing(self, place: int, other: TracedStep) -> set[Key]:
        """The facts of a step that another at the same place has not, of those that move and not by chance."""
        mine, theirs = self.facts[place], other.facts()
        before = self.facts[place - 1].items() if place else ()
        # A global generator that nothing drew from is no cause.
        idle = {key for key, entry in mine.items() if key[0] == RANDOM and (key, entry) in before}
        keys = (self.moved - self.chance - idle) & mine.keys() & theirs.keys()
        if self.steps[place].age != other.age:  # the variables were looked at in other steps
            keys = {key for key in keys if key[1] not in other.found or key[0] != kind_of(other.found[key[1]])}
        return {key for key in keys if mine[key] != theirs[key]}

    def divergence(self, life: Life, *, ended: bool = False) -> Divergence | None:
        """Where a process went another way, and what differed there; None for the same way.

        ended: its last step counts as one whose result differs.
        """
        start = life.start or 0
        pairs = list(zip(self.steps[start:], life.steps, strict=False))
        until = next((count for count, (one, other) in enumerate(pairs) if one.weights != other.weights), None)
        if until is None:
            return self.elsewhere(pairs, start) if ended and pairs else None
        by = pairs[until][0].optimizer  # the last step before that of the same optimizer led there
        place = max((place for place, (one, _) in enumerate(pairs[:until]) if one.optimizer == by), default=-1)
        if place < 0:
            return Divergence(start + (until or 0), [Cause([NOT_RESTORED], [])])
        # The weights of another optimizer show in this one's batch before it steps again; its state was there earlier.
        states = [(STATE, one.optimizer) in self.differing(start + at, other) for at, (one, other) in enumerate(pairs)]
        place = states[:place].index(True) if True in states[:place] else place
        return Divergence(start + place + 1, self.causes(start + place, pairs[place][1]))

    def elsewhere(self, pairs: list[tuple[TracedStep, TracedStep]], start: int) -> Divergence:
        """Where what differs at the end beside the weights began to."""
        late = self.differing(start + len(pairs) - 1, pairs[-1][1])
        found = [(place, late & self.differing(start + place, other)) for place, (_, other) in enumerate(pairs)]
        place, keys = next((each for each in found if each[1]), found[-1])
        return Divergence(start + place + 1, self.causes(start + place, pairs[place][1], keys))

    def unsaved_averages(self, life: Life) -> list[Cause]:
        """Weights that no optimizer trains and that differ at the end: that change with every step (the best model so
        far does not), or have an average's name; with one also tensors that the script holds in a dictionary."""
        if not life.steps or life.reached != (length := len(self.steps)):
            return []
        last, looked = self.facts[-1], sum(not step.age for step in self.steps)
        averages = set()
        for key in self.differing(length - 1, life.steps[-1]):
            moves = sum(one.get(key) != two.get(key) for one, two in pairwise(self.facts))
            is_tensor = last[key].partition(": ")[2].startswith("[")
            is_named = _is_average(f"{key[1]} {last[key]}") and (key[0] == WEIGHTS or is_tensor)
            if is_named or (key[0] == WEIGHTS and 2 * moves > looked):
                averages.add(key)
        return self.causes(length - 1, life.steps[-1], averages)

    # Causes ---------------------------------------------------------------------------------------------------------

    def causes(self, place: int, other: TracedStep, keys: set[Key] | None = None) -> list[Cause]:
        """What differs at a step, causes first; effects only if there is nothing else."""
        keys = self.differing(place, other) if keys is None else keys
        wholes = tuple(f"{name}." for kind, name in keys if kind in (SCHEDULER, WEIGHTS))
        keys = {key for key in keys if not key[1].startswith(wholes)}
        kinds = (*_ORDER, *_EFFECTS)
        mine, theirs = self.facts[place], other.facts()
        found = {key for key in keys if key[0] not in _EFFECTS or _MEMORY.fullmatch(mine[key])} or keys
        ranked = sorted(found, key=lambda key: (kinds.index(key[0]), key[1].count("."), key[1]))
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
        return [
            Cause([self.sentence(key, mine[key], theirs[key], place) for key in group[:MOST]], group)
            for group in groups.values()
        ]

    def sentence(self, key: Key, one: str, other: str, place: int) -> str:
        """What differs, in words."""
        kind, name = key[0], printable(key[1])
        here, there = (printable(text.partition(": ")[2]) for text in (one, other))
        if kind == RATE:
            here, there = one.strip("[]"), other.strip("[]")
        average = "EMA: " if _is_average(f"{name} {here}") else ""
        values = {"here": here, "there": there, "of": here.partition(" ")[0], "average": average}
        return _WORDS.get(kind, _VALUE).format(kind=kind, name=name, step=place + 1, **values)


def _is_average(text: str) -> bool:
    return any(word in text.lower() for word in _AVERAGES)


def sentences(causes: list[Cause]) -> list[str]:
    return [text for each in causes for text in each.sentences]
