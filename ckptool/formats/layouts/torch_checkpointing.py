"""`torch-checkpointing`: a folder of meta-pytorch's `torch_checkpointing`: a file for each item and rank.

Source: torch_checkpointing 0.1.1 (distributed_metadata.py, dtensor_metadata.py, default_metadata.py,
checkpoint_layout.py, metadata_serialization.py). `metadata.pkl`, a pickle of plain values, says of items that can be
resharded where each rank's file is, how it is written, and how its tensors are divided. Other items, and all of them
without that file, are known by their names: `ITEM_RANK.pt`; or `ITEM_rankRANK.pt`, as people's own scripts call them.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.dtypes import BY_TORCH
from ckptool.checkpoint.files import Folder, Input, read_json, read_small
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import inside
from ckptool.checkpoint.tree import Path
from ckptool.errors import CkptoolError, LimitExceeded, Unsupported, counted, printable
from ckptool.formats.distributed import distributed, sizes_of
from ckptool.formats.folder import MOST_NAMED, damaged, lacks, missing_ranks, mixed, without_copies
from ckptool.formats.marks import noted
from ckptool.formats.pieces import Joiner
from ckptool.formats.placements import MAX_MESH, Described, RankFile, RankShare, joined_trees, row_major_axes
from ckptool.pickles.decode import decode_all, no_storage

NAME = "torch-checkpointing"
TABLE = "metadata.pkl"
MAX_TABLE, MAX_TEXT = 256 << 20, 64 << 20
MAX_LOOKS = 4  # files opened to recognize a folder without a table
_FILE = re.compile(r"(?P<item>.*?)(?P<mark>[-_.]?rank[-_]?|_)(?P<rank>\d{1,6})\.(?P<suffix>pth?|bin|json|safetensors)")
_LAST_NUMBER = re.compile(r"\d+(?=(?:\.\w+)?$)")
_SUFFIXES = dict.fromkeys(("pt", "pth", "bin"), "TorchSerialization") | {
    "json": "JsonSerialization",
    "safetensors": "SafetensorsSerialization",
}


def detect(head: bytes, source: Input) -> bool:
    from ckptool.formats import read_alone

    if not isinstance(source, Folder):
        return False
    if TABLE in source:
        return b"rank_to_layout_info" in source.open(TABLE).read(0, min(source.open(TABLE).size, MAX_TABLE))
    first = [name for name, match in _files(source).items() if match["suffix"][0] in "pb" and not int(match["rank"])]
    for name in first[:MAX_LOOKS]:  # one that has parts of tensors of torch.distributed
        with suppress(CkptoolError):
            tensors = (distributed(node) for node in visit(read_alone(source.open(name)).tree))
            if any(tensor is not None and tensor.is_dtensor for tensor in tensors):
                return True
    return False


def _files(folder: Folder) -> dict[str, re.Match[str]]:
    return {name: match for name in without_copies(folder.names) if (match := _FILE.fullmatch(name))}


def belonging(folder: Folder) -> set[str]:
    """The names in a folder of this layout that belong to the checkpoint; none for another folder."""
    if not detect(b"", folder):
        return set()
    try:
        return _names(_items(folder, _table(folder))[0])
    except CkptoolError:  # which `read` raises again
        return {TABLE, *_files(folder)}


def read(source: Folder) -> Checkpoint:
    """The items of all ranks. Reads tables, pickles and headers, no tensor data.

    Raises `Corrupt` for a damaged table, for files that are missing or outside of the folder, and what `rank_files`
    raises for ranks that do not agree.
    """
    table, joiner = _table(source), Joiner(source)
    items, world = _items(source, table)
    tree: dict[Any, Any] = {}
    tables: dict[tuple[int, ...], tuple[int, ...]] = {}
    for item, files in items.items():
        by_path = {path: rank for rank, (path, _) in sorted(files.items(), reverse=True)}  # of a file that ranks share
        rank_files = [RankFile(str(source), files[rank][0], rank, world, tables) for rank in sorted(by_path.values())]
        values = [_opened(joiner, *files[file.rank]) for file in rank_files]
        described, apart = _described(source, table, item), not item.startswith("model")
        tree[item] = joined_trees(joiner, item, rank_files, values, described, apart=apart)
    used = _names(items)
    unused = (name for name in source.names if name not in used)
    joiner.notes += noted("unused-files", unused, "file is", "files are", "of no known item")
    version = table.get("version")
    engine = "torch_checkpointing" + (f", table version {printable(version)[:10]}" if type(version) is str else "")
    if not table and any("rank" in match["mark"] for match in _files(source).values()):
        engine = "one file per rank"
    return joiner.checkpoint(NAME, tree, engine, world)


# The table -----------------------------------------------------------------------------------------------------------


def _table(folder: Folder) -> dict[Any, Any]:
    """What `metadata.pkl` says; empty without one."""
    if TABLE not in folder:
        return {}
    source = folder.open(TABLE)
    if source.size > MAX_TABLE:
        raise LimitExceeded(f"{source} has {source.size:,} bytes", f"ckptool reads at most {MAX_TABLE:,}.")
    decoded = decode_all(source.read(0, source.size), no_storage, {}, name=str(source), file_bytes=source.size)
    if not isinstance(decoded.root, dict) or not isinstance(decoded.root.get("metadata"), dict) or decoded.aside():
        raise damaged(folder, f"its {TABLE} is not a table of plain values")
    return decoded.root


Files = dict[int, tuple[str, str]]  # of an item: for each rank the path of its file, and how it is written


def _names(items: dict[str, Files]) -> set[str]:
    """The names in the folder of the table and of the files of these items."""
    return {TABLE} | {path.partition("/")[0] for files in items.values() for path, _ in files.values()}


def _items(folder: Folder, table: dict[Any, Any]) -> tuple[dict[str, Files], int]:
    """The files of every item, by the table and else by their names; and the number of ranks."""
    items: dict[str, Files] = {}
    described = table.get("metadata", {})
    for item, entry in described.items():
        layout = inside(entry, "rank_to_layout_info")
        if type(item) is not str or not isinstance(layout, dict):
            raise damaged(folder, f"its {TABLE} does not say where its items are")
        for rank, info in layout.items():
            path, kind = f"{item}_{rank}.pt", "TorchSerialization"
            if info is not None:
                path, kind = inside(info, "file_path"), inside(info, "serialization_format.type")
            if type(rank) is not int or type(path) is not str or kind not in (*_SUFFIXES.values(), "RawSerialization"):
                raise damaged(folder, f"its {TABLE} does not say where {item} is")
            items.setdefault(item, {})[rank] = path, kind
    paths = [path for files in items.values() for path in {path for path, _ in files.values()}]
    placed = set(paths)
    if len(placed) < len(paths):
        raise damaged(folder, f"its {TABLE} names one file for two items")
    for name, match in _files(folder).items():
        if name not in placed and match["item"] not in described:
            files, rank = items.setdefault(match["item"] or "model", {}), int(match["rank"])
            if rank in files:
                raise mixed(folder, files[rank][0], name, "both belong to one rank")
            files[rank] = name, _SUFFIXES[match["suffix"]]
    world = table.get("world_size")
    if type(world) is not int or world < 1:
        world = max((max(files) + 1 for files in items.values()), default=1)
    missing: list[str] = []
    for item, files in items.items():
        if (len(files) > 1 or item in described) and len(missing) < MOST_NAMED:
            example = next(iter(files.values()))[0]
            missing += [_LAST_NUMBER.sub(str(rank), example) for rank in missing_ranks(files, world)]
    if missing:
        raise lacks(folder, f"{len(missing):,} of {counted(world, 'rank file')}", missing)
    if any(max(files) >= world for files in items.values()):
        raise damaged(folder, f"its {TABLE} is for {counted(world, 'rank')}, but there are files of more")
    return items, world


def _opened(joiner: Joiner, path: str, kind: str) -> Any:
    """The tree or value in a file, which may be in a folder below. Raises `Corrupt` for a path that leads elsewhere."""
    folder = below = joiner.folder
    *above, name = path.split("/")
    for part in (*above, name):
        if below.missing([part]):
            raise damaged(folder, f"its {TABLE} names a file that is not there: {path[:200]}")
        if part is not name:
            below = Folder(os.path.join(below.path, part))
    folder.adopt(path, below.open(name))
    if kind in ("TorchSerialization", "SafetensorsSerialization"):
        return joiner.open(name, below).tree
    read = read_json if kind == "JsonSerialization" else read_small
    return read(below.open(name).path, "an item", MAX_TEXT)


# How plain tensors are divided ---------------------------------------------------------------------------------------


def _described(folder: Folder, table: dict[Any, Any], item: str) -> Described | None:
    """The blocks that the plain tensors of an item are, by the table; None for an item that is not in it.

    Raises `Unsupported` for tensors that are divided without a mesh.
    """
    paths = inside(table.get("metadata", {}).get(item), "nested_path_to_metadata")
    if paths is None:
        return None
    by_rank: dict[tuple[str, int], Any] = {}
    try:
        for text, groups in paths.items():
            name = ".".join(map(str, json.loads(text)))
            by_rank |= {(name, rank): group["sharding_metadata"] for group in groups for rank in group["ranks"]}
    except (AttributeError, ValueError, TypeError, KeyError, RecursionError):
        raise damaged(folder, f"its {TABLE} does not say how the tensors of {item} are sharded") from None

    def share_of(file: RankFile, path: Path, entry: TensorEntry) -> RankShare | None:
        sharding, name = by_rank.get((".".join(map(str, path[1:])), file.rank)), "/".join(map(str, path))
        if sharding is None:
            return None
        try:
            kind, data = sharding["type"], sharding["data"]
            if kind != "DTensorShardingMetadata":
                what = f"{folder}: {name} is sharded by {str(kind)[:40]}"
                raise Unsupported(what, "Only sharding by a mesh (DTensorShardingMetadata) is supported.")
            dtype, shape = BY_TORCH[data["dtype"].removeprefix("torch.")], sizes_of(data["global_shape"])
            sizes, ranks = (sizes_of(data["mesh_spec"][key], MAX_MESH) for key in ("mesh_shape", "mesh_data"))
            if shape is None or sizes is None or ranks is None or prod(sizes) != len(ranks):
                raise ValueError
            placements = [(p["type"], p.get("dim"), p.get("split_factor", 1)) for p in data["placements"]]
            mesh = file.mesh(ranks, row_major_axes(sizes))
            share = file.divided(entry, shape, dtype, mesh, placements, entry.flags)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise damaged(folder, f"its {TABLE} does not say how {name} is sharded") from None
        return share if any(share.agreed[1]) else None  # replicas

    return share_of
