"""Files that are no checkpoints, and what they are: names lie, first bytes do not.

Sources: the magic numbers of file(1), the git-lfs pointer specification, onnx.proto, saved_model.proto, the
flatbuffers identifiers of TFLite (`TFL3`) and ExecuTorch (`ET12`), LevelDB's table format, the writers of Lua Torch
(File.lua), Thinc (model.py), TVM (file_utils.cc), fastText (fasttext.cc), fairseq (indexed_dataset.py) and coremltools
(MILBlob's StorageFormat.hpp).
"""

from __future__ import annotations

import os
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable

from ckptool.checkpoint.files import Folder, Input, Readable, folder_at
from ckptool.checkpoint.paths import free_name
from ckptool.commands import command, other_program
from ckptool.errors import CkptoolError, Corrupt, NoCheckpointInside, NotACheckpoint, Unsupported, listed
from ckptool.formats.folder import names_in


class OtherProgram(Unsupported):
    """It is a file that another program wrote for itself: a tokenizer, a model of ONNX."""


_SUFFIXES = ".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".th"  # of files named like a checkpoint
_READS = "ckptool reads what torch.save and safetensors write."
_AS_TEXT = rb"(?i)(?:\xef\xbb\xbf)?\s*"
_PAGE = "The server sent a login page or an error message instead of the file."
_AGAIN, _INSIDE = "Download it again, logged in.", "The checkpoint is inside."
_PACKED = "torch.save writes none; models are packed like that to get past scanners that look for pickles."
# The first bytes of a file, tried in this order; the error; what it is (`{}`: what the pattern has in a group), what
# that means, and what to do: behind a colon the program that unpacks it.
_KINDS: tuple[tuple[bytes, type[CkptoolError], str, str, str], ...] = (
    (_AS_TEXT + rb"version https://git-lfs\S*\s*([^\0]{0,200})", NotACheckpoint,
        "a git-lfs pointer ({}), not the file itself",
        "The repository was cloned without its large files.", "Fetch them: git lfs pull"),
    (_AS_TEXT + rb"<(?:!doctype|html|head|\?xml|error|!--)", NotACheckpoint, "a web page", _PAGE, _AGAIN),
    (_AS_TEXT + rb'\{\s*"(?:error|message|detail|errors)"\s*:\s*"?([^"\0]{1,120})', NotACheckpoint,
        "a server's answer: {}", _PAGE, _AGAIN),
    (rb"\x1f\x8b", Unsupported, "compressed with gzip", _INSIDE, "Unpack it first: gzip -dc"),
    (rb"BZh", Unsupported, "compressed with bzip2", _INSIDE, "Unpack it first: bzip2 -dc"),
    (rb"\xfd7zXZ\x00", Unsupported, "compressed with xz", _INSIDE, "Unpack it first: xz -dc"),
    (rb"\x28\xb5\x2f\xfd", Unsupported, "compressed with zstd", _INSIDE, "Unpack it first: zstd -dc"),
    (rb"\x04\x22\x4d\x18", Unsupported, "compressed with lz4", _INSIDE, "Unpack it first: lz4 -dc"),
    (rb"(?:UEsDB|gA[A-Z]{2}|.{3}A{7}B7)[A-Za-z0-9+/\r\n]{60}", Unsupported,
        "encoded in base64", _INSIDE, "Decode it first: base64 -d"),
    (rb"7z\xbc\xaf\x27\x1c", Unsupported,
        "a 7-Zip archive, whatever its name says", _PACKED, "If you trust where it is from: 7z x"),
    (rb"Rar!\x1a\x07", Unsupported,
        "a RAR archive, whatever its name says", _PACKED, "If you trust where it is from: unrar x"),
    (rb".{257}ustar", Unsupported,
        "a tar archive, but not one of torch's",
        "Its files are read one by one, when they are unpacked.", "See what is in it: tar tf"),
    *((magic, NotACheckpoint, f"{what}, whatever its name says", "", "") for magic, what in (
        (rb"\x89PNG", "a PNG image"),
        (rb"\x7fELF", "an ELF program"),
        (rb"%PDF", "a PDF document"),
        (rb"\xff\xd8\xff", "a JPEG image"),
        (rb"GIF8", "a GIF image"),
        (rb"MZ", "a Windows program"),
        (rb"\xcf\xfa\xed\xfe", "a macOS program"),
        (rb"SQLite format 3\0", "an SQLite database"),
        (rb"#!", "a script"))),
    *((magic, OtherProgram, what, _READS, "") for magic, what in (
        (rb"GGUF", "a GGUF model (llama.cpp)"),
        (rb"tjgg|lmgg", "a GGML model (llama.cpp)"),
        (rb"\x89HDF\r\n", "an HDF5 file (Keras .h5, or data)"),
        (rb"PYTORCH1", "a PyTorch preview archive (Caffe2, before 1.0)"),
        (rb"PAR1", "a Parquet table"),
        (rb"ARROW1", "an Arrow table"),
        (rb"\x12\x01\0{6}", "an MXNet parameter file"),
        (rb"\x04\0{3}\x01\0{3}\x03\0{3}V 1", "an object of Lua Torch (.t7)"),
        (rb"\x03\0{3}\x01\0{3}", "a table of Lua Torch (.t7)"),
        (rb"\x84\xa5nodes", "a model of spaCy or Thinc (MessagePack)"),
        (rb"\x81\xa6params", "a Flax checkpoint (MessagePack)"),
        (rb"\xb7\x9c\x04\x05O\x8d\xe5\xf7", "a TVM parameter file"),
        (rb"\xba\x16O/", "a fastText model"),
        (rb"MMIDIDX\0\0", "the index of a fairseq or Megatron data set (.idx)"),
        (rb"TNTIDX\0\0", "the index of a fairseq data set (.idx)"),
        (rb".{4}TFL3", "a TensorFlow Lite model"),
        (rb".{4}ET12", "an ExecuTorch program (.pte)"),
        (rb".{4}ORTM", "an ONNX Runtime model"),
        (rb"\x0a[\x01-\x40]\x0a[\x01-\x30]<[^>\0]{1,40}>", "a tokenizer of SentencePiece"),
        (rb"\x08[\x01-\x20](?:\x12.[ -~]*[\x1a\x22\x28\x3a\x42]|\x3a)", "an ONNX model"),
        (rb"\x08\x01\x12[\x80-\xff]*[\x01-\x7f]\x0a", "a TensorFlow SavedModel"),
        (rb"\x0a[\x80-\xff]*[\x01-\x7f]\x0a.[ -~]+\x12.(?:Placeholder|Const|NoOp|VarHandleOp|VariableV2)",
            "a TensorFlow graph"),
        (rb".{4}\x02\0\0\0.{56}\xef\xbe\xad\xde", "the weights of a Core ML model (weight.bin)"))),
)  # fmt: skip
_TABLE_END = bytes.fromhex("57fb808b247547db")  # of a LevelDB table
MAX_ZEROS = 1 << 20
# Of folders: a name in them, and what they are.
_FOLDERS = {
    ".snapshot_metadata": "a snapshot of torchsnapshot",
    "checkpoint_metadata.json": "a checkpoint of nanotron",
    "_CHECKPOINT_METADATA": "a checkpoint of Orbax (JAX)",
    "saved_model.pb": "a SavedModel of TensorFlow",
}
_BESIDE_BIN = {".idx": "a fairseq or Megatron data set", ".xml": "a model of OpenVINO", ".param": "a model of ncnn"}


