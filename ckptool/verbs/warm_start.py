"""`warm-start`: the tensors of a checkpoint that fit a model, shown first and only then written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from ckptool import formats
from ckptool.analysis.findings import Chain
from ckptool.analysis.quantization import refuse_codes
from ckptool.analysis.warm_start import LoadReport, NewFile, Suggestion, refusal
from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.nodes import same_kind
from ckptool.commands import option, repeated, several, verb
from ckptool.conventions.state_dicts import one_state_dict, without_wrappers
from ckptool.formats import CheckpointLike, PathLike, marks, open_whole
from ckptool.formats.in_memory import together
from ckptool.formats.model_folder import model_folder
from ckptool.output import replace_file
from ckptool.verbs._options import AGAINST, At, Exclude, File, IsPart, Only, Out, Texts, check_text, find_target
from ckptool.verbs._save import Save, Unpack, change_of

TRANSLATED = ("nothing-loaded", "shape-mismatch", "min-loaded")  # the refusals that a translation resolves

Rules = Texts | Mapping[str, str]
Mismatch = Literal["error", "skip"]
_SHARE = "Fraction of the values that must load: 0.95. Default: half, and all that the suggested rules would load."


@verb(
    ("ckptool warm-start model.pt --against other.pt", "what fits, and rules for the rest"),
    ("ckptool warm-start model.pt --against net.py:build -o init.pt", "write what fits"),
    ("ckptool warm-start old.pt --against new.pt --resize 'wte*=rows(mean)' -o w.pt", "a larger vocabulary"),
)
def warm_start(
    file: File,
    against: Annotated[CheckpointLike, AGAINST],
    out: Out = None,
    *,
    at: At = None,
    rename: Annotated[Rules, repeated("--rename RULE", "'OLD => NEW' for keys of FILE.")] = (),
    rules_file: Annotated[str | None, option("--rules FILE", "A YAML file of such rules.")] = None,
    only: Only = (),
    exclude: Exclude = (),
    on_mismatch: Annotated[
        Mismatch, option("--on-mismatch", "Tensors of another shape: refuse, or keep the model's.")
    ] = "error",
    resize: Annotated[
        Rules, repeated("--resize PATTERN=HOW", "How to resize: 'pos_embed=bicubic(cls=1)', '*embed*=rows(mean)'.")
    ] = (),
    min_loaded: Annotated[float | None, option("--min-loaded FRACTION", _SHARE)] = None,
    strict: Annotated[bool, option("--strict", "Allow no missing and no unexpected names.")] = False,
    suggest: Annotated[PathLike | None, option("--suggest FILE", "Write rules for --rules, so that more fits.")] = None,
    part: IsPart = False,
    **options: Unpack[Save],
) -> LoadReport | Any:
    """Matches a checkpoint with the model `against`; with `out`, writes a checkpoint of exactly the model's keys.

    The model may be a module; code of your own needs torch. Rules may have operations, as those of `translate`; `only`
    and `exclude` are patterns for names of the model, and so is that of `resize`. The half that must load does not
    count what `only`, `exclude` and skipped shapes leave out.
    `refused` of the report says why nothing is written to `out`; `report.require()` raises instead.
    """
    from ckptool.names.rule_files import all_rules
    from ckptool.transforms.memory_names import as_named  # what only the work needs, and not the help
    from ckptool.transforms.translate import translated_items
    from ckptool.transforms.warm_start import filled, match_options, plan_warm_start

    rules = all_rules(several(rename, " => "), rules_file)
    changing = None if rules.only_renames else rules
    rule_options = ((), None) if changing else (rename, rules_file)
    match = match_options(*rule_options, only, exclude, None, resize, on_mismatch, min_loaded, strict)
    change = change_of("warm-start", out, options, file)
    dry_run, overwrite = bool(change.options["dry_run"]), bool(change.options["overwrite"])
    target = find_target(against, part=part)
    opened = open_whole(file, at, part=part)
    root, remark = one_state_dict(opened.checkpoint, opened.at)
    if changing is not None:
        root = replace(root, node=same_kind(root.node, translated_items(opened.checkpoint, changing, root.node)))
    else:
        root = as_named(root, opened.checkpoint, target.tensors)
    plan = plan_warm_start(root, opened.name, target, match, remark)
    report = plan.report
    refuse_codes(opened.checkpoint, root.node, report)
    if report.missing or report.mismatched:
        from ckptool.names.layout import translation_to

        weights = {without_wrappers(key): value for key, value in root.node.items() if type(key) is str}
        if (translation := translation_to(weights, target.tensors)) is not None:  # they are of another layout
            why, translate = translation
            line = str(Chain(report.source, report.root).fill(translate))
            fix = f"Translate it first: {line}"
            refused = tuple(replace(cause, fix=fix) if cause.code in TRANSLATED else cause for cause in report.refused)
            report = replace(report, suggestions=(Suggestion((), 0, 0, f"{why}: {line}"),), refused=refused)
    has_rules = any(suggestion.rules for suggestion in report.suggestions)
    if suggest is not None and has_rules:
        check_text(suggest, overwrite=overwrite)
    if change.live and not dry_run and not report.accepted:
        raise refusal(report)
    result: tuple[Any, ...] = ()
    if (out is not None or (change.live and not dry_run)) and report.accepted:
        tree, original, model = filled(target, plan.chosen, plan.states), opened.checkpoint, target.checkpoint
        names = (name.removeprefix(target.wrapper) for name in tree)
        taken = tuple(name for name in names if name not in plan.chosen and name not in plan.states)
        mark: dict[str, Any] = marks.recovered(original.metadata, root.path)
        if taken and model is not None:
            mark |= marks.recovered(model.metadata, before=mark)
        beside = model_folder(model, tree) if model is not None else None  # only sizes come from it
        container, tensors_only = (formats.DEFAULT, False) if model is None else (model.container, model.tensors_only)
        saved = change.write(
            original if model is None else together(original, [model]),
            Checkpoint(tree, container, mark, original.source, tensors_only=tensors_only),
            inputs=[model.source] if model is not None and model.source is not None else [],
            beside=beside if beside is not None and beside.files else None,
        )
        result, notes = saved.made, (*report.normalised, *saved.notes)
        new_file = NewFile(saved.output, saved.container, saved.file_bytes, saved.details)
        report = replace(report, taken=taken, output=new_file, normalised=notes, applied=not dry_run)
    if suggest is not None and not has_rules:
        what = f"no rules found that would make more fit;  {os.fspath(suggest)} was not written"
        report = replace(report, normalised=(*report.normalised, Note("no-suggestions", what)))
    elif suggest is not None:
        if not dry_run:
            from ckptool.transforms.suggest import rules_file as rules_text

            replace_file(rules_text(report.suggestions).encode(), suggest, overwrite=overwrite)
        report = replace(report, rules_file=os.fspath(suggest))
    return result[0] if result else report
