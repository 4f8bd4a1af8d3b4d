"""The weight map once more, in plain torch on whole tensors: what the tests hold the engine and the model against.

It shares no code with mm_models.weights: Hugging Face's state dict -> Megatron tensors -> the shard of one rank.
"""

from __future__ import annotations

import re

import torch

from mm_models.config.model import ModelConfig
from mm_models.layout import Coords, ParallelLayout


def model_config(config, **extra) -> ModelConfig:
    """model.json of a Hugging Face configuration, written down by hand. `extra`: `section__key=value`."""
    family, text, vision = config.model_type, config.text_config, config.vision_config
    tower, projector = _glm_vision(vision) if vision.model_type.startswith("glm") else _qwen_vision(vision)
    decoder = _decoder(text) | {"glm4v_moe": _glm_moe, "glm4v": _glm_dense}.get(family, _qwen)(text)
    start = config.image_start_token_id if family.startswith("glm") else config.vision_start_token_id
    data = {
        "model_id": family,
        "img_context_token_id": config.image_token_id,
        "video_token_id": config.video_token_id,
        "vision_start_token_id": start,
        "image_encoder": {"vision_encoder": tower | {"freeze": False}, "vision_projector": projector},
        "text_decoder": decoder | {"untie_embeddings_and_output_weights": not config.tie_word_embeddings},
    }
    for path, value in extra.items():
        *parents, key = path.split("__")
        target = data
        for parent in parents:
            target = target[parent]
        target[key] = value
    return ModelConfig.model_validate(data)


def _glm_vision(vision) -> tuple[dict, dict]:
    tower = {
        "model_id": "glm4v_vit",
        "num_layers": vision.depth,
        "hidden_size": vision.hidden_size,
        "num_attention_heads": vision.num_heads,
        "ffn_hidden_size": vision.out_hidden_size,
        "out_hidden_size": vision.out_hidden_size,
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "rope_theta": vision.rope_parameters["rope_theta"],
        "rms_norm_eps": vision.rms_norm_eps,
    }
    projector = {
        "model_id": "GlmMLP",
        "out_hidden_size": vision.out_hidden_size,
        "intermediate_size": vision.intermediate_size,
    }
    return tower, projector


def _qwen_vision(vision) -> tuple[dict, dict]:
    new = hasattr(vision, "window_size")  # Qwen2.5-VL
    width, out = (vision.hidden_size, vision.out_hidden_size) if new else (vision.embed_dim, vision.hidden_size)
    tower = {
        "model_id": "qwen2vit",
        "num_layers": vision.depth,
        "hidden_size": width,
        "num_attention_heads": vision.num_heads,
        "ffn_hidden_size": vision.intermediate_size if new else int(width * vision.mlp_ratio),
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "rope_theta": vision.rope_parameters["rope_theta"],
        "gated_linear_unit": new,
        "activation_func": vision.hidden_act,
        "normalization": "RMSNorm" if new else "LayerNorm",
    }
    if new:
        tower |= {
            "model_id": "qwen2_5_vit",
            "window_attn_size": vision.window_size,
            "fullatt_block_indexes": vision.fullatt_block_indexes,
            "tokens_per_second": vision.tokens_per_second,
        }
    projector = {
        "model_id": "lnmlp",
        "input_size": width,
        "ffn_hidden_size": width * vision.spatial_merge_size**2,
        "hidden_size": out,
        "normalization": tower["normalization"],
    }
    return tower, projector


def _decoder(text) -> dict:
    rope = text.rope_parameters
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": text.hidden_size // text.num_attention_heads,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "mrope_section": rope["mrope_section"],
        "add_qkv_bias": True,
    }


def _qwen(text) -> dict:
    model_id = "qwen2lm" if text.model_type == "qwen2_vl_text" else "qwen2_5_lm"
    return {"model_id": model_id, "layernorm_epsilon": text.rms_norm_eps}


def _glm_dense(text) -> dict:
    return {"model_id": "glm4v_lm", "rms_norm_eps": text.rms_norm_eps}


def _glm_moe(text) -> dict:
    return {
        "model_id": "glm4v_moe_lm",
        "kv_channels": text.head_dim,
        "rms_norm_eps": text.rms_norm_eps,
        "add_qkv_bias": text.attention_bias,
        "num_moe_experts": text.n_routed_experts,
        "first_k_dense_replace": text.first_k_dense_replace,
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "n_shared_experts": text.n_shared_experts,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_router_num_groups": text.n_group,
        "moe_router_group_topk": text.topk_group,
        "moe_router_topk_scaling_factor": text.routed_scaling_factor,
        "norm_topk_prob": text.norm_topk_prob,
    }


