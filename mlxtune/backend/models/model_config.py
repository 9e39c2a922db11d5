"""Contradictions in a config.json, and its conflicts with known bounds and the model's weights."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlxtune.backend.models.config_keys import PARTS

# The maximum for counts that libraries turn into lists, in some cases just to load the tokenizer.
_MAX_COUNT = 10_000
# The maximum width of a matrix or size of a vocabulary: forty times the largest known.
_MAX_WIDTH = 10_000_000
# Keys that count layers; Gemma 3n's vocab_size_per_layer_input is not such a key.
LAYERS = re.compile(r"(?!.*per_layer).*layer.*|.*pattern")
_COUNTED_KEYS = re.compile(
    rf"{LAYERS.pattern}|.*(?:experts|_(?:inputs|blocks|stages|modules|groups|depths?))"
)
_COUNT_KEYS = re.compile(
    r"n(?:um)?_(?:\w+_)?(?:layers|heads|experts)|(?:\w+_)?head_dim"
    r"|(?:\w+_)?(?:hidden|intermediate|vocab)_size"
    r"|num_experts_per_tok(?:en)?|top_k_experts|moe_(?:k|topk|top_k)|topk_group|n_groups?"
    r"|(?:kv|q|o)_lora_rank|first_k_dense_replace|decoder_sparse_step|n_(?:embd|head|layer)"
)
# Numbers that configs give once for the whole model, never as a list.
_SCALAR_KEYS = ("vocab_size", "hidden_size", "max_position_embeddings")
# Values that must be positive: angles are divided by them, or by powers of them.
_POSITIVE_KEYS = re.compile(r".*theta|.*base_freq|rotary_emb_base|factor|(?:long|short)_factor")
_NUMBER_KEYS = re.compile(rf"{_POSITIVE_KEYS.pattern}|.*(?:eps|epsilon)")
# Values that must be finite; Mamba's time_step_limit is not among them, as it may be infinite.
_FINITE_KEYS = re.compile(r".*(?:eps|epsilon|theta|base_freq|factor|scale|scaling|multiplier)")
# The maximum for factors and bases; the maximum for an epsilon is 1.
_MAX_NUMBER = 1e15
# The number of digits that are read from a number given as text.
_MAX_NUMBER_CHARS = 20
# The values that MLX supports for each parameter of a quantised format.
FORMATS: dict[str, tuple[Any, ...]] = {
    "group_size": (16, 32, 64, 128),
    "bits": (2, 3, 4, 5, 6, 8),
    "mode": ("affine", "mxfp4", "mxfp8", "nvfp4"),
}
# Pairs of keys: the first value must be a multiple of the second.
_MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("num_attention_heads", "num_global_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("n_routed_experts", "n_group"),
)
_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN_KEYS = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_k", "moe_topk", "moe_top_k"),
)
# MLX's error for a weight of the wrong shape.
_OTHER_SHAPE = re.compile(
    r"Expected shape \((.*?)\) but received shape \((.*?)\) for parameter (\S+)"
)
# Parts of the names of layer kinds in transformers and mlx-lm.
_KINDS = re.compile(
    r"\w*(?:attention|attn|full|linear|sliding|window|sparse|dense|mlp|moe|conv|hybrid|mamba|ssm"
    r"|recurrent)\w*"
)


def config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a config and of the language model's part of it."""
    for name, count in counts(config, _COUNTED_KEYS):
        if count > _MAX_COUNT:
            yield f"{name} is more than {_MAX_COUNT:,}"
            return
    for part in (config, *(config.get(name) for name in PARTS)):
        if isinstance(part, Mapping):
            problems = list(_no_counts(part))
            yield from problems or _contradictions(part)
            yield from _unknown_formats(part)
    yield from _senseless(config)


