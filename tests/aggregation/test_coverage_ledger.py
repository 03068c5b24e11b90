"""The coverage ledger against counting by hand, and across a restart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.aggregation.coverage import CoverageLedger
from fl_elastic.errors import CheckpointError
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role

NAMES = ("deep", "middle", "running", "head")
MANIFEST = Manifest(
    NAMES,
    ((2,),) * 4,
    ("float32",) * 4,
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.PARAMETER),
)
PARAMETERS = ("deep", "middle", "head")
histories = st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=12)


@given(history=histories)
def test_probabilities_are_recent_shares_with_one_imagined_round(history: list[set[str]]) -> None:
    ledger = CoverageLedger(MANIFEST)
    for tensors in history:
        ledger.record("a", "pi", tensors)
    found = ledger.probabilities("a")
    weights = [0.95**age for age in range(len(history))][::-1]
    for name in PARAMETERS:
        hits = sum(w for w, tensors in zip(weights, history, strict=True) if name in tensors)
        assert found[name] == pytest.approx((hits + 1) / (sum(weights) + 1))
        assert 0 < found[name] <= 1
    assert ledger.probabilities("stranger") == {}


def test_shares_are_per_class() -> None:
    ledger = CoverageLedger(MANIFEST)
    ledger.record("a", "pi", ["head"])
    ledger.record("b", "pi", ["head", "deep"])
    ledger.record("c", "laptop", PARAMETERS)
    shares = {device: share.tolist() for device, share in ledger.shares().items()}
    assert shares == {"laptop": [1.0, 1.0, 1.0], "pi": [0.5, 0.0, 1.0]}


def test_the_ledger_of_another_model_is_refused() -> None:
    ledger = CoverageLedger(MANIFEST)
    ledger.record("a", "pi", ["head"])
    other = CoverageLedger(Manifest(("w",), ((1,),), ("float32",), (Role.PARAMETER,)))
    with pytest.raises(CheckpointError, match="the model has 1"):
        other.restore(ledger.to_state())
    assert other.clients == {}


def test_tables_that_do_not_fit_each_other_are_refused() -> None:
    ledger = CoverageLedger(MANIFEST)
    ledger.record("a", "pi", ["head"])
    state = ledger.to_state()
    for change in (
        {"clients": ("a", "b")}, {"devices": ()}, {"rounds": np.zeros(2, np.int64)},
        {"seen": np.zeros((1, 2))}, {"hits": np.zeros(3)},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="coverage has tables"):
            replace(state, **change)  # type: ignore[arg-type]
