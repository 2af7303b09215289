"""The way of verbs to live modules: without torch, they name the extra that is missing."""

from __future__ import annotations

from ckptool.errors import MissingExtra, Unsupported

try:
    from ckptool import bridge as bridge
    from ckptool.bridge.modules import load_into as load_into
    from ckptool.bridge.modules import target_of as target_of
    from ckptool.bridge.modules import target_of_code as target_of_code
    from ckptool.bridge.modules import unwrapped as unwrapped
except Unsupported as error:
    raise MissingExtra(
        "torch is not installed", "Live modules need torch; files are read without it.", "pip install 'ckptool[torch]'"
    ) from error
