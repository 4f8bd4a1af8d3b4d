"""Rows examined when they are drawn: the same samples, and the rule for those that would be dropped."""

from __future__ import annotations

import pickle

import pytest

from mm_models.data.dataset import ChatDataset, open_dataset
from mm_models.errors import UserError
from tests.data import kit


@pytest.fixture
def draw(folder, processor, template, tmp_path):
    def build(rows, drawn=True, key="preprocess_on_fly", **changes):
        config = kit.data_config(folder, tmp_path, rows, **{key: drawn}, **changes)
        return open_dataset(config, processor, template, decode=False)

    return build


GOOD = [kit.row(f"row {index}", "a" * (index + 1)) for index in range(6)]
EMPTY = kit.row("q", "")


@pytest.mark.parametrize("key", ["preprocess_on_fly", "streaming"])
def test_the_same_samples_as_examined_before(draw, key):
    found, examined = draw(GOOD, key=key), draw(GOOD, drawn=False)
    assert isinstance(examined, ChatDataset) and not isinstance(found, ChatDataset)
    assert [found[index] for index in range(6)] == list(examined) and len(found) == 6
    assert pickle.loads(pickle.dumps(found))[3] == found[3]
    assert "6 rows, examined when they are drawn" in found.report.lines()[0]


def test_a_cache_that_nothing_fills_is_told(draw, tmp_path):
    told = "data cache_dir has no effect, nothing is written"
    assert draw(GOOD, cache_dir=str(tmp_path / "cache")).report.lines()[-1] == told
    assert told not in draw(GOOD).report.lines()
    assert not (tmp_path / "cache").exists()


def test_a_dropped_row_is_replaced_by_the_next_kept_one(draw, capfd, tmp_path):
    rows = [EMPTY, GOOD[1], EMPTY, EMPTY, GOOD[4], EMPTY]
    expected = [1, 1, 4, 4, 4, 1]
    found = draw(rows)
    assert [found[index].id for index in range(6)] == expected
    assert [found[index].id for index in (5, 2, 0)] == [1, 4, 1]
    named = [line for line in capfd.readouterr().out.splitlines() if line.startswith("data dropped")]
    assert sorted(named) == [
        f"data dropped: {tmp_path}/train.json: row {row}: no answer to learn from" for row in (0, 2, 3, 5)
    ]


def test_a_refused_row_stops_when_it_is_drawn(draw, tmp_path):
    found = draw([GOOD[0], {"messages": []}])
    assert found[0].id == 0
    with pytest.raises(UserError, match=rf"{tmp_path}/train.json: row 1: 'messages' is \[\]"):
        found[1]


def test_a_broken_image_is_replaced_on_every_rank(draw, tmp_path):
    """Though this rank asks for no pixels, the file is decoded."""
    path = kit.picture(tmp_path / "x.png")
    rows = [kit.row("<image>", "b", images=["x.png"]), GOOD[1]]
    assert draw(rows, on_broken_image="drop")[0].id == 0
    path.write_bytes(path.read_bytes()[:-600])
    assert draw(rows, on_broken_image="drop")[0].id == 1


def test_nothing_to_draw(draw):
    with pytest.raises(UserError, match="no sample is left of 2 rows"):
        draw([EMPTY, EMPTY])[0]
