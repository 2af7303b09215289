"""`ckptool.load`: what `torch.load` would give, without running the file."""

from __future__ import annotations

from typing import Any

from ckptool.formats.opening import PathLike, open_whole


def load(path: PathLike, map_location: Any = "cpu", *, mmap: bool = True, part: bool = False) -> Any:
    """The values of a checkpoint: what `torch.load` gives, and safely also what `weights_only=True` refuses.

    path: a file of any container, or `FILE#ADDRESS` for a part of one.
    map_location: as `torch.load` takes it; None for where the tensors were saved.
    mmap: map the file instead of reading it, as `torch.load(mmap=True)` does: loading takes no time or memory of its
    own, and changes to the tensors stay in memory; checksums are not checked, and the file must not be cut short
    meanwhile. part: also what is only a part of a checkpoint: a rank's share, one shard of several. Raises `OnlyAPart`
    for such a part, `UnsafeObject` naming every object of an unknown class, and what reading raises.
    """
    from ckptool import bridge

    return bridge.build(open_whole(path, part=part).taken, map_location, mmap=mmap)
