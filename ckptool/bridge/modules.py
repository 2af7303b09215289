"""Loading a checkpoint into a live `nn.Module`, and live modules as targets.

Names are those of `state_dict()`: parameters and persistent buffers, module by module. Loading carries out a plan:
nothing in the model changes unless the whole plan is accepted; then the tensors that it names change, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import swa_utils

from ckptool.analysis.quantization import refuse_codes
from ckptool.analysis.targets import BUFFER, COUNTER, MODULE, PARAMETER, Expected, Target, kind_by_name, tie_groups
from ckptool.analysis.warm_start import LoadReport, Refusal, not_loaded, refusal
from ckptool.bridge.from_live import from_torch
from ckptool.bridge.to_live import build, to_torch
from ckptool.bridge.user_code import call_user_code, import_user_code
from ckptool.checkpoint import Checkpoint, Composite, FileRange, Flags, InlineBytes, Note, Storage, TensorEntry
from ckptool.checkpoint.blocks import verify
from ckptool.checkpoint.dtypes import BY_TORCH
from ckptool.checkpoint.paths import matcher
from ckptool.conventions.state_dicts import EXTRA_STATE, one_state_dict
from ckptool.errors import Unsupported, UsageError, counted, listed, printable
from ckptool.formats import IN_MEMORY, CheckpointLike, Opened, open_file, refuse_part
from ckptool.transforms.memory_names import as_named
from ckptool.transforms.warm_start import Assignment, match_options, plan_warm_start

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (torch.Tensor, nn.Parameter)


class _Slot(NamedTuple):
    """The place of a tensor in a model."""

    module: nn.Module
    attribute: str
    tensor: torch.Tensor

    @property
    def on_meta(self) -> bool:
        return self.tensor.device.type == "meta"


# Models as targets ---------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module, averages: bool = False) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and `torch.compile`. averages: also in `AveragedModel`.

    Raises `Unsupported` for FSDP, whose tensors are shards of the real ones, `UsageError` for what is no module.
    """
    if not isinstance(model, nn.Module):
        what, why = f"the model was given as {type(model).__name__}, not a torch.nn.Module", "It comes first."
        raise UsageError(what, why, "Without a model: ckptool.load(FILE), ckptool.save(values, PATH)")
    while True:
        inner: Any = None
        if type(model).__name__ == "FullyShardedDataParallel":
            what = "a model wrapped in FSDP holds only shards of its tensors on each rank"
            why = "Those names and shapes are not the model's."
            raise Unsupported(what, why, "Load before wrapping it; or use torch.distributed.checkpoint")
        if isinstance(model, _WRAPPERS) or (averages and isinstance(model, swa_utils.AveragedModel)):
            inner = model.module
        elif type(model).__name__ == "OptimizedModule":
            inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _model_slots(model: nn.Module) -> dict[str, _Slot]:
    """Every parameter and persistent buffer by name, in the order of `state_dict()`; tied ones under each name."""
    return {
        f"{prefix}.{name}" if prefix else name: _Slot(module, name, tensor)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def _expected(tensors: Mapping[str, torch.Tensor], model: nn.Module | None) -> dict[str, Expected]:
    """The tensors that a model expects. Raises `Unsupported` for those that only their own code can fill."""
    odd = [f"{name} ({type(tensor).__name__})" for name, tensor in tensors.items() if type(tensor) not in _PLAIN]
    for path, module in model.named_modules() if model is not None else ():
        save: Any = type(module)._save_to_state_dict
        if save is not nn.Module._save_to_state_dict and save.__module__.startswith("torch."):  # of quantized weights
            save(module, entries := dict[str, Any](), f"{path}." if path else "", True)
            held = {name: _holds_tensor(value) for name, value in entries.items() if name not in tensors}
            odd += [f"{name} ({type(module).__name__})" for name, holds in held.items() if holds]
    if odd:
        what = f"the model has tensors that are not plain tensors: {listed(odd)}"
        why = "Sharded, quantized and lazy tensors need their own code to fill them."
        raise Unsupported(what, why, "Load before the model is sharded or quantized; run a lazy model once on a batch")
    first_names: dict[Any, str] = {}
    expected = {}
    for name, tensor in tensors.items():
        # Two names are tied where they have one object, or the same view of the same memory.
        has_place = tensor.layout is torch.strided and tensor.numel() and tensor.device.type != "meta"
        view = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()) if has_place else None
        tied = first_names.setdefault(view or id(tensor), name)
        dtype = BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
        kind = BUFFER if model is not None else kind_by_name(name, dtype)
        kind = PARAMETER if isinstance(tensor, nn.Parameter) else kind
        expected[name] = Expected(name, dtype, tuple(tensor.shape), kind, tied if tied != name else None)
    return expected


def _holds_tensor(value: Any) -> bool:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(part, (torch.Tensor, torch.ScriptObject)) for part in parts)


