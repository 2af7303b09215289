"""The commands of the group Change: each writes a checkpoint changed in one way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Annotated

from ckptool.cli.options import (
    AsJson,
    At,
    Call,
    ChangedFiles,
    ChangeOutputOptions,
    DryRun,
    Exclude,
    Files,
    Force,
    KeepUnknown,
    Only,
    Out,
    OutputOptions,
    Part,
    argument,
    calls,
    examples,
    once,
    option,
    pairs,
    write_each,
    writes,
)
from ckptool.cli.output import QUOTE_RULES, Answer, Answers, progress_bar, was_redirected
from ckptool.errors import UsageError, printable


@examples(("ckptool strip-module model.pt -o clean.pt", "module.fc.weight becomes fc.weight"))
@writes
def strip_module(
    files: ChangedFiles,
    target: ChangeOutputOptions,
    prefix: Annotated[
        list[str] | None, option("--prefix PREFIX", "Remove this instead of the wrappers' prefixes. Repeatable.")
    ] = None,
    partial: Annotated[bool, option("--partial", "Go ahead where only some keys have module.")] = False,
) -> None:
    """Remove the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed from the keys."""


@examples(("ckptool add-module model.pt --at ema_state_dict -o wrapped.pt", "for a wrapped model"))
@writes
def add_module(
    files: ChangedFiles,
    target: ChangeOutputOptions,
    prefix: Annotated[str, option("--prefix PREFIX", "The prefix to add to every key.")] = "module.",
) -> None:
    """Add module. in front of the keys, as DataParallel does."""


@examples(("ckptool rename model.pt 'module.conv{n}.* => stem.{n}.*' -n -o renamed.pt", "preview, write nothing"))
@writes
def rename(
    words: Annotated[
        list[str],
        argument(
            "FILE|RULE",
            "Checkpoints (FILE#ADDRESS changes only that part, and writes the whole file), and rules 'OLD => NEW'"
            " for whole keys: * stands for anything, {n} for anything without a dot.",
        ),
    ],
    target: ChangeOutputOptions,
    call: Call,
    rules_file: Annotated[str | None, option("--rules FILE.yaml", "More rules, from a file.")] = None,
) -> Answers:
    """Rename keys by rules: rename model.pt 'blocks.{n}.* => layers.{n}.*' -o OUT. The first rule that matches wins."""
    files, given = _files_and_rules("rename", words, rules_file is not None)
    return write_each("rename", files, target, partial(call, rules=given))


@examples(
    ("ckptool translate vit.pt --rules vit-timm -n -o hf.pt", "a layout that ships: preview it"),
    ("ckptool translate vit.pt '*qkv.* => *{q,k,v}.* : split 0' --rest keep -o o.pt", "your own rules"),
    ("ckptool translate --find a.pt b.pt -o rules.yaml", "the rules between two checkpoints"),
    ("ckptool translate b.pt --rules rules.yaml --reverse -o back.pt", "the way back"),
)
@writes
def translate(
    target: ChangeOutputOptions,
    call: Call,
    words: Annotated[
        list[str] | None,
        argument(
            "FILE|RULE",
            "Checkpoints (FILE#ADDRESS changes only that part, and writes the whole file), and rules"
            " 'OLD[, OLD] => NEW[, NEW] : OPERATION | …': transpose, split, cat, stack, … (docs/translate.md).",
        ),
    ] = None,
    rules_file: Annotated[
        str | None, option("--rules FILE.yaml|LAYOUT", "More rules, from a file; or a layout that ships.")
    ] = None,
    set: Annotated[
        list[str] | None, option("--set NAME=NUMBER", "A variable of the rules; else config.json has it. Repeatable.")
    ] = None,
    reverse: Annotated[bool, option("--reverse", "Apply the inverse rules. A layout finds out itself.")] = False,
    rest: Annotated[str, option("--rest WHAT", "Keys that no rule takes: refuse, keep or drop them.")] = "refuse",
    shipped: Annotated[bool, option("--list", "List the layouts that ship; with --rules, what one needs.")] = False,
    like: Annotated[
        str | None, option("--like DIR", "Take configuration and tokenizer for an output folder from this one.")
    ] = None,
    shard_size: Annotated[
        str | None, option("--shard-size SIZE", "Write a folder of files of at most this size: 5GB.")
    ] = None,
    find: Annotated[
        bool, option("--find", "Of two files A B: find the rules that make B of A; -o writes them.")
    ] = False,
) -> Answers:
    """Change tensors by rules: split, join, transpose, reorder and rename them. One layout becomes another."""
    if shipped:
        from ckptool.verbs.layouts import layouts

        return Answers([Answer(layouts(rules_file))], target.as_json)
    if not words:
        raise UsageError("translate was given no file", "", "See the layouts that ship: ckptool translate --list")
    files, given = _files_and_rules("translate", words, rules_file is not None or find)
    if find:
        return _found_rules(files, given, target)
    return write_each("translate", files, target, partial(call, rules=given))


def _found_rules(files: Sequence[str], rules: Sequence[str], target: OutputOptions) -> Answers:
    from ckptool.verbs.find_rules import find_rules

    if len(files) != 2 or rules or target.folder or target.in_place:
        raise UsageError(
            "translate --find takes two checkpoints and no rules",
            "It finds the rules that make the second of the first.",
            "For example: ckptool translate --find a.pt b.pt -o rules.yaml",
        )
    report = find_rules(files[0], files[1], target.out, overwrite=target.overwrite, dry_run=target.dry_run)
    return Answers([Answer(report, exit_code=0 if report.complete else 1)], target.as_json)


def _files_and_rules(verb: str, words: Sequence[str], more: bool) -> tuple[list[str], list[str]]:
    """The words that are files, and those that are rules.  more: there are rules beside them."""
    from ckptool.checkpoint.paths import refused_place
    from ckptool.formats.opening import split

    rules = [word for word in words if "=>" in word and not os.path.lexists(word)]
    files = [word for word in words if word not in rules]
    if was_redirected(files):
        raise UsageError(f"{verb} was given only part of a rule: it ends at its =", *QUOTE_RULES)
    ruled = bool(rules) or more or len(files) == 1
    for word in files:
        odd = any(sign in word for sign in ("->", "=", "*", "{", " "))
        if (odd or not ruled) and not os.path.lexists(split(word)[0]) and not refused_place(word):
            raise UsageError(
                f"'{word}' is neither a file nor a rule",
                "A rule is 'OLD => NEW', in quotes and with => between them.",
                f"For example: ckptool {verb} model.pt 'a.* => b.*' -o OUT",
            )
    if not files:
        raise UsageError(
            f"{verb} was given no file",
            "All of its arguments are rules.",
            f"For example: ckptool {verb} model.pt 'a.* => b.*' -o OUT",
        )
    return files, rules


@examples(
    ("ckptool remap model.pt --to cpu -o cpu.pt", "loads on any machine"),
    ("ckptool remap model.pt --map cuda:0=cuda:1 -o moved.pt", "from one GPU to another"),
)
@writes
def remap(
    files: ChangedFiles,
    target: ChangeOutputOptions,
    call: Call,
    to: Annotated[str | None, option("--to DEVICE", "Device for everything: cpu, cuda:0, …")] = None,
    moves: Annotated[
        list[str] | None, option("--map OLD=NEW", "Move only what is on OLD: cuda:1=cuda:0. Repeatable.")
    ] = None,
) -> Answers:
    """Change the devices that a checkpoint's tensors are tagged with, so that it loads on this machine."""
    table = pairs(moves or (), "--map", "--map cuda:1=cuda:0")
    return write_each("remap", files, target, partial(call, moves=table))


