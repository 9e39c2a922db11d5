"""Rollouts with a fake policy and fake rewards: samples, advantages, records and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from mlxtune.backend.text.generate import Sampling
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config.objective_config import RewardedConfig
from mlxtune.core.data.corpus import Corpus, CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.data.prompt import PromptRow
from mlxtune.core.objectives.policy import SampledAnswer, SampledExample, SampleRequest
from mlxtune.core.run.checkpoint import Checkpoint
from mlxtune.core.run.sampled_answers import read_groups
from mlxtune.core.training.pipeline import Step
from mlxtune.errors import NonFiniteLossError, OutputError
from mlxtune.rewards.functions import parse_rewards
from mlxtune.rewards.rollouts import Prompts, Rollouts
from mlxtune.rewards.sample_checks import check_rollout
from mlxtune.rewards.samples import SampleRecords
from mlxtune.rewards.scoring import Reward

END = 0
# A checkpoint from before samples were recorded.
RESUMED = Checkpoint(Path(), {"step": 0})
SIZE = 3


@dataclass
class FakePolicy:
    """A policy whose answer's tokens are digits: the last seed, then the end unless it is 2."""

    asked: list[SampleRequest] = field(default_factory=list)
    passes: list[bool] = field(default_factory=list)
    passed: list[Example] = field(default_factory=list)
    adapter: str = "a"
    # Whether all answers are truncated.
    cuts: bool = False

    def sample(
        self,
        requests: Sequence[SampleRequest],
        sampling: Sampling,
        stop_tokens: frozenset[int],
        on_progress: Any,
    ) -> list[SampledAnswer]:
        assert stop_tokens == {END}
        self.asked += requests
        on_progress(len(requests), len(requests))
        found = []
        for request in requests:
            number = 1 if sampling.temperature == 0 else request.seeds[-1]
            finished = number != 2 and not self.cuts
            count = SIZE if self.cuts else number + 1
            tokens = (number + 1,) * count + ((END,) if finished else ())
            logps = tuple(-0.1 * (i + 1) for i in range(len(tokens)))
            found.append(SampledAnswer(tokens, logps, finished))
        return found

    def token_logps(
        self, examples: Sequence[Example], *, before_training: bool = False
    ) -> list[Any]:
        self.passes.append(before_training)
        self.passed += examples
        value = -3.0 if before_training else -2.0
        return [np.full(each.supervised, value, dtype=np.float32) for each in examples]

    def adapter_hash(self) -> str:
        return self.adapter


class FakeScorer:
    """Rewards the digit of an answer, which is its length, and gives none to a row of number 3."""

    def __init__(self) -> None:
        self.rewards = parse_rewards(["length"])
        self.scored: list[tuple[PromptRow, str]] = []
        self.equal_row, self.bonus, self.broken = 0, 0.0, False
        # The row of which an answer has no reward.
        self.bad_row = 3
        self.unrewarded_row = 0
        self.problem = "no"

    def score(self, row: PromptRow, text: str) -> Reward:
        self.scored.append((row, text))
        number = row.row["number"]
        if (
            self.broken
            or number == self.unrewarded_row
            or (number == self.bad_row and text == "11")
        ):
            problem = "broken" if self.broken else self.problem
            return Reward({"length": None}, None, (f"{row.place}: {problem}",))
        value = 1.0 if number == self.equal_row else float(text[0]) + 1 + self.bonus
        return Reward({"length": value}, value, ())


def rows() -> CorpusRows:
    examples = []
    for row in (1, 2, 3):
        tokens = np.array([*range(5, 6 + row), 9, 9, END], dtype=np.int32)
        mask = np.zeros(len(tokens), dtype=np.uint8)
        mask[-3:] = 1
        examples.append(Example(row, tokens, mask))
    return Corpus.of(examples).select()


