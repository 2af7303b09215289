"""Whatever a file calls things: no control character of it reaches a terminal, a notebook or a log, on any way out."""

import io
import itertools
import json
import pickle
import shlex
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from ckptool.checkpoint import Checkpoint, InlineBytes, Note, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set
from ckptool.checkpoint.tree import walk
from ckptool.cli import main
from ckptool.commands import VERBS as COMMANDS
from ckptool.commands import command, with_verb
from ckptool.errors import CkptoolError, FileProblem, MissingKey, Text, TextLines, printable
from ckptool.formats import torch_zip
from ckptool.output import replace_file
from tests.support.cli import Run, command_lines
from tests.support.errors import refused
from tests.support.files import saved, weights
from tests.support.processes import soon

# ESC, BEL, backspace, carriage return, C1's CSI, DEL, bidi marks, separators of lines, an invisible space, half of a
# surrogate pair.
ODD = (
    "\x1b[31m|\x07|\x08|\r|\x9b31m|\x7f|\u202e|\u2066|"
    "\u2028|\u200b\u200e|\ufeff|\n|\x00|\udcff|\U000e0041|\x85|\x1b]0;owned\x07"
).split("|")


def raw(text: str) -> list[str]:
    """The characters that should have been escaped; lines and columns may be the program's own."""
    return sorted({c for c in text if not c.isprintable() and c not in "\n\t"})


class Evil:
    """Gives texts with one odd thing each, in turn."""

    def __init__(self, without: str = "") -> None:
        self.odd = itertools.cycle(odd for odd in ODD if not set(odd) & set(without))
        self.count = 0

    def __call__(self, word: str) -> str:
        self.count += 1
        return f"{word}{next(self.odd)}{self.count}"


def tensor(evil: Evil, size: int = 3, **changes: Any) -> TensorEntry:
    data = numpy.arange(size, dtype=numpy.float32).tobytes()
    return TensorEntry(Storage(InlineBytes(data), evil("cuda")), by_name("f32"), (size,), (1,), **changes)


def thing(evil: Evil, how: str = "call", name: Global | None = None) -> Object:
    made = Object(name or Global("mod", "Class"), (evil("argument"), 1), how)
    made.state = {evil("attribute"): evil("value")}
    return made


def torch_file(path: Path, evil: Evil) -> Path:
    """A checkpoint in which every text that a torch zip can hold is odd."""
    weights = OrderedDict(
        {f"module.{evil('w')}": tensor(evil) for _ in ODD}, {"_metadata": {evil("m"): {"version": 1}}}
    )
    tree = {
        "state_dict": weights,
        evil("model"): {evil("w"): tensor(evil), evil("layer") + ".weight": tensor(evil)},
        evil("key"): [
            evil("text"),
            {evil("a"): evil("b")},
            Set([evil("item")]),
            evil("bytes").encode("utf-8", "surrogatepass"),
        ],
        "object": thing(evil, "new"),
        "name": Global("mod", "name"),
        "storage": StorageRef(Storage(InlineBytes(b"abcd"), evil("cpu")), by_name("u8")),
        (evil("tuple"), 1): thing(evil),
        "optimizer": {
            "state": {0: {"step": tensor(evil, 1)}},
            "param_groups": [{"params": [0], evil("lr"): 1, "name": evil("group")}],
        },
    }
    replace_file(torch_zip.write(Checkpoint(tree, torch_zip.NAME), keep_unknown=True), path, overwrite=True)
    return path


def names_file(path: Path, evil: Evil) -> Path:
    """An object of a class with an odd name: no such file is read."""
    tree = {"w": tensor(evil), "object": thing(evil, name=Global(evil("module"), evil("Class")))}
    replace_file(torch_zip.write(Checkpoint(tree, torch_zip.NAME), keep_unknown=True), path, overwrite=True)
    return path


def plain_file(path: Path, evil: Evil) -> Path:
    """Weights alone, which every verb takes."""
    replace_file(
        torch_zip.write(Checkpoint({f"module.{evil('w')}": tensor(evil) for _ in ODD}, torch_zip.NAME)),
        path,
        overwrite=True,
    )
    return path


def safetensors_file(path: Path, evil: Evil) -> Path:
    header: dict[str, Any] = {
        evil("w"): {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n in range(len(ODD))
    }
    header["__metadata__"] = {evil("key"): evil("value") for _ in ODD} | {"format": evil("pt")}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(ODD)))
    return path


