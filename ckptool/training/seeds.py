"""Randomness as a function of a seed and a place: nothing of it is state, and nothing is saved."""

from __future__ import annotations

import hashlib
import random
import sys

import torch

CPU = torch.device("cpu")


def derived(seed: int, *place: object) -> int:
    """A number of 63 bits for a place, the same on every machine: `derived(7, "order", epoch)`."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *place: object) -> torch.Generator:
    """A generator on the CPU of its own, for a place."""
    return torch.Generator().manual_seed(derived(seed, *place))


def seed_all(device: torch.device, seed: int, *place: object) -> None:
    """Seeds the generators that a step may draw from: Python's, torch's on CPU and device, numpy's if it is imported.

    `torch.manual_seed` would visit every backend, which takes a hundred times as long. Restoring captured generator
    states would not do: `iter(DataLoader)` itself draws from the global one, and what a killed step drew is not known.
    """
    number = derived(seed, *place)
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)
    kind = str(device.type)
    if kind == "mps":
        torch.mps.manual_seed(number)
    if kind == "cuda":
        index = device.index if ":" in str(device) else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(number)


def order(seed: int, epoch: int, count: int) -> list[int]:
    """The order in which an epoch goes through `count` samples."""
    found: list[int] = torch.randperm(count, generator=generator(seed, "order", epoch)).tolist()
    return found
