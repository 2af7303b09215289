"""`ckptool.save`: tensors, arrays and entries to a checkpoint, durably."""

from __future__ import annotations

import os
from typing import Any, BinaryIO, cast

from ckptool import formats
from ckptool.checkpoint import FileRange
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.tree import storages
from ckptool.errors import UsageError
from ckptool.output import check_target
from ckptool.verbs._save import change_of, checkpoint_of


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
    if callable(getattr(path, "write", None)):  # an open file, by way of a temporary one
        from shutil import copyfileobj
        from tempfile import TemporaryDirectory

        with TemporaryDirectory(prefix="ckptool-") as folder:
            whole, file = os.path.join(folder, "checkpoint"), cast(Any, path)
            save(tree, whole, container=container or formats.DEFAULT, keep_unknown=keep_unknown)
            try:
                with open(whole, "rb") as content:
                    copyfileobj(content, file, 1 << 20)
            except (IsADirectoryError, TypeError, ValueError) as error:
                what = f"<{type(file).__name__}> does not take the bytes of a file"
                fix = "Open it for writing in binary: open(PATH, 'wb'); for a folder of files, name one."
                raise UsageError(what, str(error), fix) from None
        return
    change = change_of("save", path, {"container": container, "overwrite": overwrite})  # type: ignore[arg-type]
    out, target = change.path or "", change.format(formats.DEFAULT)
    formats.refuse_name(out, target, asked=bool(container))
    if not target.writes_folder:
        check_target(out, overwrite=overwrite)
    made = checkpoint_of(tree, arrays_as_tensors=target.tensors_only, keep_unknown=keep_unknown)
    with no_collection():
        plan = target.write(made, keep_unknown=keep_unknown)
    ranges = [each.data for each in storages(made.tree) if isinstance(each.data, FileRange)]
    change.put(plan, out, list({id(data.file): data.file for data in ranges}.values()))
