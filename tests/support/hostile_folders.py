"""Folders of engines, broken in one way each, and what no verb may do with any of them."""

import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from tests.support.cli import Ran, Run
from tests.support.hostile_system import temporaries

SECONDS = 60  # that one command may take: whoever waits for a FIFO waits for ever
# What nothing in the files tells from a whole one: they have no checksums, and pieces no full sizes.
UNKNOWABLE = re.compile(r".*\.(?:safetensors|json|metadata): flipped|shard-0000[1-9]-.*: (?:deleted|renamed|a copy.*)")
NO_CHECKSUMS = re.compile(r".*\.distcp: flipped")  # of a safetensors in it, of which verify says so
REFUSED = re.compile(r"error\[(?:usage|part|unsupported)\]")  # of a folder whose files are all whole


class Mutation(NamedTuple):
    """One file of a folder, and what is done to it."""

    file: str
    how: str
    do: Callable[[Path], object]

    def __str__(self) -> str:
        return f"{self.file}: {self.how}"


def folder_mutations(folder: Path, rng: random.Random) -> Iterator[Mutation]:
    """Each file of the folder, broken in every way."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    for name in names:
        seed = rng.random()
        yield Mutation(name, "deleted", lambda root, name=name: (root / name).unlink())
        yield Mutation(name, "empty", lambda root, name=name: os.truncate(root / name, 0))
        for share in (0.5, 0.97):
            yield Mutation(name, f"cut to {share:.0%}", lambda root, name=name, share=share: _cut(root / name, share))
        yield Mutation(name, "a folder", lambda root, name=name: _instead(root / name, os.mkdir))
        yield Mutation(name, "a FIFO", lambda root, name=name: _instead(root / name, os.mkfifo))
        yield Mutation(name, "a loop", lambda root, name=name: _instead(root / name, lambda at: os.symlink(at, at)))
        yield Mutation(name, "a link outside", lambda root, name=name: _instead(root / name, _link_outside))
        yield Mutation(name, "renamed", lambda root, name=name: (root / name).rename(root / f"{name}.bak"))
        yield Mutation(name, "flipped", lambda root, name=name, seed=seed: _flip(root / name, seed))
        for other in _of_other_ranks(name, names)[:1]:
            yield Mutation(name, f"swapped with {other}", lambda root, a=name, b=other: _swap(root / a, root / b))
            yield Mutation(name, f"a copy of {other}", lambda root, a=name, b=other: shutil.copy(root / b, root / a))
        if larger := _of_a_larger_rank(name):
            yield Mutation(
                name, f"another rank's too ({larger})", lambda root, a=name, b=larger: shutil.copy(root / a, root / b)
            )


_RANK = re.compile(r"(.*?(?:_rank_?|__|random_states_|rng_state_|shard-|mp_rank_|_pp_rank_))(\d+)(.*)")


def _of_other_ranks(name: str, names: list[str]) -> list[str]:
    found = _RANK.fullmatch(name)
    alike = [
        each
        for each in names
        if (other := _RANK.fullmatch(each)) and found and (other[1], other[3]) == (found[1], found[3])
    ]
    return [each for each in alike if each != name]


def _of_a_larger_rank(name: str) -> str:
    found = _RANK.fullmatch(name)
    return f"{found[1]}{int(found[2]) + 7:0{len(found[2])}}{found[3]}" if found else ""


def _cut(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _link_outside(path: Path) -> None:
    outside = path.parents[len(path.parents) - 1] / "etc" / "hostname"
    path.symlink_to(outside if outside.exists() else "/dev/null")


def _swap(one: Path, other: Path) -> None:
    one.rename(one.with_name("swapped"))
    other.rename(one)
    one.with_name("swapped").rename(other)


def _flip(path: Path, seed: float) -> None:
    data = bytearray(path.read_bytes())
    rng = random.Random(seed)
    for _ in range(3):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fails what takes longer."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problems_with(folder: Path, mutation: Mutation, weights: Path, out: Path, run: Run) -> list[str]:
    """What is wrong with how the verbs take a broken folder; nothing, if all is well."""
    found = []
    ran: dict[str, Ran] = {}
    for verb in ("inspect", "verify", "doctor", "scan"):
        with within(SECONDS):
            ran[verb] = run(verb, folder)
    with within(SECONDS):
        ran["convert"] = run("convert", folder, "-o", out)
    for verb, done in ran.items():
        if done.code not in (0, 1, 2) or "Traceback" in done.err or "error[bug]" in done.err:
            found.append(f"{verb} ends with {done.code}: {done.err[-300:]}")
        elif done.code == 2 and not _has_three_parts(done.err, folder):
            found.append(f"{verb} does not say enough: {done.err}")
    if ran["convert"].code and out.exists():
        found.append("convert writes in spite of an error")
    if temporaries(out.parent):
        found.append("a temporary file is left")
    both = ran["convert"].code == ran["verify"].code == 0
    unknowable = UNKNOWABLE.fullmatch(str(mutation)) or (
        NO_CHECKSUMS.fullmatch(str(mutation)) and "damage to the data cannot be noticed" in ran["verify"].out
    )
    if both and not unknowable and not _same(out, weights):
        found.append("verify and convert take it for whole, and the values are others")
    if ran["convert"].code == 2 and ran["verify"].code == 0 and not REFUSED.match(ran["convert"].err):
        found.append(f"verify takes it for whole, and convert refuses it: {ran['convert'].err}")
    return found


def _has_three_parts(err: str, folder: Path) -> bool:
    lines = [line for line in err.splitlines() if line.strip()]
    names = str(folder) in err or any(name in err for name in os.listdir(folder))
    return len(lines) >= 2 and lines[0].startswith("error[") and names


def _same(out: Path, weights: Path) -> bool:
    found, expected = load_file(out), load_file(weights)
    return found.keys() == expected.keys() and all(
        value.dtype == found[name].dtype and _bytes(value).equal(_bytes(found[name]))
        for name, value in expected.items()
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
