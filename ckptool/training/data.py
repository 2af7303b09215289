"""Samples, and the order in which a run goes through them.

The samples of a step follow from the seed and the step alone: the order of an epoch is a permutation given by its
number, a step takes the next `batch` of them, a micro-step its slice, a process every `world`-th of these. So a resumed
run, on any number of processes and with any number of workers, sees the samples that it would have seen. Randomness is
a function of the seed and a place in the same way: nothing of it is state, and nothing is saved.
"""

from __future__ import annotations

import hashlib
import math
import random
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from ckptool.bridge.user_code import call_user_code
from ckptool.errors import UsageError, printable
from ckptool.training.config import Data
from ckptool.training.extensions import find_named, load_named

if TYPE_CHECKING:
    from ckptool.training.trainer import Trainer

Collate = Callable[[list[Any]], Any]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on the device. size: its samples.  total: how many samples it stands for among all processes."""

    data: Any
    size: int
    total: int


class Samples:
    """A data set divided into training and validation."""

    def __init__(self, dataset: Dataset[Any], settings: Data, seed: int) -> None:
        self.dataset, self.settings, self.seed = dataset, settings, seed
        count = len(dataset)  # type: ignore[arg-type]
        shuffled = torch.randperm(count, generator=generator(seed, "split")).tolist()
        kept = count - math.floor(count * settings.val_fraction)
        self.train, self.held = sorted(shuffled[:kept]), sorted(shuffled[kept:])
        self.collate = collate_of(settings.collate)

    @property
    def train_count(self) -> int:
        return len(self.train)

    @property
    def about(self) -> dict[str, Any]:
        """The data set's facts for models that ask: sizes, classes."""
        found = getattr(self.dataset, "about", {})
        if not isinstance(found, dict):
            name, kind = printable(self.settings.name), type(found).__name__
            raise UsageError(
                f"data: the attribute about of {name} is {kind}, not a dictionary",
                "It gives models their sizes by name: {'inputs': [4], 'classes': 3}.",
            )
        return found

    def batches(self, batch: int, drop_last: bool) -> int:
        """The steps of an epoch."""
        return len(self.train) // batch if drop_last else -(-len(self.train) // batch)

    def stream(self, trainer: Trainer) -> Generator[list[Batch]]:
        """The micro-batches of each step, from the trainer's to the last of the run. Closing it ends its workers."""
        device, begin = trainer.world.device, trainer.step
        asked: deque[list[_Share]] = deque()  # the loader is some steps ahead
        loader = self._loader(_Order(self._shares(trainer, begin), asked), device)
        try:
            for _ in range(begin, trainer.total_steps):
                first = to_device(self._next(loader), device)
                rest = [to_device(self._next(loader), device) for _ in asked[0][1:]]
                yield [
                    Batch(data, len(share.places) if share.counts else 0, share.total)
                    for data, share in zip((first, *rest), asked.popleft(), strict=True)
                ]
        finally:
            if hasattr(loader, "_shutdown_workers"):
                loader._shutdown_workers()  # left to the garbage collector, it takes ten seconds

    def _shares(self, trainer: Trainer, begin: int) -> Iterator[list[_Share]]:
        """This process's shares of each step from `begin` on: one of each micro-batch that has samples at all."""
        world, parts = trainer.world, trainer.config.train.accumulate
        batch, per_epoch = self.settings.batch, self.batches(self.settings.batch, self.settings.drop_last)
        for step in range(begin, trainer.total_steps):
            epoch, place = divmod(step, per_epoch)
            if place == 0 or step == begin:
                ordered = order(self.seed, epoch, len(self.train))
            samples = [self.train[i] for i in ordered[place * batch : (place + 1) * batch]]
            windows = [window for micro in range(parts) if (window := samples[micro::parts])]
            # A process without a sample takes one with the weight of none: all must take part in every step.
            yield [
                _Share([(epoch, i) for i in world.shard(window) or window[:1]], len(window), len(window) > world.rank)
                for window in windows
            ]

    def _loader(self, places: _Order, device: torch.device) -> Iterator[Any]:
        dataset = _Seeded(self.dataset, self.seed)
        if not self.settings.workers:
            return map(self.collate, map(dataset.__getitems__, places))
        loader = DataLoader(
            dataset,
            batch_sampler=places,
            num_workers=self.settings.workers,
            collate_fn=self.collate,
            worker_init_fn=ignore_in_worker,
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            pin_memory=device.type == "cuda",
        )
        with held_back():  # workers begin with what their parent lets through
            return iter(loader)

    def _next(self, loader: Iterator[Any]) -> Any:
        """The next batch; what the user's own data set or collate function raises comes with its traceback."""
        return call_user_code(next, "data", self.settings.name, loader)

    def validation(self, device: torch.device) -> Iterator[Batch]:
        """The held-out samples, in order."""
        dataset = _Seeded(self.dataset, self.seed)
        for begin in range(0, len(self.held), self.settings.batch):
            part = self.held[begin : begin + self.settings.batch]
            made = call_user_code(dataset.__getitems__, "data", self.settings.name, [(-1, i) for i in part])
            data = call_user_code(self.collate, "data", self.settings.name, made)
            yield Batch(to_device(data, device), len(part), len(part))


