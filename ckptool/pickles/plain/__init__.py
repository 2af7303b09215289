"""Plain Python values of the inert objects that a checkpoint holds: dates, paths, numpy scalars and arrays, configuration.

For showing, comparing and JSON. Every class here is named in a table of ours; no name is ever taken from a file and looked up.
What is not in the tables stays the inert object that it was.
Sources: the `__reduce__` methods of the standard library (Python 3.8 to 3.14), numpy 1 and 2, and omegaconf 2.
"""

from __future__ import annotations

from ckptool.checkpoint.nodes import canonical as canonical
from ckptool.checkpoint.numpy_arrays import Array as Array
from ckptool.checkpoint.numpy_arrays import ArrayType as ArrayType
from ckptool.checkpoint.numpy_arrays import array as array
from ckptool.checkpoint.numpy_arrays import array_type as array_type
from ckptool.checkpoint.numpy_arrays import scalar as scalar
from ckptool.pickles.plain.jsons import to_json as to_json
from ckptool.pickles.plain.jsons import to_jsons as to_jsons
from ckptool.pickles.plain.objects import expand as expand
from ckptool.pickles.plain.python_values import python_value as python_value
from ckptool.pickles.plain.summaries import summary as summary
from ckptool.pickles.plain.values import plain as plain
