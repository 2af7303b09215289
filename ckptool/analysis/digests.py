"""Digests of tensors and of sets of them: equal digests mean equal values, whatever the container, strides or ties.

The digest of a tensor is the sha256 of its values as row-major little-endian bytes, conjugate and negative bits
applied. The digest of a root is the sha256 of one line for each tensor, `["fc.weight","f32",[10,64],"5f7a…"]` and a
line feed, in the order of their bytes: key, element type, shape, digest. A key that is no text is written so that it
cannot be taken for one: 0, null, true, {"bytes": "6162"}, {"float": "0x1.8p+0"}, {"tuple": [0, 1]}, {"object":
"torch.float32"}. A tensor below a nested container has the list of the keys that lead to it. Plain values are not part
of it.

A tensor that is made of others (quantized, sparse, …) is written as `"dtype": "sparse f32"`, and the digest is of a
text that says how it is made, with the digests of its parts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptool.checkpoint import Composite, FileRange, StorageRef, Tensor, TensorEntry
from ckptool.checkpoint.blocks import chunks, sha256_of
from ckptool.checkpoint.graph import structural_parts
from ckptool.checkpoint.nodes import MISSING, Global
from ckptool.checkpoint.numeric import resolve
from ckptool.checkpoint.numpy_arrays import LazyBytes
from ckptool.checkpoint.strided import row_major
from ckptool.checkpoint.tree import Path, address, storages, tensors
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Unsupported

SCHEMA = "ckptool.digests/1"
MAX_FILE = 512 << 20
# Views may show a byte many times over: so much more than what is stored is read for their sake.
_FREE_BYTES = 256 << 20
_TIMES_STORED = 4
_THREADS = 2


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A tensor of a root. key: as JSON has it (see above).  shape: None where only torch could say."""

    key: Any
    dtype: str
    shape: tuple[int, ...] | None
    sha256: str

    @property
    def line(self) -> str:
        return _json([self.key, self.dtype, self.shape, self.sha256])

    @property
    def name(self) -> str:
        """The key, for people."""
        return self.key if isinstance(self.key, str) else _json(self.key)


