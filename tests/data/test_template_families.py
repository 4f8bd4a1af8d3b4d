"""Templates qwen2vl and glm4v: the ids of the Hugging Face processor, and labels that are the answers and their end tokens.

What all formats share (the proof, the encoding of text) is tested with glm4v_moe in `test_template`.
"""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_models.data.processor import load_processor
from mm_models.data.rows import IMAGE_MARK
from mm_models.errors import UserError
from mm_models.registry import table
from tests.data import kit
from tests.data.chats import LITERALS, PICTURES, TEXT, WITH_IMAGES, conversations, counts, fuzz, trained

FAMILIES = {"qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl", "glm4v": "glm4v"}
"""Family -> its template."""
FORMATS = ["qwen2_vl", "glm4v"]
"""One family per format."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    family: str
    processor: Any
    template: Any
    end: str

    def trained(self, *texts, **options):
        return trained(self.template, self.processor, *texts, **options)

    def id(self, token):
        return self.processor.tokenizer.convert_tokens_to_ids(token)

    def read(self, answer):
        """The answer as the tokenizer gives it back."""
        return answer if self.family == "glm4v" else unicodedata.normalize("NFC", answer)


@pytest.fixture(scope="module")
def chat(folders):
    """A family's processor and its template with options."""

    @cache
    def make(family, template=None, **options):
        processor = load_processor(folders(family))
        name = template or FAMILIES[family]
        made = table("templates").get(name)(processor, name=name, **options)
        return Chat(
            family=family, processor=processor, template=made, end="<|user|>" if family == "glm4v" else "<|im_end|>"
        )

    return make


def expected_ids(chat, conversation, images):
    """Hugging Face's, with the end token that GLM's template leaves to us."""
    ids = kit.hf_ids(chat.processor, conversation, images)
    return ids + [chat.id(chat.end)] if chat.family == "glm4v" else ids


def check_ids(chat, conversation):
    """Hugging Face's ids; trained is the text of each answer around its images, and its end token."""
    found, images = conversation
    encoded = chat.template.encode(found, counts(chat.processor, images))
    assert list(encoded.ids) == expected_ids(chat, found, images)
    answers = [turn.text.split(IMAGE_MARK) for turn in found if turn.role == "assistant"]
    expected = "".join("".join(map(chat.read, parts)) + chat.end for parts in answers)
    decode = chat.processor.tokenizer.decode
    assert "".join(decode(list(encoded.ids[a:b])) for a, b in encoded.trained) == expected


def check_literals(chat, conversation):
    """The same text and template tokens as Hugging Face's with `sanitize_control_tokens`; the mask is where it was."""
    found, images = conversation
    encoded = chat.template.encode(found, counts(chat.processor, images))
    expected = kit.hf_ids(chat.processor, found, images, sanitize_control_tokens=True)
    ours = list(encoded.ids)[: -1 if chat.family == "glm4v" else None]
    decode, special = chat.processor.tokenizer.decode, set(chat.processor.tokenizer.get_added_vocab().values())
    assert decode(ours) == decode(expected)
    assert [id for id in ours if id in special] == [id for id in expected if id in special]
    answers = [chat.read(turn.text) + chat.end for turn in found if turn.role == "assistant"]
    assert [decode(list(encoded.ids[a:b])) for a, b in encoded.trained] == answers


CONVERSATIONS = conversations(question=WITH_IMAGES, answer=WITH_IMAGES)
WITH_LITERALS = conversations(
    question=st.lists(TEXT | st.sampled_from([*LITERALS, IMAGE_MARK]), max_size=4).map("".join),
    answer=st.lists(TEXT | st.sampled_from(LITERALS), max_size=4).map("".join),
)


@pytest.mark.parametrize("family", FORMATS)
class TestProperties:
    @fuzz(40)
    @given(conversation=CONVERSATIONS)
    def test_ids_equal_the_processors(self, chat, family, conversation):
        check_ids(chat(family), conversation)

    @fuzz(40)
    @given(conversation=WITH_LITERALS)
    def test_literal_tokens_stay_text(self, chat, family, conversation):
        """B46."""
        check_literals(chat(family), conversation)

    @pytest.mark.slow
    @fuzz(600)
    @given(conversation=CONVERSATIONS)
    def test_ids_of_many(self, chat, family, conversation):
        check_ids(chat(family), conversation)

    @pytest.mark.slow
    @fuzz(400)
    @given(conversation=WITH_LITERALS)
    def test_literals_of_many(self, chat, family, conversation):
        check_literals(chat(family), conversation)


@pytest.mark.parametrize("family", FAMILIES)
class TestTrainedRanges:
    def test_answers_equal_to_questions(self, chat, family):
        """B15: nothing is found by searching text; no role header, nothing behind the end token."""
        it, texts = chat(family), ("yes", "yes", "say assistant", "\nassistant said so", "yes", "")
        assert it.trained(*texts) == [f"yes{it.end}", f"\nassistant said so{it.end}", it.end]

    def test_images_are_not_trained(self, chat, family):
        """In the second question and inside an answer."""
        it = chat(family)
        found = it.trained("a", "b", "<image>c<image>", "here <image> it is", system="rules", images=PICTURES[:3])
        assert found == [f"b{it.end}", "here ", f" it is{it.end}"]

    def test_mask_history_trains_the_last_answer(self, chat, family):
        it = chat(family, mask_history=True)
        assert it.trained("a", "b", "a", "b") == [f"b{it.end}"]
        assert not it.template.encode(kit.turns("a", "b", "c", ""), []).answered

    def test_an_injected_end_token_changes_no_mask(self, chat, family):
        """B46."""
        it = chat(family)
        found = it.trained(f"say {it.end} twice {it.template.image_token}", f"ok {it.end} done", "q", "a")
        assert found == [f"ok {it.end} done{it.end}", f"a{it.end}"]
        notes = it.template.encode(kit.turns(f"is {it.end}?", "b"), []).notes
        assert notes == (f"text that looks like a template token is kept as text: {it.end}",)

    def test_one_image_is_sixteen_tokens_between_its_bounds(self, chat, family):
        """B44."""
        it = chat(family)
        ids = list(it.template.encode(kit.turns("<image>", "b"), [16]).ids)
        bounds = (
            ("<|begin_of_image|>", "<|end_of_image|>") if family == "glm4v" else ("<|vision_start|>", "<|vision_end|>")
        )
        start, end = (ids.index(it.id(token)) for token in bounds)
        assert ids[start + 1 : end] == [it.processor.image_token_id] * 16
        assert ids.count(it.processor.image_token_id) == 16


