"""What one row becomes, by the keys of data.json: formats, trained ranges, images that are faulty."""

from __future__ import annotations

import base64
import io
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_models.components.loss import IGNORE
from mm_models.config.fsdp2.run import load_config
from mm_models.data.examine import Examiner, make_processor, make_template
from mm_models.data.images import ImageBytes, load_rgb
from mm_models.data.loader import build_loader
from mm_models.data.processor import image_grid, load_processor
from mm_models.errors import UserError
from tests.data import kit
from tests.data.chats import LITERALS, WITH_IMAGES, conversations, counts, fuzz

FORMATS = ["glm4v_moe", "glm4v", "qwen2_vl"]
ENDS = {"glm4v_moe": "<|user|>", "glm4v": "<|user|>", "qwen2_vl": "<|im_end|>"}
GOOD = kit.row("hello", "world")
YAML = kit.QUICKSTART.parent / "glm4.5v" / "glm4_5v_debug.yaml"


def encoded(image, form="PNG"):
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def trained(processor, sample):
    return [processor.tokenizer.decode(list(sample.ids[a:b])) for a, b in sample.trained]


@pytest.mark.parametrize("family", FORMATS)
class TestFormats:
    def test_a_content_list_is_what_hugging_face_makes_of_it(self, examine, processors, tmp_path, family):
        """The row's own messages, handed to the chat template as they are."""
        pictures = [kit.pattern(112, 84, seed) for seed in range(3)]
        for seed, picture in enumerate(pictures):
            picture.save(tmp_path / f"{seed}.png")
        data = base64.b64encode(encoded(pictures[1])).decode()
        ways = [{"image": "0.png"}, {"image": {"bytes": data}}, {"image": {"path": "2.png"}}]

        def messages(sources):
            image = iter([{"type": "image", **source} for source in sources])
            text = [{"type": "text", "text": text} for text in ("see ", "\n", " and ", "why?", "so ")]
            return [
                {"role": "system", "content": [text[4]]},
                {"role": "user", "content": [text[0], next(image), text[1], text[2], next(image)]},
                {"role": "assistant", "content": [text[4]]},
                {"role": "user", "content": [next(image), text[3]]},
                {"role": "assistant", "content": "because"},
            ]

        processor = processors(family)
        theirs = messages([{"image": picture} for picture in pictures])
        expected = processor.apply_chat_template(theirs, tokenize=True, return_dict=True, return_tensors="pt")
        sample = examine({"messages": messages(ways)}, family=family).sample
        own_end = 0 if family == "qwen2_vl" else 1
        assert list(sample.ids)[: len(sample.ids) - own_end] == expected["input_ids"][0].tolist()
        assert [list(grid) for grid in sample.grids] == expected["image_grid_thw"].tolist()
        for source, picture in zip(sample.images, pictures, strict=True):
            assert load_rgb(source).tobytes() == picture.tobytes()
        assert isinstance(sample.images[1], ImageBytes)

    def test_a_llava_row_keeps_the_line_break_at_the_mark(self, examine, processors, tmp_path, family):
        kit.picture(tmp_path / "a.png")
        attr = {"messages": "conversations", "role_tag": "from", "content_tag": "value", "images": "image"}
        talk = [{"from": "human", "value": "What is it?\n<image>"}, {"from": "gpt", "value": "A bus."}]
        row = {"image": "a.png", "conversations": talk}
        found = examine(row, family=family, **attr, user_tag="human", assistant_tag="gpt").sample
        assert found == examine(kit.row("What is it?\n<image>", "A bus.", images=["a.png"]), family=family).sample
        assert "What is it?\n<|" in processors(family).tokenizer.decode(list(found.ids))

    @pytest.mark.parametrize(
        "literal", ["<|image_pad|>", "<|vision_start|>", "<|im_end|>", "<|begin_of_image|>", "<|image|>", "<|user|>"]
    )
    def test_literal_tokens_add_no_image_token_and_move_no_mask(self, examine, processors, tmp_path, family, literal):
        """B46: in the question and in the answer, beside a real image."""
        kit.picture(tmp_path / "x.png")
        row = kit.row(f"<image>what {literal}", f"it is {literal}!", "q", "a", images=["x.png"])
        found, processor = examine(row, family=family).sample, processors(family)
        assert found.ids.count(processor.image_token_id) == 16
        assert trained(processor, found) == [f"it is {literal}!{ENDS[family]}", f"a{ENDS[family]}"]


PROMPTS = {
    "glm4v_moe": [
        "[gMASK]<sop><|system|>\nrules<|user|>\nsee ",
        "this<|assistant|>\n",
        "it is<|user|>\nwhy?<|assistant|>\n<think>hm</think>\nso<|user|>",
    ],
    "glm4v": [
        "[gMASK]<sop><|system|>\nrules<|user|>\nsee ",
        "this<|assistant|>\nit is<|user|>\nwhy?<|assistant|>\n<think>hm</think>so<|user|>",
    ],
    "qwen2_vl": [
        "<|im_start|>system\nrules<|im_end|>\n<|im_start|>user\nsee ",
        "this<|im_end|>\n<|im_start|>assistant\nit is<|im_end|>\n"
        "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n<think>hm</think>so<|im_end|>\n",
    ],
}
"""All that is trained of a conversation with `train_on_prompt`: not the image, nor the think block the template adds."""


