"""Connects a run's pipeline and rows with its rewards, for objectives that learn from rewards."""

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.text.sampling import sample
from mlxtune.config import TrainConfig, as_path
from mlxtune.config.data_config import parse_fields
from mlxtune.config.objective_config import RewardedConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.problems import SkippedRows, shown
from mlxtune.core.data.prompt import read_prompts
from mlxtune.core.data.text_stream import text_of
from mlxtune.core.evaluation.interval import Floats
from mlxtune.core.evaluation.matching import count_exact
from mlxtune.core.evaluation.outcome import EXACT, Evaluation, Generated, Sample
from mlxtune.core.evaluation.verdict import JudgedRows, RowRewards, evaluate_rewards
from mlxtune.core.files.reading import file_hash
from mlxtune.core.objectives.policy import SampledAnswer, SampleRequest
from mlxtune.core.run.checkpoint import RECORDS
from mlxtune.core.run.run_folder import INITIAL, SAMPLED
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.core.training.pipeline import StepSource
from mlxtune.errors import ModelError, NonFiniteLossError
from mlxtune.rewards.functions import NoReward, RewardSpec, parse_rewards
from mlxtune.rewards.rollouts import Prompts, Rollouts, sampling_of
from mlxtune.rewards.samples import SampleLedger
from mlxtune.rewards.scoring import Completion, Reward, RewardScorer
from mlxtune.session.reader import Reader
from mlxtune.session.run_session import RunSession
from mlxtune.session.session import Session
from mlxtune.session.trained_model import LoadedModel

# The most answers that are sampled to a row of a comparison: further rows narrow its interval more.
_MAX_COMPARED = 4
_EXACT = RewardSpec.parse(EXACT)


@dataclass(frozen=True)
class RewardedAnswers:
    """A model's answers to rows: one greedy answer each, and sampled ones, with their rewards.

    `exact` (R,) is 1 for a greedy answer that is the row's, NaN for a row without an answer.
    """

    greedy: Sequence[str]
    exact: Floats
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
    session: Session[Any],
    config: RewardedConfig,
    rows: CorpusRows,
    loaded: LoadedModel,
    *,
    with_adapter: bool = True,
) -> RewardedAnswers:
    """Answer rows with a loaded model, greedily and sampled, and compute the answers' rewards."""
    console, prompts = session.console, _prompts(session)
    loaded.use_adapter(with_adapter)
    name = "the adapter" if with_adapter else "the base model"
    ends, indices = _turn_ends(session.reader), range(len(rows))
    sampling = sampling_of(config)

    def show(done: int, total: int) -> None:
        console.show(f"answering with {name}: {done:,} of {total:,}")

    def draw(requests: Sequence[SampleRequest], sampling: Sampling) -> list[SampledAnswer]:
        return sample(loaded.base.model, requests, sampling, ends, show)

    tokens = [prompts.tokens(rows, i) for i in indices]
    asked = [prompts.row(rows, i) for i in indices]
    size = min(config.group_size, _MAX_COMPARED)
    greedy = draw([SampleRequest(each, ()) for each in tokens], replace(sampling, temperature=0.0))
    # No step has the number 0, so these samples are new.
    requests = [
        SampleRequest(tokens[i], (session.config.seed, 0, rows[i][-1].key, 0, number))
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
    pairs = zip(texts, asked, strict=False)
    exact = np.array([_is_exact(text, row.answer) for text, row in pairs])
    return RewardedAnswers(texts[: len(asked)], exact, first, groups)


def _is_exact(text: str, answer: str | None) -> float:
    try:
        return _EXACT.built_in()(text, answer)
    except NoReward:
        return math.nan


def compare_rewards(
    session: Session[Any],
    config: RewardedConfig,
    loaded: LoadedModel,
    judged: JudgedRows,
    start: RewardedAnswers | None,
    samples: int,
) -> Evaluation:
    """Compare the rewards of an adapter with the rewards before training.

    `start` has the answers of the adapter with which it is compared, if any. The result has the
    answers to at most `samples` rows. Raises NonFiniteLossError if no answer has a reward.
    """
    rows, seed, prompts = judged.rows, session.config.seed, _prompts(session)
    before = start or rewards_of(session, config, rows, loaded, with_adapter=False)
    after = rewards_of(session, config, rows, loaded)
    names = [spec.name for spec in parse_rewards(config.reward)]
    rewards = [
        RowRewards(name, sampled, *(each.values(name, sampled=sampled) for each in (before, after)))
        for name in ("", *(names if len(names) > 1 else ()))
        for sampled in (False, True)
    ]
    if EXACT not in names:
        rewards.append(RowRewards(EXACT, False, before.exact, after.exact))
    if (evaluation := evaluate_rewards(judged, rewards, seed)) is None:
        raise NonFiniteLossError("no answer to these rows has a reward: check --reward")
    order = np.random.default_rng(seed).permutation(len(rows))[:samples]
    shown = [_sample(prompts, judged, i, before, after) for i in sorted(order.tolist())]
    generated = Generated(len(shown), count_exact(shown), shown) if shown else None
    return replace(evaluation, generated=generated)


def _sample(
    prompts: Prompts,
    judged: JudgedRows,
    index: int,
    before: RewardedAnswers,
    after: RewardedAnswers,
) -> Sample:
    """Return the greedy answers to a row, for reports."""
    rows, against = judged.rows, judged.against is not None
    path, number = rows.source(index)
    return Sample(
        path=path,
        row=number,
        prompt=text_of(prompts.spell(prompts.tokens(rows, index))),
        expected=prompts.row(rows, index).answer or "",
        base=before.greedy[index],
        adapted=after.greedy[index],
        right=_known(after.exact[index]),
        against=before.greedy[index] if against else None,
        against_right=_known(before.exact[index]) if against else None,
    )


def _known(exact: float) -> bool | None:
    return None if math.isnan(exact) else bool(exact)


def _scorer(config: RewardedConfig) -> RewardScorer:
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
        pipeline,
        _turn_ends(session.reader),
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


def _prompts(session: Session[Any]) -> Prompts:
    """Read the rows of the data files again, as rewards get them."""
    config, fields = session.config, parse_fields(session.config.field)
    rows = {}
    for path in session.source.files.all:
        read = read_prompts(path, SkippedRows(path), format=config.format, fields=fields)
        rows[shown(path)] = {each.number: each for each in read}
    return Prompts(rows, session.reader.tokenizer.spell)
