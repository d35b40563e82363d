"""Sequence classification with a small BERT and a tokeniser of letters, by TrainingArguments."""

import datasets
import numpy as np
import torch
import transformers

from ephemeron.integrations.transformers import TransformersTask

GOOD, BAD = ("good", "great", "lovely", "fine"), ("bad", "poor", "awful", "dull")
NOUNS = ("film", "book", "song", "play", "meal")


def rows(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    texts = [f"{'what ' if rng.random() < 0.5 else ''}a {rng.choice((BAD, GOOD)[label])} {rng.choice(NOUNS)}" for label in labels]
    ids = [[1, *(ord(letter) - 94 if letter != " " else 2 for letter in text)] for text in texts]
    return datasets.Dataset.from_dict({"text": texts, "input_ids": ids, "label": labels})


def padded(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([s["label"] for s in samples])}


def model():
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=32
    )
    return transformers.BertForSequenceClassification(config)


def accuracy(found):
    return {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean()}


def task(count=512, epochs=8):
    args = transformers.TrainingArguments(
        "out",
        use_cpu=True,
        learning_rate=2e-3,
        weight_decay=0.01,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        eval_strategy="epoch",
    )
    return TransformersTask(
        None, args, rows(count, 0), rows(count // 4, 1), model_init=model, data_collator=padded, compute_metrics=accuracy
    )