def prompts(scorer: FakeScorer) -> Prompts:
    path = Path("rows.jsonl")
    read = {
        number: PromptRow(
            [{"role": "user", "content": f"q{number}"}], "99", {"number": number}, path, number
        )
        for number in (1, 2, 3)
    }
    # A corpus of examples has no paths.
    return Prompts({"": read}, lambda ids: [str(i - 1).encode() for i in ids], scorer)


@dataclass
class Made:
    rollouts: Rollouts
    policy: FakePolicy
    scorer: FakeScorer
    problems: list[str]

    def draw(self, number: int, indices: Sequence[int] = (0, 1)) -> tuple[list[Any], Any]:
        step = Step(number, 1, 0.1, list(indices))
        data = self.rollouts.examples_of(rows(), step, lambda done, total: None)
        return list(data.examples), data.metrics


def made(path: Path, workers: Workers = SINGLE_PROCESS, **options: Any) -> Made:
    policy, scorer, problems = FakePolicy(), FakeScorer(), list[str]()
    options = {"reward": ("length",), "max_new_tokens": SIZE, **options}
    config = RewardedConfig(group_size=SIZE, **options)
    rollouts = Rollouts(
        *(config, 42, policy, frozenset({END}), prompts(scorer)),
        *(SampleRecords(path, RESUMED), problems.append, workers),
    )
    return Made(rollouts, policy, scorer, problems)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "samples.jsonl.gz"


def test_samples_are_examples_behind_their_prompts(path: Path) -> None:
    own = made(path)
    examples, _ = own.draw(1)
    assert [each.row for each in examples] == [1] * SIZE + [2] * SIZE
    assert [each.tokens.tolist() for each in examples[:SIZE]] == [
        [5, 6, 1, END],
        [5, 6, 2, 2, END],
        [5, 6, 3, 3, 3],
    ]
    assert [each.assistant_mask.tolist() for each in examples[:2]] == [
        [0, 0, 1, 1],
        [0, 0, 1, 1, 1],
    ]
    assert examples[0].logps.tolist() == np.float32([-0.1, -0.2]).tolist()
    # Rewards are lengths, so the longest answer has the highest advantage.
    advantages = [each.advantage for each in examples[:SIZE]]
    assert advantages == pytest.approx([-1 / 1.0001, 0, 1 / 1.0001])
    assert examples[0].old_logps is None
    assert examples[0].reference_logps is None
    assert own.policy.passes == []


def test_reward_gets_the_text_without_the_end_and_the_row(path: Path) -> None:
    own = made(path)
    own.draw(1)
    assert [text for _, text in own.scorer.scored] == ["0", "11", "222"] * 2
    first = own.scorer.scored[0][0]
    assert (first.prompt, first.answer, first.row, first.place) == (
        *("q1", "99", {"number": 1}),
        "rows.jsonl:1",
    )


def test_seeds_name_the_step_the_row_its_use_and_the_sample(path: Path) -> None:
    own = made(path)
    own.draw(7, [1, 1])
    seeds = [each.seeds for each in own.policy.asked]
    key = rows()[1][-1].key
    assert seeds == [(42, 7, key, use, number) for use in (0, 1) for number in range(SIZE)]


def test_row_used_twice_is_two_groups(path: Path) -> None:
    examples, _ = made(path).draw(1, [1, 1])
    assert len({each.key for each in examples}) == 2


def test_sample_without_a_reward_is_masked_and_reported(path: Path) -> None:
    own = made(path)
    examples, metrics = own.draw(1, [2])
    assert [each.masked for each in examples] == [False, True, False]
    assert own.problems == ["rows.jsonl:3: no"]
    assert metrics["completions/without_reward"] == pytest.approx(1 / 3)
    assert metrics["reward"] == 2


def test_several_samples_without_a_reward_are_reported_together(path: Path) -> None:
    own = made(path)
    own.draw(1, [2, 2])
    assert own.problems == ["2 of 6 answers have no reward; the first: rows.jsonl:3: no"]


def test_first_step_without_any_reward_ends_the_run(path: Path) -> None:
    own = made(path)
    own.scorer.broken = True
    with pytest.raises(NonFiniteLossError, match=r"no answer of step 1 .*: rows.jsonl:1: broken: "):
        own.draw(1)


