"""The projections that --targets names, and targets that cannot be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from mlxtune.backend.lora.targets import choose_targets, experts_per_token
from mlxtune.backend.models.loading import open_base
from mlxtune.config import InstructConfig
from mlxtune.errors import ModelError
from tests.experts import EXPERTS
from tests.models import write_model


def opened(folder: Path, architecture: str, **config: Any) -> nn.Module:
    return open_base(
        write_model(folder, architecture, **EXPERTS[architecture], **config), "auto"
    ).model


def keys_of(model: nn.Module, *targets: str, **options: Any) -> set[str]:
    """Return the paths, within their layers, of the projections that the targets choose."""
    chosen = choose_targets(model, InstructConfig(targets=targets, **options))
    return {path.partition(".layers.")[2].partition(".")[2] for path in chosen}


@pytest.mark.parametrize("architecture", EXPERTS)
def test_all_takes_every_expert_and_no_router(tmp_path: Path, architecture: str) -> None:
    model = opened(tmp_path, architecture)
    modules = dict(model.layers[-1].named_modules())
    experts = {path for path, module in modules.items() if isinstance(module, SwitchLinear)}
    keys = keys_of(model, "all")
    assert len(experts) in (2, 3)
    assert experts <= keys
    # The names of linear routers in mlx-lm's models.
    routers = {
        "mlp.gate",
        "mlp.router",
        "block_sparse_moe.gate",
        "feed_forward.gate",
        "router.proj",
    }
    assert not keys & {*routers, "feed_forward.router", "block_sparse_moe.router.layer"}


def test_router_trains_if_it_is_named(tmp_path: Path) -> None:
    model = opened(tmp_path, "qwen3_moe")
    assert keys_of(model, "mlp.gate") == {"mlp.gate"}


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (
            ("down_proj",),
            {"dropout": 0.1},
            "--dropout does not work on the experts of model.layers.0",
        ),
        (("all",), {"dora": True}, "--dora does not work on the experts of model.layers.0.mlp.sw"),
        (("all",), {"init": "pissa_niter_4"}, "--init pissa_niter_4 does not work on the experts"),
        (("q_proj",), {"init": "pissa", "lora_rank": 65}, "has only 64 singular vectors"),
        (("q_proj",), {"target_rank": ("v_proj=4",)}, "no target is named v_proj"),
        (("all-linear",), {}, r"all-linear \(did you mean all\?\)"),
    ],
)
def test_untrainable_model_is_refused_before_weights_are_read(
    tmp_path: Path, targets: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    model = opened(tmp_path, "qwen3_moe")
    with pytest.raises(ModelError, match=message):
        keys_of(model, *targets, **options)


@pytest.mark.parametrize("architecture", EXPERTS)
def test_how_many_experts_a_token_goes_to_is_known_by_each_name(architecture: str) -> None:
    # tests/experts.py configures one or two experts per token.
    config = EXPERTS[architecture]
    assert experts_per_token(config.get("text_config", config)) in (1, 2)


def test_most_experts_of_any_layer_count() -> None:
    assert experts_per_token({"moe_topk": [2, 6, 1]}) == 6
    assert experts_per_token({"num_experts_per_tok": 0, "hidden_size": 64}) is None
