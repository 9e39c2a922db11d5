"""The padding of real rows when packed batches are rounded up for a GPU."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest

from mlxtune.backend.device import default_device
from mlxtune.config import InspectConfig
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.order import shuffled_steps
from mlxtune.core.steps.pack import StepLengths
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader
from tests.core.steps.shapes import GRAPH_OPERATIONS
from tests.slow import long, slow

ROWS = {"wikisql_train": 128, "lf_alpaca_en_demo": 512}


@pytest.mark.parametrize("rows", [slow("wikisql_train"), long("lf_alpaca_en_demo")])
def test_rounded_lines_of_real_rows_have_at_most_3_percent_more_tokens(
    rows: str, shared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(shared / "tokenizers" / "qwen3", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with (shared / "chat" / f"{rows}.jsonl").open(encoding="utf-8") as lines:
        (tmp_path / "rows.jsonl").write_text("".join(islice(lines, ROWS[rows])), encoding="utf-8")
    data = str(tmp_path / "rows.jsonl")
    options = InspectConfig(str(folder), data, max_seq_len=512, val_split=0, no_cache=True)
    corpus = load_dataset(options, Reader(options, folder)).corpus
    assert corpus.num_rows == ROWS[rows]
    for rounding in (default_device._METAL, default_device._CUDA):
        how = Execution(GRAPH_OPERATIONS, micro_batch_tokens=2048, rounding=rounding)
        for batch_size in (4, 8):
            groups = []
            for step in shuffled_steps(corpus.num_rows, batch_size, 0, 1):
                groups += how.micro_batches(
                    StepLengths.of([each for row in step for each in corpus.row(row)])
                )
            added, tokens = (sum(getattr(g, name) for g in groups) for name in ("added", "tokens"))
            assert 0 < added <= 0.03 * (tokens - added)
            # Rounding must reduce the number of shapes.
            exact = {group.tokens - group.added for group in groups}
            assert len({group.tokens for group in groups}) < 0.8 * len(exact)
            assert all(group.width % rounding.width == 0 for group in groups)
