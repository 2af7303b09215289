"""No tensor disappears inside what was taken: its bytes are in the output, or its address is in the report, or nothing
is written. How many tensors and bytes an export leaves behind is said; where that may be the model, it is refused.

Every tensor has random bytes of its own, which are looked for in the files as they are on the disk.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckptool
from ckptool.checkpoint.tree import stored_parts, walk
from ckptool.errors import CkptoolError, Unsupported
from fixtures.traps import TRAPS
from tests.support.errors import refused
from tests.support.files import saved
from tests.support.lab_trial import run_line
from tests.support.looped import looped


class Noise:
    """Makes tensors and remembers their bytes."""

    def __init__(self) -> None:
        self.bytes: list[bytes] = []

    def __call__(self, count: int = 8) -> torch.Tensor:
        values = torch.randn(count)
        self.bytes.append(values.numpy().tobytes())
        return values


class Holder:
    """Somebody's own class."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Net(nn.Module):
    """A module with tensors in its parameters, and wherever else is asked for."""

    def __init__(self, noise: Noise, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise())
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self) -> None: ...


class Call:
    """Something that pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


class Sub(torch.Tensor):
    """A subclass of somebody's own."""


def quantized(noise: Noise) -> torch.Tensor:
    values = torch.randint(-100, 100, (32,), dtype=torch.int8)
    noise.bytes.append(values.numpy().tobytes())
    return torch._make_per_tensor_quantized_tensor(values, 0.5, 0)


def dynamic(noise: Noise, *others: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), *others)
    made = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    noise.bytes.append(made[0].weight().int_repr().numpy().tobytes())
    return made


def with_grad(noise: Noise) -> torch.Tensor:
    made = nn.Parameter(noise())
    made.extra = noise()  # type: ignore[attr-defined]
    return made


rebuilt = torch._utils._rebuild_tensor
KINDS: dict[str, Callable[[Noise], Any]] = {
    "tensor": lambda noise: noise(),
    "parameter": lambda noise: nn.Parameter(noise()),
    "quantized": quantized,
    "sparse": lambda noise: torch.sparse_coo_tensor(torch.arange(8).reshape(1, 8), noise(), check_invariants=False),
    "subclass": lambda noise: noise().as_subclass(Sub),
    "wrapper": lambda noise: TwoTensor(noise(), noise()),
    "attributes": with_grad,
    "storage": lambda noise: noise().untyped_storage(),
    "list": lambda noise: [noise(), "x", noise()],
    "tuple": lambda noise: (quantized(noise), None),
    "dictionary": lambda noise: {"scale": noise(), 0: noise()},
    "own object": lambda noise: Holder(a=noise(), b=[noise()]),
    "module": lambda noise: Net(noise),
    "module with attributes": lambda noise: Net(noise, stride=noise(), more=[noise()], held=Holder(x=noise())),
    "quantized module": lambda noise: dynamic(noise),
    "partly quantized module": lambda noise: dynamic(noise, nn.LayerNorm(4)),
    "quantized state dict": lambda noise: dict(dynamic(noise).state_dict()),
    "method": lambda noise: Net(noise).forward,
    "call of a storage": lambda noise: Call(torch.BoolStorage, [True, False]),
    "rebuilt of a storage": lambda noise: Call(rebuilt, Call(torch.BoolStorage, [True]), 0, (1,), (1,)),
}

SHAPES: dict[str, Callable[[Noise, Any], Any]] = {
    "top": lambda noise, thing: thing,
    "beside": lambda noise, thing: {"state_dict": {"fc.weight": noise(), "fc.bias": noise()}, "odd": thing},
    "inside": lambda noise, thing: {"state_dict": {"fc.weight": noise(), "fc.bias": noise(), "odd": thing}, "epoch": 1},
}

