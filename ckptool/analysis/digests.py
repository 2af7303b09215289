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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from ckptool.checkpoint import Composite, FileRange, StorageRef, Tensor, TensorEntry
from ckptool.checkpoint.arrays import fold
from ckptool.checkpoint.blocks import sha256_of
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.graph import structural_parts
from ckptool.checkpoint.nodes import MISSING, Global
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.checkpoint.progress import reading
from ckptool.checkpoint.tree import Path, address, storages, tensors
from ckptool.commands import ADDRESS, FILE, Slot, arg, command
from ckptool.errors import Corrupt, LimitExceeded, Unsupported
from ckptool.facts import dataclass
from ckptool.formats import PathLike

SCHEMA = "ckptool.digests/1"
MAX_FILE = 512 << 20
# Views may show a byte many times: for them, so much more than what is stored is read.
_FREE_BYTES = 256 << 20
_TIMES_STORED = 4
_THREADS, _BATCH = 2, 64


class TensorDigest(NamedTuple):
    """A tensor of a root. key: as JSON has it; of one below a nested container the list of the keys that lead to it.
    shape: null where only torch could say.  sha256: of its values."""

    key: Any
    dtype: str
    shape: tuple[int, ...] | None
    sha256: str

    def line(self) -> str:
        return _json(self)

    def name(self) -> str:
        """The key, for people."""
        return self.key if isinstance(self.key, str) else _json(self.key)


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of the tensors of a root, in the order of their lines.
    at: the address of the root.  remark: why that one was taken, where there were others.  root: the digest of all."""

    at: str
    remark: str
    root: str
    tensors: tuple[TensorDigest, ...]


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def table(tensors: Iterable[TensorDigest], at: str = "", remark: str = "") -> Digests:
    """The digests of a root, in this order, with the digest of them all."""
    rows = tuple(tensors)
    root = hashlib.sha256("".join(f"{row.line()}\n" for row in rows).encode()).hexdigest()
    return Digests(at, remark, root, rows)


# Tensors --------------------------------------------------------------------------------------------------------------


def root_digests(root: Any, at: str = "", remark: str = "") -> Digests:
    """The digests of all tensors in a tree (as a rule, a dictionary of weights): the same for a `.pt` and the
    `.safetensors` made of it. Reads all values; see `tensor_digests`."""
    return table(sorted(tensor_digests(root, list(tensors(root))), key=TensorDigest.line), at, remark)


def tensor_digests(root: Any, pairs: Sequence[tuple[Path, Tensor]]) -> list[TensorDigest]:
    """The digests of these tensors of a tree, in their order. Contiguous data in a file is read by two threads.
    Raises `LimitExceeded` where views show far more than is stored."""
    allowance = readable_bytes(root)
    views: dict[Any, Tensor] = {}  # tensors that are the same view are read once
    for path, tensor in pairs:
        allowance -= tensor.nbytes
        if allowance < 0:
            what = f"{address(path)} shows {tensor.nbytes:,} bytes, far more than are stored"
            why = "A digest covers every value of a tensor; an expanded one repeats a few stored values endlessly."
            raise LimitExceeded(what, why, f"Name another part: {arg(at=ADDRESS)}")
        views[_view(tensor)] = tensor
    entries = [(key, tensor) for key, tensor in views.items() if isinstance(tensor, TensorEntry)]
    plain = [key for key, tensor in entries if tensor.is_contiguous and isinstance(tensor.storage.data, FileRange)]
    batches = [[views[key] for key in plain[at : at + _BATCH]] for at in range(0, len(plain), _BATCH)]
    nbytes = sum(tensor.nbytes for tensor in views.values())
    with reading(nbytes), ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as pool:
        digest_batches = pool.map(lambda batch: [*map(tensor_digest, batch)], batches)
        batched = set(plain)
        digests = {key: tensor_digest(tensor) for key, tensor in views.items() if key not in batched}
        digests |= zip(plain, (digest for batch in digest_batches for digest in batch), strict=True)
    rows = []
    for path, tensor in pairs:  # a composite has its kind before its element type
        dtype = tensor.dtype.name if tensor.dtype else "?"
        dtype = dtype if isinstance(tensor, TensorEntry) else f"{tensor.kind} {dtype}"
        keys = [_key_json(segment) for segment in path]
        rows.append(TensorDigest(keys[0] if len(keys) == 1 else keys, dtype, tensor.shape, digests[_view(tensor)]))
    return rows


def readable_bytes(tree: Any) -> int:
    """The most bytes of tensors' values that are read from a tree: somewhat more than is stored."""
    return _FREE_BYTES + _TIMES_STORED * sum(storage.nbytes for storage in storages(tree))


def _view(tensor: Tensor) -> Any:
    return id(tensor) if isinstance(tensor, Composite) else tensor.view