RENAMES = (
    (r"^model\.visual\.blocks\.(\d+)\.norm1\.", r"image_encoder.encoder.blocks.layers.\1.input_layernorm."),
    (r"^model\.visual\.blocks\.(\d+)\.norm2\.", r"image_encoder.encoder.blocks.layers.\1.pre_mlp_layernorm."),
    (
        r"^model\.visual\.blocks\.(\d+)\.attn\.proj\.",
        r"image_encoder.encoder.blocks.layers.\1.self_attention.linear_proj.",
    ),
    (r"^model\.visual\.blocks\.(\d+)\.mlp\.down_proj\.", r"image_encoder.encoder.blocks.layers.\1.mlp.linear_fc2."),
    (r"^model\.visual\.blocks\.(\d+)\.mlp\.fc([12])\.", r"image_encoder.encoder.blocks.layers.\1.mlp.linear_fc\2."),
    (r"^model\.visual\.merger\.ln_q\.", "image_encoder.projector.layernorm."),
    (r"^model\.visual\.merger\.mlp\.0\.", "image_encoder.projector.encoder.linear_fc1."),
    (r"^model\.visual\.merger\.mlp\.2\.", "image_encoder.projector.encoder.linear_fc2."),
    (r"^model\.visual\.post_layernorm\.", "image_encoder.encoder.blocks.final_layernorm."),
    (r"^model\.visual\.merger\.", "image_encoder.projector."),
    (r"^model\.visual\.", "image_encoder.encoder."),
    (r"^model\.language_model\.embed_tokens\.", "text_decoder.embedding.word_embeddings."),
    (r"^model\.language_model\.norm\.", "text_decoder.decoder.final_layernorm."),
    (r"^lm_head\.", "text_decoder.output_layer."),
    (r"^model\.language_model\.", "text_decoder.decoder."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.self_attn\.o_proj\.", ".self_attention.linear_proj."),
    (r"\.mlp\.gate\.", ".mlp.router."),
    (r"(text_decoder.*)\.mlp\.gate_up_proj\.", r"\1.mlp.linear_fc1."),
    (r"(text_decoder.*)\.mlp\.down_proj\.", r"\1.mlp.linear_fc2."),
    (r"\.mlp\.shared_experts\.down_proj\.", ".mlp.shared_experts.linear_fc2."),
)


def megatron_tensors(state: dict[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Whole Megatron tensors from a Hugging Face in-memory state dict (stacked experts)."""
    state, out = dict(state), {}
    for name in [name for name in state if ".q_proj." in name]:
        q, k, v = (state.pop(name.replace("q_proj", f"{x}_proj")).chunk(model.text.num_query_groups) for x in "qkv")
        fused = torch.cat([part for group in zip(q, k, v) for part in group])
        layer, kind = re.search(r"layers\.(\d+)\..*\.(weight|bias)", name).groups()
        out[f"text_decoder.decoder.layers.{layer}.self_attention.linear_qkv.{kind}"] = fused
    if model.vision is not None and model.vision.model_id == "glm4v_vit":
        for name in [name for name in state if ".visual.blocks." in name and ".attn." in name]:
            layer, part = re.search(r"blocks\.(\d+)\.attn\.(\w+)\.weight", name).groups()
            out[f"image_encoder.encoder.blocks.layers.{layer}.self_attention.{part}.weight"] = state.pop(name)
    for name in [name for name in state if ".attn.qkv." in name]:
        q, k, v = (part.chunk(model.vision.num_attention_heads) for part in state.pop(name).chunk(3))
        layer, kind = re.search(r"blocks\.(\d+)\..*\.(weight|bias)", name).groups()
        fused = torch.cat([part for head in zip(q, k, v) for part in head])
        out[f"image_encoder.encoder.blocks.layers.{layer}.self_attention.linear_qkv.{kind}"] = fused
    for name in [name for name in state if ".gate_proj." in name and ".merger." not in name]:
        gate, up = state.pop(name), state.pop(name.replace("gate_proj", "up_proj"))
        out[_rename(name.replace("gate_proj", "linear_fc1"))] = torch.cat([gate, up])
    for name, tensor in state.items():
        out[_rename(name)] = tensor
    return out


def _rename(name: str) -> str:
    name = re.sub(
        r"^model\.visual\.blocks\.(\d+)\.mlp\.linear_fc1",
        r"image_encoder.encoder.blocks.layers.\1.mlp.linear_fc1",
        name,
    )
    for pattern, target in RENAMES:
        name = re.sub(pattern, target, name)
    return name


def shard(name: str, tensor: torch.Tensor, coords: Coords, layout: ParallelLayout, model: ModelConfig) -> torch.Tensor:
    """The part of a whole Megatron tensor that a rank at `coords` holds."""

    def halves(x, rank, size, dim):
        return torch.cat([half.chunk(size, dim)[rank] for half in x.chunk(2, dim)], dim)

    if name.endswith("self_attention.qkv.weight"):
        return torch.cat([third.chunk(layout.tp)[coords.tp] for third in tensor.chunk(3)])
    if ".experts.gate_up_proj" in name:
        return halves(tensor.chunk(layout.ep)[coords.ep], coords.etp, layout.etp, 1)
    if ".experts.down_proj" in name:
        return tensor.chunk(layout.ep)[coords.ep].chunk(layout.etp, 2)[coords.etp]
    plain = name.startswith("image_encoder.") and not (".blocks." in name and model.vision.gated_linear_unit)
    if ".linear_fc1." in name and not plain:
        return halves(tensor, coords.tp, layout.tp, 0)
    if any(part in name for part in (".linear_fc1.", ".linear_qkv.", "word_embeddings.", "output_layer.")):
        return tensor.chunk(layout.tp)[coords.tp]
    if name.endswith((".linear_proj.weight", ".linear_fc2.weight", "self_attention.proj.weight")):
        return tensor.chunk(layout.tp, 1)[coords.tp]
    return tensor


def fill(
    tensors: dict[str, torch.Tensor],
    whole: dict[str, torch.Tensor],
    coords: Coords,
    layout: ParallelLayout,
    model: ModelConfig,
) -> None:
    """Write each live tensor from the whole one; shapes must be equal."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            source = name
            if name.endswith("output_layer.weight") and name not in whole:
                source = "text_decoder.embedding.word_embeddings.weight"
            part = shard(source, whole[source], coords, layout, model)
            assert part.shape == tensor.shape, (name, part.shape, tensor.shape)
            tensor.copy_(part)
