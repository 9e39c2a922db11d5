"""AdamW over the LoRA matrices, with a learning rate of their own for B where LoRA+ asks."""

from __future__ import annotations

from typing import Any

import mlx.optimizers as optim

from mlxtune.config import InstructConfig


def make_optimizer(config: InstructConfig) -> optim.Optimizer:
    """Return AdamW: decoupled weight decay and bias correction, arXiv:1711.05101, algorithm 2.

    With an `lr_ratio` it is two: one for `lora_b` and DoRA's `m`, and one for `lora_a`, whose rates
    `set_rate` sets. Weight decay is the same for both, and is scaled by each one's rate, as in
    PEFT's create_loraplus_optimizer with its `loraplus_weight_decay`.
    """
    if config.lr_ratio == 1:
        return _adamw(config)
    return optim.MultiOptimizer([_adamw(config), _adamw(config)], [_learns_faster])


def set_rate(optimizer: optim.Optimizer, rate: float, ratio: float) -> None:
    """Have an optimizer of `make_optimizer` take its next step at a learning rate, that of A.

    LoRA+, arXiv:2402.12354, section 4: B learns `ratio` times as fast.
    """
    if isinstance(optimizer, optim.MultiOptimizer):
        faster, other = optimizer.optimizers
        faster.learning_rate, other.learning_rate = rate * ratio, rate
    else:
        optimizer.learning_rate = rate


def _adamw(config: InstructConfig) -> optim.AdamW:
    return optim.AdamW(
        config.learning_rate,
        betas=[0.9, 0.999],
        eps=1e-8,
        weight_decay=config.weight_decay,
        bias_correction=True,
    )


def _learns_faster(path: str, _: Any) -> bool:
    """Tell whether a parameter is B, or one of DoRA's sizes, which PEFT counts with it."""
    return not path.endswith("lora_a")
