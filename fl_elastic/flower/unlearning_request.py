"""What a client asks a server to forget, until the server confirms that it has."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch

_LOG = logging.getLogger("fl_elastic")


class UnlearningRequest:
    """Examples that the global model must forget.

    Parameters
    ----------
    examples : iterable of batches, optional
        Re-iterable; None if nothing must be forgotten.
    rest : iterable of batches, optional
        The training data without these examples, if this request took them out.
    whole : iterable of batches, optional
        The training data before examples were taken out.
    ids : frozenset of int
        Numbers of the examples in ``whole``.

    Attributes
    ----------
    met : bool
        Whether the server has confirmed that its model was made to forget them.
    """

    def __init__(
        self,
        examples: Iterable[Batch] | None = None,
        *,
        rest: Iterable[Batch] | None = None,
        whole: Iterable[Batch] | None = None,
        ids: frozenset[int] = frozenset(),
    ) -> None:
        self.examples = examples
        self.rest = rest
        self.met = False
        self._whole, self._ids = whole, ids
        self._digest = ""

    @classmethod
    def of(cls, examples: Iterable[Batch] | None) -> UnlearningRequest:
        """Return a request; raise TrainingError if there are no examples or they can be read only once."""
        if examples is not None and iter(examples) is examples:
            raise TrainingError(
                "the examples to be forgotten may be read in several rounds: pass a list or a DataLoader, not an "
                "iterator"
            )
        if examples is not None and next(iter(examples), None) is None:
            raise TrainingError("there is no batch to be forgotten: leave forget out")
        return cls(examples)

    def with_ids(self, loader: Iterable[Batch], ids: Iterable[int]) -> UnlearningRequest:
        """Return a request that takes more examples out of ``loader``; itself if there are no ids.

        Raises
        ------
        TrainingError
            As `fl_elastic.training.without.parted` does.
        """
        from fl_elastic.training.without import numbers_of, parted

        numbers, whole = numbers_of(ids), loader
        if not numbers:
            return self
        if self._whole is not None and self.rest is loader:
            whole, numbers = self._whole, self._ids | numbers
        rest, gone = parted(whole, numbers)
        return UnlearningRequest(gone, rest=rest, whole=whole, ids=numbers)

    @property
    def pending(self) -> bool:
        """Whether there is anything that the server has not forgotten yet."""
        return self.examples is not None and not self.met

    def digest(self, client: str) -> str:
        """Return the digest by which the server names this request of a client."""
        if not self._digest:
            from fl_elastic.methods.dampening.forget import digest_of

            # Compared with None: the truth value of a loader is that of its length, which it may not know.
            self._digest = digest_of(() if self.examples is None else self.examples, client)
        return self._digest

    def confirm(self, client: str, forgotten: str) -> None:
        """Note which request of a client the server has met, by its digest; empty for none."""
        if self.pending and forgotten == self.digest(client):
            self.met = True
            _LOG.info("the server's model was made to forget the examples of %s", forgotten)
