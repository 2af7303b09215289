"""`bake`: what torch's own parametrized modules compute, as plain weights that the plain module loads."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, remove_weight_norm, spectral_norm, weight_norm

import ckptool
from ckptool.errors import LimitExceeded
from tests.support.errors import refused
from tests.support.files import load, saved

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:.*spectral_norm:FutureWarning")

CHANGES = Path(__file__).parents[2] / "docs" / "since-0.1.md"

MODULES = {
    "linear": lambda: nn.Linear(5, 7),
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "transposed": lambda: nn.ConvTranspose1d(3, 4, 3),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("new", [False, True], ids=["old", "new"])
def test_weight_norm(tmp_path: Path, kind: str, dim: int | None, new: bool) -> None:
    module = (parametrizations.weight_norm if new else weight_norm)(MODULES[kind](), dim=dim)
    with torch.no_grad():
        g = module.parametrizations.weight.original0 if new else module.weight_g
        g.mul_(1.7)
    x = module.weight if new else None
    file = saved(
        {"state_dict": {f"body.{k}": v for k, v in module.state_dict().items()}, "epoch": 1}, tmp_path / "in.pt"
    )
    done = ckptool.bake(file, tmp_path / "out.pt")
    found = load(tmp_path / "out.pt")["state_dict"]
    if x is None:
        x = remove_weight_norm(module).weight
    assert sorted(found) == ["body.bias", "body.weight"]
    assert torch.allclose(found["body.weight"], x, rtol=1e-6, atol=0)
    assert done.facts["folded"] == ["body.weight"]
    MODULES[kind]().load_state_dict({key.removeprefix("body."): value for key, value in found.items()})


def test_pruning_is_exact(tmp_path: Path) -> None:
    module = prune.random_unstructured(nn.Linear(50, 40), "weight", 0.5)
    plain = module.weight.detach().clone()
    ckptool.bake(saved(module.state_dict(), tmp_path / "in.pt"), tmp_path / "out.pt")
    assert torch.equal(load(tmp_path / "out.pt")["weight"], plain)


@pytest.mark.parametrize("new", [False, True], ids=["old", "new"])
def test_spectral_norm_is_left_alone(tmp_path: Path, new: bool) -> None:
    module = (parametrizations.spectral_norm if new else spectral_norm)(nn.Linear(6, 4)).eval()
    file = saved(module.state_dict(), tmp_path / "in.pt")
    done = ckptool.bake(file, tmp_path / "left.pt")
    assert list(load(tmp_path / "left.pt")) == list(module.state_dict()) and done.facts["left"]
    vectors = [key for key in module.state_dict() if key.endswith(("_u", "_v"))]
    assert len(vectors) == 2 and all(key in done.details[0] for key in vectors)


def test_what_stays_of_the_optimizer_is_said_and_other_names_are_a_renaming(tmp_path: Path) -> None:
    """The line of docs/since-0.1.md: what `load_state_dict` of torch's own modules and optimizers takes."""
    models = [
        nn.Sequential(nn.BatchNorm1d(3), norm(nn.Linear(3, 4))) for norm in (weight_norm, parametrizations.weight_norm)
    ]
    first, second = (torch.optim.Adam(model.named_parameters()) for model in models)
    models[0](torch.randn(5, 3)).sum().backward()
    first.step()
    file = saved({"model": models[0].state_dict(), "optimizer": first.state_dict()}, tmp_path / "in.pt")
    assert [note.code for note in ckptool.bake(file, tmp_path / "plain.pt").notes] == ["optimizer-differs"]
    line = next(line for line in CHANGES.read_text("utf-8").splitlines() if line.startswith("| `bake --form"))
    ckptool.rename(file, re.findall("'(.+?)'", line), tmp_path / "out.pt")
    done = load(tmp_path / "out.pt")
    assert done["optimizer"]["param_groups"][0]["param_names"] == [name for name, _ in models[1].named_parameters()]
    assert done["model"]._metadata["0"] == {"version": 2} and {"", "0", "1"} <= {*done["model"]._metadata}
    models[1].load_state_dict(done["model"])
    second.load_state_dict(done["optimizer"])
    models[1].load_state_dict(load(file)["model"])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    two = {"a.weight_g": (3, 1), "a.weight_v": (3, 2), "a.weight": (3, 2)}
    for code, says, shapes in (
        ("conflict", "already exists", two),
        ("conflict", "not a norm", {"a.weight_g": (5, 1), "a.weight_v": (3, 2)}),
        ("conflict", "the mask has a different shape", {"a.weight_orig": (3, 2), "a.weight_mask": (2, 3)}),
        ("no-match", "no parametrized weights", {"a.weight": (2,)}),
    ):
        file = saved({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "in.pt")
        refused(code, tmp_path, partial(ckptool.bake, file, tmp_path / "out.pt"), says)


def test_rows_that_no_layer_has_are_refused(tmp_path: Path) -> None:
    wide = saved({"a.weight_g": torch.ones(1, 1), "a.weight_v": torch.ones(1, 1 + (1 << 20))}, tmp_path / "wide.pt")
    with pytest.raises(LimitExceeded, match="rows of 1,048,577 elements"):
        ckptool.bake(wide, tmp_path / "none.pt")
