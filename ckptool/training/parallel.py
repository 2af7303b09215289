"""Strategies: one device; several by DataParallel or by parts of the model; processes by DistributedDataParallel, or by
FSDP2, which divides tensors among them (DTensor).

A strategy wraps models for the forward pass. The model inside is what is saved: no file carries a wrapper's prefix. The
samples of a step are chosen before they are divided, so they are the same under every strategy and world size.

Divided tensors are written by all processes into one folder of `torch.distributed.checkpoint`, each its own parts. It
is read by ckptool's own reader, which runs nothing of a file: of every tensor a process reads the part that it holds
now, whatever the number of processes was, or is, and whether it was divided when it was saved.
"""

from __future__ import annotations

import gc
import os
import sys
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ckptool import formats
from ckptool.bridge.to_live import build, to_torch
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.commands import arg
from ckptool.errors import RunFailed, UsageError, listed
from ckptool.output import write_problem
from ckptool.training.data import to_device
from ckptool.training.extensions import Patterns, modules_matching, outermost

TOGETHER = ("ddp", "fsdp")  # strategies of several processes

if TYPE_CHECKING:
    from ckptool.training.config import Config, Split


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, and this one's rank. group: their process group; None for torch's default group."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    distributed: bool = False
    group: Any = None

    @property
    def is_first(self) -> bool:
        """True in the one process that writes."""
        return self.rank == 0

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        if self.distributed:
            torch.distributed.all_reduce(value, group=self.group)
        return value

    def any_rank(self, flag: bool) -> bool:
        """True if the flag is set in any process, so that all of them decide alike."""
        return self.any_of(flag)[0]

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set in any process."""
        if not self.distributed:
            return list(flags)
        sums: list[float] = self.all_reduce(torch.tensor(flags, dtype=torch.float32, device=self.device)).tolist()
        return list(map(bool, sums))

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks, in each of them."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """The value of the first process, in all of them."""
        return self.gather(value)[0]

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """The results of `work` in all processes, in each of them; what it raises in one is raised in all."""
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            if not self.distributed:
                raise
            failure = error
        words = failure and f"{type(failure).__name__}: {failure}".partition("\n")[0]
        outcomes = self.gather((result, words))
        if failures := [f"process {rank} failed: {words}" for rank, (_, words) in enumerate(outcomes) if words]:
            raise failure or RunFailed(failures[0], "Its own message says why.")
        return [result for result, _ in outcomes]

    def first(self, work: Callable[[], Any]) -> Any:
        """The result of `work` in the first process, in all of them; what it raises there is raised in all."""
        return self.each(lambda: work() if self.is_first else None)[0]


def device_of(name: str, key: str = "device") -> torch.device:
    """The device of this machine that a key of the configuration names; `auto` is the GPU where there is one.

    Raises `UsageError` where there is none of this name.
    """
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device("cuda" if torch.cuda.is_available() else name)
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{key}: {name!r} is not a device of this machine: {reason}", "", "For example: cpu") from None
    return torch.device(name)


@contextmanager
def world_of(config: Config) -> Iterator[World]:
    """The world of a run: joined on entry, left on exit; without torchrun it is one process.

    Raises `UsageError` if torchrun started several processes for a strategy of one, `RunFailed` if they cannot connect.
    """
    size = _number("WORLD_SIZE")
    if config.strategy not in TOGETHER:
        if size > 1:
            what = f"torchrun started {size} processes, but strategy is {config.strategy}"
            raise UsageError(what, "Each would write to the same folder.", f"{arg(set='strategy=ddp')}, or fsdp")
        yield World(device=device_of(config.split.devices[0] if config.split else config.device))
        return
    device = device_of(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", _number("LOCAL_RANK"))
        torch.cuda.set_device(device)
    library: Any = torch.distributed
    options: dict[str, Any] = {"rank": _number("RANK"), "world_size": size}
    address = [os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT")]
    launched = size > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    try:
        if not launched:
            options["store"] = library.HashStore()
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store outlives a restart of its processes, and has the addresses of those that are gone.
            start = f"ckptool/{_number('TORCHELASTIC_RESTART_COUNT')}"
            options["store"] = library.PrefixStore(start, library.TCPStore(address[0], int(address[1])))
        library.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise RunFailed(
            f"the processes of this run could not connect: {str(error).partition(chr(10))[0]}",
            f"They connect at {':'.join(address)}, as set by torchrun. Nothing was trained." if launched else "",
            "Start all of them: torchrun --nproc-per-node 2 --no-python ckptool train run.yaml; "
            f"or one: {arg(set='strategy=single')}",
        ) from error
    try:
        yield World(library.get_rank(), library.get_world_size(), device, True)
    finally:
        gc.collect()  # objects of DDP in reference cycles need the group when they are freed
        library.destroy_process_group()


def _number(name: str) -> int:
    """A number that torchrun sets in the environment of each process; without torchrun that of a single process."""
    text = os.environ.get(name, "1" if name == "WORLD_SIZE" else "0")
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r} in the environment, not a number", "torchrun sets it.", f"unset {name}")
    return int(text)


def placed(model: nn.Module, config: Config, world: World) -> nn.Module:
    """The model on its device, or divided: its modules among devices (split), its tensors among processes (fsdp)."""
    if config.strategy == "fsdp":
        return divide(model, config.fsdp.match if config.fsdp else None, world)
    if config.split is None:
        return model.to(world.device)
    place(model, config.split, world.device)
    return model


def wrapped(model: nn.Module, config: Config, world: World) -> nn.Module:
    """The model as the strategy runs it. Gradients of parameters that are frozen now are not exchanged."""
    runner: Any = model
    if backend := config.train.compile:
        runner = torch.compile(model, backend="inductor" if backend is True else backend)
    learns = any(parameter.requires_grad for parameter in model.parameters())
    if config.strategy == "dp" and world.device.type == "cuda":
        index = world.device.index or 0
        return nn.DataParallel(runner, [index, *(i for i in range(torch.cuda.device_count()) if i != index)])
    if config.strategy == "ddp" and learns:
        ids = [world.device.index] if world.device.type == "cuda" else None
        # Without find_unused_parameters, gradients move to other buckets after the first step; a resumed run then
        # adds them in another order, and from three processes on the last bits differ.
        return nn.parallel.DistributedDataParallel(runner, device_ids=ids, find_unused_parameters=True)
    if config.split is not None:
        return Pipeline(runner, config.split.microbatches)
    return runner  # type: ignore[no-any-return]


def unsynchronised(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients of all but the last micro-step stay in their process."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        return model.no_sync()
    if callable(divided := getattr(model, "set_requires_gradient_sync", None)):  # fsdp
        divided(last)
    return nullcontext()


def divide(model: nn.Module, match: Patterns | None, world: World) -> nn.Module:
    """Divides the parameters of a model among all processes, by FSDP2: those of each chosen module, then the rest.

    match: patterns of modules (default: its children, those of a list one by one). Parameters of modules that share
    weights with others, and of modules that are not chosen, are divided with the model itself.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name in _children(model) if match is None else outermost(modules_matching(model, match, "fsdp.match")):
        module = model.get_submodule(name)
        paths = [path for parameter in module.parameters() for path in owners[id(parameter)]]
        if paths and all(path.startswith(name + ".") for path in paths):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def with_same_buffers(module: nn.Module, inputs: Any) -> None:
        """Gives all processes the buffers of the first, as DistributedDataParallel does: they are what is saved."""
        for _, buffer in module.named_buffers() if module.training else ():
            torch.distributed.broadcast(buffer.detach(), 0)

    model.register_forward_pre_hook(with_same_buffers)
    return model