def npz_file(path: Path, evil: Evil) -> Path:
    array = io.BytesIO()
    numpy.save(array, numpy.ones(2, numpy.float32))
    with zipfile.ZipFile(path, "w") as archive:
        for _ in ODD:
            archive.writestr(evil("w") + ".npy", array.getvalue())
    return path


def index_file(path: Path, evil: Evil) -> Path:
    """An index of shards that are not there."""
    path = path.with_suffix(".index.json")
    path.write_text(
        json.dumps({"metadata": {evil("k"): evil("v")}, "weight_map": {evil("w"): evil("shard") for _ in ODD}})
    )
    return path


def broken_file(path: Path, evil: Evil) -> Path:
    """A zip whose records have odd names, and nothing else."""
    with zipfile.ZipFile(path, "w") as archive:
        for _ in ODD:
            archive.writestr(f"{evil('folder')}/{evil('record')}", b"x")
    return path


# Halves of surrogate pairs and NULs cannot be spelt in some of the containers.
FILES: dict[str, Callable[[Path], Path]] = {
    "torch": lambda folder: torch_file(folder / "torch.pt", Evil()),
    "plain": lambda folder: plain_file(folder / "plain.pt", Evil("\udcff")),
    "names": lambda folder: names_file(folder / "names.pt", Evil("\udcff\n")),
    "safetensors": lambda folder: safetensors_file(folder / "s.safetensors", Evil("\udcff")),
    "npz": lambda folder: npz_file(folder / "n.npz", Evil("\udcff\0")),
    "index": lambda folder: index_file(folder / "model", Evil("\udcff\0")),
    "broken": lambda folder: broken_file(folder / "broken.pt", Evil("\udcff\0")),
}
COMMAND_LINES = command_lines(r"""
inspect FILE --all|inspect FILE --stats --json|inspect FILE --depth 9|show FILE#state_dict|show FILE|show FILE#0
diff FILE OTHER|diff OTHER FILE --json|diff FILE#state_dict OTHER|verify FILE|verify FILE --json|doctor FILE
doctor FILE --json|doctor FILE --against OTHER|scan FILE|scan FILE --json|scan FOLDER|report FILE -o OUT.html
report FILE OTHER --against OTHER --json|browse FILE|strip-module FILE -n|strip-module FILE -o OUT.pt --keep-unknown
strip-module FILE -n --json|add-module FILE -n|add-module FILE -o OUT.pt|rename FILE '* => x.*' -n --keep-unknown
rename FILE '* => x' -n|rename FILE nothing=>at.all -n|remap FILE --to cpu -n --keep-unknown
remap FILE --map cuda:1=cpu -n|cast FILE --dtype bf16 -n --keep-unknown|cast FILE --dtype f16 -o OUT.pt
edit FILE --drop '*' -n --keep-unknown|edit FILE --set nothing:=1 -n|edit FILE --set w -n
translate FILE '{a}.* => x.{a}.* : transpose' --rest keep -n --keep-unknown|translate FILE nothing=>at.all -n
translate FILE '* => x.*' -n --json|slim FILE -n --keep-unknown|slim FILE -o OUT.pt --dedup
convert FILE -o OUT.safetensors|convert FILE --all -o OUT.safetensors|convert FILE --weights-only -o OUT.pt -f
recover FILE -o OUT.pt|bundle -o OUT.pt a=FILE b=OTHER|unbundle FILE -d OUT.d|unbundle FILE -d OUT.d -n
average FILE OTHER -o OUT.pt|average FILE FILE -o OUT.pt -n|lora extract FILE OTHER --rank 1 -n
lora extract FILE FILE --rank 1 -n|lora resize FILE --rank 1 -n|lora convert FILE --to peft -n
lora convert FILE --to kohya --base OTHER -n|lora merge FILE OTHER -n|lora merge OTHER FILE -n|lora merge FILE FILE -n
bake FILE -n|warm-start FILE --against OTHER|warm-start OTHER --against FILE --json|spec FILE -o OUT.spec.json
spec FILE|resume FILE|eval FILE|prove FILE|prune FILE -n|plot FILE|demo OUT.demo|explain FILE|explain FILE --json
schema FILE|completion zsh|git-setup --textconv FILE|git-setup --global -n|git-check FILE|git-check FILE --json
""")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odd")


