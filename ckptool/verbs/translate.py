"""`translate`: rules that change tensors, of one's own or of a layout that ships."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from ckptool.analysis.find_rules import FoundRules
from ckptool.analysis.save import SaveResult, Written
from ckptool.checkpoint import Checkpoint, Note, TensorEntry
from ckptool.checkpoint.state_dicts import model_state_dicts, one_state_dict
from ckptool.commands import several
from ckptool.errors import Conflict, UsageError, counted, listed, printable
from ckptool.formats import SHARDED
from ckptool.formats.model_folder import CONFIG, ModelFolder, configuration, model_folder
from ckptool.formats.opening import CheckpointLike, Opened, PathLike, open_to_change
from ckptool.formats.sharded.writing import divided
from ckptool.options import argument, option, verb
from ckptool.transforms.arithmetic import Lookup
from ckptool.transforms.flatten import export, left_behind, siblings
from ckptool.transforms.join_ranks import open_joined
from ckptool.transforms.translate import TranslatedCheckpoint, translate_roots
from ckptool.transforms.translate.apply import REST, Step, TranslatedRoot
from ckptool.transforms.translate.layouts import LayoutList, LayoutRules, layout_or_file
from ckptool.transforms.translate.scope import Scope
from ckptool.transforms.translate.translation import Translation, parse_setting, parse_translation_rule
from ckptool.verbs._change import FileChange, begin_change
from ckptool.verbs._options import ChangedAt, Out, Texts, files_and_rules
from ckptool.verbs._save import ChangeOptions, Output, Unpack, save
from ckptool.verbs.find_rules import find_rules
from ckptool.verbs.layouts import layouts

MANY = 12  # steps that are all shown without -n


def _words(
    words: Annotated[
        Sequence[str],
        argument(
            "FILE|RULE",
            "Checkpoints (FILE#ADDRESS changes only that part, and writes the whole file), and rules"
            " 'OLD[, OLD] => NEW[, NEW] : OPERATION | …': transpose, split, cat, stack, … (docs/translate.md).",
            several=True,
        ),
    ] = (),
    rules_file: str | None = None,
    shipped: Annotated[bool, option("--list", "List the layouts that ship; with --rules, what one needs.")] = False,
    find: Annotated[
        bool, option("--find", "Of two files A B: find the rules that make B of A; -o writes them.")
    ] = False,
    **options: Any,
) -> dict[str, Any] | LayoutList | FoundRules:
    if shipped:
        return layouts(rules_file)
    if not words:
        raise UsageError("translate was given no file", "", "See the layouts that ship: ckptool translate --list")
    files, rules = files_and_rules("translate", words, rules_file is not None or find)
    if not find:
        return {"file": files, "rules": rules}
    if len(files) != 2 or rules or options.get("folder") or options.get("in_place"):
        raise UsageError(
            "translate --find takes two checkpoints and no rules",
            "It finds the rules that make the second of the first.",
            "For example: ckptool translate --find a.pt b.pt -o rules.yaml",
        )
    return find_rules(*files, **{name: options[name] for name in ("out", "overwrite", "dry_run") if name in options})


@verb(
    ("ckptool translate vit.pt --rules vit-timm -n -o hf.pt", "a layout that ships: preview it"),
    ("ckptool translate vit.pt '*qkv.* => *{q,k,v}.* : split 0' --rest keep -o o.pt", "your own rules"),
    ("ckptool translate --find a.pt b.pt -o rules.yaml", "the rules between two checkpoints"),
    ("ckptool translate b.pt --rules rules.yaml --reverse -o back.pt", "the way back"),
    words=_words,
)
def translate(
    file: CheckpointLike,
    rules: str | Sequence[str] = (),
    out: Out = None,
    *,
    rules_file: Annotated[
        PathLike | None, option("--rules FILE.yaml|LAYOUT", "More rules, from a file; or a layout that ships.")
    ] = None,
    set: Annotated[
        Texts | dict[str, int],
        option("--set NAME=NUMBER", "A variable of the rules; else config.json has it. Repeatable.", several=True),
    ] = (),
    reverse: Annotated[bool, option("--reverse", "Apply the inverse rules. A layout finds out itself.")] = False,
    rest: Annotated[str, option("--rest WHAT", "Keys that no rule takes: refuse, keep or drop them.")] = "refuse",
    like: Annotated[
        PathLike | None,
        option("--like DIR", "Take configuration and tokenizer for an output folder from this one."),
    ] = None,
    shard_size: Annotated[
        str | int | None, option("--shard-size SIZE", "Write a folder of files of at most this size: 5GB.")
    ] = None,
    at: ChangedAt = None,
    **options: Unpack[ChangeOptions],
) -> Written | Any:
    """Renames, splits, joins and reorders the tensors of all model weights by rules `OLD => NEW : OPERATION | …`.

    rules_file: a YAML file of more rules, or the name of a layout that ships; it may say how ranks are joined first.
    set: numbers for variables, `heads=12`; else they are taken from config.json beside the file.  reverse: the way
    back.  rest: `refuse`, `keep` or `drop` keys that no rule takes.  like: a folder of the other layout, whose
    configuration a folder of weights gets.  shard_size: the most bytes of tensors in one file of that.
    To safetensors goes one set of weights alone, and what is left behind is listed; to `.pt` the whole file.
    Raises `NoMatch` for a rule or key without a match, `Conflict` where two tensors get one name or one is missing,
    `UsageError`, which points at the rule, where a tensor does not fit.
    """
    if rest not in REST:
        raise UsageError(f"unknown --rest {rest!r}", f"Available: {', '.join(REST)}.")
    texts = several(rules)
    if rules_file is None and len(texts) == 1 and "=>" not in texts[0]:
        rules_file = texts.pop()  # as the option of the command is called
    own = [rule for text in texts for rule in parse_translation_rule(text)]
    layout = None if rules_file is None else layout_or_file(rules_file)
    translation = layout.translation if layout else Translation(())
    translation = replace(translation, rules=(*own, *translation.rules), complete=translation.complete and not own)
    if not translation.rules and translation.join is None:
        raise UsageError(
            "translate was given no rule",
            "A rule is OLD => NEW : OPERATION.",
            "For example: ckptool translate FILE '*.qkv.{p} => *.{q,k,v}.{p} : split 0' -o OUT; or --rules LAYOUT",
        )
    given = set if isinstance(set, dict) else dict(map(parse_setting, several(set)))

    def opening(file: CheckpointLike, at: str | None) -> Opened:
        def numbers(config: dict[str, Any]) -> Lookup:
            return Scope(given, translation.variables, config, {}).lookup

        if translation.join is None or reverse or not isinstance(file, (str, os.PathLike)):
            return open_to_change(file, at)
        return open_joined(file, translation.join, at, numbers=numbers)

    change = begin_change("translate", file, out, at, options, opening)
    roots = model_state_dicts(change.part, named=change.named)
    there = translation
    config = configuration(change.part) or configuration(change.original)
    if layout is not None:
        layout = replace(layout, translation=translation)
        sides = {layout.side_of(root.node, reverse, config) for root in roots}
        if len(sides) > 1:
            what = f"the sets of weights are of several sides of {layout.name}"
            raise Conflict(what, "One translation goes one way.", "Name one of them: --at ADDRESS")
        translation, reverse = layout.rules_for(*sides), layout.sides[sides.pop()][1]
    elif reverse:
        translation = translation.reversed()
    output, weights_alone = _output(change, like, shard_size)
    done = translate_roots(
        change.part,
        roots,
        translation,
        given=given,
        config=config,
        rest=rest,
        way_back=(lambda: there) if reverse else None,
        moments=not weights_alone,
    )
    beside = _beside(change, done.checkpoint, like, layout, reverse)
    result, behind, notes = _saved(replace(change, output=output), done.checkpoint, shard_size, beside, weights_alone)
    details = [*_details(change, done, layout, reverse), *behind]
    return change.written(result, _summary(done, layout, reverse), facts=_facts(done), details=details, notes=notes)


def _output(change: FileChange, like: PathLike | None, shard_size: int | str | None) -> tuple[Output, bool]:
    """Where to, and whether of a whole file only one set of weights goes there, as into a container of tensors."""
    output = change.output
    if output.container is None and ((output.path or "").endswith("/") or shard_size is not None or like is not None):
        output = replace(output, container=output.format(SHARDED).name)
    container = output.format(change.original.container)
    return output, container.tensors_only and not (output.in_place or change.original.tensors_only)


def _saved(
    change: FileChange, done: Checkpoint, shard_size: int | str | None, beside: ModelFolder, weights_alone: bool
) -> tuple[SaveResult, list[str], tuple[Note, ...]]:
    """Writes the translated file; to a container of tensors, as `convert` does, its one set of weights.

    Lines on what was taken and what stays behind, and notes on what the container cannot say.
    """
    output = change.output
    container = output.format(change.original.container)
    if not weights_alone:
        if container.writes_folder and container.tensors_only:
            done = divided(replace(done, origin=None), shard_size, beside.stem)
        return change.save(done, beside=beside), [], ()
    root, remark = one_state_dict(done, "" if change.named else None)
    copies = not container.keeps_ties
    exported = export(done, root, copy_ties=copies, container=container.name, keep_metadata=container.keeps_metadata)
    behind = [*exported.left_behind, *siblings(change.original.tree, change.part.base)]
    left = left_behind(change.original, behind, exported.checkpoint.tree, chosen=change.named)
    changed = replace(exported.checkpoint, base=())
    if container.writes_folder:
        changed = divided(replace(changed, origin=None), shard_size, beside.stem)
    result = save(output, change.original, changed, beside=beside)
    return (
        result,
        [*([remark] if remark else []), *left.lines],
        exported.notes,
    )


def _beside(
    change: FileChange, done: Checkpoint, like: PathLike | None, layout: LayoutRules | None, reverse: bool
) -> ModelFolder:
    """The files for a folder of weights: those of a folder of the new layout, as those beside describe the old one,
    unless the layout says that it is both."""
    if like is not None:
        return model_folder(change.part, done.tree, os.fspath(like))
    found = model_folder(change.original, done.tree)
    if layout is not None and layout.same_config:
        return found
    library = "" if layout is None else (layout.old if reverse else layout.new).name
    left = f"{CONFIG} (of the layout before; --like DIR takes that of a folder of the new one)"
    return ModelFolder(library, found.place, left=(left,) if found.files else ())


def _summary(done: TranslatedCheckpoint, layout: LayoutRules | None, reverse: bool) -> str:
    before = sum(len(step.keys) for _, root in done.roots for step in root.steps)
    after = sum(len(step.outputs) for _, root in done.roots for step in root.steps)
    sides = ""
    if layout is not None and layout.old.name:
        names = (layout.new.name, layout.old.name) if reverse else (layout.old.name, layout.new.name)
        sides = f", {names[0]} → {names[1]}"
    return f"{counted(before, 'tensor')} became {after:,}{sides}"


def _facts(done: TranslatedCheckpoint) -> dict[str, Any]:
    return {
        "optimizers": done.optimizers,
        "reversible": not done.lost and not any(root.dropped for _, root in done.roots),
        "not_reversible": list(done.lost),
        "roots": [
            {
                "root": place,
                "steps": [_step(step, root) for step in root.steps],
                "dropped": list(root.dropped),
                "kept": list(root.kept),
                "filled": list(root.filled),
                "unfilled": list(root.unfilled),
            }
            for place, root in done.roots
        ],
    }


def _step(step: Step, root: TranslatedRoot) -> dict[str, Any]:
    def described(names: Iterable[str], shapes: Iterable[Any]) -> list[dict[str, Any]]:
        return [{"name": name, "shape": shape} for name, shape in zip(names, shapes, strict=True)]

    outputs = [root.items[name] for name in step.outputs]
    return {
        "rule": step.rule.text,
        "place": step.rule.place,
        "operations": step.rule.operations,
        "inputs": described(step.keys, [list(shape) for shape in step.shapes] or map(_shape, outputs)),
        "outputs": described(step.outputs, [_shape(each) for each in outputs]),
        "reversible": not step.lost,
    }


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, TensorEntry) else None


def _details(
    change: FileChange, done: TranslatedCheckpoint, layout: LayoutRules | None, reverse: bool
) -> Iterator[str]:
    for place, root in done.roots:
        if len(done.roots) > 1:
            yield f"{printable(place) or 'the whole file'}:"
        shown = root.steps if change.output.dry_run or len(root.steps) <= MANY else _first_of_rules(root)
        yield from (_line(step, root) for step in shown)
        if len(shown) < len(root.steps):
            yield f"… {len(root.steps) - len(shown):,} more like these (-n shows all)"
        for names, what in (
            (root.tied, "left out, being tied to a tensor that is there"),
            ([name for name in root.dropped if name not in root.tied], "left out"),
            (root.kept, "kept as they are, as no rule takes them"),
            (root.filled, "filled with zeros"),
            (root.unfilled, "left out, as all of them are zeros"),
        ):
            if names:
                yield f"{what}: {listed([printable(name) for name in names], 6)}"
    yield from (f"not reversible: {line}" for line in done.lost)
    if done.optimizers:
        yield f"the moments of {counted(done.optimizers, 'optimizer')} went through the same rules"
    yield from layout.notes if layout is not None and not reverse else ()


def _first_of_rules(root: TranslatedRoot) -> list[Step]:
    return list({step.rule.origin: step for step in reversed(root.steps)}.values())[::-1]


def _line(step: Step, root: TranslatedRoot) -> str:
    def named(pairs: Iterable[tuple[str, Any]]) -> str:
        texts = [printable(name) + (f" {list(shape)}" if shape is not None else "") for name, shape in pairs]
        return listed(texts, 4)

    old = named(zip(step.keys, step.shapes or [None] * len(step.keys), strict=True))
    new = named((name, _shape(root.items[name])) for name in step.outputs)
    return f"{old} → {new}" + (f" : {step.rule.operations}" if step.rule.chain else "")
