"""Names and shapes of models as libraries write them, without the libraries: timm, torchvision, Hugging Face, DINO,
Lightning."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]
CHUNKS = 4


def linear(name: str, out: int, into: int) -> Shapes:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def norm(name: str, size: int, leaves: tuple[str, str] = ("weight", "bias")) -> Shapes:
    return {f"{name}.{leaf}": (size,) for leaf in leaves}


def batch_norm(name: str, size: int) -> Shapes:
    return {**norm(name, size), **norm(name, size, ("running_mean", "running_var")), f"{name}.num_batches_tracked": ()}


def conv(name: str, out: int, into: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (out, into, kernel, kernel)}


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}{key}": shape for key, shape in shapes.items()}


def timm_vit(depth: int = 12, width: int = 768, classes: int = 1000, chunks: int = 0) -> Shapes:
    """timm's VisionTransformer; with chunks, its blocks as DINOv2 nests them: `blocks.{chunk}.{block}`."""
    shapes: Shapes = {"cls_token": (1, 1, width), "pos_embed": (1, 197, width)}
    shapes |= conv("patch_embed.proj", width, 3, 16) | {"patch_embed.proj.bias": (width,)}
    for number in range(depth):
        block = f"blocks.{number * chunks // depth}.{number}" if chunks else f"blocks.{number}"
        shapes |= norm(f"{block}.norm1", width) | linear(f"{block}.attn.qkv", 3 * width, width)
        shapes |= linear(f"{block}.attn.proj", width, width) | norm(f"{block}.norm2", width)
        shapes |= linear(f"{block}.mlp.fc1", 4 * width, width) | linear(f"{block}.mlp.fc2", width, 4 * width)
    return shapes | norm("norm", width) | linear("head", classes, width)


TORCHVISION = {
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    "patch_embed.proj": "conv_proj",
    "norm": "encoder.ln",
    "head": "heads.head",
}
TORCHVISION_BLOCK = {
    "norm1.weight": "ln_1.weight",
    "norm1.bias": "ln_1.bias",
    "attn.qkv.weight": "self_attention.in_proj_weight",
    "attn.qkv.bias": "self_attention.in_proj_bias",
    "attn.proj.weight": "self_attention.out_proj.weight",
    "attn.proj.bias": "self_attention.out_proj.bias",
    "norm2.weight": "ln_2.weight",
    "norm2.bias": "ln_2.bias",
    "mlp.fc1.weight": "mlp.0.weight",
    "mlp.fc1.bias": "mlp.0.bias",
    "mlp.fc2.weight": "mlp.3.weight",
    "mlp.fc2.bias": "mlp.3.bias",
}


def torchvision_name(key: str) -> str:
    """What torchvision's VisionTransformer calls a tensor of timm's (written down by hand: what rules have to find)."""
    if key.startswith("blocks."):
        *_, number, module, leaf = key.split(".") if ".norm" in key else _joined(key)
        return f"encoder.layers.encoder_layer_{number}.{TORCHVISION_BLOCK[f'{module}.{leaf}']}"
    module = next(name for name in TORCHVISION if key == name or key.startswith(f"{name}."))
    return TORCHVISION[module] + key.removeprefix(module)


def _joined(key: str) -> list[str]:
    *blocks, outer, inner, leaf = key.split(".")
    return [*blocks, f"{outer}.{inner}", leaf]


def torchvision_vit(depth: int = 12, width: int = 768, classes: int = 1000, old: bool = False) -> Shapes:
    """torchvision's VisionTransformer, in its own order; old: with the names that its MLP had before version 2 of the
    block."""
    shapes: Shapes = {"class_token": (1, 1, width)}
    shapes |= conv("conv_proj", width, 3, 16) | {"conv_proj.bias": (width,), "encoder.pos_embedding": (1, 197, width)}
    first, second = ("linear_1", "linear_2") if old else ("0", "3")
    for number in range(depth):
        block = f"encoder.layers.encoder_layer_{number}"
        shapes |= norm(f"{block}.ln_1", width)
        shapes |= {f"{block}.self_attention.in_proj_weight": (3 * width, width)}
        shapes |= {f"{block}.self_attention.in_proj_bias": (3 * width,)}
        shapes |= linear(f"{block}.self_attention.out_proj", width, width) | norm(f"{block}.ln_2", width)
        shapes |= linear(f"{block}.mlp.{first}", 4 * width, width) | linear(f"{block}.mlp.{second}", width, 4 * width)
    return shapes | norm("encoder.ln", width) | linear("heads.head", classes, width)


