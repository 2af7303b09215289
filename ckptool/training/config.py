"""A run's configuration: the keys of `run.yaml`, checked before anything starts.

Every class is a section of the file. The line of a key says everything about it: its type, its meaning (shown by
`train --init` and in the JSON Schema), whether it may change when a run is resumed, and its default.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.fields import FieldInfo

from ckptool.commands import arg
from ckptool.errors import Conflict, counted, form
from ckptool.training.code_paths import portable, rooted

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=0)]
Args = dict[str, Any]
Strategy = Literal["single", "dp", "ddp", "fsdp", "split"]
Signal = Literal["TERM", "INT", "USR1", "USR2", "HUP"]
Place = tuple[Any, ...]
Patterns = str | list[str]

FIXED = "fixed"  # decides where the run ends, and never changes
DECLARED = "declared"  # the same, but may be changed by naming it: --set
START = "start"  # decides how the run starts; free afterwards
FREE = "free"  # has no influence on the end; alone not recorded in checkpoints


@dataclass(frozen=True, slots=True)
class Key:
    """The meaning of a key, and the rule for changing it on a resume. A rule other than `FIXED` holds for all below it.

    A section with words of its own is one line of the example; one without is written out key by key.
    """

    about: str
    resume: str = FIXED

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> Any:
        schema = handler(core)
        return {**schema, "description": self.about} if self.about else schema


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, and values are not changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class HeldOut(Section):
    """A data set to evaluate on, of which nothing is trained on."""

    name: Annotated[str, Key("as data.name")]
    args: Annotated[Args, Key("its arguments")] = {}


class Data(Section):
    """The training data. `batch` is global: its samples do not depend on the world size or on accumulation."""

    name: Annotated[
        str, Key("digits | blobs | images | spirals | linear | ring | modadd | text | sequences | file.py:NAME")
    ] = "digits"
    args: Annotated[Args, Key("its arguments")] = {}
    batch: Annotated[Positive, Key("the global batch, whatever the number of processes and of micro-steps")] = 32
    workers: Annotated[Count, Key("processes that load", FREE)] = 0
    collate: Annotated[str, Key("default | pad (sequences) | file.py:NAME")] = "default"
    drop_last: Annotated[bool, Key("leave out the last, partial batch of an epoch")] = False
    sampler: Annotated[
        str | None, Key("file.py:NAME, called with (data set, generator) in each epoch: an iterable of indices")
    ] = None
    val_fraction: Annotated[float, Field(ge=0, lt=1), Key("held out for evaluation, unless there is val")] = 0.2
    val: Annotated[HeldOut | None, Key("{name: file.py:NAME, args: {}}: a set of its own to evaluate on", DECLARED)] = (
        None
    )
    test: Annotated[HeldOut | None, Key("the same, for ckptool eval --on test alone", FREE)] = None

    @model_validator(mode="before")
    @classmethod
    def _val_replaces(cls, values: Any) -> Any:
        own = isinstance(values, dict) and values.get("val") is not None
        return {"val_fraction": 0.0, **values} if own else values

    @model_validator(mode="after")
    def _one(self) -> Data:
        if self.val is not None and self.val_fraction:
            raise ValueError("give val or val_fraction, one of the two")
        return self


class FreezeUntil(Section):
    """Parameters that do not learn until a step."""

    match: Annotated[Patterns, Key("patterns of parameters")]
    until: Annotated[Positive, Key("the first step in which they learn")]


class Clip(Section):
    """Gradients clipped to a norm or to a value; exactly one of the two."""

    norm: Annotated[PositiveFloat | None, Key("the largest norm of all gradients together")] = None
    value: Annotated[PositiveFloat | None, Key("the largest absolute value")] = None

    @model_validator(mode="after")
    def _one(self) -> Clip:
        if (self.norm is None) == (self.value is None):
            raise ValueError("give norm or value, one of the two")
        return self


class Model(Section):
    """One model. `from` names a checkpoint to start from; `freeze` patterns of parameters, for ever or until a step.

    A pattern is a glob of names ("body.*.weight"), a module ("body.0"), a class ("type:LayerNorm"), one of its
    parameters ("type:Linear.weight"), an expression ("re:…"), or "not:…", which takes away from those before it.
    """

    name: Annotated[str, Key("mlp | conv | chargpt | tagger | generator | discriminator | file.py:NAME")] = "mlp"
    args: Annotated[Args, Key("its arguments")] = {}
    init: Annotated[str, Key("default | xavier_uniform | kaiming_normal | orthogonal | file.py:NAME", START)] = (
        "default"
    )
    clip: Annotated[Clip | None, Key("of the gradients of all its optimizers together: {norm: 1.0}")] = None
    freeze: Annotated[
        list[str | FreezeUntil], Key('patterns: ["body.*"], or until a step: [{match: "body.*", until: 100}]', DECLARED)
    ] = []
    from_: Annotated[str | None, Key("a checkpoint to start from", START)] = Field(None, alias="from")
    strict: Annotated[bool, Key("false: load what fits of it, and say what was skipped", START)] = True
    min_loaded: Annotated[
        float | None, Key("the share of the model's values that must load; null: half of those asked for", START)
    ] = None


class Group(Section):
    """Options of the optimizer for the parameters that match; each parameter is in exactly one group."""

    model_config = ConfigDict(extra="allow", frozen=True)

    match: Annotated[Patterns, Key("patterns of parameters")]


class Schedule(Section):
    """A learning rate schedule: one of torch, warmup_cosine, inverse_sqrt, warmup_linear, or yours.

    `file.py:NAME` is a function of the step that gives a factor (for LambdaLR; `args` are its other arguments), or a
    class, or a function whose first argument is called `optimizer`, which make a schedule.
    """

    name: Annotated[
        str, Key("a class of torch.optim.lr_scheduler | warmup_cosine | inverse_sqrt | warmup_linear | file.py:NAME")
    ]
    args: Annotated[Args, Key("its arguments")] = {}
    per: Annotated[Literal["step", "epoch"], Key("when it advances")] = "step"

    @property
    def follows_evaluation(self) -> bool:
        """True for the schedule whose learning rates depend on evaluation."""
        return self.name.lower().replace("_", "").removesuffix("lr") == "reducelronplateau"


class Optim(Section):
    """An optimizer. Several may share a model: each parameter is in one of them, and they step together."""

    name: Annotated[str, Key("any class of torch.optim | file.py:NAME")] = "adamw"
    model: Annotated[str | None, Key("the model whose parameters it takes, where its own name is another")] = None
    match: Annotated[Patterns, Key('which of them: ["blocks.*.weight", "type:Linear.weight"]; [] is the rest')] = []
    lr: Annotated[PositiveFloat, Key("the learning rate", DECLARED)] = 0.001
    args: Annotated[Args, Key("its arguments")] = {}
    groups: Annotated[
        list[Group], Key('[{match: "type:LayerNorm", weight_decay: 0.0}]: the first that matches; the rest is the last')
    ] = []
    clip: Annotated[Clip | None, Key("of its gradients: {norm: 1.0} | {value: 0.5}")] = None
    schedule: Annotated[
        Schedule | None,
        Key("{name: step, args: {step_size: 500, gamma: 0.5}, per: step}; warmup_cosine, inverse_sqrt, …", DECLARED),
    ] = None


class ActivationCheckpoint(Section):
    """Activations recomputed instead of kept: those of modules that match, or of a sequential module in segments."""

    match: Annotated[Patterns | None, Key("patterns of modules")] = None
    sequential: Annotated[str | None, Key("the name of an nn.Sequential")] = None
    segments: Annotated[Positive, Key("how many parts the sequential module is run in")] = 2
    use_reentrant: Annotated[bool, Key("the older implementation of torch.utils.checkpoint")] = False
    preserve_rng_state: Annotated[bool, Key("dropout draws the same numbers again")] = True

    @model_validator(mode="after")
    def _one(self) -> ActivationCheckpoint:
        if (self.match is None) == (self.sequential is None):
            raise ValueError("give match or sequential, one of the two")
        return self


class Train(Section):
    """How long and how: `steps` or `epochs`, exactly one. `compile`: by torch.compile, or by the backend it names."""

    steps: Annotated[Positive | None, Key("or epochs: 10, exactly one of the two", FREE)] = None
    epochs: Annotated[Positive | None, Key("or steps: 2000, exactly one of the two", FREE)] = None
    accumulate: Annotated[Positive, Key("micro-steps in a step")] = 1
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Key("fp32 | bf16 | fp16 (with a scaler)")] = "fp32"
    compile: Annotated[bool | str, Key("true: torch.compile; or the name of a backend", FREE)] = False
    activation_checkpoint: Annotated[
        ActivationCheckpoint | None, Key('{match: "blocks.*"} | {sequential: body, segments: 4}')
    ] = None
    ema: Annotated[Decay | None, Key("0.999: an exponential moving average of the weights")] = None
    on_nonfinite: Annotated[
        Literal["stop", "skip"], Key("stop | skip a step whose loss or gradients are not finite")
    ] = "stop"

    @model_validator(mode="after")
    def _one(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give steps or epochs, exactly one of the two")
        return self


class Eval(Section):
    """When to evaluate (0: never), and which number decides what is best."""

    every: Annotated[Count | Literal["epoch"], Key("steps between evaluations; epoch: after each; 0: never")] = 200
    ema: Annotated[bool, Key("evaluate the average of the weights (train.ema) in their place")] = False
    metric: Annotated[str, Key("the number that decides what is best")] = "val_loss"
    mode: Annotated[Literal["min", "max"], Key("whether the smallest or the largest is best")] = "min"


def _seconds(value: Any) -> Any:
    """A time in seconds, also of words like 30m."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if isinstance(value, str) and (found := re.fullmatch(r"([0-9]+\.?[0-9]*) *([smhd])", value)):
        return float(found[1]) * units[found[2]]
    if isinstance(value, str):
        raise ValueError(f"should be a number of seconds, or a time like 90s, 30m, 2h or 1d (it is {value[:40]!r})")
    return value


