"""The tokenizer of a small model and the processor's files."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

from captions import ROWS
from checkpoints.family import Family

TEMPLATES = Path(__file__).parents[1]


def make_tokenizer(family: Family):
    """A byte-level BPE over the captions, the family's added tokens after it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + family.digits
    words += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = Tokenizer(models.BPE())
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    texts = [message["content"] for row in ROWS for message in row["messages"]]
    trainer = trainers.BpeTrainer(
        vocab_size=family.words - len(family.tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(
        [AddedToken(token, special=token not in family.shown, normalized=False) for token in family.tokens]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        pad_token=family.pad,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save_processor(family: Family, tokenizer, out: Path) -> None:
    """Tokenizer, chat template and image processor, in the layout of transformers 5."""
    module, name = family.image_processor.split(":")
    tokenizer.save_pretrained(out)
    shutil.copyfile(TEMPLATES / family.chat_template, out / "chat_template.jinja")
    images = getattr(importlib.import_module(module), name)(size=dict(family.sizes)).to_dict()
    images["image_processor_type"] = name.removesuffix("Pil")
    videos = {
        "video_processor_type": family.video_processor,
        "size": family.sizes,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    config = {"image_processor": images, "video_processor": videos, "processor_class": family.processor}
    (out / "processor_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
