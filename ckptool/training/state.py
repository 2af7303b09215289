"""The objects of a loop that `ckptool.Run` saves: anything with a `state_dict`, and random generators."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptool.bridge.modules import unwrapped
from ckptool.errors import Conflict, UsageError, counted, listed
from ckptool.training.batches import parts_of, saves
from ckptool.training.optim import Average, load_optimizer, parameters_of
from ckptool.training.parallel import has_divided, local, state_like, tensors
from ckptool.training.rng import is_generator, same
from ckptool.training.saving import not_plain, not_saved, plain_state, refuse_not_plain, state_digest, to_cpu

Optimizer = torch.optim.Optimizer
Schedule = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
_KINDS = (nn.Module, Optimizer, *Schedule, GradScaler)
SUFFIX, BUFFERS = "_state_dict", "_buffers"
FLAGS: Any = (("training", nn.Module.named_modules), ("requires_grad", nn.Module.named_parameters))


class Objects:
    """Objects by name, saved under `NAME_state_dict` as every tutorial has it, without the prefixes of wrappers.

    Raises `UsageError` for one that cannot be saved or restored.
    """

    def __init__(self, objects: Mapping[str, Any] | None = None) -> None:
        self.named: dict[str, Any] = {}
        self.generators: dict[str, Any] = {}
        for name, value in (objects or {}).items():
            if is_generator(value):
                self.generators[name] = value
            elif saves(value):
                self.named[name] = unwrapped(value) if isinstance(value, nn.Module) else value
            else:
                kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
                give = "Give it both methods"
                if isinstance(value, (list, tuple, dict)):
                    give = f"Give each of them: ckptool.Run(…, {name}_1=…, {name}_2=…)"
                raise UsageError(
                    f"{name} is a{'n' * (kind[0] in 'aeiou')} {kind}, which has no state_dict() and load_state_dict()",
                    "Its state could be neither saved nor restored.",
                    f"{give}; a plain value is saved by run[{name!r}] = value",
                )

    @property
    def modules(self) -> dict[str, nn.Module]:
        return self.of(nn.Module)

    def of(self, kind: Any) -> dict[str, Any]:
        """The objects of a kind, by name."""
        return {name: value for name, value in self.named.items() if isinstance(value, kind)}

    @property
    def is_divided(self) -> bool:
        """True if a module is sharded among processes, as FSDP2 does."""
        return has_divided([list(module.parameters()) for module in self.modules.values()])

    def in_parts(self, key: str) -> bool:
        """True for the key of a state that may be sharded."""
        return isinstance(self.named.get(key.removesuffix(SUFFIX)), (nn.Module, Optimizer, Average))

    @property
    def others(self) -> dict[str, Any]:
        """The objects that are no part of torch, by name: they may hold anything, and fetching data may change them."""
        return {name: value for name, value in self.named.items() if not isinstance(value, _KINDS)}

    def states_of_others(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.others.items()}

    def parts_of(self, loader: Any) -> dict[str, Any]:
        """The states of the objects that are a loader, its data set or a sampler of it, copied."""
        owners = parts_of(loader).values()
        parts = {name: value for name, value in self.named.items() if any(value is part for part in owners)}
        return {name: to_cpu(value.state_dict(), copied=True) for name, value in parts.items()}

    @contextmanager
    def refetching(self, parts: Mapping[str, Any]) -> Iterator[None]:
        """While batches that were trained on are fetched again: undoes what fetching changes in these objects.

        parts: the initial states of those that take part in fetching.
        """
        states = to_cpu(self.states_of_others(), copied=True)
        for name, state in parts.items():
            self.named[name].load_state_dict(to_cpu(state, copied=True))
        yield
        for name, state in self.states_of_others().items():
            if not same(state, states[name]):  # where nothing changed, shared tensors stay shared
                self.named[name].load_state_dict(states[name])

    def state(self, taken: Mapping[str, Any]) -> dict[str, Any]:
        """The states of all objects, by the keys that they are saved under. taken: states already captured, by name."""
        states = {}
        for name, value in self.named.items():
            state = taken[name] if name in taken else value.state_dict()
            if isinstance(value, Schedule):
                state = plain_state(state)
            elif isinstance(value, Optimizer):
                groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state["param_groups"]]
                names = zip(groups, self.parameter_names(value), strict=True)
                # Last, where torch puts them on loading: a resumed run writes the same bytes.
                state = {**state, "param_groups": [{**group, "param_names": own} for group, own in names]}
            refuse_not_plain(state, f"the state of {name}")
            states[name + SUFFIX] = state
        return {"kinds": self._kinds(), **states}

    def _kinds(self) -> dict[str, str]:
        """The classes of optimizers and schedules, as one may load another's state and train differently."""
        return {name: type(value).__name__ for name, value in self.of((Optimizer, *Schedule)).items()}

    def parameter_names(self, optimizer: Optimizer) -> list[list[str]]:
        """The names of an optimizer's parameters, group by group, in its order: the model's names, if it is known.

        torch matches an optimizer's state by position, and silently accepts swapped parameters.
        """
        names: list[list[str]] = [group.get("param_names", []) for group in optimizer.param_groups]
        if all(names):  # the optimizer was made of named parameters
            return names
        several = len(self.modules) > 1
        known = {
            id(parameter): f"{label}.{name}" if several else name
            for label, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }
        return [
            [known.get(id(parameter), f"parameter {number}.{index}") for index, parameter in enumerate(group["params"])]
            for number, group in enumerate(optimizer.param_groups)
        ]

    def refuse_others(self, tree: Mapping[str, Any], where: str) -> None:
        """Raises `Conflict` for a saved state without its object, and an object without its state."""
        saved = {key.removesuffix(SUFFIX) for key in tree if key.endswith(SUFFIX)}
        saved |= set(tree.get("generators", ()))
        names = {*self.named, *self.generators}
        if missing := sorted(saved - names):
            what = f"{where} holds the state of {listed(missing)}, which this script does not pass"
            why = "Without it this would be a different run."
            raise Conflict(what, why, f"Give it under that name: ckptool.Run(…, {missing[0]}=…)")
        if new := sorted(names - saved):
            what = f"{where} holds no state of {listed(new)}"
            why = "It would start from scratch in the middle of the run."
            raise Conflict(what, why, "Start a new run with it, or leave it out of this one.")
        kinds = self._kinds()
        if changed := [(name, kind) for name, kind in tree.get("kinds", {}).items() if kinds.get(name, kind) != kind]:
            name, kind = changed[0]
            what = f"{where} holds the state of {name} ({kind}); the script gives {kinds[name]}"
            why = "It might load the state, but train like neither of them."
            raise Conflict(what, why, f"Give {kind}, or start a new run")

    def restore(self, tree: Mapping[str, Any], where: str) -> None:
        """Loads the objects' states: modules, then optimizers, then all others, as schedules change learning rates.

        Raises `Conflict`, naming the object, if a state is missing or does not fit.
        """
        if missing := [name + SUFFIX for name in self.named if name + SUFFIX not in tree]:
            raise Conflict(f"{where} has no {missing[0]}", "Without it, the run would not resume as it was.")
        order: Iterable[Any] = (nn.Module, Optimizer)
        first = [name for kind in order for name in self.of(kind)]
        for name in (*first, *(name for name in self.named if name not in first)):
            value, state = self.named[name], tree[name + SUFFIX]
            try:
                if isinstance(value, Optimizer):
                    load_optimizer(value, state, where, self.parameter_names(value))
                    continue
                if isinstance(value, nn.Module):
                    live = value.state_dict()
                    state = state_like(state, live)
                    _refuse_rounding(state, live, f"{where}: {name}")
                value.load_state_dict(state)
            except Conflict:
                raise
            except Exception as error:
                raise Conflict(
                    f"{where}: the state of {name} does not fit: {' '.join(str(error).split())[:400]}",
                    f"It was saved from a different {name}.",
                ) from error

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The groups of parameters of all optimizers, each with the name of its optimizer."""
        return ((name, group) for name, optimizer in self.of(Optimizer).items() for group in optimizer.param_groups)

    def averaging_optimizer(self) -> str:
        """The name of a schedule-free optimizer in evaluation mode, whose parameters are averages; empty for none."""
        return next((name for name, group in self._groups() if group.get("train_mode") is False), "")

    def parameter_ids(self) -> set[int]:
        """The identities of the parameters of all modules."""
        return {id(parameter) for module in self.modules.values() for parameter in module.parameters()}

    def refuse_unowned_parameters(self) -> None:
        """Raises `UsageError` for trained parameters that are in no given module: their values would be lost."""
        owned = self.parameter_ids()
        for name, optimizer in self.of(Optimizer).items() if not self.others else ():
            trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
            if unowned := [parameter for parameter in trained if id(parameter) not in owned]:
                raise UsageError(
                    f"{name} trains {counted(len(unowned), 'parameter')} of no module that was passed",
                    "They would not be saved.",
                    "Give the module: ckptool.Run(…, model=model). For a tensor x of its own, train "
                    "x = torch.nn.Parameter(x), and give x=torch.nn.ParameterList([x])",
                )

    def buffers(self, without: Collection[str] = ()) -> dict[str, Any]:
        """The parts of modules' states that no optimizer trains, which may differ between processes, by `NAME_buffers`.

        without: the names of modules whose buffers do not differ.
        """
        buffers = {}
        for name, module in self.modules.items():
            if name not in without:
                parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
                parts = {key: value for key, value in module.state_dict().items() if key not in parameters}
                buffers[name + BUFFERS] = parts
        return buffers

    def flags(self) -> dict[str, Any]:
        """What no state dict has of modules: flag -> the parts or parameters for which it is False.

        And `grad` -> those without a gradient, where others have one: an optimizer steps a parameter whose gradient
        was zeroed in place, and none without a gradient.
        """
        flags: dict[str, dict[str, list[str]]] = {}
        for label, module in self.modules.items():
            flags[label] = {
                flag: [name for name, part in parts(module) if not getattr(part, flag)] for flag, parts in FLAGS
            }
            gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
            lacking = [name for name, gradient in gradients.items() if gradient is None or gradient.is_sparse]
            flags[label] |= {"grad": lacking} if len(lacking) < len(gradients) else {}
        return flags

    def set_flags(self, saved: Mapping[str, Any]) -> None:
        """Sets what `flags` gave; gradients are zeros, as their values were used."""
        for label, (flag, parts) in itertools.product(saved, FLAGS):
            cleared = set(saved[label][flag])
            for name, part in parts(self.modules[label]):
                setattr(part, flag, name not in cleared)
        for label, flags in saved.items():
            parameters = dict(self.modules[label].named_parameters())
            lacking = set(flags.get("grad", parameters))
            for name, parameter in parameters.items():
                parameter.grad = None if name in lacking else torch.zeros_like(parameter)

    def optimizer_without_its_schedule(self) -> str:
        """The name of an optimizer whose schedule was not given; empty for none."""
        if self.of(Schedule) or self.others:
            return ""
        return next((name for name, group in self._groups() if "initial_lr" in group), "")

    def options(self) -> dict[str, list[dict[str, Any]]]:
        """The plain options of every optimizer's groups (`lr`, `fused`) and every schedule (`T_max`), and what of every
        module is frozen, as the script set them."""
        groups: dict[str, list[dict[str, Any]]] = {name: each.param_groups for name, each in self.of(Optimizer).items()}
        groups |= {name: [vars(each)] for name, each in self.of(Schedule).items()}
        groups |= {name: [{"frozen": listed(off["requires_grad"], 3) or "none"}] for name, off in self.flags().items()}
        plain = (int, float, bool, str, tuple, Counter, type(None))
        return {
            name: [{k: v for k, v in group.items() if not k.startswith("_") and type(v) in plain} for group in each]
            for name, each in groups.items()
        }


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Evaluation mode without gradients; restores the modes of modules and of all their parts afterwards.

    Calls neither `eval` nor `train`: modules may have methods of their own by these names.
    """
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def ranks_with_own(
    rank: Mapping[str, Any], states: Mapping[str, Any], gather: Callable[[Any], list[Any]]
) -> list[dict[str, Any]]:
    """What is saved for each process: its `rank`, and under `own` those of its states that differ from the first one's.

    gather: gives the values of all processes. Raises `UsageError` in all of them for a state that is not plain.
    """
    states = {key: plain_state(state) if isinstance(state, dict) else state for key, state in states.items()}
    names = {key.removesuffix(SUFFIX): not_plain(state) for key, state in states.items()}
    refused = next((f"the state of {key} holds {name}" for key, name in names.items() if name), "")
    digests = {} if refused else {key: state_digest(state) for key, state in states.items()}
    outcomes = gather((refused, digests))
    for what in (text for text, _ in outcomes if text):
        raise not_saved(what)
    differing = {key: states[key] for key, digest in digests.items() if outcomes[0][1].get(key) != digest}
    return gather({**rank, **({"own": differing} if differing else {})})


