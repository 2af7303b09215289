"""Suggestions for names that nearly fit: the right rule first, and no wrong one given as certain."""

import string
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckptool.analysis.warm_start import Suggestion
from ckptool.names import steps
from ckptool.names.rule_files import renaming
from ckptool.names.rules import Rule
from ckptool.transforms.suggest import rules_file, suggest
from tests.support.layouts import both_sides
from tests.support.looped import looped
from tests.support.processes import is_quick, soon

Shapes = dict[str, tuple[int, ...]]
SIZES = [(4, 4), (4, 4), (4,), (8, 4), (3, 4), (), (2, 2, 2)]
Part = str | tuple[int, int]  # a name, or the numbers from .. to
RESNET, HF_RESNET, _ = both_sides("resnet-torchvision")
TIMM, HF_VIT, _ = both_sides("vit-timm")


LARGER = RESNET | {key.replace("layer2.1", "layer2.2"): shape for key, shape in RESNET.items() if "layer2.1" in key}
LARGER = {
    key: shape for key, shape in (LARGER | {"layer2.2.bn1.num_batches_tracked": ()}).items() if "layer4.1" not in key
}
SMALLER = {key: shape for key, shape in RESNET.items() if "layer4.1" not in key}
HEADLESS = {key: shape for key, shape in RESNET.items() if not key.startswith("fc")}


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}{key}": shape for key, shape in shapes.items()}


def blocks(name: str, numbers: range) -> Shapes:
    """Blocks of one shape, as those of a ViT or BERT."""
    ends = [f"{part}.{leaf}" for part in ("attn.qkv", "attn.proj", "norm1") for leaf in ("weight", "bias")]
    return {f"{name}.{n}.{end}": (len(end), 4) for n in numbers for end in ends}


def renamed(rules: Sequence[Rule], keys: Shapes) -> dict[str, str]:
    return {key: key for key in keys} | {key: new for key, (_, new) in steps.renamed(rules, keys).items()}


def parsed(*suggestions: Suggestion) -> list[Rule]:
    return [*renaming(rule for suggestion in suggestions for rule in suggestion.rules)]


def found(source: Shapes, target: Shapes) -> tuple[list[Suggestion], str, dict[str, str]]:
    """The suggestions, the ways that there are where there are several, and the new names of keys; after a look at all
    that is promised whatever the names are."""
    suggestions = suggest(source, target)
    sure = [each for each in suggestions if each.rules]
    ways = [each.why for each in suggestions if not each.rules]
    assert suggestions[: len(sure)] == sure and len(ways) < 2
    assert all(one.agree <= one.total and one.why for one in suggestions)
    rules = parsed(*sure)
    names = renamed(rules, source)
    assert len(set(names.values())) == len(names)
    assert all(names[key] == key for key in source.keys() & target.keys())
    takers = {id(rule) for rule, _ in steps.renamed(rules, source).values()}
    assert takers == set(map(id, rules))  # a rule that takes nothing is refused
    by_all = _fitting(sure, source, target)
    assert len(by_all) == sum(one.agree for one in sure)
    assert all(one.agree <= len(_fitting([one], source, target)) for one in sure)
    return sure, "".join(ways), by_all


def _fitting(suggestions: Sequence[Suggestion], source: Shapes, target: Shapes) -> dict[str, str]:
    names = renamed(parsed(*suggestions), source)
    return {k: new for k, new in names.items() if new != k and target.get(new, "none") == source[k]}


# Real models ---------------------------------------------------------------------------------------------------------


@looped(
    ("name", "certain"),
    [("bert-gamma", 12), ("clip-openclip", 14), ("mixtral-stacked", 2), ("resnet-torchvision", 36), ("unet-ldm", 40),
     ("vae-ldm", 40), ("vit-timm", 18)],
)  # fmt: skip
def test_what_is_certain_between_two_libraries_is_true(name: str, certain: int) -> None:
    old, new, truth = both_sides(name)
    for source, target, pairs in ((old, new, truth), (new, old, {new: old for old, new in truth.items()})):
        by_certain = found(source, target)[2]
        assert len(by_certain) >= certain
        assert all(pairs.get(key, name) == name for key, name in by_certain.items())


