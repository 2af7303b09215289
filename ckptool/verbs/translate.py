"""`translate`: rules that change tensors, of one's own, of a layout that ships, or found between two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from ckptool.checkpoint import Note, TensorEntry
from ckptool.commands import ADDRESS, FILE, OUT, Slot, arg, argument, command, option, repeated, several, verb
from ckptool.conventions.state_dicts import model_state_dicts, one_state_dict
from ckptool.errors import Conflict, UsageError, counted, listed, printable
from ckptool.formats import SHARDED, CheckpointLike, Opened, PathLike, changeable, open_file, open_whole
from ckptool.formats.folder import CONFIG
from ckptool.formats.model_folder import ModelFolder, configuration, model_folder
from ckptool.formats.sharded import divided
from ckptool.names.layout import LIST, LayoutList, layout_or_file, shipped, shipped_layout
from ckptool.names.rules import Translation, parse_rules, parse_setting
from ckptool.output import replace_file
from ckptool.transforms.find_rules import FoundRules, proved_rules
from ckptool.transforms.flatten import export, left_behind, siblings
from ckptool.transforms.join_ranks import open_joined
from ckptool.transforms.translate import TranslatedCheckpoint, translate_roots
from ckptool.verbs._options import LIKE, SHARD_SIZE, ChangedAt, Out, Size, Texts, check_text, files_and_rules
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change

MANY = 12  # steps that are all shown without -n

_FILE_OR_RULE = (
    "Checkpoints (FILE#ADDRESS changes only that part, and writes the whole file), and rules"
    " 'OLD[, OLD] => NEW[, NEW] : OPERATION | …': transpose, split, cat, stack, … (docs/translate.md)."
)
Settings = Texts | dict[str, int]
Rest = Literal["refuse", "keep", "drop"]


def _words(
    words: Annotated[Sequence[str], argument("FILE|RULE", _FILE_OR_RULE, each=True)] = (),
    rules_file: str | None = None,
    show_list: Annotated[bool, option("--list", "List the shipped layouts; with --rules, what one needs.")] = False,
    find: Annotated[bool, option("--find", "Find the rules that turn file A into file B; -o writes them.")] = False,
    **options: Any,
) -> dict[str, Any] | LayoutList | FoundRules:
    if show_list:
        return layouts(rules_file)
    if not words:
        raise UsageError("translate was given no file", "", f"See the shipped layouts: {LIST}")
    files, rules = files_and_rules("translate", words, rules_file is not None or find)
    if not find:
        return {"file": files, "rules": rules}
    if len(files) != 2 or rules or options.get("folder") or options.get("in_place"):
        what = "translate --find takes two checkpoints and no rules"
        why = "It finds the rules that turn the first into the second."
        raise UsageError(what, why, "For example: ckptool translate --find a.pt b.pt -o rules.yaml")
    return find_rules(*files, **{name: options[name] for name in ("out", "overwrite", "dry_run") if name in options})


@verb(
    ("ckptool translate vit.pt --rules vit-timm -n -o hf.pt", "a shipped layout: preview it"),
    ("ckptool translate vit.pt '*qkv.* => *{q,k,v}.* : split 0' --rest keep -o o.pt", "your own rules"),
    ("ckptool translate --find a.pt b.pt -o rules.yaml", "the rules between two checkpoints"),
    ("ckptool translate b.pt --rules rules.yaml --reverse -o back.pt", "the way back"),
    from_words=_words,
)
def translate(
    file: CheckpointLike,
    rules: str | Sequence[str] = (),
    out: Out = None,
    *,
    rules_file: Annotated[PathLike | None, option("--rules FILE.yaml|LAYOUT", "Rules, or a shipped layout.")] = None,
    set: Annotated[Settings, repeated("--set NAME=NUMBER", "Set a variable; it overrides config.json.")] = (),
    reverse: Annotated[bool, option("--reverse", "Apply the inverse rules. A layout detects its side.")] = False,
    rest: Annotated[Rest, option("--rest WHAT", "Keys that no rule matches: refuse, keep or drop them.")] = "refuse",
    like: Annotated[PathLike | None, LIKE] = None,
    shard_size: Annotated[Size, SHARD_SIZE] = None,
    at: ChangedAt = None,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Renames, splits, joins and reorders the tensors of all model weights by rules `OLD => NEW : OPERATION | …`.

    A file of rules may say how ranks are joined first.
    To safetensors it writes one set of weights and lists what is left out; to `.pt` the whole file.
    Raises `NoMatch` for a rule or key without a match, `Conflict` where two tensors get one name or one is missing,
    `UsageError`, which points at the rule, where a tensor does not fit.
    """
    texts = several(rules)
    if rules_file is None and len(texts) == 1 and "=>" not in texts[0]:
        rules_file = texts.pop()  # the command names it with --rules, too
    extra = [rule for text in texts for rule in parse_rules(text)]
    layout = None if rules_file is None else layout_or_file(rules_file)
    translation = layout.translation if layout else Translation(())
    translation = replace(translation, rules=(*extra, *translation.rules), complete=translation.complete and not extra)
    if not (translation.rules or translation.joins):
        fix = f"For example: {command('translate', FILE, '*.qkv.{p} => *.{q,k,v}.{p} : split 0', out=OUT)}; "
        fix += f"or {arg(rules_file=Slot('LAYOUT'))}"
        raise UsageError("translate was given no rule", "A rule is OLD => NEW : OPERATION.", fix)
    settings = set if isinstance(set, dict) else dict(map(parse_setting, several(set)))

    def opening(file: CheckpointLike, at: str | None) -> Opened:
        if not translation.joins or reverse or not isinstance(file, (str, os.PathLike)):
            return changeable(open_file(file, at))
        return open_joined(file, translation, at, given=settings, like=like)

    change = begin_change("translate", file, out, at, options, opening)
    roots = model_state_dicts(change.part, named=change.named)
    forward = translation
    config = configuration(change.part) or configuration(change.original, like)
    if layout is not None:
        layout = replace(layout, translation=translation)
        sides = {layout.side_of(root.node, reverse, config) for root in roots}
        if len(sides) > 1:
            what = f"the sets of weights belong to different sides of {layout.name}"
            raise Conflict(what, "One translation goes in one direction.", f"Name one of them: {arg(at=ADDRESS)}")
        translation, reverse = layout.rules_for(*sides), layout.sides()[sides.pop()][1]
    elif reverse:
        translation = translation.reversed()
    chosen, original = change.options, change.original
    if shard_size is not None:
        change = change.into_folder(SHARDED, arg("shard_size"))
    elif like is not None and chosen["container"] is None:
        change = change.into(change.format(SHARDED).name)
    container = change.format(original.container)
    shards = container.writes_folder and container.tensors_only
    # Of a whole file, only one set of weights goes into a container of tensors, as `convert` takes it.
    weights_alone = container.tensors_only and not (chosen["in_place"] or original.tensors_only)
    setup: Any = {"given": settings, "config": config, "rest": rest, "moments": not weights_alone}
    outcome = translate_roots(change.part, roots, translation, way_back=(lambda: forward) if reverse else None, **setup)
    changed, behind, notes = outcome.checkpoint, list[str](), tuple[Note, ...]()
    # For a folder of weights: the files of a folder of the new layout, as those beside describe the old one, unless the
    # layout says that it is both.
    part = change.original if like is None else change.part
    beside = model_folder(part, changed.tree, None if like is None else os.fspath(like))
    if like is None and not (layout is not None and layout.same_config):
        library = "" if layout is None else (layout.old if reverse else layout.new).name
        leftover = f"{CONFIG} (of the layout before; {arg(like=Slot('DIR'))!s} takes that of a folder of the new one)"
        beside = ModelFolder(library, beside.place, left=(leftover,) if beside.files else ())
    if weights_alone:
        root, remark = one_state_dict(changed, "" if change.named else None)
        exported = export(changed, root, container)
        names = [*exported.left_behind, *siblings(original.tree, change.part.base)]
        leftovers = left_behind(original, names, exported.checkpoint.tree, chosen=change.named)
        changed, notes = replace(exported.checkpoint, base=()), exported.notes
        behind = [*([remark] if remark else []), *leftovers.lines]
    else:
        old = {key for _, root in outcome.roots for step in root.steps for key in step.keys}
        old -= {key for _, root in outcome.roots for key in root.items}
        notes = (*change.old_names(changed, old, moved=True),)
    if shards:
        changed = divided(replace(changed, origin=None), shard_size, beside.stem)
    written = change.write(original, changed, beside=beside) if weights_alone else change.save(changed, beside=beside)
    counts = [sum(len(getattr(s, end)) for _, root in outcome.roots for s in root.steps) for end in ("keys", "outputs")]
    summary = f"{counted(counts[0], 'tensor')} became {counts[1]:,}"
    if layout is not None and layout.old.name:
        sides_of = (layout.new.name, layout.old.name) if reverse else (layout.old.name, layout.new.name)
        summary += f", {' → '.join(sides_of)}"
    return written.about(
        summary,
        *_report_rows(outcome, bool(chosen["dry_run"])),
        *(layout.notes if layout is not None and not reverse else ()),
        *behind,
        notes=notes,
        reversible=not outcome.lost and not any(root.dropped for _, root in outcome.roots),
    )


