"""Notes on what training changes and no checkpoint has, as far as it can be seen: in the objects that were given to
`Run`, and in the variables of the script that runs the loop. Each is named once, with the line to write.

The search takes time, so it is done only at the 1st, 2nd, 4th, 8th … save of a process. It reads only classes and plain
attributes: no code of the objects is run.
"""

from __future__ import annotations

import dis
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FrameType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckptool.bridge.modules import unwrapped
from ckptool.errors import listed, printable
from ckptool.training import moving
from ckptool.training.batches import epochs_of, parts_of
from ckptool.training.rng import is_generator
from ckptool.training.state import SETTING, Objects, Schedule

if TYPE_CHECKING:
    from ckptool.training.run import Run

VARIABLE = "variable"  # a kind like those of `moving`
_HOW = {  # what to write, by the kind of what changes; for attributes and buffers as for variables
    moving.GENERATOR: "give it: ckptool.Run(…, {short}={name})",
    moving.NOT_PERSISTENT: "write: register_buffer(…, persistent=True)",
    moving.MODULE_ATTRIBUTE: "make it a buffer, or give the module get_extra_state() and set_extra_state()",
    SETTING: "set it in every epoch or step, by run.epoch or run.step",
    VARIABLE: 'if a later step needs it, make it a value of the run: run["{short}"] = {name}',
}
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = re.compile(rf"<frozen|{re.escape(sysconfig.get_path('stdlib'))}|.*[/\\\\](?:site|dist)-packages[/\\\\]")
_FIXED = (int, float, complex, str, bytes, tuple, frozenset, range, type(None))
_MENTION = re.compile("(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)(?!_AND_CLEAR)")


class Looks:
    """What the last look saw. groups: each optimizer's count of parameter groups at the start.  saves: by this process.
    entries: what was reached, as in `moving`.  ids: of the objects in variables.  noted: the names already reported."""

    def __init__(self, objects: Objects) -> None:
        self.groups = {name: len(each.param_groups) for name, each in objects.of(torch.optim.Optimizer).items()}
        self.saves = 0
        self.entries: dict[str, str] = {}
        self.ids: dict[str, int] = {}
        self.noted: set[str] = set()

    def notes(self, run: Run, first: bool) -> Iterator[str]:
        """The notes to print at a save. first: True at the first save of the run."""
        objects, generators, loader = run.objects, run._generators(), run.position.loader
        if unscheduled := objects.optimizer_without_its_schedule():
            yield (
                f"{printable(unscheduled)} has a learning rate schedule, which was not given to ckptool.Run and is not "
                "saved; write: ckptool.Run(…, scheduler=scheduler)"
            )
        for name in [each for each, count in self.groups.items() if len(objects.named[each].param_groups) != count]:
            yield (
                f"{printable(name)} has other groups of parameters than at ckptool.Run(…), and a resumed process "
                "cannot load its state; give it all of them before, and set requires_grad or lr later"
            )
        self.saves += 1
        if self.saves & (self.saves - 1):
            return
        named = {**generators, **objects.named, **({"loader": loader} if loader is not None else {})}
        unsaved = unsaved_objects(named.values(), Schedule if unscheduled else ())
        if first and unsaved:
            names = [printable(f"{name} ({type(value).__name__})") for name, value in unsaved.items()]
            yield (
                f"seen in the script and not saved: {listed(names, 8)}. What training changes in them is lost: give "
                "generators, and what has state_dict() and load_state_dict(), to Run by name; an iterator's data to "
                "run.batches(loader)"
            )
        skipped: dict[int, Any] = {id(run): run}
        current = {**moving.reachable(named, skipped)[0], **objects.requires_grad()}
        skipped |= {id(each): each for each in unsaved.values()}  # which were reported above
        carried, mutable = variables_left()
        mutable = {name: value for name, value in mutable.items() if id(value) not in skipped}
        # A variable that equals a value of the run, a part of one, or a counter of the run is saved.
        parts = [run.values, run.step, run.step - 1, run.epoch, run.epoch + 1, run.loss]
        for each in itertools.islice(parts, moving.MAX_OBJECTS):
            parts += each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else ()
        values = moving.snapshot({str(at): each for at, each in enumerate(parts)})
        texts = {entry.partition(": ")[2] for entry in values.values()}
        modules = objects.modules.values()
        addresses = {_memory_of(each) for module in modules for each in (*module.parameters(), *module.buffers())}
        entries, reached = moving.reachable({**mutable, **carried}, skipped)
        for name, entry in entries.items():
            # A model's tensor under another name, as in a state dict of it, is saved with the model.
            is_models = isinstance(reached.get(name), torch.Tensor) and _memory_of(reached[name]) in addresses
            if (text := entry.partition(": ")[2]) not in texts and not is_models:
                current.setdefault(name, f"{VARIABLE}: {text}")
        # A variable that holds another object now does not count as changed.
        ids = {name: id(value) for name, value in {**mutable, "loader": loader}.items()}
        rebound = {name for name, number in self.ids.items() if ids.get(name) != number}
        before = {name: entry for name, entry in self.entries.items() if re.split(r"[.\[#]", name)[0] not in rebound}
        saved = moving.saved_names({name: value.state_dict() for name, value in objects.modules.items()})
        saved |= {*generators, *(objects.named.keys() - objects.modules.keys()), *epochs_of(loader)}
        kinds: dict[str, list[str]] = {}
        for name, kind in moving.unsaved(before or current, current, saved).items():
            owner = re.split(r"[\[#]", name.removeprefix(f"{SETTING} "))[0]  # an item goes by the name of its container
            if owner not in self.noted:
                self.noted.add(owner)
                kinds.setdefault(kind, []).append(printable(owner))
        for kind, names in kinds.items():
            verbs = ("changes", "is") if len(names) == 1 else ("change", "are")
            how = _HOW.get(kind, _HOW[VARIABLE]).format(name=names[0], short=names[0].rpartition(".")[2])
            yield f"{listed(names, 8)} ({kind}) {verbs[0]} during training and {verbs[1]} not saved; {how}"
        self.entries, self.ids = current, ids


