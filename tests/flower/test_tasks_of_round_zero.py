"""Round zero of every kind of task; where there is no head in closed form the rounds begin as without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from slow_ones import slow_unless
from small_federation import arrays_of, as_weights, plain_sgd, quiet, run
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic import Budget
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundConfig, elastic_client_app
from fl_elastic.losses import own_loss_or_cross_entropy

NODES = 4
Task = tuple[Callable[[], nn.Module], Callable[[int], list[Any]], Any]


def maps() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 3, 1))


def map_data(node: int) -> list[Any]:
    """Each place is of the class of the larger of two channels, or of neither; the edge is of none."""
    generator = torch.Generator().manual_seed(node)
    x = torch.randn(12, 2, 6, 6, generator=generator)
    y = torch.where(x.amax(dim=1) < 0, 2, x.argmax(dim=1))
    y[:, 0] = -100
    return list(zip(x.split(4), y.split(4), strict=True))


def labels() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))


def label_data(node: int) -> list[Any]:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(node))
    return list(zip(x.split(20), (x[:, :3] > 0.5).float().split(20), strict=True))


def numbers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))


def number_data(node: int) -> list[Any]:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(node))
    return list(zip(x.split(20), (x[:, :2] + x[:, 2:4].abs()).split(20), strict=True))


def tokens() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))


def token_data(node: int) -> list[Any]:
    x = torch.randint(0, 20, (12, 5), generator=torch.Generator().manual_seed(node))
    return list(zip(x.split(4), (x % 4).masked_fill(x == 0, -100).split(4), strict=True))


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.movedim(-1, 1), targets)


class Detector(nn.Module):
    """Says boxes of each image as a list, as torchvision's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.box = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return [{"boxes": self.box(self.body(row[None]).relu())} for row in x]


def boxes(node: int) -> list[Any]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(node))
    return list(zip(x.split(4), (2 * x).split(4), strict=True))


def box_loss(outputs: Any, targets: Tensor) -> Tensor:
    return functional.mse_loss(torch.cat([each["boxes"] for each in outputs]), targets)


def next_word(tied: bool) -> nn.Module:
    torch.manual_seed(3)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, tie_word_embeddings=tied
        )
    )


def text(node: int) -> list[Any]:
    generator = torch.Generator().manual_seed(node)
    given = torch.randint(3, 40, (8, 6), generator=generator)
    return [{"input_ids": rows, "labels": rows} for rows in given.split(4)]


def losses(task: Task, terms: RoundConfig, rounds: int = 0) -> list[float]:
    """Test loss before the first round and after each."""
    make, data, loss_fn = task

    def client(node: int) -> ElasticClient:
        return ElasticClient(
            make(), data(node), data(0), budget=Budget(), loss_fn=loss_fn, optimizer_fn=plain_sgd,
            policy="full",
        )  # fmt: skip

    apps = {n: elastic_client_app(lambda _, n=n: client(n)) for n in range(1, NODES + 1)}
    seen: list[float] = []

    def evaluate(server_round: int, arrays: Any) -> None:
        own = client(0)
        seen.append(own.evaluate(list(as_weights(arrays).values()), {})[0])

    run(
        PartialUpdates(quiet(), config=terms), apps, arrays_of(make()), rounds, evaluate_fn=evaluate
    )
    return seen


TERMS = RoundConfig(read="last", solve_every=1)
SOLVED: dict[str, Task] = {
    "maps": (maps, map_data, functional.cross_entropy),
    "labels": (labels, label_data, functional.binary_cross_entropy_with_logits),
    "numbers": (numbers, number_data, functional.mse_loss),
    "tokens": (tokens, token_data, token_loss),
}
OTHERS: dict[str, Task] = {
    "detection": (Detector, boxes, box_loss),
    "tied": (lambda: next_word(True), text, own_loss_or_cross_entropy),
    "next word": (lambda: next_word(False), text, own_loss_or_cross_entropy),
}


@pytest.mark.parametrize("name", slow_unless({"maps", "labels"}.__contains__, SOLVED))
def test_the_head_is_solved_for_and_rounds_go_on_under_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fl_elastic")
    (plain,) = losses(SOLVED[name], RoundConfig())
    before, *after = losses(SOLVED[name], TERMS, rounds=2)
    assert before < 0.7 * plain and max(after) < 1.1 * before
    assert "left out" not in caplog.text and "from 4 clients" not in caplog.text


@pytest.mark.parametrize("name", slow_unless("next word".__ne__, OTHERS))
def test_where_there_is_none_the_log_says_so_and_rounds_begin_as_without(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = losses(OTHERS[name], RoundConfig(), rounds=2)
    with caplog.at_level(logging.WARNING, "fl_elastic"):
        found = losses(OTHERS[name], TERMS, rounds=2)
    assert "no client sent sums for a head; it stays as it is" in caplog.text
    assert "in closed form" in caplog.text
    assert found == pytest.approx(plain) and plain[2] < plain[0]
