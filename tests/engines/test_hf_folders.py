"""The folders that `convert -o DIR/` writes, loaded by the libraries themselves (`make engines`): no name missing, none
unexpected, and the outputs of the model that was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cli import Run

pytestmark = pytest.mark.engines


def tiny(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=24, tie_word_embeddings=False)
        return transformers.LlamaForCausalLM(config).eval()
    if kind == "llama-tied":
        config = transformers.LlamaConfig(**sizes, intermediate_size=24, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config).eval()
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        return transformers.GPT2LMHeadModel(config).eval()
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=24)).eval()


@pytest.mark.parametrize("form", ["one file", "shards"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "bert"])
def test_transformers_loads_what_was_written(kind: str, form: str, tmp_path: Path, run: Run) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path / "like")
    trained = tmp_path / "checkpoint-7"
    trained.mkdir()
    torch.save({"model": model.state_dict(), "step": 7}, trained / "state.pt")
    options = ["--shard-size", "8KB"] if "shards" in form else []
    done = run(
        "convert", f"{trained / 'state.pt'}#model", "-o", f"{tmp_path / 'out'}/", "--like", tmp_path / "like", *options
    )
    assert done.code == 0, done
    shards = [path for path in (tmp_path / "out").iterdir() if "-of-" in path.name]
    assert bool(shards) == ("shards" in form)
    found, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    words = torch.arange(12).reshape(2, 6)
    assert torch.equal(found.eval()(words).logits, model(words).logits)
    if kind != "llama":
        assert found.get_input_embeddings().weight is found.get_output_embeddings().weight


def test_the_dtype_in_the_configuration_is_that_of_the_weights(tmp_path: Path, run: Run) -> None:
    import transformers

    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path / "like", max_shard_size="4KB")
    done = run("cast", tmp_path / "like", "--dtype", "f32", "-o", tmp_path / "out")
    assert done.code == 0 and "dtype is now float32" in done.out
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert found.dtype == torch.float32
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("like", "out"))
    assert after == before.replace("bfloat16", "float32") != before


@pytest.mark.parametrize("shards", [False, True])
def test_diffusers_loads_what_was_written(shards: bool, tmp_path: Path, run: Run) -> None:
    import diffusers

    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    for model in (unet, vae):
        like, file, out = (tmp_path / f"{type(model).__name__}{end}" for end in ("", ".pt", "-out"))
        model.save_pretrained(like)
        torch.save(model.state_dict(), file)
        size = ["--shard-size", "20KB"] if shards else []
        done = run("convert", file, "-o", f"{out}/", "--like", like, *size)
        assert done.code == 0, done
        found, info = type(model).from_pretrained(out, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft_loads_an_adapter_that_was_written(tmp_path: Path, run: Run) -> None:
    import peft

    base = tiny("llama")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "like")
    done = run("convert", tmp_path / "like", "-o", tmp_path / "adapter.pt")
    assert done.code == 0, done
    done = run("convert", tmp_path / "adapter.pt", "-o", f"{tmp_path / 'out'}/", "--like", tmp_path / "like")
    assert done.code == 0, done
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    found = peft.PeftModel.from_pretrained(tiny("llama"), tmp_path / "out").eval()
    words = torch.arange(12).reshape(2, 6)
    assert torch.equal(found(words).logits, adapted.eval()(words).logits)


def test_names_that_the_library_does_not_find_are_said(tmp_path: Path, run: Run) -> None:
    model = tiny("gpt2")
    model.save_pretrained(tmp_path / "like")
    torch.save({f"_orig_mod.{name}": value for name, value in model.state_dict().items()}, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", "-o", f"{tmp_path / 'out'}/", "--like", tmp_path / "like", "--json")
    assert done.code == 0, done
    (note,) = [note for note in json.loads(done.out)["notes"] if note["code"] == "prefix-module"]
    assert run(*note["fix"][1:]).code == 0, note
    _, info = type(model).from_pretrained(tmp_path / "out-bare", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("named", ["checkpoint-7", "checkpoint-7/pytorch_model_fsdp_0"])
def test_a_distributed_checkpoint_of_a_trainer_is_loaded(named: str, tmp_path: Path, run: Run) -> None:
    import torch.distributed.checkpoint as dcp

    model = tiny("llama-tied")
    model.config.save_pretrained(tmp_path / "checkpoint-7")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint-7/pytorch_model_fsdp_0", no_dist=True)
    (tmp_path / "checkpoint-7/trainer_state.json").write_text('{"global_step": 7}')
    done = run("convert", tmp_path / named, "-o", f"{tmp_path / 'out'}/")
    assert done.code == 0, done
    found, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    words = torch.arange(12).reshape(2, 6)
    assert torch.equal(found.eval()(words).logits, model(words).logits)


def test_a_component_of_a_pipeline_has_its_own_configuration(tmp_path: Path, run: Run) -> None:
    import diffusers

    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler()).save_pretrained(tmp_path / "pipe")
    done = run("convert", f"{tmp_path / 'pipe'}#unet", "-o", f"{tmp_path / 'out'}/", "--shard-size", "20KB")
    assert done.code == 0, done
    found = diffusers.UNet2DModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in unet.state_dict().items())


@pytest.mark.parametrize("shards", [False, True])
def test_transformers_and_diffusers_take_safetensors_where_torch_files_are_there_too(
    shards: bool, tmp_path: Path, run: Run
) -> None:
    import diffusers
    import transformers

    blocks = {"down_block_types": ("DownBlock1D",), "up_block_types": ("UpBlock1D",), "block_out_channels": (8,)}
    models: list[Any] = [tiny("bert"), diffusers.UNet1DModel(**blocks, norm_num_groups=4)]
    for number, model in enumerate(models):
        folder = tmp_path / str(number)
        model.save_pretrained(folder, **({"max_shard_size": "8KB"} if shards else {}))
        other = {name: tensor + 1 for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
        stem = "pytorch_model" if isinstance(model, transformers.PreTrainedModel) else "diffusion_pytorch_model"
        torch.save(other, folder / f"{stem}.bin")
        read = run("convert", folder, "-o", tmp_path / f"{number}.pt")
        assert read.code == 0, read
        written, kept = torch.load(tmp_path / f"{number}.pt"), type(model).from_pretrained(folder).state_dict()
        assert all(torch.equal(tensor, kept[name]) for name, tensor in written.items())
