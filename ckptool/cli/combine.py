"""The commands of the group Combine: several checkpoints into one, and apart again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from ckptool.cli.options import (
    AsJson,
    At,
    Call,
    Container,
    DryRun,
    Exclude,
    File,
    Force,
    KeepUnknown,
    Only,
    OutputOptions,
    Part,
    Verify,
    argument,
    calls,
    examples,
    option,
    pairs,
    write_each,
    writes,
)
from ckptool.cli.output import Answer, Answers, progress_bar
from ckptool.errors import Conflict, UsageError, counted, printable

_EXAMPLE = "For example: ckptool bundle -o gan.tar generator=G.pt discriminator=D.pt#state_dict epoch:=3"


@examples(("ckptool bundle G=a.pt D=b.pt epoch:=3 -o gan.pt", "several models in one file"))
@partial(writes, without=("--dir", "--skip-refused", "--jobs"))
def bundle(
    target: OutputOptions,
    call: Call,
    words: Annotated[
        list[str] | None,
        argument(
            "NAME=FILE|NAME:=JSON|FILE",
            "Members: files (NAME=FILE#ADDRESS for a part of one), plain values. Or one bundle to change.",
        ),
    ] = None,
    add: Annotated[
        list[str] | None, option("--add NAME=FILE", "Add a member (or NAME:=JSON) to the bundle. Repeatable.")
    ] = None,
    drop: Annotated[list[str] | None, option("--drop NAME", "Drop a member of the bundle. Repeatable.")] = None,
    rename: Annotated[
        list[str] | None, option("--rename OLD=NEW", "Rename a member of the bundle. Repeatable.")
    ] = None,
    from_folder: Annotated[str | None, option("--from DIR", "Reassemble what unbundle wrote to DIR.")] = None,
    dedup: Annotated[
        bool, option("--dedup", "Store equal tensors once; ckptool separates them again on load.")
    ] = False,
    part: Part = False,
) -> Answers:
    """Put several models, optimizers and values into one file: bundle -o gan.tar generator=G.pt epoch:=3."""
    if target.folder is not None:
        raise UsageError("bundle writes one file, but was given a folder", "All members go into one file.", _EXAMPLE)
    base, given = _base_and_members(words or [], bool(add or drop or rename or target.in_place))
    files, values = _members([*given, *(add or ())])
    renames = pairs(rename or (), "--rename", "--rename G=generator", str.partition)

    def write(_: str, **output: Any) -> Any:
        return call(files, file=base, values=values, rename=renames, **output)

    ways = "A new file: -o gan.tar or -o gan.safetensors; the bundle that is changed: --in-place"
    return write_each("bundle", [base or from_folder or target.out or ""], target, write, ways)


def _base_and_members(words: Sequence[str], changes: bool) -> tuple[str | None, Sequence[str]]:
    """The bundle to change, where one word names a file, and the words that name members."""
    if len(words) == 1 and ("=" not in words[0] or os.path.lexists(words[0])):
        return words[0], ()
    if changes and words:
        raise UsageError(
            f"bundle was given {counted(len(words), 'word')} besides its changes",
            "--add, --drop and --rename change one bundle.",
            "For example: ckptool bundle gan.tar --add epoch:=4 -o new.tar",
        )
    return None, words


def _members(words: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The files and the plain values among `NAME=FILE` and `NAME:=JSON`."""
    from ckptool.transforms.edit import parse_assignment

    files: dict[str, str] = {}
    values: dict[str, Any] = {}
    for word in words:
        name, separator, file = word.partition("=")
        if not (name and separator and file):
            raise UsageError(f"{word!r} names no member", "Write NAME=FILE or NAME:=JSON.", _EXAMPLE)
        plain = name.endswith(":")
        if plain:
            name, file = parse_assignment(word)
        if name in files or name in values:
            raise Conflict(
                f"two members are called {name}",
                "One member would replace the other. Nothing was written.",
                "Give one of them another name.",
            )
        (values if plain else files)[name] = file
    return files, values


@examples(("ckptool unbundle gan.pt -d parts", "one file per member"))
@calls
def unbundle(
    file: File,
    call: Call,
    folder: Annotated[
        str | None, option("-d --dir DIR", "Write the members and bundle.json into this new folder.")
    ] = None,
    only: Annotated[list[str] | None, option("--only NAME", "Write only this member. Repeatable.")] = None,
    container: Container = None,
    overwrite: Force = False,
    dry_run: DryRun = False,
    verify: Verify = False,
    keep_unknown: KeepUnknown = False,
    part: Part = False,
    as_json: AsJson = False,
) -> Answers:
    """Write each member of a bundle to its own file, and bundle.json, which says how they belong together."""
    return Answers(_unbundled(file, call), as_json)


def _unbundled(file: str, call: Call) -> Iterator[Answer]:
    with progress_bar(f"unbundle {printable(os.path.basename(file))}") as progress:
        report = call(progress=progress)
    yield Answer(report)


def _write_one(
    verb: str, files: Sequence[str], target: OutputOptions, write: Any, example: str = "For example: -o adapter/"
) -> Answers:
    """The answer of a verb that makes one new output of all that it was given."""
    if target.folder is not None or target.in_place:
        given = "a folder for several outputs" if target.folder is not None else "--in-place"
        raise UsageError(f"{verb} writes one new file or folder, and was given {given}", "", example)
    return write_each(verb, files, target, write, example)


_one_output = partial(writes, without=("--dir", "--in-place", "--skip-refused", "--jobs"), through=_write_one)


