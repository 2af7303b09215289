"""Warm starts of models of another size: what is resized, and how, is said before and done exactly so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import ckptool
from ckptool.errors import NoMatch, UsageError
from tests.support.cli import Run
from tests.support.files import saved
from tests.support.memory import LIMIT, peak_of
from tests.support.warm_starts import warm_started

WAYS = ["pos_embed=bicubic(cls=1)", "embed.*=rows(mean)", "conv.weight=channels"]


def old_and_new(tmp_path: Path, tied: bool = True) -> tuple[dict[str, Any], Path, Path]:
    torch.manual_seed(0)
    old = {
        "pos_embed": torch.randn(1, 17, 6),
        "embed.weight": torch.randn(10, 4),
        "conv.weight": torch.randn(2, 3, 2, 2),
    }
    old["lm_head.weight"] = old["embed.weight"] if tied else torch.randn(10, 4)
    new = {
        "pos_embed": torch.zeros(1, 26, 6),
        "embed.weight": torch.zeros(13, 4),
        "conv.weight": torch.zeros(2, 1, 2, 2),
    }
    new["lm_head.weight"] = new["embed.weight"] if tied else torch.zeros(13, 4)
    return old, saved(old, tmp_path / "old.pt"), saved(new, tmp_path / "new.pt")


def test_every_kind_with_a_tied_head(tmp_path: Path) -> None:
    old, file, target = old_and_new(tmp_path)
    report, done = warm_started(file, target, tmp_path / "out.pt", on_mismatch="resize", resize=WAYS, verify=True)
    image = old["pos_embed"][:, 1:].reshape(1, 4, 4, 6).permute(0, 3, 1, 2)
    wanted = functional.interpolate(image, (5, 5), mode="bicubic").permute(0, 2, 3, 1).reshape(1, 25, 6)
    assert torch.equal(done["pos_embed"][:, :1], old["pos_embed"][:, :1])
    assert torch.allclose(done["pos_embed"][:, 1:], wanted, atol=1e-6)
    assert torch.equal(done["embed.weight"][10:], old["embed.weight"].double().mean(0).float().expand(3, 4))
    assert done["lm_head.weight"].data_ptr() == done["embed.weight"].data_ptr()
    assert torch.equal(done["conv.weight"], old["conv.weight"].double().sum(1, keepdim=True).float())
    assert report.share == 1 and {fact.how for fact in report.loaded} == {"resized"}
    assert [(fact.target, fact.how) for fact in report.mismatched] == [
        ("pos_embed", "bicubic(cls=1)"),
        ("embed.weight", "rows(mean)"),
        ("conv.weight", "channels"),
    ]
    assert "pos_embed: f32 [1, 17, 6] against f32 [1, 26, 6], resized by bicubic(cls=1)" in str(report)


def test_a_folder_has_the_configuration_of_the_model(tmp_path: Path, run: Run) -> None:
    for name, rows in (("old", 10), ("new", 13)):
        (tmp_path / name).mkdir()
        save_file({"embed.weight": torch.randn(rows, 4)}, tmp_path / name / "model.safetensors", {"format": "pt"})
        config = {"model_type": "llama", "vocab_size": rows}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    args = ("warm-start", tmp_path / "old", "--against", tmp_path / "new", "--resize", "embed.*=rows(mean)")
    done = run(*args, "-o", f"{out}/")
    assert done.code == 0 and "carried along: config.json" in done.out, done
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 13


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"resize": ["nothing*=rows"]}, NoMatch, "nothing"),
        ({"resize": ["pos_embed"]}, UsageError, "not of the form PATTERN=HOW"),
        ({"resize": ["pos_embed=lanczos"]}, UsageError, "unknown way"),
        ({"resize": ["pos_embed=rows"]}, UsageError, "pos_embed .*Only the first dimension"),
        ({"resize": ["pos_embed=bicubic"]}, UsageError, "pos_embed .*17 tokens are no square.*cls=1"),
    ],
)
def test_ways_that_lead_nowhere_are_errors(tmp_path: Path, options: Any, error: Any, words: str) -> None:
    _, file, target = old_and_new(tmp_path)
    with pytest.raises(error, match=f"(?s){words}"):
        ckptool.warm_start(file, target, tmp_path / "out.pt", **{"on_mismatch": "resize", **options})
    assert not (tmp_path / "out.pt").exists()


PROGRAM = """
ways = ["pos=bicubic(cls=1)", "emb=rows(mean)", "conv=bicubic(antialias)"]
report = ckptool.warm_start("old.pt", "new.pt", "out.pt", on_mismatch="resize", resize=ways)
assert report.applied and report.share == 1, report
"""


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    old = {"pos": (1, 4901, 2048), "emb": (10_000, 1024), "conv": (100, 100, 32, 32)}
    new = {"pos": (1, 6401, 2048), "emb": (12_000, 1024), "conv": (100, 100, 28, 28)}
    saved({name: torch.ones(shape) for name, shape in old.items()}, tmp_path / "old.pt")
    saved({name: torch.zeros([1] * len(shape)).expand(shape) for name, shape in new.items()}, tmp_path / "new.pt")
    assert peak_of(PROGRAM, tmp_path) < LIMIT


def test_live_models_and_state_of_resized_parameters(tmp_path: Path) -> None:
    torch.manual_seed(1)
    small, large = nn.Embedding(7, 3), nn.Embedding(9, 3)
    optimizer = torch.optim.Adam(small.parameters())
    small(torch.arange(7)).sum().backward()
    optimizer.step()
    file = saved({"model": small.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    mine = torch.optim.Adam(large.parameters())
    report = ckptool.load_into(large, file, on_mismatch="resize", resize="weight=rows(mean)", optimizer=mine)
    assert torch.equal(large.weight[:7], small.weight) and not mine.state
    assert torch.allclose(large.weight[7:], small.weight.mean(0))
    assert report.optimizer is not None and report.optimizer.left_out == (("weight", "its parameter is resized"),)


def test_a_grid_that_keeps_its_number_of_tokens_is_resized_all_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = saved({"p": torch.randn(1, 280, 4), "w": torch.ones(4)}, tmp_path / "a.pt")
    target = saved({"p": torch.zeros(1, 280, 4), "w": torch.zeros(4)}, tmp_path / "b.pt")
    image = torch.load(file)["p"].reshape(1, 14, 20, 4).permute(0, 3, 1, 2)
    for mode in ("bicubic", "bilinear"):
        ways = {
            "from=14x20, to=20x14": functional.interpolate(image, (20, 14), mode=mode),
            "from=14x20, to=14x20": image,
        }
        for sides, wanted in ways.items():
            out = tmp_path / f"{mode}{sides}.pt"
            report, done = warm_started(file, target, out, resize=f"p={mode}({sides})")
            assert torch.allclose(done["p"], wanted.permute(0, 2, 3, 1).reshape(1, 280, 4), atol=1e-5)
            assert [fact.how for fact in report.loaded if fact.target == "p"] == ["resized"]
    with pytest.raises(UsageError, match="cannot become"):
        warm_started(file, target, tmp_path / "c.pt", resize="p=bicubic(from=14x20, to=10x14)")
