"""Every option, once: its bounds and one-line help, in the order of --help.

The dataclasses of mlxtune.config take their fields from here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mlxtune.config.checked import Bounds

# One entry for each option, in the order of --help, shared by the classes below where they mean
# the same thing.
SECTIONS: dict[str, dict[str, Bounds]] = {
    "Files": {
        "model_path": Bounds(
            "Model folder in MLX or Hugging Face layout, or owner/name to download.",
            required=True,
            if_empty="is required",
        ),
        "data": Bounds(
            "Data to train on: .jsonl, .json, .jsonl.gz or .parquet, or a folder with train.jsonl "
            "and valid.jsonl; may be given again.",
            required=True,
            several=True,
            metavar="PATH",
            if_empty="is required",
        ),
        "adapter": Bounds(
            "Adapter file, its folder, or a run's folder.",
            if_empty="is empty: name an adapter, its folder or that of a run",
        ),
        "trust_remote_code": Bounds(
            "Run Python code that the model's folder brings; read it first."
        ),
        "output": Bounds(
            "Adapter file to write; adapter_config.json is written beside it.",
            if_empty="is empty: name the adapter file to write",
        ),
        "checkpoint_dir": Bounds(
            "Folder of checkpoints, metrics and ledger; default: checkpoints beside --output."
        ),
    },
    "Data": {
        "val_split": Bounds(
            "Share of the rows held out for validation, up to 0.5; 0 turns validation off.",
            at_least=0,
            at_most=0.5,
        ),
        "val_data": Bounds("Validation file, used instead of --val-split."),
        "val_rows": Bounds("Hold out at most so many rows; the others train.", at_least=1),
        "max_seq_len": Bounds(
            "Longest example in tokens; what is beyond is cut.", at_least=2, at_most=10**9
        ),
        "format": Bounds(
            "How a row is laid out; auto goes by each file's own rows.",
            choices=("auto", "chat", "prompt", "alpaca", "sharegpt", "text"),
        ),
        "field": Bounds(
            "Where a row has a field by another name, such as prompt=question; may be given again.",
            several=True,
            metavar="NAME=KEY",
        ),
        "template": Bounds(
            "Chat template; auto is the model's own, or one by its type where it has none.",
            choices=("auto", "qwen3", "gemma"),
        ),
        "turns": Bounds("Assistant turns that carry loss.", choices=("all", "last")),
        "thinking": Bounds(
            "Whether a template that knows thinking asks for it; auto goes by each conversation.",
            choices=("auto", "on", "off"),
        ),
        "merge_system": Bounds(
            "Put a system message into the first user turn where the template has no place for it."
        ),
        "strict": Bounds("Make a bad row an error instead of skipping it."),
        "cache_dir": Bounds("Folder that keeps encoded data; default: in the user's cache folder."),
        "no_cache": Bounds("Encode the data anew, and keep nothing."),
    },
    "Inspect": {
        "row": Bounds("Show this row only, by its number in the file.", at_least=1, metavar="N"),
        "html": Bounds("Write a page to look at in a browser.", metavar="FILE"),
        "dump": Bounds(
            "Write every example as a JSON line with its row, tokens and mask.", metavar="FILE"
        ),
    },
    "Bench": {
        "against": Bounds("Measure another trainer on the same steps.", choices=("mlx-lm",)),
        "steps": Bounds("Optimizer steps to time, the first of an epoch.", at_least=1),
        "repeats": Bounds("Times to measure each side, each in a new process.", at_least=1),
    },
    "Generation": {
        "prompt": Bounds(
            "What the user says; without it or --messages, standard input is read.",
            metavar="TEXT",
            if_empty="is empty: say something",
        ),
        "messages": Bounds(
            "JSON file of a conversation to answer: a list of messages, or an object with "
            "'messages' and, if there are any, 'tools'; - is standard input.",
            metavar="FILE",
            if_empty="is empty: name a file, or - for standard input",
        ),
        "system": Bounds(
            "System message that stands before the conversation.",
            metavar="TEXT",
            if_empty="is empty: leave it out",
        ),
        "generate": Bounds(
            "Also answer the last turn of each row, greedily, and count the answers that are those "
            "of the data to the letter."
        ),
        "max_new_tokens": Bounds("Longest answer in tokens.", at_least=1, at_most=10**9),
        "temperature": Bounds(
            "How freely tokens are drawn; 0 takes the likeliest.", at_least=0, at_most=100
        ),
        "top_k": Bounds("Draw from the likeliest K tokens; 0 is off.", at_least=0),
        "top_p": Bounds(
            "Draw from the likeliest tokens that together have this probability; 1 is off.",
            above=0,
            at_most=1,
        ),
        "stop": Bounds(
            "Text that ends an answer, beside the model's own end tokens; may be given again.",
            several=True,
            blank=True,
            metavar="TEXT",
        ),
    },
    "Export": {
        "export_format": Bounds(
            "What to write it for: mlx-lm, PEFT and transformers, llama.cpp and Ollama, or a flat "
            "safetensors file.",
            choices=("mlx-lm", "peft", "gguf", "flat"),
            required=True,
        ),
        "export_output": Bounds(
            "Folder to write.", required=True, metavar="DIR", if_empty="is required"
        ),
        "dequantize": Bounds("Write plain weights where the base model's are quantised."),
    },
    "LoRA": {
        "rank": Bounds("Rank of the LoRA matrices.", at_least=1, at_most=10**6),
        "alpha": Bounds("LoRA alpha; the update is scaled by alpha / rank.", above=0),
        "targets": Bounds(
            "Projections that get LoRA, by name (q_proj) or path (self_attn.q_proj), or 'all'.",
            metavar="NAME,NAME",
            if_empty="is empty: name projections such as q_proj,v_proj, or 'all'",
        ),
        "num_layers": Bounds("Apply LoRA to the last N layers only; default: all.", at_least=1),
        "dropout": Bounds("Dropout on the input of the LoRA matrices.", at_least=0, below=1),
        "target_rank": Bounds(
            "Rank of one target, where it is not --rank, such as q_proj=16; may be given again.",
            several=True,
            metavar="NAME=N",
        ),
        "rslora": Bounds("Scale the update by alpha / √rank (rsLoRA): for high ranks."),
        "dora": Bounds("Train the size of each row of the weights beside LoRA (DoRA)."),
        "init": Bounds(
            "What LoRA begins as: lora at random, pissa as the weights' largest singular vectors, "
            "pissa_niter_N as these found by N iterations, which is faster.",
            metavar="lora|pissa|pissa_niter_N",
        ),
        "init_adapter": Bounds(
            "Go on training an adapter: its file or folder; rank, alpha, targets are its own.",
            metavar="PATH",
        ),
    },
    "Training": {
        "epochs": Bounds("Passes over the training rows.", at_least=1),
        "max_steps": Bounds("Stop after so many optimizer steps.", at_least=1),
        "batch_size": Bounds("Rows in an optimizer step.", at_least=1),
        "order": Bounds(
            "Which rows share a step: any with shuffle, those of about one length with length.",
            choices=("shuffle", "length"),
        ),
        "lr": Bounds("Peak learning rate of AdamW.", above=0),
        "lr_ratio": Bounds(
            "Learning rate of B, as a multiple of that of A (LoRA+).", above=0, at_most=1e6
        ),
        "schedule": Bounds(
            "Learning rate over the run.", choices=("warmup-cosine", "linear-warmup", "constant")
        ),
        "warmup_fraction": Bounds("Share of the steps that warm up.", at_least=0, at_most=1),
        "lr_min": Bounds("Learning rate at the end of warmup-cosine.", at_least=0),
        "weight_decay": Bounds("AdamW weight decay.", at_least=0),
        "max_grad_norm": Bounds(
            "Clip gradients to this L2 norm; 0 turns clipping off.", at_least=0
        ),
        "samples": Bounds(
            "Validation rows that base and adapted model answer at the end, for the run's page; "
            "0 turns it off.",
            at_least=0,
            at_most=1000,
        ),
        "patience": Bounds(
            "Stop after so many epochs without a better validation loss.", at_least=1
        ),
    },
    "Run": {
        "memory_limit": Bounds(
            "Memory that MLX may use, in GB (10^9 bytes).", above=0, at_most=1e6
        ),
        "dtype": Bounds(
            "Compute dtype; auto is the model's own on a GPU and float32 on the CPU.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        "quantize": Bounds(
            "Quantise the frozen weights while loading: MLX's formats, or QLoRA's nf4; default: as "
            "the folder has them.",
            choices=("4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4"),
        ),
        "use_quantize": Bounds(
            "Quantise the weights while loading; default: as those that the adapter was trained "
            "on; none: not at all.",
            choices=("none", "4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4"),
        ),
        "double_quant": Bounds("Quantise the scales of nf4 as well, to 8 bits."),
        "quantized_compute": Bounds(
            "Products with quantised weights: MLX's own, or with each matrix dequantised for the "
            "product; auto is what is faster, dequantized on the CPU.",
            choices=("auto", "quantized", "dequantized"),
        ),
        "grad_checkpoint": Bounds(
            "Compute activations again in the backward pass, which takes time and saves memory; "
            "auto where it is needed.",
            choices=("auto", "on", "off"),
        ),
        "compile": Bounds(
            "Have MLX compile the step; auto on a GPU and not on the CPU.",
            choices=("auto", "on", "off"),
        ),
        "seed": Bounds("Seed of the split, the order, the LoRA matrices and dropout.", at_least=0),
        "save_every": Bounds("Epochs between checkpoints.", at_least=1),
        "save_steps": Bounds("Optimizer steps between checkpoints within an epoch.", at_least=1),
        "save_minutes": Bounds(
            "Minutes between checkpoints within an epoch; 0 turns these off.", at_least=0
        ),
        "keep": Bounds("Recent checkpoints to keep, beside best/.", at_least=1),
        "overwrite": Bounds("Start over where the folder holds an unfinished run."),
        "on_nonfinite": Bounds(
            "Where a loss or gradient is not finite: skip the step, and stop after 3 in a row, or "
            "stop at once.",
            choices=("skip", "stop"),
        ),
        "wait": Bounds("Wait where other runs hold the memory, instead of ending."),
        "ignore_ledger": Bounds("Train although other runs hold the memory."),
        "log_every": Bounds("Steps between progress lines when stderr is no terminal.", at_least=1),
        "profile_interval": Bounds(
            "Measure every so many steps, phase by phase and layer by layer; 0 turns it off.",
            at_least=0,
        ),
        "track": Bounds(
            "Also write the run to trackio, tensorboard or wandb; may be given again.",
            several=True,
            metavar="NAME",
        ),
        "json": Bounds("Print JSON for programs; docs/inspect.md describes it."),
        "quiet": Bounds("Print warnings and errors only."),
    },
}
OPTIONS = {name: bounds for section in SECTIONS.values() for name, bounds in section.items()}


def option(
    name: str, default: Any, help: str | None = None, *, required: bool | None = None
) -> Any:
    """Declare a dataclass field whose bounds are those of OPTIONS[name], as is its help by default.

    `help` is what a config says of the option where it means something else by it; `required`
    whether it asks for it, where it does not ask as others do.
    """
    bounds = OPTIONS[name]
    if required is not None:
        bounds = dataclasses.replace(bounds, required=required)
    metadata = {"option": name, "help": help or bounds.help, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)
