"""Connects a run's pipeline and rows with its rewards, for objectives that learn from rewards."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.text.sampling import sample
from mlxtune.config.data_config import parse_fields
from mlxtune.config.objective_config import RewardedConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.problems import SkippedRows, shown
from mlxtune.core.data.prompt import read_prompts
from mlxtune.core.data.text_stream import text_of
from mlxtune.core.evaluation.interval import Floats
from mlxtune.core.evaluation.matching import count_exact
from mlxtune.core.evaluation.outcome import EXACT, Evaluation, Generated, Sample, Unrewarded
from mlxtune.core.evaluation.verdict import JudgedRows, RowRewards, evaluate_rewards
from mlxtune.core.files.remembered import is_own
from mlxtune.core.objectives.policy import SampledAnswer, SampleRequest
from mlxtune.core.run.checkpoint import RECORDS
from mlxtune.core.run.run_folder import INITIAL, SAMPLED, ResumePoint
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.core.training.pipeline import StepSource
from mlxtune.errors import ModelError, NonFiniteLossError
from mlxtune.rewards.functions import NoRewardError, RewardSpec, parse_rewards
from mlxtune.rewards.rollouts import Prompts, Rollouts, sampling_of
from mlxtune.rewards.samples import SampleRecords
from mlxtune.rewards.scoring import Completion, Reward, RewardScorer, unrewarded_text, with_remedy
from mlxtune.session.reader import Reader
from mlxtune.session.resuming import check_rewards
from mlxtune.session.run_session import RunSession
from mlxtune.session.session import Session
from mlxtune.session.trained_model import LoadedModel

# The most answers that are sampled to a row of a comparison: further rows narrow its interval more.
_MAX_COMPARED = 4
_EXACT = RewardSpec.parse(EXACT).built_in()


@dataclass(frozen=True)
class RewardedAnswers:
    """The rewards of a model's answers to rows: of greedy answers, with their texts, or sampled.

    `values` has the rewards (R,) of `sampled` answers or not by name, without a name the weighted
    sum: a row's mean, NaN for a row without one. `exact` (R,) is 1 for a greedy answer that is the
    row's, NaN for a row without an answer. `problems` says why a greedy answer has no reward, and
    is empty for an answer that has one.
    """

    greedy: Sequence[str]
    exact: Floats
    values: Mapping[tuple[str, bool], Floats]
    problems: Sequence[str]


class RewardSession:
    """The rewards and prompts that training, evaluations and the verdict share.

    Files of rewards and the rows are read once, so a change of a file during a run changes nothing.
    The process of reward functions ends when `cleanup` closes. Raises ConfigError for rewards that
    cannot be used, ModelError if only a text ends answers, and DataError if the run to `resume` had
    other rewards.
    """

    def __init__(
        self,
        session: Session[Any],
        config: RewardedConfig,
        cleanup: ExitStack,
        resume: ResumePoint | None = None,
    ) -> None:
        self._session, self._config = session, config
        specs = parse_rewards(config.reward)
        for hint in filter(None, (spec.hint for spec in specs)):
            session.console.warn(hint)
        self._scorer = RewardScorer(specs, config.reward_timeout)
        if resume is not None:
            check_rewards(resume, self._scorer.hash)
        self._ends, self._prompts = _turn_ends(session.reader), _read_prompts(session)
        names = [spec.name for spec in self._scorer.rewards]
        # A single reward is the sum.
        self._names = ["", *(names if len(names) > 1 else ())]
        cleanup.enter_context(self._scorer)

    def rollouts(self, session: RunSession, pipeline: InstructPipeline) -> StepSource:
        """Return the source of a run's samples.

        Raises ModelError for a missing initial model, and OutputError for a damaged record of
        samples.
        """
        config = session.config
        if config.kl and session.resume is not None:
            checkpoint = session.resume.checkpoint
            hashes = get_mapping(checkpoint.metadata, RECORDS)
            pipeline.load_initial(checkpoint.folder.parent / INITIAL, hashes.get(INITIAL))
        return Rollouts(
            self._config,
            config.seed,
            pipeline,
            self._ends,
            self._prompts,
            self._scorer,
            _records(session),
            session.console.warn,
            session.workers,
        )

    def measure(
        self, rows: CorpusRows, loaded: LoadedModel, *, with_adapter: bool = True
    ) -> RewardedAnswers:
        """Answer rows with a loaded model, greedily and sampled, and compute the rewards."""
        prompts, sampling, indices = self._prompts, sampling_of(self._config), range(len(rows))
        console, seed = self._session.console, self._session.config.seed
        loaded.use_adapter(with_adapter)
        name = "the adapter" if with_adapter else "the base model"

        def show(done: int, total: int) -> None:
            console.show(f"answering with {name}: {done:,} of {total:,}")

        def sample_answers(
            requests: Sequence[SampleRequest], sampling: Sampling
        ) -> list[SampledAnswer]:
            return sample(loaded.base.model, requests, sampling, self._ends, show)

        tokens = [prompts.tokens(rows, i) for i in indices]
        prompt_rows = [prompts.row(rows, i) for i in indices]
        size = min(self._config.group_size, _MAX_COMPARED)
        greedy = [SampleRequest(each, ()) for each in tokens]
        # No step has the number 0, so these samples are new.
        requests = [
            SampleRequest(tokens[i], (seed, 0, rows[i][-1].key, 0, number))
            for i in indices
            for number in range(size)
        ]
        answers = [
            *sample_answers(greedy, replace(sampling, temperature=0.0)),
            *sample_answers(requests, sampling),
        ]
        console.close()
        texts = list(map(prompts.text, answers))
        repeated = [*prompt_rows, *(row for row in prompt_rows for _ in range(size))]
        scored = self._scorer.score(list(map(Completion, repeated, texts)))
        greedy_ones = [[reward] for reward in scored[: len(rows)]]
        groups = [scored[i : i + size] for i in range(len(rows), len(scored), size)]
        exact = [_is_exact(text, row.answer) for row, text in zip(prompt_rows, texts, strict=False)]
        values = {
            (name, sampled): _means(groups if sampled else greedy_ones, name)
            for name in self._names
            for sampled in (False, True)
        }
        problems = ["".join(reward.problems[:1]) for reward in scored[: len(rows)]]
        return RewardedAnswers(texts[: len(rows)], np.array(exact), values, problems)

    def compare(
        self, loaded: LoadedModel, judged: JudgedRows, start: RewardedAnswers | None, samples: int
    ) -> Evaluation:
        """Compare the rewards of an adapter with the rewards before training.

        `start` has the answers of the adapter with which it is compared, if any. The result has the
        answers to at most `samples` rows. Raises NonFiniteLossError if no answer has a reward.
        """
        seed = self._session.config.seed
        before = start or self.measure(judged.rows, loaded, with_adapter=False)
        after = self.measure(judged.rows, loaded)
        rewards = [RowRewards(*key, before.values[key], after.values[key]) for key in after.values]
        if EXACT not in [spec.name for spec in self._scorer.rewards]:
            rewards.append(RowRewards(EXACT, False, before.exact, after.exact))
        without = _unrewarded(before.problems, after.problems)
        if (evaluation := evaluate_rewards(judged, rewards, seed)) is None:
            assert without is not None
            problem = "no row has a reward both before and after training; the first problem: "
            raise NonFiniteLossError(with_remedy(problem + without.reason))
        if without is not None:
            count = without.rows, without.total
            text = unrewarded_text(*count, "rows", without.reason)
            self._session.console.warn(with_remedy(text))
        order = np.random.default_rng(seed).permutation(len(judged.rows))[:samples]
        shown = [self._sample(judged, i, before, after) for i in sorted(order.tolist())]
        generated = Generated(len(shown), count_exact(shown), shown) if shown else None
        return replace(evaluation, generated=generated, unrewarded=without)

    def _sample(
        self, judged: JudgedRows, index: int, before: RewardedAnswers, after: RewardedAnswers
    ) -> Sample:
        """Return the greedy answers to a row, for reports."""
        rows, against = judged.rows, judged.against is not None
        path, number = rows.source(index)
        return Sample(
            path=path,
            row=number,
            prompt=text_of(self._prompts.token_bytes(self._prompts.tokens(rows, index))),
            expected=self._prompts.row(rows, index).answer or "",
            base=before.greedy[index],
            adapted=after.greedy[index],
            right=_as_bool(after.exact[index]),
            against=before.greedy[index] if against else None,
            against_right=_as_bool(before.exact[index]) if against else None,
        )


def _records(session: RunSession) -> SampleRecords:
    """Open the record of a run's samples.

    In another user's run, samples that no checkpoint vouches for are drawn again.
    """
    folder, resume = session.config.checkpoint_path, session.resume
    if resume is None:
        return SampleRecords(folder / SAMPLED, resumed=False)
    checkpoint = resume.checkpoint
    return SampleRecords(
        folder / SAMPLED,
        checkpoint=checkpoint,
        until=None if is_own(folder) else checkpoint.step,
        on_problem=session.console.warn,
    )


def _means(groups: Sequence[Sequence[Reward]], name: str) -> Floats:
    values = [[each.values[name] if name else each.total for each in group] for group in groups]
    rewarded = ([value for value in group if value is not None] for group in values)
    return np.array([fmean(each) if each else math.nan for each in rewarded])


def _unrewarded(before: Sequence[str], after: Sequence[str]) -> Unrewarded | None:
    """Count the rows without a reward by the problems of both answers to each row."""
    pairs = zip(before, after, strict=True)
    reasons = [reason for pair in pairs if (reason := pair[1] or pair[0])]
    if not reasons:
        return None
    early, late = (sum(map(bool, each)) for each in (before, after))
    return Unrewarded(len(reasons), len(before), early, late, reasons[0])


def _is_exact(text: str, answer: str | None) -> float:
    try:
        return _EXACT(text, answer)
    except NoRewardError:
        return math.nan


def _as_bool(exact: float) -> bool | None:
    return None if math.isnan(exact) else bool(exact)


def _turn_ends(reader: Reader) -> frozenset[int]:
    """Return the tokens that end an answer. Raises ModelError if only a text ends it."""
    if text := reader.turn_ends.text:
        raise ModelError(
            f"the template ends answers with the text {text!r}, which is no token of the "
            "tokenizer: --objective grpo needs a --template that ends them with a token"
        )
    end = reader.unknown_end
    return reader.tokenizer.eos_ids | ({end} if end is not None else set())


def _read_prompts(session: Session[Any]) -> Prompts:
    """Read the rows of the data files again, in the form that reward functions get."""
    config, fields = session.config, parse_fields(session.config.field)
    rows = {}
    for path in session.source.files.all:
        read = read_prompts(path, SkippedRows(path), format=config.format, fields=fields)
        rows[shown(path)] = {each.number: each for each in read}
    return Prompts(rows, session.reader.tokenizer.token_bytes)
