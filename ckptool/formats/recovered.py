"""The mark of a recovered file: what was lost, and what was filled in from elsewhere, so that no file passes for intact that is not.

In a zip it is a record that torch does not read; in a safetensors file, an entry of the metadata. It goes along into every file made
of this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.tree import Path, address
from ckptool.errors import counted, listed, printable

KEY = "ckptool.recovered"  # in the metadata of a checkpoint
RECORD = ".ckptool/recovered"  # below the root of a zip
CODE = "recovered-file"  # of the note
SCHEMA = "ckptool.recovered/1"
MAX_RECORD = 1 << 20
_NAMED = 1_000  # tensors; the rest is counted
_LONGEST = 200


def mark(lost: list[str], filled: list[str], before: str = "") -> str:
    """The mark for a file of which the tensors at these addresses were lost, or filled in. `before`: the mark that it had already."""
    known = facts(before)
    lost, filled = list(dict.fromkeys([*known["lost"], *lost])), list(dict.fromkeys([*known["filled"], *filled]))
    lost_count = known["lost_count"] + len(lost) - len(known["lost"])
    filled_count = known["filled_count"] + len(filled) - len(known["filled"])
    record = {
        "schema": SCHEMA,
        "lost_count": lost_count,
        "filled_count": filled_count,
        "lost": _few(lost),
        "filled": _few(filled),
    }
    return json.dumps(record, separators=(",", ":"))


def of_part(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The mark for a part of a checkpoint, as metadata: of the tensors below `path`, by their addresses in it. Empty if there are none."""
    if not isinstance(text := metadata.get(KEY), str):
        return {}
    if not path:
        return {KEY: text}
    said, above = facts(text), f"{address(path)}/"
    lost, filled = (
        [place.removeprefix(above) for place in said[kind] if place.startswith(above)] for kind in ("lost", "filled")
    )
    return {KEY: mark(lost, filled)} if lost or filled else {}


def of_parts(parts: Iterable[tuple[Mapping[str, Any], Path]]) -> dict[str, Any]:
    """The mark for what is made of several parts with the same names, each given with the metadata of its checkpoint."""
    found: dict[str, Any] = {}
    for metadata, path in parts:
        found = with_part(found, (), of_part(metadata, path))
    return found


def with_part(metadata: Mapping[str, Any], path: Path, part: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a checkpoint that gets a part with other metadata at `path`: its mark goes into the whole's."""
    if not isinstance(text := part.get(KEY), str):
        return dict(metadata)
    said, above = facts(text), f"{address(path)}/" if path else ""
    lost, filled = ([above + place for place in said[kind]] for kind in ("lost", "filled"))
    return {**metadata, KEY: mark(lost, filled, metadata.get(KEY, ""))}


def _few(names: list[str]) -> list[str]:
    return [name if len(name) <= _LONGEST else name[:_LONGEST] + "…" for name in names[:_NAMED]]


def facts(text: str) -> dict[str, Any]:
    """What a mark says: names and counts of what was lost and filled. A mark that cannot be read says nothing more than that it is one."""
    found: dict[str, Any] = {"lost": [], "filled": [], "lost_count": 0, "filled_count": 0}
    try:
        record = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return found
    if isinstance(record, dict):
        for key in ("lost", "filled"):
            names = record.get(key)
            found[key] = [name for name in names if type(name) is str] if isinstance(names, list) else []
            count = record.get(f"{key}_count")
            found[f"{key}_count"] = count if type(count) is int and count >= 0 else len(found[key])
    return found


def notes(metadata: dict[str, Any]) -> tuple[Note, ...]:
    """What one should know about a file with this metadata: nothing, unless it was recovered."""
    text = metadata.get(KEY)
    if not isinstance(text, str):
        return ()
    said = facts(text)
    parts = []
    for key, words in (("filled", "filled in from another file"), ("lost", "lost")):
        if said[f"{key}_count"]:
            names = listed([printable(name) for name in said[key][: said[f"{key}_count"]]], 3)
            parts.append(f"{counted(said[f'{key}_count'], 'tensor was', 'tensors were')} {words}: {names}")
    return (Note(CODE, f"recovered from a damaged file; {'; '.join(parts) or 'what was lost is not said'}"),)
