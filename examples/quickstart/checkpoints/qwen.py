"""Small Qwen2-VL (its own output layer, as the 7B has) and Qwen2.5-VL (tied and in the proportions of the 3B)."""

from __future__ import annotations

from typing import Any

from checkpoints.family import VOCABULARY, Family

SPECIAL = """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
""".split()  # noqa: SIM905  a list literal would take a line per token
CODE = """
    <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
""".split()  # noqa: SIM905
"""Qwen2.5's."""
PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}


def _root(ids: dict[str, int], **changes: Any) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    } | changes


def _text(ids: dict[str, int], **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "max_window_layers": 4,
        "use_sliding_window": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    } | changes


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": list(sections)}


def _config(ids: dict[str, int]) -> Any:
    from transformers import Qwen2VLConfig

    return Qwen2VLConfig(
        text_config=_text(ids, intermediate_size=320, num_attention_heads=4, rope_parameters=_rope(4, 6, 6)),
        # `hidden_size` is the decoder's; `embed_dim` is the tower's own width
        vision_config=PATCHES
        | {
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 4,
            "mlp_ratio": 4,
            "hidden_act": "quick_gelu",
        },
        **_root(ids, tie_word_embeddings=False),
    )


def _config_2_5(ids: dict[str, int]) -> Any:
    """Widths a sixteenth of the 3B's; windows of 2 x 2 merged tokens, so that the quickstart's photographs hold several."""
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config=_text(ids, intermediate_size=688, num_attention_heads=8, rope_parameters=_rope(2, 3, 3)),
        vision_config=PATCHES
        | {
            "depth": 4,
            "hidden_size": 80,
            "num_heads": 4,
            "intermediate_size": 216,
            "out_hidden_size": 128,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
            "hidden_act": "silu",
        },
        **_root(ids, tie_word_embeddings=True),
    )


def _family(**fields: Any) -> Family:
    return Family(
        words=500,  # fewer than the embedding has rows, as in the real ones
        nfc=True,
        stops=("<|im_end|>", "<|endoftext|>"),
        eos="<|im_end|>",
        chat_template="chat_template_qwen2vl.jinja",
        image_processor="transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        sizes={"shortest_edge": 784, "longest_edge": 12544},
        video_processor="Qwen2VLVideoProcessor",
        **fields,
    )


QWEN2_VL = _family(
    title="Qwen2-VL",
    model="Qwen2VLForConditionalGeneration",
    config=_config,
    tokens=tuple(SPECIAL),
    shown=frozenset(),
    processor="Qwen2VLProcessor",
)
QWEN2_5_VL = _family(
    title="Qwen2.5-VL",
    model="Qwen2_5_VLForConditionalGeneration",
    config=_config_2_5,
    tokens=(*SPECIAL, *CODE),
    shown=frozenset(CODE),
    processor="Qwen2_5_VLProcessor",
)
