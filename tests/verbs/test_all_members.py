"""`convert --all` of folders that weights stand for: every member of the folder is in the output, as torch reads it."""

from pathlib import Path

import pytest

import ckptool
from fixtures.engines import cases

ENGINES = Path(cases.__file__).parent


def test_what_the_container_cannot_hold_of_a_member_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ckptool.CkptoolError, match=r"training_args\.bin"):
        ckptool.convert(ENGINES / "trainer" / "checkpoint", tmp_path / "out.safetensors", all=True)
