"""Files that are no checkpoints, and what they are: names lie, first bytes do not.

Sources: the magic numbers of file(1), the git-lfs pointer specification, onnx.proto,
saved_model.proto and the flatbuffers identifiers of TFLite (`TFL3`) and ExecuTorch (`ET12`), LevelDB's table format,
the writers of Lua Torch (File.lua), Thinc (model.py), TVM (file_utils.cc), fastText (fasttext.cc), fairseq
(indexed_dataset.py) and coremltools (MILBlob's StorageFormat.hpp).
"""

from __future__ import annotations

import os
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable
from typing import Any

from ckptool.checkpoint.files import Folder, Input, Readable, Source
from ckptool.checkpoint.paths import parted
from ckptool.commands import command, other_program
from ckptool.errors import CkptoolError, Corrupt, NoCheckpointInside, NotACheckpoint, Unsupported, listed, quoted
from ckptool.formats.folder import names_in

_READS = "ckptool reads what torch.save and safetensors write."
# By the first bytes. Compressed: a name, the program that unpacks it to its standard output, the usual suffix.
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gzip -dc", ".gz"),
    b"BZh": ("bzip2", "bzip2 -dc", ".bz2"),
    b"\xfd7zXZ\x00": ("xz", "xz -dc", ".xz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc", ".zst"),
    b"\x04\x22\x4d\x18": ("lz4", "lz4 -dc", ".lz4"),
}
_ARCHIVES = {b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x"), b"Rar!\x1a\x07": ("RAR", "unrar x")}
_OTHER_FILES = {
    b"\x89PNG": "a PNG image",
    b"\x7fELF": "an ELF program",
    b"%PDF": "a PDF document",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"MZ": "a Windows program",
    b"\xcf\xfa\xed\xfe": "a macOS program",
    b"SQLite format 3\0": "an SQLite database",
    b"#!": "a script",
}
_OTHER_MODELS = {
    b"GGUF": "a GGUF model (llama.cpp)",
    b"tjgg": "a GGML model (llama.cpp)",
    b"lmgg": "a GGML model (llama.cpp)",
    b"\x89HDF\r\n": "an HDF5 file (Keras .h5, or data)",
    b"PYTORCH1": "a PyTorch preview archive (Caffe2, before 1.0)",
    b"PAR1": "a Parquet table",
    b"ARROW1": "an Arrow table",
    b"\x12\x01\0\0\0\0\0\0": "an MXNet parameter file",
    b"\x04\0\0\0\x01\0\0\0\x03\0\0\0V 1": "an object of Lua Torch (.t7)",
    b"\x03\0\0\0\x01\0\0\0": "a table of Lua Torch (.t7)",
    b"\x84\xa5nodes": "a model of spaCy or Thinc (MessagePack)",
    b"\x81\xa6params": "a Flax checkpoint (MessagePack)",
    b"\xb7\x9c\x04\x05O\x8d\xe5\xf7": "a TVM parameter file",
    b"\xba\x16O/": "a fastText model",
    b"MMIDIDX\0\0": "the index of a fairseq or Megatron data set (.idx)",
    b"TNTIDX\0\0": "the index of a fairseq data set (.idx)",
}
# By more than that, each tried on the first 512 bytes in this order.
_PATTERNS = {
    rb".{4}TFL3": "a TensorFlow Lite model",  # flatbuffers
    rb".{4}ET12": "an ExecuTorch program (.pte)",
    rb".{4}ORTM": "an ONNX Runtime model",
    rb"\x08[\x01-\x20](?:\x12.[ -~]*[\x1a\x22\x28\x3a\x42]|\x3a)": "an ONNX model",  # the first fields of protobuf
    rb"\x08\x01\x12[\x80-\xff]*[\x01-\x7f]\x0a": "a TensorFlow SavedModel",
    rb"\x0a[\x80-\xff]*[\x01-\x7f]\x0a.[ -~]+\x12.(?:Placeholder|Const|NoOp|VarHandleOp|VariableV2)":
        "a TensorFlow graph",
    rb".{4}\x02\0\0\0.{56}\xef\xbe\xad\xde": "the weights of a Core ML model (weight.bin)",
}  # fmt: skip
_WEIGHTS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".th"})  # of checkpoints inside of archives
_TABLE_END = bytes.fromhex("57fb808b247547db")  # of a LevelDB table
MAX_ZEROS = 1 << 20