@looped(
    ("source", "target", "rules", "agree"),
    [
        (under("model.", RESNET), RESNET, ["model.* => *"], len(RESNET)),
        (RESNET, under("model.", RESNET), ["* => model.*"], len(RESNET)),
        # A name that has a place already: two would be fc.x.
        (under("model.", RESNET) | {"fc.x": (1, 2), "model.fc.x": (3, 4)}, RESNET, None, len(RESNET)),
        (blocks("encoder.layer", range(24)), blocks("h", range(12)), ["encoder.layer.* => h.*"], 72),  # fewer layers
        (blocks("h", range(12)), blocks("layers", range(12)), ["h.* => layers.*"], 72),
        # A wrapper inside another, and one around a part; blocks that only one side has.
        (under("net.module.", RESNET), under("model.", RESNET), ["net.module.* => model.*"], len(RESNET)),
        (under("net.", LARGER), SMALLER, ["net.* => *"], len(SMALLER)),
        (blocks("a.module", range(3)), blocks("a", range(4)), ["a.module.* => a.*"], 18),
        (under("a.", HEADLESS | {"fc.module.weight": (3, 4)}), under("b.", HEADLESS | {"fc.weight": (3, 4)}),
         None, len(HEADLESS) + 1),
        (RESNET, {key.replace("fc.", "head."): shape for key, shape in RESNET.items()}, ["fc.* => head.*"], 2),
        (under("module.", blocks("h", range(3)) | {"h.3.attn.k.weight": (3, 4)}),
         under("net.", blocks("layers", range(3)) | {"layers.3.attn.v.weight": (3, 4)}),
         ["module.h.* => net.layers.*"], 18),
        ({f"{{a}}.b*c.{n}.d\\e => f": (n + 2, 7) for n in range(5)},
         {f"re:x.{{a}}.b*c.{n}.d\\e => f": (n + 2, 7) for n in range(5)}, None, 5),
    ],
)  # fmt: skip
def test_rules(source: Shapes, target: Shapes, rules: list[str] | None, agree: int) -> None:
    sure, _, by_certain = found(source, target)
    assert len(by_certain) == agree and rules in (None, [rule for each in sure for rule in each.rules])


@looped(
    ("source", "target", "ways"),
    [
        *(
            sides
            for one, other in (("student", "teacher"), ("encoder_q", "encoder_k"), ("model", "model_ema"))
            for two in [under(f"{one}.", RESNET) | under(f"{other}.", RESNET)]
            for sides in (
                (two, RESNET, {f"{one}.* as *", f"{other}.* as *"}),
                (RESNET, two, {f"* as {one}.*", f"* as {other}.*"}),
            )
        ),
        *(
            (blocks("layers", range(12)), blocks(name, range(shift, 12 + shift)), set())  # numbers from elsewhere
            for shift in (1, 6)
            for name in ("layers", "blocks")
        ),
        *(
            (
                under(prefix, {key: shape for key, shape in LARGER.items() if "layer2.2" in key}),
                {"layer4.1.bn1.num_batches_tracked": ()},
                set(),
            )
            for prefix in ("", "net.")
        ),
        (LARGER, SMALLER | {"layer4.1.bn1.num_batches_tracked": ()}, set()),
        ({"steps": (), "scale": (1,)}, {"counter": (), "factor": (1,)}, set()),  # scalars are no evidence
    ],
)
def test_nothing_is_suggested_that_is_ambiguous(source: Shapes, target: Shapes, ways: set[str]) -> None:
    sure, said, _ = found(source, target)
    assert not sure and bool(ways) == bool(said) and all(way in said for way in ways)


