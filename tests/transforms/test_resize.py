"""Resized tensors against torch's own `interpolate` in f64: never further from it than twice what torch's f32 is."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies
from torch.nn import functional

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.conventions.state_dicts import of_positions
from ckptool.errors import LimitExceeded, Unsupported, UsageError
from ckptool.transforms.resize import parse_resize, resized
from tests.support.files import entry_of
from tests.support.looped import examples, looped


def values(entry: TensorEntry) -> torch.Tensor:
    data = bytearray(entry.bytes())
    dtype = getattr(torch, entry.dtype.torch)
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(entry.shape)


def resized_values(tensor: torch.Tensor, shape: tuple[int, ...], how: str) -> torch.Tensor:
    return values(resized(entry_of(tensor), shape, parse_resize(how), "x"))


def interpolated(image: torch.Tensor, new: tuple[int, int], mode: str, antialias: bool) -> torch.Tensor:
    """torch's own, of [.., N, D] with N tokens as an image of the sizes of `image` [.., H, W, D]."""
    lead = image.shape[:-3]
    planes = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2)
    made = functional.interpolate(planes, new, mode=mode, antialias=antialias, align_corners=False)
    return made.permute(0, 2, 3, 1).reshape(*lead, new[0] * new[1], -1)


def assert_close(found: torch.Tensor, tensor: torch.Tensor, torchs: Any) -> None:
    """No further from the f64 result than twice torch's own error and half a unit of the largest value."""
    exact = torchs(tensor.double())
    single = torchs(tensor.float())
    own = (single.double() - exact).abs().max().item()
    rounding = 0.0 if tensor.dtype == torch.float32 else torch.finfo(tensor.dtype).eps * exact.abs().max().item() / 2
    error = (found.double() - exact).abs().max().item()
    assert error <= max(2 * own, torch.finfo(torch.float32).eps / 2 * exact.abs().max().item()) + rounding


