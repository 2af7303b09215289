"""The lab: what `doctor` says of every specimen, with its model and without, and what its commands make. Torch is the
judge."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fixtures import lab
from tests.support.lab_trial import Trial, trial

WITH_MODEL = [name for name, specimen in lab.SPECIMENS.items() if specimen.model]
BOTH = [(name, False) for name in lab.SPECIMENS] + [(name, True) for name in WITH_MODEL]
# Each specimen once, every other one of those that have a model with it.
ONCE = {(name, name in WITH_MODEL[::2]) for name in lab.SPECIMENS}


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Trial]:
    """The specimens of this run, tried without their models or with them, each in a folder of its own."""
    chosen = BOTH if any(item.name.endswith("[all]") for item in request.session.items) else sorted(ONCE)
    before, made = os.getcwd(), {}
    for name, against in chosen:
        folder = tmp_path_factory.mktemp("lab")
        os.chdir(folder)
        try:
            made[name, against] = trial(lab.SPECIMENS[name], folder, against)
        finally:
            os.chdir(before)
    return made


def wanted(specimen: lab.Specimen, against: bool) -> frozenset[str]:
    return specimen.against if against and specimen.against is not None else specimen.codes


@pytest.mark.parametrize(
    ("name", "against"), [pytest.param(*each, marks=() if each in ONCE else pytest.mark.soak) for each in BOTH]
)
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


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 600))])
@pytest.mark.parametrize("against", [False, True])
def test_any_specimen(seed: int, against: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    specimen = lab.any_specimen(seed)
    done = trial(specimen, tmp_path, against)
    assert not done.failed and not (done.good and done.blocks), done
    assert done.good or not done.all_clear or not (against or specimen.seen_alone), done
    assert done.loads or done.good or not (against or specimen.alone), done


@pytest.mark.parametrize(
    "chosen", [pytest.param(sorted(ONCE), id="once"), pytest.param(BOTH, id="all", marks=pytest.mark.soak)]
)
def test_the_share_of_what_is_named(chosen: list[tuple[str, bool]], trials: dict[tuple[str, bool], Trial]) -> None:
    faulty = [each for each in chosen if wanted(lab.SPECIMENS[each[0]], each[1])]
    named = [each for each in faulty if wanted(lab.SPECIMENS[each[0]], each[1]) <= trials[each].codes]
    assert len(lab.SPECIMENS) >= 80 and len(faulty) >= 60
    assert len(named) >= 0.95 * len(faulty), sorted(set(faulty) - set(named))