class Saving(Section):
    """When to save, what to keep, and how a checkpoint is verified when it is resumed from (`full`: sha256; `size`)."""

    every: Annotated[Positive, Key("steps between saves")] = 200
    seconds: Annotated[PositiveFloat | None, Key("save too when so many have passed since the last save; or 10m")] = (
        None
    )
    at_start: Annotated[bool, Key("save before the first step, too")] = False
    keep_last: Annotated[Positive, Key("newest to keep; a checkpoint stays if any of the three keeps it")] = 3
    keep_best: Annotated[Count, Key("how many of the best, by eval.metric")] = 1
    keep_every: Annotated[Count, Key("keep those at every multiple of this many steps; 0: none")] = 0
    async_: Annotated[bool, Key("write while the next steps run")] = Field(False, alias="async")
    verify: Annotated[Literal["full", "size"], Key("what resuming checks: full (sha256) | size")] = "full"

    _units = field_validator("seconds", mode="before")(_seconds)


class Stop(Section):
    """When to stop before the end: after a time, when evaluations get no better, or by a signal; all save first."""

    after: Annotated[PositiveFloat | None, Key("seconds from the first step on, or 30m, 2h")] = None
    patience: Annotated[Positive | None, Key("evaluations in a row in which eval.metric gets no better")] = None
    min_delta: Annotated[float, Field(ge=0), Key("better is by more than this")] = 0.0
    signals: Annotated[list[Signal], Key("the signals that stop a run after saving")] = ["TERM", "INT", "USR1"]

    _units = field_validator("after", mode="before")(_seconds)


