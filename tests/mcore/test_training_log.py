"""What a run says: Megatron's line to the letter, exact metrics, the table at start, stacks when it hangs, drifted replicas."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch

from mm_models.layout import ModelSplit, StageSplit
from mm_models.mcore import rank_table
from mm_models.train import log
from tests.harness import CaseFailed, run
from tests.mcore.test_training import DISTRIBUTED, SP, topology
from tests.mcore.training_kit import Synthetic, launch_synthetic, printed, tiny_flags

WHOLE = dict(
    iteration=7, train_iters=30, consumed_samples=28, seconds=0.12344, learning_rate=1.1e-5, next_learning_rate=1e-5,
    global_batch_size=4, loss=6.0123456789, grad_norm=1.23456, tokens=1000, labelled_tokens=400,
)  # fmt: skip


def test_the_iteration_line_is_megatrons():
    line = log.iteration_line(log.Iteration(**WHOLE), datetime(2026, 1, 2, 3, 4, 5))
    assert line == (
        " [2026-01-02 03:04:05] iteration        7/      30 | consumed samples:           28 | elapsed time per iteration (ms): 123.4 |"
        " learning rate: 1.000000E-05 | global batch size:     4 | lm loss: 6.012346E+00 | loss scale: 1.0 | grad norm: 1.235 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_the_seeds_own_greps_read_it():
    """What the launch scripts of the field take from a log."""
    line = log.iteration_line(log.Iteration(**WHOLE), datetime(2026, 1, 2, 3, 4, 5))
    assert re.search(r"elapsed time per iteration \(ms\): ([0-9.]+)", line)[1] == "123.4"
    assert re.search(r"global batch size: +([0-9]+)", line)[1] == "4"
    fields = dict(part.strip().split(": ", 1) for part in line.split("]", 1)[1].split("|") if ": " in part)
    assert float(fields["lm loss"]) == 6.012346 and int(fields["consumed samples"]) == 28


def test_metrics_hold_full_precision_and_forget_what_a_broken_run_did(tmp_path):
    path = str(tmp_path / "deep" / "metrics.jsonl")
    for first, last in ((0, 3), (2, 4)):
        journal = log.Journal(speaks=True, interval=10, train_iters=9, start=first, metrics=path, tensorboard=None)
        for iteration in range(first + 1, last + 1):
            journal.add(log.Iteration(**(WHOLE | {"iteration": iteration, "loss": iteration / 3})))
        journal.close()
    records = log.read_metrics(path)
    assert [(r["iteration"], r["loss"]) for r in records] == [(i, i / 3) for i in (1, 2, 3, 4)]
    Path(path).write_text(Path(path).read_text() + '{"iteration": 5, "lo')  # killed while writing
    log.open_metrics(path, 4).close()
    assert len(log.read_metrics(path)) == 4


def test_the_line_averages_time_and_adds_skips(capsys):
    journal = log.Journal(speaks=True, interval=2, train_iters=9, start=0, metrics=None, tensorboard=None)
    for iteration, seconds, skipped in ((1, 1.0, 1), (2, 3.0, 0), (3, 9.0, 0)):
        journal.add(log.Iteration(**(WHOLE | {"iteration": iteration, "seconds": seconds, "skipped": skipped})))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and "(ms): 2000.0 |" in lines[0] and "skipped iterations:   1 |" in lines[0]


def test_the_table_says_what_each_rank_holds(tmp_path):
    split = ModelSplit(vision=StageSplit(((1, 1), (0, 0))), text=StageSplit(((0, 0), (3, 1))))
    assert rank_table.holdings(split, 0) == ("patches + vision 0", "embedding + text 0-2")
    assert rank_table.holdings(split, 1) == ("vision 1 + projector", "text 3 + head")
    said = printed(4, tiny_flags(tmp_path, *topology(tp=2, etp=1, pp=2), SP, "--from-scratch", steps=1))[0].splitlines()
    table = said[next(i for i, line in enumerate(said) if line.startswith("rank  stage")) :][:5]
    assert [line.split()[:5] for line in table[1:]] == [
        ["0", "0", "0", "0", "0"],
        ["1", "0", "1", "0", "0"],
        ["2", "1", "0", "0", "0"],
        ["3", "1", "1", "0", "0"],
    ]
    assert "0: patches + vision 0-1 + projector + embedding + text 0-1" in table[1] and "0: text 2-3 + head" in table[3]
    assert all(re.search(r"0-7 +[\d,]+ of [\d,]+$", line) for line in table[1:])


def test_resolved_configuration_is_printed_once(tmp_path):
    said = "".join(printed(2, tiny_flags(tmp_path, "--from-scratch", steps=1)))
    for words in (
        "  lr .......",
        "model.json: {",
        "batches: global 4 = micro 1 · dp 2 · 2 micro-batches; loss default",
        "parameters; none on",
    ):
        assert said.count(words) == 1, words


def _hang(rank: int, file: str) -> None:
    import sys

    from mm_models.layout import ParallelLayout
    from mm_models.mcore.session import Session
    from mm_models.train.session import Position
    from mm_models.train.watch import Watchdog

    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w")
    layout = ParallelLayout(pp=2)
    plan = type("Plan", (), {"layout": layout})
    session = Session(
        plan=plan,
        rank=rank,
        coords=layout.coords(rank),
        device=torch.device("cpu"),
        dtype=torch.float32,
        position=Position(step=3),
    )
    session.position.at("forward and backward", micro_batch=1, chunk=0)
    with Watchdog(session, seconds=0.5):
        if rank == 1:
            time.sleep(1.5)  # stuck somewhere in here
        else:
            for micro in range(15):
                session.position.at("forward and backward", micro_batch=micro)
                time.sleep(0.1)


def test_a_rank_that_does_not_move_prints_its_place_and_stack(tmp_path):
    run(_hang, 2, str(tmp_path / "err"))
    said = (tmp_path / "err").read_text()
    assert said.count("has not moved for") == 1
    assert (
        "rank 1 (stage 1, tp 0, dp 0, ep 0) has not moved for" in said
        and "at step 3, forward and backward, micro-batch 1, chunk 0" in said
    )
    assert "in _hang" in said and "most recent call first" in said


def _drift(rank: int, argv: list[str], name: str, where: int) -> None:
    """Train with one element changed on one rank after the first step."""
    from mm_models.mcore import step
    from tests.mcore.training_kit import train_synthetic

    plain = step.train_step

    def train_step(session, chunks, *rest):
        result = plain(session, chunks, *rest)
        for chunk in chunks:
            for key, parameter in chunk.named_parameters():
                if key.endswith(name) and session.rank == where:
                    parameter.data.view(-1)[0] += 1
        return result

    from mm_models.mcore import training

    training.train_step = train_step
    train_synthetic(rank, argv, Synthetic())


@pytest.mark.parametrize(
    "nprocs, flags, name, where",
    [
        (2, [], "decoder.final_layernorm.weight", 1),
        (2, [*topology(tp=2), SP], "layers.1.mlp.router.weight", 1),
        (2, [DISTRIBUTED], "layers.1.mlp.experts.down_proj", 0),
        (4, [*topology(tp=2), SP], "text_decoder.decoder.layers.0.mlp.linear_fc1.weight", 3),
    ],
)
def test_replicas_that_drift_apart_are_named(nprocs, flags, name, where, tmp_path):
    argv = tiny_flags(tmp_path, *flags, "--from-scratch", "--check-replicas", "1", steps=2)
    assert len(launch_synthetic(nprocs, argv, tmp_path / "m.jsonl")) == 2
    with pytest.raises(CaseFailed) as caught:
        run(_drift, nprocs, argv, name, where)
    assert "after step 1: text_decoder.decoder." in str(caught.value)
    assert name in str(caught.value) and "hold different values" in str(caught.value)


def test_tied_copies_on_two_stages_are_compared(tmp_path):
    tied = {"untie_embeddings_and_output_weights": False}
    argv = tiny_flags(tmp_path, *topology(pp=2), "--from-scratch", "--check-replicas", "1", steps=2, text_decoder=tied)
    assert len(launch_synthetic(2, argv, tmp_path / "m.jsonl")) == 2
    with pytest.raises(CaseFailed, match=r"word_embeddings\.weight is replicated, but ranks"):
        run(_drift, 2, argv, "output_layer.weight", 1)
