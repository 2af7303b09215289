"""A pickle decoded: opcodes in, a tree of names, values and tensors out; nothing is imported, resolved or called.

`decode` sets the limits, runs the machine (`machine`) and puts whatever goes wrong into words that name the byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.graph import alike, check_depth
from ckptool.checkpoint.nodes import Global
from ckptool.commands import FILE, OUT, command
from ckptool.errors import CkptoolError, Corrupt, Truncated, counted, form, listed
from ckptool.pickles.calls import is_inert
from ckptool.pickles.machine import Machine
from ckptool.pickles.objects import DAMAGED, ObjectMaker, PickleReader
from ckptool.pickles.strings import StubbedValue
from ckptool.pickles.torch_objects import Builder, PerPickle, purse

# What a file of any size may ask for (in opcodes); a larger file may ask for one per byte.
FREE_OPCODES = 1_000_000
NESTED_NAMES = 4  # the protocol from which on a dot in a name leads into a class
OLD_GRADIENTS, REPEATED_KEY = "old-gradients", "repeated-key"  # codes of notes
MAX_REPEATED = 100  # keys given twice whose values are compared
FREE_BYTES = 1 << 15  # that builders may copy of the smallest pickle, and twice the bytes of larger ones


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded pickle. `discarded`: what of it is not inert and not in its tree: made, or imported, and thrown away.

    end: the byte after its STOP.  notes: on what is unusual about it.
    """

    root: Any
    discarded: tuple[Any, ...]
    protocol: int
    end: int
    notes: tuple[Note, ...] = ()

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
    stubs: Sequence[Any] | None = None,
    place: Callable[[int], int] = int,
) -> Decoded:
    """The tree that the pickle at the start of `data` describes.

    persistent: gives the value for a persistent id.  builders: known functions and what their calls mean.
    name: what to call the pickle in errors.  file_bytes: the size of the file it came from, which bounds the work.
    stubs: for a skeleton (of which the frames were checked), the values that its opcode 0xFF stands for.
    place: where in the file a byte of `data` is.
    Raises `Corrupt`, `Truncated`, `LimitExceeded`, `Unsupported` or `Conflict`; each names the byte.
    """
    left_out = sum(stub.data.length if type(stub) is StubbedValue else len(stub) for stub in stubs or ())
    budget = 2 * max(len(data) + left_out, file_bytes, FREE_BYTES)
    builders = {
        fn: partial(made.build, purse(budget)) if type(made) is PerPickle else made for fn, made in builders.items()
    }
    limit = max(FREE_OPCODES, file_bytes)
    reader = PickleReader(data)
    objects = ObjectMaker(reader, builders, limit, bool(stubs))
    machine = Machine(reader, objects, persistent, limit, stubs)
    try:
        root = machine.run()
        check_depth(root, max(len(data), file_bytes))
    except CkptoolError as error:
        if reader.in_frame and type(error) is Truncated:
            error = reader.straddling()
        raise error.within(f"{name} at byte {place(reader.base + reader.at):,}") from None
    except (IndexError, struct.error) as error:
        if str(error) in ("list index out of range", "pop from empty list"):
            what = "the pickle pops from an empty stack"
            raise Corrupt(what, "It was damaged, or is not a pickle at all.").within(name) from None
        if reader.in_frame:
            raise reader.straddling().within(name) from None
        raise Truncated(f"{name}: the pickle ends at byte {place(len(data)):,}, before its STOP") from None
    except KeyError as error:
        raise Corrupt(f"{name} refers to value {error}, which was not stored", DAMAGED) from None
    except UnicodeDecodeError:
        raise Corrupt(f"{name} holds text that is not UTF-8", DAMAGED) from None
    return Decoded(root, objects.discarded(root), machine.protocol, reader.at, (*_notes(objects, machine.protocol),))


def _notes(objects: ObjectMaker, protocol: int) -> Iterator[Note]:
    """Notes on what is unusual about a pickle."""
    if count := objects.byte_strings:
        what = f"{counted(count, 'text')} of Python 2 {form(count, 'is', 'are')} not UTF-8: keys among them "
        yield Note("python2-text", f"{what}were read as latin-1, values are kept as bytes")
    nested = [name for name in objects.names if "." in name.name] if protocol < NESTED_NAMES else []
    if count := len(nested):
        names = f"{form(count, 'the name', 'the names')} {listed(nested, 1)}"
        what = f"{names} {form(count, 'has a dot', 'have dots')}, which pickles below protocol 4 cannot express"
        yield Note("nested-name", f"{what}: torch.load fails there", command("convert", FILE, out=OUT))
    if count := objects.gradients:  # saved by torch before 0.2
        what = f"{counted(count, 'gradient') if count > 1 else 'a gradient'} inside of parameters"
        why = "as torch once saved them: no later torch reads them, and a rewritten file leaves them out"
        yield Note(OLD_GRADIENTS, f"{what}, {why}")
    # Keys with two values, or with ones that are too long to compare.
    replaced = [
        str(key)[:80]
        for number, (key, old, new) in enumerate(objects.repeated)
        if number >= MAX_REPEATED or not alike(old, new, 1_000)
    ]
    if count := len(replaced):
        what = f"{form(count, 'the key', 'the keys')} {listed(replaced, 3)} {form(count, 'was', 'were')} given twice"
        yield Note(REPEATED_KEY, f"{what}, with different values: the last counts, as in every reader")


def protocol_notes(protocol: int) -> list[Note]:
    """A note on a pickle of protocol 4 or 5: torch/_weights_only_unpickler.py knows none of their opcodes."""
    if protocol < 4:
        return []
    what = f"pickled with protocol {protocol}, which torch.load(weights_only=True) does not read"
    return [Note("pickle-protocol", what, command("convert", FILE, out=OUT))]


def no_storage(pid: Any) -> Any:
    """Stands for the storages of a pickle that has none."""
    raise Corrupt("a persistent id in a table that has no storages", "The file is of another kind.")
