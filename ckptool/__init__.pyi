"""ckptool: open any PyTorch checkpoint without running its code. Written by `python -m docs.stub`."""

from collections.abc import Iterator, Mapping, Sequence
from io import BufferedIOBase
from os import PathLike
from typing import IO, Any, Literal, Optional, Union, overload

from torch.nn import Module
from typing_extensions import Unpack

from ckptool.checkpoint.jobs import Executor
from ckptool.verbs._save import Save, SaveInPlace, SavePart, Written
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
from ckptool.verbs.browse import browse as browse
from ckptool.verbs.diff import diff as diff
from ckptool.verbs.eval import eval as eval
from ckptool.verbs.load import load as load
from ckptool.verbs.load import open as open
from ckptool.verbs.plot import plot as plot
from ckptool.verbs.prove import prove as prove
from ckptool.verbs.prune import prune as prune
from ckptool.verbs.recover import recover as recover
from ckptool.verbs.report import report as report
from ckptool.verbs.resume import resume as resume
from ckptool.verbs.save import save as save
from ckptool.verbs.save import save_for_cpu as save_for_cpu
from ckptool.verbs.show import show as show
from ckptool.verbs.spec import spec as spec
from ckptool.verbs.train import train as train
from ckptool.verbs.translate import find_rules as find_rules
from ckptool.verbs.translate import layouts as layouts
from ckptool.analysis.findings import Diagnosis
from ckptool.analysis.inspect import Listing
from ckptool.analysis.scan import Scan
from ckptool.analysis.verify import Verification

__version__: str
__all__: list[str]

