"""Kept tokens: behind which blocks of a transformer a step goes on with a share of its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fl_elastic.errors import PlanError

__all__ = ["KeptTokens", "cosine_share", "kept_count"]


@dataclass(frozen=True)
class KeptTokens:
    """Where tokens are left out, and how many stay.

    Which ones stay is found anew for each example: those that its class tokens attend to most in that block, by the
    mean over its heads. Behind a block that is frozen the same ones stay whenever the example comes back.

    Attributes
    ----------
    drops : tuple of (str, float)
        Blocks, in the order of the forward pass, each with the share of its tokens that goes on, in (0, 1].
    classes : int
        How many tokens, the first ones, the model answers from: they always stay, and do not count for the share.
    attention : float
        Share of the others that each token goes on to attend to behind the first of these blocks, in (0, 1]; 1 for
        all, which costs less than any other.
    blocks : tuple of str
        Where attention is less than 1, the first of these blocks and all above it.

    Raises
    ------
    PlanError
        If a share is impossible.
    """

    drops: tuple[tuple[str, float], ...]
    classes: int = 1
    attention: float = 1.0
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.attention <= 1:
            raise PlanError(f"attention {self.attention} must be above 0 and at most 1")
        for module, share in self.drops:
            if not 0 < share <= 1:
                raise PlanError(
                    f"share {share} of tokens behind {module!r} must be above 0 and at most 1"
                )
        if self.classes < 1:
            raise PlanError(
                f"{self.classes} class tokens: tokens are left out by the attention of at least 1"
            )

    def counts(self, tokens: int) -> tuple[int, ...]:
        """Return how many tokens, class tokens among them, there are behind each of the blocks.

        Examples
        --------
        >>> KeptTokens((("blocks.3", 0.9), ("blocks.6", 0.9), ("blocks.9", 0.9))).counts(197)
        (178, 161, 145)
        """
        counts = []
        for _, share in self.drops:
            tokens = self.classes + kept_count(tokens - self.classes, share)
            counts.append(tokens)
        return tuple(counts)


def kept_count(tokens: int, share: float) -> int:
    """Return how many of some tokens stay: the share, rounded up.

    Examples
    --------
    >>> [kept_count(tokens, 0.9) for tokens in (196, 177, 160)]
    [177, 160, 144]
    """
    # A product that is whole but for its rounding is not one more.
    return min(tokens, max(1, math.ceil(tokens * share - 1e-9)))


def cosine_share(
    progress: float, share: float, begin: float = 10 / 300, end: float = 110 / 300
) -> float:
    """Return the share of tokens that stays at a point of the training: 1 at first, falling by a half cosine.

    The published schedule of Tri-Level E-ViT (Kong et al., AAAI 2023): 300 epochs, from the 10th to the 110th.

    Parameters
    ----------
    progress : float
        Share of the training that is over.
    share : float
        Where it ends.
    begin, end : float
        Share of the training at which it begins to fall, and has fallen.

    Examples
    --------
    >>> [round(cosine_share(epoch / 300, 0.9), 3) for epoch in (0, 10, 60, 110, 300)]
    [1.0, 1.0, 0.95, 0.9, 0.9]
    """
    if not 0 <= begin < end:
        raise PlanError(
            f"tokens are left out from {begin} to {end} of the training: end must come later"
        )
    passed = min(max((progress - begin) / (end - begin), 0.0), 1.0)
    return share + (1 - share) * (1 + math.cos(math.pi * passed)) / 2
