"""`ckptool.open`: a checkpoint, not loaded; `ckptool.load`: what `torch.load` would give, without running the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.graph import no_collection
from ckptool.errors import Corrupt, UsageError, listed
from ckptool.formats import CheckpointLike, open_file, open_whole


def open(file: CheckpointLike) -> Checkpoint:
    """Opens `FILE`, or `FILE#address`, whose part is the tree. Reads tables, no tensor data; runs nothing in the file.

    Of a dictionary or a module in memory, its tensors as entries, none of them copied.

        >>> ckptool.open("model.pt")["state_dict"]["fc.weight"].numpy()

    Raises a `CkptoolError` for what is missing, damaged, ambiguous or not a checkpoint.
    """
    return open_file(file).taken


def load(
    f: CheckpointLike,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    part: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """The values of a checkpoint: what `torch.load` returns, and safely also what `weights_only=True` refuses.

    f: a file of any container, `FILE#ADDRESS` for a part of one, a file open for reading in binary (read from its
    position on), or an opened checkpoint.
    map_location: as `torch.load` takes it. None: where the tensors were saved, or the CPU if this machine has no such
    devices at all.
    pickle_module: None, as nothing is unpickled.  weights_only: ignored; nothing in the file is ever executed.
    mmap: map the file, as `torch.load(mmap=True)` does, which is the default; False reads it and checks its checksums.
    Mapped, nothing is read before it is used, and changes to the tensors stay in memory; but truncating the file
    meanwhile kills the process (`torch.save` to the same path does that; `ckptool.save` replaces the file).
    part: accept what is only a part of a checkpoint: a rank's share, one shard of several.
    pickle_load_args: `encoding`, for Python 2 strings that are not UTF-8 (without it they stay bytes), and `errors`.

    Raises `OnlyAPart` for such a part, `UnsafeObject` naming every object of an unknown class, `UsageError` for
    arguments that it cannot honour, and what reading raises.
    """
    if pickle_module is not None and getattr(pickle_module, "__name__", "") != "pickle":
        what = f"pickle_module={getattr(pickle_module, '__name__', repr(pickle_module))[:80]} is not used"
        raise UsageError(what, "ckptool reads pickles itself and runs nothing in them.", "Leave it out.")
    text = _python_2_text(**pickle_load_args)
    from ckptool.bridge.to_live import build

    with no_collection():
        return build(open_whole(f, part=part).taken, map_location, mmap=mmap is not False, text=text)


def _python_2_text(
    encoding: str | None = None, errors: str = "strict", fix_imports: bool = True, **unknown: Any
) -> Callable[[bytes], Any]:
    """A decoder for strings of Python 2 that are not UTF-8. fix_imports: always done; known because pickle has it."""
    if unknown:
        what = f"load has no argument {listed(sorted(unknown))}"
        raise UsageError(what, "", "It has those of torch.load; a part is 'FILE#ADDRESS'.")
    if encoding is None:
        return bytes
    try:
        "-".encode(encoding, errors)
    except LookupError as error:  # `bytes`, too, which torch takes: here UTF-8 is always text
        why = str(error)
        fix = "Leave it out to get strings that are not UTF-8 as bytes; or name a codec: encoding='latin1'"
        raise UsageError(f"encoding={encoding!r} is not supported", why, fix) from None

    def text(raw: bytes) -> str:
        try:
            return raw.decode(encoding, errors)
        except (UnicodeError, LookupError) as error:
            what, why = f"a Python 2 string is not {encoding}", str(error)[:200]
            raise Corrupt(what, why, "Give its encoding: encoding='latin1'") from None

    return text
