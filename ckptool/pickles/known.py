"""The table of names that are understood: how a pickle may use each so that nothing of unknown origin runs.

A name is only ever text. There is no list of bad names to bypass, only this one to be outside of. A row says with what
arguments the name may be called (`arguments`), what its object may receive afterwards, and whether the name may stand
by itself; `calls` judges trees by it, for `scan`, `inspect`, `load` and every writer. Names are listed one by one; a
dotted name (`Path.write_text`) is in no row.
Sources: the reducers of torch 0.1 to 2.13 (torch/_utils.py, torch/_tensor.py, torch/storage.py), the `__reduce__`
methods of the standard library (3.6 to 3.14) and of numpy 1 and 2, and the classes of the configuration and training
libraries below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from ckptool.checkpoint.dtypes import BY_STORAGE, BY_TORCH
from ckptool.checkpoint.nodes import HOMES, Global, Object
from ckptool.checkpoint.numpy_arrays import is_array, is_type
from ckptool.pickles import arguments as rules
from ckptool.pickles.arguments import Rule, every, exactly, up_to

NOWHERE = 1 << 30  # beyond the arguments of any call


class Kind(NamedTuple):
    """How pickles may use the names of one kind.

    called: tells whether it may be called, or made (`cls.__new__`), with these arguments; None: it may not be called.
    empty: it may be made without arguments.  state, items, elements: what the object may receive afterwards.
    stands: it may stand by itself, as a value or a key.  state_at: the index of the first argument that is a state.
    custom: the class runs somebody's code, like people's own classes; its objects are passed on, and always
    mentioned.
    filled: tells whether the object with its state is allowed, where that takes more than judging each part.
    value: the word for what the object is, by which `plain` makes its plain value and `bridge` the live object.
    weights_only: `torch.load(weights_only=True)` calls it.
    """

    called: Rule | None = None
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

    def of(self, names: str) -> dict[tuple[str, str], Kind]:
        """The rows of the names in a text (see `named`)."""
        return dict.fromkeys(named(names), self)


_NAME = Kind()  # a class, a function or a constant that is only referred to
_OBJECT = Kind(empty=True, state=True)
_LAYER = _OBJECT._replace(filled=rules.few_layers)
_CUSTOM = Kind(empty=True, state=True, items=True, elements=True, custom=True, stands=False)
_MAPPING = Kind(up_to("pairs"), empty=True, state=True, items=True)
_CONTAINER = Kind(rules.none, empty=True, state=True, items=True, elements=True)
_PATH = Kind(every("path"), empty=True)
_SCALARS = Kind(every("scalar"), empty=True)
_NUMBER = Kind(every("number"), empty=True)
_SEQUENCE = Kind(up_to("sequence"), empty=True)
_ENUM = Kind(exactly("scalar"))  # a member by its value
_ANY = every("anything")


def is_member(args: Any) -> bool:
    """`getattr(IntervalStrategy, "STEPS")`: a member of an enum by its name, as Python 3.11.0 to 3.11.3 pickle it."""
    is_attribute = type(args) is tuple and len(args) == 2 and type(args[1]) is str and args[1].isidentifier()
    return is_attribute and not args[1].startswith("_") and kind_of(args[0]) is _ENUM


_TENSOR = Kind(rules.of_tensors, weights_only=True)
_PACKED = _OBJECT._replace(filled=rules.packed, stands=False)  # by a backend, whose C++ code sets the state
_STORAGE = Kind(up_to("sequence"))  # with its numbers, as in very old pickles


def named(text: str) -> Iterator[tuple[str, str]]:
    """The modules and names in a text: `module: Name Name`; several modules in a row share the names after them.

    `torch.nn.: module: Name`: the modules from there on are inside that one, or inside each of several in a row.
    """
    homes, modules, last = [""], list[str](), ""
    for word in text.split():
        if word.endswith(".:"):
            homes = [*(homes if last.endswith(".:") else ()), word[:-1]]
        elif word.endswith(":"):
            among = modules if last.endswith(":") and not last.endswith(".:") else ()
            modules = [*among, *(home + word[:-1] for home in homes)]
        else:
            yield from ((module, word) for module in modules)
        last = word


# torch's classes that a pickle makes without arguments and then fills: modules, optimizers, schedulers, data sets, and
# the classes of eager-mode quantization. The code that makes each and sets its state (`__new__`, `__setstate__`) was
# read: it fills the object and does nothing else. Left out on purpose: `torch.fx` graph modules (their pickle runs
# source text), `torch.package`, `torch.jit`, data pipes and loaders. Source: torch 2.13, and older versions.
TORCH_CLASSES = """
    torch.ao.nn.quantized.: dynamic.modules.linear: modules.linear: Linear dynamic.modules.rnn: GRU LSTM RNNBase
    PackedParameter modules: DeQuantize Quantize modules.conv: Conv1d Conv2d Conv3d modules.embedding_ops: Embedding
    EmbeddingBag EmbeddingPackedParams modules.functional_modules: FloatFunctional QFunctional modules.linear:
    LinearPackedParams modules.utils: WeightedQuantizedModule
    torch.nn.modules.: activation: CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid
    LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus
    Softshrink Softsign Tanh Tanhshrink Threshold adaptive: AdaptiveLogSoftmaxWithLoss batchnorm: BatchNorm1d
    BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d SyncBatchNorm _BatchNorm _LazyNormBase
    _NormBase channelshuffle: ChannelShuffle container: Container ModuleDict ModuleList ParameterDict ParameterList
    Sequential conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d LazyConv2d
    LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d _ConvNd _ConvTransposeMixin _ConvTransposeNd
    _LazyConvXdMixin distance: CosineSimilarity PairwiseDistance dropout: AlphaDropout Dropout Dropout1d Dropout2d
    Dropout3d FeatureAlphaDropout _DropoutNd flatten: Flatten Unflatten fold: Fold Unfold instancenorm: InstanceNorm1d
    InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d _InstanceNorm lazy:
    LazyModuleMixin linear: Bilinear Identity LazyLinear Linear NonDynamicallyQuantizableLinear _LinearWithBias loss:
    BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss HingeEmbeddingLoss HuberLoss
    KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss
    MultiMarginLoss NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss
    TripletMarginWithDistanceLoss _Loss _WeightedLoss module: Module _WrappedHook normalization: CrossMapLRN2d GroupNorm
    LayerNorm LocalResponseNorm RMSNorm padding: CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d
    ConstantPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d
    ZeroPad1d ZeroPad2d ZeroPad3d _CircularPadNd _ConstantPadNd _ReflectionPadNd _ReplicationPadNd pixelshuffle:
    PixelShuffle PixelUnshuffle pooling: AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d
    AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d FractionalMaxPool2d FractionalMaxPool3d LPPool1d
    LPPool2d LPPool3d MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d _AdaptiveAvgPoolNd
    _AdaptiveMaxPoolNd _AvgPoolNd _LPPoolNd _MaxPoolNd _MaxUnpoolNd rnn: GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell
    RNNCellBase sparse: Embedding EmbeddingBag transformer: Transformer TransformerDecoder TransformerDecoderLayer
    TransformerEncoder TransformerEncoderLayer upsampling: Upsample UpsamplingBilinear2d UpsamplingNearest2d
    _UpsamplingBase
    torch.optim.: adadelta: Adadelta adagrad: Adagrad adam: Adam adamax: Adamax adamw: AdamW asgd: ASGD lbfgs: LBFGS
    lr_scheduler: ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR
    LRScheduler LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR
    StepLR _LRScheduler _SchedulePhase nadam: NAdam optimizer: Optimizer radam: RAdam rmsprop: RMSprop rprop: Rprop sgd:
    SGD sparse_adam: SparseAdam swa_utils: AveragedModel SWALR
    torch.nn.: parallel.data_parallel: DataParallel parallel.distributed: DistributedDataParallel
    utils.parametrizations: _Orthogonal _SpectralNorm _WeightNorm utils.parametrize: ParametrizationList utils.prune:
    BasePruningMethod CustomFromMask Identity L1Unstructured LnStructured PruningContainer RandomStructured
    RandomUnstructured utils.spectral_norm: SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook
    utils.weight_norm: WeightNorm backends.thnn: THNNFunctionBackend backends.backend: FunctionBackend
    torch.: amp.grad_scaler: GradScaler cuda.amp.grad_scaler: GradScaler optim: Adafactor Muon utils.data.dataset:
    ChainDataset ConcatDataset Dataset IterableDataset StackDataset Subset TensorDataset utils.data.distributed:
    DistributedSampler utils.data.sampler: BatchSampler RandomSampler Sampler SequentialSampler SubsetRandomSampler
    WeightedRandomSampler utils.hooks: RemovableHandle
