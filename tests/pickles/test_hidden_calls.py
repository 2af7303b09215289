"""Something unknown hidden in the use of something known: nothing passes it on, everything mentions it, nothing runs
it."""

from __future__ import annotations

import io
import itertools
import pickletools
import random
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError
from tests.support.hidden_calls import UNKNOWN, HiddenCall, combinations, hidden_calls, known_names
from tests.support.hostile_inputs import pickle_zip
from tests.support.looped import looped

SEEDED, SOAKED = 200, 4_000
DECOYS = ("ckptool_marker", "models", "omegaconf")

Verb = Callable[[Path, Path], Any]

VERBS: dict[str, Verb] = {
    "convert": lambda file, out: ckptool.convert(file, out),
    "convert --all": lambda file, out: ckptool.convert(file, out.with_suffix(".safetensors"), all=True),
    "strip-module, clean": lambda file, out: ckptool.strip_module(file, out),
    "add-module": lambda file, out: ckptool.add_module(file, out, at="state_dict"),
    "add-module --in-place": lambda file, _: ckptool.add_module(file, at="state_dict", in_place=True),
    "rename": lambda file, out: ckptool.rename(file, ["a.* => b.*"], out, at="state_dict"),
    "remap": lambda file, out: ckptool.remap(file, out, to="cuda:0"),
    "remap, clean": lambda file, out: ckptool.remap(file, out, to="cpu"),
    "remap --in-place": lambda file, _: ckptool.remap(file, to="cuda:0", in_place=True),
    "cast": lambda file, out: ckptool.cast(file, out, dtype="f16", at="state_dict"),
    "edit": lambda file, out: ckptool.edit(file, out, set={"epoch": 1}),
    "edit --in-place": lambda file, _: ckptool.edit(file, set={"epoch": 1}, in_place=True),
    "slim": lambda file, out: ckptool.slim(file, out),
    "bundle": lambda file, out: ckptool.bundle({"a": file, "b": file}, out),
    "average": lambda file, out: ckptool.average([file, file], out),
    "warm-start": lambda file, out: ckptool.warm_start(file, against=file, out=out),
    "save": lambda file, out: ckptool.save(ckptool.open(file), out),
}


class _Watch:
    """What the process imports, opens to write and starts while a verb works; the hook stays for the process, so it can
    be turned off."""

    events: list[str]

    def __init__(self) -> None:
        self.events, self.on = [], False
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and (
            event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")
            or (event == "import" and str(args[0]).partition(".")[0] in DECOYS)
            or (event == "pickle.find_class")
        ):
            self.events.append(f"{event} {args[:1]}")


_WATCH = _Watch()


def check(case: HiddenCall, verb: str, folder: Path) -> None:
    """One case with one verb: refused, or written without what was hidden; mentioned; nothing ran."""
    folder.mkdir()
    file, out = folder / "in.pt", folder / "out.pt"
    content = pickle_zip(case.pickle)
    file.write_bytes(content)
    _WATCH.events, _WATCH.on = [], True
    try:
        try:
            VERBS[verb](file, out)
            passed = True
        except CkptoolError:
            passed = False
        mentioned = _mentions(file, case) if file.read_bytes() == content else True
    finally:
        _WATCH.on = False
    assert not _WATCH.events, (case.title, verb, _WATCH.events)
    assert mentioned, (case.title, verb)
    for written in folder.iterdir():
        if written != file or file.read_bytes() != content:
            assert passed, (case.title, verb, "refused, and wrote", written.name)
            assert not any(case.word in found for found in names_in(written)), (case.title, verb)


def _mentions(file: Path, case: HiddenCall) -> bool:
    """Whether `inspect` and `scan` name what is hidden, and `load` refuses; also where the file cannot be opened at
    all."""
    try:
        notes = [note.message for note in ckptool.inspect(file).notes if note.code == "unsafe-global"]
    except CkptoolError:
        with pytest.raises(CkptoolError):
            ckptool.scan(file)
        return True
    with pytest.raises(CkptoolError):
        ckptool.load(file)
    report = ckptool.scan(file)
    names = [call.name for row in report.files for call in row.calls]
    return bool(notes) and any(case.word in name for name in names) and report.findings > 0


