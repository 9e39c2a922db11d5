"""Rollouts: the model answers the prompts of a step, and its answers are rewarded and recorded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, compress, islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config.limits import SAMPLE_LIMITS, parse_json
from mlxtune.config.objective_config import RewardedConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.data.prompt import PromptRow, last_answer
from mlxtune.core.data.text_stream import text_of
from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.objectives.policy import (
    SampledAnswer,
    SampledExample,
    SampleRequest,
    advantages_of,
)
from mlxtune.core.run.checkpoint import WRITTEN_SAMPLES
from mlxtune.core.run.metrics import FileLoss, InstructBatchResult
from mlxtune.core.run.sampled_answers import (
    GroupRecord,
    NoGradient,
    SampleRecord,
    groups_in,
)
from mlxtune.core.steps.order import RolloutOfStep
from mlxtune.core.training.pipeline import OnProgress, Step, StepData
from mlxtune.errors import NonFiniteLossError, OutputError
from mlxtune.rewards.sample_checks import (
    check_rollout,
    sample_metrics,
    step_metrics,
)
from mlxtune.rewards.samples import SampleRecords
from mlxtune.rewards.scoring import RewardScorer, unrewarded_text, with_remedy

# A run ends after this many rollouts in a row without any reward.
_MAX_UNREWARDED_IN_A_ROW = 3
# A run warns if none of its first rollouts taught it anything.
_FIRST_ROLLOUTS = 3

T = TypeVar("T")
_Logps = npt.NDArray[np.float32]
_PerSample = list[tuple[float, ...] | None]


# A row, and the requests for answers to it.
Question = tuple[PromptRow, list[SampleRequest]]


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run's rows, whose answers `scorer` rewards.

    Their tokens are from the corpus, the rest as read: `rows` maps the name of a file, and a row's
    number in it, to the row. `token_bytes` returns the bytes of tokens.
    """

    rows: Mapping[str, Mapping[int, PromptRow]]
    token_bytes: Callable[[Sequence[int]], Sequence[bytes]]
    scorer: RewardScorer

    def row(self, rows: CorpusRows, index: int) -> PromptRow:
        path, number = rows.source(index)
        return self.rows[path][number]

    def tokens(self, rows: CorpusRows, index: int) -> tuple[int, ...]:
        """Return the tokens of the prompt: those before the row's last answer."""
        example = rows[index][-1]
        return tuple(example.tokens[: last_answer(example)[0]].tolist())

    def text(self, answer: SampledAnswer | SampleRecord) -> str:
        """Return an answer's text, without the token that ended it."""
        tokens = answer.tokens[: len(answer.tokens) - answer.finished]
        return text_of(self.token_bytes(tokens))

    def questions(self, rows: CorpusRows, count: int, seed: int, step: int) -> list[Question]:
        """Return requests for `count` answers to each row, which differ in each step."""
        questions = []
        for i, use in enumerate(_uses(rows)):
            tokens, key = self.tokens(rows, i), rows[i][-1].key
            seeds = [(seed, step, key, use, number) for number in range(count)]
            questions.append((self.row(rows, i), [SampleRequest(tokens, each) for each in seeds]))
        return questions

    def answer(
        self,
        questions: Sequence[Question],
        sample: Callable[[list[SampleRequest]], list[SampledAnswer]],
    ) -> list[list[SampleRecord]]:
        """Sample the requested answers to each row, and return them with their rewards."""
        answers = iter(sample([request for _, requests in questions for request in requests]))
        return [
            [self._reward(row, answer) for answer in islice(answers, len(requests))]
            for row, requests in questions
        ]

    def reward_again(self, row: PromptRow, sample: SampleRecord) -> SampleRecord:
        """Return a sample with new rewards; its log-probabilities of other passes are left out."""
        reward = self.scorer.score(row, sample.text) if sample.problems else None
        new = replace(sample, advantage=0.0, old_logps=None, reference_logps=None)
        if reward is None:
            return new
        return replace(new, rewards=reward.values, reward=reward.total, problems=reward.problems)

    def _reward(self, row: PromptRow, answer: SampledAnswer) -> SampleRecord:
        text = self.text(answer)
        reward = self.scorer.score(row, text)
        return SampleRecord(
            tokens=answer.tokens,
            logps=_shortest(answer.logps),
            text=text,
            finished=answer.finished,
            rewards=reward.values,
            reward=reward.total,
            problems=reward.problems,
        )


def sampling_of(config: RewardedConfig) -> Sampling:
    return Sampling(config.max_new_tokens, temperature=config.temperature, top_p=config.top_p)


