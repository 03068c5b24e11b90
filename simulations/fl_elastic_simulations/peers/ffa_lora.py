"""FFA-LoRA: clients train one factor of every adapter and share the other, so that averaging is exact."""

from __future__ import annotations

from torch import nn

from fl_elastic.groups import Batch, LossFn
from fl_elastic_simulations.models.adapters import low_rank_layers
from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.low_rank import trainable_groups
from fl_elastic_simulations.peers.training import mask_of, train_mask

__all__ = ["FfaLora"]


@register_peer("ffa_lora")
class FfaLora(Peer):
    """Train B of every adapter; A stays at an initial value that all clients share, and does not travel.

    FFA-LoRA (Sun et al., ICLR 2024), without its differential privacy. It takes as many steps as the time allows;
    clients are weighted by their number of examples. A model without adapters is trained as a whole.
    """

    def prepare(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> nn.Module:
        """Return the model with every A frozen."""
        del loss_fn, batch
        for layer in low_rank_layers(model).values():
            layer.lora_A.requires_grad_(False)
        return model

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train all parameters that the model allows to train."""
        groups = trainable_groups(task, task.model)
        return train_mask(task, self.name, mask_of(task.profile, groups))