# The variables of the script ------------------------------------------------------------------------------------------


def _script() -> Iterator[FrameType]:
    """The frames of the script: code that is neither ours nor a library's, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        ours = str(frame.f_globals.get("__name__")).partition(".")[0] == "ckptool"
        if not ours and not _LIBRARY.match(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def unsaved_objects(named: Iterable[Any], left_out: tuple[type, ...] = ()) -> dict[str, Any]:
    """The objects with a state in the variables of the script, by name, without those that `Run` was given (`named`).

    Modules, optimizers, schedules, scalers; what else has `state_dict` and `load_state_dict`; generators; iterators;
    environments, which have `reset` and `step`. left_out: classes to leave out.
    """
    ids = {id(value) for value in named}
    for value in list(named):
        ids |= {id(part) for part in value.modules()} if isinstance(value, nn.Module) else set()
        ids |= set(map(id, parts_of(value).values()))
    if (frame := next(_script(), None)) is None:
        return {}
    stateful = {
        name: value
        for name, value in {**frame.f_globals, **frame.f_locals}.items()
        if _has_state(name, value) and not issubclass(type(value), left_out)
    }
    inner = {name: unwrapped(value) if isinstance(value, nn.Module) else value for name, value in stateful.items()}
    return {name: value for name, value in stateful.items() if not {id(value), id(inner[name])} & ids}


def _has_state(name: str, value: Any) -> bool:
    kind = type(value)
    if name.startswith("_") or issubclass(kind, type) or str(kind.__module__).startswith("ckptool."):
        return False
    if issubclass(kind, nn.Module):  # `isinstance` would run a proxy's `__class__`
        return any(True for _ in (*value.parameters(), *value.buffers()))
    if kind is GeneratorType:
        return value.gi_frame is not None and not value.gi_running and not value.gi_code.co_filename.startswith(_OURS)
    if issubclass(kind, (itertools.cycle, torch.utils.data.dataloader._BaseDataLoaderIter)):
        return True
    methods = [callable(getattr(kind, method, None)) for method in ("state_dict", "load_state_dict", "reset", "step")]
    return is_generator(value) or all(methods[:2]) or all(methods[2:])


def variables_left() -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables that a step may leave to a later one, unlike those that the loop's body sets before it uses them.

    First those that the body uses before it sets them; then those whose object may change in place.
    """
    carried: dict[str, Any] = {}
    mutable: dict[str, Any] = {}
    for frame in _script():
        code, offset = list(dis.get_instructions(frame.f_code)), frame.f_lasti
        loops = [(instruction.offset, instruction.argval) for instruction in code if instruction.opname == "FOR_ITER"]
        bodies = [(begin, end) for begin, end in reversed(loops) if begin <= offset < end]  # the innermost first
        uses: dict[str, tuple[bool, bool]] = {}  # of variables set: in the innermost body?  used before?
        for body in bodies:
            first_uses: dict[str, str] = {}
            stored = set()
            for instruction in code:
                names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
                for verb, name in zip(_MENTION.findall(instruction.opname), names, strict=False):
                    if body[0] <= instruction.offset < body[1]:
                        first_uses.setdefault(name, verb)
                        stored |= {name} if verb == "STORE" else set()
            uses = {name: (body == bodies[0], first_uses[name] == "LOAD") for name in stored} | uses
        is_module = frame.f_locals is frame.f_globals or frame.f_code.co_name == "<module>"
        for name, value in frame.f_locals.items():
            if name in carried or name in mutable or name.startswith("_") or not _is_of_script(type(value)):
                continue
            is_inner, is_used = uses.get(name, (False, False))
            is_fixed = issubclass(type(value), _FIXED)
            if is_used or (is_module and name not in uses and is_fixed):
                carried[name] = _detached(value)
            elif not is_inner and not is_fixed:
                mutable[name] = value
    return carried, mutable


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's values: the same number for all tensors that share them."""
    local = getattr(tensor, "_local_tensor", tensor)
    return (local.layout is torch.strided and local.untyped_storage().data_ptr()) or id(tensor)


def _detached(value: Any) -> Any:
    """Tensors, alone or in lists and tuples, without their autograd graph."""
    if issubclass(type(value), torch.Tensor):
        return value.detach()
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value


def _is_of_script(kind: type) -> bool:
    """True for plain classes, tensors, arrays, functions, and classes that are no library's; not for methods."""
    file = str(getattr(sys.modules.get(str(kind.__module__)), "__file__", ""))
    is_plain = kind is torch.Tensor or kind.__name__ == "ndarray" or kind.__module__ == "collections"
    return is_plain or (kind is not MethodType and not file.startswith(_OURS) and not _LIBRARY.match(file))
