"""Checks the record of samples against a run's options, steps, rows and checkpoints.

What follows from the samples is computed again: advantages, weighted sums and metrics of steps.
"""

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from statistics import fmean

from mlxtune.config.objective_config import PolicyConfig, RewardedConfig, reward_weight
from mlxtune.core.files.reading import open_regular, read_json, read_own
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.formatting import pluralize
from mlxtune.core.objectives.policy import MAX_REWARD, advantages_of, deviation
from mlxtune.core.run.checkpoint import METRICS, WRITTEN_SAMPLES, Checkpoint
from mlxtune.core.run.metrics import (
    ADDED_METRICS,
    CLIPPED_RATIO,
    EQUAL_REWARDS,
    MASKED_ROWS,
    MEAN_LENGTH,
    REWARD,
    ROWS_WITHOUT_REWARD,
    WITHOUT_REWARD,
    StepRecord,
)
from mlxtune.core.run.progress import Progress
from mlxtune.core.run.run_folder import ABOUT, LEDGER, ROW_FILES, SAMPLE_RECORDS
from mlxtune.core.run.sampled_answers import GroupRecord, SampleRecord, groups_in, read_members
from mlxtune.core.run.stored_run import get_int, get_mapping, read_ledgers
from mlxtune.core.steps.order import RolloutOfStep

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_TOKEN = 2**31
# Rounding may make a log-probability larger than 0.
_MAX_LOGP = 1e-3
_PRECISION = 1e-9


# Metrics


def step_metrics(groups: Sequence[GroupRecord], config: PolicyConfig) -> dict[str, float]:
    """Return the metrics of a step that its samples alone decide."""
    samples = [sample for group in groups for sample in group.samples]
    equal = fmean(group.has_equal_rewards for group in groups)
    metrics = {**sample_metrics(samples), EQUAL_REWARDS: equal}
    left_out_if_0 = {
        ROWS_WITHOUT_REWARD: fmean(group.is_unrewarded for group in groups),
        MASKED_ROWS: fmean(group.is_masked(config) for group in groups),
    }
    return metrics | {name: value for name, value in left_out_if_0.items() if value}


def sample_metrics(samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Return TRL's metrics of samples, and the fraction of samples without a reward."""
    totals = [sample.reward for sample in samples if sample.reward is not None]
    values = {f"rewards/{name}": [s.rewards[name] for s in samples] for name in samples[0].rewards}
    metrics = {}
    for name, each in values.items():
        if numbers := [value for value in each if value is not None]:
            metrics[f"{name}/mean"], metrics[f"{name}/std"] = fmean(numbers), deviation(numbers)
    if totals:
        metrics |= {REWARD: fmean(totals), "reward_std": deviation(totals)}
    return metrics | {
        MEAN_LENGTH: fmean(len(sample.tokens) for sample in samples),
        CLIPPED_RATIO: fmean(not sample.finished for sample in samples),
        WITHOUT_REWARD: 1 - len(totals) / len(samples),
    }


# The samples of one step


def check_rollout(groups: Sequence[GroupRecord], config: RewardedConfig, seed: int) -> None:
    """Compare the samples of a step with the options, and compute their advantages again.

    Raises ValueError, which names the row, for the first contradiction.
    """
    step, adapter, uses = groups[0].step, groups[0].adapter, dict[str, int]()
    for group in groups:
        facts = (group.step, group.adapter, group.seed, group.use)
        if facts != (step, adapter, seed, uses.setdefault(group.row, 0)):
            raise ValueError(f"{group.row} has another step, adapter, seed or use than expected")
        uses[group.row] += 1
        if len(group.samples) != config.group_size or not group.prompt_tokens:
            raise ValueError(f"{group.row} has no prompt, or not {config.group_size} samples")
    rewards = [[sample.reward for sample in group.samples] for group in groups]
    weights = list(map(reward_weight, config.reward))
    advantages = advantages_of(rewards, config.scale_rewards)
    for group, expected in zip(groups, advantages, strict=True):
        for sample, advantage in zip(group.samples, expected, strict=True):
            try:
                _check_sample(sample, config, weights)
                if not _is_close(sample.advantage, advantage):
                    raise ValueError(
                        f"has advantage {sample.advantage:g}, but its rewards give {advantage:g}"
                    )
            except ValueError as problem:
                raise ValueError(f"a sample for {group.row} {problem}") from None


def _check_sample(sample: SampleRecord, config: RewardedConfig, weights: Sequence[float]) -> None:
    count, most = len(sample.tokens), config.max_new_tokens
    if not (0 < count <= most) or (count < most and not sample.finished):
        raise ValueError(f"has {pluralize(count, 'token')}, of at most {most:,}")
    if max(sample.tokens) >= _MAX_TOKEN:
        raise ValueError(f"has the token {max(sample.tokens)}")
    # Later updates and the divergence need log-probabilities where there is a gradient.
    trained = sample.has_gradient(config)
    for name, logps, needed in (
        ("log-probabilities", sample.logps, True),
        ("earlier log-probabilities", sample.old_logps, trained and config.updates > 1),
        ("reference's log-probabilities", sample.reference_logps, trained and config.kl > 0),
    ):
        if len(logps or ()) != count * needed:
            raise ValueError(f"has {len(logps or ())} {name} of {pluralize(count, 'token')}")
        if max(logps or (), default=0.0) > _MAX_LOGP:
            raise ValueError(f"has {name} above 0")
    _check_sum(sample, weights)


def _check_sum(sample: SampleRecord, weights: Sequence[float]) -> None:
    values, own, total = list(sample.rewards.values()), sample.reward, None
    if len(values) != len(weights):
        raise ValueError(f"has {pluralize(len(values), 'reward')}, but the run {len(weights)}")
    if None not in values:
        total = sum(weight * (value or 0.0) for weight, value in zip(weights, values, strict=True))
        total = total if abs(total) <= MAX_REWARD else None
    if own != total and (own is None or total is None or not _is_close(own, total)):
        raise ValueError(f"has reward {own}, but its weighted sum is {total}")
    if (sample.reward is None) != bool(sample.problems):
        raise ValueError("has a reward and a problem, or neither")


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=_PRECISION, abs_tol=_PRECISION)


