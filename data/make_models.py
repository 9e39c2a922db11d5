"""Train the two demo models from scratch, on the CPU, in about ten minutes each.

    python data/make_models.py             # data/demo-qwen3 and data/demo-gemma3

The folders have the layout that mlx-lm loads. Qwen 3's shape comes with a byte-level BPE
vocabulary as tokenizer.json; Gemma 3's with only a SentencePiece tokenizer.model.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS, which has to happen before mlx

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from demo_formats import (
    VOCAB_SIZE,
    Encode,
    Segments,
    chatml_segments,
    gemma_segments,
    make_gemma_tokenizer,
    make_qwen_tokenizer,
    write_json,
)
from make_chat import Messages
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gemma3_text, qwen3
from pretraining import conversations, repetitions

# These models learn copying slowest and need it most, so it gets its own steps first.
REPETITION_STEPS = 120
MAX_LENGTH = 160
BATCH_SIZE = 16
MUON_RATE = 0.03  # for the matrices of the layers
ADAM_RATE = 3e-3  # for the embedding and the norms
WARMUP_STEPS = 40

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **SHAPE,
    "hidden_act": "silu",
    "eos_token_id": VOCAB_SIZE - 1,
}
GEMMA_CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    **SHAPE,
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 64,
    "sliding_window_pattern": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": [1, 6],
}


@dataclass(frozen=True)
class Demo:
    folder: str
    architecture: Any  # a module of mlx_lm.models
    config: dict[str, Any]
    embedding_std: float  # to start with; Gemma multiplies its embedding by sqrt(hidden_size)
    make_tokenizer: Callable[[Path, list[str]], Encode]
    segments: Callable[[Messages], Segments]


DEMOS = (
    Demo("demo-qwen3", qwen3, QWEN_CONFIG, 0.1, make_qwen_tokenizer, chatml_segments),
    Demo("demo-gemma3", gemma3_text, GEMMA_CONFIG, 0.02, make_gemma_tokenizer, gemma_segments),
)
EncodedRow = tuple[list[int], list[bool]]  # tokens, and which of them are the assistant's


def encode_rows(encode: Encode, rows: Iterable[Segments]) -> list[EncodedRow]:
    """Return tokens and mask of each row that is not too long."""
    encoded: list[EncodedRow] = []
    for segments in rows:
        tokens: list[int] = []
        mask: list[bool] = []
        for text, assistant in segments:
            ids = encode(text)
            tokens += ids
            mask += [assistant] * len(ids)
        if len(tokens) <= MAX_LENGTH:
            encoded.append((tokens, mask))
    return encoded


def batches(rows: list[EncodedRow], seed: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield tokens_BxL and mask_BxL of rows of similar length, right-padded to multiples of 8."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    full = len(rows) - len(rows) % BATCH_SIZE
    groups = [rows[i : i + BATCH_SIZE] for i in range(0, full, BATCH_SIZE)]
    random.Random(seed).shuffle(groups)
    for group in groups:
        length = -(-len(group[-1][0]) // 8) * 8
        tokens_BxL = np.zeros((BATCH_SIZE, length), np.int32)
        mask_BxL = np.zeros((BATCH_SIZE, length), np.float32)
        for i, (tokens, mask) in enumerate(group):
            tokens_BxL[i, : len(tokens)] = tokens
            mask_BxL[i, : len(mask)] = mask
        yield mx.array(tokens_BxL), mx.array(mask_BxL)


def loss_fn(model: nn.Module, tokens_BxL: mx.array, mask_BxL: mx.array) -> mx.array:
    logits = model(tokens_BxL[:, :-1])
    losses = nn.losses.cross_entropy(logits, tokens_BxL[:, 1:])
    mask = mask_BxL[:, 1:]
    return (losses * mask).sum() / mask.sum()


def new_model(demo: Demo, seed: int) -> nn.Module:
    """Return a model with small random weights and norms that multiply by one."""
    mx.random.seed(seed)
    model = demo.architecture.Model(demo.architecture.ModelArgs.from_dict(demo.config))
    model.sanitize({})  # tells mlx-lm's Gemma 3 that its head is its embedding
    norm = 0.0 if demo.config["model_type"] == "gemma3_text" else 1.0  # Gemma's adds one itself

    def draw(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2:
            return mx.full(value.shape, norm)
        std = demo.embedding_std if "embed" in name else 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * demo.config["num_hidden_layers"])
        return mx.random.normal(value.shape) * std

    model.load_weights([(name, draw(name, v)) for name, v in tree_flatten(model.parameters())])
    mx.eval(model.parameters())
    return model


def new_optimizer(steps: int) -> optim.Optimizer:
    """Return Muon for the projections and AdamW for everything else.

    Muon needs a third of the steps that AdamW alone would.
    """

    def schedule(peak: float) -> Callable[[mx.array], mx.array]:
        warmup = optim.linear_schedule(0.0, peak, WARMUP_STEPS)
        decay = optim.cosine_decay(peak, steps - WARMUP_STEPS, end=0.02 * peak)
        return optim.join_schedules([warmup, decay], [WARMUP_STEPS])

    muon = optim.Muon(schedule(MUON_RATE), weight_decay=0.0)
    adam = optim.AdamW(schedule(ADAM_RATE), betas=[0.9, 0.98])
    return optim.MultiOptimizer([muon, adam], [lambda name, _: name.endswith("_proj.weight")])


def train(model: nn.Module, data: list[tuple[mx.array, mx.array]]) -> None:
    optimizer = new_optimizer(len(data))
    value_and_grad = nn.value_and_grad(model, loss_fn)
    recent: list[float] = []
    start = time.perf_counter()
    for step, (tokens_BxL, mask_BxL) in enumerate(data, start=1):
        loss, gradients = value_and_grad(model, tokens_BxL, mask_BxL)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        recent.append(loss.item())
        if step % 50 == 0 or step == len(data):
            seconds = time.perf_counter() - start
            progress = f"step {step:4d} of {len(data)}"
            print(f"  {progress}  loss {np.mean(recent):.4f}  {seconds:4.0f} s", flush=True)
            recent.clear()


def save(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    weights = tree_map(lambda value: value.astype(mx.bfloat16), model.parameters())
    path = folder / "model.safetensors"
    mx.save_safetensors(str(path), dict(tree_flatten(weights)), metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
    ends = {"eos_token_id": config["eos_token_id"], "do_sample": False}
    write_json(folder / "generation_config.json", ends)


def make(demo: Demo, out: Path, seed: int, steps: int) -> None:
    folder = out / demo.folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(conversations(seed, steps * BATCH_SIZE))
    first = list(repetitions(seed + 1, REPETITION_STEPS * BATCH_SIZE))
    encode = demo.make_tokenizer(folder, [message["content"] for row in rows for message in row])
    data = [
        batch
        for part in (first, rows)
        for batch in batches(encode_rows(encode, map(demo.segments, part)), seed)
    ]
    model = new_model(demo, seed)
    parameters = sum(value.size for _, value in tree_flatten(model.parameters()))
    tokens = sum(int(tokens_BxL.size) for tokens_BxL, _ in data)
    print(f"{folder}: {parameters / 1e6:.2f}M parameters, {tokens / 1e6:.1f}M tokens")
    train(model, data)
    save(folder, model, demo.config)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", choices=[demo.folder for demo in DEMOS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    for demo in DEMOS:
        if args.only in (None, demo.folder):
            make(demo, args.out, args.seed, args.steps)


if __name__ == "__main__":
    main()
