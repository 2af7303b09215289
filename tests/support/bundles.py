"""Members of bundles; and files of 0.1.0, in which equal storages lie once and are no ties."""

import json
import zipfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import ckptool
from ckptool.checkpoint import Storage, TensorEntry
from ckptool.checkpoint.tree import address, map_storages, walk


def small_net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


GAN = {"generator": "G.pt", "discriminator": "D.pt#state_dict", "optimizerA": "optimizer.pt", "ema": "ema.pt"}


SHARED = torch.arange(1024.0).reshape(32, 32)


def net_state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2)).state_dict()


LEAST = 1024  # bytes


def deduplicated(file: str | Path, out: str | Path) -> int:
    """Writes the file as 0.1.0 deduplicated it; returns how many storages have no bytes of their own."""
    opened = ckptool.open(file)
    alike: dict[tuple[bytes, str], dict[int, list[str]]] = defaultdict(dict)
    first: dict[tuple[bytes, str], Storage] = {}
    one: dict[int, Storage] = {}
    for path, node in walk(opened.tree):
        if isinstance(node, TensorEntry) and node.storage.nbytes >= LEAST:
            key = bytes(node.storage.data.read(0, node.storage.nbytes)), node.storage.location
            alike[key].setdefault(id(node.storage), []).append(address(path))
            one[id(node.storage)] = first.setdefault(key, node.storage)
    groups = [[*storages.values()] for storages in alike.values() if len(storages) > 1]
    tied = map_storages(opened.tree, lambda storage: one.get(id(storage), storage))
    ckptool.save(replace(opened, tree=tied), out, keep_unknown=True)
    with zipfile.ZipFile(out, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/.ckptool/twins", json.dumps(groups))
    return sum(len(group) - 1 for group in groups)
