"""Records of ours in other formats' files: storages that are equal and not tied, and the mark of a recovered file.

0.1.0 stored equal storages once. Torch would tie them, so a record that it does not read says which tensors belong to
which storage: `[[["a", "b"], ["c"]], …]`, for each piece of data the storages on it, each as the addresses of its
tensors. They are separate when they are read, and so when they are written.

The mark says what was lost, and what 0.1.0 filled in from elsewhere, so that no file passes for intact that is not. It
goes along into every file made of this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from ckptool.checkpoint import Note, Storage, TensorEntry
from ckptool.checkpoint.nodes import items
from ckptool.checkpoint.tree import Path, address, rebuild, walk
from ckptool.errors import Corrupt, counted, listed

PICKLE = "ckptool.pickle"  # in the metadata of safetensors: see `whole_tree`
OLD_TREE = "ckptool"  # in that of 0.1.0: see `old_records`
DEDUPLICATED = "ckptool.twins"  # in the metadata of safetensors: ties that are none, though their bytes are stored once
DEDUPLICATED_RECORD = ".ckptool/twins"  # below the root of a zip
MAX_DEDUPLICATED = 64 << 20  # bytes


def separated(tree: Any, record: bytes) -> tuple[Any, list[Note]]:
    """The tree in which the storages that a record names are separate again, and a note on them.

    Raises `Corrupt` for a record of another shape. Addresses that lead to no tensor are passed over: it is gone.
    """
    owner: dict[Any, tuple[int, int]] = {}
    try:
        for number, group in enumerate(json.loads(record)):
            owner |= {place: (number, index) for index, names in enumerate(group) for place in names}
        if not all(type(place) is str for place in owner):
            raise TypeError
    except (ValueError, TypeError, RecursionError) as error:
        raise Corrupt("its record of deduplicated storages is damaged", "ckptool did not write it.") from error
    separate: dict[tuple[int, int, int], Storage] = {}
    entries: dict[int, TensorEntry] = {}
    for path, node in walk(tree):
        if isinstance(node, TensorEntry) and (member := owner.get(address(path))) is not None:
            storage = separate.setdefault((id(node.storage), *member), node.storage.alone())
            entries.setdefault(id(node), node.with_storage(storage))
    if not entries:
        return tree, []
    count = f"{counted(len(separate), 'storage is', 'storages are')} stored as {len({old for old, _, _ in separate}):,}"
    note = Note("new-ties", f"{count}, since they are equal: ckptool keeps them separate, stock torch.load ties them")
    return rebuild(tree, lambda node: entries.get(id(node), node)), [note]


def noted(code: str, names: Iterable[object], one: str, many: str, about: str, fix: tuple[str, ...] = ()) -> list[Note]:
    """The note on several things of one kind, if there are any: how many, in words with their verb, and the first."""
    things = list(names)
    return [Note(code, f"{counted(len(things), one, many)} {about}: {listed(things, 3)}", fix)] if things else []


# Codes of the notes on what was chosen among the values of several ranks, or among several checkpoints, or may be
# missing: they are also printed where a file is made of it.
OTHER_TAGS, WEIGHTS_BESIDE, OTHER_ADAPTERS = "other-tags", "weights-beside", "other-adapters"
CHOSEN = (
    *(OTHER_TAGS, "replicas-differ", "replicas-not-compared", "ranks-differ", "common-collides", "steps-differ"),
    *("no-optimizer-files", "no-buffers", "sizes-from-pieces", WEIGHTS_BESIDE, OTHER_ADAPTERS),
)

# Recovered files -----------------------------------------------------------------------------------------------------

RECOVERED = "ckptool.recovered"  # in the metadata of a checkpoint
RECOVERED_RECORD = ".ckptool/recovered"  # below the root of a zip
RECOVERED_NOTE = "recovered-file"  # its code
SCHEMA = "ckptool.recovered/1"
MAX_RECORD = 1 << 20
MOST, _LONGEST = 1_000, 200  # addresses of one kind that are kept, and characters of each


def recovered_mark(lost: Iterable[str], before: str = "") -> str:
    """The mark of a file whose tensors at these addresses were lost. before: the mark that it had."""
    names = islice(dict.fromkeys([*lost_by(before), *lost]), MOST)
    short = [name if len(name) <= _LONGEST else name[:_LONGEST] + "…" for name in names]
    return json.dumps({"schema": SCHEMA, "lost": short, "filled": []}, separators=(",", ":"))


def recovered(
    metadata: Mapping[str, Any], at: Path = (), to: Path = (), before: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The mark for what was at one address of a checkpoint with this metadata, as metadata of one that has it at `to`.

    Joined to the mark that this has before; empty where nothing of it was lost.
    """
    if not isinstance(text := metadata.get(RECOVERED), str):
        return {}
    old, new = f"{address(at)}/" if at else "", f"{address(to)}/" if to else ""
    lost = [new + place.removeprefix(old) for place in lost_by(text) if place.startswith(old)]
    return {RECOVERED: recovered_mark(lost, before.get(RECOVERED, ""))} if lost or not at else {}


def lost_by(mark: str) -> list[str]:
    """The addresses of lost tensors in a mark, and of those that 0.1.0 filled in from elsewhere; none in one that
    cannot be read."""
    try:
        record = json.loads(mark) if mark else {}
    except (ValueError, RecursionError):
        record = {}
    lists = [record.get(kind) for kind in ("lost", "filled")] if isinstance(record, dict) else []
    return [place for places in lists for place in items(places) if type(place) is str]


def recovered_notes(metadata: Mapping[str, Any]) -> tuple[Note, ...]:
    """The note on a file with this metadata, if it was recovered."""
    if not isinstance(text := metadata.get(RECOVERED), str):
        return ()
    places = lost_by(text)
    were = "tensors or more were" if len(places) >= MOST else "tensors were"
    lost = f"{counted(len(places), 'tensor was', were)} lost: {listed(places, 3)}" if places else ""
    what = lost or "what was lost was not recorded"
    return (Note(RECOVERED_NOTE, f"recovered from a damaged file; {what}"),)


def omitted_notes(metadata: Mapping[str, Any], origin: str) -> tuple[Note, ...]:
    """The note on metadata strings of safetensors that what is written of it cannot hold."""
    names = listed(sorted(metadata.keys() - {"format", PICKLE, RECOVERED}), 3)
    return (Note("metadata-left", f"{origin} has metadata strings that are left out: {names}"),) if names else ()
