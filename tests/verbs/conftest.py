"""Fixtures that several verbs share: a run to train, members of bundles, the code of a model."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

import ckptool
from tests.support.cli import Run
from tests.support.small_models import CODE, SHARED, net_state, small_net
from tests.support.small_runs import MLP, Typed


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Typed:
    """A command line in an empty folder that has a run.yaml: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(MLP | {"run": "runs/x"}))
    return run


@pytest.fixture(scope="module")
def gan_originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, an optimizer, an average that equals its model but for one tensor."""
    folder = tmp_path_factory.mktemp("originals")
    torch.manual_seed(0)
    generator, discriminator = small_net(64), small_net()
    optimizer = torch.optim.Adam(generator.parameters())
    generator(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    average = {name: tensor.clone() for name, tensor in generator.state_dict().items()}
    average["2.bias"] += 1
    torch.save(generator.state_dict(), folder / "G.pt")
    torch.save({"state_dict": discriminator.state_dict(), "epoch": 7}, folder / "D.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(average, folder / "ema.pt")
    return folder


@pytest.fixture
def gan_files(gan_originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as the working directory."""
    shutil.copytree(gan_originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gan_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of two models, an average, an optimizer and values; in the working directory."""
    monkeypatch.chdir(tmp_path)
    torch.save(net_state(1), "G.pt")
    torch.save({"w.weight": SHARED, "tied.weight": SHARED, "part.weight": SHARED[1:]}, "T.pt")
    parameters = [torch.nn.Parameter(torch.ones(3))]
    torch.save(torch.optim.SGD(parameters, 0.1, momentum=0.9).state_dict(), "o.pt")
    ckptool.bundle(
        {"generator": "G.pt", "tied": "T.pt", "optimizerA": "o.pt", "ema": "G.pt"},
        "gan.tar",
        values={"epoch": 3, "config": {"lr": [0.1, 1e-300, None, True], "name": "n\u00e4me"}, "empty": {}},
    )
    return tmp_path / "gan.tar"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(CODE)
    return path
