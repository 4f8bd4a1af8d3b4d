"""Small GLM-4.5V (mixture of experts) and GLM-4.1V (dense)."""

from __future__ import annotations

from typing import Any

from checkpoints.family import VOCABULARY, Family

START = """
    <|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>
    <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>
""".split()  # noqa: SIM905  a list literal would take a line per token
AUDIO = """
    <|begin_of_audio|> <|end_of_audio|>
    <|begin_of_transcription|> <|end_of_transcription|> <|code_prefix|> <|code_middle|> <|code_suffix|>
""".split()  # noqa: SIM905
BOXES = ("<|begin_of_box|>", "<|end_of_box|>")
PICTURES = ("<|image|>", "<|video|>")
MOE_MARKUP = """
    <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key>
    <arg_value> </arg_value> /nothink
""".split()  # noqa: SIM905
MARKUP = ("<think>", "</think>", "<answer>", "</answer>")


def _vision(**changes: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "image_size": 168,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 128,
        "intermediate_size": 160,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
    } | changes


def _root(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
        "tie_word_embeddings": False,
    }


def _text(ids: dict[str, int], stops: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 3, 3],
        },
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids[token] for token in stops],
    } | changes


MOE_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
STOPS = (*MOE_STOPS, "</answer>")


def _moe_config(ids: dict[str, int]) -> Any:
    """Four text layers: the first dense, three of 8 experts with a shared one."""
    from transformers import Glm4vMoeConfig

    text = _text(
        ids,
        MOE_STOPS,
        head_dim=32,
        attention_bias=True,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    return Glm4vMoeConfig(text_config=text, vision_config=_vision(), **_root(ids))


def _dense_config(ids: dict[str, int]) -> Any:
    """GLM-4.1V-9B's proportions of MLP and hidden width."""
    from transformers import Glm4vConfig

    text = _text(ids, STOPS, intermediate_size=428, attention_bias=True)
    return Glm4vConfig(text_config=text, vision_config=_vision(intermediate_size=428), **_root(ids))


def _family(**fields: Any) -> Family:
    return Family(
        digits=r"\p{N}{1,3}",
        eos="<|endoftext|>",
        processor="Glm4vProcessor",
        image_processor="transformers.models.glm4v.image_processing_pil_glm4v:Glm4vImageProcessorPil",
        sizes={"shortest_edge": 1568, "longest_edge": 25088},
        video_processor="Glm4vVideoProcessor",
        **fields,
    )


GLM4V_MOE = _family(
    title="GLM-4.5V",
    model="Glm4vMoeForConditionalGeneration",
    config=_moe_config,
    tokens=(*START, *AUDIO, *MOE_MARKUP, *BOXES, *PICTURES),
    shown=frozenset((*MOE_MARKUP, *BOXES)),
    stops=MOE_STOPS,
    chat_template="chat_template.jinja",
)
GLM4V = _family(
    title="GLM-4.1V",
    model="Glm4vForConditionalGeneration",
    config=_dense_config,
    tokens=(*START, *PICTURES, *MARKUP, *BOXES),
    shown=frozenset((*MARKUP, *BOXES)),
    stops=STOPS,
    chat_template="chat_template_glm4v.jinja",
)
