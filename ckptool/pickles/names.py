"""The names of torch's own classes and of Python's modules.

torch's classes are those that a pickle makes without arguments and then fills: modules, optimizers, schedulers, data
sets, distributions. Each was read for what making it and setting its state do (`__new__`, `__setstate__`): they fill
the object and do nothing else. Left out on purpose: `torch.fx` graph modules (their pickle runs source text),
`torch.package`, `torch.jit`, data pipes and loaders.
Source: torch 2.13, and what older versions had.
"""

TORCH_CLASSES = """
torch.amp.grad_scaler: GradScaler
torch.ao.nn.intrinsic.modules.fused: BNReLU2d BNReLU3d ConvAdd2d ConvAddReLU2d ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d
    ConvBnReLU2d ConvBnReLU3d ConvReLU1d ConvReLU2d ConvReLU3d LinearBn1d LinearLeakyReLU LinearReLU LinearTanh
    _FusedModule
torch.ao.nn.intrinsic.qat.modules.conv_fused: ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d ConvBnReLU3d
    ConvReLU1d ConvReLU2d ConvReLU3d _ConvBnNd
torch.ao.nn.intrinsic.qat.modules.linear_fused: LinearBn1d
torch.ao.nn.intrinsic.qat.modules.linear_relu: LinearReLU
torch.ao.nn.intrinsic.quantized.dynamic.modules.linear_relu: LinearReLU
torch.ao.nn.intrinsic.quantized.modules.bn_relu: BNReLU2d BNReLU3d
torch.ao.nn.intrinsic.quantized.modules.conv_add: ConvAdd2d ConvAddReLU2d
torch.ao.nn.intrinsic.quantized.modules.conv_relu: ConvReLU1d ConvReLU2d ConvReLU3d
torch.ao.nn.intrinsic.quantized.modules.linear_relu: LinearLeakyReLU LinearReLU LinearTanh
torch.ao.nn.qat.dynamic.modules.linear: Linear
torch.ao.nn.qat.modules.conv: Conv1d Conv2d Conv3d _ConvNd
torch.ao.nn.qat.modules.embedding_ops: Embedding EmbeddingBag
torch.ao.nn.qat.modules.linear: Linear
torch.ao.nn.quantizable.modules.activation: MultiheadAttention
torch.ao.nn.quantizable.modules.rnn: LSTM LSTMCell _LSTMLayer _LSTMSingleLayer
torch.ao.nn.quantized.dynamic.modules.conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
torch.ao.nn.quantized.dynamic.modules.linear: Linear
torch.ao.nn.quantized.dynamic.modules.rnn: GRU GRUCell LSTM LSTMCell PackedParameter RNNBase RNNCell RNNCellBase
torch.ao.nn.quantized.modules: DeQuantize Quantize
torch.ao.nn.quantized.modules.activation: ELU Hardswish LeakyReLU MultiheadAttention PReLU ReLU6 Sigmoid Softmax
torch.ao.nn.quantized.modules.batchnorm: BatchNorm2d BatchNorm3d _BatchNorm
torch.ao.nn.quantized.modules.conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d _ConvNd
    _ConvTransposeNd
torch.ao.nn.quantized.modules.dropout: Dropout
torch.ao.nn.quantized.modules.embedding_ops: Embedding EmbeddingBag EmbeddingPackedParams
torch.ao.nn.quantized.modules.functional_modules: FXFloatFunctional FloatFunctional QFunctional
torch.ao.nn.quantized.modules.linear: Linear LinearPackedParams
torch.ao.nn.quantized.modules.normalization: GroupNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm
torch.ao.nn.quantized.modules.rnn: LSTM
torch.ao.nn.quantized.modules.utils: WeightedQuantizedModule
torch.ao.nn.quantized.reference.modules.conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
    _ConvNd _ConvTransposeNd
torch.ao.nn.quantized.reference.modules.linear: Linear
torch.ao.nn.quantized.reference.modules.rnn: GRU GRUCell LSTM LSTMCell RNNBase RNNCell RNNCellBase
torch.ao.nn.quantized.reference.modules.sparse: Embedding EmbeddingBag
torch.ao.nn.quantized.reference.modules.utils: ReferenceQuantizedModule
torch.ao.nn.sparse.quantized.dynamic.linear: Linear
torch.ao.nn.sparse.quantized.linear: Linear LinearPackedParams
torch.ao.nn.sparse.quantized.utils: LinearBlockSparsePattern
torch.ao.quantization._learnable_fake_quantize: _LearnableFakeQuantize
torch.ao.quantization.fake_quantize: FakeQuantize FakeQuantizeBase FixedQParamsFakeQuantize
    FusedMovingAvgObsFakeQuantize
torch.ao.quantization.observer: AffineQuantizedObserverBase FixedQParamsObserver HistogramObserver MinMaxObserver
    MovingAverageMinMaxObserver MovingAveragePerChannelMinMaxObserver NoopObserver ObserverBase
    PerChannelMinMaxObserver PlaceholderObserver RecordingObserver ReuseInputObserver UniformQuantizationObserverBase
    _ObserverBase
torch.ao.quantization.stubs: DeQuantStub QuantStub QuantWrapper
torch.cuda.amp.grad_scaler: GradScaler
torch.distributions.bernoulli: Bernoulli
torch.distributions.beta: Beta
torch.distributions.binomial: Binomial
torch.distributions.categorical: Categorical
torch.distributions.cauchy: Cauchy
torch.distributions.chi2: Chi2
torch.distributions.constraints: Constraint MixtureSameFamilyConstraint _Boolean _Cat _CorrCholesky _Dependent
    _DependentProperty _GreaterThan _GreaterThanEq _HalfOpenInterval _IndependentConstraint _IntegerGreaterThan
    _IntegerInterval _IntegerLessThan _Interval _LessThan _LowerCholesky _LowerTriangular _Multinomial _OneHot
    _PositiveDefinite _PositiveSemidefinite _Real _Simplex _Square _Stack _Symmetric
torch.distributions.continuous_bernoulli: ContinuousBernoulli
torch.distributions.dirichlet: Dirichlet _Dirichlet
torch.distributions.distribution: Distribution
torch.distributions.exp_family: ExponentialFamily
torch.distributions.exponential: Exponential
torch.distributions.fishersnedecor: FisherSnedecor
torch.distributions.gamma: Gamma
torch.distributions.generalized_pareto: GeneralizedPareto
torch.distributions.geometric: Geometric
torch.distributions.gumbel: Gumbel
torch.distributions.half_cauchy: HalfCauchy
torch.distributions.half_normal: HalfNormal
torch.distributions.independent: Independent
torch.distributions.inverse_gamma: InverseGamma
torch.distributions.kumaraswamy: Kumaraswamy
torch.distributions.laplace: Laplace
torch.distributions.lkj_cholesky: LKJCholesky
torch.distributions.log_normal: LogNormal
torch.distributions.logistic_normal: LogisticNormal
torch.distributions.lowrank_multivariate_normal: LowRankMultivariateNormal
torch.distributions.mixture_same_family: MixtureSameFamily
torch.distributions.multinomial: Multinomial
torch.distributions.multivariate_normal: MultivariateNormal
torch.distributions.negative_binomial: NegativeBinomial
torch.distributions.normal: Normal
torch.distributions.one_hot_categorical: OneHotCategorical OneHotCategoricalStraightThrough
torch.distributions.pareto: Pareto
torch.distributions.poisson: Poisson
torch.distributions.relaxed_bernoulli: LogitRelaxedBernoulli RelaxedBernoulli
torch.distributions.relaxed_categorical: ExpRelaxedCategorical RelaxedOneHotCategorical
torch.distributions.studentT: StudentT
torch.distributions.transformed_distribution: TransformedDistribution
torch.distributions.transforms: AbsTransform AffineTransform CatTransform ComposeTransform CorrCholeskyTransform
    CumulativeDistributionTransform ExpTransform IndependentTransform LowerCholeskyTransform PositiveDefiniteTransform
    PowerTransform ReshapeTransform SigmoidTransform SoftmaxTransform SoftplusTransform StackTransform
    StickBreakingTransform TanhTransform Transform _InverseTransform
torch.distributions.uniform: Uniform
torch.distributions.von_mises: VonMises
torch.distributions.weibull: Weibull
torch.distributions.wishart: Wishart
torch.nn.modules.activation: CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid
    LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus
    Softshrink Softsign Tanh Tanhshrink Threshold
torch.nn.modules.adaptive: AdaptiveLogSoftmaxWithLoss
torch.nn.modules.batchnorm: BatchNorm1d BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d
    SyncBatchNorm _BatchNorm _LazyNormBase _NormBase
torch.nn.modules.channelshuffle: ChannelShuffle
torch.nn.modules.container: Container ModuleDict ModuleList ParameterDict ParameterList Sequential
torch.nn.modules.conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d LazyConv2d
    LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d _ConvNd _ConvTransposeMixin
    _ConvTransposeNd _LazyConvXdMixin
torch.nn.modules.distance: CosineSimilarity PairwiseDistance
torch.nn.modules.dropout: AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout _DropoutNd
torch.nn.modules.flatten: Flatten Unflatten
torch.nn.modules.fold: Fold Unfold
torch.nn.modules.instancenorm: InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d
    LazyInstanceNorm3d _InstanceNorm
torch.nn.modules.lazy: LazyModuleMixin
torch.nn.modules.linear: Bilinear Identity LazyLinear Linear NonDynamicallyQuantizableLinear _LinearWithBias
torch.nn.modules.loss: BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss
    HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss MarginRankingLoss
    MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss
    SoftMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss _Loss _WeightedLoss
torch.nn.modules.module: Module _WrappedHook
torch.nn.modules.normalization: CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm
torch.nn.modules.padding: CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d
    ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d
    ZeroPad2d ZeroPad3d _CircularPadNd _ConstantPadNd _ReflectionPadNd _ReplicationPadNd
torch.nn.modules.pixelshuffle: PixelShuffle PixelUnshuffle
torch.nn.modules.pooling: AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d FractionalMaxPool2d FractionalMaxPool3d LPPool1d LPPool2d LPPool3d
    MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d _AdaptiveAvgPoolNd _AdaptiveMaxPoolNd _AvgPoolNd
    _LPPoolNd _MaxPoolNd _MaxUnpoolNd
torch.nn.modules.rnn: GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell RNNCellBase
torch.nn.modules.sparse: Embedding EmbeddingBag
torch.nn.modules.transformer: Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder
    TransformerEncoderLayer
torch.nn.modules.upsampling: Upsample UpsamplingBilinear2d UpsamplingNearest2d _UpsamplingBase
torch.nn.parallel.data_parallel: DataParallel
torch.nn.parallel.distributed: DistributedDataParallel
torch.nn.utils.parametrizations: _Orthogonal _SpectralNorm _WeightNorm
torch.nn.utils.parametrize: ParametrizationList
torch.nn.utils.prune: BasePruningMethod CustomFromMask Identity L1Unstructured LnStructured PruningContainer
    RandomStructured RandomUnstructured
torch.nn.utils.spectral_norm: SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook
torch.nn.utils.weight_norm: WeightNorm
torch.optim: Adafactor Muon
torch.optim.adadelta: Adadelta
torch.optim.adagrad: Adagrad
torch.optim.adam: Adam
torch.optim.adamax: Adamax
torch.optim.adamw: AdamW
torch.optim.asgd: ASGD
torch.optim.lbfgs: LBFGS
torch.optim.lr_scheduler: ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR
    ExponentialLR LRScheduler LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR ReduceLROnPlateau
    SequentialLR StepLR _LRScheduler _SchedulePhase
torch.optim.nadam: NAdam
torch.optim.optimizer: Optimizer
torch.optim.radam: RAdam
torch.optim.rmsprop: RMSprop
torch.optim.rprop: Rprop
torch.optim.sgd: SGD
torch.optim.sparse_adam: SparseAdam
torch.optim.swa_utils: AveragedModel SWALR
torch.utils.data.dataset: ChainDataset ConcatDataset Dataset IterableDataset StackDataset Subset TensorDataset
torch.utils.data.distributed: DistributedSampler
torch.utils.data.sampler: BatchSampler RandomSampler Sampler SequentialSampler SubsetRandomSampler
    WeightedRandomSampler
torch.utils.hooks: RemovableHandle
torch.nn.backends.thnn: THNNFunctionBackend
torch.nn.backends.backend: FunctionBackend
"""

