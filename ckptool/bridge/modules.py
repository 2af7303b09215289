"""Loading a checkpoint into a live `nn.Module`, and live modules as targets.

Names are those of `state_dict()`: parameters and persistent buffers, module by module. Loading is a plan that is
accepted first: nothing of the model changes unless the whole of it is; then the tensors that it names change, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from ckptool import bridge
from ckptool.analysis.quantization import refuse_codes
from ckptool.analysis.targets import BUFFER, MODULE, PARAMETER, Expected, Target, kind_by_name, tie_groups
from ckptool.analysis.torch_versions import COUNTER
from ckptool.analysis.warm_start import LoadReport, Refusal, not_loaded, refusal
from ckptool.bridge.user_code import call_user_code, import_user_code
from ckptool.checkpoint import Checkpoint, Composite, FileRange, Flags, InlineBytes, Note, Storage, TensorEntry
from ckptool.checkpoint.blocks import verify
from ckptool.checkpoint.dtypes import BY_TORCH
from ckptool.checkpoint.patterns import matcher
from ckptool.conventions.state_dicts import StateDict, one_state_dict
from ckptool.errors import Conflict, Unsupported, UsageError, counted, listed, printable
from ckptool.formats.opening import CheckpointLike, open_whole, refuse_part
from ckptool.transforms.casting import first_part
from ckptool.transforms.memory_names import as_named
from ckptool.transforms.warm_start import Carried, carried
from ckptool.transforms.warm_start_plan import (
    Assignment,
    MatchOptions,
    WarmStartPlan,
    match_options,
    plan_warm_start,
)

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """The place of a tensor in a model."""

    module: nn.Module
    attribute: str
    tensor: torch.Tensor

    def put(self, tensor: torch.Tensor) -> None:
        held: Any = self.module._parameters if self.attribute in self.module._parameters else self.module._buffers
        held[self.attribute] = tensor


# Models as targets ---------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module, averages: bool = False) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and `torch.compile`; averages: and `AveragedModel`.

    Raises `Unsupported` for FSDP, whose tensors are pieces of the real ones.
    """
    while True:
        inner: Any = None
        if type(model).__name__ == "FullyShardedDataParallel":
            raise Unsupported(
                "a model wrapped in FSDP holds only shards of its tensors on each rank",
                "Its names and shapes are not the model's.",
                "Load before it is wrapped; or use torch.distributed.checkpoint",
            )
        if isinstance(model, _WRAPPERS) or (averages and isinstance(model, swa_utils.AveragedModel)):
            inner = model.module
        elif type(model).__name__ == "OptimizedModule":
            inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _slots(model: nn.Module) -> dict[str, _Slot]:
    """Every parameter and persistent buffer by name, in the order of `state_dict()`; tied ones under each name."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        own_ones = [*module._parameters.items(), *(item for item in module._buffers.items() if item[0] not in passing)]
        for name, tensor in own_ones:
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = _Slot(module, name, tensor)
    return found


def _expected(tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, str]) -> dict[str, Expected]:
    """The tensors that a model expects. Raises `Unsupported` for those that only code of their own can fill."""
    odd = [f"{name} ({type(tensor).__name__})" for name, tensor in tensors.items() if type(tensor) not in _PLAIN]
    if odd:
        raise Unsupported(
            f"the model has tensors that are not plain: {listed(odd)}",
            "Sharded, quantized and lazy tensors are filled by their own code.",
            "Load before the model is sharded or quantized; run a lazy model once on a batch",
        )
    first: dict[Any, str] = {}
    made = {}
    for name, tensor in tensors.items():
        tied = first.setdefault(_identity(tensor), name)
        dtype = BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
        made[name] = Expected(name, dtype, tuple(tensor.shape), kinds[name], tied if tied != name else None)
    return made


def _identity(tensor: torch.Tensor) -> Any:
    """The same for two names of one tensor: the object, or the view of the memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def target_of_code(name: str) -> Target:
    """The module or state dict that `file.py:factory` or `pkg.module:factory` makes, as a target with values.

    A factory is called without arguments, from the seed 0, so that the same command gives the same values.
    Raises `UserCodeFailed` with its traceback where it raises, `UsageError` where it makes something else.
    """
    made = import_user_code(name, "the target")
    if not isinstance(made, nn.Module) and callable(made):
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(0)
            made = call_user_code(made, "the target", name)
    return target_of(made, name)


