"""`lora convert`: an adapter with the names of another library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from ckptool.commands import option, repeated, verb
from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import counted
from ckptool.formats import CheckpointLike, open_whole
from ckptool.transforms.lora.adapters import SCHEMES, convert
from ckptool.verbs._adapters import NEW_ADAPTER, AdapterArgument, ConfigOption, open_adapter, write_adapter
from ckptool.verbs._options import Out
from ckptool.verbs._save import Save, Unpack, Written, change_of

Files = CheckpointLike | Sequence[CheckpointLike]
Scheme = Literal["peft", "kohya", "diffusers"]


@verb(
    ("ckptool lora convert style.safetensors --to peft --base model.pt -o style/", "a file of kohya for PEFT"),
    ("ckptool lora convert adapter --to kohya -o k.safetensors", "and back"),
    one_output=NEW_ADAPTER,
)
def lora_convert(
    adapter: AdapterArgument,
    out: Out = None,
    *,
    to: Annotated[Scheme, option("--to SCHEME", "The naming scheme.")],
    base: Annotated[Files, repeated("--base FILE", "A base model that the adapter fits: resolves kohya's names.")] = (),
    config: ConfigOption = None,
    **options: Unpack[Save],
) -> Written | Any:
    """Writes a LoRA adapter with the names of `peft` (a folder), `kohya` or `diffusers`, and its factors.

    Raises `Unsupported` naming what the scheme cannot hold, `NoMatch` for modules that no base has.
    """
    change = change_of("lora convert", out, options, adapter)
    checkpoint, parsed = open_adapter(adapter, config)
    files: list[Any] = list(base) if isinstance(base, (list, tuple)) else [base]
    bases = [one_state_dict(opened.checkpoint, opened.at)[0].node for opened in map(open_whole, files)]
    converted, remarks = convert(parsed, SCHEMES[to], bases=bases)
    count, old, new = len(parsed.products), parsed.scheme, SCHEMES[to]
    facts = {"from": old, "to": new, "modules": count, "tensors": len(converted.tree)}
    summary = f"{counted(count, 'module')} renamed, {old} → {new}"
    return write_adapter(change, checkpoint, converted).about(summary, *remarks, notes=parsed.notes, **facts)
