"""Bits by stages: turning points on given losses, and a fleet whose updates get finer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from small_federation import arrays_of, elastic_client, local_data, plain_sgd, quiet, run
from small_models import conv_net, loss_fn

from fl_elastic import Budget
from fl_elastic.errors import RegistryError
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundTerms, elastic_client_app
from fl_elastic.flower.as_told import codec_as_told
from fl_elastic.flower.client_registry import ClientRegistry
from fl_elastic.flower.instructions import Instructions
from fl_elastic.flower.precision import TurningPoints
from fl_elastic.flower.round import RoundRecord
from fl_elastic.flower.terms import _PRECISIONS
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.training.feature_codec import PRECISIONS
from fl_elastic.training.report import ForwardReport
from fl_elastic.update.frame import peek

CODECS = ("int8", "bf16", "fp32")


def slow_turns(
    losses: list[float], stages: int, eps: float = 0.05, decay: float = 0.3
) -> list[int]:
    """The published rule, read from its description: where the stage changes."""
    turns: list[int] = []
    kept: list[float] = []
    for at, loss in enumerate(losses):
        kept.append(loss)
        normaliser = abs(np.mean(losses[: min(at + 1, 10)]))
        if len(turns) < stages - 1 and len(kept) >= 5:
            four = kept[-5:-1]
            if all(abs(each - loss) / normaliser <= eps for each in four):
                turns.append(at)
                kept = []
                if len(turns) <= 2:
                    eps *= decay
    return turns


@pytest.mark.parametrize("seed", range(40))
def test_turning_points_are_the_published_ones(seed: int) -> None:
    draw = np.random.default_rng(seed)
    levels = np.repeat(np.sort(draw.uniform(0.2, 3.0, 5))[::-1], 12)
    losses = (levels * (1 + draw.normal(0, draw.choice([0.002, 0.01, 0.03]), len(levels)))).tolist()
    stages = TurningPoints(4)
    found = [at for at, loss in enumerate(losses) if stages.observe(loss)]
    assert found == slow_turns(losses, 4)
    assert all(later - before >= 5 for before, later in pairwise(found))


def test_losses_that_are_none_change_nothing() -> None:
    stages = TurningPoints(3)
    for loss in (1.0, 1.0, float("nan"), 1.0, float("inf"), 1.0):
        assert not stages.observe(loss)
    assert stages.observe(1.0) and stages.stage == 1


def test_a_run_ends_with_all_bits() -> None:
    stages = TurningPoints(3)
    for number in range(1, 17):
        stages.ends(number, 20)
        assert stages.stage == 0
    stages.ends(17, 20)
    assert stages.stage == 2
    unknown = TurningPoints(3)
    unknown.ends(10**6, 0)
    assert unknown.stage == 0


def test_stages_outlast_the_server() -> None:
    losses = [2.0, 1.5, *[1.0] * 7, *[0.5] * 4]
    stages = TurningPoints(3)
    for loss in losses:
        stages.observe(loss)
    again = TurningPoints(3)
    again.from_arrays(stages.to_arrays())
    assert again.stage == stages.stage == 1
    more = [0.5, 0.5, 0.5, 0.5]
    assert [again.observe(each) for each in more] == [stages.observe(each) for each in more]
    for wrong in ([7.0, 0.0, 0.05], [1.0, 2.0, 0.05], [0.0, 0.0, float("nan")]):
        with pytest.raises(ValueError):
            again.from_arrays({**stages.to_arrays(), "state": np.array(wrong)})


def test_a_fleet_sends_finer_from_stage_to_stage() -> None:
    """Clients say a loss that levels off in round 5; the run's last fifth is the last round."""
    seen: dict[int, set[str]] = {}
    records: list[RoundRecord] = []

    def alter(message: Message) -> Message:
        content = message.content
        packed = content.array_records["fitres.parameters"]["0"].numpy().tobytes()
        number = len(records) + 1
        seen.setdefault(number, set()).add(str(peek(packed)["codec"]))
        told = content.config_records["fitres.metrics"]
        told["train-loss"] = {1: 3.0}.get(number, 1.0)
        return message

    apps = {
        node: elastic_client_app(lambda _, node=node: elastic_client(conv_net(), node))
        for node in range(1, 5)
    }
    strategy = PartialUpdates(
        quiet(), terms=RoundTerms(codecs=CODECS, step_back=False), on_round=records.append
    )
    run(strategy, apps, arrays_of(conv_net()), 10, alter=alter)
    codecs = [seen[number] for number in sorted(seen)]
    assert codecs == [{"int8"}] * 6 + [{"bf16"}] * 2 + [{"fp32"}] * 2
    sizes = [sum(each.uplink_bytes for each in record.accepted) for record in records]
    assert sizes[0] < 0.4 * sizes[-1] and sizes[6] < 0.6 * sizes[-1]


