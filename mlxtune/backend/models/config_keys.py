"""The keys of a config.json that mlx-lm's classes read: renamed where they read older names.

A key that changes the computation and that no class reads makes another model of the folder's.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

# The keys under which configs of multimodal models keep the language model's part.
PARTS = ("text_config", "llm_config", "language_config")
_MODELS_PREFIX = "mlx_lm.models."
# Keys that describe training, files, tokens, images or sound, or how other tools run the model.
_IGNORED_KEYS = re.compile(
    r"_.*|.*(?:token_id|token_ids|token_index|tokens_per_image|_token)s?|architectures|model_type"
    r"|.*(?:vision|visual|audio|speech|image|video|multi_?modal|mm_|projector).*|.*_plan"
    r"|transformers(?:_version|\.js_config|_js_config)|unsloth_.*|torch_dtype|dtype|torchscript"
    r"|name|name_or_path|auto_map|model_file|custom_pipelines|license|tags"
    r"|quantization(?:_config)?|compression_config|use_cache|cache_implementation|cache_config"
    r"|initializer_.*|.*_initializer_range|init_.*|.*_init(?:_\w+)?|rescale_prenorm_residual"
    r"|.*(?:dropout|_pdrop|_drop)(?:_prob|_rate|_p)?|.*dropout_\w+|label_smoothing|gradient_.*"
    r"|.*(?:aux_loss|z_loss)\w*|seq_aux|output_.*|return_dict\w*|is_(?:en|de)coder\w*|id2label"
    r"|label2id|num_labels|problem_type|task_specific_params|finetuning_task|classifier_.*"
    r"|summary_.*|keys_to_ignore_at_inference|pruned_heads|chunk_size_feed_forward"
    r"|(?:max|min)_length|num_beams|num_beam_groups|do_sample|temperature|top_[kp]|typical_p"
    r"|repetition_penalty|length_penalty|no_repeat_ngram_size|num_return_sequences|diversity_.*"
    r"|early_stopping|bad_words_ids|sep_token\w*|prefix|forced_\w+|suppress_tokens|begin_suppress.*"
    r"|exponential_decay_.*|encoder_no_repeat_.*|tie_encoder_decoder|remove_invalid_values"
    r"|max_position_embeddings|n_positions|n_ctx|seq_length|max_seq(?:uence)?_?len(?:gth)?"
    r"|model_max_length|initial_context_length|max_window_layers|use_sliding_window|ep_size"
    r"|pretraining_tp|tp_size|pad_vocab_size_multiple|attn_implementation|use_flash_attn\w*"
    r"|use_mamba_kernels|fused?_\w+|use_fused?_\w+|.*parallel_?(?:mode|size)|num_nextn_\w+|mtp_\w+"
    r"|num_mtp_\w+|bf16|fp16|fp32|use_bfloat16|onnx_safe|rms_norm|.*softmax_in_fp32"
    r"|time_step_\w+|residual_in_fp32|use_associative_scan|num_logits_to_keep|is_llama_config"
    r"|experts_per_token|layer_switch|use_embedding_sharing|use_gated_activation|use_parallel_block"
    r"|use_rotary_pos_emb|predict_special_tokens|weight_share_add_bias|use_rmsnorm|use_recompute\w*"
    r"|.*_cache_dtype|original_max_position_embeddings|disable_exllama"
    r"|tokenizer_class|(?:vocab|tokenizer)_\w*(?:type|name|version)|pretrained_\w+|conversation\w*"
    r"|non_linearity_\w*|use_return_dict|cross_attention\w*|add_cross_attention|router_jitter_noise"
)
# Sizes, and flags of further tensors, show in the weights, which must fit the model.
_WEIGHT_KEYS = re.compile(
    r"n_(?:embd|inner|head|layer)|.*_size_per_layer_input|.*(?:hidden_size|intermediate_size|ffn_size|vocab_size|_heads?"
    r"|_layers|_experts|_ff_dim|block_dim|head_dim)|kv_channels|block_multiple_of|(?!attention_).*chunk_size"
    r"|(?:.*_)?expand|tie_word_embeddings|(?:.*_)?bias|use_(?:\w+_)?bias|(?:use_)?qk_(?:layer)?norm"
)
# Names that a class may have instead of its own, as the reference implementation ignores them.
_OTHER_NAMES = re.compile(r".*(?:eps|epsilon)|rope_theta")
# The older names of a rope's theta, and of the part of each head that it turns.
_THETA_KEYS = ("rope_theta", "rotary_emb_base")
_ROTARY_FRACTION_KEYS = ("partial_rotary_factor", "rotary_pct")
# Examples within the window are computed the same; Phi-3's window is the shortest that is ignored.
_LONG_WINDOW = 2047
# Factors that change nothing if they are 1.
_FACTOR = re.compile(
    r".*(?:multiplier|scale|scaling|factor|alpha|ratio|interval|groups?|freq|step|beta|mod|pct)"
)
# Several keys give the kinds of layers, and a class reads one of them.
_KINDS_OF_LAYERS = frozenset(["layer_types", "sliding_window_pattern", "full_attention_interval"])
_ACTIVATION = re.compile(r".*(?:act|activation|act_fn|activation_function|nonlinearity)")
# The names that activations have in configs and in the code of mlx-lm.
_FAMILIES = {
    **dict.fromkeys(("silu", "swish", "swiglu"), r"silu|swish|swiglu"),
    **dict.fromkeys(
        ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "geglu"),
        r"gelu|geglu",
    ),
    **dict.fromkeys(("relu2", "relu_squared", "relu"), r"relu"),
    "xielu": "xielu",
    "sigmoid": "sigmoid",
}


@lru_cache(32)
def _sources(name: str) -> tuple[frozenset[str], str]:
    """Return the keys that an architecture's module and its imports read, and their source."""
    module = __import__(name, fromlist=["ModelArgs"])
    keys: set[str] = set()
    sources = []
    for each in _with_imports(module):
        source = inspect.getsource(each)
        sources.append(source)
        keys |= {*re.findall(r"[\"'](\w+)[\"']", source)}
        for _, member in inspect.getmembers(each, inspect.isclass):
            if dataclasses.is_dataclass(member):
                keys |= {field.name for field in dataclasses.fields(member)}
    return frozenset(keys), "\n".join(sources)