@pytest.mark.parametrize("updates", [1, 2])
def test_three_rollouts_in_a_row_without_any_reward_end_the_run(path: Path, updates: int) -> None:
    own, steps = made(path, updates=updates), iter(range(1, 99))

    def draw(broken: bool) -> None:
        own.scorer.broken = broken
        for _ in range(updates):
            own.draw(next(steps))

    for broken in (False, True, True, False, True, True):
        draw(broken)
    with pytest.raises(NonFiniteLossError, match="no answer of 3 rollouts in a row has a reward"):
        draw(broken=True)


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("first_equal", [1, 2, 3, 4])
def test_first_rollouts_without_a_gradient_are_reported_once(
    path: Path, updates: int, first_equal: int
) -> None:
    own = made(path, updates=updates)
    for step in range(1, 6 * updates + 1):
        own.scorer.equal_row = 1 if (step - 1) // updates + 1 >= first_equal else 0
        own.draw(step, [0])
    assert len(own.problems) == (first_equal == 1)
    if own.problems:
        assert own.problems[0].startswith("in the first 3 rollouts, all answers to each prompt got")


def test_first_rollouts_of_rows_without_any_reward_ask_to_fix_the_reward(path: Path) -> None:
    own = made(path)
    own.scorer.equal_row, own.scorer.unrewarded_row = 1, 2
    metrics = [own.draw(step, [0, 1, 1])[1] for step in (1, 2, 3)]
    assert own.problems[-1] == (
        "in the first 3 rollouts, nothing was learned, and for 67% of the rows, no answer had a "
        "reward: fix the reward, which mlxtune reward tries on rows"
    )
    assert {each["frac_without_reward"] for each in metrics} == {2 / 3}
    assert {each["frac_reward_zero_std"] for each in metrics} == {1.0}
    assert "frac_without_reward" not in own.draw(4, [0, 2])[1]


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_first_rollouts_whose_answers_are_all_masked_are_reported(path: Path, kl: float) -> None:
    """Their rewards differ, so TRL's metric is 0."""
    own = made(path, mask_truncated=True, kl=kl)
    own.policy.cuts, own.scorer.equal_row = True, 1
    drawn = [own.draw(step, [0, 1, 1, 1]) for step in (1, 2, 3)]
    assert not any(each.has_gradient for examples, _ in drawn for each in examples)
    assert own.problems == [
        "in the first 3 rollouts, nothing was learned, and for 75% of the rows, the answers that "
        "would teach were truncated: raise --max-new-tokens, or leave out --mask-truncated"
    ]
    assert {each["frac_masked"] for _, each in drawn} == {3 / 4}
    assert {each["frac_reward_zero_std"] for _, each in drawn} == {1 / 4}
    own.policy.cuts = False
    assert "frac_masked" not in own.draw(4)[1]


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("cuts", [False, True])
def test_examples_records_passes_and_checks_agree_on_the_gradient(
    path: Path, mask_truncated: bool, kl: float, cuts: bool
) -> None:
    """The rows have equal rewards, different rewards, and a sample without a reward."""
    options: dict[str, Any] = {"mask_truncated": mask_truncated, "kl": kl, "updates": 2}
    own = made(path, **options)
    own.policy.cuts, own.scorer.equal_row = cuts, 1
    examples, _ = own.draw(1, [0, 1, 2])
    options |= {"reward": ("length",), "max_new_tokens": SIZE, "group_size": SIZE}
    groups, config = list(read_groups(path)), RewardedConfig(**options)
    check_rollout(groups, config, 42)
    samples = [sample for group in groups for sample in group.samples]
    found = [
        (example.has_gradient, sample.has_gradient(config), sample.old_logps is not None)
        for example, sample in zip(examples, samples, strict=True)
    ]
    expected = [
        sample.reward is not None
        and (sample.finished or not mask_truncated)
        and (sample.advantage != 0 or kl > 0)
        for sample in samples
    ]
    assert found == [(each, each, each) for each in expected]
    assert [each.masked for each in examples] == [sample.is_masked(config) for sample in samples]