def test_keys_that_have_their_place_keep_it() -> None:
    source, target = under("model.", RESNET), under("net.", RESNET)
    placed = {key: key.replace("model.", "net.") for key in source if ".layer1." in key}
    names = renamed(parsed(*suggest(source, target, placed)), source)
    assert all(names[key] in (key, placed[key]) for key in placed)
    assert all(placed.get(key, name) in target for key, name in names.items())


# Any names -----------------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: Callable[[Any], Any]) -> dict[tuple[Part, ...], tuple[int, ...]]:
    """Shapes by path; few words and few shapes, so that much can be taken for something else."""
    tree: dict[tuple[Part, ...], tuple[int, ...]] = {}

    def grow(path: tuple[Part, ...], depth: int) -> None:
        kind = draw(st.sampled_from(["leaves", "names", "numbers"] if depth else ["leaves"]))
        if kind == "leaves":
            leaves = st.lists(st.sampled_from(["weight", "bias", "gain"]), min_size=1, max_size=2, unique=True)
            tree.update({(*path, leaf): draw(st.sampled_from(SIZES)) for leaf in draw(leaves)})
        elif kind == "names":
            for name in draw(st.lists(st.sampled_from(["fox", "owl", "elk"]), min_size=1, max_size=3, unique=True)):
                grow((*path, name), depth - 1)
        else:
            start, count, alike = draw(st.integers(0, 1)), draw(st.integers(1, 3)), draw(st.booleans())
            spans = [(start, start + count)] if alike else [(n, n + 1) for n in range(start, start + count)]
            for span in spans:
                grow((*path, span), depth - 1)

    for name in draw(st.lists(st.sampled_from(["fox", "owl", "elk", "bee"]), min_size=1, max_size=4, unique=True)):
        grow((name,), 3)
    return tree


def spelled_out(path: tuple[Part, ...]) -> list[str]:
    keys = [""]
    for part in path:
        choices = [part] if isinstance(part, str) else [str(number) for number in range(*part)]
        keys = [f"{key}.{choice}" if key else choice for key in keys for choice in choices]
    return keys


@st.composite
def renamings(draw: Callable[[Any], Any]) -> tuple[dict[str, str], Shapes]:
    """Keys with their true new names, and their shapes: names stay or become ones that are nowhere else, numbers
    stay."""
    fresh = (f"z{a}{b}" for a in string.ascii_lowercase for b in string.ascii_lowercase)
    often, wrapper = draw(st.sampled_from([0, 1, 2, 4])), draw(st.sampled_from([(), ("model",)]))
    names: dict[tuple[Part, ...], Part] = {}
    truth: dict[str, str] = {}
    shapes: Shapes = {}
    for path, shape in draw(trees()).items():
        for depth, part in enumerate(path):
            new = isinstance(part, str) and draw(st.integers(0, 4)) < often
            names.setdefault(path[: depth + 1], next(fresh) if new else part)
        goal = (*wrapper, *(names[path[: depth + 1]] for depth in range(len(path))))
        for key, name in zip(spelled_out(path), spelled_out(goal), strict=True):
            truth[key], shapes[key] = name, shape
    if draw(st.booleans()):
        shapes = {truth[key]: shape for key, shape in shapes.items()}
        truth = {name: key for key, name in truth.items()}
    return truth, shapes