class Log(Section):
    """How often a line is written, and where besides metrics.jsonl; `tensorboard` has to be installed."""

    every: Annotated[Positive, Key("steps between lines")] = 10
    csv: Annotated[bool, Key("write the lines as a table, metrics.csv, too")] = False
    tensorboard: Annotated[bool, Key("write event files for TensorBoard, too")] = False


class Profile(Section):
    """The steps that `torch.profiler` waits, warms up and records; where the trace goes, in the run's folder.

    Beside it goes a table, `profile.txt`, of the operators that took the most time.
    """

    wait: Annotated[Count, Key("steps to wait")] = 1
    warmup: Annotated[Count, Key("steps to warm up")] = 1
    active: Annotated[Positive, Key("steps to record")] = 3
    trace: Annotated[str, Field(pattern=r"^[\w][\w.-]*\.json(\.gz)?$"), Key("the name of the file")] = "profile.json"

    @property
    def table(self) -> str:
        """The name of the file with the operators that took the most time."""
        return self.trace.removesuffix(".gz").removesuffix(".json") + ".txt"


class Split(Section):
    """A model on several devices: it is cut before the named modules."""

    devices: Annotated[list[str], Key("one for each part")]
    at: Annotated[list[str], Key("the modules before which the model is cut")]
    microbatches: Annotated[Positive, Key("the parts of a batch that follow each other through the devices")] = 1

    @model_validator(mode="after")
    def _fits(self) -> Split:
        if len(self.devices) != len(self.at) + 1:
            raise ValueError(
                f"{counted(len(self.at), 'cut')} {form(len(self.at), 'makes', 'make')} "
                f"{counted(len(self.at) + 1, 'part')}, for {counted(len(self.devices), 'device')}"
            )
        return self


