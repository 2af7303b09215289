"""Suggestions for names that nearly fit: the right rule first, and no wrong one given as certain."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.analysis.warm_start import Suggestion
from ckptool.names import steps
from ckptool.names.rule_files import read_rules, renaming
from ckptool.names.rules import Rule
from ckptool.transforms.suggest import rules_file, suggest
from tests.support.looped import looped
from tests.support.naming_schemes import (
    CHUNKS,
    Shapes,
    bert,
    bert_attention,
    hugging_face_vit,
    linear,
    masked_language_head,
    norm,
    resnet50,
    spectrally_normed,
    timm_vit,
    torchvision_name,
    torchvision_vit,
    under,
    weight_normed,
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


def test_lightning_prefix_and_a_new_head() -> None:
    first, *others = found(under("model.", resnet50()), resnet50(classes=10))
    assert first.rules == ("model.* => *",) and first.unambiguous and not others
    assert (first.agree, first.total) == (318, 320)


def test_a_prefix_to_put_on() -> None:
    [only] = found(resnet50(), under("model.", resnet50()))
    assert only.rules == ("* => model.*",) and (only.agree, only.total, only.unambiguous) == (320, 320, True)


def test_a_renamed_backbone() -> None:
    source = under("backbone.", resnet50()) | linear("decoder.out", 3, 7)
    first, *others = found(source, under("encoder.", resnet50(classes=5)) | linear("segment", 9, 9))
    assert first.rules == ("backbone.* => encoder.*",) and first.unambiguous and not others


def test_a_prefix_on_some_keys_leaves_the_others_alone() -> None:
    source = linear("head", 3, 4) | norm("norm", 4) | {f"layers.{n}.weight": (4, 4) for n in range(6)}
    target = {key if key.startswith("head") else f"body.{key}": shape for key, shape in source.items()}
    assert pairs(source, target) == {key: key if key.startswith("head") else f"body.{key}" for key in source}


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


# Spelling ------------------------------------------------------------------------------------------------------------


def test_original_bert_against_a_new_one() -> None:
    first, *others = found(bert(prefix="bert.", old=True), bert())
    assert first.rules == ("bert.*.gamma => *.weight", "bert.*.beta => *.bias", "bert.* => *")
    assert (first.agree, first.total, first.unambiguous) == (199, 199, True) and not others


def test_original_bert_without_and_with_a_prefix_to_put_on() -> None:
    [only] = found(bert(old=True), bert())
    assert only.rules == ("*.gamma => *.weight", "*.beta => *.bias") and only.agree == 50
    assert "gamma" in only.why
    [only] = found(bert(old=True), bert(prefix="bert."))
    assert only.rules == ("*.gamma => bert.*.weight", "*.beta => bert.*.bias", "* => bert.*") and only.agree == 199


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("prefix", ["", "generator."])
def test_weight_norm_of_both_kinds(prefix: str, back: bool) -> None:
    source, target = under(prefix, weight_normed(new=back)), weight_normed(new=not back)
    first, *others = found(source, target)
    assert first.unambiguous and first.agree == len(source) - 5 * (not prefix) and not others
    old, new = ("weight_g", "parametrizations.weight.original0")
    assert f"{prefix}*.{new} => *.{old}" if back else f"{prefix}*.{old} => *.{new}" in first.rules


def test_spectral_norm_of_both_kinds() -> None:
    assert len(pairs(spectrally_normed(), spectrally_normed(new=True))) == 6
    assert len(pairs(spectrally_normed(new=True), spectrally_normed())) == 6


# Blocks --------------------------------------------------------------------------------------------------------------


def test_the_example_of_a_renamed_block() -> None:
    source = {key: shape for key, shape in bert().items() if ".attention." in key}
    target = {key: size for n in range(12) for key, size in bert_attention(f"blocks.{n}.attn", 768).items()}
    [only] = found(source, target)
    assert only.rules == ("encoder.layer.{n}.attention.* => blocks.{n}.attn.*",) and only.unambiguous
    assert (only.agree, only.total) == (120, 120)


@pytest.mark.parametrize("classes", [1000, 10])
def test_timm_against_torchvision(classes: int) -> None:
    source = timm_vit()
    suggestions = found(source, torchvision_vit(classes=classes))
    assert suggestions[0].agree == 144 and suggestions[0].unambiguous
    assert sorted(suggestions[0].rules) == sorted(
        (
            "blocks.{n}.norm{m}.* => encoder.layers.encoder_layer_{n}.ln_{m}.*",
            "blocks.{n}.attn.qkv.weight => encoder.layers.encoder_layer_{n}.self_attention.in_proj_weight",
            "blocks.{n}.attn.qkv.bias => encoder.layers.encoder_layer_{n}.self_attention.in_proj_bias",
            "blocks.{n}.attn.proj.* => encoder.layers.encoder_layer_{n}.self_attention.out_proj.*",
            "blocks.{n}.mlp.fc1.* => encoder.layers.encoder_layer_{n}.mlp.0.*",
            "blocks.{n}.mlp.fc2.* => encoder.layers.encoder_layer_{n}.mlp.3.*",
        )
    )
    names = pairs(source, torchvision_vit(classes=classes))
    assert names == {key: torchvision_name(key) for key in source if classes == 1000 or not key.startswith("head.")}


@pytest.mark.parametrize("chunks", [0, CHUNKS])
def test_torchvision_against_timm(chunks: int) -> None:
    target = timm_vit(chunks=chunks)
    assert pairs(torchvision_vit(), target) == {torchvision_name(key): key for key in target}
    assert pairs(target, torchvision_vit()) == {key: torchvision_name(key) for key in target}


def test_an_older_torchvision() -> None:
    old = torchvision_vit(old=True)
    new = {key: key.replace("linear_1", "0").replace("linear_2", "3") for key in old}
    assert pairs(old, torchvision_vit()) == new
    assert len(pairs(old, timm_vit())) == len(old)


def test_dino_chunks_follow_from_the_number_of_the_block() -> None:
    source, target = timm_vit(), timm_vit(chunks=CHUNKS)
    [only] = found(source, target)
    assert only.rules == ("blocks.{n}.* => blocks.{n // 3}.{n}.*",)
    assert (only.agree, only.total, only.unambiguous) == (144, 144, True)


def test_dino_chunks_against_plain_blocks() -> None:
    source, target = timm_vit(chunks=CHUNKS), timm_vit()
    assert pairs(source, target) == {key: re.sub(r"^blocks\.\d+\.", "blocks.", key) for key in source}


def test_chunks_that_count_anew_rest_on_order_alone() -> None:
    source = timm_vit()
    target = {
        re.sub(r"^blocks\.(\d+)", lambda m: f"blocks.{int(m[1]) // 3}.{int(m[1]) % 3}", k): s for k, s in source.items()
    }
    suggestions = found(source, target)
    assert not certain(suggestions)
    assert suggestions[0].rules == ("blocks.{n}.* => blocks.{n // 3}.{n % 3}.*",)
    assert "count from another number" in suggestions[0].why


@pytest.mark.parametrize("shift", [1, 6])
@pytest.mark.parametrize("name", ["layers", "blocks"])
def test_numbers_that_count_from_elsewhere_are_never_certain(shift: int, name: str) -> None:
    source = {key: size for n in range(12) for key, size in bert_attention(f"layers.{n}", 64).items()}
    target = {key: size for n in range(12) for key, size in bert_attention(f"{name}.{n + shift}", 64).items()}
    assert not certain(found(source, target))


def test_stages_that_count_from_elsewhere_but_differ_in_shape() -> None:
    other = resnet50("stages.{}.blocks", 0, ("shortcut.conv", "shortcut.norm"), ("stem.conv", "stem.norm"), "head.fc")
    source = resnet50()
    assert list(pairs(source, other).values()) == list(other)  # both are in the same order
    assert list(pairs(other, source).values()) == list(source)


def test_fewer_layers() -> None:
    target = {key.replace("encoder.layer", "transformer.h"): size for key, size in bert(12).items()}
    names = pairs(bert(24), target)
    assert names == {key.replace("transformer.h", "encoder.layer"): key for key in target} and len(target) == 199


@pytest.mark.parametrize("layers", [(6, 12), (12, 6)])
def test_names_of_another_library_with_more_or_fewer_layers(layers: tuple[int, int]) -> None:
    parts = {"query": "q_lin", "key": "k_lin", "value": "v_lin"}
    source = {f"encoder.layer.{n}.self.{part}.weight": (8, 8) for n in range(layers[0]) for part in parts}
    target = {f"transformer.h.{n}.{part}.weight": (8, 8) for n in range(layers[1]) for part in parts.values()}
    names = {
        f"encoder.layer.{n}.self.{old}.weight": f"transformer.h.{n}.{new}.weight"
        for n in range(6)
        for old, new in parts.items()
    }
    assert pairs(source, target) == names


# Doubts --------------------------------------------------------------------------------------------------------------


def test_separate_against_fused_attention() -> None:
    three = "vit.encoder.layer.{n}.attention.attention.{query,key,value}.*"
    for source, target, rule in (
        (hugging_face_vit(), timm_vit(), f"{three} => blocks.{{n}}.attn.qkv.* : cat 0"),
        (timm_vit(), hugging_face_vit(), f"blocks.{{n}}.attn.qkv.* => {three} : split 0"),
    ):
        suggestions = found(source, target)
        (fused,) = [one for one in suggestions if any(" : " in rule for rule in one.rules)]
        assert fused.rules == (rule,) and not fused.unambiguous and fused.agree == fused.total == 24
        assert "one after the other" in fused.why


def test_norms_that_only_their_order_tells_apart() -> None:
    suggestions = found(hugging_face_vit(), timm_vit())
    order, *_ = [one for one in doubtful(suggestions) if "order" in one.why]
    assert order.rules == (
        "vit.encoder.layer.{n}.layernorm_before.* => blocks.{n}.norm1.*",
        "vit.encoder.layer.{n}.layernorm_after.* => blocks.{n}.norm2.*",
    )
    assert "vit.encoder.layer.{n}.output.dense.* => blocks.{n}.mlp.fc2.*" in suggestions[0].rules


def test_what_is_left_alone_is_suggested_whatever_it_is() -> None:
    source, target = (
        {f"{block}.{n}.{leaf}": (8,) for n in range(3)} for block, leaf in (("blocks", "gamma"), ("layers", "scale"))
    )
    (only,) = found(source, target)
    assert not only.unambiguous and (only.agree, only.total) == (3, 3)


def test_another_layer_of_the_same_shape_is_not_taken_for_a_new_one() -> None:
    first, *others = found(bert(), bert(prefix="bert.", pooler=False) | masked_language_head())
    assert first.rules == ("* => bert.*",) and first.agree == 197
    assert not certain(others)  # pooler.dense has the shape of transform.dense


@pytest.mark.parametrize("names", [("query", "key"), ("up_proj", "gate_proj"), ("enc", "decoder"), ("left", "right")])
def test_names_that_contradict_each_other(names: tuple[str, str]) -> None:
    source, target = ({f"layers.{n}.{name}.weight": (4, 4) for n in range(3)} for name in names)
    assert found(source, target) == []


def test_scalars_are_no_evidence() -> None:
    assert found({"steps": (), "scale": (1,)}, {"counter": (), "factor": (1,)}) == []


def test_two_of_one_shape() -> None:
    suggestions = found(linear("up", 4, 4) | linear("fox", 4, 4), linear("elk", 4, 4) | linear("owl", 4, 4))
    assert not certain(suggestions) and suggestions


def test_one_vector_of_a_length_that_many_have_is_not_suggested() -> None:
    """A matrix by itself is, as doubtful, and a vector with the matrix of its module."""
    source, target = {"conv.weight": (16, 3, 3, 3), "conv.bias": (16,)}, {"fc.weight": (16, 8), "norm.bias": (16,)}
    assert suggest(source, target) == []
    source["conv.weight"] = (16, 8)
    assert all(not each.unambiguous for each in suggest(source, target)) and suggest(source, target)


def test_nothing_to_suggest() -> None:
    assert suggest({}, {}) == suggest(resnet50(), resnet50()) == suggest({"a": (1,)}, {}) == []
    assert suggest({"a.weight": (4, 4)}, {"b.weight": (4, 5)}) == []
    assert suggest(resnet50(classes=1000), resnet50(classes=10)) == []


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


@pytest.mark.parametrize("seed", range(4))
def test_renamings_with_different_shapes_are_found(seed: int) -> None:
    """So that the test above cannot be passed by suggesting nothing."""
    source = {
        f"{name}.{n}.{part}.weight": (n + seed + 2, size)
        for n in range(4)
        for name, size in (("fox", 3), ("owl", 5))
        for part in ("a",)
    }
    truth = {key: key.replace("fox", "zaa").replace("owl", "zab") for key in source}
    assert pairs(source, {truth[key]: shape for key, shape in source.items()}) == truth


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


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (timm_vit(), torchvision_vit()),
        (bert(prefix="bert.", old=True), bert()),
        (hugging_face_vit(), timm_vit()),
        ({f"\x1b: - 'é\ud800 {n}": (n, 2) for n in range(3)}, {f"x.\x1b: - 'é\ud800 {n}": (n, 2) for n in range(3)}),
    ],
)
def test_the_rules_file_is_read_back(source: Shapes, target: Shapes, tmp_path: Path) -> None:
    suggestions = found(source, target)
    assert certain(suggestions)
    path = tmp_path / "rules.yaml"
    path.write_bytes(rules_file(suggestions).encode())
    rules = [rule for one in certain(suggestions) for rule in one.rules]
    assert [rule.text for rule in read_rules(str(path)).rules] == rules


def test_ambiguous_rules_are_comments_before_the_others(tmp_path: Path) -> None:
    suggestions = found(hugging_face_vit(), timm_vit())
    text = rules_file(suggestions)
    assert text.count("AMBIGUOUS") == len(doubtful(suggestions)) > 0
    path = tmp_path / "rules.yaml"
    path.write_text(re.sub(r"(?m)^# (- ')", r"\1", text), encoding="utf-8")
    expected = sorted(rule for one in suggestions for rule in one.rules)
    assert sorted({rule.text for rule in read_rules(str(path)).rules}) == expected
    assert text.rindex("AMBIGUOUS") < text.index(suggestions[0].rules[0])


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
