"""Conformance of aggregation rules: what every divisor must satisfy."""

from __future__ import annotations

import math

import numpy as np

from fl_elastic.aggregation import AggregationRule
from fl_elastic.testing.subjects import Check, instance_of, require

__all__ = ["rule_checks"]

Subject = type[AggregationRule] | AggregationRule

_SHARES = (1e-6, 0.01, 0.3, 0.999, 1.0)
_TOTALS = (1.0, 17.0, 1e9)


def rule_checks() -> list[Check]:
    """Return the checks of a rule; each takes the class or an instance and raises AssertionError.

    Examples
    --------
    >>> from fl_elastic.aggregation.rules import Contributors
    >>> for check in rule_checks():
    ...     check(Contributors)
    """
    return [
        check_all_from_all_is_fedavg,
        check_divisor_is_positive_and_finite,
        check_step_is_no_longer_than_the_contributors_mean,
        check_unit_of_weight_does_not_matter,
        check_divisor_depends_on_nothing_else,
    ]


def check_all_from_all_is_fedavg(subject: Subject) -> None:
    """Check that a tensor trained by every client gets the weighted mean of FedAvg."""
    generator = np.random.default_rng(3)
    for clients in (1, 2, 9):
        weights = generator.integers(1, 500, clients).astype(float)
        deltas = generator.standard_normal((clients, 4))
        total = float(weights.sum())
        merged = weights @ deltas / instance_of(subject).divisor(total, total)
        expected = np.average(deltas, axis=0, weights=weights)
        require(
            bool(np.allclose(merged, expected, rtol=1e-12, atol=1e-12)),
            f"{clients} clients that trained everything give {merged}, FedAvg gives {expected}",
        )


def check_divisor_is_positive_and_finite(subject: Subject) -> None:
    """Check that the divisor is a positive number."""
    for contributed, total in _cases():
        divisor = instance_of(subject).divisor(contributed, total)
        require(
            math.isfinite(divisor) and divisor > 0,
            f"divisor {divisor} for {contributed} of {total}",
        )


def check_step_is_no_longer_than_the_contributors_mean(subject: Subject) -> None:
    """Check that the model moves at most as far as those who trained did on average."""
    for contributed, total in _cases():
        divisor = instance_of(subject).divisor(contributed, total)
        require(
            divisor >= contributed * (1 - 1e-12),
            f"divisor {divisor} is below the contributed weight {contributed}",
        )


def check_unit_of_weight_does_not_matter(subject: Subject) -> None:
    """Check that counting examples in thousands changes nothing."""
    rule = instance_of(subject)
    for contributed, total in _cases():
        scaled = rule.divisor(1000 * contributed, 1000 * total)
        require(
            math.isclose(scaled, 1000 * rule.divisor(contributed, total), rel_tol=1e-9),
            "the divisor does not grow in proportion to the weights",
        )


def check_divisor_depends_on_nothing_else(subject: Subject) -> None:
    """Check that a rule keeps nothing from one tensor to the next."""
    rule = instance_of(subject)
    before = [rule.divisor(*case) for case in _cases()]
    after = [rule.divisor(*case) for case in reversed(_cases())]
    require(before == after[::-1], "the divisor depends on the order of the calls")


def _cases() -> list[tuple[float, float]]:
    return [(share * total, total) for share in _SHARES for total in _TOTALS]
