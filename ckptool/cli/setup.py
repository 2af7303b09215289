"""The commands of the group Setup: what only a shell needs, and no function of Python does."""
