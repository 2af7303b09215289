"""A pickle decoded: opcodes in, a tree of names, values and tensors out; nothing is imported, resolved or called.

`decode` sets the limits, runs the machine (`machine`) and puts whatever goes wrong into words that name the byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.nodes import Global, check_depth
from ckptool.errors import CkptoolError, Corrupt, Truncated
from ckptool.pickles.builders import Builder, PerPickle, StubbedValue, purse
from ckptool.pickles.calls import is_inert
from ckptool.pickles.machine import Machine
from ckptool.pickles.maker import Maker
from ckptool.pickles.tape import DAMAGED, Tape
from ckptool.pickles.texts import gradient_notes, nested_name_notes, python2_notes

# What a file of any size may ask for (in opcodes); a larger file may ask for one per byte.
FREE_OPCODES = 1_000_000
NESTED_NAMES = 4  # the protocol from which on a dot in a name leads into a class
FREE_BYTES = 1 << 15  # that builders may copy of the smallest pickle, and twice the bytes of larger ones


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded pickle. `discarded`: what of it is not inert and not in its tree: made, or imported, and thrown away.

    end: the byte after its STOP.

    byte_strings: how many texts of Python 2 in it are not UTF-8.  unreachable: names of nested classes that its protocol cannot say.
    gradients: how many old parameters had one inside.
    """

    root: Any
    discarded: tuple[Any, ...]
    protocol: int
    end: int
    byte_strings: int = 0
    unreachable: tuple[Global, ...] = ()
    gradients: int = 0

    @property
    def notes(self) -> list[Note]:
        """Notes on what is unusual about the pickle."""
        return [
            *python2_notes(self.byte_strings),
            *nested_name_notes(self.unreachable),
            *gradient_notes(self.gradients),
        ]

    def aside(self) -> tuple[Any, ...]:
        """Everything that is not inert in a pickle of which only the value is used."""
        return self.discarded if is_inert(self.root) else (*self.discarded, self.root)


def decode(
    data: bytes,
    persistent: Callable[[Any], Any],
    builders: Mapping[Global, Builder],
    *,
    name: str = "data.pkl",
    file_bytes: int = 0,
    blobs: Sequence[Any] | None = None,
    place: Callable[[int], int] = int,
) -> Decoded:
    """The tree that the pickle at the start of `data` describes.

    persistent: gives the value for a persistent id.  builders: known functions and what their calls mean.
    name: what to call the pickle in errors.  file_bytes: the size of the file it came from, which bounds the work.
    blobs: for a skeleton (of which the frames were checked), the values that its opcode 0xFF stands for.
    place: where in the file a byte of `data` is.
    Raises `Corrupt`, `Truncated`, `LimitExceeded`, `Unsupported` or `Conflict`; each names the byte.
    """
    left_out = sum(blob.data.length if type(blob) is StubbedValue else len(blob) for blob in blobs or ())
    budget = 2 * max(len(data) + left_out, file_bytes, FREE_BYTES)
    builders = {fn: made.make(purse(budget)) if type(made) is PerPickle else made for fn, made in builders.items()}
    limit = max(FREE_OPCODES, file_bytes)
    tape = Tape(data)
    maker = Maker(tape, builders, limit, bool(blobs))
    machine = Machine(tape, maker, persistent, limit, blobs)
    try:
        root = machine.run()
        check_depth(root, max(len(data), file_bytes))
    except CkptoolError as error:
        if tape.in_frame and type(error) is Truncated:
            error = tape.straddling()
        raise error.within(f"{name} at byte {place(tape.base + tape.at):,}") from None
    except (IndexError, struct.error) as error:
        if str(error) in ("list index out of range", "pop from empty list"):
            raise _underflow().within(name) from None
        if tape.in_frame:
            raise tape.straddling().within(name) from None
        raise Truncated(
            f"{name}: the pickle ends at byte {place(len(data)):,}, before its STOP", "The file was cut off."
        ) from None
    except KeyError as error:
        raise Corrupt(f"{name} refers to value {error}, which was not stored", DAMAGED) from None
    except UnicodeDecodeError:
        raise Corrupt(f"{name} holds text that is not UTF-8", DAMAGED) from None
    unreachable = tuple(name for name in maker.names if "." in name.name) if machine.protocol < NESTED_NAMES else ()
    return Decoded(
        root, maker.discarded(root), machine.protocol, tape.at, maker.byte_strings, unreachable, maker.gradients
    )


def _underflow() -> Corrupt:
    return Corrupt("the pickle takes a value that is not there", "It was damaged, or is not a pickle at all.")
