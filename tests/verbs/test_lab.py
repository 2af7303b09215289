"""The lab: what `doctor` says of every specimen, with its model and without, and what its commands make. Torch is the
judge."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import ckptool
from fixtures import lab
from tests.support.lab_trial import Trial, trial

WITH_MODEL = [name for name, specimen in lab.SPECIMENS.items() if specimen.model]
BOTH = [(name, False) for name in lab.SPECIMENS] + [(name, True) for name in WITH_MODEL]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Trial]:
    """Every specimen, tried without its model and with it, each in a folder of its own."""
    before, made = os.getcwd(), {}
    for name, against in BOTH:
        folder = tmp_path_factory.mktemp("lab")
        os.chdir(folder)
        try:
            made[name, against] = trial(lab.SPECIMENS[name], folder, against)
        finally:
            os.chdir(before)
    return made


def wanted(specimen: lab.Specimen, against: bool) -> frozenset[str]:
    return specimen.against if against and specimen.against is not None else specimen.codes


@pytest.mark.parametrize(("name", "against"), BOTH)
def test_a_specimen(name: str, against: bool, trials: dict[tuple[str, bool], Trial]) -> None:
    specimen, done = lab.SPECIMENS[name], trials[name, against]
    assert done.good is specimen.healthy, "the specimen is not what it says"
    assert not done.failed, "a command that was printed did not run"
    assert not (done.good and done.blocks), f"a false alarm: {done.codes}"
    if against or specimen.seen_alone:
        assert done.good or not done.all_clear, "a false all-clear"
        assert done.loads or done.good or not specimen.mended or not (against or specimen.alone), (
            "what came out does not load"
        )
    assert not done.good or done.loads, "a healthy file no longer loads after what was printed"


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(16, 600))])
@pytest.mark.parametrize("against", [False, True])
def test_any_specimen(seed: int, against: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    specimen = lab.any_specimen(seed)
    done = trial(specimen, tmp_path, against)
    assert not done.failed and not (done.good and done.blocks), done
    assert done.good or not done.all_clear or not (against or specimen.seen_alone), done
    assert done.loads or done.good or not (against or specimen.alone), done


def test_the_share_of_what_is_named(trials: dict[tuple[str, bool], Trial], capsys: pytest.CaptureFixture[str]) -> None:
    faulty = [(name, against) for name, against in BOTH if wanted(lab.SPECIMENS[name], against)]
    named = [key for key in faulty if wanted(lab.SPECIMENS[key[0]], key[1]) <= trials[key].codes]
    commands = sum(done.ran for done in trials.values())
    with capsys.disabled():
        print(f"\nlab: {len(lab.SPECIMENS)} specimens, {len(trials)} trials, {commands} commands run; ", end="")
        print(f"named {len(named)} of {len(faulty)} ({100 * len(named) / len(faulty):.1f} %)")
    assert len(lab.SPECIMENS) >= 80
    assert len(named) >= 0.95 * len(faulty), sorted(set(faulty) - set(named))


@pytest.mark.parametrize("name", ["dp.pt", "training_gpu.pth.tar", "-dash.pt"])
def test_it_says_what_it_has_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.make(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    text = str(ckptool.doctor(name))
    (line,) = [line for line in text.splitlines() if "not the tensors' data" in line]
    assert re.search(r"ckptool verify (\./)?\S+ --finite$", line) and "None" not in text
