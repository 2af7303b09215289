"""Many values in one test, and a few of very many here while the others are for `make soak`."""

import functools
import inspect
import math
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

AT_ONCE = 40  # values of one test, so that none is long


def examples(many: int) -> int:
    """Examples for hypothesis: so many in `make soak`, a fifth of them in every run."""
    return many if "CKPTOOL_SOAK" in os.environ else max(20, many // 5)


def sliced(values: Iterable[Any], here: int) -> list[Any]:
    """Values of which `here` are for every run, drawn with a seed, and the others for `make soak`; in order. A tuple
    has one for each name."""
    given = [value if isinstance(value, tuple) else (value,) for value in values]
    drawn = _drawn(len(given), here, len(given))
    return [pytest.param(*value, marks=() if index in drawn else pytest.mark.soak) for index, value in enumerate(given)]


def _drawn(count: int, here: int, seed: int | str) -> set[int]:
    return set(random.Random(seed).sample(range(count), min(here, count)))


def looped(
    names: str | tuple[str, ...],
    values: Iterable[Any],
    ids: Any = None,
    *,
    at_once: int = AT_ONCE,
    here: int | float = 1.0,
) -> Callable[[Any], Any]:
    """`pytest.mark.parametrize` for values that take little: `at_once` of them are one test, which lists what fails.

    here: so many of them, or such a share, are for every run, the others for `make soak`. They are drawn with a seed; a
    share with one of the test's name, so that tests of the same values have others. Each has a `tmp_path` and a
    `monkeypatch` of its own; other fixtures are shared.
    """
    arguments = tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names)
    named = iter(ids) if ids is not None and not callable(ids) else None
    rows: list[tuple[str, dict[str, Any]]] = []
    for value in values:
        name, given = (value.id, value.values) if isinstance(value, ParameterSet) else (None, value)
        name = next(named) if named else name or (ids or str)(value)
        single = len(arguments) == 1 and not isinstance(value, ParameterSet)
        rows.append((str(name)[:100], dict(zip(arguments, (given,) if single else given, strict=True))))
    part = f"part_of_{'_'.join(arguments)}"

    def decorate(test: Callable[..., None]) -> Any:
        share = isinstance(here, float)
        drawn = _drawn(
            len(rows), math.ceil(len(rows) * here) if share else int(here), test.__name__ if share else len(rows)
        )
        now, later = ([row for index, row in enumerate(rows) if (index in drawn) is wanted] for wanted in (True, False))
        parts = [some[at : at + at_once] for some in (now, later) for at in range(0, len(some), at_once)]
        first_of_soak = -(-len(now) // at_once)
        wanted = inspect.signature(test).parameters
        others = [name for name in wanted if name not in arguments]

        @functools.wraps(test)
        def all_of_them(**fixtures: Any) -> None:
            failed: dict[str, BaseException] = {}
            skipped: list[str] = []
            number = fixtures.pop(part)
            for index, (name, row) in enumerate(parts[number]):
                with pytest.MonkeyPatch.context() as patch:
                    own: dict[str, Any] = {}
                    if "tmp_path" in wanted:
                        own["tmp_path"] = fixtures["tmp_path"] / str(index)
                        own["tmp_path"].mkdir()
                    if "monkeypatch" in wanted:
                        own["monkeypatch"] = patch
                    try:
                        test(**{**fixtures, **own, **row})
                    except pytest.skip.Exception as error:
                        skipped.append(f"{name}: {error}")
                    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 -- raised below
                        failed[name] = error
            if failed:
                first = next(iter(failed.values()))
                raise AssertionError(f"{len(failed)} of {len(parts[number])}: {', '.join(failed)}") from first
            if len(skipped) == len(parts[number]):
                pytest.skip("; ".join(dict.fromkeys(skipped)))

        kind = inspect.Parameter.KEYWORD_ONLY
        all_of_them.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in [part, *others]])  # type: ignore[attr-defined]
        numbers = [
            number if number < first_of_soak else pytest.param(number, marks=pytest.mark.soak)
            for number in range(len(parts))
        ]
        return pytest.mark.parametrize(part, numbers)(all_of_them)

    return decorate
