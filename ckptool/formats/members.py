"""`folder`: a folder of several files and folders that together are one checkpoint, its members, each under its name in
the tree: `pytorch_model_fsdp_0`, `optimizer_0`, `scheduler.bin`, `unet`.

Members are known by the names that one program writes, and each is opened as whatever it is. Where the weights stand
for the folder (an index, `model.safetensors`) the folder is read as those, and its other members are only looked at:
whether each is whole. Those beside what another format joined (`meta.pt` beside .distcp files) come into its tree.

Engines load what lies beside the weights (`optimizer.bin`, `training_args.bin`, a rank's random states) with `pickle`,
whatever its name. So when it is judged what a folder would run, every file below it that is a pickle by content is
judged as if it had been named alone, except those of DCP, whose table is read whole.

Source: transformers/trainer.py (`_save_checkpoint`: weights, optimizer, scheduler, random states, and
`trainer_state.json` last), accelerate/checkpointing.py (random states last), lightning/fabric/strategies/fsdp.py
(`meta.pt`), megatron/training/checkpointing.py, diffusers (`model_index.json`),
sentence-transformers (`modules.json`), ByteCheckpoint's README.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator
from contextlib import suppress
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, PartKind, PartOf
from ckptool.checkpoint.files import Folder, Input, Source, entries_of, folder_at, json_or_none, open_input, while_open
from ckptool.checkpoint.nodes import fields, items
from ckptool.commands import OUT, OUT_SAFETENSORS, RULES, command
from ckptool.conventions.state_dicts import optimizers
from ckptool.errors import CkptoolError, Conflict, Corrupt, LimitExceeded, NotACheckpoint, counted, listed, printable
from ckptool.facts import dataclass, replace
from ckptool.formats import FORMATS, HEAD, named, read_alone
from ckptool.formats.folder import (
    ADAPTER,
    CONFIG,
    CONSOLIDATED,
    FOLDER,
    FSDP_RANKS,
    MAX_TABLE,
    MEMBERS,
    MODEL_PARALLEL,
    OF_WORLD,
    PIECES,
    STATE,
    NamePattern,
    as_part,
    damaged,
    json_in,
    missing_names,
    names_in,
    number_in,
    renamed,
    without_copies,
)
from ckptool.pickles.calls import UNKNOWN, NameUse, uses_of

NAME = "folder"
MAX_MEMBERS = 10_000  # of a folder, each of which is opened: thousands of ranks save two each
MAX_STEPS = 512  # of parameters looked at
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # of a Trainer
ROUTER = "router_config.json"

# Files beside weights. What they hold belongs to one checkpoint and is none by itself.
BESIDE_WEIGHTS = NamePattern(
    ".",
    r"(?:optimizer|scheduler|scaler|sampler)(?:_\d+)?\.(?:pt|bin)|dl_state_dict(?:_\d+)?\.bin|rng_state(?:_\d+)?\.pth"
    r"|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|training_args\.bin|trainer_state\.json|model_\d+\.safetensors"
    r"|pytorch_model(?:_\d+|_fsdp(?:_\d+)?)\.bin|common\.pt|meta\.pt|distrib_optim\.pt",
)
_OTHER_MODEL = NamePattern("_", r"(?:pytorch_)?model_\d+\.(?:safetensors|bin)")
_ENGINE = "what the ranks saved"  # in the folder itself, for people
NO_WEIGHTS = ("optimizer", "scheduler", "rng_state", "random_states", "sampler")
_TRAINING = (*NO_WEIGHTS, "trainer_state", "common.pt", "meta.pt")
_FOLDERS = NamePattern("", r"global_step\d+|pytorch_model_fsdp_\d+|optimizer_\d+|pytorch_model")
_WITH_WEIGHTS = ("global_step", "pytorch_model")
RANDOM_STATES = NamePattern("_", r"(?P<set>rng_state_|random_states_)(?P<rank>\d+)(?P<rest>)\.(?:pth|pkl)")
_NUMBERED = NamePattern(
    "_", r"(?P<stem>optimizer|scheduler|custom_checkpoint)_(?P<number>[1-9]\d{0,4})(?P<suffix>\.bin|\.pkl)"
)
# On one device, FSDP, TPUs (`rank0-of-8-optimizer.pt`) and SageMaker (`optimizer.pt_0_0`).
_OPTIMIZER = NamePattern("optimizer", r"(?:.+-)?optimizer(?:_\d+)?(?:_rank\d+)?(?:\.(?:pt|bin))?(?:_\d+)*")
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
        """The number of members present, counting what another format reads of the folder as one."""
        return len(self.names) + self.beside


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and layout_of(source) is not None


def layout_of(folder: Folder) -> MemberFiles | None:
    """The members of a folder that no other format reads; None where it has none."""
    # Megatron's legacy layout: a folder for each rank.
    folders = [name for name in folder.names if MODEL_PARALLEL.fullmatch(name) and _is_folder(folder, name)]
    ranks = {
        name: [n for n in without_copies(_names_in(folder, name)) if n.endswith((".pt", ".ckpt"))] for name in folders
    }
    files = tuple(f"{rank}/{name}" for rank, content in ranks.items() for name in content)
    if files:
        missing = [*missing_names(ranks, MODEL_PARALLEL), *(rank for rank, content in ranks.items() if not content)]
        return MemberFiles("a Megatron checkpoint", "Megatron", files, tuple(f"{r}/" for r in missing), by_rules=True)
    # Llama's files, one for each rank of tensor parallelism; one alone is the model.
    names = tuple(name for name in folder.names if CONSOLIDATED.fullmatch(name))
    if len(names) > 1:
        return MemberFiles("a Llama checkpoint", "", names, tuple(missing_names(names, CONSOLIDATED)), by_rules=True)
    # A diffusers pipeline: `model_index.json` names its components, each in a folder of its own. What has weights has a
    # config.json; schedulers and tokenizers have others.
    components = dict(_components(folder, "model_index.json"))
    names = tuple(name for name, what in components.items() if what == "weights")
    if names:
        missing = [name for name, what in components.items() if what in ("", CONFIG)]
        return MemberFiles("a diffusers pipeline", "diffusers", names, tuple(missing))
    # ByteCheckpoint: folders of torch.distributed.checkpoint for the model, the optimizer and the rest.
    sets = {name: _names_in(folder, name) for name in ("model", "optimizer", "extra_state") if name in folder}
    names = tuple(name for name, content in sets.items() if any(file.endswith(_OF_DCP) for file in content))
    if "model" in names and len(names) > 1:
        return MemberFiles("a checkpoint of ByteCheckpoint", "ByteCheckpoint", names)
    return _training_members(folder)


def members_of(checkpoint: Checkpoint, folder: Folder) -> MemberFiles | None:
    """The members of the folder that a checkpoint was read from, without those that its own format reads."""
    if checkpoint.container == NAME:
        return layout_of(folder)
    layout = _training_members(folder, beside=True)
    if layout is None or not layout.names:
        return layout
    sources = checkpoint.source.files if isinstance(checkpoint.source, Folder) else {}
    tree = checkpoint.tree if isinstance(checkpoint.tree, dict) else {}
    read_by_it = {name.partition("/")[0] for name in sources}.difference(tree)
    if checkpoint.container.startswith("deepspeed"):  # which reads one tag; the others are checkpoints of their own
        read_by_it |= {name for name in layout.names if name.startswith("global_step")}
    names = tuple(name for name in layout.names if name.partition("/")[0] not in read_by_it)
    return replace(layout, names=names) if names else None


def read(source: Folder) -> Checkpoint:
    """A folder's members, each under its name; one that cannot be read is left out, and counted as not whole.

    Raises `LimitExceeded` for more than 10,000 members, `Corrupt` where none can be read.
    """
    return with_members(Checkpoint({}, NAME, {}, source), source)


def with_members(checkpoint: Checkpoint, folder: Folder) -> Checkpoint:
    """The checkpoint of a folder with its members: in its tree, or where weights stand for it, in a note.

    With a `part` where some are missing, damaged, of another step, or parts that are not joined.
    """
    layout = members_of(checkpoint, folder)
    if layout is None or not (layout.names or layout.missing):
        return checkpoint
    if len(layout.names) > MAX_MEMBERS:
        what = f"{folder} is {layout.kind} of {counted(len(layout.names), 'file')}"
        raise LimitExceeded(what, f"ckptool opens at most {MAX_MEMBERS:,}.", "Name one of them.")
    members: dict[str, Checkpoint] = {}
    parts: list[PartOf] = []  # members that are parts of one thing
    errors: dict[str, str] = {}
    for name in layout.names:
        try:
            members[name] = member = open_member(folder, name)
        except CkptoolError as error:
            errors[name] = error.what.replace(printable(os.path.join(folder.path, name)), printable(name))
            continue
        if (part := member.part or as_part(member)) is not None:
            parts.append(part)
            if part.kind is PartKind.MEMBERS and not part.is_complete:
                errors[name] = part.meaning
    untied = [f"{name}/{file}" for name, member in members.items() for file in member.untied]
    if layout.by_rules and len(members) > 1:
        untied = [name for name, member in members.items() if "iteration" not in fields(member.tree)]
    checkpoint = replace(checkpoint, untied=(*checkpoint.untied, *untied))
    errors |= {name: why for name, why in _of_other_steps(checkpoint, members).items() if name not in errors}
    # The number of ranks that saved the folder, as far as its members say.
    counts = [member.metadata.get("ranks") for member in (checkpoint, *members.values())]
    counts += [part.count for part in parts if part.kind is PartKind.RANK]
    counts += [int(ranked["rank"]) + 1 for name in members if (ranked := RANDOM_STATES.fullmatch(name))]
    world = max((n for n in counts if type(n) is int), default=0)
    ranks = {name.partition("/")[0] for name in layout.names if "/" in name}
    stages = {match["rest"] for rank in ranks if (match := MODEL_PARALLEL.fullmatch(rank))}
    missing = dict.fromkeys((*layout.missing, *missing_names(layout.names, RANDOM_STATES, world)))
    missing |= {f"{r}/": None for r in missing_names(sorted(ranks), MODEL_PARALLEL, world // max(1, len(stages)))}
    number, count = layout.count - len(errors), layout.count + len(missing)
    label = f"{number:,} of {counted(count, 'member')}"
    problems = listed([*errors.values(), *(f"{printable(name)} is missing" for name in missing)], 3)
    if checkpoint.container == NAME and not members:
        what = f"{folder} is {layout.kind}, but none of its {counted(len(layout.names), 'file')} can be read"
        raise Corrupt(what, f"{problems}.", "Take an earlier checkpoint.")
    # A file (`pytorch_model.bin`) holds those of one model, whatever its container.
    only_weights = named(checkpoint.container).tensors_only or not isinstance(checkpoint.source, Folder)
    if isinstance(checkpoint.source, Source) and any(name.startswith(_TRAINING) for name in members):
        checkpoint = replace(checkpoint, untied=(os.path.basename(checkpoint.source.path), *checkpoint.untied))
    if isinstance(checkpoint.source, Folder) and not only_weights:
        checkpoint = _in_tree(checkpoint, checkpoint.source, members)
    step = step_in(members.get(STATE))
    if checkpoint.container == NAME:
        facts = {"engine": layout.engine, "ranks": world, "step": step}
        checkpoint = replace(checkpoint, metadata={key: fact for key, fact in facts.items() if fact})
    if number == count and not (parts and checkpoint.container == NAME):
        lead = ["the weights" if only_weights else _ENGINE] if layout.beside else []
        what = f"{number:,} of {counted(count, 'member is', 'members are')} whole"
        at = f", saved at step {step:,}" if step and checkpoint.container != NAME else ""
        note = Note(MEMBERS, f"{what}{at}: {listed([*lead, *layout.names], 4)}")
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    detail = problems or f"all of its files are present; {_NOT_JOINED[layout.by_rules]}"
    join = command("convert", folder.path, rules_file=RULES, out=OUT_SAFETENSORS) if layout.by_rules else ()
    meaning = f"{layout.kind}; {detail}"
    return replace(checkpoint, part=PartOf(PartKind.MEMBERS, label, meaning, number, count, folder.path, join=join))


_NOT_JOINED = (
    "they are not joined here",
    "each holds shards of the tensors, and a rules file has to say how: column, row, glu, qkv, replicated",
)


def _in_tree(checkpoint: Checkpoint, source: Folder, members: dict[str, Checkpoint]) -> Checkpoint:
    """The checkpoint with the members in its tree, and their notes."""
    tree = dict(checkpoint.tree) if isinstance(checkpoint.tree, dict) else {}
    notes, discarded = [*checkpoint.notes], [*checkpoint.discarded]
    for name, member in members.items():
        if name in tree:
            raise damaged(source, f"it holds a member {name}, but one of its tensors has that name, too")
        if member.source is not None:
            source.adopt(name, member.source)
        tree[name] = member.tree
        notes += [replace(note, message=f"{name}: {note.message}", fix=()) for note in member.notes]
        discarded += member.discarded
    return replace(checkpoint, tree=tree, notes=tuple(notes), discarded=tuple(discarded))


def with_all(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of a folder that was read as its weights, with these (`model.safetensors`) and all members in it.

    Raises what opening a member does.
    """
    names, source = beside(checkpoint), checkpoint.source
    if not names or source is None:
        return checkpoint
    folder = _folder_of(source)
    weights = "weights" if isinstance(source, Folder) else os.path.basename(source.path)
    for name, file in source.files.items() if isinstance(source, Folder) else [(weights, source)]:
        folder.adopt(name, file)
    base = replace(checkpoint, tree={weights: checkpoint.tree}, container=NAME, source=folder, tensors_only=False)
    return _in_tree(replace(base, origin=None), folder, {name: open_member(folder, name) for name in names})