def target_of(made: Any, name: str) -> Target:
    """A module or state dict as a target with values. Raises what `target_of_code` raises."""
    if isinstance(made, nn.Module):
        model = unwrapped(made)
        kinds = _kinds(_slots(model))
        state = call_user_code(model.state_dict, "the target", name, keep_vars=True)
    elif isinstance(made, Mapping):
        kinds, state = {}, made
    else:
        raise UsageError(
            f"{name} made {type(made).__name__}, not a torch.nn.Module",
            "A target is a module, or a state dict.",
            "For example: def build(): return MyModel()",
        )
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    guessed = {key: kind_by_name(key, BY_TORCH.get(str(t.dtype).removeprefix("torch."))) for key, t in tensors.items()}
    expected = _expected(tensors, guessed | kinds)
    metadata = {path: dict(facts) for path, facts in getattr(state, "_metadata", {}).items()} or None
    wrapper = ""
    if isinstance(made, nn.Module):  # the prefix that the wrappers around the model put before its names
        wrapper = next((f"{name}." for name, module in made.named_modules() if module is model and name), "")
    return Target(name, MODULE, expected, bool(kinds), _values(state), metadata, wrapper=wrapper)


def _kinds(slots: Mapping[str, _Slot]) -> dict[str, str]:
    return {key: PARAMETER if isinstance(slot.tensor, nn.Parameter) else BUFFER for key, slot in slots.items()}


