"""The way of verbs to live modules, and a module to a file: without torch, they name the extra that is missing."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.tree import map_storages
from ckptool.conventions.state_dicts import INNER_WRAPPERS, WEIGHTS, StateDict
from ckptool.errors import MissingExtra, Unsupported
from ckptool.transforms.rename import apply
from ckptool.verbs.save import save

if TYPE_CHECKING:
    from torch import nn

try:
    from ckptool import bridge as bridge
    from ckptool.bridge.modules import load_into as load_into
    from ckptool.bridge.modules import target_of as target_of
    from ckptool.bridge.modules import target_of_code as target_of_code
    from ckptool.bridge.modules import unwrapped as unwrapped
except Unsupported as error:
    why = "Live modules need torch; files are read without it."
    raise MissingExtra("torch is not installed", why, "pip install 'ckptool[torch]'") from error


def save_for_cpu(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a model's state dict as any machine can load it: unwrapped, on the CPU, without wrappers' prefixes.

    The model stays where it is: tensors on another device are copied piece by piece. `torch.load(path,
    weights_only=True)` and `model.load_state_dict` take it as it is.  overwrite: replace what is there. Raises
    `OutputExists`, `DiskFull`, and `Unsupported` naming tensors that are pieces of others (FSDP).
    """

    def without_inner(key: str) -> str:  # what `torch.compile` and the like put on submodules; not a submodule `module`
        *modules, name = key.split(".")
        return ".".join([*(part for part in modules if part not in INNER_WRAPPERS), name])

    state: Any = unwrapped(model, averages=True).state_dict()
    tree = map_storages(bridge.from_torch(state), lambda storage: replace(storage, location="cpu"))
    whole = Checkpoint(tree, "live")
    save(apply(whole, [StateDict((), tree, WEIGHTS)], without_inner).checkpoint, path, overwrite=overwrite)
