"""A run's configuration: the keys of `run.yaml`, checked before anything starts.

Every class is a section of the file. The line of a key says everything about it: its type, its default, its meaning
(shown by `train --init` and in the JSON Schema), and whether it may change when a run is resumed.

Paths in it (the files of `file.py:NAME`, the `from` of a model, arguments that begin with `./` or `../`) are relative
to the file that they are in, and absolute from then on.
"""

from __future__ import annotations

import json
import os
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ckptool.analysis.targets import names_code
from ckptool.checkpoint.paths import absolute
from ckptool.commands import arg, command
from ckptool.errors import Conflict
from ckptool.training import CONFIG

FIXED = "fixed"  # decides where the run ends, and never changes
DECLARED = "declared"  # the same, but may be changed by naming it: --set
START = "start"  # decides how the run starts; free afterwards
FREE = "free"  # has no influence on the end; alone not recorded in checkpoints


def key(default: Any, about: str, resume: str = FIXED, **more: Any) -> Any:
    """A key of a section: its default (`...`: it must be given), its meaning, and the rule for changing it on a resume.

    A rule other than `FIXED` holds for all below it. A section without words of its own is explained key by key.
    """
    return Field(default, description=about or None, json_schema_extra={"resume": resume}, **more)


def _number(value: Any) -> Any:
    """Refuses true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "should be a number")
    return value


_TIME = r"([0-9]+\.?[0-9]*) *([smhd])"


def _seconds(value: Any) -> Any:
    """A time in seconds, also of words like 30m."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if isinstance(value, str) and (match := re.fullmatch(_TIME, value)):
        return float(match[1]) * units[match[2]]
    if isinstance(value, str):
        raise ValueError(f"should be a number of seconds or a time like 90s, 30m, 2h or 1d (it is {value[:40]!r})")
    return _number(value)


Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[int, Field(gt=0), BeforeValidator(_number)]
PositiveFloat = Annotated[float, Field(gt=0), BeforeValidator(_number)]
_WRITTEN = [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": f"^{_TIME}$"}]
Seconds = Annotated[float, Field(gt=0), BeforeValidator(_seconds), WithJsonSchema({"anyOf": _WRITTEN})]
Count = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Args = dict[str, Any]
Strategy = Literal["single", "dp", "ddp", "fsdp", "split"]
Signal = Literal["TERM", "INT", "USR1", "USR2", "HUP"]
Place = tuple[Any, ...]
Patterns = str | list[str]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, and values are not changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    one_of: ClassVar[tuple[str, ...]] = ()  # keys of which exactly one is given

    def wrong(self) -> dict[str, bool]:
        """What may be wrong with the values together: the words of the error, and whether it is so."""
        count = sum(getattr(self, name) is not None for name in self.one_of)
        return {
            f"give {' or '.join(self.one_of)}, exactly one of the two (null is none)": bool(self.one_of) and count != 1
        }

    @model_validator(mode="after")
    def _fits(self) -> Section:
        for words in [words for words, is_so in self.wrong().items() if is_so]:
            raise ValueError(words)
        return self


class HeldOut(Section):
    """A data set to evaluate on, of which nothing is trained on."""

    name: str = key(..., "as data.name")
    args: Args = key({}, "its arguments")


class Data(Section):
    """The training data. `batch` is global: its samples do not depend on the world size or on accumulation."""

    name: str = key("digits", "digits | blobs | file.py:NAME")
    args: Args = key({}, "its arguments")
    batch: Positive = key(32, "the global batch, whatever the number of processes and of micro-steps")
    workers: Count = key(0, "processes that load", FREE)
    collate: str = key("default", "default | file.py:NAME, as examples/data.py:pad")
    drop_last: bool = key(False, "leave out the last, partial batch of an epoch")
    sampler: str | None = key(None, "file.py:NAME, called with (data set, generator) in each epoch: gives indices")
    val_fraction: Number = key(0.2, "held out for evaluation, unless there is val", ge=0, lt=1)
    val: HeldOut | None = key(None, "{name: file.py:NAME, args: {}}: a set of its own to evaluate on", DECLARED)
    test: HeldOut | None = key(None, "the same, only for ckptool eval --on test", FREE)

    @model_validator(mode="before")
    @classmethod
    def _val_replaces(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("val") is None:
            return values
        if values.get("val_fraction"):
            raise ValueError("give val or val_fraction, one of the two")
        return {**values, "val_fraction": 0.0}


class Clip(Section):
    """Gradients clipped to a norm or to a value; exactly one of the two."""

    one_of = ("norm", "value")
    norm: PositiveFloat | None = key(None, "clip gradients to this total norm")
    value: PositiveFloat | None = key(None, "clip gradients to this absolute value")


class Model(Section):
    """One model. `from` names a checkpoint to start from; `freeze` patterns of parameters.

    A pattern is a glob of names ("body.*.weight"), a module ("body.0"), a class ("type:LayerNorm"), one of its
    parameters ("type:Linear.weight"), an expression ("re:…"), or "not:…", which takes away from those before it.
    """

    name: str = key("mlp", "mlp | file.py:NAME")
    args: Args = key({}, "its arguments")
    init: str = key("default", "default: what its own code sets | file.py:NAME, called with the model", START)
    clip: Clip | None = key(None, "of the gradients of all its optimizers together: {norm: 1.0}")
    freeze: list[str] = key([], 'patterns of parameters that do not learn: ["body.*"]', DECLARED)
    from_: str | None = key(None, "a checkpoint to start from", START, alias="from")
    strict: bool = key(True, "false: load what fits of it, and say what was skipped", START)
    min_loaded: Number | None = key(
        None, "the share of the model's values that must load; null: half of those asked for", START
    )


class Group(Section):
    """Options of the optimizer for the parameters that match; each parameter is in exactly one group."""

    model_config = ConfigDict(extra="allow", frozen=True)

    match: Patterns = key(..., "patterns of parameters")


class Schedule(Section):
    """A learning rate schedule: one of torch, warmup_cosine, or yours.

    `file.py:NAME` is a function of the step that gives a factor (for LambdaLR; `args` are its other arguments), or a
    class, or a function whose first argument is called `optimizer`, which make a schedule.
    """

    name: str = key(..., "a class of torch.optim.lr_scheduler | warmup_cosine | file.py:NAME")
    args: Args = key({}, "its arguments")
    per: Literal["step", "epoch"] = key("step", "when it advances")

    @property
    def follows_evaluation(self) -> bool:
        """True for the schedule whose learning rates depend on evaluation."""
        return self.name.lower().replace("_", "").removesuffix("lr") == "reducelronplateau"


class Optim(Section):
    """An optimizer. Several may share a model: each parameter is in one of them, and they step together."""

    name: str = key("adamw", "any class of torch.optim | file.py:NAME")
    model: str | None = key(None, "the model whose parameters it takes, where its own name is another")
    match: Patterns = key([], 'which of them: ["blocks.*.weight", "type:Linear.weight"]; [] is the rest')
    lr: PositiveFloat = key(0.001, "the learning rate", DECLARED)
    args: Args = key({}, "its arguments")
    groups: list[Group] = key(
        [], '[{match: "type:LayerNorm", weight_decay: 0.0}]: the first that matches; the rest is the last'
    )
    clip: Clip | None = key(None, "of its gradients: {norm: 1.0} | {value: 0.5}")
    schedule: Schedule | None = key(
        None,
        "{name: step, args: {step_size: 500, gamma: 0.5}, per: step} | {name: file.py:NAME}; warmup_cosine, …",
        DECLARED,
    )

    def wrong(self) -> dict[str, bool]:
        return {"give lr itself, not in args": "lr" in self.args}  # `--set optim.main.lr` would do nothing


class ActivationCheckpoint(Section):
    """Activations recomputed instead of kept: those of modules that match, or of a sequential module in segments."""

    one_of = ("match", "sequential")
    match: Patterns | None = key(None, "patterns of modules")
    sequential: str | None = key(None, "the name of an nn.Sequential")
    segments: Positive = key(2, "how many parts the sequential module is run in")
    use_reentrant: bool = key(False, "the older implementation of torch.utils.checkpoint, where it applies")
    preserve_rng_state: bool = key(True, "dropout draws the same numbers again")


class Train(Section):
    """How long and how: `steps` or `epochs`, exactly one. `compile`: by torch.compile, or by the backend it names."""

    one_of = ("steps", "epochs")
    steps: Positive | None = key(None, "or epochs: 10, exactly one of the two", FREE)
    epochs: Positive | None = key(None, "or steps: 2000, exactly one of the two", FREE)
    accumulate: Positive = key(1, "micro-steps in a step")
    precision: Literal["fp32", "bf16", "fp16"] = key("fp32", "fp32 | bf16 | fp16 (with a scaler)")
    compile: bool | str = key(False, "true: torch.compile; or the name of a backend", FREE)
    activation_checkpoint: ActivationCheckpoint | None = key(
        None, '{match: "blocks.*"} | {sequential: body, segments: 4}'
    )
    ema: Number | None = key(None, "0.999: an exponential moving average of the weights", gt=0, lt=1)
    on_nonfinite: Literal["stop", "skip"] = key("stop", "stop | skip a step whose loss or gradients are not finite")


class Eval(Section):
    """When to evaluate (0: never), and which number decides what is best."""

    every: Count | Literal["epoch"] = key(
        200, "steps between evaluations; epoch: after each; 0: never; also at the end"
    )
    ema: bool = key(False, "evaluate the average of the weights (train.ema) in their place")
    metric: str = key("val_loss", "the number that decides what is best")
    mode: Literal["min", "max"] = key("min", "whether the smallest or the largest is best")


class Saving(Section):
    """When to save, what to keep, and how a checkpoint is verified when it is resumed from (`full`: sha256; `size`)."""

    every: Positive = key(200, "steps between saves")
    seconds: Seconds | None = key(None, "save too when so many have passed since the last save; or 10m")
    at_start: bool = key(False, "save before the first step, too")
    keep_last: Positive = key(3, "newest to keep; a checkpoint stays if any of the three keeps it")
    keep_best: Count = key(1, "how many of the best, by eval.metric")
    keep_every: Count = key(0, "keep those at every multiple of this many steps; 0: none")
    async_: bool = key(False, "write while the next steps run", alias="async")
    verify: Literal["full", "size"] = key("full", "what resuming checks: full (sha256) | size")


class Stop(Section):
    """When to stop before the end: after a time, when evaluations get no better, or by a signal; all save first."""

    after: Seconds | None = key(None, "seconds from the first step on, or 30m, 2h")
    patience: Positive | None = key(None, "evaluations in a row in which eval.metric gets no better")
    min_delta: Number = key(0.0, "better is by more than this", ge=0)
    signals: list[Signal] = key(["TERM", "INT", "USR1"], "the signals that stop a run after saving")


class Log(Section):
    """How often a line is written, and where besides metrics.jsonl; `tensorboard` has to be installed."""

    every: Positive = key(10, "steps between logged lines")
    tensorboard: bool = key(False, "write event files for TensorBoard, too")


class Profile(Section):
    """The steps that `torch.profiler` waits, warms up and records; where the trace goes, in the run's folder."""

    wait: Count = key(1, "steps to wait")
    warmup: Count = key(1, "steps to warm up")
    active: Positive = key(3, "steps to record")
    trace: str = key("profile.json", "the name of the file", pattern=r"^[\w][\w.-]*\.json(\.gz)?$")


class Split(Section):
    """A model on several devices: it is cut before the named modules."""

    devices: list[str] = key(..., "one for each part")
    at: list[str] = key(..., "the modules before which the model is cut")
    microbatches: Positive = key(1, "the parts of a batch that follow each other through the devices")

    def wrong(self) -> dict[str, bool]:
        parts = len(self.at) + 1
        return {f"at makes {parts} parts, and there must be as many devices": len(self.devices) != parts}


class Fsdp(Section):
    """A model divided among processes, by FSDP2: the modules that are gathered one by one, to be computed."""

    match: Patterns = key(..., "patterns of modules; without the section: the children of the model")


class Config(Section):
    """A whole run."""

    run: str = key(..., "the folder of the run", FREE, min_length=1)
    seed: Count = key(0, "with step and place, the source of all randomness")
    device: str = key("auto", "auto | cpu | cuda | cuda:1 | mps", FREE)
    strategy: Strategy = key(
        "single", "single | dp (DataParallel) | ddp (torchrun) | fsdp (torchrun) | split (see split)", FREE
    )
    deterministic: bool | Literal["warn"] = key(True, "true | warn | false: torch.use_deterministic_algorithms", FREE)
    data: Data = key(Data(), "")
    models: dict[str, Model] = key({"main": Model.model_validate({})}, "")
    task: str = key("classify", "classify | regress | lm | gan | file.py:NAME")
    optim: dict[str, Optim] = key({"main": Optim()}, "")
    train: Train = key(..., "")
    eval: Eval = key(Eval(), "", FREE)
    save: Saving = key(Saving.model_validate({}), "", FREE)
    stop: Stop = key(Stop(), "", FREE)
    log: Log = key(Log(), "", FREE)
    hooks: list[str] = key([], "grad_norm | activation_stats | file.py:NAME", FREE)
    profile: Profile | None = key(None, "{wait: 1, warmup: 1, active: 3, trace: profile.json}", FREE)
    fsdp: Fsdp | None = key(None, '{match: "blocks.*"}: modules that are gathered one by one', FREE)
    split: Split | None = key(None, "{devices: [cuda:0, cuda:1], at: [blocks.4], microbatches: 4}", FREE)

    def wrong(self) -> dict[str, bool]:
        owners = [self.model_of(name) for name in self.optim]
        catch_alls = [self.model_of(name) for name, settings in self.optim.items() if not settings.match]
        several = {name for name in catch_alls if catch_alls.count(name) > 1}
        return {
            "there is no model": not self.models,
            f"models are {sorted(self.models)}, optimizers for {sorted(set(owners))}; each model needs one, and each "
            "optimizer a model (its own name, or `model`)": set(self.models) != set(owners),
            f"several optimizers take the rest of {sorted(several)}; all but one need match": bool(several),
            "eval.ema needs train.ema: there is no average of the weights": self.eval.ema and not self.train.ema,
            "stop.patience counts evaluations, and there are none: eval.every is 0": bool(
                self.stop.patience and not self.eval.every
            ),
            "schedule: ReduceLROnPlateau needs evaluation, and eval.every is 0": not self.eval.every
            and any(optim.schedule is not None and optim.schedule.follows_evaluation for optim in self.optim.values()),
            "strategy: split needs the section split, and the section needs the strategy": (
                (self.strategy == "split") != (self.split is not None)
            ),
            f"strategy: split cuts one model, and there are {len(self.models)}": (
                self.split is not None and len(self.models) > 1
            ),
        }

    def model_of(self, optimizer: str) -> str:
        """The model whose parameters an optimizer takes."""
        return self.optim[optimizer].model or optimizer

    def dumped(self) -> dict[str, Any]:
        """The configuration as plain values, every default filled in."""
        return self.model_dump(mode="json", by_alias=True)


# The keys as data ----------------------------------------------------------------------------------------------------


def keys_of(section: type[BaseModel] | None) -> dict[str, FieldInfo]:
    """The keys of a section, as they are written in a file."""
    return {field.alias or name: field for name, field in section.model_fields.items()} if section else {}


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section in `Section | None`, `dict[str, Section]`, `list[Section]`."""
    if isinstance(annotation, type(BaseModel)):
        return annotation
    return next((section for part in typing.get_args(annotation) if (section := section_in(part)) is not None), None)


def is_named(field: FieldInfo) -> bool:
    """True for sections of one kind, under names of the user's own."""
    return typing.get_origin(field.annotation) is dict


def descend(place: Place) -> Iterator[tuple[FieldInfo | None, type[BaseModel] | None]]:
    """The key and the following section at each part of a place; no key for names of the user's own and numbers."""
    section: type[BaseModel] | None = Config
    several = False  # the section holds sections of one kind, by name or by number
    for part in place:
        field = None if several else keys_of(section).get(str(part))
        if not several:
            section = section_in(field.annotation) if field is not None else None
        several = field is not None and typing.get_origin(field.annotation) in (dict, list)
        yield field, None if several else section


# Paths ---------------------------------------------------------------------------------------------------------------


def _names_file(text: str) -> bool:
    return names_code(text) and text.rpartition(":")[0].endswith(".py")


def rooted(value: Any, folder: str, place: tuple[Any, ...] = ()) -> Any:
    """A copy of a configuration's plain values with absolute paths; `place`: the keys that lead to `value`."""
    if isinstance(value, dict):
        return {key: rooted(item, folder, (*place, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [rooted(item, folder, (*place, index)) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    if value.startswith("~/"):
        value = os.path.expanduser(value)
    is_path = value.startswith(("./", "../")) if "args" in place else _names_file(value) or place[-1:] == ("from",)
    path, separator, address = value.partition("#")
    return absolute(os.path.join(folder, path)) + separator + address if is_path and path else value


def portable(value: Any) -> Any:
    """Plain values in which code is named without its folder, which differs between machines."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    return os.path.basename(value) if isinstance(value, str) and _names_file(value) else value


def code_names(value: Any) -> Iterator[str]:
    """Every `file.py:NAME` and `module:NAME` in plain values."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from code_names(item)
    if isinstance(value, str) and names_code(value):
        yield value


# What may change on a resume -----------------------------------------------------------------------------------------


def _rule(field: FieldInfo) -> str:
    extra: Any = field.json_schema_extra
    return str(extra["resume"])


def rule_of(key: str) -> str:
    """The rule for changing a key on a resume: the first one on the path to it that is not `FIXED`."""
    rules = (_rule(field) for field, _ in descend(tuple(key.split("."))) if field is not None)
    return next((rule for rule in rules if rule != FIXED), FIXED)


def recorded(values: dict[str, Any], section: type[BaseModel] = Config) -> dict[str, Any]:
    """The part of a dumped configuration that decides where a run ends, as its checkpoints hold it.

    Plain values come first, then sections: the order of keys is part of a file's bytes.
    """
    fields = {key: field for key, field in keys_of(section).items() if _rule(field) != FREE}
    below = {key: section_in(f.annotation) for key, f in fields.items() if typing.get_origin(f.annotation) is not list}
    record = {}
    for key in sorted(fields, key=lambda key: below.get(key) is not None):
        value, inner = values[key], below.get(key)
        if inner is not None and value is not None:
            named = is_named(fields[key])
            value = {name: recorded(part, inner) for name, part in value.items()} if named else recorded(value, inner)
        record[key] = portable(value)
    return record


class ChangedKey(NamedTuple):
    """A key whose value differs from the one that the run was started with, and its rule."""

    key: str
    before: Any
    after: Any
    rule: str


def changes(before: Config, after: Config) -> list[ChangedKey]:
    """The keys that differ, without `run`, each with its rule."""
    settings = (*before.optim.values(), *after.optim.values())
    followed = any(optim.schedule is not None and optim.schedule.follows_evaluation for optim in settings)
    rules = dict.fromkeys(("eval.every", "eval.metric", "eval.ema"), DECLARED) if followed else {}
    differing = _differing({**before.dumped(), "run": after.run}, after.dumped(), "")
    return [ChangedKey(key, old, new, rules.get(key) or rule_of(key)) for key, old, new in differing]


def _differing(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """The keys whose values differ, with both. A section that one of the two has not, or lacks a key of, is a value."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() <= new.keys():
        for name, value in new.items():
            yield from _differing(old.get(name), value, f"{key}.{name}".lstrip("."))
    elif portable(old) != portable(new):
        yield key, old, new


def refuse_fixed(changed: Sequence[ChangedKey], assignments: Sequence[str], folder: str) -> None:
    """Raises `Conflict` for changes of fixed keys, and of declared ones that no assignment (`--set`) names."""
    fixed = [change for change in changed if change.rule == FIXED]
    keys = [assignment.partition("=")[0].strip(": ") + "." for assignment in assignments]
    named = [c.key for c in changed if any(f"{c.key}.".startswith(key) or key.startswith(f"{c.key}.") for key in keys)]
    silent = [change for change in changed if change.rule == DECLARED and change.key not in named]
    if wrong := fixed + silent:
        lines = [f"{change.key} was {_typed(change.before)}, and is now {_typed(change.after)}" for change in wrong]
        words = [f"{change.key}={_typed(change.after)}" for change in (changed if fixed else silent)]
        raise Conflict(
            f"{folder} cannot continue with a changed configuration: " + "; ".join(lines),
            "The result would belong to neither configuration. Nothing was changed.",
            f"Start another run: {command('train', os.path.join(folder, CONFIG), set=[*words, 'run=OTHER'])}"
            if fixed
            else f"Confirm the change: {arg(set=words)}",
        )


def _typed(value: Any) -> str:
    """A value as it is typed in a configuration."""
    is_word = isinstance(value, str) and re.fullmatch(r"[\w./:~-]+", value)
    return value if is_word else json.dumps(value, ensure_ascii=False)