def test_remedy_for_functions_that_raise_is_given_once(path: Path) -> None:
    own = made(path)
    own.scorer.problem = "reward f: raised ValueError: bad (line 2)"
    for step in (1, 2):
        own.draw(step, [0, 2])
    assert own.problems == [
        f"rows.jsonl:3: {own.scorer.problem}: return 0 if such an answer is wrong",
        f"rows.jsonl:3: {own.scorer.problem}",
    ]


def test_truncated_answer_is_masked_with_the_option(path: Path) -> None:
    examples, metrics = made(path, mask_truncated=True).draw(1)
    assert [each.masked for each in examples] == [False, False, True] * 2
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)


def test_metrics_have_the_names_of_trl(path: Path) -> None:
    _, metrics = made(path).draw(1)
    assert metrics == pytest.approx(
        {
            "rewards/length/mean": 2.0,
            "rewards/length/std": np.std([1, 2, 3] * 2, ddof=1),
            "reward": 2.0,
            "reward_std": np.std([1, 2, 3] * 2, ddof=1),
            "frac_reward_zero_std": 0.0,
            "completions/mean_length": 8 / 3,
            "completions/clipped_ratio": 1 / 3,
            "completions/without_reward": 0.0,
        }
    )


def test_updates_use_the_same_samples_and_the_first_log_probabilities(path: Path) -> None:
    own = made(path, updates=2, kl=0.1)
    first, second = own.draw(3)[0], own.draw(4)[0]
    assert len(own.policy.asked) == 2 * SIZE
    assert own.policy.passes == [False, True]
    for one, other in zip(first, second, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert set(other.old_logps.tolist()) == {-2.0}
        assert set(other.reference_logps.tolist()) == {-3.0}
    own.draw(5)
    assert len(own.policy.asked) == 4 * SIZE
    assert [each.step for each in read_groups(path)] == [3, 3, 5, 5]


class InThreads(Workers):
    """Workers in threads, which exchange texts."""

    def __init__(self, rank: int, size: int, barrier: Barrier, texts: list[str]) -> None:
        super().__init__()
        self.rank, self.world_size = rank, size
        self._barrier, self._texts = barrier, texts

    def all_gather_text(self, own: str) -> list[str]:
        self._texts[self.rank] = own
        self._barrier.wait(60)
        found = list(self._texts)
        self._barrier.wait(60)
        return found

    def broadcast_bytes(self, own: bytes) -> bytes:
        return self.all_gather_text(own.decode())[0].encode()


@pytest.mark.parametrize("indices", [[0, 1, 2], [1], [2, 2]], ids=str)
def test_workers_divide_the_rows_and_get_the_same_step(path: Path, indices: list[int]) -> None:
    options = {"updates": 2, "scale_rewards": "batch"}
    alone, barrier, texts = made(path, **options), Barrier(2), ["", ""]
    paths = [path.with_name(f"{rank}.gz") for rank in range(2)]

    def start() -> list[Made]:
        return [
            made(each, InThreads(rank, 2, barrier, texts), **options)
            for rank, each in enumerate(paths)
        ]

    workers = start()
    chosen = rows().only(np.array([0, 1]))

    def evaluate(own: Made) -> Any:
        return own.rollouts.evaluate(chosen, lambda *each: None)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda own: own.draw(1, indices), workers))
        # A run that is resumed reads the samples of the first worker.
        resumed = start()
        again = list(pool.map(lambda own: own.draw(2, indices), resumed))
        evaluated = [each[0] for each in pool.map(evaluate, workers)]
    expected, metrics = alone.draw(1, indices)
    for examples, each in (*found, *again):
        assert same(examples, expected)
        assert each == metrics
    assert paths[0].read_bytes() == path.read_bytes()
    assert not paths[1].exists()
    asked = [len(own.policy.asked) for own in workers]
    assert evaluated == [evaluate(alone)[0]] * 2
    assert sum(asked) == len(alone.policy.asked)
    assert max(asked) < sum(asked) or len(indices) == 1
    assert all(own.policy.asked == [] for own in resumed)
    assert [own.problems for own in workers] == [alone.problems] * 2


