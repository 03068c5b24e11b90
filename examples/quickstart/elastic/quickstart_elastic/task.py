"""The model and the data."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small convolutional network for pictures of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 4 * 4, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score per class."""
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


Loader = DataLoader[tuple[Tensor, ...]]


def load_data(partition_id: int, num_partitions: int) -> tuple[Loader, Loader]:
    """Return loaders of one node's training and test digits, which come with scikit-learn."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    own = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    own = own[partition_id::num_partitions]
    cut = int(0.8 * len(own))
    train, test = (TensorDataset(images[part], labels[part]) for part in (own[:cut], own[cut:]))
    return DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)
