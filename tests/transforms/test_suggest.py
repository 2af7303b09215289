"""Suggestions for names that nearly fit: the right rule first, and no wrong one given as certain."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.analysis.warm_start import Suggestion
from ckptool.names import steps
from ckptool.names.rule_files import renaming
from ckptool.names.rules import Rule
from ckptool.transforms.suggest import rules_file, suggest
from tests.support.looped import looped
from tests.support.naming_schemes import (
    CHUNKS,
    Shapes,
    bert,
    bert_attention,
    hugging_face_vit,
    resnet50,
    timm_vit,
    torchvision_vit,
    under,
)
from tests.support.processes import is_quick, soon
from tests.support.renamed_trees import SIZES, renamings


def renamed(key: str, rules: Sequence[Rule]) -> str:
    return next((new for _, new in steps.renamed(rules, [key]).values()), key)


def parsed(*suggestions: Suggestion) -> list[Rule]:
    rules = [rule for suggestion in suggestions for rule in suggestion.rules]
    return [*renaming(rule for rule in rules if not re.search(r"(?<!\\)\s:\s", rule.partition(" => ")[2]))]


def certain(suggestions: Sequence[Suggestion]) -> list[Suggestion]:
    return [suggestion for suggestion in suggestions if suggestion.unambiguous]


def doubtful(suggestions: Sequence[Suggestion]) -> list[Suggestion]:
    return [suggestion for suggestion in suggestions if not suggestion.unambiguous and suggestion.rules]


def found(source: Shapes, target: Shapes) -> list[Suggestion]:
    """The suggestions, after a look at all that they promise whatever the names are."""
    suggestions = suggest(source, target)
    sure = certain(suggestions)
    assert suggestions[: len(sure)] == sure
    for given_rules in (sure, *([one, *sure] for one in doubtful(suggestions))):
        names = {key: renamed(key, parsed(*given_rules)) for key in source}
        assert len(set(names.values())) == len(names)
        for key in source.keys() & target.keys():
            assert names[key] == key
        rules = parsed(*given_rules)
        takers = {id(rule) for rule, _ in steps.renamed(rules, source).values()}
        assert takers == set(map(id, rules))  # a rule that takes nothing is refused
    gained = {key: new for key in source if (new := renamed(key, parsed(*sure))) != key}
    brought = [key for key, new in gained.items() if target.get(new, "none") == source[key]]
    assert len(brought) == sum(one.agree for one in sure)
    assert all(one.agree <= one.total and one.why for one in suggestions)
    for one in (one for one in suggestions if parsed(one)):  # the others change tensors
        alone = {key: renamed(key, parsed(one)) for key in source}
        fits = [key for key, new in alone.items() if new != key and target.get(new, "none") == source[key]]
        assert one.agree <= len(fits)
    return suggestions


def pairs(source: Shapes, target: Shapes) -> dict[str, str]:
    """What the certain suggestions bring, by applying their rules."""
    rules = parsed(*certain(found(source, target)))
    return {key: new for key in source if (new := renamed(key, rules)) in target and target[new] == source[key]}


# Prefixes ------------------------------------------------------------------------------------------------------------


def test_keys_of_that_prefix_without_a_place_do_not_collide() -> None:
    source = under("model.", resnet50()) | {"fc.extra": (1, 2), "model.fc.extra": (3, 4)}
    suggestions = found(source, resnet50())
    assert sum(one.agree for one in certain(suggestions)) == 320
    assert renamed("model.fc.extra", parsed(*suggestions)) != "fc.extra"


@pytest.mark.parametrize("names", [("student", "teacher"), ("encoder_q", "encoder_k"), ("model", "model_ema")])
def test_two_models_that_both_fit_are_never_chosen_between(names: tuple[str, str]) -> None:
    one, other = names
    suggestions = found(under(f"{one}.", resnet50()) | under(f"{other}.", resnet50()), resnet50())
    assert not certain(suggestions)
    assert [suggestion.rules for suggestion in suggestions] == [(f"{one}.* => *",), (f"{other}.* => *",)]
    assert all(one in suggestion.why and other in suggestion.why for suggestion in suggestions)


def test_a_target_with_two_places_is_never_chosen_for() -> None:
    suggestions = found(resnet50(), under("student.", resnet50()) | under("teacher.", resnet50()))
    assert not certain(suggestions) and {one.rules for one in suggestions} == {("* => student.*",), ("* => teacher.*",)}


# Blocks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1, 6])
@pytest.mark.parametrize("name", ["layers", "blocks"])
def test_numbers_that_count_from_elsewhere_are_never_certain(shift: int, name: str) -> None:
    source = {key: size for n in range(12) for key, size in bert_attention(f"layers.{n}", 64).items()}
    target = {key: size for n in range(12) for key, size in bert_attention(f"{name}.{n + shift}", 64).items()}
    assert not certain(found(source, target))


def test_fewer_layers() -> None:
    target = {key.replace("encoder.layer", "transformer.h"): size for key, size in bert(12).items()}
    names = pairs(bert(24), target)
    assert names == {key.replace("transformer.h", "encoder.layer"): key for key in target} and len(target) == 199


# Doubts --------------------------------------------------------------------------------------------------------------


def test_what_is_left_alone_is_suggested_whatever_it_is() -> None:
    source, target = (
        {f"{block}.{n}.{leaf}": (8,) for n in range(3)} for block, leaf in (("blocks", "gamma"), ("layers", "scale"))
    )
    (only,) = found(source, target)
    assert not only.unambiguous and (only.agree, only.total) == (3, 3)


def test_scalars_are_no_evidence() -> None:
    assert found({"steps": (), "scale": (1,)}, {"counter": (), "factor": (1,)}) == []


def test_keys_that_have_their_place_keep_it() -> None:
    source, target = under("model.", resnet50()), under("net.", resnet50())
    placed = {key: key.replace("model.", "net.") for key in source if ".layer1." in key}
    rules = parsed(*suggest(source, target, placed))
    names = {key: renamed(key, rules) for key in source}
    assert all(names[key] in (key, placed[key]) for key in placed)
    assert {placed.get(key, name) for key, name in names.items()} == set(target)


# Any names -----------------------------------------------------------------------------------------------------------


@given(renamings(), st.booleans())
def test_no_wrong_assignment_is_accepted_silently(case: tuple[dict[str, str], Shapes], in_order: bool) -> None:
    truth, source = case
    names = list(truth.values())
    by_name = {name: source[key] for key, name in truth.items()}
    target = {name: by_name[name] for name in (names if in_order else sorted(names))}
    for key, name in pairs(source, target).items():
        assert name == truth[key] or name == key


ODD = st.text(alphabet=string.ascii_lowercase[:3] + ".{}*\\=> 0123\n:é", max_size=8)


@given(
    st.dictionaries(st.one_of(ODD, ODD.map(lambda text: f"re:{text}")), st.sampled_from(SIZES), max_size=8),
    st.sampled_from(["x.{}", "{}", "a*{}", "\\{}", "{{n}}.{}", "q => {}"]),
    st.dictionaries(ODD, st.sampled_from([*SIZES, None]), max_size=4),
)
def test_names_with_characters_that_rules_use(source: Shapes, pattern: str, more: Any) -> None:
    found(source, {pattern.format(key): shape for key, shape in source.items()} | more)


def test_names_with_characters_that_rules_use_have_rules_too() -> None:
    source = {f"{{a}}.b*c.{n}.d\\e => f": (n + 2, 7) for n in range(5)}
    target = {f"re:x.{key}": shape for key, shape in source.items()}
    assert len(pairs(source, target)) == len(pairs(target, source)) == 5


# Time ----------------------------------------------------------------------------------------------------------------


def words_of(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


@looped(
    ("source", "target"),
    [
        (timm_vit(84), torchvision_vit(84)),
        (timm_vit(84), timm_vit(84, chunks=CHUNKS)),
        (hugging_face_vit(64), timm_vit(64)),
        (under("model.", timm_vit(84)), timm_vit(84)),
        *(
            ({f"{words_of(n)}.{old}.weight": (size(n), 4) for n in range(1000)},
             {f"{new}.{words_of(n if same else n + 7000)}.weight": (size(n), 4) for n in range(1000)})
            for size in (lambda n: 4, lambda n: n)
            for same in (True, False)
            for old, new in (("x", "x"), ("x", "y"))
        ),
        ({f"a.{n}.w": (4, 4) for n in range(1000)}, {f"b.{n + 1}.v": (4, 4) for n in range(1000)}),
        (
            {f"a.{n % 10}.{n // 10 % 10}.{n // 100}.w": (n % 7, 4) for n in range(1000)},
            {f"b.{n % 10}.{n // 10 % 10}.{n // 100 + 1}.w": (n % 7, 4) for n in range(1000)},
        ),
    ],
    at_once=5,
)  # fmt: skip
def test_a_thousand_keys_within_a_second(source: Shapes, target: Shapes) -> None:
    found: list[Any] = []
    assert is_quick(lambda: found.append(suggest(source, target)), 1)
    (suggestions, *_) = found
    assert isinstance(suggestions, list) and rules_file(suggestions)


def test_very_many_keys_and_very_long_ones() -> None:
    many = {f"{words_of(n)}.{n % 9}.weight": (n, 4) for n in range(20_000)}
    long: Shapes = {"a9" * 50_000: (4, 4), "a." * 100_000: (3,)}
    with soon(4):
        assert suggest(under("model.", many), many)[0].rules == ("model.* => *",)
        assert suggest(long, under("b", long)) == []
