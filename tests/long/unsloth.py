"""Unsloth's MLX trainer as the other side of `mlxtune bench`; see `bench_unsloth`.

The trainer's own loop runs in a thread and waits in callbacks. The first step, in which the trainer
compiles, is taken twice: first as a warm-up at a rate of 0.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlxtune.config import TrainConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.files.sizes import read_text
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.core.steps.batch import run_length
from mlxtune.errors import MlxTuneError

# The label of a token without loss.
_IGNORED = -100


class Unsloth:
    """Unsloth's model, LoRA, batches, loss and step, with the settings of mlxtune's optimizer.

    Like mlxtune in benchmarks, it uses no gradient checkpointing and no clipping. It compiles,
    which is its default: on the CPU the first step waits minutes for a C++ compiler, and later
    steps take half the time.
    """

    loss_function = "unsloth"

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        # Without these variables, Unsloth looks for a CUDA card on Linux.
        os.environ |= {"UNSLOTH_IS_PRESENT": "1", "UNSLOTH_ZOO_DISABLE_GPU_INIT": "1"}
        self.execution = f"compiled, unsloth_zoo {version('unsloth_zoo')}"
        self._config, self._turns = config, Turns()
        self._turns.take(lambda: self._load(folder))

    def start(self, adapter: Path, steps: Sequence[Sequence[Example]]) -> None:
        """Put Unsloth's LoRA on the model, with the adapter's matrices. Raises MlxTuneError."""
        if any(len(step) != self._config.batch_size for step in steps):
            raise MlxTuneError("unsloth takes one example a row and whole steps only")
        self._turns.take(lambda: self._attach(adapter))
        rows = [row(example) for step in (steps[0], *steps) for example in step]
        self._turns.take(lambda: self._prepare(rows, adapter.parent / "unsloth"))

    def warm_up(self, steps: Sequence[Sequence[Example]]) -> float | None:
        """Take the first step at a rate of 0, because the loop cannot undo a step."""
        self._turns.take(self._trainer.train)
        return None

    def step(self, number: int, examples: Sequence[Example]) -> float:
        """Take step `number`, from 1, on all examples; return its loss."""
        loss: float = self._turns.take()
        return loss

    def tokens(self, examples: Sequence[Example]) -> tuple[int, int]:
        """Return the number of tokens that the last step ran, and the number that were padding."""
        run = self._turns.batch_tokens - len(examples)
        return run, run - sum(map(run_length, examples))

    def _load(self, folder: Path) -> None:
        from unsloth_zoo.mlx.loader import FastMLXModel

        given = self._config
        self._loader = FastMLXModel
        self._model, self._tokenizer = FastMLXModel.from_pretrained(
            str(folder),
            dtype=given.dtype,
            load_in_4bit=False,
            max_seq_length=given.max_seq_len,
            trust_remote_code=given.trust_remote_code,
        )
        mx.eval(self._model.parameters())

    def _attach(self, adapter: Path) -> None:
        config = json.loads(read_text(adapter / "adapter_config.json"))
        lora = config["lora_parameters"]
        self._model = self._loader.get_peft_model(
            self._model,
            r=lora["rank"],
            lora_alpha=lora["rank"] * lora["scale"],
            lora_dropout=lora["dropout"],
            target_modules=sorted({key.rpartition(".")[2] for key in lora["keys"]}),
            finetune_last_n_layers=config["num_layers"],
            use_gradient_checkpointing=False,
        )
        matrices = dict(tree_flatten(mx.load(str(adapter / ADAPTER))))
        if _shapes(self._model.trainable_parameters()) != _shapes(matrices):
            raise MlxTuneError("unsloth trains other matrices with these options")
        self._model.load_weights(list(matrices.items()), strict=False)

    def _prepare(self, rows: list[dict[str, list[int]]], output: Path) -> None:
        from unsloth_zoo.mlx.trainer import MLXTrainer, MLXTrainingConfig

        given, size = self._config, self._config.batch_size
        config = MLXTrainingConfig(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=1,
            max_steps=len(rows) // size,
            warmup_steps=0,
            learning_rate=given.lr,
            lr_scheduler_type="constant",
            optim="adamw",
            weight_decay=given.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_epsilon=1e-8,
            max_grad_norm=0.0,
            max_grad_leaf_norm=0.0,
            logging_steps=1,
            output_dir=str(output),
            max_seq_length=given.max_seq_len,
            compile=True,
            gradient_checkpointing=False,
            dataset_order="sequential",
            disable_memory_limits=True,
            append_eos=False,
        )
        # Hugging Face's option to count the tokens that run, including padding.
        config.include_num_input_tokens_seen = "all"
        self._trainer = MLXTrainer(
            self._model, self._tokenizer, rows, args=config, callbacks=[self._turns]
        )
        self._trainer.add_step_callback(self._turns.on_loss)


class Turns:
    """A thread that does all work with MLX, whose streams belong to threads; pauses after a step.

    The methods `on_…` are callbacks for a trainer like Hugging Face's. `batch_tokens` counts the
    tokens of the last step's batch, including padding.
    """

    def __init__(self) -> None:
        self.batch_tokens = 0
        self._seen = self._taken = 0
        self._work: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def take(self, work: Callable[[], Any] = lambda: None) -> Any:
        """Do some work, or continue the current work, to its end or the end of a step.

        Returns the work's result or the step's loss. Raises the work's errors.
        """
        self._work.put(work)
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def on_loss(self, step: int, total: int, loss: float, *_: Any) -> None:
        """Return a step's loss to `take`, and wait for the next call."""
        self._taken += 1
        self._results.put(loss)
        self._work.get()

    def on_pre_optimizer_step(self, args: Any, *_: Any, optimizer: Any, **__: Any) -> None:
        """Set the learning rate: 0 for the first step, so that this step changes nothing."""
        optimizer.learning_rate = args.learning_rate if self._taken else 0.0

    def on_step_end(self, _: Any, state: Any, *__: Any, optimizer: Any, **___: Any) -> None:
        """Count the step's tokens; after the first step, reset the optimizer's moments."""
        seen = state.num_input_tokens_seen
        self.batch_tokens, self._seen = seen - self._seen, seen
        if not self._taken:
            # The state is updated in place, because a compiled step reads this object.
            optimizer.state.update(tree_map(mx.zeros_like, optimizer.state))

    def _serve(self) -> None:
        while True:
            try:
                self._results.put(self._work.get()())
            except BaseException as error:  # noqa: BLE001  raised again by `take`
                self._results.put(error)


def row(example: Example) -> dict[str, list[int]]:
    """Return an example as `input_ids` and `labels`."""
    labels = np.where(np.asarray(example.assistant_mask) == 1, example.tokens, _IGNORED)
    return {"input_ids": np.asarray(example.tokens).tolist(), "labels": labels.tolist()}


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tree_flatten(tree)}
