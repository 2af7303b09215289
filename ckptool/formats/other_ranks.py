"""Whether a file is one rank's share, as the files of other ranks show, in programs that no layout knows.

A number behind `rank`, `tp`, `shard` or the like is no proof: ranks save whole copies, too, and LoRA has a rank. So the
file of another rank is opened, whose name or folder differs in such numbers alone: one whose weights have other names,
shapes or values shows that each has its own. Where the name says how many ranks there are, none need be there.

Source: vLLM (`model-rank-0-part-0.safetensors`), TensorRT-LLM (`rank0.safetensors`), DeepSeek's convert.py
(`model0-mp8.safetensors`), fairseq and metaseq (`checkpoint_last-model_part-0-shard0.pt`), fairseq2
(`pp_00/tp_00/sdp_00.pt`), InternEvo (`model_tp0_wp0_pp0.pt`), neuronx-distributed and NeMo 1
(`tp_rank_00_pp_rank_000/`), torch_xla (`rank-00000000-of-00000008`), SageMaker (`model.pt_0_0`), mmengine
(`epoch_1.pth/rank0.pth`), ColossalAI (`pytorch_model-stage-00001-shard-00001.bin`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from ckptool.checkpoint import Checkpoint, PartKind, PartOf, TensorEntry
from ckptool.checkpoint.files import Folder, Input, open_input
from ckptool.checkpoint.paths import absolute
from ckptool.commands import OUT_SAFETENSORS, RULES, command
from ckptool.errors import CkptoolError, FileProblem, NoCheckpointInside, counted, printable
from ckptool.facts import replace
from ckptool.formats.folder import complete, names_in

LEVELS = 3  # of a path in which a rank may be named
SAMPLES, SAMPLE = 32, 1 << 16  # tensors that are compared, and bytes at each end of those without a checksum

_MARKS = "rank", "tp", "pp", "mp", "sdp", "shard", "part", ".pt_"
_NUMBER = r"[-_]?(?:rank[-_]?)?|\.pt_)(\d{1,8}(?:_\d{1,4})*)(?![0-9a-z]|\.[0-9])"
_RANK = r"rank|tp|pp|sdp|shard|model_?part|mp(?!\d+\.s)|model(?=\d+-mp)"
_OF_RANKS = rf"(?i)(?:(?<![a-z])(?:{_RANK}){_NUMBER}"
# Beside one of these, the names of other ranks may differ in others, too.
_NUMBERS = rf"(?i)(?:(?<![a-z])(?:{_RANK}|[cdw]p|wdp|zo|part|stage(?=-\d{{5}}-)){_NUMBER}"
_OF_WORLD = r"(?:.*[-_.])?rank-?(\d{1,8})-of-(\d{1,8})(?!\d).*|model(\d{1,6})-mp(\d{1,6})\.safetensors"


def one_of_ranks(checkpoint: Checkpoint, read: Callable[[Input], Checkpoint]) -> PartOf | None:
    """The part that a file or folder is by its name, or by that of another rank, which is read; None for any other."""
    source = checkpoint.source
    above = absolute(source.path) if source is not None and source.path else ""
    if not any(mark in above.lower() for mark in _MARKS):  # patterns are compiled where they may be found
        return None
    if match := re.fullmatch(_OF_WORLD, os.path.basename(above)):
        rank, count = (int(number) for number in match.groups() if number)
        what = "its name says of how many ranks it is, each of which has weights of its own"
        return PartOf(PartKind.RANK, f"rank {rank:,} of {count:,}", what, rank, count) if count > 1 else None
    below: list[str] = []
    for _ in range(LEVELS):
        above, name = os.path.split(above)
        ranks = _named_alike(above, name) if re.search(_OF_RANKS, name) else {}
        other = next((os.path.join(each, *below) for each in ranks if each != name), "")
        if other and (what := _unlike(checkpoint, os.path.join(above, other), read)):
            columns = [{*column} for column in zip(*ranks.values(), strict=True)]
            telling = [own for own, column in zip(ranks[name], columns, strict=True) if len(column) == len(ranks)]
            number = int(telling[0]) if telling else None
            label = f"one of {counted(len(ranks), 'file')}" if number is None else f"rank {number:,} of {len(ranks):,}"
            part = PartOf(PartKind.RANK, label, what.format(printable(other)), number, len(ranks))
            if below or not ranks_in(Folder(above), name):
                return part
            return replace(part, join=command("convert", above, rules_file=RULES, out=OUT_SAFETENSORS))
        below.insert(0, name)
    return None


def ranks_in(folder: Folder, first: str = "") -> dict[str, tuple[int, int]]:
    """The files in a folder that are named like the first that has a rank in its name, or the one given, but for their
    ranks, each with that in tensor and in pipeline parallelism; none where the names number anything else, too.

    Raises `Corrupt` where they say that some are missing.
    """
    first = first or next((name for name in folder.names if re.search(_OF_RANKS, name)), "")
    ranks = _named_alike(folder.path, first) if first else {}
    marks = [match[0].lower().startswith("pp") for match in re.finditer(_NUMBERS, first)]
    columns = zip(*ranks.values(), strict=True)
    axes = {is_stage: column for is_stage, column in zip(marks, columns, strict=False) if len({*column}) > 1}
    tensor, stage = (map(int, axes.get(is_stage, ("0",) * len(ranks))) for is_stage in (False, True))
    places = dict(zip(ranks, zip(tensor, stage, strict=True), strict=True))
    if world := re.fullmatch(_OF_WORLD, first):
        complete(folder, {rank for rank, _ in places.values()}, int(world[2] or world[4]), first)
    return places if len({*places.values()}) == len(ranks) > 1 else {}


def _named_alike(folder: str, name: str) -> dict[str, tuple[str, ...]]:
    """The names in a folder that differ in the numbers of ranks alone, with these, and this one; none where these do
    not begin at 0, as LoRA's do not; those of shards may begin at 1."""
    places = [match.span(1) for match in re.finditer(_NUMBERS, name)]
    edges = [0, *(edge for place in places for edge in place), len(name)]
    words = (re.escape(name[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True))
    pattern = re.compile(r"(\d{1,8})(?:_\d{1,4})*".join(words))
    matches = [match for match in map(pattern.fullmatch, names_in(folder)) if match]
    least = [min(map(int, column)) for column in zip(*(match.groups() for match in matches), strict=True)]
    return {match[0]: match.groups() for match in matches} if max(least, default=2) <= ("shard" in name) else {}


def _unlike(checkpoint: Checkpoint, path: str, read: Callable[[Input], Checkpoint]) -> str:
    """What shows that another rank's file has other weights than the checkpoint; empty where they are equal, or one has
    none."""
    from ckptool.conventions.state_dicts import find_state_dicts  # which few files need

    try:
        ours, theirs = (
            {root.path: root.node for root in find_state_dicts(each) if root.is_model}
            for each in (checkpoint, read(open_input(path)))
        )
        differ = any(_differ(ours[place], theirs[place]) for place in ours.keys() & theirs.keys())
    except (NoCheckpointInside, FileProblem):  # a folder of logs
        return ""
    except CkptoolError:  # damaged, or not downloaded
        return "{}, which is another rank's, cannot be read: nothing shows whether each has the whole model"
    return "each rank has weights of its own: those in {} differ" if differ else ""


def _differ(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """True for weights that are not the same. Values are those of matrices, if there are any: running means and the
    like differ in copies of one model, too."""
    pairs: list[tuple[Any, Any]] = [
        (each, other.get(name)) for name, each in one.items() if isinstance(each, TensorEntry)
    ]
    if one.keys() != other.keys() or not all(
        isinstance(theirs, TensorEntry) and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        for ours, theirs in pairs
    ):
        return True
    matrices = [pair for pair in pairs if len(pair[0].shape) > 1] or pairs
    return any(_sample(ours) != _sample(theirs) for ours, theirs in matrices[:: 1 + len(matrices) // SAMPLES])


def _sample(entry: TensorEntry) -> object:
    """The checksum of a tensor that is all of its storage; without one, the bytes at both of its ends."""
    if entry.storage.crc is not None and entry.nbytes == entry.storage.nbytes:
        return entry.storage.crc
    if not entry.numel or not entry.shape:
        return entry.bytes()
    count = min(entry.shape[0], 1 + SAMPLE * entry.shape[0] // entry.nbytes)
    return entry.narrow(0, 0, count).bytes(), entry.narrow(0, entry.shape[0] - count, count).bytes()
