"""`folder`: a folder of several files and folders that together are one checkpoint, its members, each under its name in
the tree: `pytorch_model_fsdp_0`, `optimizer_0`, `scheduler.bin`, `unet`.

Members are known by the names that one program writes, and each is opened as whatever it is. Where the weights stand
for the folder (an index, `model.safetensors`) the folder is read as those, and its other members are only looked at:
whether each is whole. Those beside what another format joined (`meta.pt` beside .distcp files) come into its tree.

Source: transformers/trainer.py (`_save_checkpoint`: weights, optimizer, scheduler, random states, and
`trainer_state.json` last), accelerate/checkpointing.py (random states last), lightning/fabric/strategies/fsdp.py
(`meta.pt`), megatron/training/checkpointing.py, diffusers (`model_index.json`),
sentence-transformers (`modules.json`), ByteCheckpoint's README.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, PartKind, PartOf
from ckptool.checkpoint.files import Folder, Input, Source, json_or_none, open_input, read_json
from ckptool.commands import OUT_SAFETENSORS, RULES, command
from ckptool.conventions.state_dicts import optimizers
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, counted, listed, printable
from ckptool.formats import FORMATS, named, read_alone
from ckptool.formats.folder import (
    CONSOLIDATED,
    FSDP_RANKS,
    MODEL_PARALLEL,
    OF_WORLD,
    PIECES,
    NamePattern,
    missing_names,
    names_in,
    number_in,
)
from ckptool.formats.parts import MEMBERS, part_of

NAME = "folder"
MAX_MEMBERS = 10_000  # of a folder, each of which is opened: thousands of ranks save two each
MAX_JSON = 16 << 20
MAX_STEPS = 512  # of parameters, that are looked at
STATE = "trainer_state.json"

# Files beside weights. What they hold belongs to one checkpoint and is none by itself.
BESIDE_WEIGHTS = NamePattern(
    ".",
    r"(?:optimizer|scheduler|scaler|sampler)(?:_\d+)?\.(?:pt|bin)|dl_state_dict(?:_\d+)?\.bin|rng_state(?:_\d+)?\.pth"
    r"|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|training_args\.bin|trainer_state\.json|model_\d+\.safetensors"
    r"|pytorch_model(?:_\d+|_fsdp(?:_\d+)?)\.bin|common\.pt|meta\.pt|distrib_optim\.pt",
)
_TRAINING = ("optimizer", "scheduler", "rng_state", "random_states", "trainer_state", "sampler", "common.pt", "meta.pt")
_FOLDERS = NamePattern("", r"global_step\d+|pytorch_model_fsdp_\d+|optimizer_\d+|pytorch_model")
_BYTE_CHECKPOINT = ("model", "optimizer", "extra_state")
_WITH_WEIGHTS = ("global_step", "pytorch_model")
_RANKED = NamePattern("_", r"(?P<set>rng_state_|random_states_)(?P<rank>\d+)(?P<rest>)\.(?:pth|pkl)")
_OF_A_CHECKPOINT = NamePattern("", r"latest|zero_to_\w+\.py|.*\.distcp|(?:__\d+)?\.metadata")


@dataclass(frozen=True, slots=True)
class MemberFiles:
    """The members of a folder. kind: what it is, for people.  engine: the program that wrote it.  names: its members
    that are there (`mp_rank_00/model_optim_rng.pt`).

    missing: those that it says or shows it once had.  beside: another format reads the folder; these are its other
    files.  by_rules: they are joined where rules say how.
    """

    kind: str
    engine: str
    names: tuple[str, ...]
    missing: tuple[str, ...] = ()
    beside: bool = False
    by_rules: bool = False

    @property
    def count(self) -> int:
        """The number of members that are there, what the folder is read as among them."""
        return len(self.names) + self.beside


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and layout_of(source) is not None


def layout_of(folder: Folder, *, beside: bool = False) -> MemberFiles | None:
    """The members of a folder; None where it has none. beside: another format reads it, and stands for it."""
    return next((found for find in _KINDS if (found := find(folder, beside)) is not None), None)


def members_of(checkpoint: Checkpoint, folder: Folder) -> MemberFiles | None:
    """The members of the folder that a checkpoint was read from, without those that its own format reads."""
    if checkpoint.container == NAME:
        return layout_of(folder)
    layout = layout_of(folder, beside=True)
    own = checkpoint.source.files if isinstance(checkpoint.source, Folder) else {}
    tree = checkpoint.tree if isinstance(checkpoint.tree, dict) else {}
    read_by_it = {name.partition("/")[0] for name in own}.difference(tree)
    if layout is None or not layout.names:
        return layout
    if checkpoint.container.startswith("deepspeed"):  # which reads one tag; the others are checkpoints of their own
        read_by_it |= {name for name in layout.names if name.startswith("global_step")}
    layout = replace(layout, names=tuple(name for name in layout.names if name.partition("/")[0] not in read_by_it))
    return layout if layout.names else None


def read(source: Folder) -> Checkpoint:
    """A folder's members, each under its name; one that cannot be read is left out, and counted as not whole.

    Raises `LimitExceeded` for more than 10,000 members, `Corrupt` where none can be read.
    """
    layout = layout_of(source)
    assert layout is not None
    found = with_members(Checkpoint({}, NAME, {}, source), source)
    if not found.tree:
        what = f"{source} is {layout.kind}, and none of its {counted(len(layout.names), 'file')} can be read"
        why = found.part.meaning.partition("; ")[2] if found.part is not None else ""
        raise Corrupt(what, f"{why}.", "Take an earlier checkpoint.")
    return found


def with_members(checkpoint: Checkpoint, folder: Folder) -> Checkpoint:
    """The checkpoint of a folder with its members: in its tree, or where weights stand for it, in a note.

    With a `part` where some are missing, damaged, of another step, or parts that are not joined.
    """
    layout = members_of(checkpoint, folder)
    if layout is None:
        return checkpoint
    found = dict(opened(folder, layout))
    whole = {name: each for name, each in found.items() if isinstance(each, Checkpoint)}
    wrong = {name: problem for name, each in found.items() if (problem := _problem(each))}
    wrong |= {name: problem for name, problem in _of_other_steps(whole).items() if name not in wrong}
    world = _world(checkpoint, whole)
    ranks = {name.partition("/")[0] for name in layout.names if "/" in name}
    stages = {inside["rest"] for rank in ranks if (inside := MODEL_PARALLEL.fullmatch(rank))}
    missing = (*layout.missing, *missing_names(layout.names, _RANKED, world))
    missing += tuple(f"{rank}/" for rank in missing_names(sorted(ranks), MODEL_PARALLEL, world // max(1, len(stages))))
    layout = replace(layout, missing=tuple(dict.fromkeys(missing)))
    part = _counted(folder, layout, wrong, _is_joined(checkpoint, whole))
    if isinstance(checkpoint.source, Folder) and not named(checkpoint.container).tensors_only:
        checkpoint = _joined(checkpoint, checkpoint.source, whole)
    if checkpoint.container == NAME:
        facts = {"engine": layout.engine, "ranks": world, "step": step_in(whole.get(STATE))}
        checkpoint = replace(checkpoint, metadata={key: fact for key, fact in facts.items() if fact})
    if part.is_complete and _is_joined(checkpoint, whole):
        own = ["the weights" if named(checkpoint.container).tensors_only else "what the ranks saved"] * layout.beside
        note = Note(MEMBERS, f"{part.label} are whole: {listed([*own, *layout.names], 4)}")
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    return replace(checkpoint, part=part)


def _joined(checkpoint: Checkpoint, source: Folder, whole: dict[str, Checkpoint]) -> Checkpoint:
    """The checkpoint with the members in its tree, and their notes."""
    own = checkpoint.tree if isinstance(checkpoint.tree, dict) else {}
    for name, each in whole.items():
        if name in own:
            raise Corrupt(
                f"{source} holds a member {name}, and its tensors have one of that name, too", "No program writes both."
            )
        if each.source is not None:
            source.adopt(name, each.source)
    notes = [
        replace(note, message=f"{name}: {note.message}", fix=()) for name, each in whole.items() for note in each.notes
    ]
    return replace(
        checkpoint,
        tree={**own, **{name: each.tree for name, each in whole.items()}},
        notes=(*checkpoint.notes, *notes),
        discarded=(*checkpoint.discarded, *(call for each in whole.values() for call in each.discarded)),
    )


def _is_joined(checkpoint: Checkpoint, whole: dict[str, Checkpoint]) -> bool:
    """False for a folder of members that are parts of one thing which nothing here puts together."""
    return checkpoint.container != NAME or not any(each.part or part_of(each) for each in whole.values())


def with_all(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of a folder that weights stand for, with them (`model.safetensors`) and all members in its tree.

    Raises what opening a member does.
    """
    if not (names := beside(checkpoint)):
        return checkpoint
    source = checkpoint.source
    folder = Folder(source.path if isinstance(source, Folder) else os.path.dirname(source.path) if source else "")
    weights = "weights" if isinstance(source, Folder) or source is None else os.path.basename(source.path)
    if isinstance(source, Folder):
        for name, file in source.files.items():
            folder.adopt(name, file)
    elif source is not None:
        folder.adopt(weights, source)
    whole = replace(checkpoint, tree={weights: checkpoint.tree}, container=NAME, source=folder, tensors_only=False)
    return _joined(replace(whole, origin=None), folder, {name: open_member(folder, name) for name in names})


