"""The memory that weights need, as one line and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from ckptool.analysis.memory import MemoryNeeds
from ckptool.errors import counted
from ckptool.facts import short, size
from ckptool.render.json import Json


def memory_text(needs: MemoryNeeds) -> str:
    """`11.7M parameters: 44.6 MB f32 + 40 B i64; …`: what is known of it, in one line; empty where nothing is."""
    facts = []
    if needs.sets:
        counts = "weights" if needs.parameters is None else counted(needs.parameters, "parameter", shown=short)
        counts += f" in {counted(needs.sets, 'set')} of weights" if needs.sets > 1 else ""
        facts.append(f"{counts}: {' + '.join(f'{size(n)} {name}' for name, n in needs.dtypes) or '0 B'}")
    facts += [f"EMA {size(needs.average)}"] if needs.average else []
    facts += [f"optimizer {size(needs.optimizer)} ({needs.optimizer_share:.0%})"] if needs.optimizer else []
    facts += [", ".join(_uses(needs))] if needs.to_load else []
    return ("this part alone: " if needs.partial and facts else "") + "; ".join(facts).replace("%", " %")


def _uses(needs: MemoryNeeds) -> list[str]:
    uses = [f"{size(needs.to_load or 0)} to load"]
    if needs.to_train and needs.trained:
        uses.append(f"{size(needs.to_train)} to train with Adam in {' + '.join(needs.trained)} without activations")
    return uses


def memory_json(needs: MemoryNeeds) -> Json:
    """The fields of the report; sizes in bytes, null where the file does not tell."""
    return asdict(needs) | {"dtypes": dict(needs.dtypes), "trained": list(needs.trained)}
