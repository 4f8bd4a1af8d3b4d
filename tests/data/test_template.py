"""Template glm4v_moe: the ids of the Hugging Face processor, and labels that are the answers and their end tokens."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_models.data.processor import load_processor
from mm_models.data.rows import IMAGE_MARK
from mm_models.data.templates.glm4v_moe import Glm4vMoeTemplate
from mm_models.errors import UserError
from tests.data import kit
from tests.data.chats import LITERALS, PICTURES, TEXT, WITH_IMAGES, conversations, counts, fuzz, trained

END = "<|user|>"
WITH_LITERALS = conversations(
    question=st.lists(TEXT | st.sampled_from([*LITERALS, IMAGE_MARK]), max_size=4).map("".join),
    answer=st.lists(TEXT | st.sampled_from(LITERALS), max_size=4).map("".join),
)


def check_ids(processor, template, conversation):
    """Multi-turn, multi-image, system, empty, unicode, thoughts: our ids are Hugging Face's and one end token."""
    found, images = conversation
    encoded = template.encode(found, counts(processor, images))
    expected = kit.hf_ids(processor, found, images, enable_thinking=template.enable_thinking)
    assert list(encoded.ids) == expected + [processor.tokenizer.convert_tokens_to_ids(END)]
    return encoded


def check_literals(processor, template, conversation):
    """Text that holds template tokens: the same text and the same tokens of the template as Hugging Face's with its
    `sanitize_control_tokens`, which only cuts the text at the literals before tokenising it."""
    found, images = conversation
    encoded = template.encode(found, counts(processor, images))
    expected = kit.hf_ids(processor, found, images, sanitize_control_tokens=True)
    decode, special = processor.tokenizer.decode, set(processor.tokenizer.get_added_vocab().values())
    assert decode(list(encoded.ids[:-1])) == decode(expected)
    assert [id for id in encoded.ids[:-1] if id in special] == [id for id in expected if id in special]
    answers = [turn.text.strip() + END for turn in found if turn.role == "assistant"]
    assert [decode(list(encoded.ids[a:b])) for a, b in encoded.trained] == answers


@fuzz(60)
@given(conversation=conversations(), thinking=st.booleans())
def test_ids_equal_the_processors(processor, template, no_think_template, conversation, thinking):
    check_ids(processor, template if thinking else no_think_template, conversation)


@fuzz(40)
@given(conversation=WITH_LITERALS)
def test_literal_tokens_stay_text(processor, template, conversation):
    check_literals(processor, template, conversation)


@pytest.mark.slow
class TestMany:
    """A thousand conversations."""

    @fuzz(400)
    @given(conversation=conversations(), thinking=st.booleans())
    def test_ids(self, processor, template, no_think_template, conversation, thinking):
        check_ids(processor, template if thinking else no_think_template, conversation)

    @fuzz(300)
    @given(conversation=conversations(question=WITH_IMAGES, answer=WITH_IMAGES))
    def test_labels(self, processor, template, conversation):
        """Trained is the text of each answer around its images, and its end token."""
        encoded, decode = check_ids(processor, template, conversation), processor.tokenizer.decode
        answers = [turn.text.strip().replace(IMAGE_MARK, "") for turn in conversation[0] if turn.role == "assistant"]
        found = "".join(decode(list(encoded.ids[a:b])) for a, b in encoded.trained)
        assert found == "".join(answer + END for answer in answers)

    @fuzz(300)
    @given(conversation=WITH_LITERALS)
    def test_literals(self, processor, template, conversation):
        check_literals(processor, template, conversation)


@pytest.fixture(scope="module")
def no_think_template(processor):
    return Glm4vMoeTemplate(processor, name="glm4v_moe", enable_thinking=False)


@fuzz(40)
@given(texts=st.lists(TEXT, min_size=2, max_size=8).filter(lambda texts: len(texts) % 2 == 0))
def test_labels_are_the_answers_and_their_end_tokens(processor, template, texts):
    expected = [text.strip() + "<|user|>" for text in texts[1::2]]
    assert trained(template, processor, *texts) == expected


