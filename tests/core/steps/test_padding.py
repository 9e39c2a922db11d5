"""Real chat data, and data of known lengths, packed into sequences."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from mlxtune.config import InspectConfig
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import forward_tokens
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.order import shuffled_steps
from mlxtune.core.steps.pack import StepLengths, pack, packed_micro_batches
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader
from tests.backend.text.turns import load_once
from tests.core.steps.epochs import LENGTHS, epoch_of
from tests.core.steps.shapes import GRAPH_OPERATIONS
from tests.slow import long_except

BATCH_SIZE, MAX_LENGTH, MAX_TOKENS, STEPS = 4, 512, 512, 300
NAMES = [
    *("fastchat_dummy", "gsm8k_train", "lf_alpaca_en_demo", "lf_glaive_toolcall_en"),
    *("lf_identity", "wikisql_train", "wikisql_valid"),
]


@functools.cache
def corpus_of(shared: Path, name: str) -> Corpus:
    """Return a file of real chat data in tokens of Qwen3."""
    folder = shared / "tokenizers" / "qwen3"
    config = InspectConfig(
        str(folder), str(shared / "chat" / f"{name}.jsonl"), max_seq_len=MAX_LENGTH, val_split=0
    )
    reader = Reader(config, folder)
    reader.tokenizer = load_once(folder)
    return load_dataset(config, reader).corpus


@pytest.mark.parametrize("name", long_except(NAMES, "lf_identity"))
def test_nothing_in_a_sequence_is_padding(shared: Path, name: str) -> None:
    corpus = corpus_of(shared, name)
    for step in shuffled_steps(corpus.num_rows, BATCH_SIZE, 42, 1)[:STEPS]:
        examples = [example for row in step for example in corpus.row(row)]
        run = 0
        for micro_batch in packed_micro_batches(StepLengths.of(examples), MAX_TOKENS, fixed=80):
            line = pack([examples[i] for i in micro_batch.examples])
            assert line.inputs.size == micro_batch.tokens == sum(map(len, line.segments))
            run += micro_batch.tokens
        assert run <= sum(map(forward_tokens, examples))


def test_every_file_of_real_chat_data_is_looked_at(shared: Path) -> None:
    assert sorted(path.stem for path in (shared / "chat").glob("*.jsonl")) == NAMES


@pytest.mark.parametrize("tokens_at_once", [2048, 8192])
@pytest.mark.parametrize("name", LENGTHS)
def test_no_work_is_added_to_an_epoch_on_a_gpu(name: str, tokens_at_once: int) -> None:
    execution = Execution(GRAPH_OPERATIONS, micro_batch_tokens=tokens_at_once, fixed_cost=512)
    needed = run = lines = 0
    for step in epoch_of(name):
        micro_batches = execution.micro_batches(StepLengths.of(step))
        run += sum(micro_batch.tokens for micro_batch in micro_batches)
        lines += len(micro_batches)
        # All tokens but the last of each row run; the shared prefix runs once per sequence.
        needed += sum(len(example) - 1 for example in step)
        needed -= LENGTHS[name][-1] * (len(step) - len(micro_batches))
    assert 250 <= lines < 1000
    assert run <= needed
