"""Writes a line for every optimizer step of any program: what `ckptool prove -- COMMAND` finds the cause by.

`prove` puts this file, as `sitecustomize.py`, into a folder of PYTHONPATH, with `moving.py` beside it. Without its
environment variable it does nothing; it imports nothing but the standard library until the program imports torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import sysconfig
from contextlib import suppress
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
VARIABLE = "CKPTOOL_PROVE_TRACE"  # the folder that the lines go to
OPTIMIZER, LOADER = "torch.optim.optimizer", "torch.utils.data.dataloader"


class Tracer:
    """Hooks into torch; what has happened since the last step."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.samples: list[str] = []
        self.optimizers: list[Any] = []
        self.last: dict[str, str] = {}
        self.file: Any = None
        self.moving: Any = None
        self.libraries = (sysconfig.get_path("stdlib"), FOLDER, "<frozen")

    # Imports -----------------------------------------------------------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Lets the import system find a module of torch, and hooks into it once it was run."""
        if name not in (OPTIMIZER, LOADER):
            return None
        sys.meta_path.remove(self)
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            with suppress(Exception):
                self.hook(name, module)

        spec.loader.exec_module = exec_module
        return spec

    def hook(self, name: str, module: Any) -> None:
        if self.moving is None:
            spec: Any = importlib.util.spec_from_file_location("_ckptool_moving", os.path.join(FOLDER, "moving.py"))
            self.moving = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.moving)
        if name == OPTIMIZER:
            module.register_optimizer_step_pre_hook(self.before_step)
            return
        following = module._BaseDataLoaderIter.__next__

        def traced(loader: Any) -> Any:
            batch = following(loader)
            with suppress(Exception):
                self.samples.append(self.moving.digest(repr(self.moving.snapshot({"batch": batch})).encode()))
            return batch

        module._BaseDataLoaderIter.__next__ = traced

    # Steps -------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Writes a line; of what was found that which changed since the last."""
        with suppress(Exception):
            if not any(optimizer is one for one in self.optimizers):
                self.optimizers.append(optimizer)
            number = next(place for place, one in enumerate(self.optimizers) if optimizer is one)
            found = self.moving.snapshot(self.roots())
            line = {"optimizer": number, "found": dict(found.items() - self.last.items())} | self.facts(optimizer)
            self.last, self.samples = found, []
            if self.file is None:
                several: Any = sys.modules.get("torch.distributed")
                several = several if several is not None and several.is_available() else None
                rank = several.get_rank() if several and several.is_initialized() else os.environ.get("RANK", "0")
                name = f"{rank}-{os.getpid()}.jsonl"
                self.file = open(os.path.join(self.folder, name), "a", encoding="utf-8")  # noqa: SIM115
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def facts(self, optimizer: Any) -> dict[str, Any]:
        digest_of, plain, digest = self.moving.tensor_digest, self.moving.plain_text, self.moving.digest
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = [
            f"{place} {key} {plain(value) or digest_of(value)}"
            for place, parameter in enumerate(parameters)
            if parameter in optimizer.state
            for key, value in sorted(optimizer.state[parameter].items())
        ]
        return {
            "weights": digest(" ".join(map(digest_of, parameters)).encode()),
            "samples": self.samples,
            "state": digest(" ".join(state).encode()),
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
            "random": self.moving.random_states(),
        }

    def roots(self) -> dict[str, Any]:
        """The variables of the program: of the functions that are running, and of its modules."""
        found: dict[str, Any] = {}
        frame: Any = sys._getframe(2)
        while frame is not None:
            if self.is_own(frame.f_code.co_filename):
                found = {**frame.f_locals, **found}
            frame = frame.f_back
        for module in list(sys.modules.values()):
            if self.is_own(getattr(module, "__file__", None)):
                found = {**vars(module), **found}
        return {name: value for name, value in found.items() if not name.startswith("__")}

    def is_own(self, file: Any) -> bool:
        """True for a file of the program itself, not of a library."""
        packages = ("/site-packages/", "/dist-packages/", "/ckptool/")
        library = not isinstance(file, str) or file.startswith(self.libraries)
        return not library and not any(part in file for part in packages)


def chain() -> None:
    """Runs the `sitecustomize` that this one hides."""
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != FOLDER]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if own is not None:
            sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":
    chain()
    if os.environ.get(VARIABLE):
        sys.meta_path.insert(0, Tracer(os.environ[VARIABLE]))
