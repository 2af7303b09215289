"""The training harness: it makes checkpoints, resumes them, and proves that a run killed anywhere ends with the same bytes.

Read `loop.py` first: it is what happens, in order. State is what the next step cannot compute again; everything else is a function of a
seed and a place. This package imports torch; nothing outside of it needs it.
"""
