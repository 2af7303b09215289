"""A tensor in pieces: a shape, and what fills it, as the ranks of a distributed run saved it.

Every engine's folder is read as this. A piece is a strided range of bytes of a file, at some offsets in the whole
tensor. Pieces may be empty, come in any order, and repeat: replicas, which have to agree. Those of a flat vector (ZeRO)
are pieces of the tensor in one dimension.

Row-major bytes are assembled on demand: a read touches the pieces in its range alone, and memory holds no more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any, Protocol

from ckptool.checkpoint import (
    NO_FLAGS,
    Checkpoint,
    Computed,
    FileRange,
    InlineBytes,
    Note,
    Storage,
    TensorEntry,
    row_major_strides,
)
from ckptool.checkpoint.dtypes import DType, by_name, has_numbers
from ckptool.checkpoint.files import Folder, Source
from ckptool.checkpoint.strided import row_major
from ckptool.errors import Corrupt, Unsupported, counted
from ckptool.facts import dataclass, field, replace
from ckptool.formats.folder import another_run, mixed, refuse_renamed
from ckptool.formats.marks import noted
from ckptool.pickles.calls import UNKNOWN, uses

DIFFERENT, NOT_COMPARED = "replicas-differ", "replicas-not-compared"  # of the notes
MAX_SPLIT = 8  # axes along which one tensor is divided
# Names of tensors that are the same on all ranks, or divided; and of numbers that count the steps of a run.
DIVIDED = frozenset(("weight", "bias", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"))
STEPS = frozenset("step global_step global_steps iteration epoch last_epoch _step_count".split())
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset of a block on every axis, and its sizes."""


class Original(Protocol):
    """A tensor that was read in full. begin: where its bytes begin, from its place by the table; those of others like
    it begin as far from theirs."""

    @property
    def entry(self) -> TensorEntry: ...
    @property
    def begin(self) -> int: ...


class Stored:
    """A tensor like the original's, in other bytes of a file. There may be hundreds of thousands, so its entry is made
    once, when it is asked for, and then takes the place of the original.
    at: its place by the table, whose number it shares: one of its own is 32 bytes.  crc: of its bytes."""

    __slots__ = ("at", "crc", "file", "original")

    def __init__(self, original: Original, file: Source, at: int, crc: int) -> None:
        self.file, self.at, self.crc = file, at, crc
        self.original: Original | TensorEntry = original

    @property
    def like(self) -> TensorEntry:
        return self.original if isinstance(self.original, TensorEntry) else self.original.entry

    @property
    def entry(self) -> TensorEntry:
        if not isinstance(self.original, TensorEntry):
            like = self.original.entry
            place = FileRange(self.file, self.at + self.original.begin, like.storage.nbytes)
            self.original = like.with_storage(Storage(place, like.location, self.crc))
        return self.original


