"""Tensors and storages that contradict themselves, or ask for more than there is."""

from collections.abc import Callable, Mapping

from ckptool.errors import BadTensor, CkptoolError, Corrupt, Unsupported
from tests.support.hostile_inputs import (
    HOOKS,
    ONE,
    W,
    integer,
    integers,
    name,
    pickle_zip,
    state_pickle,
    storage,
    tensor,
    text,
    w,
)

QINT = b"(" + text("storage") + name("torch", "QInt8Storage") + text("0") + text("cpu") + integer(16) + b"tQ"


INDEX = storage("LongStorage", "i", numel=4)


SCHEME = name("torch", "per_tensor_affine")


CHANNELS = name("torch", "per_channel_affine")


def quantized(shape: tuple[int, ...], stride: tuple[int, ...], parameters: bytes, offset: int = 0) -> bytes:
    """A call of `_rebuild_qtensor`."""
    call = b"(" + QINT + integer(offset) + integers(shape) + integers(stride) + parameters + b"\x89" + HOOKS + b"tR"
    return name("torch._utils", "_rebuild_qtensor") + call


def layout(kind: str) -> bytes:
    return name("torch.serialization", "_get_layout") + text(f"torch.{kind}") + b"\x85R"


def sparse(kind: str, *parts: bytes) -> bytes:
    """A call of `_rebuild_sparse_tensor`."""
    return name("torch._utils", "_rebuild_sparse_tensor") + layout(kind) + b"(" + b"".join(parts) + b"t\x86R"


