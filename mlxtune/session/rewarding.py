"""Connects a run's pipeline and rows with its rewards, for objectives that learn from rewards."""

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.text.sampling import sample
from mlxtune.config import TrainConfig, as_path
from mlxtune.config.data_config import parse_fields
from mlxtune.config.objective_config import RewardedConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.data.problems import SkippedRows, shown
from mlxtune.core.data.prompt import read_prompts
from mlxtune.core.data.text_stream import text_of
from mlxtune.core.evaluation.interval import Floats
from mlxtune.core.evaluation.matching import count_exact
from mlxtune.core.evaluation.outcome import Evaluation, Generated, Sample
from mlxtune.core.evaluation.verdict import JudgedRows, RowRewards, evaluate_rewards
from mlxtune.core.files.reading import file_hash
from mlxtune.core.objectives.policy import SampledAnswer, SampleRequest
from mlxtune.core.run.checkpoint import RECORDS
from mlxtune.core.run.run_folder import INITIAL, SAMPLED
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.core.training.pipeline import OnProgress, StepSource
from mlxtune.errors import ModelError, NonFiniteLossError
from mlxtune.rewards.functions import parse_rewards
from mlxtune.rewards.rollouts import Prompts, Rollouts
from mlxtune.rewards.samples import SampleLedger
from mlxtune.rewards.scoring import Completion, Reward, RewardScorer
from mlxtune.session.reader import Reader
from mlxtune.session.run_session import RunSession
from mlxtune.session.trained_model import LoadedModel


@dataclass(frozen=True)
class RewardedAnswers:
    """A model's answers to rows: one greedy answer each, and sampled ones, with their rewards."""

    greedy: Sequence[str]
    rewards: Sequence[Reward]
    sampled: Sequence[Sequence[Reward]]

    def values(self, name: str, *, sampled: bool) -> Floats:
        """Return a row's mean of a reward, or of the sum without a name; NaN for a row without."""
        groups = self.sampled if sampled else [[reward] for reward in self.rewards]
        found = []
        for group in groups:
            values = [each.values[name] if name else each.total for each in group]
            known = [value for value in values if value is not None]
            found.append(fmean(known) if known else math.nan)
        return np.array(found)


def rewards_of(
    session: RunSession, rows: CorpusRows, loaded: LoadedModel, *, with_adapter: bool = True
) -> RewardedAnswers:
    """Answer rows with a loaded model, greedily and sampled, and compute the answers' rewards."""
    config, console, prompts = session.config, session.console, _prompts(session)
    loaded.use_adapter(with_adapter)
    name = "the adapter" if with_adapter else "the base model"
    ends, indices = _turn_ends(session.reader), range(len(rows))
    sampling = _sampling(config)

    def show(done: int, total: int) -> None:
        console.show(f"answering with {name}: {done:,} of {total:,}")

    def draw(requests: Sequence[SampleRequest], sampling: Sampling) -> list[SampledAnswer]:
        return sample(loaded.base.model, requests, sampling, ends, show)

    tokens = [prompts.tokens(rows, i) for i in indices]
    asked = [prompts.row(rows, i) for i in indices]
    size = config.group_size
    greedy = draw([SampleRequest(each, ()) for each in tokens], replace(sampling, temperature=0.0))
    # No step has the number 0, so these samples are new.
    requests = [
        SampleRequest(tokens[i], (config.seed, 0, rows[i][-1].key, 0, number))
        for i in indices
        for number in range(size)
    ]
    drawn = draw(requests, sampling)
    console.close()
    texts = [prompts.text(answer) for answer in (*greedy, *drawn)]
    repeated = [*asked, *(row for row in asked for _ in range(size))]
    completions = [Completion.of(row, text) for row, text in zip(repeated, texts, strict=True)]
    with _scorer(config) as scorer:
        scored = scorer.score(completions)
    first, rest = scored[: len(asked)], scored[len(asked) :]
    groups = [rest[i * size : (i + 1) * size] for i in indices]
    return RewardedAnswers(texts[: len(asked)], first, groups)


def compare_rewards(
    session: RunSession, loaded: LoadedModel, judged: JudgedRows, start: RewardedAnswers | None
) -> Evaluation:
    """Compare the rewards of a run's adapter with those before training.

    `start` has the answers of the adapter from which training started, if any. Raises
    NonFiniteLossError if no answer has a reward.
    """
    config, rows = session.config, judged.rows
    before = start or rewards_of(session, rows, loaded, with_adapter=False)
    after = rewards_of(session, rows, loaded)
    names = [spec.name for spec in parse_rewards(config.reward)]
    rewards = [
        RowRewards(name, sampled, *(each.values(name, sampled=sampled) for each in (before, after)))
        for name in ("", *(names if len(names) > 1 else ()))
        for sampled in (False, True)
    ]
    if (evaluation := evaluate_rewards(judged, rewards, config.seed)) is None:
        raise NonFiniteLossError("no answer to a validation row has a reward: check --reward")
    return replace(evaluation, generated=_generated(session, rows, before, after))


