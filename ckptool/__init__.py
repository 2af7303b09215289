"""ckptool: open any PyTorch checkpoint without running its code, without importing torch, without loading it.

    >>> import ckptool
    >>> ckpt = ckptool.open("model.pt")                # lazy: tables only
    >>> ckpt["state_dict"]["fc.weight"].shape
    >>> ckptool.strip_module("model.pt", "clean.pt")   # every command is a function
    >>> weights = ckptool.load("clean.pt")             # what torch.load gives, safely

Names are resolved when they are first used, so that importing the package costs nothing; type checkers read them in
`__init__.pyi`. Nothing at all is imported here: the program starts with this file, and first has to take the working
directory off the path (`__main__.py`).
"""

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


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted([*_HOMES, *_verbs()])
    home = _HOMES.get(name) or _verbs().get(name)
    if home is None:
        from sys import modules

        raise AttributeError(f"module 'ckptool' has no attribute {name!r}", name=name, obj=modules[__name__])
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


def _without_torch(name: str) -> object:
    from ckptool.errors import MissingExtra

    def missing(*arguments: object, **options: object) -> object:
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
