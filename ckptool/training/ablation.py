"""A checkpoint with a part of its state forgotten, as a saver leaves it that does not know of that part."""

from __future__ import annotations

from typing import Any

import torch

from ckptool.training.dry_run import first_difference
from ckptool.training.parallel import world_of
from ckptool.training.runs import read_config
from ckptool.training.state import gathered
from ckptool.training.store import Store
from ckptool.training.trainer import build


def forget(folder: str, part: str) -> bool:
    """Gives the newest checkpoint of a run that part of the state which a new trainer has. False if the run has none, or it is empty.

    part: `optimizer`, `scheduler`, `scaler` or `ema`. A forgotten average starts again from the weights.
    """
    number, config = read_config(folder)
    store = Store(folder, number)
    newest = store.all()[-1]
    tree: dict[str, Any] = torch.load(newest.path, map_location="cpu", weights_only=True)
    keys = [key for key in tree if key.startswith(f"{part}_")]
    if not keys:
        return False
    with world_of(config) as world:
        new = gathered(build(config, world))
    fresh = {key: tree[key.replace(part, "model", 1)] if part == "ema" else new[key] for key in keys}
    if not first_difference({key: tree[key] for key in keys}, fresh):
        return False  # plain SGD remembers nothing
    tree.update(fresh)
    facts = {
        key: value for key, value in (newest.sidecar or {}).items() if key not in ("run", "step", "bytes", "sha256")
    }
    store.commit(newest.step, tree, facts)
    return True