@pytest.mark.parametrize("kind", FILES)
def test_the_program_prints_no_control_character_of_a_file(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {with_verb(line.split())[0] for line in COMMAND_LINES} == {*COMMANDS} - {"train"}
    file, other = FILES[kind](folder), plain_file(folder / "other.pt", Evil("\udcff"))
    wrong = []
    for number, line in enumerate(COMMAND_LINES):
        words = shlex.split(
            line.replace("OUT", f"{folder}/{kind}{number}").replace("FILE", str(file)).replace("OTHER", str(other))
        )
        words = [word.replace("FOLDER", str(folder)) for word in words]
        capsys.readouterr()
        code = main(words)
        out, err = capsys.readouterr()
        wrong += [(line, raw(text), text) for text in (out, err) if raw(text)]
        assert code in (0, 1, 2, 3) and "[bug]" not in err, (line, err)
        if "--json" in words:
            json.loads(out)
    assert not wrong, "\n".join(f"{line}: {found}: {text[:500]!r}" for line, found, text in wrong)


LOOKING = "open inspect show verify doctor scan spec load".split()
WRITING: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("strip_module", "convert", "recover")},
    "slim": {"keep_unknown": True},
    "cast": {"dtype": "bf16", "keep_unknown": True},
    "remap": {"to": "cpu"},
    "rename": {"rules": ["* => x"]},
    "translate": {"rules": "{a}.* => x.{a}.*"},
}


def answers(file: Path, other: Path) -> Iterator[tuple[str, Any]]:
    """What the library gives of a file, or raises."""
    calls: dict[str, Callable[[], Any]] = {name: partial(getattr(ckptool, name), file) for name in LOOKING}
    for name, options in WRITING.items():
        out = file.with_suffix(".out.safetensors" if name == "convert" else ".out.pt")
        calls[name] = partial(getattr(ckptool, name), file, out=out, dry_run=True, **options)
    calls |= {name: partial(getattr(ckptool, name), file, against=other) for name in ("report", "warm_start")}
    calls["diff"] = partial(ckptool.diff, file, other)
    for name, call in calls.items():
        try:
            yield name, call()
        except CkptoolError as error:
            yield f"{name}'s error", error


@pytest.mark.parametrize("kind", FILES)
def test_no_text_of_an_object_has_a_control_character_of_a_file(kind: str, folder: Path) -> None:
    file, other = FILES[kind](folder), plain_file(folder / "other.pt", Evil("\udcff"))
    wrong = []
    for name, answer in answers(file, other):
        texts = {"repr": repr(answer), "str": str(answer), "format": f"{answer}"}
        if hasattr(answer, "_repr_html_"):
            texts["html"] = answer._repr_html_()
        if isinstance(answer, Checkpoint):
            for number, (_, node) in enumerate(walk(answer.tree)):
                if not isinstance(node, str):
                    texts |= {f"repr of {number}": repr(node), f"str of {number}": str(node)}
            texts |= {f"note {note.code}": f"{note.message} {note!r}" for note in answer.notes}
        wrong += [f"{name}: {what}: {raw(text)}: {text[:300]!r}" for what, text in texts.items() if raw(text)]
    assert not wrong, "\n".join(wrong)


def kinds(kind: type[CkptoolError] = CkptoolError) -> Iterator[type[CkptoolError]]:
    """Every error that there is, those of single modules included."""
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


ORDINARY = "é 日本 a\\nb $'\\x1b' 'it' ×…→"  # a backslash is no escape yet, and a text that is escaped has some


def sentences(error: Any, name: str) -> list[str]:
    """The error's parts, after whatever an error goes through."""
    moved = error.within(f"{name}/place")
    again = type(error)(moved.what, moved.why, moved.fix)
    assert (again.what, again.why, again.fix) == (moved.what, moved.why, moved.fix), "nothing is escaped twice"
    assert type(moved) is type(error) and moved.within(f"{name}/place") is moved, "the place is known again"
    sent = pickle.loads(pickle.dumps(moved))
    assert (sent.what, sent.why, sent.fix, sent.args) == (moved.what, moved.why, moved.fix, moved.args)
    return [error.what, error.why, error.fix, *error.args, moved.what, moved.why, moved.fix, *str(moved).split("\n")]


