"""What a configuration asks for and cannot have is refused before the first step, or in it, in words that name it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckptool.errors import CkptoolError
from ckptool.training.trainer import start
from tests.support.looped import looped
from tests.support.small_runs import GAN, MUON, TEXT, config, own, scheduled, split_at, take, toy, trainer

NET: dict[str, Any] = {"models": {"net": {"name": "mlp"}}, "optim": {"net": {}}}


def of(name: str, **more: Any) -> dict[str, Any]:
    """Data of one's own."""
    return {"data": {"name": own(name), "batch": 8, "val_fraction": 0, **more}}


def model(name: str = "mlp", **more: Any) -> dict[str, Any]:
    return {"models": {"main": {"name": name, **more}}}


def optimizers(**each: dict[str, Any]) -> dict[str, Any]:
    return {**TEXT, "optim": {name: {"model": "main", **settings} for name, settings in each.items()}}


def groups(*each: dict[str, Any]) -> dict[str, Any]:
    return {"optim": {"main": {"name": "adamw", "groups": list(each)}}}


def checkpointed(**settings: Any) -> dict[str, Any]:
    return {**TEXT, "train": {"steps": 5, "activation_checkpoint": settings}}


# Changes or sections, and what is said.
REFUSED: list[tuple[str | dict[str, Any], str]] = [
    # data
    ({"data": {"name": "builtins:object", "batch": 8}}, "object returned object, not a Dataset"),
    (of("raises", args={"n": 0}), "own.py:raises raised RuntimeError: out of ideas"),
    (of("Items", args={"m": 0}), "does not take these arguments.*It takes: count"),
    ({"data": {"name": "gone.py:none"}}, "there is no file"),
    (of("Broken"), "own.py:Broken raised KeyError.*no such picture"),
    (of("Broken", workers=1), "own.py:Broken raised KeyError.*no such picture"),
    (of("Counting"), "Counting has a state_dict, but gives samples by index"),
    ({"data": {"name": "blobs", "batch": 999, "drop_last": True}}, r"data\.batch is 999, but there are 410 samples"),
    (
        {"data": {"name": toy("data.py:Sequences"), "args": {"samples": 20}}},
        r"a batch cannot be stacked: stack expects each tensor to be equal size.*data\.collate=file",
    ),
    (of("Stream", val_fraction=0.2), r"is a stream.*data\.val\.name"),
    (of("Stream", sampler=own("weighted")), "is a stream"),
    (of("Empty"), "ends after 0 samples"),
    (of("Stream", batch=32, drop_last=True), "ends after 21 samples.*no batch of 32"),
    ({**of("Stream"), "eval": {"every": "epoch"}}, r"has no length.*counted in epochs: eval\.every\.\n"),
    ({**of("Stream"), "train": {"epochs": 2}}, r"has no length.*counted in epochs: train\.epochs\.\n"),
    (
        {**of("Stream"), "optim": {"main": {"schedule": {"name": "step", "args": {"step_size": 2}, "per": "epoch"}}}},
        r"has no length.*counted in epochs: optim\.main\.schedule\.per\.\n",
    ),
    (of("PointItems", sampler=own("longer")), "gave 3 places of .* in epoch 1.*as long as the first"),
    (of("Items", sampler=own("outside")), "gave 1 place of 40 in epoch 0"),
    (of("Items", sampler=own("none")), "has no none"),
    (of("Items", val={"name": own("Items")}, val_fraction=0.2), "give val or val_fraction, one of the two"),
    # models
    (model(own("raises")), "(?s)own.py:raises raised RuntimeError: out of ideas.*not in ckptool"),
    (model("builtins:str"), r"returned str, not a torch\.nn\.Module"),
    (model(own("Nett")), "has no Nett.*It has: .*Inner"),
    (model(args={"hiden": [3]}), "mlp does not take.*It takes: inputs"),
    (model("gone_module:Net"), "there is no module gone_module"),
    (model("torch.nn:LazyLinear", args={"out_features": 2}), r"models\.main: parameters of lazy modules.*weight, bias"),
    (model(init=own("raises")), "out of ideas"),
    (model(freeze=["body.*"]), r"freeze: 'body\.\*' matches no parameter.*1\.weight"),
    (model(freeze=["1.*", "type:Conv2d"]), r"freeze: 'type:Conv2d' matches no parameter.*1\.weight"),
    (checkpointed(match="layers.*"), r"'layers\.\*' matches no module.*blocks\.0"),
    (checkpointed(sequential="blocks"), r"'blocks' is not an nn\.Sequential.*blocks\.0\.mlp"),
    (model(init="orthogonal"), "init: there is no 'orthogonal'.*file.py:NAME, which is called with the model"),
    (checkpointed(match="*", sequential="blocks"), "match or sequential, exactly one of the two"),
    # tasks
    ("task=builtins:int", "returned int, not a ckptool"),
    (f"task={own('raises')}", "out of ideas"),
    (f"task={own('vector')}", r"the loss of .*vector is of shape \[3\], not a tensor of one element"),
    (NET, "trains the model 'main'.*Available: net"),
    (
        {"data": {"name": toy("data.py:text"), "args": {"length": 8, "samples": 40}, "batch": 8}},
        "task: classify raised RuntimeError.*something it does not expect: check the data, the model and",
    ),
    ({"data": {"name": toy("data.py:ring")}, **model(args={"classes": 2})}, r"a batch is list.*\(inputs, target\)"),
    ("eval.metric=accuracy", "eval.metric is accuracy, which the task does not give.*val_loss, val_acc.*=val_acc"),
    (
        {"stop": {"patience": 2}, "data": {"name": "blobs", "val_fraction": 0}},
        r"eval\.metric is val_loss, which.*No data is held out",
    ),
    # optimizers
    ("optim.main.name=lbfgs", "optim: lbfgs asks for the loss several times.*file.py:NAME"),
    ("optim.main.name=torch.optim.Adamm", "optim: there is no 'torch.optim.Adamm'.*Did you mean Adam?"),
    ({"optim": {"main": {"name": "sgd", "args": {"momentun": 0.9}}}}, "sgd does not take.*momentun.*It takes: lr, mom"),
    ({"optim": {"main": {"name": "sgd", "args": {"momentum": -1}}}}, "Invalid momentum"),
    ({"optim": {"main": {"clip": {"norm": 1, "value": 1}}}}, "one of the two"),
    (groups({"match": "head.*"}), r"'head\.\*' matches no parameter.*1\.weight"),
    (groups({"match": "*"}, {"match": "*.bias"}), "outside the earlier groups"),
    (groups({"match": "*", "weight_decy": 0.0}), "AdamW has no option 'weight_decy'.*weight_decay"),
    (f"optim.main.name={own('matrices')}", r"does not step exactly the parameters.*It left out 1\.bias, 4\.bias"),
    (f"optim.main.name={own('nothing')}", r"own\.py:nothing returned float, not a torch\.optim\.Optimizer"),
    ({"optim": {"main": {"name": own("Lion"), "args": {"momentum": 1}}}}, "Lion does not take.*momentum.*takes: lr"),
    (
        optimizers(muon=MUON, rest={"match": ["type:LayerNorm", "*.bias", "tokens"]}),
        r"that no optimizer takes: places\.weight\n.*without match takes the rest",
    ),
    (
        optimizers(muon=MUON, rest={"match": ["blocks.0.qkv.weight"]}),
        r"several optimizers take: blocks\.0\.qkv\.weight \(muon, rest\)",
    ),
    (optimizers(muon=MUON, rest={"match": "body"}), r"optim\.rest\.match: 'body' matches no parameter"),
    ({"optim": {"a": {"model": "main"}, "b": {"model": "main"}}}, r"take the rest of \['main'\]; all but one need"),
    ({"optim": {"main": {}, "a": {"match": "*"}}}, r"optimizers for \['a', 'main'\]; each model needs one"),
    # schedules
    ({"optim": {"main": {"schedule": {"name": "step", "args": {"gama": 1}}}}}, "schedule: step does not take.*gama"),
    (
        {"optim": {"main": {"schedule": {"name": "warmup_cosine", "args": {"warmup": 2, "total": "x"}}}}},
        "schedule: warmup_cosine does not take these arguments.*unsupported operand",
    ),
    (
        {"optim": {"main": {"schedule": {"name": "warmup_cosine", "args": {"warmup": 5}}}}},
        "schedule: warmup_cosine does not take these arguments.*It takes: warmup, total, floor",
    ),
    *(
        (
            {"optim": {"main": {"schedule": {"name": name}}}},
            f"{name} takes functions or .*file.py:NAME, which is a func",
        )
        for name in ("lambda", "LambdaLR", "multiplicative", "SequentialLR", "chained_scheduler")
    ),
    ({"optim": {"main": {"schedule": {"name": "cosine"}}}}, "Did you mean warmup_cosine or CosineAnnealingLR or Cos"),
    *(
        ({"optim": {"main": {"schedule": {"name": own(name)}}}}, f"schedule: .*{name}")
        for name in ("plateau", "counter", "nothing")
    ),
    ({"optim": scheduled("ReduceLROnPlateau"), "eval": {"every": 0}}, r"needs evaluation.*eval\.every"),
    # strategies
    ("device=gpu", "device: 'gpu' is not a device of this machine"),
    ("device=cuda:99", "device: 'cuda:99' is not a device of this machine"),
    ({"train": {"steps": 3, "compile": "fast"}}, "fast"),
    ("strategy=split", "split needs the section"),
    (
        {"strategy": "split", "split": {"devices": ["cpu"] * 3, "at": ["4"]}},
        "at makes 2 parts, and there must be as many devices",
    ),
    ({"strategy": "split", "split": {"devices": ["cpu", "gpu:7"], "at": ["4"]}}, "'gpu:7' is not a device"),
    ({**GAN, **split_at("4")}, "split cuts one model, and there are 2"),
    ({**TEXT, **split_at("blocks.9")}, r"split\.at: blocks\.9 are not modules in the order.*blocks\.0"),
    ({**TEXT, **split_at("norm", "blocks.1")}, "not modules in the order of the model"),
    ({**TEXT, **split_at("norm", "norm")}, "not modules in the order of the model"),
    # hooks, and the profiler's file
    (f"hooks=[{own('Misspelt')}]", "returned Misspelt, not an object with one of these methods"),
    ("hooks=[builtins:int]", "returned int, not an object with one of these methods"),
    *((f"profile.trace={name}", r"profile\.trace") for name in ("../t.json", "/tmp/t.json", "run.yaml", ".json")),
]


@looped("row", REFUSED, ids=[str(row[0])[-60:] for row in REFUSED], at_once=12)
def test_what_cannot_be_is_refused_by_name(tmp_path: Any, row: tuple[str | dict[str, Any], str]) -> None:
    asked, words = row
    changes, sections = ((asked,), {}) if isinstance(asked, str) else ((), asked)
    with pytest.raises(CkptoolError) as raised:
        start(config("save.every=100", *changes, run=tmp_path / "run", **sections))
    assert re.search(f"(?s){words}", str(raised.value)), str(raised.value)
    assert raised.value.exit_code == 2
    saved = [path.stem for path in tmp_path.glob("run/checkpoints/*.pt")]  # the last whole step, if there is one
    assert saved in ([], ["step-00000001"], ["step-00000005"])


def test_what_is_frozen_needs_no_optimizer() -> None:
    frozen = {"main": {**TEXT["models"]["main"], "freeze": ["places"]}}
    rest = {"match": ["type:LayerNorm", "*.bias", "tokens"]}
    take(trainer(**{**optimizers(muon=MUON, rest=rest), "models": frozen}), 2)