@examples(
    ("ckptool average a.pt b.pt c.pt -o mean.pt", "a model soup"),
    ("ckptool average a.pt b.pt --ema 0.99 -o ema.pt", "later files count more"),
    ("ckptool average a.pt b.pt --method ties --base c.pt -o ties.pt", "what two fine-tuned models learned"),
)
@_one_output
def average(
    files: Annotated[
        list[str], argument("FILE…", "Checkpoints of one model, two or more, or FILE#ADDRESS for a part of one.")
    ],
    target: OutputOptions,
    call: Call,
    weights: Annotated[str | None, option("--weights W,W,…", "Weight of each file: 0.5,0.3,0.2.")] = None,
    weight: Annotated[
        list[str] | None, option("--weight PATTERN=W,W", "Weights for some keys: 'layers.0.*=0.3,0.7'. Repeatable.")
    ] = None,
    ema: Annotated[
        float | None, option("--ema DECAY", "An exponential moving average over the files in order.")
    ] = None,
    method: Annotated[str, option("--method HOW", "mean, slerp, task-arithmetic, ties or dare.")] = "mean",
    base: Annotated[
        str | None, option("--base FILE", "The model whose differences task-arithmetic, ties and dare add.")
    ] = None,
    density: Annotated[
        str | None, option("--density D", "Share of the differences that ties and dare keep (0.5).")
    ] = None,
    scale: Annotated[float | None, option("--lambda X", "Scale of the sum of the differences (1).")] = None,
    t: Annotated[float | None, option("--t T", "For slerp: 0 is the first file, 1 the second (0.5).")] = None,
    seed: Annotated[int | None, option("--seed N", "Seed of what dare keeps (0).")] = None,
    definition: Annotated[str | None, option("--definition WHOSE", "Whose ties and dare: mergekit or peft.")] = None,
    at: At = None,
    part: Part = False,
) -> Answers:
    """Average the weights of several checkpoints, or merge models, in bounded memory. Counters are the last file's."""
    shares, kept = _numbers("--weights", weights), _numbers("--density", density)

    def write(_: str, **output: Any) -> Any:
        return call(files, weights=shares, density=kept, **output)

    return _write_one("average", files[-1:], target, write, "For example: -o mean.pt")


Adapter = Annotated[
    str, argument("ADAPTER", "A LoRA, LoHa or LoKr: PEFT's folder, a file, or FILE#ADDRESS for a part of one.")
]
Config = Annotated[str | None, option("--config FILE.json", "Its adapter_config.json, if that is not beside it.")]
Rank = Annotated[int, option("--rank R", "The rank of every module.", show_default=False)]


@examples(
    ("ckptool lora merge model.pt adapter -o merged.safetensors", "a PEFT folder"),
    ("ckptool lora merge model.pt style.safetensors --scale 0.8 -o styled.pt", "kohya"),
)
@partial(_one_output, through=partial(_write_one, example="For example: -o merged.safetensors"))
def lora_merge(
    base: Annotated[str, argument("BASE", "The weights that it is for, or FILE#ADDRESS for a part of one.")],
    adapter: Adapter,
    target: OutputOptions,
    config: Config = None,
    scale: Annotated[float, option("--scale X", "Multiply its changes by this.")] = 1.0,
    at: At = None,
    part: Part = False,
    changed_base: Annotated[
        bool, option("--changed-base", "BASE is the one that PiSSA, OLoRA, LoftQ, CorDA or LoRA-GA changed.")
    ] = False,
) -> None:
    """Merge an adapter into its base, with the bits of PEFT's merge_and_unload. Every key is used, or exit 1."""


@examples(
    ("ckptool lora extract tuned.pt model.pt --rank 4 -o new/", "PEFT loads it"),
)
@_one_output
def lora_extract(
    tuned: Annotated[str, argument("TUNED", "The changed weights, FILE or FILE#ADDRESS for a part.")],
    base: Annotated[str, argument("BASE", "The weights before.")],
    target: OutputOptions,
    rank: Rank,
    energy: Annotated[
        float, option("--energy X", "Of each matrix the smallest rank that keeps this share, 0.99.")
    ] = 1.0,
    dtype: Annotated[str, option("--dtype DTYPE", "The type of the factors.")] = "f32",
    only: Only = None,
    exclude: Exclude = None,
) -> None:
    """Write what one model changed of another as an adapter of PEFT, of low rank, in bounded memory."""


@examples(("ckptool lora resize adapter --rank 8 -o small/", "by the SVD of every product, with its error"))
@_one_output
def lora_resize(adapter: Adapter, target: OutputOptions, rank: Rank, config: Config = None) -> None:
    """Write an adapter in another rank: truncated by SVD, or filled up with zeros. Its scale stays."""


@examples(
    ("ckptool lora convert style.safetensors --to peft --base model.pt -o style/", "kohya's file for PEFT"),
    ("ckptool lora convert adapter --to kohya --component unet -o k.safetensors", "and back"),
)
@_one_output
def lora_convert(
    adapter: Adapter,
    target: OutputOptions,
    to: Annotated[str, option("--to SCHEME", "The names: peft, kohya or diffusers.", show_default=False)],
    base: Annotated[
        list[str] | None, option("--base FILE", "A model that it is for: resolves kohya's names. Repeatable.")
    ] = None,
    component: Annotated[
        str | None, option("--component NAME", "The model that it is for: unet, te, te1, te2, transformer.")
    ] = None,
    fold: Annotated[bool, option("--fold", "Multiply the scales into the factors.")] = False,
    config: Config = None,
) -> None:
    """Write an adapter with the names of another library; its factors stay as they are."""


def _numbers(flag: str, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{flag} {text or ''!r} is not a list of numbers", "", f"For example: {flag} 0.5,0.3,0.2"
        ) from None
