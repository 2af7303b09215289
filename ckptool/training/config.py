"""A run's configuration: what can be said in `run.yaml`, checked before anything starts.

Every class is a section of the file. Unknown keys are errors; `configfile.py` says in which line and what may have been meant.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ckptool.errors import counted, form

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Args = dict[str, Any]


class Section(BaseModel):
    """A part of the configuration: no unknown keys, not changed once it was made."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Data(Section):
    """What is trained on. `batch` is the global batch: its samples do not depend on the world size or on accumulation."""

    name: str = "digits"
    args: Args = {}
    batch: Positive = 32
    workers: Count = 0
    collate: str = "default"
    drop_last: bool = False
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2


class Model(Section):
    """One model. `from` names a checkpoint to start from; `freeze` patterns of parameters, for ever or until a step."""

    name: str = "mlp"
    args: Args = {}
    init: str = "default"
    freeze: list[str | FreezeUntil] = []
    from_: str | None = Field(None, alias="from")
    strict: bool = True


class FreezeUntil(Section):
    """Parameters that do not learn until a step."""

    match: str
    until: Positive


class Group(Section):
    """Options of the optimizer for the parameters that match; each parameter is in exactly one group."""

    model_config = ConfigDict(extra="allow", frozen=True)

    match: str


class Clip(Section):
    """Gradients cut to a norm, or to a value; exactly one of the two."""

    norm: Annotated[float, Field(gt=0)] | None = None
    value: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Clip:
        if (self.norm is None) == (self.value is None):
            raise ValueError("give norm or value, one of the two")
        return self


class Schedule(Section):
    """A learning rate schedule: any of `torch.optim.lr_scheduler`, or warmup_cosine, inverse_sqrt, warmup_linear."""

    name: str
    args: Args = {}
    per: Literal["step", "epoch"] = "step"

    @property
    def follows_evaluation(self) -> bool:
        """True for the schedule whose rates are those that evaluation decides."""
        return self.name.lower().replace("_", "").removesuffix("lr") == "reducelronplateau"


class Optim(Section):
    """An optimizer: any of `torch.optim` by name."""

    name: str = "adamw"
    lr: Annotated[float, Field(gt=0)] = 0.001
    args: Args = {}
    groups: list[Group] = []
    clip: Clip | None = None
    schedule: Schedule | None = None


class ActivationCheckpoint(Section):
    """What is computed again instead of kept: modules that match, or a sequential module in segments."""

    match: str | None = None
    sequential: str | None = None
    segments: Positive = 2
    use_reentrant: bool = False
    preserve_rng_state: bool = True

    @model_validator(mode="after")
    def _one(self) -> ActivationCheckpoint:
        if (self.match is None) == (self.sequential is None):
            raise ValueError("give match or sequential, one of the two")
        return self


class Train(Section):
    """How long and how. `steps` or `epochs`, exactly one of the two. `compile`: by torch.compile, or by the backend that is named."""

    steps: Positive | None = None
    epochs: Positive | None = None
    accumulate: Positive = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool | str = False
    activation_checkpoint: ActivationCheckpoint | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"

    @model_validator(mode="after")
    def _one(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give steps or epochs, exactly one of the two")
        return self


class Eval(Section):
    """When to evaluate (0: never), and which number says what is best."""

    every: Count = 200
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"


class Save(Section):
    """When to save, what to keep, and how a checkpoint is verified when it is resumed from (`full`: sha256; `size`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())

    every: Positive = 200
    at_start: bool = False
    keep_last: Positive = 3
    keep_best: Count = 1
    keep_every: Count = 0
    async_: bool = Field(False, alias="async")
    verify: Literal["full", "size"] = "full"


class Stop(Section):
    """When to stop before the end: after so many seconds (or `30m`, `2h`), or by a signal; both save first."""

    after: Annotated[float, Field(gt=0)] | None = None
    signals: list[Literal["TERM", "INT", "USR1", "USR2", "HUP"]] = ["TERM", "INT", "USR1"]

    @field_validator("after", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
        if isinstance(value, str) and (found := re.fullmatch(r"([0-9]+\.?[0-9]*) *([smhd])", value)):
            return float(found[1]) * units[found[2]]
        if isinstance(value, str):
            raise ValueError(f"should be a number of seconds, or a time like 90s, 30m, 2h or 1d (it is {value[:40]!r})")
        return value


class Log(Section):
    """How often a line is written; `tensorboard` writes event files too, where it is installed."""

    every: Positive = 10
    tensorboard: bool = False


class Profile(Section):
    """What `torch.profiler` records: steps to wait, to warm up, and to record; where the trace goes, in the run's folder."""

    wait: Count = 1
    warmup: Count = 1
    active: Positive = 3
    trace: Annotated[str, Field(pattern=r"^[\w][\w.-]*\.json(\.gz)?$")] = "profile.json"


class Split(Section):
    """A model on several devices: it is cut before the named modules."""

    devices: list[str]
    at: list[str]
    microbatches: Positive = 1

    @model_validator(mode="after")
    def _fits(self) -> Split:
        if len(self.devices) != len(self.at) + 1:
            raise ValueError(
                f"{counted(len(self.at), 'cut')} {form(len(self.at), 'makes', 'make')} "
                f"{counted(len(self.at) + 1, 'part')}, for {counted(len(self.devices), 'device')}"
            )
        return self


class Config(Section):
    """A whole run."""

    run: str
    seed: Count = 0
    device: str = "auto"
    strategy: Literal["single", "dp", "ddp", "split"] = "single"
    deterministic: bool | Literal["warn"] = True
    data: Data = Data()
    models: dict[str, Model] = {"main": Model.model_validate({})}
    task: str = "classify"
    optim: dict[str, Optim] = {"main": Optim()}
    train: Train
    eval: Eval = Eval()
    save: Save = Save.model_validate({})
    stop: Stop = Stop()
    log: Log = Log()
    hooks: list[str] = []
    profile: Profile | None = None
    split: Split | None = None

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if not self.models:
            raise ValueError("there is no model")
        if set(self.models) != set(self.optim):
            raise ValueError(f"models are {sorted(self.models)}, optimizers for {sorted(self.optim)}: one for each")
        if (self.strategy == "split") != (self.split is not None):
            raise ValueError("strategy: split and the section split go together")
        return self

    def dumped(self) -> dict[str, Any]:
        """The configuration as plain values, every default filled in."""
        return self.model_dump(mode="json", by_alias=True)
