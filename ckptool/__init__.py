"""ckptool: open any PyTorch checkpoint without running its code, without importing torch, without loading it.

    >>> import ckptool
    >>> ckpt = ckptool.open("model.pt")                # lazy: tables only
    >>> ckpt["state_dict"]["fc.weight"].shape
    >>> ckptool.strip_module("model.pt", "clean.pt")   # every command is a function
    >>> weights = ckptool.load("clean.pt")             # what torch.load gives, safely

Names are resolved when they are first used, so that importing the package costs nothing. Nothing at all is imported
here: the program starts with this file, and first has to take the working directory off the path (`__main__.py`).
"""

TYPE_CHECKING = False  # as checkers of types read it: True

if TYPE_CHECKING:
    from typing import Any

    from ckptool.analysis.warm_start import LoadReport as LoadReport
    from ckptool.bridge.modules import load_into as load_into
    from ckptool.checkpoint import Checkpoint as Checkpoint
    from ckptool.checkpoint import Composite as Composite
    from ckptool.checkpoint import Note as Note
    from ckptool.checkpoint import Storage as Storage
    from ckptool.checkpoint import TensorEntry as TensorEntry
    from ckptool.errors import CkptoolError as CkptoolError
    from ckptool.training.run import Run as Run
    from ckptool.training.run_folder import inspect_run as inspect_run
    from ckptool.verbs.add_module import add_module as add_module
    from ckptool.verbs.average import average as average
    from ckptool.verbs.bake import bake as bake
    from ckptool.verbs.browse import browse as browse
    from ckptool.verbs.bundle import bundle as bundle
    from ckptool.verbs.cast import cast as cast
    from ckptool.verbs.convert import convert as convert
    from ckptool.verbs.diff import diff as diff
    from ckptool.verbs.doctor import doctor as doctor
    from ckptool.verbs.edit import edit as edit
    from ckptool.verbs.eval import eval as eval
    from ckptool.verbs.inspect import inspect as inspect
    from ckptool.verbs.load import load as load
    from ckptool.verbs.load import open as open
    from ckptool.verbs.lora_convert import lora_convert as lora_convert
    from ckptool.verbs.lora_extract import lora_extract as lora_extract
    from ckptool.verbs.lora_merge import lora_merge as lora_merge
    from ckptool.verbs.lora_resize import lora_resize as lora_resize
    from ckptool.verbs.plot import plot as plot
    from ckptool.verbs.prove import prove as prove
    from ckptool.verbs.prune import prune as prune
    from ckptool.verbs.recover import recover as recover
    from ckptool.verbs.remap import remap as remap
    from ckptool.verbs.rename import rename as rename
    from ckptool.verbs.report import report as report
    from ckptool.verbs.resume import resume as resume
    from ckptool.verbs.save import save as save
    from ckptool.verbs.save import save_for_cpu as save_for_cpu
    from ckptool.verbs.scan import scan as scan
    from ckptool.verbs.show import show as show
    from ckptool.verbs.slim import slim as slim
    from ckptool.verbs.spec import spec as spec
    from ckptool.verbs.strip_module import strip_module as strip_module
    from ckptool.verbs.train import train as train
    from ckptool.verbs.translate import find_rules as find_rules
    from ckptool.verbs.translate import layouts as layouts
    from ckptool.verbs.translate import translate as translate
    from ckptool.verbs.unbundle import unbundle as unbundle
    from ckptool.verbs.verify import verify as verify
    from ckptool.verbs.warm_start import warm_start as warm_start

__version__ = "0.2.0"

# Public names that are not commands -> the module that has each. Commands `a-b` and `a b` are `a_b` in `verbs/a_b.py`.
_HOMES = {
    "Checkpoint": "checkpoint",
    "CkptoolError": "errors",
    "Composite": "checkpoint",
    "LoadReport": "analysis.warm_start",
    "Note": "checkpoint",
    "Run": "training.run",
    "Storage": "checkpoint",
    "TensorEntry": "checkpoint",
    "find_rules": "verbs.translate",
    "inspect_run": "training.run_folder",
    "layouts": "verbs.translate",
    "load": "verbs.load",
    "load_into": "bridge.modules",
    "open": "verbs.load",
    "save": "verbs.save",
    "save_for_cpu": "verbs.save",
}


def __getattr__(name: str) -> "Any":
    if name == "__all__":
        return sorted([*_HOMES, *_verbs()])
    home = _HOMES.get(name) or _verbs().get(name)
    if home is None:
        raise AttributeError(f"module 'ckptool' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(f"ckptool.{home}"), name)
    except ImportError as error:  # without torch the name is there, and says what is missing when it is called
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        if not isinstance(cause, ModuleNotFoundError) or (cause.name or "").partition(".")[0] != "torch":
            raise
        return _without_torch(name)
    value = import_module("ckptool.commands").for_python(value)
    globals()[name] = value
    return value


def _without_torch(name: str) -> "Any":
    from ckptool.errors import MissingExtra

    def missing(*arguments: "Any", **options: "Any") -> "Any":
        """Needs torch, which is not installed: pip install 'ckptool[torch]'"""
        why = "Only what makes torch's own objects needs it."
        raise MissingExtra(f"ckptool.{name} needs torch, which is not installed", why, "pip install 'ckptool[torch]'")

    missing.__name__ = missing.__qualname__ = name
    return type(name, (), {"__new__": missing, "__doc__": missing.__doc__}) if name[:1].isupper() else missing


def _verbs() -> dict[str, str]:
    """The function of every command that has one, and its module."""
    from ckptool.commands import VERBS

    names = [verb.function for verb in VERBS.values() if verb.in_python]
    return {name: f"verbs.{name}" for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_verbs()})