"""


MEMORY_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
# torch's constants, of which only storages are ever called (with their numbers): dtypes, storages, tensor classes.
_STORAGES = [name for name in BY_STORAGE if name]
_CONSTANTS = {("torch", name) for name in BY_TORCH} | {
    (module, name)
    for module in ("torch", "torch.cuda", "torch.sparse", "torch.storage")
    for name in (*_STORAGES, *(name.replace("Storage", "Tensor") for name in _STORAGES))
}
_CONSTANTS |= set(
    named("""
        torch: torch.cuda: torch.sparse: torch.storage: UntypedStorage _UntypedStorage TypedStorage _TypedStorage
        torch: per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric
        per_channel_affine_float_qparams
    """)
)
_CONSTANTS |= {("torch", name) for name in MEMORY_FORMATS}

# How names may be used, and which names; if a name is in two rows, the later one counts.
_KINDS: dict[tuple[str, str], Kind] = {
    **_LAYER.of(TORCH_CLASSES),
    # torch: tensors, and what describes them
    **_TENSOR.of("""
        torch._utils: _rebuild_tensor _rebuild_sparse_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage
        _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor
    """),
    **Kind(rules.of_tensors).of("""
        torch._utils: _rebuild_sparse_csr_tensor _rebuild_xla_tensor
        torch.nested._internal.nested_tensor: _rebuild_njt
    """),
    **Kind(rules.of_tensors, value="uninitialized").of(
        "torch.nn.parameter: UninitializedParameter UninitializedBuffer"
    ),
    **Kind(rules.without_hooks(5), weights_only=True).of("torch._utils: _rebuild_tensor_v2 _rebuild_tensor_v3"),
    **Kind(rules.without_hooks(2), state_at=3, weights_only=True).of(
        "torch._utils: _rebuild_parameter _rebuild_parameter_with_state"
    ),
    **Kind(rules.without_hooks(6), weights_only=True).of("torch._utils: _rebuild_qtensor"),
    **Kind(rules.rebuild_and_class, state_at=3, stands=False).of(
        "torch._tensor: torch.tensor: _rebuild_from_type _rebuild_from_type_v2"
    ),
    **Kind(rules.class_first, weights_only=True).of("torch._utils: _rebuild_wrapper_subclass"),
    **Kind(rules.of_tensors, empty=True, state=True).of(
        "torch.nn.parameter: Parameter Buffer torch.autograd.variable: Variable"
    ),
    **_SEQUENCE._replace(value="size", weights_only=True).of("torch: Size"),
    **_SCALARS._replace(value="device", weights_only=True).of("torch: device"),
    **_SCALARS._replace(value="layout", weights_only=True).of("torch.serialization: _get_layout"),
    **_SCALARS._replace(value="str").of("torch.torch_version: TorchVersion"),
    **Kind(up_to("device"), state=True, filled=rules.seeded).of("torch: torch._C: Generator"),
    **{(f"{rules.PACKED}.{module}", name): _PACKED for module, name in (path.split(".") for path in rules.CLASSES)},
    **_PACKED.of("torch: ScriptObject"),
    **Kind(lambda args: rules.getattr_of_known(args) or is_member(args), stands=False).of("builtins: getattr"),
    **_NAME.of("""
        torch: torch._tensor: Tensor
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
        constant_ orthogonal_ trunc_normal_ eye_ dirac_ sparse_
    """),
    # as protocol 4 spells them
    **_NAME.of(
        "torch._utils: torch.contiguous_format torch.channels_last torch.channels_last_3d torch.preserve_format"
    ),
    # torch.distributed: what ranks save
    **_OBJECT.of("""
        torch.distributed.tensor._dtensor_spec: DTensorSpec
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
        torch._dynamo.decorators: _DimRange
    """),
    # namedtuples, and classes that define how they are filled
    **Kind(_ANY, empty=True, state=True).of("""
        torch.distributed.tensor._dtensor_spec: TensorMeta ShardOrderEntry
        torch.distributed.tensor.placement_types: Placement Shard Replicate Partial _Partial _StridedShard _MaskPartial
        torch.distributed._mesh_layout: _MeshLayout _FlatLayout
        torch.distributed.algorithms.join: _JoinConfig torch.nn.parallel.distributed: _BucketCapacityConfig
        torch.distributed.remote_device: _remote_device
        torch.distributed._shard.sharded_tensor.metadata: ShardedTensorMetadata TensorProperties
        torch.distributed.checkpoint.metadata: TensorProperties
        torch.distributed.checkpoint.planner: WriteItemType
        torch.distributed.checkpoint.filesystem: _StorageInfo _StoragePrefix
        torch.distributed.checkpoint._hf_utils: _HFStorageInfo
    """),
    # made with arguments, it opens connections
    **Kind(empty=True, state=True, stands=False).of(
        "torch.distributed.device_mesh: torch.distributed._tensor.device_mesh: DeviceMesh"
    ),
    **_ENUM.of("""
        torch.amp.grad_scaler: torch.cuda.amp.grad_scaler: OptState
        torch.distributed._shard.sharded_tensor.metadata: MEM_FORMAT_ENCODING
        torch.distributed.checkpoint.metadata: _MEM_FORMAT_ENCODING
    """),
    **Kind(rules.none).of("torch.nn.backends.thnn: _get_thnn_function_backend"),
    # Python
    **_CONTAINER._replace(elements=False, value="namespace").of(
        "argparse: Namespace types: SimpleNamespace ultralytics.utils: ultralytics.yolo.utils: IterableSimpleNamespace"
    ),
    **_MAPPING.of("collections: OrderedDict"),
    **_MAPPING._replace(called=up_to("anything"), value="defaultdict").of("collections: defaultdict"),
    **Kind(up_to("sequence", "scalar"), empty=True, state=True, elements=True, value="deque").of("collections: deque"),
    **_MAPPING._replace(value="counter", weights_only=True).of("collections: Counter"),
    **_MAPPING._replace(state=False, value="dict").of("builtins: dict"),
    **_SEQUENCE._replace(elements=True, value="list").of("builtins: list"),
    **_SEQUENCE._replace(elements=True).of("builtins: set"),
    **_SEQUENCE._replace(value="tuple").of("builtins: tuple"),
    **_SEQUENCE.of("builtins: frozenset"),
    **Kind(up_to("content", "codec", "codec"), empty=True).of("builtins: bytes bytearray"),
    **Kind(up_to("scalar", "codec", "codec"), empty=True, value="str").of("builtins: str unicode"),
    **_NUMBER._replace(value="int").of("builtins: int long"),
    **_NUMBER._replace(value="float").of("builtins: float"),
    **_SCALARS._replace(value="bool").of("builtins: bool"),
    **_NUMBER._replace(weights_only=True).of("builtins: complex"),
    **_SCALARS._replace(value="slice").of("builtins: slice"),
    **_SCALARS._replace(value="range").of("builtins: range xrange"),
    **_SCALARS.of("builtins: object"),
    **Kind(exactly("constant"), stands=False).of("builtins: type"),
    **_NAME.of("builtins: Ellipsis NotImplemented abs max min sum len round sorted"),
    **{
        ("datetime", name): Kind(every("in date"), value=name)
        for name in ("datetime", "date", "time", "timedelta", "timezone")
    },
    **_NUMBER._replace(value="decimal").of("decimal: Decimal"),
    **_NUMBER._replace(value="fraction").of("fractions: Fraction"),
    **Kind(rules.none, empty=True, state=True, value="uuid").of("uuid: UUID"),
    **_ENUM.of("uuid: SafeUUID"),
    **_PATH._replace(value="posix path").of("pathlib: PosixPath"),
    **_PATH._replace(value="windows path").of("pathlib: WindowsPath"),
    **_PATH._replace(value="pure posix path").of("pathlib: PurePosixPath"),
    **_PATH._replace(value="pure windows path").of("pathlib: PureWindowsPath"),
    **_PATH.of("pathlib: Path PurePath"),
    **Kind(rules.none, empty=True, state=True, filled=rules.generated).of("random: Random"),
    **_PATH._replace(empty=False, stands=False).of("logging: getLogger"),
    **Kind(exactly("expression", "scalar"), stands=False).of("re: _compile"),
    **Kind(rules.application, state=True, stands=False, filled=rules.same_application).of("functools: partial"),
    **Kind(rules.type_expression).of("operator: _operator: getitem or_ types: GenericAlias"),
    **Kind(rules.union, stands=False).of("functools: _functools: builtins: reduce"),
    **_NAME.of("""
        typing: Any Union Optional Dict List Tuple Set FrozenSet Callable Sequence Mapping MutableMapping Iterable
        Iterator Type Literal Deque DefaultDict OrderedDict Text AnyStr Hashable Sized Collection Container NoReturn
        ClassVar Final
        numbers: Number Complex Real Rational Integral
        math: sqrt exp log log2 log10 sin cos tanh ceil floor
        inspect: _empty
    """),
    # numpy
    **Kind(every("scalar"), state=True, filled=is_type, value="array type").of("numpy: dtype"),
    **Kind(exactly("class of arrays", "anything", "anything"), state=True, filled=is_array, value="array").of(
        "numpy.core.multiarray: _reconstruct"
    ),
    **Kind(_ANY, filled=is_array, value="array").of("numpy.core.numeric: _frombuffer"),
    **Kind(_ANY, filled=is_array, value="array scalar").of("numpy.core.multiarray: scalar"),
    **Kind(every("of random"), state=True).of("""
        numpy.random._pickle: __bit_generator_ctor __generator_ctor __randomstate_ctor
        numpy.random: __RandomState_ctor numpy.random.bit_generator: __pyx_unpickle_SeedSequence
    """),
    **_OBJECT.of("""
        numpy.random._pcg64: PCG64 PCG64DXSM numpy.random._mt19937: MT19937 numpy.random._philox: Philox
        numpy.random._sfc64: SFC64 numpy.random.bit_generator: SeedSequence
    """),
    **_NAME.of("""
        numpy: ndarray matrix recarray chararray bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64
        float16 float32 float64 float128 longdouble complex64 complex128 str_ bytes_ object_ void datetime64
        timedelta64 generic number integer signedinteger unsignedinteger inexact floating complexfloating intc uintc
        intp uintp long ulong longlong ulonglong
        numpy.rec: numpy.core.records: recarray
        numpy.core.defchararray: numpy.char: chararray
        numpy.matrixlib.defmatrix: matrix
    """),
    # Configuration: dictionaries and lists in disguise
    **_CONTAINER._replace(value="omegaconf").of("omegaconf.dictconfig: DictConfig omegaconf.listconfig: ListConfig"),
    **_CONTAINER._replace(value="omegaconf node").of("""
        omegaconf.nodes: AnyNode StringNode IntegerNode FloatNode BooleanNode BytesNode PathNode EnumNode
        InterpolationResultNode
    """),
    **_CONTAINER.of("omegaconf.base: ContainerMetadata Metadata"),
    **_CONTAINER._replace(value="items or attributes").of("""
        pytorch_lightning.utilities.parsing: lightning_fabric.utilities.data: lightning.fabric.utilities.data:
        lightning.pytorch.utilities.parsing: AttributeDict easydict: EasyDict
    """),
    **_CONTAINER._replace(value="items").of("""
        yacs.config: CfgNode mmcv.utils.config: mmengine.config.config: ConfigDict munch: Munch
        addict: addict.addict: Dict box: box.box: Box
    """),
    **_CONTAINER._replace(value="elements").of("box: box.box_list: BoxList"),
    **_CONTAINER._replace(value="attributes").of("mmengine.logging.history_buffer: HistoryBuffer"),
    **_CONTAINER._replace(value="mmengine config").of("mmengine.config.config: Config"),
    **_CONTAINER._replace(value="ml_collections").of(
        "ml_collections.config_dict.config_dict: ml_collections.config_dict: ConfigDict FrozenConfigDict"
    ),
    # Batches and graphs of data, whose classes set their state as it is
    **Kind(exactly("class of tensordict", "attributes"), state_at=1, stands=False).of(
        "tensordict._reductions: _make_td"
    ),
    **_OBJECT.of("""
        torch_geometric.data.data: Data torch_geometric.data.hetero_data: HeteroData
        torch_geometric.data.storage: BaseStorage NodeStorage EdgeStorage GlobalStorage
    """),
    **_NAME.of("""
        tensordict._td: TensorDict tensordict._lazy: LazyStackedTensorDict
        torch_geometric.data.data: DataEdgeAttr DataTensorAttr torch_geometric.data.feature_store: TensorAttr
        torch_geometric.data.graph_store: EdgeAttr
    """),
    **_ENUM.of("""
        pytorch_lightning.trainer.states: lightning.pytorch.trainer.states: TrainerFn TrainerStatus RunningStage
        transformers.trainer_utils: IntervalStrategy SaveStrategy HubStrategy SchedulerType FSDPOption
        RemoveColumnsCollator EvaluationStrategy
        transformers.training_args: OptimizerNames ParallelMode
        transformers.debug_utils: DebugOption
        transformers.utils.generic: ExplicitEnum PaddingStrategy TensorType
        transformers.utils.quantization_config: QuantizationMethod AWQLinearVersion
        transformers.optimization: SchedulerType timm.layers.format: Format peft.utils.peft_types: PeftType TaskType
        accelerate.utils.dataclasses: DistributedType DynamoBackend LoggerType PrecisionType RNGType
        SageMakerDistributedType ComputeEnvironment CustomDtype SaveDtype FP8BackendType
        accelerate.state: DistributedType
        deepspeed.runtime.zero.config: ZeroStageEnum
        fairseq.dataclass.constants: StrEnum DDP_BACKEND_CHOICES DDP_COMM_HOOK_CHOICES DATASET_IMPL_CHOICES
        GENERATION_CONSTRAINTS_CHOICES GENERATION_DECODING_FORMAT_CHOICES LOG_FORMAT_CHOICES
        PIPELINE_CHECKPOINT_CHOICES PRINT_ALIGNMENT_CHOICES SHORTEN_METHOD_CHOICES SAMPLE_BREAK_MODE_CHOICES
        CLIP_GRAD_NORM_TYPE_CHOICES ZERO_SHARDING_CHOICES
    """),
    **_NAME.of("""
        fairseq.dataclass.configs: FairseqConfig CommonConfig DistributedTrainingConfig DatasetConfig
        OptimizationConfig CheckpointConfig FairseqBMUFConfig GenerationConfig CommonEvalConfig EvalLMConfig
        InteractiveConfig EMAConfig FairseqDataclass
    """),
    # used as keys in checkpoints
    **_NAME.of("""
        pytorch_lightning.callbacks.: lightning.pytorch.callbacks.: model_checkpoint: ModelCheckpoint
        early_stopping: EarlyStopping lr_monitor: LearningRateMonitor gpu_stats_monitor: GPUStatsMonitor
        device_stats_monitor: DeviceStatsMonitor progress: ProgressBar ProgressBarBase TQDMProgressBar
        RichProgressBar progress.base: ProgressBarBase progress.progress_bar: ProgressBar progress.tqdm_progress:
        TQDMProgressBar progress.rich_progress: RichProgressBar model_summary: ModelSummary rich_model_summary:
        RichModelSummary gradient_accumulation_scheduler: GradientAccumulationScheduler stochastic_weight_avg:
        StochasticWeightAveraging weight_averaging: WeightAveraging EMAWeightAveraging finetuning: BaseFinetuning
        BackboneFinetuning lambda_function: LambdaCallback prediction_writer: BasePredictionWriter pruning:
        ModelPruning quantization: QuantizationAwareTraining timer: Timer xla_stats_monitor: XLAStatsMonitor
        throughput_monitor: ThroughputMonitor spike: SpikeDetection batch_size_finder: BatchSizeFinder lr_finder:
        LearningRateFinder callback: Callback
    """),
    **{key: _STORAGE if "Storage" in key[1] else _NAME for key in _CONSTANTS},
}

# Modules that moved: the old place, and the new one.
MOVED = {"torch.nn.quantized": "torch.ao.nn.quantized", "torch.optim._multi_tensor": "torch.optim"}
# Where torch's layers, optimizers and distributions are in all versions. Names there that are not listed are classes
# that were removed, or that hardly anybody saves: they are treated as somebody's own.
TORCH_LAYERS = tuple(
    """
    torch.nn.modules. torch.optim. torch.legacy.nn. torch.legacy.optim. torch.distributions. torch.ao.nn.
    torch.nn.intrinsic. torch.nn.qat. torch.nn.quantizable. torch.nn.quantized. torch.quantization.observer
    torch.quantization.fake_quantize torch.quantization.stubs torch.ao.quantization.observer
    torch.ao.quantization.fake_quantize torch.ao.quantization.stubs
    """.split()
)

# Modules that every installation may have: a name in one of them that is in no row of the table is nobody's own class.
# These are in some versions of Python from 3.6 to 3.14 but not in all; the running version's are added.
PYTHON3 = """
    _aix_support _android_support _apple_support _ast_unparse _bootsubprocess _colorize _compression _crypt _hmac
    _interpchannels _interpqueues _interpreters _ios_support _msi _opcode_metadata _py_warnings _pydatetime _pylong
    _pyrepl _remote_debugging _sha2 _sha256 _sha512 _suggestions _sysconfig _tokenize _types _typing _wmi _zstd aifc
    annotationlib asynchat asyncore audioop binhex cgi cgitb chunk compression crypt distutils imghdr imp lib2to3
    mailcap msilib nis nntplib nturl2path ossaudiodev pipes smtpd sndhdr spwd sre_compile sre_constants sre_parse
    sunau telnetlib test tomllib uu xdrlib
