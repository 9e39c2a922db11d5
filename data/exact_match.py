"""Count the rows of a test file that a model answers word for word.

    python data/exact_match.py --model-path data/demo-qwen3 --data data/bookings_test.jsonl \
        --adapter-path adapters
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS, which has to happen before mlx

# isort: split
import mlx.core as mx
from mlx_lm import batch_generate, load

Row = list[dict[str, str]]


def read_rows(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines if line.strip()]


def answer(model: Any, tokenizer: Any, rows: list[Row]) -> list[str]:
    """Greedy answers to all but the last message of each row."""
    prompts = [tokenizer.apply_chat_template(row[:-1], add_generation_prompt=True) for row in rows]
    expected = [len(tokenizer.encode(row[-1]["content"])) for row in rows]
    # A right answer ends by itself before this; a wrong one need not be followed to its end.
    limits = [length + 4 for length in expected]
    return batch_generate(model, tokenizer, prompts, max_tokens=limits).texts


def show(row: Row, got: str) -> None:
    for message in row[:-1]:
        print(f"{message['role']:>9}: {message['content']}")
    print(f" expected: {row[-1]['content']}\n      got: {got}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--adapter-path", type=Path)
    parser.add_argument("--show", type=int, default=0, metavar="K", help="print K answers too")
    args = parser.parse_args()
    adapter = str(args.adapter_path) if args.adapter_path else None
    model, tokenizer = load(str(args.model_path), adapter_path=adapter)
    if not mx.metal.is_available():
        model.set_dtype(mx.float32)  # bfloat16 products are slow on the CPU
    rows = read_rows(args.data)
    answers = answer(model, tokenizer, rows)
    for row, got in list(zip(rows, answers, strict=True))[: args.show]:
        show(row, got)
    right = sum(got == row[-1]["content"] for row, got in zip(rows, answers, strict=True))
    print(f"{right} of {len(rows)} answers match exactly ({100 * right / len(rows):.1f} %)")


if __name__ == "__main__":
    main()
