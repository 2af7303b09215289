"""Plain Python values of a checkpoint's inert objects: dates, paths, numpy scalars and arrays, configuration.

For showing, comparing and JSON. Every class is named in the table of `pickles.known`; no name is taken from a file and
looked up. What is not in the table stays the inert object that it was.
"""