WAYS: dict[str, Callable[[Path, Path], Any]] = {
    "to safetensors": lambda file, out: ckptool.convert(file, out / "out.safetensors"),
    "to npz": lambda file, out: ckptool.convert(file, out / "out.npz"),
    "to shards": lambda file, out: ckptool.convert(file, out / "shards", shard_size="1MB"),
    "all": lambda file, out: ckptool.convert(file, out / "out.safetensors", all=True),
    "compact": lambda file, out: ckptool.convert(file, out / "out.pt"),
    "weights only": lambda file, out: ckptool.convert(file, out / "out.pt", weights_only=True),
    "weights only to safetensors": lambda file, out: ckptool.convert(file, out / "out.safetensors", weights_only=True),
    "the part": lambda file, out: ckptool.convert(f"{file}#odd", out / "out.pt"),
    "the state dict": lambda file, out: ckptool.convert(f"{file}#state_dict", out / "out.pt"),
    "slim": lambda file, out: ckptool.slim(file, out / "out.pt"),
    "rename": lambda file, out: ckptool.rename(file, ["fc.* => head.*"], out / "out.pt"),
    "set": lambda file, out: ckptool.edit(file, out / "out.pt", set={"state_dict/odd": 3}),
    "set beside": lambda file, out: ckptool.edit(file, out / "out.pt", set={"odd": 3}),
    "average": lambda file, out: ckptool.average([file, file], out / "out.pt"),
    "bundle": lambda file, out: ckptool.bundle({"a": file, "b": f"{file}#odd"}, out / "out.pt"),
    "bundle to safetensors": lambda file, out: ckptool.bundle({"a": file}, out / "out.safetensors"),
    "unbundle": lambda file, out: ckptool.unbundle(file, out / "parts"),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about its quantization
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@looped("kind", KINDS, here=1 / 3)
def test_every_tensor_is_written_or_listed_or_nothing_is(kind: str, shape: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(len(kind) + 100 * len(shape))
    noise, out = Noise(), tmp_path / "out"
    out.mkdir()
    file = saved(SHAPES[shape](noise, KINDS[kind](noise)), tmp_path / "f.pt")
    before = file.read_bytes()
    assert all(data in before for data in noise.bytes)
    try:
        done = WAYS[way](file, out)
    except CkptoolError as error:
        assert error.exit_code in (1, 2) and error.what
        assert not list(out.iterdir()) and file.read_bytes() == before
        return
    after = b"".join(path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file())
    lost = [data for data in noise.bytes if data not in after]
    listed = done.facts.get("left_behind", [])
    told = b"".join(_data(node) for place in listed for _, node in walk(ckptool.open(f"{file}#{place}").tree))
    assert all(data in told for data in lost), f"{len(lost)} lost, listed: {listed}"
    if kind.endswith("of a storage") and way.startswith(("weights only", "to ")):
        assert "odd" in listed


def _data(node: Any) -> bytes:
    return b"".join(part.storage.data.read(0, part.storage.nbytes) for part in stored_parts(node))


def test_what_is_in_the_way_of_plain_values_can_be_dropped_as_the_error_says(tmp_path: Path) -> None:
    noise = Noise()
    net = Net(noise, stride=noise(), more=[noise()])
    file = saved({"model": net, "epoch": 1}, tmp_path / "f.pt")
    with pytest.raises(CkptoolError, match=r"2 tensors of .* would be lost: model/stride") as caught:
        ckptool.convert(file, tmp_path / "out.pt", weights_only=True)
    assert "--drop model/stride --drop model/more" in caught.value.fix
    ckptool.edit(file, tmp_path / "less.pt", drop=["model/stride", "model/more"])
    ckptool.convert(tmp_path / "less.pt", tmp_path / "out.pt", weights_only=True)
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["weight"], net.weight)


def test_a_buffer_that_its_module_does_not_save_is_listed(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("passing", torch.ones(2), persistent=False)
    done = ckptool.convert(saved({"model": net}, tmp_path / "f.pt"), tmp_path / "out.pt", weights_only=True)
    assert done.facts["left_behind"] == ["model/_buffers/passing"]


# What an export leaves behind.
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
            says = r"16.0 kB would be left out.*60 B"
            refused("unsupported", tmp_path, lambda: ckptool.convert(file, out), says)
        done = ckptool.convert(f"{file}#model" if name in UNEXPECTED else file, out)
        assert done.facts["left_behind_bytes"] >= LARGE.numel() and done.facts["left_behind_tensors"] >= 1
        assert re.search(rf"left out \(the input keeps it\): {name} \(.*B\)", "\n".join(done.details)), done
        out.unlink()


def test_only_what_one_does_not_expect_is_named_and_summed(tmp_path: Path) -> None:
    """By other verbs that export one set, too; what is smaller or written under another name is no loss."""
    file, out = tmp_path / "in.pt", tmp_path / "out.safetensors"
    torch.save({"model": MODEL, **EXPECTED, "codebook": LARGE}, file)
    says = r"16\.0 kB would be left out[^:]*written: codebook \(16\.0 kB\)\n"
    for call in (lambda: ckptool.convert(file, out), lambda: ckptool.average([file, file], out)):
        refused("unsupported", tmp_path, call, says)
    assert "codebook" in ckptool.average([f"{file}#model"] * 2, out, dry_run=True).facts["left_behind"]
    for beside in ({"mean": torch.ones(2)}, {"again": {"w": MODEL["fc.weight"]}, "all": [MODEL["fc.weight"]] * 9}):
        torch.save({"model": MODEL, **beside}, tmp_path / "in.pt")
        done = ckptool.convert(tmp_path / "in.pt", tmp_path / "out.safetensors", overwrite=True)
        assert done.facts["left_behind_bytes"] == (8 if "mean" in beside else 0)
        chosen = ckptool.convert(tmp_path / "in.pt", tmp_path / "one.safetensors", only="fc.bias", overwrite=True)
        assert chosen.facts["left_behind_bytes"] >= 48  # named by a pattern


def test_only_a_file_of_a_model_and_its_average_is_cut_to_the_model(tmp_path: Path) -> None:
    """A fix takes the model out of ema_pytorch's, but no part out of a latent diffusion model with three."""
    pair = {"model.w": torch.ones(2, 2), "model_ema.w": torch.ones(2, 2), "model_ema.decay": torch.ones(())}
    for parts in ({"betas": torch.ones(9)}, {"first_stage_model.w": torch.ones(2, 2)}):
        file = saved({"state_dict": pair | parts, "epoch": 1}, tmp_path / "in.pt")
        done = ckptool.doctor(file, tmp_path / "out.pt", fix=True, overwrite=True)
        names = list(torch.load(tmp_path / "out.pt", weights_only=True))
        assert names == (["w"] if "betas" in parts else [*pair, *parts]), done


def test_of_weights_that_fit_equally_well_it_is_said_which_were_taken(tmp_path: Path) -> None:
    target = saved(MODEL, tmp_path / "target.pt")
    both = {"student": {f"module.{key}": value + 1 for key, value in MODEL.items()}, "teacher": MODEL}
    file = saved(both | {"head": {"fc.weight": torch.ones(3, 4)}}, tmp_path / "in.pt")
    done = ckptool.doctor(file, tmp_path / "out.pt", fix=True, against=target)
    (note,) = [note.message for note in done.notes if note.code == "several-weights"]
    assert "2 sets of weights, but a model takes one: student, teacher. student was taken" in note
    assert f"--against {target}" in note


def test_no_error_advises_to_drop_the_weights(tmp_path: Path) -> None:
    danger, other = (TRAPS["20-unknown-call"]()["danger"] for _ in range(2))
    model = nn.Linear(2, 2)
    model.config = danger  # type: ignore[assignment]
    file = tmp_path / "in.pt"
    for tree, fix in (
        ({"net": model}, "Write only the weights"),
        ({"state_dict": MODEL, "config": {"criterion": model}}, "Write only the weights"),
        ({"x": danger, "y": {"z": other}}, "Drop it"),
        ([danger], "Pass it"),
    ):
        saved(tree, file)
        error = refused("unsafe-global", tmp_path, lambda: ckptool.remap(file, tmp_path / "out.pt", to="cpu"))
        assert error.fix.startswith(fix)
        if fix != "Pass it":
            assert run_line(str(error.fix.commands[0]).replace("OUT", f"{tmp_path}/{len(tree)}-{len(fix)}")) == 0
    assert ckptool.diff(tmp_path / "2-22.safetensors", saved(MODEL, tmp_path / "weights.pt")).same


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


def test_metadata_strings_are_kept_or_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "in.safetensors"
    save_file({"a.weight": torch.ones(2, 3)}, file, metadata={"format": "pt", "ss_network_dim": "4"})
    calls: list[Callable[[Path], Any]] = [
        lambda out: ckptool.convert(file, out),
        lambda out: ckptool.cast(file, out, dtype="f16"),
        lambda out: ckptool.rename(file, ["a.* => b.*"], out),
        lambda out: ckptool.average([file, file], out),
        lambda out: ckptool.slim(file, out),
    ]
    for number, call in enumerate(calls):
        for name in ("out.safetensors", "out.pt", "out.npz", "out.dcp", "out/"):
            out = f"{tmp_path / str(number)}{name}"
            written = call(out)  # type: ignore[arg-type]
            notes = [note.message for note in written.notes if note.code == "metadata-left"]
            assert ("ss_network_dim" in ckptool.open(out).metadata) is not bool(notes), out
            assert not notes or "ss_network_dim" in notes[0]
