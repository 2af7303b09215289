"""Tensors that processes share among them (DTensor, as FSDP2 makes them): their parts, saving and loading those.

All processes write into one folder of `torch.distributed.checkpoint`, each its own parts. It is read by ckptool's own
reader, which runs nothing of a file: of every tensor a process reads the part that it holds now, whatever the number
of processes was, or is, and whether it was divided when it was saved.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckptool import formats
from ckptool.bridge import build, to_torch
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.errors import RunFailed
from ckptool.output import write_problem


def is_divided(value: Any) -> bool:
    """True for a tensor of which each process has a part."""
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and none of them is there before it
    return tensors is not None and isinstance(value, tensors.DTensor)


def has_divided(tree: Any) -> bool:
    """True where any tensor of a tree is divided."""
    return _holds(tree, is_divided)


def _holds(node: Any, wanted: Callable[[Any], bool]) -> bool:
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return wanted(node) or any(_holds(part, wanted) for part in parts)


def local(value: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is in this process; all of one that is not divided."""
    return value._local_tensor if is_divided(value) else value  # type: ignore[attr-defined]


def whole(value: Any) -> torch.Tensor:
    """All of a tensor, in every process, which they put together."""
    return value.full_tensor() if is_divided(value) else value  # type: ignore[no-any-return]


def with_local(value: torch.Tensor, part: torch.Tensor) -> Any:
    """A tensor divided like another, with another part in this process."""
    like: Any = value
    make = sys.modules["torch.distributed.tensor"].DTensor.from_local
    return make(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def divided_like(value: Any, like: Any) -> Any:
    """A tensor of a checkpoint as the live one is: its part in this process, where that is divided."""
    if not isinstance(value, (TensorEntry, torch.Tensor)) or is_divided(value):
        return value
    if not is_divided(like) or tuple(value.shape) != tuple(like.shape):
        return to_torch(value) if isinstance(value, TensorEntry) else value
    for place, placement in zip(like.device_mesh.get_coordinate(), _sizes(like), strict=True):
        if placement is not None:  # as torch.chunk divides: the last parts are smaller, or empty
            dim, count = placement
            length = value.shape[dim]
            begin, end = (min(length, number * -(-length // count)) for number in (place, place + 1))
            value = value.narrow(dim, begin, end - begin)
    part = to_torch(value) if isinstance(value, TensorEntry) else value.clone()
    return with_local(like, part.to(like.device))


def _sizes(like: Any) -> Iterator[tuple[int, int] | None]:
    """For each dimension of the mesh the dimension that it divides, and into how many parts; None for copies."""
    for size, placement in zip(like.device_mesh.shape, like.placements, strict=True):
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise RunFailed(f"a tensor is divided as {placement}, which is not resumed", "FSDP2 divides by Shard.")
        yield (placement.dim, size) if placement.is_shard() else None


def state_like(state: Mapping[str, Any], live: Mapping[str, Any]) -> Any:
    """A state dict of a checkpoint, its tensors divided as those of the live one, which gives its versions, too."""
    if not has_divided(dict(live)) and not any(isinstance(value, TensorEntry) for value in state.values()):
        return state
    made: Any = OrderedDict((name, divided_like(value, live.get(name))) for name, value in state.items())
    made._metadata = getattr(live, "_metadata", None)
    return made


# Files ---------------------------------------------------------------------------------------------------------------


def write(tree: Mapping[str, Any], folder: str, group: Any) -> None:
    """Writes a tree into a folder, synced; every process of a group its own parts. Raises in all what one meets."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        writer: Any = FileSystemWriter(folder, sync_files=True)
        writer.storage_meta = lambda: None  # a random number, and the name that the folder has now
        save(dict(tree), storage_writer=writer, planner=_planner(), process_group=group)
    except CheckpointException as error:
        for rank, (problem, _) in error.failures.items():
            if isinstance(problem, OSError):
                raise write_problem(problem, os.path.dirname(folder)) from error
            words = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            raise RunFailed(f"process {rank} could not save: {words}") from error
        raise RunFailed("the processes could not save together") from error


def _planner() -> Any:
    """What names the values of a tree: as torch does, but what has no tensor in it is one object, even an empty one."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            found = list(_values(state_dict))
            self.mappings = {".".join(map(str, path)): path for path, _ in found}
            if len(self.mappings) < len(found):
                raise RunFailed("two values would have one name", "torch.distributed.checkpoint joins keys by dots.")
            self.state_dict = dict(zip(self.mappings, (value for _, value in found), strict=True))
            self.is_coordinator = is_coordinator

    return Planner(dedup_save_to_lowest_rank=True)


def _values(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(node, torch.Tensor) or (path and not _holds(node, lambda value: isinstance(value, torch.Tensor))):
        yield path, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        # Interned: a pickle tells two equal texts from one that is there twice.
        yield from _values(value, (*path, sys.intern(str(key)) if isinstance(node, dict) else key))


def read(path: str, parts: Callable[[str], bool]) -> dict[str, Any]:
    """The tree of a folder. parts: tells the keys whose tensors stay entries, of which `divided_like` reads parts."""
    tree = formats.read(path).tree
    return {key: _live(value) if parts(key) else build(Checkpoint(value, "")) for key, value in tree.items()}


def _live(node: Any) -> Any:
    if type(node) is dict:
        return {key: _live(value) for key, value in node.items()}
    return node if isinstance(node, TensorEntry) else build(Checkpoint(node, ""))
