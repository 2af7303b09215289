"""Notes on what training changes and no checkpoint has, as far as it can be seen: in the objects that were given to
`Run`, and in the variables of the script that runs the loop. Each is named once, with the line to write.

The search takes time, so it is done only at the 1st, 2nd, 4th, 8th … save of a process. It reads only classes and plain
attributes: no code of the objects is run.
"""

from __future__ import annotations

import dis
import io
import itertools
import re
import sys
import sysconfig
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FrameType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckptool.bridge.modules import unwrapped
from ckptool.errors import listed, printable
from ckptool.training import moving
from ckptool.training.batches import parts_of
from ckptool.training.rng import is_generator
from ckptool.training.state import Objects, Schedule

if TYPE_CHECKING:
    from ckptool.training.run import Run

VARIABLE, WEIGHTS = "variable", "weights"  # kinds like those of `moving`
_HOW = {  # what to write, by the kind of what changes; for attributes and buffers as for variables
    moving.GENERATOR: "give it: ckptool.Run(…, {short}={name})",
    WEIGHTS: "if a later step needs them, give them: ckptool.Run(…, {short}={name})",
    moving.NOT_PERSISTENT: "write: register_buffer(…, persistent=True)",
    moving.MODULE_ATTRIBUTE: "make it a buffer, or give the module get_extra_state() and set_extra_state()",
    moving.ATTRIBUTE: "if a later step needs it, give {owner} state_dict() and load_state_dict(), and give it to Run: "
    "ckptool.Run(…, {part}={owner})",
    VARIABLE: 'if a later step needs it, write run["{short}"] in place of {name}',
}
_HOW_IN_HARNESS = {kind: _HOW[kind] for kind in (moving.NOT_PERSISTENT, moving.MODULE_ATTRIBUTE)} | {
    moving.GENERATOR: "draw from the global generators, which are seeded for each step and sample"
}
_Texts = dict[str, str]
_LIBRARY = re.compile(rf"<frozen|{re.escape(sysconfig.get_path('stdlib'))}|.*[/\\\\](?:site|dist)-packages[/\\\\]")
_FIXED = (int, float, complex, str, bytes, tuple, frozenset, range, type(None))
_IN_PLACE = re.compile("INPLACE_|BINARY_OP .*=$")
_MENTION = re.compile("(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)(?!_AND_CLEAR)")


