"""Conformance checks of aggregation rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation import AggregationRule, LinearRule, RobustRule
from fl_elastic.testing.subjects import Check, instance_of, require
from fl_elastic.update import PartialUpdate

Subject = type[AggregationRule] | AggregationRule
_Floats = NDArray[np.float64]

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
        check_agreement_is_kept,
        check_result_lies_between_the_deltas,
        check_order_of_clients_does_not_matter,
        check_weight_is_positive_and_falls_with_probability,
        check_linear_all_from_all_is_fedavg,
        check_linear_step_is_no_longer_than_the_contributors_mean,
        check_linear_unit_of_weight_does_not_matter,
        check_linear_divisor_depends_on_nothing_else,
        check_robust_untrained_elements_do_not_count,
    ]


def check_agreement_is_kept(subject: Subject) -> None:
    """Check that equal deltas of all clients are returned unchanged."""
    delta = np.random.default_rng(1).standard_normal(5)
    for clients in (1, 2, 6):
        merged = _merged(subject, np.tile(delta, (clients, 1)), np.arange(1.0, clients + 1))
        require(bool(np.allclose(merged, delta)), f"{clients} equal deltas {delta} give {merged}")


def check_result_lies_between_the_deltas(subject: Subject) -> None:
    """Check that no element moves further, in either direction, than the client that moves it most."""
    for deltas, weights in _rounds():
        merged = _merged(subject, deltas, weights)
        slack = 1e-9
        inside = (merged <= deltas.max(0).clip(min=0) + slack) & (
            merged >= deltas.min(0).clip(max=0) - slack
        )
        require(bool(inside.all()), f"{merged} lies outside of the clients' deltas")


def check_order_of_clients_does_not_matter(subject: Subject) -> None:
    """Check that the order of clients does not matter."""
    for deltas, weights in _rounds():
        order = np.random.default_rng(2).permutation(len(deltas))
        one, other = (
            _merged(subject, deltas, weights),
            _merged(subject, deltas[order], weights[order]),
        )
        require(bool(np.allclose(one, other)), f"{one} in one order, {other} in another")


def check_weight_is_positive_and_falls_with_probability(subject: Subject) -> None:
    """Check that a client's weight is positive, and does not grow with its probability of training the tensor."""
    rule = instance_of(subject)
    weights = [rule.weight(10.0, probability) for probability in (1e-9, 0.1, 0.5, 1.0)]
    require(all(0 < weight < math.inf for weight in weights), f"weights {weights}")
    require(weights == sorted(weights, reverse=True), f"weights {weights} rise with probability")
    require(math.isclose(weights[-1], 10.0), f"probability 1 turns 10 examples into {weights[-1]}")


def check_linear_all_from_all_is_fedavg(subject: Subject) -> None:
    """Check that a tensor trained by every client gets the weighted mean of FedAvg."""
    rule = instance_of(subject)
    if not isinstance(rule, LinearRule):
        return
    for deltas, weights in _rounds():
        merged, expected = (
            _merged(rule, deltas, weights),
            np.average(deltas, axis=0, weights=weights),
        )
        require(
            bool(np.allclose(merged, expected, rtol=1e-12, atol=1e-12)),
            f"{len(deltas)} clients that trained everything give {merged}, FedAvg gives {expected}",
        )


def check_linear_step_is_no_longer_than_the_contributors_mean(subject: Subject) -> None:
    """Check that the divisor is finite and at least the contributed weight, also for each element."""
    rule = instance_of(subject)
    if not isinstance(rule, LinearRule):
        return
    for contributed, total in _cases():
        divisor = np.asarray(rule.divisor(contributed, total))
        each = np.asarray(rule.divisor(np.array([contributed, contributed]), total))
        require(bool(np.isfinite(divisor).all()), f"divisor {divisor} for {contributed} of {total}")
        require(
            float(divisor) >= contributed * (1 - 1e-12),
            f"divisor {divisor} is below the contributed weight {contributed}",
        )
        require(bool(np.allclose(each, divisor)), f"{each} for an array of what gives {divisor}")


def check_linear_unit_of_weight_does_not_matter(subject: Subject) -> None:
    """Check that the unit of weights does not matter, such as examples or thousands of examples."""
    rule = instance_of(subject)
    if not isinstance(rule, LinearRule):
        return
    for contributed, total in _cases():
        scaled = float(rule.divisor(1000 * contributed, 1000 * total))
        require(
            math.isclose(scaled, 1000 * float(rule.divisor(contributed, total)), rel_tol=1e-9),
            "the divisor does not grow in proportion to the weights",
        )


def check_linear_divisor_depends_on_nothing_else(subject: Subject) -> None:
    """Check that a rule keeps no state from one tensor to the next."""
    rule = instance_of(subject)
    if not isinstance(rule, LinearRule):
        return
    before = [rule.divisor(*case) for case in _cases()]
    after = [rule.divisor(*case) for case in reversed(_cases())]
    require(before == after[::-1], "the divisor depends on the order of the calls")


def check_robust_untrained_elements_do_not_count(subject: Subject) -> None:
    """Check that an element is merged from the clients that trained it, as if there were no others."""
    rule = instance_of(subject)
    if not isinstance(rule, RobustRule) or type(rule).chosen is not RobustRule.chosen:
        # A rule that chooses among whole updates does not handle parts.
        return
    deltas = np.random.default_rng(3).standard_normal((5, 1))
    absent = np.concatenate([deltas, np.full((3, 1), np.nan)])
    one = rule.combine(deltas, np.ones(5))
    other = rule.combine(absent, np.ones(8))
    require(bool(np.isfinite(other).all()), f"untrained elements give {other}")
    require(
        bool((np.sign(one) == np.sign(other)).all()), f"{one} alone, {other} with absent clients"
    )


def _merged(subject: Subject, deltas: _Floats, weights: _Floats) -> _Floats:
    """Merge deltas of one tensor that every client has trained."""
    rule = instance_of(subject)
    if isinstance(rule, LinearRule):
        scaled = np.array([rule.weight(float(weight), 1.0) for weight in weights])
        total = float(weights.sum())
        return np.asarray(scaled @ deltas / rule.divisor(float(scaled.sum()), total))
    if not isinstance(rule, RobustRule):
        raise AssertionError("a rule derives from LinearRule or RobustRule")
    chosen = _chosen(rule, deltas)
    return rule.combine(deltas[chosen], weights[chosen])


def _chosen(rule: RobustRule, deltas: _Floats) -> list[int]:
    updates = [PartialUpdate({"w": delta}, {"w": 1}, num_examples=1) for delta in deltas]
    return rule.chosen(updates, ["w"])


def _rounds() -> Sequence[tuple[_Floats, _Floats]]:
    generator = np.random.default_rng(3)
    return [
        (generator.standard_normal((n, 4)), generator.integers(1, 500, n).astype(float))
        for n in (1, 2, 5, 9)
    ]


def _cases() -> list[tuple[float, float]]:
    return [(share * total, total) for share in _SHARES for total in _TOTALS]
