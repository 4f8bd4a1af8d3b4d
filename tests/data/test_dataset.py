"""Rows: kept, dropped with a reason, or refused by number (field cases B08, B14, B46, B51, B58)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from mm_models.data import images
from mm_models.data.dataset import ChatDataset
from mm_models.errors import UserError
from tests.data import kit

GOOD = kit.row("hello", "world")


@pytest.fixture
def make(folder, processor, template, tmp_path):
    """A data set over rows; pictures are put beside them by the test."""

    def build(rows, **changes):
        config = kit.data_config(folder, tmp_path, rows, **changes)
        return ChatDataset(config, processor, template)

    return build


def refusal(make, *rows, **changes):
    with pytest.raises(UserError) as caught:
        make(list(rows), **changes)
    return str(caught.value)


BAD = {
    "not an object": ("text", "got str, expected an object"),
    "no messages": ({"message": []}, "no key 'messages' (attr.messages), did you mean 'message'"),
    "empty messages": ({"messages": []}, "'messages' is [], expected a list of messages"),
    "no content": ({"messages": [{"role": "user", "value": "x"}]}, "messages[0] has no key 'content'"),
    "unknown role": ({"messages": [{"role": "human", "content": "x"}]}, "role 'human', expected one of 'user'"),
    "content list": (
        {"messages": [{"role": "user", "content": [1]}]},
        "messages[0]: content is list, expected text",
    ),
    "no answer": (kit.row("a", "b", "c"), "turns are user, assistant, user; expected"),
    "two answers": ({"messages": [{"role": "assistant", "content": "x"}] * 2}, "turns are assistant, assistant"),
    "mark without image": (kit.row("<image>a", "b"), "1 <image> marks in the text, 0 images"),
    "image without mark": (kit.row("a", "b", images=["x.png"]), "0 <image> marks in the text, 1 images"),
    "images not paths": ({**GOOD, "images": [1]}, "'images' is [1], expected a list of paths"),
    "video": ({**GOOD, "videos": ["a.mp4"]}, "1 videos under 'videos'; video is not supported yet"),
    "video mark": (kit.row("<video>a", "b"), "a <video> mark; video is not supported yet"),
    "no unicode": (kit.row("a\ud800", "b"), "half of a surrogate pair"),
    "open thought": (kit.row("a", "<think>b"), "at most one <think>...</think> block"),
    "address": (kit.row("<image>", "b", images=["http://x/y.png"]), "got a http:// address, expected a path"),
}


class TestRows:
    @pytest.mark.parametrize("case", BAD)
    def test_a_bad_row_is_refused_by_file_and_number(self, make, tmp_path, case):
        bad, reason = BAD[case]
        text = refusal(make, GOOD, GOOD, bad)
        assert f"{tmp_path}/train.json: 1 of 3 rows refused" in text
        assert "row 2: " in text and reason in text

    def test_all_bad_rows_are_counted_and_ten_shown(self, make):
        text = refusal(make, GOOD, *[kit.row("a")] * 12)
        assert (
            "12 of 13 rows refused" in text and "row 10:" in text and "row 11:" not in text and "and rows 11-12" in text
        )

    def test_attr_renames_columns_and_roles(self, make, processor):
        row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "prompt": "be kind"}
        attr = {"messages": "conversations", "role_tag": "from", "content_tag": "value"}
        found = make([row], **attr, user_tag="human", assistant_tag="gpt", images=None)
        assert "q" in processor.tokenizer.decode(list(found[0].ids))

    def test_jsonl(self, make, folder, processor, template, tmp_path):
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(GOOD) for _ in range(3)) + "\n\n")
        config = kit.data_config(folder, tmp_path, dataset="train.jsonl")
        assert len(ChatDataset(config, processor, template)) == 3
        (tmp_path / "train.jsonl").write_text(json.dumps(GOOD) + "\n{]\n")
        with pytest.raises(UserError, match=r"train.jsonl: line 2 is not valid JSON"):
            ChatDataset(config, processor, template)

    def test_files_that_are_not_data(self, make, folder, processor, template, tmp_path):
        config = kit.data_config(folder, tmp_path)
        for text, message in (
            ('{"a": 1}', "got dict at the top"),
            ("[1", "line 1 column"),
            ("{}\n{}", "name the file .jsonl"),
        ):
            (tmp_path / "train.json").write_text(text)
            with pytest.raises(UserError, match=message):
                ChatDataset(config, processor, template)
        with pytest.raises(UserError, match=r"'absent.json': no such file; looked at .* and .*absent.json"):
            ChatDataset(kit.data_config(folder, tmp_path, dataset="absent.json"), processor, template)

    def test_max_samples_takes_the_first_rows(self, make):
        assert [sample.id for sample in make([GOOD] * 5, max_samples=3)] == [0, 1, 2]

    def test_validation_rows(self, folder, processor, template, tmp_path):
        (tmp_path / "val.json").write_text(json.dumps([GOOD] * 4))
        config = kit.data_config(folder, tmp_path, [GOOD], val_dataset="val.json", val_max_samples=2)
        assert len(ChatDataset(config, processor, template, split="valid")) == 2
        with pytest.raises(UserError, match="val_dataset is null"):
            ChatDataset(kit.data_config(folder, tmp_path), processor, template, split="valid")


class TestImages:
    @pytest.mark.parametrize("form", ["relative", "absolute", "file", "spaces", "unicode", "parent"])
    def test_paths_from_another_working_directory(self, folder, processor, template, tmp_path, monkeypatch, form):
        """B58."""
        name = {"spaces": "a b/c d.png", "unicode": "画像/é.png", "parent": "../up.png"}.get(form, "images/x.png")
        path = kit.picture(tmp_path / "data" / name)
        reference = {"absolute": str(path), "file": path.as_uri()}.get(form, name)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        config = kit.data_config(folder, tmp_path / "data", [kit.row("<image>", "b", images=[reference])])
        found = ChatDataset(config, processor, template)
        assert found[0].images[0].samefile(path)

    def test_a_percent_encoded_file_address(self, tmp_path):
        path = kit.picture(tmp_path / "a b.png")
        assert images.resolve(path.as_uri(), ".").samefile(path)
        assert "%20" in path.as_uri()

    def test_one_missing_image_of_ten(self, make, tmp_path):
        rows = []
        for index in range(10):
            rows.append(kit.row("<image>", "b", images=[f"{index}.png"]))
            kit.picture(tmp_path / f"{index}.png")
        (tmp_path / "6.png").unlink()
        text = refusal(make, *rows)
        assert "1 of 10 rows refused" in text and f"row 6: image '{tmp_path}/6.png': no such file" in text

    @pytest.mark.parametrize("name", ["a.png", "a.jpg"])
    def test_a_truncated_image(self, make, tmp_path, name):
        path = tmp_path / name
        Image.effect_noise((200, 200), 80).convert("RGB").save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert "row 0: image" in (text := refusal(make, kit.row("<image>", "b", images=[name]))) and "truncated" in text

    def test_not_an_image(self, make, tmp_path):
        (tmp_path / "a.png").write_text("no")
        assert "not a readable image" in refusal(make, kit.row("<image>", "b", images=["a.png"]))

    def test_depth_and_animation(self, make, tmp_path):
        Image.new("I;16", (60, 60)).save(tmp_path / "deep.png")
        assert "more than 8 bits" in refusal(make, kit.row("<image>", "b", images=["deep.png"]))
        frames = {"save_all": True, "append_images": [kit.pattern(60, 60, 5)]}
        kit.pattern(60, 60).save(tmp_path / "a.gif", **frames)
        assert "2 frames" in refusal(make, kit.row("<image>", "b", images=["a.gif"]))
        kit.pattern(60, 60).save(tmp_path / "phone.jpg", "MPO", **frames)
        assert make([kit.row("<image>", "b", images=["phone.jpg"])])[0].grids == ((1, 4, 4),)

    def test_a_shape_the_processor_refuses(self, make, tmp_path):
        kit.picture(tmp_path / "thin.png", 6000, 28)
        text = refusal(make, kit.row("<image>", "b", images=["thin.png"]))
        assert "row 0: image" in text and "6000 x 28" in text and "aspect ratio" in text

    @pytest.mark.parametrize("orientation", [1, 3, 6, 8])
    def test_exif_turns_size_and_pixels_as_hugging_face_does(self, tmp_path, orientation):
        from transformers.image_utils import load_image

        exif = Image.Exif()
        exif[images.ORIENTATION_TAG] = orientation
        path = tmp_path / "a.jpg"
        kit.pattern(120, 60).save(path, exif=exif)
        expected = load_image(str(path))
        assert (
            images.inspect(path, decode=True) == images.inspect(path, decode=False) == (expected.height, expected.width)
        )
        assert images.load_rgb(path).tobytes() == expected.tobytes()

    @pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
    def test_modes_become_rgb_as_hugging_face_does(self, tmp_path, mode):
        from transformers.image_utils import load_image

        path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
        kit.pattern(60, 40).convert(mode).save(path)
        assert images.load_rgb(path).tobytes() == load_image(str(path)).tobytes()


@pytest.mark.parametrize(
    "literal", ["<|image_pad|>", "<|vision_start|>", "<|im_end|>", "<|begin_of_image|>", "<|image|>", "<|user|>"]
)
def test_literal_tokens_in_a_row_add_no_image_token_and_move_no_mask(make, processor, tmp_path, literal):
    """B46: in the question and in the answer, beside a real image."""
    kit.picture(tmp_path / "x.png")
    rows = [kit.row(f"<image>what {literal}", f"it is {literal}!", "q", "a", images=["x.png"])]
    found = make(rows)[0]
    assert found.ids.count(processor.image_token_id) == 16
    decoded = [processor.tokenizer.decode(list(found.ids[a:b])) for a, b in found.trained]
    assert decoded == [f"it is {literal}!<|user|>", "a<|user|>"]


class TestLength:
    """B08: a sample is whole or not there."""

    def test_every_cutoff(self, make, tmp_path):
        names = [kit.picture(tmp_path / f"{k}.png", seed=k).name for k in range(2)]
        rows = [kit.row("<image>first", "one", "<image>second", "two", images=names), kit.row("", "x")]
        full, short = (len(sample.ids) for sample in make(rows))
        for cutoff in range(1, full + 2):
            if cutoff < short:
                assert "no sample is left of 2 rows" in refusal(make, *rows, cutoff_len=cutoff)
                continue
            found = make(rows, cutoff_len=cutoff)
            assert [sample.id for sample in found] == ([0, 1] if cutoff >= full else [1])
            assert found.report.dropped == ({} if cutoff >= full else {f"longer than cutoff_len {cutoff}": [0]})

    def test_nothing_left(self, make):
        text = refusal(make, GOOD, GOOD, cutoff_len=5)
        assert "no sample is left of 2 rows" in text and "longer than cutoff_len 5: 2 rows: 0-1" in text

    def test_no_answer_to_learn_from(self, make):
        """B14: end tokens alone are nothing to learn from."""
        found = make([kit.row("q", " \n"), GOOD, kit.row("q", "", "q", "a")])
        assert [sample.id for sample in found] == [1, 2]
        assert found.report.dropped == {"no answer to learn from": [0]}
        assert "no sample is left" in refusal(make, kit.row("q", ""))

    def test_every_sample_has_labels(self, make):
        assert all(sample.labelled > 1 for sample in make([GOOD, kit.row("q", "", "q", "a")]))


def test_the_report_names_what_happened(make):
    found = make([GOOD, kit.row("what is <|image|>?", "a"), kit.row("q", "")])
    first, dropped, note = found.report.lines()
    assert "2 of 3 rows" in first and "0 images" in first
    assert dropped == "data dropped: no answer to learn from: 1 rows: 2"
    assert note == "data note: text that looks like a template token is kept as text: <|image|>: 1 rows: 1"


def test_the_base_folder_of_the_file_is_tried_second(make, folder, processor, template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    config = kit.data_config(folder, tmp_path, [GOOD], dataset="train.json")
    assert ChatDataset(config, processor, template).report.path == Path(tmp_path, "train.json")
    assert not os.path.exists("train.json")
