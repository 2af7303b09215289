"""Files of 0.1.0, in which equal storages lie once and are no ties: what `slim --dedup` and `bundle --dedup` wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ckptool
from ckptool.checkpoint import Storage
from ckptool.checkpoint.tree import map_storages, storages

LEAST = 1024  # bytes


def deduplicated(file: str | Path, out: str | Path) -> int:
    """Writes the file as 0.1.0 deduplicated it; returns how many storages have no bytes of their own."""
    opened = ckptool.open(file)
    alike: dict[tuple[bytes, str], list[Storage]] = {}
    for storage in storages(opened.tree):
        alike.setdefault((bytes(storage.data.read(0, storage.nbytes)), storage.location), []).append(storage)
    groups = [group for (data, _), group in alike.items() if len(group) > 1 and len(data) >= LEAST]
    data = {id(storage): group[0].data for group in groups for storage in group}

    def shared(storage: Storage) -> Storage:
        return replace(storage, data=data[id(storage)], deduplicated=True) if id(storage) in data else storage

    ckptool.save(replace(opened, tree=map_storages(opened.tree, shared)), out, keep_unknown=True)
    return len(data) - len(groups)