def refuse(head: bytes, source: Input) -> CkptoolError:
    """The error for a file or folder that no format reads, naming what it is as exactly as its first bytes allow."""
    if isinstance(source, Folder):
        held = f"It holds {listed(source.names, 4)}." if source.names else "It is empty."
        sought = "an index of shards (*.index.json), .metadata of torch.distributed, and files like model.safetensors"
        fix = f"Name a file in it, or see what is there: {command('scan', source.path)}"
        return NoCheckpointInside(
            f"{source} is a folder, not a checkpoint", f"ckptool looked for {sought}. {held}", fix
        )
    return _text(head, source) or _other_file(head, source) or _nothing_known(head, source)


def _other_file(head: bytes, source: Source) -> CkptoolError | None:
    """Compressed files, archives, and the models of other programs."""

    def starting(table: dict[bytes, Any]) -> Any:
        return next((found for magic, found in table.items() if head.startswith(magic)), None)

    if found := starting(_COMPRESSED):
        name, program, suffix = found
        inside = source.path.removesuffix(suffix)
        out = inside if inside != source.path else f"{inside}.unpacked"
        fix = f"Unpack it first: {other_program(program, source.path, into=out)}"
        return Unsupported(f"{source} is compressed with {name}", "The checkpoint is inside.", fix)
    if found := starting(_ARCHIVES):
        name, program = found
        what = f"{source} is a {name} archive, whatever its name says"
        why = "torch.save writes none; models are packed this way to get past scanners that look for pickles in a zip."
        return Unsupported(what, why, f"If you trust where it is from: {other_program(program, source.path)}")
    if name := starting(_OTHER_FILES):
        return NotACheckpoint(f"{source} is {name}, whatever its name says")
    if head[257:262] == b"ustar":
        from ckptool.formats.torch_tar import record_paths

        names = [name for name in record_paths(source) if os.path.splitext(name)[1] in _WEIGHTS and name.isprintable()]
        what = f"{source} is a tar archive, not one of torch's"
        if not names:
            list_it = other_program("tar tf", source.path)
            return Unsupported(what, "Nothing in it is named like a checkpoint.", f"See what is in it: {list_it}")
        out = f"{parted(source.path)[0]}.unpacked{os.path.splitext(names[0])[1]}"
        unpack = other_program("tar xOf", source.path, names[0], into=out)
        return Unsupported(what, f"It holds {listed(names, 4)}.", f"Take it out: {unpack}")
    name = starting(_OTHER_MODELS)
    name = name or next((name for each, name in _PATTERNS.items() if re.match(each, head, re.DOTALL)), None)
    if name is None and source.path.endswith(".bin") and os.path.isfile(f"{source.path[:-4]}.idx"):
        name = "the data of a fairseq or Megatron data set, which the .idx file beside it describes"
    if name is None and source.size >= 48 and source.read(source.size - 8, 8) == _TABLE_END:
        name = "the index of a TensorFlow checkpoint"
    return Unsupported(f"{source} is {name}", _READS) if name is not None else None


# Zip archives --------------------------------------------------------------------------------------------------------

# A pattern that finds one of the names of records; what the archive is, what that means, and what to do with torch.
_TORCHS_ZIPS = (
    (r"(?:^|/)serialized_exported_program\.json$|^[^/\n]*/archive_format$", "a program of torch.export (.pt2)",
        "Its tensors belong to a graph that only torch understands.",
        "With torch: torch.save(torch.export.load(FILE).state_dict, 'weights.pt')"),
    (r"^[^/\n]*/\.data/extern_modules$", "a torch.package archive",
        "It holds source code that builds its objects; ckptool runs none of it.",
        ("With torch, and only if you trust it: "
            "torch.package.PackageImporter(FILE).load_pickle(PACKAGE, RESOURCE).state_dict()")),
    (r"^MAR-INF/MANIFEST\.json$", "a TorchServe archive (.mar)", "", ""),
    (r"(?:^|/)model\.json$", "a model of torch 1.0's first script format (model.json)", "It holds no pickle to read.",
        "With torch: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')"),
)  # fmt: skip
_ZIPS = (
    ("[Content_Types].xml", "an Office document"),
    ("META-INF/MANIFEST.MF", "a Java archive"),
    ("AndroidManifest.xml", "an Android program"),
    ("model.weights.h5", "a Keras model (.keras)"),
    ("mimetype", "an OpenDocument or EPUB document"),
)


