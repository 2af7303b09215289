"""The lines that `tracer` wrote, and what they say about why a resumed process went another way."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ckptool.errors import printable
from ckptool.training.moving import ATTRIBUTE, BUFFER, GENERATOR, MODULE_ATTRIBUTE, NOT_PERSISTENT, VALUE, kind_of

# In the order of cause and effect. Buffers of state dicts and variables of the program are effects, as a rule.
SAMPLES, STATE, RATE, RANDOM = "samples", "optimizer", "lr", "random"
_ORDER = (GENERATOR, ATTRIBUTE, SAMPLES, MODULE_ATTRIBUTE, NOT_PERSISTENT, STATE, RATE, RANDOM, BUFFER, VALUE)
_EFFECTS = (BUFFER, VALUE)
MOST = 6  # causes that are shown
NOT_RESTORED = "the weights it resumed from are those of no step: a torn file, or not all were restored"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The state before an optimizer step: digests, and what `moving.snapshot` found."""

    optimizer: int
    weights: str
    samples: list[str]
    state: str
    lr: list[float]
    random: dict[str, str]
    found: dict[str, str]

    def facts(self) -> dict[tuple[str, str], str]:
        """(kind, name) -> entry, for everything but the weights."""
        facts = {(kind_of(entry), name): entry for name, entry in self.found.items()}
        facts |= {(SAMPLES, ""): str(self.samples), (STATE, ""): self.state, (RATE, ""): str(self.lr)}
        return facts | {(RANDOM, library): state for library, state in self.random.items()}


class Divergence(NamedTuple):
    """Where a process went another way. step: the first, from 1, whose result differs.  causes: sentences."""

    step: int
    causes: list[str]


class Trace:
    """The steps of one process of the command (of several, of rank 0), read as they are written."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.steps: list[TracedStep] = []
        self._file: Any = None
        self._rest = ""

    def read(self) -> int:
        """Reads what is new; how many steps there are. A line that was cut off by a kill does not count."""
        if self._file is None:
            names = sorted(name for name in os.listdir(self.folder) if name.startswith("0-"))
            if not names:
                return 0
            self._file = open(os.path.join(self.folder, names[0]), encoding="utf-8")  # noqa: SIM115
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            values = json.loads(line)
            values["found"] = (self.steps[-1].found if self.steps else {}) | values["found"]
            self.steps.append(TracedStep(**values))
        return len(self.steps)

    def close(self) -> None:
        with suppress(OSError, ValueError):
            self.read()
        if self._file is not None:
            self._file.close()


def place_of(first: TracedStep, reference: list[TracedStep]) -> int | None:
    """The number of steps of the reference before the one that begins with the same weights; None where none does."""
    facts = first.facts()
    same = [
        place
        for place, step in enumerate(reference)
        if (step.optimizer, step.weights) == (first.optimizer, first.weights)
    ]
    return max(same, key=lambda place: len(facts.items() & reference[place].facts().items()), default=None)


def divergence(
    reference: list[TracedStep], again: list[TracedStep], steps: list[TracedStep], start: int, *, ended: bool = False
) -> Divergence | None:
    """Where a process that began at a place of the reference went another way, and what differed there.

    again: another unbroken run; what differs in it, or never changes, is no cause, nor a global generator that nothing
    has drawn from since.  ended: its last step counts as one whose result differs. None for the same way.
    """
    pairs = list(zip(reference[start:], steps, strict=False))
    until = next((count for count, (one, other) in enumerate(pairs) if one.weights != other.weights), None)
    if until is None and not (ended and pairs):
        return None
    # The last step before that of the same optimizer led there.
    place = len(pairs) - 1
    if until is not None:
        by = pairs[until][0].optimizer
        place = max((place for place, (one, _) in enumerate(pairs[:until]) if one.optimizer == by), default=-1)
    if place < 0:
        return Divergence(start + (until or 0), [NOT_RESTORED])
    facts = [step.facts() for step in reference]
    moved = {key for one, other in pairwise(facts) for key, _ in one.items() ^ other.items()}
    chance = {key for one, other in zip(facts, again, strict=False) for key, _ in one.items() ^ other.facts().items()}
    before = facts[start - 1].items() if start else ()
    chance |= {key for key, entry in facts[start + place].items() if key[0] == RANDOM and (key, entry) in before}
    one, other = pairs[place]
    other = replace(
        other, samples=other.samples[len(other.samples) - len(one.samples) :]
    )  # those before were skipped on the way there
    return Divergence(start + place + 1, sentences(one.facts(), other.facts(), moved - chance))


def sentences(
    one: dict[tuple[str, str], str], other: dict[tuple[str, str], str], keys: set[tuple[str, str]]
) -> list[str]:
    """Sentences on what differs, causes first; effects only if there is nothing else."""
    found = [key for key in keys if key in one and key in other and one[key] != other[key]]
    found = [key for key in found if key[0] not in _EFFECTS] or found
    found.sort(key=lambda key: (_ORDER.index(key[0]), key[1].count("."), key[1]))
    return [_sentence(*key, one[key], other[key]) for key in found[:MOST]]


def _sentence(kind: str, name: str, one: str, other: str) -> str:
    if kind == SAMPLES:
        return "the samples differ: their order, the place in the epoch, or what is drawn for them"
    if kind == STATE:
        return "the state of the optimizer differs"
    if kind == RATE:
        return f"lr is {one} in the unbroken run and {other} after the restart: a scheduler"
    if kind == RANDOM:
        return f"the global generator of {name} is in another state"
    if kind == GENERATOR:
        return f"`{printable(name)}`, a generator, is in another state"
    values = [entry.partition(": ")[2] for entry in (one, other)]
    if any("…" in value or value.startswith("[") for value in values):
        return f"`{printable(name)}` ({kind}) has another value"
    here, there = map(printable, values)
    return f"`{printable(name)}` ({kind}) is {here} in the unbroken run and {there} after the restart"
