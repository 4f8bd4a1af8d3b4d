"""What the data tests share: a processor folder made offline, a matching model.json, pictures and data.json values."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from mm_models.config.data import Attributes, DataConfig, DataloaderParam
from mm_models.config.model import ModelConfig
from mm_models.config.strict import validate
from mm_models.data.rows import IMAGE_MARK, Turn

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
TEMPLATES = {"glm4v_moe": "glm4v_moe", "glm4v": "glm4v", "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl"}
"""Family -> its template."""
BASE = (QUICKSTART / "data.json").read_text(encoding="utf-8")


def quickstart(name: str) -> Any:
    """A module of examples/quickstart; its scripts import each other by plain name."""
    if str(QUICKSTART) not in sys.path:
        sys.path.insert(0, str(QUICKSTART))
    return importlib.import_module(name)


def processor_folder(folder: Path, family: str = "glm4v_moe") -> Path:
    """Tokenizer, chat template and image processor of one of the quickstart's models, without the model."""
    maker = quickstart("make_checkpoint")
    folder.mkdir(parents=True)
    maker.save_processor(maker.FAMILIES[family], maker.make_tokenizer(maker.FAMILIES[family]), folder)
    return folder


def model_config(processor: Any, **text: Any) -> ModelConfig:
    """The model.json of the quickstart's model, as far as data looks at it."""
    vision = {
        "model_id": "glm4v_vit",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "out_hidden_size": 128,
        "image_size": 168,
    }
    projector = {"model_id": "GlmMLP", "out_hidden_size": 128, "intermediate_size": 160}
    decoder = {
        "model_id": "glm4v_moe_lm",
        "num_layers": 2,
        "hidden_size": 128,
        "ffn_hidden_size": 192,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 32,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
        "rms_norm_eps": 1e-5,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": True,
    }
    return ModelConfig.model_validate(
        {
            "img_context_token_id": processor.image_token_id,
            "image_encoder": {"vision_encoder": vision, "vision_projector": projector},
            "text_decoder": decoder | text,
        }
    )


def data_config(folder: Path, dataset_dir: Path, rows: list[Any] | None = None, **changes: Any) -> DataConfig:
    """A data.json over `dataset_dir`/train.json (written from `rows`); a change goes to the section of its key."""
    if rows is not None:
        dataset_dir.mkdir(parents=True, exist_ok=True)
        (dataset_dir / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    value = json.loads(BASE)
    basic = {"dataset_dir": str(dataset_dir), "dataset": str(dataset_dir / "train.json"), "cutoff_len": 4096}
    value["dataset_param"]["basic_parameters"] |= basic
    value["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(folder)
    sections = [
        value["dataset_param"]["basic_parameters"],
        value["dataset_param"]["preprocess_parameters"],
        value["dataset_param"]["attr"],
        value["dataloader_param"],
        value["dataloader_param"]["collate_param"],
    ]
    for key, new in changes.items():
        homes = ((Attributes, sections[2]), (DataloaderParam, sections[3]))
        rest = next((section for schema, section in homes if key in schema.model_fields), sections[0])
        next((section for section in sections if key in section), rest)[key] = new
    if "model_name" in changes:
        sections[-1] |= {"model_name": sections[0].pop("model_name"), "collator_id": None}
    return validate(DataConfig, value, "data.json")


def picture(path: Path, width: int = 112, height: int = 112, seed: int = 0) -> Path:
    """An image file with a pattern of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pattern(width, height, seed).save(path)
    return path


def pattern(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth RGB picture that no two seeds share."""
    image = Image.new("RGB", (2, 2))
    image.putdata(
        [((seed * 53 + k * 71) % 256, (seed * 97 + k * 29) % 256, (seed * 31 + k * 113) % 256) for k in range(4)]
    )
    return image.resize((width, height), Image.Resampling.BICUBIC)


def row(*texts: str, images: tuple[str, ...] | list[str] = (), system: str | None = None) -> dict[str, Any]:
    """A row of user and assistant turns in turn."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
    return {"messages": messages, "images": list(images)}


def turns(*texts: str, system: str | None = None) -> tuple[Turn, ...]:
    return tuple(Turn(role=m["role"], text=m["content"]) for m in row(*texts, system=system)["messages"])


def messages(conversation: tuple[Turn, ...], images: list[Image.Image]) -> list[dict[str, Any]]:
    """The conversation as Hugging Face takes it."""
    supply = iter(images)
    result = []
    for turn in conversation:
        content: list[dict[str, Any]] = []
        for index, part in enumerate(turn.text.split(IMAGE_MARK)):
            content += [{"type": "image", "image": next(supply)}] if index else []
            content += [{"type": "text", "text": part}] if part else []
        result.append({"role": turn.role, "content": content})
    return result


def hf_ids(processor: Any, conversation: tuple[Turn, ...], images: list[Image.Image], **options: Any) -> list[int]:
    """Token ids by the Hugging Face processor: chat template, image tokens, tokenizer."""
    made = processor.apply_chat_template(messages(conversation, images), tokenize=True, return_dict=True, **options)
    return made["input_ids"][0]
