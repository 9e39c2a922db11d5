"""What a person reads of a run, as lines of text. Nothing here prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from mlxtune.config import DataConfig, TrainConfig
from mlxtune.core.data.findings import Finding
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.text import count, duration
from mlxtune.core.training.checkpoint import ADAPTER
from mlxtune.core.training.metrics import (
    InstructEpochMetrics,
    InstructTrainResult,
    StepRecord,
    perplexity,
)
from mlxtune.core.training.trainer import InstructTrainer


def loss(value: float) -> str:
    """Return a loss in nats with its perplexity."""
    return f"{value:.4f} (perplexity {perplexity(value):.4g})"


def rows_line(ledger: Ledger) -> str:
    """Return where the rows of a file went."""
    parts = [f"{count(ledger.rows_read, 'row')} read"]
    if ledger.rows_train:
        parts.append(f"{ledger.rows_train:,} train")
    if ledger.rows_validation:
        parts.append(f"{ledger.rows_validation:,} validate")
    if skipped := ledger.rows_skipped.total():
        kinds = ", ".join(f"{kind}: {number:,}" for kind, number in ledger.rows_skipped.items())
        parts.append(f"{skipped:,} skipped ({kinds})")
    return f"{ledger.path}: " + ", ".join(parts)


def evaluated_line(ledger: Ledger) -> str:
    """Return which rows and tokens of a file are evaluated."""
    cut = f", {ledger.rows_truncated:,} of them cut" if ledger.rows_truncated else ""
    skipped = f", {total:,} skipped" if (total := ledger.rows_skipped.total()) else ""
    return (
        f"{ledger.path}: {count(ledger.rows_read, 'row')} read{skipped}{cut}; "
        f"{count(ledger.tokens_supervised, 'supervised token')}"
    )


def tokens_line(ledger: Ledger) -> str:
    """Return where the tokens of a file went."""
    cut = f" from {count(ledger.rows_truncated, 'row')}" if ledger.rows_truncated else ""
    several = f" in {ledger.examples:,} examples" if ledger.examples > ledger.rows_kept else ""
    return (
        f"{count(ledger.tokens, 'token')}{several} = {ledger.tokens_supervised:,} supervised + "
        f"{ledger.tokens_context:,} context + {ledger.tokens_truncated:,} truncated{cut}"
    )


def template_line(template: str, config: DataConfig) -> str:
    """Return how rows become examples."""
    turns = "every assistant turn" if config.turns == "all" else "the last assistant turn"
    thinking = "" if config.thinking == "auto" else f", thinking {config.thinking}"
    return f"{template}; {turns}{thinking}, up to {config.max_seq_len:,} tokens"


def finding_line(finding: Finding) -> str:
    """Return a finding with the first row to look at, if it is about rows."""
    if not finding.places:
        return f"{finding.kind}: {finding.advice}"
    first = finding.places[0]
    detail = f" ({first.detail})" if first.detail else ""
    more = f", and {finding.rows - 1:,} more" if finding.rows > 1 else ""
    return f"{first.path}:{first.row}: {finding.kind}{detail}{more}: {finding.advice}"


class SmoothedLoss:
    """Exponential moving average of the losses, the first being its start."""

    def __init__(self, keep: float = 0.9) -> None:
        self._keep = keep
        self._value: float | None = None

    def add(self, loss: float) -> float:
        """Take in a loss and return the average."""
        before = loss if self._value is None else self._value
        self._value = self._keep * before + (1 - self._keep) * loss
        return self._value


def step_line(record: StepRecord, total_steps: int, average: float, peak_gb: float) -> str:
    """Return one step as a plain line."""
    return (
        f"step {record.step}/{total_steps}  loss {record.loss:.4f}  average {average:.4f}  "
        f"lr {record.learning_rate:.3g}  grad norm {record.grad_norm:.3g}  "
        f"{tokens_per_second(record):,.0f} tokens/s  peak {memory(peak_gb)}"
    )


def step_state(record: StepRecord, average: float, peak_gb: float, room: int) -> str:
    """Return what of a step fits into `room` characters, the most important first."""
    state = f"loss {record.loss:.3f}"
    for part in (
        f"average {average:.3f}",
        f"lr {record.learning_rate:.2g}",
        f"{tokens_per_second(record):,.0f} tok/s",
        memory(peak_gb),
    ):
        if len(state) + 2 + len(part) > room:
            break
        state = f"{state}  {part}"
    return state


def tokens_per_second(record: StepRecord) -> float:
    """Return how many tokens the model read in a second of the step."""
    return record.tokens / max(record.seconds, 1e-9)


def memory(gb: float) -> str:
    """Return `310 MB` or `8.25 GB`."""
    return f"{gb:.2f} GB" if gb >= 1 else f"{gb * 1000:.0f} MB"


def epoch_line(metrics: InstructEpochMetrics, best: bool) -> str:
    """Return one epoch's result."""
    validation = ""
    if metrics.val_loss is not None:
        validation = f", validation {loss(metrics.val_loss)}" + (", best so far" if best else "")
    return (
        f"epoch {metrics.epoch}: train {metrics.train_loss:.4f}{validation}; "
        f"{metrics.samples_per_sec:.1f} rows/s, {duration(metrics.epoch_time_ms / 1000)}"
    )