# Below `callbacks` of Lightning.
LIGHTNING_CALLBACKS = """
model_checkpoint: ModelCheckpoint
early_stopping: EarlyStopping
lr_monitor: LearningRateMonitor
gpu_stats_monitor: GPUStatsMonitor
device_stats_monitor: DeviceStatsMonitor
progress: ProgressBar ProgressBarBase TQDMProgressBar RichProgressBar
progress.base: ProgressBarBase
progress.progress_bar: ProgressBar
progress.tqdm_progress: TQDMProgressBar
progress.rich_progress: RichProgressBar
model_summary: ModelSummary
rich_model_summary: RichModelSummary
gradient_accumulation_scheduler: GradientAccumulationScheduler
stochastic_weight_avg: StochasticWeightAveraging
weight_averaging: WeightAveraging EMAWeightAveraging
finetuning: BaseFinetuning BackboneFinetuning
lambda_function: LambdaCallback
prediction_writer: BasePredictionWriter
pruning: ModelPruning
quantization: QuantizationAwareTraining
timer: Timer
xla_stats_monitor: XLAStatsMonitor
throughput_monitor: ThroughputMonitor
spike: SpikeDetection
batch_size_finder: BatchSizeFinder
lr_finder: LearningRateFinder
callback: Callback
"""