@given(
    strategies.tuples(*[strategies.integers(1, 12)] * 4),
    strategies.sampled_from(["bicubic", "bilinear"]),
    strategies.booleans(),
    strategies.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    strategies.sampled_from([(), (1,), (3,)]),
    strategies.integers(0, 2**31),
)
@example((14, 14, 24, 24), "bicubic", False, torch.float16, (1,), 0)
@example((16, 16, 37, 37), "bicubic", True, torch.float32, (), 0)
@example((14, 20, 20, 14), "bilinear", True, torch.float64, (), 0)
@example((24, 24, 14, 14), "bilinear", False, torch.bfloat16, (3,), 0)
@settings(max_examples=examples(200), derandomize=True)
def test_grids_are_torchs(
    sides: Any, mode: str, antialias: bool, dtype: torch.dtype, lead: tuple[int, ...], seed: int
) -> None:
    old, new = sides[:2], sides[2:]
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(*lead, math.prod(old) + 3, 5, generator=generator).to(dtype)
    how = f"{mode}({'antialias, ' * antialias}cls=2, from={old[0]}x{old[1]}, to={new[0]}x{new[1]}, extra=1)"
    found = resized_values(tensor, (*lead, math.prod(new) + 3, 5), how)
    assert torch.equal(found[..., [0, 1, -1], :], tensor[..., [0, 1, -1], :])
    image, made = tensor[..., 2:-1, :].reshape(*lead, *old, 5), found[..., 2:-1, :]
    if dtype == torch.float64:
        assert torch.allclose(made, interpolated(image, new, mode, antialias), rtol=0, atol=1e-14)
    else:
        assert_close(made, image, lambda image: interpolated(image, new, mode, antialias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", ["rows", "rows(mean)", "rows(zero)", "classes(mean)"])
def test_rows(how: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    old = (torch.randn(7, 5) * 100).to(dtype)
    found = resized_values(old, (17, 5), how)
    assert torch.equal(found[:7], old)
    if how == "rows(zero)":
        assert not found[7:].any()
    elif dtype == torch.float64:
        assert torch.allclose(found[7:], old.mean(0).expand(10, 5), rtol=1e-15, atol=0)
    else:
        assert torch.equal(found[7:], old.double().mean(0).float().to(dtype).expand(10, 5))
    assert torch.equal(resized_values(old, (3, 5), how), old[:3])
    assert torch.equal(resized_values(old[:, 0], (9,), how)[:7], old[:, 0])  # the bias of a head
    assert torch.equal(resized_values(old.t(), (5, 7), how), old.t())


def test_channels_are_timms() -> None:
    old = torch.randn(4, 3, 2, 2)
    gray = old.double().sum(1, keepdim=True).float()
    assert torch.equal(resized_values(old, (4, 1, 2, 2), "channels"), gray)
    five = (old.repeat(1, 2, 1, 1)[:, :5].double() * (3 / 5)).float()
    assert torch.equal(resized_values(old, (4, 5, 2, 2), "channels"), five)


def test_views_flags_and_lazy_bits() -> None:
    base = torch.complex(torch.randn(9, 4), torch.randn(9, 4))
    negative = base.conj().imag  # a view with the negative bit
    assert negative.is_neg()
    found = resized_values(negative, (16, 4), "bilinear")
    assert torch.equal(found, resized_values(negative.resolve_neg().clone(), (16, 4), "bilinear"))
    assert torch.equal(resized_values(negative, (12, 4), "rows(zero)")[:9], negative.resolve_neg())


@looped(
    ("old", "new", "how", "words"),
    [
        ((198, 8), (257, 8), "bicubic", "198 tokens are not a square.*cls=2"),
        ((197, 8), (258, 8), "bicubic(cls=1)", "257 tokens are not a square.*to=HxW.*cls=2"),
        ((197, 8), (257, 9), "bicubic(cls=1)", "of which N differs"),
        ((197, 8), (257, 9), "bicubic", "of which N differs"),
        ((1, 197, 8), (1, 257, 9), "bicubic", "of which N differs"),
        ((196, 8), (100, 8), "bicubic(from=14x15)", "from=14x15 is 210 tokens, and the .* has 196"),
        ((1, 8), (2, 8), "bicubic(cls=1)", "0 tokens are not a square"),
        ((4, 8), (5, 8, 1), "rows", "Only the first dimension"),
        ((4, 8), (5, 9), "rows", "Only the first dimension"),
        ((0, 8), (5, 8), "rows(mean)", "There are no rows"),
        ((4, 3, 2, 2), (5, 4, 2, 2), "channels", "Only the second dimension"),
        ((), (3,), "rows", "Only the first"),
        ((2, 3, 4, 5), (3, 4, 5, 5), "bicubic", "H, W or both differ"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(old: Any, new: Any, how: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"(?s)a.b .*cannot become .*{words}"):
        resized(entry_of(torch.zeros(old)), new, parse_resize(how), "a.b")


@looped(
    ("text", "words"),
    [
        ("lanczos", "unknown way to resize: 'lanczos'"),
        ("", "unknown way"),
        ("bicubic(cls=1", "unknown way"),
        ("bicubic(mean)", "bicubic does not take 'mean'.*It takes bicubic, antialias, cls=N"),
        ("bicubic(cls=x)", "does not take 'cls=x'"),
        ("bicubic(from=14)", "does not take 'from=14'"),
        ("rows(median)", "It takes mean, zero"),
        ("rows(copy)", "rows does not take 'copy'"),
        ("rows(mean,zero)", "gives the mode twice"),
        ("bicubic(antialias, antialias)", "gives the antialias twice"),
    ],
)
def test_texts_that_mean_nothing(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){words}"):
        parse_resize(text)


def test_other_than_floats_and_hostile_sizes_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"a.b is .*i64.*cannot be resized"):
        resized(entry_of(torch.zeros(4, 2, dtype=torch.int64)), (9, 2), parse_resize("bicubic"), "a.b")
    many = 70_000**2
    entry = TensorEntry(Storage(InlineBytes(bytes(4))), by_name("f32"), (1, 1), (1, 1))
    with pytest.raises(LimitExceeded, match="70,000"):
        resized(entry, (many, 1), parse_resize("bicubic"), "x")
    with pytest.raises(LimitExceeded):
        resized(entry_of(torch.zeros(1, 3)), (1, 10**9), parse_resize("channels"), "x")
    huge = resized(entry, (10**15, 1), parse_resize("rows(mean)"), "x")  # planned, and not held
    assert huge.storage.data.read(4 * 10**14, 8) == bytes(8)


@looped(
    ("name", "old", "new", "how"),
    [
        *((name, (1, 17, 8), (1, 26, 8), "bicubic(cls=1)")
          for name in ("pos_embed", "encoder.pos_embedding", "vit.embeddings.position_embeddings", "model.posEmbed")),
        ("visual.positional_embedding", (17, 8), (26, 8), "bicubic(cls=1)"),
        ("vision_model.embeddings.position_embedding.weight", (16, 8), (25, 8), "bicubic"),
        ("model.decoder.embed_positions.weight", (1026, 8), (4098, 8), ""),  # of texts, with two more in front
        ("position_embeddings.weight", (1024, 8), (4096, 8), ""),
        ("post_quant_conv.weight", (4, 4, 1, 1), (16, 16, 1, 1), ""),  # of a VAE with more latent channels
        ("pos_conv.weight", (1, 4, 8), (1, 9, 7), ""),
    ],
)  # fmt: skip
def test_only_positions_of_a_grid_are_offered_another(name: str, old: Any, new: Any, how: str) -> None:
    assert of_positions(name, old, new) == how
