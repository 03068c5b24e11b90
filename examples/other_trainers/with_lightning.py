"""Train by a plan with Lightning's Trainer: its schedule and its clipping stay where they are."""

from typing import Any

import lightning.pytorch as pl
import torch
from task import adam, digits, first_two, network, planned, sent
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fl_elastic.training import apply_plan


class Digits(pl.LightningModule):
    """The module that there was before."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of one batch."""
        del index
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return the optimiser and its schedule."""
        optimizer = adam(self.net.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def main() -> None:
    """Plan, and hand the module to Lightning inside the plan."""
    torch.manual_seed(0)
    module, loader = Digits(network()), DataLoader(digits(), batch_size=32, shuffle=True)
    plan, base = planned(module.net, first_two(loader))
    trainer = pl.Trainer(
        max_epochs=2, gradient_clip_val=1.0, accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with apply_plan(module.net, plan):
        trainer.fit(module, loader)
    sent("lightning", module.net, base, plan, trainer.global_step, 1024)


if __name__ == "__main__":
    main()