class Looks:
    """What the last look saw. parameters: of each module and optimizer at the start.  saves: by this process.
    entries: what was reached, as in `moving`.  ids: of the objects in variables, and whether they are alive.
    noted: the names already reported.  was_inside: a look was inside an epoch, where other variables are in use.
    again: the step at whose end to look once more, as what changes in place shows in the second look."""

    def __init__(self, objects: Objects) -> None:
        self.parameters = _parameters_of(objects)
        self.saves = 0
        self.was_inside = False
        self.again = -1
        self.entries: dict[str, str] = {}
        self.ids: dict[str, tuple[int, Callable[[], Any]]] = {}
        self.noted: set[str] = set()

    def notes(self, run: Run, first: bool) -> Iterator[str]:
        """The notes to print at a save. first: True at the first save of the run."""
        unscheduled = run.objects.optimizer_without_its_schedule()
        yield from self._of_objects(run, unscheduled)
        is_inside = run.position.batch > 0
        is_new = not self.saves or (is_inside and not self.was_inside)
        self.saves += 1
        if not is_new and self.saves & (self.saves - 1) and run.step != self.again:
            return
        self.was_inside |= is_inside
        self.again = run.step + 1 if is_new else -1
        yield from self._of_changes(run, first, Schedule if unscheduled else ())

    def _of_objects(self, run: Run, unscheduled: str) -> Iterator[str]:
        """The notes on the objects that were given, and on those that belong to them. unscheduled: the name of an
        optimizer whose schedule was not given."""
        objects = run.objects
        if unscheduled:
            yield (
                f"{printable(unscheduled)} has a learning rate schedule, which was not given to ckptool.Run and is not "
                "saved; write: ckptool.Run(…, scheduler=scheduler)"
            )
        for name in [each for each, now in _parameters_of(objects).items() if self.parameters[each] != now]:
            what = "groups of " if isinstance(self.parameters[name], int) else ""
            yield (
                f"{printable(name)} has other {what}parameters than at ckptool.Run(…), and a resumed process cannot "
                "load its state; give it all of them before, and set requires_grad or lr later, or make another Run, "
                "with another folder, where they change"
            )
        for optimizer in run._window.unsaved():
            yield (
                f"an optimizer ({optimizer}) that was not given to ckptool.Run trains parameters of the given modules, "
                "and its state is not saved; write: ckptool.Run(…, optimizer=optimizer), with another folder if it "
                "replaces one that was given; or hold its state in the state_dict() of what is given"
            )
        if run._window.is_adding:
            yield "gradients are added to those of earlier steps, which no checkpoint has; call optimizer.zero_grad()"

    def _of_changes(self, run: Run, first: bool, explained: tuple[type, ...]) -> Iterator[str]:
        """The notes on what the script has beside them, and on what changes and is not saved. explained:
        classes of objects on which there is a note already."""
        objects, generators, loader = run.objects, run._generators(), run.position.loader
        named = {**generators, **objects.named, **({"loader": loader} if loader is not None else {})}
        held = _held(named.values())
        unsaved = unsaved_objects(held, explained)
        groups = [group for each in objects.of(torch.optim.Optimizer).values() for group in each.param_groups]
        skipped: dict[int, Any] = {id(each): each for each in (run, *groups)}
        current, objects_met = moving.reachable(named, skipped)
        skipped |= {id(each): each for each in unsaved.values()}  # which were reported above
        carried, plain, mutable = variables_left(self.ids)
        mutable = {name: value for name, value in mutable.items() if id(value) not in skipped}
        # A variable that equals a value of the run or a part of one is saved; others may be counters of the run.
        parts: list[Any] = [run.values]
        for each in itertools.islice(parts, moving.MAX_OBJECTS):
            parts += each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else ()
        values = _texts(parts)
        counters = _texts([run.step, run.step - 1, *range(run.epoch - 1, run.epoch + 2), run.loss])
        modules = objects.modules.values()
        addresses = {_memory_of(each) for module in modules for each in (*module.parameters(), *module.buffers())}
        entries, reached = moving.reachable({**mutable, **plain, **carried}, skipped)
        objects_met |= reached
        met = {re.split(r"[\[#]", name)[0]: each for name, each in reached.items() if _has_own_state(each)}
        inner = {name: each for name, each in met.items() if name not in unsaved and id(each) not in held}
        new = {name: value for name, value in {**unsaved, **inner}.items() if name not in self.noted}
        self.noted |= new.keys()
        if new and (first or self.saves > 1):  # a resumed process has been told
            names = [printable(f"{name} ({type(value).__name__})") for name, value in new.items()]
            yield (
                f"seen in the script and not saved: {listed(names, 8)}. What training changes in them is lost: give "
                "generators, and what has state_dict() and load_state_dict(), to Run by name; an iterator's data to "
                "run.batches(loader); a file's lines to run.log, else they come twice"
            )
        outer: tuple[str, ...] = ()
        for name, module in reached.items():
            if issubclass(type(module), nn.Module) and not name.startswith(outer):
                outer += (f"{name}.",)
                with suppress(Exception):  # lazy modules, and those on the device "meta", have no values
                    tensors = (*module.parameters(), *module.buffers())
                    weights = " ".join(moving.tensor_digest(t) for t in tensors if _memory_of(t) not in addresses)
                    current[name] = f"{WEIGHTS}: {moving.digest(weights.encode())}"
        kinds: dict[str, list[str]] = {}
        for name, entry in entries.items():
            # A model's tensor under another name, as in a state dict of it, is saved with the model.
            is_models = isinstance(reached.get(name), torch.Tensor) and _memory_of(reached[name]) in addresses
            text, variable = entry.partition(": ")[2], re.split(r"[.\[#]", name)[0]
            is_models |= moving.kind_of(entry) in (moving.BUFFER, moving.NOT_PERSISTENT)  # which its weights stand for
            if text in values or is_models or (text in counters and variable not in carried):
                continue
            current.setdefault(name, f"{VARIABLE}: {text}")
            if variable in carried and variable not in self.noted:
                self.noted.add(variable)
                kinds.setdefault(VARIABLE, []).append(printable(variable))
        # A variable that holds another object now does not count as changed.
        ids = {name: (id(value), _liveness(value)) for name, value in {**mutable, "loader": loader}.items()}
        now = {name: number for name, (number, _) in ids.items()}
        rebound = {name for name, (number, live) in self.ids.items() if now.get(name) != number or live() is None}
        before = {name: entry for name, entry in self.entries.items() if re.split(r"[.\[#]", name)[0] not in rebound}
        saved = {*_keys(objects.modules), *generators, *(objects.named.keys() - objects.modules.keys())}
        yield from self._changed(before, current, objects_met, saved, _HOW, kinds)
        self.ids = ids

    def notes_of_harness(self, modules: Mapping[str, nn.Module], data: Any) -> Iterator[str]:
        """The notes to print at a save of a trainer, all of whose state is known but what its user's code keeps."""
        self.saves += 1
        if self.saves & (self.saves - 1) == 0:
            reached = moving.reachable({**modules, "data": data})
            yield from self._changed(self.entries, *reached, _keys(modules), _HOW_IN_HARNESS, {})

    def _changed(
        self, before: _Texts, current: _Texts, met: dict[str, Any], saved: set[str], how: _Texts, kinds: dict[str, Any]
    ) -> Iterator[str]:
        """A note for each kind of what changed and is not saved. kinds: names of what is reported with it, by kind."""
        self.entries = current
        for name, part in met.items():
            saved |= {f"{name}.epoch"} if callable(getattr(type(part), "set_epoch", None)) else set()
            saved |= {f"{name}.training"} if issubclass(type(part), nn.Module) else set()
        for name, kind in moving.unsaved(before or current, current, saved).items():
            owner = re.split(r"[\[#]", name)[0]  # an item goes by the name of its container
            if owner not in self.noted and kind in how:
                self.noted.add(owner)
                kinds.setdefault(kind, []).append(printable(owner))
        for kind, names in kinds.items():
            verbs = ("changes", "is") if len(names) == 1 else ("change", "are")
            owner, _, short = names[0].rpartition(".")
            advice = how[VARIABLE if kind == moving.ATTRIBUTE and not owner else kind]
            advice = advice.format(name=names[0], owner=owner, short=short, part=owner.replace(".", "_"))
            yield f"{listed(names, 8)} ({kind}) {verbs[0]} during training and {verbs[1]} not saved; {advice}"


