"""Compare --auto with the defaults: held-out losses on four data sets and two models.

    python -m tests.long.auto_table            # writes the table of docs/auto.md
    python -m tests.long.auto_table --rows 400

Both runs train on the same few rows. Both adapters are evaluated on the same new rows, with the
same --max-seq-len.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxtune import EvalConfig, TrainConfig, evaluate, train
from mlxtune.config import demo_file
from tests.paths import SHARED

PAGE = Path(__file__).parents[2] / "docs" / "auto.md"
BEGIN, END = "<!-- table: python -m tests.long.auto_table -->", "<!-- end of table -->"
MODELS = {"demo": demo_file("demo-qwen3"), "stories260k": SHARED / "models" / "stories260k"}
DATA = {
    "bookings": demo_file("bookings.jsonl"),
    "GSM8K": SHARED / "chat" / "gsm8k_train.jsonl",
    "WikiSQL": SHARED / "chat" / "wikisql_train.jsonl",
    "tool calls": SHARED / "chat" / "lf_glaive_toolcall_en.jsonl",
}
# The maximum number of characters in a row, so that a pair of runs takes minutes. Both models have
# short tokens.
_LONGEST = 1600
_CHOSEN = ("lr", "max_seq_len", "epochs")
# --max-seq-len of both runs where the default would cut off every answer, and the number of rows,
# which is smaller because these rows are long.
_LONG = {("tool calls", "stories260k"): (1024, 30)}


def rows_of(path: Path, count: int) -> tuple[list[str], list[str]]:
    """Return `count` rows for training, and a third of that number for evaluation."""
    lines = path.read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if len(line) <= _LONGEST]
    return short[:count], short[count : count + count // 3]


def compare(data: str, model: str, count: int, folder: Path) -> dict[str, Any]:
    """Return the losses with the defaults and with --auto, and the options that --auto chose."""
    template = "chatml" if model == "stories260k" else "auto"
    shared: dict[str, Any] = {"model_path": str(MODELS[model]), "template": template, "quiet": True}
    length, count = _LONG.get((data, model), (None, count))
    given = {} if length is None else {"max_seq_len": length}
    training, judging = (folder / f"{name}.jsonl" for name in ("train", "judge"))
    for path, lines in zip((training, judging), rows_of(DATA[data], count), strict=True):
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    for name in ("defaults", "auto"):
        train(
            TrainConfig(
                data=(str(training),),
                output=str(folder / name),
                auto=name == "auto",
                samples=0,
                **shared,
                **given,
            )
        )
    about = json.loads((folder / "auto" / "checkpoints" / "run.json").read_text())
    found = {"chosen": {name: about["config"][name] for name in _CHOSEN}, "line": about["auto"]}
    for name in ("defaults", "auto"):
        result = evaluate(
            EvalConfig(
                data=(str(judging),),
                adapter=str(folder / name),
                max_seq_len=found["chosen"]["max_seq_len"],
                **shared,
            )
        )
        assert result.adapted is not None
        found |= {"base": result.base.loss, name: result.adapted.loss}
    return found


def table(count: int) -> Iterator[str]:
    yield "| data | model | base | defaults | `--auto` | chosen |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for data in DATA:
        for model in MODELS:
            with tempfile.TemporaryDirectory() as scratch:
                found = compare(data, model, count, Path(scratch))
            losses = " | ".join(f"{found[name]:.3f}" for name in ("base", "defaults", "auto"))
            chosen = " ".join(
                f"--{name.replace('_', '-')} {value:g}" for name, value in found["chosen"].items()
            )
            row = f"| {data} | {model} | {losses} | `{chosen}` |"
            print(row, shlex.quote(found["line"]), flush=True)
            assert found["auto"] < found["defaults"], row
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=120)
    lines = list(table(parser.parse_args().rows))
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    PAGE.write_text("\n".join([f"{before}{BEGIN}\n", *lines, f"\n{after}"]), encoding="utf-8")


if __name__ == "__main__":
    main()