class Fsdp(Section):
    """A model divided among processes, by FSDP2: the modules that are gathered one by one, to be computed."""

    match: Annotated[Patterns, Key("patterns of modules; without the section: the children of the model")]


class Config(Section):
    """A whole run."""

    run: Annotated[str, Key("the folder of the run", FREE)]
    seed: Annotated[Count, Key("with step and place, the source of all randomness")] = 0
    device: Annotated[str, Key("auto | cpu | cuda | cuda:1 | mps", FREE)] = "auto"
    strategy: Annotated[
        Strategy, Key("single | dp (DataParallel) | ddp (torchrun) | fsdp (torchrun) | split (see split)", FREE)
    ] = "single"
    deterministic: Annotated[
        bool | Literal["warn"], Key("true | warn | false: torch.use_deterministic_algorithms", FREE)
    ] = True
    cudnn_benchmark: Annotated[bool, Key("true: kernels by timing; needs deterministic: false", FREE)] = False
    data: Annotated[Data, Key("")] = Data()
    models: Annotated[dict[str, Model], Key("")] = {"main": Model.model_validate({})}
    task: Annotated[str, Key("classify | regress | lm | gan | file.py:NAME")] = "classify"
    optim: Annotated[dict[str, Optim], Key("")] = {"main": Optim()}
    train: Annotated[Train, Key("")]
    eval: Annotated[
        Eval, Key("what is best (default: val_loss, min); also at the end, where it decides nothing", FREE)
    ] = Eval()
    save: Annotated[Saving, Key("", FREE)] = Saving.model_validate({})
    stop: Annotated[Stop, Key("after: seconds, or 2h; patience: evaluations that get no better", FREE)] = Stop()
    log: Annotated[Log, Key("steps between lines; metrics.csv; event files", FREE)] = Log()
    hooks: Annotated[list[str], Key("grad_norm | activation_stats | file.py:NAME", FREE)] = []
    profile: Annotated[Profile | None, Key("{wait: 1, warmup: 1, active: 3, trace: profile.json}", FREE)] = None
    fsdp: Annotated[Fsdp | None, Key('{match: "blocks.*"}: modules that are gathered one by one', FREE)] = None
    split: Annotated[Split | None, Key("{devices: [cuda:0, cuda:1], at: [blocks.4], microbatches: 4}", FREE)] = None

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if not self.models:
            raise ValueError("there is no model")
        owners = [self.model_of(name) for name in self.optim]
        if set(self.models) != set(owners):
            raise ValueError(
                f"models are {sorted(self.models)}, optimizers for {sorted(set(owners))}; each model needs one, and "
                "each optimizer a model (its own name, or `model`)"
            )
        rest = [self.model_of(name) for name, settings in self.optim.items() if not settings.match]
        if several := {name for name in rest if rest.count(name) > 1}:
            raise ValueError(f"several optimizers take the rest of {sorted(several)}; all but one need match")
        if self.cudnn_benchmark and self.deterministic:
            raise ValueError("cudnn_benchmark picks kernels by timing, which needs deterministic: false")
        if self.eval.ema and not self.train.ema:
            raise ValueError("eval.ema needs train.ema: there is no average of the weights")
        if self.stop.patience and not self.eval.every:
            raise ValueError("stop.patience counts evaluations, and there are none: eval.every is 0")
        if (self.strategy == "split") != (self.split is not None):
            raise ValueError("strategy: split needs the section split, and the section needs the strategy")
        return self

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