def beside(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The members of the named folder that are not in the tree, as weights stand for it; none for a file."""
    source, part = checkpoint.source, checkpoint.part
    is_folder = (part is not None and part.kind is PartKind.MEMBERS) or any(
        note.code == MEMBERS for note in checkpoint.notes
    )
    if source is None or not is_folder or checkpoint.container == NAME:
        return ()
    folder = source if isinstance(source, Folder) else Folder(os.path.dirname(source.path) or os.curdir)
    layout = members_of(checkpoint, folder)
    return tuple(name for name in layout.names if name not in checkpoint.tree) if layout is not None else ()


def _problem(found: Checkpoint | CkptoolError) -> str:
    """The reason why a member is not whole; empty where it is, as a rank's share is."""
    if isinstance(found, CkptoolError):
        return found.what
    part = found.part
    return part.meaning if part is not None and part.kind is PartKind.MEMBERS and not part.is_complete else ""


def _counted(folder: Folder, layout: MemberFiles, wrong: dict[str, str], joined: bool) -> PartOf:
    """The count of members that are there and whole, and the problems of the others."""
    count = layout.count + len(layout.missing)
    problems = [
        what.replace(printable(os.path.join(folder.path, name)), printable(name)) for name, what in wrong.items()
    ]
    problems += [f"{printable(name)} is missing" for name in layout.missing]
    whole = "all of its files are there" + ("" if joined else f"; {_NOT_JOINED[layout.by_rules]}")
    meaning = f"{layout.kind}; " + (listed(problems, 3) if problems else whole)
    number = layout.count - len(wrong)
    label = f"{number:,} of {counted(count, 'member')}"
    join = command("convert", folder.path, rules_file=RULES, out=OUT_SAFETENSORS) if layout.by_rules else ()
    return PartOf(PartKind.MEMBERS, label, meaning, number, count, folder.path, join=join)


_NOT_JOINED = (
    "they are not joined here",
    "each holds shards of the tensors, and a rules file has to say how: column, row, glu, qkv, replicated",
)


def opened(folder: Folder, layout: MemberFiles) -> Iterator[tuple[str, Checkpoint | CkptoolError]]:
    """Every member with what is in it, or with why it cannot be read."""
    if len(layout.names) > MAX_MEMBERS:
        what = f"{folder} is {layout.kind} of {counted(len(layout.names), 'file')}"
        raise LimitExceeded(what, f"At most {MAX_MEMBERS:,} are opened.", "Name one of them.")
    for name in layout.names:
        try:
            yield name, open_member(folder, name)
        except CkptoolError as error:
            yield name, error


def open_member(folder: Folder, name: str) -> Checkpoint:
    """Opens a member. Raises `Corrupt` for one whose own members are folders again, and what opening it raises."""
    if name.endswith(".json"):
        table = read_json(os.path.join(folder.path, name), "a table", MAX_JSON)
        return Checkpoint(table if isinstance(table, dict) else {}, "json")
    source = open_input(os.path.join(folder.path, name))
    if isinstance(source, Source):
        source.share_descriptors()
    elif (inside := layout_of(source)) is not None and any(_is_folder(source, each) for each in inside.names):
        raise Corrupt(f"{source} holds folders of checkpoints, and is in one", "A link may lead back to where it is.")
    return read_alone(source)


# Do they belong together? --------------------------------------------------------------------------------------------


def _world(checkpoint: Checkpoint, whole: dict[str, Checkpoint]) -> int:
    """The number of ranks that saved the folder, as far as its members say; 0 where none does."""
    counts = [each.metadata.get("ranks") for each in (checkpoint, *whole.values())]
    parts = [each.part or part_of(each) for each in whole.values()]
    counts += [part.count for part in parts if part is not None and part.kind is PartKind.RANK]
    ranked = [int(found["rank"]) + 1 for name in whole if (found := _RANKED.fullmatch(name))]
    return max((n for n in (*counts, *ranked) if type(n) is int), default=0)


def _of_other_steps(whole: dict[str, Checkpoint]) -> dict[str, str]:
    """Members of a Trainer's checkpoint that were certainly saved at another step than the rest, each with why.

    The optimizer and the scheduler step together, and no more often than the Trainer counts; less often where a
    gradient scaler skips steps.
    """
    total = step_in(whole.get(STATE))
    if not total:
        return {}
    steps = {name: step for name, each in whole.items() if name != STATE and (step := _steps_of(name, each))}
    if not any(name.startswith("optimizer") for name in steps):
        return {}  # under DeepSpeed the scheduler takes a step for each rank
    late = {name: step for name, step in steps.items() if step > total}
    if not late and len(set(steps.values())) > 1:
        late = {name: step for name, step in steps.items() if step != max(steps.values())}
    others = {name: step for name, step in steps.items() if name not in late} or {STATE: total}
    other, at = max(others.items(), key=lambda item: item[1])
    return {
        name: f"{printable(name)} is of step {step:,}, and {printable(other)} of step {at:,}"
        for name, step in late.items()
    }


def _steps_of(name: str, member: Checkpoint) -> int:
    """The number of steps that an optimizer or the Trainer's scheduler has taken; 0 where it is not certain."""
    steps: list[Any] = []
    for _, found in optimizers(member.tree):
        slots = [slots.get("step") for slots in found["state"].values() if isinstance(slots, dict)]
        if len(slots) <= MAX_STEPS:  # parameters that were frozen for a while have taken fewer than others
            steps += slots
    top = member.tree if isinstance(member.tree, dict) else {}
    if name == "scheduler.pt" and "base_lrs" in top:
        steps.append(top.get("last_epoch"))
    numbers = (number_in(step) or 0 for step in steps)
    return max((int(number) for number in numbers if 0 <= number < 1 << 53), default=0)


# The kinds of folders ------------------------------------------------------------------------------------------------


def _model_parallel(folder: Folder, beside: bool) -> MemberFiles | None:
    """Megatron's legacy layout: a folder for each rank."""
    ranks = [name for name in folder.names if MODEL_PARALLEL.fullmatch(name) and _is_folder(folder, name)]
    inside = [f"{rank}/{name}" for rank in ranks for name in _names_in(folder, rank) if name.endswith(".pt")]
    if not inside or beside:
        return None
    missing = [
        f"{rank}/" for rank in (*missing_names(ranks, MODEL_PARALLEL), *(r for r in ranks if not _names_in(folder, r)))
    ]
    return MemberFiles("a Megatron checkpoint", "Megatron", tuple(inside), tuple(missing), by_rules=True)


def _consolidated(folder: Folder, beside: bool) -> MemberFiles | None:
    """Llama's files, one for each rank of tensor parallelism; one alone is the model."""
    names = [name for name in folder.names if CONSOLIDATED.fullmatch(name)]
    if len(names) < 2 or beside:
        return None
    return MemberFiles("a Llama checkpoint", "", tuple(names), tuple(missing_names(names, CONSOLIDATED)), by_rules=True)


def _pipeline(folder: Folder, beside: bool) -> MemberFiles | None:
    """A diffusers pipeline: `model_index.json` names its components, each in a folder of its own."""
    table = _table(folder, "model_index.json")
    if table is None or beside:
        return None
    names, missing = [], []
    for name, value in table.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2 or value[0] is None or "/" in name:
            continue
        inside = set(_names_in(folder, name)) if _is_folder(folder, name) else set()
        if any(_is_weights(file) for file in inside):
            names.append(name)
        elif not inside or "config.json" in inside:  # what has weights has this; schedulers and tokenizers have others
            missing.append(name)
    return MemberFiles("a diffusers pipeline", "diffusers", tuple(names), tuple(missing)) if names else None


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _collection(folder: Folder, beside: bool) -> MemberFiles | None:
    """ByteCheckpoint: folders of torch.distributed.checkpoint for the model, the optimizer and the rest."""
    names = [name for name in _BYTE_CHECKPOINT if _is_folder(folder, name) and _is_set(folder, name)]
    if beside or "model" not in names or len(names) < 2:
        return None
    return MemberFiles("a checkpoint of ByteCheckpoint", "ByteCheckpoint", tuple(names))


def _training(folder: Folder, beside: bool) -> MemberFiles | None:
    """Files that transformers' Trainer and accelerate save beside weights; the modules of sentence-transformers."""
    names = [name for name in folder.names if BESIDE_WEIGHTS.fullmatch(name) and not _is_folder(folder, name)]
    sets = [name for name in folder.names if _FOLDERS.fullmatch(name) and _is_set(folder, name)]
    modules = list(_modules(folder))
    there = [*sets, *names, *(name for name, present in modules if present == "weights")]
    there.sort(key=lambda name: not name.startswith(_WITH_WEIGHTS))  # what the others belong to, first
    missing = [
        *missing_names(names, _RANKED),
        *(name for name, present in modules if not present),
        *_written_last(names),
    ]
    if beside:
        known = bool(sets or modules) or any(name.startswith(_TRAINING) for name in names)
    else:  # people call files optimizer.pt, too; these are what the programs alone write
        weights = [name for name, present in modules if present == "weights"]
        known = bool(sets or weights) or any(name.startswith(("trainer_state", "random_states_")) for name in names)
        if not weights and not any(name.startswith(_WITH_WEIGHTS) for name in there):
            missing.append("pytorch_model_fsdp_0" if sets else "model.safetensors")
    kind, engine = _kind_of(names, bool(modules))
    return MemberFiles(kind, engine, tuple(there), tuple(missing), beside) if known else None


def _is_set(folder: Folder, name: str) -> bool:
    """True for a folder in it that another format reads."""
    inner = Folder(os.path.join(folder.path, name)) if _is_folder(folder, name) else None
    found = (each for each in FORMATS if each.name != NAME and each.is_folder)
    return inner is not None and (
        any(each.detect(b"", inner) for each in found) or any(each.endswith("_states.pt") for each in inner.names)
    )


def _kind_of(names: list[str], modules: bool) -> tuple[str, str]:
    if any(name.startswith(("trainer_state", "training_args", "rng_state")) for name in names):
        return "a checkpoint of transformers' Trainer", "transformers"
    if modules:
        return "a model of sentence-transformers", "sentence-transformers"
    accelerate = any(name.startswith("random_states_") for name in names)
    return "a training checkpoint in several files", "accelerate" if accelerate else ""


def _written_last(names: list[str]) -> list[str]:
    """The file that a program writes last, where it wrote those before: else it was stopped while it saved."""
    if "optimizer.pt" in names and "training_args.bin" in names and "trainer_state.json" not in names:
        return ["trainer_state.json"]
    if "optimizer.bin" in names and not any(name.startswith("random_states_") for name in names):
        return ["random_states_0.pkl"]
    return []


def _modules(folder: Folder) -> Iterator[tuple[str, str]]:
    """The modules in folders that sentence-transformers lists, and what is there: `weights`, `files` or nothing."""
    table = _table(folder, "modules.json", list)
    for module in table if isinstance(table, list) else ():
        path = module.get("path") if isinstance(module, dict) else None
        if path == "" and "config.json" in folder:  # the transformer itself
            yield "model.safetensors", "files" if any(map(_is_weights, folder.names)) else ""
        elif type(path) is str and path and "/" not in path.strip("/") and path not in (".", ".."):
            inside = _names_in(folder, path.strip("/"))
            has = any(_is_weights(name) for name in inside)
            yield path.strip("/"), "weights" if has else "files" if inside else ""


_KINDS: tuple[Callable[[Folder, bool], MemberFiles | None], ...] = (
    _model_parallel,
    _consolidated,
    _pipeline,
    _collection,
    _training,
)


def _table(folder: Folder, name: str, kind: type = dict) -> Any:
    """A JSON file of the folder; None where there is none, or where it is something else."""
    table = json_or_none(os.path.join(folder.path, name), MAX_JSON) if name in folder else None
    return table if isinstance(table, kind) else None


def _is_folder(folder: Folder, name: str) -> bool:
    return name in folder and os.path.isdir(os.path.join(folder.path, name))  # `..` is none of its names


def _names_in(folder: Folder, name: str) -> list[str]:
    return names_in(os.path.join(folder.path, name))


def claimed(folder: Folder) -> set[str]:
    """The names in a checkpoint's folder that belong to it: its index and shards, the ranks' files, its members."""
    layout = layout_of(folder, beside=True) or layout_of(folder)
    names = {name.partition("/")[0] for name in (layout.names if layout is not None else ())}
    kinds = (_OF_A_CHECKPOINT, BESIDE_WEIGHTS, OF_WORLD, FSDP_RANKS, PIECES)
    return names | {name for name in folder.names if any(kind.fullmatch(name) for kind in kinds)}


def step_in(state: Checkpoint | None) -> int:
    """The step that a Trainer's state was saved at; 0 where it says none."""
    step = state.tree.get("global_step") if state is not None else None
    return step if type(step) is int else 0


def step_of(folder: str) -> dict[str, Any]:
    """The progress of a Trainer by its state: `{"global_step": 500, "epoch": 1.0}`; empty without one."""
    try:
        found = _table(Folder(folder), STATE)
    except CkptoolError:
        return {}
    return {key: value for key, value in (found or {}).items() if key in ("global_step", "epoch")}
