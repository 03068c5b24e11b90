"""Every client trains every group again and again, whatever its policy, with and without a state folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from slow_ones import slow_unless
from small_federation import build, elastic_client, local_data
from small_models import flat_profile, sgd

from fl_elastic import Budget
from fl_elastic.flower import ElasticClient, elastic_client_app
from fl_elastic.flower.records import PACKED, instruction
from fl_elastic.planning import POLICIES, policies
from fl_elastic.profiling import CostProfile
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.update import Manifest, decode, weights_of
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_wire import encode_weights

ROUNDS = 24
OPTIONS = TrainerOptions(full_update_every=4, timing=Timing(closed_loop=False))


MANIFEST = Manifest.of(build("group"))


@cache
def profile() -> CostProfile:
    """Made inside of a test, with the threads that tests run with."""
    return flat_profile(build("group"), local_data(3)[0], sgd)


PACKED_MODEL = np.frombuffer(
    encode_weights(weights_of(build("group"), MANIFEST), MANIFEST, version=1), np.uint8
)


class Node:
    """A node whose process lives for one message: only Flower's context and files last."""

    def __init__(
        self,
        number: int,
        policy: str,
        state_dir: Path | None,
        *,
        rate: float = 0.05,
        **settings: Any,
    ) -> None:
        self.context = Context(
            run_id=1,
            node_id=1000 + number,
            node_config={"partition-id": number},
            state=RecordDict(),
            run_config={},
        )

        def client_fn(_: Context) -> ElasticClient:
            client = elastic_client(
                build("group"), 3, policy, state_dir=state_dir,
                **{"budget": Budget(speedup=2.0), "options": OPTIONS, "profile": profile()} | settings,
            )  # fmt: skip
            client.optimizer_fn = lambda parameters: torch.optim.SGD(
                parameters, lr=rate, momentum=0.9, weight_decay=0.01
            )
            return client

        self.app: ClientApp = elastic_client_app(client_fn)

    def trained(self, server_round: int, **config: Any) -> frozenset[str]:
        """Return the parameters that this node trains in a round."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
        content = instruction(
            "train", PACKED_MODEL.tobytes(), {PACKED: True, "server-round": server_round} | config
        )
        reply = self.app(Message(content, dst_node_id=1, message_type="train"), self.context)
        arrays = next(iter(reply.content.array_records.values())).to_numpy_ndarrays()
        update = decode(arrays[0].tobytes(), MANIFEST)
        return frozenset(n for n in update.deltas if MANIFEST.role(n) is Role.PARAMETER)


EVERYTHING = frozenset(n for n in MANIFEST.names if MANIFEST.role(n) is Role.PARAMETER)


@pytest.mark.slow
def test_random_choices_differ_between_rounds_and_clients(tmp_path: Path) -> None:
    seen = []
    for number in (1, 2):
        node = Node(number, "random", tmp_path, budget=Budget(speedup=1.3))
        seen.append([node.trained(each) for each in range(1, ROUNDS + 1)])
    assert all(len(set(choices)) > 3 for choices in seen)
    assert seen[0] != seen[1]
    again = Node(1, "random", tmp_path / "again", budget=Budget(speedup=1.3))
    assert [again.trained(each) for each in range(1, ROUNDS + 1)] == seen[0]


@pytest.mark.parametrize(
    ("policy", "on_disk"),
    slow_unless(
        lambda *case: case[0] == "elastic", [("elastic", True), ("random", False), ("joint", True)]
    ),
)
def test_deep_fits_come_for_every_policy_at_rounds_of_each_clients_own(
    policy: str, on_disk: bool, tmp_path: Path
) -> None:
    deep = []
    for number in (1, 2, 3):
        node = Node(number, policy, tmp_path if on_disk else None)
        trained = [node.trained(each) for each in range(1, ROUNDS + 1)]
        for name in EVERYTHING:
            rounds = [each for each, names in enumerate(trained, start=1) if name in names]
            assert np.diff([0, *rounds, ROUNDS + 1]).max() <= 2 * OPTIONS.full_update_every + 1, (
                name
            )
        deep.append(tuple(each for each, names in enumerate(trained) if names == EVERYTHING))
    assert all(deep) and len(set(deep)) > 1


def test_policies_say_whether_what_they_leave_out_comes_back() -> None:
    kept = {name for name in policies() if not POLICIES.make(name).needs_coverage}
    assert kept == {"bias", "bsr", "e_vit", "full", "head", "neq", "slice_out", "slice_out_fit"}


def test_what_one_node_keeps_is_written_by_no_other(tmp_path: Path) -> None:
    busy = Node(1, "full", tmp_path, codec="topk", budget=Budget(), profile=None)
    busy.trained(1)
    idle = Node(2, "full", tmp_path, codec="topk", budget=Budget(), profile=None, rate=0.0)
    content = instruction("train", PACKED_MODEL.tobytes(), {PACKED: True, "server-round": 2})
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    reply = idle.app(Message(content, dst_node_id=1, message_type="train"), idle.context)
    arrays = next(iter(reply.content.array_records.values())).to_numpy_ndarrays()
    deltas = decode(arrays[0].tobytes(), MANIFEST).deltas
    assert sum(float(np.abs(delta).sum()) for delta in deltas.values()) == 0.0
    folders = {path.name for path in tmp_path.iterdir()}
    assert folders == {"client-1", "client-2"}


def test_without_a_folder_the_counters_are_in_the_nodes_own_context() -> None:
    node = Node(
        1,
        "elastic",
        None,
        options=TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False)),
    )
    for number in (1, 2, 3):
        node.trained(number)
    record = node.context.state["fl_elastic.selection"]
    assert isinstance(record, ConfigRecord) and b'"left_out"' in bytes(record["state"])  # type: ignore[arg-type]
