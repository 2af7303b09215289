"""Arrays, scalars and element types of numpy, made of what their pickles say. numpy is imported only when there is one."""

from __future__ import annotations

from typing import Any

from ckptool.pickles import plain


def numpy_type(kind: plain.ArrayType) -> Any:
    """numpy's own element type."""
    import numpy

    if kind.fields:
        names, kinds, offsets = zip(*kind.fields, strict=True)
        fields: Any = {
            "names": names,
            "formats": [numpy_type(part) for part in kinds],
            "offsets": offsets,
            "itemsize": kind.itemsize,
        }
        return numpy.dtype(fields)
    order = "" if kind.order == "|" else kind.order
    unit = f"[{kind.unit[1]}{kind.unit[0]}]" if kind.unit and kind.unit[0] != "generic" else ""
    return numpy.dtype(f"{order}{kind.code}{unit}")


def numpy_array(found: plain.Array) -> Any:
    """A new array, in the byte order that it was saved in; the bytes were counted, and there are no Python objects in it."""
    import numpy

    kind = numpy_type(found.type)
    if not found.data:
        return numpy.zeros(found.shape, kind, order="F" if found.fortran else "C")
    array = numpy.frombuffer(bytearray(bytes(found.data)), kind)
    return array.reshape(found.shape, order="F" if found.fortran else "C")
