"""What an update must satisfy before it is packed or merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_models import conv_net

from fl_elastic.errors import UpdateError
from fl_elastic.update import Manifest, PartialUpdate, encode
from fl_elastic.update.checks import Limits, check_update

MANIFEST = Manifest.of(conv_net())
GOOD = PartialUpdate(
    {"0.bias": np.ones(4, np.float32), "1.running_mean": np.zeros(4, np.float32)},
    {"0.bias": 3, "1.running_mean": 2},
    num_examples=12,
    base_version=1,
)


def with_delta(name: str, delta: Any, steps: Any = 1) -> PartialUpdate:
    return replace(GOOD, deltas=GOOD.deltas | {name: delta}, steps=GOOD.steps | {name: steps})


def with_part(masks: Any, name: str = "0.bias", delta: Any = (1, 0, 1, 0)) -> PartialUpdate:
    changed = with_delta("0.bias", np.array(delta, np.float32))
    return replace(changed, parts={name: masks})


EVEN = np.array([True, False, True, False])
BAD: dict[str, tuple[PartialUpdate, str]] = {
    "unknown tensor": (with_delta("9.bias", np.ones(4)), "'9.bias' is not in the manifest"),
    "counter": (with_delta("1.num_batches_tracked", np.array(1.0)), "never averaged"),
    "shape": (with_delta("0.bias", np.ones((4, 1))), "shape"),
    "scalar for a vector": (with_delta("0.bias", np.float32(1)), "shape"),
    "NaN": (with_delta("0.bias", np.array([0, 0, np.nan, 0])), "NaN"),
    "infinity": (with_delta("0.bias", np.array([0, 0, -np.inf, 0])), "NaN or infinite"),
    "huge": (with_delta("0.bias", np.full(4, 2e30)), "reaches"),
    "no steps": (with_delta("0.bias", np.ones(4), 0), "step count of '0.bias' is 0"),
    "steps are a fraction": (with_delta("0.bias", np.ones(4), 1.5), "must be an integer"),
    "steps are true": (with_delta("0.bias", np.ones(4), True), "must be an integer"),
    "too many steps": (with_delta("0.bias", np.ones(4), 10**7), "step count"),
    "steps without delta": (replace(GOOD, steps=GOOD.steps | {"0.weight": 1}), "0.weight"),
    "delta without steps": (replace(GOOD, steps={"0.bias": 3}), "1.running_mean"),
    "no examples": (replace(GOOD, num_examples=0), "num_examples"),
    "examples are a fraction": (replace(GOOD, num_examples=1.5), "num_examples"),  # type: ignore[arg-type]
    "too many examples": (replace(GOOD, num_examples=10**9), "num_examples"),
    "negative version": (replace(GOOD, base_version=-1), "base_version"),
    "words": (with_delta("0.bias", np.array(["a", "b", "c", "d"])), "numbers"),
    "objects": (with_delta("0.bias", np.array([None] * 4)), "numbers"),
    "part of no delta": (
        with_part((EVEN,), "0.weight"),
        "'0.weight' has a trained part but no delta",
    ),
    "part without masks": (with_part(()), "tuple of 1 masks"),
    "part of other axes": (with_part((EVEN, None)), "tuple of 1 masks"),
    "part is a list": (with_part([EVEN]), "tuple of 1 masks"),
    "part is a mask": (with_part(EVEN), "tuple of 1 masks"),
    "part is all": (with_part((None,)), "leave it out of the parts"),
    "mask of another length": (with_part((EVEN[:3],)), r"mask of shape \(4,\)"),
    "mask of two axes": (with_part((EVEN.reshape(2, 2),)), r"mask of shape \(4,\)"),
    "mask of numbers": (with_part((EVEN.astype(int),)), "boolean mask"),
    "mask is a list": (with_part((EVEN.tolist(),)), "boolean mask"),
    "change outside the part": (with_part((EVEN,), delta=(1, 0, 1, 1)), "outside its trained part"),
    "complex numbers": (with_delta("0.bias", np.ones(4, np.complex64)), "numbers"),
}


def test_a_good_update_passes() -> None:
    assert check_update(GOOD, MANIFEST) is None  # type: ignore[func-returns-value]
    assert check_update(PartialUpdate({}, {}, 1), MANIFEST) is None  # type: ignore[func-returns-value]
    for mask in (EVEN, np.ones(4, bool)):
        assert check_update(with_part((mask,)), MANIFEST) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_update_is_explained_in_one_line_and_not_packed(case: str) -> None:
    update, message = BAD[case]
    with pytest.raises(UpdateError, match=message) as caught:
        check_update(update, MANIFEST)
    assert "\n" not in str(caught.value)
    with pytest.raises(UpdateError):
        encode(update, MANIFEST)


def test_counts_of_numpy_are_counts() -> None:
    examples: Any = np.int64(5)
    steps: dict[str, Any] = {name: np.int32(2) for name in GOOD.deltas}
    update = replace(GOOD, num_examples=examples, steps=steps)
    assert check_update(update, MANIFEST) is None  # type: ignore[func-returns-value]
    assert encode(update, MANIFEST) == encode(
        replace(GOOD, num_examples=5, steps=dict.fromkeys(GOOD.deltas, 2)), MANIFEST
    )


def test_tighter_limits_refuse_what_the_usual_ones_take() -> None:
    for limits in (Limits(max_steps=2), Limits(max_examples=11), Limits(max_change=0.99)):
        with pytest.raises(UpdateError):
            check_update(GOOD, MANIFEST, limits)
    assert check_update(GOOD, MANIFEST, Limits(3, 12, 1.0)) is None  # type: ignore[func-returns-value]
