"""The protocols of numpy and torch that a tensor implements.

What a higher layer makes of it (`.torch()`, `.to()`) is imported by name when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint.dtypes import dtype_of
from ckptool.errors import UsageError, counted


class ArrayLike:
    """A tensor whose values are in a file: `np.asarray(entry)` reads them all, `entry[3:7]` only those rows."""

    __slots__ = ()

    @property
    def ndim(self: Any) -> int:
        return len(self.shape)

    @property
    def device(self: Any) -> str:
        """The device that it was saved from."""
        return str(self.location)

    @property
    def T(self: Any) -> Any:  # noqa: N802 (as numpy and torch call it)
        """The view with its dimensions in reverse order."""
        return self.transpose()

    def size(self: Any, dim: int | None = None) -> Any:
        """The shape, or its length along a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self: Any) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return int(self.shape[0])

    def __bool__(self) -> bool:
        """True whatever its values are: an entry is there. The value of a single element is `entry.item()`."""
        return True

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self: Any, key: Any) -> Any:
        """`tensor.numpy()[key]`."""
        return self.numpy()[key]

    def torch(self) -> Any:
        """A new `torch.Tensor` on the CPU. Needs the `torch` extra."""
        return import_module("ckptool.bridge.to_live").to_torch(self)

    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("an array of values that are in a file is a copy of them: copy=False is impossible")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self: Any, **options: Any) -> Any:  # else `torch.as_tensor(entry)` would ask for element by element
        return self.torch().detach().resolve_conj().resolve_neg().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

    def to(self, dtype: Any) -> Any:
        """The tensor in another type, cast when it is read, with the bits of torch's `tensor.to(dtype)`.

        dtype: a name, or torch's or numpy's own. Raises `UsageError` for types between which it does not cast.
        """
        try:
            target = dtype_of(dtype)
        except UsageError as error:
            why, fix = f"{error.fix}.", "On a device: entry.torch().to(DEVICE)"
            raise error if error.why else UsageError(error.what, why, fix) from None
        return import_module("ckptool.transforms.casting").cast_lazily(self, target)

    def tolist(self) -> Any:
        """The values as nested lists of Python's numbers; the number itself where there are no dimensions."""
        return self._plain().tolist()

    def item(self: Any) -> Any:
        """The value of a tensor of one element as Python's number; raises `UsageError` for any other."""
        if self.numel != 1:
            count = counted(self.numel, "element")
            raise UsageError(f"{self!r} has {count}: item() is for one", "", "All of them: entry.tolist()")
        return self._plain().item()

    def _plain(self: Any) -> Any:
        """An array of a type that numpy itself has: ml_dtypes' types become f32."""
        array = self.numpy()
        return array.astype("f4") if array.dtype.isbuiltin == 2 else array

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    if not TYPE_CHECKING:  # else type checkers would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                what += f": its values are in the file. Read them first: entry.numpy().{name} or entry.torch().{name}"
            raise AttributeError(what, name=name, obj=self)
