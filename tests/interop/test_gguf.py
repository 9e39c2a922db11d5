"""LoRA adapters as GGUF, against llama.cpp's converter and llama.cpp itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

gguf = pytest.importorskip(
    "gguf", reason="needs the gguf package: pip install 'mlxtune-lora[gguf]'"
)

from mlxtune import ExportConfig, ModelError, TrainConfig, export, train  # noqa: E402
from mlxtune.backend.adapters.adapter_file import AdapterFile  # noqa: E402
from mlxtune.backend.adapters.file_formats.adapter import WeightUpdate  # noqa: E402
from mlxtune.backend.adapters.file_formats.gguf import orders  # noqa: E402
from mlxtune.backend.models.loading import load_base  # noqa: E402
from tests.interop.base_gguf import interleaved, write_base_gguf  # noqa: E402
from tests.long.architectures import ARCHITECTURES  # noqa: E402
from tests.models import sums, write_chat, write_model  # noqa: E402
from tests.slow import slow  # noqa: E402

pytestmark = pytest.mark.usefixtures("short_checks")

HEADS = {"q_proj": 4, "k_proj": 2}
# The projections' names in llama.cpp's convert_lora_to_gguf.py.
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.out_proj": "ssm_out",
    **{
        f"{stack}.{projection}_proj": f"ffn_{projection}_exps"
        for stack in ("mlp.switch_mlp", "mlp.experts", "block_sparse_moe.switch_mlp")
        for projection in ("gate", "up", "down")
    },
}


def trained(folder: Path, model: Path, **options: Any) -> Path:
    rows = write_chat(folder / "chat.jsonl", sums(20))
    settings = {"rank": 4, "alpha": 6.0, "lr": 1e-2, "targets": ("all",), "quiet": True}
    settings |= {"samples": 0, **options}
    output = folder / "out" / "adapters.safetensors"
    train(TrainConfig(str(model), (str(rows),), output=str(output), **settings))
    return output.parent


def exported(adapter: Path, output: Path) -> Path:
    config = ExportConfig(adapter=str(adapter), output=str(output), format="gguf", quiet=True)
    assert not export(config).certificate.problems
    return output / "adapter.gguf"


def tiled(tensor: Any, projection: str, part: str) -> Any:
    """Return a matrix of the gated delta rule in the order of llama.cpp's converter.

    Heads have size 16; value heads 0 and 1 use key head 0, and 2 and 3 use key head 1.
    """
    if part == "lora_a":
        if projection != "out_proj":
            return tensor
        return np.concatenate([tensor[:, 16 * head : 16 * head + 16] for head in (0, 2, 1, 3)], 1)
    if projection == "out_proj":
        return tensor
    before = 2 * 2 * 16 if projection == "in_proj_qkv" else 0
    size = 1 if projection in ("in_proj_a", "in_proj_b") else 16
    starts = [before + size * head for head in (0, 2, 1, 3)]
    return np.concatenate([tensor[:before], *(tensor[start : start + size] for start in starts)])


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "llama"),
        slow("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        slow("gemma2", "gemma2"),
        ("gemma3_text", "gemma3"),
        slow("gemma4_text", "gemma4"),
        ("qwen3_5", "qwen35"),
        ("gpt_oss", "gpt-oss"),
        slow("mixtral", "llama"),
        slow("olmoe", "olmoe"),
        slow("qwen3_moe", "qwen3moe"),
    ],
)
def test_names_shapes_and_values_are_those_of_llama_cpps_converter(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    model = write_model(tmp_path / "model", model_type, **ARCHITECTURES.get(model_type, {}))
    adapter = trained(tmp_path, model, template="qwen3" if "gemma" not in model_type else "gemma")
    reader = gguf.GGUFReader(exported(adapter, tmp_path / "gguf"))
    said = {name: field.contents() for name, field in reader.fields.items() if "." in name}
    assert (
        said.items()
        >= {
            "general.type": "adapter",
            "general.architecture": architecture,
            "adapter.type": "lora",
            "adapter.lora.alpha": 6.0,
        }.items()
    )
    expected = {}
    for name, tensor in safetensors.numpy.load_file(adapter / "adapters.safetensors").items():
        found = re.fullmatch(r".*layers\.(\d+)\.(.+)\.(lora_[ab])", name)
        assert found
        layer, inside, part = found.groups()
        # The A and B of experts are stacked, as in mlx-lm and in LoraTorchTensor.
        tensor = tensor if tensor.ndim == 3 else tensor.T
        projection = inside.split(".")[-1]
        if part == "lora_b" and architecture == "llama" and projection in HEADS:
            tensor = interleaved(tensor, HEADS[projection])
        if "linear_attn" in inside:
            tensor = tiled(tensor, projection, part)
        expected[f"blk.{layer}.{NAMES[inside]}.weight.{part}"] = tensor
    written = {tensor.name: tensor for tensor in reader.tensors}
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(written[name].data, tensor)


def test_heads_match_the_loaded_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    base = load_base(model, "float32")
    rows = np.arange(len(base.model.layers[0].self_attn.q_proj.weight))
    update = WeightUpdate(np.zeros((64, 2), np.float32), np.zeros((2, len(rows)), np.float32))
    other = replace(base, text_config={"num_attention_heads": 8})
    _, order = orders("model.layers.0.self_attn.q_proj", update, other)
    np.testing.assert_array_equal(order, interleaved(rows, HEADS["q_proj"]))
    none = replace(update, b=update.b[:, :-1])
    with pytest.raises(ModelError, match="which are not whole heads of 16"):
        orders("model.layers.0.self_attn.q_proj", none, base)


def test_model_that_llama_cpp_is_not_written_for_is_an_error(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "olmo2")
    adapter = trained(tmp_path, model, template="qwen3")
    with pytest.raises(ModelError, match="not olmo2: use --format peft"):
        exported(adapter, tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()


def test_llama_cpp_answers_as_we_do(shared: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="needs llama-cpp-python, which builds llama.cpp"
    )
    import mlx.core as mx

    from mlxtune.backend.adapters.attach import load_adapted
    from mlxtune.backend.models.loading import load_base

    model = shared / "models" / "stories260k"
    texts = [
        {"text": f"The robot number {i} was red. It liked to count to {i}."} for i in range(30)
    ]
    rows = write_chat(tmp_path / "text.jsonl", texts)
    output = tmp_path / "out" / "adapters.safetensors"
    train(
        TrainConfig(
            *(str(model), (str(rows),)), output=str(output), targets=("all",), lr=1e-2, quiet=True
        )
    )
    adapter = exported(output.parent, tmp_path / "gguf")
    base = write_base_gguf(model, model / "tok512.model", tmp_path / "base.gguf")
    adapted = load_adapted(load_base(model, "float32"), AdapterFile.find(str(output)))
    prompts = [[1, 403, 407, 261, 378], [1, 291, 290]]

    def ours(prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(64):
            tokens.append(int(mx.argmax(adapted.model(mx.array([tokens]))[0, -1]).item()))
        return tokens[len(prompt) :]

    def theirs(prompt: list[int], lora: Path | None) -> list[int]:
        runner = llama_cpp.Llama(
            str(base),
            lora_path=None if lora is None else str(lora),
            n_ctx=256,
            n_threads=1,
            verbose=False,
        )
        found = runner.generate(prompt, temp=0.0, repeat_penalty=1.0)
        answer = [next(found) for _ in range(64)]
        runner.close()
        return answer

    with_adapter = [ours(prompt) for prompt in prompts]
    assert [theirs(prompt, adapter) for prompt in prompts] == with_adapter
    adapted.use_adapter(False)
    without = [ours(prompt) for prompt in prompts]
    assert [theirs(prompt, None) for prompt in prompts] == without
    assert with_adapter != without
