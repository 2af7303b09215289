"""The files of ranks in a folder: their names, which are missing, what does not fit; and what a file is a part of.

Whether what is taken for a checkpoint is a rank's share, one shard of several or placeholders is decided here, from the
tree (tensors that several ranks share, DeepSpeed's and Megatron's entries), the name of the file and those beside it.
Names alone are believed where only one program writes them; an ordinary file is never called a part for its name.

Source: torch/distributed/tensor and _shard/sharded_tensor (what their pickles hold), deepspeed/runtime/engine.py (names
of files, and `param_shapes`), megatron/training/checkpointing.py (`mp_rank_TT_PPP`), huggingface_hub/serialization
(names of shards), verl and accelerate (`_world_size_W_rank_R`), nanotron/serialize (`…_tp-rank-0-of-2`), torchtune's
training/checkpointing (`hf_model_0001_0.pt`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from math import isfinite, prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, PartKind, PartOf, Tensor, TensorEntry
from ckptool.checkpoint.dtypes import has_numbers
from ckptool.checkpoint.files import Folder, Source, json_or_none
from ckptool.checkpoint.graph import structural_parts, visit
from ckptool.checkpoint.nodes import Global, Object, fields, items
from ckptool.checkpoint.paths import absolute, is_url
from ckptool.checkpoint.tree import is_meta
from ckptool.commands import NAME, OUT, command, input_of
from ckptool.errors import CkptoolError, Conflict, Corrupt, OnlyAPart, counted, listed, printable
from ckptool.facts import replace
from ckptool.formats.marks import OTHER_TAGS, noted

MAX_TABLE = 100_000_000  # bytes of an index or another table
MOST_NAMED = 1_000  # missing ranks: a number in a file may claim any world size
_COPY = "Copy or download {} again, or take another checkpoint."


# Names ---------------------------------------------------------------------------------------------------------------


class NamePattern:
    """A pattern of file names. It is compiled when a name has `mark` in it, which most names never have."""

    def __init__(self, mark: str, pattern: str) -> None:
        self.mark, self.pattern = mark, pattern

    def fullmatch(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(self.pattern, name) if self.mark in name else None


# Of a Trainer's checkpoint; of a model; of an adapter of PEFT's.
STATE, CONFIG, ADAPTER = "trainer_state.json", "config.json", "adapter_config.json"
# Of shards, and the index that says which tensor is in which.
NUMBERED = NamePattern("-of-", r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.[A-Za-z]+)")
_OF_A_SHARD = NamePattern("-of-", r".+-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})[^.]*\.[A-Za-z]+")  # `…_old.bin`, too
INDEX = NamePattern(".index.", r".+\.(?:safetensors|bin)\.index(?:\.[A-Za-z0-9_-]+)?\.json")
# Of what each rank saved: DeepSpeed's shares, model and layers; FSDP's; Megatron's folders; Llama's files.
STATES = NamePattern(
    "zero_pp_rank_",
    r"(?P<set>(?:bf16_|fp16_)?zero_pp_rank_)(?P<rank>\d+)_mp_rank_(?P<rest>[\d_]+(?:optim|model)_states)\.pt",
)
MODEL_STATES = NamePattern("_model_states.pt", r"(?P<set>)mp_rank_(?P<rank>\d+)(?P<rest>(?:_\d+)*_model_states)\.pt")
LAYER = NamePattern(
    "model_states.pt", r"layer_(?P<layer>\d+)(?:_expert_(?P<expert>\d+))?(?:-model|_mp_rank)_[\d_-]*model_states\.pt"
)
OF_WORLD = NamePattern(
    "_world_size_", r"(?P<set>.+_world_size_(?P<world>\d{1,6})_rank_)(?P<rank>\d{1,6})(?P<rest>)\.pt"
)
FSDP_RANKS = NamePattern(
    "_rank", r"(?P<set>(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank)(?P<rank>\d{1,6})(?P<rest>)\.bin"
)
PIECES = NamePattern("shard-", r"(?P<set>shard-)(?P<rank>\d{5})-(?P<rest>model-\d{5}-of-\d{5})\.safetensors")
MODEL_PARALLEL = NamePattern("mp_rank_", r"(?P<set>mp_rank_)(?P<rank>\d\d)(?P<rest>(?:_\d\d\d){0,2})")
NANOTRON = NamePattern("-of-", r"(?:.+_)?[pt]p-(?:rank-)?\d+-of-\d+(?:_[a-z]+-(?:rank-)?\d+-of-\d+)+\.[a-z]+")
TORCHTUNE = NamePattern("hf_model_", r"hf_model_(?P<number>\d{4})_(?P<epoch>\d+)\.(?:pt|safetensors)")
CONSOLIDATED = NamePattern("consolidated.", r"(?P<set>consolidated\.)(?P<rank>\d\d)(?P<rest>\.(?:pth|pt|safetensors))")


# What copying, downloading and syncing programs make of a name that is taken.
_OF_A_COPY = re.compile(
    r"(?:copy of )?(?P<stem>.+?)(?: ?\([^()]{1,60}\)| - copy(?: \(\d+\))?| copy(?: \d+)?|\.sync-conflict-[\w-]+)?"
    r"(?P<suffix>\.[a-z]+)"
)


def plain_name(name: str) -> str:
    """The name in small letters, without what is added to that of a copy: `optimizer (1).pt` and `OPTIMIZER.PT` hold
    what `optimizer.pt` does."""
    lowered = name.lower()
    may_be = any(mark in lowered for mark in ("(", "copy", ".sync-"))  # of tens of thousands, as a rule none
    match = _OF_A_COPY.fullmatch(lowered) if may_be else None
    return match["stem"] + match["suffix"] if match else lowered


# What programs call what they have not finished, or hide.
_UNFINISHED = re.compile(r"tmp[-_].*|\..+|.+\.(?:tmp|part|partial|incomplete)")


def is_set_aside(path: str) -> bool:
    """True for the path in a folder of what is not finished or hidden, or a copy."""
    *folders, name = path.split(os.sep)
    return any(map(_UNFINISHED.fullmatch, (*folders, name))) or plain_name(name) != name.lower()


def without_copies(names: Collection[str]) -> list[str]:
    """The names without those of copies of others among them, which no program reads."""
    lowered = {name.lower() for name in names}
    return [name for name in names if plain_name(name) == name.lower() or plain_name(name) not in lowered]


def renamed(names: Collection[str], pattern: NamePattern) -> list[str]:
    """The names of this pattern that are missing among others, where the file is there under the name of a copy."""
    absent = sorted({plain_name(name) for name in names}.difference(names))
    return [name for name in absent if pattern.fullmatch(name)]


def names_in(folder: str) -> list[str]:
    """The names in a folder, sorted; none where it cannot be read."""
    try:
        return Folder(folder).names
    except CkptoolError:
        return []


def is_in(folder: str, name: str) -> bool:
    """True if a folder has something of this name; one at a URL is listed for it, others may be very long."""
    return name in names_in(folder) if is_url(folder) else os.path.lexists(os.path.join(folder, name))


def json_in(folder: str, name: str) -> dict[str, Any]:
    """The JSON object in a file of a folder: an index, a configuration; empty where there is none that can be read."""
    return fields(json_or_none(os.path.join(folder, name), MAX_TABLE))


def led_elsewhere(folder: str, names: Iterable[str]) -> dict[str, str]:
    """The files of a folder that are links to files outside of it (except the `blobs` of a hub's cache), and where each
    leads."""
    root = os.path.realpath(folder)
    cache = os.path.join(root.partition(f"{os.sep}snapshots{os.sep}")[0], "blobs")
    real = {name: os.path.realpath(os.path.join(root, name)) for name in names}
    return {name: place for name, place in real.items() if not place.startswith((root + os.sep, cache + os.sep))}


def missing_names(names: Iterable[str], pattern: NamePattern, world: int = 0) -> list[str]:
    """The names that are missing in sets of ranks: up to the highest rank, or the size of the world where it is
    known."""
    sets: dict[tuple[str, str], dict[int, re.Match[str]]] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        sets.setdefault((match["set"], match["rest"]), {})[int(match["rank"])] = match
        world = max(world, int(match["rank"]) + 1, int(match.groupdict().get("world") or 0))
    missing: list[str] = []
    for ranks in sets.values():
        example = next(iter(ranks.values()))
        name, (start, end) = example.string, example.span("rank")
        width = end - start if name[start] == "0" else 1
        absent = (rank for rank in range(world) if rank not in ranks)
        # Names are made up as easily as numbers in them.
        for rank in islice(absent, 10 * MOST_NAMED - len(missing)):
            missing.append(f"{name[:start]}{rank:0{width}}{name[end:]}")
    return missing


def refuse_renamed(checkpoint: Checkpoint) -> None:
    """Raises `Conflict` for a file of one rank, layer or expert that was saved under the name of another.

    torch names the root folder of a zip after the file that it writes, and nothing else in a share of ZeRO says which
    rank's it is.
    """
    source, root = checkpoint.source, getattr(checkpoint.origin, "root", "").strip("/")
    if not root or not isinstance(source, Source):
        return
    name = os.path.basename(source.path)
    saved = root + os.path.splitext(name)[1]
    for pattern in (STATES, MODEL_STATES, LAYER, OF_WORLD, FSDP_RANKS):
        if name != saved and pattern.fullmatch(name) and pattern.fullmatch(saved):
            raise another_run(source, f"it was saved as {saved}")


# What does not fit together -------------------------------------------------------------------------------------------


def number_in(value: Any) -> float | None:
    """A finite number that was saved as such, or in a tensor of one element; None for anything else."""
    if isinstance(value, TensorEntry) and value.numel == 1 and has_numbers(value.dtype):
        value = value.numpy().item()
    return value if type(value) is int or (type(value) is float and isfinite(value)) else None


def missing_ranks(present: Collection[int], world: int) -> list[int]:
    """The ranks below `world` that are not there, at most 1,000 of them."""
    return list(islice((rank for rank in range(world) if rank not in present), MOST_NAMED))


def complete(folder: Folder, ranks: Collection[int], world: int, file: str) -> None:
    """Raises `Corrupt` for ranks of this world that have no file, `Conflict` for files of ranks beyond it. file: the
    one that says how many there are."""
    if beyond := [f"rank {rank:,}" for rank in sorted(ranks) if rank >= world]:
        what = f"{folder} has files of {counted(len(beyond), 'rank')} in excess of the {world:,} by {file}"
        why = "They are left over from a larger world, and may be from another step."
        raise Conflict(f"{what}: {listed(beyond, 3)}", why, "Copy only the files of this checkpoint elsewhere.")
    if missing := [f"rank {rank:,}" for rank in missing_ranks(ranks, world)]:
        raise lacks(folder, f"the files of {counted(world - len(ranks), 'rank')} of {world:,}", missing)


def lacks(where: object, what: str, names: Iterable[str] = ()) -> Corrupt:
    """The error for files that are missing. names: theirs."""
    shown = listed(list(names), 3)
    why = "Only all of its files together are a checkpoint."
    return Corrupt(f"{where} lacks {what}{shown and ': '}{shown}", why, _COPY.format("what is missing"))


def mixed(where: object, one: str, other: str, what: str) -> Conflict:
    """The error for two files of one folder that are not of one checkpoint."""
    return Conflict(
        f"{where}: {one} and {other} come from two checkpoints: {what}",
        "The folder has files of another step or run; joined, they would be a model that never existed.",
        "Copy the folder again into an empty one, or take another checkpoint.",
    )


def another_run(where: object, what: str) -> Conflict:
    """The error for what the files of all ranks should agree on, and do not."""
    why = "A file is missing, was renamed or changed, or comes from another step or run."
    return Conflict(f"{where}: {what}", why, "Copy all of the files again, each under its own name.")


def damaged(where: object, what: str) -> Corrupt:
    """The error for a file that is not what its name or its table says."""
    why = "It was damaged, is of another checkpoint, or another program wrote it."
    return Corrupt(f"{where}: {what}", why, _COPY.format("the whole folder"))


def one_of(folder: Folder, inner: Folder, names: Iterable[str], read: Callable[[Folder], Checkpoint]) -> Checkpoint:
    """The checkpoint as which the folder of a run is read, and a note on the others. names: those of all in it."""
    checkpoint, name = read(inner), os.path.basename(inner.path)
    folder.adopt(name, inner)
    others = (other for other in names if other != name)
    notes = noted(OTHER_TAGS, others, "other checkpoint is", "other checkpoints are", f"beside {name}, which was read")
    return replace(checkpoint, source=folder, notes=(*checkpoint.notes, *notes))


# What a file is a part of --------------------------------------------------------------------------------------------

CODE, MEMBERS = "part", "members"  # of the notes
FOLDER = "folder"  # of `Checkpoint.kept`: the path of the folder that was named

_RANK_IN_NAME = NamePattern("rank", r"(?s)(?:.*?[-_.])?rank[-_]?(?P<rank>\d{1,6})(?!\d).*")
_NUMBERS = re.compile(r"\d+")

_SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None), TensorEntry, Global})
_NO_VALUES = "weights without values"
_ONE_OF_SEVERAL = "model parallelism shards the weights over several files, and this is one of them"


def as_part(checkpoint: Checkpoint) -> PartOf | None:
    """What a file is a part of, by its tree, its name and what lies beside it, the surest first; None for a whole
    checkpoint."""
    source = checkpoint.source
    # A folder was put together by its index or table; an index or table that is named itself stands for its folder.
    path = "" if source is None or isinstance(source, Folder) else source.path  # empty: it has no name
    tree, facts, folder = checkpoint.tree, _TreeFacts(checkpoint.tree), os.path.dirname(path)
    name = plain_name(os.path.basename(path))
    top = tree if isinstance(tree, dict) else {}
    # A rank's share of tensors that several ranks hold.
    world_match = OF_WORLD.fullmatch(name)
    rank_match = world_match or _RANK_IN_NAME.fullmatch(os.path.splitext(name)[0])
    rank = int(rank_match["rank"]) if rank_match else facts.rank
    world = int(world_match["world"]) if world_match else facts.world
    if facts.shared:
        which = "all of its tensors are" if facts.shared == facts.tensors else f"{facts.shared:,} of its tensors are"
        what = "shared with other ranks; only this rank's values are here, while shapes are those of the whole"
        similar = [_NUMBERS.sub("#", file) for file in _beside(path)].count(_NUMBERS.sub("#", name))
        whole = (folder or ".") if rank_match and world and similar >= world else ""
        return replace(_ranked(rank, world, f"{which} {what}"), whole=whole)
    if facts.flat or (world_match and world is not None and world > 1):
        what = "its parameters are flattened the way FSDP keeps them, without those of the other ranks"
        return _ranked(rank, world, what if facts.flat else "the other ranks have files of their own")
    # A file of DeepSpeed's: a rank's share of the optimizer, or weights whose values are in those.
    states_match = STATES.fullmatch(name)
    rank, optimizer = int(states_match["rank"]) if states_match else None, fields(top.get("optimizer_state_dict"))
    if (states_match and "optim" in states_match["rest"]) or "partition_count" in optimizer:
        count = optimizer.get("partition_count")  # the number of partitions, or those for each group of parameters
        world = max((n for n in items(count) or [count] if type(n) is int), default=None)
        what = "one rank's share of the optimizer's state and of the f32 weights under ZeRO"
        return _ranked(rank, world, f"{what}; the model is in all files together")
    if "param_shapes" in top and isinstance(source, Folder):
        return None  # what is empty there has no elements
    if "param_shapes" in top and facts.empty:
        world = top["dp_world_size"] if type(top.get("dp_world_size")) is int else None
        what = f"{facts.empty:,} of its weights are placeholders (shape [0])"
        part = _ranked(rank, world, f"{what}: their values are in the *_optim_states.pt files", PartKind.PLACEHOLDERS)
        return part if states_match else replace(part, label=_NO_VALUES)
    if states_match:
        return _ranked(rank, None, "one file of a ZeRO checkpoint, which consists of all of them")
    if NANOTRON.fullmatch(name):
        what = "each rank saves its piece of each parameter, and of the optimizer, to a file of its own"
        return PartOf(PartKind.RANK, "one file of nanotron's", what)
    if divided := TORCHTUNE.fullmatch(name):
        matches = filter(None, map(TORCHTUNE.fullmatch, _beside(path)))
        nth, last = int(divided["number"]), max(int(m["number"]) for m in matches if m["epoch"] == divided["epoch"])
        if last > 1:
            what = "torchtune divides a model over these files"
            return PartOf(PartKind.SHARD, f"shard {nth:,} of {last:,}", what, nth, last)
    if layer := LAYER.fullmatch(name):
        label = f"layer {int(layer['layer'])}" + (f", expert {int(layer['expert'])}" if layer["expert"] else "")
        what = "DeepSpeed saves each layer of a pipeline, and each expert, to a file of its own"
        return PartOf(PartKind.SHARD, label, what)
    # One of the files over which tensor and pipeline parallelism divide a model (Megatron, DeepSpeed, Llama).
    args = top.get("args") if "model" in top else None  # Megatron's say over how many files it is divided
    settings = args.attributes if isinstance(args, Object) else {}
    sizes = [settings.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    world = prod(size for size in sizes if type(size) is int and size > 0)
    rank_folder = os.path.dirname(absolute(path)) if path else ""  # Megatron has a folder for each rank
    for pattern, place, of_rank, stated in (
        (MODEL_STATES, path, name, top.get("mp_world_size")),
        (CONSOLIDATED, path, name, None),
        (MODEL_PARALLEL, rank_folder, os.path.basename(rank_folder), world),
    ):
        if match := pattern.fullmatch(of_rank):
            text = match["rank"] + (match["rest"] if pattern is MODEL_PARALLEL else "")
            number = int(text) if "_" not in text else None
            siblings = sum(pattern.fullmatch(file) is not None for file in _beside(place))
            count = max(siblings, stated if type(stated) is int else 1, (number or 0) + 1)
            label = f"rank {text.replace('_', '/') if number is None else number} of {count:,}"
            if count > 1:
                return PartOf(PartKind.RANK, label, _ONE_OF_SEVERAL, number, count)
    if world > 1:
        return _ranked(None, world, _ONE_OF_SEVERAL)
    if "DCP_SHARDING_INFO" in checkpoint.metadata:  # as `HuggingFaceStorageWriter(save_distributed=True)` writes it
        piece, ranks = PIECES.fullmatch(name), {m["rank"] for m in map(PIECES.fullmatch, _beside(path)) if m}
        what = "its tensors are pieces of larger ones, whose other pieces are in the files of the other ranks"
        return _ranked(int(piece["rank"]) - 1 if piece else None, len(ranks) or None, what)
    are_tensors = isinstance(tree, dict) and all(isinstance(value, (TensorEntry, Composite)) for value in top.values())
    if are_tensors and (shard := _shard(folder, name)) is not None:
        return shard
    if facts.empty > 1 and 2 * facts.empty >= facts.weights:
        what = f"{facts.empty:,} of {counted(facts.weights, 'weight')} are placeholders (shape [0])"
        return PartOf(PartKind.PLACEHOLDERS, _NO_VALUES, f"{what}, as ZeRO stage 3 saves ungathered weights")
    if facts.meta:
        what = f"{facts.meta:,} of {counted(facts.weights, 'weight')} have a shape but no values"
        why = "they were saved from the meta device, where offloaded and empty models have theirs"
        return PartOf(PartKind.PLACEHOLDERS, _NO_VALUES, f"{what}: {why}")
    return None


def _shard(folder: str, name: str) -> PartOf | None:
    """The shard that a file of this plain name is: an index names it, or its own name numbers it among several; None
    for neither."""
    numbered = _OF_A_SHARD.fullmatch(name)
    number, count = (int(numbered["number"]), int(numbered["count"])) if numbered else (0, 0)
    whole, index = "", ""
    # On another machine, each listing is a request.
    siblings = _beside(os.path.join(folder, name)) if numbered or not is_url(folder) else ()
    indexes = list(filter(INDEX.fullmatch, siblings))
    evidence = "its name says so" if indexes else "the index of the set is not beside it"
    for sibling in indexes:
        table = json_in(folder, sibling).get("weight_map")
        files = sorted({plain_name(file) for file in fields(table).values() if type(file) is str})
        if name in files:
            number, count, whole, index = files.index(name) + 1, len(files), folder or ".", sibling
            evidence = f"{printable(index)} says which tensors are in which"
            break
    if 1 <= number <= count > 1:
        what = f"it has some of the model's tensors, the other files the rest; {evidence}"
        return PartOf(PartKind.SHARD, f"shard {number:,} of {count:,}", what, number, count, whole, index)
    return None


def _beside(path: str) -> list[str]:
    """The names in the folder of a file; none for an empty path."""
    return names_in(os.path.dirname(path) or ".") if path else []


class _TreeFacts:
    """Counts of a tree.

    tensors: those of torch.distributed; shared: those of them that are only a rank's share.  rank, world: as they say.
    flat: parameters are flattened.  empty: the empty weights of the dictionary with most of them, or `meta`: those on
    that device; weights: all of its weights.
    """

    def __init__(self, tree: Any) -> None:
        self.tensors = self.shared = self.empty = self.meta = self.weights = 0
        self.rank: int | None = None
        self.world: int | None = None
        self.flat = False
        for node in visit(tree, _with_parts):
            if type(node) is Composite:
                from ckptool.formats.distributed import distributed  # which few files need

                if (tensor := distributed(node)) is not None:
                    rank, world = tensor.rank, tensor.world
                    self.tensors += 1
                    self.shared += not tensor.is_whole
                    self.rank = rank if self.rank is None and type(rank) is int and rank >= 0 else self.rank
                    self.world = world if self.world is None and type(world) is int and world > 0 else self.world
            elif isinstance(node, dict):
                named = {key: value for key, value in node.items() if isinstance(value, Tensor) and type(key) is str}
                weights = [value for key, value in named.items() if key.rpartition(".")[2] in ("weight", "bias")]
                empty = sum(value.shape == (0,) for value in weights)
                meta = sum(type(value) is Composite and is_meta(value) for value in weights)
                flat = [key for key in named if "flat_param" in key]
                self.flat |= any(is_flat_parameter(key) for key in flat if type(named[key]) is TensorEntry)
                if empty > self.empty or meta > self.meta:
                    self.empty, self.meta, self.weights = empty, meta, len(weights)


def _with_parts(node: Any) -> list[Any]:
    """The parts of a node that have parts themselves, without its keys; none of a tensor of torch.distributed."""
    if isinstance(node, Object):
        parts: Iterable[Any] = (node.args, node.items, node.elements, node.state)
    else:
        parts = node.values() if isinstance(node, dict) else () if type(node) is Composite else structural_parts(node)
    return [part for part in parts if type(part) not in _SCALARS]


def is_flat_parameter(key: Any) -> bool:
    """True for the name of the vector that FSDP keeps the parameters of a module in."""
    return type(key) is str and key.rpartition(".")[2].lstrip("_").startswith("flat_param")


def _ranked(rank: int | None, world: int | None, meaning: str, kind: PartKind = PartKind.RANK) -> PartOf:
    label = "one rank" if rank is None else f"rank {rank:,}"
    label = label + f" of {world:,}" if world is not None else label if rank is not None else "what one rank saved"
    return PartOf(kind, label, meaning, rank, world)


def refuse_placeholders(checkpoint: Checkpoint, names: Iterable[tuple[str, Any]]) -> None:
    """Raises `OnlyAPart` for tensors to be written by themselves whose values are elsewhere."""
    part = checkpoint.part
    is_joined = part is not None and part.kind is PartKind.MEMBERS and checkpoint.container != "folder"
    if part is None or part.kind is PartKind.SHARD or is_joined:
        return
    pairs = [(name, value) for name, value in names if isinstance(value, Tensor)]
    empty = [name for name, value in pairs if is_meta(value)]
    empty = empty or [name for name, value in pairs if isinstance(value, TensorEntry) and value.shape == (0,)]
    if empty:
        what = f"{checkpoint.source or 'the checkpoint'}: {len(empty):,} of the tensors have no values in it"
        why = f"It is {part.label}; on their own, empty tensors would pass for weights. Nothing was written."
        fix = f"Drop them: {command('edit', input_of(checkpoint.source), drop=NAME, out=OUT)}"
        if checkpoint.source is None:
            fix = "Load or gather their values first, as with deepspeed.zero.GatheredParameters(model.parameters())"
        raise OnlyAPart(f"{what}: {listed(empty, 3)}", why, fix)
