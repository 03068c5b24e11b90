"""The backward pass of a chain of filtered convolutions that never leaves the grid of patches.

A filtered input gradient is constant on patches. After a rectifier its mean is still known: a constant times a mask
has as its mean the constant times the open share of the patch. A frozen norm is a scale per channel, and a stride
splits each cell into patches. So between the units of a chain no gradient is ever expanded to full size, and of the
rectifiers only the count of open units per patch is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_elastic.methods.gradient_filter.gradients import (
    filtered_weight_gradient,
    grid_input_gradient,
    pooled_input,
)
from fl_elastic.methods.gradient_filter.patch_chain import PatchChain
from fl_elastic.methods.gradient_filter.patches import CellGrid, patch_counts, patch_sums
from fl_elastic.ops.activations import open_units
from fl_elastic.ops.autograd import apply_function, once_differentiable
from fl_elastic.ops.geometry import ConvGeometry, Pair
from fl_elastic.ops.packed_masks import Layout, gate, pack_bits


def run_patch_chain(x: Tensor, chain: PatchChain) -> Tensor:
    """Return the output of ``chain`` for ``x`` ``[N, C, H, W]``; its backward pass stays on the grid of patches.

    It keeps the patch means of every trained convolution's input, the number of open units per patch of the inner
    rectifiers (a byte each), and a bit per element of the last rectifier. The gradient of ``x`` has full size.

    The gradients are those of `PatchChain.op_by_op`. If the chain does not fit the size of ``x``, it runs op by op.
    """
    if x.dim() != 4 or not chain.fits((x.shape[2], x.shape[3])):
        return chain.op_by_op(x)
    return apply_function(_PatchChain, x, chain, *chain.parameters())


class _PatchChain(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: PatchChain, *parameters: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.chain, ctx.sizes, ctx.layout = chain, [], None
        ctx.lowest = _lowest_needed(needs)
        saved: list[Tensor | None] = []
        for index, unit in enumerate(chain.units):
            weight, bias = parameters[2 * index : 2 * index + 2]
            assert weight is not None
            pooled = pooled_input(x, unit.geometry, chain.patch) if needs[2 + 2 * index] else None
            ctx.sizes.append((x.shape[2], x.shape[3]))
            x = unit.finish(unit.geometry.convolve(x, weight, bias))
            mask = None
            if unit.activation is not None and index >= ctx.lowest:
                opened = open_units(x, capped=unit.is_capped)
                if index < len(chain.units) - 1:
                    mask = _open_counts(opened, chain.patch)
                else:
                    # The gradient that arrives here can have any form, so the whole mask is needed.
                    mask, ctx.layout = pack_bits(opened), Layout.of(opened)
            saved += [weight, pooled, mask, unit.scale()]
        if ctx.lowest < len(chain.units):
            ctx.save_for_backward(*saved)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        chain, needs = ctx.chain, ctx.needs_input_grad
        saved = ctx.saved_tensors
        of_parameters: list[Tensor | None] = [None] * len(chain.parameters())
        # Of the present unit's output, and in the end of the chain's input.
        on_patches: Tensor | None = None
        for index in reversed(range(ctx.lowest, len(chain.units))):
            geometry = chain.units[index].geometry
            weight, pooled, mask, scale = saved[4 * index : 4 * index + 4]
            size = ctx.sizes[index]
            if on_patches is None:
                whole = gradient if mask is None else gate(gradient, mask, ctx.layout)
                sums = _sums(whole, chain.patch)
            elif mask is None:
                sums = on_patches * patch_counts(geometry.output_size(size), chain.patch, gradient)
            else:
                sums = on_patches * mask
            if scale is not None:
                sums = sums * scale.view(-1, 1, 1)
            if needs[2 + 2 * index]:
                of_parameters[2 * index] = filtered_weight_gradient(
                    sums, pooled, weight, geometry, size
                )
            if needs[3 + 2 * index]:
                of_parameters[2 * index + 1] = sums.sum((0, 2, 3))
            if index > ctx.lowest or needs[0]:
                on_cells = grid_input_gradient(sums, weight, geometry, size, chain.patch)
                on_patches = _on_patches(on_cells, geometry, size, chain.patch)
        of_input = None
        if needs[0] and on_patches is not None:
            of_input = _fill(on_patches, ctx.sizes[0], chain.patch)
        return of_input, None, *of_parameters


def _lowest_needed(needs: tuple[bool, ...]) -> int:
    """Return the index of the first unit whose output gradient is needed; the number of units if none is."""
    if needs[0]:
        return 0
    return next(
        (place // 2 for place, needed in enumerate(needs[2:]) if needed), len(needs) // 2 - 1
    )


def _open_counts(opened: Tensor, patch: int) -> Tensor:
    """Return the number of open units per patch, in the smallest integer type that holds it."""
    counts = patch_sums(opened.view(torch.int8).float(), patch)
    return counts.to(torch.uint8 if patch * patch < 256 else torch.int32)


def _sums(gradient: Tensor, patch: int) -> Tensor:
    if not gradient.is_contiguous():
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    return patch_sums(gradient, patch)


def _on_patches(on_cells: Tensor, geometry: ConvGeometry, size: Pair, patch: int) -> Tensor:
    """Return values of cells as values of the previous unit's patches; a stride splits a cell into several."""
    if geometry.stride == (1, 1):
        return on_cells
    rows, columns = (
        torch.arange(-(-length // patch), device=on_cells.device) // stride
        for length, stride in zip(size, geometry.stride, strict=True)
    )
    return on_cells.index_select(2, rows).index_select(3, columns)


def _fill(means: Tensor, size: Pair, patch: int) -> Tensor:
    """Return patch values as a full map of ``size``."""
    return CellGrid.of(ConvGeometry((1, 1)), size, patch).fill(means)
