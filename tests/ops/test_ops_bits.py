"""Masks at one bit per element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fl_elastic.ops.packed_masks import Layout, gate, pack_bits, unpack_bits

SHAPES = st.lists(st.integers(0, 6), min_size=0, max_size=4)


def mask_of(shape: list[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) < 0.5


@given(SHAPES, st.integers(0, 100))
def test_a_mask_survives_packing(shape: list[int], seed: int) -> None:
    mask = mask_of(shape, seed)
    bits = pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.shape == ((mask.numel() + 7) // 8,)
    opened = unpack_bits(bits, Layout.of(mask))
    assert opened.dtype == torch.bool
    assert torch.equal(opened, mask)


def test_every_byte_is_packed_with_the_first_element_lowest() -> None:
    rows = [[bool(byte >> place & 1) for place in range(8)] for byte in range(256)]
    assert pack_bits(torch.tensor(rows)).tolist() == list(range(256))


def views() -> list[Tensor]:
    mask = mask_of([3, 5, 4, 6], 0)
    return [
        mask.to(memory_format=torch.channels_last),
        mask.transpose(0, 3),
        mask[:, 1:4],
        mask[1:],
        mask[:, :, ::2],
        mask.to(memory_format=torch.channels_last)[:, :3],
        mask.flatten()[3:],
        mask[0, 0, 0, 0],
        mask.expand(2, *mask.shape),
    ]


@pytest.mark.parametrize("mask", views(), ids=range(len(views())))
def test_any_view_survives_packing(mask: Tensor) -> None:
    assert torch.equal(unpack_bits(pack_bits(mask), Layout.of(mask)), mask)


def test_a_channels_last_mask_stays_in_its_order() -> None:
    mask = mask_of([2, 8, 3, 3], 1).to(memory_format=torch.channels_last)
    in_order = mask.permute(0, 2, 3, 1).contiguous()
    assert torch.equal(pack_bits(mask), pack_bits(in_order))
    opened = unpack_bits(pack_bits(mask), Layout.of(mask))
    assert opened.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
def test_a_gate_lets_through_what_the_mask_says(
    dtype: torch.dtype, order: torch.memory_format
) -> None:
    mask = mask_of([2, 3, 5, 7], 2).to(memory_format=torch.channels_last)
    gradient = torch.randn(mask.shape, dtype=dtype).contiguous(memory_format=order)
    gradient[0, 0, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-7, -1.0])
    before = gradient.clone()
    passed = gate(gradient, pack_bits(mask), Layout.of(mask))
    assert torch.equal(gradient.nan_to_num(7.0), before.nan_to_num(7.0))
    expected = torch.where(mask, gradient, torch.zeros_like(gradient))
    assert passed.stride() == mask.stride()
    assert passed.dtype == dtype
    torch.testing.assert_close(passed, expected, rtol=0, atol=0, equal_nan=True)