def test_workers_share_the_values_of_rewards_that_vary(path: Path) -> None:
    barrier, texts = Barrier(2), ["", ""]
    workers = [
        made(path.with_name(f"{rank}.gz"), workers=InThreads(rank, 2, barrier, texts))
        for rank in range(2)
    ]
    workers[1].scorer.bonus = 0.25
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda own: own.draw(1)[0], workers)
    assert same(one, other)
    groups = list(read_groups(path.with_name("0.gz")))
    assert [group.samples[0].reward for group in groups] == [1, 1.25]


@pytest.mark.parametrize(
    ("options", "old", "reference"),
    [({"updates": 2}, 4, 0), ({"kl": 0.1}, 0, 8), ({"updates": 2, "kl": 0.1}, 8, 8)],
)
def test_only_samples_that_need_them_run_for_log_probabilities(
    path: Path, options: dict[str, Any], old: int, reference: int
) -> None:
    """The first group has equal rewards, one sample of the last has none, and rewards are 1 to 3.

    The middle sample of a group has the mean reward, and so no advantage either.
    """
    own = made(path, **options)
    own.scorer.equal_row = 1
    examples, _ = own.draw(1, [0, 1, 2])
    assert sum(each.old_logps is not None for each in examples) == old
    assert sum(each.reference_logps is not None for each in examples) == reference
    assert len(own.policy.passed) == old + reference
    needed = [each for each in examples if each.has_gradient]
    assert len(needed) == (8 if options.get("kl") else 4)
    if old:
        assert all(each.old_logps is not None for each in needed)


def same(one: list[SampledExample], other: list[SampledExample]) -> bool:
    return all(
        np.array_equal(a.tokens, b.tokens)
        and a.advantage == b.advantage
        and np.array_equal(a.logps, b.logps)
        and np.array_equal(a.old_logps, b.old_logps)
        and a.key == b.key
        for a, b in zip(one, other, strict=True)
    )


def test_resumed_run_reads_the_samples_of_a_step(path: Path) -> None:
    own = made(path, updates=2)
    own.draw(1)
    expected, metrics = own.draw(3)
    resumed = made(path, updates=2)
    resumed.policy.adapter = "after the first update"
    found, again = resumed.draw(4)
    assert same(found, expected)
    assert again == metrics
    assert resumed.policy.asked == []
    assert resumed.scorer.scored == []


@pytest.mark.parametrize("is_broken", [False, True], ids=["one answer", "all answers"])
@pytest.mark.parametrize(
    "options",
    [{}, {"updates": 2}, {"kl": 0.1}, {"updates": 2, "kl": 0.1, "scale_rewards": "batch"}],
    ids=str,
)
def test_recorded_samples_without_a_reward_are_rewarded_again(
    path: Path, options: dict[str, Any], is_broken: bool
) -> None:
    whole, failed = (made(each, **options) for each in (path.with_name("whole.gz"), path))
    whole.scorer.bad_row, failed.scorer.broken = 0, is_broken
    with suppress(NonFiniteLossError):
        failed.draw(1, [0, 2])
    resumed = made(path, **options)
    resumed.scorer.bad_row = 0
    expected, metrics = whole.draw(1, [0, 2])
    found, again = resumed.draw(1, [0, 2])
    assert same(found, expected)
    assert again == metrics
    assert resumed.policy.asked == [] and resumed.problems == []
    assert len(resumed.scorer.scored) == (2 * SIZE if is_broken else 1)
    assert path.read_bytes() == path.with_name("whole.gz").read_bytes()


