"""Conversations for property tests, and the pictures they hold."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mm_models.data.processor import image_grid
from mm_models.data.rows import IMAGE_MARK
from tests.data import kit

SIZES = ((56, 56), (112, 84), (90, 150), (30, 200))
PICTURES = [kit.pattern(*size, seed) for seed, size in enumerate(SIZES)]
LITERALS = [
    "<|image|>",
    "<|user|>",
    "<|assistant|>",
    "<|endoftext|>",
    "<|begin_of_image|>",
    "<|video|>",
    "[gMASK]",
    "<sop>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
]

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>|[]/\x00"), max_size=12)
TEXT = st.lists(WORDS | st.sampled_from(["\n", " ", "", "don't", "12345", "你好", "🙂", "e\u0301"]), max_size=4).map(
    "".join
)
WITH_IMAGES = st.lists(TEXT | st.just(IMAGE_MARK), max_size=4).map("".join)
QUESTION = st.builds(str.__add__, WITH_IMAGES, st.sampled_from(["", "", "/nothink"]))
THOUGHT = TEXT.map(lambda text: f"<think>{text}</think>")
ANSWER = st.builds(lambda thought, text: thought + text, st.just("") | THOUGHT, WITH_IMAGES)


@st.composite
def conversations(draw, question=QUESTION, answer=ANSWER):
    texts = [draw(question if index % 2 == 0 else answer) for index in range(2 * draw(st.integers(1, 4)))]
    found = kit.turns(*texts, system=draw(st.none() | TEXT))
    count = sum(turn.text.count(IMAGE_MARK) for turn in found)
    return found, [PICTURES[draw(st.integers(0, len(PICTURES) - 1))] for _ in range(count)]


def fuzz(examples):
    """Settings of a property test: so many conversations, however long one takes."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def counts(processor, images):
    """Image tokens of each picture."""
    return [
        image_grid(processor, image.height, image.width)[1] * image_grid(processor, image.height, image.width)[2] // 4
        for image in images
    ]


def trained(template, processor, *texts, images=(), **options):
    """Each trained range, decoded."""
    encoded = template.encode(kit.turns(*texts, **options), counts(processor, images))
    return [processor.tokenizer.decode(list(encoded.ids[a:b])) for a, b in encoded.trained]
