"""The schema of model.json: which component stands in each part, by `model_id`, and its sizes.

    {"model_id": ..., "image_encoder": {"vision_encoder": {...}, "vision_projector": {...}} | null, "text_decoder": {...} | null}

A part that is null or absent is not built. Sizes follow the field's names (`num_query_groups` are key-value heads,
`kv_channels` is the head dimension, `ffn_hidden_size` the MLP's inner width). Everything is checked when the file is read:
unknown keys, types, sums of `pipeline_num_layers`, and, in `check_layout`, what must divide by a parallel degree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mm_models.config.strict import StrictModel, load_json, validate
from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout, StageSplit, check_divides

Size = Annotated[int, Field(gt=0)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Strict all the same: JSON may write 10000 for 10000.0, but neither "1e4" nor true."""
LayerCounts = list[int] | list[list[int]] | None
Freeze = bool | list[str] | None

FREEZE_DEFAULTS = {"vision_encoder": True, "vision_projector": False, "text_decoder": False}
"""What `freeze` means when it is absent, as in the field."""


class VisionEncoderConfig(StrictModel):
    """A vision transformer: patches in, `out_hidden_size` features per merged token out."""

    model_id: str
    num_layers: Size
    pipeline_num_layers: LayerCounts = None
    freeze: Freeze = None
    hidden_size: Size
    num_attention_heads: Size
    ffn_hidden_size: Size
    out_hidden_size: Size
    image_size: Size
    patch_size: Size = 14
    temporal_patch_size: Size = 2
    spatial_merge_size: Size = 2
    in_channels: Size = 3
    attention_bias: Literal[False] = False
    add_bias_linear: Literal[False] = False
    gated_linear_unit: Literal[True] = True
    activation_func: Literal["silu"] = "silu"
    normalization: Literal["RMSNorm"] = "RMSNorm"
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 10000.0
    init_method_std: Number = 0.02

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_features(self) -> int:
        """Width of one row of `pixel_values`."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @model_validator(mode="after")
    def _check(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide by num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 4:
            raise ValueError(f"head dimension {self.head_dim} must be a multiple of 4 for the 2-D rotary embedding")
        return self


class VisionProjectorConfig(StrictModel):
    """The merger between vision tower and decoder: `out_hidden_size` features in and out."""

    model_id: str
    freeze: Freeze = None
    out_hidden_size: Size
    intermediate_size: Size
    hidden_act: Literal["silu"] = "silu"
    layernorm_epsilon: Number = 1e-5
    init_method_std: Number = 0.02


class TextDecoderConfig(StrictModel):
    """A decoder. `num_moe_experts` null makes every layer dense; else the first `first_k_dense_replace` layers are."""

    model_id: str
    num_layers: Size
    pipeline_num_layers: LayerCounts = None
    freeze: Freeze = None
    hidden_size: Size
    ffn_hidden_size: Size
    num_attention_heads: Size
    num_query_groups: Size
    kv_channels: Size
    vocab_size: Size
    max_position_embeddings: Size
    rope_theta: Number
    partial_rotary_factor: Number = 1.0
    mrope_section: list[int]
    position_embedding_type: Literal["mrope"] = "mrope"
    normalization: Literal["RMSNorm"] = "RMSNorm"
    rms_norm_eps: Number
    activation_func: Literal["silu"] = "silu"
    gated_linear_unit: Literal[True] = True
    add_bias_linear: Literal[False] = False
    add_qkv_bias: bool
    untie_embeddings_and_output_weights: bool
    num_moe_experts: Size | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 0
    moe_ffn_hidden_size: Size | None = None
    n_shared_experts: Size | None = None
    moe_router_topk: Size | None = None
    moe_router_num_groups: Size = 1
    moe_router_group_topk: Size = 1
    moe_router_topk_scaling_factor: Number = 1.0
    norm_topk_prob: bool = True
    init_method_std: Number = 0.02

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head are rotated."""
        return int(self.kv_channels * self.partial_rotary_factor)

    @property
    def shared_ffn_hidden_size(self) -> int:
        return self.moe_ffn_hidden_size * self.n_shared_experts

    def is_moe(self, layer: int) -> bool:
        """Whether global layer `layer` is a mixture-of-experts layer."""
        return self.num_moe_experts is not None and layer >= self.first_k_dense_replace

    @model_validator(mode="after")
    def _check(self):
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide by num_query_groups {self.num_query_groups}"
            )
        if 2 * sum(self.mrope_section) != self.rotary_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} sums to {sum(self.mrope_section)}, expected half the rotary dimension, "
                f"kv_channels {self.kv_channels} x partial_rotary_factor {self.partial_rotary_factor} / 2 = {self.rotary_dim / 2:g}"
            )
        moe = ("moe_ffn_hidden_size", "n_shared_experts", "moe_router_topk")
        if self.num_moe_experts is None:
            given = [name for name in moe if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{', '.join(given)} given without num_moe_experts")
            return self
        missing = [name for name in moe if getattr(self, name) is None]
        if missing:
            raise ValueError(f"num_moe_experts {self.num_moe_experts} needs {', '.join(missing)}")
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(f"moe_router_topk {self.moe_router_topk} exceeds num_moe_experts {self.num_moe_experts}")
        if self.num_moe_experts % self.moe_router_num_groups or self.moe_router_group_topk > self.moe_router_num_groups:
            raise ValueError(
                f"moe_router_num_groups {self.moe_router_num_groups} must divide num_moe_experts {self.num_moe_experts} "
                f"and be at least moe_router_group_topk {self.moe_router_group_topk}"
            )
        if self.first_k_dense_replace >= self.num_layers:
            raise ValueError(
                f"first_k_dense_replace {self.first_k_dense_replace} leaves no MoE layer of {self.num_layers}; drop num_moe_experts"
            )
        return self


class ImageEncoderConfig(StrictModel):
    vision_encoder: VisionEncoderConfig
    vision_projector: VisionProjectorConfig

    @model_validator(mode="after")
    def _check(self):
        if self.vision_encoder.out_hidden_size != self.vision_projector.out_hidden_size:
            raise ValueError(
                f"out_hidden_size: vision_encoder {self.vision_encoder.out_hidden_size}, "
                f"vision_projector {self.vision_projector.out_hidden_size}"
            )
        return self


class LossConfig(StrictModel):
    """`default`: mean over non-empty micro-batches of (sum of CE / labelled tokens).
    `per_token_loss`: sum of CE of the step / its labelled tokens."""

    loss_type: Literal["default", "per_token_loss"] = "default"


class ModelConfig(StrictModel):
    """model.json as a whole."""

    model_id: str | None = None
    img_context_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    image_encoder: ImageEncoderConfig | None = None
    text_decoder: TextDecoderConfig | None = None
    text_encoder: None = None
    video_encoder: None = None
    loss_cfg: LossConfig = LossConfig()

    @model_validator(mode="after")
    def _check(self):
        if self.image_encoder is None and self.text_decoder is None:
            raise ValueError("image_encoder and text_decoder are both null: nothing to build")
        if self.image_encoder and self.text_decoder:
            if self.img_context_token_id is None:
                raise ValueError("img_context_token_id is needed to place image features among text tokens")
            out, hidden = self.image_encoder.vision_projector.out_hidden_size, self.text_decoder.hidden_size
            if out != hidden:
                raise ValueError(
                    f"vision_projector.out_hidden_size {out} differs from text_decoder.hidden_size {hidden}"
                )
        return self

    @property
    def vision(self) -> VisionEncoderConfig | None:
        return self.image_encoder.vision_encoder if self.image_encoder else None

    @property
    def projector(self) -> VisionProjectorConfig | None:
        return self.image_encoder.vision_projector if self.image_encoder else None

    @property
    def text(self) -> TextDecoderConfig | None:
        return self.text_decoder

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one weight."""
        return self.text is not None and not self.text.untie_embeddings_and_output_weights

    def split(self, layout: ParallelLayout, *, vision_layers: object = None, text_layers: object = None) -> ModelSplit:
        """Layers over stages: from the arguments, else from `pipeline_num_layers`, else the whole ViT first, text layers balanced."""
        pp, vpp = layout.pp, layout.vpp
        vision = text = None
        if self.vision:
            counts, what = _choose(
                vision_layers, self.vision.pipeline_num_layers, "vision_encoder.pipeline_num_layers", "vit_pp_layers"
            )
            number = self.vision.num_layers
            if counts is None:
                vision = StageSplit.first_stage(number, pp=pp, vpp=vpp)
            else:
                vision = StageSplit.parse(counts, pp=pp, vpp=vpp, num_layers=number, what=what)
        if self.text:
            counts, what = _choose(
                text_layers, self.text.pipeline_num_layers, "text_decoder.pipeline_num_layers", "llm_pp_layers"
            )
            text = StageSplit.parse(counts, pp=pp, vpp=vpp, num_layers=self.text.num_layers, what=what)
        return ModelSplit(vision=vision, text=text)

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuse sizes that do not divide by their parallel degree, and experts that a dense model does not have."""
        pairs = []
        if self.vision:
            pairs += [
                ("vision_encoder.num_attention_heads", self.vision.num_attention_heads, "tp", layout.tp),
                ("vision_encoder.ffn_hidden_size", self.vision.ffn_hidden_size, "tp", layout.tp),
            ]
        if text := self.text:
            pairs += [
                ("text_decoder.num_attention_heads", text.num_attention_heads, "tp", layout.tp),
                ("text_decoder.num_query_groups (kv heads)", text.num_query_groups, "tp", layout.tp),
                ("text_decoder.vocab_size", text.vocab_size, "tp", layout.tp),
                ("text_decoder.ffn_hidden_size", text.ffn_hidden_size, "tp", layout.tp),
            ]
            if text.num_moe_experts:
                pairs += [
                    ("text_decoder.num_moe_experts", text.num_moe_experts, "ep", layout.ep),
                    ("text_decoder.moe_ffn_hidden_size", text.moe_ffn_hidden_size, "etp", layout.etp),
                    ("text_decoder shared experts' width", text.shared_ffn_hidden_size, "tp", layout.tp),
                ]
        check_divides(pairs)
        if layout.separate_experts and not (self.text and self.text.num_moe_experts):
            raise UserError(
                f"layout: ep {layout.ep}, etp {layout.etp} (tp {layout.tp}), but the model has no experts. Drop --ep and --etp."
            )


def _choose(argument: object, configured: object, key: str, flag: str) -> tuple[object, str]:
    return (configured, f"model.json {key}") if argument is None else (argument, flag)


def load_model_config(path: str | Path) -> ModelConfig:
    """Read and check model.json."""
    return validate(ModelConfig, load_json(path), str(path))
