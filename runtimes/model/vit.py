"""timm's VisionTransformer as layers: embedding, blocks, head.

Embedding and Head keep timm's attribute names, so that their weights keep the original names, and
repeat what VisionTransformer.forward_features and forward_head do around the blocks.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from timm.layers.pool1d import global_pool_nlc
from timm.layers.weight_init import trunc_normal_
from timm.models.vision_transformer import VisionTransformer, get_init_weights_vit
from torch import Tensor, nn

from runtimes.model.layer import Layer, innermost_first

__all__ = ["vision_transformer_layers"]


class Embedding(nn.Module):
    """(n, C, H, W) images → (n, tokens, width)."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.patch_embed = model.patch_embed
        self.cls_token: nn.Parameter | None = model.cls_token
        self.reg_token: nn.Parameter | None = model.reg_token
        self.pos_embed: nn.Parameter | None = model.pos_embed
        self.pos_drop = model.pos_drop
        self.norm_pre = model.norm_pre
        self.no_embed_class = model.no_embed_class

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.patch_embed(images)
        prefix = [
            token.expand(len(x), -1, -1)
            for token in (self.cls_token, self.reg_token)
            if token is not None
        ]
        if self.pos_embed is None:
            # timm applies pos_drop only where there is a position embedding.
            x = torch.cat([*prefix, x], dim=1)
        elif self.no_embed_class:
            x = self.pos_drop(torch.cat([*prefix, x + self.pos_embed], dim=1))
        else:
            x = self.pos_drop(torch.cat([*prefix, x], dim=1) + self.pos_embed)
        x = self.norm_pre(x)
        return x


class Head(nn.Module):
    """(n, tokens, width) → (n, classes)."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.norm = model.norm
        self.attn_pool: nn.Module | None = model.attn_pool
        self.fc_norm = model.fc_norm
        self.head_drop = model.head_drop
        self.head = model.head
        self.pool = partial(
            global_pool_nlc,
            pool_type=model.global_pool,
            num_prefix_tokens=model.num_prefix_tokens,
            reduce_include_prefix=model.pool_include_prefix,
        )
        self.prefix = 0 if model.pool_include_prefix else model.num_prefix_tokens

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        pooled = self.pool(x) if self.attn_pool is None else self.attn_pool(x[:, self.prefix :])
        logits: Tensor = self.head(self.head_drop(self.fc_norm(pooled)))
        return logits


class _Initialisation:
    """timm's initialisation of a VisionTransformer, of one layer at a time.

    The modules' own values, then the rules of VisionTransformer.init_weights for the model's
    ``weight_init`` and ``fix_init``, which go by the modules' names in the whole model.
    """

    def __init__(self, model: VisionTransformer, layer: str) -> None:
        mode: str = model.weight_init_mode
        head_bias = -math.log(model.num_classes) if "nlhb" in mode else 0.0
        self.rule = get_init_weights_vit(mode, head_bias, needs_reset=True)
        self.layer = layer
        self.depth = int(layer.removeprefix("blocks.")) if layer.startswith("blocks.") else None
        self.fix_init: bool = model.fix_init

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, Embedding):
            if module.pos_embed is not None:
                trunc_normal_(module.pos_embed, std=0.02)
            for token in (module.cls_token, module.reg_token):
                if token is not None:
                    nn.init.normal_(token, std=1e-6)
        for name, part in innermost_first(module, self.layer if self.depth is not None else ""):
            self.rule(part, name)
        if self.fix_init and self.depth is not None:
            for weight in ("attn.proj.weight", "mlp.fc2.weight"):
                module.get_parameter(weight).div_(math.sqrt(2.0 * (self.depth + 1)))


def vision_transformer_layers(model: VisionTransformer) -> tuple[Layer, ...]:
    """Layers "embed", "blocks.0" …, "head" of a model on the meta device, whose modules they use.

    Raises ValueError for what a fixed stack of layers cannot do.
    """
    if model.dynamic_img_size:
        raise ValueError(
            "a VisionTransformer with dynamic_img_size has no fixed shapes to send between "
            "stages: build it with dynamic_img_size=False"
        )
    if model.grad_checkpointing:
        raise ValueError(
            "the VisionTransformer has gradient checkpointing on: switch it off and plan stages "
            "with recompute instead"
        )
    pieces: list[tuple[str, str, nn.Module]] = [("embed", "", Embedding(model))]
    pieces += [(f"blocks.{i}", f"blocks.{i}.", block) for i, block in enumerate(model.blocks)]
    pieces.append(("head", "", Head(model)))
    layers = tuple(
        Layer(name, prefix, module, _Initialisation(model, name)) for name, prefix, module in pieces
    )
    if not isinstance(model.patch_drop, nn.Identity):
        raise ValueError(
            "patch_drop is a PatchDropout, whose randomness cannot be keyed by sample: build the "
            "model with patch_drop_rate=0"
        )
    owned = {name for layer in layers for name in layer.module.state_dict(prefix=layer.prefix)}
    unknown = sorted(set(model.state_dict()) - owned)
    if unknown:
        raise ValueError(
            f"the VisionTransformer has weights that are none of timm's: {', '.join(unknown)}"
        )
    return layers