@examples(
    ("ckptool cast model.pt --dtype bf16 -o half.pt", "half the size"),
    ("ckptool cast fp8/ --dtype bf16 --dequantize -o bf16/", "a folder of quantized weights"),
)
@writes
def cast(
    files: ChangedFiles,
    target: ChangeOutputOptions,
    dtype: Annotated[str, option("--dtype DTYPE", "bf16, f16, f32, float8_e4m3fn, …", show_default=False)],
    only: Only = None,
    exclude: Exclude = None,
    dequantize: Annotated[
        bool, option("--dequantize", "Compute the weights of fp8, GPTQ, AWQ, bitsandbytes, … from their scales.")
    ] = False,
    block_size: Annotated[str, option("--block-size RxC", "With --dequantize: the block that shares a scale.")] = "",
) -> None:
    """Convert the floating-point tensors of the weights to another dtype, and report which lose values."""


@examples(("ckptool edit model.pt --drop optimizer --set epoch:=0 -o edited.pt", "drop and set entries"))
@writes
def edit(
    files: ChangedFiles,
    target: ChangeOutputOptions,
    call: Call,
    drop: Annotated[
        list[str] | None, option("--drop PATTERN", "Drop matching entries below the address. Repeatable.")
    ] = None,
    set: Annotated[list[str] | None, option("--set PATH:=JSON", "Set a plain value: epoch:=3. Repeatable.")] = None,
    tensor: Annotated[
        list[str] | None, option("--tensor PATH=FILE.npy", "Give a tensor new values. Repeatable.")
    ] = None,
) -> Answers:
    """Drop entries, set plain values, replace the values of tensors."""
    from ckptool.transforms.edit import parse_assignment

    values = once("--set", [parse_assignment(text) for text in set or ()])
    arrays = pairs(tensor or (), "--tensor", "--tensor state_dict/fc.bias=bias.npy")
    return write_each("edit", files, target, partial(call, set=values, tensor=arrays))