def _children(model: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # has no forward of its own
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def place(model: nn.Module, settings: Split, home: torch.device) -> None:
    """Puts each part of a model on its device, and moves tensors between them; the output returns to `home`.

    Modules stay where they are in the model, so names and state dict do not change. Parts follow the order in which
    modules are defined; an outer module belongs to the part where it begins, and a module with weights tied to an
    earlier part runs there. Raises `UsageError` for a cut that is out of order or before no module, or no device.
    """
    devices = [device_of(name, "split.devices") for name in settings.devices]
    modules = dict(model.named_modules())
    names = list(modules)
    cuts = [names.index(cut) if cut in names else 0 for cut in settings.at]
    if cuts != sorted(set(cuts)) or 0 in cuts:
        what = f"split.at: {', '.join(settings.at)} are not modules in the order of the model"
        raise UsageError(what, f"In its order they are {listed(names[1:], 12)}.")
    part_of = {id(module): bisect(cuts, number) for number, module in enumerate(modules.values())}
    placed: set[int] = set()
    for module in modules.values():
        device = devices[part_of[id(module)]]
        # A tied tensor stays where it came first.
        module._apply(
            lambda tensor, device=device: tensor if id(tensor) in placed else tensor.to(device), recurse=False
        )
        placed.update(map(id, (*module.parameters(recurse=False), *module.buffers(recurse=False))))
    for module in modules.values():
        inside = {part_of[id(part)] for part in module.modules()}
        if len(inside) == 1:
            weight = next(module.parameters(), None)
            device = devices[inside.pop()] if weight is None else weight.device
            move = lambda module, args, kwargs, device=device: to_device((args, kwargs), device)  # noqa: E731
            module.register_forward_pre_hook(move, with_kwargs=True)
    model.register_forward_hook(lambda module, inputs, output: to_device(output, home))


class Pipeline(nn.Module):
    """Runs a model on the micro-batches of a batch one after the other, and concatenates their outputs.

    On GPUs the parts of the model work at the same time: a micro-batch is in the second while the next is in the first.
    With several, BatchNorm sees each micro-batch by itself, and dropout draws for each.
    """

    def __init__(self, model: nn.Module, microbatches: int) -> None:
        super().__init__()
        self.module, self.microbatches = model, microbatches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        size = next((len(value) for value in leaves if _has_rows(value)), 1)
        if min(self.microbatches, size) == 1:
            return self.module(*args, **kwargs)
        bounds = sorted({size * number // self.microbatches for number in range(self.microbatches + 1)})
        outputs = []
        for begin, end in pairwise(bounds):
            rows = [value[begin:end] if _has_rows(value) and len(value) == size else value for value in leaves]
            part, named = tree_unflatten(rows, spec)
            outputs.append(self.module(*part, **named))
        return tree_map(lambda *rows: torch.cat(rows), *outputs)


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


# Divided tensors -----------------------------------------------------------------------------------------------------


def is_divided(value: Any) -> bool:
    """True for a tensor of which each process has a part (a DTensor)."""
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and there are none before the import
    return isinstance(value, getattr(tensors, "DTensor", ()))


def has_divided(tree: Any) -> bool:
    """True where any tensor of a tree is divided."""
    return "torch.distributed.tensor" in sys.modules and any(map(is_divided, tensors(tree)))


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    for part in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ():
        if not isinstance(part, (int, float, str)):  # thousands, in the state of a generator
            yield from tensors(part)


def local(value: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is in this process; all of one that is not divided."""
    return value._local_tensor if is_divided(value) else value  # type: ignore[attr-defined]


def with_local(value: torch.Tensor, part: torch.Tensor) -> Any:
    """A tensor divided like another, with another part in this process."""
    like: Any = value
    make = sys.modules["torch.distributed.tensor"].DTensor.from_local
    return make(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def divided_like(value: Any, like: Any) -> Any:
    """A tensor of a checkpoint in the form of the live one `like`: its part in this process, if that is divided."""
    if not isinstance(value, (TensorEntry, torch.Tensor)) or is_divided(value):
        return value
    if not is_divided(like) or tuple(value.shape) != tuple(like.shape):
        return to_torch(value) if isinstance(value, TensorEntry) else value
    mesh = like.device_mesh
    for coordinate, count, placement in zip(mesh.get_coordinate(), mesh.shape, like.placements, strict=True):
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise RunFailed(f"a tensor has the placement {placement}, which cannot be resumed", "FSDP2 uses Shard.")
        if placement.is_shard():  # as torch.chunk divides: the last parts are smaller, or empty
            length = value.shape[placement.dim]
            begin, end = (min(length, number * -(-length // count)) for number in (coordinate, coordinate + 1))
            value = value.narrow(placement.dim, begin, end - begin)
    part = to_torch(value) if isinstance(value, TensorEntry) else value.clone()
    return with_local(like, part.to(like.device))


def state_like(state: Mapping[str, Any], live: Mapping[str, Any]) -> Any:
    """A state dict of a checkpoint with its tensors divided as the live one's, and the live one's version metadata."""
    if not has_divided(dict(live)) and not any(isinstance(value, TensorEntry) for value in state.values()):
        return state
    divided: Any = OrderedDict((name, divided_like(value, live.get(name))) for name, value in state.items())
    divided._metadata = getattr(live, "_metadata", None)
    return divided


# Files ---------------------------------------------------------------------------------------------------------------


def write_divided(tree: Mapping[str, Any], folder: str, group: Any) -> None:
    """Writes a tree into a folder, synced; every process of a group its own parts. Raises one's error in all."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        """Names the values of a tree as torch does, but a subtree without tensors, even an empty one, is one object."""

        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            leaves = list(_values(state_dict))
            self.mappings = {".".join(map(str, path)): path for path, _ in leaves}
            if len(self.mappings) < len(leaves):
                raise RunFailed("two values would have one name", "torch.distributed.checkpoint joins keys with dots.")
            self.state_dict = dict(zip(self.mappings, (value for _, value in leaves), strict=True))
            self.is_coordinator = is_coordinator

    try:
        writer: Any = FileSystemWriter(folder, sync_files=True)
        writer.storage_meta = lambda: None  # leaves out a random number, and the folder's temporary name
        planner = Planner(dedup_save_to_lowest_rank=True)
        save(dict(tree), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        for rank, (problem, _) in error.failures.items():
            if isinstance(problem, OSError):
                raise write_problem(problem, os.path.dirname(folder)) from error
            words = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            raise RunFailed(f"process {rank} could not save: {words}") from error
        raise RunFailed("the processes could not save together") from error


def _values(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(node, torch.Tensor) or (path and next(tensors(node), None) is None):
        yield path, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        # Interned: in a pickle two equal texts differ from one that occurs twice.
        yield from _values(value, (*path, sys.intern(str(key)) if isinstance(node, dict) else key))


def read_divided(path: str, parts: Callable[[str], bool]) -> dict[str, Any]:
    """The tree of a folder. parts: True for keys whose tensors stay entries, of which `divided_like` reads parts."""
    tree = formats.read(path).tree
    return {key: _live(value) if parts(key) else build(Checkpoint(value, "")) for key, value in tree.items()}


def _live(node: Any) -> Any:
    if type(node) is dict:
        return {key: _live(value) for key, value in node.items()}
    return node if isinstance(node, TensorEntry) else build(Checkpoint(node, ""))
