"""Renders `schema`: the schema itself, as text in lines; a list of those that there are."""

from __future__ import annotations

import json

from ckptool.checkpoint.registry import provides
from ckptool.render.json import Json
from ckptool.render.style import PLAIN, Style
from ckptool.reports.schema import SchemaReport


@provides("text", SchemaReport)
def schema_text(found: SchemaReport, *, style: Style = PLAIN) -> str:
    """The schema as JSON; of a list, each name with its commands and what it holds."""
    if found.document:
        return json.dumps(found.document, indent=2, ensure_ascii=True) + "\n"
    lines = []
    for name, (about, verbs) in found.names.items():
        lines += [style.bold(f"ckptool.{name}/1"), *style.prose(f"  {about}")]
        lines += style.prose(f"  printed by: {', '.join(verbs)}", "    ") if verbs[0] else []
    return "\n".join(lines) + "\n"


@provides("json", SchemaReport)
def schema_json(found: SchemaReport) -> Json:
    """The schema itself, which is JSON; of a list `ckptool.schemas/1`."""
    listed = [
        {"schema": f"ckptool.{name}/1", "about": about, "verbs": [verb for verb in verbs if verb]}
        for name, (about, verbs) in found.names.items()
    ]
    return found.document or {"schema": "ckptool.schemas/1", "schemas": listed}
