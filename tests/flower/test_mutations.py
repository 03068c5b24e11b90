"""Whatever is changed on its way or on disk: an error of this library's own, or nothing, and memory stays flat.

A small sample by default; ``-m slow`` takes ten times as many.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_buffers import rebuilt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam
from mutations import as_text, mutated_bytes, mutated_json, odd_value
from scripted_clients import EXAMPLES, first_arrays, first_weights, manifest, scripts
from small_federation import as_weights, elastic_client, quiet, run, scripted_app
from small_models import conv_net
from test_crafted_checkpoints import entries_of, put, strategy, trained
from test_deadlines import answering_app

from fl_elastic.aggregation import SERVER_OPTIMIZERS
from fl_elastic.errors import ElasticError, FleetError
from fl_elastic.fleet.inventory import Inventory, Node, Server, load_inventory, save_inventory
from fl_elastic.fleet.node_settings import load_node_settings
from fl_elastic.flower import Deadline, PartialUpdates, RoundConfig
from fl_elastic.flower._compat import bytes_to_ndarray, ndarray_to_bytes
from fl_elastic.flower.capabilities import Capabilities
from fl_elastic.flower.records import PACKED
from fl_elastic.flower.tasks.train import Train
from fl_elastic.state.archive import Kind, archive_bytes
from fl_elastic.state.codec import to_archive
from fl_elastic.update import Manifest, PartialUpdate, decode, encode, weights_of
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_wire import decode_weights, encode_weights

SIZES = [pytest.param(1, id="sample"), pytest.param(10, id="many", marks=pytest.mark.slow)]
many = pytest.mark.parametrize("times", SIZES)
MOST_BYTES = 30_000_000


@contextmanager
def flat(most: int = MOST_BYTES) -> Iterator[None]:
    """Fail if what is inside ever holds more memory than that, beyond what there was."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def assert_only_own_errors(call: Callable[[], object]) -> None:
    try:
        call()
    except ElasticError as error:
        assert "\n" not in str(error)[:1000]


KNOWN = Manifest(
    ("conv", "bias", "bn.running_var", "count"),
    ((6, 3, 3, 3), (6,), (6,), ()),
    ("float32", "float16", "float32", "int64"),
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.COUNTER),
)
WEIGHTS: dict[str, Any] = {
    "conv": np.ones((6, 3, 3, 3), np.float32), "bias": np.ones(6, np.float16),
    "bn.running_var": np.ones(6, np.float32), "count": np.array(5),
}  # fmt: skip


def updates() -> list[bytes]:
    rng = np.random.default_rng(0)
    deltas = {
        name: rng.normal(size=KNOWN.shape(name)).astype(np.float32) for name in KNOWN.names[:3]
    }
    whole = PartialUpdate(deltas, dict.fromkeys(deltas, 4), 10, 7)
    mask = np.array([True, False] * 3)
    part = {"conv": deltas["conv"] * mask[:, None, None, None]}
    partly = PartialUpdate(part, {"conv": 4}, 10, 7, {"conv": (mask, None, None, None)})
    return [
        encode(each, KNOWN, codec) for each in (whole, partly) for codec in ("fp32", "int8", "topk")
    ]


def changed(packed: bytes, rng: random.Random, kind: int = 1) -> bytes:
    """The message with any bytes changed, or header and payload changed under a checksum that fits."""
    what = rng.randrange(4)
    if what == 0:
        return mutated_bytes(packed, rng)
    header: dict[str, Any] = {}

    def with_header(text: bytes) -> bytes:
        header.update(json.loads(text))
        return text

    length = int.from_bytes(packed[8:12], "little")
    with_header(packed[28 : 28 + length])
    text = as_text(mutated_json(header, rng)) if what < 3 else mutated_bytes(as_text(header), rng)
    payload = (lambda old: mutated_bytes(old, rng)) if rng.random() < 0.3 else (lambda old: old)
    return rebuilt(packed, payload=payload, text=text, kind=kind)


