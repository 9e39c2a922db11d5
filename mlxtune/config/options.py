"""Every option, once: its help, what it affects, and its bounds.

The dataclasses of mlxtune.config take their fields from here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mlxtune.config.fields import Affects, Option

RESULT, LENGTH, INPUT, EXECUTION, PLACES, COMMAND = Affects

# In the order of --help. Configs share an option where it means the same to them.
SECTIONS: dict[str, dict[str, Option]] = {
    "Files": {
        "model_path": Option(
            "Model folder in MLX or Hugging Face layout, or owner/name to download.",
            INPUT,
            path=True,
            required=True,
            if_empty="is required",
        ),
        "data": Option(
            "Data to train on: .jsonl, .json, .jsonl.gz or .parquet, or a folder with train.jsonl "
            "and valid.jsonl; may be given again.",
            INPUT,
            path=True,
            required=True,
            several=True,
            metavar="PATH",
            if_empty="is required",
        ),
        "adapter": Option(
            "Adapter file, its folder, or a run's folder.",
            COMMAND,
            if_empty="is empty: name an adapter, its folder or that of a run",
        ),
        "trust_remote_code": Option(
            "Run Python code that the model's folder brings; read it first.",
            EXECUTION,
            encodes=True,  # it may bring another tokenizer
            inherited=False,
        ),
        "output": Option(
            "Adapter file to write; adapter_config.json is written beside it.",
            PLACES,
            path=True,
            if_empty="is empty: name the adapter file to write",
        ),
        "checkpoint_dir": Option(
            "Folder of checkpoints, metrics and ledger; default: checkpoints beside --output.",
            PLACES,
            path=True,
        ),
    },
    "Data": {
        "val_split": Option(
            "Share of the rows held out for validation, up to 0.5; 0 turns validation off.",
            RESULT,
            at_least=0,
            at_most=0.5,
        ),
        "val_data": Option("Validation file, used instead of --val-split.", INPUT, path=True),
        "val_rows": Option("Hold out at most so many rows; the others train.", RESULT, at_least=1),
        "max_seq_len": Option(
            "Longest example in tokens; what is beyond is cut.", RESULT, at_least=2, at_most=10**9
        ),
        "format": Option(
            "How a row is laid out; auto goes by each file's own rows.",
            RESULT,
            encodes=True,
            choices=("auto", "chat", "prompt", "alpaca", "sharegpt", "text"),
        ),
        "field": Option(
            "Where a row has a field by another name, such as prompt=question; may be given again.",
            RESULT,
            encodes=True,
            several=True,
            metavar="NAME=KEY",
        ),
        "template": Option(
            "Chat template; auto is the model's own, or one by its type where it has none.",
            RESULT,
            encodes=True,
            choices=("auto", "qwen3", "gemma"),
        ),
        "turns": Option(
            "Assistant turns that carry loss.", RESULT, encodes=True, choices=("all", "last")
        ),
        "thinking": Option(
            "Whether a template that knows thinking asks for it; auto goes by each conversation.",
            RESULT,
            encodes=True,
            choices=("auto", "on", "off"),
        ),
        "merge_system": Option(
            "Put a system message into the first user turn where the template has no place for it.",
            RESULT,
            encodes=True,
        ),
        "strict": Option("Make a bad row an error instead of skipping it.", RESULT),
        "cache_dir": Option(
            "Folder that keeps encoded data; default: in the user's cache folder.",
            PLACES,
            path=True,
            inherited=False,
        ),
        "no_cache": Option("Encode the data anew, and keep nothing.", PLACES),
    },
    "Inspect": {
        "row": Option(
            "Show this row only, by its number in the file.", COMMAND, at_least=1, metavar="N"
        ),
        "html": Option("Write a page to look at in a browser.", COMMAND, metavar="FILE"),
        "dump": Option(
            "Write every example as a JSON line with its row, tokens and mask.",
            COMMAND,
            metavar="FILE",
        ),
    },
    "Bench": {
        "against": Option(
            "Measure another trainer on the same steps.", COMMAND, choices=("mlx-lm",)
        ),
        "steps": Option("Optimizer steps to time, the first of an epoch.", COMMAND, at_least=1),
        "repeats": Option(
            "Times to measure each side, each in a new process.", COMMAND, at_least=1
        ),
    },
    "Generation": {
        "prompt": Option(
            "What the user says; without it or --messages, standard input is read.",
            COMMAND,
            metavar="TEXT",
            if_empty="is empty: say something",
        ),
        "messages": Option(
            "JSON file of a conversation to answer: a list of messages, or an object with "
            "'messages' and, if there are any, 'tools'; - is standard input.",
            COMMAND,
            metavar="FILE",
            if_empty="is empty: name a file, or - for standard input",
        ),
        "system": Option(
            "System message that stands before the conversation.",
            COMMAND,
            metavar="TEXT",
            if_empty="is empty: leave it out",
        ),
        "generate": Option(
            "Also answer the last turn of each row, greedily, and count the answers that are those "
            "of the data to the letter.",
            COMMAND,
        ),
        "max_new_tokens": Option("Longest answer in tokens.", COMMAND, at_least=1, at_most=10**9),
        "temperature": Option(
            "How freely tokens are drawn; 0 takes the likeliest.", COMMAND, at_least=0, at_most=100
        ),
        "top_k": Option("Draw from the likeliest K tokens; 0 is off.", COMMAND, at_least=0),
        "top_p": Option(
            "Draw from the likeliest tokens that together have this probability; 1 is off.",
            COMMAND,
            above=0,
            at_most=1,
        ),
        "stop": Option(
            "Text that ends an answer, beside the model's own end tokens; may be given again.",
            COMMAND,
            several=True,
            blank=True,
            metavar="TEXT",
        ),
    },
    "Export": {
        "export_format": Option(
            "What to write it for: mlx-lm, PEFT and transformers, llama.cpp and Ollama, or a flat "
            "safetensors file.",
            COMMAND,
            choices=("mlx-lm", "peft", "gguf", "flat"),
            required=True,
        ),
        "export_output": Option(
            "Folder to write.", COMMAND, required=True, metavar="DIR", if_empty="is required"
        ),
        "dequantize": Option("Write plain weights where the base model's are quantised.", COMMAND),
    },
    "LoRA": {
        "rank": Option("Rank of the LoRA matrices.", RESULT, at_least=1, at_most=10**6),
        "alpha": Option("LoRA alpha; the update is scaled by alpha / rank.", RESULT, above=0),
        "targets": Option(
            "Projections that get LoRA, by name (q_proj) or path (self_attn.q_proj), or 'all'.",
            RESULT,
            metavar="NAME,NAME",
            if_empty="is empty: name projections such as q_proj,v_proj, or 'all'",
        ),
        "num_layers": Option(
            "Apply LoRA to the last N layers only; default: all.", RESULT, at_least=1
        ),
        "dropout": Option(
            "Dropout on the input of the LoRA matrices.", RESULT, at_least=0, below=1
        ),
        "target_rank": Option(
            "Rank of one target, where it is not --rank, such as q_proj=16; may be given again.",
            RESULT,
            several=True,
            metavar="NAME=N",
        ),
        "rslora": Option("Scale the update by alpha / √rank (rsLoRA): for high ranks.", RESULT),
        "dora": Option("Train the size of each row of the weights beside LoRA (DoRA).", RESULT),
        "init": Option(
            "What LoRA begins as: lora at random, pissa as the weights' largest singular vectors, "
            "pissa_niter_N as these found by N iterations, which is faster.",
            RESULT,
            metavar="lora|pissa|pissa_niter_N",
        ),
        "init_adapter": Option(
            "Go on training an adapter: its file or folder; rank, alpha, targets are its own.",
            INPUT,
            path=True,
            metavar="PATH",
        ),
    },
    "Training": {
        "epochs": Option("Passes over the training rows.", LENGTH, at_least=1),
        "max_steps": Option("Stop after so many optimizer steps.", LENGTH, at_least=1),
        "batch_size": Option("Rows in an optimizer step.", RESULT, at_least=1),
        "order": Option(
            "Which rows share a step: any with shuffle, those of about one length with length.",
            RESULT,
            choices=("shuffle", "length"),
        ),
        "lr": Option("Peak learning rate of AdamW.", RESULT, above=0),
        "lr_ratio": Option(
            "Learning rate of B, as a multiple of that of A (LoRA+).", RESULT, above=0, at_most=1e6
        ),
        "schedule": Option(
            "Learning rate over the run.",
            RESULT,
            choices=("warmup-cosine", "linear-warmup", "constant"),
        ),
        "warmup_fraction": Option(
            "Share of the steps that warm up.", RESULT, at_least=0, at_most=1
        ),
        "lr_min": Option("Learning rate at the end of warmup-cosine.", RESULT, at_least=0),
        "weight_decay": Option("AdamW weight decay.", RESULT, at_least=0),
        "max_grad_norm": Option(
            "Clip gradients to this L2 norm; 0 turns clipping off.", RESULT, at_least=0
        ),
        "samples": Option(
            "Validation rows that base and adapted model answer at the end, for the run's page; "
            "0 turns it off.",
            EXECUTION,
            at_least=0,
            at_most=1000,
        ),
        "patience": Option(
            "Stop after so many epochs without a better validation loss.", RESULT, at_least=1
        ),
    },
    "Run": {
        "memory_limit": Option(
            "Memory that MLX may use, in GB (10^9 bytes).", EXECUTION, above=0, at_most=1e6
        ),
        "dtype": Option(
            "Compute dtype; auto is the model's own on a GPU and float32 on the CPU.",
            RESULT,
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        "quantize": Option(
            "Quantise the frozen weights while loading: MLX's formats, or QLoRA's nf4; default: as "
            "the folder has them.",
            RESULT,
            choices=("4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4"),
        ),
        "use_quantize": Option(
            "Quantise the weights while loading; default: as those that the adapter was trained "
            "on; none: not at all.",
            COMMAND,
            choices=("none", "4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4"),
        ),
        "double_quant": Option("Quantise the scales of nf4 as well, to 8 bits.", RESULT),
        "quantized_compute": Option(
            "Products with quantised weights: MLX's own, or with each matrix dequantised for the "
            "product; auto is what is faster, dequantized on the CPU.",
            RESULT,
            choices=("auto", "quantized", "dequantized"),
        ),
        "grad_checkpoint": Option(
            "Compute activations again in the backward pass, which takes time and saves memory; "
            "auto where it is needed.",
            EXECUTION,
            choices=("auto", "on", "off"),
        ),
        "compile": Option(
            "Have MLX compile the step; auto on a GPU and not on the CPU.",
            EXECUTION,
            choices=("auto", "on", "off"),
        ),
        "seed": Option(
            "Seed of the split, the order, the LoRA matrices and dropout.", RESULT, at_least=0
        ),
        "save_every": Option("Epochs between checkpoints.", EXECUTION, at_least=1),
        "save_steps": Option(
            "Optimizer steps between checkpoints within an epoch.", EXECUTION, at_least=1
        ),
        "save_minutes": Option(
            "Minutes between checkpoints within an epoch; 0 turns these off.", EXECUTION, at_least=0
        ),
        "keep": Option("Recent checkpoints to keep, beside best/.", EXECUTION, at_least=1),
        "overwrite": Option(
            "Start over where the folder holds an unfinished run.", PLACES, inherited=False
        ),
        "on_nonfinite": Option(
            "Where a loss or gradient is not finite: skip the step, and stop after 3 in a row, or "
            "stop at once.",
            EXECUTION,
            choices=("skip", "stop"),
        ),
        "wait": Option(
            "Wait where other runs hold the memory, instead of ending.", EXECUTION, inherited=False
        ),
        "ignore_ledger": Option(
            "Train although other runs hold the memory.", EXECUTION, inherited=False
        ),
        "log_every": Option(
            "Steps between progress lines when stderr is no terminal.", PLACES, at_least=1
        ),
        "profile_interval": Option(
            "Measure every so many steps, phase by phase and layer by layer; 0 turns it off.",
            EXECUTION,
            at_least=0,
        ),
        "track": Option(
            "Also write the run to trackio, tensorboard or wandb; may be given again.",
            EXECUTION,
            several=True,
            metavar="NAME",
        ),
        "json": Option("Print JSON for programs; docs/inspect.md describes it.", COMMAND),
        "quiet": Option("Print warnings and errors only.", PLACES),
    },
}
OPTIONS = {name: option for section in SECTIONS.values() for name, option in section.items()}


def option(
    name: str, default: Any, help: str | None = None, *, required: bool | None = None
) -> Any:
    """Declare a dataclass field for OPTIONS[name], with another `help` or `required` if given."""
    shared = OPTIONS[name]
    needed = shared.required if required is None else required
    option = dataclasses.replace(shared, help=help or shared.help, required=needed)
    return dataclasses.field(default=default, metadata={"name": name, "option": option})
