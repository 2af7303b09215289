"""`ckptool scan` beside other scanners of pickles (`make engines`): the same files in one run, and the table of
docs/safety.md.

What a generated file does, stock torch says, which loads it in a forked child, in a folder of its own. The files of
fixtures/ and of the corpus are read, never loaded. A scanner flags a file with a finding, an error, or an exception:
whatever its own command ends with another exit code than 0 for.
"""

from __future__ import annotations

import argparse
import bz2
import cProfile
import gzip
import io
import itertools
import logging
import os
import platform
import pty
import random
import runpy
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import timeit
import types
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from tests.support.hidden import DECOY, Call, fate, hidden_calls, hidden_effects, torch_saved
from tests.support.hostile_inputs import pickle_zip, text
from tests.support.object_graphs import saved_graph

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

HOME = Path(__file__).parents[2]
CORPUS = Path("/work/shared/corpus")
SUFFIXES = {".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar", ".jit", ".ptl", ".safetensors", ".distcp", ".mol"}
LINES: list[str] = []  # the table, which conftest.py prints

# Files ---------------------------------------------------------------------------------------------------------------

MADE = "open('TRACE', 'w')"
WELL_KNOWN: list[tuple[Any, tuple[Any, ...]]] = [
    (os.system, ("touch TRACE",)),
    (os.mkdir, ("TRACE",)),
    (eval, (MADE,)),
    (exec, (MADE,)),
    (open, ("TRACE", "w")),
    (subprocess.call, (["touch", "TRACE"],)),
    (subprocess.check_output, (["touch", "TRACE"],)),
    (pty.spawn, (["touch", "TRACE"],)),
    (runpy._run_code, (MADE, {})),  # type: ignore[attr-defined]
    (shutil.copyfile, ("in.pt", "TRACE")),
]
OTHERS: list[tuple[Any, tuple[Any, ...]]] = [
    (timeit.timeit, (MADE, "pass", time.perf_counter, 1)),
    (cProfile.run, (MADE,)),
    (logging.FileHandler, ("TRACE",)),
    (zipfile.ZipFile, ("TRACE", "w")),
    (sqlite3.connect, ("TRACE",)),
    (tempfile.mkdtemp, ("", "TRACE", ".")),
    (gzip.open, ("TRACE", "wb")),
    (bz2.open, ("TRACE", "wb")),
    (np.savetxt, ("TRACE", [1])),
    (np.save, ("TRACE", [1])),
    (np.memmap, ("TRACE", "u1", "w+", 0, (4,))),
    (torch.save, ([1], "TRACE")),
    (torch.UntypedStorage.from_file, ("TRACE", True, 8)),
]


def hidden(count: int, known: bool) -> Iterator[bytes]:
    """Calls hidden in the use of names that everybody allows: of `os.system`, or of a module that nobody knows."""
    for case in itertools.islice(hidden_calls(random.Random(11)), count):
        pickle = case.pickle
        if known:
            pickle = pickle.replace(f"{DECOY}\nrun\n".encode(), b"posix\nsystem\n")
            pickle = pickle.replace(text("trace"), text("touch TRACE"))
        yield pickle_zip(pickle)


def saved(value: Any) -> Iterator[bytes]:
    """A value as `torch.save` writes it today, and as it did before torch 1.6."""
    for new in (True, False):
        stream = io.BytesIO()
        torch.save(value, stream, _use_new_zipfile_serialization=new)
        yield stream.getvalue()


