"""What a configuration names: code, built in or the user's own, with its errors; parameters and modules of a model.

`file.py:NAME` and `module:NAME` are the user's own, imported only because they were named.

Patterns are one language for optimizers, groups, `freeze` and `activation_checkpoint`. `blocks.*.weight` is a glob of
names in which `*` crosses dots, `re:…` an expression. `blocks.0` stands for all parameters of a module,
`type:LayerNorm` for those of all modules of a class and those derived from it, `type:Linear.weight` for theirs by a
name. `not:…` takes away from what the patterns before it chose.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ckptool.analysis.targets import names_code
from ckptool.bridge.user_code import call_user_code, import_user_code
from ckptool.checkpoint.paths import matcher
from ckptool.errors import CkptoolError, Conflict, RunFailed, TextLines, UsageError, UserCodeFailed, listed
from ckptool.training.moving import OURS


def classes_of(module: Any, base: type) -> dict[str, Any]:
    """The public classes of a module that derive from `base`, by their names in lower case."""
    return {
        name.lower(): value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    }


@dataclass(frozen=True, slots=True)
class Choice:
    """What the names at a key of the configuration stand for: built in, a class of torch, or `file.py:NAME`.

    key: its name in messages.  yours: what `file.py:NAME` is or does, in words.  built_in: by name.  classes: torch's,
    by name in lower case; `step` and `step_lr` are StepLR.  unfit: those that cannot be named, and why.  gives: what a
    call must return, in words, and the test for it.
    """

    key: str
    yours: str
    built_in: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, Any] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    gives: tuple[str, Callable[[Any], bool]] = ("", lambda value: True)

    @property
    def typed(self) -> str:
        """How to name one of the user's own."""
        return f"Your own is file.py:NAME, which {self.yours}"

    def find(self, name: str) -> Any:
        """The object with a name. Raises `UsageError` for an unknown one, `UserCodeFailed` where its module raises."""
        if names_code(name):
            return import_user_code(name, self.key)
        if name in self.built_in:
            return self.built_in[name]
        plain = name.removeprefix("torch.optim.").removeprefix("lr_scheduler.").lower().replace("_", "")
        for spelling in (plain, f"{plain}lr", plain.removesuffix("lr")):
            if spelling in self.unfit:
                raise UsageError(f"{self.key}: {name} {self.unfit[spelling]}", "", self.typed)
            if spelling in self.classes:
                return self.classes[spelling]
        names = {entry.lower(): entry for entry in self.built_in}
        names |= {key: entry.__name__ for key, entry in self.classes.items() if key not in self.unfit}
        close = [key for key in names if len(plain) > 3 and plain in key] or difflib.get_close_matches(plain, names, 1)
        raise UsageError(
            f"{self.key}: there is no {name!r}",
            f"Known: {listed(sorted(names.values()), 40)}." if names else "Nothing is built in.",
            f"Did you mean {' or '.join(names[key] for key in close)}? " * bool(close) + self.typed,
        )

    def make(self, name: str, args: Mapping[str, Any], *first: Any) -> Any:
        """The result of `call`, checked. Raises as that does, and `UsageError` for a result of another kind."""
        result = self.call(name, args, *first)
        words, is_one = self.gives
        if not is_one(result):
            raise UsageError(f"{self.key}: {name} returned {type(result).__name__}, not {words}", "", self.typed)
        return result

    def call(self, name: str, args: Mapping[str, Any], *first: Any) -> Any:
        """The result of calling the object with a name. first: its arguments before `args`.

        Raises `UsageError` for arguments that it does not take.
        """
        code, takes = self.find(name), ""
        try:
            if (signature := signature_of(code)) is not None:
                takes = ", ".join([*signature.parameters][len(first) :])
                signature.bind_partial(*first, **args)  # reports a misspelt argument before a missing one
                signature.bind(*first, **args)
            return call_user_code(code, self.key, name, *first, **args) if names_code(name) else code(*first, **args)
        except CkptoolError:
            raise
        except (TypeError, ValueError, ArithmeticError, RuntimeError, LookupError) as error:
            raise UsageError(
                f"{self.key}: {name} does not take these arguments: {error}",
                f"It takes: {takes}." if takes else self.typed,
            ) from error


def signature_of(target: Any) -> inspect.Signature | None:
    """The signature of a callable; None for C code that has none. Raises `TypeError` for what cannot be called."""
    with suppress(ValueError):
        return inspect.signature(target)
    return None


def numbers(values: Any, what: str, name: str) -> dict[str, float]:
    """The numbers that the user's code returned, by name. Raises `UsageError` for anything else."""
    try:
        return {str(key): float(value) for key, value in values.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"{what}: {name} gave no dictionary of numbers: {error}", "", "Give numbers, or scalar tensors, by name."
        ) from None


