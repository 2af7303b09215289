"""Torch's pickles without `import pickle`: opcodes to a tree, and a tree to opcodes.

`decode` runs the pickle machine over names instead of objects: nothing is imported, resolved or called.
`torch_objects` knows what torch's rebuild functions mean and turns their calls into tensors. `encode` writes a tree as
protocol 2, byte for byte as Python's pickler writes what torch gives it. `known` says which names are understood.

Source of the opcodes: the comments of Lib/pickletools.py and PEP 307, 3154, 574.
"""