@pytest.mark.parametrize("kind", sorted({*kinds()}, key=lambda kind: kind.__name__))
def test_every_part_of_every_error_is_a_line_without_control_characters(kind: Any) -> None:
    for odd in ODD:
        name = f"{ORDINARY}{odd}error[io]: forged"
        for part in ("what", "why", "fix"):
            error = kind(**{"what": "a.pt", part: f"{name} is odd"})
            assert getattr(error, part) == f"{ORDINARY}{printable(odd)}error[io]: forged is odd"
            if isinstance(error, FileProblem):
                error.about(2, name)
                assert pickle.loads(pickle.dumps(error.within(name))).filename == name, "a path stays one"
            assert all(text.isprintable() for text in sentences(error, name)), (part, odd)
        error = kind("a.pt", TextLines("first", f"{name} is odd"), f"{name} is odd")
        texts = sentences(error, name)
        assert error.why.split("\n") == ["first", printable(f"{name} is odd")] and raw("".join(texts)) == []


@pytest.mark.parametrize("odd", ODD)
def test_advice_notes_and_names_looked_for_are_escaped(odd: str) -> None:
    name = f"{ORDINARY}{odd}x"
    advice = CkptoolError("a.pt", "", Text(f"Look at {name}: ", command("inspect", name, only=name))).fix
    assert isinstance(advice, Text) and advice.isprintable() and advice == "".join(map(str, advice.parts))
    assert [*advice.commands] == [("ckptool", "inspect", name, "--only", name)], "a command is typed as it was"
    assert advice.python.isprintable() and pickle.loads(pickle.dumps(advice)).parts == advice.parts
    error = MissingKey.among(f"{name}y", lambda: [name], f"in {name}")
    assert all(text.isprintable() and printable(name) in text for text in (error.what, error.why, error.fix))
    note = Note("odd", f"{name} is odd", ("ckptool", "show", name))
    assert note.message == f"{printable(name)} is odd" and note.fix[-1] == name and Note("", note.message).message
    assert Note("odd", note.message).message == note.message


# Names that are more than odd letters, which tests/test_escaped.py has.
NAMES = {
    "CR and LF": "a\r\nerror: fake",
    "markup": "<img src=x onerror=alert(1)>&amp;\"'",
    "256 kB": "k" * (1 << 18),
    "256 kB, raw": "\x1b" * (1 << 18),
}


class Texts(HTMLParser):
    """The tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_escaped_in_every_output(kind: str, tmp_path: Path, run: Run) -> None:
    name = NAMES[kind]
    state = {f"{name}.weight": torch.ones(2, 2), f"{name}.bias": torch.full((2,), float("nan"))}
    path = saved({"model": state, name: 1, "text": name, "list": [{name: name}]}, tmp_path / "in.pt")
    out, flat = tmp_path / "out.pt", tmp_path / "out.safetensors"
    commands: list[list[Any]] = [
        ["inspect", path],
        ["inspect", path, "--all"],
        ["show", path],
        ["show", f"{path}#text"],
    ]
    commands += [["show", f"{path}#model/{name}.missing"]] if len(name) < 99 else []
    commands += [["add-module", path, "-o", out], ["diff", path, out], ["diff", path, out, "--json"]]
    commands += [["convert", path, "-o", flat, "-f", "--all"], ["inspect", flat, "--all"]]
    for words in commands:
        code, out_text, err = run(*words)
        assert code in (0, 1, 2) and "error[bug]" not in err, err[:500]
        raw = {c for c in {*out_text, *err} if not c.isprintable()} - {"\n"}
        assert not raw, (words, raw)
        if kind == "CR and LF" and not str(words[1]).endswith("#text"):  # a text that was asked for has its lines
            assert not any(line.strip().startswith("error: fake") for line in (out_text + err).split("\n"))
        if "--json" in words:
            json.loads(out_text)
            assert out_text.isascii() or kind in ("markup", "256 kB")
    page = ckptool.inspect(path)._repr_html_() + ckptool.open(path)._repr_html_()
    assert Texts(page).tags <= {"div", "b", "table", "tr", "td", "span", "pre", "style"}
    assert not {c for c in {*page} if not c.isprintable()} - {"\n"}
    assert list(ckptool.open(path)["model"]) == list(state), "the library has the names as they are"


LONG = "a" * 60 + "!"


def test_rules_with_many_stars_are_refused_or_quick(tmp_path: Path) -> None:
    path, long = saved(weights(LONG), tmp_path / "in.pt"), saved(weights("ab." * 20_000 + "b"), tmp_path / "long.pt")
    for rule, file, says in (
        ("*a*a*a*a*a*a*a*a*a*a*a*a*b => x", path, "13 *"),
        ("*a*.{x}*.b => x", long, "60,001 characters"),
    ):
        with soon(5):
            error = refused("usage", tmp_path, lambda: ckptool.rename(file, [rule], tmp_path / "out.pt"))  # noqa: B023
        assert says in error.what