def hugging_face_vit(depth: int = 12, width: int = 768, classes: int = 1000) -> Shapes:
    """transformers' ViTForImageClassification: queries, keys and values apart."""
    shapes: Shapes = {"vit.embeddings.cls_token": (1, 1, width), "vit.embeddings.position_embeddings": (1, 197, width)}
    patches = "vit.embeddings.patch_embeddings.projection"
    shapes |= conv(patches, width, 3, 16) | {f"{patches}.bias": (width,)}
    for number in range(depth):
        block = f"vit.encoder.layer.{number}"
        for role in ("query", "key", "value"):
            shapes |= linear(f"{block}.attention.attention.{role}", width, width)
        shapes |= linear(f"{block}.attention.output.dense", width, width)
        shapes |= linear(f"{block}.intermediate.dense", 4 * width, width)
        shapes |= linear(f"{block}.output.dense", width, 4 * width)
        shapes |= norm(f"{block}.layernorm_before", width) | norm(f"{block}.layernorm_after", width)
    return shapes | norm("vit.layernorm", width) | linear("classifier", classes, width)


def bert(depth: int = 12, width: int = 768, prefix: str = "", old: bool = False, pooler: bool = True) -> Shapes:
    """transformers' BertModel; old: with gamma and beta, as converted from Google's files."""
    leaves = ("gamma", "beta") if old else ("weight", "bias")
    sizes = {"word_embeddings": 30522, "position_embeddings": 512, "token_type_embeddings": 2}
    shapes: Shapes = {f"embeddings.{name}.weight": (size, width) for name, size in sizes.items()}
    shapes |= norm("embeddings.LayerNorm", width, leaves)
    for number in range(depth):
        shapes |= bert_attention(f"encoder.layer.{number}.attention", width, leaves)
        block = f"encoder.layer.{number}"
        shapes |= linear(f"{block}.intermediate.dense", 4 * width, width)
        shapes |= linear(f"{block}.output.dense", width, 4 * width) | norm(f"{block}.output.LayerNorm", width, leaves)
    return under(prefix, shapes | (linear("pooler.dense", width, width) if pooler else {}))


def bert_attention(name: str, width: int, leaves: tuple[str, str] = ("weight", "bias")) -> Shapes:
    shapes: Shapes = {}
    for role in ("query", "key", "value"):
        shapes |= linear(f"{name}.self.{role}", width, width)
    return shapes | linear(f"{name}.output.dense", width, width) | norm(f"{name}.output.LayerNorm", width, leaves)


def masked_language_head(width: int = 768) -> Shapes:
    """What BertForMaskedLM has beside its BertModel."""
    head = "cls.predictions"
    shapes = {f"{head}.bias": (30522,), f"{head}.decoder.weight": (30522, width), f"{head}.decoder.bias": (30522,)}
    return shapes | linear(f"{head}.transform.dense", width, width) | norm(f"{head}.transform.LayerNorm", width)


def resnet50(
    stage: str = "layer{}",
    first: int = 1,
    shortcut: tuple[str, str] = ("downsample.0", "downsample.1"),
    stem: tuple[str, str] = ("conv1", "bn1"),
    head: str = "fc",
    classes: int = 1000,
) -> Shapes:
    """torchvision's ResNet-50, or one that calls its stages, shortcuts, stem and head otherwise."""
    shapes = conv(stem[0], 64, 3, 7) | batch_norm(stem[1], 64)
    into = 64
    for index, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << index
        for number in range(blocks):
            block = f"{stage.format(index + first)}.{number}"
            for place, (size, kernel) in enumerate(((width, 1), (width, 3), (4 * width, 1)), 1):
                before = into if place == 1 else width
                shapes |= conv(f"{block}.conv{place}", size, before, kernel) | batch_norm(f"{block}.bn{place}", size)
            if number == 0:
                shapes |= conv(f"{block}.{shortcut[0]}", 4 * width, into, 1)
                shapes |= batch_norm(f"{block}.{shortcut[1]}", 4 * width)
            into = 4 * width
    return shapes | linear(head, classes, into)


def weight_normed(layers: int = 5, new: bool = False) -> Shapes:
    """Convolutions with weight norm, as torch stored them before and since torch.nn.utils.parametrizations."""
    names = (
        ("parametrizations.weight.original0", "parametrizations.weight.original1") if new else ("weight_g", "weight_v")
    )
    shapes: Shapes = {}
    for number in range(layers):
        shapes |= {
            f"convs.{number}.bias": (8,),
            f"convs.{number}.{names[0]}": (8, 1, 1),
            f"convs.{number}.{names[1]}": (8, 8, 3),
        }
    return shapes


def spectrally_normed(new: bool = False) -> Shapes:
    names = ("parametrizations.weight.original", "parametrizations.weight.0._u", "parametrizations.weight.0._v")
    old = ("weight_orig", "weight_u", "weight_v")
    sizes = ((8, 4, 3, 3), (8,), (36,))
    return {f"main.{n}.{name}": size for n in (0, 2) for name, size in zip(names if new else old, sizes, strict=True)}