class Rollouts:
    """Supplies steps with sampled answers, and evaluates rows by the rewards of greedy answers.

    Answers are recorded in `records` before they are trained on, and read from there if a resumed
    run needs them again. `on_problem` gets a sentence on answers without a reward. Of several
    `workers`, each answers a part of the rows, all get the same answers and rewards, and worker 0
    keeps the record.
    """

    def __init__(
        self,
        config: RewardedConfig,
        seed: int,
        policy: InstructPipeline,
        stop_tokens: frozenset[int],
        prompts: Prompts,
        records: SampleRecords,
        on_problem: Callable[[str], None],
        workers: Workers = SINGLE_PROCESS,
    ) -> None:
        self._workers = workers
        self.updates = config.updates
        self._config, self._seed = config, seed
        self._policy, self._sampling, self._stop_tokens = policy, sampling_of(config), stop_tokens
        self._prompts, self._records, self._on_problem = prompts, records, on_problem
        self._advised = False
        # Whether this process has computed rewards of a rollout.
        self._has_rewarded = False
        self._unrewarded_in_a_row = self._first_untaught = 0
        # The groups of the first rollouts, if they teach nothing.
        self._first_groups: list[GroupRecord] = []
        # The first step of the last rollout, and its groups.
        self._last: tuple[int, list[GroupRecord]] = 0, []

    def describe(self) -> Mapping[str, str]:
        return {"reward_hash": self._prompts.scorer.hash}

    def checkpoint_facts(self, step: int) -> Mapping[str, Any]:
        return {WRITTEN_SAMPLES: self._records.written(step)}

    # A step

    def examples_of(self, rows: CorpusRows, step: Step, on_progress: OnProgress) -> StepData:
        """Return the samples of a step's rows; several updates use the same samples.

        Raises NonFiniteLossError if no answer of the first rollout that this process rewards, or of
        three rollouts in a row, has a reward.
        """
        number, first = RolloutOfStep.of(step.number, self.updates)
        rows = rows.only(np.array(step.row_indices))
        if self._last[0] != first:
            had_rewarded = self._has_rewarded
            groups = self._rollout(rows, first, step.number == first, on_progress)
            is_first = self._has_rewarded and not had_rewarded
            self._stop_without_rewards(first, groups, is_first)
            self._warn_if_untaught(number, groups)
            self._last = first, groups
        groups = self._last[1]
        return StepData(self._examples(rows, groups), step_metrics(groups, self._config))

    def _stop_without_rewards(
        self, step: int, groups: Sequence[GroupRecord], is_first: bool
    ) -> None:
        samples = _samples(groups)
        if any(sample.reward is not None for sample in samples):
            self._unrewarded_in_a_row = 0
            return
        self._unrewarded_in_a_row += 1
        count, reason = self._unrewarded_in_a_row, samples[0].problems[0]
        if is_first or count >= _MAX_UNREWARDED_IN_A_ROW:
            steps = f"{count} rollouts in a row" if count > 1 else f"step {step}"
            raise NonFiniteLossError(
                f"no answer of {steps} has a reward; the first: {reason}: check --reward and the "
                "rows"
            )

    def _warn_if_untaught(self, number: int, groups: Sequence[GroupRecord]) -> None:
        """Warn once if the run has learned nothing in its first rollouts; `number` is a rollout."""
        config = self._config
        if number > _FIRST_ROLLOUTS or any(each.teaches(config) for each in _samples(groups)):
            return
        self._first_untaught += 1
        self._first_groups += groups
        if self._first_untaught == _FIRST_ROLLOUTS:
            why = NoGradient.of(step_metrics(self._first_groups, config))
            assert why is not None
            self._on_problem(f"in the first {_FIRST_ROLLOUTS} rollouts, {why.nothing_learned}")

    def _rollout(
        self, rows: CorpusRows, step: int, is_new: bool, on_progress: OnProgress
    ) -> list[GroupRecord]:
        """Return the groups of the rollout of a step: recorded ones, or new ones, then recorded."""
        adapter = None
        if is_new:
            # This also waits for the step that the policy still takes.
            on_progress(0, len(rows) * self._config.group_size)
            adapter = self._policy.adapter_hash()
        if recorded := self._read_record(step, adapter):
            self._check_recorded(rows, step, recorded)
            return self._reward_again(rows, recorded) if is_new else recorded
        if adapter is None:
            raise OutputError(
                f"the record of samples has none of step {step}, which the next step trains "
                "on: bring it back, or start over with --overwrite"
            )
        return self._complete(rows, self._draw(rows, step, adapter, on_progress))

    def _complete(self, rows: CorpusRows, groups: Sequence[GroupRecord]) -> list[GroupRecord]:
        """Add what follows from the rewards of all samples of a rollout, and record the rollout."""
        rewards = [[sample.reward for sample in group.samples] for group in groups]
        advantages = chain(*advantages_of(rewards, self._config.scale_rewards))
        samples = zip(_samples(groups), advantages, strict=True)
        groups = _with_samples(groups, [replace(each, advantage=own) for each, own in samples])
        groups = self._with_logps(rows, groups)
        if self._workers.rank == 0:
            self._records.add(groups)
        return groups

    def _read_record(self, step: int, adapter: str | None) -> list[GroupRecord]:
        """Return the recorded groups of a rollout that the given or any LoRA matrices sampled."""
        groups = self._records.read(step, adapter) if self._workers.rank == 0 else None
        content = b"".join(group.as_json() for group in groups or ())
        return groups_in(self._workers.broadcast_bytes(content))

    def _reward_again(self, rows: CorpusRows, recorded: list[GroupRecord]) -> list[GroupRecord]:
        """Return recorded groups with rewards for the samples of which functions failed, if any.

        Where the functions failed for a passing reason, the groups equal the groups of a run in
        which no function failed.
        """
        samples = _samples(recorded)
        if not any(sample.problems for sample in samples):
            return recorded
        prompts, self._has_rewarded = self._prompts, True
        answered = self._gather_answers(
            [
                [prompts.reward_again(prompts.row(rows, i), sample) for sample in group.samples]
                for i, group in self._own_part(list(enumerate(recorded)))
            ],
            len(recorded),
        )
        again = [sample for own in answered for sample in own]
        if all(one.rewards == other.rewards for one, other in zip(samples, again, strict=True)):
            return recorded
        return self._complete(rows, _with_samples(recorded, again))

    def _check_recorded(self, rows: CorpusRows, step: int, groups: Sequence[GroupRecord]) -> None:
        """Raise OutputError for samples that this run cannot have drawn for the rows of a step."""
        names = [spec.name for spec in self._prompts.scorer.rewards]
        try:
            check_rollout(groups, self._config, self._seed)
            if (groups[0].step, len(groups)) != (step, len(rows)):
                raise ValueError(f"has {len(groups)} rows, not {len(rows)}")
            for i, (use, group) in enumerate(zip(_uses(rows), groups, strict=True)):
                row, prompt = self._prompts.row(rows, i), self._prompts.tokens(rows, i)
                if (group.use, group.prompt, group.prompt_tokens) != (use, row.prompt, prompt):
                    raise ValueError(f"{group.row} is not the prompt of {row.place}")
                for each in group.samples:
                    if list(each.rewards) != names:
                        raise ValueError(f"a sample for {group.row} has other rewards")
                    if each.text != self._prompts.text(each):
                        raise ValueError(f"a sample for {group.row} has other tokens than its text")
        except ValueError as problem:
            raise self._records.error(step, problem) from problem

    def _draw(
        self, rows: CorpusRows, step: int, adapter: str, on_progress: OnProgress
    ) -> list[GroupRecord]:
        seed, prompts = self._seed, self._prompts
        questions = prompts.questions(rows, self._config.group_size, seed, step)
        answered = self._answer(questions, self._sampling, on_progress)
        self._has_rewarded = True
        return [
            GroupRecord(
                step=step,
                row=row.place,
                use=use,
                seed=seed,
                adapter=adapter,
                prompt=row.prompt,
                prompt_tokens=requests[0].prompt,
                samples=tuple(samples),
            )
            for (row, requests), use, samples in zip(questions, _uses(rows), answered, strict=True)
        ]

    def _answer(
        self, questions: Sequence[Question], sampling: Sampling, on_progress: OnProgress
    ) -> list[list[SampleRecord]]:
        """Return the rewarded answers to each row, without advantages."""

        def sample(requests: list[SampleRequest]) -> list[SampledAnswer]:
            return self._policy.sample(requests, sampling, self._stop_tokens, on_progress)

        return self._gather_answers(
            self._prompts.answer(self._own_part(questions), sample), len(questions)
        )

    def _own_part(self, values: Sequence[T]) -> Sequence[T]:
        """Return this worker's part of the values for each row."""
        return values[self._workers.rank :: self._workers.world_size]

    def _gather_answers(
        self, own: list[list[SampleRecord]], count: int
    ) -> list[list[SampleRecord]]:
        """Return the samples for `count` rows, of which each worker has its own part.

        A reward may differ between two calls, so no worker computes another's again.
        """
        workers = self._workers
        parts = [
            from_json(
                list[list[SampleRecord]],
                parse_json(part.encode(), SAMPLE_LIMITS, f"the answers of worker {worker}"),
            )
            for worker, part in enumerate(workers.all_gather_text(json.dumps(own, default=asdict)))
        ]
        answered = [parts[i % len(parts)][i // len(parts)] for i in range(count)]
        self._report([sample for samples in answered for sample in samples])
        return answered

    def _report(self, samples: Sequence[SampleRecord]) -> None:
        problems = [sample.problems[0] for sample in samples if sample.problems]
        if not problems:
            return
        text = problems[0]
        if len(problems) > 1:
            text = unrewarded_text(len(problems), len(samples), "answers", text)
        advised = text if self._advised else with_remedy(text)
        self._advised |= advised != text
        self._on_problem(advised)

    def _with_logps(self, rows: CorpusRows, groups: list[GroupRecord]) -> list[GroupRecord]:
        """Return groups with the log-probabilities that later updates and the divergence need.

        Without a divergence, samples without an advantage have no gradient and need none.
        """
        config, samples = self._config, _samples(groups)
        needed = [sample.has_gradient(config) for sample in samples]
        trained = list(compress(self._examples(rows, groups), needed))
        old: _PerSample = [None] * len(samples)
        reference = old
        if config.updates > 1:
            old = _spread(self._policy.token_logps(trained), needed)
        if config.kl:
            first = self._policy.token_logps(trained, before_training=True)
            reference = _spread(first, needed)
        new = zip(samples, old, reference, strict=True)
        return _with_samples(
            groups, [replace(each, old_logps=one, reference_logps=two) for each, one, two in new]
        )

    def _examples(self, rows: CorpusRows, groups: Sequence[GroupRecord]) -> list[SampledExample]:
        return [
            self._example(row[-1], group, sample)
            for row, group in zip(rows, groups, strict=True)
            for sample in group.samples
        ]

    def _example(self, row: Example, group: GroupRecord, sample: SampleRecord) -> SampledExample:
        lengths = [len(group.prompt_tokens), len(sample.tokens)]
        return SampledExample(
            row=row.row,
            tokens=np.array([*group.prompt_tokens, *sample.tokens], dtype=np.int32),
            assistant_mask=np.repeat(np.array([0, 1], dtype=np.uint8), lengths),
            file=row.file,
            use=group.use,
            advantage=sample.advantage,
            logps=np.array(sample.logps, dtype=np.float32),
            old_logps=_array(sample.old_logps),
            reference_logps=_array(sample.reference_logps),
            masked=sample.is_masked(self._config),
        )

    # An evaluation

    def evaluate(
        self, rows: CorpusRows, on_progress: OnProgress
    ) -> tuple[InstructBatchResult, list[FileLoss]]:
        """Return the negative mean reward of greedy answers as the loss.

        Raises NonFiniteLossError if no answer has a reward.
        """
        greedy = replace(self._sampling, temperature=0.0)
        questions = self._prompts.questions(rows, 1, self._seed, 0)
        answered = self._answer(questions, greedy, on_progress)
        losses = []
        for name, indices in rows.by_file():
            part = _evaluated([answered[i] for i in indices])
            losses.append(FileLoss(name, part.avg_loss, part.metrics))
        return _evaluated(answered), losses


def _samples(groups: Sequence[GroupRecord]) -> list[SampleRecord]:
    return [sample for group in groups for sample in group.samples]


def _with_samples(
    groups: Sequence[GroupRecord], samples: Sequence[SampleRecord]
) -> list[GroupRecord]:
    """Return groups with other samples, as many in each group as before."""
    new = iter(samples)
    return [replace(group, samples=tuple(islice(new, len(group.samples)))) for group in groups]


def _evaluated(answered: Sequence[Sequence[SampleRecord]]) -> InstructBatchResult:
    samples = [sample for samples in answered for sample in samples]
    metrics = sample_metrics(samples)
    if "reward" not in metrics:
        problems = [problem for sample in samples for problem in sample.problems]
        raise NonFiniteLossError(f"no answer to a validation row has a reward: {problems[0]}")
    loss, tokens = -metrics["reward"], sum(len(sample.tokens) for sample in samples)
    return InstructBatchResult(loss, tokens, perplexity(loss), metrics=metrics)


def _uses(rows: CorpusRows) -> list[int]:
    """Return, for each row of a step, how often an earlier place of the step uses it."""
    counts, uses = Counter[int](), []
    for index in rows.indices:
        uses.append(counts[index])
        counts[index] += 1
    return uses


def _spread(logps: Sequence[_Logps], needed: Sequence[bool]) -> _PerSample:
    """Return the log-probabilities of the needed samples, and None for the others."""
    own = iter(logps)
    return [_shortest(next(own).tolist()) if each else None for each in needed]


def _shortest(values: Sequence[float]) -> tuple[float, ...]:
    """Return 32-bit numbers with as few digits as tell them apart."""
    return tuple(float(str(np.float32(value))) for value in values)


def _array(values: Sequence[float] | None) -> _Logps | None:
    return None if values is None else np.array(values, dtype=np.float32)