def _with_imports(module: ModuleType) -> Iterator[ModuleType]:
    """Yield a module and the architectures that it imports, for their parts of the config."""
    seen, left = {module.__name__}, [module]
    while left:
        yield (each := left.pop())
        for _, member in inspect.getmembers(each):
            name = str(
                getattr(member, "__name__" if inspect.ismodule(member) else "__module__", "")
            )
            if name.startswith(_MODELS_PREFIX) and name not in seen:
                seen.add(name)
                if hasattr(sys.modules[name], "ModelArgs"):
                    left.append(sys.modules[name])


def with_known_keys(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return a config whose RoPE settings also stand under the names that mlx-lm's class reads.

    transformers 5 writes them as `rope_parameters` alone: one object, or one for each kind of
    layer.
    """
    renamed = dict(config)
    for part in PARTS:
        if isinstance(inner := config.get(part), Mapping):
            renamed[part] = _with_rope_keys(inner, _sources_of_part(inner, architecture)[0])
    return _with_rope_keys(renamed, _sources(_MODELS_PREFIX + architecture)[0])


def _sources_of_part(part: Mapping[str, Any], architecture: str) -> tuple[frozenset[str], str]:
    """Return the keys and the source of a language model's part, which may have its own module."""
    kind = str(part.get("model_type"))
    try:
        return _sources(_MODELS_PREFIX + MODEL_REMAPPING.get(kind, kind))
    except (ImportError, SystemExit):  # the module asks for another package, or does not exist
        return _sources(_MODELS_PREFIX + architecture)


def _with_rope_keys(config: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    renamed, rope = dict(config), config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_parameters" in keys:
        return renamed
    layers = {name: each for name, each in rope.items() if isinstance(each, Mapping)}
    whole = layers.get("full_attention", rope)
    sliding = layers.get("sliding_attention", {})
    values: dict[str, Any] = {
        **dict.fromkeys(_THETA_KEYS, whole.get("rope_theta")),
        **dict.fromkeys(_ROTARY_FRACTION_KEYS, whole.get("partial_rotary_factor")),
        "rope_local_base_freq": sliding.get("rope_theta"),
        "original_max_position_embeddings": whole.get("original_max_position_embeddings"),
    }
    if _is_scaled(whole):
        values["rope_scaling"] = {k: v for k, v in whole.items() if k != "rope_theta"}
    # The newer name is the one that transformers reads.
    return renamed | {k: v for k, v in values.items() if v is not None and k in keys}


def _is_scaled(rope: Mapping[str, Any]) -> bool:
    return rope.get("rope_type", rope.get("type", "default")) != "default"


def _unread_in_rope(rope: Any, keys: frozenset[str]) -> dict[str, Any]:
    """Return the entries of `rope_parameters` that a class without this key reads nowhere else."""
    if not isinstance(rope, Mapping):
        return {"rope_parameters": rope}
    layers = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]
    thetas = {layer.get("rope_theta") for layer in layers}
    partial = {layer.get("partial_rotary_factor", 1) for layer in layers} - {1, None}
    kinds = [layer.get("rope_type", layer.get("type")) for layer in layers if _is_scaled(layer)]
    unread: dict[str, Any] = {}
    if keys.isdisjoint(_THETA_KEYS) or not (len(thetas) == 1 or "rope_local_base_freq" in keys):
        unread["rope_theta"] = next(iter(thetas)) if len(thetas) == 1 else sorted(thetas, key=str)
    if partial and keys.isdisjoint(_ROTARY_FRACTION_KEYS):
        unread["partial_rotary_factor"] = min(partial, key=str)
    if kinds and "rope_scaling" not in keys:
        unread["rope_type"] = kinds[0]
    return {f"rope_parameters.{name}": value for name, value in unread.items()}


def unread_config_keys(config: Mapping[str, Any], architecture: str) -> list[str]:
    """Return the keys, with their values, that change the model but that mlx-lm does not read."""
    listed: list[str] = []
    parts = {"": config}
    parts |= {f"{name}.": inner for name in PARTS if isinstance(inner := config.get(name), Mapping)}
    for prefix, part in parts.items():
        # What stands beside the language model's part is about images and sound.
        if not prefix and len(parts) > 1:
            continue
        keys, source = _sources(_MODELS_PREFIX + architecture)
        if prefix:  # a wrapper may use the module of its part
            inner_keys, inner_source = _sources_of_part(part, architecture)
            keys, source = keys | inner_keys, source + inner_source
        kind = str(part.get("model_type", config.get("model_type")))
        unread = {
            key: value
            for key, value in part.items()
            if key not in keys and not _is_harmless(key, value, part, source, keys)
        }
        if unread:
            defaults = _defaults(kind)
            for key, value in unread.items():
                if _differs(key, value, defaults):
                    named = {key: value}
                    if key == "rope_parameters":
                        named = _unread_in_rope(value, keys)
                    listed += [
                        f"{prefix}{name} ({_short_repr(each)})" for name, each in named.items()
                    ]
    return listed


def _short_repr(value: Any) -> str:
    """Return a value, cut between two words if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else (text[:60].rpartition(" ")[0] or text[:60]) + " …"


def _differs(key: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Return whether a key changes the model, compared with transformers' defaults."""
    default = defaults.get(key)
    if isinstance(default, list) and isinstance(value, list):
        # A pattern of layers has an entry for each layer.
        return any(ours != theirs for ours, theirs in zip(value, default, strict=False))
    if key in defaults:
        return bool(default != value)
    return not isinstance(value, str) and _OTHER_NAMES.fullmatch(key) is None


def _is_harmless(
    key: str, value: Any, config: Mapping[str, Any], source: str, keys: frozenset[str]
) -> bool:
    """Return whether a key that no class reads changes nothing."""
    if value is None or value is False or value == 0 or value in ("", [], {}):
        return True
    if _IGNORED_KEYS.fullmatch(key) or _WEIGHT_KEYS.fullmatch(key) or key in PARTS:
        return True
    if key == "rope_parameters":
        return not _unread_in_rope(value, keys)
    if _ACTIVATION.fullmatch(key):
        family = _FAMILIES.get(str(value).lower())
        return family is not None and re.search(family, source, re.IGNORECASE) is not None
    if key in _KINDS_OF_LAYERS and any(config.get(name) for name in _KINDS_OF_LAYERS & keys):
        return True
    if key == "layer_types":
        return {*value} == {"full_attention"} if isinstance(value, list) else False
    if key == "rope_interleave":
        return "traditional=True" in source
    if key in ("sliding_window", "attention_chunk_size"):
        longest = config.get("max_position_embeddings")
        unused = config.get("use_sliding_window") is False
        most = min(longest, _LONG_WINDOW) if isinstance(longest, int) else _LONG_WINDOW
        return unused or (isinstance(value, int) and value >= most)
    return value == 1 and _FACTOR.fullmatch(key) is not None


@lru_cache(8)
def _defaults(model_type: str) -> Mapping[str, Any]:
    """Return transformers' defaults of a model type, which are the values of mlx-lm's code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return dict(CONFIG_MAPPING[model_type]().to_dict())
    except Exception:  # noqa: BLE001  a type unknown to transformers, or without defaults
        return {}
    finally:
        logging.set_verbosity(before)
