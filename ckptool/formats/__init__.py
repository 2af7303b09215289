"""Containers: bytes to a tree, and a tree to a plan of what to write.

A format is a module or folder with `detect(head, source)` and `read(source)`, and one line in `FORMATS` with every fact
about it. One that can be written has `write(checkpoint, keep_unknown=...)`, one that can be edited in place
`append(checkpoint, keep_unknown=...)`, which gives None where it has to be written anew. To add one: its file, its
line, its test through the contract. Files are known by their content, never by their name; a module is imported when
the first bytes ask for it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ckptool.checkpoint import Checkpoint, FileRange, Note
from ckptool.checkpoint.files import Folder, Input, Source, open_input, unchanged, while_open
from ckptool.checkpoint.graph import no_collection
from ckptool.commands import arg
from ckptool.errors import Corrupt, Truncated, UsageError, counted, listed

if TYPE_CHECKING:  # reading imports nothing of writing
    from ckptool.checkpoint.blocks import Plan


@dataclass(frozen=True, slots=True)
class Format:
    """A container: what is true of all of its kind, and the way to its code.

    begins: the first bytes of files that its code is asked about, with those whose names end in one of `endings`.
    is_folder: it may be a folder; its code is asked about one in whose names, one on a line, `holds` is found.
    suffixes: of files that are written, the usual one first; none where a folder is.  writes_folder: it is written as
    a folder, not as a file.
    appendable: it can be edited in place.  tensors_only: it has names of tensors and no more, so that one state dict is
    chosen for it.  keeps_ties: it can say that two names are one tensor.  keeps_metadata: where it has only tensors,
    the `_metadata` of a state dict too.  keeps_tree: it can be written with everything that a checkpoint holds.
    own_metadata: its metadata are its own byte order and versions.  is_program: its tensors belong to code.
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
    leftovers: str = "(?!)"
    pickled: bool = False
    disguise: bytes = b"(?!)"

    def detect(self, head: bytes, source: Input) -> bool:
        """True for one of its files. head: the first bytes of a file; of a folder, none."""
        if isinstance(source, Folder):
            asked = self.is_folder and re.search(self.holds, "\n".join(source.names), re.MULTILINE) is not None
        else:
            asked = source.path.endswith(self.endings) or re.match(self.begins, head, re.DOTALL) is not None
        return asked and self.code.detect(head, source)

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


_ZIP = rb"PK\x03\x04|PK\x05\x06"
# The first record is an array, or has a very long name, or is not there.
_NPZ = rb"PK\x05\x06|PK\x03\x04(?:.{23}[^\0]|.*\.npy)"
_SAFETENSORS = rb".{8}[\[{\x22\xef]|.{0,8}\Z"
# The magic number or the version, as a number or as text.
_LEGACY = rb".*(?:l\xfc\x9cF\xf9 j\xa8P\x19|119547037146038801333356L|\xe9\x03\.|1001\n\.)"
# A zip that does not begin as torch's do, and any tar.
_ARCHIVE = rb"PK\x03\x04(?!.{26}[^/\0]{1,200}/data\.pkl)|.{257}ustar"
_WEIGHTS = r"-of-\d|\.index\.|^(?:model|pytorch_model|adapter_model|diffusion_pytorch_model|pytorch_lora_|consolidated)"
_ZERO = r"_states\.pt$|^latest|^global_step\d"
_TORCH = (".pt", ".pth", ".ckpt", ".bin", ".pt2", ".tar", ".pkl", ".model", ".th")

# Asked in this order: the table of a dcp folder is a pickle, and its files begin as zips.
FORMATS: tuple[Format, ...] = (
    Format("sharded", "sharded", rb"\s*\{", is_folder=True, holds=_WEIGHTS, writable=True, writes_folder=True,
           tensors_only=True, keeps_metadata=True),
    Format("megatron", "layouts.megatron", is_folder=True, holds=r"^(?:metadata\.json|latest_.*_iteration\.txt)$"),
    Format("dcp", "dcp", endings=(".distcp", ".metadata"), is_folder=True, holds=r"\.(?:distcp|metadata)$",
           suffixes=(".dcp",), writable=True, writes_folder=True, keeps_tree=True,
           leftovers=r"__\d{1,7}_\d{1,7}\.distcp"),
    Format("deepspeed-universal", "layouts.universal", is_folder=True, holds=_ZERO),
    Format("deepspeed", "layouts.deepspeed", is_folder=True, holds=_ZERO),
    Format("rank-files", "layouts.rank_files", is_folder=True, holds=r"_rank_?\d"),
    Format("hf-pieces", "layouts.hf_pieces", is_folder=True, holds=r"^shard-\d", tensors_only=True),
    Format("torch-checkpointing", "layouts.torch_checkpointing", is_folder=True,
           holds=r"^metadata\.pkl$|\d\.(?:pth?|bin)$"),
    Format("folder", "members", is_folder=True),
    Format("npz", "npz", _NPZ, suffixes=(".npz",), writable=True, tensors_only=True, keeps_ties=False,
           pickled=True),
    Format("archive", "archives", _ARCHIVE, pickled=True, disguise=b""),
    Format("torchscript", "torchscript", is_program=True),  # found by torch-zip, among the names in the file
    Format("torch-zip", "torch_zip", _ZIP, suffixes=_TORCH, writable=True, appendable=True, keeps_tree=True,
           own_metadata=True, pickled=True),
    Format("safetensors", "safetensors", _SAFETENSORS, suffixes=(".safetensors", ".sft"), writable=True,
           tensors_only=True, keeps_tree=True, disguise=rb".{0,3}[VUTXBC\x8a-\x8c]"),
    Format("torch-legacy", "torch_legacy", _LEGACY, pickled=True),
    Format("torch-tar", "torch_tar", rb".{257}ustar", pickled=True, disguise=b""),
    Format("npy", "npy", rb"\x93NUMPY", pickled=True),
    Format("pickle", "pickle_file", rb"[\x80\]}()cNIJKLMFGSTUVXBC\x88-\x8e\x95\x96]", pickled=True),
)  # fmt: skip
WRITERS = tuple(container for container in FORMATS if container.writable)
SUFFIXES = {suffix: container for container in WRITERS for suffix in container.suffixes}
_NAMES = {container.name: container for container in FORMATS}