# Where modules were before, and where they are now.
MOVED = {
    "torch.nn._intrinsic": "torch.ao.nn.intrinsic",
    "torch.nn.intrinsic": "torch.ao.nn.intrinsic",
    "torch.nn.qat": "torch.ao.nn.qat",
    "torch.nn.quantizable": "torch.ao.nn.quantizable",
    "torch.nn.quantized": "torch.ao.nn.quantized",
    "torch.optim._multi_tensor": "torch.optim",
    "torch.quantization": "torch.ao.quantization",
}
# Here torch's layers and optimizers were in all of its versions: names that are not listed are classes that it removed.
TORCH_LAYERS = ("torch.nn.modules.", "torch.optim.", "torch.legacy.nn.", "torch.legacy.optim.")


PYTHON3 = """
    __future__ _abc _aix_support _android_support _apple_support _ast _ast_unparse _asyncio _bisect _blake2
    _bootsubprocess _bz2 _codecs _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw _collections
    _collections_abc _colorize _compat_pickle _compression _contextvars _crypt _csv _ctypes _curses _curses_panel
    _datetime _dbm _decimal _elementtree _frozen_importlib _frozen_importlib_external _functools _gdbm _hashlib
    _heapq _hmac _imp _interpchannels _interpqueues _interpreters _io _ios_support _json _locale _lsprof _lzma
    _markupbase _md5 _msi _multibytecodec _multiprocessing _opcode _opcode_metadata _operator _osx_support
    _overlapped _pickle _posixshmem _posixsubprocess _py_abc _py_warnings _pydatetime _pydecimal _pyio _pylong
    _pyrepl _queue _random _remote_debugging _scproxy _sha1 _sha2 _sha256 _sha3 _sha512 _signal _sitebuiltins
    _socket _sqlite3 _sre _ssl _stat _statistics _string _strptime _struct _suggestions _symtable _sysconfig _thread
    _threading_local _tkinter _tokenize _tracemalloc _types _typing _uuid _warnings _weakref _weakrefset _winapi
    _wmi _zoneinfo _zstd abc aifc annotationlib antigravity argparse array ast asynchat asyncio asyncore atexit
    audioop base64 bdb binascii binhex bisect builtins bz2 cProfile calendar cgi cgitb chunk cmath cmd code codecs
    codeop collections colorsys compileall compression concurrent configparser contextlib contextvars copy copyreg
    crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis distutils doctest email encodings ensurepip
    enum errno faulthandler fcntl filecmp fileinput fnmatch fractions ftplib functools gc genericpath getopt getpass
    gettext glob graphlib grp gzip hashlib heapq hmac html http idlelib imaplib imghdr imp importlib inspect io
    ipaddress itertools json keyword lib2to3 linecache locale logging lzma mailbox mailcap marshal math mimetypes
    mmap modulefinder msilib msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers opcode operator
    optparse os ossaudiodev pathlib pdb pickle pickletools pipes pkgutil platform plistlib poplib posix posixpath
    pprint profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re readline reprlib
    resource rlcompleter runpy sched secrets select selectors shelve shlex shutil signal site smtpd smtplib sndhdr
    socket socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics string stringprep
    struct subprocess sunau symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios test textwrap
    this threading time timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle turtledemo
    types typing unicodedata unittest urllib uu uuid venv warnings wave weakref webbrowser winreg winsound wsgiref
    xdrlib xml xmlrpc zipapp zipfile zipimport zlib zoneinfo
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

# What torch and numpy bring with them and require, in any version.
REQUIRED = """
    _yaml caffe2 cuda f2py filelock fsspec functorch future isympy jinja2 libfuturize mkl markupsafe
    mpmath networkx numpy nvidia nvfuser opt_einsum optree past six sympy tbb torch torchgen
    triton typing_extensions yaml
"""

PYTHON_MODULES = frozenset(f"{PYTHON3} {PYTHON2} {INSTALLERS}".split())
SHARED_MODULES = PYTHON_MODULES | frozenset(REQUIRED.split())
