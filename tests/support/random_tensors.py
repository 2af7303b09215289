"""Random values and tensors: what `object_graphs` puts into its graphs, and the choices that a seed makes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

STRINGS = [
    "",
    "a",
    "model.weight",
    "ключ",
    "重み",
    "\U0001f525",
    "a/b~c",
    "with space",
    "tab\tline\nend",
    "\x00\x1b[31m",
    "'quote\"",
    "é" * 40,
    "x" * 300,
]
INTEGERS = [
    0,
    1,
    -1,
    255,
    256,
    65535,
    65536,
    -(1 << 31),
    (1 << 31) - 1,
    1 << 31,
    -(1 << 63),
    1 << 64,
    10**40,
    -(10**40),
]
FLOATS = [0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 5e-324, 1.7976931348623157e308, 0.1]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]

Piece = Callable[[], Any]


class TensorGrammar:
    """Makes values without parts, and tensors of every kind. `kinds`: the names of the rules that were used."""

    def __init__(self, seed: int, protocol: int = 2, legacy: bool = False) -> None:
        self.random = random.Random(seed)
        self.protocol, self.legacy = protocol, legacy
        self.kinds: set[str] = set()
        self.bases: list[torch.Tensor] = []  # whose storages others may share

    def pick(self, choices: Any) -> Any:
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def count(self, most: int) -> int:
        return self.random.randrange(most + 1)

    def used(self, kind: str, value: Any) -> Any:
        self.kinds.add(kind)
        return value

    def number(self, _: int = 0) -> Any:
        return self.pick(
            [*INTEGERS, *FLOATS, True, False, None, 1 + 2j, complex(float("nan"), -0.0), self.random.getrandbits(80)]
        )

    def text(self, _: int = 0) -> str:
        return self.pick(STRINGS) + (str(self.count(99)) if self.chance(0.5) else "")

    # Tensors --------------------------------------------------------------------------------------------------------

    def bits(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A flat tensor of random bits; of truths and numbers."""
        if dtype is torch.bool:
            return torch.tensor([self.chance(0.5) for _ in range(count)], dtype=torch.bool)
        size = count * dtype.itemsize
        return (
            torch.frombuffer(bytearray(self.random.randbytes(size)) or bytearray(1), dtype=torch.uint8)[:size]
            .clone()
            .view(dtype)
        )

    def tensor(self, _: int = 0) -> torch.Tensor:
        """A strided tensor of any type: some share a storage, some see it turned, repeated, conjugated or from its
        middle."""
        if self.bases and self.chance(0.4):
            base = self.used("shared storage", self.pick(self.bases))
        else:
            base = self.bits(self.pick(DTYPES), self.pick([0, 1, 6, 12, 24]))
            self.bases.append(base)
        made = self.view(base)
        if base.dtype.is_complex and base.dtype is not torch.complex32 and self.chance(0.3):
            made = self.used("conjugate", made.conj())
        if (base.dtype.is_floating_point or base.dtype.is_complex) and base.dtype.itemsize > 1 and self.chance(0.15):
            made = self.used("negative", torch._neg_view(made))
        kind = self.count(9)
        typed = base.dtype in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
        )
        if kind == 0 and typed:
            return made.detach().requires_grad_()
        if kind == 1 and typed:
            return torch.nn.Parameter(made.detach(), requires_grad=self.chance(0.7))
        if kind == 2:
            return torch.nn.Buffer(made.detach())
        if kind == 3:
            made = made.detach()
            made.note, made.other = self.text(), [self.number()]  # type: ignore[attr-defined]
            return self.used("tensor with attributes", made)
        if kind == 4 and typed:
            parameter = torch.nn.Parameter(made.detach())
            parameter.note = self.text()  # type: ignore[attr-defined]
            return self.used("parameter with attributes", parameter)
        return made

    def view(self, base: torch.Tensor) -> torch.Tensor:
        base = base.flatten() if base.dim() > 1 and base.is_contiguous() else base
        count = base.numel()
        if count < 6 or base.dim() != 1:
            return (
                base.reshape(())
                if count == 1 and self.chance(0.5)
                else base
                if self.chance(0.5)
                else base.unsqueeze(-1)
            )
        choice = self.count(7)
        if choice == 0:
            return base.reshape(2, -1).t()
        if choice == 1:
            return base[2:5]
        if choice == 2:
            return base[::2]
        if choice == 3:
            return base[:3].reshape(3, 1).expand(3, 4)
        if choice == 4:
            return base.reshape(2, 3, -1).permute(2, 0, 1)
        if choice == 5:
            return base[:0].reshape(0, 3)
        return base if choice == 6 else base.reshape(3, -1)[1]

    def quantized(self, _: int) -> torch.Tensor:
        dtype = self.pick([torch.quint8, torch.qint8, torch.qint32])
        values = torch.arange(6.0).reshape(2, 3)
        if self.chance(0.5):
            return torch.quantize_per_tensor(values, 0.25, 3, dtype)
        return torch.quantize_per_channel(values, torch.tensor([0.5, 0.25]).double(), torch.tensor([0, 1]), 0, dtype)

    def sparse(self, _: int) -> torch.Tensor:
        values = torch.tensor([[1.0, 0, 2], [0, 0, 3]], dtype=self.pick([torch.float32, torch.int64, torch.complex64]))
        kind = self.count(4)
        if kind == 0:
            return values.to_sparse()
        if kind == 1:
            # Not coalesced.
            return torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 3))
        if kind == 2:
            return values.to_sparse_csc()
        return values.to_sparse_csr() if kind == 3 else torch.ones(4, 4).to_sparse_bsr((2, 2))

    def nested(self, _: int) -> torch.Tensor:
        parts = [self.bits(torch.float32, 3 * n).reshape(n, 3) for n in (2, 1)]
        # Torch looks at their sizes before it has read them, in old files.
        strided = not self.legacy and self.chance(0.5)
        return torch.nested.nested_tensor(parts, layout=torch.strided if strided else torch.jagged)

    def of_torch(self, _: int) -> Any:
        choices: list[Piece] = [
            lambda: self.pick(DTYPES),
            lambda: torch.device(self.pick(["cpu", "cuda:1", "meta"])),
            lambda: torch.Size([2, 3]),
            lambda: torch.get_rng_state(),
            lambda: torch.sparse_coo,
            lambda: torch.per_channel_affine,
            lambda: torch.UntypedStorage(self.count(5)),
            lambda: torch.empty(2, 3, device="meta"),
            lambda: self.used("memory format", torch.channels_last) if self.protocol >= 4 else torch.strided,
        ]
        return self.pick(choices)()

    def finite(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        made = self.bits(dtype, count)
        return made.where(made.isfinite(), torch.ones((), dtype=dtype))
