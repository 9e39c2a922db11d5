"""AdamW over the LoRA matrices, with a separate learning rate for B under LoRA+."""

import mlx.optimizers as optim

from mlxtune.config import InstructConfig


def make_optimizer(config: InstructConfig) -> optim.Optimizer:
    """Return AdamW: decoupled weight decay and bias correction, arXiv:1711.05101, algorithm 2.

    With an `lr_ratio` it is two, whose rates `set_rate` sets: one for `lora_b` and DoRA's `m`,
    which PEFT groups with it, and one for `lora_a`. Weight decay is the same for both, and is
    scaled by each one's rate, as in PEFT's create_loraplus_optimizer with its
    `loraplus_weight_decay`.
    """

    def adamw() -> optim.AdamW:
        return optim.AdamW(
            config.learning_rate,
            betas=[0.9, 0.999],
            eps=1e-8,
            weight_decay=config.weight_decay,
            bias_correction=True,
        )

    if config.lr_ratio == 1:
        return adamw()
    return optim.MultiOptimizer([adamw(), adamw()], [lambda path, _: not path.endswith("lora_a")])


def set_rate(optimizer: optim.Optimizer, rate: float, ratio: float) -> None:
    """Set the learning rate of the next step: that of A, and `ratio` times as much for B.

    LoRA+, arXiv:2402.12354, section 4.
    """
    if isinstance(optimizer, optim.MultiOptimizer):
        faster, slower = optimizer.optimizers
        faster.learning_rate, slower.learning_rate = rate * ratio, rate
    else:
        optimizer.learning_rate = rate
