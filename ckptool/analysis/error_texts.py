"""The error messages that people search for, what each means, and what fixes it.

Texts of torch 0.4 to 2.13, safetensors, pickle and the systems below them, matched as regular expressions in the order
of this table: the more exact first. A fix is a command; its PREFIX is what the pattern names so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptool.commands import (
    FILE,
    FOLDER,
    MODEL,
    OUT,
    OUT_PT,
    OUT_SAFETENSORS,
    Advice,
    Command,
    Slot,
    command,
)

MAX_TEXT = 100_000  # characters of a message that are looked at


@dataclass(frozen=True, slots=True)
class KnownError:
    """pattern: of the message.  code: as in notes and errors.  meaning: what is wrong.  fixes: commands, in order.

    advice: what to do where no command does it.  certain: not only the likely meaning.
    """

    pattern: re.Pattern[str]
    code: str
    meaning: str
    fixes: tuple[Command, ...] = ()
    advice: str = ""
    certain: bool = True

    def found(self, text: str) -> dict[str, str]:
        """The pattern's named groups in a message, by the names of the slots that they fill: `PREFIX`."""
        match = self.pattern.search(text[:MAX_TEXT])
        return {name.upper(): value for name, value in match.groupdict().items() if value} if match else {}


def _known(pattern: str, code: str, meaning: str, *fixes: Command, advice: str = "") -> KnownError:
    return KnownError(re.compile(pattern, re.IGNORECASE), code, meaning, fixes, advice)


def _likely(pattern: str, code: str, meaning: str, *fixes: Command, advice: str = "") -> KnownError:
    return KnownError(re.compile(pattern, re.IGNORECASE), code, meaning, fixes, advice, certain=False)


_STRIP = command("strip-module", FILE, out=OUT)
_ADD = command("add-module", FILE, out=OUT)
_CPU = command("remap", FILE, to="cpu", out=OUT)
_PLAIN = command("convert", FILE, weights_only=True, out=OUT)
_INSPECT = command("inspect", FILE)
_WEIGHTS = command("convert", FILE, out=OUT_SAFETENSORS)
_ANEW = command("convert", FILE, out=OUT)
_RECOVER = command("recover", FILE, out=OUT)
_DOCTOR = command("doctor", FILE)
_SCAN = command("scan", FILE)
_VERIFY = command("verify", FILE)
_LATEST = command("scan", FOLDER, latest_good=True)
_FIRST_MISSING = r"\A(?:(?!missing key)(?s:.))*missing key\(s\) in state_dict:\s*"  # once, however often it is there
_MODEL = "MODEL is a checkpoint of your model, or your own code: model.py:build"

