"""Random windows: HeteroFL whose windows each client draws anew in every round."""

from __future__ import annotations

from collections.abc import Sequence

from fl_elastic.methods.windows.windows import window_starts
from fl_elastic_simulations.peers.base import LocalTask, register_peer, task_generator
from fl_elastic_simulations.peers.heterofl import HeteroFl
from fl_elastic_simulations.peers.widths import LayerChannels, Starts

__all__ = ["RandomWindows"]


@register_peer("random_windows")
class RandomWindows(HeteroFl):
    """Train a window of the channels of every layer, each from a start of its own that is drawn in every round.

    Federated dropout (Caldas, Konecny, McMahan and Talwalkar, 2018) with neighbouring channels, and what moving
    windows have to beat. Any channel is as likely as any other. All else as in `HeteroFl`.
    """

    def starts(self, task: LocalTask, layers: Sequence[LayerChannels], rate: float) -> Starts:
        """Return a start of each space that depends on seed, client and round alone."""
        del rate
        generator = task_generator(task)
        spaces = {each.outputs.space: each.outputs.size for each in layers}
        return {
            space: int(generator.choice(window_starts(size, 1)))
            for space, size in sorted(spaces.items())
        }
