"""Writes a line for every optimizer step of any program, by which `ckptool prove -- COMMAND` finds causes.

`prove` puts this file, as `sitecustomize.py`, into a folder of PYTHONPATH, with `moving.py` beside it. Without its
environment variable it does nothing; it imports nothing but the standard library until the program imports torch.

The folder that the variable names also holds a plan: where the process waits to be killed, at which steps it stores the
values that a restart there would need, and which of them it puts back right before the first training step of a
restart. That moment is the first call of a model with gradients after an optimizer step: the batch is there, and not
used yet. Generators are also put back where a data loader begins, since that draws the order.

A look at all that the program's variables lead to takes longer than a quick step. So it is done at the first step,
where a checkpoint was written, and at one in four other steps, which the weights decide: in all runs at the same ones.
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
LOOKED_AT = "0123"  # how the digests begin of the weights at which the variables are looked at

# Kinds like those of `moving`; the weights are of modules that no optimizer trains.
WEIGHTS, SCHEDULER, SCALER = "weights", "scheduler", "scaler"


class Tracer:
    """Hooks into torch; records what happened since the last step. count: steps so far.  depth: of calls of modules.

    age: steps since the last look at the variables.  names: of optimizers, by their ids.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.inputs: list[str] = []
        self.last: dict[str, str] = {}
        self.files: dict[str, Any] = {}
        self.count = self.depth = self.age = 0
        self.names: dict[int, str] = {}
        self.plan_read: tuple[Any, dict[str, Any]] = (None, {})  # when the plan was written, and the plan
        self.begun: dict[str, Any] = {}  # the generators where the last loader began
        self.file: Any = None
        self.moving: Any = None
        self.rng: Any = None
        self.modules: list[Any] = []  # of the program itself
        self.looked_at = 0  # modules
        self.libraries = (sysconfig.get_path("stdlib"), FOLDER, "<frozen")

    @property
    def plan(self) -> dict[str, Any]:
        """What `prove` wants: run, a folder; hold, the step to wait in; keep, where; put, what of the file `values`."""
        path = os.path.join(self.folder, "plan.json")
        status = os.stat(path)
        if self.plan_read[0] != (stamp := (status.st_mtime_ns, status.st_ino)):
            with open(path, encoding="utf-8") as file:
                self.plan_read = stamp, json.load(file)
        return self.plan_read[1]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Lets the import system find torch, and hooks into it after it was executed."""
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
        """Registers calls at steps of optimizers, at calls of modules, and where a loader begins."""
        self.moving, self.rng = beside("moving"), beside("rng")
        names = ("torch.optim.optimizer", "torch.nn.modules.module", "torch.utils.data.dataloader")
        optimizers, modules, loaders = map(importlib.import_module, names)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        modules.register_module_forward_pre_hook(self.before_call)
        modules.register_module_forward_hook(self.after_call, always_call=True)
        begin = loaders.DataLoader.__iter__

        def traced(loader: Any) -> Any:
            """A loader begins; if it is trained on, its generators are stored, or put back."""
            with suppress(Exception):
                if sys.modules["torch"].is_grad_enabled():
                    if not self.count and self.plan["put"]:
                        self.put_back({"random": self.stored()["begun"]})
                    if self.plan["hold"]:  # it is to be killed
                        self.begun = self.generators(self.walk()[1])
            return begin(loader)

        loaders.DataLoader.__iter__ = traced

    # What happens -------------------------------------------------------------------------------------------------

    def before_call(self, module: Any, args: Any) -> None:
        """Before a model is called: notes its inputs; the first time after a step stores or puts back values."""
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return
        self.depth += 1
        # In evaluation mode, a call with gradients is one of a validation.
        if self.depth > 1 or not module.training or not torch.is_grad_enabled() or len(self.inputs) == MOST:
            return
        with suppress(Exception):
            tensors = [tensor for tensor in args if type(tensor) is torch.Tensor]
            if not self.inputs:
                if self.count in self.plan["keep"]:
                    path = os.path.join(self.folder, f"values-{self.count}")
                    torch.save({"values": self.values(), "begun": self.begun, "given": tensors}, f"{path}.tmp")
                    os.rename(f"{path}.tmp", path)
                if not self.count and self.plan["put"]:
                    stored = self.stored()
                    self.put_back(stored["values"])
                    for old, new in zip(tensors, stored["given"] if "batch:" in self.plan["put"] else (), strict=False):
                        old.data = new
            self.inputs.append(self.digests(tensors))

    def after_call(self, module: Any, args: Any, result: Any) -> None:
        if not sys.modules["torch"].compiler.is_compiling():
            self.depth -= 1

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Writes a line, with the entries that changed since the last. Then waits, if the process is to be killed."""
        with suppress(Exception):
            line = self.facts(optimizer) | {"saved": self.saved(), "time": time.monotonic()}
            random = {name: self.text(state) for name, state in self.rng.global_states().items()}
            line |= {"inputs": self.inputs, "random": random, "found": {}, "gone": []}
            self.age += 1
            is_new = not self.count or id(optimizer) not in self.names
            if is_new or line["saved"] or line["weights"].startswith(tuple(LOOKED_AT)):
                entries, objects = self.walk()
                named = {id(value): name for name, value in of_class(objects, type(optimizer)).items()}
                self.names |= {id(optimizer): type(optimizer).__name__, **named}
                line["found"] = dict(entries.items() - self.last.items())
                line["gone"] = [*(self.last.keys() - entries.keys())]
                self.last, self.age = entries, 0
            line |= {"optimizer": self.names[id(optimizer)], "age": self.age}
            self.inputs, self.depth = [], 0
            if self.file is None:
                dist: Any = sys.modules.get("torch.distributed")
                dist = dist if dist is not None and dist.is_available() else None
                rank = dist.get_rank() if dist and dist.is_initialized() else os.environ.get("RANK", "0")
                name = f"{rank}-{os.getpid()}.jsonl"
                self.file = open(os.path.join(self.folder, name), "a", encoding="utf-8")  # noqa: SIM115
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
            self.count += 1
            deadline = time.monotonic() + PATIENCE
            while self.count >= (self.plan["hold"] or sys.maxsize) and time.monotonic() < deadline:
                time.sleep(0.002)

    def facts(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's learning rates, and digests of its state and of the weights that it trains."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = [
            f"{place} {key} {self.text(value)}"
            for place, parameter in enumerate(parameters)
            for key, value in sorted(optimizer.state.get(parameter, {}).items())
        ]
        return {
            "weights": self.digests(parameters),
            "state": self.moving.digest(" ".join(state).encode()),
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
        }

    def text(self, value: Any) -> str:
        """A value of a state, as text: a tensor, a plain value, or a list of tensors, as LBFGS has."""
        if hasattr(value, "data_ptr"):
            return str(self.moving.tensor_digest(value))
        return self.moving.plain_text(value) or str(self.moving.reachable({"": value})[0])

    def digests(self, tensors: Any) -> str:
        """One digest of several tensors."""
        return str(self.moving.digest(" ".join(map(self.moving.tensor_digest, tensors)).encode()))

    def saved(self) -> bool:
        """True if a file of the run's folder was written since the last step, other than by appending to it."""
        run, before, self.files = self.plan["run"], self.files, {}
        for folder, _, names in os.walk(run):
            for path in (os.path.join(folder, name) for name in names):
                with suppress(OSError):
                    state = os.stat(path)
                    self.files[path] = (state.st_ino, state.st_size, state.st_mtime_ns)
        pairs = [(before.get(path, (0, 0, 0)), state) for path, state in self.files.items()]
        return any(old != new and not (old[0] == new[0] and old[1] < new[1]) for old, new in pairs)

    # The variables of the program ----------------------------------------------------------------------------------

    def walk(self) -> tuple[dict[str, str], dict[str, Any]]:
        """`moving.reachable` from the variables, with entries for schedulers, scalers, and modules of no optimizer."""
        torch = sys.modules["torch"]
        entries, objects = self.moving.reachable(self.roots())
        rates = getattr(sys.modules.get("torch.optim.lr_scheduler"), "LRScheduler", ())
        groups = [group for value in of_class(objects, torch.optim.Optimizer).values() for group in value.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        for kind, classes in ((SCHEDULER, rates), (SCALER, getattr(torch.amp, "GradScaler", ()))):
            for name, value in of_class(objects, classes).items():
                text = repr(plain(value.state_dict())).encode()
                entries[name] = f"{kind}: {type(value).__name__} {self.moving.digest(text)}"
        prefixes: tuple[str, ...] = ()
        outer: tuple[str, ...] = ()
        for name, value in of_class(objects, torch.nn.Module).items():
            parameters = list(value.parameters())
            if not name.startswith(outer):
                outer += (f"{name}.",)
                flags = [parameter.requires_grad for parameter in parameters]
                learning = f"True for {sum(flags)} of {len(flags)}, {self.moving.digest(bytes(flags))}"
                entries[f"{name}.requires_grad"] = f"{self.moving.MODULE_ATTRIBUTE}: {learning}"
            if parameters and not name.startswith(prefixes) and not trained & set(map(id, parameters)):
                prefixes += (f"{name}.",)
                entries[name] = f"{WEIGHTS}: {type(value).__name__} {self.digests(parameters)}"
        return entries, objects

    def roots(self) -> dict[str, Any]:
        """The variables of the program: those of the functions that are running, and of its modules."""
        variables: dict[str, Any] = {}
        frame: Any = sys._getframe(2)
        while frame is not None:
            if self.is_own(frame.f_code.co_filename):
                variables = {**frame.f_locals, **variables}
            frame = frame.f_back
        if len(sys.modules) != self.looked_at:  # there are thousands
            modules, self.looked_at = list(sys.modules.values()), len(sys.modules)
            self.modules = [module for module in modules if self.is_own(getattr(module, "__file__", None))]
        for module in self.modules:
            variables = {**vars(module), **variables}
        return {name: value for name, value in variables.items() if not name.startswith("__")}

    def is_own(self, file: Any) -> bool:
        """True for a file of the program itself: of no library, and existing (`torch.ops` names `_ops.py`)."""
        packages = ("/site-packages/", "/dist-packages/", "/ckptool/")
        library = not isinstance(file, str) or file.startswith(self.libraries)
        is_there = not library and (os.path.isabs(file) or file.startswith("<") or os.path.isfile(file))
        return is_there and not any(part in file for part in packages)

    # Their values ---------------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """The states of the generators, and by name all other values that can be put back."""
        entries, objects = self.walk()
        values: dict[str, Any] = {}
        for name in (*entries, *of_class(objects, sys.modules["torch"].optim.Optimizer)):
            with suppress(KeyError, TypeError):
                value = objects[name] if name in objects else self.home(objects, name)[name.rpartition(".")[2]]
                values[name] = plain(value.state_dict() if hasattr(value, "load_state_dict") else value)
        return {"random": self.generators(objects), "values": values}

    def home(self, objects: dict[str, Any], name: str) -> dict[str, Any]:
        """Where a plain value is: in the attributes of an object, or the variables of a module of the program."""
        owner, _, attribute = name.rpartition(".")
        modules = (vars(module) for module in self.modules if attribute in vars(module))
        return vars(objects[owner]) if owner else next(modules, {})

    def stored(self) -> dict[str, Any]:
        """The values that an earlier process stored for this one."""
        return dict(sys.modules["torch"].load(self.plan["values"], weights_only=True))

    def generators(self, objects: dict[str, Any]) -> dict[str, Any]:
        """The states of all generators."""
        return dict(self.rng.capture({name: value for name, value in objects.items() if self.rng.is_generator(value)}))

    def put_back(self, stored: dict[str, Any]) -> None:
        """Puts back what the plan names; with `batch` all tensors in variables, with `lr` all learning rates."""
        _, objects = self.walk()
        keys = [key.partition(":")[::2] for key in self.plan["put"]]
        shared = {name for kind, name in keys if kind == "random"}
        names = {name for kind, name in keys if kind != "random"}
        state = {name: item for name, item in stored["random"].items() if name in shared}
        generators = {name: item for name, item in stored["random"]["generators"].items() if name in names}
        self.rng.restore(state | {"generators": generators}, objects)
        for name, value in stored.get("values", {}).items():
            target: Any = objects.get(name)
            owner, _, attribute = name.rpartition(".")
            fetched = ("batch", "") in keys and not owner and hasattr(value, "data_ptr")
            with suppress(Exception):
                if ("lr", "") in keys and hasattr(target, "param_groups"):
                    for group, before in zip(target.param_groups, value["param_groups"], strict=True):
                        group["lr"] = before["lr"]
                if name not in names and not fetched:
                    continue
                if target is None:
                    self.home(objects, name)[attribute] = value
                elif hasattr(target, "load_state_dict"):
                    target.load_state_dict(value)
                elif hasattr(target, "data_ptr"):
                    target.data = value
                else:
                    target[slice(None) if isinstance(target, list) else ...] = value


def beside(name: str) -> Any:
    """A module of ckptool that lies beside this file, and imports no other module of it."""
    spec: Any = importlib.util.spec_from_file_location(f"_ckptool_{name}", os.path.join(FOLDER, f"{name}.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_class(objects: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The objects of a class, by name. Asks the type, not the object."""
    return {name: value for name, value in objects.items() if issubclass(type(value), kind)}


def plain(value: Any) -> Any:
    """A value in a form that `torch.load(weights_only=True)` reads; an array becomes a list, all else None."""
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
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if this is not None:
            sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize":
    chain()
    if os.environ.get(VARIABLE):
        sys.meta_path.insert(0, Tracer(os.environ[VARIABLE]))