# The whole record


def check_samples(run: Path, good: Sequence[Checkpoint], *, finished: bool) -> str:
    """Compare the record of a run with the checkpoints' hashes, with its steps and its data files.

    `good` are the intact checkpoints, the newest first. Returns the record's size in words. Raises
    OSError, or ValueError for the first contradiction.
    """
    path, options = run / SAMPLE_RECORDS, get_mapping(good[0].metadata, "config")
    _check_hashes(path, good)
    progress, files = Progress(), list[str]()
    with suppress(OSError, ValueError):  # other checks report the error
        progress = Progress.from_jsonl(read_own(run / METRICS))
        files += [ledger.path for ledger in read_ledgers(run / LEDGER)]
        # A run that resumed elsewhere keeps the names of its start.
        names = read_json(run / ABOUT).get(ROW_FILES)
        files += map(str, names if isinstance(names, list) else ())
    names = {field.name for field in fields(RewardedConfig)} & options.keys()
    config: RewardedConfig = from_json(RewardedConfig, {name: options[name] for name in names})
    seed = get_int(options, "seed") or 0
    expected, end, groups = _by_rollout(progress, config.updates), 0, 0
    with open_regular(path, links=False) as file:
        size = os.fstat(file.fileno()).st_size
        for step, _, end, content, _ in read_members(file):  # noqa: B007
            own = groups_in(content)
            try:
                check_rollout(own, config, seed)
                _check_places(own, files)
                # An unfinished run may have the samples of its next step.
                if finished or step != progress.step + 1:
                    _check_steps(own, expected.pop(step, None), config)
            except ValueError as problem:
                raise ValueError(f"step {step}: {problem}") from None
            groups += len(own)
    if finished and end < size:
        raise ValueError(f"has {pluralize(size - end, 'byte')} behind its last step")
    if expected:
        raise ValueError(f"lacks the samples of step {min(expected)}")
    return f"{groups * config.group_size:,} samples of {pluralize(groups, 'prompt')}"


def _check_hashes(path: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Compare the record up to each checkpoint with its hash there."""
    hashes = {0: sha256().hexdigest()}
    with open_regular(path, links=False) as file, suppress(ValueError):  # reported below
        for member in read_members(file, keep=0):
            hashes[member.end] = member.digest.hexdigest()
    for checkpoint in checkpoints:
        expected, name = get_mapping(checkpoint.metadata, WRITTEN_SAMPLES), checkpoint.folder.name
        size = get_int(expected, "bytes")
        if size is None or "sha256" not in expected:
            raise ValueError(f"cannot be confirmed: {name} lacks its hash")
        if hashes.get(size) != expected["sha256"]:
            raise ValueError(
                f"has changed: the hash of the samples up to step {checkpoint.step} is not that in "
                f"{name}"
            )


def _by_rollout(progress: Progress, updates: int) -> dict[int, list[StepRecord]]:
    """Return the records by the first step on the same samples; a skipped step has no record."""
    steps = range(1, progress.step + 1)
    records = {RolloutOfStep.of(step, updates).first: list[StepRecord]() for step in steps}
    for record in progress.steps:
        records[RolloutOfStep.of(record.step, updates).first].append(record)
    return records


def _check_places(groups: Sequence[GroupRecord], files: Sequence[str]) -> None:
    if not _SHA256.fullmatch(groups[0].adapter):
        raise ValueError("has no hash of the adapter that sampled")
    for group in groups:
        if files and not group.row.startswith(
            tuple(f"{each}{mark}" for each in files for mark in ":[")
        ):
            raise ValueError(f"{group.row} is in no file of the run")


def _check_steps(
    groups: Sequence[GroupRecord], records: Sequence[StepRecord] | None, config: RewardedConfig
) -> None:
    """Compare samples with the records of their steps: their rows, and their metrics by name."""
    if records is None:
        raise ValueError(f"is not a step of {METRICS}")
    metrics = {"rows": len(groups), **step_metrics(groups, config)}
    for record in records:
        recorded = {**record.metrics, "rows": record.rows}
        for name, own in metrics.items():
            other = recorded.get(name, own if name in ADDED_METRICS else None)
            if other is None or not _is_close(own, other):
                raise ValueError(f"has {name} {own:.6g}, but {METRICS} has {other}")
