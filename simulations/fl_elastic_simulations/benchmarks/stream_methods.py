"""Ways to go through a stream that changes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LATENT", "METHODS", "REFERENCE", "SHOWN", "StreamMethod"]


@dataclass(frozen=True)
class StreamMethod:
    """How a device learns from its stream.

    Parameters
    ----------
    policy : str
        Registered policy; empty for a model that stays as it is.
    speedup : float
        Of its budget.
    replay : str
        Registered replay.
    latent : bool
        Whether the lower part is frozen, and the store keeps a tenth of the bytes, of features.
    """

    policy: str = "full"
    speedup: float = 1.0
    replay: str = "er"
    latent: bool = False


REFERENCE = "full, replay"
LATENT = "elastic, latent replay"

SHOWN = ("elastic at 2, replay",)
"""Of their first seed, the page shows what was trained when."""

METHODS: dict[str, StreamMethod] = {
    "no adaptation": StreamMethod(policy=""),
    "full, no replay": StreamMethod(replay="none"),
    REFERENCE: StreamMethod(),
    "full, DER++": StreamMethod(replay="der_pp"),
    "elastic at 2, replay": StreamMethod("elastic", 2.0),
    "elastic at 4, replay": StreamMethod("elastic", 4.0),
    LATENT: StreamMethod("elastic", latent=True),
}
