"""Finds what changes while a model trains, to name what is in no state dict: generators, buffers, counters, the order
of a sampler.

`reachable` goes from named objects through attributes, containers, closures and suspended generators, and names what it
meets by its owner: `dataset.rng`. It runs none of their code: no property, no `__getattr__`, no `__repr__` of theirs.
This module imports nothing of ckptool, and torch only if the program has: `prove` loads it into any interpreter.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import chain, count, islice
from typing import Any

MAX_OBJECTS = 20_000  # that a snapshot visits
WHOLE = 1 << 18  # bytes of a tensor, array or text up to which all of it is digested, else `SAMPLES` values
SAMPLES = 4096
SHOWN = 40  # characters up to which a value is not digested
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # the files of ckptool begin so
DEPTH = 4  # of nested containers up to which they are one value

GENERATOR, BUFFER, NOT_PERSISTENT = "generator", "buffer", "non-persistent buffer"
MODULE_ATTRIBUTE, ATTRIBUTE, VALUE = "module attribute", "attribute", "value"

_SCALARS = frozenset((int, float, complex, bool, str, bytes, type(None), count))
_ITEMS = frozenset((list, tuple, set, frozenset, deque, range))
_MAPPINGS = frozenset((dict, OrderedDict, defaultdict, Counter))
_OPAQUE = frozenset((types.ModuleType, types.CodeType))
# Modules of C types whose parts have no names: what they refer to goes by the name of the container.
_UNNAMED = ("builtins", "itertools", "functools", "collections", "_collections")


def reachable(objects: Mapping[str, Any], seen: dict[int, Any] | None = None) -> tuple[dict[str, str], dict[str, Any]]:
    """A snapshot: name -> `KIND: DIGEST` of all that can change and is reachable from the objects; short values are not
    digested. And name -> object for all objects that were met on the way.

    Left out: parameters, the global generators of libraries, `SystemRandom`, activations, the state of optimizers, and
    what cannot be read. Bounded by `MAX_OBJECTS`; never raises.
    seen: objects to skip, by id; those that were met are added.
    """
    entries: dict[str, str] = {}
    reached: dict[str, Any] = {}
    seen = {} if seen is None else seen  # with the objects: an id is reused once its object is gone
    queue: deque[tuple[str, Any, str]] = deque((name, value, VALUE) for name, value in objects.items())
    while queue and len(seen) < MAX_OBJECTS:  # breadth first, to name an object by its nearest owner
        name, value, kind = queue.popleft()
        with suppress(Exception):
            if (text := plain_text(value)) is None:
                is_class = issubclass(type(value), type)  # of those only the program's own, by their variables
                is_opaque = type(value) in _OPAQUE or str(type(value).__module__).startswith("ckptool.")
                is_opaque |= is_class and (name not in objects or _is_library(value))
                if id(value) in seen or is_opaque:
                    continue
                seen[id(value)] = value
                reached.setdefault(name, value)
                if (state := _generator_state(value)) is not None:
                    kind, text = GENERATOR, digest(state) if state else ""
                elif _is(value, "torch", "Tensor"):
                    torch = sys.modules["torch"]
                    is_plain = type(value) is torch.Tensor and value.is_leaf and value.layout is torch.strided
                    text = tensor_digest(value) if is_plain else ""
                elif _is(value, "numpy", "ndarray"):
                    part = value if value.nbytes <= WHOLE else value.flat[:: max(1, value.size // SAMPLES)]
                    is_constant = value.dtype == object or not value.flags.writeable
                    text = "" if is_constant else f"{list(value.shape)} {digest(part.tobytes())}"
                else:
                    queue.extend(list(_parts(name, value, kind)))
                    # Of a container only its length: a cache or a replay memory grows.
                    text = f"{type(value).__name__} of {len(value)}" if type(value) in _ITEMS | _MAPPINGS else ""
            if text:
                names = chain([name], (f"{name}#{number}" for number in count(2)))
                entries[next(unique for unique in names if unique not in entries)] = f"{kind}: {text}"
    return entries, reached


def unsaved(before: Mapping[str, str], after: Mapping[str, str], saved_names: Collection[str]) -> dict[str, str]:
    """Name -> kind of what changed between two snapshots and is not saved, by itself or as part of something saved.

    The names begin with the owner, `model.counter`; the kinds are the constants above.
    """
    moved = [name for name, entry in after.items() if before.get(name, entry) != entry]
    # A part of `model`, and of `model.bn`, is `model.bn.count`.
    owners = {name: [name, *(name[:at] for at, letter in enumerate(name) if letter in ".[#")] for name in moved}
    return {name: kind_of(after[name]) for name in moved if not any(owner in saved_names for owner in owners[name])}


def kind_of(entry: str) -> str:
    """The kind in an entry of a snapshot."""
    return entry.partition(": ")[0]


def digest(data: Any) -> str:
    """The digest of a bytes-like object, 16 hexadecimal digits."""
    return blake2b(data, digest_size=8).hexdigest()


def tensor_digest(tensor: Any) -> str:
    """The digest of a strided `torch.Tensor`: of samples if it is large, and the value itself if it has one element."""
    torch = sys.modules["torch"]
    value = getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor what this rank has
    if value.numel() == 1 and value.dtype.itemsize <= 8:
        return repr(value.item())
    if value.numel() * value.dtype.itemsize > WHOLE:
        value = torch.take(value, torch.arange(0, value.numel(), value.numel() // SAMPLES, device=value.device))
    data = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{list(tensor.shape)} {digest(data)}"


# The walk ------------------------------------------------------------------------------------------------------------


def _parts(name: str, value: Any, place: str) -> Iterator[tuple[str, Any, str]]:
    """The parts of an object: name, part, and its kind if it is a plain value. place: the kind for items of containers.

    Of a library's class only public attributes and slots; of an optimizer nothing of its state.
    """
    kind: Any = type(value)
    hidden = _is_library(kind)  # its private attributes are internals: buckets, iterators, locks
    if _is(value, "torch.nn", "Module"):
        attributes = vars(value)
        parameters = attributes.get("_parameters", {})
        passing = attributes.get("_non_persistent_buffers_set", ())
        for key, buffer in attributes.get("_buffers", {}).items():
            yield f"{name}.{key}", buffer, NOT_PERSISTENT if key in passing else BUFFER
        for key, part in attributes.get("_modules", {}).items():
            yield f"{name}.{key}", part, ATTRIBUTE
        for key, part in attributes.items():
            # What torch's weight_norm, spectral_norm and pruning compute from parameters anew in each call.
            is_computed = not parameters.keys().isdisjoint((f"{key}_g", f"{key}_orig"))
            if not is_computed and key not in _of_every_module() and not (hidden and key.startswith("_")):
                yield f"{name}.{key}", part, MODULE_ATTRIBUTE
    elif kind is types.FunctionType:
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with suppress(ValueError):  # nothing was assigned to it yet
                yield f"{name}.{free}", cell.cell_contents, ATTRIBUTE
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield name, default, ATTRIBUTE
        yield from ((f"{name}.{key}", part, ATTRIBUTE) for key, part in vars(value).items())
    elif kind in (types.MethodType, types.BuiltinMethodType):
        yield name, value.__self__, ATTRIBUTE
    elif kind is functools.partial:
        yield from ((name, part, ATTRIBUTE) for part in (value.func, value.args, value.keywords))
    elif kind is types.GeneratorType:
        is_ours = value.gi_code.co_filename.startswith(OURS)  # of a loop, whose state is saved
        running = dict(value.gi_frame.f_locals) if value.gi_frame is not None and not is_ours else {}
        yield from ((f"{name}.{key}", part, ATTRIBUTE) for key, part in running.items())
    elif kind in _MAPPINGS:
        keyed = ((key, part) for key, part in _sampled(value.items(), len(value)))
        yield from ((f"{name}[{plain_text(key) or type(key).__name__}]", part, place) for key, part in keyed)
    elif kind in _ITEMS:
        items = enumerate(_sampled(value, len(value)))
        yield from ((f"{name}[{number}]", part, place) for number, part in items)
    else:
        skipped = ("state", "param_groups", "defaults") if _is(value, "torch.optim", "Optimizer") else ()
        attributes = {}
        with suppress(TypeError):
            attributes.update(vars(value))
        descriptors = (item for base in kind.__mro__ if "__slots__" in vars(base) for item in vars(base).items())
        for slot, member in descriptors:
            with suppress(AttributeError):
                attributes |= {slot: member.__get__(value)} if type(member) is types.MemberDescriptorType else {}
        for key, part in attributes.items():
            if isinstance(key, str) and key not in skipped and not (hidden and key.startswith("_")):
                yield f"{name}.{key}", part, ATTRIBUTE
        if not attributes and kind.__module__ in _UNNAMED:
            yield from ((name, part, ATTRIBUTE) for part in islice(gc.get_referents(value), SAMPLES))


# Values --------------------------------------------------------------------------------------------------------------


def plain_text(value: Any, depth: int = 0) -> str | None:
    """A plain value, or a container of nothing else, in words or as a digest; None for all other objects."""
    kind = type(value)
    if kind in _SCALARS or _is(value, "numpy", "generic"):
        return _short(repr(value[:: max(1, len(value) // WHOLE)] if kind in (str, bytes) else value))
    if depth == DEPTH or not (kind in _ITEMS or kind in _MAPPINGS):
        return None
    items = list(_sampled(value.items() if kind in _MAPPINGS else value, len(value)))
    texts = [*map(repr, items)] if {*map(type, items)} <= {int, float} else []  # the order of a sampler is long
    for item in items if not texts else ():
        if (text := plain_text(item, depth + 1)) is None:
            return None
        texts.append(text)
    unordered = kind in (set, frozenset)
    return _short(f"{kind.__name__} of {len(value)}: {', '.join(sorted(texts) if unordered else texts)}")


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}… {digest(text.encode(errors='backslashreplace'))}"


def _sampled(items: Iterable[Any], count: int) -> Iterator[Any]:
    """All items, or about `SAMPLES` of them, evenly spaced."""
    return islice(items, 0, None, max(1, count // SAMPLES))


def _generator_state(value: Any) -> bytes | None:
    """The state of a generator; empty for global ones and the system's. None for other objects."""
    if random.Random in type(value).__mro__:
        shared = random.SystemRandom in type(value).__mro__ or value is getattr(random, "_inst", None)
        version, numbers, *gauss = random.Random.getstate(value)  # for whose 625 numbers `repr` takes ten times as long
        return b"" if shared else array("Q", numbers).tobytes() + repr((version, gauss)).encode()
    if _is(value, "torch", "Generator"):
        torch = sys.modules["torch"]
        shared = any(value is generator for generator in (torch.default_generator, *torch.cuda.default_generators))
        return b"" if shared else bytes(value.get_state().numpy())
    if _is(value, "numpy.random", "Generator"):
        return _state_bytes(value.bit_generator.state)
    if _is(value, "numpy.random", "BitGenerator"):
        return _state_bytes(value.state)
    if _is(value, "numpy.random", "RandomState"):
        shared = value is getattr(sys.modules["numpy"].random.get_state, "__self__", None)
        return b"" if shared else _state_bytes(value.get_state(legacy=False))
    return None


def _state_bytes(state: Any) -> bytes:
    if isinstance(state, dict):
        return b",".join(key.encode() + _state_bytes(part) for key, part in state.items())
    return bytes(state.tobytes()) if hasattr(state, "tobytes") else repr(state).encode()


# Libraries -----------------------------------------------------------------------------------------------------------


def _is_library(kind: type) -> bool:
    """True for a class of the libraries whose insides are known."""
    library = str(kind.__module__).partition(".")[0]
    return library in ("torch", "torchdata", "numpy", "ckptool") or library in sys.stdlib_module_names


def _is(value: Any, module: str, name: str) -> bool:
    """True for an instance of a library's class, if the library is imported. Asks the type, not the object."""
    return (kind := getattr(sys.modules.get(module), name, None)) is not None and kind in type(value).__mro__


@functools.cache
def _of_every_module() -> frozenset[str]:
    return frozenset(vars(sys.modules["torch"].nn.Module())) - {"training"}
