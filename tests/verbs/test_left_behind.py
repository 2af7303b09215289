"""What an export leaves behind: how many tensors and bytes; where that may be the model, it is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import Unsupported

MODEL = {"fc.weight": torch.ones(3, 4), "fc.bias": torch.zeros(3)}
LARGE = torch.arange(4000.0)
EXPECTED = {
    "optimizer": {"state": {0: {"exp_avg": LARGE}}, "param_groups": [{"params": [0]}]},
    "optimizers": [{"moments": LARGE}],
    "ema_model": {"fc.weight": LARGE.reshape(40, 100), "fc.bias": torch.zeros(40)},
    "model_ema": {"shadow": [LARGE]},
    "rng_state": LARGE.byte(),
    "cuda_rng_state_all": [LARGE.byte()],
    "random_states": {"torch": LARGE.byte()},
    "lr_scheduler": {"table": LARGE},
}
UNEXPECTED = {
    "attributes": {"packed": LARGE},
    "buffers": [LARGE],
    "codebook": LARGE,
    "extra": {"deep": [{"x": LARGE}]},
    "pair": (LARGE, LARGE),
}


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_more_than_is_written_is_refused_until_it_is_named(suffix: str, tmp_path: Path) -> None:
    file, out = tmp_path / "in.pt", tmp_path / f"out.{suffix}"
    for name, value in (EXPECTED | UNEXPECTED).items():
        torch.save({"model": MODEL, name: value}, file)
        if name in UNEXPECTED:
            with pytest.raises(Unsupported, match=r"16.0 kB would be left out.*60 B"):
                ckptool.convert(file, out)
            assert not out.exists()
            done = ckptool.convert(f"{file}#model", out)
        else:
            done = ckptool.convert(file, out)
        assert done.facts["left_behind_bytes"] >= LARGE.numel() and done.facts["left_behind_tensors"] >= 1
        assert any(
            line.startswith(f"left out (the input keeps it): {name} (") and "B)" in line for line in done.details
        ), done
        out.unlink()


def test_only_what_one_does_not_expect_is_named_and_summed(tmp_path: Path) -> None:
    torch.save({"model": MODEL, **EXPECTED, "codebook": LARGE}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match=r"16\.0 kB would be left out") as raised:
        ckptool.convert(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert raised.value.what.endswith("written: codebook (16.0 kB)")


def test_what_is_smaller_or_written_under_another_name_is_no_loss(tmp_path: Path) -> None:
    for beside in ({"mean": torch.ones(2)}, {"again": {"w": MODEL["fc.weight"]}, "all": [MODEL["fc.weight"]] * 9}):
        torch.save({"model": MODEL, **beside}, tmp_path / "in.pt")
        done = ckptool.convert(tmp_path / "in.pt", tmp_path / "out.safetensors", overwrite=True)
        assert done.facts["left_behind_bytes"] == (8 if "mean" in beside else 0)
        chosen = ckptool.convert(tmp_path / "in.pt", tmp_path / "one.safetensors", only="fc.bias", overwrite=True)
        assert chosen.facts["left_behind_bytes"] >= 48  # named by a pattern


def test_other_verbs_that_export_one_set(tmp_path: Path) -> None:
    torch.save({"model": MODEL, "codebook": LARGE}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match="codebook"):
        ckptool.average([tmp_path / "in.pt", tmp_path / "in.pt"], tmp_path / "out.pt")
    assert ckptool.average([f"{tmp_path}/in.pt#model"] * 2, tmp_path / "out.pt").facts["left_behind"] == ["codebook"]


@pytest.mark.filterwarnings("ignore")
def test_a_program_with_its_weights_elsewhere(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = nn.Parameter(torch.ones(2))
            self.large = nn.Linear(30, 30)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.large(x) * self.kept.sum()

    script = torch.jit.freeze(torch.jit.script(Mixed().eval()), preserved_attrs=["kept"])
    script.save(tmp_path / "frozen.pt")  # the weights of `large` are constants now
    if "kept" in torch.jit.load(tmp_path / "frozen.pt").state_dict():
        with pytest.raises(Unsupported, match="constants"):
            ckptool.convert(tmp_path / "frozen.pt", tmp_path / "out.safetensors")
    backend = torch.backends.quantized.engine
    torch.backends.quantized.engine = next(e for e in torch.backends.quantized.supported_engines if e != "none")
    try:
        packed = torch.ao.nn.quantized.Linear(40, 40)
        torch.jit.script(nn.Sequential(nn.LayerNorm(2), packed)).save(tmp_path / "packed.pt")
    finally:
        torch.backends.quantized.engine = backend
    with pytest.raises(Unsupported, match=r"attributes \(2 tensors"):
        ckptool.convert(tmp_path / "packed.pt", tmp_path / "out.safetensors")
    ckptool.convert(f"{tmp_path}/packed.pt#state_dict", tmp_path / "out.safetensors")


def test_safetensors_never_has_the_versions_of_modules_and_says_nothing_of_it(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1).state_dict(), tmp_path / "in.pt")
    done = ckptool.convert(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert "left out" not in str(done) and done.to_dict()["facts"]["left_behind"] == ["_metadata"]
