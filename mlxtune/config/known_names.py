"""Options of mlx-lm, TRL, Unsloth and Axolotl, each with our equivalent and the difference."""

import difflib
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlxtune.errors import shorten

_ADAMW = "the optimizer is always AdamW; --weight-decay 0 makes it Adam"
_ANSWERS_ONLY = (
    "in conversations, only answers carry loss; --turns last trains on a row's last answer"
)
_PACKING = "where the architecture allows it, examples are always laid end to end"
_NEW_TOKENS = "new tokens are out of scope: LoRA trains no embeddings"
_FULL_FINE_TUNING = "full fine-tuning is out of scope: mlxtune trains LoRA, and DoRA with --dora"
_IMAGES = "images are out of scope: only a model's text part is trained"
_REFERENCE = "the reference is the model before the first step, so no option is needed"
_OWN_CHOICE = "mlxtune chooses this to suit the machine"


@dataclass(frozen=True, slots=True)
class OptionEquivalent:
    """Our equivalent of another tool's option.

    `ours` lists equivalent options: the first that a command has is suggested. A value in an entry,
    as in `quantize=4`, replaces the given value. `differs` states the differences or, if `ours` is
    empty, why we have no such option.
    """

    ours: tuple[str, ...]
    differs: str = ""


# Other tools' names of options, ours, and the difference. Names are written with `_`.
_TABLE: tuple[tuple[str, str, str], ...] = (
    # Model and data
    ("model model_name base_model model_name_or_path", "model_path", ""),
    ("dataset datasets dataset_name dataset_path train_dataset train_file", "data", ""),
    ("eval_dataset test_datasets valid_file", "val_data", ""),
    ("val_set_size val_size", "val_split", "a fraction of the rows; --val-rows bounds it"),
    ("dataset_text_field", "field=text=KEY", ""),
    ("hf_dataset", "data", "owner/name:split on Hugging Face, with --field for the columns"),
    ("max_seq_length max_length sequence_len model_max_length cutoff_len", "max_seq_len", ""),
    ("chat_template chat_template_path", "template", "the default is the model's own"),
    ("system_prompt", "system", ""),
    ("mask_prompt completion_only_loss assistant_only_loss", "", _ANSWERS_ONLY),
    ("train_on_inputs train_on_responses_only", "", _ANSWERS_ONLY),
    ("packing sample_packing padding_free group_by_length pad_to_sequence_len", "", _PACKING),
    ("dataset_prepared_path", "cache_dir", ""),
    ("overwrite_cache", "no_cache", ""),
    ("tokens special_tokens added_tokens add_tokens new_tokens", "", _NEW_TOKENS),
    (
        "modules_to_save lora_modules_to_save additional_target embedding_learning_rate",
        "",
        _NEW_TOKENS,
    ),
    ("image images image_folder image_size finetune_vision_layers", "", _IMAGES),
    # LoRA
    (
        "fine_tune_type finetuning_type",
        "",
        "mlxtune trains LoRA, or DoRA with --dora, but not all weights",
    ),
    ("full full_finetuning full_finetune", "", _FULL_FINE_TUNING),
    ("r lora_r lora_rank", "rank", ""),
    ("lora_alpha", "alpha", ""),
    ("scale lora_scale", "alpha=N", "alpha is scale times rank"),
    ("lora_dropout", "dropout", ""),
    (
        "target_modules lora_target_modules lora_target keys",
        "targets",
        "names separated by commas, or all",
    ),
    ("lora_target_linear", "targets=all", ""),
    ("lora_layers layers_to_transform lora_layers_to_transform", "num_layers", ""),
    ("lora_parameters", "rank", "with --alpha (scale times rank), --dropout and --targets"),
    ("rank_pattern", "target_rank=q_proj=16", ""),
    ("use_rslora peft_use_rslora", "rslora", ""),
    ("use_dora peft_use_dora", "dora", ""),
    ("init_lora_weights", "init=pissa", "lora or pissa"),
    ("loraplus_lr_ratio", "lr_ratio", ""),
    ("resume_adapter_file lora_model_dir", "init_adapter", ""),
    ("load_in_4bit", "quantize=4", "nf4 is QLoRA's"),
    ("load_in_8bit", "quantize=8", ""),
    ("quantization_bit", "quantize", ""),
    ("bnb_4bit_use_double_quant", "double_quant", ""),
    # Training
    ("learning_rate", "lr", ""),
    ("iters", "max_steps", "--epochs bounds the steps too"),
    ("num_train_epochs num_epochs n_epochs", "epochs", ""),
    ("per_device_train_batch_size micro_batch_size", "batch_size", "number of rows per step"),
    (
        "gradient_accumulation_steps grad_accumulation_steps gradient_accumulation "
        "grad_accumulation grad_accum grad_accum_steps accumulate_grad_batches",
        "batch_size=N",
        "number of rows per step, split as memory requires",
    ),
    ("gradient_checkpointing use_gradient_checkpointing", "grad_checkpoint=on", ""),
    ("lr_scheduler lr_scheduler_type lr_schedule", "schedule=warmup-cosine", ""),
    ("warmup_ratio", "warmup_fraction", ""),
    ("warmup warmup_steps", "warmup_fraction=0.1", "a fraction of the steps"),
    ("optim optimizer optimizer_config", "", _ADAMW),
    ("gradient_clipping", "max_grad_norm", ""),
    ("random_state", "seed", ""),
    ("training_mode train_mode rl stage", "objective", "sft, dpo or another of --help-all"),
    ("loss_type pref_loss", "dpo_loss", ""),
    ("pref_beta", "beta", ""),
    ("ref_model ref_model_path reference_model reference_model_path", "", _REFERENCE),
    (
        "limit max_samples num_samples",
        "",
        "all rows are used: to use fewer, run head -n 20 FILE > SMALL",
    ),
    ("neftune_noise_alpha", "", "mlxtune adds no noise to embeddings"),
    # Validation, checkpoints and records
    ("steps_per_eval eval_steps", "val_steps", "every epoch ends with a validation anyway"),
    ("eval_strategy evals_per_epoch", "val_steps=N", "every epoch ends with a validation anyway"),
    ("val_batches", "", "each validation covers all its rows; --val-rows limits their number"),
    ("test test_batches", "", "mlxtune eval measures an adapter on test data"),
    ("early_stopping_patience", "patience", ""),
    ("early_stopping", "patience=5", "number of validations in a row without a better loss"),
    ("save_strategy steps_per_save", "save_steps=N", ""),
    ("save_total_limit", "keep", ""),
    ("steps_per_report logging_steps", "log_every", ""),
    ("report_to", "track", ""),
    ("wandb use_wandb", "track=wandb", ""),
    ("qlora", "quantize=nf4", "LoRA is the default"),
    ("wandb_project project_name", "track=wandb", "the project is wandb's own setting"),
    ("output_dir", "output", ""),
    ("adapter_path", "adapter output", ""),
    ("save_path", "output", ""),
    ("resume_from_checkpoint", "resume", ""),
    ("hub_model_id push_to_hub upload_repo", "", "mlxtune push uploads a finished run"),
    ("export_gguf", "gguf", ""),
    ("de_quantize", "dequantize", ""),
    # Running
    ("bf16", "dtype=bfloat16", ""),
    ("fp16", "dtype=float16", ""),
    ("torch_dtype", "dtype", ""),
    ("max_tokens", "max_new_tokens", ""),
    ("temp", "temperature", ""),
    ("extra_eos_token stop_words", "stop", ""),
    ("force", "overwrite", ""),
    ("verbose", "", "everything is shown unless --quiet is given"),
    ("do_train do_eval", "", "each is a command: mlxtune train, mlxtune eval"),
    ("train", "", "leave it out: mlxtune train is a command"),
    ("clear_cache_threshold flash_attention attn_implementation", "", _OWN_CHOICE),
    ("device gpu gpus cpu num_gpus no_cuda", "", _OWN_CHOICE),
    ("per_device_eval_batch_size eval_batch_size use_cpu", "", _OWN_CHOICE),
    ("dataset_num_proc preprocessing_num_workers", "", _OWN_CHOICE),
)
# Options of a command that no config has, so that no file can set them.
FLAGS = ("dry_run", "resume", "open", "config", "debug")
EQUIVALENTS: Mapping[str, OptionEquivalent] = {
    name: OptionEquivalent(tuple(ours.split()), differs)
    for names, ours, differs in _TABLE
    for name in names.split()
}
# Commands, options that they lack, and what to use instead.
_COMMAND_HINTS: tuple[tuple[str, str, str], ...] = (
    ("report inspect", "output out", "--html FILE writes the page"),
    ("runs", "output out html", "mlxtune report writes a page"),
    ("bench", "output out", "--json FILE writes the figures"),
    (
        "eval verify",
        "output out html",
        "--json prints the result, and > FILE keeps it",
    ),
    (
        "train plan inspect eval",
        "system system_prompt",
        "each row has its own, in the key 'system' or in a first message",
    ),
    ("train plan inspect bench", "adapter", "--init-adapter continues training an adapter"),
    ("chat", "prompt messages", "mlxtune generate answers one prompt"),
    ("generate", "out html", "--json prints the result, and > FILE keeps it"),
    ("chat", "data", "mlxtune generate --data answers every row"),
    ("eval", "val_data val_split", "every row of --data is evaluated"),
    (
        "import report runs verify watch push",
        "adapter run",
        "pass the path alone, without an option",
    ),
    ("reward", "reward", "name a REWARD without an option, such as json"),
    ("push", "private", "leave it out: private is the default"),
    ("push", "repo repo_id repository hub_model_id", "name OWNER/NAME after the run"),
    ("push", "token hf_token", "run hf auth login, or set HF_TOKEN"),
    ("watch", "port host", "the page is always on 127.0.0.1, on a free port"),
)
COMMAND_HINTS: Mapping[tuple[str, str], str] = {
    (command, name): answer
    for commands, names, answer in _COMMAND_HINTS
    for command in commands.split()
    for name in names.split()
}
# Commands of other tools, and ours.
COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("lora", "sft", "finetune", "fine-tune", "qlora"), "mlxtune train"),
    **{name: f"mlxtune train --objective {name}" for name in ("dpo", "kto", "orpo", "cpo")},
    **dict.fromkeys(("evaluate", "perplexity", "test"), "mlxtune eval"),
    **dict.fromkeys(("merge", "merge-lora"), "mlxtune fuse"),
    **dict.fromkeys(("inference", "predict"), "mlxtune generate"),
    **dict.fromkeys(
        ("convert", "quantize"), "mlxtune train --quantize 4, which needs no conversion"
    ),
    "server": "mlxtune serve",
    **dict.fromkeys(("upload", "share"), "mlxtune push"),
    "resume": "mlxtune train --resume",
}
# Writes an option and its value, if it has one, in the caller's style: as a flag, a file's entry or
# a keyword.
Writer = Callable[[str, str | None], str]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_flag(name: str, value: str | None) -> str:
    """Return an option as the command line takes it."""
    return flag(name) if value is None else f"{flag(name)} {shlex.quote(value)}"


