"""LoRA for models of transformers (`make engines`): what `lora merge` writes is what PEFT's merge computes, and PEFT
loads what `lora extract` writes without a warning; tensors may have other names in memory than in their files, heads
may be tied, tokens may be trained."""

from __future__ import annotations

import warnings
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
# Every class takes the fields that it knows.
SIZES: dict[str, Any] = {"vocab_size": 64, "image_size": 16, "patch_size": 8, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "decoder_start_token_id": 1, "max_position_embeddings": 32, "n_positions": 16}
for names, size in (
    ("hidden_size embedding_size d_model dim n_embd emb_dim word_embed_proj_dim", 32),
    ("intermediate_size d_ff dff hidden_dim d_inner ffn_dim encoder_ffn_dim decoder_ffn_dim", 48),
    ("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers", 1),
    ("num_attention_heads num_key_value_heads num_heads n_head n_heads", 4),
    ("encoder_attention_heads decoder_attention_heads", 4),
    ("d_kv head_dim num_mel_bins max_source_positions", 8),
):
    SIZES |= dict.fromkeys(names.split(), size)
MOE = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE |= {"shared_expert_intermediate_size": 24, "num_key_value_heads": 2, "decoder_sparse_step": 1}
IMAGE = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
BOTH = {"text_config": IMAGE | {"vocab_size": 64, "max_position_embeddings": 16}, "projection_dim": 16}
BOTH |= {"vision_config": IMAGE | {"image_size": 16, "patch_size": 8}}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
DETR = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 5}
DETR |= {"backbone_config": RESNET | {"out_features": ["stage2"]}}


def ramp(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


WORDS, PIXELS = {"input_ids": torch.arange(3, 11)[None]}, {"pixel_values": ramp(1, 3, 16, 16)}
DECODED = WORDS | {"decoder_input_ids": torch.arange(1, 5)[None]}
IMAGES = """ViTForImageClassification ViTModel DeiTForImageClassification BeitForImageClassification
    Dinov2ForImageClassification CLIPVisionModelWithProjection""".split()
TEXTS = """GPTNeoXForCausalLM GPT2LMHeadModel BertForSequenceClassification RobertaForTokenClassification
    LlamaForCausalLM MistralForCausalLM Gemma2ForCausalLM Qwen2ForCausalLM""".split()
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    **dict.fromkeys(IMAGES, ({"projection_dim": 16}, PIXELS)),
    **dict.fromkeys(TEXTS, ({}, WORDS)),
    **{f"{name}ForCausalLM": (MOE, WORDS) for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe")},
    **dict.fromkeys(("CLIPModel", "SiglipModel"), (BOTH, WORDS | PIXELS)),
    **dict.fromkeys(("T5ForConditionalGeneration", "BartForConditionalGeneration"), ({}, DECODED)),
    "ViTMAEModel": ({"mask_ratio": 0.0}, PIXELS),
    "ASTForAudioClassification": (
        {"max_length": 32, "num_mel_bins": 32, "patch_size": 16},
        {"input_values": ramp(1, 32, 32)},
    ),
    "WhisperForConditionalGeneration": (
        {"max_target_positions": 16},
        {"input_features": ramp(1, 8, 16), "decoder_input_ids": torch.arange(3)[None]},
    ),
    "LlavaForConditionalGeneration": (
        {
            "image_token_index": 5,
            "text_config": BOTH["text_config"] | {"model_type": "llama"},
            "vision_config": BOTH["vision_config"] | {"model_type": "clip_vision_model"},
        },
        WORDS,
    ),
    "DetrForObjectDetection": (DETR, {"pixel_values": ramp(1, 3, 32, 32)}),
}


def class_of(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def made(name: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    own = FAMILIES.get(name, ({}, {}))[0]
    sizes = {} if "text_config" in own else {k: v for k, v in SIZES.items() if "Falcon" not in name or k != "head_dim"}
    return class_of(name)(class_of(name).config_class(**sizes | own | fields)).eval()


def output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        found = model.eval()(**inputs)
    names = ("logits", "prediction_logits", "logits_per_image", "last_hidden_state", "image_embeds")
    return next(found[key] for key in names if key in found)


def reloaded(name: str, folder: Path, **options: Any) -> Any:
    found, info = class_of(name).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return found.eval()


def with_random(adapted: Any, dtype: torch.dtype | None = None) -> Any:
    """The model with other values in all that its adapter trains."""
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter, dtype=dtype) / 8
    return adapted


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_merge_as_peft_merges_them(name: str, tmp_path: Path) -> None:
    import peft

    made(name).save_pretrained(tmp_path / "base")
    base = reloaded(name, tmp_path / "base")
    experts = sorted({key.rsplit("experts.", 1)[1] for key, _ in base.named_parameters() if ".experts." in key})
    more = {"target_parameters": [f"experts.{each}" for each in experts]} if experts else {}
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", **more)
    adapted = with_random(peft.get_peft_model(base, config))
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload().eval()  # LoRA of the out_proj of a MultiheadAttention acts once it is merged
    merged.save_pretrained(tmp_path / "theirs")
    ckptool.lora_merge(tmp_path / "base", tmp_path / "adapter", f"{tmp_path / 'out'}/")
    inputs = FAMILIES[name][1]
    assert (output(reloaded(name, tmp_path / "out"), inputs) - output(merged, inputs)).abs().max() < 1e-4
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-6) for key in ours)