def plan_line(trainer: InstructTrainer) -> str:
    """Return what a run will do."""
    config = trainer.config
    validation = f"{len(trainer.val_rows):,} validate" if trainer.val_rows else "no validation"
    return (
        f"{count(trainer.total_steps, 'step')} of {count(config.batch_size, 'row')}, "
        f"{count(config.epochs, 'epoch')}; {len(trainer.train_rows):,} rows train, {validation}; "
        f"learning rate {config.learning_rate:g}, {config.schedule}; "
        f"seed {config.seed}"
    )


def summary_lines(
    result: InstructTrainResult,
    config: TrainConfig,
    peak_gb: float,
    predicted_gb: float | None = None,
) -> Iterator[str]:
    """Yield the end of a run: speed and memory, losses, and what was written where."""
    predicted = "" if predicted_gb is None else f" (predicted {memory(predicted_gb)})"
    seconds = max(sum(record.seconds for record in result.steps), 1e-9)
    tokens = sum(record.tokens for record in result.steps)
    rows = sum(record.rows for record in result.steps)
    yield (
        f"{count(len(result.steps), 'step')} in {duration(result.total_time_ms / 1000)}, "
        f"{rows / seconds:.1f} rows/s, {tokens / seconds:,.0f} tokens/s, "
        f"peak memory {memory(peak_gb)}{predicted}"
    )
    yield f"training loss {loss(result.epoch_metrics[-1].train_loss)} in the last epoch"
    yield from _validation_lines(result)
    if result.stopped_early:
        yield f"stopped early after epoch {result.epoch_metrics[-1].epoch}"
    chosen = "last epoch" if result.best_epoch is None else f"best epoch, {result.best_epoch}"
    yield f"adapter of the {chosen}: {config.output_path}"
    yield f"checkpoints, metrics and ledger: {config.checkpoint_path}"


def _validation_lines(result: InstructTrainResult) -> Iterator[str]:
    initial, best, last = (
        result.initial_val_loss,
        result.best_val_loss,
        result.epoch_metrics[-1].val_loss,
    )
    if initial is None or best is None or last is None:
        return
    yield (
        f"validation loss {loss(initial)} before, {loss(last)} at the end, "
        f"{loss(best)} at best, in epoch {result.best_epoch}"
    )
    if best >= initial:
        yield (
            "no epoch was better than the base model on the validation rows: "
            "lower --lr, or bring more data"
        )


def quantized_base_lines(config: TrainConfig) -> Iterator[str]:
    """Yield what to know of an adapter whose base was quantised while loading, if it was."""
    if config.quantize is None:
        return
    yield (
        f"trained on {config.model_path} quantised to {config.quantize} while loading; mlx-lm puts "
        "the adapter on the model in full precision, where it was not trained"
    )
    same = f"--quantize {config.quantize}{' --double-quant' if config.double_quant else ''}"
    if config.quantize in _CONVERTED:
        model = shlex.quote(config.model_path)
        how = _CONVERTED[config.quantize]
        yield f"the same base for mlx-lm: mlx_lm.convert --hf-path {model} -q {how}"
    else:
        yield f"mlx-lm knows no {config.quantize}: {same} has mlxtune load the same base"


# What makes of a model with mlx-lm what --quantize makes of it.
_CONVERTED = {
    "4": "--q-bits 4",
    "8": "--q-bits 8",
    "mxfp4": "--q-mode mxfp4",
    "nvfp4": "--q-mode nvfp4",
    "mxfp8": "--q-mode mxfp8",
}


def usage_line(result: InstructTrainResult, config: TrainConfig) -> str:
    """Return the command that uses the adapter with mlx-lm."""
    folder = config.output_path.parent
    if config.output_path.name != ADAPTER:
        if result.best_epoch is None:
            return f"mlx-lm loads a folder whose adapter file is named {ADAPTER}"
        folder = config.checkpoint_path / "best"
    model, adapter = shlex.quote(config.model_path), shlex.quote(str(folder))
    return f"mlx_lm.generate --model {model} --adapter-path {adapter} --prompt '…'"
