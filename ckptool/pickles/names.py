"""The names of torch's own classes and of Python's modules.

torch's classes are those that a pickle makes without arguments and then fills: modules, optimizers, schedulers, data
sets, distributions. Each was read for what making it and setting its state do (`__new__`, `__setstate__`): they fill
the object and do nothing else. Left out on purpose: `torch.fx` graph modules (their pickle runs source text),
`torch.package`, `torch.jit`, data pipes and loaders.
Source: torch 2.13, and what older versions had.
"""

TORCH_CLASSES = {
    "torch.ao.nn.intrinsic.": """
        modules.fused: BNReLU2d BNReLU3d ConvAdd2d ConvAddReLU2d ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d
        ConvBnReLU3d ConvReLU1d ConvReLU2d ConvReLU3d LinearBn1d LinearLeakyReLU LinearReLU LinearTanh _FusedModule
        qat.modules.conv_fused: ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d ConvBnReLU3d ConvReLU1d ConvReLU2d
        ConvReLU3d _ConvBnNd qat.modules.linear_fused: LinearBn1d qat.modules.linear_relu: LinearReLU
        quantized.dynamic.modules.linear_relu: LinearReLU quantized.modules.bn_relu: BNReLU2d BNReLU3d
        quantized.modules.conv_add: ConvAdd2d ConvAddReLU2d quantized.modules.conv_relu: ConvReLU1d ConvReLU2d
        ConvReLU3d quantized.modules.linear_relu: LinearLeakyReLU LinearReLU LinearTanh
    """,
    "torch.ao.nn.quantized.": """
        dynamic.modules.conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
        dynamic.modules.linear: Linear dynamic.modules.rnn: GRU GRUCell LSTM LSTMCell PackedParameter RNNBase RNNCell
        RNNCellBase modules: DeQuantize Quantize modules.activation: ELU Hardswish LeakyReLU MultiheadAttention PReLU
        ReLU6 Sigmoid Softmax modules.batchnorm: BatchNorm2d BatchNorm3d _BatchNorm modules.conv: Conv1d Conv2d Conv3d
        ConvTranspose1d ConvTranspose2d ConvTranspose3d _ConvNd _ConvTransposeNd modules.dropout: Dropout
        modules.embedding_ops: Embedding EmbeddingBag EmbeddingPackedParams modules.functional_modules:
        FXFloatFunctional FloatFunctional QFunctional modules.linear: Linear LinearPackedParams modules.normalization:
        GroupNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm modules.rnn: LSTM modules.utils:
        WeightedQuantizedModule reference.modules.conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
        ConvTranspose3d _ConvNd _ConvTransposeNd reference.modules.linear: Linear reference.modules.rnn: GRU GRUCell
        LSTM LSTMCell RNNBase RNNCell RNNCellBase reference.modules.sparse: Embedding EmbeddingBag
        reference.modules.utils: ReferenceQuantizedModule
    """,
    "torch.ao.nn.": """
        qat.dynamic.modules.linear: Linear qat.modules.conv: Conv1d Conv2d Conv3d _ConvNd qat.modules.embedding_ops:
        Embedding EmbeddingBag qat.modules.linear: Linear quantizable.modules.activation: MultiheadAttention
        quantizable.modules.rnn: LSTM LSTMCell _LSTMLayer _LSTMSingleLayer sparse.quantized.dynamic.linear: Linear
        sparse.quantized.linear: Linear LinearPackedParams sparse.quantized.utils: LinearBlockSparsePattern
    """,
    "torch.ao.quantization.": """
        _learnable_fake_quantize: _LearnableFakeQuantize fake_quantize: FakeQuantize FakeQuantizeBase
        FixedQParamsFakeQuantize FusedMovingAvgObsFakeQuantize observer: AffineQuantizedObserverBase
        FixedQParamsObserver HistogramObserver MinMaxObserver MovingAverageMinMaxObserver
        MovingAveragePerChannelMinMaxObserver NoopObserver ObserverBase PerChannelMinMaxObserver PlaceholderObserver
        RecordingObserver ReuseInputObserver UniformQuantizationObserverBase _ObserverBase stubs: DeQuantStub QuantStub
        QuantWrapper
    """,
    "torch.distributions.": """
        bernoulli: Bernoulli beta: Beta binomial: Binomial categorical: Categorical cauchy: Cauchy chi2: Chi2
        constraints: Constraint MixtureSameFamilyConstraint _Boolean _Cat _CorrCholesky _Dependent _DependentProperty
        _GreaterThan _GreaterThanEq _HalfOpenInterval _IndependentConstraint _IntegerGreaterThan _IntegerInterval
        _IntegerLessThan _Interval _LessThan _LowerCholesky _LowerTriangular _Multinomial _OneHot _PositiveDefinite
        _PositiveSemidefinite _Real _Simplex _Square _Stack _Symmetric continuous_bernoulli: ContinuousBernoulli
        dirichlet: Dirichlet _Dirichlet distribution: Distribution exp_family: ExponentialFamily exponential:
        Exponential fishersnedecor: FisherSnedecor gamma: Gamma generalized_pareto: GeneralizedPareto geometric:
        Geometric gumbel: Gumbel half_cauchy: HalfCauchy half_normal: HalfNormal independent: Independent inverse_gamma:
        InverseGamma kumaraswamy: Kumaraswamy laplace: Laplace lkj_cholesky: LKJCholesky log_normal: LogNormal
        logistic_normal: LogisticNormal lowrank_multivariate_normal: LowRankMultivariateNormal mixture_same_family:
        MixtureSameFamily multinomial: Multinomial multivariate_normal: MultivariateNormal negative_binomial:
        NegativeBinomial normal: Normal one_hot_categorical: OneHotCategorical OneHotCategoricalStraightThrough pareto:
        Pareto poisson: Poisson relaxed_bernoulli: LogitRelaxedBernoulli RelaxedBernoulli relaxed_categorical:
        ExpRelaxedCategorical RelaxedOneHotCategorical studentT: StudentT transformed_distribution:
        TransformedDistribution transforms: AbsTransform AffineTransform CatTransform ComposeTransform
        CorrCholeskyTransform CumulativeDistributionTransform ExpTransform IndependentTransform LowerCholeskyTransform
        PositiveDefiniteTransform PowerTransform ReshapeTransform SigmoidTransform SoftmaxTransform SoftplusTransform
        StackTransform StickBreakingTransform TanhTransform Transform _InverseTransform uniform: Uniform von_mises:
        VonMises weibull: Weibull wishart: Wishart
    """,
    "torch.nn.modules.": """
        activation: CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish
        MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus Softshrink
        Softsign Tanh Tanhshrink Threshold adaptive: AdaptiveLogSoftmaxWithLoss batchnorm: BatchNorm1d BatchNorm2d
        BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d SyncBatchNorm _BatchNorm _LazyNormBase _NormBase
        channelshuffle: ChannelShuffle container: Container ModuleDict ModuleList ParameterDict ParameterList Sequential
        conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d LazyConv2d LazyConv3d
        LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d _ConvNd _ConvTransposeMixin _ConvTransposeNd
        _LazyConvXdMixin distance: CosineSimilarity PairwiseDistance dropout: AlphaDropout Dropout Dropout1d Dropout2d
        Dropout3d FeatureAlphaDropout _DropoutNd flatten: Flatten Unflatten fold: Fold Unfold instancenorm:
        InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d
        _InstanceNorm lazy: LazyModuleMixin linear: Bilinear Identity LazyLinear Linear NonDynamicallyQuantizableLinear
        _LinearWithBias loss: BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss
        HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss MarginRankingLoss
        MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss
        SoftMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss _Loss _WeightedLoss module: Module _WrappedHook
        normalization: CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm padding: CircularPad1d CircularPad2d
        CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d
        ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d _CircularPadNd _ConstantPadNd
        _ReflectionPadNd _ReplicationPadNd pixelshuffle: PixelShuffle PixelUnshuffle pooling: AdaptiveAvgPool1d
        AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d
        AvgPool3d FractionalMaxPool2d FractionalMaxPool3d LPPool1d LPPool2d LPPool3d MaxPool1d MaxPool2d MaxPool3d
        MaxUnpool1d MaxUnpool2d MaxUnpool3d _AdaptiveAvgPoolNd _AdaptiveMaxPoolNd _AvgPoolNd _LPPoolNd _MaxPoolNd
        _MaxUnpoolNd rnn: GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell RNNCellBase sparse: Embedding EmbeddingBag
        transformer: Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer
        upsampling: Upsample UpsamplingBilinear2d UpsamplingNearest2d _UpsamplingBase
    """,
    "torch.optim.": """
        adadelta: Adadelta adagrad: Adagrad adam: Adam adamax: Adamax adamw: AdamW asgd: ASGD lbfgs: LBFGS lr_scheduler:
        ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LRScheduler
        LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR StepLR
        _LRScheduler _SchedulePhase nadam: NAdam optimizer: Optimizer radam: RAdam rmsprop: RMSprop rprop: Rprop sgd:
        SGD sparse_adam: SparseAdam swa_utils: AveragedModel SWALR
    """,
    "torch.nn.": """
        parallel.data_parallel: DataParallel parallel.distributed: DistributedDataParallel utils.parametrizations:
        _Orthogonal _SpectralNorm _WeightNorm utils.parametrize: ParametrizationList utils.prune: BasePruningMethod
        CustomFromMask Identity L1Unstructured LnStructured PruningContainer RandomStructured RandomUnstructured
        utils.spectral_norm: SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook utils.weight_norm:
        WeightNorm backends.thnn: THNNFunctionBackend backends.backend: FunctionBackend
    """,
    "torch.": """
        amp.grad_scaler: GradScaler cuda.amp.grad_scaler: GradScaler optim: Adafactor Muon utils.data.dataset:
        ChainDataset ConcatDataset Dataset IterableDataset StackDataset Subset TensorDataset utils.data.distributed:
        DistributedSampler utils.data.sampler: BatchSampler RandomSampler Sampler SequentialSampler SubsetRandomSampler
        WeightedRandomSampler utils.hooks: RemovableHandle
    """,
}

# Below `callbacks` of Lightning.
LIGHTNING_CALLBACKS = """
    model_checkpoint: ModelCheckpoint early_stopping: EarlyStopping lr_monitor: LearningRateMonitor gpu_stats_monitor:
    GPUStatsMonitor device_stats_monitor: DeviceStatsMonitor progress: ProgressBar ProgressBarBase TQDMProgressBar
    RichProgressBar progress.base: ProgressBarBase progress.progress_bar: ProgressBar progress.tqdm_progress:
    TQDMProgressBar progress.rich_progress: RichProgressBar model_summary: ModelSummary rich_model_summary:
    RichModelSummary gradient_accumulation_scheduler: GradientAccumulationScheduler stochastic_weight_avg:
    StochasticWeightAveraging weight_averaging: WeightAveraging EMAWeightAveraging finetuning: BaseFinetuning
    BackboneFinetuning lambda_function: LambdaCallback prediction_writer: BasePredictionWriter pruning: ModelPruning
    quantization: QuantizationAwareTraining timer: Timer xla_stats_monitor: XLAStatsMonitor throughput_monitor:
    ThroughputMonitor spike: SpikeDetection batch_size_finder: BatchSizeFinder lr_finder: LearningRateFinder callback:
    Callback
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
