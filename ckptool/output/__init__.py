"""The one place that writes: plans in, files out, and at every instant the old file or the new one whole under its name."""

from ckptool.output.append import append_in_place
from ckptool.output.durable import check_target, replace_file
from ckptool.output.sink import Progress

__all__ = ["Progress", "append_in_place", "check_target", "replace_file"]
