"""The one place that writes: at every instant the old file or the new one is whole under its name.

Folders and remote files have modules of their own, which few commands need.
"""

from ckptool.output.durable import check_target, make_folder, new_folder, replace_file, sweep_folder, write_problem
from ckptool.output.sink import Progress

__all__ = ["Progress", "check_target", "make_folder", "new_folder", "replace_file", "sweep_folder", "write_problem"]
