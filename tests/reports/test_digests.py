"""Digests: what they are, bit for bit, and that they do not depend on how values are stored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.analysis.digests import (
    Digests,
    TensorDigest,
    digests_file,
    read_digests,
    root_digests,
    table,
    tensor_digest,
)
from ckptool.checkpoint import Composite, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import BY_TORCH, DTYPES, by_name
from ckptool.errors import Corrupt, LimitExceeded, Unsupported
from ckptool.formats import read
from ckptool.verbs.convert import convert
from tests.support.files import opened, saved, written
from tests.support.looped import looped


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def bits(tensor: torch.Tensor) -> bytes:
    """Row-major bytes, as torch resolves and orders them."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return bytes(plain.flatten().view(torch.uint8).tolist()) if plain.numel() else b""


# The definition -------------------------------------------------------------------------------------------------------


def test_keys_that_are_no_text_are_not_taken_for_text(tmp_path: Path) -> None:
    w = torch.ones(1)
    tree = {0: w, "0": w, None: w, "None": w, (1, "a"): w, b"ab": w, 1.5: w, "in": {"x": [w]}}
    names = [json.dumps(tensor.key) for tensor in root_digests(opened(tree, tmp_path).tree).tensors]
    plain = ["0", '"0"', "null", '"None"', '["in", "x", 0]', '{"tuple": [1, "a"]}', '{"bytes": "6162"}']
    assert sorted(names) == sorted([*plain, '{"float": "0x1.8000000000000p+0"}'])


# Values ---------------------------------------------------------------------------------------------------------------


PLAIN_DTYPES = [dtype for dtype in DTYPES if hasattr(torch, dtype.torch) and dtype.kind not in ("quantized", "bits")]


@looped("dtype", PLAIN_DTYPES, ids=str)
def test_every_type(dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    raw = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    kind = getattr(torch, dtype.torch)
    x = (raw > 127)[:6] if kind is torch.bool else raw.view(kind)
    matrix = x.reshape(2, 3)
    tree = {"x": matrix, "turned": matrix.t(), "every other": x[::2], "one": x[3], "wide": x[:1].expand(4)}
    found = opened(tree, tmp_path).tree
    for name, tensor in tree.items():
        assert tensor_digest(found[name]) == sha(bits(tensor)), name


def test_a_negated_view_of_a_type_without_negatives_is_refused() -> None:
    entry = TensorEntry(Storage(InlineBytes(b"ab")), by_name("u8"), (2,), (1,))
    with pytest.raises(Unsupported):
        tensor_digest(TensorEntry(entry.storage, entry.dtype, (2,), (1,), 0, entry.flags._replace(neg=True)))


def test_an_expanded_view_without_end_is_refused_by_name(tmp_path: Path) -> None:
    """Four bytes, shown a million million times."""
    tree = opened({"ok": torch.ones(1).expand(1000), "endless": torch.ones(1).expand(10**6, 10**6)}, tmp_path).tree
    with pytest.raises(LimitExceeded, match="endless"):
        root_digests(tree)
    assert tensor_digest(tree["ok"]) == sha(bits(torch.ones(1000)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_composite_of_other_parts_has_another_digest(tmp_path: Path) -> None:
    def quantized(scale: float, zero: int, last: float) -> Any:
        tree = opened(
            {"q": torch.quantize_per_tensor(torch.tensor([0.0, last]), scale, zero, torch.qint8)}, tmp_path
        ).tree
        assert isinstance(tree["q"], Composite)
        return tensor_digest(tree["q"])

    digests = [quantized(0.5, 0, 1.0), quantized(0.25, 0, 1.0), quantized(0.5, 1, 1.0), quantized(0.5, 0, 2.0)]
    assert len(set(digests)) == 4 and quantized(0.5, 0, 1.0) == digests[0]


# Containers -----------------------------------------------------------------------------------------------------------


def test_a_pt_and_its_safetensors_agree(tmp_path: Path) -> None:
    torch.manual_seed(2)
    tree: dict[str, Any] = {}
    for dtype in DTYPES:
        if dtype.safetensors and hasattr(torch, dtype.torch):
            raw = torch.randint(0, 2 if dtype.name == "bool" else 256, (4 * dtype.itemsize,), dtype=torch.uint8)
            tree[f"w.{dtype.name}"] = raw.view(BY_TORCH[dtype.torch] and getattr(torch, dtype.torch)).reshape(2, 2)
    x = torch.arange(24.0).reshape(4, 6)
    z = torch.complex(torch.randn(3), torch.randn(3))
    tree |= {"w.base": x, "w.tied": x, "w.turned": x.t(), "w.part": x[1:3, 2:4], "w.empty": torch.zeros(0, 3)}
    tree |= {"w.scalar": torch.tensor(2.5), "w.conj": z.conj(), "w.neg": torch._neg_view(torch.randn(3))}
    tree |= {"w.parameter": torch.nn.Parameter(torch.ones(2))}
    path = saved(tree, tmp_path / "a.pt")
    for name, options in (("plain", {}), ("copies", {"ties": "copy"}), ("whole", {"all": True})):
        convert(path, tmp_path / f"{name}.safetensors", **options)
        assert root_digests(read(tmp_path / f"{name}.safetensors").tree) == root_digests(read(path).tree), name


# Kept -----------------------------------------------------------------------------------------------------------------


def digests() -> Digests:
    return table((TensorDigest("a", "f32", (2,), "0" * 64), TensorDigest([0, "b"], "f16", None, "1" * 64)))


def test_the_file_is_that_of_version_0_1_0(tmp_path: Path) -> None:
    kept = b'{"schema": "ckptool.digests/1",\n "root": "%s",\n "tensors": [\n' % sha(
        b'["a","f32",[2],"%b"]\n[[0,"b"],"f16",null,"%b"]\n' % (b"0" * 64, b"1" * 64)
    ).encode() + b'  ["a","f32",[2],"%b"],\n  [[0,"b"],"f16",null,"%b"]\n ]\n}\n' % (b"0" * 64, b"1" * 64)
    assert digests_file(digests()) == kept and read_digests(written(kept, tmp_path / "d.json")) == digests()


ONE = table(digests().tensors[:1])
DAMAGED = {
    "not JSON": (b"\x00\x01", Unsupported, "not a file of digests"),
    "a list": (b"[1]", Unsupported, "not a file of digests"),
    "nested without end": (b"[" * 200_000, Unsupported, "not a file of digests"),
    "another schema": (b'{"schema": "ckptool.inspect/1"}', Unsupported, "not a file of digests"),
    "a later version": (b'{"schema": "ckptool.digests/2"}', Unsupported, "another version"),
    "a changed digest": (digests_file(digests()).replace(b'"1111', b'"2111'), Corrupt, "its own root digest"),
    "a line gone": (digests_file(ONE).replace(ONE.root.encode(), digests().root.encode()), Corrupt, "own root digest"),
    "a short line": (digests_file(digests()).replace(b',"f32"', b""), Corrupt, "its own root digest"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_of_digests(what: str, tmp_path: Path) -> None:
    content, error, words = DAMAGED[what]
    with pytest.raises(error, match=words) as caught:
        read_digests(written(content, tmp_path / "d.json"))
    assert "d.json" in caught.value.what and caught.value.what
