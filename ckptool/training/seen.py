"""What training changes and no checkpoint has, as far as it can be seen: from the objects that were given to `Run`, and
in the variables of the script that runs the loop. Each is named once, with what to write.

It is looked for at the 1st, 2nd, 4th, 8th save of a process and so on, since looking takes time. Only classes and plain
attributes are asked: no code of the objects is run.
"""

from __future__ import annotations

import dis
import io
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
_HOW = {  # to save what changes; attributes and buffers as variables
    moving.GENERATOR: "give it: ckptool.Run(…, {short}={name})",
    moving.NOT_PERSISTENT: "write: register_buffer(…, persistent=True)",
    moving.MODULE_ATTRIBUTE: "make it a buffer, or give the module get_extra_state() and set_extra_state()",
    moving.ATTRIBUTE: "if a later step needs it, give {owner} state_dict() and load_state_dict(), and give it to Run: "
    "ckptool.Run(…, data={owner})",
    SETTING: "set it in every epoch or step, by run.epoch or run.step",
    VARIABLE: 'if a later step needs it, write run["{short}"] in place of {name}',
}
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = re.compile(rf"<frozen|{re.escape(sysconfig.get_path('stdlib'))}|.*[/\\\\](?:site|dist)-packages[/\\\\]")
_FIXED = (int, float, complex, str, bytes, tuple, frozenset, range, type(None))
_IN_PLACE = re.compile("INPLACE_|BINARY_OP .*=$")
_MENTION = re.compile("(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)(?!_AND_CLEAR)")


class Looks:
    """What was there at the last look. parameters: of each module and optimizer at first.  saves: of this process.
    entries: what was reached, as in `moving`.  ids: which object a variable held.  told: names of what was said."""

    def __init__(self, objects: Objects) -> None:
        self.parameters = _parameters_of(objects)
        self.saves = 0
        self.entries: dict[str, str] = {}
        self.ids: dict[str, int] = {}
        self.told: set[str] = set()

    def notes(self, run: Run, first: bool) -> Iterator[str]:
        """What there is to say at a save. first: of the run."""
        objects, generators, loader = run.objects, run._generators(), run.position.loader
        if unscheduled := objects.optimizer_without_its_schedule():
            yield (
                f"{printable(unscheduled)} has a learning rate schedule, which was not given to ckptool.Run and is not "
                "saved; write: ckptool.Run(…, scheduler=scheduler)"
            )
        for name in [each for each, now in _parameters_of(objects).items() if self.parameters[each] != now]:
            what = "groups of " if isinstance(self.parameters[name], int) else ""
            yield (
                f"{printable(name)} has other {what}parameters than at ckptool.Run(…), and a resumed process cannot "
                "load its state; give it all of them before, and set requires_grad or lr later"
            )
        for optimizer in run._window.unsaved():
            yield (
                f"an optimizer ({optimizer}) that was not given to ckptool.Run trains parameters of the given modules, "
                "and its state is not saved; write: ckptool.Run(…, optimizer=optimizer), or hold its state in the "
                "state_dict() of what is given"
            )
        self.saves += 1
        if self.saves & (self.saves - 1):
            return
        given = {**generators, **objects.named, **({"loader": loader} if loader is not None else {})}
        unsaved = unsaved_objects(given.values(), Schedule if unscheduled else ())
        new = {name: value for name, value in unsaved.items() if name not in self.told}
        self.told |= new.keys()
        if new and (first or self.saves > 1):  # a resumed process has been told
            names = [printable(f"{name} ({type(value).__name__})") for name, value in new.items()]
            yield (
                f"seen in the script and not saved: {listed(names, 8)}. What training changes in them is lost: give "
                "generators, and what has state_dict() and load_state_dict(), to Run by name; an iterator's data to "
                "run.batches(loader); a file's lines to run.log, else they come twice"
            )
        seen: dict[int, Any] = {id(run): run}
        now = {**moving.reachable(given, seen)[0], **objects.requires_grad()}
        seen |= {id(each): each for each in unsaved.values()}  # which were named
        used, plain, held = variables_left()
        held = {name: value for name, value in held.items() if id(value) not in seen}
        # A variable that is a value of the run, or a part of one, is saved; an attribute may be what the run counts.
        parts: list[Any] = [run.values]
        for each in itertools.islice(parts, moving.MAX_OBJECTS):
            parts += each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else ()
        values = _texts(parts)
        counts = _texts([run.step, run.step - 1, run.epoch, run.epoch + 1, run.loss])
        modules = objects.modules.values()
        places = {_memory_of(each) for module in modules for each in (*module.parameters(), *module.buffers())}
        entries, met = moving.reachable({**held, **plain, **used}, seen)
        kinds: dict[str, list[str]] = {}
        for name, entry in entries.items():
            # A tensor of a model under another name, as in its state dict, is saved with the model.
            is_models = isinstance(met.get(name), torch.Tensor) and _memory_of(met[name]) in places
            text, variable = entry.partition(": ")[2], re.split(r"[.\[#]", name)[0]
            if text in values or is_models or (text in counts and variable not in used):
                continue
            now.setdefault(name, f"{VARIABLE}: {text}")
            if variable in used and variable not in self.told:
                kinds.setdefault(VARIABLE, []).append(printable(variable))
                self.told.add(variable)
        # What is another object now has not changed.
        ids = {name: id(value) for name, value in {**held, "loader": loader}.items()}
        others = {name for name, number in self.ids.items() if ids.get(name) != number}
        before = {name: entry for name, entry in self.entries.items() if re.split(r"[.\[#]", name)[0] not in others}
        saved = moving.saved_names({name: value.state_dict() for name, value in objects.modules.items()})
        saved |= {*generators, *(objects.named.keys() - objects.modules.keys()), *epochs_of(loader)}
        for name, kind in moving.unsaved(before or now, now, saved).items():
            whole = re.split(r"[\[#]", name.removeprefix(f"{SETTING} "))[0]  # an item is named by what holds it
            if whole not in self.told:
                self.told.add(whole)
                kinds.setdefault(kind, []).append(printable(whole))
        for kind, names in kinds.items():
            verbs = ("changes", "is") if len(names) == 1 else ("change", "are")
            owner, _, short = names[0].rpartition(".")
            how = _HOW[VARIABLE if kind == moving.ATTRIBUTE and not owner else kind]
            how = how.format(name=names[0], owner=owner, short=short)
            yield f"{listed(names, 8)} ({kind}) {verbs[0]} during training and {verbs[1]} not saved; {how}"
        self.entries, self.ids = now, ids