@overload
def add_module(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, out: str | PathLike[str] | None = ..., *, at: str | None = ..., prefix: str = ..., **options: Unpack[SavePart]) -> Written: """Puts `module.` (or `prefix`) before every key of all model weights in `file`, as DataParallel does."""
@overload
def add_module(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, at: str | None = ..., prefix: str = ..., **options: Unpack[SavePart]) -> Written: """Puts `module.` (or `prefix`) before every key of all model weights in `file`, as DataParallel does."""
@overload
def add_module(file: Checkpoint, out: None = ..., *, at: str | None = ..., prefix: str = ..., **options: Unpack[SavePart]) -> Checkpoint: """Puts `module.` (or `prefix`) before every key of all model weights in `file`, as DataParallel does."""
@overload
def add_module(file: Mapping[Any, Any] | Module, out: None = ..., *, at: str | None = ..., prefix: str = ..., **options: Unpack[SavePart]) -> dict[Any, Any]: """Puts `module.` (or `prefix`) before every key of all model weights in `file`, as DataParallel does."""
@overload
def add_module(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Written | Any]: """Puts `module.` (or `prefix`) before every key of all model weights in `file`, as DataParallel does."""
@overload
def add_module(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, at: str | None = ..., prefix: str = ..., **options: Unpack[SavePart]) -> Any: """Puts `module.` (or `prefix`) before every key of all model weights in `file`, as DataParallel does."""
@overload
def average(files: Sequence[str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint] | Iterator[str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint], out: str | PathLike[str], *, weights: Sequence[float] | None = ..., ema: float | None = ..., method: Literal['mean', 'slerp', 'task-arithmetic', 'ties', 'dare'] = ..., base: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., density: float | Sequence[float] | None = ..., scale: float | None = ..., t: float | None = ..., seed: int | None = ..., at: str | None = ..., part: bool = ..., **options: Unpack[Save]) -> Written: """Writes the mean of one set of weights over several files: equal shares, `weights`, or a moving average (`ema`)."""
@overload
def average(files: Sequence[str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint] | Iterator[str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint], out: str | PathLike[str] | None = ..., *, weights: Sequence[float] | None = ..., ema: float | None = ..., method: Literal['mean', 'slerp', 'task-arithmetic', 'ties', 'dare'] = ..., base: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., density: float | Sequence[float] | None = ..., scale: float | None = ..., t: float | None = ..., seed: int | None = ..., at: str | None = ..., part: bool = ..., **options: Unpack[Save]) -> Any: """Writes the mean of one set of weights over several files: equal shares, `weights`, or a moving average (`ema`)."""
@overload
def bake(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, out: str | PathLike[str] | None = ..., *, at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Folds weight norm and pruning into plain weights, in all model weights of a file or the part `at`."""
@overload
def bake(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Folds weight norm and pruning into plain weights, in all model weights of a file or the part `at`."""
@overload
def bake(file: Checkpoint, out: None = ..., *, at: str | None = ..., **options: Unpack[SavePart]) -> Checkpoint: """Folds weight norm and pruning into plain weights, in all model weights of a file or the part `at`."""
@overload
def bake(file: Mapping[Any, Any] | Module, out: None = ..., *, at: str | None = ..., **options: Unpack[SavePart]) -> dict[Any, Any]: """Folds weight norm and pruning into plain weights, in all model weights of a file or the part `at`."""
@overload
def bake(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Written | Any]: """Folds weight norm and pruning into plain weights, in all model weights of a file or the part `at`."""
@overload
def bake(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, at: str | None = ..., **options: Unpack[SavePart]) -> Any: """Folds weight norm and pruning into plain weights, in all model weights of a file or the part `at`."""
@overload
def bundle(members: Mapping[str, str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint] | None, out: str | PathLike[str], *, values: Mapping[str, Any] | None = ..., file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., drop: str | Sequence[str] = ..., rename: Mapping[str, str] | None = ..., from_folder: str | PathLike[str] | None = ..., part: bool = ..., **options: Unpack[SaveInPlace]) -> Written: """Writes one file that holds several: `{name: FILE or FILE#ADDRESS}`, then plain `values` by name (`{"epoch": 3}`)."""
@overload
def bundle(members: Mapping[str, str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint] | None = ..., out: str | PathLike[str] | None = ..., *, values: Mapping[str, Any] | None = ..., file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., drop: str | Sequence[str] = ..., rename: Mapping[str, str] | None = ..., from_folder: str | PathLike[str] | None = ..., part: bool = ..., **options: Unpack[SaveInPlace]) -> Any: """Writes one file that holds several: `{name: FILE or FILE#ADDRESS}`, then plain `values` by name (`{"epoch": 3}`)."""
@overload
def cast(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, out: str | PathLike[str] | None = ..., dtype: object = ..., *, at: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., dequantize: bool = ..., **options: Unpack[SavePart]) -> Written: """Converts the floating tensors of all model weights to `dtype`, as torch's `tensor.to(dtype)` does, bit for bit."""
@overload
def cast(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], dtype: object = ..., *, at: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., dequantize: bool = ..., **options: Unpack[SavePart]) -> Written: """Converts the floating tensors of all model weights to `dtype`, as torch's `tensor.to(dtype)` does, bit for bit."""
@overload
def cast(file: Checkpoint, out: None = ..., dtype: object = ..., *, at: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., dequantize: bool = ..., **options: Unpack[SavePart]) -> Checkpoint: """Converts the floating tensors of all model weights to `dtype`, as torch's `tensor.to(dtype)` does, bit for bit."""
@overload
def cast(file: Mapping[Any, Any] | Module, out: None = ..., dtype: object = ..., *, at: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., dequantize: bool = ..., **options: Unpack[SavePart]) -> dict[Any, Any]: """Converts the floating tensors of all model weights to `dtype`, as torch's `tensor.to(dtype)` does, bit for bit."""
@overload
def cast(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Written | Any]: """Converts the floating tensors of all model weights to `dtype`, as torch's `tensor.to(dtype)` does, bit for bit."""
@overload
def cast(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: object = ..., dtype: object = ..., *, at: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., dequantize: bool = ..., **options: Unpack[SavePart]) -> Any: """Converts the floating tensors of all model weights to `dtype`, as torch's `tensor.to(dtype)` does, bit for bit."""
@overload
def convert(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, out: str | PathLike[str] | None = ..., *, at: str | None = ..., all: bool = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., ties: Literal['record', 'copy'] = ..., weights_only: bool = ..., shard_size: str | int | None = ..., part: bool = ..., optimizer_as: Optional[Literal['names', 'ids', 'flat']] = ..., against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., like: str | PathLike[str] | None = ..., rules_file: str | PathLike[str] | None = ..., ranks: int | None = ..., shard_dim: int | None = ..., **options: Unpack[Save]) -> Written: """Writes a checkpoint in the container of `out`'s suffix, or in `container`."""
@overload
def convert(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, at: str | None = ..., all: bool = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., ties: Literal['record', 'copy'] = ..., weights_only: bool = ..., shard_size: str | int | None = ..., part: bool = ..., optimizer_as: Optional[Literal['names', 'ids', 'flat']] = ..., against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., like: str | PathLike[str] | None = ..., rules_file: str | PathLike[str] | None = ..., ranks: int | None = ..., shard_dim: int | None = ..., **options: Unpack[Save]) -> Written: """Writes a checkpoint in the container of `out`'s suffix, or in `container`."""
@overload
def convert(file: Checkpoint, out: None = ..., *, at: str | None = ..., all: bool = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., ties: Literal['record', 'copy'] = ..., weights_only: bool = ..., shard_size: str | int | None = ..., part: bool = ..., optimizer_as: Optional[Literal['names', 'ids', 'flat']] = ..., against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., like: str | PathLike[str] | None = ..., rules_file: str | PathLike[str] | None = ..., ranks: int | None = ..., shard_dim: int | None = ..., **options: Unpack[Save]) -> Checkpoint: """Writes a checkpoint in the container of `out`'s suffix, or in `container`."""
@overload
def convert(file: Mapping[Any, Any] | Module, out: None = ..., *, at: str | None = ..., all: bool = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., ties: Literal['record', 'copy'] = ..., weights_only: bool = ..., shard_size: str | int | None = ..., part: bool = ..., optimizer_as: Optional[Literal['names', 'ids', 'flat']] = ..., against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., like: str | PathLike[str] | None = ..., rules_file: str | PathLike[str] | None = ..., ranks: int | None = ..., shard_dim: int | None = ..., **options: Unpack[Save]) -> dict[Any, Any]: """Writes a checkpoint in the container of `out`'s suffix, or in `container`."""
@overload
def convert(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Written | Any]: """Writes a checkpoint in the container of `out`'s suffix, or in `container`."""
@overload
def convert(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, at: str | None = ..., all: bool = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., ties: Literal['record', 'copy'] = ..., weights_only: bool = ..., shard_size: str | int | None = ..., part: bool = ..., optimizer_as: Optional[Literal['names', 'ids', 'flat']] = ..., against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., like: str | PathLike[str] | None = ..., rules_file: str | PathLike[str] | None = ..., ranks: int | None = ..., shard_dim: int | None = ..., **options: Unpack[Save]) -> Any: """Writes a checkpoint in the container of `out`'s suffix, or in `container`."""
@overload
def doctor(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., out: str | PathLike[str] | None = ..., *, fix: Literal[False] = ..., dtype: object = ..., against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., error: str | None = ..., **options: Unpack[SaveInPlace]) -> Diagnosis: """Diagnoses a checkpoint: what it is, why stock `torch.load` or a model refuses it, and the commands that fix it."""
@overload
def doctor(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., out: str | PathLike[str] | None = ..., *, fix: bool = ..., dtype: object = ..., against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint | None = ..., error: str | None = ..., **options: Unpack[SaveInPlace]) -> Any: """Diagnoses a checkpoint: what it is, why stock `torch.load` or a model refuses it, and the commands that fix it."""
@overload
def doctor(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Diagnosis | Any]: """Diagnoses a checkpoint: what it is, why stock `torch.load` or a model refuses it, and the commands that fix it."""
@overload
def edit(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, out: str | PathLike[str] | None = ..., *, drop: str | Sequence[str] = ..., set: Mapping[str, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Drops entries, sets values."""
@overload
def edit(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, drop: str | Sequence[str] = ..., set: Mapping[str, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Drops entries, sets values."""
@overload
def edit(file: Checkpoint, out: None = ..., *, drop: str | Sequence[str] = ..., set: Mapping[str, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Checkpoint: """Drops entries, sets values."""
@overload
def edit(file: Mapping[Any, Any] | Module, out: None = ..., *, drop: str | Sequence[str] = ..., set: Mapping[str, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> dict[Any, Any]: """Drops entries, sets values."""
@overload
def edit(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Written | Any]: """Drops entries, sets values."""
@overload
def edit(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, drop: str | Sequence[str] = ..., set: Mapping[str, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Any: """Drops entries, sets values."""
@overload
def inspect(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, *, at: str | None = ..., stats: bool = ..., only: str | Sequence[str] = ...) -> Listing | Any: """Lists the contents of `file`, or of the part at an address, with notes and the commands that fix things."""
@overload
def inspect(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Listing | Any]: """Lists the contents of `file`, or of the part at an address, with notes and the commands that fix things."""
@overload
def lora_convert(adapter: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, to: Literal['peft', 'kohya', 'diffusers'], base: Union[str, PathLike[str], IO[bytes], BufferedIOBase, Mapping[Any, Any], Checkpoint, Module, Sequence[str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint]] = ..., config: str | PathLike[str] | Mapping[str, Any] | Any | None = ..., **options: Unpack[Save]) -> Written: """Writes a LoRA adapter with the names of `peft` (a folder), `kohya` or `diffusers`, and its factors."""
@overload
def lora_convert(adapter: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, to: Literal['peft', 'kohya', 'diffusers'], base: Union[str, PathLike[str], IO[bytes], BufferedIOBase, Mapping[Any, Any], Checkpoint, Module, Sequence[str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint]] = ..., config: str | PathLike[str] | Mapping[str, Any] | Any | None = ..., **options: Unpack[Save]) -> Any: """Writes a LoRA adapter with the names of `peft` (a folder), `kohya` or `diffusers`, and its factors."""
@overload
def lora_extract(tuned: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, base: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, rank: int, dtype: object = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., **options: Unpack[Save]) -> Written: """Writes what `tuned` changed of `base` as an adapter of PEFT: a folder that `PeftModel.from_pretrained` loads."""
@overload
def lora_extract(tuned: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, base: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, rank: int, dtype: object = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., **options: Unpack[Save]) -> Any: """Writes what `tuned` changed of `base` as an adapter of PEFT: a folder that `PeftModel.from_pretrained` loads."""
@overload
def lora_merge(base: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, adapter: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, config: str | PathLike[str] | Mapping[str, Any] | Any | None = ..., scale: float = ..., at: str | None = ..., part: bool = ..., changed_base: bool = ..., **options: Unpack[Save]) -> Written: """Merges an adapter into one set of weights of `base`, as PEFT's `merge_and_unload`, to one unit in the last place."""
@overload
def lora_merge(base: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, adapter: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, config: str | PathLike[str] | Mapping[str, Any] | Any | None = ..., scale: float = ..., at: str | None = ..., part: bool = ..., changed_base: bool = ..., **options: Unpack[Save]) -> Any: """Merges an adapter into one set of weights of `base`, as PEFT's `merge_and_unload`, to one unit in the last place."""
@overload
def lora_resize(adapter: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, rank: int, config: str | PathLike[str] | Mapping[str, Any] | Any | None = ..., **options: Unpack[Save]) -> Written: """Writes a LoRA adapter with every module in at most rank `rank`, under its names and with its scale."""
@overload
def lora_resize(adapter: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, rank: int, config: str | PathLike[str] | Mapping[str, Any] | Any | None = ..., **options: Unpack[Save]) -> Any: """Writes a LoRA adapter with every module in at most rank `rank`, under its names and with its scale."""
@overload
def remap(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, out: str | PathLike[str] | None = ..., to: object = ..., *, moves: Mapping[Any, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Tags every storage with the device `to`, as `torch.load(map_location=…)` would, or by `moves`, old to new."""
@overload
def remap(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], to: object = ..., *, moves: Mapping[Any, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Tags every storage with the device `to`, as `torch.load(map_location=…)` would, or by `moves`, old to new."""
@overload
def remap(file: Checkpoint, out: None = ..., to: object = ..., *, moves: Mapping[Any, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Checkpoint: """Tags every storage with the device `to`, as `torch.load(map_location=…)` would, or by `moves`, old to new."""
@overload
def remap(file: Mapping[Any, Any] | Module, out: None = ..., to: object = ..., *, moves: Mapping[Any, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> dict[Any, Any]: """Tags every storage with the device `to`, as `torch.load(map_location=…)` would, or by `moves`, old to new."""
@overload
def remap(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Written | Any]: """Tags every storage with the device `to`, as `torch.load(map_location=…)` would, or by `moves`, old to new."""
@overload
def remap(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: object = ..., to: object = ..., *, moves: Mapping[Any, Any] | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Any: """Tags every storage with the device `to`, as `torch.load(map_location=…)` would, or by `moves`, old to new."""
@overload
def rename(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, rules: str | Sequence[str] | Mapping[str, str] = ..., out: str | PathLike[str] | None = ..., *, rules_file: str | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Renames the keys of all model weights by rules `OLD => NEW`; for each key the first that matches counts."""
@overload
def rename(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, rules: str | Sequence[str] | Mapping[str, str], out: str | PathLike[str], *, rules_file: str | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Renames the keys of all model weights by rules `OLD => NEW`; for each key the first that matches counts."""
@overload
def rename(file: Checkpoint, rules: str | Sequence[str] | Mapping[str, str] = ..., out: None = ..., *, rules_file: str | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Checkpoint: """Renames the keys of all model weights by rules `OLD => NEW`; for each key the first that matches counts."""
@overload
def rename(file: Mapping[Any, Any] | Module, rules: str | Sequence[str] | Mapping[str, str] = ..., out: None = ..., *, rules_file: str | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> dict[Any, Any]: """Renames the keys of all model weights by rules `OLD => NEW`; for each key the first that matches counts."""
@overload
def rename(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, rules: str | Sequence[str] | Mapping[str, str] = ..., out: str | PathLike[str] | None = ..., *, rules_file: str | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Any: """Renames the keys of all model weights by rules `OLD => NEW`; for each key the first that matches counts."""
@overload
def scan(path: str | PathLike[str], *, latest_only: bool = ..., full: bool = ..., jobs: int | str | Executor = ...) -> Scan: """Looks at every checkpoint below a folder, or at one file, without running anything."""
@overload
def scan(path: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Scan | Any]: """Looks at every checkpoint below a folder, or at one file, without running anything."""
@overload
def slim(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, out: str | PathLike[str] | None = ..., *, dedup: bool = ..., keep_optimizer: bool = ..., at: str | None = ..., extract: bool = ..., **options: Unpack[Save]) -> Written: """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor uses."""
@overload
def slim(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, dedup: bool = ..., keep_optimizer: bool = ..., at: str | None = ..., extract: bool = ..., **options: Unpack[Save]) -> Written: """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor uses."""
@overload
def slim(file: Checkpoint, out: None = ..., *, dedup: bool = ..., keep_optimizer: bool = ..., at: str | None = ..., extract: bool = ..., **options: Unpack[Save]) -> Checkpoint: """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor uses."""
@overload
def slim(file: Mapping[Any, Any] | Module, out: None = ..., *, dedup: bool = ..., keep_optimizer: bool = ..., at: str | None = ..., extract: bool = ..., **options: Unpack[Save]) -> dict[Any, Any]: """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor uses."""
@overload
def slim(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Written | Any]: """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor uses."""
@overload
def slim(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, dedup: bool = ..., keep_optimizer: bool = ..., at: str | None = ..., extract: bool = ..., **options: Unpack[Save]) -> Any: """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor uses."""
@overload
def strip_module(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, out: str | PathLike[str] | None = ..., *, at: str | None = ..., prefix: str | Sequence[str] = ..., partial: bool = ..., **options: Unpack[SavePart]) -> Written: """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights."""
@overload
def strip_module(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, at: str | None = ..., prefix: str | Sequence[str] = ..., partial: bool = ..., **options: Unpack[SavePart]) -> Written: """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights."""
@overload
def strip_module(file: Checkpoint, out: None = ..., *, at: str | None = ..., prefix: str | Sequence[str] = ..., partial: bool = ..., **options: Unpack[SavePart]) -> Checkpoint: """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights."""
@overload
def strip_module(file: Mapping[Any, Any] | Module, out: None = ..., *, at: str | None = ..., prefix: str | Sequence[str] = ..., partial: bool = ..., **options: Unpack[SavePart]) -> dict[Any, Any]: """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights."""
@overload
def strip_module(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Written | Any]: """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights."""
@overload
def strip_module(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, at: str | None = ..., prefix: str | Sequence[str] = ..., partial: bool = ..., **options: Unpack[SavePart]) -> Any: """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights."""
@overload
def translate(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, rules: str | Sequence[str] = ..., out: str | PathLike[str] | None = ..., *, rules_file: str | PathLike[str] | None = ..., set: str | Sequence[str] | dict[str, int] = ..., reverse: bool = ..., rest: Literal['refuse', 'keep', 'drop'] = ..., like: str | PathLike[str] | None = ..., shard_size: str | int | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Renames, splits, joins and reorders the tensors of all model weights by rules `OLD => NEW : OPERATION | …`."""
@overload
def translate(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, rules: str | Sequence[str], out: str | PathLike[str], *, rules_file: str | PathLike[str] | None = ..., set: str | Sequence[str] | dict[str, int] = ..., reverse: bool = ..., rest: Literal['refuse', 'keep', 'drop'] = ..., like: str | PathLike[str] | None = ..., shard_size: str | int | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Written: """Renames, splits, joins and reorders the tensors of all model weights by rules `OLD => NEW : OPERATION | …`."""
@overload
def translate(file: Checkpoint, rules: str | Sequence[str] = ..., out: None = ..., *, rules_file: str | PathLike[str] | None = ..., set: str | Sequence[str] | dict[str, int] = ..., reverse: bool = ..., rest: Literal['refuse', 'keep', 'drop'] = ..., like: str | PathLike[str] | None = ..., shard_size: str | int | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Checkpoint: """Renames, splits, joins and reorders the tensors of all model weights by rules `OLD => NEW : OPERATION | …`."""
@overload
def translate(file: Mapping[Any, Any] | Module, rules: str | Sequence[str] = ..., out: None = ..., *, rules_file: str | PathLike[str] | None = ..., set: str | Sequence[str] | dict[str, int] = ..., reverse: bool = ..., rest: Literal['refuse', 'keep', 'drop'] = ..., like: str | PathLike[str] | None = ..., shard_size: str | int | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> dict[Any, Any]: """Renames, splits, joins and reorders the tensors of all model weights by rules `OLD => NEW : OPERATION | …`."""
@overload
def translate(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, rules: str | Sequence[str] = ..., out: str | PathLike[str] | None = ..., *, rules_file: str | PathLike[str] | None = ..., set: str | Sequence[str] | dict[str, int] = ..., reverse: bool = ..., rest: Literal['refuse', 'keep', 'drop'] = ..., like: str | PathLike[str] | None = ..., shard_size: str | int | None = ..., at: str | None = ..., **options: Unpack[SavePart]) -> Any: """Renames, splits, joins and reorders the tensors of all model weights by rules `OLD => NEW : OPERATION | …`."""
@overload
def unbundle(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, folder: str | PathLike[str] | None = ..., *, only: str | Sequence[str] = ..., part: bool = ..., **options: Unpack[Save]) -> Written: """Writes every member of a bundle to a file of its own in a new folder, and `bundle.json`, which `bundle` reads."""
@overload
def unbundle(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, folder: str | PathLike[str], *, only: str | Sequence[str] = ..., part: bool = ..., **options: Unpack[Save]) -> Written: """Writes every member of a bundle to a file of its own in a new folder, and `bundle.json`, which `bundle` reads."""
@overload
def unbundle(file: Checkpoint, folder: None = ..., *, only: str | Sequence[str] = ..., part: bool = ..., **options: Unpack[Save]) -> Checkpoint: """Writes every member of a bundle to a file of its own in a new folder, and `bundle.json`, which `bundle` reads."""
@overload
def unbundle(file: Mapping[Any, Any] | Module, folder: None = ..., *, only: str | Sequence[str] = ..., part: bool = ..., **options: Unpack[Save]) -> dict[Any, Any]: """Writes every member of a bundle to a file of its own in a new folder, and `bundle.json`, which `bundle` reads."""
@overload
def unbundle(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, folder: str | PathLike[str] | None = ..., *, only: str | Sequence[str] = ..., part: bool = ..., **options: Unpack[Save]) -> Any: """Writes every member of a bundle to a file of its own in a new folder, and `bundle.json`, which `bundle` reads."""
@overload
def verify(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, *, at: str | None = ..., finite: bool = ..., digest: bool = ..., write_digest: str | PathLike[str] | None = ..., against: str | PathLike[str] | None = ..., overwrite: bool = ..., jobs: int | str | Executor = ...) -> Verification: """Reads all of a checkpoint and reports everything that is wrong with it: checksums, headers, missing data."""
@overload
def verify(file: list[Any] | tuple[Any, ...] | Iterator[str | PathLike[str]], *, jobs: int | str | Executor = ..., folder: str | PathLike[str] | None = ..., skip_refused: bool = ..., **options: Any) -> list[Verification | Any]: """Reads all of a checkpoint and reports everything that is wrong with it: checksums, headers, missing data."""
@overload
def warm_start(file: str | PathLike[str] | IO[bytes] | BufferedIOBase, against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, at: str | None = ..., rename: str | Sequence[str] | Mapping[str, str] = ..., rules_file: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., on_mismatch: Literal['error', 'skip'] = ..., resize: str | Sequence[str] | Mapping[str, str] = ..., min_loaded: float | None = ..., strict: bool = ..., suggest: str | PathLike[str] | None = ..., part: bool = ..., **options: Unpack[Save]) -> LoadReport: """Matches a checkpoint with the model `against`; with `out`, writes a checkpoint of exactly the model's keys."""
@overload
def warm_start(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str], *, at: str | None = ..., rename: str | Sequence[str] | Mapping[str, str] = ..., rules_file: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., on_mismatch: Literal['error', 'skip'] = ..., resize: str | Sequence[str] | Mapping[str, str] = ..., min_loaded: float | None = ..., strict: bool = ..., suggest: str | PathLike[str] | None = ..., part: bool = ..., **options: Unpack[Save]) -> LoadReport: """Matches a checkpoint with the model `against`; with `out`, writes a checkpoint of exactly the model's keys."""
@overload
def warm_start(file: Checkpoint, against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: None = ..., *, at: str | None = ..., rename: str | Sequence[str] | Mapping[str, str] = ..., rules_file: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., on_mismatch: Literal['error', 'skip'] = ..., resize: str | Sequence[str] | Mapping[str, str] = ..., min_loaded: float | None = ..., strict: bool = ..., suggest: str | PathLike[str] | None = ..., part: bool = ..., **options: Unpack[Save]) -> Checkpoint: """Matches a checkpoint with the model `against`; with `out`, writes a checkpoint of exactly the model's keys."""
@overload
def warm_start(file: Mapping[Any, Any] | Module, against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: None = ..., *, at: str | None = ..., rename: str | Sequence[str] | Mapping[str, str] = ..., rules_file: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., on_mismatch: Literal['error', 'skip'] = ..., resize: str | Sequence[str] | Mapping[str, str] = ..., min_loaded: float | None = ..., strict: bool = ..., suggest: str | PathLike[str] | None = ..., part: bool = ..., **options: Unpack[Save]) -> dict[Any, Any]: """Matches a checkpoint with the model `against`; with `out`, writes a checkpoint of exactly the model's keys."""
@overload
def warm_start(file: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, against: str | PathLike[str] | IO[bytes] | BufferedIOBase | Mapping[Any, Any] | Module | Checkpoint, out: str | PathLike[str] | None = ..., *, at: str | None = ..., rename: str | Sequence[str] | Mapping[str, str] = ..., rules_file: str | None = ..., only: str | Sequence[str] = ..., exclude: str | Sequence[str] = ..., on_mismatch: Literal['error', 'skip'] = ..., resize: str | Sequence[str] | Mapping[str, str] = ..., min_loaded: float | None = ..., strict: bool = ..., suggest: str | PathLike[str] | None = ..., part: bool = ..., **options: Unpack[Save]) -> Any: """Matches a checkpoint with the model `against`; with `out`, writes a checkpoint of exactly the model's keys."""
