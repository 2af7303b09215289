"""What has to hold for a folder that an engine wrote: every verb takes it for one checkpoint, with the values that the
engine itself gives."""

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.cli import Run

ROOT = Path(__file__).parents[2] / "fixtures" / "engines"
TABLE = ROOT.parents[1] / "docs" / "formats.md"


def committed_cases() -> list[Path]:
    """The cases in the repository, by the names of their folders."""
    return sorted(path.parent for path in ROOT.glob("*/case.json"))


def scripts() -> dict[str, list[str]]:
    """Each `make_ENGINE` and its cases, read off its source: here the engine need not be installed."""
    found = {}
    for path in sorted(ROOT.glob("make_*.py")):
        for node in ast.parse(path.read_text()).body:
            target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
            if isinstance(target, ast.Name) and target.id == "CASES":
                keys = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
                found[path.stem] = [key.value for key in keys]
    return found


@dataclass(frozen=True)
class Row:
    """A row of the table of layouts in docs/formats.md: what is judged, and by what."""

    layout: str
    case: str
    judge: str
    optimizer: str  # its judge, or why there is none


def judged_layouts() -> dict[str, Row]:
    """The table of layouts, by case."""
    rows = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[1].startswith("`"):
            case = cells[1].strip("`")
            assert case not in rows, f"{case} has two rows"
            rows[case] = Row(cells[0], case, cells[2], cells[3])
    return rows


def check_case(case: Path, scratch: Path, run: Run) -> None:
    """Fails unless inspect, verify, scan, convert to safetensors, an HF folder and `.pt`, and diff all take the folder
    for one checkpoint and give the engine's own values, bit for bit; and its optimizer by name, where the case has it.
    """
    about = json.loads((case / "case.json").read_text())
    if "needs" in about:  # a package of an extra
        pytest.importorskip(about["needs"])
    folder = str(case / "checkpoint")
    model = folder + (f"#{about['model']}" if about.get("model") else "")  # only where the folder holds several models
    rules = ("--rules", str(case / about["rules"])) if "rules" in about else ()
    expected = load_file(case / "weights.safetensors")
    for verb in ("inspect", "verify") if rules else ("inspect", "verify", "doctor"):  # for which it is no whole yet
        done = run(verb, folder)
        assert done.code == 0, (verb, done)
    done = run("scan", folder, "--json")
    assert done.code == 0, done
    rows = json.loads(done.out)["files"]
    assert len(rows) == 1, [row["path"] for row in rows]
    for out in ("out.safetensors", "hf/", "out.pt"):
        to = ("--shard-size", "1MB") if out == "hf/" else ()
        done = run("convert", model, "-o", str(scratch / out), *to, *rules)
        assert done.code == 0, done
    _same(load_file(scratch / "out.safetensors"), expected)
    shards = sorted((scratch / "hf").glob("*.safetensors"))
    _same({name: value for file in shards for name, value in load_file(file).items()}, expected)
    for one in ([] if rules else [model, str(scratch / "out.pt")]) + [
        str(scratch / "hf")
    ]:  # .pt has `_extra_state` too
        done = run("diff", one, str(case / "weights.safetensors"))
        assert done.code == 0, done
    if (case / "optimizer.safetensors").exists():
        optimizer = str(case / about.get("optimizer_in", "checkpoint"))
        against = ("--against", str(case / about["against"])) if "against" in about else ()  # the model of its numbers
        done = run("convert", optimizer, "-o", str(scratch / "named.pt"), "--optimizer-as", "names", *against)
        assert done.code == 0, done
        # What lies beside it may hold arrays of numpy (random states) or arguments of Megatron.
        found = _optimizer_states(torch.load(scratch / "named.pt", weights_only=False))
        _same(found, load_file(case / "optimizer.safetensors"))


def _optimizer_states(tree: Any) -> dict[str, torch.Tensor]:
    """Every tensor of every optimizer state in a tree, as `NAME/KEY`."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(tree, dict):
        if isinstance(tree.get("state"), dict) and "param_groups" in tree:
            for name, slots in tree["state"].items():
                found |= {f"{name}/{key}": torch.as_tensor(value) for key, value in slots.items()}
        else:
            for value in tree.values():
                found |= _optimizer_states(value)
    return found


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        got = found[name]
        assert got.shape == value.shape and got.dtype == value.dtype, (name, got.dtype, value.dtype, got.shape)
        assert got.contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8)), name
