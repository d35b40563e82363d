"""Fine-tuning of a frozen GPT-2 with adapters of peft: only the adapters, some kilobytes, are exchanged."""

import datasets
import numpy as np
import peft
import transformers

from ephemeron.integrations.transformers import TransformersTask


def model():
    """A model that stands for a trained one: `from_pretrained("folder", local_files_only=True)` in practice."""
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_positions=32, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    adapters = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    return peft.get_peft_model(base, adapters)


def rows(count, seed):
    """Multiples of a number, modulo 32."""
    ids = (np.random.default_rng(seed).integers(1, 32, (count, 1)) * np.arange(1, 17)) % 32
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def task(count=512, epochs=5):
    args = transformers.TrainingArguments(
        "out",
        use_cpu=True,
        learning_rate=1e-2,
        warmup_steps=10,
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
    )
    return TransformersTask(None, args, rows(count, 0), rows(count // 4, 1), model_init=model)
