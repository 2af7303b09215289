"""`rank-files`: a folder of files that each rank of a run saved for itself with `torch.save`, all of one checkpoint.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py and SkyRL (`model_world_size_W_rank_R.pt`, `optim_…`,
`extra_state_…`), accelerate/utils/fsdp_utils.py 1.15 with `use_dcp=False` (`pytorch_model_fsdp_0_rankR.bin`,
`optimizer_0_rankR.bin`). The tree has an entry for each set: `model`, `optim`, `extra_state`; `model`, `optimizer`.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Folder, Input
from ckptool.commands import OUT, Slot, command
from ckptool.errors import Unsupported, counted
from ckptool.formats.folder import FSDP_RANKS, OF_WORLD, lacks, missing_names, mixed, without_copies
from ckptool.formats.pieces import Joiner
from ckptool.formats.placements import RankFile
from ckptool.formats.rank_trees import joined_trees

NAME = "rank-files"


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and any(OF_WORLD.fullmatch(n) or FSDP_RANKS.fullmatch(n) for n in source.names)


def read(source: Folder) -> Checkpoint:
    """The checkpoint of all ranks. Reads their pickles and directories, no tensor data.

    Tensors that the ranks hold together are whole, plain ones are those of the first rank, compared with the others'.
    A set (other than the model's) that differs and does not say how it is divided stays as it is, each rank's by
    itself. Raises `Conflict` for files of several runs or steps, `Corrupt` for missing files and parts, and
    `Unsupported` for a model that cannot be put together.
    """
    ranks, tree = RankSets(source), dict[str, Any]()
    for name in ranks.sets:
        files, trees = ranks.open(name)
        if any(is_flat_parameter(key) for key in (trees[0] if isinstance(trees[0], dict) else ())):
            raise Unsupported(
                f"{source} holds FSDP's flat parameters (LOCAL_STATE_DICT), one vector for each wrapped module",
                "The files lack the names and shapes of the parameters in it: they alone do not make the model.",
                "Take these from a spec or another checkpoint of the model: "
                f"{command('convert', source.path, against=Slot('SPEC'), out=OUT)}",
            )
        apart = name.startswith(("optim", "extra"))
        tree[name] = joined_trees(ranks.joiner, name, files, trees, apart=apart)
    engine = "accelerate, FSDP with use_dcp=False" if ranks.is_accelerate else "FSDP, one file per rank"
    return ranks.joiner.checkpoint(NAME, tree, engine, ranks.world)


def is_flat_parameter(key: Any) -> bool:
    """True for the name of the vector that FSDP keeps the parameters of a module in."""
    return type(key) is str and key.rpartition(".")[2].lstrip("_").startswith("flat_param")


class RankSets:
    """The files of a folder by set and rank. Raises `Conflict` for files of several world sizes, `Corrupt` where some
    are missing."""

    def __init__(self, folder: Folder) -> None:
        self.joiner = Joiner(folder)
        self.is_accelerate = False
        self._tables: dict[tuple[int, ...], tuple[int, ...]] = {}
        sets: dict[str, dict[int, str]] = {}
        worlds: dict[int, str] = {}
        for name in without_copies(folder.names):
            if match := OF_WORLD.fullmatch(name):
                worlds.setdefault(int(match["world"]), name)
                kind = match["set"].partition("_world_size_")[0]
            elif match := FSDP_RANKS.fullmatch(name):
                self.is_accelerate = True
                stem, _, number = match["set"].removesuffix("_rank").rpartition("_")
                kind = "optimizer" if stem == "optimizer" else "model"
                kind += "" if number in ("0", "fsdp") else f"_{number}"
            else:
                continue
            if (other := sets.setdefault(kind, {}).setdefault(int(match["rank"]), name)) != name:
                raise mixed(folder, name, other, "both belong to one rank")
        if len(worlds) > 1:
            one, other, *_ = worlds.values()
            raise mixed(folder, one, other, "their world sizes differ")
        self.sets = dict(sorted(sets.items(), key=lambda item: not item[0].startswith("model")))
        self.world = max([0, *worlds, *(max(files) + 1 for files in sets.values())])
        names = [*chain(*(files.values() for files in self.sets.values()))]
        missing = [file for pattern in (OF_WORLD, FSDP_RANKS) for file in missing_names(names, pattern, self.world)]
        if missing:
            raise lacks(folder, f"{counted(len(missing), 'file')} of {counted(self.world, 'rank')}", missing)

    def open(self, name: str) -> tuple[list[RankFile], list[Any]]:
        """The files of a set in the order of their ranks, and the tree in each."""
        ranks, folder = sorted(self.sets[name].items()), str(self.joiner.folder)
        files = [RankFile(folder, file, rank, self.world, self._tables) for rank, file in ranks]
        return files, [self.joiner.open(file).tree for _, file in ranks]
