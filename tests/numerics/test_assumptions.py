"""What bit-equality rests on: how this CPU's matrix products and attention behave. On another CPU a failure here names the cause."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_number_of_rows_from_12_on(dtype):
    torch.manual_seed(0)
    x, w = torch.randn(64, 256, dtype=dtype), torch.randn(192, 256, dtype=dtype)
    whole = F.linear(x, w)
    for rows in (12, 13, 16, 31, 48):
        assert torch.equal(F.linear(x[:rows], w), whole[:rows]), rows


def test_bf16_rows_never_depend_on_the_number_of_rows():
    torch.manual_seed(0)
    x, w = torch.randn(64, 256, dtype=torch.bfloat16), torch.randn(192, 256, dtype=torch.bfloat16)
    whole = F.linear(x, w)
    for rows in range(1, 13):
        assert torch.equal(F.linear(x[:rows], w), whole[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_fused_product_equals_separate_ones(dtype):
    """Why q, k, v and gate, up may be one weight: a column of the product does not depend on the number of columns."""
    torch.manual_seed(0)
    x, parts = torch.randn(40, 256, dtype=dtype), [torch.randn(n, 256, dtype=dtype) for n in (128, 64, 64)]
    bias = [torch.randn(len(p), dtype=dtype) for p in parts]
    fused = F.linear(x, torch.cat(parts), torch.cat(bias))
    assert torch.equal(fused, torch.cat([F.linear(x, p, b) for p, b in zip(parts, bias)], -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_strided_heads_equals_contiguous_ones(dtype):
    torch.manual_seed(0)
    packed = torch.randn(40, 1, 2, 4, 32, dtype=dtype)  # S B G (q q k v) D
    query, key, value = packed.split([2, 1, 1], dim=3)
    query, key, value = query.reshape(40, 1, 4, 32), key.squeeze(3), value.squeeze(3)
    views = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
    strided = F.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=True)
    assert torch.equal(
        strided, F.scaled_dot_product_attention(*(v.contiguous() for v in views), is_causal=True, enable_gqa=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_product_equals_a_loop_of_products(dtype):
    torch.manual_seed(0)
    x, w = torch.randn(60, 64, dtype=dtype), torch.randn(3, 48, 64, dtype=dtype)
    offsets = torch.tensor([20, 20, 60], dtype=torch.int32)
    whole = F.grouped_mm(x, w.transpose(-2, -1), offs=offsets)
    assert torch.equal(whole, torch.cat([F.linear(x[:20], w[0]), F.linear(x[20:], w[2])]))


@pytest.mark.parametrize("width", [64, 96, 1408, 10944])
def test_silu_of_rows_apart_equals_that_of_one_piece(width):
    """Where gate and up are one weight, rows of the gate lie apart. With AVX-512 only widths that divide by 32 are safe."""
    torch.manual_seed(0)
    gate = torch.randn(40, 2 * width).chunk(2, -1)[0]
    assert torch.equal(F.silu(gate), F.silu(gate.contiguous()))


def test_summed_cross_entropy_over_count_is_the_mean():
    torch.manual_seed(0)
    for _ in range(50):
        logits, labels = torch.randn(37, 320), torch.randint(0, 320, (37,))
        labels[::3] = -100
        count = int((labels != -100).sum())
        assert torch.equal(F.cross_entropy(logits, labels, reduction="sum") / count, F.cross_entropy(logits, labels))
