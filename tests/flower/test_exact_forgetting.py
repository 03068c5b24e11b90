"""A head in closed form forgets exactly: the next one is that of a federation that never saw the examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from in_process_grid import InProcessGrid
from small_federation import as_weights, quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_elastic import Budget
from fl_elastic.flower import (
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    elastic_client_app,
    initial_arrays,
)
from fl_elastic.flower.round import RoundRecord
from fl_elastic.flower.round_zero import HeadCheckpoint, HeadCheckpointState, Solved
from fl_elastic.flower.tasks.solve_head import SolveHead
from fl_elastic.losses import classification_loss
from fl_elastic.state.codec import from_archive, to_archive

Batches = list[tuple[torch.Tensor, torch.Tensor]]
NODES = range(1, 7)
TERMS = RoundConfig(read="last", solve_every=5, forget=True)


def build(*, frozen: bool) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    for parameter in model[0].parameters():
        parameter.requires_grad_(not frozen)
    return model


def data(node: int, *, clean: bool = True, offset: float = 0.0) -> Batches:
    """Classes that follow from the inputs, or are drawn by chance."""
    generator = torch.Generator().manual_seed(node)
    x = torch.randn(48, 8, generator=generator) + offset
    y = x[:, :4].argmax(dim=1)
    y = y if clean else torch.randint(0, 4, (48,), generator=generator)
    return list(zip(x.split(8), y.split(8), strict=True))


THEIRS = data(99, clean=False, offset=1.0)


def shuffled(batches: Batches) -> DataLoader[Any]:
    """The same examples, drawn in another order each time."""
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True)


class Ruin(torch.optim.SGD):
    """A step that leaves nothing of the features."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.zero_()


class Federation:
    """Nodes that hold ``own[node]`` in the beginning."""

    def __init__(
        self,
        own: dict[int, Batches],
        *,
        frozen: bool = True,
        rate: float = 0.05,
        optimizer: Any = torch.optim.SGD,
        terms: RoundConfig = TERMS,
    ) -> None:
        self.records: list[RoundRecord] = []
        self.heads: list[dict[str, Any]] = []

        def client(node: int) -> ElasticClient:
            return ElasticClient(
                build(frozen=frozen), own[node], data(0), budget=Budget(),
                loss_fn=classification_loss, client_id=str(node),
                optimizer_fn=lambda parameters: optimizer(parameters, lr=rate),
            )  # fmt: skip

        self.clients = {node: client(node) for node in own}
        self.model = build(frozen=frozen)
        apps = {n: elastic_client_app(lambda _, n=n: self.clients[n]) for n in own}
        self.grid = InProcessGrid(len(own), apps.__getitem__)
        self.strategy = PartialUpdates(quiet(nodes=3), config=terms, on_round=self.records.append)

    def run(self, rounds: int, after_zero: Any = lambda self: None) -> Federation:
        def evaluate(server_round: int, arrays: ArrayRecord) -> None:
            self.heads.append(as_weights(arrays))
            if not server_round:
                after_zero(self)

        self.strategy.start(
            grid=self.grid, initial_arrays=initial_arrays(self.model), num_rounds=rounds,
            timeout=1, evaluate_fn=evaluate,
        )  # fmt: skip
        return self


def assert_same_head(one: dict[str, Any], other: dict[str, Any], layer: str = "2") -> None:
    for name in (f"{layer}.weight", f"{layer}.bias"):
        np.testing.assert_allclose(
            one[name], other[name], rtol=1e-5, atol=1e-5 * float(np.abs(other[name]).max())
        )


def differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return not np.allclose(one["2.weight"], other["2.weight"], rtol=1e-2)


def six(**options: Any) -> dict[int, Batches]:
    return {node: data(node, **options) for node in NODES}


def with_theirs() -> dict[int, Batches]:
    return six() | {2: [*data(2), *THEIRS]}


def request(run: Federation) -> None:
    run.clients[2].forget(range(48, 96))


def leave(run: Federation) -> None:
    for node in (4, 5, 6):
        del run.grid._contexts[node]


def test_a_wish_is_met_by_the_next_head_without_dampening() -> None:
    never = Federation(six()).run(2)

    found = Federation(with_theirs()).run(2, request)
    assert differ(found.heads[0], never.heads[0])
    # At once, though no head was due after the first round.
    assert_same_head(found.heads[1], never.heads[0])
    assert_same_head(found.heads[2], never.heads[2])
    assert found.clients[2].forgotten and not found.clients[1].forgotten
    # Nobody was asked for squares of gradients: asked for a head after each round, no more.
    assert [each.server_round for each in found.records if not each.trains] == [0, 1, 2]
    assert not any(each.dampened for each in found.records)


