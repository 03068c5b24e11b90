"""A client has examples forgotten: everybody sends squares of gradients, and the server makes weights smaller."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import FedAvg
from slow_ones import slow_unless
from small_federation import arrays_of, as_weights, plain_sgd, quiet, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_elastic import Budget
from fl_elastic.aggregation import ModelAverage
from fl_elastic.errors import TrainingError, UpdateError
from fl_elastic.flower import (
    Checkpointed,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    elastic_client_app,
)
from fl_elastic.flower.client_round import ClientRound
from fl_elastic.flower.forgetting import ForgetRequests, dampened
from fl_elastic.flower.records import FORGET, train_reply
from fl_elastic.flower.round import RoundRecord
from fl_elastic.flower.tasks.forgetting import SumSquaredGradients
from fl_elastic.flower.tasks.task import task_in
from fl_elastic.losses import classification_loss, squared_outputs
from fl_elastic.methods.dampening.forget import dampen, digest_of, squared_gradients
from fl_elastic.update import Manifest
from fl_elastic.update.checks import Limits
from fl_elastic.update.dampening import (
    SquaredGradients,
    dampening_factors,
    decode_squares,
    encode_squares,
)
from fl_elastic.update.frame import MessageKind, pack

NODES, CLASSES, ALPHA = 4, 5, 2.0
Batch = tuple[torch.Tensor, torch.Tensor]
Untold = Callable[[int], dict[str, Any]]


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def data(node: int, *classes: int) -> list[Batch]:
    """Examples of each class around a place of its own; node 0 is the test."""
    generator = torch.Generator().manual_seed(node)
    places = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(99)) * 2
    targets = torch.tensor(classes).repeat_interleave(16)[
        torch.randperm(16 * len(classes), generator=generator)
    ]
    inputs = places[targets] + torch.randn(len(targets), 8, generator=generator)
    return list(zip(inputs.split(8), targets.split(8), strict=True))


THEIRS = data(7, 4)
"""What the second client, and nobody else, has of the last class."""


def client(
    node: int,
    *,
    forgets: bool = True,
    trains_it: bool = True,
    forget: Any = None,
    epochs: int = 3,
) -> ElasticClient:
    own = data(node, 0, 1, 2, 3)
    request = forget or (THEIRS if node == 2 and forgets else None)
    return ElasticClient(
        build(), [*own, *THEIRS] if node == 2 and trains_it else own, data(0, 0, 1, 2, 3, 4),
        budget=Budget(), loss_fn=classification_loss, optimizer_fn=plain_sgd, epochs=epochs,
        client_id=str(node), forget=request,
    )  # fmt: skip


def accuracy(weights: dict[str, Any], *classes: int) -> float:
    model = build()
    model.load_state_dict(
        {name: torch.from_numpy(np.array(each)) for name, each in weights.items()}
    )
    batches = data(0, *classes)
    with torch.no_grad():
        right = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)


def trained() -> ArrayRecord:
    """A model that knows all classes."""
    strategy = PartialUpdates(quiet(FedAvg))
    apps = {n: elastic_client_app(lambda _, n=n: client(n, forgets=False)) for n in range(1, 5)}
    result, _ = run(strategy, apps, arrays_of(build()), 6)
    return result.arrays


@pytest.fixture(scope="module")
def known() -> ArrayRecord:
    return trained()


def start(
    known: ArrayRecord,
    rounds: int = 1,
    *,
    terms: RoundConfig | None = None,
    requests: Mapping[int, list[Batch]] = MappingProxyType({}),
    alter: Callable[[Message], Message] = lambda reply: reply,
    average: ModelAverage | None = None,
    epochs: int = 3,
    **options: Any,
) -> tuple[dict[str, Any], list[RoundRecord], dict[int, ElasticClient]]:
    """Rounds in which nobody trains on what is to be forgotten; clients live as long as the run."""
    records: list[RoundRecord] = []
    strategy = PartialUpdates(
        quiet(FedAvg), config=terms or RoundConfig(forget=ALPHA), on_round=records.append,
        average=average,
    )  # fmt: skip
    clients = {
        n: client(n, trains_it=False, forget=requests.get(n), epochs=epochs)
        for n in range(1, NODES + 1)
    }
    apps = {n: elastic_client_app(lambda _, n=n: clients[n]) for n in clients}
    chosen: Any = options.pop("wrap", lambda strategy: strategy)(strategy)
    result, _ = run(chosen, apps, known, rounds, alter=alter)
    return as_weights(result.arrays), records, clients


@pytest.fixture(scope="module")
def untold(known: ArrayRecord) -> Untold:
    """The model after so many rounds of a server that forgets nothing."""
    return cache(lambda rounds: start(known, rounds, terms=RoundConfig())[0])


@pytest.fixture(scope="module")
def told(
    known: ArrayRecord,
) -> tuple[dict[str, Any], list[RoundRecord], dict[int, ElasticClient]]:
    """A round of a server that forgets."""
    return start(known)


@pytest.mark.slow
def test_a_class_of_one_client_is_forgotten_and_the_others_are_kept(
    known: ArrayRecord, untold: Untold, told: Any
) -> None:
    before = as_weights(known)
    assert accuracy(before, 4) > 0.9 and accuracy(before, 0, 1, 2, 3) > 0.9
    assert accuracy(untold(1), 4) > 0.6, "rounds alone have forgotten it"
    after, records, _ = told
    assert accuracy(after, 4) < 0.2
    assert accuracy(after, 0, 1, 2, 3) > 0.9
    (asked,) = [each for each in records if not each.trains]
    assert asked.dampened > 0 and len(asked.accepted) == NODES
    assert asked.downlink_total_bytes > 0 and all(each.uplink_bytes for each in asked.accepted)


@pytest.mark.slow
def test_the_mean_of_the_models_forgets_as_well(known: ArrayRecord, told: Any) -> None:
    """Of the models before, which knew it, nothing is left in what is tested and returned."""
    alone, _, _ = told
    after, _, _ = start(known, average=ModelAverage(0.9))
    assert all(np.array_equal(after[name], each) for name, each in alone.items())
    later, _, _ = start(known, 3, average=ModelAverage(0.9))
    assert accuracy(later, 4) < 0.3 and accuracy(later, 0, 1, 2, 3) > 0.9


@pytest.mark.parametrize("alpha", [ALPHA, None])
def test_it_is_what_one_device_with_all_the_data_would_do(
    known: ArrayRecord, untold: Untold, told: Any, alpha: float | None
) -> None:
    """The dampened model of a round against the same round's model, dampened by everybody's examples at once."""
    plain = untold(1)
    after, _, _ = told if alpha else start(known, terms=RoundConfig(forget=True))
    model = build()
    model.load_state_dict({n: torch.from_numpy(np.array(each)) for n, each in plain.items()})
    everything = [batch for node in range(1, 5) for batch in data(node, 0, 1, 2, 3)] + THEIRS
    few = squared_gradients(model, squared_outputs, THEIRS)
    dampen(model, few, squared_gradients(model, squared_outputs, everything), alpha=alpha)
    for name, each in model.state_dict().items():
        np.testing.assert_allclose(after[name], each.numpy(), rtol=1e-3, atol=1e-5)


def test_a_wish_is_met_once_and_the_client_hears_of_it(known: ArrayRecord) -> None:
    _, records, clients = start(known, epochs=1, rounds=3)
    assert [each.server_round for each in records if not each.trains] == [1]
    assert clients[2].forgotten and not clients[1].forgotten


def test_a_server_that_does_not_listen_says_nothing_and_does_nothing(known: ArrayRecord) -> None:
    _, records, clients = start(known, epochs=1, rounds=2, terms=RoundConfig())
    assert all(each.trains for each in records) and not clients[2].forgotten


def test_what_was_met_outlasts_the_server(known: ArrayRecord, tmp_path: Path) -> None:
    def kept(strategy: PartialUpdates) -> Checkpointed:
        return Checkpointed(strategy, tmp_path)

    start(known, epochs=1, rounds=1, wrap=kept)
    _, records, clients = start(known, epochs=1, rounds=3, wrap=kept)
    assert records and all(each.trains for each in records)
    assert clients[2].forgotten


def test_squares_of_nobody_who_asked_forget_nothing(known: ArrayRecord) -> None:
    def alter(message: Message) -> Message:
        if message.metadata.src_node_id == 2:
            told = message.content.config_records["fitres.metrics"]
            told.pop(FORGET, None)
        return message

    _, records, clients = start(known, epochs=1, rounds=2, alter=alter)
    assert all(each.trains for each in records) and not clients[2].forgotten


def test_damaged_squares_are_left_out_and_the_wish_is_not_met(
    known: ArrayRecord, caplog: pytest.LogCaptureFixture
) -> None:
    def alter(message: Message) -> Message:
        packed = message.content.array_records["fitres.parameters"]["0"].numpy()
        if (
            message.metadata.src_node_id == 2
            and FORGET not in message.content.config_records["fitres.metrics"]
        ):
            broken = packed.copy()
            broken[-1] ^= 1
            message.content = train_reply([broken], 8, {})
        return message

    with caplog.at_level(logging.WARNING, "fl_elastic"):
        _, records, clients = start(known, rounds=1, alter=alter)
    asked = records[-1]
    assert not asked.trains and not asked.dampened and asked.rejected[0].node_id == 2
    assert "nothing can be forgotten" in caplog.text and not clients[2].forgotten


def breaking(nodes: set[int], times: int) -> Callable[[Message], Message]:
    """Let the squares of some nodes arrive damaged, the first so many times."""
    left = Counter(dict.fromkeys(nodes, times))

    def alter(message: Message) -> Message:
        node = message.metadata.src_node_id
        packed = message.content.array_records["fitres.parameters"]["0"].numpy().tobytes()
        try:
            decode_squares(packed, Manifest.of(build()))
        except UpdateError:
            return message
        if left[node] > 0:
            left[node] -= 1
            broken = np.frombuffer(packed, np.uint8).copy()
            broken[-1] ^= 1
            message.content = train_reply([broken], 8, {})
        return message

    return alter


def test_a_client_whose_squares_were_lost_is_not_told_that_it_is_done(known: ArrayRecord) -> None:
    """Two want something forgotten, and only what one of them wants arrives."""
    _, _, clients = start(
        known, epochs=1, rounds=2, requests={3: data(8, 3)}, alter=breaking({3}, 9)
    )
    assert clients[2].forgotten and not clients[3].forgotten


@pytest.mark.slow
def test_a_wish_is_tried_again_after_a_failure_and_given_up_after_three(known: ArrayRecord) -> None:
    _, records, clients = start(known, epochs=1, rounds=3, alter=breaking({2}, 1))
    asked = [each for each in records if not each.trains]
    assert [each.dampened > 0 for each in asked] == [False, True] and clients[2].forgotten
    _, records, clients = start(known, epochs=1, rounds=4, alter=breaking({2}, 9))
    asked = [each for each in records if not each.trains]
    assert len(asked) == 3 and not any(each.dampened for each in asked)
    assert not clients[2].forgotten


def test_a_server_that_starts_again_has_not_forgotten_how_often_it_tried(
    known: ArrayRecord, tmp_path: Path
) -> None:
    asked = []
    for rounds in range(1, 7):
        _, records, _ = start(
            known, epochs=1, rounds=rounds, alter=breaking({2}, 9),
            wrap=lambda strategy: Checkpointed(strategy, tmp_path),
        )  # fmt: skip
        asked += [each.server_round for each in records if not each.trains]
    _, records, _ = start(known, epochs=1, rounds=6, alter=breaking({2}, 9))
    assert asked == [each.server_round for each in records if not each.trains] == [1, 2, 4]


def test_one_that_wants_everything_forgotten_does_not_keep_others_from_it(
    known: ArrayRecord,
) -> None:
    everything = [batch for node in range(20, 30) for batch in data(node, 0, 1, 2, 3)]
    _, _, clients = start(known, epochs=1, rounds=2, requests={1: everything})
    assert clients[2].forgotten and not clients[1].forgotten


def test_little_time_is_spent_on_what_is_to_be_forgotten_and_the_rest_speaks_for_all() -> None:
    own = client(2, trains_it=False)
    manifest = Manifest.of(own.model)
    hurried, whole = (
        task.answer(ClientRound(own, task, own.data)).arrays[0].tobytes()
        for task in (SumSquaredGradients(1e-6), SumSquaredGradients())
    )
    everything, forgotten = decode_squares(hurried, manifest)
    of_all, of_them = decode_squares(whole, manifest)
    assert forgotten is not None and of_them is not None
    assert (everything.examples, forgotten.examples) == (of_all.examples, of_them.examples)
    assert everything.examples == 80 and forgotten.examples == 16
    for name in forgotten.sums:
        np.testing.assert_array_equal(forgotten.sums[name], of_them.sums[name])
    assert any((everything.sums[n] != of_all.sums[n]).any() for n in of_all.sums)


def test_where_losses_jump_after_forgetting_the_wish_counts_as_undone() -> None:
    requests = ForgetRequests()
    request = "ab" * 16
    requests.hear(2, request)
    assert requests.open_of([1, 2]) == {2: request} and requests.met_of(2) == ""
    requests.tried({2: request}, 3)
    assert requests.met_of(2) == request and not requests.open_of([2])
    requests.undone(2)
    assert requests.met_of(2) == request
    requests.undone(3)
    assert requests.met_of(2) == "" and not requests.open_of([2])
    again = ForgetRequests()
    again.restore(requests.to_state())
    again.hear(2, request)
    assert again.met_of(2) == "" and not again.open_of([2])


@pytest.mark.parametrize("said", [None, 7, "", "xyz" * 8, "ab" * 40, "AB" * 16, b"ab" * 16])
def test_what_is_no_digest_is_no_wish(said: object) -> None:
    requests = ForgetRequests()
    requests.hear(1, said)
    assert not requests.open_of([1])


def squares_of(seed: int, examples: int) -> SquaredGradients:
    draw = np.random.default_rng(seed)
    model = Manifest.of(build())
    sums = {
        name: draw.exponential(size=shape).astype(np.float32)
        for name, shape in zip(model.names, model.shapes, strict=True)
    }
    # Gradients of length 1.
    return SquaredGradients(sums, examples).times(
        examples / sum(each.sum() for each in sums.values())
    )


@pytest.mark.parametrize("with_few", [True, False])
def test_squares_arrive_as_they_were_sent(with_few: bool) -> None:
    manifest, few = Manifest.of(build()), squares_of(1, 3)
    everything = squares_of(2, 9) + few
    packed = encode_squares(everything, few if with_few else None, manifest)
    found, forgotten = decode_squares(packed, manifest)
    assert found.examples == 12
    assert (forgotten is not None) == with_few
    for name, each in everything.sums.items():
        np.testing.assert_array_equal(found.sums[name], each)
        if forgotten is not None:
            np.testing.assert_array_equal(forgotten.sums[name], few.sums[name])


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed < 40, range(200)))
def test_mutated_squares_raise_update_errors_alone(seed: int) -> None:
    manifest, few = Manifest.of(build()), squares_of(1, 3)
    packed = bytearray(encode_squares(squares_of(2, 9) + few, few, manifest))
    draw = np.random.default_rng(seed)
    for _ in range(int(draw.integers(1, 4))):
        packed[int(draw.integers(len(packed)))] ^= int(draw.integers(1, 256))
    with pytest.raises(UpdateError):
        decode_squares(bytes(packed[: int(draw.integers(10, len(packed) + 1))]), manifest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_that_are_not_dampened_keep_every_digit(dtype: torch.dtype) -> None:
    model = build().to(dtype)
    manifest, few = Manifest.of(model), squares_of(1, 3)
    everything = squares_of(2, 90) + few
    reply = train_reply(
        [np.frombuffer(encode_squares(everything, few, manifest), np.uint8)], 93, {}
    )
    metadata = SimpleNamespace(src_node_id=1)
    message: Any = SimpleNamespace(content=reply, metadata=metadata, has_error=lambda: False)
    before = {name: each.numpy() / 3 for name, each in model.state_dict().items()}
    new, came = dampened(
        [message], before, manifest, Limits(), RoundRecord(1), {1: "request"}, None
    )  # fmt: skip
    factors = dampening_factors(few, everything)
    assert came == {1: 3} and any((each < 1).any() for each in factors.values())
    for name, factor in factors.items():
        assert new[name].dtype == before[name].dtype
        np.testing.assert_array_equal(new[name][factor == 1], before[name][factor == 1])
        assert (np.abs(new[name][factor < 1]) < np.abs(before[name][factor < 1])).all()


def test_what_is_to_be_forgotten_is_a_part_of_everything() -> None:
    manifest = Manifest.of(build())
    few, others = squares_of(1, 3), squares_of(2, 9)
    fewer = SquaredGradients(others.times(0.2).sums, 2)
    for everything, forgotten in ((others, few), (fewer, few)):
        with pytest.raises(UpdateError):
            decode_squares(encode_squares(everything, forgotten, manifest), manifest)


@pytest.mark.parametrize("part", ["everything", "forgotten"])
def test_squares_that_no_examples_can_have_are_refused(part: str) -> None:
    manifest, few = Manifest.of(build()), squares_of(1, 3)
    everything = squares_of(2, 9) + few
    if part == "everything":
        everything = everything.times(1.5)
    else:
        # Of one example, which all of them contain.
        few = SquaredGradients(few.sums, 1)
    with pytest.raises(UpdateError, match="must add up to one"):
        decode_squares(encode_squares(everything, few, manifest), manifest)


def claiming(node: int, squares: float, examples: int = 1) -> Callable[[Message], Message]:
    """Let a node claim squares that are the same for every weight, of as many examples, all to be forgotten."""
    manifest = Manifest.of(build())
    each = {
        n: np.full(s, 1.0, np.float32) for n, s in zip(manifest.names, manifest.shapes, strict=True)
    }
    count = sum(array.size for array in each.values())

    def alter(message: Message) -> Message:
        packed = message.content.array_records["fitres.parameters"]["0"].numpy().tobytes()
        if message.metadata.src_node_id != node:
            return message
        try:
            decode_squares(packed, manifest)
        except UpdateError:
            return message
        lie = SquaredGradients(
            {n: a * np.float32(squares / count) for n, a in each.items()}, examples
        )
        sent = encode_squares(lie, lie, manifest)
        message.content = train_reply([np.frombuffer(sent, np.uint8)], examples, {})
        return message

    return alter


def pointing(message: Message) -> Message:
    """Let node 2 claim one example to which the first layer alone matters, as it matters to others."""
    manifest = Manifest.of(build())
    packed = message.content.array_records["fitres.parameters"]["0"].numpy().tobytes()
    if message.metadata.src_node_id != 2:
        return message
    try:
        sums = dict(decode_squares(packed, manifest)[0].sums)
    except UpdateError:
        return message
    sums = {n: each if n.startswith("0.") else 0 * each for n, each in sums.items()}
    lie = SquaredGradients(sums, 1).times(1 / sum(float(each.sum()) for each in sums.values()))
    sent = encode_squares(lie, lie, manifest)
    message.content = train_reply([np.frombuffer(sent, np.uint8)], 1, {})
    return message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "lie"),
    [(1, claiming(2, 1.0)), (1, claiming(2, 1e6)), (3, claiming(2, 1e6)), (1, pointing)],
)
def test_lies_about_squares_cost_hardly_anything(
    known: ArrayRecord, untold: Untold, rounds: int, lie: Any
) -> None:
    after, _, _ = start(known, rounds, alter=lie)
    assert accuracy(after, 0, 1, 2, 3) > accuracy(untold(rounds), 0, 1, 2, 3) - 0.02


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_the_others_do_not_bear_is_not_kept_to_the_rounds_end(
    known: ArrayRecord,
    untold: Untold,
    rounds: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: Any,
) -> None:
    """Whatever squares would come through."""
    monkeypatch.setattr("fl_elastic.update.dampening._ROUNDED", math.inf)
    after, records, clients = start(known, rounds, alter=claiming(2, 1e6))
    assert accuracy(after, 0, 1, 2, 3) > accuracy(untold(rounds), 0, 1, 2, 3) - 0.02
    assert not any(each.dampened for each in records) and not clients[2].forgotten
    assert "nothing is forgotten: the losses of" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("squares", [0.0, 1e-42, 1e-36])
def test_squares_next_to_nothing_end_no_round(
    known: ArrayRecord, untold: Untold, squares: float
) -> None:
    after, records, _ = start(
        known, 2, terms=RoundConfig(forget=True), alter=claiming(2, squares, examples=3)
    )
    assert sum(each.trains for each in records) == 2
    assert accuracy(after, 0, 1, 2, 3) > accuracy(untold(2), 0, 1, 2, 3) - 0.02


@pytest.mark.slow
def test_a_node_that_always_wants_something_else_forgotten_is_heard_ever_more_rarely(
    known: ArrayRecord,
) -> None:
    def alter(message: Message) -> Message:
        told = message.content.config_records["fitres.metrics"]
        if message.metadata.src_node_id == 2 and FORGET in told:
            told[FORGET] = np.random.default_rng().bytes(16).hex()
        return message

    _, records, _ = start(known, epochs=1, rounds=9, alter=alter)
    asked = [each.server_round for each in records if not each.trains]
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert asked[:2] == [1, 2] and len(gaps) == 3 and gaps == sorted(set(gaps))


def test_tied_weights_are_dampened_under_each_of_their_names() -> None:
    from fl_elastic.methods.dampening.forget import split_over_names

    torch.manual_seed(0)
    first = nn.Linear(6, 6)
    model = nn.Sequential(first, nn.Tanh(), first, nn.Linear(6, 3))
    loader = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(3)]
    everything = squared_gradients(model, classification_loss, loader)
    few = squared_gradients(model, classification_loss, loader[:1])
    factors = dampening_factors(
        split_over_names(model, few), split_over_names(model, everything), alpha=1.5
    )
    assert set(factors) == {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}
    np.testing.assert_array_equal(factors["0.weight"], factors["2.weight"])
    local = deepcopy(model)
    dampen(local, few, everything, alpha=1.5)
    np.testing.assert_allclose(
        local[0].weight.detach(), first.weight.detach() * factors["0.weight"], rtol=1e-6
    )


def test_the_question_is_one_that_only_the_librarys_clients_know() -> None:
    task = SumSquaredGradients()
    assert not task.known_to_flower and task_in(task.to_config()) == task


def test_what_a_policy_looked_at_goes_as_well() -> None:
    """Policy ``neq`` keeps inputs from fit to fit, which may be those that are to be forgotten."""
    own = ElasticClient(
        build(), [*THEIRS, *data(2, 0, 1, 2, 3)], [], budget=Budget(), policy="neq",
        optimizer_fn=plain_sgd,
    )  # fmt: skip
    arrays = own.get_parameters({})
    theirs = [row for x, _ in THEIRS for row in x.numpy()]

    def kept() -> list[bool]:
        rows = [row for array in own.state.selection.memory.arrays.values() for row in array]
        return [any(np.array_equal(row, each) for each in theirs) for row in rows]

    own.fit(arrays, {})
    assert any(kept())
    own.forget(range(16))
    own.fit(arrays, {})
    assert kept() and not any(kept())


@pytest.mark.parametrize("empty", [[], DataLoader([], batch_size=4), iter(THEIRS)])
def test_nothing_to_forget_is_refused_when_a_client_is_made(empty: Any) -> None:
    with pytest.raises(TrainingError, match=r"leave forget out|not an iterator"):
        ElasticClient(build(), data(1, 0, 1), [], budget=Budget(), forget=empty)


def test_a_wish_is_the_same_in_any_order(known: ArrayRecord) -> None:
    """A node's process lives for one message: a loader that shuffles must not make a new request of it."""
    examples = TensorDataset(*(torch.cat(each) for each in zip(*THEIRS, strict=True)))
    shuffling = DataLoader(examples, batch_size=5, shuffle=True)

    def fresh(node: int) -> ElasticClient:
        return client(node, trains_it=False, forget=shuffling if node == 2 else None, epochs=1)

    strategy = PartialUpdates(quiet(FedAvg), config=RoundConfig(forget=ALPHA))
    apps = {n: elastic_client_app(lambda _, n=n: fresh(n)) for n in range(1, NODES + 1)}
    run(strategy, apps, known, 2)
    tried = [*strategy.fleet.forget_requests.to_state().rounds]
    assert tried == [digest_of(THEIRS, "2")]


def test_the_server_remembers_a_bounded_number_of_requests() -> None:
    requests, first = ForgetRequests(), f"{0:032x}"
    requests.tried({number: f"{number:032x}" for number in range(10_002)}, 1)
    kept = requests.to_state().rounds
    assert len(kept) == 10_000 and first not in kept and f"{10_001:032x}" in kept


def test_squares_that_are_too_few_for_their_parameters_are_refused() -> None:
    manifest = Manifest.of(build())
    header = {"manifest": manifest.hash, "indices": [0], "num_examples": 3, "forgotten": 0}
    with pytest.raises(UpdateError, match="squares need"):
        decode_squares(pack(MessageKind.SQUARES, header, [bytes(8)]), manifest)
