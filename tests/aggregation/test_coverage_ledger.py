"""The coverage ledger against counting by hand, and across a restart."""

from __future__ import annotations

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


@given(history=histories)
def test_a_restart_forgets_nothing(history: list[set[str]]) -> None:
    ledger, again = CoverageLedger(MANIFEST), CoverageLedger(MANIFEST)
    for index, tensors in enumerate(history):
        ledger.record(str(index % 3), "pi", tensors)
    again.from_arrays(ledger.to_arrays())
    for client in ("0", "1", "2"):
        assert again.probabilities(client) == ledger.probabilities(client)
    assert all(np.array_equal(again.shares()[d], s) for d, s in ledger.shares().items())


def test_the_ledger_of_another_model_is_refused() -> None:
    ledger = CoverageLedger(MANIFEST)
    ledger.record("a", "pi", ["head"])
    other = CoverageLedger(Manifest(("w",), ((1,),), ("float32",), (Role.PARAMETER,)))
    with pytest.raises(CheckpointError, match="1 parameters"):
        other.from_arrays(ledger.to_arrays())
    other.from_arrays({})
    assert other.clients == {}
