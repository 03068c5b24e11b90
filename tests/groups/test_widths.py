"""Inner widths: which channels may be left out, found in any model or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import (
    Attention,
    Heads,
    Residual,
    SqueezeExcite,
    TiedLinears,
    chain,
    conv_net,
    images,
    loss_fn,
    vectors,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fl_elastic.groups.graph import Reader, Width
from fl_elastic.groups.trace import trace_step


def widths_of(model: nn.Module, batch: Any) -> dict[str, Width]:
    return {width.name: width for width in trace_step(model, loss_fn, batch).graph.widths}


def test_an_inverted_residual_with_its_depthwise_convolution_and_gate() -> None:
    found = widths_of(SqueezeExcite(), images()[0])
    assert found.keys() == {"expand", "squeeze"}
    inner = found["expand"]
    assert (inner.size, inner.unit) == (12, 1)
    assert inner.makers == ("expand", "excite") and inner.keepers == ("norm", "deep")
    assert inner.readers == (Reader("squeeze"), Reader("project", norm="last"))
    assert found["squeeze"].readers == (Reader("excite"),)


def test_a_residual_stream_stays_whole() -> None:
    model = Residual()
    names = set(widths_of(model, images()[0]))
    streams = {name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)}
    assert names and names < streams


def test_flattened_images_repeat_their_channels() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3)
    )
    (width,) = widths_of(model, images()[0]).values()
    assert width.readers == (Reader("4", repeat=9),)


def test_groups_of_a_group_norm_stay_together() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.GroupNorm(6, 24), nn.ReLU(), nn.Conv2d(24, 3, 6), nn.Flatten()
    )
    (width,) = widths_of(model, images()[0]).values()
    assert (width.size, width.unit) == (6, 4)


def test_a_perceptron_on_tokens_and_no_attention() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x, x, x)[0]
            return self.head((x + self.mlp(x)).mean(1))

    batch = torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0])
    (width,) = widths_of(Tokens(), batch).values()
    assert width.name == "mlp.1" and width.readers == (Reader("mlp.3"),) and width.size == 16


@pytest.mark.parametrize("rows", [2, 4, 5])
def test_heads_of_a_fused_attention_stay_together(rows: int) -> None:
    """However many examples there are, also as many as heads."""
    x, y = vectors()[0]
    found = widths_of(Heads(), (x[:rows], y[:rows]))
    assert list(found) == ["query", "mlp.1"]
    width = found["query"]
    assert (width.size, width.unit) == (4, 4)
    assert set(width.makers) == {"query", "key", "value"}
    assert width.readers == (Reader("out"),) and not width.keepers


class Crossed(Heads):
    """Its keys have other heads than its queries and values."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every head to the same keys."""
        y = self.embed(x.view(len(x), 3, 2))
        query, value = (
            layer(y).view(len(x), 3, 4, 4).transpose(1, 2) for layer in (self.query, self.value)
        )
        key = self.key(y).view(len(x), 3, 1, 4).transpose(1, 2).expand(-1, 4, -1, -1)
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        scores: Tensor = self.head((y + self.out(seen.transpose(1, 2).flatten(2))).mean(1))
        return scores


def used_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, 3))


def mixing() -> nn.Module:
    class Softmax(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](torch.softmax(self[0](x), 1))

    return Softmax(nn.Linear(6, 8), nn.Linear(8, 3))


def parametrised() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))


class OwnLinear(nn.Linear):
    """A layer that may do anything with its weight."""


@pytest.mark.parametrize(
    "model",
    [
        used_twice(), mixing(), parametrised(), TiedLinears(),
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
        nn.Sequential(OwnLinear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3)),
        nn.Linear(6, 3), Attention(), Crossed(),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_none(model: nn.Module) -> None:
    assert widths_of(model, vectors()[0]) == {}


def test_grouped_convolutions_are_none() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 3, 4), nn.Flatten()
    )  # fmt: skip
    assert widths_of(model, images()[0]) == {}


def test_chains_have_one_width_between_each_pair_of_layers() -> None:
    layers = [n for n, m in chain().named_modules() if isinstance(m, nn.Linear)]
    assert list(widths_of(chain(), vectors()[0])) == layers[:-1]
    assert list(widths_of(conv_net(), images()[0])) == ["0", "3", "6"]
    # Two groups of channels that must stay together are too few to leave one out.
    assert widths_of(conv_net("group"), images()[0]) == {}
