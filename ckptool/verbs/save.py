"""`ckptool.save` and `save_for_cpu`: tensors, arrays and entries, or a model's weights, to a checkpoint, durably."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptool import formats
from ckptool.checkpoint import Checkpoint, FileRange
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.state_dicts import INNER_WRAPPERS, WEIGHTS, StateDict
from ckptool.checkpoint.tree import map_storages, storages
from ckptool.output import check_target
from ckptool.transforms.rename import apply
from ckptool.verbs._save import checkpoint_of, path_of, put_in_place

if TYPE_CHECKING:
    from torch import nn


def save(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    container: str | None = None,
    overwrite: bool = False,
    keep_unknown: bool = False,
) -> None:
    """Writes `tree` to `path`: what `torch.save` takes, of a module its state dict, entries and checkpoints.

    container: `torch-zip`, `safetensors`, `sharded`, `npz`, …; by default that of the suffix, else `torch-zip`.
    overwrite: replace what is there; it stays whole under its name until the new file is.
    keep_unknown: write objects of unknown classes as `torch.save` would (they load with `weights_only=False` only).
    Numpy arrays become tensors in safetensors and other containers of tensors alone, and stay arrays in torch files.
    Raises `Unsupported`, naming what cannot be saved and where it is.
    """
    path = path_of("save", path)
    target = formats.by_name(container) if container else formats.for_output(path, formats.DEFAULT)
    if not container:
        formats.refuse_suffix(path, target)
    formats.refuse_index(path, target)
    if not target.writes_folder:
        check_target(path, overwrite=overwrite)
    made = checkpoint_of(tree, arrays_as_tensors=target.tensors_only, keep_unknown=keep_unknown)
    with no_collection():
        plan = target.write(made, keep_unknown=keep_unknown)
    ranges = [each.data for each in storages(made.tree) if isinstance(each.data, FileRange)]
    sources = list({id(data.file): data.file for data in ranges}.values())
    put_in_place(plan, path, overwrite=overwrite, inputs=sources)


def save_for_cpu(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a model's state dict as any machine can load it: unwrapped, tagged `cpu`, without wrappers' prefixes.

    The model stays where it is: tensors on another device are copied piece by piece. `torch.load(path,
    weights_only=True)` and `model.load_state_dict` take it as it is.  overwrite: replace what is there. Raises
    `OutputExists`, `DiskFull`, and `Unsupported` naming tensors that are pieces of others (FSDP).
    """
    from ckptool.verbs._live import bridge, unwrapped

    def without_inner(key: str) -> str:
        # What `torch.compile` and the like put on submodules; a submodule `module` keeps its name.
        *modules, name = key.split(".")
        return ".".join([*(part for part in modules if part not in INNER_WRAPPERS), name])

    state: Any = unwrapped(model, averages=True).state_dict()
    tree = map_storages(bridge.from_torch(state), lambda storage: replace(storage, location="cpu"))
    whole = Checkpoint(tree, "live")
    save(apply(whole, [StateDict((), tree, WEIGHTS)], without_inner).checkpoint, path, overwrite=overwrite)
