"""Randomness: the states of generators, the global ones of a process and others by name; or a seed and a place instead.

States are plain values and tensors, which `torch.load(weights_only=True)` reads. `ckptool.Run` captures them, as a loop
draws across steps; the harness, and `Run` with a seed, derive all numbers from the seed and the place instead, so that
nothing of them is saved. This module imports nothing of ckptool: `prove` loads it into any interpreter.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

State = dict[str, Any]
CPU = torch.device("cpu")


def capture(generators: Mapping[str, Any], *, with_global: bool = True) -> State:
    """The states of generators, and of the global ones of this process."""
    state = global_states() if with_global else {}
    return {**state, "generators": {name: _get_state(generator) for name, generator in generators.items()}}


def moved(state: State, before: State) -> set[str]:
    """The names in a state whose value is new or changed; of the named generators, only those of `state` count."""
    generators = {name: before.get("generators", {}).get(name) for name in state.get("generators", ())}
    before = {**before, "generators": generators}
    return {name for name, value in state.items() if not same(value, before.get(name))}


def same(one: Any, other: Any) -> bool:
    """True for plain values and tensors that are known to be equal."""
    if isinstance(one, torch.Tensor):
        like = isinstance(other, torch.Tensor) and one.shape == other.shape and one.dtype == other.dtype
        try:
            return like and (torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True))
        except RuntimeError:  # torch cannot tell it of sparse tensors
            return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or bool(one == other)


def _global_generators() -> dict[str, Any]:
    """The global generators on the CPU: Python's, torch's, and numpy's where it is imported."""
    numpy = {"numpy": sys.modules["numpy"].random.mtrand._rand} if "numpy" in sys.modules else {}
    return {"python": random._inst, "torch": torch.default_generator, **numpy}


def _accelerators() -> dict[str, Any]:
    """The modules of the accelerators that this process can use. Older torch keeps it of mps in `backends` alone."""
    names = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    return {name: getattr(torch, name) for name, module in names.items() if module.is_available()}


def global_states() -> State:
    """The states of all global generators of this process: Python's, numpy's, torch's on each device."""
    state: State = {name: _get_state(generator) for name, generator in _global_generators().items()}
    for name, module in _accelerators().items():
        if name == "mps" or module.is_initialized():
            state[name] = module.get_rng_state() if name == "mps" else module.get_rng_state_all()
    return state


def restore(state: State, generators: Mapping[str, Any]) -> None:
    """Sets the global generators and those given to the states that `capture` returned."""
    if "numpy" in state:
        import numpy  # noqa: F401  its generator is one of those
    for owners, states in ((_global_generators(), state), (generators, state["generators"])):
        for name in owners.keys() & states.keys():
            generator, state_of = owners[name], states[name]
            if isinstance(generator, torch.Generator):
                generator.set_state(state_of)
            elif isinstance(generator, random.Random):
                generator.setstate(state_of)
            elif hasattr(generator, "set_state"):
                generator.set_state(_arrays(state_of))
            else:
                generator.bit_generator.state = _arrays(state_of)
    for name, module in _accelerators().items():
        if name in state:
            (module.set_rng_state if name == "mps" else module.set_rng_state_all)(state[name])


@contextmanager
def forked(generators: Mapping[str, Any]) -> Iterator[None]:
    """Restores all generators afterwards, so that draws inside do not change later ones."""
    before = capture(generators)
    try:
        yield
    finally:
        restore(before, generators)


def is_generator(value: Any) -> bool:
    """True for a generator of torch, numpy or Python with a state of its own."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if issubclass(kind, (torch.Generator, random.Random)):
        return not issubclass(kind, random.SystemRandom)
    return numpy is not None and issubclass(kind, (numpy.random.Generator, numpy.random.RandomState))


def _get_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    legacy = hasattr(generator, "get_state")
    return _plain(generator.get_state(legacy=False) if legacy else generator.bit_generator.state)


def _plain(value: Any) -> Any:
    """Arrays as lists of numbers, numpy's numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _arrays(value: Any) -> Any:
    """Lists of numbers as the arrays of a numpy state."""
    import numpy

    if isinstance(value, dict):
        kind = numpy.uint32 if value.keys() >= {"key", "pos"} else numpy.uint64
        return {key: numpy.array(v, kind) if isinstance(v, list) else _arrays(v) for key, v in value.items()}
    return value


# A seed and a place ---------------------------------------------------------------------------------------------------


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