TIED = """BertForMaskedLM BertLMHeadModel BertForPreTraining RobertaForMaskedLM CamembertForMaskedLM ElectraForMaskedLM
AlbertForMaskedLM DistilBertForMaskedLM DebertaV2ForMaskedLM MPNetForMaskedLM
XLMWithLMHeadModel T5ForConditionalGeneration MT5ForConditionalGeneration T5EncoderModel
BartForConditionalGeneration BartForCausalLM MBartForConditionalGeneration PegasusForConditionalGeneration
BloomForCausalLM FalconForCausalLM GPTNeoXForCausalLM GPT2LMHeadModel OpenAIGPTLMHeadModel CTRLLMHeadModel
BioGptForCausalLM OPTForCausalLM LlamaForCausalLM Qwen2ForCausalLM GemmaForCausalLM
ModernBertForMaskedLM BertModel BertForSequenceClassification GPT2Model BloomModel BartModel BertGenerationDecoder
EsmForMaskedLM ConvBertForMaskedLM""".split()
# PEFT takes their `down_proj` for one of experts, or refuses their `out_proj`.
OTHERS = [name for name in FAMILIES if name not in TIED] + ["Glm4MoeForCausalLM", "MambaForCausalLM"]


@pytest.mark.parametrize(("name", "tied"), [*((name, True) for name in TIED), *((name, False) for name in OTHERS)])
def test_what_is_extracted_gives_the_tuned_model(name: str, tied: bool, tmp_path: Path) -> None:
    """By PEFT, and merged by us; from safetensors, and from files that have tied tensors under both names."""
    import peft

    cls, fields = class_of(name), {"tie_word_embeddings": True} if tied else {}
    base, tuned = made(name, **fields), made(name, **fields)
    inner = {key.rpartition(".")[0] for key, _ in tuned.named_modules()}  # PEFT saves modules without others in them
    ties = set(tuned.get_expanded_tied_weights_keys(all_submodels=True).values())
    torch.manual_seed(2)
    for key, parameter in tuned.named_parameters():
        if "Whisper" in name and "conv" in key:
            continue  # it asks its own convolutions for their stride, which those of PEFT do not have
        if key.rpartition(".")[0] not in inner or (tied and key in ties):
            parameter.data += torch.randn_like(parameter) * 0.05
    inputs = FAMILIES[name][1] if name in FAMILIES else DECODED if base.config.is_encoder_decoder else WORDS
    expected = output(tuned, inputs)
    close = 2e-4 * expected.abs().max().clamp(1)
    assert (output(base, inputs) - expected).abs().max() > 1e-3
    for kind in ("safetensors", "bin") if tied else ("safetensors",):
        for model, folder in ((base, tmp_path / f"base-{kind}"), (tuned, tmp_path / f"tuned-{kind}")):
            model.save_pretrained(folder)
            if kind == "bin":
                (folder / "model.safetensors").unlink()
                torch.save(model.state_dict(), folder / "pytorch_model.bin")
        ckptool.lora_extract(tmp_path / f"tuned-{kind}", tmp_path / f"base-{kind}", tmp_path / kind, rank=32)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(missing|unexpected|Unexpected keyword|no tied).*")
            loaded = cls.from_pretrained(tmp_path / "base-safetensors")
            adapted = peft.PeftModel.from_pretrained(loaded, str(tmp_path / kind))
        assert (output(adapted.base_model.model, inputs) - expected).abs().max() < close
        merged = f"{tmp_path / ('merged-' + kind)}/"
        ckptool.lora_merge(tmp_path / "base-safetensors", tmp_path / kind, merged)
        assert (output(reloaded(name, Path(merged)), inputs) - expected).abs().max() < close, "merged"


