"""Drift detectors: alarm on a real change, silence without one, and state that survives a restart."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fl_elastic.errors import RegistryError
from fl_elastic.streaming.drift import DRIFT_DETECTORS, DriftDetector, DriftMemory

SEEDS = 10


def errors(seed: int, *parts: tuple[int, float]) -> list[float]:
    """A stream of 0 and 1: so many samples at each error rate."""
    generator = np.random.default_rng(seed)
    return [float(generator.random() < rate) for count, rate in parts for _ in range(count)]


def alarms(name: str, stream: list[float]) -> list[int]:
    """Where the detector, begun anew after each alarm, says drift."""
    memory = DriftMemory(lambda: DRIFT_DETECTORS.make(name))
    return [index for index, error in enumerate(stream) if memory.update(error)]


def test_all_detectors_are_found() -> None:
    assert DRIFT_DETECTORS.names() == ["adwin", "none"]
    with pytest.raises(RegistryError, match="did you mean 'adwin'"):
        DRIFT_DETECTORS.make("adwinn")


def test_an_abrupt_change_is_noticed_within_300_samples() -> None:
    found = [alarms("adwin", errors(seed, (1000, 0.1), (300, 0.6))) for seed in range(SEEDS)]
    assert sum(any(index >= 1000 for index in each) for each in found) >= 0.9 * SEEDS


@pytest.mark.parametrize("name", DRIFT_DETECTORS.names())
def test_a_stationary_stream_hardly_raises_an_alarm(name: str) -> None:
    false = [len(alarms(name, errors(seed, (1500, 0.2)))) for seed in range(SEEDS)]
    assert sum(count > 0 for count in false) <= 0.2 * SEEDS


@pytest.mark.parametrize("name", DRIFT_DETECTORS.names())
def test_fewer_errors_are_no_drift(name: str) -> None:
    false = [alarms(name, errors(seed, (500, 0.6), (500, 0.1))) for seed in range(SEEDS)]
    assert sum(any(index >= 500 for index in each) for each in false) <= 0.1 * SEEDS


@pytest.mark.parametrize("name", DRIFT_DETECTORS.names())
@pytest.mark.parametrize("remember", [50, 2000])
def test_a_restart_anywhere_changes_nothing(
    name: str, remember: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_elastic.streaming.drift._REMEMBERED", remember)
    stream = errors(3, (400, 0.1), (200, 0.6), (300, 0.2))
    plain = DriftMemory(lambda: DRIFT_DETECTORS.make(name))
    expected = [plain.update(error) for error in stream]
    restarted = DriftMemory(lambda: DRIFT_DETECTORS.make(name))
    seen = []
    for index, error in enumerate(stream):
        if index % 37 == 0:
            kept = restarted.errors
            restarted = DriftMemory(lambda: DRIFT_DETECTORS.make(name))
            restarted.restore(kept)
        seen.append(restarted.update(error))
    assert seen == expected
    assert len(restarted.errors) < 2 * remember


@pytest.mark.parametrize("kind", ["errors", "losses"])
def test_adwin_says_what_that_of_river_says(kind: str) -> None:
    drift = pytest.importorskip("river.drift")
    for seed in range(10):
        draw = np.random.default_rng(seed)
        parts = [(int(draw.integers(20, 500)), float(draw.random())) for _ in range(4)]
        stream = errors(seed, *parts)
        if kind == "losses":
            stream = [abs(each + draw.normal(scale=0.2)) for each in stream]
        other = drift.ADWIN(clock=1)
        assert len(stream) < 4000
        memory, drifts = DriftMemory(lambda: DRIFT_DETECTORS.make("adwin")), 0
        for index, error in enumerate(stream):
            before = other.estimation
            other.update(error)
            found = other.drift_detected
            if found and other.estimation <= before:
                # It was cut as errors became fewer: only ours goes on with that window.
                break
            assert memory.update(error) == found, (seed, index)
            drifts += found
        assert drifts < 9


def test_no_detector_needs_more_than_a_base_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("river", "river.drift", "scipy"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in DRIFT_DETECTORS.names():
        assert DRIFT_DETECTORS.make(name).update(1.0) is False


def test_ones_own_detector_begins_anew_after_its_alarm() -> None:
    class Third(DriftDetector):
        def __init__(self) -> None:
            self.count = 0

        def update(self, error: float) -> bool:
            self.count += 1
            return self.count == 3

    memory = DriftMemory(Third)
    assert [memory.update(0.0) for _ in range(7)] == [False, False, True] * 2 + [False]