def _values(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The values of a state dict as nodes; None for a model on the meta device, which has none."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    if any(tensor.device.type == "meta" for tensor in tensors):
        return None
    bare = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    nodes: Mapping[str, Any] = bridge.from_torch(bare, keep_unknown=True)
    return nodes


# Loading -------------------------------------------------------------------------------------------------------------


def load_into(
    model: nn.Module,
    checkpoint: CheckpointLike,
    *,
    at: str | None = None,
    rename: str | Sequence[str] = (),
    rules_file: str | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    on_mismatch: str = "error",
    resize: str | Sequence[str] = (),
    min_loaded: float | None = None,
    missing: str | Sequence[str] | None = None,
    strict: bool = False,
    assign: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dry_run: bool = False,
    part: bool = False,
) -> LoadReport:
    """Loads what fits of a checkpoint into a live model, all of the plan or nothing, and reports it name by name.

    checkpoint: a path, `FILE#ADDRESS`, an open file, a state dict, a module, or what `ckptool.open` gave; the tensors
    of a file are mapped, not read into memory.  at: the weights in it, where there are several.
    rename, rules_file: rules `OLD => NEW` for its keys.  only, exclude: patterns for names of the model.
    on_mismatch: `error`, `skip`, `slice`, `pad` or `resize`, for other shapes.
    resize: how, as `PATTERN=HOW` for names of the model: `pos_embed=bicubic(cls=1)`.  min_loaded: the share of
    the model's values, 0 to 1, that must load; by default half (not counting what `only`, `exclude` and skipped shapes
    leave out), and no less than the suggested rules would load.  missing: patterns for the only names that may be
    missing.  strict: no missing and no unexpected names.  assign: put new tensors in place of the model's instead of
    copying into them; by default where those are on the meta device.  optimizer: gets the state of the parameters that
    are loaded.  dry_run: only the report, with its `refused`.  part: load also a part of a checkpoint: a rank's share,
    one shard. Raises `PlanRefused` (with its `report`) and what opening raises; then nothing of the model has changed.
    """
    options = match_options(
        rename,
        rules_file,
        only,
        exclude,
        missing,
        resize,
        on_mismatch=on_mismatch,
        min_loaded=min_loaded,
        strict=strict,
    )
    load = _planned(model, checkpoint, at, part, options, assign, optimizer)
    if dry_run:
        return load.report
    if load.report.refused:
        raise refusal(load.report)
    load.carry_out(assign, optimizer)
    return replace(load.report, applied=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """A plan for a live model. state: what its optimizer gets."""

    slots: Mapping[str, _Slot]
    target: Target
    plan: WarmStartPlan
    report: LoadReport
    state: Carried | None

    def carry_out(self, assign: bool | None, optimizer: torch.optim.Optimizer | None) -> None:
        changes = _staged(self.plan, self.slots, self.target, assign)
        if optimizer is not None and self.state is not None:
            _load_optimizer(optimizer, self.state, self.slots)
        with torch.no_grad():
            for change in changes:
                change.carry_out()


def _planned(
    model: nn.Module,
    checkpoint: CheckpointLike,
    at: str | None,
    part: bool,
    options: MatchOptions,
    assign: bool | None,
    optimizer: torch.optim.Optimizer | None,
) -> _Load:
    """The plan, and its report with what only the live model tells."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"load_into was given {type(model).__name__}, not a torch.nn.Module",
            "It loads into an existing model.",
            "To get a checkpoint's values without a model: ckptool.load(FILE)",
        )
    bare = unwrapped(model)
    slots = _slots(bare)
    name = type(bare).__name__
    kinds = _kinds(slots)
    target = Target(name, MODULE, _expected({key: slot.tensor for key, slot in slots.items()}, kinds), kinds_known=True)
    whole, root, remark = _weights(checkpoint, at, part)
    root = root if optimizer is not None else as_named(root, whole, slots)
    plan = _with_counters(plan_warm_start(root, str(whole.source or "the checkpoint"), target, options, remark), slots)
    refuse_codes(whole, root.node, plan.report)
    report = plan.report
    refused = (*report.refused, *_refusals(plan, slots, options.missing, assign))
    report = replace(report, refused=refused, normalised=(*report.normalised, *_passing(bare)))
    state = _for_optimizer(optimizer, whole, root, target, plan, slots, assign) if optimizer is not None else None
    report = replace(report, optimizer=state.report) if state is not None else report
    return _Load(slots, target, plan, report, state)


def _weights(checkpoint: CheckpointLike, at: str | None, part: bool) -> tuple[Checkpoint, StateDict, str]:
    if isinstance(checkpoint, Checkpoint):
        refuse_part(checkpoint, part=part)
    else:
        opened = open_whole(checkpoint, at, part=part)
        checkpoint, at = opened.checkpoint, opened.at
    return checkpoint, *one_state_dict(checkpoint, at)


def _with_counters(plan: WarmStartPlan, slots: Mapping[str, _Slot]) -> WarmStartPlan:
    """The plan with zeros for counters that an older file lacks, where the model's are on the meta device."""
    names = [
        name for name in plan.report.supplied if slots[name].tensor.device.type == "meta" and name.endswith(COUNTER)
    ]
    zeros = {
        name: Assignment(name, TensorEntry(Storage(InlineBytes(bytes(8)), "cpu"), BY_TORCH["int64"], (), (), 0))
        for name in names
    }
    supplied = tuple(name for name in plan.report.supplied if name not in zeros)
    return replace(plan, chosen={**plan.chosen, **zeros}, report=replace(plan.report, supplied=supplied))


def _refusals(
    plan: WarmStartPlan, slots: Mapping[str, _Slot], missing: Sequence[str] | None, assign: bool | None
) -> Iterator[Refusal]:
    """Refusals for tensors without memory, or that cannot be written to."""
    on_meta = {name for name, slot in slots.items() if slot.tensor.device.type == "meta"}
    if on_meta and assign is False:
        what = f"{counted(len(on_meta), 'tensor is', 'tensors are')} on the meta device and have no memory"
        yield Refusal("meta", what, "assign=True")
    if plan.report.loaded and (left := _left_on_meta(plan, on_meta, missing)):
        fix = "Give them values yourself, and allow it: missing='PATTERN'"
        yield Refusal("meta-missing", f"on the meta device, and without values after it: {listed(left)}", fix)
    tensors = {name: choice.tensor for name, choice in plan.chosen.items()}
    odd = [f"{printable(name)} ({tensor.kind})" for name, tensor in tensors.items() if isinstance(tensor, Composite)]
    if odd:
        what = f"tensors in the checkpoint that are not plain: {listed(odd)}"
        yield Refusal("kind-mismatch", what, "Leave them out: exclude=[…]")
    written = [name for name in plan.chosen if assign is not True and name not in on_meta]
    if stuck := [printable(name) for name in written if _is_stuck(slots[name])]:
        what = f"expanded or inference tensors, which cannot be copied into: {listed(stuck)}"
        yield Refusal("read-only", what, "Replace them with new ones: assign=True")


def _left_on_meta(plan: WarmStartPlan, on_meta: set[str], missing: Sequence[str] | None) -> list[str]:
    """The names on the meta device that get no values, or only some, and that may not be missing."""
    allowed = [matcher(pattern) for pattern in missing or ()]
    partly = [name for name, choice in plan.chosen.items() if choice.part is not None and name in on_meta]
    others = (*not_loaded(plan.report), *plan.report.supplied)
    empty = [name for name in others if name in on_meta and not any(matches(name) for matches in allowed)]
    return [printable(name) for name in (*partly, *empty)]


def _is_stuck(slot: _Slot) -> bool:
    tensor = slot.tensor
    repeated = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return repeated or (tensor.is_inference() and not torch.is_inference_mode_enabled())


def _passing(model: nn.Module) -> Iterable[Note]:
    """A word on buffers that no checkpoint has and that have no values either."""
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None and buffer.device.type == "meta"
    ]
    if names:
        yield Note("meta-buffers", f"buffers that are not saved stay on the meta device: {listed(names)}")


# Changes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One tensor of the model, under all its names, and what it gets."""

    slots: Sequence[_Slot]
    entry: TensorEntry
    mapped: torch.Tensor | None
    assign: bool
    shared: bool

    def carry_out(self) -> None:
        old = self.slots[0].tensor
        made = self.mapped if self.mapped is not None else bridge.to_torch(self.entry)
        if not self.assign:
            old[tuple(slice(0, size) for size in self.entry.shape)].copy_(made)
            return
        device = "cpu" if old.device.type == "meta" else old.device
        new = made.resolve_conj().resolve_neg().to(device, old.dtype)
        new = new.clone() if self.shared and new.data_ptr() == made.data_ptr() else new
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad)
        vars(new).update(vars(old))
        for slot in self.slots:
            slot.put(new)


