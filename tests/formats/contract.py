"""The law that every container keeps: what was read, written and read again is the same tree, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptoolError
from ckptool.formats import Format, read
from fixtures.traps import TRAPS
from tests.support.files import carry_out, load, torch_bytes, written
from tests.support.same import assert_same_objects, assert_same_tree

# Vectors with calls of functions that nobody here knows: written only when told to.
UNKNOWN_CALLS = {
    "11-subclass",
    "11-subclass-with-attributes",
    "11-subclass-in-a-parameter",
    "11-masked",
    "11-wrapper-subclass",
    "20-unknown-call",
    "20-defaultdict-of-unknown",  # a name that stands by itself
}


def vector(name: str, folder: Path) -> Path:
    """A file that torch made of a vector of `fixtures/traps`."""
    return written(torch_bytes(TRAPS[name]()), folder / "original.pt")


def round_trip(container: Format, checkpoint: Checkpoint, out: Path, **options: Any) -> Checkpoint:
    """Writes a checkpoint, reads it again, and asserts that it is the same, that writing it twice gives the same bytes,
    and that the input was not touched."""
    source = checkpoint.source
    before = Path(source.path).read_bytes() if source else b""
    carry_out(container.write(checkpoint, **options), out)
    again = read(out)
    assert again.container == container.NAME
    assert_same_tree(checkpoint, again)
    twice = carry_out(container.write(again, **options), out.with_name("twice" + out.suffix))
    assert twice.read_bytes() == out.read_bytes()
    if source:
        assert Path(source.path).read_bytes() == before
    return again


def refusal(action: Any) -> CkptoolError | None:
    """The error with which an action is refused; it says what, why and what to do."""
    try:
        action()
    except CkptoolError as error:
        assert error.what and error.why and error.code != "error"
        return error
    return None


def same_for_torch(original: Path, out: Path, *, mmap: bool) -> None:
    """Fails unless torch loads the same from both, bit for bit; with `weights_only=True` if it so loads the
    original."""
    try:
        before, safe = load(original, mmap=mmap), True
    except Exception as error:  # noqa: BLE001 (torch's refusal: an UnpicklingError, but also others)
        assert "eights_only" in str(error) or "nsupported" in str(error), error
        before, safe = load(original, mmap=mmap, weights_only=False), False
    assert_same_objects(before, load(out, mmap=mmap, weights_only=safe))
