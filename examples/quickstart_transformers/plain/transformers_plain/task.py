"""The model, the data, training and testing."""

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
)
from transformers import BertForSequenceClassification as Bert


def get_model(name: str) -> Any:
    """Return a pretrained model, or a tiny one with random weights."""
    if name:
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return Bert(config)


def load_data(
    partition: int, partitions: int, dataset: str, model: str
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of one node's sentences, as batches with ``labels``."""
    if not dataset:
        words = torch.randint(2, 64, (160, 12), generator=torch.Generator().manual_seed(partition))
        labels = words[:, 0] < 33
        rows = [
            {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": label.long()}
            for each, label in zip(words, labels, strict=True)
        ]
        return DataLoader(rows[:128], batch_size=16, shuffle=True), DataLoader(rows[128:], 32)  # type: ignore[arg-type]
    from flwr_datasets import FederatedDataset
    from flwr_datasets.partitioner import IidPartitioner

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = FederatedDataset(dataset=dataset, partitioners={"train": IidPartitioner(partitions)})
    parts = data.load_partition(partition).train_test_split(test_size=0.2, seed=42)
    parts = parts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=512))
    parts = parts.remove_columns("text").rename_column("label", "labels")
    collate = DataCollatorWithPadding(tokenizer)
    return (
        DataLoader(parts["train"], batch_size=16, shuffle=True, collate_fn=collate),
        DataLoader(parts["test"], batch_size=32, collate_fn=collate),
    )


def train(model: Any, loader: DataLoader[Any], rate: float) -> float:
    """Train for one epoch and return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    loss = torch.tensor(0.0)
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    return float(loss)


def test(model: Any, loader: DataLoader[Any]) -> tuple[float, float]:
    """Return loss and accuracy."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        loss += float(outputs.loss) * len(batch["labels"])
        right += int((outputs.logits.argmax(1) == batch["labels"]).sum())
        count += len(batch["labels"])
    return loss / count, right / count
