"""Saves a run's state: gathers it, copies it if a thread writes it, commits, prunes, and notes it in the history."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch

from ckptool.checkpoint.paths import is_url
from ckptool.errors import DiskFull, Text, UsageError
from ckptool.training.parallel import World, has_divided, is_divided, local, read_divided, tensors, with_local
from ckptool.training.store import Retention, RunFolder

Tree = dict[str, Any]
Storage = torch.UntypedStorage
_new_storage: Any = Storage  # torch gives its functions no types
_NUMPY = ("float64", "int64", "bool", "bool_")
_VALUES = (int, float, complex, str, bool, bytes, bytearray, type(None), torch.Size, torch.device, torch.dtype)


class Saver:
    """Commits the state after a step, then prunes. step: of the newest checkpoint, committed or being written.

    background: a thread writes a copy of the state, at most one at a time; the next `wait` raises what went wrong.
    """

    def __init__(self, run: RunFolder, world: World, background: bool, step: int | None) -> None:
        self.run, self.world, self.step = run, world, step
        self._writers = world  # of sharded tensors; a thread has a process group of its own
        self._memory: list[Storage] | None = [] if background else None  # of the last copy
        self._saved_at = time.monotonic()
        self._writing: Future[None] | None = None

    def save(self, step: int, gather: Callable[[], Tree], facts: Tree) -> None:
        """Saves the state after `step` steps; all processes take part. The first one writes; where tensors are sharded,
        all do.

        gather: returns the tree to write, in every process.  facts: for the sidecar.
        """
        self.wait()
        background, moved = self._memory is not None, list[Tree]()
        self.world.each(lambda: moved.append(to_cpu(gather(), copied=background, memory=self._memory)))
        tree = moved[0]
        divided = has_divided(tree)
        if divided and background and self._writers is self.world and self.world.distributed:
            group = torch.distributed.new_group(backend="gloo")  # of the thread: the processes train meanwhile
            self._writers = replace(self.world, device=torch.device("cpu"), group=group)
        writes = self.world.is_first or divided
        if not background:
            self.world.each(lambda: self._commit(step, tree, facts) if writes else None)
        elif writes:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckptool-save")
            # The copy is its own alone, and so gone before the next one is made.
            self._writing = thread.submit(lambda: self._commit(step, moved.pop(), facts))
            thread.shutdown(wait=False)  # it ends with its work: loaders fork
        self.step, self._saved_at = step, time.monotonic()

    def is_late(self, seconds: float | None) -> bool:
        """True once this many seconds have passed since the last save, or the start, by the clock of this process."""
        return seconds is not None and time.monotonic() - self._saved_at >= seconds

    def wait(self) -> None:
        """Waits for the thread that writes, and raises in every process what went wrong."""
        writing, self._writing = self._writing, None
        if self._memory is not None:
            self.world.each(lambda: writing.result() if writing is not None else None)

    def finish(self, say: Callable[[str], Any] = lambda text: None) -> None:
        """Waits for the thread that writes, reports its error, which nothing raises any more, and releases the lock."""
        writing, self._writing = self._writing, None
        error = writing.exception() if writing is not None else None
        self.run.close()
        if self._memory is not None:
            self._memory.clear()
        if error is not None:
            say(f"the last save failed: {error}")

    def _commit(self, step: int, tree: Tree, facts: Tree) -> None:
        try:
            if has_divided(tree):
                saved = self.run.commit_together(step, tree, facts, self._writers)
            else:
                saved = self.run.commit(step, tree, facts)
        except DiskFull as error:
            error.why = "Existing checkpoints stay as they are."
            error.fix = Text(f"Make room, then {self.run.way_on}")
            raise
        if self.world.is_first:
            pruned = self.run.prune()
            metrics = {"metrics": facts["metrics"]} if facts.get("metrics") else {}
            self.run.note("save", step=saved.step, path=saved.path, pruned=[old.step for old in pruned], **metrics)


def loaded(path: str, parts: Callable[[str], bool] = lambda key: False) -> Any:
    """The tree of a checkpoint that a run saved, mapped, on the CPU. parts: see `read_divided`."""
    if os.path.isdir(path):
        return read_divided(path, parts)
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def to_cpu(tree: Any, *, copied: bool = False, memory: list[Storage] | None = None) -> Any:
    """A tree with its tensors on the CPU, which share memory as before. copied: copies those already there, too.

    memory: of the last copy, which this one overwrites; memory is allocated for sizes that it did not have.
    """
    free: dict[int, list[Storage]] = {}
    for storage in memory or ():
        free.setdefault(storage.nbytes(), []).append(storage)
    moved: dict[int, Storage] = {}

    def copy(storage: Storage) -> Storage:
        reusable, size = free.get(storage.nbytes()), storage.nbytes()
        target: Storage = reusable.pop() if reusable else _new_storage(size)
        if storage.device.type != "cpu":
            return target.copy_(storage)
        ctypes.memmove(target.data_ptr(), storage.data_ptr(), size)  # 3 to 8 times as fast as torch's threads
        return target

    parts = (local(tensor.detach()) for tensor in tensors(tree))
    counts = Counter(part.untyped_storage()._cdata for part in parts if _is_plain(part))
    several = {storage for storage, count in counts.items() if count > 1}  # those in which several tensors are
    result = _moved(tree, copy if copied else _new_storage.cpu, moved, several)
    if memory is not None:
        memory[:] = moved.values()
    return result


def _is_plain(part: torch.Tensor) -> bool:
    """True for a tensor whose storage is its whole value."""
    is_strided = type(part) is torch.Tensor and part.layout is torch.strided and not part.is_quantized
    return is_strided and not part.is_conj() and not part.is_neg()


def _moved(node: Any, move: Callable[[Storage], Storage], moved: dict[int, Any], shared: set[int]) -> Any:
    """A tree with moved storages, each once, and numpy's numbers as Python's. Not a closure: that would refer to
    itself, and keep the copies alive."""
    if isinstance(node, torch.Tensor):
        part = local(node.detach())
        storage: Any = part.untyped_storage() if _is_plain(part) else None
        is_rest = storage and part.is_contiguous() and part.nbytes < storage.nbytes() and storage._cdata not in shared
        if storage is None or is_rest:  # what nobody sees of a storage, as of a mean's, may be anything
            part = part.to("cpu", copy=True)
        else:
            if (home := moved.get(storage._cdata)) is None:
                home = moved[storage._cdata] = move(storage)
            if home is not storage:
                layout = part.storage_offset(), part.shape, part.stride()
                part = torch.empty(0, dtype=part.dtype).set_(home, *layout)
        part.requires_grad_(node.requires_grad and node.is_leaf)  # as a value that gradients are computed for
        return with_local(node, part) if is_divided(node) else part
    if isinstance(node, dict):
        container: Any = type(node)() if type(node) is not dict else {}
        for key, item in node.items():
            container[_python(key)] = _moved(item, move, moved, shared)
        if hasattr(node, "_metadata"):
            container._metadata = node._metadata
        return container
    if type(node) in (list, tuple, set):
        return type(node)(_moved(item, move, moved, shared) for item in node)
    return node.copy() if type(node) is bytearray else _python(node)  # its owner may change it while a thread writes


def _python(value: Any) -> Any:
    """A number of numpy that computes as Python's do (`float64`, not `float32`) as Python's; all else as it is."""
    return value.item() if type(value).__module__ == "numpy" and type(value).__name__ in _NUMPY else value


def plain_state(state: Tree) -> Tree:
    """A schedule's state without its functions, which the script defines anew when it makes the schedule."""
    if "lr_lambdas" not in state:
        return state
    return {**state, "lr_lambdas": [each if each and not not_plain(each) else None for each in state["lr_lambdas"]]}