@pytest.mark.parametrize("kind", [list, shuffled])
def test_ids_name_what_is_to_be_forgotten(kind: Any) -> None:
    """Here and there among a client's examples, and some of them in a second request."""
    draw = np.random.default_rng(5)
    gone = {n: sorted(draw.permutation(48)[: 5 + n].tolist()) for n in NODES}
    stay = {
        n: [
            (torch.cat([x for x, _ in data(n)])[kept], torch.cat([y for _, y in data(n)])[kept])
            for kept in [[i for i in range(48) if i not in gone[n]]]
        ]
        for n in NODES
    }
    never = Federation(stay).run(0)

    def twice(run: Federation) -> None:
        for n, each in run.clients.items():
            each.forget(gone[n][:3])
            each.forget(gone[n][2:])

    found = Federation({n: kind(data(n)) for n in NODES}).run(1, twice)
    assert differ(found.heads[0], never.heads[0])
    assert_same_head(found.heads[1], never.heads[0])
    assert all(
        len(torch.cat([y for _, y in each.train_loader])) == 48 - len(gone[n])
        for n, each in found.clients.items()
    )


def test_what_was_trained_by_steps_is_dampened_and_the_head_solved_for_under_it() -> None:
    found = Federation(with_theirs(), frozen=False, rate=0.0).run(2, request)
    squares, solved = [each for each in found.records if each.server_round == 1][1:]
    assert squares.dampened and not solved.dampened and found.clients[2].forgotten
    # The head is the one of the dampened body, from sums without the examples.
    body = {n: each for n, each in found.heads[1].items() if n.startswith("0.")}
    again = Federation(six(), frozen=False)
    state = {n: torch.from_numpy(np.array(each)) for n, each in body.items()}
    again.model.load_state_dict(state, strict=False)
    assert_same_head(found.heads[1], again.run(0).heads[0])


def test_who_is_not_told_of_a_head_that_nobody_sent_sums_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, answers = Federation(with_theirs()), SolveHead.answer

    def asked(run: Federation) -> None:
        request(run)

        def lost(task: SolveHead, *asked: Any) -> Any:
            from fl_elastic.errors import TrainingError

            if len([each for each in run.records if each.trains]) < 2:
                raise TrainingError("out of memory")
            return answers(task, *asked)

        monkeypatch.setattr(SolveHead, "answer", lost)

    told: list[bool] = []
    send = found.grid.push_messages

    def watched(messages: Any) -> Any:
        sent = send(messages)
        told.append(found.clients[2].forgotten)
        return sent

    found.grid.push_messages = watched  # type: ignore[method-assign]
    found.run(3, asked)
    assert_same_head(found.heads[3], Federation(six()).run(0).heads[0])
    # Not in the second round, for the first head without the examples came after it.
    trained = [n for n, each in enumerate(found.records) if each.trains]
    assert len(trained) == 3 and found.clients[2].forgotten and not all(told[2:4])


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_examples_that_are_simply_gone_are_in_no_later_head(frozen: bool) -> None:
    """Without a request; where nothing else is trained the head is due all the same."""
    terms = RoundConfig(read="last", solve_every=1)
    never = Federation(six(), frozen=frozen, rate=0.0, terms=terms).run(1)

    def drop(run: Federation) -> None:
        run.clients[2].train_loader = data(2)

    found = Federation(with_theirs(), frozen=frozen, rate=0.0, terms=terms).run(1, drop)
    assert_same_head(found.heads[1], never.heads[1])


@pytest.mark.parametrize("easy", [False, True])
def test_who_leaves_is_in_no_later_head(easy: bool) -> None:
    """Also where the head of those who stay has a larger error, for they have the harder examples."""
    terms = RoundConfig(read="last", solve_every=1)
    own = {node: data(node, clean=easy and node > 3) for node in NODES}
    stay = {node: own[node] for node in (1, 2, 3)}
    never = Federation(stay, frozen=False, rate=0.0, terms=terms).run(1)

    found = Federation(own, frozen=False, rate=0.0, terms=terms).run(1, leave)
    assert differ(found.heads[0], found.heads[1])
    assert_same_head(found.heads[1], never.heads[1])
    # Features were as good as before, so nobody's rate is smaller.
    assert not any(each.stepped_back for each in found.records)
    assert found.strategy.solved.nodes == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(("read", "layer"), [("last", "2"), ("1@flat", "head")])
def test_spoiled_features_go_back_under_a_head_of_those_who_are_there(
    read: str, layer: str
) -> None:
    terms = RoundConfig(solve_every=1, read=read)
    own = {node: data(node, clean=node <= 4) for node in NODES}
    stay = {node: own[node] for node in (1, 2, 3)}
    never = Federation(stay, frozen=False, rate=0.0, terms=terms).run(1)

    found = Federation(own, frozen=False, optimizer=Ruin, terms=terms).run(1, leave)
    assert found.records[-1].stepped_back
    assert_same_head(found.heads[1], never.heads[1], layer)


def test_the_state_keeps_whose_head_it_is_and_no_sums() -> None:
    solved, again = HeadCheckpoint(), HeadCheckpoint()
    solved.take(Solved({"w": np.ones(3)}, "", 0.5, frozenset({7, 2**63 + 1})))
    archive = to_archive(solved.to_state())
    assert [*archive.arrays] == ["weights/w"]
    again.restore(from_archive(HeadCheckpointState, archive))
    assert again.nodes == {7, 2**63 + 1} and list(again.weights) == ["w"]
