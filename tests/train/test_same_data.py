"""Nodes whose data folders differ: an error at the start on both targets, in place of two orders that do not fit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mm_models.config.fsdp2 import load_config
from mm_models.data.drawn import DrawnReport
from mm_models.data.report import Counts, Places, Report
from mm_models.errors import UserError
from mm_models.train import agree
from tests.fsdp2.test_training_run import configuration
from tests.harness import run
from tests.mcore import training_kit
from tests.mcore.training_kit import BATCH, world  # noqa: F401

COUNTS = {"starts": (0, 5), "rows": 5, "tokens": 60, "labelled": 20, "images": 3, "notes": {}}


def report(name: str, dropped: list[int], **changes) -> Report:
    counts = Counts(**COUNTS | {"kept": (5 - len(dropped),), "dropped": {"broken": dropped}} | changes)
    return Report(places=Places(files=(Path(name, "a.json"),), starts=(0, 5)), counts=counts, remarks=(name,))


def test_a_summary_is_that_of_the_samples():
    """Not of the place of the files, nor of what a machine has to remark; which rows are kept counts."""
    assert report("/a", [1]).summary() == report("/b", [1]).summary()
    others = [report("/a", [1]), report("/a", [2]), report("/a", []), report("/a", [1], tokens=61)]
    drawn = [DrawnReport(places=Places(files=(), starts=(0, end)), rows=5) for end in (5, 6)]
    assert len({found.summary() for found in (*others, *drawn)}) == 6


def compare(rank: int, dropped: list[list[int]]) -> str | None:
    loader = (
        SimpleNamespace(summary=report(f"/node{rank}", dropped[rank]).summary)
        if dropped[rank] is not None
        else object()
    )
    try:
        agree.same_data(loader)
    except UserError as error:
        return str(error)
    return None


def test_every_rank_is_told_who_differs():
    assert run(compare, 3, [[1], [1], [1]]) == run(compare, 2, [None, None]) + [None] == [None] * 3
    first, *others = run(compare, 3, [[1], [1, 2], [1]])
    assert others == [first] * 2
    assert "rank 0, 2: 4 of 5 rows, 60 tokens" in first and "rank 1: 3 of 5 rows" in first


def mcore(rank: int, nodes: Path, argv: list[str]) -> str:
    os.chdir(nodes / str(rank))
    with pytest.raises(UserError) as caught:
        training_kit.train(rank, argv)
    return str(caught.value)


def fsdp2(rank: int, nodes: Path, path: Path) -> str:
    from mm_models.fsdp2 import training
    from mm_models.fsdp2.validation import plan

    os.chdir(nodes / str(rank))
    with pytest.raises(UserError) as caught:
        training.train(plan(load_config(path), 2, "cpu"))
    return str(caught.value)


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("target", ["mcore", "fsdp2"])
def test_a_run_over_nodes_of_different_data(world, tmp_path, target, split):  # noqa: F811
    """One image is missing on the second: with `on_broken_image: drop` its rows are others than the first's."""
    rows = json.loads((world.folder / "data" / "train.json").read_text())
    for node in "01":
        shutil.copytree(world.folder / "data", tmp_path / node)
        (tmp_path / node / "texts.json").write_text(json.dumps([row for row in rows if not row["images"]] * 8))
    next((tmp_path / "1" / "images").iterdir()).unlink()
    files = {"dataset": "train.json"} if split == "train" else {"dataset": "texts.json", "val_dataset": "train.json"}
    data = world.data(f"nodes_{target}_{split}", **files, dataset_dir=".", on_broken_image="drop")
    if target == "mcore":
        evaluate = ["--eval-interval", "1"] if split == "valid" else []
        said = run(mcore, 2, tmp_path, world.flags(*evaluate, data=data), timeout=90)
    else:
        evaluate = {"training__eval_interval": 1} if split == "valid" else {}
        path = configuration(world, tmp_path, data=json.loads(data.read_text()), **evaluate)
        said = run(fsdp2, 2, tmp_path, path, timeout=90)
    assert said[0] == said[1] and "the ranks hold different data (rank 0: 16 of 16 rows" in said[0], said


def told(rank: int, start: list[str] | Path) -> list[str]:
    """What a run of one process says of data that differ: flags for one target, a YAML for the other."""
    from mm_models.fsdp2 import training
    from mm_models.fsdp2.validation import plan

    with contextlib.redirect_stdout(io.StringIO()) as out:
        if isinstance(start, Path):
            training.train(plan(load_config(start), 1, "cpu"))
        else:
            training_kit.train(rank, start)
    return [line for line in out.getvalue().splitlines() if "data differ from the saved run" in line]


@pytest.mark.parametrize("target", ["mcore", "fsdp2"])
def test_a_run_resumed_on_other_data_is_told(world, tmp_path, target):  # noqa: F811
    """Two rows fewer, and the order of the file; with the data of before nothing is said."""
    save, said = tmp_path / "save", []
    data = [
        world.data(f"before_{target}"),
        world.data(f"before_{target}"),
        world.data(f"after_{target}", max_samples=14, shuffle=False),
    ]
    for number, path in enumerate(data, 1):
        if target == "mcore":
            flags = ("--save", str(save), "--exit-interval", "1", "--lr-decay-style", "constant")
            start = world.flags(*flags, start="hf" if number == 1 else save, data=path, steps=3)
        else:
            load = {} if number == 1 else {"training__load": str(save)}
            keys = {"training__save": str(save), "training__exit_interval": 1, "data": json.loads(path.read_text())}
            start = configuration(world, tmp_path, **keys, **load)
        said += run(told, 1, start, timeout=90)
    assert said[:2] == [[], []] and len(said[2]) == 1
    assert "it had 16 of 16 rows" in said[2][0] and "shuffled; this has 14 of 14 rows" in said[2][0]
    assert f"in file order. After {2 * (BATCH if target == 'mcore' else 1)} samples" in said[2][0]
