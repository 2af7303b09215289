"""What is typed for a verb, in all the ways in which people write options."""

from __future__ import annotations

import pytest

from tests.support.cli import Run, done

STRIPPED = "dp.pt -n -f -o out.pt"


@pytest.mark.parametrize(
    "typed",
    [
        "dp.pt -nf -o out.pt",
        "dp.pt -nfoout.pt",
        "-o out.pt dp.pt -n --force",
        "--out=out.pt -nf -- dp.pt",
        "-o else.pt dp.pt -nf -o out.pt",
        "dp.pt -nn -f --dry-run --out out.pt",
    ],
)
@pytest.mark.usefixtures("files")
def test_options_stand_anywhere_in_any_form(typed: str, run: Run) -> None:
    assert done(run("strip-module", *typed.split())) == done(run("strip-module", *STRIPPED.split()))


@pytest.mark.usefixtures("files")
def test_a_value_may_look_like_an_option_and_an_argument_after_the_dashes(run: Run) -> None:
    assert "→ -n (" in done(run("strip-module", "dp.pt", "-o", "-n")).replace("./", "")
    assert "such file" in run("inspect", "--", "--json").err


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("diff dp.pt", "ckptool diff needs B\n  Usage: ckptool diff [OPTIONS] A B\n"),
        ("diff dp.pt b.pt c.pt d.pt", "ckptool diff was given too many arguments: c.pt d.pt\n"),
        ("cast dp.pt", "ckptool cast needs --dtype DTYPE\n"),
        ("strip-module dp.pt -nx", "ckptool strip-module has no option -x\n"),
        ("strip-module dp.pt --in-place=yes", "--in-place takes no value\n"),
        ("strip-module dp.pt -n -o", "-o needs a value, and was given none\n"),
        ("diff dp.pt b.pt --atol=-1", "--atol takes a number of at least 0, not '-1'\n"),
        ("diff dp.pt b.pt --atol nan", "--atol takes a number of at least 0, not 'nan'\n"),
        ("prove run.yaml --kills 1.5", "--kills takes a whole number of at least 1, not '1.5'\n"),
        ("completion tcsh", "SHELL takes bash, zsh or fish, not 'tcsh'\n"),
        ("inspect dp.pt --jsom", "ckptool inspect has no option --jsom\n  Did you mean --json?\n"),
    ],
)
def test_what_it_does_not_take_is_told(typed: str, told: str, run: Run) -> None:
    ran = run(*typed.split())
    assert (ran.code, ran.out) == (2, "") and told in ran.err, ran.err
