"""Plain Python values of a checkpoint's inert objects: dates, paths, numpy scalars and arrays, configuration.

For showing, comparing and JSON. Every class is named in the table of `pickles.known`; no name is taken from a file and
looked up. What is not in the table stays the inert object that it was.
"""

from __future__ import annotations

from ckptool.pickles.plain.text import summary as summary
from ckptool.pickles.plain.text import to_json as to_json
from ckptool.pickles.plain.text import to_jsons as to_jsons
from ckptool.pickles.plain.values import expand as expand
from ckptool.pickles.plain.values import plain as plain
from ckptool.pickles.plain.values import python_value as python_value
