"""Randomness as a function of a seed and a place, so that a step can be taken again and draw the same numbers.

Restoring captured generator states does not do it: `iter(DataLoader)` itself draws from the global generator, and what a killed step drew
is not known. Nothing here is state; nothing here is saved.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch

_BITS = 63


def derived(seed: int, *place: object) -> int:
    """A number of 63 bits for a place: `derived(7, "order", epoch)`. The same on every machine and in every version of Python."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _BITS)


def generator(seed: int, *place: object) -> torch.Generator:
    """A generator on the CPU of its own, for a place."""
    return torch.Generator().manual_seed(derived(seed, *place))


def seed_all(device: torch.device, seed: int, *place: object) -> None:
    """Seeds what a step may draw from: Python's generator, numpy's where it is imported, torch's on the CPU and on the devices in use.

    `torch.manual_seed` would visit every backend, which takes a hundred times as long.
    """
    seed_to(device, derived(seed, *place))


def seed_to(device: torch.device, number: int) -> None:
    """Seeds the generators of `seed_all` with a number that was derived already."""
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
