"""Our own YAML says the same to both parsers of PyYAML: the one in Python, and libyaml, which not every PyYAML has."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ckptool.analysis.findings import table

HOME = Path(__file__).parent.parent
OTHERS = {"build", "dist", "node_modules", "runs"}
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def texts() -> Iterator[tuple[str, str]]:
    """Every YAML file of the project, and every YAML example in its pages."""
    for folder, below, names in os.walk(HOME):
        below[:] = [name for name in below if name not in OTHERS and (not name.startswith(".") or name == ".ci")]
        for path in (Path(folder, name) for name in names):
            if path.suffix in (".yaml", ".yml"):
                yield str(path), path.read_text()
            elif path.suffix == ".md":
                yield from ((f"{path}: {text[:40]!r}", text) for text in BLOCK.findall(path.read_text()))


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="this PyYAML has no libyaml")
def test_both_parsers_read_the_same() -> None:
    found = dict(texts())
    assert len(found) > 45
    for name, text in found.items():
        # repr: NaN is not equal to itself
        one, other = (list(yaml.load_all(text, loader)) for loader in (yaml.SafeLoader, yaml.CSafeLoader))
        assert repr(one) == repr(other), name


def test_the_parser_in_python_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("findings", "error_texts")
    quick = [table(name) for name in names]
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    table.cache_clear()
    assert [table(name) for name in names] == quick