def test_a_client_that_does_not_know_the_codec_keeps_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert codec_as_told("bf16", Instructions(codec="of-tomorrow")) == "bf16"
    assert codec_as_told("bf16", Instructions(codec="int8")) == "int8"
    assert codec_as_told("bf16", Instructions()) == "bf16"
    assert "of-tomorrow" in caplog.text


@pytest.mark.parametrize("codecs", ["int8", ["int8", "none"], [""]])
def test_codecs_that_are_none_are_refused(codecs: Any) -> None:
    with pytest.raises(RegistryError):
        RoundTerms(codecs=codecs)


def test_privacy_by_noise_does_not_go_by_losses() -> None:
    private = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 2)
    with pytest.raises(RegistryError, match="differential privacy"):
        PartialUpdates(private, terms=RoundTerms(codecs=CODECS))


def test_a_fleet_keeps_finer_features_from_stage_to_stage(tmp_path: Path) -> None:
    """Losses level off in round 6: every client computes its features in rounds 1 and 7 and in no other."""
    records: list[RoundRecord] = []
    forwards: list[ForwardReport] = []

    class Noted(ElasticClient):
        def fit(self, *given: Any) -> Any:
            found = super().fit(*given)
            assert self.report is not None and self.report.forward is not None
            forwards.append(self.report.forward)
            return found

    def client_of(node: int) -> ElasticClient:
        return Noted(
            conv_net("group"), local_data(node), local_data(node), budget=Budget(), policy="full",
            loss_fn=loss_fn, optimizer_fn=plain_sgd, state_dir=tmp_path / str(node),
            options=TrainerOptions(timing=Timing(closed_loop=False)),
        )  # fmt: skip

    def alter(message: Message) -> Message:
        told = message.content.config_records["fitres.metrics"]
        told["train-loss"] = {1: 3.0}.get(len(records) + 1, 1.0)
        return message

    apps = {node: elastic_client_app(lambda _, node=node: client_of(node)) for node in range(1, 5)}
    terms = RoundTerms(
        cut="fixed:6", feature_precisions=("int8", "fp16"), step_back=False, codecs=("fp32",)
    )
    strategy = PartialUpdates(quiet(), terms=terms, on_round=records.append)
    run(strategy, apps, arrays_of(conv_net("group")), 8, alter=alter)
    computed = [sum(each.computed for each in forwards[at : at + 4]) for at in range(0, 32, 4)]
    assert computed[0] == computed[6] > 0
    assert computed[1:6] == [0] * 5 and computed[7] == 0
    kept = [path.read_bytes()[:4096] for path in tmp_path.rglob("features.bin")]
    assert len(kept) == 4 and all(b'"precision": "fp16"' in each for each in kept)


def test_each_kind_of_bits_has_as_many_stages_as_it_names() -> None:
    terms = RoundTerms(
        cut="moving", codecs=("int8", "bf16", "fp32"), feature_precisions=("int8", "fp16")
    )
    fleet = ClientRegistry(terms)
    assert fleet.precision is not None
    found = []
    for fleet.precision.stage in range(3):
        told = fleet.instructions(1, 1)
        found.append((told.codec, told.feature_precision))
        assert fleet.evaluation().feature_precision == told.feature_precision
    assert found == [("int8", "int8"), ("bf16", "fp16"), ("fp32", "fp16")]
    only = ClientRegistry(RoundTerms(cut="moving", feature_precisions=("int8", "fp16")))
    assert only.instructions(1, 1).codec == "" and only.codec == ""


def test_a_client_that_does_not_know_the_precision_keeps_its_own(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    client = elastic_client(conv_net(), 1, state_dir=tmp_path)
    for told, expected in (("int8", "int8"), ("of-tomorrow", "fp16"), ("", "fp16")):
        forward = client._options(Instructions(cut="6", feature_precision=told)).forward
        assert forward is not None and forward.precision == expected
    assert "of-tomorrow" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"feature_precisions": "int8"},
        {"feature_precisions": ["int4"]},
        {"feature_precisions": ["int8"], "cut": "none"},
    ],
)
def test_precisions_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RegistryError, match="feature_precisions"):
        RoundTerms(**{"cut": "moving"} | wrong)


def test_what_a_server_may_ask_for_is_what_features_can_be_kept_in() -> None:
    assert set(_PRECISIONS) == set(PRECISIONS)
