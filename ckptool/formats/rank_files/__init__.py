"""`rank-files`: a folder of files that each rank of a run saved for itself with `torch.save`, all of one checkpoint.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py and SkyRL (`model_world_size_W_rank_R.pt`, `optim_…`,
`extra_state_…`), accelerate/utils/fsdp_utils.py 1.15 with `use_dcp=False` (`pytorch_model_fsdp_0_rankR.bin`,
`optimizer_0_rankR.bin`). The tree has an entry for each set: `model`, `optim`, `extra_state`; `model`, `optimizer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.commands import OUT, Advice, command
from ckptool.checkpoint.files import Folder, Input
from ckptool.errors import Conflict, Corrupt, Unsupported, counted, listed, printable
from ckptool.formats.boxes import Joiner
from ckptool.formats.parts import FSDP_RANKS, OF_WORLD
from ckptool.formats.placements import RankFile
from ckptool.formats.rank_files.join_trees import TreeJoiner
from ckptool.pickles.calls import UNKNOWN, uses

NAME = "rank-files"
NOT_JOINED = "not-joined"  # of the note
MAX_MISSING = 100_000  # ranks


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and any(OF_WORLD.fullmatch(n) or FSDP_RANKS.fullmatch(n) for n in source.names)


def read(source: Folder) -> Checkpoint:
    """The checkpoint of all ranks. Reads their pickles and directories, no tensor data.

    Tensors that the ranks hold together are whole, plain ones are those of the first rank, compared with the others'.
    A set (other than the model's) whose tensors differ and do not say how they are divided stays as it is, each rank's
    by itself. Raises `Conflict` for files of several runs or steps, `Corrupt` for missing files and parts, and
    `Unsupported` for a model that cannot be put together.
    """
    ranks = RankSets(source)
    joiner = Joiner(str(source))
    notes: list[Note] = []
    tree = {name: _joined(ranks, name, joiner, notes) for name in ranks.sets}
    engine = "accelerate, FSDP with use_dcp=False" if ranks.is_accelerate else "FSDP, a file of each rank"
    metadata = {"engine": engine, "ranks": ranks.world}
    return Checkpoint(tree, NAME, metadata, source, notes=(*notes, *joiner.notes()), discarded=tuple(ranks.discarded))


def _joined(ranks: RankSets, name: str, joiner: Joiner, notes: list[Note]) -> Any:
    files, trees = ranks.open(name)
    if any(is_flat_parameter(key) for key in (trees[0] if isinstance(trees[0], dict) else ())):
        raise _flat(ranks.folder)
    walk, before = TreeJoiner(joiner), dict(joiner.different)
    whole = walk.join((name,), files, trees)
    if found := walk.unjoinable():
        joiner.different = before
        if not name.startswith(("optim", "extra")):
            raise _not_joinable(ranks.folder, name, found)
        what = f"{printable(name)} is not joined: nothing says how {listed(found, 2)} and others are divided"
        notes.append(Note(NOT_JOINED, f"{what}, so it holds what each rank saved"))
        return {f"rank {file.rank}": tree for file, tree in zip(files, trees, strict=True)}
    walk.check()
    notes += walk.notes()
    return whole


def is_flat_parameter(key: Any) -> bool:
    """True for the name of the vector that FSDP keeps the parameters of a module in."""
    return type(key) is str and key.rpartition(".")[2].lstrip("_").startswith("flat_param")


def _flat(folder: Folder) -> Unsupported:
    return Unsupported(
        f"{folder} holds FSDP's flat parameters (LOCAL_STATE_DICT), one vector for each wrapped module",
        "The names and shapes of the parameters in it are not in the files, so they alone do not give the model.",
        Advice("Take these from a spec or another checkpoint of the model: ",
            command("convert", folder.path, against="SPEC", out=OUT)),
    )  # fmt: skip


def _not_joinable(folder: Folder, name: str, found: list[str]) -> Unsupported:
    return Unsupported(
        f"{folder}: the ranks saved different plain tensors as {printable(name)}: {listed(found, 3)}",
        "No file says how they are divided over the ranks, or whether they are: one rank's would not be the model.",
        "Save a full state dict: torch.distributed.checkpoint.state_dict.get_model_state_dict(…, full_state_dict=True)",
    )


@dataclass(slots=True, eq=False)
class RankSets:
    """The files of a folder by set and rank. discarded: what is not inert in any of them."""

    folder: Folder
    sets: dict[str, dict[int, str]] = field(default_factory=dict)
    world: int = 0
    is_accelerate: bool = False
    discarded: list[Any] = field(default_factory=list)
    _tables: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Finds the files. Raises `Conflict` for those of several worlds, `Corrupt` where some are missing."""
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
                raise self._mixed([name, self.sets[kind][int(found["rank"])]])
        if len(worlds) > 1:
            raise self._mixed(list(worlds.values()))
        self.sets = dict(sorted(self.sets.items(), key=lambda item: not item[0].startswith("model")))
        self.world = max(*worlds, *(max(files) + 1 for files in self.sets.values()), 0)
        self._check_missing()

    def _mixed(self, names: list[str]) -> Conflict:
        return Conflict(
            f"{self.folder} holds the files of two runs: {listed([printable(name) for name in names], 3)}",
            "They are of different numbers of ranks, and one checkpoint is of one.",
            "Move the files of one of them to another folder.",
        )

    def _check_missing(self) -> None:
        missing = []
        for files in self.sets.values():
            rank, name = next(iter(files.items()))
            start, _, end = name.rpartition(f"rank_{rank}" if f"rank_{rank}" in name else f"rank{rank}")
            separator = "_" if f"rank_{rank}" in name else ""
            absent = [r for r in range(min(self.world, MAX_MISSING)) if r not in files]
            missing += [f"{start}rank{separator}{r}{end}" for r in absent]
        if missing:
            raise Corrupt(
                f"{self.folder} lacks {counted(len(missing), 'file')} of those of {counted(self.world, 'rank')}: "
                f"{listed([printable(name) for name in missing], 3)}",
                "What the ranks saved is only complete together.",
                "Copy the whole folder, or take an earlier checkpoint.",
            )

    def open(self, name: str) -> tuple[list[RankFile], list[Any]]:
        """The files of a set in the order of their ranks, and the tree in each."""
        from ckptool.formats import read_alone

        files, trees = [], []
        for rank, file in sorted(self.sets[name].items()):
            checkpoint = read_alone(self.folder.open(file))
            self.discarded += checkpoint.discarded
            if any(use.verdict == UNKNOWN for use in uses(checkpoint.tree)):
                self.discarded.append(checkpoint.tree)
            files.append(RankFile(str(self.folder), printable(file), rank, self.world, self._tables))
            trees.append(checkpoint.tree)
        return files, trees