def target_of_code(name: str) -> Target:
    """The module or state dict that `file.py:factory` or `pkg.module:factory` returns, as a target with values.

    A factory is called without arguments and with seed 0, so that the same command gives the same values.
    Raises `UserCodeFailed` with its traceback where it raises, `UsageError` where it makes something else.
    """
    result = import_user_code(name, "the target")
    if not isinstance(result, nn.Module) and callable(result):
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(0)
            result = call_user_code(result, "the target", name)
    return target_of(result, name)


def target_of(source: Any, name: str) -> Target:
    """A module or state dict as a target with values; on the meta device without. Raises what `target_of_code`
    raises."""
    model, state, wrapper = None, source, ""
    if isinstance(source, nn.Module):
        model = unwrapped(source)
        state = call_user_code(model.state_dict, "the target", name, keep_vars=True)
        # the prefix that wrappers around the model add to its names
        wrapper = next((f"{path}." for path, module in source.named_modules() if module is model and path), "")
    elif not isinstance(source, Mapping):
        what = f"{name} made {type(source).__name__}, not a torch.nn.Module"
        raise UsageError(what, "A target is a module, or a state dict.", "For example: def build(): return MyModel()")
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    expected = _expected(tensors, model)
    values: Mapping[str, Any] | None = None
    if not any(tensor.device.type == "meta" for tensor in tensors.values()):
        bare = {key: tensors[key].detach() if key in tensors else value for key, value in state.items()}
        values = from_torch(bare, keep_unknown=True)
    metadata = {path: dict(facts) for path, facts in getattr(state, "_metadata", {}).items()} or None
    return Target(name, MODULE, expected, model is not None, values, metadata, wrapper=wrapper)


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
    on_mismatch: Literal["error", "skip"] = "error",
    resize: str | Sequence[str] = (),
    min_loaded: float | None = None,
    missing: str | Sequence[str] | None = None,
    strict: bool = False,
    assign: bool | None = None,
    dry_run: bool = False,
    part: bool = False,
) -> LoadReport:
    """Loads what fits of a checkpoint into a live model, all of the plan or nothing, and reports it name by name.

    checkpoint: a path, `FILE#ADDRESS`, an open file, a state dict, a module, or what `ckptool.open` returned; the
    tensors of a file are mapped, not read into memory.  at: the weights in it, where there are several.
    rename, rules_file: rules `OLD => NEW` for its keys.  only, exclude: patterns for names of the model.
    on_mismatch: `error` or `skip`, for other shapes.  resize: to compute the model's, as `PATTERN=HOW` for names of the
    model: `pos_embed=bicubic(cls=1)`.  min_loaded: the share of the model's values, 0 to 1, that must load; by default
    half (not counting what `only`, `exclude` and skipped shapes leave out), and no less than the suggested rules would
    load.  missing: patterns for the only names that may be missing.  strict: no missing and no unexpected names.
    assign: put new tensors in place of the model's instead of copying into them; by default where those are on the meta
    device.  dry_run: only the report, with its `refused`.  part: accept a part of a checkpoint: a rank's share, one
    shard. Raises `PlanRefused` (with its `report`) and what opening raises; then nothing of the model has changed.
    """
    options = match_options(rename, rules_file, only, exclude, missing, resize, on_mismatch, min_loaded, strict)
    bare = unwrapped(model)
    slots = _model_slots(bare)
    expected = _expected({key: slot.tensor for key, slot in slots.items()}, bare)
    stateful = {
        f"{path}.{EXTRA_STATE}".lstrip("."): module
        for path, module in bare.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    target = Target(type(bare).__name__, MODULE, expected, kinds_known=True, values=stateful)
    opened = Opened(checkpoint, at, "") if isinstance(checkpoint, Checkpoint) else open_file(checkpoint, at)
    refuse_part(opened.checkpoint, part=part)
    source, (root, remark) = opened.checkpoint, one_state_dict(opened.checkpoint, opened.at)
    root = as_named(root, source, slots)
    plan = plan_warm_start(root, str(source.source or IN_MEMORY), target, options, remark)
    refuse_codes(source, root.node, plan.report)
    # Counters that an older file lacks, which torch tolerates: zeros where the model's are on the meta device.
    zero = TensorEntry(Storage(InlineBytes(bytes(8)), "cpu"), BY_TORCH["int64"], (), (), 0)
    zeros = [name for name in plan.report.supplied if slots[name].on_meta and name.endswith(COUNTER)]
    chosen = plan.chosen | {name: Assignment(name, zero) for name in zeros}
    supplied = tuple(name for name in plan.report.supplied if name not in zeros)
    on_meta = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in bare.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None and buffer.device.type == "meta"
    ]
    what = f"buffers that are not saved stay on the meta device: {listed(on_meta)}"
    notes = [Note("meta-buffers", what)] if on_meta else []
    if hooked := _own_hooks(bare):
        what = f"load_state_dict would run the model's own code in {listed(hooked)}; load_into does not"
        notes.append(Note("own-hooks", what))
    report = replace(plan.report, supplied=supplied, normalised=(*plan.report.normalised, *notes))
    report = replace(report, refused=(*report.refused, *_live_refusals(report, chosen, slots, options.missing, assign)))
    if dry_run:
        return report
    if report.refused:
        raise refusal(report)
    changes = list(_staged_changes(chosen, slots, target, assign))
    carried = replace(source, tree=plan.states, discarded=())
    states = source.memory.objects(carried.tree) if source.memory else build(carried)
    with torch.no_grad():
        for change in changes:
            change()
    for name, state in states.items():
        call_user_code(stateful[name].set_extra_state, printable(name), target.name, state)
    return replace(report, applied=True)


