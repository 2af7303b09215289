"""`ckptool.save`: tensors, arrays and entries to a checkpoint, durably."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from ckptool import formats
from ckptool.checkpoint import FileRange
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.tree import storages
from ckptool.errors import UsageError
from ckptool.output import check_target
from ckptool.verbs._save import checkpoint_of, path_of, put_in_place


def save(
    tree: Any,
    path: str | os.PathLike[str] | BinaryIO,
    *,
    container: str | None = None,
    overwrite: bool = False,
    keep_unknown: bool = False,
) -> None:
    """Writes `tree` to `path`: what `torch.save` takes, of a module its state dict, entries and checkpoints.

    path: also a URL that can be written (`s3://bucket/model.pt`), or a file that is open for writing in binary. An open
    file gets the bytes when they are complete; whether they survive a power cut is then its owner's to see to.
    container: `torch-zip`, `safetensors`, `sharded`, `npz`, …; by default that of the suffix, else `torch-zip`.
    overwrite: replace what is there; it stays whole under its name until the new file is.
    keep_unknown: write objects of unknown classes as `torch.save` would (they load with `weights_only=False` only).
    Numpy arrays become tensors in safetensors and other containers of tensors alone, and stay arrays in torch files.
    Raises `Unsupported`, naming what cannot be saved and where it is.
    """
    file = path if callable(getattr(path, "write", None)) else None
    path = path_of("save", "" if file is not None else path)
    target = formats.by_name(container) if container else formats.for_output(path, formats.DEFAULT)
    formats.refuse_name(path, target, asked=bool(container))
    if file is not None and target.writes_folder:
        raise UsageError(f"an open file cannot hold {target.name}, which is a folder", "", "Name a folder.")
    if file is None and not target.writes_folder:
        check_target(path, overwrite=overwrite)
    made = checkpoint_of(tree, arrays_as_tensors=target.tensors_only, keep_unknown=keep_unknown)
    with no_collection():
        plan = target.write(made, keep_unknown=keep_unknown)
    ranges = [each.data for each in storages(made.tree) if isinstance(each.data, FileRange)]
    sources = list({id(data.file): data.file for data in ranges}.values())
    if file is None:
        put_in_place(plan, path, overwrite=overwrite, inputs=sources)
    else:
        from ckptool.output.uploads import write_out

        write_out(plan, file, sources)