def training() -> Iterator[bytes]:
    """What training scripts save: models, optimizers and schedulers of many classes, with what stands beside them."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        for net in (torch.nn.Linear(3, 2), torch.nn.LSTM(3, 2, 2), torch.nn.TransformerEncoderLayer(4, 2, 8)):
            optimizer = kind(net.parameters(), lr=0.1)
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            beside = {"loss": np.float64(1.5), "args": argparse.Namespace(lr=0.1), "random": random.getstate()}
            beside |= {"numpy": np.random.RandomState(1).get_state(), "torch": torch.get_rng_state(), "at": Path("a")}
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict()
            tree = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule}
            yield from (data for value in (tree, tree | beside, net.state_dict(), net) for data in saved(value))


def graphs() -> Iterator[bytes]:
    return (graph.data for graph in map(saved_graph, range(120)) if graph is not None)


RAN, HARMED, FINE = ({"ran"}, {"ran", "crashed", "took for ever", "took all memory"}, {""})


def generated() -> Iterator[tuple[str, Iterable[bytes], set[str]]]:
    """Each kind of generated file, and what stock torch is to say of it. An import may take a second of its own, so a
    call counts only where it ran."""
    yield "calls of well-known functions", (torch_saved(Call(*each)) for each in WELL_KNOWN), RAN
    yield "calls of other functions", (torch_saved(Call(*each)) for each in OTHERS), RAN
    yield "`os.system` hidden among names that are harmless", hidden(600, True), RAN
    yield "an unknown module hidden among them", hidden(600, False), RAN
    effects = list(itertools.islice(hidden_effects(random.Random(7)), 200))
    yield "harm without a suspicious name", (each.content for each in effects if not each.fine), HARMED
    yield "what libraries write, with the same names", (each.content for each in effects if each.fine), FINE
    yield "what training scripts save", training(), FINE
    yield "random objects, people's own classes too", graphs(), FINE


def judged(folder: Path) -> Iterator[tuple[str, bool, list[Path]]]:
    """Kind, whether hostile, and its files: those of which stock torch says what they are meant to be."""
    for number, (kind, contents, wanted) in enumerate(generated()):
        paths = []
        for each, content in enumerate(contents):
            if fate(content, folder) in wanted:
                paths.append(folder / f"{number}-{each}.pt")
                paths[-1].write_bytes(content)
        yield kind, wanted != FINE, paths
    for kind, top in (("`fixtures/`", HOME / "fixtures"), ("other people's files", CORPUS)):
        paths = [path for path in sorted(top.rglob("*")) if path.suffix in SUFFIXES or path.name == ".metadata"]
        if paths:
            yield kind, False, paths


# Scanners ------------------------------------------------------------------------------------------------------------


def by_ckptool(path: Path) -> bool:
    return ckptool.scan(path).findings > 0


def by_picklescan(path: Path, strict: bool = False) -> bool:
    from picklescan.scanner import scan_file_path

    found = scan_file_path(str(path), strict=strict)
    return bool(found.issues_count or found.scan_err)


def by_picklescan_strict(path: Path) -> bool:
    return by_picklescan(path, strict=True)


def by_modelscan(path: Path) -> bool:
    from modelscan.modelscan import ModelScan
    from modelscan.settings import DEFAULT_SETTINGS

    scanner = ModelScan(settings=DEFAULT_SETTINGS)
    scanner.scan(str(path))
    return bool(scanner.issues.all_issues or scanner.errors)


def by_fickling(path: Path) -> bool:
    """As its scan of a model on the Hub decides: the pickles of a zip, another file as a pickle, safetensors not."""
    from fickling.loader import scan_file, scan_zip_archive

    if path.suffix == ".safetensors":
        return False
    archive = scan_zip_archive(str(path), graceful=True) if zipfile.is_zipfile(path) else {}
    return not all(archive.values() if archive else [scan_file(str(path), graceful=True)])


SCANNERS: dict[str, Callable[[Path], bool]] = {
    "ckptool": by_ckptool,
    "picklescan": by_picklescan,
    "picklescan --strict": by_picklescan_strict,
    "modelscan": by_modelscan,
    "fickling": by_fickling,
}


def flags(scanner: Callable[[Path], bool], path: Path) -> tuple[bool, float]:
    """Whether a scanner flags a file, and its seconds."""
    start = time.perf_counter()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            found = scanner(path)
        except Exception:  # noqa: BLE001 (what its command would end with)
            found = True
    return found, time.perf_counter() - start


def test_scanners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stock torch runs or is broken by is flagged, and nothing that libraries write."""
    for package in ("picklescan", "modelscan", "fickling"):
        pytest.importorskip(package)
    decoy = types.ModuleType(DECOY)
    decoy.run = lambda *_, **__: Path("TRACE").touch()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, DECOY, decoy)
    monkeypatch.chdir(tmp_path)
    logging.disable()
    warnings.simplefilter("ignore")
    seconds: dict[str, list[float]] = {scanner: [] for scanner in SCANNERS}
    wrong: list[str] = []
    rows = [["files", "number", *SCANNERS], ["---"] * (2 + len(SCANNERS))]
    for kind, hostile, paths in judged(tmp_path):
        found = {scanner: [flags(function, path) for path in paths] for scanner, function in SCANNERS.items()}
        for scanner, answers in found.items():
            seconds[scanner] += [taken for _, taken in answers]
        counts = [str(sum(flagged for flagged, _ in answers)) for answers in found.values()]
        rows.append([f"{'hostile' if hostile else 'benign'}: {kind}", str(len(paths)), *counts])
        ours = [path.name for path, (flagged, _) in zip(paths, found["ckptool"], strict=True) if flagged != hostile]
        print(kind, ours)
        wrong += [f"{kind}: {name}" for name in ours] if hostile or "libraries" in kind or "training" in kind else []
    rows.append(["median of a file, ms", "", *(f"{1000 * median(each):.1f}" for each in seconds.values())])
    LINES.extend("| " + " | ".join(row) + " |" for row in rows)
    made = ", ".join(f"{package} {version(package)}" for package in ("picklescan", "modelscan", "fickling", "torch"))
    LINES.append(f"{time.strftime('%Y-%m-%d')}, {made}, Python {platform.python_version()}")
    logging.disable(logging.NOTSET)
    assert not wrong, wrong