# The variables of the script ------------------------------------------------------------------------------------------


def _script() -> Iterator[FrameType]:
    """The frames of the script: code that is neither ours nor a library's, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        ours = str(frame.f_globals.get("__name__")).partition(".")[0] == "ckptool"
        if not ours and not _LIBRARY.match(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _held(named: Iterable[Any]) -> set[int]:
    """The identities of objects and of what they hold and save: modules, samplers, the schedules of a SequentialLR."""
    ids = {id(value) for value in named}
    for value in list(named):
        inner: Iterable[Any] = (*parts_of(value).values(), *getattr(value, "__dict__", {}).values())
        for part in value.modules() if isinstance(value, nn.Module) else inner:
            ids |= {id(part), *(map(id, part) if isinstance(part, (list, tuple)) else ())}
    return ids


def unsaved_objects(held: set[int], left_out: tuple[type, ...] = ()) -> dict[str, Any]:
    """The objects with a state in the variables of the script, by name, without those that `Run` was given (`held`).

    Modules, optimizers, schedules, scalers; what else has `state_dict` and `load_state_dict`; generators; iterators;
    files that are written; environments, which have `reset` and `step`. left_out: classes to leave out.
    """
    variables: dict[str, Any] = {}
    for frame in _script():
        variables = {**frame.f_globals, **frame.f_locals} | variables
    stateful = {
        name: value
        for name, value in variables.items()
        if _has_state(name, value) and not issubclass(type(value), left_out)
    }
    inner = {name: unwrapped(value) if isinstance(value, nn.Module) else value for name, value in stateful.items()}
    return {name: value for name, value in stateful.items() if not {id(value), id(inner[name])} & held}


def _has_own_state(value: Any) -> bool:
    """True for an optimizer that has stepped, a schedule, and what else has `state_dict` and is no module."""
    kind = type(value)
    methods = [callable(getattr(kind, method, None)) for method in ("state_dict", "load_state_dict")]
    return all(methods) and not issubclass(kind, nn.Module) and bool(getattr(value, "state", True))


def _has_state(name: str, value: Any) -> bool:
    kind = type(value)
    if name.startswith("_") or issubclass(kind, type) or str(kind.__module__).startswith("ckptool."):
        return False
    if issubclass(kind, nn.Module):  # `isinstance` would run a proxy's `__class__`
        return any(True for _ in (*value.parameters(), *value.buffers()))
    if kind is GeneratorType:
        is_ours = value.gi_code.co_filename.startswith(moving.OURS)
        return value.gi_frame is not None and not (value.gi_running or is_ours)
    is_iterator = str(kind.__module__) in ("builtins", "itertools") and hasattr(kind, "__next__")
    if is_iterator or issubclass(kind, torch.utils.data.dataloader._BaseDataLoaderIter):
        return True
    if kind in (io.TextIOWrapper, io.BufferedWriter):
        return not value.closed and value.writable() and value.fileno() > 2
    methods = [callable(getattr(kind, method, None)) for method in ("state_dict", "load_state_dict", "reset", "step")]
    return is_generator(value) or all(methods[:2]) or all(methods[2:])


def variables_left(noticed: Collection[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The variables that a step may leave to a later one, unlike those that the loop's body sets before it uses them.

    First those that the body uses before it sets them, or in which it leaves weights for what follows the loop, unless
    a text of the script names them, as in `run["best"]`; then other plain values; then those whose object may change
    in place. noticed: names of those that are looked at again in the outer body that sets them.
    """
    carried: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    mutable: dict[str, Any] = {}
    for frame in _script():
        code, offset = list(dis.get_instructions(frame.f_code)), frame.f_lasti
        # `bad += 1` uses what an earlier step left, also where another branch before it sets `bad = 0`.
        pairs = itertools.pairwise(code)
        stores = [after.argval for previous, after in pairs if _IN_PLACE.match(f"{previous.opname} {previous.argrepr}")]
        updated = {name[0] if isinstance(name, tuple) else name for name in stores}
        loops = [(instruction.offset, instruction.argval) for instruction in code if instruction.opname == "FOR_ITER"]
        bodies = [(begin, end) for begin, end in reversed(loops) if begin <= offset < end]  # the innermost first
        uses: dict[str, tuple[bool, bool]] = {}  # of variables set: in the innermost body?  used before?
        used_later = set[str]()  # behind the loop
        for body in bodies:
            first_uses: dict[str, str] = {}
            stored, branch_end = set(), 0
            for instruction in code:
                is_inside = body[0] <= instruction.offset < body[1]
                if is_inside and "JUMP" in instruction.opname and instruction.argval < body[1]:
                    branch_end = max(branch_end, instruction.argval)
                names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
                for verb, name in zip(_MENTION.findall(instruction.opname), names, strict=False):
                    if is_inside:
                        if verb == "LOAD" or name not in updated or instruction.offset >= branch_end:
                            first_uses.setdefault(name, verb)
                        stored |= {name} if verb == "STORE" else set()
                    elif instruction.offset >= body[1] and verb == "LOAD":
                        used_later.add(name)
            uses = {name: (body == bodies[0], first_uses.get(name) == "LOAD") for name in stored} | uses
        is_module = frame.f_locals is frame.f_globals or frame.f_code.co_name == "<module>"
        # Those of its module, too: a function of another file, or in a thread, was called by no frame of it.
        for name, value in (frame.f_globals | frame.f_locals).items():
            is_known = name in carried or name in plain or name in mutable
            kind = value if issubclass(type(value), type) else type(value)
            if is_known or name.startswith("_") or not _is_of_script(kind):
                continue
            is_inner, is_used = uses.get(name, (False, False))
            is_fixed = issubclass(type(value), _FIXED)
            if name in uses and name in used_later and issubclass(type(value), dict):  # a copy of a state dict
                is_used |= any(isinstance(item, torch.Tensor) for item in value.values())
            is_global = is_module or name not in frame.f_locals
            if is_used or (is_global and name not in uses and is_fixed):
                (carried if is_used and name not in frame.f_code.co_consts else plain)[name] = _detached(value)
            elif (not is_inner or name in noticed) and not is_fixed:
                mutable[name] = value
    return carried, plain, mutable


