"""Write a small GLM-4.5V as a complete Hugging Face folder: real architecture, random weights, everything made offline.

    python examples/quickstart/make_checkpoint.py --out build/quickstart/hf --dtype bf16

Four text layers (the first dense, three of 8 experts with a shared one), two vision layers. Every tensor has values
of its own, biases, norms and the router's correction bias too, so that a tensor that is lost or swapped on the way
shows. The tokenizer is trained on the quickstart's captions and has GLM's special tokens. The same bytes every time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from captions import ROWS

HERE = Path(__file__).parent
VOCABULARY = 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FP32_NAMES = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
"""The router stays fp32 in a bf16 model, as transformers keeps it."""

SPECIAL_TOKENS = """
    <|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>
    <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <|begin_of_audio|> <|end_of_audio|>
    <|begin_of_transcription|> <|end_of_transcription|> <|code_prefix|> <|code_middle|> <|code_suffix|>
    <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key>
    <arg_value> </arg_value> /nothink <|begin_of_box|> <|end_of_box|> <|image|> <|video|>
""".split()  # noqa: SIM905  a list literal would take a line per token
"""GLM's, in its order."""
MARKUP = SPECIAL_TOKENS[SPECIAL_TOKENS.index("<think>") : SPECIAL_TOKENS.index("<|end_of_box|>") + 1]
"""Those a decoder shows as text: one id each, but not special."""

VIDEO_PROCESSOR = {
    "video_processor_type": "Glm4vVideoProcessor",
    "size": {"shortest_edge": 1568, "longest_edge": 25088},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""So that the stock AutoProcessor loads the folder where torchvision is installed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, default=Path("build/quickstart/hf"), help="folder to write; must be new or empty"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    write_checkpoint(options.out, dtype=DTYPES[options.dtype], seed=options.seed)
    print(f"wrote a small GLM-4.5V ({options.dtype}) to {options.out}")


def write_checkpoint(out: Path, *, dtype: torch.dtype = torch.float32, seed: int = 1234) -> None:
    """Model, generation config, tokenizer, image processor and chat template into `out`, which must not hold anything yet."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} exists and is not empty. Remove it, or give another --out.")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, dtype, seed)
    model.save_pretrained(out, max_shard_size="1MB")
    save_processor(tokenizer, out)


def make_tokenizer():
    """A byte-level BPE over the captions, GLM's special tokens after it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    words += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    texts = [message["content"] for row in ROWS for message in row["messages"]]
    size = VOCABULARY - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(token, special=token not in MARKUP, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer, dtype: torch.dtype, seed: int):
    """`Glm4vMoeForConditionalGeneration` with random weights; the router stays fp32."""
    from transformers import GenerationConfig, Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    stops = [ids[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    config = Glm4vMoeConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 3, 3],
            },
            "pad_token_id": ids["<|endoftext|>"],
            "eos_token_id": stops,
        },
        vision_config={
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
        },
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
        tie_word_embeddings=False,
    )
    model = Glm4vMoeForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(draw(name, tensor.shape, seed))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in model.state_dict() and not name.endswith(FP32_NAMES):
            tensor.data = tensor.data.to(dtype)
    for part in (config, config.text_config, config.vision_config):
        part.dtype = dtype
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=ids["<|endoftext|>"], do_sample=False)
    return model


def draw(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Values of one tensor, from (seed, name): norms around 1, biases around 0, weights at 1 / sqrt(inputs)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.05 * noise
    if "embed" in name:
        return 0.3 * noise
    return noise / (noise.shape[-1] if "experts" in name else noise[0].numel()) ** 0.5


def save_processor(tokenizer, out: Path) -> None:
    """Tokenizer, chat template and image processor, in the layout of transformers 5."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    tokenizer.save_pretrained(out)
    shutil.copyfile(HERE / "chat_template.jinja", out / "chat_template.jinja")
    images = Glm4vImageProcessorPil(size={"shortest_edge": 1568, "longest_edge": 25088}).to_dict()
    images["image_processor_type"] = "Glm4vImageProcessor"
    config = {"image_processor": images, "video_processor": VIDEO_PROCESSOR, "processor_class": "Glm4vProcessor"}
    (out / "processor_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
