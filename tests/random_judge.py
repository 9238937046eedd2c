"""Make a scalar judge of random weights for tests that need different scores, right or wrong."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification


def save_random_judge(folder: Path, tokenizer, seed: int = 0) -> None:
    """Write a scalar judge (a sequence classifier with one label) of random weights into a folder."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, initializer_range=0.3, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