# The variables of the script ------------------------------------------------------------------------------------------


def _script() -> Iterator[FrameType]:
    """The frames whose code is neither ours nor a library's, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        ours = str(frame.f_globals.get("__name__")).partition(".")[0] == "ckptool"
        if not ours and not _LIBRARY.match(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def unsaved_objects(given: Iterable[Any], left_out: tuple[type, ...] = ()) -> dict[str, Any]:
    """The objects with a state in the variables of the script, by name, without those given.

    Modules, optimizers, schedules, scalers; what else has `state_dict` and `load_state_dict`; generators; iterators;
    files that are written; environments, which have `reset` and `step`. left_out: classes that are not named.
    """
    known = {id(each) for each in given}
    for each in list(given):
        known |= {id(part) for part in each.modules()} if isinstance(each, nn.Module) else set()
        known |= set(map(id, parts_of(each).values()))
    if (frame := next(_script(), None)) is None:
        return {}
    found = {
        name: value
        for name, value in {**frame.f_globals, **frame.f_locals}.items()
        if _has_state(name, value) and not issubclass(type(value), left_out)
    }
    whole = {name: unwrapped(value) if isinstance(value, nn.Module) else value for name, value in found.items()}
    return {name: value for name, value in found.items() if not {id(value), id(whole[name])} & known}


def _has_state(name: str, value: Any) -> bool:
    kind = type(value)
    if name.startswith("_") or issubclass(kind, type) or str(kind.__module__).startswith("ckptool."):
        return False
    if issubclass(kind, nn.Module):  # `isinstance` would ask a proxy for the class that it stands for
        return any(True for _ in (*value.parameters(), *value.buffers()))
    if kind is GeneratorType:
        return value.gi_frame is not None and not value.gi_running and not value.gi_code.co_filename.startswith(_OURS)
    if issubclass(kind, (itertools.cycle, torch.utils.data.dataloader._BaseDataLoaderIter)):
        return True
    if kind in (io.TextIOWrapper, io.BufferedWriter):
        return not value.closed and value.writable() and value.fileno() > 2
    methods = [callable(getattr(kind, each, None)) for each in ("state_dict", "load_state_dict", "reset", "step")]
    return is_generator(value) or all(methods[:2]) or all(methods[2:])


def variables_left() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The variables that a step may leave to a later one: not those that the body of the loop sets before it uses them.

    Those that it uses and then sets, or leaves weights in for what follows the loop, unless a text of the script names
    them, as in `run["best"]`; other plain values; and what may change while a variable holds it, whichever object it
    is.
    """
    used: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for frame in _script():
        code, at = list(dis.get_instructions(frame.f_code)), frame.f_lasti
        # `bad += 1` uses what an earlier step left, also where another branch before it sets `bad = 0`.
        pairs = itertools.pairwise(code)
        stores = [after.argval for each, after in pairs if _IN_PLACE.match(f"{each.opname} {each.argrepr}")]
        updated = {name[0] if isinstance(name, tuple) else name for name in stores}
        loops = [(each.offset, each.argval) for each in code if each.opname == "FOR_ITER"]
        bodies = [(begin, end) for begin, end in reversed(loops) if begin <= at < end]  # the innermost first
        uses: dict[str, tuple[bool, bool]] = {}  # of what is set: in the innermost body, and used before
        after = set[str]()  # used behind the loop
        for body in bodies:
            first: dict[str, str] = {}
            stored, skipped = set(), 0
            for each in code:
                is_inside = body[0] <= each.offset < body[1]
                if is_inside and "JUMP" in each.opname and each.argval < body[1]:
                    skipped = max(skipped, each.argval)  # what is before that is in a branch
                names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
                for verb, name in zip(_MENTION.findall(each.opname), names, strict=False):
                    if is_inside:
                        if verb == "LOAD" or name not in updated or each.offset >= skipped:
                            first.setdefault(name, verb)
                        stored |= {name} if verb == "STORE" else set()
                    elif each.offset >= body[1] and verb == "LOAD":
                        after.add(name)
            uses = {name: (body == bodies[0], first.get(name) == "LOAD") for name in stored} | uses
        is_module = frame.f_locals is frame.f_globals or frame.f_code.co_name == "<module>"
        for name, value in frame.f_locals.items():
            known = name in used or name in plain or name in held
            if known or name.startswith("_") or not _is_of_script(type(value)):
                continue
            is_inner, is_used = uses.get(name, (False, False))
            is_fixed = issubclass(type(value), _FIXED)
            is_used |= name in uses and name in after and _holds_weights(value)
            if is_used or (is_module and name not in uses and is_fixed):
                (used if is_used and name not in frame.f_code.co_consts else plain)[name] = _detached(value)
            elif not is_inner and not is_fixed:
                held[name] = value
    return used, plain, held


