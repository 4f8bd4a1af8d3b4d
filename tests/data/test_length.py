"""`cutoff_len` (B08): whole turns and whole images, in every format; a sample with an answer, or a reason."""

from __future__ import annotations

import pytest

from mm_models.components.loss import IGNORE
from mm_models.data.collator import NEEDS, VisionLanguageCollator
from mm_models.data.dataset import ChatDataset
from mm_models.data.positions import mrope
from tests.data import kit

FORMATS = ["glm4v_moe", "glm4v", "qwen2_vl"]
CHAT = ("<image>first", "one", "second", "two", "third <image>", "three")
"""112 x 112 each: 16 tokens an image."""


@pytest.fixture
def names(tmp_path):
    return [kit.picture(tmp_path / f"{seed}.png", seed=seed).name for seed in range(2)]


def batch(processor, sample):
    collate = VisionLanguageCollator(processor=processor, positions=mrope, needs=NEEDS - {"pixels"})
    return collate([sample])


@pytest.mark.parametrize("family", FORMATS)
def test_every_cutoff(examine, processors, names, family):
    """From one token to one more than all: the sample is the longest run of whole turns that fits."""
    processor, decode = processors(family), processors(family).tokenizer.decode
    whole = [
        examine(kit.row(*CHAT[:end], images=names[:count]), family=family).sample
        for end, count in ((2, 1), (4, 1), (6, 2))
    ]
    lengths = [len(sample.ids) for sample in whole]
    row = kit.row(*CHAT, images=names)
    for cutoff in range(1, lengths[-1] + 2):
        found = examine(row, family=family, cutoff_len=cutoff)
        fitting = [sample for sample in whole if len(sample.ids) <= cutoff]
        if not fitting:
            assert found.sample is None and found.dropped == f"longer than cutoff_len {cutoff}" and not found.notes
            continue
        assert found.sample == fitting[-1]
        cut = (f"turns at the end left out to fit cutoff_len {cutoff}",)
        assert found.notes == (() if fitting[-1] is whole[-1] else cut)
        made = batch(processor, found.sample)
        assert made["position_ids"].shape == (3, *made["input_ids"].shape)
        grid = made["image_grid_thw"]
        assert found.sample.ids.count(processor.image_token_id) == grid.prod(dim=1).sum() // 4
        assert len(found.sample.images) == len(grid)
        answers = decode(made["labels"][made["labels"] != IGNORE].tolist())
        assert answers.count("one") == 1 and ("two" in answers) == (cutoff >= lengths[1])
    dropped = {examine(row, family=family, cutoff_len=cutoff, cutoff="drop").dropped for cutoff in lengths[:2]}
    assert dropped == {f"longer than cutoff_len {cutoff}" for cutoff in lengths[:2]}
    assert examine(row, family=family, cutoff_len=lengths[-1], cutoff="drop").sample == whole[-1]


def test_a_very_long_conversation_is_cut_quickly(examine):
    """A thousand questions: not one attempt per question."""
    found = examine(kit.row(*["q", "a"] * 1000), cutoff_len=1024).sample
    assert 1000 < len(found.ids) <= 1024 and found == examine(kit.row(*["q", "a"] * (len(found.trained)))).sample


def test_what_is_left_may_have_no_answer(examine):
    """B14: the first answer is empty, the one that was cut was not."""
    found = examine(kit.row("q", "", "q", "a long answer"), cutoff_len=20)
    assert found.dropped == "no answer to learn from"
    assert found.notes == ("turns at the end left out to fit cutoff_len 20",)


def test_the_last_answer_that_is_left_is_trained(examine, processors):
    found = examine(kit.row("q", "a", "q", "a long answer"), cutoff_len=20, mask_history=True).sample
    assert [processors("glm4v_moe").tokenizer.decode(list(found.ids[a:b])) for a, b in found.trained] == ["a<|user|>"]


def test_a_thought_comes_back_when_its_turn_becomes_the_last(examine, processors):
    row = kit.row("q", "<think>why</think>a", "q", "an answer that is far too long to fit into it")
    whole = examine(row).sample
    found = examine(row, cutoff_len=len(whole.ids) - 1).sample
    assert found == examine(kit.row("q", "<think>why</think>a")).sample
    assert "why" in processors("glm4v_moe").tokenizer.decode(list(found.ids))


def test_an_image_of_a_turn_that_is_cut_is_examined_too(examine, names):
    row = kit.row(*CHAT, images=[names[0], "absent.png"])
    assert "absent.png': no such file" in examine(row, cutoff_len=40).fault


def test_the_system_text_stays(examine, processors):
    found = examine(kit.row("q", "a", "q", "an answer that is too long", system="rules"), cutoff_len=24).sample
    text = processors("glm4v_moe").tokenizer.decode(list(found.ids))
    assert "rules" in text and "too long" not in text


def test_the_report_lists_what_was_cut_and_dropped(folder, processor, template, tmp_path):
    long = "an answer that is far too long"
    chats = [kit.row("q", "a"), kit.row("q", "a", "q", long), kit.row("q", long), kit.row("q", "a", "q", long)]
    found = ChatDataset(kit.data_config(folder, tmp_path, chats, cutoff_len=24), processor, template)
    assert [sample.id for sample in found] == [0, 1, 3]
    lines = "\n".join(found.report.lines())
    assert "dropped: longer than cutoff_len 24: 1 rows: 2" in lines
    assert "note: turns at the end left out to fit cutoff_len 24: 2 rows: 1, 3" in lines
