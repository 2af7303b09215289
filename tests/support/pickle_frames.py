"""Frames of protocol 4: whole ones, and such as tear what is in them."""

import struct


def frame(content: bytes, size: int | None = None) -> bytes:
    return b"\x95" + struct.pack("<Q", len(content) if size is None else size) + content


WHOLE_FRAMES = {
    "one up to the end": b"\x80\x04" + frame(b"]."),
    "one before the end": b"\x80\x04" + frame(b"]") + b".",
    "several": b"\x80\x04" + frame(b"](") + frame(b"K\x01K\x02") + b"K\x03" + frame(b"e.") + b"after",
    "an empty one": b"\x80\x04" + frame(b"") + b"](K\x01" + frame(b"") + b"e.",
    "around a memo": b"\x80\x04" + frame(b"]\x94h\x00") + b"\x86" + frame(b"."),
    "around a long text": b"\x80\x04" + frame(b"X\x64\0\0\0" + b"x" * 100) + frame(b"."),
    "ends with the byte that we put behind one": b"\x80\x04" + frame(b"C\x01\xfe") + b".",
}


TORN_FRAMES = {
    "an argument of one byte": frame(b"](K", 3) + b"\x01e.",
    "an argument of four bytes": frame(b"](J\1\0", 5) + b"\0\0e.",
    "a short text": frame(b"]\x8c\x05ab", 5) + b"cdea.",
    "a text of 40 bytes": frame(b"]X\x28\0\0\0" + b"x" * 20, 26) + b"x" * 20 + b"a.",
    "a text of 100 bytes": frame(b"]X\x64\0\0\0" + b"x" * 20, 26) + b"x" * 80 + b"a.",
    "bytes": frame(b"]B\x64\0\0\0" + b"x" * 20, 26) + b"x" * 80 + b"a.",
    "a name": frame(b"]ccoll", 6) + b"ections\nOrderedDict\na.",
    "the line of a number": frame(b"](I12", 5) + b"34\ne.",
    "the header of a frame": frame(b"]\x95\1\0", 4) + b"\0\0\0\0\0\0.",
    "a recall": frame(b"]\x94(h", 4) + b"\0e.",
    "a frame in a frame": frame(b"](" + frame(b"K\x01") + b"e."),
    "a frame in a frame, of the same end": frame(b"](" + frame(b"K\x01e.")),
    "longer than the pickle": frame(b"].", 3),
    "much longer": frame(b"].", 1 << 63),
    "goes on after the end": frame(b"].K\x01"),
}
