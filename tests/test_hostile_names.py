"""Names chosen by strangers, and what the tool's own options are pointed at."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import FileProblem, OutputExists
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import contents, load, saved, weights
from tests.support.memory import LIMIT, peak
from tests.support.processes import soon
from tests.support.same import assert_same_objects

# Keys -----------------------------------------------------------------------------------------------------------------


def test_stripping_that_would_make_two_keys_equal_is_a_conflict(tmp_path: Path) -> None:
    path = saved(weights("module.a", "a", "module.b", "b"), tmp_path / "in.pt")
    for options in ({"partial": True}, {"prefix": ["module."], "partial": True}):
        error = refused(
            "conflict", tmp_path, lambda options=options: ckptool.strip_module(path, tmp_path / "out.pt", **options)
        )
        assert "module.a and a would both be 'a'" in error.what and "module.b and b would both be 'b'" in error.what
    error = refused("conflict", tmp_path, lambda: ckptool.rename(path, ["* => x"], tmp_path / "out.pt"))
    assert "would all be 'x'" in error.what
    refused("conflict", tmp_path, lambda: ckptool.strip_module(path, in_place=True, partial=True))


def test_a_prefix_on_some_keys_twice_or_as_the_whole_key(tmp_path: Path) -> None:
    some = saved(weights("module.a", "b"), tmp_path / "some.pt")
    error = refused("conflict", tmp_path, lambda: ckptool.strip_module(some, tmp_path / "out.pt"))
    assert "1 of 2 keys" in error.what and "--partial" in error.fix
    ckptool.strip_module(some, tmp_path / "out.pt", partial=True)
    assert list(load(tmp_path / "out.pt")) == ["a", "b"]
    twice = saved(weights("module.module.a", "module.module.b"), tmp_path / "twice.pt")
    ckptool.strip_module(twice, tmp_path / "once.pt")
    assert list(load(tmp_path / "once.pt")) == ["module.a", "module.b"]
    whole = saved(weights("module.", "module.a"), tmp_path / "whole.pt")
    error = refused("conflict", tmp_path, lambda: ckptool.strip_module(whole, tmp_path / "no.pt"))
    assert "become empty" in error.what


def test_the_prefix_goes_from_metadata_optimizers_and_every_model(tmp_path: Path) -> None:
    model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    names = [name for name, _ in model.named_parameters()]
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [*range(len(names))], "param_names": names}]}
    state = {"model": model.state_dict(), "ema": model.state_dict(), "optimizer": optimizer}
    path = saved(state | {"note": "module.a"}, tmp_path / "in.pt")
    ckptool.strip_module(path, tmp_path / "out.pt")
    found = load(tmp_path / "out.pt")
    expected = model.module.state_dict()
    for part in ("model", "ema"):
        assert list(found[part]) == list(expected)
        assert {name: value for name, value in found[part]._metadata.items() if name} == {
            name: value for name, value in expected._metadata.items() if name
        }
    names = [name for group in found["optimizer"]["param_groups"] for name in group["param_names"]]
    assert names == [name for name, _ in model.module.named_parameters()]
    assert found["note"] == "module.a", "only names of weights are"


NAMES = {
    "ESC": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;owned\x07",
    "CR and LF": "a\r\nerror: fake",
    "bidi": "a\u202egnp.exe\u2066",
    "NUL": "a\0b",
    "C1": "\x9b31m",
    "separators": "a\u2028b\u2029c\x85d",
    "tags": "\U000e0041\U000e0042",
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
    commands = [
        ["inspect", path],
        ["inspect", path, "--all"],
        ["inspect", path, "--stats", "--json"],
        ["show", path],
        ["show", f"{path}#text"],
        ["show", path, "--json"],
        ["show", f"{path}#model/{name}.weight"],
        ["show", f"{path}#model/{name}.missing"],
        ["add-module", path, "-o", out],
        ["add-module", path, "-o", out, "-f", "--json"],
        ["diff", path, out],
        ["diff", path, out, "--json"],
        ["rename", path, "* => x", "-o", out, "-f"],
        ["cast", path, "--dtype", "bf16", "-o", out, "-f"],
        ["edit", path, "--drop", "text", "-o", out, "-f"],
        ["convert", path, "-o", flat, "-f"],
        ["convert", path, "-o", flat, "-f", "--all"],
        ["inspect", flat, "--all"],
    ]
    if kind.startswith("256 kB"):
        commands = commands[:2] + commands[3:4] + commands[10:12] + commands[-2:]
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
    assert Texts(page).tags <= {"div", "b", "table", "tr", "td", "span", "pre"}
    assert not {c for c in {*page} if not c.isprintable()} - {"\n"}
    assert list(ckptool.open(path)["model"]) == list(state), "the library has the names as they are"


def test_keys_that_are_not_strings_are_kept_and_listed(tmp_path: Path, run: Run) -> None:
    keys: list[Any] = [0, 1.5, None, True, b"raw", (1, "a"), "w"]
    state = {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}
    path = saved({"table": state, "model": weights("module.w")}, tmp_path / "in.pt")
    ckptool.strip_module(path, tmp_path / "out.pt")
    assert_same_objects(load(tmp_path / "out.pt")["table"], state)
    ckptool.convert(path, tmp_path / "all.safetensors", all=True)
    ckptool.convert(tmp_path / "all.safetensors", tmp_path / "back.pt")
    assert_same_objects(load(tmp_path / "back.pt"), load(path))
    mixed = saved({7: torch.zeros(2), "a.w": torch.ones(2), "a.b": torch.ones(2)}, tmp_path / "mixed.pt")
    done = ckptool.convert(mixed, tmp_path / "mixed.safetensors", at="")
    assert set(ckptool.open(tmp_path / "mixed.safetensors")) == {"a.w", "a.b"}
    assert done.facts["left_behind"] and any("7" in line for line in done.details)


# Where it writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["same", "dot", "hard link", "symlink", "folder link"])
def test_the_input_may_be_the_output_by_any_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    path = saved(weights("module.a", "module.b"), tmp_path / "d/in.pt")
    monkeypatch.chdir(path.parent)
    os.link(path, "hard.pt")
    os.symlink("in.pt", "soft.pt")
    os.symlink("d", tmp_path / "e")
    output = {
        "same": "in.pt",
        "dot": "./../d/./in.pt",
        "hard link": "hard.pt",
        "symlink": "soft.pt",
        "folder link": str(tmp_path / "e/in.pt"),
    }[name]
    before = path.read_bytes()
    error = refused("conflict", tmp_path, lambda: ckptool.strip_module("in.pt", output))
    assert "is the input itself" in error.what
    ckptool.strip_module("in.pt", output, overwrite=True)
    assert list(load(Path(output))) == ["a", "b"]
    if name == "hard link":
        assert path.read_bytes() == before, "the other name keeps the old file"
    assert os.path.islink("soft.pt") and not list(path.parent.glob(".ckptool-*"))


def test_an_existing_output_is_refused_without_force(tmp_path: Path, run: Run) -> None:
    path = saved(weights("module.a"), tmp_path / "in.pt")
    (tmp_path / "out.pt").write_bytes(b"precious")
    for words in (
        ("strip-module",),
        ("remap", "--to", "cpu"),
        ("cast", "--dtype", "bf16"),
        ("convert",),
        ("add-module",),
    ):
        command = [words[0], path, *words[1:], "-o", tmp_path / "out.pt"]
        before = contents(tmp_path)
        code, _, err = run(*command)
        assert code == 2 and err.startswith("error[output-exists]") and "-f" in err
        assert run(*command, "-n")[0] == 2, "a dry run says so too"
        assert contents(tmp_path) == before
    assert run("strip-module", path, "-o", tmp_path / "out.pt", "-f")[0] == 0
    assert list(load(tmp_path / "out.pt")) == ["a"]


@pytest.mark.permissions
def test_the_target_of_an_output_link_is_replaced(tmp_path: Path) -> None:
    path = saved(weights("module.a"), tmp_path / "in.pt")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/real.pt").write_bytes(b"old")
    (tmp_path / "there/real.pt").chmod(0o600)
    (tmp_path / "link.pt").symlink_to("there/real.pt")
    with pytest.raises(OutputExists):
        ckptool.strip_module(path, tmp_path / "link.pt")
    ckptool.strip_module(path, tmp_path / "link.pt", overwrite=True)
    assert os.readlink(tmp_path / "link.pt") == "there/real.pt"
    assert list(load(tmp_path / "there/real.pt")) == ["a"]
    assert (tmp_path / "there/real.pt").stat().st_mode & 0o777 == 0o600
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    with pytest.raises(FileProblem):
        ckptool.strip_module(path, tmp_path / "loop.pt", overwrite=True)


@pytest.mark.permissions
def test_impossible_outputs_are_refused(tmp_path: Path) -> None:
    path = saved(weights("module.a"), tmp_path / "in.pt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked").mkdir(mode=0o500)
    locked = tmp_path / "locked/out.pt" if os.geteuid() else Path("/proc/out.pt")  # root may write everywhere but there
    outputs = [tmp_path / "no/such/out.pt", tmp_path / "folder", path / "out.pt", tmp_path / ("n" * 300), locked]
    for output in [*outputs, tmp_path / "nul\0.pt"]:
        for options in ({}, {"overwrite": True}):
            error = refused(
                "io", tmp_path, lambda output=output, options=options: ckptool.strip_module(path, output, **options)
            )
            assert error.what.startswith(("cannot write", "cannot use"))


def test_the_temporary_file_is_beside_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved({f"module.{n}": torch.ones(100) for n in range(20)}, tmp_path / "in.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    seen: list[list[str]] = []

    def watch(done: int, total: int) -> None:
        seen.append([path.name for path in (tmp_path / "out").iterdir()])
        assert not list((tmp_path / "tmp").iterdir())

    ckptool.strip_module(path, tmp_path / "out/new.pt", progress=watch)
    assert seen and all(len(names) == 1 and names[0].startswith(".ckptool-") for names in seen)


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:-1", "cuda:1000", "cpu:1", "", "cuda:٣", "cuda:0:1", "meta", "../x", "cuda\0"]
)
def test_devices_that_do_not_exist_are_refused(device: str, tmp_path: Path) -> None:
    path = saved(weights("a"), tmp_path / "in.pt")
    refused("usage", tmp_path, lambda: ckptool.remap(path, tmp_path / "out.pt", to=device))
    refused("usage", tmp_path, lambda: ckptool.remap(path, tmp_path / "out.pt", moves={"cpu": device}))


# What it is told ------------------------------------------------------------------------------------------------------

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


def test_a_diff_finds_every_kind_of_change(tmp_path: Path, run: Run) -> None:
    nan = torch.tensor([1.0, float("nan"), float("inf")])
    left = {"same": nan, "shape": torch.ones(6), "dtype": torch.ones(3), "nan": torch.ones(3), "gone": torch.ones(1)}
    right = {
        "same": nan.clone(),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(3).half(),
        "nan": nan,
        "new": torch.ones(1),
    }
    a, b = saved(left, tmp_path / "a.pt"), saved(right, tmp_path / "b.pt")
    found = ckptool.diff(a, b)
    aspects = {change.address: set(change.aspects) for change in found.changed}
    assert set(aspects) == {"shape", "dtype", "nan"} and "shape" in aspects["shape"] and "dtype" in aspects["dtype"]
    assert run("diff", a, b)[0] == 1 and run("diff", a, a)[0] == 0
    assert run("diff", a, tmp_path / "missing.pt")[0] == 2


def test_huge_files_are_compared_in_bounded_memory(tmp_path: Path) -> None:
    from fixtures.sparse import make_sparse

    make_sparse(tmp_path / "large.pt", 200_000_000, tensors=2)
    assert peak("diff", tmp_path / "large.pt", tmp_path) <= LIMIT
