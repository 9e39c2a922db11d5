"""The memory that a layer keeps for its backward pass, from models of 2 and 6 layers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3

from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from tests.slow import long, slow


def kept(layers: int, tokens: int, fraction: float) -> int:
    """Return the bytes that a forward pass keeps for its backward pass.

    The model has the shape of Qwen3 0.6B in float32, with widths scaled by `fraction`.
    """
    shape = {
        "hidden_size": int(1024 * fraction),
        "intermediate_size": int(3072 * fraction),
        "num_attention_heads": int(16 * fraction),
        "num_key_value_heads": int(8 * fraction),
        "num_hidden_layers": layers,
    }
    fixed = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e6}
    arguments = qwen3.ModelArgs(
        model_type="qwen3", vocab_size=64, head_dim=128, tie_word_embeddings=True, **fixed, **shape
    )
    mx.random.seed(0)
    model = qwen3.Model(arguments)
    config = InstructConfig(lora_rank=8, targets=("q_proj", "v_proj"))
    pipeline = InstructPipeline(model, config, execution=best_execution(0, kind="gpu"))
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    example = Example(1, np.arange(tokens, dtype=np.int32) % 64, mask)
    ((_, batch),) = pipeline._engine.micro_batches.iterate([example])
    parameters = pipeline.forward.trained.values()
    mx.eval(model.parameters(), parameters)
    inputs = pipeline._engine.inputs(batch, 1)
    (loss,), gradients = pipeline.forward.gradients(parameters, inputs, mx.array(1.0))
    before = mx.get_active_memory()
    mx.eval(loss)
    mx.synchronize()
    found = mx.get_active_memory() - before
    # The gradients are not evaluated, so they keep the values that they need in memory.
    assert gradients
    return found


@pytest.mark.parametrize(
    ("fraction", "tokens", "most"),
    [
        # Relative to its width, a narrow model keeps more: LoRA's arrays do not shrink.
        slow(1 / 4, (256, 512), 4_500),
        long(1, (128, 256), 16_600),
    ],
)
def test_layer_keeps_few_values_a_token(
    fraction: float, tokens: tuple[int, int], most: int
) -> None:
    few, many = tokens
    # The lower of two measurements: timing decides which buffers MLX reuses.
    least = {
        (layers, n): min(kept(layers, n, fraction) for _ in range(2))
        for layers in (2, 6)
        for n in tokens
    }
    a_token = [(least[6, n] - least[2, n]) / 4 / 4 / n for n in tokens]
    # Subtract attention's scores: only the CPU keeps them, and they grow with the length's square.
    scores = (a_token[1] - a_token[0]) / (many - few)
    assert a_token[0] - scores * few <= most, (a_token, scores)
