"""Evaluate the model on the client's test data. `believable` bounds the results that the server collects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.flower.client_availability import inner_times
from fl_elastic.flower.records import EvaluateReply, refuse_metrics
from fl_elastic.flower.tasks.task import Answer, RoundTask

if TYPE_CHECKING:
    from fl_elastic.flower.client_round import ClientRound
    from fl_elastic.groups import Batch


_ACCURACY = "accuracy"
# Number of clients from which on it is known what is usual.
_FEWEST = 3
# A client's examples count for at most this multiple of the largest number, without the top fifth of the clients.
_EXAMPLES = 2.0
# No number may lie further from the others' than this multiple of their size or range.
_BEYOND = 1000.0


@dataclass(frozen=True)
class Evaluate(RoundTask):
    """Return loss, accuracy and the user's metrics on the test loader."""

    name: ClassVar[str] = "evaluate"
    message_type: ClassVar[str] = "evaluate"
    known_to_flower: ClassVar[bool] = True

    @property
    def reveals_data(self) -> bool:
        """False: it reveals no more than any evaluation."""
        return False

    def answer(self, work: ClientRound) -> Answer:
        """Evaluate the model, on kept features of the test data at the fleet's cut if there are any."""
        from fl_elastic.training import evaluate

        client, data = work.client, work.data
        with _above_cut(work) as running:
            found = evaluate(
                data.model, data.loss_fn, data.tests,
                metrics_fn=client.metrics_fn, running=running,
                count_examples=client.options.count_examples,
            )  # fmt: skip
        accuracy = {} if found.accuracy is None else {"accuracy": found.accuracy}
        refuse_metrics(found.metrics)
        return Answer([], found.num_examples, {**accuracy, **found.metrics}, found.loss)


@contextmanager
def _above_cut(
    work: ClientRound,
) -> Iterator[Callable[[Batch], AbstractContextManager[None]] | None]:
    """Keep the test data's features in a file of their own: a fit wipes features that it does not meet."""
    options, profile, tests = work.options, work.known_profile(), work.data.tests
    forward = options.forward
    lasts = forward is not None and forward.path is not None and forward.feature_bytes
    if not options.part.cut or profile is None or not lasts or not isinstance(tests, Sized):
        yield None
        return
    from fl_elastic.flower.client_state import features_of_tests
    from fl_elastic.training.above_cut import passing_above_cut

    assert forward is not None and forward.path is not None
    tested = replace(forward, path=features_of_tests(Path(forward.path)))
    options = replace(options, forward=tested)
    with passing_above_cut(work.data.model, tests, profile.graph, options) as kept:
        yield kept.step


def believable(
    replies: Mapping[int, EvaluateReply],
) -> tuple[dict[int, EvaluateReply], dict[int, str]]:
    """Return the plausible evaluations by node, with bounded counts, and why the others are not plausible.

    An accuracy must be between 0 and 1, unless most of the others are not either. No number may be further from the
    others' than a thousand times their size or range. With one or two clients everything is believed.

    Parameters
    ----------
    replies : mapping of int to EvaluateReply
        Replies by node.

    Examples
    --------
    >>> honest = {n: EvaluateReply(0.7, 100, {"accuracy": 0.5}) for n in range(4)}
    >>> kept, left = believable({**honest, 7: EvaluateReply(0.7, 10**8, {"accuracy": 1.0})})
    >>> kept[7].num_examples, left
    (200, {})
    >>> believable({**honest, 7: EvaluateReply(0.7, 100, {"accuracy": -5.0})})[1]
    {7: 'accuracy is -5, no share of examples as those of the others'}
    """
    if len(replies) < _FEWEST:
        return dict(replies), {}
    left: dict[int, str] = {}
    numbers = {node: {**reply.metrics, "loss": reply.loss} for node, reply in replies.items()}
    shares = [said[_ACCURACY] for said in numbers.values() if _ACCURACY in said]
    are_shares = 2 * sum(0 <= share <= 1 for share in shares) > len(shares)
    for node, said in numbers.items():
        if are_shares and not 0 <= said.get(_ACCURACY, 0.0) <= 1:
            left[node] = (
                f"{_ACCURACY} is {said[_ACCURACY]:.4g}, no share of examples as those of the others"
            )
    for name in sorted({name for said in numbers.values() for name in said}):
        of = {node: float(said[name]) for node, said in numbers.items() if name in said}
        if len(of) < _FEWEST:
            continue
        inner = inner_times(of.values())
        room = _BEYOND * max(inner[-1] - inner[0], abs(inner[0]), abs(inner[-1]), 1.0)
        for node, value in of.items():
            if not inner[0] - room <= value <= inner[-1] + room:
                left.setdefault(
                    node, f"{name} is {value:.4g}, that of most {inner[0]:.4g} to {inner[-1]:.4g}"
                )
    most = int(_EXAMPLES * inner_times([float(each.num_examples) for each in replies.values()])[-1])
    kept = {
        node: replace(reply, num_examples=min(reply.num_examples, most))
        for node, reply in replies.items()
        if node not in left
    }
    return kept, left
