"""Any combination of terms, policies and codecs ends in the same model, whoever is started anew in between.

In one federation clients and server live through the whole run.
In the other each message meets a client of a process of its own, as in deployment, and the server is killed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM
from in_process_grid import InProcessGrid
from small_federation import arrays_of, as_weights, assert_identical, local_data, plain_sgd, quiet
from small_models import (
    Inception,
    Residual,
    SqueezeExcite,
    conv_net,
    flat_profile,
    images,
    loss_fn,
)
from torch import nn

from fl_elastic import Budget, TrainerOptions
from fl_elastic.aggregation import RULES, SERVER_OPTIMIZERS, MergeOptions, ModelAverage
from fl_elastic.flower import (
    Checkpointed,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    elastic_client_app,
)
from fl_elastic.training import Timing
from fl_elastic.update import CODECS

NODES, ROUNDS = (1, 2, 3), 4
MODELS: list[Callable[[], nn.Module]] = [
    conv_net, lambda: conv_net("group"), Residual, Inception, SqueezeExcite,
]  # fmt: skip
POLICIES = [
    "full", "head", "elastic", "bias", "last_k", "random", "gradient_filter", "tinytrain", "joint",
    "sparse_update", "velocity",
]  # fmt: skip


class Killed(Exception):
    """Stands for the end of the server's process."""


class InOrder(InProcessGrid):
    """Flower draws clients in an order of its own; sums are the same in the same order."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return super().push_messages(sorted(messages, key=lambda m: m.metadata.dst_node_id))

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        assert not reply.has_error(), reply.error.reason
        return reply


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


class Federation:
    """What three clients and their server are like, drawn at random; nothing of it depends on a clock."""

    def __init__(self, draw: random.Random) -> None:
        one, self._make = draw.choice, draw.choice(MODELS)
        places = [group.name for group in self._profile(plain_sgd).graph.groups]
        cut = one(["none", "none", "moving", f"fixed:{one(places)}"])
        self._config = RoundConfig(
            delta_downlink=one([False, True]), read=one(["none", "last"]),
            solve_every=one([1, 2, 5]), cut=cut, forget=one([False, False, True]),
            plan=one(["local", "local", "server"]),
        )  # fmt: skip
        self._merge = MergeOptions(
            weighting=one(["examples", "uniform"]), normalise_steps=one([False, True]),
        )  # fmt: skip
        self._rule = one(
            [None, *(name for name in RULES.names() if name not in ("products", "contributors"))]
        )
        self._server, self._average = (
            one([None, None, *SERVER_OPTIMIZERS.names()]),
            one([None, 0.5]),
        )
        self._tests = one([0.0, 1.0])
        # A test that a kill cuts off is not done again: who missed it is sent one rounded change in place of two.
        self._codec = one(["fp32", "fp16", "bf16"]) if not self._tests else "fp32"
        self._inner = one(
            [(FedAvg, {}), (FedAvgM, {"server_momentum": 0.9}), (FedAdam, {"eta": 0.05})]
        )
        self._clients = [
            {
                "policy": one(POLICIES), "codec": one(CODECS.names()), "epochs": one([1, 1, 2]),
                "optimizer_fn": one([plain_sgd, adamw]), "budget": Budget(one([None, 1.5, 2.5])),
                "options": TrainerOptions(proximal=one([0.0, 0.1]), timing=Timing(closed_loop=False)),
            }
            for _ in NODES
        ]  # fmt: skip

    def strategy(self) -> PartialUpdates:
        """A server that has seen nothing yet."""
        kind, options = self._inner
        return PartialUpdates(
            quiet(kind, nodes=len(NODES), fraction_evaluate=self._tests, **options),
            rule=self._rule, merge=self._merge, config=self._config, codec=self._codec,
            server_optimizer=self._server and SERVER_OPTIMIZERS.make(self._server),
            average=self._average and ModelAverage(self._average),
        )  # fmt: skip

    def client(self, node: int, state: Path) -> ElasticClient:
        """A client whose process has just begun, with what earlier ones have left."""
        mine = self._clients[node - 1]
        return ElasticClient(
            self.model(), local_data(node), images(2, seed=99), loss_fn=loss_fn,
            profile=self._profile(mine["optimizer_fn"]), state_dir=state / str(node),
            client_id=f"client {node}", **mine,
        )  # fmt: skip

    def model(self) -> nn.Module:
        """The first one, always the same."""
        torch.manual_seed(0)
        return self._make()

    def run(
        self, strategy: Any, client: Callable[[int], ElasticClient], dies: int = 0
    ) -> ArrayRecord:
        """Start a server's process, which ends after a round or lives to the last one."""

        def app_of(node: int) -> Any:
            def client_fn(context: Context) -> ElasticClient:
                return client(node)

            return elastic_client_app(client_fn)

        def evaluate(server_round: int, arrays: ArrayRecord) -> None:
            if dies and server_round == dies:
                raise Killed

        grid, first = InOrder(len(NODES), app_of), arrays_of(self.model())
        result = strategy.start(
            grid=grid, initial_arrays=first, num_rounds=ROUNDS, timeout=1, evaluate_fn=evaluate
        )
        return result.arrays

    def _profile(self, optimizer_fn: Any) -> Any:
        return flat_profile(self.model(), local_data(1)[0], optimizer_fn)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 40))]
)
def test_whoever_is_started_anew_ends_in_the_same_model(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    these = Federation(draw)
    lasting = {node: these.client(node, tmp_path / "lasting") for node in NODES}
    whole = these.run(these.strategy(), lasting.__getitem__)

    def anew(node: int) -> ElasticClient:
        return these.client(node, tmp_path / "anew")

    for dies in sorted(draw.sample(range(1, ROUNDS), draw.randrange(3))):
        with pytest.raises(Killed):
            these.run(Checkpointed(these.strategy(), tmp_path / "run"), anew, dies)
    resumed = these.run(Checkpointed(these.strategy(), tmp_path / "run"), anew)
    assert_identical(resumed, whole)
    assert all(np.isfinite(each).all() for each in as_weights(whole).values())
