"""Every option, once: its help, what it affects, and its bounds.

The dataclasses of mlxtune.config take their fields from here.
"""

import dataclasses
from typing import Any

from mlxtune.config.fields import Affects, Option

RESULT, LENGTH, INPUT, EXECUTION, PLACES, COMMAND = Affects

# In the order of --help. Configs share an option if it means the same to them; a dot sets apart
# one that means something else to some commands.
SECTIONS: dict[str, dict[str, Option]] = {
    "Files": {
        "model_path": Option(
            "Model folder in MLX or Hugging Face layout, or owner/name to download.",
            INPUT,
            path=True,
            required=True,
        ),
        "data": Option(
            "Data to train on: .jsonl, .json, .jsonl.gz or .parquet, a folder with train.jsonl and "
            "valid.jsonl, or owner/name[/config][@revision][:split] on Hugging Face; may be "
            "repeated.",
            INPUT,
            path=True,
            required=True,
            several=True,
        ),
        "adapter": Option("Adapter file, its folder, or a run's folder.", COMMAND),
        "trust_remote_code": Option(
            "Run Python code from the model's folder; read it first.",
            EXECUTION,
            encodes=True,  # it may bring another tokenizer
            inherited=False,
        ),
        "output": Option(
            "Adapter file to write; adapter_config.json is written next to it.", PLACES, path=True
        ),
        "checkpoint_dir": Option(
            "Folder of checkpoints, metrics and ledger; default: checkpoints next to --output.",
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
        "val_data": Option(
            "Validation file, or owner/name:split on Hugging Face, used instead of --val-split.",
            INPUT,
            path=True,
        ),
        "val_rows": Option("Most rows to hold out; the others train.", RESULT, at_least=1),
        "max_seq_len": Option(
            "Longest example in tokens; the rest is cut off.", RESULT, at_least=2, at_most=10**9
        ),
        "format": Option(
            "Layout of a row; auto detects it for each file.",
            RESULT,
            encodes=True,
            choices=("auto", "chat", "prompt", "alpaca", "sharegpt", "text"),
        ),
        "field": Option(
            "Key of a field in the file, such as prompt=question; may be repeated.",
            RESULT,
            encodes=True,
            several=True,
            metavar="NAME=KEY",
        ),
        "template": Option(
            "Chat template; auto is the model's own, or a built-in one for its type.",
            RESULT,
            encodes=True,
            choices=("auto", "qwen3", "gemma"),
        ),
        "turns": Option(
            "Assistant turns that carry loss.", RESULT, encodes=True, choices=("all", "last")
        ),
        "thinking": Option(
            "Whether the template turns thinking on; auto follows each conversation.",
            RESULT,
            encodes=True,
            choices=("auto", "on", "off"),
        ),
        "merge_system": Option(
            "Merge a system message into the first user turn if the template has no system role.",
            RESULT,
            encodes=True,
        ),
        "strict": Option("Make a bad row an error instead of skipping it.", RESULT),
        "cache_dir": Option(
            "Folder that caches encoded data; default: the user's cache folder.",
            PLACES,
            path=True,
            inherited=False,
        ),
        "no_cache": Option("Encode the data again, and cache nothing.", PLACES),
    },
    "Inspect": {
        "row": Option("Show only this row, by its number in the file.", COMMAND, at_least=1),
        "html": Option("Write an HTML page.", COMMAND, path=True),
        "dump": Option(
            "Write every example as a JSON line with its row, tokens and mask.", COMMAND, path=True
        ),
    },
    "Bench": {
        "against": Option(
            "Measure another trainer on the same steps.", COMMAND, choices=("mlx-lm",)
        ),
        "execution": Option(
            "How our side computes: auto is what train does, gpu what Metal and CUDA get on any "
            "device, cpu what Linux gets, plain the reference.",
            COMMAND,
            choices=("auto", "gpu", "cpu", "plain"),
        ),
        "steps": Option("Optimizer steps to time, the first of an epoch.", COMMAND, at_least=1),
        "repeats": Option(
            "Times to measure each side, each in a new process.", COMMAND, at_least=1
        ),
    },
    "Plan": {
        "longest": Option("Say how long an example may be to fit --memory-limit.", COMMAND),
        "workers": Option("Machines to plan for, as mlx.launch starts them.", COMMAND, at_least=1),
        "link": Option(
            "Bandwidth between the machines, in Gbit/s.", COMMAND, above=0, metavar="GBPS"
        ),
    },
    "Generation": {
        "prompt": Option(
            "The user's message; without it or --messages, standard input is read.",
            COMMAND,
            metavar="TEXT",
        ),
        "messages": Option(
            "JSON file of a conversation to answer: a list of messages, or an object with "
            "'messages' and perhaps 'tools'; - is standard input.",
            COMMAND,
        ),
        "system": Option("System message before the conversation.", COMMAND, metavar="TEXT"),
        "generate": Option(
            "Also answer the last turn of each row greedily, and count exact matches.", COMMAND
        ),
        "max_new_tokens": Option("Longest answer in tokens.", COMMAND, at_least=1, at_most=10**9),
        "temperature": Option(
            "Sampling temperature; 0 always takes the likeliest token.",
            COMMAND,
            at_least=0,
            at_most=100,
        ),
        "top_k": Option("Sample from the likeliest K tokens; 0 is off.", COMMAND, at_least=0),
        "top_p": Option(
            "Sample from the likeliest tokens that together have this probability; 1 is off.",
            COMMAND,
            above=0,
            at_most=1,
        ),
        "stop": Option(
            "Text that ends an answer, like the model's own end tokens; may be repeated.",
            COMMAND,
            several=True,
            metavar="TEXT",
        ),
    },
    "Export": {
        "export.format": Option(
            "Target: mlx-lm, PEFT and transformers, llama.cpp and Ollama, or a flat "
            "safetensors file.",
            COMMAND,
            choices=("mlx-lm", "peft", "gguf", "flat"),
            required=True,
        ),
        "export.output": Option("Folder to write.", COMMAND, required=True, metavar="DIR"),
        "dequantize": Option("Dequantise the base model's weights.", COMMAND),
        "gguf": Option("Also write model.gguf with llama.cpp's converter.", COMMAND),
        "force": Option(
            "Quantise the trained projections as the base does, whatever that loses.", COMMAND
        ),
    },
    "LoRA": {
        "rank": Option("Rank of the LoRA matrices.", RESULT, at_least=1, at_most=10**6),
        "alpha": Option("LoRA alpha; the update is scaled by alpha / rank.", RESULT, above=0),
        "targets": Option(
            "Projections that get LoRA, by name (q_proj) or path (self_attn.q_proj), or 'all'.",
            RESULT,
            metavar="NAME,NAME",
        ),
        "num_layers": Option(
            "Apply LoRA to the last N layers only; default: all.", RESULT, at_least=1
        ),
        "dropout": Option(
            "Dropout on the input of the LoRA matrices.", RESULT, at_least=0, below=1
        ),
        "target_rank": Option(
            "Rank of one target instead of --rank, such as q_proj=16; may be repeated.",
            RESULT,
            several=True,
            metavar="NAME=N",
        ),
        "rslora": Option("Scale the update by alpha / √rank (rsLoRA): for high ranks.", RESULT),
        "dora": Option("Also train the magnitude of each weight row (DoRA).", RESULT),
        "init": Option(
            "Initial LoRA values: lora is random, pissa the weights' largest singular "
            "vectors, pissa_niter_N the same by N iterations, which is faster.",
            RESULT,
            metavar="lora|pissa|pissa_niter_N",
        ),
        "init_adapter": Option(
            "Continue training an adapter (file or folder), with its rank, alpha and targets.",
            INPUT,
            path=True,
        ),
    },
    "Training": {
        "epochs": Option("Passes over the training rows.", LENGTH, at_least=1),
        "max_steps": Option("Stop after this many optimizer steps.", LENGTH, at_least=1),
        "batch_size": Option("Rows in an optimizer step.", RESULT, at_least=1),
        "order": Option(
            "Rows that share a step: shuffle mixes all, length groups rows of similar length.",
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
            "Validation rows to answer at the end, with and without the adapter; 0 for none.",
            EXECUTION,
            at_least=0,
            at_most=1000,
        ),
        "val_steps": Option(
            "Also validate and save every N optimizer steps within an epoch; default: only at its "
            "end.",
            RESULT,
            at_least=1,
            metavar="N",
        ),
        "patience": Option(
            "Stop after this many validations, of epochs and --val-steps, without a better loss.",
            RESULT,
            at_least=1,
        ),
    },
    "Run": {
        "memory_limit": Option(
            "Memory that MLX may use, in GB (10^9 bytes); at most what the device can give.",
            EXECUTION,
            above=0,
            at_most=1e6,
        ),
        "dtype": Option(
            "Compute dtype; auto is the model's own on a GPU and float32 on the CPU.",
            RESULT,
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        "quantize": Option(
            "Quantise the frozen weights while loading, in an MLX format or QLoRA's nf4.",
            RESULT,
            choices=("4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4"),
        ),
        "use.quantize": Option(
            "Quantise the weights while loading; default: as in training.",
            COMMAND,
            choices=("none", "4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4"),
        ),
        "double_quant": Option("Also quantise the scales of nf4, to 8 bits.", RESULT),
        "quantized_compute": Option(
            "Multiply by quantised weights, or dequantise them for each product; auto takes "
            "dequantized on the CPU, and times both on a GPU.",
            RESULT,
            choices=("auto", "quantized", "dequantized"),
        ),
        "grad_checkpoint": Option(
            "Recompute activations in the backward pass, which saves memory and costs time; "
            "auto recomputes if needed.",
            EXECUTION,
            choices=("auto", "on", "off"),
        ),
        "parallel": Option(
            "What the workers that mlx.launch starts share: the examples of each step (data), or "
            "the model, of which each holds a part (tensor).",
            EXECUTION,
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
        "keep": Option("Recent checkpoints to keep, in addition to best/.", EXECUTION, at_least=1),
        "overwrite": Option(
            "Start over if the folder holds an unfinished run.", PLACES, inherited=False
        ),
        "on_nonfinite": Option(
            "If a loss or gradient is not finite, skip the step and stop after 3 in a row, or "
            "stop at once.",
            EXECUTION,
            choices=("skip", "stop"),
        ),
        "wait": Option(
            "Wait if other runs hold the memory, instead of failing.", EXECUTION, inherited=False
        ),
        "ignore_ledger": Option(
            "Train even if other runs hold the memory.", EXECUTION, inherited=False
        ),
        "allow_sleep": Option(
            "Let an idle machine fall asleep while it trains.", EXECUTION, inherited=False
        ),
        "pause_on_battery": Option(
            "Pause between steps while the machine runs on battery.", EXECUTION, inherited=False
        ),
        "log_every": Option(
            "Steps between progress lines when stderr is not a terminal.", PLACES, at_least=1
        ),
        "profile_interval": Option(
            "Profile every Nth step, by phase; 0 turns it off.", EXECUTION, at_least=0
        ),
        "track": Option(
            "Also write the run to a tracker; may be repeated.",
            EXECUTION,
            several=True,
            choices=("trackio", "tensorboard", "wandb"),
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
