"""How a sample for the choice travels: what comes back, and bytes that make no sense."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bad_buffers import rebuilt
from damage import assert_damage_is_noticed, set_to
from mutations import as_text, mutated_bytes, mutated_json
from torch import nn

from fl_elastic.errors import UpdateError
from fl_elastic.readout.best_places import Sample, choose_places
from fl_elastic.readout.place import Place
from fl_elastic.readout.places_wire import PlacesReply, decode_places, encode_places
from fl_elastic.update import Manifest
from fl_elastic.update.frame import MessageKind, unpack

MODEL = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
MANIFEST = Manifest.of(MODEL)
ONE, TWO = Place("0", "grid", 2), Place("3", "flat", at_input=True)
LESS = 2**-11
"""What a number of fp16 may lose of itself."""


def reply(seed: int = 0, count: int = 23, *, classes: bool = True) -> PlacesReply:
    rng = np.random.default_rng(seed)
    rows: dict[Place, Any] = {
        ONE: (rng.normal(size=(count, 5)) * 10.0 ** rng.uniform(-3, 3, 5)).astype(np.float32),
        TWO: rng.normal(size=(count, 16)).astype(np.float32) + 100,
    }
    rows[TWO][:, 3] = 7.0
    targets = (
        np.eye(3)[rng.integers(0, 3, count)] if classes else 50 * rng.normal(size=(count, 3)) + 9
    )
    sample = Sample.of(rows, targets, rng.integers(0, 5, count))
    return PlacesReply(
        sample, {ONE: 0.001, TWO: 0.25}, {ONE: (0, 1), TWO: (0, 1, 3)}, classes, "3", 70
    )


def sent(seed: int = 0, **options: Any) -> bytes:
    return encode_places(reply(seed, **options), MANIFEST)


@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.parametrize("count", [2, 7, 23, 128])
@pytest.mark.parametrize("seed", range(3))
def test_sums_of_each_fold_come_back_and_no_row_does(seed: int, count: int, classes: bool) -> None:
    before = reply(seed, count, classes=classes)
    after = decode_places(sent(seed, count=count, classes=classes), MANIFEST)
    assert (after.seconds, after.kept, after.classes, after.last, after.most) == (
        before.seconds, before.kept, classes, "3", 70,
    )  # fmt: skip
    folds = np.unique(before.sample.folds)
    for number, fold in enumerate(folds):
        old, new = before.sample.folds == fold, after.sample.folds == number
        assert old.sum() == new.sum()
        wanted, found = before.sample.targets[old], after.sample.targets[new]
        size = np.abs(before.sample.targets).max() ** 2 * count
        np.testing.assert_allclose(found.T @ found, wanted.T @ wanted, atol=1e-5 * size)
        ones = after.sample.constant[new]
        assert ones @ ones == pytest.approx(old.sum(), rel=1e-5)
        np.testing.assert_allclose(ones @ found, wanted.sum(axis=0), atol=1e-5 * size)
        for place, rows in before.sample.rows.items():
            own, back = rows[old].astype(float), after.sample.rows[place][new]
            # Rounding moves a standardised number by a share of itself; means travel apart, in fp32.
            spread, at = rows.astype(float).std(axis=0), rows.astype(float).mean(axis=0)
            centred, again = own - at, back - np.outer(ones, at)
            size = np.sqrt(np.outer((centred**2).sum(axis=0), (centred**2).sum(axis=0)))
            bound = 2 * LESS * size + 1e-4 * old.sum() * np.outer(spread, spread) + 1e-9
            assert (np.abs(again.T @ again - centred.T @ centred) <= bound).all()
            alike = [np.isclose(back, row, rtol=1e-3).all(axis=1).any() for row in own]
            assert old.sum() < 2 or not all(alike)
    if count > 20:
        one = choose_places(before.sample, most_features=99)
        other = choose_places(after.sample, most_features=99)
        assert one.best.name == other.best.name
        by_name = {each.name: each.error for each in other.single}
        assert all(by_name[e.name] == pytest.approx(e.error, rel=0.02) for e in one.single)


@pytest.mark.parametrize("seed", range(4))
def test_rows_say_nothing_beyond_the_sums_over_a_fold(seed: int) -> None:
    """Other examples with the same sums give the same rows: whoever knows all but the examples cannot tell them."""
    rng, before = np.random.default_rng(seed), reply(seed, 40)
    sample = before.sample
    order = np.argsort(sample.folds, kind="stable")
    turn = np.zeros((40, 40))
    for fold in np.unique(sample.folds):
        own = np.flatnonzero(sample.folds[order] == fold)
        turn[np.ix_(own, own)] = np.linalg.qr(rng.normal(size=(len(own), len(own))))[0]
    others = Sample(
        {place: turn @ rows[order] for place, rows in sample.rows.items()},
        turn @ sample.constant[order],
        turn @ sample.targets[order],
        sample.folds[order],
        sample.clients,
    )
    one, other = (
        decode_places(
            encode_places(PlacesReply(each, {}, {}, before.classes, "3", 70), MANIFEST), MANIFEST
        ).sample
        for each in (sample, others)
    )
    # An axis has no direction.
    signs = np.sign(one.constant * other.constant)
    for place in (ONE, TWO):
        mean = sample.rows[place].astype(float).mean(axis=0)
        size = np.abs(sample.rows[place] - mean).max(axis=0) * 7
        rows = [each.rows[place] - np.outer(each.constant, mean) for each in (one, other)]
        assert (np.abs(rows[0] - signs[:, None] * rows[1]) <= 4e-3 * size + 1e-5).all()
    np.testing.assert_allclose(one.targets, signs[:, None] * other.targets, atol=1e-4)


def test_every_cut_and_changed_byte_is_noticed() -> None:
    packed = sent()
    assert_damage_is_noticed(
        packed, lambda data: decode_places(data, MANIFEST),
        range(0, 8 * len(packed), 7), range(0, len(packed), 7),
    )  # fmt: skip


def test_the_reply_of_another_model_is_refused() -> None:
    with pytest.raises(UpdateError, match="another model version"):
        decode_places(sent(), Manifest.of(nn.Linear(2, 2)))


def with_header(**fields: Any) -> bytes:
    return rebuilt(sent(), kind=MessageKind.PLACES, **fields)


HUGE = 10**400
HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "no places": ({"places": [], "features": [], "microseconds": [], "kept": []}, "places"),
    "places that are none": ({"places": 3}, "places"),
    "more features than are sent": ({"features": [5, 17]}, "bytes"),
    "fewer features": ({"features": [5]}, "without their features"),
    "negative features": ({"features": [-5, 26]}, "features"),
    "no features": ({"features": [0, 21]}, "features"),
    "features without end": ({"features": [5, HUGE]}, "features"),
    "half a feature": ({"features": [5.0, 16]}, "integers"),
    "truth as a number": ({"features": [True, 20]}, "integers"),
    "no folds": ({"folds": []}, "rows"),
    "an empty fold": ({"folds": [0, 23]}, "rows of a fold"),
    "folds of other sizes": ({"folds": [22, 1]}, "represent"),
    "more rows": ({"folds": [24]}, "bytes"),
    "rows without end": ({"folds": [HUGE]}, "rows"),
    "many rows": ({"folds": [4000] * 1000}, "rows|header"),
    "negative rows": ({"folds": [-1, 24]}, "rows"),
    "no outputs": ({"outputs": 0}, "outputs"),
    "outputs without end": ({"outputs": HUGE}, "outputs"),
    "outputs as words": ({"outputs": "3"}, "outputs"),
    "time that runs backwards": ({"microseconds": [-1, 5]}, "microseconds"),
    "time without end": ({"microseconds": [1, HUGE]}, "microseconds"),
    "one time": ({"microseconds": [1]}, "without"),
    "the same place twice": ({"places": [str(ONE), str(ONE)]}, "twice"),
    "no name": ({"places": [str(ONE), ""]}, "form"),
    "a number for a name": ({"places": [str(ONE), 7]}, "not a valid name"),
    "a name without end": ({"places": [str(ONE), "x" * 600 + "@flat"]}, "not a valid name"),
    "half a character": ({"places": [str(ONE), "\ud800@flat"]}, "not a valid name"),
    "two names in one": ({"places": [str(ONE), "a@flat+b@flat"]}, "form"),
    "a size without end": ({"places": [str(ONE), "0@grid" + "9" * 480]}, "form"),
    "kept by name": ({"kept": [["0"], [0, 1]]}, "runs"),
    "kept without end": ({"kept": [[0, 2], [0, 5]]}, "outside"),
    "kept before the first": ({"kept": [[-1, 2], [0, 1]]}, "outside"),
    "kept in disorder": ({"kept": [[2, 1], [0, 1]]}, "runs"),
    "kept by halves": ({"kept": [[0, 1, 2], [0, 1]]}, "runs"),
    "kept as truth": ({"kept": [[False, True], [0, 1]]}, "runs"),
    "kept as a number": ({"kept": [0, 1]}, "runs"),
    "kept too far": ({"kept": [[0, HUGE], [0, 1]]}, "outside"),
    "classes as words": ({"classes": "yes"}, "classes"),
    "last as a number": ({"last": 3}, "last"),
    "nothing afforded": ({"most": 0}, "afforded"),
    "everything afforded": ({"most": HUGE}, "afforded"),
    "no word of what is afforded": ({"most": None}, "most"),
    "no last": ({"last": None}, "last"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_makes_no_sense_is_refused(name: str) -> None:
    fields, words = HEADERS[name]
    with pytest.raises(UpdateError, match=words):
        decode_places(with_header(**fields), MANIFEST)


def with_numbers(change: Callable[..., None], *, classes: bool = True) -> bytes:
    """The reply with changed means and scales, constants, targets, and standardised rows."""
    packed = sent(classes=classes)
    payload = unpack(packed, MANIFEST, MessageKind.PLACES)[2]
    exact = np.frombuffer(bytes(payload[: 4 * (42 + 23 * 4)]), "<f4").copy()
    small = np.frombuffer(bytes(payload[4 * (42 + 23 * 4) :]), "<f2").copy()
    change(exact[:42], exact[42:65], exact[65:].reshape(23, 3), small)
    numbers = exact.tobytes() + small.tobytes()
    return rebuilt(packed, kind=MessageKind.PLACES, payload=lambda old: numbers)


def longer(part: int) -> Callable[..., None]:
    def change(*parts: Any) -> None:
        parts[part][...] *= 1.1

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((set_to(part, 3 if part != 2 else (3, 1), np.nan), "not finite") for part in range(4)),
        *((set_to(part, 0, np.inf), "not finite") for part in range(4)),
        (set_to(0, 0, 1e38), "or larger than"),
        (longer(1), "represent"),
        (set_to(1, slice(None), 0.0), "represent"),
        (longer(2), "one class"),
        (set_to(2, 0, 1.0), "one class"),
        (set_to(2, slice(None), 0.0), "one class"),
    ],
)
def test_numbers_that_no_examples_have_are_refused(change: Callable[..., None], words: str) -> None:
    decode_places(with_numbers(lambda *parts: None), MANIFEST)
    with pytest.raises(UpdateError, match=words):
        decode_places(with_numbers(change), MANIFEST)


def test_targets_that_are_numbers_are_free() -> None:
    usual, found = (
        decode_places(with_numbers(change, classes=False), MANIFEST).sample
        for change in (lambda *_: None, longer(2))
    )
    np.testing.assert_allclose(found.targets, 1.1 * usual.targets, rtol=1e-6)


@pytest.mark.parametrize(
    "times", [pytest.param(1, id="sample"), pytest.param(20, id="many", marks=pytest.mark.slow)]
)
def test_whatever_is_changed_is_an_error_of_this_library_or_nothing(times: int) -> None:
    packed = sent()
    fields = unpack(packed, MANIFEST, MessageKind.PLACES)[1]
    tracemalloc.start()
    try:
        for seed in range(400 * times):
            rng = random.Random(seed)
            whole = rng.random() < 0.7
            text = (
                as_text(mutated_json(fields, rng)) if whole else mutated_bytes(as_text(fields), rng)
            )

            def payload(old: bytes, rng: random.Random = rng) -> bytes:
                return mutated_bytes(old, rng) if rng.random() < 0.3 else old

            changed = rebuilt(packed, kind=MessageKind.PLACES, text=text, payload=payload)
            try:
                # What is taken can be ranked, or the choice says why not.
                choose_places(decode_places(changed, MANIFEST).sample, most_features=100)
            except UpdateError as error:
                assert "\n" not in str(error)[:1000]
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def test_many_outputs_cost_no_square_of_them() -> None:
    sample = Sample.of({ONE: np.ones((2, 1), np.float32)}, np.eye(2, 60_000), np.arange(2))
    packed = encode_places(PlacesReply(sample, {}, {}, True, "", 1), MANIFEST)
    tracemalloc.start()
    try:
        assert decode_places(packed, MANIFEST).sample.targets.shape == (2, 60_000)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()