class TestPrompts:
    @pytest.mark.parametrize("family", FORMATS)
    def test_everything_else_is_trained(self, examine, processors, tmp_path, family):
        kit.picture(tmp_path / "x.png")
        row = kit.row("see <image>this", "it is", "why?", "<think>hm</think>so", system="rules", images=["x.png"])
        plain, found = (examine(row, family=family, train_on_prompt=on).sample for on in (False, True))
        assert trained(processors(family), found) == PROMPTS[family]
        assert found.ids == plain.ids and found.labelled > plain.labelled

    @pytest.mark.parametrize("family", ["glm4v", "qwen2_vl"])
    @fuzz(25)
    @given(conversation=conversations(question=WITH_IMAGES, answer=WITH_IMAGES))
    def test_only_images_are_left_out(self, processors, templates, family, conversation):
        """Where the template adds no thought: every other token is trained."""
        turns, pictures = conversation
        tokens = counts(processors(family), pictures)
        found = templates(family, train_on_prompt=True).encode(turns, tokens)
        assert found.ids == templates(family).encode(turns, tokens).ids
        assert len(found.ids) - sum(end - start for start, end in found.trained) == sum(tokens) + 2 * len(tokens)

    @pytest.mark.parametrize("family", FORMATS)
    def test_an_image_is_no_answer_to_learn_from(self, examine, tmp_path, family):
        """An image is not trained: the end token alone would be."""
        kit.picture(tmp_path / "a.png")
        assert examine(kit.row("q", " <image>\n", images=["a.png"]), family=family).dropped == "no answer to learn from"
        found = examine(kit.row("q", "<image>", "q", "a", images=["a.png"]), family=family, mask_history=True)
        assert found.sample and examine(kit.row("q", "so <image>", images=["a.png"]), family=family).sample

    def test_a_prompt_alone_is_enough_to_learn_from(self, examine):
        assert examine(kit.row("q", "")).dropped == "no answer to learn from"
        assert examine(kit.row("q", ""), train_on_prompt=True).sample
        assert examine(kit.row(" ", ""), train_on_prompt=True).dropped == "no answer to learn from"


class TestFaults:
    def test_a_fault_of_the_row(self, examine):
        found = examine(kit.row("<image>", "b", images=["http://x/y.png"]), on_broken_image="drop")
        assert "got a http:// address, expected a path" in found.fault and found.sample is None is found.dropped
        names = ["a\0b.png", "\ud800.png", "a" * 5000, "http://[x"]
        assert all(examine(kit.row("<image>", "b", images=[name])).fault for name in names)
        assert "at most one <think>" in examine(kit.row("a", "<think>b")).fault

    @pytest.mark.parametrize(
        ("make", "kind", "reason"),
        [
            (lambda path: None, "missing image", "no such file"),
            (lambda path: path.write_bytes(b""), "broken image", "not a readable image"),
            (lambda path: path.write_bytes(encoded(kit.pattern(60, 60))[:-30]), "broken image", "broken or truncated"),
            (
                lambda path: kit.pattern(60, 60).save(
                    path, "GIF", save_all=True, append_images=[kit.pattern(60, 60, 5)]
                ),
                "animated image",
                "2 frames; give one frame",
            ),
        ],
    )
    def test_an_image_is_refused_or_its_row_dropped(self, examine, tmp_path, make, kind, reason):
        make(tmp_path / "a.png")
        row = kit.row("<image>", "b", images=["a.png"])
        assert f"image '{tmp_path}/a.png': {reason}" in examine(row).fault
        found = examine(row, on_broken_image="drop")
        assert found.dropped == f"{kind} (on_broken_image)" and found.fault is None is found.sample

    def test_a_truncated_image_needs_decoding_to_be_found(self, examine, tmp_path):
        (tmp_path / "a.jpg").write_bytes(encoded(kit.pattern(200, 200), "JPEG")[:-300])
        row = kit.row("<image>", "b", images=["a.jpg"])
        assert examine(row).fault and examine(row, decode=False).sample

    def test_the_first_frame(self, examine, tmp_path):
        first, other = kit.pattern(60, 60), kit.pattern(60, 60, 5)
        first.save(tmp_path / "a.png", save_all=True, append_images=[other])
        sample = examine(kit.row("<image>", "b", images=["a.png"]), on_animated_image="first_frame").sample
        assert load_rgb(sample.images[0]).tobytes() == first.tobytes()