def longs(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


I22 = tensor((2, 2), (2, 1), of=INDEX)


I4 = tensor((4,), (1,), of=INDEX)


V2 = tensor((2,), (1,))


SPARSE = ONE | {"data/i": longs(0, 1, 1, 0)}


# What is refused when the file is opened: pickle, records, error.
REFUSED: dict[str, tuple[bytes, Mapping[str, bytes], type[CkptoolError]]] = {
    "87-missing": (w(W), {}, Corrupt),
    "88-short": (w(W), {"data/0": bytes(15)}, Corrupt),
    "88-long": (w(W), {"data/0": bytes(17)}, Corrupt),
    "88-empty": (w(W), {"data/0": b""}, Corrupt),
    "89-negative": (w(tensor((4,), (1,), of=storage(numel=-4))), ONE, Corrupt),
    "89-2-62": (w(tensor((4,), (1,), of=storage(numel=1 << 62))), ONE, Corrupt),
    "89-product-wraps": (w(tensor((4,), (1,), of=storage(numel=(1 << 62) + 4))), ONE, Corrupt),
    "89-shape-wraps": (w(tensor((1 << 33, 1 << 33), (1, 1))), ONE, BadTensor),
    "89-shape-of-2-64": (w(tensor((1 << 64,), (1,))), ONE, BadTensor),
    "89-expanded-beyond-all": (w(tensor((1 << 62,) * 60, (0,) * 60)), ONE, BadTensor),
    "89-stride-of-2-64": (w(tensor((1,), (1 << 64,))), ONE, BadTensor),
    "89-meta": (w(name("torch._utils", "_rebuild_meta_tensor_no_storage") + b"(" + name("torch", "float32")
        + integers((1 << 40, 1 << 40)) + integers((1, 1)) + b"\x89tR"), ONE, BadTensor),
    "90-size-beyond": (w(tensor((5,), (1,))), ONE, BadTensor),
    "90-offset-beyond": (w(tensor((1,), (1,), 4)), ONE, BadTensor),
    "90-offset-of-2-64": (w(tensor((1,), (1,), 1 << 64)), ONE, BadTensor),
    "90-offset-negative": (w(tensor((1,), (1,), -1)), ONE, BadTensor),
    "90-stride-negative": (w(tensor((2,), (-1,), 1)), ONE, BadTensor),
    "90-stride-beyond": (w(tensor((2,), (4,))), ONE, BadTensor),
    "90-size-negative": (w(tensor((-1,), (1,))), ONE, BadTensor),
    "90-empty-with-a-negative-offset": (w(tensor((0,), (1,), -1)), ONE, BadTensor),
    "91-rank": (w(tensor((2, 2), (1,))), ONE, BadTensor),
    "91-rank-100": (w(tensor((1,) * 100, (1,) * 100)), ONE, BadTensor),
    "91-float": (w(tensor((), ()).replace(b"(t(t", b"G\x40\0\0\0\0\0\0\0\x85K\x01\x85")), ONE, BadTensor),
    "91-bool": (w(tensor((), ()).replace(b"(t(t", b"\x88\x85K\x01\x85")), ONE, BadTensor),
    "91-text": (w(tensor((), ()).replace(b"(t(t", text("4") + b"\x85K\x01\x85")), ONE, BadTensor),
    "94-other-type": (state_pickle({"w": W, "v": tensor((8,), (1,), of=storage("HalfStorage", numel=8))}), ONE,
        Corrupt),
    "94-other-count": (state_pickle({"w": W, "v": tensor((2,), (1,), of=storage(numel=2))}), ONE, Corrupt),
    "94-other-place": (state_pickle({"w": W, "v": tensor((4,), (1,), of=storage(location="cuda:0"))}), ONE, Corrupt),
    "95-storage": (w(tensor((4,), (1,), of=storage("FancyStorage"))), ONE, Unsupported),
    "95-quantized-place": (w(tensor((4,), (1,), of=storage("cuda.FloatStorage"))), ONE, Unsupported),
    "97-up": (w(tensor((4,), (1,), of=storage(key="../../../etc/passwd"))), ONE, Corrupt),
    "97-absolute": (w(tensor((4,), (1,), of=storage(key="/etc/passwd"))), ONE, Corrupt),
    "97-long": (w(tensor((4,), (1,), of=storage(key="k" * 900_000))), ONE, Corrupt),
    "97-zero": (w(tensor((4,), (1,), of=storage(key="0\0"))), ONE, Corrupt),
    "100-values-beyond": (w(sparse("sparse_coo", I22, tensor((9,), (1,)), integers((2, 2)))), SPARSE, BadTensor),
    "100-count-lies": (w(sparse("sparse_coo", I22, W, integers((2, 2)))), SPARSE, BadTensor),
    "100-too-few-rows": (w(sparse("sparse_coo", tensor((1, 2), (2, 1), of=INDEX), V2, integers((2, 2)))), SPARSE,
        BadTensor),
    "100-too-many-rows": (w(sparse("sparse_coo", I22, V2, integers((4,)))), SPARSE, BadTensor),
    "100-flat-indices": (w(sparse("sparse_coo", I4, V2, integers((2, 2)))), SPARSE, BadTensor),
    "100-negative-size": (w(sparse("sparse_coo", I22, V2, integers((-2, 2)))), SPARSE, BadTensor),
    "100-csr-rows": (w(sparse("sparse_csr", I4, tensor((2,), (1,), of=INDEX), V2, integers((2, 2)))), SPARSE,
        BadTensor),
    "100-csr-count": (w(sparse("sparse_csr", tensor((3,), (1,), of=INDEX), I4, V2, integers((2, 2)))), SPARSE,
        BadTensor),
    "101-beyond": (w(quantized((17,), (1,), b"(" + SCHEME + b"G\x3f\xf0\0\0\0\0\0\0K\x00t")), ONE, BadTensor),
    "101-scales": (w(quantized((4, 4), (4, 1), b"(" + CHANNELS + tensor((2,), (1,), of=storage("FloatStorage", "s"))
        + tensor((4,), (1,), of=INDEX) + b"K\x00t")), SPARSE | {"data/s": bytes(16)}, BadTensor),
    "101-zero-points": (w(quantized((4, 4), (4, 1), b"(" + CHANNELS + tensor((4,), (1,), of=storage("FloatStorage",
        "s")) + tensor((3,), (1,), of=INDEX) + b"K\x00t")), SPARSE | {"data/s": bytes(16)}, BadTensor),
    "101-axis": (w(quantized((4, 4), (4, 1), b"(" + CHANNELS + tensor((4,), (1,), of=storage("FloatStorage", "s"))
        + I4 + b"K\x02t")), SPARSE | {"data/s": bytes(16)}, BadTensor),
    "101-nan-scale": (w(quantized((4, 4), (4, 1), b"(" + SCHEME + b"G\x7f\xf8\0\0\0\0\0\0K\x00t")), ONE, BadTensor),
    "101-infinite-scale": (w(quantized((4, 4), (4, 1), b"(" + SCHEME
        + b"G\x7f\xf0\0\0\0\0\0\0K\x00t")), ONE, BadTensor),
}  # fmt: skip


BIG = tensor((1_000_000, 1_000_000), (0, 0), of=storage(numel=1))


ACCEPTED: dict[str, tuple[bytes, Mapping[str, bytes]]] = {
    "92-expanded": (w(BIG), {"data/0": bytes(4)}),
    "93-overlapping": (w(tensor((3, 2), (1, 1))), ONE),
    "96-location": (w(tensor((4,), (1,), of=storage(location="banana:7\x1b[31m"))), ONE),
    "96-long-location": (w(tensor((4,), (1,), of=storage(location="x" * 900_000))), ONE),
    "97-record-named-so": (w(tensor((4,), (1,), of=storage(key="weird key"))), {"data/weird key": bytes(16)}),
    "98-smuggled": (w(W), ONE | {"data/77": bytes(range(200))}),
    "100-sparse": (w(sparse("sparse_coo", I22, V2, integers((2, 2)), b"\x89")), SPARSE),
    "100-indices-out-of-range": (w(sparse("sparse_coo", I22, V2, integers((1, 1)), b"\x88")), SPARSE),
    "101-quantized": (w(quantized((4, 4), (4, 1), b"(" + SCHEME + b"G\x3f\xf0\0\0\0\0\0\0K\x00t")), ONE),
    "102-negative-by-name": (w(W.replace(HOOKS, HOOKS + b"}" + text("neg") + b"\x89s")), ONE),
    "104-nothing": (state_pickle({}), {}),
    "104-none": (b"\x80\x02N.", {}),
    "104-no-dimensions": (w(tensor((), (), 3)), ONE),
    "104-no-elements": (w(tensor((0,), (1,), of=storage(numel=0))), {"data/0": b""}),
    "106-optimizer": (state_pickle({"model": b"}" + text("a.weight") + W + b"s", "optimizer": b"}(" + text("state")
        + b"}(K\x00}" + text("exp_avg") + W + b"sK\x07}" + text("exp_avg") + W + b"su" + text("param_groups")
        + b"]}(" + text("lr") + b"G\x3f\xf0\0\0\0\0\0\0" + text("params") + b"](K\x00K\x01eua" + b"u"}), ONE),
}  # fmt: skip


INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    **{f"row {title}": pickle_zip(pickle, records) for title, (pickle, records, _) in REFUSED.items()},
    **{f"row {title}": pickle_zip(pickle, records) for title, (pickle, records) in ACCEPTED.items()},
}
