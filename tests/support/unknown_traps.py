"""Which traps hold what only code of their own could make again."""

from __future__ import annotations

# What holds objects of classes or functions that only their own code could make again.
UNKNOWN = {
    "11-subclass",
    "11-subclass-with-attributes",
    "11-subclass-in-a-parameter",
    "11-wrapper-subclass",
    "11-masked",
    "11-nested-jagged",
    "20-defaultdict-of-unknown",
    "20-dict-subclass",
    "20-unknown-object",
    "20-unknown-call",
}
LOADED_IN_ESSENCE = {"11-nested-jagged"}  # without the notes that torch's compiler left on it; not saved
