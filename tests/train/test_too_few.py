"""Field case B63 through both entry scripts, as users start them: no step, a status, and the numbers."""

from __future__ import annotations

import json

import pytest

from tests.fsdp2 import test_training_run as fsdp2
from tests.mcore import test_pretrain as megatron
from tests.mcore.training_kit import world  # noqa: F401


@pytest.fixture(params=["pretrain_vlm.py", "pretrain_fsdp2.py"])
def start(request, world, tmp_path):  # noqa: F811
    """A run of two processes, four samples a step, that would save."""

    def run(**basic):
        data, save = world.data("few", **basic), str(tmp_path / "ck")
        if request.param == "pretrain_vlm.py":
            return megatron.start(2, *world.flags("--save", save, data=data))
        steps = {"training__gradient_accumulation_steps": 2, "training__save": save}
        return fsdp2.start(2, str(fsdp2.configuration(world, tmp_path, data=json.loads(data.read_text()), **steps)))

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("basic", "words"),
    [
        ({"max_samples": 3}, "3 samples are fewer than one global batch of 4"),
        ({"cutoff_len": 5}, "no sample is left of 16 rows"),
    ],
    ids=["three", "none left"],
)
def test_a_run_of_too_few_samples_fails(start, tmp_path, basic, words):
    done = start(**basic)
    assert done.returncode != 0 and words in done.stderr, done.stderr[-3000:]
    assert not megatron.LINE.search(done.stdout) and "training ended" not in done.stdout
    assert not list((tmp_path / "ck").glob("*"))