@dataclass(frozen=True, slots=True)
class _Share:
    """A process's samples of a micro-batch: (epoch, index). total: of all processes; counts: False for a stand-in."""

    places: list[tuple[int, int]]
    total: int
    counts: bool


class _Order:
    """The samples of each micro-batch, for a loader. Each step is added to `asked` when its first one is."""

    def __init__(self, steps: Iterator[list[_Share]], asked: deque[list[_Share]]) -> None:
        self.steps, self.asked = steps, asked

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            self.asked.append(step)
            for share in step:
                yield share.places


class _Seeded(Dataset[Any]):
    """The data set, with randomness (augmentation) that follows from epoch and index, whichever worker draws it."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, derived(seed, "sample")
        self.random = bool(getattr(dataset, "random", True))

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        if self.random:
            seed_all(CPU, self.seed, epoch, index)
        return self.dataset[index]

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        if not self.random and hasattr(self.dataset, "__getitems__"):
            found: list[Any] = self.dataset.__getitems__([index for _, index in places])
            return found
        return [self[place] for place in places]


def to_device(data: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dictionaries, on the device."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    return type(data)(to_device(part, device) for part in data) if type(data) in (tuple, list) else data


def load_data(settings: Data, seed: int) -> Samples:
    """The data that a configuration names. Raises `UsageError` for an unknown name, or arguments it does not take."""
    made = load_named(settings.name, BUILT_IN, "data", settings.args)
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
        raise UsageError(
            f"data: {settings.name} returned {type(made).__name__}, which is not a Dataset",
            "It has no length, or no items.",
        )
    samples: Samples = call_user_code(Samples, "data", settings.name, made, settings, seed)
    if not samples.batches(settings.batch, settings.drop_last):
        raise UsageError(
            f"data.batch is {settings.batch}, but there are {samples.train_count} samples to train on",
            "With drop_last there would be no step.",
            "Make the batch smaller: --set data.batch=…",
        )
    return samples


# Collating -----------------------------------------------------------------------------------------------------------


def default(samples: list[Any]) -> Any:
    """Samples of one shape, stacked. Raises `UsageError` where their shapes differ."""
    from torch.utils.data import default_collate

    try:
        return default_collate(samples)
    except RuntimeError as error:
        raise UsageError(
            f"data: the samples of a batch cannot be stacked: {error}",
            "They have several shapes.",
            "Pad sequences: --set data.collate=pad; or name a function of your own: --set data.collate=file.py:NAME",
        ) from error


def pad(samples: list[Any]) -> Any:
    """Sequences, padded with zeros to the longest; their lengths are the last part (`lengths`, in a dictionary)."""
    if isinstance(samples[0], dict):
        columns = {key: [sample[key] for sample in samples] for key in samples[0]}
        lengths = _lengths(next(iter(columns.values())))
        return {**{key: _padded(column) for key, column in columns.items()}, "lengths": lengths}
    several = isinstance(samples[0], tuple)
    parts = [list(column) for column in zip(*samples, strict=True)] if several else [samples]
    return (*(_padded(column) for column in parts), _lengths(parts[0]))


def _lengths(sequences: list[Any]) -> torch.Tensor:
    return torch.tensor([len(sequence) for sequence in sequences])


def _padded(column: list[Any]) -> Any:
    tensors = [torch.as_tensor(part) if isinstance(part, list) else part for part in column]
    if all(isinstance(part, torch.Tensor) and part.dim() for part in tensors):
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    return default(column)


_COLLATES: dict[str, Collate] = {"default": default, "pad": pad}


def collate_of(name: str) -> Collate:
    """The function that makes a batch of samples: `default`, `pad`, or the user's own."""
    if name in _COLLATES:
        return _COLLATES[name]

    found: Collate = find_named(name, _COLLATES, "collate")
    return found


# Randomness as a function of a seed and a place ----------------------------------------------------------------------


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


# Built-in data: small, made on the spot, the same on every machine ---------------------------------------------------


class Arrays(Dataset[Any]):
    """Tensors whose first dimension counts the samples. about: sizes for models (`inputs`, `classes`, `vocabulary`)."""

    random = False  # nothing is drawn when a sample is taken

    def __init__(self, *columns: torch.Tensor, about: dict[str, Any]) -> None:
        self.columns, self.about = columns, about

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        parts = tuple(column[index] for column in self.columns)
        return parts if len(parts) > 1 else parts[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Samples together: one look-up in each column."""
        taken = [column[indices].unbind() for column in self.columns]
        return list(zip(*taken, strict=True)) if len(taken) > 1 else list(taken[0])


def digits() -> Arrays:
    """scikit-learn's 1,797 handwritten digits: f32 [1, 8, 8] from 0 to 1, 10 classes. Needs the extra `examples`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "data: digits come with scikit-learn, which is not installed",
            "",
            "pip install 'ckptool[examples]'; or other pictures: --set data.name=images",
        ) from None
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return Arrays(images, torch.tensor(found.target, dtype=torch.int64), about={"inputs": [1, 8, 8], "classes": 10})


