"""The table of names that are understood: how a pickle may use each so that nothing of unknown origin runs.

A name is only ever text. There is no list of bad names to bypass, only this one to be outside of. A row reads: what the
name may be called with (`arguments`), what its object may be given afterwards, whether it may stand by itself; `calls`
judges a tree by it, and `scan`, `inspect`, `load` and every writer ask `calls`. Names are listed one by one; a dotted
name (`Path.write_text`) is in no row.
Sources: the reducers of torch 0.1 to 2.13 (torch/_utils.py, torch/_tensor.py, torch/storage.py), the `__reduce__`
methods of the standard library (3.6 to 3.14) and of numpy 1 and 2, and the classes of the configuration and training
libraries below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from ckptool.checkpoint.dtypes import BY_STORAGE, BY_TORCH
from ckptool.checkpoint.nodes import HOMES, Global, Object
from ckptool.checkpoint.numpy_arrays import is_array, is_type
from ckptool.pickles import arguments as given
from ckptool.pickles.arguments import every, exactly, up_to
from ckptool.pickles.names import LIGHTNING_CALLBACKS, MOVED, SHARED_MODULES, TORCH_CLASSES, TORCH_LAYERS

Arguments = tuple[Any, ...]


NOWHERE = 1 << 30  # of no call's arguments


class Kind(NamedTuple):
    """The use that pickles may make of the names of one kind.

    called: whether these arguments are ones that it may be called with, or made with (`cls.__new__`); None: with none
    at all.
    empty: it may be made without arguments.  state, items, elements: what may be given to the object afterwards.
    stands: it may stand by itself, as a value or a key.  state_at: the first argument that is a state.
    custom: an object whose class runs somebody's code, as of people's own classes (it is written on, and always
    mentioned).
    filled: whether the object with its state is one that may be, where that is more than each of its parts.
    value: the word for what such an object is, by which `plain` makes its plain value and `bridge` the live object.
    weights_only: `torch.load(weights_only=True)` calls it.
    """

    called: Callable[[Arguments], bool] | None = None
    empty: bool = False
    state: bool = False
    items: bool = False
    elements: bool = False
    stands: bool = True
    state_at: int = NOWHERE
    custom: bool = False
    filled: Callable[[Object], bool] | None = None
    value: str = ""
    weights_only: bool = False


_NAME = Kind()  # a class, a function or a constant that is only referred to
_OBJECT = Kind(empty=True, state=True)
_CUSTOM = Kind(empty=True, state=True, items=True, elements=True, custom=True, stands=False)
_MAPPING = Kind(up_to("pairs"), empty=True, state=True, items=True)
_CONTAINER = Kind(given.none, empty=True, state=True, items=True, elements=True)
_PATH = Kind(every("path"), empty=True)
_SCALARS = Kind(every("scalar"), empty=True)
_NUMBER = Kind(every("number"), empty=True)
_SEQUENCE = Kind(up_to("sequence"), empty=True)
_ENUM = Kind(exactly("scalar"))  # a member, by its value
_ANY = every("anything")
_TENSOR = Kind(given.of_tensors, weights_only=True)
_PACKED = _OBJECT._replace(filled=given.packed, stands=False)  # by a backend, whose C++ code sets the state
_STORAGE = Kind(up_to("sequence"))  # with its numbers, as very old pickles have it


def named(text: str, home: str = "") -> Iterator[tuple[str, str]]:
    """The modules and names of a text: `module: Name Name`; several modules in a row have the names behind them."""
    modules: list[str] = []
    last = ""
    for word in text.split():
        if word.endswith(":"):
            modules = [*(modules if last.endswith(":") else ()), home + word[:-1]]
        else:
            yield from ((module, word) for module in modules)
        last = word


# What may be done with names, and which names those are; of a name that stands in two rows the later counts.
_TABLE: tuple[tuple[Kind, str], ...] = (
    # torch: tensors, and what describes them
    (
        _TENSOR,
        """torch._utils: _rebuild_tensor _rebuild_sparse_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage
        _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor""",
    ),
    (
        Kind(given.of_tensors),
        """torch._utils: _rebuild_sparse_csr_tensor _rebuild_xla_tensor
        torch.nested._internal.nested_tensor: _rebuild_njt""",
    ),
    (
        Kind(given.of_tensors, value="uninitialized"),
        "torch.nn.parameter: UninitializedParameter UninitializedBuffer",
    ),
    (Kind(given.without_hooks(5), weights_only=True), "torch._utils: _rebuild_tensor_v2 _rebuild_tensor_v3"),
    (Kind(given.without_hooks(2), weights_only=True), "torch._utils: _rebuild_parameter"),
    (
        Kind(given.parameter_with_state, state_at=3, weights_only=True),
        "torch._utils: _rebuild_parameter_with_state",
    ),
    (Kind(given.without_hooks(6), weights_only=True), "torch._utils: _rebuild_qtensor"),
    (
        Kind(given.rebuild_and_class, state_at=3, stands=False),  # it sets any attribute of what any function gives
        "torch._tensor: torch.tensor: _rebuild_from_type _rebuild_from_type_v2",
    ),
    (Kind(given.class_first, weights_only=True), "torch._utils: _rebuild_wrapper_subclass"),
    (
        Kind(given.of_tensors, empty=True, state=True),
        "torch.nn.parameter: Parameter Buffer torch.autograd.variable: Variable",
    ),
    (_SEQUENCE._replace(value="size", weights_only=True), "torch: Size"),
    (_SCALARS._replace(value="device", weights_only=True), "torch: device"),
    (_SCALARS._replace(value="layout", weights_only=True), "torch.serialization: _get_layout"),
    (_SCALARS._replace(value="str"), "torch.torch_version: TorchVersion"),
    (Kind(up_to("device"), state=True, filled=given.seeded), "torch: torch._C: Generator"),
    *((_PACKED, f"{given.PACKED}.{module}: {name}") for module, name in (each.split(".") for each in given.CLASSES)),
    (_PACKED, "torch: ScriptObject"),
    (Kind(given.getattr_of_known, stands=False), "builtins: getattr"),
    (
        _NAME,
        """torch: torch._tensor: Tensor
        torch._C: _VariableFunctionsClass
        torch.utils.data.dataloader: DataLoader
        torch.nested._internal.nested_tensor: NestedTensor
        torch.distributed.tensor: torch.distributed._tensor.api: torch.distributed._tensor: DTensor
        torch.distributed.fsdp._flat_param: torch.distributed.fsdp.flat_param: FlatParameter
        torch.amp.grad_scaler: torch.cuda.amp.grad_scaler: _refresh_per_optimizer_state
        torch.nn.functional: relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish sigmoid tanh softmax
        log_softmax softmin softplus softsign softshrink hardshrink hardtanh hardsigmoid hardswish tanhshrink logsigmoid
        glu threshold normalize cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div
        binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity dropout layer_norm interpolate
        torch._C._nn: gelu silu mish elu_ hardtanh hardswish hardsigmoid leaky_relu log_sigmoid softplus softshrink
        torch.nn.init: xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ normal_ uniform_ zeros_ ones_
        constant_ orthogonal_ trunc_normal_ eye_ dirac_ sparse_""",
    ),
    # as protocol 4 spells them
    (_NAME, "torch._utils: torch.contiguous_format torch.channels_last torch.channels_last_3d torch.preserve_format"),
    # torch.distributed: what ranks save
    (
        _OBJECT,
        """torch.distributed.tensor._dtensor_spec: DTensorSpec
        torch.distributed._tensor.placement_types: DTensorSpec TensorMeta Shard Replicate Partial _Partial Placement
        torch.distributed._tensor.dispatch: TensorMeta
        torch.distributed._shard.sharded_tensor.api: ShardedTensor ShardedTensor.ProcessGroupState
        torch.distributed._shard.sharded_tensor.shard: Shard
        torch.distributed._shard.metadata: ShardMetadata
        torch.distributed._shard.sharding_spec.chunk_sharding_spec: ChunkShardingSpec
        torch.distributed._shard.sharding_spec.api: EnumerableShardingSpec DevicePlacementSpec
        torch.distributed.checkpoint.metadata: BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex
        StorageMeta TensorStorageMetadata
        torch.distributed.checkpoint.planner: SavePlan WriteItem TensorWriteData BytesIOWriteData
        torch._dynamo.decorators: _DimRange""",
    ),
    (
        # namedtuples, and classes that say themselves how they are filled
        Kind(_ANY, empty=True, state=True),
        """torch.distributed.tensor._dtensor_spec: TensorMeta ShardOrderEntry
        torch.distributed.tensor.placement_types: Placement Shard Replicate Partial _Partial _StridedShard _MaskPartial
        torch.distributed._mesh_layout: _MeshLayout _FlatLayout
        torch.distributed.remote_device: _remote_device
        torch.distributed._shard.sharded_tensor.metadata: ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING
        torch.distributed.checkpoint.metadata: TensorProperties _MEM_FORMAT_ENCODING
        torch.distributed.checkpoint.planner: WriteItemType
        torch.distributed.checkpoint.filesystem: _StorageInfo _StoragePrefix
        torch.distributed.checkpoint._hf_utils: _HFStorageInfo""",
    ),
    # made with arguments, it opens connections
    (
        Kind(empty=True, state=True, stands=False),
        "torch.distributed.device_mesh: torch.distributed._tensor.device_mesh: DeviceMesh",
    ),
    (_ENUM, "torch.amp.grad_scaler: torch.cuda.amp.grad_scaler: OptState"),
    (Kind(given.none), "torch.nn.backends.thnn: _get_thnn_function_backend"),
    # Python
    (_CONTAINER._replace(elements=False, value="namespace"), "argparse: Namespace types: SimpleNamespace"),
    (_MAPPING, "collections: OrderedDict"),
    (_MAPPING._replace(called=up_to("factory"), value="defaultdict"), "collections: defaultdict"),
    (
        Kind(up_to("sequence", "limit"), empty=True, state=True, elements=True, value="deque"),
        "collections: deque",
    ),
    (_MAPPING._replace(value="counter", weights_only=True), "collections: Counter"),
    (_MAPPING._replace(state=False, value="dict"), "builtins: dict"),
    (_SEQUENCE._replace(elements=True, value="list"), "builtins: list"),
    (_SEQUENCE._replace(elements=True), "builtins: set"),
    (_SEQUENCE._replace(value="tuple"), "builtins: tuple"),
    (_SEQUENCE, "builtins: frozenset"),
    (Kind(up_to("content", "codec", "on error"), empty=True), "builtins: bytes bytearray"),
    (Kind(up_to("scalar", "codec", "on error"), empty=True, value="str"), "builtins: str unicode"),
    (_NUMBER._replace(value="int"), "builtins: int long"),
    (_NUMBER._replace(value="float"), "builtins: float"),
    (_SCALARS._replace(value="bool"), "builtins: bool"),
    (_NUMBER._replace(weights_only=True), "builtins: complex"),
    (_SCALARS._replace(value="slice"), "builtins: slice"),
    (_SCALARS._replace(value="range"), "builtins: range xrange"),
    (_SCALARS, "builtins: object"),
    (Kind(exactly("constant"), stands=False), "builtins: type"),
    (_NAME, "builtins: Ellipsis NotImplemented abs max min sum len round sorted"),
    *(
        (Kind(every("in date"), value=name), f"datetime: {name}")
        for name in ("datetime", "date", "time", "timedelta", "timezone")
    ),
    (_NUMBER._replace(value="decimal"), "decimal: Decimal"),
    (_NUMBER._replace(value="fraction"), "fractions: Fraction"),
    (Kind(given.none, empty=True, state=True, value="uuid"), "uuid: UUID"),
    (_ENUM, "uuid: SafeUUID"),
    (_PATH._replace(value="posix path"), "pathlib: PosixPath"),
    (_PATH._replace(value="windows path"), "pathlib: WindowsPath"),
    (_PATH._replace(value="pure posix path"), "pathlib: PurePosixPath"),
    (_PATH._replace(value="pure windows path"), "pathlib: PureWindowsPath"),
    (_PATH, "pathlib: Path PurePath"),
    (Kind(given.none, empty=True, state=True, filled=given.generated), "random: Random"),
    (_PATH._replace(empty=False, stands=False), "logging: getLogger"),
    (Kind(exactly("expression", "integer"), stands=False), "re: _compile"),
    (Kind(given.application, state=True, stands=False, filled=given.same_application), "functools: partial"),
    (Kind(given.type_expression), "operator: _operator: getitem or_ types: GenericAlias"),
    (Kind(given.union, stands=False), "functools: _functools: reduce"),
    (
        _NAME,
        """typing: Any Union Optional Dict List Tuple Set FrozenSet Callable Sequence Mapping MutableMapping Iterable
        Iterator Type Literal Deque DefaultDict OrderedDict Text AnyStr Hashable Sized Collection Container NoReturn
        ClassVar Final
        numbers: Number Complex Real Rational Integral
        math: sqrt exp log log2 log10 sin cos tanh ceil floor
        inspect: _empty""",
    ),
    # numpy
    (Kind(every("scalar"), state=True, filled=is_type, value="array type"), "numpy: dtype"),
    (
        Kind(exactly("class of arrays", "shape", "anything"), state=True, filled=is_array, value="array"),
        "numpy.core.multiarray: _reconstruct",
    ),
    (Kind(_ANY, filled=is_array, value="array"), "numpy.core.numeric: _frombuffer"),
    (Kind(_ANY, filled=is_array, value="array scalar"), "numpy.core.multiarray: scalar"),
    (
        Kind(every("of random"), state=True),
        """numpy.random._pickle: __bit_generator_ctor __generator_ctor __randomstate_ctor
        numpy.random: __RandomState_ctor numpy.random.bit_generator: __pyx_unpickle_SeedSequence""",
    ),
    (
        _OBJECT,
        """numpy.random._pcg64: PCG64 PCG64DXSM numpy.random._mt19937: MT19937 numpy.random._philox: Philox
        numpy.random._sfc64: SFC64 numpy.random.bit_generator: SeedSequence""",
    ),
    (
        Kind(given.none),
        """numpy.dtypes: BoolDType ByteDType UByteDType ShortDType UShortDType IntDType UIntDType LongDType ULongDType
        LongLongDType ULongLongDType Int8DType UInt8DType Int16DType UInt16DType Int32DType UInt32DType Int64DType
        UInt64DType Float16DType Float32DType Float64DType LongDoubleDType Complex64DType Complex128DType
        CLongDoubleDType ObjectDType BytesDType StrDType StringDType VoidDType DateTime64DType TimeDelta64DType""",
    ),
    (
        _NAME,
        """numpy: ndarray matrix recarray chararray bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64
        float16 float32 float64 float128 longdouble complex64 complex128 str_ bytes_ object_ void datetime64
        timedelta64 generic number integer signedinteger unsignedinteger inexact floating complexfloating intc uintc
        intp uintp long ulong longlong ulonglong
        numpy.rec: numpy.core.records: recarray
        numpy.core.defchararray: chararray
        numpy.matrixlib.defmatrix: matrix""",
    ),
    # Configuration: dictionaries and lists in disguise
    (
        _CONTAINER._replace(value="omegaconf"),
        "omegaconf.dictconfig: DictConfig omegaconf.listconfig: ListConfig",
    ),
    (
        _CONTAINER._replace(value="omegaconf node"),
        """omegaconf.nodes: AnyNode StringNode IntegerNode FloatNode BooleanNode BytesNode PathNode EnumNode
        InterpolationResultNode""",
    ),
    (_CONTAINER, "omegaconf.base: ContainerMetadata Metadata"),
    (
        _CONTAINER._replace(value="items or attributes"),
        """pytorch_lightning.utilities.parsing: lightning_fabric.utilities.data: lightning.fabric.utilities.data:
        lightning.pytorch.utilities.parsing: AttributeDict easydict: EasyDict""",
    ),
    (
        _CONTAINER._replace(value="items"),
        """yacs.config: CfgNode mmcv.utils.config: mmengine.config.config: ConfigDict munch: Munch
        addict: addict.addict: Dict box: box.box: Box""",
    ),
    (_CONTAINER._replace(value="elements"), "box: box.box_list: BoxList"),
    (_CONTAINER._replace(value="attributes"), "mmengine.logging.history_buffer: HistoryBuffer"),
    (_CONTAINER._replace(value="mmengine config"), "mmengine.config.config: Config"),
    (
        _CONTAINER._replace(value="ml_collections"),
        "ml_collections.config_dict.config_dict: ml_collections.config_dict: ConfigDict FrozenConfigDict",
    ),
    # Data in batches and graphs, whose classes set their state as it is
    (
        Kind(exactly("class of tensordict", "attributes"), state_at=1, stands=False),
        "tensordict._reductions: _make_td",
    ),
    (
        _OBJECT,
        """torch_geometric.data.data: Data torch_geometric.data.hetero_data: HeteroData
        torch_geometric.data.storage: BaseStorage NodeStorage EdgeStorage GlobalStorage""",
    ),
    (
        _NAME,
        """tensordict._td: TensorDict tensordict._lazy: LazyStackedTensorDict
        torch_geometric.data.data: DataEdgeAttr DataTensorAttr torch_geometric.data.feature_store: TensorAttr
        torch_geometric.data.graph_store: EdgeAttr""",
    ),
    (
        _ENUM,
        """pytorch_lightning.trainer.states: lightning.pytorch.trainer.states: TrainerFn TrainerStatus RunningStage
        transformers.trainer_utils: IntervalStrategy SaveStrategy HubStrategy SchedulerType FSDPOption
        RemoveColumnsCollator EvaluationStrategy
        transformers.training_args: OptimizerNames ParallelMode
        transformers.debug_utils: DebugOption
        transformers.utils.generic: ExplicitEnum PaddingStrategy TensorType
        transformers.utils.quantization_config: QuantizationMethod AWQLinearVersion
        transformers.optimization: SchedulerType
        accelerate.utils.dataclasses: DistributedType DynamoBackend LoggerType PrecisionType RNGType
        SageMakerDistributedType ComputeEnvironment CustomDtype SaveDtype FP8BackendType
        accelerate.state: DistributedType
        deepspeed.runtime.zero.config: ZeroStageEnum
        fairseq.dataclass.constants: StrEnum DDP_BACKEND_CHOICES DDP_COMM_HOOK_CHOICES DATASET_IMPL_CHOICES
        GENERATION_CONSTRAINTS_CHOICES GENERATION_DECODING_FORMAT_CHOICES LOG_FORMAT_CHOICES
        PIPELINE_CHECKPOINT_CHOICES PRINT_ALIGNMENT_CHOICES SHORTEN_METHOD_CHOICES SAMPLE_BREAK_MODE_CHOICES
        CLIP_GRAD_NORM_TYPE_CHOICES ZERO_SHARDING_CHOICES""",
    ),
    (
        _NAME,
        """fairseq.dataclass.configs: FairseqConfig CommonConfig DistributedTrainingConfig DatasetConfig
        OptimizationConfig CheckpointConfig FairseqBMUFConfig GenerationConfig CommonEvalConfig EvalLMConfig
        InteractiveConfig EMAConfig FairseqDataclass""",
    ),
)


def _kinds() -> dict[tuple[str, str], Kind]:
    layer = _OBJECT._replace(filled=given.few_layers)
    kinds = {each: layer for home, text in TORCH_CLASSES.items() for each in named(text, home)}
    kinds.update({each: kind for kind, text in _TABLE for each in named(text)})
    for home in ("pytorch_lightning.callbacks.", "lightning.pytorch.callbacks."):
        kinds.update(dict.fromkeys(named(LIGHTNING_CALLBACKS, home), _NAME))  # they stand in checkpoints as keys
    for module, constants in _CONSTANTS.items():
        kinds.update(((module, name), _STORAGE if "Storage" in name else _NAME) for name in constants)
    return kinds


def _constants(module: str) -> Iterator[str]:
    """torch's element types, storages, tensor classes, quantization schemes and memory formats, never called."""
    yield from (name for storage in BY_STORAGE if storage for name in (storage, storage.replace("Storage", "Tensor")))
    yield from ("UntypedStorage", "_UntypedStorage", "TypedStorage", "_TypedStorage")
    if module == "torch":
        yield from BY_TORCH
        yield from "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric".split()
        yield from "per_channel_affine_float_qparams contiguous_format channels_last channels_last_3d".split()
        yield "preserve_format"


