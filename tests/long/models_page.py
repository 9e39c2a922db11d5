"""Makes docs/models.md from models_table's measurements; checks them against the page's rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.long.model_sizes import LISTED

# Measurements by architecture; the cases of each are by execution and name.
Records = Mapping[str, Mapping[str, Any]]
CASES = {"wikisql": "WikiSQL", "alpaca": "Alpaca", "long": "2,048 tokens"}
_GETS = {
    "split": "head split",
    "head": "head in blocks",
    "line": "packed line",
    "layerwise": "kernels",
}
_HEAD = """# Models

This page lists the support for each architecture of mlx-lm. `python -m tests.long.models_table`
makes the page; its figures are in [measured/models.jsonl](measured/models.jsonl).

Models have random weights, hidden size 512, 8 layers, 8 heads of 64 (4 for keys), 16 experts of
384, of which 4 are used, and mostly the vocabulary of the real model. mlxtune and mlx-lm train the
same adapter (rank 8, on the default targets, or on all projections if none has such a name) on the
same steps on two x86-64 cores in float32, one after the other: 2 steps of 4 rows of WikiSQL, 1
step of 4 rows of Alpaca, or 1 step of one example of 2,048 tokens. On an NVIDIA GPU only
[Qwen3's shapes](performance.md#on-an-nvidia-gpu) have been measured, and nothing on Metal.

- **WikiSQL, Alpaca, 2,048 tokens**: real tokens per second as a multiple of mlx-lm's own trainer,
  and peak memory as a fraction of the trainer's. An empty cell has not been measured.
- **Efficiency**: the fraction of a step that its matrix products would take at the BLAS's speed, on
  WikiSQL.
- **Fast paths**: *head split*: logits are computed for supervised positions only; *head in
  blocks*: a block of logits at a time, from a plain product; *packed line*: examples are
  packed end to end, without padding; *kernels*: the CPU's functions run the layers, and keep less
  for the backward pass. Models with experts, convolutions or recurrences run by MLX's operations
  everywhere.
- **LoRA by default**: the projections that `q_proj,v_proj` match. If the column says *none*, give
  `--targets`.
- **Exports**: formats that can hold an adapter of the default targets, with * if they cannot hold
  an adapter of `all`.
- **Template**: whether the model's own chat template is tested against golden renders.

Figures are from one run of each trainer, or medians of several (`repeats` in the file). Most of the
WikiSQL column was measured once, sometimes while other programs ran and the code was still
changing: these figures show which trainer is faster, and roughly how much. Qwen3 and Gemma 3 were
measured again with nothing else running: before, they had reached half of the efficiency shown.
Architectures with experts, convolutions or recurrences were measured again, once, with little else
running, after their CPU kernels were removed.
Where `threads` in the file is 1, an architecture had one core, and other work ran on the second.
At 2,048 tokens, mlx-lm was not warmed up.

`models_table` fails if an architecture is slower or takes more memory than in mlx-lm's own trainer.
"""


def page(records: Records) -> str:
    columns = ["architecture", "trains", *CASES.values(), "efficiency", "fast paths"]
    columns += ["LoRA by default", "exports", "template"]
    lines = [_line(columns), _line(["---"] * len(columns))]
    lines += [_row(name, records[name]) for name in LISTED if name in records]
    parts = [_HEAD, "\n".join(lines) + "\n"]
    if gpu := [name for name in LISTED if _measured(records.get(name, {}), "gpu")]:
        columns = ["architecture", *CASES.values(), "efficiency"]
        table = [_line(columns), _line(["---"] * len(columns))]
        table += [_line([_title(name), *_figures(records[name], "gpu")]) for name in gpu]
        parts += [
            "## A GPU's execution, on the CPU\n\nThe same two CPU cores with `--execution gpu`: "
            "MLX's own operations, which Metal and CUDA use. Neither has been measured.\n",
            "\n".join(table) + "\n",
        ]
    if found := broken(records):
        parts += ["## Not yet met\n", "\n".join(f"- {each}" for each in found) + "\n"]
    return "\n".join(parts)


def broken(records: Records) -> list[str]:
    """Return a line for each failure of an architecture to train or to keep up with mlx-lm."""
    return [
        f"{_title(name)}: {why}"
        for name in LISTED
        if name in records
        for why in _breaks(records[name])
    ]


def _breaks(record: Mapping[str, Any]) -> Iterator[str]:
    if record.get("trains") is False:
        yield "a step differs from the plain path's"
    for execution, cases in record["cases"].items():
        for case, found in cases.items():
            where = f"{CASES[case]}{' (GPU)' if execution == 'gpu' else ''}"
            if "failed" in found:
                yield f"{where}: fails: {found['failed']}"
            elif found["theirs_failed"] is None:
                speed, memory = _ratio(found, "real_tokens_per_s"), _ratio(found, "peak_memory")
                if speed < 1:
                    yield f"{where}: {speed:.2f} times mlx-lm's speed"
                if memory > 1:
                    yield f"{where}: {memory:.2f} times mlx-lm's memory"
                if not found["losses_agree"]:
                    yield f"{where}: the losses differ from mlx-lm's"


def _row(name: str, record: Mapping[str, Any]) -> str:
    gets = [title for key, title in _GETS.items() if record["gets"].get(key)]
    exports = [
        export if export in record["exports_all"] else f"{export}*" for export in record["exports"]
    ]
    return _line(
        [
            _title(name),
            "yes" if record["trains"] else "**no**",
            *_figures(record, "auto"),
            ", ".join(gets) or "none",
            _targets(record),
            ", ".join(exports) or "none",
            "yes" if LISTED[name].templates else "no",
        ]
    )


def _targets(record: Mapping[str, Any]) -> str:
    if not record["targets"]:
        return "none"
    last = dict.fromkeys(target.rsplit(".", 1)[-1] for target in record["targets"])
    names = ", ".join(f"`{name}`" for name in last)
    layers, total = record["layers"]
    return names if layers == total else f"{names}, in the layers that have them"


def _figures(record: Mapping[str, Any], execution: str) -> list[str]:
    """Return the cells of the cases, and a cell with WikiSQL's step efficiency."""
    found = _measured(record, execution)
    efficiency = found.get("wikisql", {}).get("step_efficiency")
    return [
        *(_cell(found.get(case)) for case in CASES),
        "" if efficiency is None else f"{efficiency:.0%}",
    ]


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    if "failed" in found:
        return "**fails**"
    if found["theirs_failed"] is not None:
        return f"mlx-lm fails; {found['real_tokens_per_s'][0]:.0f} tokens/s"
    layers = found["model_layers"]
    cell = f"{_ratio(found, 'real_tokens_per_s'):.1f}×, {_ratio(found, 'peak_memory'):.2f}"
    return f"{cell} ({layers} layers)" if layers else cell


def _measured(record: Mapping[str, Any], execution: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.get("cases", {}).get(execution, {})
    return found


def _ratio(found: Mapping[str, Any], quantity: str) -> float:
    ours, theirs = found[quantity]
    return float(ours / theirs)


def _title(name: str) -> str:
    return LISTED[name].title


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
