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


_RANK = re.compile(r"(.*?(?:_rank_?|__|random_states_|rng_state_|shard-|mp_rank_|_pp_rank_))(\d+)(.*)")


def folder_mutations(folder: Path, rng: random.Random) -> Iterator[Mutation]:
    """Each file of the folder, broken in every way."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    ranks = {name: found for name in names if (found := _RANK.fullmatch(name))}
    for name in names:
        seed = rng.random()
        ways: dict[str, Callable[[Path, Path], object]] = {  # of the folder, and the file
            "deleted": lambda _, file: file.unlink(),
            "empty": lambda _, file: os.truncate(file, 0),
            "cut to 50%": lambda _, file: os.truncate(file, int(file.stat().st_size * 0.5)),
            "cut to 97%": lambda _, file: os.truncate(file, int(file.stat().st_size * 0.97)),
            "a folder": lambda _, file: _instead(file, os.mkdir),
            "a FIFO": lambda _, file: _instead(file, os.mkfifo),
            "a loop": lambda _, file: _instead(file, lambda at: os.symlink(at, at)),
            "a link outside": lambda _, file: _instead(file, _link_outside),
            "renamed": lambda _, file: file.rename(f"{file}.bak"),
            "flipped": lambda _, file, seed=seed: _flip(file, seed),  # type: ignore[misc]
        }
        if found := ranks.get(name):
            alike = (one for one, rank in ranks.items() if (rank[1], rank[3]) == (found[1], found[3]) and one != name)
            for other in [*alike][:1]:
                ways[f"swapped with {other}"] = lambda root, file, other=other: _swap(file, root / other)
                ways[f"a copy of {other}"] = lambda root, file, other=other: shutil.copy(root / other, file)
            larger = f"{found[1]}{int(found[2]) + 7:0{len(found[2])}}{found[3]}"
            ways[f"another rank's too ({larger})"] = lambda root, file, more=larger: shutil.copy(file, root / more)
        yield from (Mutation(name, how, lambda root, do=do, at=name: do(root, root / at)) for how, do in ways.items())


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
        NO_CHECKSUMS.fullmatch(str(mutation)) and "damage to the data cannot be detected" in ran["verify"].out
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
