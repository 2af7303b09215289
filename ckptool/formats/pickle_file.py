"""`pickle`: a pickle by itself, as `pickle.dump` writes it, of any protocol. It is read, not run, and not written.

It may hold numpy arrays, whose data stays in the file, and tensors, which torch pickles as a stream inside of a byte
string (`torch.storage._load_from_bytes`; see `torch_legacy.py`). One file is one pickle: what follows it would be lost
without a word, so a file of several is refused. Sources: PEP 307, PEP 3154, PEP 574 and Lib/pickletools.py; numpy's
`__reduce__` methods; joblib/numpy_pickle.py for what is no pickle.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from ckptool.checkpoint import Checkpoint, FileRange
from ckptool.checkpoint.files import Input, Source
from ckptool.errors import Ambiguous, CkptoolError, Truncated, Unsupported
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import decode, decode_lazily, reaches_a_call, skeleton

NAME = "pickle"
SMALLEST = 4  # bytes; an empty dictionary of protocol 2 has as many
_PROTO = 0x80
# How a pickle of protocol 0 or 1 begins: with a container, a class, an object of a class, or a tuple of such things.
# Their opcodes are letters and brackets, so texts begin like that too; whoever matches is tried.
_NAME = rb"[\w.]{1,200}\n[\w.]{1,200}\n"
_OLD = re.compile(
    rb"[\]}]|\([dlt]|\(*(?:c%b|\(i%b|\((?:[\]}(KMJX]|I-?\d+\n|L-?\d+L?\n|F[-\d]|S['\"]|V[^\n]*\n))" % (_NAME, _NAME)
)
_JOBLIB = b"joblib.numpy_pickle"
_FIRST = 1 << 20  # bytes of a file that cannot be read, in which joblib's name is looked for


def detect(head: bytes, source: Input) -> bool:
    """True for what begins as a pickle; older protocols, which begin like texts, are tried as far as `head` goes."""
    if not isinstance(source, Source) or source.size < SMALLEST:
        return False
    if head[0] == _PROTO:
        return head[1:2] <= b"\5"
    if _OLD.match(head) is None:
        return reaches_a_call(source)
    try:
        decode(head, lambda _: None, {}, name="")
    except Truncated:
        return source.size > len(head)
    except CkptoolError:
        return reaches_a_call(source)
    return True


def read(source: Source) -> Checkpoint:
    """The checkpoint in a bare pickle. Reads its opcodes; the data of large arrays and of tensors stays in the file.

    Raises `Ambiguous` for a file of several pickles, `Unsupported` for one that is a part of something else (joblib, a
    torch zip), and what `skeleton` and `decode` raise.
    """
    try:
        opcodes = skeleton(FileRange(source, 0, source.size), name=str(source))
        decoded = decode_lazily(opcodes, _refuse_id, BUILDERS, name=str(source), file_bytes=source.size, arrays=True)
    except CkptoolError:
        if _JOBLIB in source.read(0, min(_FIRST, source.size)):
            fix = "With joblib: pickle.dump(joblib.load(FILE), open('new.pkl', 'wb'))"
            raise Unsupported(f"{source} was written by joblib, which alone reads it", fix=fix) from None
        raise
    if rest := source.size - opcodes.end:
        why = (
            "pickle.load reads only the first: pickle.dump was called several times, or something may be hidden there."
        )
        fix = f"Take the first by itself: head -c {opcodes.end} {source} > first.pkl"
        raise Ambiguous(f"{source} has {rest:,} bytes after the end of its pickle", why, fix)
    notes = decoded.notes
    return Checkpoint(decoded.root, NAME, {}, source, notes=notes, discarded=decoded.discarded)


def _refuse_id(pid: Any) -> NoReturn:
    if type(pid) is tuple and pid and pid[0] == "storage":
        fix = "Name the archive itself, or zip its folder again: zip -0 -r NEW.pt FOLDER"
        raise Unsupported("it is the data.pkl of a torch zip, extracted", fix=fix)
    shown = f" ({pid[:40]})" if type(pid) is str else ""
    what = f"it refers to something outside the pickle by a persistent id{shown}"
    raise Unsupported(what, fix="Load it with the program that wrote it, and save its weights with torch.save.")
