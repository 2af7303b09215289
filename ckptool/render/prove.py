"""Renders the proof of a command as text and JSON."""

from __future__ import annotations

from collections import Counter

from ckptool.analysis.prove import ANY, POLLING, PRELOAD, CommandKill, CommandProof
from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, printable
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style

WAYS = {
    PRELOAD: "calls, by a preloaded library; each kill comes before one, or half way through a write",
    POLLING: "files that appear, grow and go (calls cannot be seen here); each kill comes just after",
}
USUAL = "an unseeded generator, PYTHONHASHSEED and the order of sets, the clock, the number of threads"


@provides("text", CommandProof)
def command_text(found: CommandProof, *, style: Style = PLAIN) -> str:
    """The unbroken runs, the kills and what they covered, what is wrong and why; then the verdict."""
    length = counted(found.steps, "optimizer step") if found.steps else f"{found.seconds:.1f} s"
    rows = [("unbroken", f"{length}, {counted(len(found.compared), 'checkpoint')} at the end")]
    if not found.unstable:
        rows += [("watched", WAYS[found.watched])]
        rows += [("killed", _kill(kill)) for kill in found.kills] or [("killed", "never: it ended before a kill came")]
        rows += [("kinds of events", _coverage(found))]
    rows += [("note", printable(remark)) for remark in found.remarks]
    rows += [("found", printable(each)) for each in found.findings]
    if found.differs:
        rows += [("differs", printable(found.differs))]
        rows += [("probably not saved", printable(cause)) for cause in found.causes]
    lines = [f"{name:<20}{value}" for name, value in rows]
    if found.proved:
        kills = counted(len(found.kills), "kill")
        lines.append(style.green(f"proved for {kills}: the checkpoints at the end are those of a run never killed."))
        lines.append("  Other moments, other machines and power failures were not tried.")
    elif found.unstable:
        lines.append(
            style.yellow("not tried: two unbroken runs end differently, so nothing can be compared with them.")
        )
        lines += [f"  {printable(each)}" for each in found.unstable]
        lines.append(f"  Such differences usually come from {USUAL}.")
    elif found.exit() == 1:
        lines.append(style.red("disproved: killed and started again, it does not end as a run that was never killed."))
    else:
        lines.append(style.yellow("not tried: it ended before it could be killed."))
    if found.kept:
        lines.append(f"  its runs are kept in {printable(found.kept)}")
    return "\n".join(lines) + "\n"


def _kill(kill: CommandKill) -> str:
    step = "" if kill.step is None else f"after step {kill.step}, "
    resumed = "" if kill.resumed is None else f"; resumed from {kill.resumed}"
    return f"{step}{'at any moment' if kill.place == ANY else f'at: {kill.place}'}{resumed}"


def _coverage(found: CommandProof) -> str:
    """Kind of event: at how many of how many a kill came; kinds that there are and no kill came at are told."""
    kills = Counter(kill.place for kill in found.kills)
    told = [f"{kind} {kills[kind]} of {count:,}" for kind, count in found.events.items()]
    return ", ".join(told) or "none was seen"


document(CommandProof, "prove_command", "proved *")