DEFAULT = "torch-zip"  # what is written where nothing says otherwise
SHARDED, DCP = "sharded", "dcp"  # what is written as a folder
LIVE = "live"  # what was read from memory
HEAD = 512


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint of any known container: a file, or a folder. Reads its tables, no tensor data.

    Raises `FileProblem`, `NotACheckpoint`, `Unsupported`, `Truncated`, `Corrupt`, `Ambiguous` or `LimitExceeded`.
    """
    return read_source(open_input(path))


def read_source(source: Input) -> Checkpoint:
    """Opens a checkpoint whose file or folder is open already; see `read`."""
    from ckptool.formats.parts import with_part

    with while_open(), unchanged(source):
        found = with_part(read_alone(source), source)
    if isinstance(source, Folder) and not source.far and (links := _led_elsewhere(source)):
        what = counted(len(links), "file is a link that leads", "files are links that lead")
        note = Note("link-elsewhere", f"{what} out of the folder: {listed(links, 3)}")
        kept, found = found.kept, replace(found, notes=(*found.notes, note))
        found.kept.update(kept)
    return found


def _led_elsewhere(folder: Folder) -> list[str]:
    """The files of a folder that are links to files outside of it, but for the `blobs` of a hub's cache."""
    here = os.path.realpath(folder.path)
    cache = os.path.join(here.partition(f"{os.sep}snapshots{os.sep}")[0], "blobs")
    real = {name: os.path.realpath(os.path.join(here, name)) for name in folder.files}
    return [f"{name} → {real[name]}" for name in real if not real[name].startswith((here + os.sep, cache + os.sep))]


def read_alone(source: Input) -> Checkpoint:
    """Opens one of the files that a checkpoint is put together from, without asking whether it is a part."""
    head = b""
    if isinstance(source, Source):
        if not source.size:
            why = "It was never written, or lost in a crash or a full disk."
            raise Truncated(f"{source} is empty (0 bytes)", why, "Copy or download it again.")
        head = source.read(0, min(HEAD, source.size))
        if head[:4] not in (b"PK\3\4", b"PK\5\6"):
            from ckptool.formats.zip.directory import refuse_zip_behind

            refuse_zip_behind(head, source)
    for container in FORMATS:
        if container.detect(head, source):
            if isinstance(source, Source) and re.match(container.disguise, head, re.DOTALL):
                from ckptool.pickles.skeleton import reaches_a_call

                if reaches_a_call(FileRange(source, 0, source.size)):
                    why = "Its first bytes are opcodes that skip what makes it a file of its format; a program follows."
                    raise Corrupt(f"{source} is a pickle, too: torch.load may run it", why, "Do not load it.")
            with no_collection():
                return cast(Checkpoint, container.code.read(source))
    from ckptool.formats.unrecognized import refuse

    raise refuse(head, source)


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
    meant = SUFFIXES.get(os.path.splitext(name.rstrip("/"))[1].lower())
    if meant is not None and (meant.writes_folder or not name.endswith("/")):
        return meant
    return named(default) if named(default).writable else named(DEFAULT)


_WRITABLE = f"Writable containers: {listed([container.name for container in WRITERS], 9)}."
NOT_WRITTEN = frozenset(
    ".onnx .gguf .ggml .h5 .hdf5 .keras .tflite .pb .engine .trt .plan .mlmodel .npy .msgpack .json .yaml .txt .csv"
    " .zip .nemo .gz .distcp".split()
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
    torch = written.name == DEFAULT and (not original or original.startswith("torch-"))
    own = suffix == os.path.splitext(source)[1].lower() and (torch or original == written.name)
    if not (asked or suffix in SUFFIXES or own) and re.fullmatch(_SUFFIX, suffix):
        import difflib

        near = difflib.get_close_matches(suffix, [each for each in SUFFIXES if len(each) > 5], 1, 0.8)
        if near or suffix in NOT_WRITTEN or not torch:
            meant = f"Did you mean {near[0]}? " if near else ""
            fix = f"{meant}To write a torch file of that name: {arg(container='torch-zip')}"
            raise UsageError(f"{suffix} is not the suffix of a container that ckptool writes", _WRITABLE, fix)
    if written.writes_folder and name.lower().endswith(".json"):
        what = f"{name} is the name of an index, and shards are written as a folder"
        why = "The index is one of the files in it."
        raise UsageError(what, why, f"Name the folder: {arg(out=os.path.dirname(name) or 'DIR')}")