def _parameters_of(objects: Objects) -> dict[str, Any]:
    """What a state is matched by: the names of a module's parameters, the number of an optimizer's groups."""
    groups: dict[str, Any] = {name: len(each.param_groups) for name, each in objects.of(torch.optim.Optimizer).items()}
    return groups | {name: [key for key, _ in module.named_parameters()] for name, module in objects.modules.items()}


def _keys(modules: Mapping[str, nn.Module]) -> set[str]:
    """The names of what their state dicts hold; of a module with extra state that of the module."""
    return {
        f"{name}.{key}".removesuffix("._extra_state") for name, each in modules.items() for key in each.state_dict()
    }


def _texts(values: list[Any]) -> set[str]:
    """The entries of these values and of their parts in a snapshot, without their kinds."""
    entries = moving.reachable({str(number): value for number, value in enumerate(values)})[0]
    return {entry.partition(": ")[2] for entry in entries.values()}


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's values: the same number for all tensors that share them."""
    local = getattr(tensor, "_local_tensor", tensor)
    return (local.layout is torch.strided and local.untyped_storage().data_ptr()) or id(tensor)


def _liveness(value: Any) -> Callable[[], Any]:
    """A function that returns None once an object is gone, whose id may then be another's; 0 if nobody can know."""
    return weakref.ref(value) if type(value).__weakrefoffset__ else int


def _detached(value: Any) -> Any:
    """Tensors, alone or in lists and tuples, without their autograd graph."""
    if issubclass(type(value), torch.Tensor):
        return value.detach()
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value


def _is_of_script(kind: type) -> bool:
    """True for plain classes, tensors, arrays, functions, and classes that are no library's; not for methods."""
    file = str(getattr(sys.modules.get(str(kind.__module__)), "__file__", ""))
    is_plain = kind is torch.Tensor or kind.__module__ in ("numpy", "collections")
    return is_plain or (kind is not MethodType and not file.startswith(moving.OURS) and not _LIBRARY.match(file))
