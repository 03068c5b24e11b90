"""Train by a plan with the Trainer of transformers, which makes its own optimiser and schedule."""

from typing import Any

import torch
from task import planned, sent
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from fl_elastic.losses import own_loss
from fl_elastic.training import apply_plan


class Sentences(Dataset[dict[str, Any]]):
    """Made-up sentences: the class is whether the first word comes again."""

    def __init__(self, count: int = 512, length: int = 16) -> None:
        words = torch.randint(1, 40, (count, length))
        self.words, self.labels = words, (words[:, :1] == words[:, 1:]).any(1).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def main() -> None:
    """Plan, and let the Trainer train inside the plan."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128,
    )  # fmt: skip
    model, data = BertForSequenceClassification(config), Sentences()
    arguments = TrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=32, learning_rate=1e-3,
        warmup_steps=4, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    batches = [batch for _, batch in zip(range(2), trainer.get_train_dataloader(), strict=False)]
    plan, base = planned(model, batches, own_loss)
    with apply_plan(model, plan):
        trainer.train()
    sent("transformers", model, base, plan, trainer.state.global_step, len(data))


if __name__ == "__main__":
    main()
