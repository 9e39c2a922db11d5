"""No token reaches a model whose embedding has no row for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxtune import TrainConfig
from mlxtune.backend.adapters import compare_logits
from mlxtune.backend.forward.forward import Forward
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.lora.lora_layers import DropoutKeys
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.token_array import TokenArrays
from mlxtune.backend.text.generate import Generator, Sampling, answer_prompts
from mlxtune.benchmark.peers import MlxLm
from mlxtune.core.data.encode import Example
from mlxtune.core.data.prompt import Prompt
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.micro_batch import collate
from mlxtune.core.steps.pack import pack
from mlxtune.errors import ModelError
from tests.backend.text.test_generate import Bytes
from tests.models import VOCAB_SIZE, write_model
from tests.sources import PACKAGE, nodes_of

GREEDY = Sampling(max_new_tokens=2)


def example(token: int, *, last: bool) -> Example:
    tokens = [1, 2, 3, token] if last else [1, token, 3, 4]
    return Example(1, np.array(tokens, np.int32), np.array([0, 1, 1, 1], np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def model(folder: Path) -> nn.Module:
    return load_base(folder, "float32").model


def forward(model: nn.Module) -> Forward:
    return Forward(model, DropoutKeys(), Execution(MLX), trains=False)


Use = Callable[[nn.Module, int], Any]
USES: dict[str, Use] = {
    "training": lambda model, token: forward(model).losses(collate([example(token, last=False)])),
    "packed": lambda model, token: forward(model).losses(pack([example(token, last=False)])),
    # The last token is only a label.
    "label": lambda model, token: forward(model).losses(collate([example(token, last=True)])),
    "packed label": lambda model, token: forward(model).losses(pack([example(token, last=True)])),
    "answer": lambda model, token: Generator(model, Bytes(), VOCAB_SIZE).answer(
        Prompt((1, token), None), GREEDY
    ),
    "answers": lambda model, token: answer_prompts(
        model, Bytes(), [Prompt((1, token), None), Prompt((1, 2), None)], GREEDY
    ),
    "logits": lambda model, token: compare_logits._logits(model, [1, token, 3], 1),
}


@pytest.mark.parametrize("token", [VOCAB_SIZE, 1_000_000, -1])
@pytest.mark.parametrize("use", USES)
def test_token_without_a_row_is_refused(model: nn.Module, use: str, token: int) -> None:
    USES[use](model, VOCAB_SIZE - 1)
    with pytest.raises(ModelError, match=rf"token {token:,}, but .* has {VOCAB_SIZE} rows: use"):
        USES[use](model, token)


def test_peer_gets_no_token_without_a_row(folder: Path) -> None:
    peer = MlxLm(folder, TrainConfig(str(folder), "data.jsonl", dtype="float32"))
    with pytest.raises(ModelError, match="has 320 rows"):
        peer.batch([example(VOCAB_SIZE, last=False)])


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ["embed_tokens", "wte", "unheard_of"])
def test_token_rows_come_from_the_input_embedding(name: str, bits: int | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wpe = nn.Embedding(12, 64)
            self.norm = nn.RMSNorm(999)
            self[name] = nn.Embedding(40, 64)

    model = Model()
    if bits is not None:
        nn.quantize(model, bits=bits)
    assert TokenArrays(model).rows == 40
    array = TokenArrays(model).array([[0, 39]])
    assert (array.tolist(), array.dtype) == ([[0, 39]], mx.int32)


# Arrays of numbers that are no tokens of a user, or that were checked on the way.
_OTHERS = {
    ("backend/cpu/blas_matmuls.py", "head.log_sums() - _right(weight, states, labels)[0]"),
    ("backend/forward/forward.py", "labels"),
    ("backend/forward/forward.py", "labels.reshape(-1)[positions]"),
    ("backend/forward/head.py", "self._inputs.texts.tokens"),
    ("backend/models/token_array.py", "self.check(tokens).astype(np.int32, copy=False)"),
    ("backend/models/packed.py", "tokens"),
}


def test_tokens_become_an_array_in_one_place() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), argument)
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
        if node.func.attr == "array" and ast.unparse(node.func) == "mx.array"
        for argument in [ast.unparse(node.args[0])]
        if re.search("token|ids|prompt|labels|inputs", argument) and "row_ids" not in argument
    }
    assert found == _OTHERS
