"""Methods for learning from a stream that changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamMethod:
    """How a device learns from its stream.

    Parameters
    ----------
    policy : str
        Name of a registered policy; empty for a model that does not adapt.
    speedup : float
        Speed-up of the budget.
    replay : bool
        Whether each batch contains stored samples.
    latent : bool
        Whether the lower part is frozen and the store holds its features, in a tenth of the bytes.
    closed_form : bool
        Whether the head is solved from running sums, which include those from home. The store then serves only to
        forget samples, and also gets a tenth of the bytes.
    at_home : bool
        Whether the model below the head was trained at home. If not, it keeps the weights it was built with: random
        ones, or pretrained ones if the task has them.
    read : str
        Where a head in closed form reads: the last layer if empty, places chosen from the data at home if ``auto``,
        or the places of these names.
    """

    policy: str = "full"
    speedup: float = 1.0
    replay: bool = True
    latent: bool = False
    closed_form: bool = False
    at_home: bool = True
    read: str = ""

    @property
    def store_share(self) -> float:
        """Capacity, as a share of that of a store of inputs.

        Features get a tenth of the bytes: the capacity is set lower, because files are somewhat larger than it.
        """
        return 0.0875 if self.latent or self.closed_form else 1.0


REFERENCE = "full, replay"
LATENT = "elastic, latent replay"
SOLVED = "closed form"
READS = "closed form, chosen places"
MORE = "closed form, chosen places, at most 4,096 features"

METHODS: dict[str, StreamMethod] = {
    "no adaptation": StreamMethod(policy=""),
    "full, no replay": StreamMethod(replay=False),
    REFERENCE: StreamMethod(),
    "elastic at 2, replay": StreamMethod("elastic", 2.0),
    "elastic at 4, replay": StreamMethod("elastic", 4.0),
    LATENT: StreamMethod("elastic", latent=True),
    SOLVED: StreamMethod(closed_form=True),
    "closed form, untrained body": StreamMethod(closed_form=True, at_home=False),
    READS: StreamMethod(closed_form=True, at_home=False, read="auto"),
    MORE: StreamMethod(closed_form=True, at_home=False, read="auto>4096"),
    "closed form, blocks 7, 14 and last": StreamMethod(
        closed_form=True,
        at_home=False,
        read="features.7@grid4+features.14@grid2+in:classifier.1@flat",
    ),
}