def about(field: FieldInfo) -> Key:
    """The meaning and the resume rule of a key."""
    return next(found for found in field.metadata if isinstance(found, Key))


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section in `Section | None`, `dict[str, Section]`, `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := section_in(part)) is not None), None)


def descend(place: Place) -> Iterator[tuple[FieldInfo | None, type[BaseModel] | None]]:
    """The key at each part of a place, None for names of the user's own, and the section that follows."""
    section: type[BaseModel] | None = Config
    named = False  # the section holds sections of one kind, under names of the user's own
    for part in place:
        if named or isinstance(part, int):
            field, named = None, False
        else:
            field = keys_of(section).get(str(part))
            annotation = field.annotation if field is not None else None
            section, named = section_in(annotation), typing.get_origin(annotation) is dict
        yield field, None if named else section


def _is_section(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is not list and section_in(field.annotation) is not None


def is_named(field: FieldInfo) -> bool:
    """True for sections of one kind, under names of the user's own."""
    return typing.get_origin(field.annotation) is dict


# What may change on a resume -----------------------------------------------------------------------------------------


def rule_of(key: str) -> str:
    """The rule for changing a key on a resume: the first on the way to it that is not `FIXED`."""
    rules = (about(field).resume for field, _ in descend(tuple(key.split("."))) if field is not None)
    return next((rule for rule in rules if rule != FIXED), FIXED)


def recorded(values: dict[str, Any], section: type[BaseModel] = Config) -> dict[str, Any]:
    """The part of a dumped configuration that decides where a run ends, as its checkpoints hold it.

    Plain values come first, then sections: the order of keys is part of a file's bytes.
    """
    fields = {key: field for key, field in keys_of(section).items() if about(field).resume != FREE}
    kept = {}
    for key in sorted(fields, key=lambda key: _is_section(fields[key])):
        value, below = values[key], section_in(fields[key].annotation)
        if _is_section(fields[key]) and below is not None and value is not None:
            named = is_named(fields[key])
            value = {name: recorded(each, below) for name, each in value.items()} if named else recorded(value, below)
        kept[key] = portable(value)
    return kept


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """A key whose value is another than the run was started with, and its rule."""

    key: str
    before: Any
    after: Any
    rule: str


def changes(before: Config, after: Config) -> list[ChangedKey]:
    """The keys that differ, each with its rule."""
    # Runs of 0.1.0 have paths that are relative to the working directory.
    one, other = (dict(_leaves(portable(rooted(each.dumped(), os.curdir)))) for each in (before, after))
    keys = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
    settings = (*before.optim.values(), *after.optim.values())
    followed = any(each.schedule is not None and each.schedule.follows_evaluation for each in settings)
    rules = dict.fromkeys(("eval.every", "eval.metric", "eval.ema"), DECLARED) if followed else {}
    return [ChangedKey(key, one.get(key), other.get(key), rules.get(key) or rule_of(key)) for key in keys]


def _leaves(values: Any, place: Place = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _leaves(value, (*place, key))
    elif isinstance(values, list) and any(isinstance(value, (dict, list)) for value in values):
        for index, value in enumerate(values):
            yield from _leaves(value, (*place, index))
    else:
        yield ".".join(map(str, place)), values


def refuse_fixed(found: Sequence[ChangedKey], asked: Sequence[str], folder: str) -> None:
    """Raises `Conflict` for keys that may not change in a run, and for those that change only when they are `--set`."""
    fixed = [change for change in found if change.rule == FIXED]
    silent = [change for change in found if change.rule == DECLARED and not _is_asked(change.key, asked)]
    if wrong := fixed + silent:
        lines = [f"{change.key} was {change.before!r}, and is now {change.after!r}" for change in wrong]
        raise Conflict(
            f"{folder} cannot go on with a changed configuration: " + "; ".join(lines),
            "The result would belong to neither. Nothing was changed.",
            f"Start another run: {arg(set='run=OTHER')}"
            if fixed
            else f"Confirm the change: {arg(set=f'{wrong[0].key}={wrong[0].after}')}",
        )


def _is_asked(key: str, asked: Sequence[str]) -> bool:
    return any(key == each or key.startswith(each + ".") for each in asked)
