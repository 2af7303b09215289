"""`show`: the values of a tensor, or any other entry."""

import re
from functools import partial
from math import prod
from pathlib import Path

import numpy
import pytest
import torch

import ckptool
from ckptool.errors import UsageError
from ckptool.render.lines import text as report_text
from fixtures.traps import TRAPS
from tests.support.files import saved
from tests.support.looped import looped


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = {"a.w": torch.arange(24.0).reshape(4, 6), "big": torch.arange(10_000).reshape(100, 100)}
    value = {"model": model | {"n": torch.tensor(7)}, "epoch": 3, **TRAPS["11-sparse-coo"]()}
    return saved(value, tmp_path / "in.pt")


@looped("text", ["0:4", "1:3,:", ":,2:,3:5", ":", "5:2", "4:99", "9:,:1", " 1 : , : ", "0:0", ":,:,:"])
def test_a_slice_is_that_of_numpy(text: str, tmp_path: Path) -> None:
    tensor = torch.arange(6 * 7 * 8).reshape(7, 6, 8).transpose(0, 1)
    wanted = eval(f"array[{text}]", {"array": tensor.numpy()})
    for value in (tensor, tensor.numpy()):
        found = ckptool.show(saved({"w": value}, tmp_path / "w.pt"), at="w", slice=text)
        assert found.slice == text and found.values.shape == wanted.shape and found.values.tolist() == wanted.tolist()


@looped("text", ["", "3", "-1:", ":-2", "::2", "...", "x", "1.5:", "0:1,0:1,0:1", "1:2:0", "0:1,", "\x1b[0m"])
def test_a_slice_that_does_not_fit_names_the_shape(text: str, file: Path) -> None:
    with pytest.raises(UsageError, match=r"\[4, 6\]") as caught:
        ckptool.show(f"{file}#model/a.w", slice=text)
    assert "\x1b" not in str(caught.value)
    for place in ("model/n", "epoch", "w", "model"):  # of no dimension, no tensor
        with pytest.raises(UsageError):
            ckptool.show(f"{file}#{place}", slice=":")
    with pytest.raises(UsageError, match="there is no x in model"):
        ckptool.show(f"{file}#model/x")


@pytest.mark.parametrize(("shape", "edge"), [((5_000,), 3), ((80, 90), 3), ((30, 31, 32), 2), ((2, 30, 31, 9), 2)])
def test_the_corners_are_those_that_numpy_prints(shape: tuple[int, ...], edge: int, tmp_path: Path) -> None:
    whole = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    found = ckptool.show(f"{saved({'w': whole}, tmp_path / 'a.pt')}#w")
    printed = numpy.array2string(whole.numpy(), threshold=0, edgeitems=edge, max_line_width=120, separator=", ")
    assert found.values is None and numpy.array_equal(ckptool.show(tmp_path / "a.pt", at="w", all=True).values, whole)
    assert found.truncated and re.sub(r"\s+", "", printed) in re.sub(r"\s+", "", str(found))


def test_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    text = "\n# a\n\n\nb: \x1b[31m\n"
    tree = {"config": text, "none": "", "long": {"text": "a\n" * 9}, "flat": [[1, 2], {"x": ()}]}
    file = saved(tree, tmp_path / "t.pt")
    assert report_text(ckptool.show(file, at="config")) == "\n# a\n\n\nb: \\x1b[31m\n\n"
    assert report_text(ckptool.show(file, at="none")) == "\n"
    assert str(ckptool.show(file, at="long")) == "text: a string of 9 lines"
    assert str(ckptool.show(file, at="flat")) == "0: [1, 2]\n1:\n  x: ()"
    called = ckptool.show(saved({"call": partial(int, base=2)}, tmp_path / "u.pt"), at="call")
    assert str(called).startswith("<functools.partial>\n(args):")
    assert str(ckptool.show(saved({"w": torch.ones(2, 2, 1, 1)}, tmp_path / "w.pt"), at="w")).count("\n\n\n") == 1


def test_json_has_everything(file: Path) -> None:
    big, entry = (ckptool.show(file, at=place).to_dict() for place in ("model/big", "epoch"))
    assert big["truncated"] and big["values"] is None and big["tensor"]["dtype"] == "i64"
    assert (entry["type"], entry["value"], entry["tensor"], entry["truncated"]) == ("int", 3, None, False)
    odd = {"c": torch.tensor([1 + 2j, complex("nan")]), "b": torch.tensor([1.5, float("inf")]).bfloat16()}
    path = saved(odd, file.with_name("odd.pt"))
    assert ckptool.show(path, at="c").to_dict()["values"] == [[1.0, 2.0], ["NaN", 0.0]]
    assert ckptool.show(path, at="b").to_dict()["values"] == [1.5, "Infinity"]


def test_of_an_optimizer_the_first_parameters_and_the_settings(tmp_path: Path) -> None:
    weights = [torch.zeros(2, requires_grad=True) for _ in range(60)]
    optimizer = torch.optim.Adam(weights)
    sum(map(torch.sum, weights)).backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    shown = ckptool.show(tmp_path / "a.pt", at="optimizer")
    told = str(shown).split("\n")
    assert len(told) < 40 and "  … 57 more (all=True)" in told and "    lr: 0.001" in told
    assert "    params: 0, 1, 2, 3, 4, 5, 6, 7 and 52 more" in told
    whole = report_text(shown, all=True)
    assert "  59:\n" in whole and "      59: 59\n" in whole
