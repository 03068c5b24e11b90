"""What is sent of a trained model: against the global one, in its order, and no more than was trained."""

from __future__ import annotations

import numpy as np

from fl_elastic.flower.stream_update import relative_to_server
from fl_elastic.streaming.labelled_weights import LabelledWeights
from fl_elastic.update import Manifest, PartialUpdate, decode, encode

HEAD = ("head",)
SERVER = LabelledWeights(
    {"body": np.zeros((2, 2), np.float32), "head": np.zeros((3, 2), np.float32)}, (0, 1, 2), HEAD
)
# The device knows 2 and 5 and 0, and has a row to spare; its rows say which they are.
DEVICE = LabelledWeights(
    {
        "body": np.array([[1, 2], [3, 4]], np.float32),
        "head": np.array([[2, 2], [5, 5], [0.5, 0.5], [1, 1], [9, 9]], np.float32),
    },
    (2, 5, 0, 1),
    HEAD,
)


def trained(
    *names: str, parts: dict[str, tuple[np.ndarray | None, ...]] | None = None
) -> PartialUpdate:
    deltas = {name: np.ones_like(DEVICE.weights[name]) for name in names}
    return PartialUpdate(deltas, dict.fromkeys(names, 4), 10, 7, parts or {})


def test_rows_stand_in_the_servers_order_and_unknown_ones_stay_at_home() -> None:
    sent = relative_to_server(SERVER, DEVICE, trained("head", "body"))
    assert sent.deltas["head"].tolist() == [[0.5, 0.5], [1, 1], [2, 2]]
    assert sent.deltas["body"].tolist() == [[1, 2], [3, 4]]
    assert (sent.steps, sent.num_examples, sent.base_version) == ({"head": 4, "body": 4}, 10, 7)


def test_what_was_not_trained_is_not_sent() -> None:
    assert set(relative_to_server(SERVER, DEVICE, trained("head")).deltas) == {"head"}


def test_a_part_is_sent_as_that_part_and_passes_the_wire() -> None:
    rows = np.array([True, True, False, False, False])
    columns = np.array([True, False])
    update = trained("head", "body", parts={"head": (rows, None), "body": (None, columns)})
    sent = relative_to_server(SERVER, DEVICE, update)
    # Of the rows 2 and 5 that were trained the server knows 2.
    assert sent.deltas["head"].tolist() == [[0, 0], [0, 0], [2, 2]]
    assert sent.deltas["body"].tolist() == [[1, 0], [3, 0]]
    manifest = Manifest.of_arrays(SERVER.weights)
    back = decode(encode(sent, manifest), manifest)
    assert all(np.array_equal(back.deltas[name], sent.deltas[name]) for name in sent.deltas)


def test_a_part_that_is_all_the_server_knows_is_no_part() -> None:
    rows = np.array([True, False, True, True, False])
    sent = relative_to_server(SERVER, DEVICE, trained("head", parts={"head": (rows, None)}))
    assert sent.parts == {} and sent.deltas["head"].tolist() == [[0.5, 0.5], [1, 1], [2, 2]]


def test_an_update_of_nothing_is_one_all_the_same() -> None:
    manifest = Manifest.of_arrays(SERVER.weights)
    sent = relative_to_server(SERVER, DEVICE, trained())
    assert decode(encode(sent, manifest), manifest).deltas == {}