def _report_rows(outcome: TranslatedCheckpoint, dry_run: bool) -> Iterator[Row]:
    def described(names: Iterable[str], shapes: Iterable[Any]) -> list[dict[str, Any]]:
        shapes = (None if shape is None else list(shape) for shape in shapes)
        return [{"name": name, "shape": shape} for name, shape in zip(names, shapes, strict=True)]

    roots, lines = [], []
    for place, root in outcome.roots:
        steps = list[dict[str, Any]]()
        for step in root.steps:
            values = [root.items[name] for name in step.outputs]
            shapes = [value.shape if isinstance(value, TensorEntry) else None for value in values]
            rule = {"rule": step.rule.text, "place": step.rule.place, "operations": step.rule.operations}
            inputs, outputs = described(step.keys, step.shapes or shapes), described(step.outputs, shapes)
            steps.append({**rule, "inputs": inputs, "outputs": outputs, "reversible": not step.lost})
        lines += [f"{place or 'the whole file'}:"] if len(outcome.roots) > 1 else []
        shown = dict(enumerate(steps))
        if len(steps) > MANY and not dry_run:  # the first of each rule
            firsts = {step.rule.origin: number for number, step in reversed([*enumerate(root.steps)])}
            shown = {number: steps[number] for number in sorted(firsts.values())[:MANY]}
        for number, fact in shown.items():
            sides, texts = (fact["inputs"], fact["outputs"]), []
            for side, has_shapes in zip(sides, (root.steps[number].shapes, True), strict=True):
                sizes = [f" {item['shape']}" if has_shapes and item["shape"] is not None else "" for item in side]
                texts.append(listed([item["name"] + size for item, size in zip(side, sizes, strict=True)], 4))
            lines.append(" → ".join(texts) + (f" : {fact['operations']}" if fact["operations"] else ""))
        if hidden := len(steps) - len(shown):
            lines.append(f"… {hidden:,} more like these ({arg(dry_run=True)} shows all)")
        dropped = [name for name in root.dropped if name not in root.tied]
        for names, what in (
            (root.tied, "left out, as tied to one that is there"),
            (dropped, "left out"),
            (root.kept, "kept as they are, as no rule matches them"),
            (root.filled, "filled with zeros"),
            (root.unfilled, "left out, as all of them are zeros"),
        ):
            lines += Row.named("", names, f"{what}:", 6).lines
        unmatched = {name: list(getattr(root, name)) for name in ("dropped", "kept", "filled", "unfilled")}
        roots.append({"root": place, "steps": steps, **unmatched})
    yield Row("roots", roots, lines)
    if outcome.lists:
        yield Row.named("lists", list(map(printable, outcome.lists)), "lists of tensors, left in the old layout:")
    yield Row("not_reversible", list(outcome.lost), [f"not reversible: {line}" for line in outcome.lost])
    moved = f"the same rules were applied to the moments of {counted(outcome.optimizers, 'optimizer')}"
    yield Row("optimizers", outcome.optimizers, [moved] if outcome.optimizers else [])


