"""FLOPs of a step against torch's own counter on Hugging Face's model, every product of which it sees."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from mm_models.config.model import ModelConfig
from mm_models.train.flops import batch_flops, training_flops
from tests.mcore.batches import batch, hf_sum_loss
from tests.models import tiny_glm_model, tiny_model_json

CASES = {
    "text": ({}, [[]], ()),
    "two samples, three images": ({}, [[(4, 4)], [(8, 4), (4, 8)]], ()),
    "narrow experts, wide vocabulary": ({"moe_intermediate_size": 16, "vocab_size": 1000, "num_experts_per_tok": 4}, [[(4, 4)]], ()),
    "vision frozen": ({}, [[(8, 8)]], ("vision_encoder",)),
    "vision and merger frozen": ({}, [[(8, 8)]], ("vision_encoder", "vision_projector")),
    "text frozen": ({}, [[(8, 8)]], ("text_decoder",)),
}  # fmt: skip

MERGER = "model.visual.merger."


def part_of(name: str) -> str:
    if name.startswith(MERGER):
        return "vision_projector"
    return "vision_encoder" if name.startswith("model.visual.") else "text_decoder"


@pytest.mark.parametrize("case", CASES)
def test_against_torchs_counter(case):
    sizes, images, frozen = CASES[case]
    model = tiny_glm_model(**sizes)
    model.config._attn_implementation = "eager"  # the counter sees matrix products, not the CPU's fused kernels
    for part in (model.config.text_config, model.config.vision_config):
        part._attn_implementation = "eager"
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in frozen)
    data = batch(images=images, length=64)
    with FlopCounterMode(display=False) as counter:
        hf_sum_loss(model, data)[1].backward()
    config = ModelConfig.model_validate(tiny_model_json(model.config))
    assert batch_flops(config, data, frozen=frozen) == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_the_large_model_is_six_flops_a_parameter_and_token():
    """Of the parameters that a token meets, embedding left out; short sequences, so that attention's square is small."""
    model = tiny_glm_model(hidden_size=256, out_hidden_size=256, moe_intermediate_size=128, vocab_size=512)
    config = ModelConfig.model_validate(tiny_model_json(model.config))
    met = 0
    for name, parameter in model.named_parameters():
        if part_of(name) == "text_decoder" and "embed_tokens" not in name:
            met += parameter.numel() * (2 / 8 if ".experts." in name else 1)
    assert training_flops(config, sequences=[4] * 10) == pytest.approx(6 * met * 40, rel=0.02)
