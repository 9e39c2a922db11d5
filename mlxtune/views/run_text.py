"""The output of `train` and `eval` as lines of text. Nothing in this file prints."""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from mlxtune.config import DataConfig, TrainConfig
from mlxtune.config.fields import flag
from mlxtune.config.objective_config import default_learning_rate, is_rewarded
from mlxtune.core.data.findings import Finding
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.problems import where
from mlxtune.core.evaluation.outcome import (
    EXACT,
    HELPED,
    PERPLEXITY_CAP,
    Evaluation,
    ExactMatch,
    KeyMatches,
    Matches,
    Sample,
    perplexity,
)
from mlxtune.core.evaluation.verdict_text import file_verdict_lines, verdict_lines
from mlxtune.core.formatting import (
    byte_size,
    duration,
    format_name,
    loss_text,
    pluralize,
    short_duration,
)
from mlxtune.core.machine.installation import DISTRIBUTION
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.core.run.metrics import (
    EQUAL_REWARDS,
    MASKED_ROWS,
    REWARD,
    ROWS_WITHOUT_REWARD,
    InstructEpochMetrics,
    InstructTrainResult,
    StepRecord,
    validation_measure,
)
from mlxtune.core.run.profile import OTHER, PHASES, Phase, StepProfile
from mlxtune.core.run.sampled_answers import (
    NoGradient,
    exploit_warning,
    gradient_warning,
    untaught,
)
from mlxtune.core.run.summary import RunView, option_text
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.views.output import render_lines
from mlxtune.views.plan_text import MIN_STEPS
from mlxtune.views.visible import escape, without_template_tokens

# The maximum number of characters of a sample that are shown.
_MAX_CHARS = 400
_PHASE_WIDTH = 16
# The number of wrong or differing answers that are listed.
_MAX_LISTED = 10
# Fewer losses show no trend.
_MIN_LOSSES = 5
# In normal training, no loss is this many times the untrained model's loss.
_JUMP_RATIO = 1.5
# Nats per token by which chosen answers may become less likely without a warning.
_MAX_LOGP_DROP = 0.1
# Few rows teach a policy if more than this fraction teach nothing.
_MAX_UNTAUGHT = 0.5
# A rate below this fraction of the objective's default hardly trains.
_TINY_RATE_FRACTION = 0.05


def loss_and_perplexity(value: float, objective: str = "sft") -> str:
    """Return a loss as text, such as `1.2817 (perplexity 3.603)`.

    The loss of a preference objective has no perplexity, as it is not a loss of text. A validation
    by rewards has their mean instead of a loss.
    """
    name, value = validation_measure(value, objective)
    if name == REWARD:
        return f"{name} {value:.4f}"
    if objective != "sft":
        return f"{value:.4f}"
    capped = perplexity(value)
    shown = f"{capped:.4g}" if capped < PERPLEXITY_CAP else f"over {PERPLEXITY_CAP:,.0f}"
    return f"{value:.4f} (perplexity {shown})"


def rows_line(ledger: Ledger) -> str:
    parts = [f"{pluralize(ledger.rows_read, 'row')} read"]
    if ledger.rows_train:
        parts.append(f"{ledger.rows_train:,} for training")
    if ledger.weight != 1:
        parts[-1] += f" ({ledger.weight:g} times per epoch)"
    if ledger.rows_validation:
        parts.append(f"{ledger.rows_validation:,} for validation")
    if skipped := ledger.rows_skipped.total():
        kinds = ", ".join(f"{kind}: {number:,}" for kind, number in ledger.rows_skipped.items())
        parts.append(f"{skipped:,} skipped ({kinds})")
    return f"{ledger.path}: " + ", ".join(parts)


def evaluated_line(ledger: Ledger) -> str:
    cut = f", {ledger.rows_truncated:,} truncated" if ledger.rows_truncated else ""
    skipped = f", {total:,} skipped" if (total := ledger.rows_skipped.total()) else ""
    return (
        f"{ledger.path}: {pluralize(ledger.rows_read, 'row')} read{skipped}{cut}; "
        f"{pluralize(ledger.tokens_supervised, 'supervised token')}"
    )


def changed_options(before: Any, after: Any, names: Sequence[str]) -> str:
    """Return the options that differ between two configs, as flags with the later values."""
    changed = [name for name in names if getattr(before, name) != getattr(after, name)]
    return " ".join(f"{flag(name)} {option_text(getattr(after, name))}" for name in changed)


