"""`rank-files`: a folder of files that each rank of a run saved for itself with `torch.save`, all of one checkpoint.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py and SkyRL (`model_world_size_W_rank_R.pt`, `optim_…`,
`extra_state_…`), accelerate/utils/fsdp_utils.py 1.15 with `use_dcp=False` (`pytorch_model_fsdp_0_rankR.bin`,
`optimizer_0_rankR.bin`). The tree has an entry for each set: `model`, `optim`, `extra_state`; `model`, `optimizer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.files import Folder, Input
from ckptool.commands import OUT, Slot, command
from ckptool.errors import Unsupported, counted, listed
from ckptool.formats.folder import FSDP_RANKS, OF_WORLD, RankFolder, lacks, missing_names, mixed
from ckptool.formats.placements import RankFile
from ckptool.formats.rank_trees import TreeJoiner, not_joinable

NAME = "rank-files"
NOT_JOINED = "not-joined"  # of the note


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and any(OF_WORLD.fullmatch(n) or FSDP_RANKS.fullmatch(n) for n in source.names)


def read(source: Folder) -> Checkpoint:
    """The checkpoint of all ranks. Reads their pickles and directories, no tensor data.

    Tensors that the ranks hold together are whole, plain ones are those of the first rank, compared with the others'.
    A set (other than the model's) whose tensors differ and do not say how they are divided stays as it is, each rank's
    by itself. Raises `Conflict` for files of several runs or steps, `Corrupt` for missing files and parts, and
    `Unsupported` for a model that cannot be put together.
    """
    ranks, tree = RankSets(source), dict[str, Any]()
    for name in ranks.sets:
        files, trees = ranks.open(name)
        if any(is_flat_parameter(key) for key in (trees[0] if isinstance(trees[0], dict) else ())):
            raise Unsupported(
                f"{source} holds FSDP's flat parameters (LOCAL_STATE_DICT), one vector for each wrapped module",
                "The names and shapes of the parameters in it are not in the files: they alone do not give the model.",
                "Take these from a spec or another checkpoint of the model: "
                f"{command('convert', source.path, against=Slot('SPEC'), out=OUT)}",
            )
        walk, before = TreeJoiner(ranks.files.joiner), dict(ranks.files.joiner.different)
        tree[name] = walk.join((name,), files, trees)
        if unjoinable := walk.unjoinable():
            ranks.files.joiner.different = before
            if not name.startswith(("optim", "extra")):
                raise not_joinable(source, name, unjoinable)
            what = f"{name} is not joined: no file says how {listed(unjoinable, 2)} and others are sharded"
            ranks.files.notes.append(Note(NOT_JOINED, f"{what}, so it holds what each rank saved"))
            tree[name] = {f"rank {file.rank}": each for file, each in zip(files, trees, strict=True)}
            continue
        walk.check()
        ranks.files.notes += walk.notes()
    engine = "accelerate, FSDP with use_dcp=False" if ranks.is_accelerate else "FSDP, one file per rank"
    return ranks.files.checkpoint(NAME, tree, engine, ranks.world)


def is_flat_parameter(key: Any) -> bool:
    """True for the name of the vector that FSDP keeps the parameters of a module in."""
    return type(key) is str and key.rpartition(".")[2].lstrip("_").startswith("flat_param")


@dataclass(slots=True, eq=False)
class RankSets:
    """The files of a folder by set and rank."""

    folder: Folder
    files: RankFolder = field(init=False)
    sets: dict[str, dict[int, str]] = field(default_factory=dict)
    world: int = 0
    is_accelerate: bool = False
    _tables: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `Conflict` for files of several world sizes, `Corrupt` where some are missing."""
        self.files = RankFolder(self.folder)
        worlds: dict[int, str] = {}
        for name in self.folder.names:
            if found := OF_WORLD.fullmatch(name):
                worlds.setdefault(int(found["world"]), name)
                kind = found["set"].partition("_world_size_")[0]
            elif found := FSDP_RANKS.fullmatch(name):
                self.is_accelerate = True
                stem, _, number = found["set"].removesuffix("_rank").rpartition("_")
                kind = "optimizer" if stem == "optimizer" else "model"
                kind += "" if number in ("0", "fsdp") else f"_{number}"
            else:
                continue
            if self.sets.setdefault(kind, {}).setdefault(int(found["rank"]), name) != name:
                raise mixed(self.folder, name, self.sets[kind][int(found["rank"])], "both are of one rank")
        if len(worlds) > 1:
            one, other, *_ = worlds.values()
            raise mixed(self.folder, one, other, "their world sizes differ")
        self.sets = dict(sorted(self.sets.items(), key=lambda item: not item[0].startswith("model")))
        self.world = max(*worlds, *(max(files) + 1 for files in self.sets.values()), 0)
        names = [name for files in self.sets.values() for name in files.values()]
        missing = [lost for pattern in (OF_WORLD, FSDP_RANKS) for lost in missing_names(names, pattern, self.world)]
        if missing:
            raise lacks(self.folder, f"{counted(len(missing), 'file')} of {counted(self.world, 'rank')}", missing)

    def open(self, name: str) -> tuple[list[RankFile], list[Any]]:
        """The files of a set in the order of their ranks, and the tree in each."""
        ranks = sorted(self.sets[name].items())
        files = [RankFile(str(self.folder), file, rank, self.world, self._tables) for rank, file in ranks]
        return files, [self.files.open(file) for _, file in ranks]
