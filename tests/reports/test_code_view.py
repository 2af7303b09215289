"""The code view, judged by torch.nn: each class that it states makes the tensors of the file; one is the true one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from ckptool.checkpoint import Checkpoint
from ckptool.formats.in_memory import checkpoint_in_memory
from ckptool.reports.code_view import CodeLine, code_view
from ckptool.reports.inspect import listing, parts


def view(value: Any) -> tuple[CodeLine, ...]:
    if isinstance(value, nn.Module):
        value = value.state_dict()
    found = checkpoint_in_memory(value)
    assert isinstance(found, Checkpoint)
    (part,) = parts(listing(found))
    return code_view(part)


def texts(value: Any) -> list[str]:
    return [f"{'  ' * line.level}{line.name}: {line.text}".rstrip(": ") for line in view(value)]


def classes(text: str) -> Iterator[nn.Module]:
    """Every module that a line states, made by torch: of a convolution "or transposed" the other one, too."""
    text = re.sub(r"(\d+)((?:×\d+)+)", lambda m: f"({m[0].replace('×', ', ')})", text.replace(", heads unknown", ", 1"))
    text = re.sub(r"LayerNorm or GroupNorm \((\d+)\)", r"LayerNorm(\1) or GroupNorm(1, \1)", text)
    text = re.sub(
        r"RMSNorm, LayerNorm without bias or PReLU \((\d+)\)",
        r"RMSNorm(\1) or LayerNorm(\1, bias=False) or PReLU(\1)",
        text,
    )
    first, *others = text.replace("BatchNorm", "BatchNorm2d").split(" or ")
    made = eval(first, vars(nn))
    yield made
    for other in others:
        if other == "transposed":
            kind = getattr(nn, type(made).__name__.replace("Conv", "ConvTranspose"))
            n, bias = made.out_channels, made.bias is not None
            groups = n if bias and made.in_channels != n else 1
            yield kind(n, made.in_channels * groups, made.kernel_size, groups=groups, bias=bias)
        elif other == "depthwise":
            n = made.out_channels
            yield type(made)(n, n, made.kernel_size, groups=n, bias=made.bias is not None)
        elif other == "Bilinear":
            n, a, b = made.weight.shape
            yield nn.Bilinear(a, b, n, bias=made.bias is not None)
        else:
            yield eval(other, vars(nn))


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in module.state_dict().items()}


def kind(module: nn.Module) -> str:
    return re.sub("(Batch)Norm.*|NonDynamicallyQuantizable", r"\1", type(module).__name__)


def judge(module: nn.Module, text: str) -> None:
    made = list(classes(text))
    assert kind(module) in [kind(each) for each in made], (module, text)
    for each in made:
        if kind(each) in ("PReLU", "RMSNorm", "GroupNorm", kind(module)) or isinstance(each, nn.modules.conv._ConvNd):
            assert shapes(each) == shapes(module), (module, text)


small = st.integers(1, 5)
yes = st.booleans()
KERNELS = st.integers(1, 3)
CONVS = [getattr(nn, f"Conv{way}{n}d") for way in ("", "Transpose") for n in (1, 2, 3)]
LAYERS: list[st.SearchStrategy[nn.Module]] = [
    st.builds(nn.Linear, small, small, bias=yes),
    st.builds(nn.Embedding, small, small),
    st.builds(nn.Bilinear, small, small, small, bias=yes),
    st.builds(lambda cls, a, b, k, bias: cls(a, b, k, bias=bias), st.sampled_from(CONVS), small, small, KERNELS, yes),
    st.builds(
        lambda cls, n, k, bias: cls(n, n, k, groups=n, bias=bias), st.sampled_from(CONVS[:3]), small, KERNELS, yes
    ),
    st.builds(
        lambda n, g, o, b: nn.ConvTranspose2d(n * g, o * g, 3, groups=g), small, st.integers(2, 3), small, yes
    ).filter(lambda conv: conv.in_channels != conv.out_channels),
    st.builds(lambda cls, n, a: cls(n, affine=a), st.sampled_from([nn.BatchNorm1d, nn.BatchNorm2d]), small, yes),
    st.builds(nn.LayerNorm, st.lists(small, min_size=1, max_size=3)),
    st.builds(lambda n: nn.LayerNorm(n, bias=False), small),
    st.builds(lambda n: nn.GroupNorm(1, n), small),
    st.builds(nn.RMSNorm, small),
    st.builds(nn.PReLU, small),
    st.builds(
        lambda cls, *a, **k: cls(*a, **k),
        st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
        small,
        small,
        num_layers=st.integers(1, 3),
        bias=yes,
        bidirectional=yes,
    ),
    st.builds(lambda i, h, p: nn.LSTM(i, h + p, proj_size=p), small, small, small),
    st.builds(
        lambda cls, i, h, b: cls(i, h, b), st.sampled_from([nn.LSTMCell, nn.GRUCell, nn.RNNCell]), small, small, yes
    ),
    st.builds(
        lambda n, bias, more, k: nn.MultiheadAttention(n, 1, bias=bias, add_bias_kv=more, kdim=k),
        small,
        yes,
        yes,
        small,
    ),
]


def numbers(name: str) -> range:
    run = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", name)
    return range(int(run[1]), int(run[2]) + 1) if run else range(int(name), int(name) + 1)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(LAYERS), min_size=1, max_size=6), st.integers(1, 4))
def test_what_is_stated_of_random_models_is_true(layers: list[nn.Module], times: int) -> None:
    model = nn.Sequential(*[deepcopy(layer) for layer in layers for _ in range(times)])
    stated = {number: line.text for line in view(model) if line.level == 0 for number in numbers(line.name)}
    told = {int(name) for name, layer in model.named_children() if layer.state_dict()}
    assert stated.keys() == told
    for number, text in stated.items():
        judge(model[number], text)


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 4),
    "transformer": lambda: nn.Transformer(8, 2, 3, 3, 16, batch_first=True),
    "lstm": lambda: nn.Sequential(nn.Embedding(10, 4), nn.LSTM(4, 8, 2, bidirectional=True), nn.Linear(16, 10)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_line_of_real_models_is_true(name: str) -> None:
    model = WHOLE[name]()
    seen = set()
    above: list[str] = []
    for line in view(model):
        first = re.sub(r"\{(\d+)\.\..*\}", r"\1", line.name)
        above = [*above[: line.level], first]
        if line.text:
            module = model.get_submodule(".".join(above))
            judge(module, line.text)
            seen.add(".".join(above))
    owners = {key.rpartition(".")[0] for key in model.state_dict()}
    folded = {re.sub(r"\.\d+\.", ".0.", f"{owner}.") for owner in owners}
    assert {re.sub(r"\.\d+\.", ".0.", f"{owner}.") for owner in seen} >= {
        re.sub(r"norm[23]", "norm1", o) for o in folded
    } - {""}


class Block(nn.Module):
    def __init__(self, given: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(given, out, 3, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, bias=False), nn.BatchNorm2d(out)
        if given != out:
            self.downsample = nn.Sequential(nn.Conv2d(given, out, 1, bias=False), nn.BatchNorm2d(out))


def test_a_resnet_reads_as_it_is_written() -> None:
    model = nn.ModuleDict(
        {"conv1": nn.Conv2d(3, 8, 7, bias=False), "bn1": nn.BatchNorm2d(8)}
        | {"layer1": nn.Sequential(Block(8, 16), *(Block(16, 16) for _ in range(3))), "fc": nn.Linear(16, 10)}
    )
    assert texts(model) == [
        "conv1: Conv2d(3, 8, 7×7, bias=False)",
        "bn1: BatchNorm(8)",
        "layer1",
        "  0",
        "    conv1: Conv2d(8, 16, 3×3, bias=False)",
        "    bn1: BatchNorm(16)",
        "    conv2: Conv2d(16, 16, 3×3, bias=False)",
        "    bn2: BatchNorm(16)",
        "    downsample",
        "      0: Conv2d(8, 16, 1×1, bias=False)",
        "      1: BatchNorm(16)",
        "  {1..3}",
        "    conv1: Conv2d(16, 16, 3×3, bias=False)",
        "    bn1: BatchNorm(16)",
        "    conv2: Conv2d(16, 16, 3×3, bias=False)",
        "    bn2: BatchNorm(16)",
        "fc: Linear(16, 10)",
    ]


def test_a_transposed_convolution_is_never_stated_to_be_the_other() -> None:
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, bias=False)
    )
    assert [text for text in texts(generator) if "Conv" in text] == [
        "0: Conv2d(8, 16, 4×4, bias=False) or transposed",
        "3: Conv2d(3, 8, 4×4, bias=False) or transposed",
    ]
    named = nn.ModuleDict({"up_conv1": nn.ConvTranspose2d(8, 8, 4, bias=False), "bn1": nn.BatchNorm2d(8)})
    assert texts(named)[0] == "up_conv1: Conv2d(8, 8, 4×4, bias=False) or transposed"


def test_names_tell_embeddings_from_linear_layers_and_norms_apart() -> None:
    square = torch.ones(4, 4)
    names = ("wte", "tok_embeddings", "q_proj", "lm_head", "w1", "shared", "embed_out")
    assert texts({f"m.{name}.weight": square for name in names}) == ["m"] + [
        f"  {name}: {text}"
        for name, text in zip(
            names,
            (
                *2 * ("Embedding(4, 4)",),
                *3 * ("Linear(4, 4, bias=False)",),
                *2 * ("Linear(4, 4, bias=False) or Embedding(4, 4)",),
            ),
            strict=True,
        )
    ]
    norms = {f"m.{name}.{end}": torch.ones(4) for name in ("ln_1", "norm", "group_norm") for end in ("weight", "bias")}
    assert texts(norms)[1:] == [
        "  ln_1: LayerNorm(4)",
        "  norm: LayerNorm or GroupNorm (4)",
        "  group_norm: GroupNorm(4)",
    ]
    gpt2 = {
        "c_attn.weight": torch.ones(4, 12),
        "c_attn.bias": torch.ones(12),
        "c_proj.weight": square,
        "c_proj.bias": torch.ones(4),
    }
    assert texts(gpt2) == ["c_attn: Conv1D(12, 4)", "c_proj: Linear(4, 4) or Conv1D"]


def test_adapters_and_quantized_weights() -> None:
    key = "base_model.model.layers.{}.{}.lora_{}.weight"
    pairs = {
        key.format(i, name, side): torch.ones(shape)
        for i in range(4)
        for name in ("q_proj", "v_proj")
        for side, shape in (("A", (2, 8)), ("B", (6, 2)))
    }
    lines = ["base_model.model.layers.{0..3}", "  q_proj: LoRA(8, 6, r=2)", "  v_proj: LoRA(8, 6, r=2)"]
    assert texts(pairs) == lines
    f8 = torch.zeros(4, 6).to(torch.float8_e4m3fn)
    scaled = {
        f"layers.{i}.w.{end}": value
        for i in range(3)
        for end, value in (("weight", f8.clone()), ("weight_scale", torch.ones(1)))
    }
    assert texts(scaled) == ["layers.{0..2}", "  w: Linear(6, 4), fp8 with a scale for each tensor"]


def test_unknown_kinds_stay_tensors() -> None:
    state = {
        "cls_token": torch.ones(1, 1, 4),
        "gate.weight": torch.ones(4, 4),
        "gate.extra": torch.ones(2),
        "codes.weight": torch.ones(4, 4, dtype=torch.int8),
        "lstm.weight_ih_l0": torch.ones(8, 4),
        "steps.0": torch.ones(2),
        "steps.1": torch.ones(2),
        "steps.2": torch.ones(2),
        "a": torch.ones(()),
        "a.weight": torch.ones(0, 4),
    }
    assert texts(state) == [
        "cls_token: tensor f32 [1, 1, 4]",
        "gate",
        "  weight: tensor f32 [4, 4]",
        "  extra: tensor f32 [2]",
        "codes.weight: tensor i8 [4, 4]",
        "lstm.weight_ih_l0: tensor f32 [8, 4]",
        "steps.{0..2}: tensor f32 [2]",
        "a: tensor f32 []",
        "a.weight: tensor f32 [0, 4]",
    ]


def test_a_model_that_is_one_layer_has_its_class() -> None:
    assert view(nn.Linear(3, 2)) == (CodeLine(0, "", "Linear(3, 2)"),)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text("a.0/~{é", max_size=8), st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=8))
def test_any_names_and_shapes_have_a_view(state: dict[str, list[int]]) -> None:
    found = view({"state_dict": {f"m.{key}": torch.zeros(shape) for key, shape in state.items()}}["state_dict"])
    assert all(line.times >= 1 for line in found)
