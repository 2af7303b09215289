"""Facts about one or two checkpoints, as dataclasses."""
