"""What torchvision needs to be imported, in every Python that has this folder on its path."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from contextlib import suppress
from typing import Any


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Defines the names of torchvision's operators before it is imported.

    PyPI's wheel is built for CUDA and cannot load its C code beside a torch for CPUs. Its models, which are Python,
    need only that the names exist.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            import torch

            sys.meta_path.remove(self)
            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in TORCHVISION:
                with suppress(RuntimeError):  # where the C code could be loaded, it has them
                    self.library.define(schema)


TORCHVISION = (
    "nms(Tensor d, Tensor s, float t) -> Tensor",
    "qnms(Tensor d, Tensor s, float t) -> Tensor",
    "roi_align(Tensor i, Tensor r, float s, SymInt h, SymInt w, int n, bool a) -> Tensor",
    "_roi_align_backward(Tensor g, Tensor r, float s, SymInt h, SymInt w, int n) -> Tensor",
)
OPERATORS = TorchvisionOperators()  # kept: with the library the names would go
if importlib.util.find_spec("torchvision") is not None:
    sys.meta_path.insert(0, OPERATORS)
