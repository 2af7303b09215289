"""Reports as JSON: one object with a versioned schema, strictly valid, stable from run to run.

NaN and infinities are texts; what is not ASCII is escaped, so no control character of a file passes raw. Keys are in the order below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Composite, Note, Tensor, TensorEntry
from ckptool.errors import CkptoolError, printable
from ckptool.nodes import Object
from ckptool.plain import summary, to_json
from ckptool.reports.parts import parts
from ckptool.tree import Path, address

if TYPE_CHECKING:
    from ckptool.reports.diff import Change, Diff
    from ckptool.verbs.inspect import Inspection
    from ckptool.verbs.saving import Written
    from ckptool.verbs.show import Shown

Json = dict[str, Any]


def dumps(value: Any) -> str:
    """The one way in which everything here is written."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def finite(value: Any) -> Any:
    """Plain facts with NaN and infinities as the texts "NaN", "Infinity", "-Infinity", and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def inspection_json(found: Inspection) -> Json:
    """`ckptool.inspect/1`: every tensor and entry with its path; sizes in bytes."""
    listing = found.listing
    tensors = []
    for row in listing.tensors:
        fact = tensor_json(row.path, row.tensor, row.storage)
        if found.statistics and (numbers := found.statistics.get(row.address)) is not None:
            fact["statistics"] = finite(asdict(numbers))
        tensors.append(fact)
    return {
        "schema": "ckptool.inspect/1",
        "file": listing.file,
        "container": listing.container,
        "bytes": listing.bytes,
        "at": listing.at,
        "tensor_bytes": listing.tensor_bytes,
        "storages": listing.storages,
        "metadata": to_json(listing.metadata),
        "roots": [
            {
                "path": path_json(part.root.path),
                "kind": part.root.kind,
                "detail": part.root.detail,
                "tensors": len(part.rows),
                "elements": part.elements,
                "bytes": part.bytes,
                "dtypes": list(part.dtypes),
                "locations": list(part.locations),
            }
            for part in parts(listing)
        ],
        "tensors": tensors,
        "entries": [
            {"path": path_json(row.path), "type": type_name(row.value), "value": to_json(row.value)}
            for row in listing.entries
        ],
        "notes": notes_json(found.notes),
    }


def tensor_json(path: Path, tensor: Tensor, storage: int | None) -> Json:
    """One tensor: shape, stride and offset count elements, `nbytes` its values; a composite has a `kind` and no stride."""
    fact: Json = {
        "path": path_json(path),
        "dtype": tensor.dtype.name if tensor.dtype else None,
        "shape": None if tensor.shape is None else list(tensor.shape),
    }
    if isinstance(tensor, TensorEntry):
        fact |= {
            "stride": list(tensor.stride),
            "offset": tensor.offset,
            "location": tensor.location,
            "storage": storage,
        }
        fact |= {"nbytes": tensor.nbytes}
        fact |= {name: True for name, value in tensor.flags._asdict().items() if value} if any(tensor.flags) else {}
        return fact
    parts = {"stride": None, "offset": None, "location": tensor.location, "storage": None}
    return fact | parts | {"nbytes": tensor.nbytes, "kind": tensor.kind}


def path_json(path: Path) -> list[Any]:
    """A path as a list: texts and integers as they are, other keys as texts."""
    return [segment if type(segment) in (str, int) else summary(segment, 1_000) for segment in path]


def notes_json(notes: Iterable[Note]) -> list[Json]:
    return [{"code": note.code, "message": note.message, "fix": list(note.fix)} for note in notes]


def type_name(value: Any) -> str:
    """What kind of value an entry is: `int`, `dict`, `argparse.Namespace`."""
    return printable(value.name) if isinstance(value, Object) else type(value).__name__


def shown_json(shown: Shown) -> Json:
    """`ckptool.show/1`: a tensor with its values as nested lists (none where only the corners were read), or a value."""
    head: Json = {"schema": "ckptool.show/1", "file": shown.file, "address": shown.address}
    entry = shown.entry
    if not isinstance(entry, (TensorEntry, Composite)):
        return head | {"type": type_name(entry), "value": to_json(entry)}
    head |= {"tensor": tensor_json((), entry, None), "slice": shown.slice, "truncated": shown.edges}
    del head["tensor"]["path"], head["tensor"]["storage"]
    return head | {"values": None if shown.values is None or shown.edges else values_json(shown.values)}


def values_json(values: Any) -> Any:
    """A numpy array as nested lists; complex numbers as [real, imaginary], bf16 and float8 as numbers."""
    if values.dtype.kind == "V":
        values = values.astype("f4")
    if values.dtype.kind != "c":
        return finite(values.tolist())
    import numpy

    return finite(numpy.stack([values.real, values.imag], axis=-1).tolist())


def diff_json(found: Diff) -> Json:
    """`ckptool.diff/1`: the verdict, what it rests on, and every difference."""
    return {
        "schema": "ckptool.diff/1",
        "left": found.left,
        "right": found.right,
        "same": found.same,
        "evidence": found.evidence,
        "tensors": found.tensors,
        "equal": found.equal,
        "changed": [_change_json(change) for change in found.changed],
        "only_left": [_only_json(path, node) for path, node in found.only_left],
        "only_right": [_only_json(path, node) for path, node in found.only_right],
        "ties": [{"side": side, "names": list(names)} for side, names in found.ties],
        "order": list(found.order_differs),
        "ignored": list(found.ignored),
        "not_compared": list(found.not_compared),
        "remarks": list(found.remarks),
    }


def _change_json(change: Change) -> Json:
    aspects = {
        name: None if name == "values" else [_aspect(name, side) for side in sides]
        for name, sides in change.aspects.items()
    }
    values = None if change.values is None else finite(asdict(change.values))
    return {"path": path_json(change.path), "address": change.address, "aspects": aspects, "values": values}


def _aspect(name: str, value: Any) -> Any:
    if name == "value":
        return to_json(value)
    if isinstance(value, (tuple, list)):
        return list(value)
    return value if value is None or isinstance(value, (bool, str)) else str(value)


def _only_json(path: Path, node: Any) -> Json:
    fact: Json = {"path": path_json(path), "address": address(path)}
    if isinstance(node, (TensorEntry, Composite)):
        shape = None if node.shape is None else list(node.shape)
        return fact | {"dtype": node.dtype.name if node.dtype else None, "shape": shape, "nbytes": node.nbytes}
    return fact | {"type": type_name(node)}


def written_json(written: Written) -> Json:
    """`ckptool.written/1`: what a verb wrote, or would write."""
    return {
        "schema": "ckptool.written/1",
        "verb": written.verb,
        "file": written.file,
        "output": written.output,
        "container": written.container,
        "how": written.how,
        "dry_run": written.dry_run,
        "verified": written.verified,
        "bytes_written": written.bytes_written,
        "file_bytes": written.file_bytes,
        "summary": written.summary,
        "facts": finite(written.facts),
        "details": list(written.details),
        "notes": notes_json(written.notes),
    }


def results_json(results: Sequence[Json]) -> Json:
    """One result as it is; several as `ckptool.results/1`."""
    return results[0] if len(results) == 1 else {"schema": "ckptool.results/1", "results": list(results)}


def error_json(error: CkptoolError, done: Sequence[Json] = ()) -> Json:
    """`ckptool.error/1`: the three parts and the code; `done`: what was finished before."""
    facts = {"schema": "ckptool.error/1", "code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    return facts | ({"done": list(done)} if done else {})