def _senseless(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of factors and epsilons at any depth: invalid types and values."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _senseless(value)
        for each in value if isinstance(value, list) else [value]:
            if problem := _senseless_number(name, each):
                yield f"{name} is {problem}"
                break


def _senseless_number(name: str, value: Any) -> str | None:
    if isinstance(value, str | bool):
        return f"{value!r:.40}, not a number" if _NUMBER_KEYS.fullmatch(name) else None
    if not isinstance(value, int | float) or not (
        _FINITE_KEYS.fullmatch(name) or _NUMBER_KEYS.fullmatch(name)
    ):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, not a finite number"
    if abs(value) > (most := 1 if "eps" in name else _MAX_NUMBER):
        return f"{value:.3g}, more than {most:g}"
    if value <= 0 and _POSITIVE_KEYS.fullmatch(name):
        return f"{value}, not above 0"
    if value < 0 and _NUMBER_KEYS.fullmatch(name):
        return f"{value}, less than 0"
    return None


def counts(config: Mapping[str, Any], names: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """Yield the counts under keys with matching names, at any depth: numbers or lengths of lists.

    A pattern of layers may be a string, with a character for each layer, and so may a number.
    """
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("config"):
            yield from counts(value, names)
        elif names.fullmatch(name):
            if isinstance(value, int):
                yield name, value
            elif isinstance(value, list) or (isinstance(value, str) and "pattern" in name):
                yield name, len(value)
            elif isinstance(value, str) and value.isdecimal():
                yield name, int(value[:_MAX_NUMBER_CHARS])


def _no_counts(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if _COUNT_KEYS.fullmatch(name) and not isinstance(value, list | None):
            if type(value) is not int:
                yield f"{name} is not an integer: {value!r:.40}"
            elif value < 0:
                yield f"{name} is {value}, less than 0"
            elif value > _MAX_WIDTH:
                yield f"{name} is more than {_MAX_WIDTH:,}"
        elif (isinstance(value, list) and name in _SCALAR_KEYS) or (
            name == "max_position_embeddings" and isinstance(value, str | Mapping)
        ):
            yield f"{name} is not an integer: {value!r:.40}"
        elif (
            isinstance(value, list) and name in _EXPERTS_PER_TOKEN_KEYS and not _are_integers(value)
        ):
            yield f"{name} is not a list of integers: {value!r:.40}"


def _are_integers(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int for value in values)


def _unknown_formats(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of quantised formats: values unknown to MLX, and a group size of 0.

    `quantization` has MLX's formats, also for single layers; `quantization_config` has formats of
    other tools, of which only the group size is checked, because libraries divide by it.
    """
    ours, others = config.get("quantization"), config.get("quantization_config")
    if isinstance(others, Mapping) and others.get("group_size", 1) == 0:
        yield "quantization_config has group_size 0"
    if not isinstance(ours, Mapping):
        return
    yield from _unknown_format("quantization", ours)
    for name, value in ours.items():
        if isinstance(value, Mapping):
            yield from _unknown_format(f"quantization of {name:.100}", value)


def _unknown_format(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    for name, formats in FORMATS.items():
        if name in values and values[name] not in formats:
            yield f"{where} has {name} {values[name]!r:.40}, not {', '.join(map(str, formats))}"


def _contradictions(config: Mapping[str, Any]) -> Iterator[str]:
    for whole, part in _MULTIPLES:
        a, b = config.get(whole), config.get(part)
        if type(a) is type(b) is int and b > 0 and a % b:
            yield f"{whole} is {a}, which is not a multiple of {part} ({b})"
    experts = next((name for name in _EXPERT_COUNT_KEYS if type(config.get(name)) is int), None)
    # Models with a single expert have plain layers.
    if experts is not None and (count := config[experts]) > 1:
        for name in _EXPERTS_PER_TOKEN_KEYS:
            used = config.get(name, 1)
            if type(used) is int and not 1 <= used <= count:
                yield f"{name} is {used}, but {experts} is {count}"
    yield from _layer_kinds(config)


def _layer_kinds(config: Mapping[str, Any]) -> Iterator[str]:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is None or type(layers) is not int:
        return
    # Layers for multi-token prediction come last, and may be listed too.
    further = config.get("num_nextn_predict_layers")
    most = layers + (further if type(further) is int else 0)
    if not isinstance(kinds, list) or not layers <= len(kinds) <= most:
        length = len(kinds) if isinstance(kinds, list) else repr(kinds)[:40]
        yield f"layer_types has {length} entries, but num_hidden_layers is {layers}"
    elif unknown := [kind for kind in kinds if not _KINDS.fullmatch(str(kind))]:
        yield f"layer_types has {unknown[0]!r:.40}, which is not a kind of layer"


def misfit(error: Exception, config: Mapping[str, Any]) -> str | None:
    """Explain MLX's error for a weight of the wrong shape; return None for other errors."""
    if (match := _OTHER_SHAPE.search(str(error))) is None:
        return None
    expected, stored, name = match.groups()
    shapes = [[int(n) for n in re.findall(r"\d+", shape)] for shape in (expected, stored)]
    sizes = {
        key: value
        for part in (config, *(config.get(part) for part in PARTS))
        if isinstance(part, Mapping)
        for key, value in part.items()
        if _COUNT_KEYS.fullmatch(key) and not key.endswith("layers") and type(value) is int
    }
    fitting = {a for a, b in zip(*shapes, strict=False) if a == b}
    keys = {
        key
        for key, value in sizes.items()
        for ours, theirs in zip(*shapes, strict=False)
        if ours != theirs and value not in fitting and _explains(value, ours, theirs)
    }
    look = f"check {', '.join(sorted(keys))}, or " if keys else ""
    return (
        f"does not fit the weights: it gives {name} the shape ({expected}), but the weights have "
        f"the shape ({stored}): {look}download the model again"
    )


def _explains(value: int, ours: int, theirs: int) -> bool:
    """Return whether another value of a key could make the dimension `theirs` instead of `ours`."""
    if value < 2 or ours == 0 or ours % value:
        return value == ours
    return theirs % (ours // value) == 0