@many
def test_updates(times: int) -> None:
    good = updates()
    with flat():
        for seed in range(300 * times):
            rng = random.Random(seed)
            data = changed(rng.choice(good), rng)
            assert_only_own_errors(lambda data=data: decode(data, KNOWN))


@many
def test_models_and_their_changes(times: int) -> None:
    whole = encode_weights(WEIGHTS, KNOWN, version=4)
    some = encode_weights(WEIGHTS, KNOWN, version=5, since=4, names={"conv", "count"})
    with flat():
        for seed in range(300 * times):
            rng = random.Random(seed)
            kind = rng.choice((2, 3))
            data = changed(whole if kind == 2 else some, rng, kind)
            known = rng.choice((None, (WEIGHTS, 4), (WEIGHTS, 5)))
            assert_only_own_errors(
                lambda data=data, known=known: decode_weights(data, KNOWN, known)
            )


@many
def test_what_clients_are_told(times: int) -> None:
    model = conv_net("batch")
    known = Manifest.of(model)
    packed = encode_weights(weights_of(model, known), known, version=1)
    told = Train(deadline=30.0, groups='["head"]', rate=0.5, kept_head="11", keep=True).to_config()
    made = elastic_client(model, 1)
    # What torch loads the first time is not counted.
    made.fit([np.frombuffer(packed, np.uint8)], {**told, PACKED: True})
    with flat():
        for seed in range(20 * times):
            rng = random.Random(seed)
            config = {**told, PACKED: True, "local-epochs": 1}
            data = packed
            if rng.random() < 0.5:
                data = mutated_bytes(packed, rng)
            else:
                key = rng.choice(sorted(told))
                config[key] = odd_value(rng)
            arrays = [np.frombuffer(data, np.uint8)]
            assert_only_own_errors(lambda c=config, a=arrays: made.fit(a, c))
            assert_only_own_errors(lambda c=config, a=arrays: made.evaluate(a, c))


def spoilt(reply: Message, rng: random.Random) -> Message:
    """Any part of a reply, to training or to a question, is something else."""
    content = reply.content
    what = rng.randrange(5)
    if what == 0 and "fitres.parameters" in content:
        arrays = content.array_records["fitres.parameters"]
        packed = bytes_to_ndarray(arrays["0"].data).tobytes()
        arrays["0"].data = ndarray_to_bytes(np.frombuffer(changed(packed, rng), np.uint8))
    elif what == 1 and "fitres.parameters" in content:
        arrays = content.array_records["fitres.parameters"]
        arrays["0"].data = mutated_bytes(arrays["0"].data, rng)
    elif what == 2:
        name = rng.choice(list(content))
        del content[name]
        if rng.random() < 0.5:
            content[name] = rng.choice((ArrayRecord(), MetricRecord(), ConfigRecord({"a": b"x"})))
    else:
        for name, record in list(content.config_records.items()) + list(
            content.metric_records.items()
        ):
            for key in [
                *record,
                "fl_elastic.importance",
                "fl_elastic.have",
                "fl_elastic.stale",
                "junk",
            ]:
                if rng.random() < 0.3:
                    try:
                        record[key] = odd_value(rng)
                    except (TypeError, ValueError):
                        # Flower itself has no such value.
                        content[name] = record
    return reply


RULES = ("contributors", "median", "trimmed_mean", "norm_clipping", "krum", "inverse_probability")