def test_workers_reward_recorded_samples_again_together(path: Path) -> None:
    barrier, texts = Barrier(2), ["", ""]
    paths = [path, path.with_name("other.gz")]

    def start(bad_row: int) -> list[Made]:
        own = [made(each, InThreads(i, 2, barrier, texts)) for i, each in enumerate(paths)]
        for each in own:
            each.scorer.bad_row = bad_row
        return own

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda own: own.draw(1, [0, 2]), start(3)))
        one, other = pool.map(lambda own: own.draw(1, [0, 2]), start(0))
    assert same(one[0], other[0])
    assert one[1] == other[1]
    assert not any(sample.problems for each in read_groups(path) for sample in each.samples)


def test_samples_that_still_have_no_reward_stay_on_record(path: Path) -> None:
    """So do later rollouts, although adding one removes them."""
    own = made(path)
    for step in (1, 2):
        own.draw(step, [2])
    content = path.read_bytes()
    resumed = made(path)
    resumed.draw(1, [2])
    assert path.read_bytes() == content
    assert resumed.problems == ["rows.jsonl:3: no"]
    resumed.draw(2, [2])
    assert resumed.policy.asked == []


@pytest.mark.parametrize("updates", [1, 2])
def test_first_step_after_a_resume_without_any_reward_ends_the_run(
    path: Path, updates: int
) -> None:
    made(path, updates=updates).draw(1)
    for _ in range(2):  # the samples are on record now
        resumed = made(path, updates=updates)
        resumed.scorer.broken = True
        # The rewards of this step are on record, so they are no sign that functions work.
        resumed.draw(1)
        with pytest.raises(NonFiniteLossError, match="no answer of step 3 has a reward"):
            resumed.draw(3)


def test_resume_within_the_updates_on_samples_without_a_reward_trains_on(path: Path) -> None:
    own = made(path, updates=2)
    own.draw(1)
    own.scorer.broken = True
    own.draw(3)
    content = path.read_bytes()
    examples, _ = made(path, updates=2).draw(4)
    assert all(each.masked for each in examples)
    assert path.read_bytes() == content


def test_missing_samples_of_a_step_are_an_error(path: Path) -> None:
    with pytest.raises(OutputError, match="has none of step 3"):
        made(path, updates=2).draw(4)


def test_samples_of_another_adapter_are_drawn_again(path: Path) -> None:
    made(path).draw(1)
    resumed = made(path)
    resumed.policy.adapter = "b"
    resumed.draw(1)
    assert len(resumed.policy.asked) == 2 * SIZE
    assert {each.adapter for each in read_groups(path)} == {"b"}


def test_running_step_ends_before_the_policy_samples(path: Path) -> None:
    own, calls = made(path), list[tuple[int, int]]()
    own.rollouts.examples_of(rows(), Step(1, 1, 0.1, [0]), lambda *each: calls.append(each))
    assert calls == [(0, SIZE), (SIZE, SIZE)]


def test_evaluation_is_the_negative_mean_reward_of_greedy_answers(path: Path) -> None:
    own = made(path)
    result, files = own.rollouts.evaluate(rows().only(np.array([0, 1])), lambda *each: None)
    assert result.avg_loss == -2
    assert result.metrics["rewards/length/mean"] == 2
    assert files == []
    assert [text for _, text in own.scorer.scored] == ["11", "11"]


def test_evaluation_has_the_mean_reward_of_each_file_even_without_a_path(path: Path) -> None:
    own, examples = made(path), rows().examples_of([0, 1])
    own.scorer.equal_row = 2
    two_files = Corpus.of([replace(each, file=i) for i, each in enumerate(examples)]).select()
    result, files = own.rollouts.evaluate(two_files, lambda *each: None)
    assert result.avg_loss == -1.5
    assert [(each.path, each.val_loss) for each in files] == [("file 1", -2), ("file 2", -1)]


def test_evaluation_without_any_reward_is_an_error(path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match=r"no answer .*: rows.jsonl:3: no"):
        made(path).rollouts.evaluate(rows().only(np.array([2])), lambda *each: None)
