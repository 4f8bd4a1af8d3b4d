"""`VLMModel`: what one flat pipeline stage holds of a vision-language model, assembled from model.json by lookups alone.

Between neighbouring stages exactly one 3-D tensor travels (DESIGN, Pipeline contract):

    before the vision tower   one zero row, so that there is something to send
    inside it                 patch states (patches, 1, h_vit); one zero row for a micro-batch without images
    its end .. first text     merged features (image tokens, 1, h_llm); one zero row without images
    from the first text stage hidden states (S / tp, B, h_llm)

Whatever a stage receives enters its graph through `join`: without it core would send no gradient back, and the neighbour would wait
for ever. Outputs are never views, since core frees their storage after sending.
"""

from __future__ import annotations

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from torch import nn

from mm_models.components.multimodal import check_image_tokens, join
from mm_models.config.model import ModelConfig
from mm_models.layout import ModelSplit, ParallelLayout
from mm_models.mcore.layers import TransformerBlock
from mm_models.mcore.text import TextDecoder
from mm_models.mcore.vision import ImageEncoder
from mm_models.registry import table


class VLMModel(nn.Module):
    """One flat stage. `stage` is the pipeline rank, `chunk` the virtual chunk."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        layout: ParallelLayout,
        split: ModelSplit,
        stage: int,
        chunk: int,
        config: TransformerConfig,
        provider,
    ):
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.model_config = model
        self.split, self.flat = split, split.flat(stage, chunk)
        self.vp_stage = chunk if config.virtual_pipeline_model_parallel_size else None
        self.pre_process, self.post_process = self.flat == 0, self.flat == split.flat_stages - 1
        self.vision_stage, self.text_stage = split.stage("vision", stage, chunk), split.stage("text", stage, chunk)
        if not self.vision_stage.empty:
            self.image_encoder = ImageEncoder(
                config=config,
                encoder=table("vision_encoders").get(model.vision.model_id)(
                    model.vision, layout, self.vision_stage, provider
                ),
                projector=table("vision_projectors").get(model.projector.model_id)(
                    model.projector, layout, self.vision_stage, provider
                ),
                stage=self.vision_stage,
            )
        if not self.text_stage.empty:
            self.text_decoder = TextDecoder(
                config=config,
                text=model.text,
                block=table("text_decoders").get(model.text.model_id)(model.text, layout, self.text_stage, provider),
                stage=self.text_stage,
                tie_here=model.tied and self.text_stage.first,
            )
            if model.tied and self.text_stage.last and not self.text_stage.first:
                self.text_decoder.output_layer.weight.shared = True  # a second copy: counted once in norms
        self.received: torch.Tensor | None = None

    def set_recompute(self, recompute) -> None:
        """Give every block of this stage its recompute choice."""
        for module in self.modules():
            if isinstance(module, TransformerBlock):
                module.recompute = recompute

    def set_input_tensor(self, tensor) -> None:
        """Called by core before each forward with what the stage before sent."""
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def needs(self) -> frozenset[str]:
        """Which parts of a batch this stage reads."""
        parts = set()
        if not self.vision_stage.empty:
            parts.add("grid")
        if self.vision_stage.first:
            parts.add("pixels")
        if self.text_stage.layers:
            parts.add("positions")
        if self.text_stage.first:
            parts |= {"ids", "grid"}
        if self.text_stage.last:
            parts.add("labels")
        return frozenset(parts)

    def forward(self, batch: dict) -> torch.Tensor:
        """What this stage sends on; on the last one the summed loss (or logits (S, B, V / tp) without labels)."""
        received, self.received = self.received, None
        x = received
        images = batch.get("image_grid_thw")
        if not self.vision_stage.empty:
            x = self._vision(batch, received, images)
        if self.text_stage.first:
            x = self._embed(batch, x, images)
        if not self.text_stage.empty:
            x = self.text_decoder(x, batch)
        elif self.vision_stage.empty:
            x = self._pass_on(received)
        return x if x._base is None else x.clone()

    def _vision(self, batch: dict, received: torch.Tensor | None, images: torch.Tensor | None) -> torch.Tensor:
        if images is None:
            return self._pass_on(received)
        if not self.vision_stage.first:
            return self.image_encoder(received, images)
        pixels = batch["pixel_values"]
        patches = int(images.prod(1).sum())
        if len(pixels) != patches:
            raise ValueError(f"pixel_values has {len(pixels)} rows, image_grid_thw {images.tolist()} needs {patches}.")
        return join(self.image_encoder(pixels, images), received)

    def _embed(self, batch: dict, x: torch.Tensor | None, images: torch.Tensor | None) -> torch.Tensor:
        ids, model = batch["input_ids"], self.model_config
        if model.vision:
            check_image_tokens(
                ids, images, image_token_id=model.img_context_token_id, merge=model.vision.spatial_merge_size
            )
        if images is None:
            return join(self.text_decoder.embed(ids, None, None), x)
        return self.text_decoder.embed(ids, x, model.img_context_token_id)

    def _pass_on(self, received: torch.Tensor | None) -> torch.Tensor:
        """A stage with nothing to compute: what came, or one zero row.

        The row asks for a gradient where the tower here is trained: then a rank with a text-only micro-batch runs the same
        backward, collectives included, as its expert-parallel peers with images, even below a frozen decoder.
        """
        if received is not None:
            return received.clone()
        width = (self.model_config.text or self.model_config.vision).hidden_size
        parameters = list(self.parameters())
        device = parameters[0].device if parameters else torch.device("cpu")
        row = torch.zeros(1, 1, width, dtype=self.config.params_dtype, device=device)
        trained = not self.vision_stage.empty and any(p.requires_grad for p in self.image_encoder.parameters())
        return row.requires_grad_().clone() if trained and torch.is_grad_enabled() else row
