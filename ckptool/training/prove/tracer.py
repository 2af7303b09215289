"""Writes a line for every optimizer step of any program: what `ckptool prove -- COMMAND` finds the cause by.

`prove` puts this file, as `sitecustomize.py`, into a folder of PYTHONPATH, with `moving.py` beside it. Without its
environment variable it does nothing; it imports nothing but the standard library until the program imports torch.

The folder that the variable names holds a plan, too: where the process waits to be killed, at which steps it keeps what
a restart there would need, and what it puts back of that, right before the first training step of a restart. That
moment is the first call of a model with gradients after an optimizer step: the batch is there, and nothing used it yet.
Generators are put back where a data loader begins, too, since that draws the order.

To look at all that the program's variables lead to takes longer than a quick step. So the first unbroken run does it as
often as a share of its time allows, and where a checkpoint was written; all other runs do it where they have the same
weights, so that what was seen can be compared.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import sysconfig
import time
from contextlib import suppress
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
VARIABLE = "CKPTOOL_PROVE_TRACE"  # the folder that the lines go to
PATIENCE = 60.0  # seconds that it waits for `prove`
MOST = 8  # calls of models between two steps that are looked at
FREE, SHARE = 1.0, 0.15  # seconds, and share of the time since the first step, that looking may take

WEIGHTS, SCHEDULER = "weights", "scheduler"  # of modules that no optimizer trains; kinds like those of `moving`


class Tracer:
    """Hooks into torch; what has happened since the last step. count: the steps so far.  depth: of calls of modules.

    age: steps since the variables were looked at.  walked: digests of the weights at which they are.  spent: seconds
    that it took.  names: of optimizers, by their ids.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.inputs: list[str] = []
        self.last: dict[str, str] = {}
        self.files: dict[str, Any] = {}
        self.count = self.depth = self.age = 0
        self.walked: set[str] = set()
        self.spent = self.first = 0.0
        self.names: dict[int, str] = {}
        self.seen: tuple[Any, dict[str, Any]] = (None, {})  # when the plan was written, and the plan
        self.begun: dict[str, Any] = {}  # the generators where the last loader began
        self.file: Any = None
        self.moving: Any = None
        self.rng: Any = None
        self.modules: list[Any] = []  # of the program itself
        self.looked_at = 0  # modules
        self.libraries = (sysconfig.get_path("stdlib"), FOLDER, "<frozen")

    @property
    def plan(self) -> dict[str, Any]:
        """What `prove` wants: run, a folder; hold, the step to wait in; keep, where; put, what of the file `values`;
        walked, the weights at which the first run looked at the variables, None for that one."""
        path = os.path.join(self.folder, "plan.json")
        status = os.stat(path)
        if self.seen[0] != (stamp := (status.st_mtime_ns, status.st_ino)):
            with open(path, encoding="utf-8") as file:
                self.seen = stamp, json.load(file)
        return self.seen[1]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Lets the import system find torch, and hooks into it once it was run."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                with suppress(Exception):
                    self.hook()

            spec.loader.exec_module = exec_module
        return spec

    def hook(self) -> None:
        """Is called from now on at steps of optimizers, at calls of modules, and where a loader begins."""
        self.moving, self.rng = beside("moving"), beside("rng")
        names = ("torch.optim.optimizer", "torch.nn.modules.module", "torch.utils.data.dataloader")
        optimizers, modules, loaders = map(importlib.import_module, names)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        modules.register_module_forward_pre_hook(self.before_call)
        modules.register_module_forward_hook(self.after_call, always_call=True)
        begin = loaders.DataLoader.__iter__

        def traced(loader: Any) -> Any:
            """A loader begins; where it is trained on, its generators are kept, or put back."""
            with suppress(Exception):
                if sys.modules["torch"].is_grad_enabled():
                    if not self.count and self.plan["put"]:
                        self.put_back({"random": self.kept()["begun"]})
                    if self.plan["hold"]:  # it is to be killed
                        self.begun = self.generators(self.walk()[1])
            return begin(loader)

        loaders.DataLoader.__iter__ = traced

    # What happens -------------------------------------------------------------------------------------------------

    def before_call(self, module: Any, given: Any) -> None:
        """Before a model is called: notes what it is given; the first time after a step keeps or puts back values."""
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return
        self.depth += 1
        if self.depth > 1 or not torch.is_grad_enabled() or len(self.inputs) == MOST:
            return
        with suppress(Exception):
            tensors = [one for one in given if type(one) is torch.Tensor]
            if not self.inputs:
                if self.count in self.plan["keep"]:
                    path = os.path.join(self.folder, f"values-{self.count}")
                    torch.save({"values": self.values(), "begun": self.begun, "given": tensors}, f"{path}.tmp")
                    os.rename(f"{path}.tmp", path)
                if not self.count and self.plan["put"]:
                    kept = self.kept()
                    self.put_back(kept["values"])
                    for one, other in zip(tensors, kept["given"] if "batch:" in self.plan["put"] else (), strict=False):
                        one.data = other
            self.inputs.append(self.digests(tensors))

    def after_call(self, module: Any, given: Any, result: Any) -> None:
        if not sys.modules["torch"].compiler.is_compiling():
            self.depth -= 1

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Writes a line; of what was found that which changed since the last. Then it waits, if it is to be killed."""
        with suppress(Exception):
            line = self.facts(optimizer) | {"saved": self.saved(), "time": time.monotonic()}
            line |= {"inputs": self.inputs, "random": self.moving.random_states()}
            line |= {"found": {}, "gone": []}
            self.age += 1
            if self.is_due(line["weights"], line["saved"], id(optimizer)):
                found, objects = self.walk()
                named = {id(one): name for name, one in of_class(objects, type(optimizer)).items()}
                self.names |= {id(optimizer): type(optimizer).__name__, **named}
                line["found"] = dict(found.items() - self.last.items())
                line["gone"] = [*(self.last.keys() - found.keys())]
                self.last, self.age = found, 0
            line |= {"optimizer": self.names[id(optimizer)], "age": self.age}
            self.inputs, self.depth = [], 0
            if self.file is None:
                several: Any = sys.modules.get("torch.distributed")
                several = several if several is not None and several.is_available() else None
                rank = several.get_rank() if several and several.is_initialized() else os.environ.get("RANK", "0")
                name = f"{rank}-{os.getpid()}.jsonl"
                self.file = open(os.path.join(self.folder, name), "a", encoding="utf-8")  # noqa: SIM115
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
            self.count += 1
            until = time.monotonic() + PATIENCE
            while self.count >= (self.plan["hold"] or sys.maxsize) and time.monotonic() < until:
                time.sleep(0.002)

    def is_due(self, weights: str, saved: bool, optimizer: int) -> bool:
        """True where the variables are looked at before this step."""
        now, walked = time.monotonic(), self.plan["walked"]
        if not self.count:
            self.first, self.walked = now, set(walked or ())
        share = 1.0 if saved else SHARE
        chosen = walked is None and self.spent < FREE + share * (now - self.first)
        if chosen or weights in self.walked or optimizer not in self.names:
            self.walked.add(weights)
            return True
        return False

    def facts(self, optimizer: Any) -> dict[str, Any]:
        """Of an optimizer its rates, and digests of its state and of the weights that it trains."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = [
            f"{place} {key} {self.moving.plain_text(value) or self.moving.tensor_digest(value)}"
            for place, parameter in enumerate(parameters)
            for key, value in sorted(optimizer.state.get(parameter, {}).items())
        ]
        return {
            "weights": self.digests(parameters),
            "state": self.moving.digest(" ".join(state).encode()),
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
        }

    def digests(self, tensors: Any) -> str:
        """One digest of several tensors."""
        return str(self.moving.digest(" ".join(map(self.moving.tensor_digest, tensors)).encode()))

    def saved(self) -> bool:
        """True where a file of the run's folder was written since the last step, other than by adding to it."""
        run, before, self.files = self.plan["run"], self.files, {}
        for here, _, names in os.walk(run):
            for path in (os.path.join(here, name) for name in names):
                with suppress(OSError):
                    state = os.stat(path)
                    self.files[path] = (state.st_ino, state.st_size, state.st_mtime_ns)
        olds = [(before.get(path, (0, 0, 0)), state) for path, state in self.files.items()]
        return any(old != new and not (old[0] == new[0] and old[1] < new[1]) for old, new in olds)

    # The variables of the program ----------------------------------------------------------------------------------

    def walk(self) -> tuple[dict[str, str], dict[str, Any]]:
        """What `moving.reachable` finds from the variables, with schedulers, and modules that no optimizer trains."""
        torch, begin = sys.modules["torch"], time.monotonic()
        found, objects = self.moving.reachable(self.roots())
        rates = getattr(sys.modules.get("torch.optim.lr_scheduler"), "LRScheduler", ())
        groups = [group for one in of_class(objects, torch.optim.Optimizer).values() for group in one.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        for name, one in of_class(objects, rates).items():
            text = repr(plain(one.state_dict())).encode()
            found[name] = f"{SCHEDULER}: {type(one).__name__} {self.moving.digest(text)}"
        wholes: tuple[str, ...] = ()
        for name, one in of_class(objects, torch.nn.Module).items():
            parameters = list(one.parameters())
            if parameters and not name.startswith(wholes) and not trained & set(map(id, parameters)):
                wholes += (f"{name}.",)
                found[name] = f"{WEIGHTS}: {type(one).__name__} {self.digests(parameters)}"
        self.spent += time.monotonic() - begin
        return found, objects

    def roots(self) -> dict[str, Any]:
        """The variables of the program: of the functions that are running, and of its modules."""
        found: dict[str, Any] = {}
        frame: Any = sys._getframe(2)
        while frame is not None:
            if self.is_own(frame.f_code.co_filename):
                found = {**frame.f_locals, **found}
            frame = frame.f_back
        if len(sys.modules) != self.looked_at:  # there are thousands
            every, self.looked_at = list(sys.modules.values()), len(sys.modules)
            self.modules = [module for module in every if self.is_own(getattr(module, "__file__", None))]
        for module in self.modules:
            found = {**vars(module), **found}
        return {name: value for name, value in found.items() if not name.startswith("__")}

    def is_own(self, file: Any) -> bool:
        """True for a file of the program itself: of no library, and one that is there (`torch.ops` says `_ops.py`)."""
        packages = ("/site-packages/", "/dist-packages/", "/ckptool/")
        library = not isinstance(file, str) or file.startswith(self.libraries)
        is_there = not library and (os.path.isabs(file) or file.startswith("<") or os.path.isfile(file))
        return is_there and not any(part in file for part in packages)

    # Their values ---------------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """The states of the generators, and by name the values of all else that can be put back."""
        found, objects = self.walk()
        kept: dict[str, Any] = {}
        for name in (*found, *of_class(objects, sys.modules["torch"].optim.Optimizer)):
            owner, _, attribute = name.rpartition(".")
            with suppress(KeyError, TypeError):
                value = objects[name] if name in objects else vars(objects[owner])[attribute]
                kept[name] = plain(value.state_dict() if hasattr(value, "load_state_dict") else value)
        return {"random": self.generators(objects), "values": kept}

    def kept(self) -> dict[str, Any]:
        """What an earlier process kept for this one."""
        return dict(sys.modules["torch"].load(self.plan["values"], weights_only=True))

    def generators(self, objects: dict[str, Any]) -> dict[str, Any]:
        """The states of all generators."""
        return dict(self.rng.capture({name: one for name, one in objects.items() if self.rng.is_generator(one)}))

    def put_back(self, kept: dict[str, Any]) -> None:
        """Puts back what the plan names; with a batch the tensors of variables, with lr that of all optimizers."""
        _, objects = self.walk()
        wanted = [key.partition(":")[::2] for key in self.plan["put"]]
        shared = {name.partition(":")[0] for kind, name in wanted if kind == "random"}
        names = {name for kind, name in wanted if kind != "random"}
        state = {name: each for name, each in kept["random"].items() if name in shared}
        own = {name: each for name, each in kept["random"]["generators"].items() if name in names}
        self.rng.restore(state | {"generators": own}, objects)
        for name, value in kept.get("values", {}).items():
            one: Any = objects.get(name)
            owner, _, attribute = name.rpartition(".")
            fetched = ("batch", "") in wanted and not owner and hasattr(value, "data_ptr")
            with suppress(Exception):
                if ("lr", "") in wanted and hasattr(one, "param_groups"):
                    for group, before in zip(one.param_groups, value["param_groups"], strict=True):
                        group["lr"] = before["lr"]
                if name not in names and not fetched:
                    continue
                if one is None:
                    vars(objects[owner])[attribute] = value
                elif hasattr(one, "load_state_dict"):
                    one.load_state_dict(value)
                elif hasattr(one, "data_ptr"):
                    one.data = value
                else:
                    one[...] = value


def beside(name: str) -> Any:
    """A module of ckptool's that lies beside this file; it imports nothing else of it."""
    spec: Any = importlib.util.spec_from_file_location(f"_ckptool_{name}", os.path.join(FOLDER, f"{name}.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_class(objects: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The objects of a class, by name. Asks the type, not the object."""
    return {name: one for name, one in objects.items() if issubclass(type(one), kind)}


def plain(value: Any) -> Any:
    """What of a value `torch.load(weights_only=True)` loads again; an array is a list, and what cannot be is None."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else list(map(plain, value))
    if hasattr(value, "data_ptr"):
        return value.detach()
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (int, float, complex, str, bytes)) else None


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
