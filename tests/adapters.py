"""A small residual network with a frozen base and low-rank adapters, as LoRA makes them, without any package."""

from __future__ import annotations

import torch
from torch import Tensor, nn

RANK = 2
WIDTH = 8


class LowRank(nn.Module):
    """A frozen linear layer beside a trained product of two thin ones."""

    def __init__(self, width: int, rank: int = RANK) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.lora_A = nn.Linear(width, rank, bias=False)
        self.lora_B = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return found

    def delta(self) -> Tensor:
        """What the adapter adds to the weight of the layer."""
        return self.lora_B.weight.detach().double() @ self.lora_A.weight.detach().double()


class Block(LowRank):
    """x + tanh(adapted(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Adapted(nn.Module):
    """Tokens in, classes out: embedding and head are frozen as well."""

    def __init__(self, blocks: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, classes)
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def adapted(seed: int = 5, blocks: int = 4, *, fixed_a: bool = False) -> Adapted:
    """The model with weights of this seed; ``fixed_a`` trains B alone, from an A that all share."""
    torch.manual_seed(seed)
    model = Adapted(blocks)
    for name, parameter in model.named_parameters():
        if "lora_A" in name and fixed_a:
            parameter.requires_grad_(False)
    return model


def tokens(node: int, count: int = 3, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Batches of a client, of its own."""
    generator = torch.Generator().manual_seed(node)
    return [
        (
            torch.randint(0, 11, (size, 5), generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def base_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what is frozen."""
    return {
        name: each.detach().clone()
        for name, each in model.named_parameters()
        if not each.requires_grad
    }


def trained_bytes(model: nn.Module) -> int:
    """What the parameters that are trained take as fp32."""
    return sum(4 * each.numel() for each in model.parameters() if each.requires_grad)
