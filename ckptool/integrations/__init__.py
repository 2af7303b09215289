"""Crash-safe checkpoints inside other libraries' loops: `from ckptool.integrations.lightning import …`.

Each module imports its library; importing ckptool imports none of them.
"""
