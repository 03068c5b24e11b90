"""Ways to go through a stream that changes."""

from __future__ import annotations

from dataclasses import dataclass

from fl_elastic.readout.place import MOST_FEATURES

__all__ = [
    "ALONG",
    "LATENT",
    "METHODS",
    "MORE",
    "READS",
    "REFERENCE",
    "SOLVED",
    "StreamMethod",
]


@dataclass(frozen=True)
class StreamMethod:
    """How a device learns from its stream.

    Parameters
    ----------
    policy : str
        Registered policy; empty for a model that stays as it is.
    speedup : float
        Of its budget.
    replay : bool
        Whether stored samples are part of each batch.
    latent : bool
        Whether the lower part is frozen, and the store keeps a tenth of the bytes, of features.
    closed_form : bool
        Whether the head is solved from running sums, those of home among them; the store then is for forgetting
        alone, and keeps a tenth of the bytes as well.
    at_home : bool
        Whether the model below the head was trained at home; if not, it has the weights it was built with, which
        are random ones where there are no pretrained ones.
    read : str
        Where a head in closed form reads: at the last layer if empty, at places chosen by what is known at home if
        ``auto``, or at places of these names.
    most_features : int
        Of an example, where places are chosen.
    along : bool
        Whether places are chosen along the stream, of which what is known at home is the beginning then.
    """

    policy: str = "full"
    speedup: float = 1.0
    replay: bool = True
    latent: bool = False
    closed_form: bool = False
    at_home: bool = True
    read: str = ""
    most_features: int = MOST_FEATURES
    along: bool = False

    @property
    def store_share(self) -> float:
        """Of the capacity of a store of inputs; less than a tenth, as files are seldom full to the last page."""
        # Until it is chosen where to read, inputs are kept.
        features = self.latent or (self.closed_form and not self.along)
        return 0.0875 if features else 1.0


REFERENCE = "full, replay"
LATENT = "elastic, latent replay"
SOLVED = "closed form"
READS = "closed form, chosen places"
MORE = "closed form, chosen places, at most 4,096 features"
ALONG = "closed form, places chosen along the stream"

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
    MORE: StreamMethod(closed_form=True, at_home=False, read="auto", most_features=4096),
    ALONG: StreamMethod(closed_form=True, at_home=False, read="auto", along=True),
    "closed form, blocks 7, 14 and last": StreamMethod(
        closed_form=True,
        at_home=False,
        read="features.7@grid4+features.14@grid2+in:classifier.1@flat",
    ),
}
