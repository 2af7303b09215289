"""`ckptool.json` beside the files of a folder: what its container has no place for, and ckptool gives back on reading.

One JSON object, `{"schema": "ckptool.sidecar/1", …}`; the loaders of libraries pass it over. Folders of shards keep the
`_metadata` of a state dict in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.errors import LimitExceeded, Unsupported, is_text
from ckptool.formats.strict_json import parse_object

NAME = "ckptool.json"
SCHEMA = "ckptool.sidecar/1"
METADATA = "_metadata"
MAX_SIDECAR = 64 << 20  # bytes


def read(folder: Folder) -> dict[str, Any]:
    """The facts in the side-car of a folder; none where there is no such file.

    Raises `Corrupt` or `Ambiguous` for a damaged one, `Unsupported` for one of another version, `LimitExceeded`.
    """
    if NAME not in folder:
        return {}
    source = folder.open(NAME)
    if source.size > MAX_SIDECAR:
        raise LimitExceeded(f"{source} has {source.size:,} bytes", f"At most {MAX_SIDECAR:,} are read.")
    facts = parse_object(source.read(0, source.size), str(source))
    if facts.get("schema") != SCHEMA:
        what = f"{source} is of the version {str(facts.get('schema'))[:60]}"
        raise Unsupported(what, f"This version reads {SCHEMA}.", "Move the file away to read the folder without it.")
    return facts


def written(facts: Mapping[str, Any]) -> InlineBytes:
    """The bytes of a side-car with these facts, which have to be JSON."""
    return InlineBytes(json.dumps({"schema": SCHEMA, **facts}, indent=1, ensure_ascii=False).encode() + b"\n")


def holds(metadata: Any) -> bool:
    """True for the `_metadata` of a state dict as torch writes it: names of modules, each with plain facts."""
    return isinstance(metadata, dict) and all(
        type(name) is str
        and is_text(name)
        and type(facts) is dict
        and all(type(key) is str and is_text(key) and type(value) in (int, bool) for key, value in facts.items())
        for name, facts in metadata.items()
    )


def with_metadata(tree: Any, facts: Mapping[str, Any]) -> Any:
    """The dictionary with the `_metadata` that a side-car keeps; the same where it keeps none."""
    found = facts.get(METADATA)
    if not found or not holds(found) or not isinstance(tree, dict):
        return tree
    return OrderedDict(tree, {METADATA: OrderedDict(found)})