def blobs(samples: int = 512, classes: int = 4, inputs: int = 8, spread: float = 1.0, seed: int = 0) -> Arrays:
    """Points around as many centres as there are classes."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, inputs, generator=g) * 3
    labels = torch.arange(samples) % classes
    points = centres[labels] + torch.randn(samples, inputs, generator=g) * spread
    return Arrays(points, labels, about={"inputs": [inputs], "classes": classes})


def images(
    samples: int = 256, classes: int = 4, size: int = 8, channels: int = 1, noise: float = 0.5, seed: int = 0
) -> Arrays:
    """Noisy copies of one random image for each class."""
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, channels, size, size, generator=g)
    labels = torch.arange(samples) % classes
    made = patterns[labels] + torch.randn(samples, channels, size, size, generator=g) * noise
    return Arrays(made, labels, about={"inputs": [channels, size, size], "classes": classes})


def spirals(samples: int = 512, classes: int = 3, noise: float = 0.1, seed: int = 0) -> Arrays:
    """Arms of a spiral in the plane, one for each class."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % classes
    along = torch.rand(samples, generator=g)
    angle = along * 4 + labels * (2 * math.pi / classes) + torch.randn(samples, generator=g) * noise
    points = torch.stack([along * torch.cos(angle), along * torch.sin(angle)], dim=1)
    return Arrays(points, labels, about={"inputs": [2], "classes": classes})


def linear(samples: int = 512, inputs: int = 8, noise: float = 0.1, seed: int = 0) -> Arrays:
    """A linear function of the inputs, with noise: one number to predict."""
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(samples, inputs, generator=g)
    weights = torch.randn(inputs, generator=g)
    target = points @ weights + torch.randn(samples, generator=g) * noise
    return Arrays(points, target.unsqueeze(1), about={"inputs": [inputs], "outputs": 1})


def ring(samples: int = 512, modes: int = 8, noise: float = 0.05, seed: int = 0) -> Arrays:
    """Points near a circle, in clusters: what the GAN learns to make."""
    g = torch.Generator().manual_seed(seed)
    angle = (torch.arange(samples) % modes) * (2 * math.pi / modes)
    points = torch.stack([torch.cos(angle), torch.sin(angle)], dim=1) + torch.randn(samples, 2, generator=g) * noise
    return Arrays(points, about={"inputs": [2]})


def modadd(modulus: int = 23) -> Arrays:
    """All sums of two numbers modulo a prime: two tokens in, one class out."""
    pairs = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus))
    return Arrays(pairs, pairs.sum(dim=1) % modulus, about={"inputs": [2], "classes": modulus, "vocabulary": modulus})


_TEXT = (
    "a checkpoint is what the next step cannot compute again. a step is atomic. a file exists when its name exists, "
    "and a name appears when everything behind it is safe. "
    "nothing is lost that was ever saved, and nothing is saved by halves. "
)


def text(length: int = 32, samples: int = 256, seed: int = 0) -> Arrays:
    """Windows of a short text as numbers of its characters: tokens, and the same one place on."""
    alphabet = sorted(set(_TEXT))
    codes = torch.tensor([alphabet.index(c) for c in _TEXT * 2])
    starts = torch.randint(len(_TEXT), (samples,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([codes[s : s + length + 1] for s in starts.tolist()])
    return Arrays(
        windows[:, :-1],
        windows[:, 1:],
        about={"inputs": [length], "vocabulary": len(alphabet), "classes": len(alphabet)},
    )


class Sequences(Dataset[Any]):
    """Sequences of several lengths, for `collate: pad`: the numbers of one digit, how often it comes is the class."""

    random = False

    def __init__(self, samples: int = 256, longest: int = 12, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, longest + 1, (samples,), generator=g).tolist()
        self.items = [torch.randint(1, 5, (n,), generator=g) for n in lengths]
        self.about = {"inputs": [longest], "classes": 2, "vocabulary": 5}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        return item, torch.tensor(int((item == 1).sum()) % 2)


BUILT_IN: dict[str, Callable[..., Dataset[Any]]] = {
    "digits": digits,
    "blobs": blobs,
    "images": images,
    "spirals": spirals,
    "linear": linear,
    "ring": ring,
    "modadd": modadd,
    "text": text,
    "sequences": Sequences,
}


_ALL = ("TERM", "INT", "USR1", "USR2", "HUP")


@contextmanager
def held_back() -> Iterator[None]:
    """Blocks signals, so that a process that is forked here cannot be stopped before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[f"SIG{name}"] for name in _ALL])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_in_worker(_: int = 0) -> None:
    """Ignores signals in a worker: one to the whole process group is for the trainer, which still needs its workers."""
    for name in _ALL:
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
