"""What the documents say in tables and lists is what the program has, cell by cell."""

import json
import re
from pathlib import Path

import yaml

from ckptool import __version__, errors
from ckptool.analysis.diff import IGNORABLE
from ckptool.checkpoint import graph
from ckptool.commands import ALIASES, VERBS, Use
from ckptool.formats import FORMATS, distributed, nested_streams, safetensors, torch_zip
from ckptool.formats.zip import directory
from ckptool.pickles import decode, objects, strings
from ckptool.training.config import Config, descend
from ckptool.verbs._explain import all_codes

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
