"""The three loss modes through the head, whole and chunked: every micro-batch's share is Hugging Face's own number."""

from __future__ import annotations

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from mm_models.components.loss import IGNORE, shift_labels
from mm_models.errors import UserError
from mm_models.fsdp2.head import Head
from mm_models.train.batches import gather_step
from tests.harness import run

HIDDEN, VOCABULARY = 16, 50
CPU = torch.device("cpu")


def micro_batch(number: int) -> dict:
    """Sequences of 12 with 3 + number labels; number 3 has none."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    labels[:, 4 + number :] = IGNORE
    if number == 3:
        labels[:] = IGNORE
    return {"labels": labels, "hidden": torch.randn(2, 12, HIDDEN, generator=generator)}


def head(chunk: int | None = None, total: int | None = None) -> Head:
    torch.manual_seed(7)
    made = Head(HIDDEN, VOCABULARY)
    made.chunk, made.total_chunk = chunk, total
    return made


def ours(rank: int, loss_type: str, chunks: tuple, read: list[list[int]]):
    """Summed over ranks: the loss of the step and the head's gradient."""
    step = gather_step(
        iter(map(micro_batch, read[rank])), count=len(read[rank]), loss_type=loss_type, counts=True, device=CPU
    )
    model, total = head(*chunks), torch.zeros(())
    for micro in step.micro:
        loss = micro.loss(model(micro.data["hidden"], shift_labels(micro.data["labels"])))
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    torch.distributed.all_reduce(model.weight.grad)
    return total, model.weight.grad


def theirs(loss_type: str, numbers: list[int]):
    """By Hugging Face's loss function, in one process."""
    model = head()
    read = [micro_batch(number) for number in numbers if number != 3]
    labelled = sum(int((data["labels"][:, 1:] != IGNORE).sum()) for data in read)
    losses = []
    for data in read:
        items = {"num_items_in_batch": labelled} if loss_type == "per_token_loss" else {}
        loss = ForCausalLMLoss(model(data["hidden"]), data["labels"], VOCABULARY, **items)
        losses.append(loss if items else loss / len(read))
    total = torch.stack(losses).sum()
    total.backward()
    return total.detach(), model.weight.grad


@pytest.mark.parametrize("chunks", [(None, None), (5, None), (None, 8)], ids=["whole", "static", "dynamic"])
@pytest.mark.parametrize("loss_type", ["default", "raw", "per_token_loss"])
def test_every_mode_is_hugging_faces_number(loss_type, chunks):
    read = [[0, 1], [2, 3]]
    loss, grad = run(ours, 2, loss_type, chunks, read)[0]
    wanted_loss, wanted_grad = theirs(loss_type, [number for part in read for number in part])
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-6, atol=0)
    assert ((grad - wanted_grad).norm() / wanted_grad.norm()).item() < 1e-6


def test_one_micro_batch_is_bit_equal_when_whole():
    loss, grad = run(ours, 1, "raw", (None, None), [[0]])[0]
    wanted_loss, wanted_grad = theirs("raw", [0])
    assert torch.equal(loss, wanted_loss) and torch.equal(grad, wanted_grad)


def refused(rank: int):
    with pytest.raises(UserError, match=r"unknown loss type 'per_token'.*did you mean 'per_token_loss'"):
        gather_step(iter([micro_batch(0)]), count=1, loss_type="per_token", counts=True, device=CPU)


def test_an_unknown_mode_is_refused():
    run(refused, 1)
