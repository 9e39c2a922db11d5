"""Compare everything on with the plain path, on tiny random models of many architectures.

    python -m tests.long.check_architectures [NAME ...]

Prints for each which of the optimisations it gets, and how far loss and gradients are from those of
the plain path. tests/backend/step/test_execution_architectures.py has some of them.

Results: tests/long/README.md.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.cpu.operations import CPU
from mlxtune.backend.step.operations import MLX
from mlxtune.core.steps.execution import Execution
from mlxtune.errors import ModelError
from tests.backend.step.executions import fixed_step, fresh, gradients_of
from tests.models import write_model

_MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_MLA |= {"qk_nope_head_dim": 16, "num_key_value_heads": 4, "rope_interleave": True}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERTS |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_ROUTED |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_ROUTED |= {"moe_layer_freq": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
_TEXT |= {"vocab_size": 320, "tie_word_embeddings": False}
_YARN: dict[str, Any] = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
_MAMBA: dict[str, Any] = {
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
}
_MAMBA |= {"mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_ssm": 128}
_LFM2: dict[str, Any] = {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3}
_LFM2 |= {"block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 32}
_LFM2 |= {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "llama (window)": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "mistral3": {"text_config": {"model_type": "llama", **_TEXT}},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 320,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
    },
    "qwen2": {},
    "qwen": {"kv_channels": 16, "intermediate_size": 192},
    "qwen2_moe": {"shared_expert_intermediate_size": 32, **_EXPERTS},
    "qwen3_moe": {"tie_word_embeddings": False, **_EXPERTS},
    "qwen3_next": {
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        **_EXPERTS,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**_EXPERTS, "num_experts": 4},
    "phi": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "rope_dim": 8},
    "phi3": {"partial_rotary_factor": 0.5},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "num_hidden_layers": 4},
    "cohere": {"logit_scale": 0.0625, "layer_norm_bias": False},
    "cohere2": {
        "logit_scale": 0.0625,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "layer_norm_eps": 1e-5,
    },
    "granite": {
        "logits_scaling": 8.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0},
    "minicpm3": {
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 12.0,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "num_key_value_heads": 4,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 512,
        },
    },
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "starcoder2": {},
    "gpt2": {
        "n_ctx": 512,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
    },
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "intermediate_size": 64,
    },
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "deepseek_v2": {**_MLA, **_ROUTED, "topk_method": "greedy", "rope_scaling": _YARN},
    "deepseek_v3": {**_MLA, **_ROUTED, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "exaone4": {
        "sliding_window": 8,
        "sliding_window_pattern": "LG",
        "tie_word_embeddings": False,
        "rope_scaling": None,
    },
    "smollm3": {"tie_word_embeddings": True, "no_rope_layer_interval": 2},
    "ernie4_5": {"use_bias": False, "tie_word_embeddings": True},
    "seed_oss": {},
    "internlm2": {"bias": False},
    "helium": {"mlp_bias": False, "attention_bias": False, "tie_word_embeddings": True},
    "nanochat": {},
    "hunyuan": {
        "attention_bias": False,
        "moe_topk": 1,
        "num_experts": 1,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": False,
        "use_qk_norm": True,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "cla_share_factor": 2,
        "tie_word_embeddings": True,
    },
    "llama4_text": {
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 96,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
        "attn_temperature_tuning": 4,
        "no_rope_layers": [1, 0],
        "use_cache": True,
        "tie_word_embeddings": False,
    },
    "mamba": {
        "state_size": 8,
        "intermediate_size": 128,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        "num_heads": 8,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "head_dim": 16,
        "chunk_size": 32,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 4,
        "residual_in_fp32": False,
        "rms_norm": True,
        "tie_word_embeddings": True,
    },
    "falcon_h1": dict(_MAMBA),
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "nemotron_h": {
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": list("M*-"),
        "num_hidden_layers": 3,
    },
    "lfm2": {
        **_LFM2,
        "layer_types": ["conv", "full_attention"],
    },
    "lfm2 (attention first)": {
        **_LFM2,
        "layer_types": ["full_attention", "conv"],
    },
    "granitemoehybrid": {
        "logits_scaling": 8.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "position_embedding_type": "rope",
        "normalization_function": "rmsnorm",
        "intermediate_size": 96,
    },
    "rwkv7": {"head_dim": 16, "norm_eps": 1e-5, "decay_low_rank_dim": 8, "a_low_rank_dim": 8}
    | {"gate_low_rank_dim": 8, "v_low_rank_dim": 8},
}


@dataclass(frozen=True)
class Result:
    """What an architecture gets, and how far it is from the plain path, relative to the largest."""

    gets: dict[str, bool]
    loss: float
    gradient: float

    @property
    def same(self) -> bool:
        """Tell whether all is within the tolerances of the equality tests."""
        return self.loss <= 1e-5 and self.gradient <= 1e-4


def check(name: str, folder: Path, **config: Any) -> Result:
    """Compare an architecture with everything on, by the CPU's functions and without them."""
    write_model(folder, name.split()[0], **ARCHITECTURES[name])
    examples = fixed_step()
    plain = fresh(folder, **config).loss_and_gradients(examples)
    expected_loss, tree = plain.loss, plain.gradients
    expected = gradients_of(tree)
    largest = max(np.abs(value).max() for value in expected.values())
    loss_distance = distance = 0.0
    for how in (
        Execution(MLX, packs=False, recompute=True),
        Execution(MLX, recompute=True),
        Execution(CPU, packs=False),
        Execution(CPU),
    ):
        fast = fresh(folder, how, 10_000, **config)
        result = fast.loss_and_gradients(examples)
        loss, tree = result.loss, result.gradients
        found = gradients_of(tree)
        loss_distance = max(loss_distance, abs(loss - expected_loss) / abs(expected_loss))
        for key, value in expected.items():
            # What is not a number counts as far away.
            difference = np.nan_to_num(np.abs(found[key] - value), nan=np.inf)
            distance = max(distance, float(difference.max() / largest))
    gets = {
        "split": fast.forward.execution.split_head,
        "head": fast.forward.plain_head,
        "layerwise": fast.forward.layerwise is not None,
        "line": fast.forward.execution.packs,
    }
    return Result(gets, loss_distance, distance)


def main() -> int:
    """Print a line for each architecture; return how many differ or fail.

    LoRA is on all projections, then on two before the attention, where a layer's backward pass
    reads least.
    """
    failed = 0
    for name, targets in product(sys.argv[1:] or ARCHITECTURES, (("all",), ("q_proj", "v_proj"))):
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = check(name, Path(folder), targets=targets)
            except ModelError:  # it has no projections of these names
                continue
            except Exception as error:  # noqa: BLE001
                failed += 1
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(frame.filename).name}:{frame.lineno}"
                print(f"{name:18} FAILS {type(error).__name__}: {str(error)[:150]} ({where})")
                continue
        failed += not result.same
        gets = " ".join(key if value else f"no-{key}" for key, value in result.gets.items())
        verdict = "same" if result.same else "DIFFERS"
        apart = f"loss {result.loss:.0e} grad {result.gradient:.0e}"
        print(f"{name:18} {targets[0]:6} {verdict:8} {apart}  {gets}")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
