"""The first examples of a dataset as batches, for commands that examine a model with data."""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.datasets import load_dataset


def dataset_batches(
    name: str, shape: tuple[int, ...], batch_size: int, examples: int
) -> list[tuple[Any, Any]]:
    """Return batches of training examples in random order; images are resized to the model's input.

    Raises
    ------
    DatasetError
        If there is no such dataset, or its inputs have another shape.

    Examples
    --------
    >>> [tuple(x.shape) for x, _ in dataset_batches("digits", (1, 8, 8), 16, 32)]
    [(16, 1, 8, 8), (16, 1, 8, 8)]
    """
    import torch

    data = load_dataset(name)
    square = len(shape) == len(data.input_shape) == 3 and shape[1] == shape[2]
    if square and shape != data.input_shape:
        data = load_dataset(name, image_size=shape[1])
    if tuple(shape) != tuple(data.input_shape):
        own = ",".join(map(str, data.input_shape))
        raise DatasetError(f"{name}: inputs are of shape {own}, not {shape}; use --input {own}")
    order = np.random.default_rng(0).permutation(len(data.train_x))[:examples]
    inputs, targets = torch.from_numpy(data.train_x[order]), torch.from_numpy(data.train_y[order])
    return [
        (inputs[start : start + batch_size], targets[start : start + batch_size])
        for start in range(0, len(order), batch_size)
    ]
