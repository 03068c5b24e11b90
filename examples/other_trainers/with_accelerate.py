"""Train by a plan in a loop of accelerate, in mixed precision, with gradients of four batches per step."""

import torch
from accelerate import Accelerator
from task import adam, digits, first_two, network, planned, sent
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fl_elastic.training import apply_plan


def main() -> None:
    """Plan, and run the loop that there was before inside the plan."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    model = network()
    optimizer, loader = adam(model.parameters()), DataLoader(digits(), batch_size=32, shuffle=True)
    plan, base = planned(model, first_two(loader))
    steps = 0
    prepared, stepped, loader = accelerator.prepare(model, optimizer, loader)
    with apply_plan(model, plan, optimizer):
        for _ in range(2):
            prepared.train()
            for inputs, targets in loader:
                with accelerator.accumulate(prepared):
                    accelerator.backward(F.cross_entropy(prepared(inputs), targets))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                        steps += 1
                    stepped.step()
                    stepped.zero_grad()
    sent("accelerate", accelerator.unwrap_model(prepared), base, plan, steps, 1024)


if __name__ == "__main__":
    main()
