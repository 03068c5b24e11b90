"""Cuts and blocks: where one tensor is all that the rest of the model sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Inception, Residual, chain, conv_net, images, loss_fn, vectors
from torch import Tensor, nn

from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched


def graph_of(model: nn.Module, batch: Any) -> BackwardGraph:
    with untouched(model):
        return trace_step(model, loss_fn, batch).graph


def test_a_chain_can_be_cut_between_any_two_groups() -> None:
    graph = graph_of(chain(), vectors()[0])
    assert [cut.groups_above for cut in graph.cuts] == [1, 2, 3]
    # Nearest to the loss: after the activation, not before it.
    assert [(cut.module, cut.at_input) for cut in graph.cuts] == [
        ("5", False), ("3", False), ("1", False),
    ]  # fmt: skip
    assert [name for name, _ in graph.cuts[1].skipped] == ["0", "1", "2"]


def test_groups_on_a_branch_cannot_be_cut_off() -> None:
    graph = graph_of(Residual(), images()[0])
    # The two branches start from the input: only the head lies behind a bottleneck.
    assert [(cut.groups_above, cut.module, cut.at_input) for cut in graph.cuts] == [
        (1, "head", True)
    ]
    inception = graph_of(Inception(), images()[0])
    # What follows the stem is a function, not a module: its output is the nearest place that can be given.
    assert [cut.groups_above for cut in inception.cuts] == [1, 5]
    assert inception.cuts[-1].module == "stem"


class TwoUses(nn.Module):
    """A tensor that enters a module and goes past it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        out: Tensor = self.last(x + self.norm(x))
        return out


def test_an_input_that_is_used_elsewhere_too_is_no_cut() -> None:
    cuts = graph_of(TwoUses(), vectors()[0]).cuts
    assert ("norm", True) not in [(cut.module, cut.at_input) for cut in cuts]
    assert [cut.groups_above for cut in cuts] == [1, 2]


def test_an_active_dropout_belongs_to_what_is_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    assert graph_of(model.train(), vectors()[0]).cuts[0].module == "1"
    batch = vectors()[0]
    with_dropout = graph_of(model.train(), batch).nodes
    assert "2" in {node.module for node in with_dropout}
    assert "2" not in {cut.module for cut in graph_of(model.train(), batch).cuts}


def test_blocks_have_one_input_and_one_output() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.inner(x)
            return out

    model = nn.Sequential(nn.Linear(6, 6), Block(), nn.ReLU(), nn.Linear(6, 3))
    graph = graph_of(model, vectors()[0])
    assert [block.module for block in graph.blocks] == ["1"]
    inside = {graph.nodes[index].module for index in graph.blocks[0].nodes}
    assert {"1.inner.0", "1.inner.2"} <= inside and "0" not in inside and "3" not in inside


def test_nodes_know_their_shape_and_module() -> None:
    graph = graph_of(conv_net(), images(size=6)[0])
    convolutions = [node for node in graph.nodes if node.name.startswith("Convolution")]
    assert [(node.module, node.shape) for node in convolutions] == [
        ("6", (6, 8, 8, 8)), ("3", (6, 8, 8, 8)), ("0", (6, 4, 8, 8)),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_equal_examples_have_equal_ids_and_others_have_others(dtype: torch.dtype) -> None:
    examples = (torch.randn(200, 3, 5) * 50).to(dtype)
    ids = sample_ids(examples)
    assert len(set(ids)) == len({tuple(one.flatten().tolist()) for one in examples})
    assert sample_ids(examples.flip(0)) == ids[::-1]


def test_ids_see_a_single_bit_wherever_it_is() -> None:
    base = torch.zeros(1, 4, dtype=torch.int64)
    changed = [base.clone() for _ in range(4 * 63)]
    for index, one in enumerate(changed):
        one[0, index // 63] = 1 << (index % 63)
    ids = sample_ids(torch.cat([base, *changed]))
    assert len(set(ids)) == len(ids)


def test_ids_of_small_inputs_and_of_channels_last_images() -> None:
    assert len(set(sample_ids(torch.arange(5, dtype=torch.uint8).reshape(5, 1)))) == 5
    image = torch.randn(3, 3, 4, 4)
    laid_out = image.contiguous(memory_format=torch.channels_last)
    assert len(set(sample_ids(laid_out))) == 3