def tokens_line(ledger: Ledger) -> str:
    cut = f" from {pluralize(ledger.rows_truncated, 'row')}" if ledger.rows_truncated else ""
    several = f" in {ledger.examples:,} examples" if ledger.examples > ledger.rows_kept else ""
    return (
        f"{pluralize(ledger.tokens, 'token')}{several} = {ledger.tokens_supervised:,} supervised + "
        f"{ledger.tokens_context:,} context + {ledger.tokens_truncated:,} truncated{cut}"
    )


def template_line(template: str, config: DataConfig, *, added: bool = False) -> str:
    """Return a line on a run's template; `added` says that the model itself has none."""
    turns = "every assistant turn" if config.turns == "all" else "the last assistant turn"
    if config.is_rewarded:
        turns = "prompts end before the last assistant turn"
    thinking = "" if config.thinking == "auto" else f", thinking {config.thinking}"
    alone = "; mlx-lm uses the template with a fused model, not with the adapter" if added else ""
    return f"{template}; {turns}{thinking}, up to {config.max_seq_len:,} tokens{alone}"


def finding_line(finding: Finding) -> str:
    if not finding.places:
        return f"{finding.kind}: {finding.advice}"
    first = finding.places[0]
    detail = f" ({first.detail})" if first.detail else ""
    more = f", and {finding.rows - 1:,} more" if finding.rows > 1 else ""
    return f"{where(first.path, first.row)}: {finding.kind}{detail}{more}: {finding.advice}"


def step_line(
    record: StepRecord, total_steps: int, average: float, peak_gb: float, thermal: str = ""
) -> str:
    return (
        f"step {record.step}/{total_steps}  loss {record.loss:.4f}  average {average:.4f}  "
        f"{_reward_metrics(record)}lr {record.learning_rate:.3g}  "
        f"grad norm {record.grad_norm:.3g}  "
        f"{record.tokens_per_second:,.0f} tokens/s  peak {byte_size(peak_gb * 1e9)}"
        f"{_thermal_text(thermal)}"
    )


def step_state(record: StepRecord, average: float, peak_gb: float, thermal: str = "") -> str:
    speed = record.tokens_per_second
    memory = f"{byte_size(peak_gb * 1e9)}{_thermal_text(thermal)}"
    return f"loss {average:.3f}  {_reward_metrics(record)}{speed:,.0f} tok/s  {memory}"


def _reward_metrics(record: StepRecord) -> str:
    """Return the metrics of rewards to show in a step's line."""
    shown = (REWARD, "rewards/accuracies", "rewards/margins", "kl")
    metrics = ((name, record.metrics[name]) for name in shown if name in record.metrics)
    return "".join(f"{name} {value:.3g}  " for name, value in metrics)


def _thermal_text(thermal: str) -> str:
    return f"  thermal: {thermal}" if thermal else ""


def epoch_line(
    metrics: InstructEpochMetrics,
    best: bool,
    objective: str = "sft",
    initial: float | None = None,
) -> str:
    """Return a line on an epoch's losses; `initial` is the validation loss before training."""
    validation, train = "", "loss " if is_rewarded(objective) else "train "
    if metrics.val_loss is not None:
        validation = f", validation {loss_and_perplexity(metrics.val_loss, objective)}"
        if initial is not None and metrics.val_loss >= initial:
            validation += ", no better than before training"
        elif best:
            validation += ", best so far"
    return (
        f"epoch {metrics.epoch}: {train}{metrics.train_loss:.4f}{validation}; "
        f"{metrics.samples_per_sec:.1f} rows/s, {duration(metrics.epoch_time_ms / 1000)}"
    )


def validation_line(
    step: int, epochs: float, loss: float, best: bool, objective: str = "sft"
) -> str:
    """Return a line on a validation within an epoch; `epochs` may be fractional."""
    so_far = ", best so far" if best else ""
    return f"step {step} (epoch {epochs:.2f}): {loss_and_perplexity(loss, objective)}{so_far}"


def plan_line(trainer: InstructTrainer) -> str:
    config = trainer.config
    validation = (
        f"{len(trainer.val_rows):,} for validation" if trainer.val_rows else "no validation"
    )
    if trainer.val_rows and config.val_steps:
        validation += f" every {pluralize(config.val_steps, 'step')}"
    epochs = min(config.epochs, math.ceil(trainer.total_steps / trainer.steps_per_epoch))
    objective, rate = trainer.objective, f"learning rate {trainer.learning_rate:g}"
    if not objective.is_sft:
        default = default_learning_rate(objective.name)
        default_note = f" (the default of {objective.name})" * (trainer.learning_rate == default)
        rate = f"{objective.description}; {rate}{default_note}"
    return (
        f"{pluralize(trainer.total_steps, 'step')} of {pluralize(config.batch_size, 'row')}, "
        f"{pluralize(epochs, 'epoch')}; {pluralize(len(trainer.train_rows), 'training row')}, "
        f"{validation}; {rate}, {config.schedule}; "
        f"seed {config.seed}"
    )


