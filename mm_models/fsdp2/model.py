"""What a Hugging Face vision-language model computes in training: one collated batch in, logits or the summed loss out.

Mixins stand before Hugging Face's classes. `Conditional` is the whole model: `model`, then `lm_head`. `Multimodal` is its
`model`: an embedding, `visual` and `language_model`. `Tower` or `WindowedTower` is `visual`. Positions are always given, nothing is
cached, and the functions around the modules (mask, positions of patches, windows, placing features) are the components of the other
target.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from mm_models.components.attention import causal_padding_mask, frame_lengths
from mm_models.components.loss import shift_labels
from mm_models.components.multimodal import check_image_tokens, join, place_features
from mm_models.components.rotary import vision_position_ids
from mm_models.components.windows import windows
from mm_models.errors import UserError


class Conditional:
    """`batch` as the collator makes it (data/collator.py) -> logits (B, S, V), or with labels the summed cross entropy, fp32."""

    def forward(self, batch: dict) -> torch.Tensor:
        hidden = self.model(batch)
        labels = batch.get("labels")
        return self.lm_head(hidden) if labels is None else self.lm_head(hidden, shift_labels(labels))


class Multimodal:
    """A batch -> final hidden states (B, S, H)."""

    def forward(self, batch: dict) -> torch.Tensor:
        ids, images = batch["input_ids"], batch.get("image_grid_thw")
        config = self.config
        check_image_tokens(
            ids, images, image_token_id=config.image_token_id, merge=config.vision_config.spatial_merge_size
        )
        x = self.get_input_embeddings()(ids)
        if images is not None:
            x = place_features(x, self.visual(batch["pixel_values"], images), ids, config.image_token_id)
        elif self._tower_must_run():
            x = join(x, self.visual(*self._blank_image(ids.device)))
        return self.language_model(
            inputs_embeds=x,
            position_ids=batch["position_ids"],
            attention_mask=causal_padding_mask(batch.get("attention_mask")),
            use_cache=False,
        ).last_hidden_state

    def _tower_must_run(self) -> bool:
        """Whether a batch without images runs the tower all the same: a neighbour may have some, and the collectives of forward
        and backward must pair up; and a group of parameters must have been gathered before its gradients are only added up."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            return True
        return any(isinstance(module, FSDPModule) for module in self.visual.modules())

    def _blank_image(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The smallest image there is, of zeros."""
        vision = self.config.vision_config
        merge = vision.spatial_merge_size
        features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return torch.zeros(merge**2, features, device=device), torch.tensor([[1, merge, merge]], device=device)


class Tower:
    """Pixels (patches, features) and the images' grids (N, 3) -> merged features (image tokens, H), and nothing else."""

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        lengths = frame_lengths(grid_thw)
        if len(pixels) != sum(lengths):
            raise UserError(
                f"pixel_values has {len(pixels)} rows, but image_grid_thw {grid_thw.tolist()} needs {sum(lengths)}."
            )
        outputs = super().forward(
            pixels,
            grid_thw=grid_thw,
            position_ids=vision_position_ids(grid_thw, self.config.spatial_merge_size),
            cu_seqlens=_boundaries(lengths),
            **self._windows(grid_thw),
        )
        return outputs.pooler_output

    def _windows(self, grid_thw: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


class WindowedTower(Tower):
    """A tower whose blocks attend inside windows, but for some: the order of windows goes in, features come out in the order of pixels."""

    def _windows(self, grid_thw: torch.Tensor) -> dict[str, torch.Tensor]:
        config = self.config
        found = windows(grid_thw, merge=config.spatial_merge_size, window=config.window_size, patch=config.patch_size)
        return {"window_index": found.index, "cu_window_seqlens": _boundaries(found.lengths)}


def _boundaries(lengths: list[int]) -> torch.Tensor:
    """On the host: they are only read there."""
    return torch.tensor([0, *lengths]).cumsum(0)


def training(module: torch.nn.Module, mixin: type) -> torch.nn.Module:
    """Put `mixin` before the module's own class, in place."""
    module.__class__ = type(f"Training{type(module).__name__}", (mixin, type(module)), {})
    return module
