"""From data.json to a batch, for Qwen2-VL, Qwen2.5-VL and GLM-4.1V: what Hugging Face's processor and model make of a chat.

The data.json has the field's names: `template: qwen2vl`, `collate_param.model_name: qwen2vl`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from mm_models.components.loss import IGNORE
from mm_models.config.family import family_of
from mm_models.config.model import ModelConfig
from mm_models.data.loader import build_loader
from mm_models.data.processor import load_processor
from mm_models.errors import UserError
from tests.data import kit

TEMPLATES = {"qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl", "glm4v": "glm4v"}
SIZES = [(112, 112), (150, 90), (40, 200)]
CHATS = [
    ("<image>one", "a"),
    ("no picture", "a long enough answer to pad the others"),
    ("yes", "yes", "<image>two<image>", "yes", "say assistant", "\nassistant said so"),
]
PICTURES = [[0], [], [1, 2]]


@dataclass(frozen=True, kw_only=True)
class World:
    """A family's small model and processor, and the three chats as a data set."""

    family: str
    folder: Any
    base: Any
    processor: Any
    model: Any
    model_config: ModelConfig

    def loader(self, model_config=None, **changes):
        name = TEMPLATES[self.family]
        data = {"template": name, "model_name": name, "shuffle": False} | changes
        config = kit.data_config(self.folder, self.base, **data)
        model = model_config or self.model_config
        return build_loader(config, model_config=model, micro_batch_size=3, global_batch_size=3)

    def expected(self, chat):
        """The processor's own tensors of one chat."""
        images = [kit.pattern(*SIZES[seed], seed) for seed in PICTURES[chat]]
        messages = kit.messages(kit.turns(*CHATS[chat]), images)
        return self.processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")


@pytest.fixture(scope="module")
def world(folders, tmp_path_factory):
    maker = kit.quickstart("make_checkpoint")

    @cache
    def made(family):
        base = tmp_path_factory.mktemp("data")
        for seed, size in enumerate(SIZES):
            kit.picture(base / f"{seed}.png", *size, seed=seed)
        rows = [kit.row(*chat, images=[f"{n}.png" for n in names]) for chat, names in zip(CHATS, PICTURES)]
        kit.data_config(base, base, rows)
        processor = load_processor(folders(family))
        model = maker.make_model(maker.FAMILIES[family], processor.tokenizer, torch.float32, 3).eval()
        raw = model.config.to_dict()
        return World(
            family=family,
            folder=folders(family),
            base=base,
            processor=processor,
            model=model,
            model_config=ModelConfig.model_validate(family_of(raw, "the test").model_json(raw)),
        )

    return made


@pytest.mark.parametrize("family", TEMPLATES)
class TestBatch:
    def test_it_is_the_processors_own(self, world, family):
        it = world(family)
        batch = next(iter(it.loader()))
        assert batch["sample_ids"] == [0, 1, 2]
        pixels, grids = [], []
        for row in range(3):
            expected = it.expected(row)
            length = expected["input_ids"].shape[1]
            assert torch.equal(batch["input_ids"][row, :length], expected["input_ids"][0])
            if PICTURES[row]:
                pixels.append(expected["pixel_values"])
                grids.append(expected["image_grid_thw"])
        assert torch.equal(batch["pixel_values"], torch.cat(pixels))
        assert torch.equal(batch["image_grid_thw"], torch.cat(grids))

    def test_labels_alone_and_padded(self, world, family):
        """B15, B16: each answer and its end token, in every row of the batch."""
        it = world(family)
        end = "<|user|>" if family == "glm4v" else "<|im_end|>"
        batch = next(iter(it.loader()))
        for row, chat in enumerate(CHATS):
            kept = batch["labels"][row] != IGNORE
            assert torch.equal(batch["labels"][row][kept], batch["input_ids"][row][kept])
            assert it.processor.tokenizer.decode(batch["labels"][row][kept].tolist()) == "".join(
                answer + end for answer in chat[1::2]
            )

    def test_positions_and_loss_are_the_models_own(self, world, family):
        it = world(family)
        batch = next(iter(it.loader()))
        batch.pop("sample_ids")
        types = (batch["input_ids"] == it.processor.image_token_id).int()
        expected, _ = it.model.model.get_rope_index(
            batch["input_ids"], types, image_grid_thw=batch["image_grid_thw"], attention_mask=batch["attention_mask"]
        )
        assert torch.equal(batch["position_ids"], expected)
        with torch.no_grad():
            loss = it.model(**batch).loss
            del batch["position_ids"]
            assert torch.equal(loss, it.model(**batch, mm_token_type_ids=types).loss)


def test_every_collator_name_is_the_one_collator(world):
    first = next(iter(world("qwen2_vl").loader()))
    for name in ("qwen2_vl", "qwen3vl", "glm4.1v"):
        other = next(iter(world("qwen2_vl").loader(model_name=name)))
        assert all(torch.equal(first[key], other[key]) for key in first if key != "sample_ids")


def test_a_template_of_another_model_is_refused_before_any_row(world):
    """B44."""
    with pytest.raises(UserError, match=r"template 'glm4v' needs the tokens \[gMASK\]"):
        world("qwen2_vl").loader(template="glm4v")
    with pytest.raises(UserError, match=r"template 'qwen2vl' needs the tokens <\|im_start\|>"):
        world("glm4v").loader(template="qwen2vl")


def test_a_processor_of_another_model_is_refused(world):
    with pytest.raises(UserError, match=r"model img_context_token_id \d+, processor image token id \d+"):
        world("qwen2_vl").loader(model_config=world("glm4v").model_config)


def test_a_tool_role_is_refused_by_row(world, tmp_path):
    """`observation_tag` of the field's data.json names a role that no row may have."""
    it = world("qwen2_vl")
    rows = [{"messages": [{"role": "tool", "content": "x"}]}]
    config = kit.data_config(
        it.folder, tmp_path, rows, template="qwen2vl", model_name="qwen2vl", observation_tag="tool", system_tag=None
    )
    expected = r"'user' \(attr.user_tag\), 'assistant' \(attr.assistant_tag\)$"
    with pytest.raises(UserError, match=rf"row 0: .*role 'tool', expected one of {expected}"):
        build_loader(config, model_config=it.model_config)