def with_own(tree: Mapping[str, Any], rank: Mapping[str, Any]) -> dict[str, Any]:
    """A saved tree with the states of a process, of which `ranks_with_own` gave `rank`; of modules it has buffers."""
    states = rank.get("own", {})
    modules = {key.removesuffix(BUFFERS) + SUFFIX: part for key, part in states.items() if key.endswith(BUFFERS)}
    return {**tree, **states, **{key: {**tree[key], **part} for key, part in modules.items()}}


def _refuse_rounding(state: Mapping[str, Any], live: Mapping[str, Any], where: str) -> None:
    """Raises `Conflict` if loading would round: torch silently casts values to the model's dtype."""
    for key, value in state.items():
        current = live.get(key)
        if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and value.dtype != current.dtype:
            what = f"{where} was saved with {key} as {value.dtype}; the script's is {current.dtype}"
            fix = "Give the model in the dtype that it was trained in, or start a new run from its weights"
            raise Conflict(what, "Loading would round its values.", fix)


class Window:
    """Accumulated gradients that their optimizer has yet to use: they are in no checkpoint.

    Each optimizer has a window of its own. Gradients that it used in its last step are in no window. Nor are those that
    another model's loss left in it (a generator's in the discriminator), if it stepped in this body of the loop, or is
    known to start afresh: to throw away what earlier bodies left. An optimizer that was not given, but trains the same
    parameters, uses their gradients, too.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._optimizers = list(objects.of(Optimizer).values())
        # Those that were not given, and whether they train the same parameters.
        self._others: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._scalers = list(objects.of(GradScaler).values())
        self._used: dict[int, tuple[Any, int]] = {}  # parameter -> its gradient as last used: tensor, version
        self._initial: dict[int, Any] = {}  # parameter -> its gradient when the body began
        self._stepped: set[int] = set()  # the optimizers, by index, that stepped in this body
        self.zeroed: set[int] = set()  # those whose gradients were zeroed in place
        self.renewing: set[int] = set()  # of several, those that start afresh; saved, as saves depend on it
        self.is_adding = False  # an optimizer stepped by gradients that were added to those of its last step
        self._counts = [0 for _ in self._optimizers]
        self._scaled = 0
        for index, optimizer in enumerate(self._optimizers) if len(self._optimizers) > 1 else ():
            _tell(optimizer, index, weakref.ref(self))
        _WINDOWS.add(self)

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer of this process has used its gradients."""
        index = next((position for position, candidate in enumerate(self._optimizers) if candidate is optimizer), None)
        if index is None:
            if optimizer not in self._others:
                owned = self._objects.parameter_ids()
                self._others[optimizer] = not owned.isdisjoint(map(id, parameters_of(optimizer)))
            settled = _gradients(optimizer) if self._others[optimizer] else ()
        else:
            self._counts[index] += 1
            self._stepped.add(index)
            for key, gradient in itertools.islice(_gradients(optimizer), 1):  # the first speaks for all
                # One change since it was used is a backward pass; to zero it would have been another.
                self.is_adding |= self._changes(key, gradient) == 1 and _has_values(gradient)
            if len(self._optimizers) > 1:
                gradients = _gradients(optimizer)
                remained = any(key in self._initial and self._initial[key]() is gradient for key, gradient in gradients)
                (self.renewing.discard if remained and index not in self.zeroed else self.renewing.add)(index)
            settled = _gradients(*(self._optimizers[each] for each in self._stepped | self.renewing))
        self._used |= {key: (weakref.ref(gradient), gradient._version) for key, gradient in settled}

    def unsaved(self) -> list[str]:
        """The classes of the optimizers that train given parameters, and whose state is in that of no given object."""
        if not any(self._others.values()):
            return []
        named, groups = self._objects.named.values(), [group for opt in self._optimizers for group in opt.param_groups]
        saved = {id(t) for owner in named if not isinstance(owner, nn.Module) for t in tensors(owner.state_dict())}
        classes = []
        for optimizer in [other for other, trains in self._others.items() if trains]:
            state = [id(tensor) for tensor in tensors(optimizer.state)]
            is_inner = state or any(group is known for known in groups for group in optimizer.param_groups)
            if not (is_inner and saved.issuperset(state)):
                classes.append(type(optimizer).__name__)
        return classes

    def begin(self) -> None:
        """A body of the loop begins."""
        self._scaled, self._stepped, self.zeroed = self._updates(), set(), set()
        if len(self._optimizers) > 1:
            self._initial = {key: weakref.ref(gradient) for key, gradient in _gradients(*self._optimizers)}

    @property
    def steps(self) -> int:
        """How often each optimizer has stepped: the smallest count."""
        return min(self._counts, default=0)

    @property
    def is_open(self) -> bool:
        """True if an optimizer has gradients that it has yet to use. A step that a scaler skipped counts as a use."""
        gradients = _gradients(*self._optimizers) if self._updates() == self._scaled else ()
        return any(self._changes(key, gradient) != 0 and _has_values(gradient) for key, gradient in gradients)

    def _changes(self, parameter: int, gradient: torch.Tensor) -> int | None:
        """How often a gradient was changed since its optimizer used it; None if that never did."""
        used, version = self._used.get(parameter, (None, 0))
        return gradient._version - version if used is not None and used() is gradient else None

    def _updates(self) -> int:
        """How often the scalers were updated in this process, also after a step that they skipped."""
        scales = (getattr(scaler, "_scale", None) for scaler in self._scalers)  # a disabled one has none
        return sum(scale._version for scale in scales if scale is not None)


def _gradients(*optimizers: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """The gradients that optimizers use, each with the identity of its parameter."""
    parameters = itertools.chain.from_iterable(map(parameters_of, optimizers))
    return ((id(parameter), parameter.grad) for parameter in parameters if parameter.grad is not None)


_WINDOWS: weakref.WeakSet[Window] = weakref.WeakSet()


def note_step(optimizer: Optimizer, *_: Any) -> None:
    """Has all windows note a step of an optimizer of this process."""
    for window in _WINDOWS:
        window.note_step(optimizer)


# Never removed: torch may be in a loop over its hooks when a window is collected.
register_optimizer_step_post_hook(note_step)


def _has_values(gradient: torch.Tensor) -> bool:
    """True for a gradient that is not zero everywhere in this process."""
    return bool(local(gradient._values() if gradient.is_sparse else gradient).any())


def _tell(optimizer: Optimizer, index: int, window: weakref.ref[Window]) -> None:
    """Has an optimizer report its `zero_grad`, which has no hook, to a window."""
    itself = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        if (watcher := window()) is not None:
            watcher.zeroed.add(index)
        if (live := itself()) is not None:
            type(live).zero_grad(live, set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