def _own_hooks(model: nn.Module) -> list[str]:
    """The modules of which `state_dict` or `load_state_dict` would run code that is not torch's."""
    names = []
    for path, module in model.named_modules():
        kind = type(module)
        hooks = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks, module._state_dict_hooks
        code = [kind.load_state_dict, kind._load_from_state_dict, kind._save_to_state_dict]
        code += [hook for by_id in hooks for hook in by_id.values()]
        if not all(str(getattr(function, "__module__", "")).startswith("torch.") for function in code):
            names.append(path or kind.__name__)
    return names


def _live_refusals(
    report: LoadReport,
    chosen: Mapping[str, Assignment],
    slots: Mapping[str, _Slot],
    missing: Sequence[str] | None,
    assign: bool | None,
) -> Iterator[Refusal]:
    """Refusals that only the live model tells: tensors that have no memory or cannot be written to."""
    on_meta = {name for name, slot in slots.items() if slot.on_meta}
    if on_meta and assign is False:
        what = f"{counted(len(on_meta), 'tensor is', 'tensors are')} on the meta device and have no memory"
        yield Refusal("meta", what, "assign=True")
    allowed = [matcher(pattern) for pattern in missing or ()]
    empty = [n for n in (*not_loaded(report), *report.supplied) if not any(matches(n) for matches in allowed)]
    if report.loaded and (unfilled := [printable(name) for name in empty if name in on_meta]):
        fix = "Give them values yourself, and allow it: missing='PATTERN'"
        yield Refusal("meta-missing", f"on the meta device, and without values after it: {listed(unfilled)}", fix)
    tensors = {name: choice.tensor for name, choice in chosen.items()}
    odd = [f"{printable(name)} ({tensor.kind})" for name, tensor in tensors.items() if isinstance(tensor, Composite)]
    if odd:
        what = f"tensors in the checkpoint that are not plain tensors: {listed(odd)}"
        yield Refusal("kind-mismatch", what, "Leave them out: exclude=[…]")
    written = {name: slots[name].tensor for name in chosen if assign is not True and name not in on_meta}
    repeated = {
        name: any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        for name, tensor in written.items()
    }
    is_normal = not torch.is_inference_mode_enabled()
    if stuck := [printable(n) for n, tensor in written.items() if repeated[n] or (is_normal and tensor.is_inference())]:
        what = f"expanded or inference tensors, which cannot be copied into: {listed(stuck)}"
        yield Refusal("read-only", what, "Replace them with new ones: assign=True")


def _staged_changes(
    chosen: Mapping[str, Assignment], slots: Mapping[str, _Slot], target: Target, assign: bool | None
) -> Iterator[Callable[[], None]]:
    """The change to each tensor, prepared so that all that can go wrong is done: checksums, views, mapping. Raises what
    reading raises."""
    firsts: dict[str, str] = {}  # the first name of each tensor -> the first of its names that is loaded
    for name in chosen:
        firsts.setdefault(target.tensors[name].tied_to or name, name)
    entries: dict[str, TensorEntry] = {}
    for first, name in firsts.items():
        entry = chosen[name].tensor
        assert isinstance(entry, TensorEntry)  # others were refused
        entries[first] = replace(entry, flags=Flags(False, False, *entry.flags.lazy))  # no checkpoint's parameter
        verify(entries[first])
    in_files = {first: entry for first, entry in entries.items() if isinstance(entry.storage.data, FileRange)}
    mapped = build(Checkpoint(in_files, ""))
    seen_storages, tied = set[int](), tie_groups(target.tensors.values())
    for first, entry in entries.items():
        slot = slots[first]
        read = partial(mapped.get, first) if first in mapped else partial(to_torch, entry)
        if slot.on_meta if assign is None else assign:
            tied_slots = [slots[name] for name in tied.get(first, (first,))]
            yield partial(_assign, tied_slots, read, id(entry.storage) in seen_storages)
        else:
            yield partial(_copy, slot.tensor, read)
        seen_storages.add(id(entry.storage))


def _copy(tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
    tensor.copy_(read())


def _assign(slots: Sequence[_Slot], read: Callable[[], torch.Tensor], shared: bool) -> None:
    """Replaces a tensor by a new one under all its names. shared: it shares memory with one that was set before."""
    old, read_one = slots[0].tensor, read()
    device = "cpu" if old.device.type == "meta" else old.device
    new = read_one.resolve_conj().resolve_neg().to(device, old.dtype)
    new = new.clone() if shared and new.data_ptr() == read_one.data_ptr() else new
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    vars(new).update(vars(old))
    for module, attribute, _ in slots:
        held: Any = module._parameters if attribute in module._parameters else module._buffers
        held[attribute] = new
