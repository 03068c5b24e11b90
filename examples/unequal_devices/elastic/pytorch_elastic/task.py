"""The model, the data, and how one is tested on the other."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[tuple[Tensor, ...]]


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


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return pictures to train and to test with; they come with scikit-learn."""
    read = load_digits()
    images = torch.tensor(read.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(read.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return tuple(  # type: ignore[return-value]
        TensorDataset(images[part], labels[part]) for part in (order[:1437], order[1437:])
    )


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> Loader:
    """Return a loader of one node's digits."""
    data, _ = digits()
    images, labels = (tensor[partition_id::num_partitions] for tensor in data.tensors)
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True)


def test(net: nn.Module) -> tuple[float, float]:
    """Return loss and accuracy on the pictures that no node has."""
    _, data = digits()
    images, labels = data.tensors
    net.eval()
    with torch.no_grad():
        outputs = net(images)
    right = (outputs.argmax(1) == labels).float().mean().item()
    return F.cross_entropy(outputs, labels).item(), right
