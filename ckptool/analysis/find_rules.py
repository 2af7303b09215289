"""The rules that were found between two checkpoints, and the proof: what of the second one they make of the first."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptool.commands import OUT, command
from ckptool.errors import counted, listed, printable
from ckptool.facts import Note, Report, Told, bold, cyan, green, yellow

SHOWN = 6


@dataclass(frozen=True, slots=True)
class FoundRule:
    """A rule and what it makes. tensors: how many.  by_value: those with the bytes of the other checkpoint's.

    alike: those among them whose bytes other tensors have as well, so that names or their order tell which is which.
    """

    text: str
    tensors: int
    by_value: int
    alike: int

    def evidence(self) -> str:
        texts = [f"{self.by_value:,} of {counted(self.tensors, 'tensor')} by value"]
        if self.by_value < self.tensors:
            texts.append(f"{self.tensors - self.by_value:,} by name and shape only: the values differ")
        if self.alike:
            why = "with the values of others as well, distinguished by names or their order alone: check them"
            texts.append(f"{self.alike:,} {why}")
        return "; ".join(texts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FoundRules(Report):
    """Rules that make the tensors of `new` of those of `old`, as applying them has shown.

    total: tensors of the new one.  by_value: those that are made with the same bytes.  by_name: names of those that are
    made with the same type and shape, and other values; reordered: of those, the same values in another order;
    unrelated: values that no fine-tuning explains.  missing: those that are not made.  dropped: keys of the old one
    that become nothing; drop: patterns for them.  output: the file of rules.
    """

    schema = "find-rules/2"
    verdict = "complete"

    old: str
    new: str
    rules: tuple[FoundRule, ...]
    total: int
    by_value: int
    by_name: tuple[str, ...]
    reordered: tuple[str, ...]
    unrelated: tuple[str, ...]
    missing: tuple[str, ...]
    dropped: tuple[str, ...]
    drop: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    output: str = ""
    dry_run: bool = False

    @property
    def complete(self) -> bool:
        """True if every tensor of the new checkpoint is made, with its values or those that it was fine-tuned from."""
        return not (self.missing or self.reordered or self.unrelated)

    def told(self) -> Told:
        paint = green if self.by_value == self.total else yellow
        yield bold(self.old), " → ", bold(self.new), ": ", paint(self._proof())
        for rule in self.rules:
            yield "  ", cyan(rule.text)
            yield f"    {rule.evidence()}"
        yield from (f"  {text}" for text in self._left_over())
        if self.output:
            yield f"{'would write' if self.dry_run else 'wrote'} {self.output}"
            if not self._lacks():
                yield "  ", cyan(str(command("translate", self.old, rules_file=self.output, out=OUT)))
        yield from self.notes

    def rules_file(self) -> str:
        """The rules as the file that `translate --rules` takes, with the evidence as comments."""
        names = " → ".join(printable(os.path.basename(name)) for name in (self.old, self.new))
        lines = [f"# {names}: {self._proof()}.", *(f"# {printable(text)}" for text in self._left_over()), "rules:"]
        for rule in self.rules:
            lines += [f"# {rule.evidence()}", _item(rule.text)]
        lines += ["# What is not made may be of these: check them."] if self.drop and self._lacks() else []
        lines += ["drop:", *map(_item, self.drop)] if self.drop else []
        return "\n".join(lines) + "\n"

    def _proof(self) -> str:
        texts = [f"{self.by_value:,} of {self.total:,} by value"]
        texts += [f"{len(self.by_name):,} by name and shape"] if self.by_name else []
        return ", ".join([*texts, *([f"{len(self.missing):,} not made"] if self.missing else [])])

    def _left_over(self) -> list[str]:
        tuned = [name for name in self.by_name if name not in {*self.reordered, *self.unrelated}]
        named = [("not made", self.missing), ("become nothing", self.dropped), ("values differ", tuned)]
        named += [("wrong: the same values in another order, which no rule makes", self.reordered)]
        named += [("wrong: unrelated values, as of another model", self.unrelated)]
        return [f"{what}: {listed(names, SHOWN)}" for what, names in named if names]

    def _lacks(self) -> bool:
        """True where a tensor is made wrong, or is not made and no second name of one."""
        wrong = [*self.missing, *self.reordered, *self.unrelated]
        return len(wrong) > sum(note.code == "second-name" for note in self.notes)


def _item(text: str) -> str:
    import yaml

    return yaml.safe_dump([text], default_style="'", width=1 << 30, allow_unicode=False).strip()