KNOWN: tuple[KnownError, ...] = (
    _known(
        _FIRST_MISSING + r"[\"']module\.(?!(?s:.*)unexpected key\(s\) in state_dict:\s*[\"']module\.)",
        "prefix-module",
        "The model is wrapped in DataParallel or DistributedDataParallel, and the file was saved without the wrapper.",
        _ADD,
        advice="Or load it before the wrapping, or into model.module.",
    ),
    _known(
        r"(unexpected|missing) key\(s\) in state_dict:[^\n]*[\"']module\.(?s:.*)",
        "prefix-module",
        "One side was wrapped in DataParallel or DistributedDataParallel: its keys begin with module. and those of "
        "the other do not.",
        _STRIP,
        advice=Advice("Where the model is the one that is wrapped: ", _ADD),
    ),
    _known(
        r"(unexpected|missing) key\(s\) in state_dict:[^\n]*_orig_mod\.",
        "prefix-compiled",
        "The weights were saved from a model that torch.compile had wrapped.",
        _STRIP,
    ),
    _known(
        r"unexpected key\(s\) in state_dict:[^\n]*[\"'](epoch|optimizer\w*|state_dict|model_state_dict|model|step|"
        r"global_step)[\"']",
        "nested-weights",
        "The file is a whole training checkpoint, and the weights are one entry of it.",
        _INSPECT,
        _WEIGHTS,
        advice="Or in Python: model.load_state_dict(checkpoint['state_dict']), with the name that inspect shows.",
    ),
    _known(
        _FIRST_MISSING + r"[\"']([^\"']+)[\"'](?s:.*?)"
        r"unexpected key\(s\) in state_dict:\s*[\"'](?P<prefix>[\w.]{1,200}\.)\1[\"']",
        "prefix",
        "The keys of the file have a prefix that those of the model do not have; Lightning, for one, saves a model "
        "inside another.",
        command("strip-module", FILE, prefix=Slot("PREFIX"), out=OUT),
    ),
    _known(
        r"size mismatch for |copying a param with shape|Trying to set a tensor of shape|ignore_mismatched_sizes",
        "shape-mismatch",
        "A tensor of the file has another shape than the model's: another architecture, number of classes or "
        "vocabulary.",
        command("warm-start", FILE, against=MODEL, on_mismatch="skip", out=OUT),
        advice=f"It takes what fits and the model's own values for the rest. {_MODEL}.",
    ),
    _known(
        r"error\(s\) in loading state_dict|(missing|unexpected) key\(s\) in state_dict|_IncompatibleKeys",
        "keys-differ",
        "The names of the file and of the model differ.",
        command("warm-start", FILE, against=MODEL),
        advice=f"It shows what fits, and rules for the rest. {_MODEL}.",
    ),
    _likely(
        r"(cuda|hip|mps|xpu)\b.{0,40}out of memory",
        "gpu-memory",
        "The GPU is full: with the model, the batch or another process. If torch.load is in the traceback, it was "
        "putting the tensors back on the GPU that they were saved from.",
        _INSPECT,
        advice="On an NVIDIA GPU, nvidia-smi shows what fills it. For torch.load: map_location='cpu'.",
    ),
    _likely(
        r"Torch not compiled with CUDA|MPS backend|(mps|xpu|hpu|npu) .*(not available|is not (built|compiled))",
        "device-location",
        "Tensors are tagged with a device that this torch does not know, or the code asks for that device itself.",
        _CPU,
        advice="ckptool inspect FILE shows the tags; if there are none, your code asks: a .to(device) or .cuda().",
    ),
    _known(
        r"attempting to deserialize object on (a )?cuda device|cuda device \d+ but torch\.cuda\.device_count",
        "cuda-location",
        "The tensors are tagged with a GPU that this machine does not have.",
        _CPU,
        advice="Or load with map_location='cpu'. For another GPU: --to cuda:0.",
    ),
    _known(
        r"don't know how to (restore|determine) (data )?location|storage device not recognized",
        "device-location",
        "The tensors are tagged with a device that this torch does not know.",
        _CPU,
    ),
    _known(
        r"TorchScript archives|torch\.jit\.load|looks like a TorchScript archive",
        "torchscript",
        "The file is a TorchScript archive: a program with its tensors.",
        _WEIGHTS,
    ),
    _known(
        r"No module named ['\"]numpy\._core|numpy\.core\.multiarray|numpy\._core\.multiarray|numpy\.dtypes?|"
        r"numpy\.\w*dtype",
        "numpy-values",
        "Numpy numbers or arrays were saved beside the weights; their names changed between numpy 1 and 2, and "
        "weights_only refuses them.",
        _PLAIN,
    ),
    _known(
        r"dict-like, got <class ['\"](list|tuple)|['\"](list|tuple)['\"] object has no attribute ['\"](items|keys|"
        r"copy|get)",
        "nested-weights",
        "The file is a list, of several models or of tensors, and not a state dict.",
        _INSPECT,
        advice="It shows what is in the list; in Python: model.load_state_dict(loaded[0]) for the first.",
    ),
    _known(
        r"dict-like, got <class ['\"](torch\.\w*Tensor|torch\.nn\.parameter|NoneType|int|float|str|numpy)",
        "no-weights",
        "The file is not a state dict: a single tensor, or another value.",
        _INSPECT,
    ),
    _known(
        r"expected torch\.Tensor or Tensor-like object from checkpoint but received",
        "not-a-tensor",
        "An entry of the state dict is not a tensor: a list, a number or an array was saved in its place.",
        _INSPECT,
        _DOCTOR,
    ),
    _known(
        r"not in a subdirectory: \S+\.npy|invalid load key,? ['\"]?\\x93",
        "numpy-archive",
        "The file is numpy's (.npz, .npy), which torch.load does not read.",
        command("convert", FILE, out=OUT_PT),
    ),
    _likely(
        r"dict-like, got <class|has no attribute ['\"](copy|keys|items)['\"]$|"
        r"got an? (unexpected )?\S*Module.{0,20} instead of a state",
        "whole-module",
        "The file is a whole model, not its state dict: torch.load gave the model itself.",
        _WEIGHTS,
        advice="Or in Python: model.load_state_dict(loaded.state_dict()).",
    ),
    _likely(
        r"dict['\"] object has no attribute ['\"](eval|train|to|cuda|cpu|half|float|parameters|forward|modules|"
        r"module|state_dict)\b|"
        r"dict['\"] object is not callable",
        "state-dict",
        "The file is a state dict, not a whole model: create the model first.",
        _INSPECT,
        advice="In Python: model = Net(); model.load_state_dict(torch.load(FILE)).",
    ),
    _likely(
        r"KeyError: ['\"](\w*state_dict|model|net|weights|params|ema\w*|generator|[GD]|optimizer\w*|epoch|"
        r"\w*step)['\"]",
        "no-such-entry",
        "The code asks for an entry that the file does not have.",
        _INSPECT,
        advice="It shows which entries there are.",
    ),
    _likely(
        r"UnicodeDecodeError|encoding=['\"]latin1",
        "python-2",
        "Python 2 wrote the file; its texts are bytes.",
        _ANEW,
        advice="Or load with encoding='latin1'.",
    ),
    _likely(
        r"No module named|Can't get attribute|has no attribute ['\"]\w+['\"] on <module|SourceChangeWarning|"
        r"ModuleNotFoundError",
        "whole-module",
        "The file holds objects of classes that are not installed here: a whole model was saved, or a "
        "configuration object.",
        _WEIGHTS,
        _PLAIN,
    ),
    _known(
        r"Unsupported operand (118|60|10|123|80|31|53|66|37|137)\b|invalid load key,? ['\"]?(v|<|\{|\\x1f|\\n|P)",
        "not-a-checkpoint",
        "The file is not a checkpoint: a git-lfs pointer, a web page, a JSON text or a compressed file under its name.",
        _DOCTOR,
        advice="It says which of them.",
    ),
    _known(
        r"invalid load key,? ['\"]?(\\x00|\x00)",
        "corrupt",
        "The file begins with zeros: a crash or a lost connection left a file of the right length without its "
        "contents.",
        _DOCTOR,
        advice="Copy or download it again.",
    ),
    _known(
        r"invalid load key|Memo value not found|pickle data was truncated|unpickling stack underflow|"
        r"could not find MARK",
        "corrupt",
        "This is not a pickle, or a damaged one; pickle.load says so of every torch file, which takes torch.load.",
        _DOCTOR,
    ),
    _known(
        r"Unable to load weights from (pytorch|safetensors)? ?checkpoint file",
        "not-a-checkpoint",
        "The file is not a checkpoint, or is damaged; transformers does not say which.",
        _DOCTOR,
    ),
    _known(
        r"locating file constants\.pkl|file (in archive )?is not in a subdirectory",
        "not-torchscript",
        "The file is not a TorchScript archive, which torch.jit.load wants.",
        _DOCTOR,
        advice="Files of torch.save are for torch.load.",
    ),
    _known(
        r"locating file \S*data\.pkl|storage has wrong (byte )?size",
        "corrupt",
        "The file is another kind of archive, or was damaged or mixed up while it was written, as by two processes "
        "at once.",
        _VERIFY,
        advice=Advice("Copy it again; else look for the newest intact one: ", _LATEST),
    ),
    _known(
        r"Unsupported operand (149|14[0-8]|150)\b|Detected pickle protocol",
        "pickle-protocol",
        "The pickle was written with protocol 4 or 5, which weights_only does not read.",
        _ANEW,
    ),
    _known(
        r"legacy \.tar format|filename ['\"]?(storages|tensors|pickle)['\"]? not found",
        "legacy-tar",
        "The file is a tar archive: of torch before 0.1.10, or one that a checkpoint was packed in.",
        _DOCTOR,
        advice="It says which, and what to type.",
    ),
    _known(
        r"Unsupported operand \d+",
        "not-a-checkpoint",
        "The file is none of torch.save's: safetensors or another container under its name, or damaged at its "
        "beginning.",
        _DOCTOR,
        advice="It says what the file is.",
    ),
    _known(
        r"mmap can only be used|mmap.*_use_new_zipfile_serialization",
        "legacy-format",
        "The file is of torch before 1.6, or was saved in its format, which cannot be mapped.",
        _ANEW,
    ),
    _known(
        r"Weights only load failed|weights_only|Unsupported global|UnpicklingError.*global",
        "weights-only",
        "The file calls functions or holds classes that weights_only does not allow; scan says whether they would run "
        "unknown code.",
        _SCAN,
        _PLAIN,
    ),
    _known(
        r"unexpected EOF|unexpected pos \d+ vs \d+",
        "truncated",
        "The file ends too early, or is damaged: an interrupted download, a full disk, a killed save.",
        _DOCTOR,
        advice="It says how much is missing. Copy or download the file again.",
    ),
    _known(
        r"failed finding central directory|not a ZIP archive|PytorchStreamReader failed|"
        r"invalid header or archive is corrupted|"
        r"central directory|BadZipFile|file might be corrupted|MetadataIncompleteBuffer|incomplete metadata|"
        r"failed reading file|Truncated",
        "truncated",
        "The file ends too early, or is damaged: an interrupted download, a full disk, a killed save.",
        _RECOVER,
        advice="A new copy is better, where there is one.",
    ),
    _likely(
        r"Ran out of input|file (like )?object .*is empty|EOFError",
        "truncated",
        "The file is empty or ends within its pickle: the save was interrupted, or the disk was full.",
        _DOCTOR,
        advice="Copy or download it again.",
    ),
    _known(
        r"Invalid magic number|corrupt file\?|HeaderTooLarge|InvalidHeader|HeaderTooSmall|"
        r"Error while deserializing header",
        "not-a-checkpoint",
        "The file is of another kind than its name says, or damaged at its beginning.",
        _DOCTOR,
        advice="It says what the file is.",
    ),
    _known(
        r"share memory|shared (tensors|memory)|duplicate memory on disk",
        "shared-tensors",
        "Several names are one tensor (tied weights), which safetensors does not hold by itself; ckptool records "
        "the ties.",
        _WEIGHTS,
    ),
    _known(
        r"parameter group that doesn't match|different number of parameter groups",
        "optimizer-differs",
        "The optimizer state belongs to a model with other parameters.",
        command("slim", FILE, out=OUT),
        advice="Without its optimizer state the checkpoint starts a new optimizer.",
    ),
    _known(
        r"No space left on device|file write failed|PytorchStreamWriter failed|Disk quota exceeded|"
        r"enforce fail at inline_container",
        "disk-full",
        "The save ran out of room; what it left behind is not whole.",
        _VERIFY,
        advice=Advice("Look for the newest intact one: ", _LATEST),
    ),
    _likely(
        r"float8|has no attribute ['\"](bfloat16|uint16|uint32|uint64|float4)",
        "dtype-unknown",
        "The tensors have a dtype that this torch is too old for.",
        command("cast", FILE, dtype="bf16", out=OUT),
    ),
    _known(r"Is a directory|IsADirectoryError", "folder", "A folder was given where a file was expected.", _INSPECT),
    _known(
        r"No such file or directory|FileNotFoundError",
        "io",
        "There is no file of that name.",
        advice="Look at what is there: ls",
    ),
    _known(
        r"Permission denied",
        "io",
        "The permissions of the file or its folder do not allow it.",
        advice="See them: ls -l",
    ),
)


def recognised(text: str) -> KnownError | None:
    """The first entry of the table that matches the beginning of a message."""
    text = text[:MAX_TEXT]
    return next((known for known in KNOWN if known.pattern.search(text)), None)