def refuse_not_plain(value: Any, what: str) -> None:
    """Raises `UsageError` for a value that `torch.load(weights_only=True)` would not read."""
    if name := not_plain(value):
        raise not_saved(f"{what} holds {name}")


def not_saved(what: str) -> UsageError:
    """The error for what is not plain."""
    why = "Only plain values and tensors are saved, so that the file opens anywhere."
    return UsageError(what, why, "Convert it: float(x), torch.as_tensor(x), list(x), dict(x)")


def not_plain(value: Any) -> str:
    """The first class in a value that `torch.load(weights_only=True)` does not load; empty if there is none."""
    stack, seen = [value], set()
    while stack:
        node = _python(stack.pop())
        if isinstance(node, torch.Tensor) or (type(node) in _VALUES and node != b""):
            continue
        if type(node) not in (dict, OrderedDict, Counter, list, tuple, set):
            return f"{type(node).__module__}.{type(node).__qualname__}"
        if id(node) not in seen:
            seen.add(id(node))
            stack += [*node.keys(), *node.values()] if isinstance(node, dict) else node
    return ""


def state_digest(value: Any) -> str:
    """A digest of a plain value with its tensors, the same for equal ones in every process."""
    hashed, stack = blake2b(digest_size=16), [value]
    while stack:
        node = stack.pop()
        if isinstance(node, torch.Tensor):
            part = local(node.detach())
            part = (part if part.layout is torch.strided else part.to_dense()).cpu().contiguous().resolve_conj()
            raw = part.reshape(-1).view(torch.uint8).numpy().data  # much: two sums take half of a hash's time
            hashed.update(f"{part.dtype} {list(part.shape)} {zlib.crc32(raw)} {zlib.adler32(raw)}".encode())
        elif isinstance(node, (dict, list, tuple)):
            hashed.update(f"{type(node).__name__} {len(node)}".encode())
            stack += [*node, *node.values()] if isinstance(node, dict) else node
        else:
            hashed.update(repr(sorted(map(repr, node)) if isinstance(node, set) else node).encode())
    return hashed.hexdigest()


def checked_rules(
    keep: tuple[int, Any, int], folder: str, verify: str, signals: Sequence[str], seed: Any, after: float | None
) -> Retention:
    """The retention that `ckptool.Run` is given. Raises `UsageError` for an invalid argument of it."""
    last, best, every = keep
    metric, mode, count = (*(best or ("", "min", 0)), 1)[:3]
    is_best = mode in ("min", "max") and isinstance(metric, str) and count >= 0
    are_signals = all(f"SIG{name}" in signal.Signals.__members__ for name in signals)
    checks = (
        ("folder", folder, bool(folder) and not is_url(folder), "the name of a folder on this machine"),
        ("verify", verify, verify in ("full", "size"), "`full` or `size`"),
        ("signals", signals, are_signals, "like ('TERM', 'INT')"),
        ("seed", seed, seed is None or type(seed) is int, "a whole number, or None"),
        ("stop_after", after, after is None or after > 0, "a number of seconds, or None"),
        ("keep_last", last, last >= 1, "at least 1"),
        ("keep_every", every, every >= 0, "at least 0"),
        ("keep_best", best, is_best, "a metric with `max` or `min`, like ('val_acc', 'max')"),
    )
    for name, value, right, rule in checks:
        if not right:
            raise UsageError(f"ckptool.Run: {name} is {value!r}", f"It should be {rule}.")
    return Retention(last, count, every, metric, mode)


def number(value: Any, name: str) -> float:
    """A metric, from a number or a tensor with one element."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} is {type(value).__name__}, which is not a number", "", "Give numbers") from error