PIECES = ["<image>", "<think>", "</think>", "x", "\n", "", "\ud800", "é", "/nothink", "<ima", "ge>", *LITERALS]
WORDS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
SOURCES = st.sampled_from(
    ["a.png", "no.png", "http://x", "file://[", "data:,", "\ud800", {"bytes": "aGk="}, b"x", None, 1]
)
PARTS = st.builds(lambda text: {"type": "text", "text": text}, WORDS) | st.builds(
    lambda image: {"type": "image", "image": image}, SOURCES
)
CONTENTS = st.lists(WORDS | st.lists(PARTS, max_size=3), min_size=2, max_size=6).filter(
    lambda texts: len(texts) % 2 == 0
)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"train_on_prompt": True, "cutoff_len": 30, "on_broken_image": "drop"}])
@pytest.mark.parametrize("family", FORMATS)
@fuzz(300)
@given(contents=CONTENTS, sources=st.lists(SOURCES, max_size=3))
def test_no_row_raises(examine, tmp_path, family, options, contents, sources):
    """Whatever stands in it, a row has one outcome, and a sample has something to learn."""
    kit.picture(tmp_path / "a.png")
    found = examine(kit.row(*contents, images=sources), family=family, **options)
    assert [found.sample, found.dropped, found.fault].count(None) == 2
    assert found.sample is None or (found.sample.labelled and len(found.sample.ids) <= options.get("cutoff_len", 4096))


class TestMade:
    def test_from_the_folder(self, folder, examine, tmp_path):
        """As a worker makes it: from the configuration alone."""
        kit.picture(tmp_path / "a.png", 560, 560)
        row = kit.row("<image>", "b", images=["a.png"])
        config = kit.data_config(folder, tmp_path, image_max_pixels=56 * 56)
        found = Examiner.load(config, decode=True).examine(5, row).sample
        assert found.id == 5 and found.grids == ((1, 4, 4),)
        assert found.ids == examine(row, image_max_pixels=56 * 56).sample.ids != examine(row).sample.ids

    @pytest.mark.parametrize("family", FORMATS)
    @pytest.mark.parametrize(
        ("least", "most", "side", "tokens"), [(784, 112 * 112, 560, 16), (224 * 224, 448 * 448, 56, 64)]
    )
    def test_bounds_act_from_the_yaml_and_are_saved(self, folders, tmp_path, family, least, most, side, tokens):
        """B49: what the YAML of the FSDP2 target says in its data section, an override too."""
        bounds = {"image_min_pixels": least, "image_max_pixels": most, "model_name_or_path": str(folders(family))}
        key = "data.dataset_param.preprocess_parameters"
        config = load_config(YAML, [f"{key}.{name}={value}" for name, value in bounds.items()]).data
        make_processor(config).save_pretrained(tmp_path / "saved")
        for processor in (make_processor(config), load_processor(tmp_path / "saved")):
            made = processor.image_processor(images=[kit.pattern(side, side)], return_tensors="pt")
            assert len(made["pixel_values"]) == 4 * tokens
            assert image_grid(processor, side, side) == tuple(made["image_grid_thw"][0].tolist())

    def test_no_slow_tokenizer(self, folder, tmp_path):
        config = kit.data_config(folder, tmp_path, use_fast_tokenizer=False)
        with pytest.raises(UserError, match=r"use_fast_tokenizer is false: \w+ of .* has no slow form"):
            make_processor(config)

    @pytest.mark.parametrize(("pad", "eos"), [("<|endoftext|>", "<|endoftext|>"), ("<|user|>", "<|endoftext|>")])
    def test_pads_that_end_a_text_cannot_be_trained(self, folder, tmp_path, pad, eos):
        """The tokenizer's own end, or the template's."""
        config = kit.data_config(folder, tmp_path, ignore_pad_token_for_loss=False)
        processor = make_processor(config)
        processor.tokenizer.pad_token, processor.tokenizer.eos_token = pad, eos
        with pytest.raises(UserError, match=f"ignore_pad_token_for_loss is false, and the pad token {re.escape(pad)}"):
            make_template(config, processor)

    def test_pads_are_trained_when_told(self, folders, processors, tmp_path):
        """Qwen's pad token is none of its end tokens: pads are labels, the rest of the batch is as it was."""
        rows = [GOOD, kit.row("q", "a far longer answer than that")]
        model = kit.model_config(processors("qwen2_vl"))

        def first(**changes):
            config = kit.data_config(folders("qwen2_vl"), tmp_path, rows, template="qwen2vl", shuffle=False, **changes)
            loader = build_loader(config, model_config=model, micro_batch_size=2, global_batch_size=2)
            return next(iter(loader))

        plain, told = first(), first(ignore_pad_token_for_loss=False)
        pads = told["attention_mask"] == 0
        assert pads.any() and torch.equal(told["input_ids"], plain["input_ids"])
        assert (told["labels"][pads] == processors("qwen2_vl").tokenizer.pad_token_id).all()
        assert (plain["labels"][pads] == IGNORE).all() and torch.equal(told["labels"][~pads], plain["labels"][~pads])