def other_zip(source: Readable, records: Iterable[str]) -> CkptoolError:
    """The error for a zip archive that is no checkpoint, by the names of its records: what it is, and what to do."""
    names = set(records)
    lines = "\n".join(names)
    unzip = f"Unpack it: {other_program('unzip -d', f'{source.file.path}.unpacked', source.file.path)}"
    for pattern, what, why, fix in _TORCHS_ZIPS:
        if re.search(pattern, lines, re.MULTILINE):
            inside = sorted(name for name in names if name.endswith((".pt", ".pth", ".bin", ".safetensors")))
            held = listed(inside) if inside else "no .pt or .pth is named"
            return Unsupported(f"{source} is {what}", why or f"The checkpoint is inside: {held}.", fix or unzip)
    kind = next((f"is {what}" for name, what in _ZIPS if name in names), "is a zip archive")
    what = f"{source} {kind}, but not a PyTorch checkpoint"
    if inside := sorted(name for name in names if os.path.splitext(name)[1] in _WEIGHTS):
        return NotACheckpoint(what, f"It holds {listed(inside, 4)}.", unzip)
    look = f"See what is in it: {other_program('unzip -l', source.file.path)}"
    return NotACheckpoint(what, "A checkpoint has a data.pkl in its one folder.", look)


# Texts ---------------------------------------------------------------------------------------------------------------


def _text(head: bytes, source: Source) -> CkptoolError | None:
    """What stands in the place of a file that was not downloaded, and JSON texts."""
    text = head.decode("utf-8-sig", "replace").lstrip()
    start = text[:64].lower()
    if start.startswith("version https://git-lfs"):
        facts = " ".join(text.split()[2:6])
        what = f"{source} is a git-lfs pointer ({facts}), not the file itself"
        why = "The repository was cloned without its large files."
        return NotACheckpoint(what, why, f"Fetch them: {other_program('git lfs pull')}")
    if start.startswith(("<!doctype", "<html", "<head", "<?xml", "<error", "<!--")):
        why = "The download gave a login or error page instead of the file."
        return NotACheckpoint(f"{source} is a web page", why, "Download it again, logged in.")
    if not start.startswith(("{", "[")) or not _is_text(head):
        return None
    if said := re.match(r'\{\s*"(?:error|message|detail|errors)"\s*:\s*"?([^"]{1,120})', text):
        why = "The download failed, and the server's answer was saved instead of the file."
        return NotACheckpoint(f"{source} is a server's answer: {said[1]}", why, "Download it again, logged in.")
    folder = os.path.dirname(source.path)
    weights = [name for name in names_in(folder or ".") if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    beside = listed([quoted(os.path.join(folder, name)) for name in weights], 4)
    name_it = f"Name the file with them: {beside}" if beside else ""
    return NotACheckpoint(
        f"{source} is a JSON text",
        "An index, a configuration or an error message, not the tensors.",
        name_it or "Name the .safetensors or .bin file; beside this one there is none.",
    )


def _nothing_known(head: bytes, source: Source) -> CkptoolError:
    if len(head) > 2 and head[0] == 0x80 and head[1] > 5 and source.read(source.size - 1, 1) == b".":
        return Unsupported(f"{source} is a pickle of the unknown protocol {head[1]}", "Protocols 0 to 5 exist.")
    if not head.strip(b"\0"):
        start = source.read(0, min(MAX_ZEROS, source.size))
        zeros = len(start) - len(start.lstrip(b"\0"))
        more = " or more" if zeros == MAX_ZEROS < source.size else ""
        what = f"{source}: the first {zeros:,}{more} of its {source.size:,} bytes are zero"
        why = "Their space was reserved but never written, or their data was lost in a crash."
        return Corrupt(what, why, "Copy or download it again.")
    if _is_text(head):
        return NotACheckpoint(f"{source} is a text file", f"It begins with: {head[:40].decode('utf-8', 'replace')}")
    what = f"{source} is not a checkpoint that ckptool knows"
    return NotACheckpoint(what, f"It begins with the bytes {head[:8].hex(' ')}.")


def _is_text(head: bytes) -> bool:
    """True for the beginning of a text in UTF-8."""
    try:
        getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(byte >= 32 or byte in b"\t\r\n\f" for byte in head)
