"""Counts of one are told as one: no message puts a plural behind a number by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ckptool.cli import main
from ckptool.errors import counted, form
from tests.lint import NO_PLURAL

ONE = re.compile(r"(?<![\d.,:×x-])\b1 (?!of\b)(?:more )?([a-z]+s)\b(?! of a)|\b1 [a-z]+ (are|were|have)\b")


def test_counts_and_the_words_that_go_with_them() -> None:
    assert [counted(n, "name is", "names are") for n in (0, 1, 2)] == ["0 names are", "1 name is", "2 names are"]
    assert [counted(n, "storage") for n in (1, 1234)] == ["1 storage", "1,234 storages"]
    assert [form(n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]


LINES = (
    "inspect one.pt --all --stats",
    "inspect one.pt",
    "verify one.pt",
    "verify one.pt --digest",
    "doctor one.pt",
    "report one.pt",
    "scan .",
    "scan one.pt",
    "diff one.pt other.pt",
    "show one.pt",
    "strip-module one.pt -o a.pt",
    "rename one.pt 'module.a => b' -o b.pt",
    "remap cuda.pt --to cpu -o c.pt",
    "cast one.pt --dtype bf16 -o d.pt",
    "edit one.pt --drop epoch -o e.pt",
    "convert one.pt -o f.safetensors",
    "convert one.pt --all -o g.safetensors",
    "slim one.pt -o h.pt",
    "recover cut.pt -o i.pt",
    "bundle a=one.pt -o j.pt",
    "unbundle j.pt -d k",
    "warm-start one.pt --against other.pt",
    "spec one.pt -o l.json",
    "convert one.pt -o m --shard-size 5GB",
)


@pytest.fixture
def ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files with one of everything."""
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"module.a": torch.tensor([1.00001])}, "epoch": 3}, "one.pt")
    torch.save({"state_dict": {"a": torch.tensor([2.0])}, "epoch": 3}, "other.pt")
    from unittest import mock

    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save({"a": torch.ones(1)}, "cuda.pt")
    Path("cut.pt").write_bytes(Path("one.pt").read_bytes()[:-300])
    return tmp_path


def test_reports_of_one_of_everything_have_no_plural_of_one(ones: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    for line in LINES:
        main(shlex.split(line))
        out, err = capsys.readouterr()
        for told in (out + err).splitlines():
            found = ONE.search(told)
            assert not found or found[1] in NO_PLURAL, f"{line}: {told}"
