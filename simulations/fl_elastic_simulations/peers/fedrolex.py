"""FedRolex: HeteroFL with windows that move on by one channel from round to round."""

from __future__ import annotations

from collections.abc import Sequence

from fl_elastic_simulations.peers.base import LocalTask, register_peer
from fl_elastic_simulations.peers.heterofl import HeteroFl
from fl_elastic_simulations.peers.widths import LayerChannels, Starts

__all__ = ["FedRolex"]


@register_peer("fedrolex")
class FedRolex(HeteroFl):
    """Train a window of the channels of every layer, which begins one further in each round.

    FedRolex (Alam, Liu, Yan and Zhang, NeurIPS 2022). From the paper: in round j windows begin at channel j modulo
    the layer's width and go on at the first after the last, so that all channels are trained equally often;
    averages per element over those who trained it. All else as in `HeteroFl`.
    """

    def starts(self, task: LocalTask, layers: Sequence[LayerChannels], rate: float) -> Starts:
        """Return the round's start in each space, counted from round 1 at the first channel."""
        del rate
        spaces = {each.outputs.space: each.outputs.size for each in layers}
        return {space: (task.server_round - 1) % size for space, size in spaces.items()}