def tensor_digest(tensor: Tensor) -> str:
    """The sha256, in hexadecimal, of a tensor's values. Reads them once, in bounded memory.
    Raises `Unsupported` for a negated view of a type that has no negative."""
    sha256 = hashlib.sha256()
    if isinstance(tensor, Composite):  # the digest of a text that lists its parts: each once, then by its number
        numbers: dict[int, int] = {}
        stack: list[Any] = [tensor.made]
        while stack:
            node = stack.pop()
            is_data = isinstance(node, (TensorEntry, StorageRef, Composite))
            parts = () if is_data else tuple(structural_parts(node))
            if (parts or is_data) and id(node) in numbers:
                sha256.update(f"again {numbers[id(node)]}\n".encode())
                continue
            if parts or is_data:
                numbers[id(node)] = len(numbers)
            if isinstance(node, TensorEntry):
                facts: Any = ["tensor", node.dtype.name, node.shape, tensor_digest(node)]
            elif isinstance(node, StorageRef):
                facts = ["storage", node.dtype.name if node.dtype else None, sha256_of(node.storage.data).hexdigest()]
            elif isinstance(node, LongValue):
                facts = ["bytes", sha256_of(node.data).hexdigest()]
            else:
                facts = [type(node).__name__, len(parts)] if parts else _key_json(node)
            sha256.update(b"missing\n" if node is MISSING else f"{_json(facts)}\n".encode())
            stack += [node.made] if isinstance(node, Composite) else reversed(parts)
        return sha256.hexdigest()
    if not any(tensor.flags.lazy):
        return sha256_of(tensor.row_major()).hexdigest()
    if tensor.dtype.kind not in ("float", "complex"):
        raise Unsupported(f"a negated view of type {tensor.dtype} has no values", "torch does not create such views.")
    fold(lambda _, raw: sha256.update(raw.data), tensor)
    return sha256.hexdigest()


def _key_json(key: Any) -> Any:
    if key is None or type(key) in (str, int, bool):
        return key
    if type(key) is tuple:
        return {"tuple": [_key_json(part) for part in key]}
    if type(key) is float:
        return {"float": key.hex()}
    if isinstance(key, (bytes, bytearray)):
        return {"bytes": bytes(key).hex()}
    return {"object": str(key) if type(key) is Global else repr(key)}


# Digests in a file ----------------------------------------------------------------------------------------------------


def digests_file(digests: Digests) -> bytes:
    """The digests as a JSON file: one tensor a line, the same bytes for the same tensors."""
    lines = ",\n".join(f"  {tensor.line()}" for tensor in digests.tensors)
    body = f"[\n{lines}\n ]" if lines else "[]"
    return f'{{"schema": "{SCHEMA}",\n "root": "{digests.root}",\n "tensors": {body}\n}}\n'.encode()


def read_digests(file: PathLike) -> Digests:
    """The digests in a file that `digests_file` made.
    Raises `Unsupported` for a file of another version or kind, `Corrupt` where it was damaged: its own root digest
    covers all of it."""
    source = Source(file)
    if source.size > MAX_FILE:
        raise LimitExceeded(f"{source}: {source.size:,} bytes of digests", f"ckptool reads at most {MAX_FILE:,}.")
    record: Any = None
    schema: str | None = None
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        record = json.loads(source.read(0, source.size))
        schema = str(record["schema"])[:60]
    if schema != SCHEMA:
        what = f"{source} is not a file of digests, or has an unsupported version"
        why = f"Its schema is {schema}, not {SCHEMA}." if schema else "It is not a JSON object with a `schema`."
        raise Unsupported(what, why, f"Create one: {command('verify', FILE, write_digest=Slot('DIGESTS'))}")
    with suppress(ValueError, KeyError, TypeError):
        rows = map(TensorDigest._make, record["tensors"])
        digests = table(row._replace(shape=None if row.shape is None else tuple(row.shape)) for row in rows)
        if digests.root == record["root"]:
            return digests
    raise Corrupt(f"{source} does not match its own root digest", "The file of digests itself was changed or damaged.")


class Differing(NamedTuple):
    """A tensor whose digest is another. how: `values`, `shape [2] → [3]`, …"""

    key: str
    how: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A root against digests that were kept in a file. missing, new: names of tensors."""

    file: str
    differing: tuple[Differing, ...]
    missing: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not (self.differing or self.missing or self.new)


def compared(file: str, expected: Digests, digests: Digests) -> Compared:
    """The differences from the expected digests, which a file kept."""
    old, new = ({_json(tensor.key): tensor for tensor in side.tensors} for side in (expected, digests))
    differing = []
    for key, after in new.items():
        if (before := old.get(key, after)) != after:
            how = [f"type {before.dtype} → {after.dtype}"] if before.dtype != after.dtype else []
            shapes = f"shape {list(before.shape or ())} → {list(after.shape or ())}"
            how += [shapes] if before.shape != after.shape else []
            differing.append(Differing(after.name(), ", ".join(how) or "values"))
    missing, added = ([one[key].name() for key in one if key not in other] for one, other in ((old, new), (new, old)))
    return Compared(file, tuple(differing), tuple(missing), tuple(added))