def layouts(name: str | None = None) -> LayoutList:
    """The shipped layouts, between whose sides `translate(rules_file=NAME)` converts; or the one of that name.

    Raises `UsageError` for an unknown name.
    """
    return LayoutList(tuple(map(shipped_layout, shipped() if name is None else [name])))


def find_rules(
    old: CheckpointLike,
    new: CheckpointLike,
    out: PathLike | None = None,
    *,
    part: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> FoundRules:
    """Rules that turn the tensors of `old` into those of `new`: renamed, split, joined, transposed, reordered.

    They are found by value, and by names and shapes where values differ, then applied and compared. out: a new file of
    them for `translate(rules_file=…)`.  part: take also checkpoints that are only a rank's share or one shard.
    overwrite: replace an existing `out`.  dry_run: write nothing.
    Raises `UsageError` listing the sets of weights where a checkpoint has several, `OutputExists`.
    """
    if out is not None:
        check_text(out, overwrite=overwrite)
    opened = [open_whole(file, part=part or None) for file in (old, new)]  # the command has no such option
    old_root, new_root = (one_state_dict(source.checkpoint, source.at)[0] for source in opened)
    names = [source.argument or source.name for source in opened]
    report = replace(proved_rules(old_root.node, new_root.node), old=names[0], new=names[1], dry_run=dry_run)
    report = replace(report, output=os.fspath(out) if out is not None and report.rules else "")
    if report.output and not dry_run:
        replace_file(report.rules_file().encode(), report.output, overwrite=overwrite)
    return report