def refuse(head: bytes, source: Input) -> CkptoolError:
    """The error for a file or folder that no format reads, naming what it is as exactly as its first bytes allow."""
    if isinstance(source, Folder):
        if what := next((what for name, what in _FOLDERS.items() if name in source), ""):
            fix = "With the program that wrote it: load it there, and torch.save the model's state dict."
            return OtherProgram(f"{source} is {what}", "It has a layout of its own, which ckptool does not read.", fix)
        held = f"It holds {listed(source.names, 4)}." if source.names else "It is empty."
        expected = "an index of shards (*.index.json), .metadata of torch.distributed, and files like model.safetensors"
        weights = [name for name in source.names if name.lower().endswith(_SUFFIXES)]
        if len(weights) == 1 and not any(folder_at(os.path.join(source.path, name)) for name in source.names):
            fix = f"Name the file in it: {command('inspect', os.path.join(source.path, *weights))}"
        elif "refs" in source and (revisions := names_in(snapshots := os.path.join(source.path, "snapshots"))):
            fix = f"Name a revision of the model: {command('inspect', os.path.join(snapshots, revisions[-1]))}"
        else:
            fix = f"Name a checkpoint in it; to see which: {command('scan', source.path)}"
        why = f"ckptool looked for {expected}. {held}"
        return NoCheckpointInside(f"{source} is a folder, not a checkpoint", why, fix)
    for pattern, error, what, why, fix in _KINDS:
        if match := re.match(pattern, head, re.DOTALL):
            detail = " ".join(match[1].decode("utf-8", "replace").split()) if match.re.groups else ""
            advice, colon, program = fix.partition(": ")
            unpacked = re.sub(r"\.(?:gz|bz2|xz|zst|lz4)$", "", source.path)
            # `>` replaces what is there.
            out = free_name(unpacked if unpacked != source.path else f"{unpacked}.unpacked", ".unpacked")
            files = () if program.startswith("git") else (source.path,)
            how = program and other_program(program, *files, into=out if program.endswith(("-dc", "-d")) else "")
            # What was opened without a name cannot be named to a program.
            is_named = not (program and files and source.path.startswith("<"))
            fix = f"{advice}{colon}{how}" if is_named else "Unpack it first."
            return error(f"{source} is {what.format(detail)}", why, fix)
    for ending, what in _BESIDE_BIN.items() if source.path.endswith(".bin") else ():
        if os.path.isfile(source.path[:-4] + ending):
            return OtherProgram(f"{source} is the data of {what}, which the {ending} file beside it describes", _READS)
    if source.size >= 48 and source.read(source.size - 8, 8) == _TABLE_END:
        return OtherProgram(f"{source} is the index of a TensorFlow checkpoint", _READS)
    if len(head) > 2 and head[0] == 0x80 and head[1] > 5 and source.read(source.size - 1, 1) == b".":
        return Unsupported(f"{source} is a pickle of the unknown protocol {head[1]}", "Protocols 0 to 5 exist.")
    if not head.strip(b"\0"):
        start = source.read(0, min(MAX_ZEROS, source.size))
        zeros = len(start) - len(start.lstrip(b"\0"))
        suffix = " or more" if zeros == MAX_ZEROS < source.size else ""
        what = f"{source}: the first {zeros:,}{suffix} of its {source.size:,} bytes are zero"
        why = "The space was reserved but never written, or the data was lost in a crash."
        return Corrupt(what, why, "Copy or download it again.")
    try:
        getincrementaldecoder("utf-8")().decode(head)
        is_text = all(byte >= 32 or byte in b"\t\r\n\f" for byte in head)
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        what = f"{source} is not a checkpoint that ckptool knows"
        return NotACheckpoint(what, f"It begins with the bytes {head[:8].hex(' ')}.")
    if re.match(_AS_TEXT + rb"[\[{]", head):
        scan = command("scan", os.path.dirname(source.path) or os.curdir)
        why = "It is an index, a configuration or an error message, not the tensors."
        return NotACheckpoint(f"{source} is a JSON file", why, f"See which files beside it have tensors: {scan}")
    return NotACheckpoint(f"{source} is a text file", f"It begins with: {head[:40].decode('utf-8', 'replace')}")


