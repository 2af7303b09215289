"""Containers: bytes to a tree, and a tree to a plan of what to write; and `FILE#ADDRESS`, which file and what in it.

A format is a module or folder with `read(source)`, with `detect(head, source)` unless the first bytes tell enough, and
one line in `FORMATS` with every fact about it. One that can be written has `write(checkpoint, keep_unknown=...)`, one
that can be edited in place `append(checkpoint, keep_unknown=...)`, which gives None where it has to be written anew. To
add one: its file, its line, its test through the contract. Files are known by their content, never by their name; a
module is imported when the first bytes ask for it. What an address means to a verb stands in `commands`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from io import BufferedIOBase
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

from ckptool.checkpoint import Checkpoint, Note, PartKind, PartOf
from ckptool.checkpoint.files import Folder, Input, Source, open_input, unchanged, while_open
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.paths import may_exist, named_urls
from ckptool.checkpoint.tree import find
from ckptool.commands import OUT_PT, Command, arg, command, input_of
from ckptool.errors import Corrupt, OnlyAPart, Truncated, UsageError, listed, quoted
from ckptool.facts import dataclass, replace

if TYPE_CHECKING:  # reading imports nothing of writing, nor of torch
    from torch.nn import Module as Module

    from ckptool.checkpoint.blocks import Plan
else:
    Module = type("Module", (), {})  # the signatures of verbs are read where torch is not installed

PathLike = str | os.PathLike[str]
OpenFile = IO[bytes] | BufferedIOBase  # gzip's and the like are only this to type checkers
CheckpointLike: TypeAlias = PathLike | OpenFile | Mapping[Any, Any] | Checkpoint | Module
"""A path or `FILE#ADDRESS`, an open binary file, a dictionary of tensors or arrays, a checkpoint, a module."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Format:
    """A container: what is true of all of its kind, and the way to its code.

    begins: the first bytes of files that its code is asked about, beside those whose names end in one of `endings`.
    is_folder: it may be a folder; its code is asked about those in whose names, one on a line, `holds` is found.
    suffixes: of files that are written, the usual one first; none where a folder is.  writes_folder: it is written as
    a folder, not as a file.
    appendable: it can be edited in place.  tensors_only: it has names of tensors and no more, so that one state dict is
    chosen for it.  keeps_ties: it can say that two names are one tensor.  keeps_metadata: where it has only tensors,
    the `_metadata` of a state dict too.  keeps_tree: it can be written with everything that a checkpoint holds.
    own_metadata: its metadata are its own byte order and versions.  is_program: its tensors belong to code.
    recoverable: what is whole in a damaged one can be told.
    leftovers: names in its folders of files that another run may have left, and that go with them.
    pickled: its files are pickles, or have some inside.  disguise: first bytes with which a file of this kind may be a
    pickle as well, whose first opcodes pass over the rest of the header; the empty pattern: it always may.
    """

    name: str
    module: str
    begins: bytes = b"(?!)"
    endings: tuple[str, ...] = ()
    is_folder: bool = False
    holds: str = ""
    suffixes: tuple[str, ...] = ()
    writable: bool = False
    writes_folder: bool = False
    appendable: bool = False
    tensors_only: bool = False
    keeps_ties: bool = True
    keeps_metadata: bool = False
    keeps_tree: bool = False
    own_metadata: bool = False
    is_program: bool = False
    recoverable: bool = False
    leftovers: str = "(?!)"
    pickled: bool = False
    disguise: bytes = b"(?!)"

    def detect(self, head: bytes, source: Input) -> bool:
        """True for one of its files. head: the first bytes of a file; of a folder, none."""
        if isinstance(source, Folder):
            may_fit = self.is_folder and re.search(self.holds, "\n".join(source.names), re.MULTILINE) is not None
        else:
            may_fit = source.path.endswith(self.endings) or re.match(self.begins, head, re.DOTALL) is not None
        return may_fit and (not hasattr(self.code, "detect") or self.code.detect(head, source))

    def write(self, checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
        """The plan of a new file. Raises `Unsupported` for what it cannot hold, `UnsafeObject` for unknown calls."""
        return cast("Plan", self.code.write(checkpoint, keep_unknown=keep_unknown))

    def append(self, checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan | None:
        """The plan of the same change inside the file; None where it is written anew."""
        plan = self.code.append(checkpoint, keep_unknown=keep_unknown) if self.appendable else None
        return cast("Plan | None", plan)

    @property
    def code(self) -> Any:
        return import_module(f"{__name__}.{self.module}")


ZIP = b"PK\x03\x04", b"PK\x05\x06"  # how one begins, and how one without records does
# The first record is an array, or has a very long name, or is not there.
_NPZ = rb"PK\x05\x06|PK\x03\x04(?:.{23}[^\0]|.*\.npy)"
_SAFETENSORS = rb".{8}[\[{\x22\xef]|.{0,8}\Z"
# The magic number or the version, as a number or as text.
_LEGACY = rb".*(?:l\xfc\x9cF\xf9 j\xa8P\x19|119547037146038801333356L|\xe9\x03\.|1001\n\.)"
# A zip that does not begin as torch's do, and any tar.
_ARCHIVE = rb"PK\x03\x04(?!.{26}[^/\0]{1,200}/data\.pkl)|.{257}ustar"
_WEIGHTS = r"-of-\d|\.index\.|^(?:model|pytorch_model|adapter_model|diffusion_pytorch_model|pytorch_lora_|consolidated)"
_ZERO = r"_states\.pt$|^latest|^global_step\d|^zero_to_fp32\.py$|^zero$"
_TORCH = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl", ".model", ".th")

# Asked in this order: the table of a dcp folder is a pickle, and its files begin as zips.
FORMATS: tuple[Format, ...] = (
    Format("sharded", "sharded", rb"\s*\{", is_folder=True, holds=_WEIGHTS, writable=True, writes_folder=True,
           tensors_only=True, keeps_metadata=True),
    Format("megatron", "layouts.megatron", endings=(".metadata",), is_folder=True,
           holds=r"^(?:metadata\.json|common\.pt|latest_.*_iteration\.txt)$"),
    Format("dcp", "dcp", endings=(".distcp", ".metadata"), is_folder=True, holds=r"\.(?:distcp|metadata)$",
           suffixes=(".dcp",), writable=True, writes_folder=True, keeps_tree=True,
           leftovers=r"__\d{1,7}_\d{1,7}\.distcp"),
    Format("deepspeed-universal", "layouts.deepspeed", is_folder=True, holds="(?!)"),  # found by deepspeed
    Format("deepspeed", "layouts.deepspeed", is_folder=True, holds=_ZERO),
    Format("rank-files", "layouts.rank_files", is_folder=True, holds=r"_rank_?\d"),
    Format("hf-pieces", "layouts.hf_pieces", is_folder=True, holds=r"^shard-\d", tensors_only=True),
    Format("torch-checkpointing", "layouts.torch_checkpointing", is_folder=True,
           holds=r"^metadata\.pkl$|\d\.(?:pth?|bin)$"),
    Format("folder", "members", is_folder=True),
    Format("npz", "npz", _NPZ, suffixes=(".npz",), writable=True, tensors_only=True, keeps_ties=False,
           pickled=True),
    Format("archive", "archives", _ARCHIVE, pickled=True, disguise=b""),
    Format("torchscript", "torchscript", is_program=True),  # these are found by torch-zip, among the names in the file
    Format("torch-export", "torch_export", is_program=True),
    Format("torch-package", "torch_package", is_program=True),
    Format("torch-zip", "torch_zip", b"|".join(ZIP), suffixes=_TORCH, writable=True, appendable=True, keeps_tree=True,
           own_metadata=True, recoverable=True, pickled=True),
    Format("safetensors", "safetensors", _SAFETENSORS, suffixes=(".safetensors", ".sft"), writable=True,
           tensors_only=True, keeps_tree=True, recoverable=True, disguise=rb".{0,3}[VUTXBC\x8a-\x8c]"),
    Format("torch-legacy", "torch_legacy", _LEGACY, pickled=True),
    Format("torch-tar", "torch_tar", rb".{257}ustar", pickled=True, disguise=b""),
    Format("npy", "npy", rb"\x93NUMPY", pickled=True),
    Format("pickle", "pickle_file", rb"[\x80\]}()cNIJKLMFGSTUVXBC\x88-\x8e\x95\x96]", pickled=True),
)  # fmt: skip
WRITERS = tuple(container for container in FORMATS if container.writable)
PROGRAMS = tuple(container.name for container in FORMATS if container.is_program)
SUFFIXES = {suffix: container for container in WRITERS for suffix in container.suffixes}
_NAMES = {container.name: container for container in FORMATS}

DEFAULT = "torch-zip"  # what is written where nothing says otherwise
SHARDED, DCP = "sharded", "dcp"  # what is written as a folder
LIVE = "live"  # what was read from memory
IN_MEMORY = "the checkpoint"  # what it is called
HEAD = 512


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint of any known container: a file, or a folder. Reads its tables, no tensor data.

    Raises `FileProblem`, `NotACheckpoint`, `Unsupported`, `Truncated`, `Corrupt`, `Ambiguous` or `LimitExceeded`.
    """
    return read_source(open_input(path))


def read_source(source: Input) -> Checkpoint:
    """Opens a checkpoint whose file or folder is open already; see `read`."""
    from ckptool.formats.folder import CODE, FOLDER, as_part, led_elsewhere
    from ckptool.formats.other_ranks import one_of_ranks

    with while_open(), unchanged(source):
        checkpoint = read_alone(source)
        part = checkpoint.part or as_part(checkpoint) or one_of_ranks(checkpoint, read_alone)
        if part is None and isinstance(source, Folder) and checkpoint.container != "folder":
            inner = checkpoint.source
            opened = inner.files if isinstance(inner, Folder) else [os.path.basename(inner.path)] if inner else []
            if not {*source.names} <= {name.partition("/")[0] for name in opened}:  # it may have members, too
                from ckptool.formats.members import with_members

                checkpoint = with_members(checkpoint, Folder(source.path))
                part = checkpoint.part
    if part is not None:
        fix = command("inspect", part.whole) if part.whole and part.kind is not PartKind.MEMBERS else ()
        note = Note(CODE, f"{part.label}: {part.meaning}", fix)
        checkpoint = replace(checkpoint, part=part, notes=(*checkpoint.notes, note))
    if isinstance(source, Folder):
        if not source.far and (links := led_elsewhere(source.path, source.files)):
            from ckptool.formats.marks import noted

            shown = (f"{name} → {place}" for name, place in links.items())
            words = "file is a link that points", "files are links that point", "out of the folder"
            checkpoint = replace(checkpoint, notes=(*checkpoint.notes, *noted("link-elsewhere", shown, *words)))
        checkpoint.kept[FOLDER] = source.path  # whose other files `members.all_uses` judges
    return checkpoint


def read_alone(source: Input) -> Checkpoint:
    """Opens a file or folder by itself, without asking whether it is a part of something."""
    head = b""
    if isinstance(source, Source):
        if not source.size:
            why = "It was never written, or its data was lost in a crash or on a full disk."
            raise Truncated(f"{source} is empty (0 bytes)", why, "Copy or download it again.")
        head = source.read(0, min(HEAD, source.size))
        if head[:4] not in ZIP:
            from ckptool.formats.zip.directory import refuse_zip_behind

            try:
                refuse_zip_behind(head, source)
            except Corrupt as error:
                raise _with_whole_count(error, source) from None
    for container in FORMATS:
        if container.detect(head, source):
            if isinstance(source, Source) and re.match(container.disguise, head, re.DOTALL):
                from ckptool.pickles.decode import reaches_a_call

                if reaches_a_call(source):
                    why = "Its first bytes are also opcodes that skip its header; a program follows."
                    raise Corrupt(f"{source} is a pickle, too: torch.load may run it", why, "Do not load it.")
            try:
                with no_collection():
                    return cast(Checkpoint, container.code.read(source))
            except (Truncated, Corrupt) as error:
                raise _with_whole_count(error, source) from None
    from ckptool.formats.unrecognized import refuse

    raise refuse(head, source)


def _with_whole_count(error: Truncated | Corrupt, source: Input) -> Exception:
    from ckptool.formats.damaged import with_whole_count  # which says how much of it could be saved

    return with_whole_count(error, source)


def named(name: str) -> Format:
    """The format called `name`; for what was read from no file (`live`), one without facts."""
    return _NAMES.get(name) or Format(name, "")


def by_name(name: str) -> Format:
    """The format called `name`; raises `UsageError` listing those that can be written."""
    container = named(name)
    if not container.writable:
        what = f"{name} can be read but not written" if name in _NAMES else f"unknown container {name!r}"
        raise UsageError(what, _WRITABLE)
    return container


def for_output(path: str | os.PathLike[str], default: str) -> Format:
    """The format of an output's suffix; else the one called `default`, if it can be written; else torch's."""
    name = os.fspath(path)
    container = SUFFIXES.get(os.path.splitext(name.rstrip("/"))[1].lower())
    if container is not None and (container.writes_folder or not name.endswith("/")):
        return container
    return named(default) if named(default).writable else named(DEFAULT)


_WRITABLE = f"Writable containers: {listed([container.name for container in WRITERS], 9)}."
NOT_WRITTEN = frozenset(
    ".pt2 .onnx .gguf .ggml .h5 .hdf5 .keras .tflite .pb .engine .trt .plan .mlmodel .npy .msgpack .json .yaml .txt"
    " .csv .zip .nemo .gz .distcp".split()
)
# What a suffix looks like: `.foo`, and not the end of `Llama-3.1-8B` or `epoch=3-loss=0.25`.
_SUFFIX = r"\.[a-z][a-z0-9_]{0,11}"


def refuse_name(
    path: str | os.PathLike[str], written: Format, original: str = "", source: str = "", *, asked: bool = False
) -> None:
    """Raises `UsageError` where an output's suffix looks mistyped, or promises a container that is not written, and
    where a folder of shards would be called like a file in it.

    written: the container that would be; asked: by the user.  original, source: container and name of the input, whose
    own suffix is as good as any while its container stays. From one torch file to another, suffixes that stand for
    nothing (`.state`) are a matter of taste.
    """
    name = os.fspath(path)
    suffix = os.path.splitext(name)[1].lower()
    torch = written.name == DEFAULT and (not original or original.startswith("torch-")) and original not in PROGRAMS
    is_kept = suffix == os.path.splitext(source)[1].lower() and (torch or original == written.name)
    if not (asked or suffix in SUFFIXES or is_kept) and re.fullmatch(_SUFFIX, suffix):
        import difflib

        near = difflib.get_close_matches(suffix, [ending for ending in SUFFIXES if len(ending) > 5], 1, 0.8)
        if near or suffix in NOT_WRITTEN or not torch:
            hint = f"Did you mean {near[0]}? " if near else ""
            fix = f"{hint}To write a torch file of that name: {arg(container='torch-zip')}"
            raise UsageError(f"{suffix} is not the suffix of a container that ckptool writes", _WRITABLE, fix)
    if written.writes_folder and name.lower().endswith(".json"):
        what = f"{name} is an index's name, but shards are written as a folder"
        why = "The index is one of the files in it."
        raise UsageError(what, why, f"Name the folder: {arg(out=os.path.dirname(name) or 'DIR')}")


# FILE#ADDRESS --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opened:
    """A checkpoint, and the address of the part of it that was named (None for the whole).

    path: of its file; empty for what is in memory.
    """

    checkpoint: Checkpoint
    at: str | None
    path: str

    @property
    def name(self) -> str:
        """What to call it: its path, if it has one."""
        return self.path or IN_MEMORY

    @property
    def argument(self) -> str:
        """Its path, with the address that was named."""
        return f"{self.path}#{self.at}" if self.path and self.at else self.path

    @property
    def taken(self) -> Checkpoint:
        """The whole or the part that was named, as a checkpoint. Raises `UsageError` where nothing is at the
        address."""
        return self.checkpoint if self.at is None else part_of(self.checkpoint, self.at)


def part_of(checkpoint: Checkpoint, at: str) -> Checkpoint:
    """The part of a checkpoint at an address; all of it for an empty one. Raises `UsageError` where nothing is
    there."""
    path, node = find(checkpoint.tree, at)
    if not path:
        return checkpoint
    from ckptool.formats import marks

    metadata = {key: value for key, value in checkpoint.metadata.items() if key != marks.RECOVERED}
    metadata |= marks.recovered(checkpoint.metadata, path)
    base = (*checkpoint.base, *path)
    return replace(checkpoint, tree=node, metadata=metadata, base=base, discarded=(), extras={}, origin=None)


def is_in_memory(value: object) -> bool:
    """True for what is no file: objects in memory, and checkpoints that are open already."""
    is_read = value is None or isinstance(value, (str, os.PathLike)) or callable(getattr(value, "read", None))
    return isinstance(value, (Mapping, Checkpoint)) or not is_read


def shown(file: CheckpointLike) -> str:
    """What to call an input: its path, or its type."""
    return named_urls(os.fspath(file)) if isinstance(file, (str, os.PathLike)) else type(file).__name__


def open_file(file: CheckpointLike, at: str | None = None) -> Opened:
    """Opens `FILE` or `FILE#address` (a file that exists under the whole name wins). at: the part behind `#`.

    An open file is read from its position on, and stands at its end afterwards, whatever follows the checkpoint (see
    `source_of`). What is in memory is not copied: see `memory`.
    """
    if isinstance(file, Checkpoint):
        # A part is in no file by itself: none may be copied in its place.
        checkpoint = replace(file, base=(), source=None) if file.base else file
        return Opened(checkpoint, at, checkpoint.source.path if checkpoint.source is not None else "")
    if is_in_memory(file):
        from ckptool.formats.folder import as_part
        from ckptool.formats.in_memory import checkpoint_in_memory

        checkpoint = checkpoint_in_memory(file)
        return Opened(replace(checkpoint, part=as_part(checkpoint)), at, "")
    with while_open():
        source, place = open_source(file)
        checkpoint = read_source(source)
    if isinstance(file, (str, os.PathLike)):
        return Opened(checkpoint, at if at is not None else place, source.path)
    return Opened(checkpoint, at, source.path if may_exist(source.path) else "")


def open_source(file: CheckpointLike) -> tuple[Input, str | None]:
    """The file or folder behind a path or an open file, not read yet, and the address behind `#`.

    Raises `UsageError` for what is in memory.
    """
    if not isinstance(file, (str, os.PathLike)):
        from ckptool.formats.in_memory import source_of

        return source_of(file), None
    path, place = split(file)
    return open_input(path), place


def open_whole(file: CheckpointLike, at: str | None = None, *, part: bool | None = None) -> Opened:
    """Opens a file for a verb that takes it for a whole checkpoint. part: a part will do; None: that is no option.

    Raises `OnlyAPart` for a rank's share, one shard of several, placeholders, a folder of which members are missing or
    damaged.
    """
    opened = open_file(file, at)
    refuse_part(opened.checkpoint, part=part)
    return opened


def refuse_part(checkpoint: Checkpoint, *, part: bool | None = None) -> None:
    """Raises `OnlyAPart` for a checkpoint that is only a part, unless a part will do."""
    partial = checkpoint.part
    if partial is None or part:
        return
    line = command("convert", input_of(checkpoint.source), part=True, out=OUT_PT)
    raise _only_a_part(checkpoint, partial, f"take it as is: {line if part is None else arg(part=True)}")


def _only_a_part(checkpoint: Checkpoint, part: PartOf, otherwise: str | Command) -> OnlyAPart:
    """The error for a part, or for a folder of which members are missing, damaged or not joined. otherwise: the last
    way on."""
    source, member, ways = checkpoint.source, part.whole, list[str]()
    what = f"{source or 'the checkpoint'} is only a part of a checkpoint: {part.label}"
    if part.join:
        how = part.join if isinstance(part.join, Command) else Command(part.join)
        ways.append(f"say how all are joined: {how} (docs/formats.md has rules to start from)")
    if part.kind is PartKind.MEMBERS:
        what = f"{part.whole} is a folder, of which {part.label} are there and whole"
        if isinstance(source, Source):
            member = source.path
        elif source is not None and (first := next(iter(source.files), "")):  # of the folder above it, perhaps
            relative = os.path.relpath(os.path.join(source.path, first), part.whole)
            member = os.path.join(part.whole, relative.partition(os.sep)[0])
        ways.append(f"name one of its files: {quoted(member)}")
    elif part.whole and not part.join:
        ways.append(f"see the whole: {command('inspect', part.whole)}")
    fix = "; or ".join([*ways, f"{otherwise}"])
    return OnlyAPart(what, part.sentence(), f"{fix[0].upper()}{fix[1:]}")


def changeable(opened: Opened) -> Opened:
    """The same, if keys, types and entries of it may be changed: not one shard, which has to go on fitting its index.

    Raises `OnlyAPart` for a file that the index beside it names, and for a folder of members that are not all there, or
    are not joined.
    """
    part = opened.checkpoint.part
    if part is not None and part.kind is PartKind.MEMBERS and isinstance(opened.checkpoint.source, Folder):
        raise _only_a_part(opened.checkpoint, part, command("convert", opened.path, part=True, out=OUT_PT))
    if part is not None and part.index:
        what = f"{opened.checkpoint.source} is {part.label} of {os.path.join(part.whole, part.index)}"
        why = "Changed alone, it would no longer fit the index and the other shards. Nothing was written."
        raise OnlyAPart(what, why, f"Name the folder instead: {quoted(part.whole)}")
    return opened


def split(file: PathLike) -> tuple[str, str | None]:
    """The path and address in `FILE#address`; of a URL with a secret in it, the name that it has here."""
    name = named_urls(os.fspath(file))
    if "#" not in name or os.path.lexists(name):
        return name, None
    for i in reversed([i for i, c in enumerate(name) if c == "#"]):
        if os.path.lexists(name[:i]):
            return name[:i], name[i + 1 :]
    path, _, place = name.partition("#")
    return path, place


def refuse_address(verb: str, file: CheckpointLike) -> None:
    """Raises `UsageError` where a verb that is about whole files was given a part of one, or objects in memory."""
    if is_in_memory(file):
        raise UsageError(f"{verb} looks at files, and was given {shown(file)}", "", "Name it by its path.")
    if not isinstance(file, (str, os.PathLike)):
        return
    path, place = split(file)
    if place is not None and may_exist(path):
        what = f"{shown(file)} is a part of a file, and {verb} takes whole files"
        raise UsageError(what, "", f"Name the file: {path}")
