"""The schema of model.json: which component stands in each part, by `model_id`, and its sizes.

    {"model_id": ..., "image_encoder": {"vision_encoder": {...}, "vision_projector": {...}} | null, "text_decoder": {...} | null}

A part that is null or absent is not built. What a section says is in `config.sections` and, for its own keys, beside the
family's converters. Everything is checked when the file is read: unknown keys, types, sums of `pipeline_num_layers`, whether
the parts fit each other, and, in `check_layout`, what must divide by a parallel degree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from mm_models.config.sections import (
    FREEZE_DEFAULTS,
    TextDecoderConfig,
    VisionEncoderConfig,
    VisionProjectorConfig,
    by_model_id,
    dropped_keys,
)
from mm_models.config.strict import StrictModel, load_json, validate
from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout, StageSplit, check_divides

__all__ = ["FREEZE_DEFAULTS", "LossConfig", "ModelConfig", "load_model_config"]


class ImageEncoderConfig(StrictModel):
    vision_encoder: by_model_id(VisionEncoderConfig)
    vision_projector: by_model_id(VisionProjectorConfig)

    @model_validator(mode="after")
    def _check(self):
        self.vision_projector.check_encoder(self.vision_encoder)
        return self


class LossConfig(StrictModel):
    """`default`: mean over non-empty micro-batches of (sum of CE / labelled tokens).
    `per_token_loss`: sum of CE of the step / its labelled tokens."""

    loss_type: Literal["default", "per_token_loss"] = "default"


class PatchConfig(StrictModel):
    """`bridge_patch`: weights come from a Hugging Face folder when training starts, rather than from a converted checkpoint."""

    bridge_patch: bool = False


class ModelConfig(StrictModel):
    """model.json as a whole."""

    model_id: str | None = None
    img_context_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    image_encoder: ImageEncoderConfig | None = None
    text_decoder: by_model_id(TextDecoderConfig) | None = None
    text_encoder: None = None
    video_encoder: None = None
    loss_cfg: LossConfig = LossConfig()
    patch: PatchConfig | None = None

    @model_validator(mode="after")
    def _check(self):
        if self.image_encoder is None and self.text_decoder is None:
            raise ValueError("image_encoder and text_decoder are both null: nothing to build")
        if self.image_encoder and self.text_decoder:
            if self.img_context_token_id is None:
                raise ValueError("img_context_token_id is needed to place image features among text tokens")
            out, hidden = self.image_encoder.vision_projector.out_features, self.text_decoder.hidden_size
            if out != hidden:
                raise ValueError(
                    f"vision_projector gives features of width {out}, text_decoder.hidden_size is {hidden}"
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
            for key, size in self.projector.split_widths.items():
                pairs.append((f"vision_projector.{key}", size, "tp", layout.tp))
        if text := self.text:
            pairs += [
                ("text_decoder.num_attention_heads", text.num_attention_heads, "tp", layout.tp),
                ("text_decoder.num_query_groups (kv heads)", text.num_query_groups, "tp", layout.tp),
                ("text_decoder.vocab_size", text.vocab_size, "tp", layout.tp),
                ("text_decoder.ffn_hidden_size", text.ffn_hidden_size, "tp", layout.tp),
            ]
            pairs += [
                (f"text_decoder.{what}", size, axis, getattr(layout, axis)) for what, size, axis in text.split_widths()
            ]
        check_divides(pairs)
        if layout.separate_experts and not (self.text and self.text.num_moe_experts):
            raise UserError(
                f"layout: ep {layout.ep}, etp {layout.etp} (tp {layout.tp}), but the model has no experts. Drop --ep and --etp."
            )


def _choose(argument: object, configured: object, key: str, flag: str) -> tuple[object, str]:
    return (configured, f"model.json {key}") if argument is None else (argument, flag)


def load_model_config(path: str | Path, say: Callable[[str], None] | None = None) -> ModelConfig:
    """Read and check model.json. Its keys without effect here are listed once through `say`."""
    content = load_json(path)
    _refuse_bridged(content, path)
    model = validate(ModelConfig, content, str(path))
    if say is not None and (dropped := dropped_keys(content)):
        listed = "; ".join(f"{section}: {', '.join(keys)}" for section, keys in dropped.items())
        say(f"{path}: keys without effect here, not used: {listed}")
    return model


def _refuse_bridged(content: Any, path: str | Path) -> None:
    """A file that only points at a Hugging Face folder has other keys, and sizes that nobody checked."""
    if not isinstance(content, dict) or "init_from_hf_path" not in content:
        return
    from mm_models.config.family import contradictions

    folder = content["init_from_hf_path"]
    faults = contradictions(content)
    raise UserError(
        f"{path}: a file of another schema: init_from_hf_path says that the model is built from {folder}/config.json, "
        f"and its own sizes are not read there"
        + (f"; they contradict that model: {'; '.join(faults)}" if faults else "")
        + f". Write one for this target with: mm-models init --hf {folder} -o model.json; or train it on the FSDP2 target."
    )
