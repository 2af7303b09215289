"""The first bytes of files that other programs write beside checkpoints, by words of what they are."""

import struct


def varint_text(field: int, text: bytes) -> bytes:
    return bytes([field << 3 | 2, len(text)]) + text


OTHER_MODELS = {
    "GGUF": b"GGUF\x03\0\0\0" + bytes(16),
    "GGML": b"tjgg\x03\0\0\0" + bytes(16),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "ONNX": b"\x08\x08" + varint_text(2, b"pytorch") + varint_text(3, b"2.13.0") + b"\x3a\x80\x01\x0a",
    "SavedModel": b"\x08\x01\x12\xb4\x0a\x0a\x20" + bytes(60),
    "TensorFlow graph": varint_text(1, varint_text(1, b"input") + varint_text(2, b"Placeholder")),
    "TensorFlow checkpoint": b"\0\x05" + bytes(98) + b"\x01" * 40 + bytes.fromhex("57fb808b247547db"),
    "TensorFlow Lite": b"\x1c\0\0\0TFL3" + bytes(40),
    "ExecuTorch": b"\x38\0\0\0ET12" + bytes(40),
    "ONNX Runtime": b"\x38\0\0\0ORTM" + bytes(40),
    "MXNet": struct.pack("<QQ", 0x112, 0) + bytes(20),
    "preview archive": b"PYTORCH1" + bytes(56),
    "object of Lua Torch": struct.pack("<iii", 4, 1, 3) + b"V 1" + struct.pack("<i", 14) + b"nn.Sequential\0",
    "table of Lua Torch": struct.pack("<iii", 3, 1, 2) + bytes(20),
    "spaCy": b"\x84\xa5nodes\xdc\0\x10" + bytes(20),
    "Flax": b"\x81\xa6params\x82\xa6kernel" + bytes(20),
    "TVM": struct.pack("<QQQ", 0xF7E58D4F05049CB7, 0, 1) + bytes(20),
    "fastText": struct.pack("<ii", 793712314, 12) + bytes(20),
    "Core ML": struct.pack("<II", 1, 2).ljust(64, b"\0") + struct.pack("<II", 0xDEADBEEF, 1) + bytes(60),
    "SentencePiece": b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0\x18\x02" + bytes(20),
    "fairseq or Megatron": b"MMIDIDX\0\0" + bytes(20),
}