def as_entry(name: str, value: str | None) -> str:
    """Return an option as a config file takes it."""
    return f"{name}: {'true' if value is None else value}"


def as_keyword(name: str, value: str | None) -> str:
    """Return an option as Python takes it."""
    return f"{name}={'True' if value is None else value}"


def equivalent_hint(
    name: str, value: Any, own: Collection[str], write: Writer, flags: Collection[str] = ()
) -> str | None:
    """Return our equivalent of another tool's option, as the end of a message, or None.

    `own` has the command's options, and `flags` its options without a value. `value` is the given
    value, or None to leave it out.
    """
    equivalent = EQUIVALENTS.get(name)
    if equivalent is None:
        return None
    if not equivalent.ours:
        return f": {equivalent.differs}"
    for ours in equivalent.ours:
        option, fixed, text = ours.partition("=")
        if option in own:
            shown = text if fixed else (None if option in flags else _value_text(value))
            return f": use {write(option, shown)}" + (
                f" ({equivalent.differs})" if equivalent.differs else ""
            )
    return None


def _value_text(value: Any) -> str:
    """Return a value as text to repeat in a message; an ellipsis if it is long or unprintable."""
    values = value if isinstance(value, list | tuple) else [value]
    text = ",".join(map(str, values))
    is_shown = all(isinstance(each, str | int | float) for each in values) and text.isprintable()
    return text if is_shown and len(text) <= 60 else "…"


def suggestion(
    name: str, value: Any, own: Collection[str], write: Writer, flags: Collection[str] = ()
) -> str:
    """Return the end of a message about an unknown option: our equivalent, or a similar name."""
    plain = name[:60].replace("-", "_")
    if plain in FLAGS and write is not as_flag:
        return f": it is a flag of the command, {as_flag(plain, None)}"
    if plain in EQUIVALENTS:
        return equivalent_hint(plain, value, own, write, flags) or ""
    close = difflib.get_close_matches(plain, own, n=1)
    hint = "".join(close)
    if close and write is as_flag:
        # Only an option of the same name is certain to take this value.
        shown = _value_text(value) if hint == plain and hint not in flags and value else None
        hint = as_flag(hint, shown)
    return f" (did you mean {hint}?)" if hint else ""


def unknown_keyword(name: str, value: Any, own: Collection[str], flags: Collection[str]) -> str:
    """Return the message for a Python keyword that is not an option."""
    shown = repr(value) if isinstance(value, str | int | float | list | tuple) else "…"
    return f"unknown option {shorten(name)}{suggestion(name, shown, own, as_keyword, flags)}"
