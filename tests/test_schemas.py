"""`ckptool schema VERB` describes every field that `VERB --json` prints; the jsonschema library judges, strictly."""

import io
import itertools
import json
import os
import random
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

from ckptool.cli import main
from ckptool.commands import VERBS as COMMANDS
from ckptool.commands import with_verb
from ckptool.verbs._schema import schema
from fixtures.make import make_all
from tests.support.cli import command_lines, judge
from tests.support.files import saved
from tests.support.small_files import PLAIN, make_small_files, plain_words
from tests.support.small_runs import MLP

HOME = Path(__file__).parents[1]
PART = 1 if "CKPTOOL_SOAK" in os.environ else 0.12  # of the lines over files
OVER_FILES = command_lines("""
inspect FILE --stats|show FILE|doctor FILE|doctor FILE --against m.pt|scan FILE|verify FILE --finite --digest
diff FILE m.pt|slim FILE -n|strip-module FILE -n|recover FILE -o x.pt -n|average FILE FILE -o x.pt -n
warm-start FILE --against m.pt|spec FILE
""")
ALONE = command_lines("""
inspect m.pt n.pt|inspect nothing.pt|inspect m.pt nothing.pt|inspect --nothing|verify m.pt --write-digest m.digests
verify n.pt --against m.digests|verify odd.pt --finite|scan . --full|show m.pt#sd/module.a.weight|show odd.pt#c
diff odd.pt m.pt|doctor --error 'size mismatch for fc.weight'|translate --list|translate --find m.pt w.pt
average m.pt n.pt --weights 0.5,0.7 -o y2.pt|recover cut.pt -o filled.pt
warm-start m.pt --against big.pt --on-mismatch skip
warm-start training_sgd.pt --against training_sgd.pt -n -o x.pt
warm-start m.pt --against w.pt --suggest suggested.yaml|train dry.yaml -n|inspect run|plot run
report m.pt n.pt g.pt -o q.html|report m.pt --against n.pt --run run -o p.html|scan run|explain
git-check cut.pt odd.pt|schema|strip-module m.pt n.pt -d many
""")
RUNS = ["eval run", "resume run", "prune run -n", "prune run"]


def make_files(folder: Path) -> None:
    """Small files in the working directory, those of all fixtures below it, and a few with something rare."""
    make_small_files(folder)
    (folder / "fixtures").mkdir()
    make_all(folder / "fixtures")
    os.symlink("fixtures/training_sgd.pt", "training_sgd.pt")
    layer = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2)}
    saved(layer, folder / "w.pt")
    saved({"a.weight": torch.ones(4, 5), "a.bias": torch.ones(4)}, folder / "big.pt")
    odd = {"nan": torch.tensor([float("nan"), float("inf")]), "c": torch.ones(2, dtype=torch.complex64).conj()}
    saved({**odd, "sparse": torch.eye(3).to_sparse(), "text": "x", "bytes": b"x", "set": {1}}, folder / "odd.pt")
    saved({"sd": {"a": torch.arange(40_000.0), "b": torch.arange(90_000.0)}}, folder / "cut.pt")
    os.truncate(folder / "cut.pt", 300_000)
    (folder / "dry.yaml").write_text(yaml.safe_dump({**MLP, "run": "dry", "train": {"steps": 2}}))


def lines() -> Iterator[list[str]]:
    """Command lines: of every command, on rare things, over all fixtures."""
    yield from ([*command.split(), *plain_words(command)] for command in PLAIN if command not in ("schema", "prove"))
    yield from (shlex.split(line) for line in [*ALONE, *RUNS])
    chosen = random.Random(1)
    files = [*sorted(Path("fixtures").iterdir()), *sorted((HOME / "fixtures").glob("*.pt"))]
    pairs = itertools.product(files, OVER_FILES)
    yield from (shlex.split(line.replace("FILE", str(file))) for file, line in pairs if chosen.random() < PART)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, Any]]]:
    """Command -> each line of it that was run, with what it printed as JSON."""
    folder = tmp_path_factory.mktemp("schemas")
    found = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_files(folder)
        for words in lines():
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"size mismatch for fc.weight")))
            out = io.StringIO()
            with redirect_stdout(out), redirect_stderr(io.StringIO()):
                main([*words, "--json"])
            found[with_verb(words)[0]].append((shlex.join(words), json.loads(out.getvalue())))
    return found


def test_what_every_command_prints_is_as_its_schema_says(printed: dict[str, list[tuple[str, Any]]]) -> None:
    wrong: dict[str, str] = {}
    for command, answers in printed.items():
        document = schema(command).document
        jsonschema.Draft202012Validator.check_schema(document)
        whole = jsonschema.Draft202012Validator(document)
        for line, value in answers:
            assert whole.is_valid(value), line
            wrong |= {f"{line}: {text}": "" for text in judge(document, value)}
    assert not wrong, "\n".join(list(wrong)[:30])
    assert sum(map(len, printed.values())) > 110


def test_every_schema_was_seen_and_is_strict(printed: dict[str, list[tuple[str, Any]]]) -> None:
    """A field more, a field less and a value of another type are refused, whatever the answer."""
    seen: dict[str, tuple[str, Any]] = {}
    for command, answers in printed.items():
        seen |= {value["schema"]: (command, value) for _, value in answers}
    not_tried = {"ckptool.prove/2"}  # tests/verbs
    assert {each.schema for each in schema().schemas} - not_tried == {*seen}
    assert set(COMMANDS) <= {verb for each in schema().schemas for verb in each.verbs}
    for command, value in seen.values():
        document = schema(command).document
        assert not list(judge(document, value))
        assert list(judge(document, {**value, "more": 1})), value["schema"]
        for key in set(value) - {"schema", "done", "results"}:
            less = {name: each for name, each in value.items() if name != key}
            optional = command == "show" or key in ("digest", "against")
            assert optional or list(judge(document, less)), (value["schema"], key)


def test_every_type_is_described_and_no_field_in_the_words_of_another() -> None:
    wrong: list[tuple[str, str]] = []
    for name in [each.schema for each in schema().schemas]:
        for kind, entry in schema(name).document["$defs"].items():
            told = {each: words.get("description", "") for each, words in entry["properties"].items()}
            others = rf"(?<![\w`])({'|'.join(told)}):\s|\bNone\b"
            wrong += [(kind, words) for words in [entry["description"], *told.values()] if re.search(others, words)]
            wrong += [(kind, entry["description"])] if len(entry["description"].split()) < 2 else []
    assert not wrong


@pytest.mark.parametrize("name", ["inspect", "ckptool.diff/2", "error", "lora merge"])
def test_a_schema_is_printed_as_json_either_way(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    text = capsys.readouterr().out
    assert main(["schema", name, "--json"]) == 0
    assert json.loads(text) == json.loads(capsys.readouterr().out) and json.loads(text)["$schema"].endswith(
        "2020-12/schema"
    )


def test_an_unknown_schema_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "inspct"]) == 1
    assert "Did you mean inspect?" in capsys.readouterr().err
