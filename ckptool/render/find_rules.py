"""Rules between two checkpoints as text, as JSON, and as the file that `translate --rules` takes."""

from __future__ import annotations

import os

from ckptool.analysis.find_rules import FoundRule, FoundRules
from ckptool.checkpoint.registry import provides
from ckptool.commands import OUT, command
from ckptool.errors import counted, listed, printable
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style, notes_text

SHOWN = 6


@provides("text", FoundRules)
def find_rules_text(found: FoundRules, *, style: Style = PLAIN) -> str:
    """The proof, the rules with what each makes, and what is left over on either side."""
    paint = style.green if found.by_value == found.total else style.yellow
    lines = [f"{style.bold(printable(found.old))} → {style.bold(printable(found.new))}: {paint(_proof(found))}"]
    for rule in found.rules:
        lines += [f"  {style.cyan(printable(rule.text))}", f"    {_evidence(rule)}"]
    lines += [f"  {text}" for text in _left_over(found)]
    if found.output:
        lines.append(f"{'would write' if found.dry_run else 'wrote'} {printable(found.output)}")
        if not _lacks(found):
            lines.append(f"  {style.cyan(str(command('translate', found.old, rules=found.output, out=OUT)))}")
    notes = notes_text(found.notes, style)
    return "\n".join([*lines, *([notes] if notes else [])]) + "\n"


def _proof(found: FoundRules) -> str:
    texts = [f"{found.by_value:,} of {found.total:,} by value"]
    texts += [f"{len(found.by_name):,} by name and shape"] if found.by_name else []
    return ", ".join([*texts, *([f"{len(found.missing):,} not made"] if found.missing else [])])


def _evidence(rule: FoundRule) -> str:
    texts = [f"{rule.by_value:,} of {counted(rule.tensors, 'tensor')} by value"]
    if rule.by_value < rule.tensors:
        texts.append(f"{rule.tensors - rule.by_value:,} by name and shape only: the values differ")
    if rule.alike:
        texts.append(
            f"{rule.alike:,} with the values of others as well, distinguished by names or their order alone: check them"
        )
    return "; ".join(texts)


def _left_over(found: FoundRules) -> list[str]:
    tuned = [name for name in found.by_name if name not in {*found.reordered, *found.unrelated}]
    named = [("not made", found.missing), ("become nothing", found.dropped), ("values differ", tuned)]
    named += [("wrong: the same values in another order, which no rule makes", found.reordered)]
    named += [("wrong: unrelated values, as of another model", found.unrelated)]
    return [f"{what}: {listed([printable(name) for name in names], SHOWN)}" for what, names in named if names]


document(
    FoundRules,
    "find-rules",
    "old new total by_value complete rules by_name reordered unrelated missing dropped drop output dry_run notes",
)


def find_rules_file(found: FoundRules) -> str:
    """The rules as a YAML file, with the evidence as comments."""
    names = " → ".join(printable(os.path.basename(name)) for name in (found.old, found.new))
    lines = [f"# {names}: {_proof(found)}.", *(f"# {text}" for text in _left_over(found)), "rules:"]
    for rule in found.rules:
        lines += [f"# {_evidence(rule)}", _item(rule.text)]
    lines += ["# What is not made may be of these: check them."] if found.drop and _lacks(found) else []
    lines += ["drop:", *map(_item, found.drop)] if found.drop else []
    return "\n".join(lines) + "\n"


def _lacks(found: FoundRules) -> bool:
    """True where a tensor is made wrong, or is not made and no second name of one."""
    wrong = [*found.missing, *found.reordered, *found.unrelated]
    return len(wrong) > sum(note.code == "second-name" for note in found.notes)


def _item(text: str) -> str:
    import yaml

    return yaml.safe_dump([text], default_style="'", width=1 << 30, allow_unicode=False).strip()