def _generated(
    session: RunSession, rows: CorpusRows, before: RewardedAnswers, after: RewardedAnswers
) -> Generated | None:
    """Return greedy answers to a few rows, for the run's page; None if the run asked for none."""
    config, prompts = session.config, _prompts(session)
    order = np.random.default_rng(config.seed).permutation(len(rows))[: config.samples]
    samples = []
    for index in sorted(order.tolist()):
        path, number = rows.source(index)
        row = prompts.row(rows, index)
        samples.append(
            Sample(
                path=path,
                row=number,
                prompt=text_of(prompts.spell(prompts.tokens(rows, index))),
                expected=row.answer or "",
                base=before.greedy[index],
                adapted=after.greedy[index],
                right=after.greedy[index] == row.answer if row.answer else None,
            )
        )
    return Generated(len(samples), count_exact(samples), samples) if samples else None


class PipelinePolicy:
    """The pipeline's model, which answers with the options of a run."""

    def __init__(self, pipeline: InstructPipeline, config: TrainConfig, reader: Reader) -> None:
        self._pipeline = pipeline
        self._sampling = _sampling(config)
        self._ends = _turn_ends(reader)

    def sample(
        self, requests: Sequence[SampleRequest], *, greedy: bool, on_progress: OnProgress
    ) -> list[SampledAnswer]:
        sampling = replace(self._sampling, temperature=0.0) if greedy else self._sampling
        return self._pipeline.sample(requests, sampling, self._ends, on_progress)

    def token_logps(
        self, examples: Sequence[Example], *, before_training: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        return self._pipeline.token_logps(examples, before_training=before_training)

    def adapter_hash(self) -> str:
        return self._pipeline.adapter_hash()


def _sampling(config: TrainConfig) -> Sampling:
    return Sampling(config.max_new_tokens, temperature=config.temperature, top_p=config.top_p)


def _scorer(config: TrainConfig) -> RewardScorer:
    return RewardScorer(parse_rewards(config.reward), config.reward_timeout)


def _turn_ends(reader: Reader) -> frozenset[int]:
    """Return the tokens that end an answer. Raises ModelError if only a text ends it."""
    if text := reader.turn_ends.text:
        raise ModelError(
            f"the template ends answers with the text {text!r}, which is no token of the "
            "tokenizer: --objective grpo needs a --template that ends them with a token"
        )
    end = reader.unknown_end
    return reader.tokenizer.eos_ids | ({end} if end is not None else set())


def rollouts_of(session: RunSession, pipeline: InstructPipeline, cleanup: ExitStack) -> StepSource:
    """Return the source of a run's samples.

    The process of reward functions ends when `cleanup` closes. Raises ConfigError for rewards that
    cannot be used, ModelError for a missing initial model, and OutputError for a damaged record of
    samples.
    """
    config, console = session.config, session.console
    if config.kl and session.resume is not None:
        checkpoint = session.resume.checkpoint
        hashes = get_mapping(checkpoint.metadata, RECORDS)
        pipeline.load_initial(checkpoint.folder.parent / INITIAL, hashes.get(INITIAL))
    return Rollouts(
        config.part(RewardedConfig),
        config.seed,
        PipelinePolicy(pipeline, config, session.reader),
        _prompts(session),
        cleanup.enter_context(_scorer(config)),
        SampleLedger(config.checkpoint_path / SAMPLED, resumed=session.resume is not None),
        console.warn,
        _reward_hash(config),
        session.workers,
    )


def _reward_hash(config: TrainConfig) -> str:
    """Return a hash of the rewards, with the content of their files."""
    parts = []
    for spec in parse_rewards(config.reward):
        file = as_path(spec.argument) if spec.kind == "json" and spec.argument else spec.file
        content = "" if file is None else file_hash(file)
        parts.append([spec.name, spec.weight, content])
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def _prompts(session: RunSession) -> Prompts:
    """Read the rows of the data files again, as rewards get them."""
    config, fields = session.config, parse_fields(session.config.field)
    rows = {}
    for path in session.source.files.all:
        read = read_prompts(path, SkippedRows(path), format=config.format, fields=fields)
        rows[shown(path)] = {each.number: each for each in read}
    return Prompts(rows, session.reader.tokenizer.spell)
