"""`lora extract`: the difference between two models as an adapter."""

from __future__ import annotations

from typing import Annotated, Any

from ckptool.analysis.quantization import refuse_quantized
from ckptool.commands import argument, option, several, verb
from ckptool.conventions.state_dicts import one_state_dict, without_wrappers
from ckptool.errors import counted, listed, printable
from ckptool.formats import CheckpointLike, open_whole
from ckptool.formats.model_folder import configuration
from ckptool.transforms.casting import parse_dtype
from ckptool.transforms.lora.low_rank import extract
from ckptool.transforms.memory_names import in_memory
from ckptool.verbs._adapters import NEW_ADAPTER, Rank, write_adapter
from ckptool.verbs._options import Exclude, Only, Out
from ckptool.verbs._save import Save, Unpack, Written, change_of


@verb(("ckptool lora extract tuned.pt model.pt --rank 4 -o new/", "PEFT loads it"), one_output=NEW_ADAPTER)
def lora_extract(
    tuned: Annotated[CheckpointLike, argument("TUNED", "The fine-tuned weights, or FILE#ADDRESS for a part.")],
    base: Annotated[CheckpointLike, argument("BASE", "The base weights.")],
    out: Out = None,
    *,
    rank: Rank,
    dtype: Annotated[object, option("--dtype DTYPE", "The type of the factors.")] = "f32",
    only: Only = (),
    exclude: Exclude = (),
    **options: Unpack[Save],
) -> Written | Any:
    """Writes what `tuned` changed of `base` as an adapter of PEFT: a folder that `PeftModel.from_pretrained` loads.

    Each changed matrix as a product of rank `rank`, with at most 1.02 times the error of the exact SVD; changed norms,
    embeddings and biases whole.
    Raises `Conflict` for models with different keys or shapes and for infinities, `NoMatch` where nothing changed,
    `Unsupported` for a change that PEFT has no form for. A dry run reads the tensors, too.
    """
    change = change_of("lora extract", out, options, tuned, base)
    target = parse_dtype(dtype)
    models = open_whole(tuned), open_whole(base)
    nodes = [one_state_dict(model.checkpoint, model.at)[0].node for model in models]
    for model, node in zip(models, nodes, strict=True):
        refuse_quantized(model.checkpoint, [node], "Compared")
    names = printable(models[0].name), printable(models[1].name)
    configs = [configuration(model.checkpoint) for model in models]
    config = configs[1] or configs[0]  # PEFT loads the adapter into the base
    # Modules in memory, into which PEFT loads an adapter, have no wrappers' prefixes.
    bare = [{without_wrappers(key) if type(key) is str else key: node[key] for key in node} for node in nodes]
    nodes = [stripped if len(stripped) == len(node) else node for stripped, node in zip(bare, nodes, strict=True)]
    first, second = (in_memory(node, config, name) for node, name in zip(nodes, names, strict=True))
    second.refuse_unknown(names[1])
    adapter, facts, clamped = extract(first.tree, second, names, rank, target, several(only), several(exclude))
    ranks = list(facts["ranks"].values())
    span = f"{min(ranks):,}" if min(ranks) == max(ranks) else f"{min(ranks):,} to {max(ranks):,}"
    unchanged = counted(facts["unchanged"], "tensor")
    details = {
        "taken whole": facts["whole"],
        "smaller than the rank, and kept exactly": clamped,
        "tied in both, taken once": facts["tied"],
    }
    saved = write_adapter(change, models[0].checkpoint, adapter, inputs=[models[1].checkpoint.source])
    return saved.about(
        f"{counted(len(ranks), 'matrix', 'matrices')} in rank {span}, {unchanged} unchanged",
        *(f"{what}: {listed(names, 6)}" for what, names in details.items() if names),
        **facts,
    )