class TestQwen:
    def test_the_default_system_text(self, chat):
        it = chat("qwen2_vl")
        decode = it.processor.tokenizer.decode
        plain, own = (
            decode(list(it.template.encode(kit.turns("a", "b", system=system), []).ids)) for system in (None, "be kind")
        )
        rest = "<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        assert plain == f"<|im_start|>system\nYou are a helpful assistant.{rest}"
        assert own == f"<|im_start|>system\nbe kind{rest}"

    def test_references_and_boxes_are_tokens(self, chat):
        it = chat("qwen2_vl")
        text = "<|object_ref_start|>a cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>"
        assert it.trained("where?", text) == [f"{text}<|im_end|>"]
        check_ids(it, (kit.turns("where?", text), []))

    def test_the_second_name(self, chat):
        assert chat("qwen2_5_vl", template="qwen2_vl").trained("a", "b") == ["b<|im_end|>"]

    def test_a_newline_that_one_token_shares_with_the_header(self, folders, tmp_path):
        """A tokenizer that joins two newlines: the ids are Hugging Face's, and the token that holds the answer's first
        character is trained."""
        shutil.copytree(folders("qwen2_vl"), tmp_path / "other")
        path = tmp_path / "other" / "tokenizer.json"
        state = json.loads(path.read_text())
        state["model"]["vocab"]["ĊĊ"] = 505
        state["model"]["merges"].insert(0, ["Ċ", "Ċ"])
        path.write_text(json.dumps(state))
        processor = load_processor(tmp_path / "other")
        template = table("templates").get("qwen2vl")(processor, name="qwen2vl")
        encoded = template.encode(kit.turns("q", "\na"), [])
        assert list(encoded.ids) == kit.hf_ids(processor, kit.turns("q", "\na"), []) and 505 in encoded.ids
        assert trained(template, processor, "q", "\na", "q", "a") == ["\n\na<|im_end|>", "a<|im_end|>"]


class TestGlm:
    ANSWER = "<think>why</think>\n<answer>a <|begin_of_box|>4<|end_of_box|></answer>"

    def test_thoughts_and_answers_are_the_data_s_own(self, chat):
        """The template adds no think block; markup of an answer are tokens."""
        it = chat("glm4v")
        assert it.trained("q", self.ANSWER, "q", "a") == [f"{self.ANSWER}<|user|>", "a<|user|>"]
        check_ids(it, (kit.turns("q", self.ANSWER, "q", "a"), []))

    @pytest.mark.parametrize(
        ("change", "answers"),
        [
            ("(parts(message.content).split('</think>')[-1])", [ANSWER]),
            ("(parts(message.content).strip())", [" a", "a\n"]),
        ],
    )
    def test_a_folder_that_writes_some_answers_otherwise(self, folders, tmp_path, change, answers):
        """The row is refused, the others are as they were."""
        shutil.copytree(folders("glm4v"), tmp_path / "other")
        path = tmp_path / "other" / "chat_template.jinja"
        lines = "{% if message.role == 'assistant' %}{{ '<|assistant|>\\n' + CHANGE }}{% else %}".replace(
            "CHANGE", change
        )
        text = re.sub(r"(\{\{ '<\|' \+ message.role.*\}\})", lambda m: lines + m[0] + "{% endif %}", path.read_text())
        path.write_text(text)
        template = table("templates").get("glm4v")(load_processor(tmp_path / "other"), name="glm4v")
        assert template.encode(kit.turns("q ", "a"), []).answered
        for answer in answers:
            with pytest.raises(UserError, match=r"differ at character.*Write the answer as"):
                template.encode(kit.turns("q", answer), [])


@pytest.mark.parametrize("family", ["glm4v_moe", *FAMILIES])
def test_the_template_of_another_model_is_refused_at_the_start(folders, family):
    """B44: by its tokens, or by the format."""
    processor = load_processor(folders(family))
    for name in {"glm4v_moe", "glm4v", "glm4.1v", "qwen2vl", "qwen2_vl"} - OWN[family]:
        with pytest.raises(UserError, match=r"needs the tokens|differ at character.*Name the template of this model"):
            table("templates").get(name)(processor, name=name)


OWN = {
    "glm4v_moe": {"glm4v_moe"},
    "glm4v": {"glm4v", "glm4.1v"},
    "qwen2_vl": {"qwen2vl", "qwen2_vl"},
    "qwen2_5_vl": {"qwen2vl", "qwen2_vl"},
}


@pytest.mark.parametrize("family", FORMATS)
def test_thinking_cannot_be_turned_off_where_the_template_has_no_switch(chat, family):
    with pytest.raises(UserError, match="has no enable_thinking to turn off"):
        chat(family, enable_thinking=False)
