"""`lora merge`: a LoRA, LoHa or LoKr adapter merged into the weights that it is for."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any

from ckptool.analysis.quantization import refuse_quantized
from ckptool.commands import FILE, OUT, arg, argument, command, option, verb
from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import NoMatch, Unsupported, UsageError, counted, printable
from ckptool.facts import replace
from ckptool.formats import CheckpointLike, open_whole
from ckptool.formats.in_memory import together
from ckptool.formats.marks import OTHER_ADAPTERS, WEIGHTS_BESIDE
from ckptool.formats.model_folder import configuration
from ckptool.transforms.flatten import around, left_behind, weights_alone
from ckptool.transforms.lora.merge import AdapterMerge
from ckptool.transforms.memory_names import in_memory
from ckptool.verbs._adapters import AdapterArgument, ConfigOption, open_adapter
from ckptool.verbs._options import At, IsPart, Out
from ckptool.verbs._save import Row, Save, Unpack, Written, change_of

_SAID = WEIGHTS_BESIDE, OTHER_ADAPTERS  # codes of notes on what else belongs to the adapter


@verb(
    ("ckptool lora merge model.pt adapter -o merged.safetensors", "a PEFT folder"),
    ("ckptool lora merge model.pt style.safetensors --scale 0.8 -o styled.pt", "kohya"),
    one_output="For example: -o merged.safetensors",
)
def lora_merge(
    base: Annotated[CheckpointLike, argument("BASE", "The base weights, or FILE#ADDRESS for a part of a file.")],
    adapter: AdapterArgument,
    out: Out = None,
    *,
    config: ConfigOption = None,
    scale: Annotated[float, option("--scale X", "Multiply its changes by this.")] = 1.0,
    at: At = None,
    part: IsPart = False,
    changed_base: Annotated[
        bool, option("--changed-base", "BASE already has the changes that PiSSA, OLoRA, LoftQ, CorDA or LoRA-GA made.")
    ] = False,
    **options: Unpack[Save],
) -> Written | Any:
    """Merges an adapter into one set of weights of `base`, as PEFT's `merge_and_unload`, to one unit in the last place.

    An adapter's file may have the names of PEFT, kohya, LyCORIS, diffusers or ai-toolkit. `config` may be a file, its
    contents, or peft's `LoraConfig`.
    Raises `NoMatch` unless every key of the adapter is used, `Conflict` for a different base's shapes and for one side
    of tied weights, `Unsupported` for kinds of adapters that cannot be merged into weights, and for a quantized base.
    """
    change = change_of("lora merge", out, options, base, adapter)
    if not math.isfinite(scale):
        raise UsageError(f"a scale of {scale} is not a finite number", "", f"For example: {arg(scale=0.8)}")
    opened = open_whole(base, at, part=part)
    root, remark = one_state_dict(checkpoint := opened.checkpoint, opened.at)
    taken = replace(checkpoint, base=(*root.base, *root.path))  # beside which its configuration is
    refuse_quantized(checkpoint, [root.node], "Merged")
    adapter_checkpoint, parsed = open_adapter(adapter, config)
    if not changed_base and (notes := [note for note in parsed.notes if note.code == "changed-base"]):
        why = "Merged into the original base it gives wrong values, and the files do not say which base this is."
        retry = command("lora merge", opened.argument or FILE, parsed.name, changed_base=True, out=OUT)
        fix = f"If this is the changed base: {retry}"
        raise Unsupported(f"{parsed.name}: {notes[0].message}", f"{why} Nothing was written.", fix)
    # By the names that the tensors have in memory, else by the file's own.
    memory = in_memory(root.node, configuration(taken), opened.name)
    is_ordered = not memory.groups and not checkpoint.tensors_only
    merge_into = partial(
        AdapterMerge, adapter=parsed, base_name=opened.name, multiplier=scale, is_ordered=is_ordered, ties=memory.ties
    )
    try:
        merged = merge_into(memory.tree)
    except NoMatch as unmatched:
        memory.refuse_unknown(opened.name)
        try:
            merged = merge_into(root.node)
        except NoMatch:
            raise unmatched from None
        tree = merged.tree
    else:
        tree = memory.on_disk(merged.tree, root.node)
    changed = weights_alone(checkpoint, tree, [(checkpoint.metadata, root.path)])
    leftovers = left_behind(checkpoint, around(checkpoint, root), tree, chosen=opened.at is not None)
    inputs = [adapter_checkpoint.source] if adapter_checkpoint.source else []
    trained_on = printable(str(parsed.config.get("base_model_name_or_path") or ""))
    return change.write(together(taken, [adapter_checkpoint]), changed, inputs=inputs).about(
        f"{counted(merged.count, 'key')} of {parsed.name} merged into {counted(len(merged.computed), 'tensor')}",
        *([remark] if remark else []),
        *merged.places.moved(),
        Row.named("replaced", merged.replaced, "taken whole from the adapter:"),
        Row.named("added", merged.added, "new, from modules_to_save:"),
        Row("base_model", trained_on, [f"the adapter was trained on {trained_on[:200]}"] if trained_on else []),
        *leftovers.lines,
        notes=[*parsed.notes, *(each for each in adapter_checkpoint.notes if each.code in _SAID)],
        adapter=parsed.name,
        scheme=parsed.scheme,
        keys=merged.count,
        changed=merged.computed,
        **leftovers.facts,
    )
