"""The one place that writes: at every instant the old file or the new one is whole under its name."""

from ckptool.output.append import append_in_place
from ckptool.output.durable import check_target, make_folder, replace_file, sweep_folder, write_problem
from ckptool.output.folders import NewFolder, check_folder, move_folder, remove_folder, replace_folder
from ckptool.output.hashing import StreamingSha256, digest_of
from ckptool.output.sink import Progress

__all__ = [
    "NewFolder",
    "Progress",
    "StreamingSha256",
    "append_in_place",
    "check_folder",
    "check_target",
    "digest_of",
    "make_folder",
    "move_folder",
    "remove_folder",
    "replace_file",
    "replace_folder",
    "sweep_folder",
    "write_problem",
]