_INSTALLED = tuple({os.path.dirname(torch.__path__[0]), *sysconfig.get_paths().values()})


@contextmanager
def name_culprits() -> Iterator[None]:
    """Raises errors that are not ckptool's as `UserCodeFailed` where the user's code took part, else as `RunFailed`."""
    try:
        yield
    except (Exception, SystemExit) as raised:
        error: BaseException = raised
        if isinstance(raised, Conflict) and raised.__cause__ is not None:  # a state that does not fit
            cause = traceback.extract_tb(raised.__cause__.__traceback__)
            error = raised.__cause__ if any(is_theirs(frame.filename) for frame in cause) else raised
        if isinstance(error, (CkptoolError, MemoryError, RecursionError)):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        last, users = frames[-1], [number for number, frame in enumerate(frames) if is_theirs(frame.filename)]
        if users:
            frame = frames[users[-1]]
            what = f"{frame.filename}:{frame.lineno} raised {problem}"
            why = TextLines(*"".join(traceback.format_list(frames[users[0] :])).rstrip().split("\n"))
            raise UserCodeFailed(what, why, "The error is in your code, not in ckptool.") from error
        if last.filename.startswith(OURS) and not type(error).__module__.startswith("torch"):
            raise  # a bug in ckptool
        what = f"training stopped: {problem}"
        fix = "Check that the data, the model, the optimizer and their args fit each other."
        raise RunFailed(what, f"It was raised in {last.name} ({last.filename}:{last.lineno}).", fix) from error


def is_theirs(file: str) -> bool:
    """True for a file that belongs neither to ckptool nor to an installed package."""
    return os.path.isfile(file) and not os.path.abspath(file).startswith((OURS, *_INSTALLED))


# Patterns -------------------------------------------------------------------------------------------------------------

Patterns = str | Sequence[str]


def parameters_matching(model: nn.Module, patterns: Patterns, what: str) -> list[str]:
    """The names of the parameters that patterns choose, in the model's order; a tied one under its first name.

    A pattern of names means parameters; modules only if it matches no parameter. what: the key of the patterns.
    Raises `UsageError` for one that matches nothing.
    """
    names = [name for name, _ in model.named_parameters()]

    def find(pattern: str) -> set[str]:
        if pattern.startswith("type:"):  # of modules of a class
            kind, _, suffix = pattern.removeprefix("type:").partition(".")
            is_type, fits = matcher(kind), matcher(suffix or "*")
            modules = ((prefix, module) for prefix, module in model.named_modules() if _is(module, is_type))
            params = ((prefix, name) for prefix, module in modules for name, _ in module.named_parameters())
            return {f"{prefix}.{name}".removeprefix(".") for prefix, name in params if fits(name)}.intersection(names)
        matches = matcher(pattern)
        members = (name for name in names if any(map(matches, accumulate(name.split(".")[:-1], "{}.{}".format))))
        return set(filter(matches, names)) or set(members)

    return _chosen(patterns, names, find, f"{what}: {{!r}} matches no parameter")


def modules_matching(model: nn.Module, patterns: Patterns, what: str) -> list[str]:
    """The names of the modules that patterns choose, without the model itself. Raises `UsageError` as above."""
    modules = {name: module for name, module in model.named_modules() if name}

    def find(pattern: str) -> set[str]:
        is_type = matcher(pattern.removeprefix("type:"))
        if pattern.startswith("type:"):
            return {name for name, module in modules.items() if _is(module, is_type)}
        return set(filter(is_type, modules))

    return _chosen(patterns, list(modules), find, f"{what}: {{!r}} matches no module")


def outermost(names: Sequence[str]) -> list[str]:
    """The modules that are inside none of the others."""
    return [name for name in names if not any(name.startswith(other + ".") for other in names)]


def _chosen(patterns: Patterns, names: list[str], find: Callable[[str], set[str]], problem: str) -> list[str]:
    listing = [patterns] if isinstance(patterns, str) else list(patterns)
    chosen = set(names) if listing and listing[0].startswith("not:") else set()
    for pattern in listing:
        matches = find(pattern.removeprefix("not:"))
        if not matches:
            raise UsageError(problem.format(pattern), f"Available: {listed(names, 8)}.")
        chosen = chosen - matches if pattern.startswith("not:") else chosen | matches
    return [name for name in names if name in chosen]


def _is(module: nn.Module, is_type: Callable[[str], bool]) -> bool:
    return any(is_type(kind.__name__) for kind in type(module).__mro__)
