"""Run exported adapters in llama.cpp, and compare its greedy text with mlx-lm's.

    python -m tests.long.check_llama_cpp

Needs `convert_hf_to_gguf.py`, `llama-quantize` and `llama-completion` on the PATH, torch for the
first, and the real material in ../shared. The model has random weights and Qwen3's real vocabulary.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlxtune import ExportConfig, TrainConfig, export, train
from tests.models import write_model
from tests.paths import SHARED

PROMPTS = ("The capital of France is", "SELECT name FROM", "Hello world, this is", "In 2020 the")
TOKENS = 24


def write_base(folder: Path) -> Path:
    """Write a Qwen3 model that llama.cpp's converter accepts."""
    options = {"vocab_size": 151_936, "tie_word_embeddings": True}
    write_model(folder, "qwen3", architectures=["Qwen3ForCausalLM"], **options)
    for path in (SHARED / "tokenizers" / "qwen3").iterdir():
        shutil.copy(path, folder)
    return folder


def llama_texts(*arguments: object) -> list[str]:
    """Return llama.cpp's continuation of each prompt."""
    options = ["--temp", "0", "--top-k", "1", "-no-cnv", "--no-display-prompt", "--ignore-eos"]
    return [
        subprocess.run(
            ["llama-completion", *map(str, arguments), "-p", prompt, "-n", str(TOKENS), *options],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=True,
        )
        .stdout.decode(errors="replace")
        .strip()
        for prompt in PROMPTS
    ]


def mlx_lm_texts(base: Path, adapter: Path) -> list[str]:
    """Return the continuation of each prompt by the model that mlx-lm loads."""
    import mlx.core as mx
    from mlx_lm import load

    model, tokenizer = load(str(base), adapter_path=str(adapter))[:2]
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        start = len(ids)
        for _ in range(TOKENS):
            ids.append(int(mx.argmax(model(mx.array([ids]))[0, -1]).item()))
        texts.append(tokenizer.decode(ids)[len(tokenizer.decode(ids[:start])) :].strip())
    return texts


def check(folder: Path, data: Sequence[str]) -> dict[str, int]:
    """Return, for each export, the number of texts that equal mlx-lm's."""
    base, out = write_base(folder / "base"), folder / "out"
    options = {"targets": ("all",), "lr": 5e-3, "max_steps": 3, "samples": 0, "quiet": True}
    train(TrainConfig(str(base), tuple(data), output=str(out), **options))
    plain = folder / "base.gguf"
    command = ["convert_hf_to_gguf.py", base, "--outfile", plain, "--outtype", "f32"]
    subprocess.run(list(map(str, command)), check=True, stderr=subprocess.DEVNULL)
    expected = mlx_lm_texts(base, out)

    def same(*arguments: object) -> int:
        return sum(map(str.__eq__, llama_texts(*arguments), expected))

    def exported(name: str, **changes: object) -> Path:
        options = {"output": str(folder / name), "format": "gguf", "quiet": True, **changes}
        export(ExportConfig(str(out), **options))  # type: ignore[arg-type]
        return folder / name

    adapter = exported("lora") / "adapter.gguf"
    merged = exported("merged", merge=True) / "model.gguf"
    rounded = exported("rounded", merge=True, quantize="Q8_0") / "model.gguf"
    return {
        "base without the adapter": same("-m", plain),
        "adapter with --lora": same("-m", plain, "--lora", adapter),
        "merged": same("-m", merged),
        "merged, rounded to Q8_0": same("-m", rounded),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = check(Path(folder), [str(SHARED / "chat" / "wikisql_train.jsonl")])
    for name, count in found.items():
        print(f"{name}: {count} of {len(PROMPTS)} texts equal mlx-lm's")
    exact = found["adapter with --lora"] == found["merged"] == len(PROMPTS)
    sys.exit(not (exact and found["base without the adapter"] == 0))


if __name__ == "__main__":
    main()
