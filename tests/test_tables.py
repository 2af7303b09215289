"""What the documents say in tables and lists is what the program has, cell by cell."""

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

from ckptool import __version__, errors
from ckptool.analysis.diff import IGNORABLE
from ckptool.checkpoint import graph
from ckptool.cli import main
from ckptool.commands import ALIASES, VERBS, Use, with_verb
from ckptool.commands import VERBS as COMMANDS
from ckptool.formats import FORMATS, distributed, nested_streams, safetensors, torch_zip
from ckptool.formats.zip import directory
from ckptool.pickles import decode, objects, strings
from ckptool.training.config import Config, descend
from ckptool.verbs._explain import all_codes
from ckptool.verbs._schema import schema
from fixtures.make import make_all
from tests.support.cli import command_lines, judge
from tests.support.files import saved
from tests.support.small_files import PLAIN, make_small_files, plain_words
from tests.support.small_runs import MLP

HOME = Path(__file__).parents[1]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (*HOME.glob("*.md"), *HOME.glob("docs/*.md"))}
PROJECT = (HOME / "pyproject.toml").read_text(encoding="utf-8")
UNITS = {"MB": 10**6, "MiB": 1 << 20, "GiB": 1 << 30}
LIMITS = {
    "opcodes": [decode.FREE_OPCODES],
    "an inflated pickle": [
        torch_zip.inflated_limit(0),
        torch_zip.inflated_limit(1 << 20) >> 20,
        torch_zip.inflated_limit(1 << 40),
    ],
    "nesting of containers": [graph.MAX_DEPTH],
    "one string": [strings.MAX_STRING],
    "one integer": [objects.MAX_INTEGER_BITS],
    "a dictionary key": [objects.MAX_KEY_DEPTH],
    "torch streams inside torch streams": [nested_streams.MAX_NESTING],
    "classes and functions that one file names": [objects.MAX_NAMES],
    "dimensions of a tensor": [distributed.MAX_DIMENSIONS],
    "records of a zip; its directory": [directory.MAX_ENTRIES, directory.MAX_DIRECTORY],
    "a header of safetensors; its tensors": [safetensors.MAX_HEADER, safetensors.MAX_TENSORS],
}


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the rows of all tables whose first column is called so."""
    tables = re.findall(rf"^\| {heading} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", PAGES[page], re.MULTILINE)
    return [re.split(r" (?<!\\)\| ", line.strip("| ")) for table in tables for line in table.splitlines()]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def sentence(page: str, pattern: str) -> list[str]:
    """The names in a sentence."""
    (found,) = re.findall(pattern, " ".join(PAGES[page].split()))
    return names(found)


def test_every_container_and_which_are_written() -> None:
    table = {name: text for cell, text in rows("formats.md", "container") for name in names(cell)}
    assert table.keys() == {each.name for each in FORMATS}
    for each in FORMATS:
        said = "written" in table[each.name] and (each.name == "npz" or "`npz`" not in table[each.name])
        assert said is each.writable and ("in place" in table[each.name]) is each.appendable, each.name


def test_every_limit() -> None:
    said = {}
    for cell, text in rows("formats.md", "limit"):
        numbers = re.findall(r"\b(\d[\d,]*)(?: (MB|MiB|GiB))?", text)
        said[cell] = [int(number.replace(",", "")) * UNITS.get(unit, 1) for number, unit in numbers]
    assert said == LIMITS


def test_every_error_and_its_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CkptoolError)]
    ends = {kind.code: kind.exit_code for kind in kinds if kind is not errors.CkptoolError}
    assert {names(row[0])[0]: int(row[-1]) for row in rows("codes.md", "code") if row[-1].isdigit()} == ends | {
        "bug": 2
    }


def test_the_codes_of_hostile_inputs() -> None:
    cells = [answer for _, *answer in [*rows("hostile.md", "input"), *rows("hostile.md", "fault")]]
    codes = {name for cell in cells for name in names(cell[0]) if re.fullmatch("[a-z]+(-[a-z]+)*", name)}
    assert len(codes) > 15 and codes - VERBS.keys() <= all_codes().keys()


def test_what_an_address_means_to_each_verb() -> None:
    changes = sentence("commands.md", r"Commands that change a file \((.*?)\)")
    refuses = sentence("commands.md", r"Commands that read, combine or export take the part\. (.*?) are about")
    assert {*changes} == {name for name, verb in VERBS.items() if verb.address is Use.CHANGES}
    assert {*refuses} == {name for name, verb in VERBS.items() if verb.address is Use.REFUSES}


def test_other_names_of_commands() -> None:
    found = re.findall(r"((?:`\w+`(?: and )?)+) (?:is|are) (`[a-z-]+`)", " ".join(PAGES["commands.md"].split()))
    assert {name: names(verb)[0] for words, verb in found for name in names(words) if name in ALIASES} == ALIASES
    assert re.search(r"`--ignore\s+([\w,]+)`", PAGES["commands.md"]).group(1).split(",") == [*IGNORABLE]  # type: ignore[union-attr]


def test_keys_of_a_configuration() -> None:
    """`stop.patience`, `models.NAME.init`: whatever a page calls a key is one."""
    sections = {name.split(".")[0] for name in Config.model_fields} - {"run", "seed", "device"}
    pages = " ".join(PAGES[page] for page in ("harness.md", "since-0.1.md", "README.md"))
    keys = re.findall(rf"(?<=[`\s])((?:{'|'.join(sections)})(?:\.\w+)+)(?=[:=`])", pages)
    assert len({*keys}) > 12
    for key in {*keys} - {key for key in keys if key.endswith((".py", ".json", ".txt", ".yaml"))}:
        assert [*descend(tuple(key.split(".")))][-1][0] is not None, key


def test_extras_targets_and_versions() -> None:
    text = " ".join(PAGES.values())
    extras = {extra for each in re.findall(r"ckptool\[([\w,]+)\]", text) for extra in each.split(",")}
    assert extras <= {*re.findall(r"^(\w+) = \[", PROJECT.partition("optional-dependencies]")[2], re.MULTILINE)}
    targets = {*re.findall(r"^(\w+):", (HOME / "Makefile").read_text(), re.MULTILINE)}
    assert {*re.findall(r"`make (?:\w+=\S+ )*(\w+)", text)} <= targets
    assert f'version = "{__version__}"' in PROJECT and f"## [{__version__}]" in PAGES["CHANGELOG.md"]
    newest = PAGES["CHANGELOG.md"].partition("\n## ")[2].partition("\n## ")[0]
    assert len(re.findall(r"\w[\w.-]*", newest)) < 650  # two minutes; the rest stands in docs/since-0.1.md
    (hooks,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGES["git.md"], re.DOTALL) if "repos:" in block]
    assert yaml.safe_load(hooks)["repos"][0]["rev"] == f"v{__version__}"


def test_the_order_of_the_rooms() -> None:
    layers = json.loads(re.search(r"^layers = (\[.*\])$", PROJECT, re.MULTILINE).group(1))  # type: ignore[union-attr]
    said = re.search(r"```\n(errors <.*?)```", PAGES["design.md"], re.DOTALL).group(1)  # type: ignore[union-attr]
    assert [{*re.findall(r"\w+", layer)} for layer in said.split("<")] == [
        {*re.findall(r"\w+", layer)} for layer in reversed(layers)
    ]


def test_what_it_was_tried_with_is_what_the_engines_have() -> None:
    pins = (HOME / "constraints-engines.txt").read_text(encoding="utf-8").lower()
    tried = r"(lightning|transformers|accelerate|torchdata|picklescan|modelscan|fickling) (\d+\.\d+\.\d+)"
    found = re.findall(tried, (PAGES["own-loop.md"] + PAGES["safety.md"]).lower())
    assert len(found) == 7 and all(f"\n{name}=={version}\n" in pins for name, version in found), found


def test_the_speed_table_of_the_readme_is_a_part_of_the_whole_one() -> None:
    whole = [" ".join(row) for row in rows("speed.md", "work")]
    for name, *cells in rows("README.md", "work"):
        numbers = [cell.strip("| ×") for cell in cells]
        assert [row for row in whole if all(number in row for number in numbers)], name


# Schemas --------------------------------------------------------------------------------------------------------------
# `ckptool schema VERB` describes every field that `VERB --json` prints; the jsonschema library judges, strictly.


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