def beside(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The members of the folder that are not in the tree, because only its weights were read; none for a file."""
    source, part = checkpoint.source, checkpoint.part
    is_folder = any(note.code == MEMBERS for note in checkpoint.notes) or (part and part.kind is PartKind.MEMBERS)
    if source is None or not is_folder or checkpoint.container == NAME:
        return ()
    folder = source if isinstance(source, Folder) else _folder_of(source)
    if (layout := members_of(checkpoint, folder)) is None:
        return ()
    weights, unclaimed = re.compile(named("sharded").holds), sorted({*without_copies(folder.names)} - claimed(folder))
    # Adapters with names, and averages, as callbacks save them.
    others = [n for n in unclaimed if _is_model(folder, n) or (n.endswith(_TENSORS) and not weights.search(n))]
    return tuple(name for name in (*others, *layout.names) if name not in checkpoint.tree)


def refuse_other_models(checkpoint: Checkpoint) -> None:
    """Raises `Conflict` where only the weights of the first of several models, as accelerate saves them, were read."""
    names = [name for name in beside(checkpoint) if _OTHER_MODEL.fullmatch(name)]
    if names and checkpoint.source is not None:
        folder = _folder_of(checkpoint.source).path
        what = f"{folder} holds the weights of {counted(len(names) + 1, 'model')}, also {listed(names, 3)}"
        one, every = os.path.join(folder, names[0]), command("convert", folder, all=True, out=OUT)
        raise Conflict(what, "Nothing was written.", f"Name the file of one: {one}; to keep everything: {every}")


def left_beside(checkpoint: Checkpoint, place: str = "", written: Container[str] = ()) -> list[Note]:
    """The note on what is left out where weights are written. place: put before names, of which some are written."""
    names = [name for name in (os.path.join(place, name) for name in beside(checkpoint)) if name not in written]
    return [Note(MEMBERS, f"left out, as only the folder's weights are written: {listed(names, 6)}")] if names else []


def _folder_of(source: Input) -> Folder:
    """The folder, opened afresh; for a file, the one that it is in."""
    return Folder(source.path if isinstance(source, Folder) else os.path.dirname(source.path) or os.curdir)


def open_member(folder: Folder, name: str) -> Checkpoint:
    """Opens a member. Raises `Corrupt` for one whose own members are folders again, and what opening it raises."""
    if name.endswith(".json"):
        if (table := json_or_none(path := os.path.join(folder.path, name), MAX_TABLE)) is None:
            raise damaged(path, "it is not JSON that can be read")
        return Checkpoint(fields(table), "json")
    source = open_input(os.path.join(folder.path, name))
    if isinstance(source, Source):
        source.share_descriptors()
    elif (layout := layout_of(source)) is not None and any(_is_folder(source, member) for member in layout.names):
        raise Corrupt(f"{source} holds folders of checkpoints and is inside one", "A link may point back to it.")
    return read_alone(source)


# Do they belong together? --------------------------------------------------------------------------------------------


def _of_other_steps(checkpoint: Checkpoint, members: dict[str, Checkpoint]) -> dict[str, str]:
    """Members that were certainly saved at another step than the rest, each with why. checkpoint: what another format
    reads of the folder.

    Ranks step together: Megatron's files state their iteration, the random states of accelerate a step. A Trainer's
    optimizer and scheduler do, too, and no more often than it counts; less often where a gradient scaler skips steps.
    """
    keys = {
        name: "iteration" if "/" in name else "step" for name in members if "/" in name or RANDOM_STATES.fullmatch(name)
    }
    late = _behind({name: fields(members[name].tree).get(key) for name, key in keys.items()})
    if not (total := step_in(members.get(STATE))):
        return late
    engines = {name: member.metadata.get("step") for name, member in ((_ENGINE, checkpoint), *members.items())}
    late |= _behind({**engines, STATE: total})
    taken: dict[str, int] = {}  # steps of an optimizer or the Trainer's scheduler, where they are certain
    for name, member in members.items():
        values: list[Any] = []
        for _, optimizer in optimizers(member.tree) if name != STATE else ():
            steps = [slots.get("step") for slots in optimizer["state"].values() if isinstance(slots, dict)]
            if len(steps) <= MAX_STEPS:  # parameters that were frozen for a while have taken fewer than others
                values += steps
        if name == SCHEDULER and "base_lrs" in fields(member.tree):
            values.append(fields(member.tree).get("last_epoch"))
        numbers = (number_in(value) or 0 for value in values)
        taken[name] = max((int(number) for number in numbers if 0 <= number < 1 << 53), default=0)
    if not any(step for name, step in taken.items() if name.startswith("optimizer")):
        return late  # under DeepSpeed the scheduler takes a step for each rank
    return late | _behind(taken | {STATE: total if total < max(taken.values()) else 0})


def _behind(steps: dict[str, Any]) -> dict[str, str]:
    """Of the members that say their step (another than 0), those that are behind the latest, each with why."""
    stated = {name: step for name, step in steps.items() if type(step) is int and step > 0}
    last = max(stated, key=lambda name: stated[name], default="")
    reference = f"and {printable(last)} of step {stated.get(last, 0):,}"
    behind = {name: step for name, step in stated.items() if step < stated[last]}
    return {name: f"{printable(name)} is of step {step:,}, {reference}" for name, step in behind.items()}


# The kinds of folders ------------------------------------------------------------------------------------------------


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _is_model(folder: Folder, name: str) -> bool:
    """True for the folder of a model in another one, if it is no checkpoint of a run."""
    files = {*_names_in(folder, name)} if _is_folder(folder, name) else set[str]()
    return bool(files & {CONFIG, ADAPTER}) and STATE not in files and any(map(_is_weights, files))


def _training_members(folder: Folder, *, beside: bool = False) -> MemberFiles | None:
    """Files that transformers' Trainer and accelerate save beside weights; the modules of sentence-transformers.

    beside: another format reads the folder, and stands for it.
    """
    names = [name for name in folder.names if BESIDE_WEIGHTS.fullmatch(name) and not _is_folder(folder, name)]
    sets = []
    for name in folder.names:
        if _FOLDERS.fullmatch(name) and _is_folder(folder, name):
            inner = Folder(os.path.join(folder.path, name))
            kinds = (kind for kind in FORMATS if kind.name != NAME and kind.is_folder)
            is_read = any(kind.detect(b"", inner) for kind in kinds)  # by another format
            sets += [name] if is_read or any(file.endswith("_states.pt") for file in inner.names) else []
    modules = list(_components(folder, "modules.json"))
    weights = [name for name, what in modules if what == "weights"]
    missing = [*missing_names(names, RANDOM_STATES), *(name for name, what in modules if not what)]
    missing += [name for name in renamed(folder.names, BESIDE_WEIGHTS) if name not in missing]
    accelerates = any(name.startswith("random_states_") for name in names)
    is_trainers = any(name.startswith(("trainer_state", "training_args", "rng_state")) for name in names)
    models: list[str] = []  # in folders of their own: by hooks of a script, as those of diffusers; adapters with names
    if (accelerates or is_trainers) and not beside and not any(name.startswith(_WITH_WEIGHTS) for name in sets + names):
        models = [name for name in folder.names if _is_model(folder, name)]
    # What the others belong to, first.
    members = [*models, *sorted([*sets, *names, *weights], key=lambda name: not name.startswith(_WITH_WEIGHTS))]
    for match in filter(None, map(_NUMBERED.fullmatch, names)):  # by accelerate, from the first on
        stem, suffix, count = match["stem"], match["suffix"], min(int(match["number"]), MAX_MEMBERS)
        others = [f"{stem}{f'_{n}' if n or suffix != '.bin' else ''}{suffix}" for n in range(count)]
        missing += [name for name in others if name not in folder and name not in missing]
    # A Trainer saves all of these or, with save_only_model, none. DeepSpeed has the scheduler with its own optimizer.
    by_trainer = not {STATE, "training_args.bin"}.isdisjoint(names)
    if by_trainer and any(name.startswith(("rng_state", SCHEDULER)) for name in names):
        of_deepspeed = any(name.startswith("global_step") for name in sets)
        is_sharded = any(name.startswith("pytorch_model_fsdp_") for name in sets)
        if not of_deepspeed and not any(map(_OPTIMIZER.fullmatch, folder.names)):
            missing.append("optimizer_0" if is_sharded else OPTIMIZER)
        missing += [] if of_deepspeed or SCHEDULER in names else [SCHEDULER]
        missing += [] if STATE in names else [STATE]
    # The file that a program writes last, where it wrote those before: else it was stopped while it saved.
    optimizer = {OPTIMIZER, "optimizer.bin"}.intersection(names)  # the latter with FSDP, and by accelerate itself
    if optimizer and "training_args.bin" in names and STATE not in (*names, *missing):
        missing.append(STATE)
    elif "optimizer.bin" in optimizer and not (accelerates or is_trainers):
        missing.append("random_states_0.pkl")
    if beside:
        evidence = sets or modules or any(name.startswith(_TRAINING) for name in names)
    else:  # people call files optimizer.pt, too; these are what the programs alone write
        evidence = sets or weights or accelerates or any(name.startswith("trainer_state") for name in names)
        if not (models or weights or any(name.startswith(_WITH_WEIGHTS) for name in members)):
            missing.append("pytorch_model_fsdp_0" if sets else "model.safetensors")
    kind, engine = "a training checkpoint in several files", "accelerate" if accelerates else ""
    if is_trainers:
        kind, engine = "a checkpoint of transformers' Trainer", "transformers"
    elif modules:
        kind, engine = "a model of sentence-transformers", "sentence-transformers"
    return MemberFiles(kind, engine, tuple(members), tuple(missing), beside) if evidence else None


# Modules of sentence-transformers that save weights; of others (Pooling, Normalize) there is a configuration alone.
_WITH_OWN_WEIGHTS = frozenset(
    "Dense LSTM CNN LayerNorm WeightedLayerPooling WordEmbeddings WordWeights StaticEmbedding SparseAutoEncoder".split()
)


def _components(folder: Folder, table: str) -> Iterator[tuple[str, str]]:
    """The folders that a table of diffusers or of sentence-transformers (by `path`) lists, and what is there:
    `weights`, `config.json`, other `files` or nothing."""
    listing = json_or_none(os.path.join(folder.path, table), MAX_TABLE) if table in folder else None
    modules = [*map(fields, items(listing))] if table == "modules.json" else []
    pairs = [(module.get("path"), module.get("type")) for module in modules]
    if any(name == "" for name, _ in pairs) and ROUTER in folder:  # chooses among modules in folders of their own
        pairs += fields(json_in(folder.path, ROUTER).get("types")).items()
    names, types = [name for name, _ in pairs], {str(name).strip("/"): str(kind) for name, kind in pairs}
    for name, value in fields(listing).items() if table == "model_index.json" else ():
        if not name.startswith("_") and len(items(value)) == 2 and value[0] is not None:
            names.append(name)
    for name in names:
        if name == "" and CONFIG in folder:  # the transformer itself
            yield "model.safetensors", "files" if any(map(_is_weights, folder.names)) else ""
        elif type(name) is str and (name := name.strip("/")) and "/" not in name:
            files = _names_in(folder, name) if name not in (".", "..") else []
            kind = CONFIG if CONFIG in files else "files" if files else ""
            if any(map(_is_weights, files)):
                yield name, "weights"
            elif kind and types.get(name, "").rpartition(".")[2] in _WITH_OWN_WEIGHTS:
                yield f"{name}/model.safetensors", ""
            elif kind or not types.get(name, "").endswith(".Normalize"):  # saved no file before sentence-transformers 5
                yield name, kind


def _is_folder(folder: Folder, name: str) -> bool:
    return name in folder and folder_at(os.path.join(folder.path, name))  # `..` is none of its names


def _names_in(folder: Folder, name: str) -> list[str]:
    return names_in(os.path.join(folder.path, name))


def claimed(folder: Folder) -> set[str]:
    """The names in a checkpoint's folder that belong to it: its index and shards, the ranks' files, its members."""
    layout = _training_members(folder, beside=True) or layout_of(folder)
    names = {name.partition("/")[0] for name in (layout.names if layout is not None else ())}
    kinds = (_OF_A_CHECKPOINT, BESIDE_WEIGHTS, OF_WORLD, FSDP_RANKS, PIECES)
    return names | {name for name in folder.names if any(kind.fullmatch(name) for kind in kinds)}


def step_in(state: Checkpoint | None) -> int:
    """The step that a Trainer's state was saved at; 0 where it says none."""
    step = state.tree.get("global_step") if state is not None else None
    return step if type(step) is int else 0


def step_of(folder: str) -> dict[str, Any]:
    """The progress of a Trainer by its state: `{"global_step": 500, "epoch": 1.0}`; empty without one."""
    state = json_in(folder, STATE) if STATE in names_in(folder) else {}
    return {key: value for key, value in state.items() if key in ("global_step", "epoch")}


# What they would run --------------------------------------------------------------------------------------------------

MAX_FILES = 10_000  # that are judged; each is opened
_OF_DCP, _TENSORS = (".distcp", ".metadata"), (".pt", ".pth", ".bin", ".safetensors")


def all_uses(checkpoint: Checkpoint) -> Iterator[tuple[NameUse, str]]:
    """Everything that is not inert in a checkpoint, and what is unknown in other files of its folder, with addresses.

    In another file the address begins with its name: `optimizer.bin: state/0`.
    """
    reported = set()
    for use, place in uses_of(checkpoint):
        reported.add((use.how, use.name))
        yield use, place
    yield from ((use, place) for use, place in _judged(checkpoint)[0] if (use.how, use.name) not in reported)


def unjudged(checkpoint: Checkpoint) -> list[str]:
    """The names of files of its folder that look like pickles, and could not be read as such."""
    return _judged(checkpoint)[1]


@while_open()
def _judged(checkpoint: Checkpoint) -> tuple[list[tuple[NameUse, str]], list[str]]:
    folder: str = checkpoint.kept.get(FOLDER, "")
    uses, failed = list[tuple[NameUse, str]](), list[str]()
    sources = checkpoint.source.files if isinstance(checkpoint.source, Folder) and checkpoint.source.far else {}
    if "beside" not in checkpoint.kept:
        for count, name in enumerate(_names_below(folder) if folder else ()):
            if count == MAX_FILES:
                failed.append(f"{name} and all after it")
                break
            try:
                source = sources.get(name) or Source(os.path.join(folder, name))
                source.share_descriptors()  # there may be thousands of them
                file_uses = list(uses_of(read_alone(source))) if is_pickled(source) else []
            except NotACheckpoint:
                continue
            except (CkptoolError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
                failed.append(name)
                continue
            uses += ((use, f"{name}: {place or 'the top'}") for use, place in file_uses if use.verdict == UNKNOWN)
        checkpoint.kept["beside"] = uses, failed
    judged: tuple[list[tuple[NameUse, str]], list[str]] = checkpoint.kept["beside"]
    return judged


def is_pickled(source: Source) -> bool:
    """True for a file that is a pickle, or has one inside, by its content."""
    head = source.read(0, min(HEAD, source.size))
    return any(kind.pickled and kind.detect(head, source) for kind in FORMATS)


def _names_below(folder: str) -> Iterator[str]:
    """The files below a folder by their names in it, not those of hidden folders. Links to folders are not followed."""
    stack = [""]
    while stack:
        below = stack.pop()
        entries: list[tuple[str, bool, bool]] = []
        with suppress(CkptoolError):
            entries = entries_of(os.path.join(folder, below))
        for name, is_folder, is_file in entries:
            path = os.path.join(below, name)
            if is_folder:
                stack += [] if name.startswith(".") else [path]
            elif not name.endswith(_OF_DCP) and (is_file or not folder_at(os.path.join(folder, path))):
                yield path
