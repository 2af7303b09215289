"""One line for each container, with every fact about it; its code is imported when the first bytes ask for it."""

from __future__ import annotations

import gc
import warnings
import weakref
from importlib import import_module
from pathlib import Path

import pytest

from ckptool.checkpoint import Checkpoint, Computed, Storage, TensorEntry
from ckptool.checkpoint.blocks import Deferred
from ckptool.checkpoint.dtypes import by_name
from ckptool.formats import FORMATS, WRITERS, Format, read
from fixtures import make_old
from tests.support.looped import looped
from tests.support.same import assert_same_tree


@looped("container", FORMATS, ids=lambda container: container.name)
def test_a_line_agrees_with_its_module(container: Format) -> None:
    code = import_module(f"ckptool.formats.{container.module}")
    is_another = container.name == "deepspeed-universal"  # of the folders that `deepspeed` reads
    assert is_another or container.name == code.NAME
    never = Format("", "").begins  # of what another format finds in its folder or file
    is_asked = (container.is_folder and container.holds != never.decode()) or container.endings
    is_asked = is_asked or container.begins != never
    assert callable(code.read) and (is_another or is_asked or not hasattr(code, "detect"))
    assert container.writable == hasattr(code, "write") and container.appendable == hasattr(code, "append")
    assert bool(container.suffixes) <= container.writable


class Zeros:
    """The bytes of a tensor, to which a weak reference can be had."""

    def __call__(self, offset: int, length: int) -> bytes:
        return bytes(length)


@pytest.mark.parametrize("container", WRITERS, ids=lambda container: container.name)
def test_a_plan_that_was_carried_out_holds_nothing(container: Format) -> None:
    """Else what was saved stays in memory until garbage is collected, which `Run` does not wait for."""
    values = Zeros()
    held = weakref.ref(values)
    entry = TensorEntry(Storage(Computed(64, values)), by_name("f32"), (4, 4), (4, 1))
    checkpoint = Checkpoint({"a": entry}, container.name, tensors_only=container.tensors_only)
    del values, entry
    gc.disable()
    try:
        plan = container.write(checkpoint)
        del checkpoint
        made = [[part.make() if isinstance(part, Deferred) else part for part in file] for file in plan.files.values()]
        assert sum(map(len, made)) and held() is not None
        del plan, made
        assert held() is None
    finally:
        gc.enable()


# Versions -------------------------------------------------------------------------------------------------------------


FIXTURES = Path(make_old.__file__).parent / "versions"
OLD = ("1.13", "2.0", "2.4")
KINDS = {"": "torch-zip", "-legacy": "torch-legacy", "-script": "torchscript"}


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same files by the torch of the tests."""
    folder = tmp_path_factory.mktemp("now")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_old.write_versions(folder, "now")
    return folder


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("kind", KINDS)
def test_every_version_reads_alike(version: str, kind: str, now: Path) -> None:
    old, new = read(FIXTURES / f"torch-{version}{kind}.pt"), read(now / f"torch-now{kind}.pt")
    assert old.container == new.container == KINDS[kind]
    assert_same_tree(names_of(old.tree), names_of(new.tree))


def names_of(tree: dict[str, object]) -> object:
    """The tree; of a program only the state dict: which attributes its modules have differs from version to version."""
    return tree["state_dict"] if set(tree) == {"state_dict", "attributes"} else tree