@examples(("ckptool slim model.pt -o small.pt", "without optimizer state"))
@writes
def slim(
    files: ChangedFiles,
    target: ChangeOutputOptions,
    dedup: Annotated[
        bool, option("--dedup", "Store equal tensors once; ckptool separates them again on load.")
    ] = False,
    keep_optimizer: Annotated[bool, option("--keep-optimizer", "Drop only bytes that no tensor uses.")] = False,
) -> None:
    """Drop optimizer state and the unused bytes behind slices, and report what each saved."""


class Ties(str, Enum):
    record = "record"
    copy = "copy"


class OptimizerAs(str, Enum):
    names = "names"
    ids = "ids"
    flat = "flat"


@examples(
    ("ckptool convert model.pt -o model.safetensors", "the weights"),
    ("ckptool convert model.pt --all -o all.safetensors", "everything; converting back restores it"),
    ("ckptool convert model.pt --weights-only -o plain.pt", "for torch.load's default, weights_only=True"),
    ("ckptool convert model.pt --shard-size 5GB -o shards", "in shards, as on the Hugging Face Hub"),
    ("ckptool convert model.pt -o model.dcp --ranks 8", "for torch.distributed.checkpoint, sharded as FSDP2 does"),
)
@writes
def convert(
    files: Files,
    target: OutputOptions,
    all: Annotated[bool, option("--all", "Keep everything, so that converting back restores it.")] = False,
    only: Only = None,
    exclude: Exclude = None,
    ties: Annotated[
        Ties, option("--ties", "Tied tensors: stored once and recorded, or copied for each name.")
    ] = Ties.record,
    materialize: Annotated[bool, option("--materialize", "Write expanded views out in full.")] = False,
    weights_only: Annotated[
        bool, option("--weights-only", "Write plain values in place of what torch.load(weights_only=True) refuses.")
    ] = False,
    shard_size: Annotated[
        str | None,
        option(
            "--shard-size SIZE", "Write a folder of safetensors shards of at most 5GB, 500MiB, … each, with an index."
        ),
    ] = None,
    against: Annotated[
        str | None,
        option(
            "--against MODEL", "A model, its spec or code: names for --optimizer-as, shapes for FSDP's flat parameters."
        ),
    ] = None,
    like: Annotated[
        str | None, option("--like DIR", "Copy config and tokenizer from this folder of the same model.")
    ] = None,
    optimizer_as: Annotated[
        OptimizerAs | None,
        option("--optimizer-as", "Optimizer state by parameter name, by number, or as state.NAME.KEY."),
    ] = None,
    rules_file: Annotated[
        str | None,
        option(
            "--rules FILE.yaml", "Rules to join model-parallel ranks (Megatron's mp_rank_XX, Llama) or unstack layers."
        ),
    ] = None,
    ranks: Annotated[
        int | None, option("--ranks N", "Shard a .dcp folder for N ranks; it loads at any world size.")
    ] = None,
    shard_dim: Annotated[
        int | None, option("--shard-dim D", "With --ranks: shard tensors along this dimension (0).")
    ] = None,
    at: At = None,
    part: Part = False,
) -> None:
    """Convert between .pt, .dcp and .safetensors: one set of weights, or --all. From .pt to .pt: a compact file."""


@examples(("ckptool recover cut.pt -o saved.pt", "salvage a file that was cut off"))
@calls
def recover(
    file: Annotated[str, argument("FILE", "A truncated or damaged checkpoint; the whole file, not FILE#ADDRESS.")],
    call: Call,
    out: Out = None,
    fill_from: Annotated[
        str | None,
        option(
            "--fill-from OTHER",
            "Take lost tensors from this checkpoint: same key, type and shape. Every later inspect reports it.",
        ),
    ] = None,
    overwrite: Force = False,
    dry_run: DryRun = False,
    keep_unknown: KeepUnknown = False,
    as_json: AsJson = False,
) -> Answers:
    """Salvage what is intact of a damaged file; undo an interrupted in-place edit. Exit 1: something is lost."""
    with progress_bar(f"recover {printable(os.path.basename(file))}") as progress:
        done = call(progress=progress)
    return Answers([Answer(done, exit_code=0 if done.complete else 1)], as_json)


class Form(str, Enum):
    plain = "plain"
    old = "old"
    new = "new"


@examples(("ckptool bake normed.pt -o plain.pt", "weight_g and weight_v become weight"))
@writes
def bake(
    files: ChangedFiles,
    target: ChangeOutputOptions,
    form: Annotated[Form, option("--form", "plain folds; old and new rename the parts of weight norm.")] = Form.plain,
) -> None:
    """Fold weight norm and pruning into plain weights."""
