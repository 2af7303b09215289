"""Between a tree of entries and live torch objects. Beside `training`, the only place that imports torch.

`to_live` makes one tensor, or a whole tree as `torch.load` would; `from_live` turns live objects into entries.
What torch's rebuild functions do is looked up in tables of ours; no name from a file is ever imported or called.
Source of what they do: torch/_utils.py, torch/_tensor.py and torch/serialization.py, torch 2.4 to 2.13.

    tensors <- to_live <- from_live
"""

from __future__ import annotations

from ckptool.errors import MissingExtra

try:  # first of all: the modules of this package assume it
    import torch as torch
except ImportError as error:
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    what = "torch is not installed" if is_missing else f"torch cannot be imported: {error}"
    why = "Only torch tensors need it; everything else in ckptool works without."
    raise MissingExtra(what, why, "pip install 'ckptool[torch]'") from error
