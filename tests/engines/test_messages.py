"""What the real libraries say of files that they do not load is known to `explain`, in their own tracebacks."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]


def bert(**changed: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertConfig(**{**sizes, "vocab_size": 50, **changed})


def model_folder(change: Callable[[Path], Any] = lambda _: None, **options: Any) -> None:
    """Saves a BERT in `out`, changes the folder, and loads it again."""
    from transformers import BertModel

    BertModel(bert()).save_pretrained("out", **options)
    change(Path("out"))
    BertModel.from_pretrained("out")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 9)


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")


def renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def other_head() -> None:
    from transformers import BertForSequenceClassification

    BertForSequenceClassification(bert()).save_pretrained("out")
    BertForSequenceClassification.from_pretrained("out", num_labels=7)


def new_head() -> None:
    from transformers import BertForSequenceClassification, BertModel
    from transformers.utils import logging as of_transformers

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    of_transformers.get_logger("transformers").addHandler(handler)
    BertModel(bert()).save_pretrained("out")
    BertForSequenceClassification.from_pretrained("out")
    raise RuntimeWarning("\n".join(said))


def trainer(**options: Any) -> None:
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments

    rows = [{"input_ids": torch.ones(3).long(), "labels": 0}] * 4
    settings = TrainingArguments("out", report_to=[], use_cpu=True)
    Trainer(BertForSequenceClassification(bert()), settings, train_dataset=rows).train(**options)


def adapter(into: Any = None, **options: Any) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import BertModel

    get_peft_model(BertModel(bert()), LoraConfig(**{"target_modules": ["query"], **options})).save_pretrained("out")
    PeftModel.from_pretrained(BertModel(into), "out")


def no_adapter() -> None:
    from peft import PeftModel
    from transformers import BertModel

    bert().save_pretrained("out")
    PeftModel.from_pretrained(BertModel(bert()), "out")


def unet() -> None:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    UNet2DModel(sample_size=8, block_out_channels=(32, 32), layers_per_block=1, **blocks).save_pretrained("out")
    os.remove("out/diffusion_pytorch_model.safetensors")
    UNet2DModel.from_pretrained("out")


def lightning(checkpoint: dict[str, Any], train: bool = False) -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.fc(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    weights = Model().state_dict()
    torch.save({"state_dict": weights, **checkpoint} if checkpoint else weights, "a.ckpt")
    if not train:
        Model.load_from_checkpoint("a.ckpt")
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(4, 2)), batch_size=2)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    lightning.Trainer(max_epochs=1, **quiet).fit(Model(), loader, ckpt_path="a.ckpt")


def distributed(key: str, size: int, change: Callable[[], Any] = lambda: None) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"model": {"a": torch.ones(3)}}, checkpoint_id="out", no_dist=True)
    change()
    checkpoint.load({"model": {key: torch.ones(size)}}, checkpoint_id="out", no_dist=True)


def deepspeed() -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    os.mkdir("out")
    get_fp32_state_dict_from_zero_checkpoint("out")


def older_module() -> None:
    model = nn.GELU()
    del model.approximate
    torch.save(model, "a.pt")
    torch.load("a.pt", weights_only=False)(torch.ones(2))


def by_pickle() -> None:
    torch.save({"w": torch.ones(3)}, "a.pt")
    with open("a.pt", "rb") as file:
        pickle.load(file)


def meta() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.load_state_dict({"weight": torch.ones(2, 2)}, strict=False)
    model.to("cpu")


def by_safetensors(value: Any) -> None:
    from safetensors.torch import save_file

    save_file(value, "a.safetensors")


def to_device(name: str) -> None:
    torch.save({"w": torch.ones(3)}, "a.pt")
    torch.load("a.pt", map_location=name)


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "no weights of a known name": ("no-weights", lambda: model_folder(renamed)),
    "a shard is missing": (
        "io", lambda: model_folder(lambda out: sorted(out.glob("*.safetensors"))[0].unlink(), max_shard_size="2KB")),
    "cut weights": ("truncated", lambda: model_folder(cut)),
    "a pointer of git-lfs": ("not-a-checkpoint", lambda: model_folder(pointer)),
    "no such folder": ("io", lambda: __import__("transformers").AutoModel.from_pretrained("./there_is_none")),
    "another head": ("shape-mismatch", other_head),
    "a new head": ("keys-differ", new_head),
    "a Trainer without checkpoints": ("io", lambda: trainer(resume_from_checkpoint=True)),
    "a Trainer's wrong folder": ("io", lambda: trainer(resume_from_checkpoint="nothing/")),
    "an adapter of another base": ("adapter", lambda: adapter(bert(hidden_size=32))),
    "an adapter for other names": ("adapter", lambda: adapter(bert(), target_modules=["q_proj"])),
    "no adapter": ("adapter", no_adapter),
    "a UNet without weights": ("no-weights", unet),
    "weights given to Lightning": ("no-such-entry", lambda: lightning({})),
    "Lightning's without optimizer": (
        "no-such-entry", lambda: lightning({"pytorch-lightning_version": "2.0.0"}, train=True)),
    "names of torch.distributed": ("keys-differ", lambda: distributed("b", 3)),
    "shapes of torch.distributed": ("shape-mismatch", lambda: distributed("a", 4)),
    "an interrupted save of torch.distributed": (
        "not-a-checkpoint", lambda: distributed("a", 3, lambda: os.remove("out/.metadata"))),
    "no folder of DeepSpeed": ("io", deepspeed),
    "a module of an older torch": ("whole-module", older_module),
    "pickle.load": ("not-a-pickle", by_pickle),
    "the meta device": ("no-weights", meta),
    "tensors in another order": ("resolved-views", lambda: by_safetensors({"a": torch.ones(3, 4).t()})),
    "nested tensors": ("nested-weights", lambda: by_safetensors({"a": {"b": torch.ones(3)}})),
    "no such device": ("device-location", lambda: to_device("gpu")),
    "no such folder to save in": ("io", lambda: torch.save({}, "nowhere/a.pt")),
    "a generator": ("whole-module", lambda: torch.save(nn.Linear(2, 2).parameters(), "a.pt")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_says_is_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, attempt = CASES[name]
    with pytest.raises(BaseException) as caught:
        attempt()
    text = "".join(traceback.format_exception(caught.value))
    (found,) = ckptool.doctor(error=text).findings
    assert found.code == code, text
    shutil.rmtree("out", ignore_errors=True)
