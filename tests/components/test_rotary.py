"""Interleaved M-RoPE against Hugging Face's GLM-4.1V, bit by bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding, apply_rotary_pos_emb

from mm_models.components.rotary import inverse_frequencies, mrope_cos_sin
from mm_models.ops.reference import apply_rotary, apply_rotary_interleaved
from tests.models import tiny_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sections", [[1, 1, 2], [4, 0, 0], [0, 3, 1]], ids=str)
def test_interleaved_rotation(dtype, sections):
    rope = {"rope_type": "default", "rope_theta": 1234.5, "partial_rotary_factor": 0.5, "mrope_section": sections}
    hf = Glm4vTextRotaryEmbedding(tiny_config("glm4v", rope_parameters=rope).text_config)
    positions = torch.randint(0, 50, (3, 2, 7))
    query, key = torch.randn(2, 7, 4, 16, dtype=dtype), torch.randn(2, 7, 2, 16, dtype=dtype)
    expected = apply_rotary_pos_emb(query, key, *hf(query, positions), unsqueeze_dim=2)
    cos, sin = mrope_cos_sin(positions, inverse_frequencies(8, 1234.5), sections, dtype, interleaved=True)
    for x, wanted in zip((query, key), expected):
        assert torch.equal(apply_rotary_interleaved(x, cos, sin), wanted)
        assert not torch.equal(apply_rotary(x, cos, sin), wanted)