@many
@pytest.mark.parametrize("source", ["local", "server"])
def test_replies(times: int, source: Any) -> None:
    """One node of four is spoilt in every way; the run ends, the model is finite, and nothing piles up."""
    terms = RoundConfig(deadline=Deadline(quantile=0.5), plan=source, delta_downlink=True)
    with flat():
        for seed in range(6 * times):
            rng = random.Random(seed)

            def alter(reply: Message, rng: random.Random = rng) -> Message:
                if reply.metadata.src_node_id != 3 or reply.has_error():
                    return reply
                return spoilt(reply, rng)

            apps = {node: answering_app(node) for node in EXAMPLES}
            optimizer = rng.choice(
                (None, SERVER_OPTIMIZERS.make("adam"), SERVER_OPTIMIZERS.make("agreement"))
            )
            made = PartialUpdates(
                quiet(rng.choice((FedAdam, type(quiet())))), rule=rng.choice(RULES), config=terms,
                server_optimizer=optimizer,
            )  # fmt: skip
            result, _ = run(made, apps, first_arrays(), 8, alter=alter)
            found = as_weights(result.arrays)
            assert all(np.isfinite(array).all() for array in found.values())
            assert max(np.abs(array).max() for array in found.values()) < 1e3
            sizes = [
                len(archive_bytes(Kind("test"), to_archive(each.to_state())))
                for each in (made.fleet, made.guard, made.sizes)
            ]
            assert sum(sizes) < 30_000


@many
def test_capabilities(times: int) -> None:
    good = Capabilities("pi", 10, 4, 0.1, 100.0, 10.0, 0.05).to_metrics()
    for seed in range(300 * times):
        rng = random.Random(seed)
        said = mutated_json(good, rng)
        if isinstance(said, dict):
            assert_only_own_errors(lambda said=said: Capabilities.from_metrics(said))


@many
def test_checkpoints(times: int, tmp_path: Path) -> None:
    trained(tmp_path, 2)
    path = tmp_path / "round-000002.state"
    (tmp_path / "round-000001.state").unlink()
    whole = path.read_bytes()
    entries = entries_of(path)
    about = json.loads(entries["about"].tobytes())
    for seed in range(20 * times):
        rng = random.Random(seed)
        for old in tmp_path.glob("*.state"):
            old.unlink()
        what = rng.randrange(4)
        if what == 0:
            path.write_bytes(mutated_bytes(whole, rng))
        elif what == 1:
            text = as_text(mutated_json(about, rng))
            put(path, entries | {"about": np.frombuffer(text, np.uint8)})
        else:
            name = rng.choice(sorted(entries))
            other = rng.choice(
                (np.zeros(0), np.ones(3), np.array("x"), np.array([np.nan]), np.zeros((2, 2)),
                 np.array([-1.0]), np.array(2**62), np.array(["a", "b"]), entries[rng.choice(sorted(entries))])
            )  # fmt: skip
            new = (
                name
                if what == 2
                else f"state/{rng.choice(('fleet', 'inner.m_t', 'x', 'average'))}!{name[6:]}"
            )
            put(path, {k: v for k, v in entries.items() if k != name} | {new: other})
        assert_only_own_errors(lambda: trained(tmp_path, 3))
    assert isinstance(strategy(), PartialUpdates)


INVENTORY = Inventory(
    Server(("server.lan", "10.0.0.5"), 8000),
    (
        Node("pi0", "SHA256:x", "1234", config={"partition-id": 0}),
        Node("pi1", config={"deadline": 2.5}),
    ),
    ("SHA256:gone",),
)


@many
def test_inventories(times: int, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    save_inventory(path, INVENTORY)
    text = path.read_bytes()
    nested = b"[" * 2000 + b"]" * 2000
    for seed in range(200 * times):
        rng = random.Random(seed)
        data = mutated_bytes(text, rng)
        if rng.random() < 0.3:
            values = [
                b"= true",
                b"= 1e999",
                b"= []",
                b"= {}",
                b"= " + nested,
                b'= "x"',
                b"= -1",
                b"= 2020-01-01",
            ]
            lines = text.split(b"\n")
            place = rng.randrange(len(lines))
            lines[place] = lines[place].split(b"=")[0] + rng.choice(values)
            data = b"\n".join(lines)
        path.write_bytes(data)
        for read in (load_inventory, load_node_settings):
            try:
                read(path)
            except FleetError as error:
                assert len(str(error)) < 10_000


def test_the_first_weights_are_those_of_the_manifest() -> None:
    assert set(first_weights()) == set(manifest().names) and len(scripts()) == len(EXAMPLES)
    assert scripted_app(manifest(), scripts()[1]) is not None
