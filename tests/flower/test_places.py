"""A head in closed form that reads where the fleet's sums say, through whole federations in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp.strategy import FedAvg
from in_process_grid import InProcessGrid
from small_federation import arrays_of, as_weights, elastic_client, plain_sgd, run
from small_federation import build as conv_net
from torch import nn

from fl_elastic import Budget
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.sums_privacy import SumsPrivacy
from fl_elastic.errors import CheckpointError, SettingError
from fl_elastic.flower import (
    Checkpointed,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    SecurePartialUpdates,
    elastic_client_app,
    initial_arrays,
)
from fl_elastic.flower.records import ERROR, train_reply
from fl_elastic.flower.tasks.task import TASK
from fl_elastic.losses import classification_loss
from fl_elastic.readout import Readout, loaded, places_of
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.model_head import put_head

NODES = 4


def build() -> nn.Module:
    """A network that pools away where something is."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def data(node: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The class says in which quarter of the image there is a spot."""
    generator = torch.Generator().manual_seed(node)
    classes = torch.randint(0, 4, (32,), generator=generator)
    images = 0.3 * torch.randn(32, 1, 10, 10, generator=generator)
    spots = torch.randint(1, 4, (32, 2), generator=generator).tolist()
    for image, label, (row, column) in zip(images, classes.tolist(), spots, strict=True):
        image[0, 5 * (label // 2) + row, 5 * (label % 2) + column] += 4.0
    return list(zip(images.split(8), classes.split(8), strict=True))


def client(node: int) -> ElasticClient:
    return ElasticClient(
        build(), data(node), data(0), budget=Budget(), loss_fn=classification_loss,
        optimizer_fn=plain_sgd,
    )  # fmt: skip


def apps() -> dict[int, Any]:
    return {
        node: elastic_client_app(lambda _, node=node: client(node)) for node in range(1, NODES + 1)
    }


def model_of(arrays: ArrayRecord) -> nn.Module:
    return loaded(build(), arrays, data(0)[0][0]).eval()


def accuracy(model: nn.Module, apart: int = 1) -> float:
    """The share of right classes; with 2, of right halves, the upper or the lower."""
    with torch.no_grad():
        return sum(int((model(x).argmax(1) // apart == y // apart).sum()) for x, y in data(0)) / 32


def start(strategy: Any, rounds: int = 0, arrays: ArrayRecord | None = None) -> ArrayRecord:
    return models_tested(strategy, rounds, arrays)[-1]


def models_tested(
    strategy: Any, rounds: int = 0, arrays: ArrayRecord | None = None
) -> list[ArrayRecord]:
    """The models that the server tests, the first one after round zero."""
    models: list[ArrayRecord] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        models.append(arrays)
        return MetricRecord({"accuracy": accuracy(model_of(arrays))})

    run(strategy, apps(), arrays or arrays_of(build()), rounds, evaluate_fn=evaluate)
    return models


def test_the_fleet_reads_where_the_last_layer_cannot_see() -> None:
    strategy = PartialUpdates(FedAvg(), config=RoundConfig(read="auto"))
    found = start(strategy)
    last = start(PartialUpdates(FedAvg(), config=RoundConfig(read="last")))
    assert places_of(as_weights(found)) and not places_of(as_weights(last))
    assert accuracy(model_of(found)) > 0.95
    assert accuracy(model_of(last)) < 0.6


class AnyOrder(InProcessGrid):
    """Gives the replies in an order of its own."""

    def __init__(self, nodes: int, app_of: Any, seed: int) -> None:
        super().__init__(nodes, app_of)
        self._draw = np.random.default_rng(seed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = list(super().pull_messages(message_ids))
        return [found[place] for place in self._draw.permutation(len(found))]


@pytest.mark.slow
def test_who_answers_first_does_not_decide_where_a_head_reads() -> None:
    """On data without a best place, where it matters which examples are held out."""
    places = set()
    for seed in range(6):
        fleet = {
            node: elastic_client_app(lambda _, node=node: elastic_client(conv_net(), node))
            for node in (1, 2, 3, 4)
        }
        strategy = PartialUpdates(FedAvg(), config=RoundConfig(read="auto>40", plan="none"))
        grid = AnyOrder(4, fleet.__getitem__, seed)
        result = strategy.start(grid=grid, initial_arrays=arrays_of(conv_net()), num_rounds=1)
        places.add(places_of(as_weights(result.arrays)))
    assert len(places) == 1


@pytest.mark.parametrize("places", ["input@grid2+1@grid2", "mirrored:input@grid2+1@grid2"])
def test_named_places_are_those_of_one_device_with_all_examples(places: str) -> None:
    terms = RoundConfig(read=places)
    found = model_of(start(PartialUpdates(FedAvg(), config=terms)))
    alone = Readout(build(), places, data(0)[0][0], 4)
    sums = [head_sums(alone, data(node), together=8) for node in range(1, NODES + 1)]
    put_head(alone, closed_form_head(*sums), "head.weight")
    assert found.places == alone.places
    assert "body.0.weight" in found.state_dict() and "body.2.weight" not in found.state_dict()
    for name, tensor in alone.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("read", ["1@grid2", "input@grid2"])
def test_models_of_other_precision_are_read_inside_too(kind: torch.dtype, read: str) -> None:
    def client(node: int) -> ElasticClient:
        given = [(x.to(kind), y) for x, y in data(node)]
        return ElasticClient(
            build().to(kind), given, given, budget=Budget(), loss_fn=classification_loss,
            optimizer_fn=plain_sgd,
        )  # fmt: skip

    fleet = {node: elastic_client_app(lambda _, node=node: client(node)) for node in range(1, 4)}
    terms = RoundConfig(read=read, plan="none")
    result, _ = run(PartialUpdates(FedAvg(), config=terms), fleet, arrays_of(build().to(kind)))
    assert places_of(as_weights(result.arrays)) == read
    images, classes = (torch.cat(each) for each in zip(*data(0), strict=True))
    model = loaded(build().to(kind), result.arrays, images.to(kind)).eval()
    assert float((model(images.to(kind)).argmax(1) == classes).float().mean()) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "cut", "apart"),
    [("1@grid4", "none", 1), ("mirrored:input@grid4+1@grid4", "moving", 2)],
)
def test_rounds_of_training_go_on_from_it(read: str, cut: str, apart: int) -> None:
    terms = RoundConfig(read=read, solve_every=2, cut=cut)
    before, *_, after = models_tested(PartialUpdates(FedAvg(), config=terms), rounds=2)
    assert places_of(as_weights(after)) == read
    assert not np.array_equal(
        as_weights(after)["body.0.weight"], as_weights(before)["body.0.weight"]
    )
    assert accuracy(model_of(after), apart) > 0.9


def test_a_run_that_begins_with_such_a_model_keeps_its_places() -> None:
    terms = RoundConfig(read="1@grid4")
    before = start(PartialUpdates(FedAvg(), config=terms))
    after = start(PartialUpdates(FedAvg(), config=RoundConfig()), rounds=1, arrays=before)
    assert places_of(as_weights(after)) == "1@grid4"
    assert not np.array_equal(as_weights(after)["head.weight"], as_weights(before)["head.weight"])


class Named(nn.Module):
    """Puts out its scores under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(images)}


@pytest.mark.parametrize(
    ("make", "loss_fn", "metrics_fn"),
    [
        (Named, lambda outputs, classes: classification_loss(outputs.get("logits"), classes), None),
        (Named, classification_loss, lambda outputs, _: {"mean": outputs.get("logits").mean()}),
    ],
)
def test_a_fleet_whose_loss_is_not_of_scores_alone_trains_its_model_as_it_is(
    make: Any, loss_fn: Any, metrics_fn: Any
) -> None:
    def app(node: int) -> Any:
        return elastic_client_app(
            lambda _: ElasticClient(
                make(), data(node), data(0), budget=Budget(), loss_fn=loss_fn,
                optimizer_fn=plain_sgd, metrics_fn=metrics_fn,
            )
        )  # fmt: skip

    arrays = arrays_of(make())
    fleet = {node: app(node) for node in (1, 2, 3)}
    strategy = PartialUpdates(FedAvg(), config=RoundConfig(read="auto"))
    result, _ = run(strategy, fleet, arrays, rounds=2)
    assert list(result.arrays) == list(arrays)
    told = [*result.train_metrics_clientapp.values(), *result.evaluate_metrics_clientapp.values()]
    assert len(told) == 4
    assert all(each.get("train-loss", each.get("loss", -1.0)) > 0 for each in told)


class Ends(nn.Module):
    """Puts out its scores as they are, or logarithms of probabilities, as torch's first examples do."""

    def __init__(self, logarithms: bool) -> None:
        super().__init__()
        self.layers, self.logarithms = build(), logarithms

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores.log_softmax(dim=1) if self.logarithms else scores


@pytest.mark.parametrize("read", ["auto", "last"])
def test_models_that_put_out_logarithms_of_probabilities_get_the_same_head(read: str) -> None:
    found = []
    for logarithms, loss_fn in ((False, classification_loss), (True, nn.functional.nll_loss)):

        def one(node: int, logarithms: bool = logarithms, loss_fn: Any = loss_fn) -> ElasticClient:
            return ElasticClient(
                Ends(logarithms), data(node), data(0), budget=Budget(), loss_fn=loss_fn,
                optimizer_fn=plain_sgd,
            )  # fmt: skip

        fleet = {n: elastic_client_app(lambda _, n=n, one=one: one(n)) for n in range(1, NODES + 1)}
        strategy = PartialUpdates(FedAvg(), config=RoundConfig(read=read))
        result, _ = run(strategy, fleet, arrays_of(Ends(logarithms)))
        found.append(as_weights(result.arrays))
        model = loaded(Ends(logarithms), result.arrays, data(0)[0][0]).eval()
        total = model(data(0)[0][0]).exp().sum(dim=1)
        assert bool(((total - 1.0).abs() < 1e-5).all()) == logarithms
        assert isinstance(model, Readout) == (read == "auto")
    scores, logs = found
    assert scores.keys() == logs.keys()
    for name, each in scores.items():
        np.testing.assert_allclose(logs[name], each, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_place_that_the_model_does_not_have_leaves_the_last_layer() -> None:
    terms = RoundConfig(read="nowhere@grid4")
    found = start(PartialUpdates(FedAvg(), config=terms))
    assert list(as_weights(found)) == list(as_weights(arrays_of(build())))
    assert not np.array_equal(as_weights(found)["6.weight"], build()[6].weight.detach().numpy())


def test_cameras_of_different_sizes_take_part_in_one_fleet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the input's size decides how many features a place has, nobody reads there."""

    def client(node: int) -> ElasticClient:
        size = (10, 14, 18, 22)[node - 1]
        given = [
            (torch.nn.functional.interpolate(images, size=(size, size)), classes)
            for images, classes in data(node)
        ]
        return ElasticClient(
            build(), given, given, budget=Budget(), loss_fn=classification_loss,
            optimizer_fn=plain_sgd,
        )  # fmt: skip

    fleet = {node: elastic_client_app(lambda _, node=node: client(node)) for node in range(1, 5)}
    records: list[Any] = []
    strategy = PartialUpdates(FedAvg(), config=RoundConfig(read="auto"), on_round=records.append)
    result, _ = run(strategy, fleet, arrays_of(build()), 1)
    assert places_of(as_weights(result.arrays)) and "@flat" not in places_of(
        as_weights(result.arrays)
    )
    assert [len(each.accepted) for each in records] == [4] * len(records)
    assert not any(each.rejected for each in records) and "left out" not in caplog.text


@pytest.mark.parametrize("read", ["auto", "1@grid4"])
def test_where_sums_are_to_be_secret_no_place_is_chosen_from_features_in_the_clear(
    read: str,
) -> None:
    privacy = SumsPrivacy(epsilon=4.0, delta=1e-5, clip=20.0)
    with pytest.raises(SettingError, match=r"without noise: give server and clients a .*Readout"):
        RoundConfig(solve_every=0, read=read, sums_privacy=privacy)
    terms = RoundConfig(plan="server", solve_every=0, read=read)
    with pytest.raises(SettingError, match=r"the server sees: give server and clients"):
        SecurePartialUpdates(LegacyFedAvg(), config=terms, workflow=SecAggPlusWorkflow(3, 2))


@pytest.mark.slow
def test_a_server_that_restarts_goes_on_from_the_chosen_places(tmp_path: Path) -> None:
    terms = RoundConfig(read="1@grid4", solve_every=0)

    def kept(rounds: int) -> ArrayRecord:
        return start(Checkpointed(PartialUpdates(FedAvg(), config=terms), tmp_path), rounds)

    kept(1)
    after = kept(2)
    at_once = start(PartialUpdates(FedAvg(), config=terms), rounds=2)
    for name, array in as_weights(at_once).items():
        assert np.allclose(as_weights(after)[name], array, rtol=1e-4, atol=1e-5), name


def checkpointed(place: Path, rounds: int, read: str, arrays: ArrayRecord | None = None) -> None:
    strategy = PartialUpdates(FedAvg(), config=RoundConfig(read=read))
    start(Checkpointed(strategy, place), rounds, arrays)


@pytest.fixture(scope="module")
def after_one_round(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by where the head of their runs reads."""
    given = arrays_of(Readout(build(), "1@grid4", data(0)[0][0], 4))
    found = {}
    for name, read, arrays in (
        ("last", "last", None),
        ("1@grid4", "1@grid4", None),
        ("given", "last", given),
    ):
        found[name] = tmp_path_factory.mktemp("checkpoints")
        checkpointed(found[name], 1, read, arrays)
    return found


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ("last", "1@grid4", "reads last and goes on doing so: read='1@grid4'"),
        ("1@grid4", "last", "reads 1@grid4 and goes on doing so: read='last'"),
        ("1@grid4", "1@grid4", ""),
        ("1@grid4", "auto", ""),
        ("1@grid4", "none", ""),
        ("given", "last", ""),
    ],
)
def test_a_server_that_restarts_says_where_its_head_goes_on_reading(
    first: str,
    then: str,
    told: str,
    after_one_round: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = arrays_of(Readout(build(), "1@grid4", data(0)[0][0], 4)) if first == "given" else None
    shutil.copytree(after_one_round[first], tmp_path, dirs_exist_ok=True)
    checkpointed(tmp_path, 2, then, given)
    assert "resuming after round 1" in caplog.text
    assert told in caplog.text and ("goes on doing so" in caplog.text) == bool(told)


@pytest.mark.parametrize("before", ["1@grid4", "1@grid2", ""])
def test_a_checkpoint_of_other_places_is_one_of_another_model(before: str, tmp_path: Path) -> None:
    def model(places: str) -> ArrayRecord:
        return arrays_of(Readout(build(), places, data(0)[0][0], 4) if places else build())

    start(Checkpointed(PartialUpdates(FedAvg()), tmp_path), 1, model(before))
    with pytest.raises(CheckpointError, match="another model"):
        start(Checkpointed(PartialUpdates(FedAvg()), tmp_path), 2, model("3@grid4"))


def test_a_frozen_body_that_is_not_read_is_not_said_to_be_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def frozen() -> nn.Module:
        model = build()
        model[0].requires_grad_(False)
        return model

    def client(node: int) -> ElasticClient:
        return ElasticClient(
            frozen(), data(node), data(0), budget=Budget(), loss_fn=classification_loss,
            optimizer_fn=plain_sgd,
        )  # fmt: skip

    fleet = {node: elastic_client_app(lambda _, node=node: client(node)) for node in range(1, 4)}
    strategy = PartialUpdates(FedAvg(), config=RoundConfig(read="input@grid2"))
    result, _ = run(strategy, fleet, initial_arrays(frozen()), 1)
    assert places_of(as_weights(result.arrays)) == "input@grid2"
    assert "frozen part of the model" not in caplog.text


def test_under_a_head_that_reads_the_input_alone_there_is_nothing_to_train() -> None:
    records: list[Any] = []
    terms = RoundConfig(read="input@grid2")
    strategy = PartialUpdates(FedAvg(), config=terms, on_round=records.append)
    before, *_, after = models_tested(strategy, rounds=2)
    assert not any(record.trains for record in records)
    for name, array in as_weights(before).items():
        assert np.array_equal(as_weights(after)[name], array), name


def test_a_model_whose_head_nobody_sends_sums_for_stays_whole() -> None:
    """It is cut off at the places for a head that is then not there."""

    def silent(reply: Message) -> Message:
        asked = next(iter(sent[-1].content.config_records.values()))
        if asked.get(TASK) == "solve-head":
            reply.content = train_reply([np.zeros(0, np.uint8)], 0, {ERROR: "no time"})
        return reply

    models: list[ArrayRecord] = []
    terms = RoundConfig(read="1@grid4")
    strategy = PartialUpdates(FedAvg(fraction_evaluate=0.0), config=terms)
    grid = InProcessGrid(NODES, apps().__getitem__, silent)
    sent = grid.sent
    strategy.start(
        grid, arrays_of(build()), num_rounds=1, evaluate_fn=lambda _, arrays: models.append(arrays)
    )
    before = as_weights(arrays_of(build()))
    assert list(as_weights(models[0])) == list(before)
    assert all(np.array_equal(as_weights(models[0])[name], each) for name, each in before.items())
    # And the rounds begin as without.
    assert not np.array_equal(as_weights(models[1])["6.weight"], before["6.weight"])


def test_without_steps_the_head_of_round_zero_is_the_result() -> None:
    terms = RoundConfig(read="1@grid4", plan="none")
    before, *_, after = models_tested(PartialUpdates(FedAvg(), config=terms), rounds=2)
    for name, array in as_weights(before).items():
        assert np.array_equal(as_weights(after)[name], array), name


def test_a_fleet_reads_inside_a_vision_transformer() -> None:
    """Attention uses the weights of its last layer without running it: client and server keep the same tensors."""
    from torchvision.models import VisionTransformer

    def vit() -> nn.Module:
        torch.manual_seed(0)
        return VisionTransformer(10, 5, 2, 2, 16, 16, num_classes=4)

    def colours(node: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(images.repeat(1, 3, 1, 1), classes) for images, classes in data(node)]

    def vit_client(node: int) -> ElasticClient:
        return ElasticClient(
            vit(), colours(node), colours(0), budget=Budget(), loss_fn=classification_loss,
            optimizer_fn=plain_sgd,
        )  # fmt: skip

    place = "encoder.layers.encoder_layer_0@tokens2"
    fleet = {
        node: elastic_client_app(lambda _, node=node: vit_client(node)) for node in range(1, 4)
    }
    models: list[ArrayRecord] = []
    terms = RoundConfig(read=place)
    run(
        PartialUpdates(FedAvg(), config=terms), fleet, arrays_of(vit()), 1,
        evaluate_fn=lambda _, arrays: models.append(arrays),
    )  # fmt: skip
    assert [places_of(as_weights(each)) for each in models[1:]] == [place]
    found = loaded(vit(), models[-1], colours(0)[0][0])
    assert "body.encoder.layers.encoder_layer_0.self_attention.out_proj.weight" in (
        found.state_dict()
    )
    assert found.state_dict()["head.weight"].any()


@pytest.mark.parametrize("most", [6, 9])
@pytest.mark.slow
def test_where_little_is_affordable_many_features_are_projected(most: int) -> None:
    """The memory of one device bounds what all read; the place alone that fits it tells nothing."""

    def poor(node: int) -> ElasticClient:
        made = client(node)
        held = 40.5 * sum(len(y) for _, y in data(node)) * most
        made.budget = Budget(memory=held) if node == 2 else Budget()
        return made

    models: list[ArrayRecord] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        models.append(arrays)
        return MetricRecord({"accuracy": accuracy(model_of(arrays))})

    tiny = {
        node: elastic_client_app(lambda _, node=node: poor(node)) for node in range(1, NODES + 1)
    }
    strategy = PartialUpdates(FedAvg(), config=RoundConfig(read="auto"))
    run(strategy, tiny, arrays_of(build()), 1, evaluate_fn=evaluate)
    reading = places_of(as_weights(models[0]))
    assert reading.endswith(f">{most}")
    read = model_of(models[0])
    assert read.head.in_features == most
    assert accuracy(read) > 0.9
    # The directions stay as they are while the rounds train.
    for name, array in as_weights(models[1]).items():
        if name.startswith("projection."):
            np.testing.assert_array_equal(array, as_weights(models[0])[name])


def test_a_named_place_may_be_projected() -> None:
    found = start(PartialUpdates(FedAvg(), config=RoundConfig(read="1@grid2>12")))
    assert places_of(as_weights(found)) == "1@grid2>12"
    assert accuracy(model_of(found)) > 0.9
