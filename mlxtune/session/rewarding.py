"""Connects a run's pipeline and rows with its rewards, for objectives that learn from rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.text.sampling import sample
from mlxtune.config import DataConfig
from mlxtune.config.objective_config import RewardedConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.problems import SkippedRows, path_text
from mlxtune.core.data.prompt import PromptRow, read_prompts
from mlxtune.core.data.text_stream import text_of
from mlxtune.core.evaluation.interval import Floats
from mlxtune.core.evaluation.matching import count_exact
from mlxtune.core.evaluation.outcome import EXACT, Evaluation, Generated, Sample, Unrewarded
from mlxtune.core.evaluation.verdict import JudgedRows, RowRewards, evaluate_rewards
from mlxtune.core.files.remembered import is_own
from mlxtune.core.objectives.policy import SampledAnswer, SampleRequest
from mlxtune.core.run.checkpoint import FILE_HASHES
from mlxtune.core.run.run_folder import REFERENCE_LORA, SAMPLE_RECORDS
from mlxtune.core.run.sampled_answers import SampleRecord
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.core.training.pipeline import StepSource
from mlxtune.errors import ModelError, NonFiniteLossError
from mlxtune.rewards.functions import NoRewardError, RewardSpec, parse_rewards
from mlxtune.rewards.rollouts import Prompts, Rollouts, sampling_of
from mlxtune.rewards.samples import SampleRecords
from mlxtune.rewards.scoring import RewardScorer, mean_of, unrewarded_text, with_remedy
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
    """A model's answers to rows, with their rewards: a greedy one to each, and sampled ones.

    `exact` says whether the greedy answer is the row's; None for a row without an answer.
    """

    greedy: Sequence[SampleRecord]
    sampled: Sequence[Sequence[SampleRecord]]
    exact: Sequence[bool | None]

    def means(self, name: str, sampled: bool) -> Floats:
        """Return each row's mean reward (R,), NaN for a row without one.

        Without a name, that is the weighted sum.
        """
        groups = self.sampled if sampled else [[each] for each in self.greedy]
        means = [
            mean_of(each.rewards[name] if name else each.reward for each in group)
            for group in groups
        ]
        return np.array(means, dtype=np.float64)

    @property
    def problems(self) -> list[str]:
        """Why each greedy answer has no reward; empty for an answer that has one."""
        return ["".join(each.problems[:1]) for each in self.greedy]


class RewardSession:
    """The rewards and prompts that training, evaluations and the verdict share.

    Files of rewards and the rows are read once, so a change of a file during a run changes nothing.
    The process of reward functions lives in the `with` block. Functions are called in `folder`, and
    `names` are the names of the data files in records. Raises ConfigError for rewards that cannot
    be used, and ModelError if only a text ends answers.
    """

    def __init__(
        self,
        session: Session[Any],
        config: RewardedConfig,
        folder: Path | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._session, self._config = session, config
        specs = parse_rewards(config.reward)
        for hint in filter(None, (spec.hint for spec in specs)):
            session.console.warn(hint)
        self._scorer = RewardScorer(specs, config.reward_timeout, folder)
        self._stop_tokens = _stop_tokens(session.reader)
        self._prompts = _read_prompts(session, self._scorer, names)
        self._names = [spec.name for spec in specs]

    def __enter__(self) -> Self:
        self._scorer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._scorer.__exit__(*error)

    def measure(
        self, rows: CorpusRows, loaded: LoadedModel, *, with_adapter: bool = True
    ) -> RewardedAnswers:
        """Answer rows with a loaded model, greedily and sampled, and compute the rewards."""
        console, seed = self._session.console, self._session.config.seed
        loaded.use_adapter(with_adapter)
        name = "the adapter" if with_adapter else "the base model"

        def answer(count: int, sampling: Sampling) -> list[list[SampleRecord]]:
            # No step has the number 0, so these samples are new.
            questions = self._prompts.questions(rows, count, seed, step=0)
            return self._prompts.answer(questions, partial(draw, sampling))

        def draw(sampling: Sampling, requests: list[SampleRequest]) -> list[SampledAnswer]:
            answers = sample(loaded.base.model, requests, sampling, self._stop_tokens, show)
            console.close()
            return answers

        def show(done: int, total: int) -> None:
            console.show(f"answering with {name}: {done:,} of {total:,}")

        sampling = sampling_of(self._config)
        greedy = [each for (each,) in answer(1, replace(sampling, temperature=0.0))]
        sampled = answer(min(self._config.group_size, _MAX_COMPARED), sampling)
        exact = [_is_exact(each.text, self._prompts.row(rows, i)) for i, each in enumerate(greedy)]
        return RewardedAnswers(greedy, sampled, exact)

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
        both = before, after
        rewards = [
            RowRewards(name, sampled, *(each.means(name, sampled) for each in both))
            # A single reward is the sum.
            for name in ("", *(self._names if len(self._names) > 1 else ()))
            for sampled in (False, True)
        ]
        if EXACT not in self._names:
            exact = (np.array(each.exact, dtype=np.float64) for each in both)
            rewards.append(RowRewards(EXACT, False, *exact))
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
            base=before.greedy[index].text,
            adapted=after.greedy[index].text,
            right=after.exact[index],
            against=before.greedy[index].text if against else None,
            against_right=before.exact[index] if against else None,
        )


class RunRewards(RewardSession):
    """The rewards of a run. Raises DataError if a run that resumes had other rewards."""

    def __init__(self, run: RunSession) -> None:
        super().__init__(run, run.config, run.reward_folder, run.context.files)
        if run.resume is not None:
            check_rewards(run.resume, self._scorer.hash)
        self._run = run

    def rollouts(self, pipeline: InstructPipeline) -> StepSource:
        """Return the source of the run's samples.

        Raises ModelError for a missing reference, and OutputError for a damaged record of samples.
        """
        run, config = self._run, self._run.config
        folder, warn = config.checkpoint_path, run.console.warn
        checkpoint = None if run.resume is None else run.resume.checkpoint
        if config.kl and checkpoint is not None:
            hashes = get_mapping(checkpoint.metadata, FILE_HASHES)
            pipeline.load_reference_lora(
                checkpoint.run / REFERENCE_LORA, hashes.get(REFERENCE_LORA)
            )
        records = SampleRecords(
            folder / SAMPLE_RECORDS, checkpoint, is_own=is_own(folder), on_problem=warn
        )
        return Rollouts(
            config,
            config.seed,
            pipeline,
            self._stop_tokens,
            self._prompts,
            records,
            warn,
            run.workers,
        )


def _unrewarded(before: Sequence[str], after: Sequence[str]) -> Unrewarded | None:
    """Count the rows without a reward by the problems of both answers to each row."""
    pairs = zip(before, after, strict=True)
    reasons = [reason for pair in pairs if (reason := pair[1] or pair[0])]
    if not reasons:
        return None
    early, late = (sum(map(bool, each)) for each in (before, after))
    return Unrewarded(len(reasons), len(before), early, late, reasons[0])


def _is_exact(text: str, row: PromptRow) -> bool | None:
    try:
        return bool(_EXACT(text, row.answer))
    except NoRewardError:
        return None


def _stop_tokens(reader: Reader) -> frozenset[int]:
    """Return the tokens that end an answer. Raises ModelError if only a text ends it."""
    if text := reader.turn_ends.text:
        raise ModelError(
            f"the template ends answers with the text {text!r}, which is not a token of the "
            "tokenizer: --objective grpo needs a --template that ends them with a token"
        )
    end = reader.unknown_end
    return reader.tokenizer.eos_ids | ({end} if end is not None else set())


def _read_prompts(
    session: Session[Any], scorer: RewardScorer, names: Sequence[str] | None
) -> Prompts:
    """Read the rows of the data files again, in the form that reward functions get.

    `names` are the files' names in records, if they are recorded.
    """
    config: DataConfig = session.config
    rows, files = {}, session.source.files.all
    for path, name in zip(files, names or map(path_text, files), strict=True):
        read = read_prompts(path, SkippedRows(path), format=config.format, fields=config.fields)
        rows[path_text(path)] = {each.number: replace(each, file=name) for each in read}
    return Prompts(rows, session.reader.tokenizer.token_bytes, scorer)