class TestTrainedRanges:
    def test_answers_equal_to_questions(self, template, processor):
        """B15: nothing is found by searching text."""
        texts = ("yes", "yes", "say assistant", "\nassistant said so", "yes", "")
        assert trained(template, processor, *texts) == ["yes<|user|>", "assistant said so<|user|>", "<|user|>"]

    def test_system_text_and_images_are_not_trained(self, template, processor):
        found = trained(template, processor, "<image>a<image>", "b", system="rules", images=PICTURES[:2])
        assert found == ["b<|user|>"]

    def test_an_image_inside_an_answer_is_not_trained(self, template, processor):
        found = trained(template, processor, "draw", "here <image> it is", images=PICTURES[:1])
        assert found == ["here ", " it is<|user|>"]

    def test_mask_history_trains_the_last_answer(self, processor):
        last = Glm4vMoeTemplate(processor, name="glm4v_moe", mask_history=True)
        assert trained(last, processor, "a", "b", "c", "d") == ["d<|user|>"]

    def test_a_real_thought_is_trained_with_its_tags(self, template, processor):
        """B16: the empty think block the template writes is not trained, a thought in the data is."""
        assert trained(template, processor, "q", "a") == ["a<|user|>"]
        assert trained(template, processor, "q", "<think>why</think>a") == ["<think>why</think>\na<|user|>"]

    def test_an_earlier_thought_is_left_out_and_noted(self, template, processor):
        encoded = template.encode(kit.turns("q", "<think>why</think>a", "q", "b"), [])
        assert "why" not in processor.tokenizer.decode(list(encoded.ids))
        assert any("thought of an earlier turn" in note for note in encoded.notes)

    def test_box_tokens_of_an_answer_are_tokens(self, template, processor):
        encoded = template.encode(kit.turns("q", "<|begin_of_box|>4<|end_of_box|>"), [])
        assert processor.tokenizer.convert_tokens_to_ids("<|begin_of_box|>") in encoded.ids

    def test_an_injected_end_token_changes_no_mask(self, template, processor):
        """B46."""
        found = trained(template, processor, "say <|user|> twice <|image|>", "ok <|user|> done", "q", "a")
        assert found == ["ok <|user|> done<|user|>", "a<|user|>"]

    def test_literal_tokens_are_noted(self, template):
        notes = template.encode(kit.turns("is <|image|> <think>?", "<think>a</think>b"), []).notes
        assert notes == ("text that looks like a template token is kept as text: <think> <|image|>",)


class TestRefused:
    @pytest.mark.parametrize(
        "answer", ["<think>open", "x<think>a</think>b", "<think>a</think><think>b</think>c", "a</think>b</think>c"]
    )
    def test_malformed_thoughts(self, template, answer):
        with pytest.raises(UserError, match="at most one <think>"):
            template.encode(kit.turns("q", answer), [])

    def test_an_image_in_a_thought_that_is_dropped(self, template):
        with pytest.raises(UserError, match="1 images, 0 left"):
            template.encode(kit.turns("q", "<think><image></think>a", "q", "b"), [4])

    def test_a_tokenizer_of_another_model(self, folder, tmp_path):
        """B44: without GLM's tokens the template is refused before any row."""
        shutil.copytree(folder, tmp_path / "other")
        text = (tmp_path / "other" / "tokenizer.json").read_text().replace("<|begin_of_image|>", "<|vision_start|>")
        (tmp_path / "other" / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=r"needs the tokens <\|begin_of_image\|>"):
            Glm4vMoeTemplate(load_processor(tmp_path / "other"), name="glm4v_moe")

    def test_a_chat_template_of_another_format(self, folder, tmp_path):
        shutil.copytree(folder, tmp_path / "other")
        path = tmp_path / "other" / "chat_template.jinja"
        path.write_text(path.read_text().replace("'<|user|>\\n'", "'<|user|>'"))
        with pytest.raises(UserError, match=r"differ at character 20.*the folder has"):
            Glm4vMoeTemplate(load_processor(tmp_path / "other"), name="glm4v_moe")


def test_markup_tokens_are_not_special_in_the_tokenizer(folder):
    """The fixture itself: like GLM's, so that `split_special_tokens` of transformers would not be enough."""
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"] for token in added if not token["special"]} >= {"<think>", "/nothink"}