@pytest.mark.parametrize("experts", [["up", "down", "by"], ["by", "down", "up"], ["down", "up"]])
def test_parameters_are_those_of_peft_in_every_order(experts: list[str], tmp_path: Path) -> None:
    """Two of one shape, in the order of the module, whatever that of the list is."""
    import peft

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in experts:
                shape = (3, 6, 4) if name != "down" else (3, 4, 6)
                self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))

    for number, names in enumerate(permutations(experts)):
        net = torch.nn.ModuleDict({"experts": Experts()})
        torch.save(net.state_dict(), tmp_path / f"{number}.pt")
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=[f"experts.{name}" for name in names])
        adapted = with_random(peft.get_peft_model(net, config))
        adapted.save_pretrained(tmp_path / f"a{number}")
        ckptool.lora_merge(tmp_path / f"{number}.pt", tmp_path / f"a{number}", tmp_path / f"out{number}.pt")
        ours, theirs = torch.load(tmp_path / f"out{number}.pt"), adapted.merge_and_unload().state_dict()
        assert all(torch.allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-5) for key in theirs), names


@pytest.mark.parametrize("name", ["emb", "tok", "tok_emb", "chars", "E"])
def test_tables_of_embeddings_are_read_by_peft(name: str, tmp_path: Path) -> None:
    import peft

    nets = [torch.nn.Sequential() for _ in range(2)]
    for number, net in enumerate(nets):
        net.add_module(name, torch.nn.Embedding(11, 6))
        net.add_module("up_proj", torch.nn.Linear(6, 5, bias=False))
        net.add_module("head", torch.nn.Linear(5, 11))
        torch.save(net.state_dict(), tmp_path / f"{number}.pt")
    ckptool.lora_extract(tmp_path / "1.pt", tmp_path / "0.pt", tmp_path / "a", rank=5)
    adapted, x = peft.PeftModel.from_pretrained(nets[0], str(tmp_path / "a")).eval(), torch.arange(11)
    assert (adapted(x) - nets[1](x)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["ViTForImageClassification", "MixtralForCausalLM", "LlavaForConditionalGeneration"])
def test_a_model_is_loaded_from_its_files(name: str, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path / "base")
    base, blank = reloaded(name, tmp_path / "base"), made(name)
    for parameter in blank.parameters():
        parameter.data.zero_()
    ckptool.load_into(blank, tmp_path / "base", strict=True)
    assert all(torch.equal(blank.state_dict()[key], value) for key, value in base.state_dict().items())


TABLES = {  # an input embedding, and a matrix of a layer
    "LlamaForCausalLM": ("embed_tokens", "q_proj"),
    "GPT2LMHeadModel": ("wte", "c_attn"),
    "BertForMaskedLM": ("word_embeddings", "query"),
    "T5ForConditionalGeneration": ("shared", "q"),
    "BloomForCausalLM": ("word_embeddings", "dense_h_to_4h"),
    "GPTNeoXForCausalLM": ("embed_in", "dense_h_to_4h"),
    "BartForConditionalGeneration": ("shared", "q_proj"),
}
ROWS, TYPES = (
    ([3], [7, 49, 0], list(range(50))),
    ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2),
)


@pytest.mark.parametrize("name", TABLES)
def test_trained_tokens_are_merged_as_peft_merges_them(name: str, tmp_path: Path) -> None:
    import peft

    cls, (table, layer) = class_of(name), TABLES[name]
    cases = list(product((True, False), ROWS, TYPES, ("list", "table", "head", "alone")))
    for number, case in enumerate(cases[::5]):  # of 72, which share no factor with it
        tied, rows, dtypes, way = case
        folder = tmp_path / str(number)
        base = made(name, tie_word_embeddings=tied).to(dtypes[0])
        head = next(key for key, module in base.named_modules() if module is base.get_output_embeddings())
        base.save_pretrained(folder / "base")
        config: Any = peft.LoraConfig(r=2, target_modules=[layer], trainable_token_indices={table: rows})
        if way == "list":
            config.trainable_token_indices = rows
        elif way == "head" and base.get_output_embeddings().weight is not base.get_input_embeddings().weight:
            config.trainable_token_indices = {table: rows, head: [5, 4]}
        elif way == "alone":
            config = peft.TrainableTokensConfig(target_modules=[table], token_indices=rows)
        adapted = peft.get_peft_model(cls.from_pretrained(folder / "base", dtype="auto"), config)
        with_random(adapted, dtypes[1]).save_pretrained(folder / "adapter")
        theirs = adapted.merge_and_unload().state_dict()
        ckptool.lora_merge(folder / "base", folder / "adapter", f"{folder / 'out'}/")
        ours = reloaded(name, folder / "out", dtype="auto").state_dict()
        assert ours.keys() == theirs.keys(), case
        assert not [key for key in ours if ours[key].dtype != theirs[key].dtype], case
        assert not [key for key in ours if not torch.equal(ours[key], theirs[key])], case
