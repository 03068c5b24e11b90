"""The model and the data."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[tuple[Tensor, ...]]


def network() -> nn.Module:
    """Return a convolutional network for pictures of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def load_data(partition: int, partitions: int) -> tuple[Loader, Loader]:
    """Return loaders of one node's training and test digits, which come with scikit-learn."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    own = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    own = own[partition::partitions]
    cut = int(0.8 * len(own))
    train, test = (TensorDataset(images[part], labels[part]) for part in (own[:cut], own[cut:]))
    return DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)
