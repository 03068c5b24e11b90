"""Train within the budget: the task of an ordinary round. `ReplyMerger` collects the updates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fl_elastic.errors import PlanError, UpdateError
from fl_elastic.flower.tasks.task import Answer, RoundTask, config_key

if TYPE_CHECKING:
    from fl_elastic.flower.client import ElasticClient


@dataclass(frozen=True)
class Train(RoundTask):
    """Train what the budget allows, and send what changed.

    Attributes
    ----------
    groups : str
        Names of the groups to train, as a JSON list, chosen by the server from what clients report of their
        importance; empty to let the client choose.
    keep_statistics : bool
        Whether norms keep their statistics.
    rate : float
        Factor of the optimiser's learning rate, in (0, 1].
    lr : float, optional
        Learning rate that replaces the optimiser's own, under the key that Flower's apps use for it.
    forgotten : str
        The client's request to have examples forgotten that was met; empty for none.
    """

    groups: str = ""
    keep_statistics: bool = False
    rate: float = 1.0
    lr: float | None = None
    forgotten: str = ""

    name: ClassVar[str] = "train"
    known_to_flower: ClassVar[bool] = True

    @property
    def reveals_data(self) -> bool:
        """False: it reveals no more than the optimiser's steps."""
        return False

    def answer(self, client: ElasticClient, version: int, config: Mapping[str, Any]) -> Answer:
        """Train; return the update."""
        return client.train(self, version, config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the fields from a message's config; raise UpdateError if one is invalid."""
        found = super().from_config(config)
        if not 0 < found.rate <= 1:
            raise UpdateError(
                f"config {config_key('rate')} = {found.rate} is not above 0 and at most 1"
            )
        return found


def read_groups(text: str) -> tuple[str, ...]:
    """Return the names in ``groups`` of `Train`; raise PlanError if it is no list of names.

    >>> read_groups('["head", "conv"]')
    ('head', 'conv')
    """
    try:
        names = json.loads(text)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of names")
    except (ValueError, RecursionError) as error:
        raise PlanError(f"groups {text[:40]!r} cannot be read: {error}") from None
    return tuple(names)