"""

PYTHON2 = """
    BaseHTTPServer Bastion CDROM CGIHTTPServer Canvas ConfigParser Cookie DLFCN Dialog DocXMLRPCServer FileDialog
    FixTk HTMLParser IN MimeWriter Queue ScrolledText SimpleDialog SimpleHTTPServer SimpleXMLRPCServer SocketServer
    StringIO TYPES Tix Tkconstants Tkdnd Tkinter UserDict UserList UserString _LWPCookieJar _MozillaCookieJar
    __builtin__ _abcoll _ctypes_test _hotshot _sha _sysconfigdata _winreg anydbm audiodev bsddb cPickle
    cStringIO commands compiler cookielib copy_reg dbhash dircache dumbdbm dummy_thread dummy_threading exceptions
    formatter fpformat future_builtins gdbm hotshot htmlentitydefs htmllib httplib ihooks imputil linuxaudiodev
    macpath macurl2path markupbase md5 mhlib mimetools mimify multifile mutex new os2emxpath parser popen2 posixfile
    repr rexec rfc822 robotparser sets sgmllib sha sre statvfs stringold strop sunaudio symbol thread tkColorChooser
    tkCommonDialog tkFileDialog tkFont tkMessageBox tkSimpleDialog toaiff ttk urllib2 urlparse user whichdb xmllib
    xmlrpclib xxsubtype