Truth = dict[str, tuple[str, tuple[int, ...]]]
RIVALS: dict[str, Truth] = {
    "of the target, which end so": {"zaw.fox.weight": ("elk.fox.weight", (4, 4)), "zax.zay": ("fox.weight", (4, 4))},
    "of the checkpoint, which end so": {
        "zaa.fox.weight": ("fox.weight", (3, 4)),
        "zaa.owl.weight": ("zab.owl.weight", (8, 4)),
        "zaa.elk.weight": ("zac.elk.weight", (9, 4)),
        "bee.fox.weight": ("bee.zad.weight", (3, 4)),
    },
    "that have a doubtful place": {"owl.zac": ("owl.weight", (4, 4)), "zaf.0.owl.weight": ("elk.0.owl.weight", (4, 4))},
    "of another size": {
        f"down.{n}.{k}": (f"down.{n + 1}.{k}", (s * n,)) for n in (1, 2) for k, s in (("proj", 8), ("q", 4))
    },
    "of a module with others": {
        f"layers.{one}.{leaf}": (f"norm.{other}.{leaf}", (4,) * rank)
        for one, other, ranks in (("ln_attn", "zaa", (1, 1)), ("attn.proj", "attn.proj", (2, 1)))
        for leaf, rank in zip(("weight", "bias"), ranks, strict=True)
    },
    "of a block that is counted otherwise": {
        **{f"owl.{n}.b.2.{leaf}": (f"elk.{n}.b.2.{leaf}", (n, 4)) for n in (1, 3) for leaf in ("fox", "gain")},
        **{f"owl.2.b.{n}.gain": (f"elk.2.b.{n - 1}.gain", (2, 4)) for n in range(1, 4)},
    },
    "counted otherwise": {f"a.{n // 2}.{n % 2}.conv": (f"a.{n}.conv", (4 if n else 3, 4)) for n in range(3)},
}


@looped("truth", [*RIVALS.values()])
def test_nothing_is_certain_that_has_a_rival(truth: Truth) -> None:
    for there in (True, False):
        pairs = {key: name for key, (name, _) in truth.items()}
        sizes = {key: shape for key, (_, shape) in truth.items()}
        target = {name: sizes[key] for key, name in pairs.items()}
        if not there:
            pairs, sizes, target = {name: key for key, name in pairs.items()}, target, sizes
        assert all(name == pairs[key] for key, name in found(sizes, target)[2].items())


@given(renamings(), st.booleans())
def test_no_wrong_assignment_is_accepted_silently(case: tuple[dict[str, str], Shapes], in_order: bool) -> None:
    truth, source = case
    names = list(truth.values())
    by_name = {name: source[key] for key, name in truth.items()}
    target = {name: by_name[name] for name in (names if in_order else sorted(names))}
    assert all(name == truth[key] for key, name in found(source, target)[2].items())


ODD = st.text(alphabet=string.ascii_lowercase[:3] + ".{}*\\=> 0123\n:é", max_size=8)


@given(
    st.dictionaries(st.one_of(ODD, ODD.map(lambda text: f"re:{text}")), st.sampled_from(SIZES), max_size=8),
    st.sampled_from(["x.{}", "{}", "a*{}", "\\{}", "{{n}}.{}", "q => {}"]),
    st.dictionaries(ODD, st.sampled_from([*SIZES, None]), max_size=4),
)
def test_names_with_characters_that_rules_use(source: Shapes, pattern: str, more: Any) -> None:
    found(source, {pattern.format(key): shape for key, shape in source.items()} | more)


# Time ----------------------------------------------------------------------------------------------------------------


def words_of(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def many(shapes: Shapes) -> Shapes:
    """The same with more blocks, until there are a thousand."""
    more = {f"{key}.{n}": shape for n in range(30) for key, shape in shapes.items()}
    return dict([*more.items()][:1000])


@looped(
    ("source", "target"),
    [
        (many(TIMM), many(HF_VIT)),
        (many(RESNET), many(HF_RESNET)),
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
    suggestions: list[Suggestion] = []
    assert is_quick(lambda: suggestions.extend(suggest(source, target)), 1)
    assert rules_file(suggestions)


def test_very_many_keys_and_very_long_ones() -> None:
    each = {f"{words_of(n)}.{n % 9}.weight": (n, 4) for n in range(20_000)}
    long: Shapes = {"a9" * 50_000: (4, 4), "a." * 100_000: (3,)}
    with soon(4):
        assert suggest(under("model.", each), each)[0].rules == ("model.* => *",)
        assert suggest(long, under("b", long)) == []