def risen_loss_line(
    steps: Sequence[StepRecord], config: TrainConfig, before: float | None = None
) -> str | None:
    """Return a warning if the loss rose or jumped, as it does at too high a learning rate.

    It rose if the last tenth of the steps had a higher loss than the first tenth. It jumped if five
    steps in a row had a far higher loss than the untrained model, whose loss is `before`.
    """
    some, lower = max(len(steps) // 10, _MIN_LOSSES), f"lower --lr {config.peak_rate:g}"
    # A policy's loss compares answers with each other, and says nothing about their quality.
    if len(steps) < 2 * some or config.is_rewarded:
        return None
    start, end = _mean_loss(steps[:some]), _mean_loss(steps[-some:])
    # Steps have different rows, so a rise within their noise is not significant.
    scatter = math.hypot(_scatter(steps[:some]), _scatter(steps[-some:]))
    if end > start + 2 * scatter:
        return (
            f"the training loss rose from {loss_text(start)} in the first {some} steps to "
            f"{loss_text(end)} in the last {some}: {lower}"
        )
    windows = (steps[i : i + _MIN_LOSSES] for i in range(len(steps) - _MIN_LOSSES + 1))
    highest = max(windows, key=_mean_loss)
    untrained, jumped = max(steps[0].loss, before or 0), _mean_loss(highest)
    # Preference losses may be near zero, or negative.
    if config.objective != "sft" or jumped <= _JUMP_RATIO * untrained:
        return None
    return (
        f"the training loss jumped from {loss_text(untrained)} to {loss_text(jumped)} in steps "
        f"{highest[0].step} to {highest[-1].step}: {lower}"
    )


def _scatter(steps: Sequence[StepRecord]) -> float:
    """Return the standard error of the mean loss of steps."""
    return float(np.std([step.loss for step in steps], ddof=1) / math.sqrt(len(steps)))


def less_likely_line(evaluation: Evaluation, objective: str) -> str | None:
    """Return a warning if the chosen answers of pairs became less likely by more than 0.1 nats."""
    difference, preference = evaluation.difference, evaluation.preference
    if (
        preference is None
        or not preference.pairs
        or difference is None
        or difference.loss <= _MAX_LOGP_DROP
    ):
        return None
    option = {"dpo": "--sft-weight", "orpo": "a lower --beta"}.get(objective, "--cpo-alpha")
    return (
        f"the chosen answers became less likely, by {difference.loss:.2f} nats per token, more "
        f"than {_MAX_LOGP_DROP:g}: try {option}, or a lower --lr"
    )


def next_try_line(
    evaluation: Evaluation, config: TrainConfig, result: InstructTrainResult, total_steps: int
) -> str | None:
    """Return what to try after a verdict, if the run shows it; `total_steps` is the
    length of the schedule.

    The chosen answers of pairs became less likely; or the run learned little, because it was short
    or its rate tiny; or its last validation was the best, so that it was still learning.
    """
    if evaluation.rewards:
        return _next_reward_line(evaluation, config, result)
    steps, last = len(result.steps), result.validations[-1:]
    learned = evaluation.verdict == HELPED and not evaluation.hardly
    difference, preference = evaluation.difference, evaluation.preference
    weightless = config.objective == "dpo" and not config.sft_weight and preference is not None
    if weightless and difference is not None and difference.low > 0:
        return "the chosen answers became less likely: try --sft-weight 1"
    tiny = config.peak_rate < _TINY_RATE_FRACTION * default_learning_rate(config.objective)
    if not learned and not config.auto and (tiny or total_steps < MIN_STEPS):
        why = (
            f"--lr {config.peak_rate:g} is tiny"
            if tiny
            else f"{pluralize(steps, 'step')} {'is' if steps == 1 else 'are'} too few"
        )
        return f"{why}: try --auto, which chooses the learning rate and the number of steps"
    best = result.best_step
    if best is not None and last and best == last[-1].step == steps and not result.stopped_early:
        more = f"--epochs {2 * config.epochs}"
        if config.max_steps is not None and steps >= config.max_steps:
            more = f"--max-steps {2 * config.max_steps}"
        return f"the last validation was the best, so more training may help: try {more}"
    return None


def _next_reward_line(
    evaluation: Evaluation, config: TrainConfig, result: InstructTrainResult
) -> str | None:
    """Return what to try if fewer answers are exact, or the greedy ones got no better rewards."""
    if any(each.name == EXACT and each.high < 0 for each in evaluation.rewards):
        return "fewer answers are exact than before: change --reward, or stay closer with --kl"
    if evaluation.verdict == HELPED or not result.steps:
        return None
    metrics = {
        key: fmean(step.metrics.get(key, 0.0) for step in result.steps)
        for key in (EQUAL_REWARDS, ROWS_WITHOUT_REWARD, MASKED_ROWS)
    }
    if untaught(metrics) > _MAX_UNTAUGHT and (why := NoGradient.of(metrics)):
        rows = f"for {why.fraction:.0%} of the rows, {why.reason}"
        return f"{rows}, so they taught nothing: {why.remedy}"
    if any(each.sampled and not each.name and each.low > 0 for each in evaluation.rewards):
        more = f"--epochs {2 * config.epochs}"
        if config.max_steps is not None:
            more = f"--max-steps {2 * config.max_steps}"
        return f"only the sampled answers got better, so more training may help: try {more}"
    return None


def _mean_loss(steps: Sequence[StepRecord]) -> float:
    weight = sum(step.weight for step in steps)
    return sum(step.loss * step.weight for step in steps) / max(weight, 1)


def summary_lines(view: RunView, config: TrainConfig) -> Iterator[str]:
    """Yield the summary of a run; that a reward may be exploited comes first."""
    yield from exploit_warning(view.changes)
    rates = f", {view.rows_per_second:.1f} rows/s" if view.rows_per_second else ""
    rates += f", {view.speed}" if rates and view.speed else ""
    predicted = f" (predicted {byte_size(size)})" if (size := view.predicted_memory) else ""
    yield f"{view.course}{rates}, peak memory {byte_size(view.peak_memory or 0)}{predicted}"
    shown = partial(loss_and_perplexity, objective=config.objective)
    if view.unrewarded_fraction:
        yield f"{view.unrewarded_fraction:.1%} of the sampled answers had no reward"
    if view.taught_nothing:
        yield view.taught_nothing.nothing_learned
    elif view.reward_change is not None:
        yield f"reward of sampled answers: {view.reward_change.sentence}"
        yield from gradient_warning(view.changes)
    elif view.train_loss is not None and not config.is_rewarded:
        yield f"training loss {shown(view.train_loss)} in the last epoch"
    before, last, best = view.initial_val_loss, view.last_val_loss, view.best_val_loss
    if before is not None and last is not None and best is not None:
        loss = "" if config.is_rewarded else "loss "
        yield (
            f"validation {loss}{shown(before)} before, {shown(last)} at the end, {shown(best)} at "
            f"best, after {view.best_place}"
        )
    if not view.improved:
        yield view.not_better
    if view.status == "stopped early":
        yield f"stopped early after step {view.step}: see --patience {config.patience}"
    rank = "worse than the starting model" if view.worsened else "the best"
    source = f"{view.best_place}, {rank}" if view.best_place else "the last epoch"
    yield f"adapter of {source}: {config.output_path}"
    yield f"checkpoints, metrics and ledger: {config.checkpoint_path}"


def quantized_base_lines(config: TrainConfig) -> Iterator[str]:
    """Yield lines on how to load a base model that was quantised while loading."""
    if config.quantize is None:
        return
    yield (
        f"trained on {config.model_path} quantised to {format_name(config.quantize)} while "
        "loading; mlx-lm would apply the adapter to the model in full precision, on which it was "
        "not trained"
    )
    same = f"--quantize {config.quantize}{' --double-quant' if config.double_quant else ''}"
    if config.quantize in _CONVERT_OPTIONS:
        model = shlex.quote(config.model_path)
        options = _CONVERT_OPTIONS[config.quantize]
        yield f"the same base for mlx-lm: mlx_lm.convert --hf-path {model} -q {options}"
    else:
        yield f"mlx-lm has no {config.quantize}: {same} loads the same base in mlxtune"


# The mlx_lm.convert options that match values of --quantize.
_CONVERT_OPTIONS = {
    "4": "--q-bits 4",
    "8": "--q-bits 8",
    "mxfp4": "--q-mode mxfp4",
    "nvfp4": "--q-mode nvfp4",
    "mxfp8": "--q-mode mxfp8",
}


def usage_line(config: TrainConfig, *, plain_text: bool = False) -> str:
    """Return a command that chats with the trained model or, for plain text, continues a prompt."""
    output = config.output_path
    adapter = shlex.quote(str(output.parent if output.name == ADAPTER else output))
    if plain_text:
        return f"mlxtune generate --adapter {adapter} --prompt 'Once upon a time'"
    return f"mlxtune chat --adapter {adapter}"


def python_usage(model_path: str, adapter: str) -> str:
    return (
        "from mlxtune import GenerateConfig, generate\n"
        f"generate(GenerateConfig(model_path={model_path!r}, adapter={adapter!r}, prompt='…')).text"
    )


def before_and_after(row: str, sample: Sample) -> Iterator[tuple[str, str]]:
    """Yield a row's last user message and the answers without and with the adapter, by heading."""
    questions = [
        message["content"] for message in json.loads(row)["messages"] if message["role"] == "user"
    ]
    for stage, text in (
        ("Question", questions[-1]),
        ("Before", sample.base),
        ("After", sample.adapted or ""),
    ):
        yield stage, " ".join(without_template_tokens(text).split())


def next_lines(run: TrainConfig) -> Iterator[str]:
    """Yield commands to type after the demo, for its model and for the user's own data."""
    model, adapter = shlex.quote(run.model_path), shlex.quote(str(run.output_path))
    yield (
        f"ask it: mlxtune generate --model-path {model} --adapter {adapter} "
        "--prompt 'Ella Hartwell here. Friday, half past seven, party of four.'"
    )
    yield (
        "your own model and data: mlxtune train --model-path mlx-community/Qwen3-0.6B-4bit "
        "--data chat.jsonl --auto --output out"
    )
    yield (
        'each line of chat.jsonl: {"messages": [{"role": "user", "content": "2 + 2?"}, '
        '{"role": "assistant", "content": "4"}]}'
    )
    yield (
        "started by uvx or pipx run? Type that before mlxtune here too, or uv tool install "
        f"{DISTRIBUTION} (in a clone: .)"
    )


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    functions = {
        "losses": loss_and_perplexity,
        "verdict": [] if evaluation.adapted is None else verdict_lines(evaluation),
        "answer": lambda text: _shortened(without_template_tokens(text)),
        "files": file_verdict_lines(evaluation),
        "last": partial(_shortened, from_end=True),
        "line": escape,
        "models": models_line,
        "most": _MAX_LISTED,
    }
    return render_lines("evaluation.txt", str, seen=evaluation, **functions)


def models_line(match: ExactMatch | KeyMatches | Matches, of: int) -> str:
    """Return each compared model's number of matches, with the fraction of `of` answers."""
    first = ("base", match.base) if match.against is None else ("against", match.against)
    models = [first, *([] if match.adapted is None else [("adapted", match.adapted)])]
    return ", ".join(f"{name} {number:,} ({number / of:.1%})" for name, number in models)


def _shortened(text: str, *, from_end: bool = False) -> str:
    shown = escape(text)
    if len(shown) <= _MAX_CHARS:
        return shown
    return f"…{shown[-_MAX_CHARS:]}" if from_end else f"{shown[:_MAX_CHARS]}…"


class ProfileSummary:
    """The profile of a run, accumulated as its records arrive."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.phases: dict[str, Phase] = {}

    def add(self, profile: StepProfile) -> None:
        self.steps += 1
        self.seconds += profile.seconds
        for name, phase in profile.phases.items():
            known_phase = self.phases.get(name)
            self.phases[name] = known_phase.plus(phase) if known_phase else phase


def profile_line(profile: StepProfile) -> str:
    fractions = ", ".join(
        f"{name} {phase.seconds / max(profile.seconds, 1e-12):.0%}"
        for name, phase in profile.phases.items()
    )
    highest = max(profile.phases, key=lambda name: profile.phases[name].peak_bytes)
    peak = byte_size(profile.phases[highest].peak_bytes)
    took = short_duration(profile.seconds)
    return f"step {profile.step}: {took}: {fractions}; peak {peak} in {highest}"


def profile_table(summary: ProfileSummary) -> Iterator[str]:
    if summary.steps:
        steps = pluralize(summary.steps, "step")
        yield f"{steps} profiled, {short_duration(summary.seconds / summary.steps)} a step"
        yield f"{'phase':<{_PHASE_WIDTH}}{'time':>10}{'percent':>8}{'takes':>10}{'peak':>10}"
        for name in (*PHASES, OTHER):
            if phase := summary.phases.get(name):
                time = f"{short_duration(phase.seconds / summary.steps):>10}"
                fraction = f"{phase.seconds / max(summary.seconds, 1e-12):>8.1%}"
                memory = f"{byte_size(phase.bytes):>10}{byte_size(phase.peak_bytes):>10}"
                yield f"{name:<{_PHASE_WIDTH}}{time}{fraction}{memory}"