@dataclass(slots=True, eq=False)
class Piece:
    """A tensor that is a block of a larger one; `offsets`: where it begins in that, in elements.

    owner: who saved it, for people (`rank 3`).  replicas: blocks of the same place by others, to be compared with it.
    """

    tensor: TensorEntry | Stored
    offsets: tuple[int, ...]
    owner: str = "a block"
    replicas: tuple[Piece, ...] = ()

    @property
    def entry(self) -> TensorEntry:
        return self.tensor if isinstance(self.tensor, TensorEntry) else self.tensor.entry

    @property
    def like(self) -> TensorEntry:
        """A tensor of its type, shape and strides."""
        return self.tensor if isinstance(self.tensor, TensorEntry) else self.tensor.like

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for pieces that are the same values at the same place."""
        tensor = self.tensor.view if isinstance(self.tensor, TensorEntry) else id(self.tensor)
        return self.offsets, tensor, len(self.replicas)

    @property
    def box(self) -> Box:
        return self.offsets, self.like.shape

    def part(self, box: Box) -> TensorEntry:
        """The part of it that is in a box which lies within it."""
        entry = self.entry
        steps = zip(box[0], self.offsets, entry.stride, strict=True)
        return replace(entry, shape=box[1], offset=entry.offset + sum((lo - at) * step for lo, at, step in steps))


def overlap(one: Box, other: Box) -> Box | None:
    """The overlap of two boxes; None without one."""
    edges = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(*one, *other, strict=True)]
    if any(lo >= hi for lo, hi in edges):
        return None
    return tuple(lo for lo, _ in edges), tuple(hi - lo for lo, hi in edges)


class Vector:
    """Vectors of one dimension, each with who saved it, read as one. `length`: of all of them together."""

    __slots__ = ("begins", "length", "vectors")

    def __init__(self, vectors: Iterable[tuple[TensorEntry, str]]) -> None:
        self.vectors = list(vectors)
        *self.begins, self.length = accumulate((entry.shape[0] for entry, _ in self.vectors), initial=0)

    def cut(self, begin: int, length: int, at: int = 0) -> Iterator[Piece]:
        """The `length` elements from `begin`, fewer where the vector ends, as pieces of a vector in which they follow
        each other from `at`; an empty piece of nothing."""
        for number in range(max(0, bisect_right(self.begins, begin) - 1), len(self.vectors)):
            entry, owner = self.vectors[number]
            skip = begin - self.begins[number]
            count = max(0, min(length, entry.shape[0] - skip))
            if count or not length:
                yield Piece(entry.narrow(0, skip, count).with_flags(NO_FLAGS), (at,), owner)
            begin, length, at = begin + count, length - count, at + count
            if not length:
                return


@dataclass(slots=True, eq=False)
class Joiner:
    """Puts together what the ranks of a run saved in a folder: opens their files, and makes whole tensors of pieces.

    where: what messages call the folder.  discarded: what is not inert in its files.
    different: names of which the ranks saved values of their own where one was expected, and whose was taken.
    unequal: those of them that each rank saved whole.  untied: the files that do not say of which step they are.
    """

    folder: Folder
    where: str = ""
    notes: list[Note] = field(default_factory=list)
    discarded: list[Any] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)
    unequal: set[str] = field(default_factory=set)
    untied: list[str] = field(default_factory=list)
    not_compared: dict[str, None] = field(default_factory=dict)
    _joined: dict[Any, tuple[tuple[list[Piece], TensorEntry], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.where = self.where or str(self.folder)

    def open(self, name: str, below: Folder | None = None) -> Checkpoint:
        """The checkpoint in a file of the folder, or of one below it. Raises `Conflict` for another rank's file by this
        name, and whatever opening it raises."""
        from ckptool.formats import read_alone

        checkpoint = read_alone((below or self.folder).open(name))
        refuse_renamed(checkpoint)
        self.discarded += checkpoint.discarded
        if any(use.verdict == UNKNOWN for use in uses(checkpoint.tree)):
            self.discarded.append(checkpoint.tree)
        return checkpoint

    def checkpoint(self, container: str, tree: Any, engine: str, ranks: int, step: Any = None) -> Checkpoint:
        """The joined checkpoint, which `engine` wrote on so many ranks at this step, where that is a number."""
        facts = {"engine": engine, "ranks": ranks} | ({"step": step} if type(step) is int else {})
        notes = (*self.notes, *self.notes_of_replicas())
        aside, untied = tuple(self.discarded), tuple(self.untied)
        return Checkpoint(tree, container, facts, self.folder, notes=notes, discarded=aside, untied=untied)

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: DType, pieces: Iterable[Piece], copy: Piece | None = None
    ) -> TensorEntry:
        """The tensor of this shape and type that the blocks fill; the same blocks always give the same storage.

        copy: the whole tensor, perhaps in another type, with which the values are compared when they are read.
        Replicas are compared by their checksums, or when they are read. Raises `Corrupt` for blocks of other types,
        outside of the shape, that overlap or leave gaps; `Unsupported` for too many axes that are cut.
        """
        places: dict[Box, list[Piece]] = {}
        for piece in pieces:
            like = piece.like
            if like.dtype != dtype or not len(piece.offsets) == len(like.shape) == len(shape):
                actual = f"{like.dtype}{list(like.shape)} at {list(piece.offsets)}"
                raise self._corrupt(name, shape, f"{piece.owner} {actual}, a block of {dtype}{list(shape)}")
            if like.numel or not prod(shape):
                places.setdefault(piece.box, []).append(piece)
        if not covers(shape, [*places] if prod(shape) else []):
            raise self._corrupt(name, shape, problem(shape, [group[0] for group in places.values()]))
        if not places:
            raise self._corrupt(name, shape, "no file has any of it")
        has_copy = copy is not None and copy.entry.shape == shape and has_numbers(copy.entry.dtype)
        blocks: list[Piece] = []  # one for each place, with its replicas that are not known to be equal
        for box, (first, *others) in places.items():
            same = [agree(first.entry, other.entry) for other in others]
            _keep_replicas(first, [other for other, agrees in zip(others, same, strict=True) if agrees])
            unproven = [other for other, agrees in zip(others, same, strict=True) if not agrees]
            if False in same:
                self.different[name] = f"{first.owner} and {unproven[0].owner} differ"
            if has_copy and copy is not None:
                unproven.append(Piece(copy.part(box), first.offsets, copy.owner))
            blocks.append(replace(first, replicas=tuple(unproven)) if unproven else first)
        key = shape, *blocks[0].identity
        candidates = self._joined.get(key, ())
        for earlier, tensor in candidates:
            if [block.identity for block in earlier] == [block.identity for block in blocks]:
                return tensor
        is_single = len(blocks) == 1 and not blocks[0].replicas and blocks[0].like.shape == shape
        tensor = blocks[0].entry if is_single else assembled(shape, blocks, name, self.where)
        self._joined[key] = *candidates, (blocks, tensor)
        return tensor

    def flat(
        self, name: str, shape: tuple[int, ...], pieces: Iterable[Piece], copy: TensorEntry | None = None
    ) -> TensorEntry:
        """The tensor of this shape whose elements, in row-major order, are divided into pieces of one dimension.

        copy: the model's own, with which the values are compared when they are read.
        """
        pieces = list(pieces)
        model_copy = None if copy is None else Piece(copy.reshape((copy.numel,)), (0,), "the model's own copy")
        dtype = pieces[0].entry.dtype if pieces else by_name("f32")
        return self.tensor(name, (prod(shape),), dtype, pieces, model_copy).reshape(shape)

    def replicated(self, name: str, pieces: Sequence[Piece]) -> TensorEntry:
        """The first rank's value of a tensor that each saved whole; noted where the others' differ, as buffers may."""
        first, *others = pieces
        _keep_replicas(first, others)
        self.compare(name, first.owner, ((piece.owner, agree(first.entry, piece.entry, read=True)) for piece in others))
        return first.entry

    def compare(self, name: str, owner: str, others: Iterable[tuple[str, bool | None]]) -> None:
        """Records whether what ranks saved whole is the same as that of `owner`, which is used; None: nobody knows."""
        for other, same in others:
            if same is False:
                self.different[name] = f"{owner}'s value is used; {other}'s differs"
                self.unequal.add(name)
                return
            if same is None:
                self.not_compared[name] = None

    def refuse_other_runs(self) -> None:
        """Raises `Conflict` where what differs on ranks that saved it whole is a step, or looks like a weight."""
        for name in sorted(self.unequal & self.different.keys()):
            last = name.rpartition(".")[2]
            if last in STEPS or last in DIVIDED:
                kind = "counts steps" if last in STEPS else "looks like a weight"
                raise another_run(
                    self.where, f"{name} {kind}, and is not the same on all ranks: {self.different[name]}"
                )

    def notes_of_replicas(self) -> Iterator[Note]:
        """Notes on what differs between ranks and should not, and on what could not be compared."""
        different = (f"{name} ({what})" for name, what in self.different.items())
        yield from noted(DIFFERENT, different, "tensor differs", "tensors differ", "between ranks that should agree")
        words = "value that several ranks saved was", "values that several ranks saved were"
        yield from noted(NOT_COMPARED, self.not_compared, *words, "not compared, as they have no checksums")

    def _corrupt(self, name: str, shape: tuple[int, ...], what: str) -> Corrupt:
        return Corrupt(
            f"{self.where}: {name} {list(shape)}: {what}",
            "Files are missing, damaged, overwritten or of two checkpoints; or torch divided FSDP2 with TP unevenly.",
            "Copy all files of the folder again; or torch.save each rank's state dict: they say how they are joined.",
        )


def _keep_replicas(first: Piece, others: Sequence[Piece]) -> None:
    """Records the storages whose values are not used with the one whose values are, for a check of all files."""
    if not others:
        return
    used = first.entry.storage
    replicas = {id(storage): storage for storage in used.replicas}
    replicas |= {id(other.entry.storage): other.entry.storage for other in others if other.entry.storage is not used}
    if len(replicas) > len(used.replicas):
        used.replicas = tuple(replicas.values())


SMALL = 1 << 20  # bytes that are compared at once where asked


def agree(one: TensorEntry, other: TensorEntry, *, read: bool = False) -> bool | None:
    """True for the same values, False for others; None where only reading them would tell.

    By checksums, where the containers have them and the tensors are all of their storages. read: small ones are read.
    """
    if one.view == other.view:
        return True
    if (one.dtype, one.shape, one.flags.lazy) != (other.dtype, other.shape, other.flags.lazy):
        return False
    sums = one.storage.crc, other.storage.crc
    if None not in sums and one.stride == other.stride and _covers_storage(one) and _covers_storage(other):
        return sums[0] == sums[1]
    if read and one.nbytes <= SMALL:
        return one.bytes() == other.bytes()
    return None


def refuse_other(where: object, one: tuple[str, Mapping[str, Any]], other: tuple[str, Mapping[str, Any]]) -> None:
    """Raises `Conflict` for two files, each with its facts of the checkpoint, whose facts differ."""
    for what, ours in one[1].items():
        theirs = other[1].get(what, ours)
        if isinstance(ours, TensorEntry) and isinstance(theirs, TensorEntry):
            if agree(ours, theirs) is False:
                raise mixed(where, one[0], other[0], f"the {what} differs")
        elif type(ours) is not type(theirs) or ours != theirs:
            shown = f": {ours:,} and {theirs:,}" if type(ours) is type(theirs) is int else ""
            raise mixed(where, one[0], other[0], f"the {what} differs{shown}")


def _covers_storage(entry: TensorEntry) -> bool:
    return entry.is_contiguous and entry.offset == 0 and entry.nbytes == entry.storage.nbytes


def problem(shape: tuple[int, ...], blocks: Sequence[Piece]) -> str:
    """What is wrong with blocks that do not fill the shape exactly once."""
    for block in blocks:
        if not _is_inside(shape, block.box):
            return f"{block.owner} reaches outside of it: {list(block.entry.shape)} at {list(block.offsets)}"
    ordered = sorted(blocks, key=lambda block: block.offsets)
    for before, after in pairwise(ordered):
        if overlap(before.box, after.box):
            return f"the blocks of {before.owner} and {after.owner} overlap at {list(after.offsets)}"
    held, total = sum(block.entry.numel for block in blocks), prod(shape)
    if held < total:
        return f"{total - held:,} of its {counted(total, 'element')} are in no file"
    return "its blocks overlap"


def _is_inside(shape: tuple[int, ...], box: Box) -> bool:
    return all(0 <= lo <= lo + n <= full for lo, n, full in zip(*box, shape, strict=True))


def covers(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """True if the boxes lie in the shape and fill it, every element once.

    Each box adds its corners to a sum, signed as the corners of an integral are; only where the corners of the whole
    are left over is every element in exactly one box. That is linear in the number of boxes. Raises `Unsupported` for
    boxes that are cut along more than 8 axes.
    """
    if not all(_is_inside(shape, box) for box in boxes):
        return False
    cut = [axis for axis in range(len(shape)) if any(sizes[axis] != shape[axis] for _, sizes in boxes)]
    if len(cut) > MAX_SPLIT:
        raise Unsupported(f"a tensor sharded along {counted(len(cut), 'axis', 'axes')}", "Real meshes have fewer.")
    corners: Counter[tuple[int, ...]] = Counter()
    for (begin, sizes), sign in [*((box, 1) for box in boxes), (((0,) * len(shape), shape), -1)]:
        if prod(sizes):
            edges = [(begin[axis], begin[axis] + sizes[axis]) for axis in cut]
            for choice in product((0, 1), repeat=len(edges)):
                corner = tuple(edge[side] for edge, side in zip(edges, choice, strict=True))
                corners[corner] += -sign if sum(choice) % 2 else sign
    return not any(corners.values())


def assembled(
    shape: tuple[int, ...], pieces: list[Piece], name: str = "a tensor", where: str = "memory"
) -> TensorEntry:
    """The tensor of this shape that the pieces make up; they must cover it (see `covers`) and be of one type.

    Reading it raises `Conflict` where replicas differ, naming it, and where it is.
    """
    if not shape:  # one element, and its replicas

        def as_vector(piece: Piece) -> Piece:
            return Piece(piece.entry.reshape((1,)), (0,), piece.owner, tuple(map(as_vector, piece.replicas)))

        return replace(assembled((1,), [*map(as_vector, pieces)], name, where), shape=(), stride=())
    first, assembly = pieces[0].like, _Assembly(shape, pieces, name, where)
    length, checks = prod(shape) * first.dtype.itemsize, any(piece.replicas for piece in pieces)
    data = Computed(length, assembly.read, assembly, checks=checks, concatenated=assembly.in_turn)
    storage = Storage(data if length else InlineBytes(b""), first.location)
    return TensorEntry(storage, first.dtype, shape, row_major_strides(shape))


class _Assembly:
    """The row-major bytes of a tensor in pieces, which are sorted by where they begin on the first axis; and their
    storages.

    in_turn: each is whole rows and all of its storage in row-major order, so that the bytes of these follow each other.
    """

    __slots__ = ("in_turn", "name", "pieces", "shape", "tallest", "where")

    def __init__(self, shape: tuple[int, ...], pieces: list[Piece], name: str, where: str) -> None:
        self.shape, self.name, self.where = shape, name, where
        self.pieces = sorted((piece for piece in pieces if piece.like.numel), key=lambda piece: piece.offsets)
        if self.pieces == pieces:  # as a rule: then one list is enough, of tens of thousands
            self.pieces = pieces
        self.tallest = max((piece.like.shape[0] for piece in self.pieces), default=0)
        self.in_turn = len(self.pieces) == len(pieces) and all(
            piece.like.shape[1:] == shape[1:] and _covers_storage(piece.like) and not piece.replicas for piece in pieces
        )

    def __iter__(self) -> Iterator[Storage]:
        storages = [copy.entry.storage for piece in self.pieces for copy in (piece, *piece.replicas)]
        return iter(storages if self.in_turn else {id(storage): storage for storage in storages}.values())

    def read(self, offset: int, length: int) -> bytes:
        import numpy

        size = self.pieces[0].like.dtype.itemsize
        stop = min(offset + length, prod(self.shape) * size)
        if offset >= stop:
            return b""
        first, last = offset // size, -(-stop // size)
        outputs: list[bytes] = []
        for box in boxes_between(self.shape, row_major_strides(self.shape), first, last):
            begin, sizes = box
            out = numpy.empty(sizes, f"V{size}")
            low, high = (
                bisect_left(self.pieces, row, key=lambda piece: piece.offsets[0])
                for row in (begin[0] - self.tallest + 1, begin[0] + sizes[0])
            )
            for piece in self.pieces[low:high]:
                if (common := overlap(box, piece.box)) is None:
                    continue
                data = row_major(piece.part(common))
                values = data.read(0, data.length)
                for other in piece.replicas:  # which have to have the same
                    theirs = row_major(other.part(common))
                    if not _values_agree(values, piece.entry.dtype, theirs.read(0, theirs.length), other.entry.dtype):
                        what = f"{piece.owner} and {other.owner} saved different values for the same elements"
                        raise another_run(self.where, f"{self.name}: {what}, from {list(common[0])}")
                place = tuple(slice(lo - b, lo - b + n) for lo, n, b in zip(*common, begin, strict=True))
                out[place] = numpy.frombuffer(values, out.dtype).reshape(common[1])
            outputs.append(out.tobytes())
        return b"".join(outputs)[offset - first * size : stop - first * size]


def _values_agree(values: bytes, dtype: DType, copied: bytes, copy: DType) -> bool:
    """True for equal bytes; for a copy in another type, if a cast to that type gives its numbers."""
    import numpy

    if dtype == copy:
        return values == copied
    with numpy.errstate(all="ignore"):
        cast = numpy.frombuffer(values, dtype.to_numpy()).astype(copy.to_numpy())
    theirs = numpy.frombuffer(copied, copy.to_numpy())
    return bool(numpy.all((cast == theirs) | (numpy.isnan(cast) & numpy.isnan(theirs))))


def boxes_between(shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes, in order, that hold the elements `start` to `stop` (in row-major order) of a tensor without gaps."""
    while start < stop:
        axis = next(a for a, step in enumerate(strides) if start % step == 0 and step <= stop - start)
        begin = tuple(start // step % size for step, size in zip(strides, shape, strict=True))
        count = min(shape[axis] - begin[axis], (stop - start) // strides[axis])
        yield begin, (*(1 for _ in range(axis)), count, *shape[axis + 1 :])
        start += count * strides[axis]