def names_in(path: Path) -> Iterator[str]:
    """Every name in the pickles of an archive, as Python's own tool reads them; all texts, as those may become
    names."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for record in archive.namelist():
            if record.endswith(".pkl"):
                texts: list[str] = []
                for opcode, argument, _ in pickletools.genops(archive.read(record)):
                    if opcode.name in ("GLOBAL", "INST"):
                        yield str(argument).replace(" ", ".")
                    elif opcode.name == "STACK_GLOBAL":
                        yield ".".join(texts[-2:])
                    if isinstance(argument, str):
                        texts.append(argument)


def sampled(count: int, seed: int) -> list[tuple[HiddenCall, str]]:
    """So many different combinations of a case and a verb."""
    verbs = itertools.cycle(VERBS)
    return [(case, next(verbs)) for case in itertools.islice(hidden_calls(random.Random(seed)), count)]


def sweep(chosen: list[tuple[HiddenCall, str]], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Every combination in a folder of its own, with modules on the path that would leave a trace if they were
    imported."""
    for module in DECOYS:
        (folder / f"{module}.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'trace')!r}).touch()\n")
    patch.syspath_prepend(folder)
    for number, (case, verb) in enumerate(chosen):
        check(case, verb, folder / str(number))
    assert not (folder / "trace").exists()


def test_hidden_calls_are_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(sampled(SEEDED, 5), tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_hidden_calls_are_not_passed_on_at_length(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(sampled(SOAKED // 10, 1_000 + seed), tmp_path, monkeypatch)


def test_every_known_name_can_be_among_them() -> None:
    assert len(known_names()) > 900 and combinations() > 400_000


# Pickles beside the checkpoint's own ----------------------------------------------------------------------------------


def _legacy(hidden: bytes) -> bytes:
    """A file of torch before 1.6, with something hidden in what it says about the machine."""
    stream = io.BytesIO()
    torch.save({"state_dict": {"a.weight": torch.ones(4)}}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue().replace(b"u.\x80\x02}q\x00X\n", b"X\x01\x00\x00\x00x" + hidden + b"u.\x80\x02}q\x00X\n", 1)


def _array(hidden: bytes) -> bytes:
    """An array of objects, as numpy writes it with a pickle."""
    stream = io.BytesIO()
    np.save(stream, np.array([None], dtype=object), allow_pickle=True)
    return (
        stream.getvalue().replace(b"]\x94Na", b"]\x94" + hidden + b"a").replace(b"]q\x07Na", b"]q\x07" + hidden + b"a")
    )


@looped("what", UNKNOWN)
@pytest.mark.parametrize("make", [_legacy, _array])
def test_calls_in_other_pickles_of_a_file(what: str, make: Callable[[bytes], bytes], tmp_path: Path) -> None:
    hidden, word = UNKNOWN[what]
    file = tmp_path / ("in.npy" if make is _array else "in.pt")
    content = make(hidden)
    assert hidden in content
    file.write_bytes(content)
    try:
        report = ckptool.scan(file)
    except CkptoolError:
        report = None  # it cannot be opened at all
    assert report is None or any(word in call.name for call in report.files[0].calls)
    for verb in (
        lambda: ckptool.convert(file, tmp_path / "out.pt"),
        lambda: ckptool.remap(file, tmp_path / "out.pt", to="cpu"),
    ):
        with pytest.raises(CkptoolError):
            verb()
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_calls_in_the_table_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(4)}, checkpoint_id=str(tmp_path / "a.dcp"))
    assert not ckptool.scan(tmp_path).findings
    table = tmp_path / "a.dcp" / ".metadata"
    content = table.read_bytes()
    stop = content.rindex(b".")
    for hidden, word in UNKNOWN.values():
        table.write_bytes(content[:2] + hidden + b"0" + content[2:stop] + b".")
        if content[2:3] == b"\x95":  # in front of its frame
            table.write_bytes(content[:2] + hidden + b"0" + content[2:])
        report = ckptool.scan(tmp_path)
        assert report.findings and any(word in call.name for row in report.files for call in row.calls), word
        with pytest.raises(CkptoolError):
            ckptool.convert(tmp_path / "a.dcp", tmp_path / "out.pt")
        assert not (tmp_path / "out.pt").exists()
