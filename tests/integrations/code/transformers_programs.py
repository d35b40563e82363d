"""Programs of `transformers` of the tests."""

from __future__ import annotations

import datasets
import numpy as np
import torch
import transformers

from ephemeron.integrations.transformers import TransformersTask

ARGUMENTS = {
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.5,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "epoch",
    "seed": 3,
}


def arguments(**options):
    return transformers.TrainingArguments("unused", use_cpu=True, report_to=[], **{**ARGUMENTS, **options})


def sentences(count, seed):
    """Sequences with a rule, of unequal lengths: what is no label is -100."""
    rng = np.random.default_rng(seed)
    ids = (rng.integers(1, 11, (count, 1)) * np.arange(1, 10)) % 11
    labels = np.where(np.arange(9) < rng.integers(4, 10, (count, 1)), ids, -100)
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels, "comment": ["text"] * count})


def gpt():
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def language(**options):
    return TransformersTask(None, arguments(**options), sentences(64, 1), sentences(22, 2), model_init=gpt)


def answers():
    """Hardly any sequence has labels."""
    rows = sentences(64, 1)
    rows = rows.map(lambda row, i: {"labels": row["labels"] if i % 9 == 0 else [-100] * 9}, with_indices=True)
    options = {"learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant"}
    return TransformersTask(None, arguments(**options), rows, rows, model_init=lambda: gpt().double())


def half():
    return language(bf16=True)


def bert():
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return transformers.BertForSequenceClassification(config)


def texts(count, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 9, count)
    ids = [rng.integers(1, 20, n).tolist() for n in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids, "label": [sum(i) % 3 for i in ids]})


def padded(samples):
    """Like DataCollatorWithPadding, without a tokeniser."""
    longest = max(len(s["input_ids"]) for s in samples)
    ids = torch.tensor([s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([s["label"] for s in samples])}


def accuracy(found):
    return {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean(), "counted": len(found.label_ids)}


def classification():
    return TransformersTask(
        None,
        arguments(load_best_model_at_end=True, metric_for_best_model="accuracy", greater_is_better=True, save_strategy="epoch"),
        texts(64, 1),
        texts(22, 2),
        model_init=bert,
        data_collator=padded,
        compute_metrics=accuracy,
    )


def adapted():
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    return peft.get_peft_model(gpt(), config)


def lora():
    return TransformersTask(None, arguments(), sentences(64, 1), sentences(22, 2), model_init=adapted)