def _staged(plan: WarmStartPlan, slots: Mapping[str, _Slot], target: Target, assign: bool | None) -> list[_Change]:
    """Everything that can go wrong, before anything changes: checksums, views, mapping. Raises what reading raises."""
    groups: dict[str, list[str]] = {}
    for name in plan.chosen:
        groups.setdefault(target.tensors[name].tied_to or name, []).append(name)
    entries = {first: _bare_entry(plan.chosen[names[0]]) for first, names in groups.items()}
    for entry in entries.values():
        verify(entry)
    in_files = {first: entry for first, entry in entries.items() if isinstance(entry.storage.data, FileRange)}
    mapped = bridge.build(Checkpoint(in_files, ""))
    changes, seen, tied = [], set(), tie_groups(target.tensors.values())
    for first, names in groups.items():
        tensor = slots[first].tensor
        new = tensor.device.type == "meta" if assign is None else assign
        storage = id(entries[first].storage)
        every = [slots[name] for name in tied.get(first, (first,))] if new else []
        whole = plan.chosen[names[0]].part in (None, tuple(tensor.shape))
        held = every or [slots[first]]
        changes.append(_Change(held, entries[first], mapped.get(first), new and whole, storage in seen))
        seen.add(storage)
    return changes


def _bare_entry(choice: Assignment) -> TensorEntry:
    """The tensor or its part, without what it was in the checkpoint: a parameter, one with gradients."""
    assert isinstance(choice.tensor, TensorEntry)  # others were refused
    entry = choice.tensor if choice.part is None else first_part(choice.tensor, choice.part)
    return replace(entry, flags=Flags(False, False, *entry.flags.lazy))


# Optimizers ----------------------------------------------------------------------------------------------------------


def _for_optimizer(
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    root: StateDict,
    target: Target,
    plan: WarmStartPlan,
    slots: Mapping[str, _Slot],
    assign: bool | None,
) -> Carried:
    """The state for a live optimizer. Raises `UsageError` if it is not of this model, or would keep old tensors."""
    names = _names_in(optimizer, slots)
    if any(assign or slots[name].tensor.device.type == "meta" for name in names):
        raise UsageError(
            "the optimizer would keep the tensors that the model loses",
            "With assign (and on the meta device) parameters are replaced by new ones.",
            "Load first, then create the optimizer and load again with it",
        )
    return carried(checkpoint, root, target, plan.chosen, names)


def _names_in(optimizer: torch.optim.Optimizer, slots: Mapping[str, _Slot]) -> list[str]:
    """The names of an optimizer's parameters, in its order."""
    names: dict[int, str] = {}
    for name, slot in slots.items():
        names.setdefault(id(slot.tensor), name)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in held):
        raise UsageError(
            "the optimizer has parameters that are not the model's",
            "State is carried along by the names that the model gives them.",
            "Create it from this model: torch.optim.X(model.parameters())",
        )
    return [names[id(parameter)] for parameter in held]


def _load_optimizer(optimizer: torch.optim.Optimizer, moved: Carried, slots: Mapping[str, _Slot]) -> None:
    """Gives an optimizer the state by name, all or none; settings and other state stay its own."""
    state = bridge.build(Checkpoint(moved.state, ""), mmap=False)
    mine = optimizer.state_dict()
    ids = [slot for group in mine["param_groups"] for slot in group["params"]]
    by_id = zip(ids, _names_in(optimizer, slots), strict=True)
    merged = {**mine["state"], **{number: state[name] for number, name in by_id if name in state}}
    try:
        optimizer.load_state_dict({"state": merged, "param_groups": mine["param_groups"]})
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise Conflict(
            f"the optimizer rejects the state: {str(error)[:200]}",
            "It may not be the kind of optimizer that was saved. Nothing was changed.",
            "Go without it: omit optimizer",
        ) from error
