"""What an evaluation is before any model: when it is due, how much it takes, what it refuses, and what a run says of it."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from mm_models.config.data import load_data_config
from mm_models.config.model import load_model_config
from mm_models.data.loader import build_loader
from mm_models.errors import UserError
from mm_models.train import log
from mm_models.train.evaluation import Evaluation, open_split
from tests.mcore.training_kit import World, world  # noqa: F401
from tests.train.evaluation_kit import SPLIT, with_split


def opened(world: World, rows: tuple[int, ...] = SPLIT):  # noqa: F811
    """The split as one of two data-parallel ranks opens it, with global batches of four."""
    data = load_data_config(with_split(world, rows))
    model = load_model_config(world.model())
    build = partial(build_loader, data, model_config=model, dp_rank=1, dp_size=2, global_batch_size=4)
    return open_split(build, data, option="--{}".format)


def evaluation(loader, iters: int | None = None) -> Evaluation:
    return Evaluation.of(loader, interval=3, iters=iters, num_microbatches=2, option="--{}".format)


def test_every_evaluation_takes_the_same_first_batches(world):  # noqa: F811
    """Nine rows are two global batches; the second rank's rows of them, from the first on each time."""
    loader, model = opened(world), torch.nn.Linear(1, 1)

    def taken(iters: int | None) -> list[int]:
        ids: list[int] = []

        def sums(batches) -> tuple[float, int]:
            assert not model.training
            ids.extend(id for _ in range(2) for id in next(batches)["sample_ids"])
            return 6.0, len(ids)

        assert evaluation(loader, iters).run([model], sums) == ((2.0, 6) if len(ids) == 4 else (3.0, 2))
        assert model.training
        return ids

    assert taken(None) == taken(None) == taken(2) == [1, 3, 5, 7]
    assert taken(1) == taken(1) == [1, 3]


def test_when_one_is_due(world):  # noqa: F811
    asked = evaluation(opened(world))
    assert [n for n in range(1, 9) if asked.due(n, 8)] == [3, 6, 8]
    assert asked.lines()[-1] == "validation: every 3 iterations and after the last, global batches: 2"
    assert all(line.startswith("validation data ") for line in asked.lines()[:-1])


def test_no_trained_token_is_no_number(world):  # noqa: F811
    loss, tokens = evaluation(opened(world)).run([], lambda batches: (0.0, 0))
    assert loss != loss and tokens == 0


def test_what_does_not_fit_is_refused(world):  # noqa: F811
    with pytest.raises(UserError, match=r"--eval_iters 3: the validation split has 2 whole global batches\. Set it to"):
        evaluation(opened(world), 3)
    with pytest.raises(
        UserError, match=r"val_dataset .*: 3 samples are fewer than one global batch of 4(.|\n)*drop --"
    ):
        opened(world, (0, 1, 2))


def test_the_line_is_megatrons_and_goes_where_the_training_loss_goes(tmp_path, capsys):
    path, board = tmp_path / "m.jsonl", tmp_path / "tb"
    for speaks in (True, False):
        journal = log.Journal(
            speaks=speaks, interval=1, train_iters=9, start=0, metrics=str(path), tensorboard=str(board)
        )
        journal.add_validation(6, 2.0123456789, 123)
        journal.close()
    assert capsys.readouterr().out == (
        " validation loss at iteration 6 | lm loss value: 2.012346E+00 | lm loss PPL: 7.480844E+00 |\n"
    )
    assert json.loads(path.read_text()) == {"iteration": 6, "validation_loss": 2.0123456789, "validation_tokens": 123}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm loss validation")] == [
        (6, pytest.approx(2.0123456789))
    ]
