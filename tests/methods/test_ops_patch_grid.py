"""A backward pass on the grid of patches is that of the single operations, from fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kept_bytes import kept_bytes
from lean_models import settled
from slow_ones import slow_unless
from torch import Tensor, nn

from fl_elastic.methods.gradient_filter.patch_chain import PatchChain, PatchUnit
from fl_elastic.methods.gradient_filter.patch_grid import run_patch_chain

ACTIVATIONS = {"relu": nn.ReLU(), "relu6": nn.ReLU6(), "none": None}


def unit(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    *,
    groups: int = 1,
    activation: str = "relu",
    norm: bool = True,
    bias: bool = False,
) -> PatchUnit:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)
    made = PatchUnit(conv, nn.BatchNorm2d(outputs) if norm else None, ACTIVATIONS[activation])
    for module in (made.conv, made.norm):
        if module is not None:
            settled(nn.Sequential(module)).double()
    conv.requires_grad_(True)
    return made


def run(
    chain: PatchChain, x: Tensor, gradient: Tensor, *, on_grid: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """The output and the gradients of the input and of all parameters."""
    tensors = [x, *(p for p in chain.parameters() if p is not None)]
    for tensor in tensors:
        tensor.grad = None
    output = run_patch_chain(x, chain) if on_grid else chain.op_by_op(x)
    output.backward(gradient)
    return output.detach(), [tensor.grad for tensor in tensors]


def check(
    units: Sequence[PatchUnit], size: tuple[int, int], patch: int, needs: bool = True
) -> None:
    chain = PatchChain(tuple(units), patch)
    assert chain.fits(size)
    x = torch.randn(2, units[0].conv.in_channels, *size, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last).requires_grad_(needs)
    with torch.no_grad():
        gradient = torch.randn_like(chain.op_by_op(x))
    expected, separate = run(chain, x, gradient, on_grid=False)
    output, ours = run(chain, x, gradient, on_grid=True)
    assert torch.equal(output, expected)
    for mine, reference in zip(ours, separate, strict=True):
        assert (mine is None) == (reference is None)
        if mine is not None:
            torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-11)


CHAINS = {
    "one": [unit(3, 4)],
    "bare": [unit(3, 4, norm=False, activation="none", bias=True)],
    "relu": [unit(3, 4), unit(4, 6, 1), unit(6, 4)],
    "relu6": [unit(3, 4, activation="relu6"), unit(4, 6, activation="relu6")],
    "bias": [unit(3, 4, bias=True), unit(4, 4, 5, bias=True, norm=False), unit(4, 3, 1, bias=True)],
    "strided": [unit(3, 4), unit(4, 6, stride=2), unit(6, 4), unit(4, 4, stride=2)],
    "strided at both ends": [unit(3, 4, 7, 2), unit(4, 4), unit(4, 4, stride=2)],
    "grouped": [unit(4, 8, groups=2), unit(8, 8, groups=8), unit(8, 8, groups=8, stride=2), unit(8, 4, 1)],
    "inverted": [unit(4, 12, 1, activation="relu6"), unit(12, 12, groups=12, activation="relu6"),
                 unit(12, 4, 1, activation="none")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("needs", "patch", "size"),
    slow_unless(
        lambda needs, patch, size: (patch, size) in ((2, (16, 16)), (3, (13, 10)), (4, (1, 1))),
        product([True, False], [1, 2, 3, 4], [(16, 16), (13, 10), (1, 1)]),
    ),
)
@pytest.mark.parametrize("name", sorted(CHAINS))
def test_gradients_are_those_of_single_operations(
    name: str, size: tuple[int, int], patch: int, needs: bool
) -> None:
    check(CHAINS[name], size, patch, needs)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 3, 5]), st.sampled_from([1, 2, 3]), st.sampled_from(sorted(ACTIVATIONS)),
            st.booleans(), st.booleans(), st.booleans(),
        ),
        min_size=1, max_size=4,
    ),
    st.integers(5, 17), st.integers(5, 17), st.integers(1, 20), st.booleans(),
)  # fmt: skip
def test_any_chain(
    kinds: list[tuple[int, int, str, bool, bool, bool]],
    rows: int,
    columns: int,
    patch: int,
    needs: bool,
) -> None:
    units = []
    for kernel, stride, activation, norm, depthwise, trained in kinds:
        stride = 1 if kernel == 1 else stride
        groups = 4 if depthwise else 1
        units.append(unit(4, 4, kernel, stride, groups=groups, activation=activation, norm=norm))
        units[-1].conv.requires_grad_(trained)
    if not needs and not any(kind[-1] for kind in kinds):
        units[0].conv.requires_grad_(True)
    assume(PatchChain(tuple(units), patch).fits((rows, columns)))
    check(units, (rows, columns), patch, needs)


def test_only_means_counts_and_bits_are_kept() -> None:
    units = [unit(4, 8), unit(8, 8), unit(8, 8)]
    chain = PatchChain(tuple(units), 2)
    x = torch.randn(2, 4, 16, 16).double()
    model = nn.ModuleList(
        module for made in units for module in (made.conv, made.norm) if module is not None
    )
    means = 2 * 8 * 8 * (4 + 8 + 8) * 8
    counts, bits, scales = 2 * 2 * 8 * 8 * 8, 2 * 8 * 16 * 16 // 8, 3 * 8 * 8
    assert (
        kept_bytes(lambda: run_patch_chain(x, chain), besides=model)
        == means + counts + bits + scales
    )
    units[0].conv.requires_grad_(False)
    units[1].conv.requires_grad_(False)
    top = 2 * 8 * 8 * 8 * 8 + bits
    kept = kept_bytes(lambda: run_patch_chain(x, chain), besides=model)
    assert kept == top + scales
    units[2].conv.requires_grad_(False)
    assert kept_bytes(lambda: run_patch_chain(x, chain), besides=model) == 0


def test_sizes_that_do_not_fit_run_op_by_op() -> None:
    first = PatchUnit(nn.Conv2d(3, 4, 3), None, nn.ReLU())
    chain = PatchChain((first, unit(4, 4)), 2)
    first.conv.double()
    assert not chain.fits((8, 8))
    x = torch.randn(2, 3, 8, 8).double().requires_grad_()
    gradient = torch.randn(2, 4, 6, 6).double()
    _, expected = run(chain, x, gradient, on_grid=False)
    _, ours = run(chain, x, gradient, on_grid=True)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