"""

INSTALLERS = "pip setuptools pkg_resources wheel ensurepip _distutils_hack distutils_hack"

# What torch and numpy, in any version, contain and require.
REQUIRED = """
    _yaml caffe2 cuda f2py filelock fsspec functorch future isympy jinja2 libfuturize mkl markupsafe
    mpmath networkx numpy nvidia nvfuser opt_einsum optree past six sympy tbb torch torchgen
    triton typing_extensions yaml
"""

PYTHON_MODULES = sys.stdlib_module_names | frozenset(f"{PYTHON3} {PYTHON2} {INSTALLERS}".split())
SHARED_MODULES = PYTHON_MODULES | frozenset(REQUIRED.split())


def rebuild_functions() -> list[Global]:
    """torch's functions that make a tensor from storages, arrays and other tensors."""
    homes = ("torch._utils", "torch._tensor", "torch.tensor")
    return [Global(home, name) for home, name in _KINDS if home in homes and name.startswith("_rebuild_")]


def value_word(name: Any) -> str:
    """The word for what a name's objects are (see `Kind`); empty where the table has none."""
    kind = kind_of(name)
    return kind.value if kind is not None else ""


def kind_of(name: Any) -> Kind | None:
    """The kind of a name; None for one that is not listed, and for anything that is not a name."""
    return _kind_of(name) if type(name) is Global else None


