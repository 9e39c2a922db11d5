"""A small imitation of the parts of unsloth_zoo.mlx that a benchmark uses, for tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


class FastMLXModel:
    @staticmethod
    def from_pretrained(model_name: str, **_: Any) -> tuple[nn.Module, object]:
        return load_model(Path(model_name))[0], object()

    @staticmethod
    def get_peft_model(model: nn.Module, **options: Any) -> nn.Module:
        scale = options["lora_alpha"] / options["r"]
        keys = {f"self_attn.{name}" for name in options["target_modules"]}
        lora = {"rank": options["r"], "scale": scale, "dropout": 0.0, "keys": keys}
        model.freeze()
        linear_to_lora_layers(model, options["finetune_last_n_layers"], lora)
        return model


class MLXTrainingConfig(SimpleNamespace):
    pass


class MLXTrainer:
    """Trains on batches in order, padded to the longest row; callbacks are like Unsloth's."""

    def __init__(self, model: Any, _: Any, rows: Any, args: Any, callbacks: Any) -> None:
        self.model, self.rows, self.args, self.callbacks = model, rows, args, callbacks
        self.on_loss: list[Any] = []

    def add_step_callback(self, function: Any) -> None:
        self.on_loss.append(function)

    def train(self) -> None:
        args, state = self.args, SimpleNamespace(num_input_tokens_seen=0)
        assert args.include_num_input_tokens_seen == "all"
        optimizer = optim.AdamW(
            args.learning_rate,
            betas=[args.adam_beta1, args.adam_beta2],
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
            bias_correction=True,
        )
        size = args.per_device_train_batch_size
        for step in range(args.max_steps):
            batch = self.rows[step * size : (step + 1) * size]
            tokens, labels = _padded(batch, "input_ids", 0), _padded(batch, "labels", -100)
            loss, gradients = nn.value_and_grad(self.model, _loss)(self.model, tokens, labels)
            self._call("on_pre_optimizer_step", state, optimizer)
            optimizer.update(self.model, gradients)
            mx.eval(loss, self.model.parameters(), optimizer.state)
            state.num_input_tokens_seen += tokens.size
            self._call("on_step_end", state, optimizer)
            for function in self.on_loss:
                function(step + 1, args.max_steps, loss.item(), 0.0, 0.0)

    def _call(self, name: str, state: Any, optimizer: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self.args, state, None, model=self.model, optimizer=optimizer)


def _padded(rows: Any, name: str, value: int) -> mx.array:
    longest = max(len(row[name]) for row in rows)
    padded = [row[name] + [value] * (longest - len(row[name])) for row in rows]
    return mx.array(np.array(padded, dtype=np.int32))


def _loss(model: nn.Module, tokens: mx.array, labels: mx.array) -> mx.array:
    counted = labels[:, 1:] != -100
    losses = nn.losses.cross_entropy(model(tokens[:, :-1]), mx.maximum(labels[:, 1:], 0))
    return (losses * counted).sum() / counted.sum()