def _holds_weights(value: Any) -> bool:
    """True for a copy of a state dict."""
    return isinstance(value, dict) and any(isinstance(each, torch.Tensor) for each in value.values())


def _parameters_of(objects: Objects) -> dict[str, Any]:
    """What a state is matched by: the names of a module's parameters, the number of an optimizer's groups."""
    groups: dict[str, Any] = {name: len(each.param_groups) for name, each in objects.of(torch.optim.Optimizer).items()}
    return groups | {name: [key for key, _ in each.named_parameters()] for name, each in objects.modules.items()}


def _texts(values: list[Any]) -> set[str]:
    """What a snapshot says of these values and of their parts, without their kinds."""
    found = moving.snapshot({str(at): each for at, each in enumerate(values)})
    return {entry.partition(": ")[2] for entry in found.values()}


def _memory_of(tensor: torch.Tensor) -> int:
    """Where the values of a tensor are: the same number for all that share them."""
    local = getattr(tensor, "_local_tensor", tensor)
    return (local.layout is torch.strided and local.untyped_storage().data_ptr()) or id(tensor)


def _detached(value: Any) -> Any:
    """Tensors, alone or in a list, without the graph that they hang on."""
    if issubclass(type(value), torch.Tensor):
        return value.detach()
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value


def _is_of_script(kind: type) -> bool:
    """True for plain classes, tensors, arrays, functions, and classes that are no library's; not for methods."""
    file = str(getattr(sys.modules.get(str(kind.__module__)), "__file__", ""))
    is_plain = kind is torch.Tensor or kind.__name__ == "ndarray" or kind.__module__ == "collections"
    return is_plain or (kind is not MethodType and not file.startswith(_OURS) and not _LIBRARY.match(file))
