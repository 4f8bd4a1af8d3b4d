"""Rows as people have them on disk: every format gives the same conversation, and a wrong one is refused with its reason."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_models.config.data import Attributes
from mm_models.data.images import ImageBytes
from mm_models.data.rows import IMAGE_MARK, parse_row
from mm_models.errors import UserError
from tests.data import kit
from tests.data.chats import fuzz

GOOD = kit.row("hello", "world")
LLAVA = Attributes(
    messages="conversations",
    role_tag="from",
    content_tag="value",
    user_tag="human",
    assistant_tag="gpt",
    images="image",
)
PICTURE = b"the file as it is"
TEXT = base64.b64encode(PICTURE).decode()


def parse(value, **attr):
    return parse_row(0, value, Attributes(**attr))


def chat(*contents):
    """A row of content lists and texts, user and assistant in turn."""
    return {"messages": kit.row(*contents)["messages"]}


def part(kind, **values):
    return {"type": kind, **values}


class TestFormats:
    def test_llava(self):
        """As the published file has it: the mark on a line of its own, one image as text, text rows without the key."""
        row = {
            "id": "000000033471",
            "image": "000000033471.jpg",
            "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A bus."}],
        }
        found = parse_row(7, row, LLAVA)
        assert found.row == 7 and found.images == ("000000033471.jpg",)
        assert found.turns == kit.turns("<image>\nWhat is it?", "A bus.")
        talk = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
        assert all(parse_row(0, talk | empty, LLAVA).images == () for empty in ({}, {"image": None}, {"image": ""}))

    def test_sharegpt_with_system(self):
        row = {
            "conversations": [
                {"from": "system", "value": "rules"},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
            ]
        }
        assert parse_row(0, row, LLAVA).turns == kit.turns("q", "a", system="rules")

    def test_a_column_with_the_system_text(self):
        row = {**GOOD, "prompt": "be kind"}
        assert parse(row, system="prompt").turns == kit.turns("hello", "world", system="be kind")
        assert parse({**GOOD, "prompt": None}, system="prompt").turns == kit.turns("hello", "world")

    def test_content_lists(self):
        """OpenAI's and Hugging Face's parts; nulls are what Parquet makes of absent keys."""
        row = chat(
            [
                part("image_url", image_url={"url": "a.png", "detail": "low"}),
                part("text", text="one "),
                part("image", image="b.png", text=None),
                part("text", text="two"),
            ],
            [part("text", text="an answer")],
            "plain",
            "text",
        )
        found = parse(row)
        assert found.turns == kit.turns("<image>one <image>two", "an answer", "plain", "text")
        assert found.images == ("a.png", "b.png")

    def test_parts_and_marks_without_a_path_take_the_next_image(self):
        row = chat(
            [part("image"), part("text", text=" <image>"), part("image", image="own.png"), part("image", image=None)],
            "a",
        )
        found = parse(row | {"images": ["1.png", "2.png", "3.png"]})
        assert found.turns[0].text == "<image> <image><image><image>"
        assert found.images == ("1.png", "2.png", "own.png", "3.png")

    @pytest.mark.parametrize(
        ("written", "expected"),
        [
            ("a b.png", "a b.png"),
            ({"path": "a.png"}, "a.png"),
            ({"path": "a.png", "bytes": None}, "a.png"),
            ({"bytes": TEXT}, ImageBytes(data=PICTURE)),
            ({"bytes": PICTURE, "path": "a.png"}, ImageBytes(data=PICTURE, name="a.png")),
            ({"bytes": PICTURE, "path": None}, ImageBytes(data=PICTURE)),
            (PICTURE, ImageBytes(data=PICTURE)),
            (f"data:image/png;base64,{TEXT}", ImageBytes(data=PICTURE, name="data:image/png;base64")),
            (f"DATA:image/png;base64,{TEXT}", ImageBytes(data=PICTURE, name="DATA:image/png;base64")),
        ],
    )
    def test_an_image_may_be_written_as(self, written, expected):
        talk = kit.row("<image>", "b")
        assert parse(talk | {"images": [written]}).images == parse(talk | {"images": written}).images == (expected,)
        assert parse(chat([part("image", image=written)], "b")).images == (expected,)


def message(**values):
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"} | values]}


BAD = {
    "not an object": ("text", "got str, expected an object"),
    "no messages": ({"message": []}, "no key 'messages' (attr.messages), did you mean 'message'"),
    "messages under another name": (
        {"conversations": [], "images": []},
        "no key 'messages' (attr.messages); the row has 'conversations', 'images'",
    ),
    "empty messages": ({"messages": []}, "'messages' is [], expected a list of messages"),
    "no content": ({"messages": [{"role": "user", "value": "x"}]}, "messages[0] has no key 'content'"),
    "unknown role": (
        {"messages": [{"role": "human", "content": "x"}]},
        "role 'human', expected one of 'user' (attr.user_tag), 'assistant' (attr.assistant_tag)",
    ),
    "null content": (message(content=None), "messages[1]: content is NoneType, expected text or a list of parts"),
    "part is no object": (chat([1], "a"), "messages[0]: a part of the content is int, expected an object with a type"),
    "unknown part": (
        chat([part("audio")], "a"),
        "a part of type 'audio', expected one of 'text', 'image', 'image_url'",
    ),
    "part without type": (chat([{"text": "q"}], "a"), "a part of type None"),
    "text part without text": (chat([part("text", text=None)], "a"), "messages[0]: text is NoneType"),
    "image part with two sources": (chat([part("image", image="a", url="b")], "a"), "an image part with 2 sources"),
    "no answer": (kit.row("a", "b", "c"), "turns are user, assistant, user; expected"),
    "two answers": ({"messages": [{"role": "assistant", "content": "x"}] * 2}, "turns are assistant, assistant"),
    "mark without image": (kit.row("<image>a", "b"), "1 <image> marks in the text, 0 images"),
    "image without mark": (kit.row("a", "b", images=["x.png"]), "0 <image> marks in the text, 1 images"),
    "images under another name": (
        {"messages": kit.row("<image>a", "b")["messages"], "image": "x.png"},
        "needs its mark. There is no key 'images' (attr.images), did you mean 'image'?",
    ),
    "part without image": (chat([part("image")], "b"), "1 <image> marks in the text, 0 images"),
    "image beside parts": (
        chat([part("image", image="a.png")], "b") | {"images": ["b.png"]},
        "0 <image> marks in the text, 1 images",
    ),
    "image is a number": ({**GOOD, "images": [1]}, "image 1: expected a path"),
    "image is null": ({**GOOD, "images": [None]}, "image None: expected a path"),
    "image of other keys": ({**GOOD, "images": [{"file": "a"}]}, "image {'file': 'a'}: expected a path"),
    "image of nothing": ({**GOOD, "images": [{"path": None, "bytes": None}]}, "neither a path nor bytes"),
    "not base64": ({**GOOD, "images": [{"bytes": "a.png!"}]}, "image 'bytes': its bytes are not base64 text"),
    "data without base64": ({**GOOD, "images": ["data:image/png,abc"]}, "a data: address without base64 content"),
    "videos": ({**GOOD, "videos": ["a.mp4"]}, "1 videos under 'videos'; video is not supported yet"),
    "a video": ({**GOOD, "videos": "a.mp4"}, "1 videos under 'videos'"),
    "video mark": (kit.row("<video>a", "b"), "a <video> mark; video is not supported yet"),
    "video part": (chat([part("video", video="a.mp4")], "b"), "a part of type 'video'; video is not supported yet"),
    "no unicode": (kit.row("a\ud800", "b"), "half of a surrogate pair"),
    "tool call": (message(tool_calls=[{"id": 1}]), "messages[1]: 'tool_calls' is [{'id': 1}], which has no effect"),
    "thought aside": (message(reasoning_content="hm"), "'reasoning_content' is 'hm', which has no effect here"),
    "weight": (message(weight=0), "'weight' is 0, which has no effect here"),
    "half a weight": (message(weight=0.5), "'weight' is 0.5, which has no effect here"),
    "a switch as text": (message(train="false"), "'train' is 'false', which has no effect here"),
    "loss mask": (message(loss_mask=0), "'loss_mask' is 0, which has no effect here"),
    "image beside the text": (message(images=["a.png"]), "messages[1]: 'images' is ['a.png'], which has no effect"),
    "image in a text part": (
        chat([part("text", text="q", image_url={"url": "a.png"})], "a"),
        "messages[0]: a part of type 'text' with 'image_url'; make it a part of its own",
    ),
    "text in an image part": (
        chat([part("image", image="a.png", text="q")], "a"),
        "messages[0]: a part of type 'image' with 'text'; make it a part of its own",
    ),
    "name of an image": (kit.row("<image>", "a", images=["caf\udce9.png"]), "half of a surrogate pair in the name"),
    "name of an image of bytes": (
        kit.row("<image>", "a", images=[{"bytes": TEXT, "path": "caf\udce9.png"}]),
        "half of a surrogate pair in the name",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    value, reason = BAD[case]
    with pytest.raises(UserError) as caught:
        parse(value)
    assert reason in str(caught.value)


def test_keys_that_ask_for_nothing_are_left_alone():
    """Nulls, and objects of nulls, are what a Parquet file has where a row has no such key."""
    found = parse(message(weight=1.0, train=True, tool_calls=None, name="x") | {"tools": None, "videos": [], "id": 7})
    assert found.turns[1].text == "a" and found.notes == ()
    nothing = {"url": None, "detail": None}
    row = chat([part("text", text="q", image_url=nothing), part("image_url", text="", image_url=nothing)], "a")
    assert parse(row | {"images": ["a.png"]}).images == ("a.png",)
    assert parse(chat([part("image", image="a.png", image_url=nothing)], "a")).images == ("a.png",)
    assert parse(GOOD | {"images": {"bytes": None, "path": None}, "tools": nothing}).images == ()


def test_columns_that_one_may_think_are_read_are_noted():
    """A system text in a column that attr does not name is not trained on, and the report says so."""
    row = {**GOOD, "system": "be kind", "image": "a.png", "tools": "[]", "source": "web"}
    assert parse(row).notes == tuple(
        f"{name!r} is not read, attr does not name it" for name in ("system", "tools", "image")
    )
    assert parse(row | {"image": None, "tools": ""}, system="system").notes == ()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=6)
    | st.sampled_from([IMAGE_MARK, "user", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "images",
                    "role",
                    "content",
                    "type",
                    "text",
                    "image",
                    "image_url",
                    "path",
                    "bytes",
                    "url",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "image_url", "video"])}, optional={"text": JSON, "image": JSON}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": JSON | st.lists(PART, max_size=3)}
)
ROW = JSON | st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3)}, optional={"images": JSON})


def check(value):
    """Refused with a reason of one line, or a conversation whose marks are its images."""
    try:
        found = parse(value)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert sum(turn.text.count(IMAGE_MARK) for turn in found.turns) >= len(found.images)
        assert [turn.role for turn in found.turns][-2:] == ["user", "assistant"]


@fuzz(60)
@given(value=ROW)
def test_any_json(value):
    check(json.loads(json.dumps(value)))


@pytest.mark.slow
@fuzz(1000)
@given(value=ROW)
def test_much_json(value):
    check(value)