@lru_cache(maxsize=1024)
def _kind_of(listed: Global) -> Kind | None:
    module, name = listed.module, listed.name
    kind = _KINDS.get((HOMES.get(module, module), name))
    if kind is None and module.startswith("torch."):
        old = next((old for old in MOVED if module == old or module.startswith(f"{old}.")), None)
        kind = _KINDS.get((MOVED[old] + module.removeprefix(old), name)) if old is not None else None
    if kind is None and module.startswith(TORCH_LAYERS):
        kind = _CUSTOM if name.isidentifier() and name.lstrip("_")[:1].isupper() else None
    return kind


def is_own(name: Any) -> bool:
    """True for a class of people's own, from a module that is neither Python's, nor torch's, nor required by torch.

    A nested class (`Outer.Inner`) is one; a name after a lower-case part (`os.system`) leads out of the module and is
    not.
    """
    return type(name) is Global and _is_own(name)


@lru_cache(maxsize=1024)
def _is_own(name: Global) -> bool:
    top = name.module.partition(".")[0]
    outer = name.name.split(".")[:-1]
    return (
        bool(top)
        and top not in SHARED_MODULES
        and top != "__torch__"  # declared by a program, and judged with it
        and all(part.lstrip("_")[:1].isupper() for part in outer)
    )


def is_torch_name(name: Global) -> bool:
    """True for torch's dtypes, storages, layouts and quantization schemes: constants that are not called."""
    return (name.module, name.name) in _CONSTANTS