_CONSTANTS = {
    module: frozenset(_constants(module)) for module in ("torch", "torch.cuda", "torch.sparse", "torch.storage")
}
_KINDS = _kinds()


def value_word(name: Any) -> str:
    """The word for what objects of a name are (see `Kind`); empty where the table has none."""
    kind = kind_of(name)
    return kind.value if kind is not None else ""


def kind_of(name: Any) -> Kind | None:
    """The kind of a name; None for one that is not listed, and for what is no name."""
    return _kind_of(name) if type(name) is Global else None


@lru_cache(maxsize=1024)
def _kind_of(listed: Global) -> Kind | None:
    module, name = listed.module, listed.name
    found = _KINDS.get((HOMES.get(module, module), name))
    if found is None and module.startswith("torch."):
        old = next((old for old in MOVED if module == old or module.startswith(f"{old}.")), None)
        found = _KINDS.get((MOVED[old] + module.removeprefix(old), name)) if old is not None else None
    if found is None and module.startswith(TORCH_LAYERS):
        found = _CUSTOM if name.isidentifier() and name.lstrip("_")[:1].isupper() else None
    return found


def is_own(name: Any) -> bool:
    """True for a class of people's own: of a module that is neither Python's, nor torch's, nor required by torch.

    A nested class (`Outer.Inner`) is one; a name behind something in lower case (`os.system`) leads out of the module
    and is none.
    """
    return type(name) is Global and _is_own(name)


@lru_cache(maxsize=1024)
def _is_own(name: Global) -> bool:
    top = name.module.partition(".")[0]
    outer = name.name.split(".")[:-1]
    return (
        bool(top)
        and top not in SHARED_MODULES
        and top != "__torch__"  # what a program declares, which is judged with the program
        and all(part.lstrip("_")[:1].isupper() for part in outer)
    )


def is_torch_name(name: Global) -> bool:
    """True for torch's dtypes, storages, layouts and quantization schemes: constants, of which nothing is called."""
    return name.name in _CONSTANTS.get(name.module, ())
