"""One line for each container, with every fact about it; its code is imported when the first bytes ask for it."""

from __future__ import annotations

from importlib import import_module

from ckptool.formats import FORMATS, Format
from tests.support.looped import looped


@looped("container", FORMATS, ids=lambda container: container.name)
def test_a_line_agrees_with_its_module(container: Format) -> None:
    code = import_module(f"ckptool.formats.{container.module}")
    assert container.name == code.NAME
    is_asked = container.is_folder or container.endings or container.begins != Format("", "").begins
    assert callable(code.read) and hasattr(code, "detect") == bool(is_asked)
    assert container.writable == hasattr(code, "write") and container.appendable == hasattr(code, "append")
    assert bool(container.suffixes) <= container.writable
