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
