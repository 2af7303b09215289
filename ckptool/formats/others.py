"""What a file is when it is no checkpoint that is read here: names lie, first bytes do not.

Sources: the magic numbers of file(1), the git-lfs pointer specification, torch/serialization.py for the older torch files.
"""

from __future__ import annotations

from ckptool.errors import CkptoolError, Corrupt, NotACheckpoint, Unsupported, listed, printable
from ckptool.files import Folder, Input, Source

_LEGACY_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")  # 0x1950a86a20f9469cfc6c, inside a pickled LONG1

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ\x00": ("xz", "xz -dk"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dk"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x"),
    b"Rar!\x1a\x07": ("RAR", "unrar x"),
}
_OTHER_MODELS = {
    b"GGUF": "a GGUF model",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x93NUMPY": "a numpy array (.npy)",
    b"PYTORCH1": "a PyTorch preview archive",
}
_OTHER_FILES = {
    b"\x89PNG": "a PNG image",
    b"\x7fELF": "an ELF program",
    b"%PDF": "a PDF document",
    b"\xff\xd8\xff": "a JPEG image",
    b"MZ": "a Windows program",
}


def refuse(head: bytes, source: Input) -> CkptoolError:
    """The error for a file or folder that no format here reads, saying what it is as exactly as its first bytes allow."""
    if isinstance(source, Folder):
        return _no_checkpoint_in(source)
    return (
        _text_file(head, source)
        or _older_torch(head, source)
        or _by_magic(head, source)
        or _nothing_known(head, source)
    )


def _no_checkpoint_in(folder: Folder) -> CkptoolError:
    held = f"It holds {listed([printable(name) for name in folder.names], 4)}." if folder.names else "It is empty."
    return NotACheckpoint(
        f"{folder} is a folder, not a checkpoint",
        f"ckptool looked for *.safetensors.index.json, *.bin.index.json and .metadata. {held}",
        f"Name the file: ls {printable(folder.path)}; or see what is there: ckptool scan {printable(folder.path)}",
    )


def _by_magic(head: bytes, source: Source) -> CkptoolError | None:
    for magic, (name, command) in _COMPRESSED.items():
        if head.startswith(magic):
            return Unsupported(
                f"{source} is compressed with {name}",
                "The checkpoint is inside.",
                f"Unpack it first: {command} {source}",
            )
    for magic, name in _OTHER_MODELS.items():
        if head.startswith(magic):
            return Unsupported(f"{source} is {name}", "ckptool reads what torch.save and safetensors write.")
    for magic, name in _OTHER_FILES.items():
        if head.startswith(magic):
            return NotACheckpoint(f"{source} is {name}, whatever its name says")
    if head[257:262] == b"ustar":
        return Unsupported(
            f"{source} is a tar archive", "The checkpoint may be inside.", f"See what is in it: tar tf {source}"
        )
    return None


def _text_file(head: bytes, source: Source) -> CkptoolError | None:
    start = head.lstrip()[:64].lower()
    if start.startswith(b"version https://git-lfs"):
        facts = printable(" ".join(head.decode("utf-8", "replace").split()[2:6]))
        return NotACheckpoint(
            f"{source} is a git-lfs pointer ({facts}), not the file itself",
            "The repository was cloned without its large files.",
            "Fetch them: git lfs pull",
        )
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return NotACheckpoint(
            f"{source} is a web page",
            "The download gave a login or error page instead of the file.",
            "Download it again, logged in.",
        )
    if start.startswith((b"{", b"[")) and _is_text(head):
        return NotACheckpoint(
            f"{source} is a JSON text",
            "An index or an error message, not the tensors.",
            "Name the .safetensors or .bin file beside it.",
        )
    return None


def _older_torch(head: bytes, source: Source) -> CkptoolError | None:
    if _LEGACY_MAGIC in head[:32] or b"L119547037146038801333356L\n" in head[:64]:
        return Unsupported(
            f"{source} is a checkpoint in torch's format before 1.6",
            "This version reads zip checkpoints (torch 1.6 and newer) and safetensors.",
            "Convert it with torch: torch.save(torch.load(FILE, map_location='cpu', weights_only=True), 'new.pt')",
        )
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        return Unsupported(
            f"{source} is a bare pickle (protocol {head[1]})",
            "torch.save puts its pickles into a zip; this is the work of another library.",
        )
    return None


def _nothing_known(head: bytes, source: Source) -> CkptoolError:
    if not head.strip(b"\0"):
        return Corrupt(
            f"{source} begins with {len(head)} zero bytes",
            "It was reserved but never written, or lost in a crash.",
            "Copy or download it again.",
        )
    if _is_text(head):
        return NotACheckpoint(
            f"{source} is a text file", f"It begins with: {printable(head[:40].decode('utf-8', 'replace'))}"
        )
    return NotACheckpoint(
        f"{source} is not a checkpoint that ckptool knows", f"It begins with the bytes {head[:8].hex(' ')}."
    )


def _is_text(head: bytes) -> bool:
    return b"\0" not in head and all(byte >= 32 or byte in b"\t\r\n\f" for byte in head)