@dataclass(frozen=True)
class Digests:
    """The digests of the tensors of a root, in the order of their lines."""

    tensors: tuple[TensorDigest, ...]

    @cached_property
    def root(self) -> str:
        """The digest of them all."""
        return hashlib.sha256("".join(f"{tensor.line}\n" for tensor in self.tensors).encode()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


# Tensors --------------------------------------------------------------------------------------------------------------


def tensor_digest(tensor: Tensor) -> str:
    """The sha256, in hexadecimal, of a tensor's values. Reads them once, in bounded memory.

    Raises `Unsupported` for a negated view of a type that has no negative.
    """
    return _composite_digest(tensor) if isinstance(tensor, Composite) else _entry_digest(tensor)


def _entry_digest(entry: TensorEntry) -> str:
    data, flags = row_major(entry), entry.flags
    if not (flags.conj or flags.neg):
        return sha256_of(data).hexdigest()
    if entry.dtype.kind not in ("float", "complex"):
        raise Unsupported(f"a negated view of type {entry.dtype} has no values", "torch does not create such views.")
    total = hashlib.sha256()
    for raw in chunks(data, entry.dtype.itemsize, "raw"):
        total.update(resolve(raw, entry.dtype, flags).data)
    return total.hexdigest()


def _composite_digest(composite: Composite) -> str:
    """The digest of a text of all that a composite is made of: every value once, then by its number."""
    total = hashlib.sha256()
    numbers: dict[int, int] = {}
    stack: list[Any] = [composite.made]
    while stack:
        node = stack.pop()
        below = () if isinstance(node, (TensorEntry, StorageRef, Composite)) else tuple(structural_parts(node))
        if below or isinstance(node, (TensorEntry, StorageRef, Composite)):
            if id(node) in numbers:
                total.update(f"again {numbers[id(node)]}\n".encode())
                continue
            numbers[id(node)] = len(numbers)
        total.update(f"{_made_of(node, len(below))}\n".encode())
        stack += [node.made] if isinstance(node, Composite) else reversed(below)
    return total.hexdigest()


def _made_of(node: Any, parts: int) -> str:
    if isinstance(node, TensorEntry):
        return _json(["tensor", node.dtype.name, node.shape, _entry_digest(node)])
    if isinstance(node, StorageRef):
        return _json(["storage", node.dtype.name if node.dtype else None, sha256_of(node.storage.data).hexdigest()])
    if isinstance(node, LazyBytes):
        return _json(["bytes", sha256_of(node.data).hexdigest()])
    if node is MISSING:
        return "missing"
    return _json([type(node).__name__, parts]) if parts else _json(_key(node))


# Roots ----------------------------------------------------------------------------------------------------------------


def root_digest(root: Any) -> str:
    """The digest, in hexadecimal, of all tensors in a tree: the same for a `.pt` and the `.safetensors` made of it."""
    return root_digests(root).root


def root_digests(root: Any) -> Digests:
    """The digests of all tensors in a tree (as a rule, a dictionary of weights). Reads all values, by two threads.

    Raises `LimitExceeded` where views show far more than is stored.
    """
    found = list(tensors(root))
    made = [
        TensorDigest(path_key(path), dtype_name(tensor), tensor.shape, digest)
        for (path, tensor), digest in zip(found, path_digests(root, found), strict=True)
    ]
    return Digests(tuple(sorted(made, key=lambda digest: digest.line)))


def path_digests(root: Any, found: Sequence[tuple[Path, Tensor]]) -> list[str]:
    """The digests of these tensors of a tree, in their order; see `root_digests`."""
    _check_work(root, found)
    views: dict[Any, Tensor] = {_view(tensor): tensor for _, tensor in found}
    digests = dict(zip(views, _all(list(views.values())), strict=True))
    return [digests[_view(tensor)] for _, tensor in found]


def dtype_name(tensor: Tensor) -> str:
    """The element type, with the kind of tensor before it where it is no plain one."""
    name = tensor.dtype.name if tensor.dtype else "?"
    return name if isinstance(tensor, TensorEntry) else f"{tensor.kind} {name}"


def _view(tensor: Tensor) -> Any:
    """Equal for tensors that show the same bytes in the same way: they are read once."""
    if isinstance(tensor, Composite):
        return id(tensor)
    return tensor.view


def readable_bytes(tree: Any) -> int:
    """The most bytes of tensors' values that are read of a tree: some more than is stored."""
    return _FREE_BYTES + _TIMES_STORED * sum(storage.nbytes for storage in storages(tree))


def _check_work(root: Any, found: Sequence[tuple[Path, Tensor]]) -> None:
    left = readable_bytes(root)
    for path, tensor in found:
        left -= tensor.nbytes
        if left < 0:
            raise LimitExceeded(
                f"{address(path)} shows {tensor.nbytes:,} bytes, far more than is stored",
                "A digest covers every value of a tensor; an expanded one repeats a few stored values endlessly.",
                "Name another part: --at ADDRESS",
            )


def _all(wanted: Sequence[Tensor]) -> Iterator[str]:
    """The digest of each tensor. What lies in a file as it is is read by threads; what is gathered first, here."""
    plain = [isinstance(tensor, TensorEntry) and _is_plain(tensor) for tensor in wanted]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as pool:
        chosen = [tensor for tensor, alone in zip(wanted, plain, strict=True) if alone]
        batches = [chosen[at : at + 64] for at in range(0, len(chosen), 64)]
        later = (digest for batch in pool.map(_digests_of, batches) for digest in batch)
        for tensor, alone in zip(wanted, plain, strict=True):
            yield next(later) if alone else tensor_digest(tensor)


def _is_plain(entry: TensorEntry) -> bool:
    return entry.is_contiguous and isinstance(entry.storage.data, FileRange)


def _digests_of(batch: Sequence[Tensor]) -> list[str]:
    return [tensor_digest(tensor) for tensor in batch]


def path_key(path: Path) -> Any:
    """A key as JSON; of a path of several, the list of them."""
    return _key(path[0]) if len(path) == 1 else [_key(segment) for segment in path]


def _key(key: Any) -> Any:
    if key is None or type(key) in (str, int, bool):
        return key
    if type(key) is tuple:
        return {"tuple": [_key(part) for part in key]}
    if type(key) is float:
        return {"float": key.hex()}
    if isinstance(key, (bytes, bytearray)):
        return {"bytes": bytes(key).hex()}
    return {"object": str(key) if type(key) is Global else repr(key)}


# Digests in a file ----------------------------------------------------------------------------------------------------


def digests_file(digests: Digests) -> bytes:
    """The digests as a JSON file: one tensor a line, the same bytes for the same tensors."""
    lines = ",\n".join(f"  {tensor.line}" for tensor in digests.tensors)
    body = f"[\n{lines}\n ]" if lines else "[]"
    return f'{{"schema": "{SCHEMA}",\n "root": "{digests.root}",\n "tensors": {body}\n}}\n'.encode()


def read_digests(content: bytes, name: str) -> Digests:
    """The digests in a file of `digests_file`; `name` is what to call it.

    Raises `Unsupported` for a file of another version or kind, `Corrupt` where it was damaged: its own root digest
    covers all of it.
    """
    try:
        record = json.loads(content)
        schema = record["schema"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _no_digests(name, "It is not a JSON object with a schema.") from None
    if schema != SCHEMA:
        version = re.fullmatch(r"ckptool\.digests/(\d+)", schema) if isinstance(schema, str) else None
        if version is None:
            raise _no_digests(name, f"Its schema is {str(schema)[:60]}.")
        raise Unsupported(
            f"{name} holds digests of version {version[1][:20]}",
            f"This version of ckptool reads {SCHEMA}.",
            "Create it again: ckptool verify FILE --write-digest DIGESTS",
        )
    digests = Digests(tuple(_checked(record.get("tensors"), name)))
    if digests.root != record.get("root"):
        raise Corrupt(
            f"{name} does not match its own root digest", "The file of digests itself was changed or damaged."
        )
    return digests


def _no_digests(name: str, why: str) -> CkptoolError:
    return Unsupported(
        f"{name} is not a file of digests", why, "Create one: ckptool verify FILE --write-digest DIGESTS"
    )


def _checked(rows: Any, name: str) -> Iterable[TensorDigest]:
    for row in rows if isinstance(rows, list) else ():
        try:
            key, dtype, shape, digest = row
            sizes = None if shape is None else tuple(shape)
        except (ValueError, TypeError):
            raise Corrupt(f"{name}: a line is damaged: {str(row)[:80]}") from None
        if type(dtype) is not str or type(digest) is not str or not re.fullmatch("[0-9a-f]{64}", digest):
            raise Corrupt(f"{name}: a line is damaged: {str(row)[:80]}")
        yield TensorDigest(key, dtype, sizes, digest)


@dataclass(frozen=True, slots=True)
class Compared:
    """A root against digests that were kept. Names of tensors: (name, difference), those gone, and new ones."""

    differing: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not (self.differing or self.missing or self.new)


def compare_digests(kept: Digests, found: Digests) -> Compared:
    """The differences from digests that were kept, each with its aspect (`values`, `shape [2] → [3]`, …)."""
    old = {_json(tensor.key): tensor for tensor in kept.tensors}
    new = {_json(tensor.key): tensor for tensor in found.tensors}
    differing = [
        (tensor.name, _difference(old[key], tensor)) for key, tensor in new.items() if key in old and old[key] != tensor
    ]
    return Compared(
        tuple(differing),
        tuple(tensor.name for key, tensor in old.items() if key not in new),
        tuple(tensor.name for key, tensor in new.items() if key not in old),
    )


def _difference(old: TensorDigest, new: TensorDigest) -> str:
    facts = []
    if old.dtype != new.dtype:
        facts.append(f"type {old.dtype} → {new.dtype}")
    if old.shape != new.shape:
        facts.append(f"shape {list(old.shape or ())} → {list(new.shape or ())}")
    return ", ".join(facts) or "values"
