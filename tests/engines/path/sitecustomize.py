"""Python imports this where the folder is on its path: in the processes that the tests start."""

import torchvision_operators  # noqa: F401