# Zip archives --------------------------------------------------------------------------------------------------------

# As above, of an archive: the pattern finds one of the names of its records. Where the last two are empty: what it
# holds, and how to unpack it.
_ZIPS: tuple[tuple[str, type[CkptoolError], str, str, str], ...] = (
    (r"^MAR-INF/MANIFEST\.json$", Unsupported, "a TorchServe archive (.mar)", "", ""),
    (r"(?:^|/)model\.json$", Unsupported, "a model of torch 1.0's first script format (model.json)",
        "It holds no pickle to read.", "With torch: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')"),
    (r"\A(?![\s\S]*/data/)[\s\S]*^[^/\n]+/\.data/serialization_id$", Corrupt, "a file of torch.save without a value",
        "torch.save failed before it wrote any, as it does where an object cannot be pickled.",
        "Look at the error that it ended with, and save again, or take an earlier checkpoint."),
    *((pattern, NotACheckpoint, f"{what}, but not a PyTorch checkpoint", "", "") for pattern, what in (
        (r"^\[Content_Types\]\.xml$", "an Office document"),
        (r"^META-INF/MANIFEST\.MF$", "a Java archive"),
        (r"^AndroidManifest\.xml$", "an Android program"),
        (r"^model\.weights\.h5$", "a Keras model (.keras)"),
        (r"^mimetype$", "an OpenDocument or EPUB document"),
        ("", "a zip archive"))),
)  # fmt: skip


def other_zip(source: Readable, records: Iterable[str]) -> CkptoolError:
    """The error for a zip archive that is no checkpoint, by the names of its records: what it is, and what to do."""
    names = sorted(set(records))
    error, what, why, fix = next(row for row in _ZIPS if re.search(row[0], "\n".join(names), re.MULTILINE))[1:]
    files = [name for name in names if name.endswith(_SUFFIXES)]
    held = f"It holds {listed(files, 4)}." if files else "It holds no file named like a checkpoint, and no data.pkl."
    unzip = f"Unpack it: {other_program('unzip -d', f'{source.file.path}.unpacked', source.file.path)}"
    return error(f"{source} is {what}", why or held, fix or unzip)
