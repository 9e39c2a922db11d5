"""Options of the base model and of how steps on it are computed."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlxtune.config.fields import Checked
from mlxtune.config.options import option


@dataclasses.dataclass(frozen=True)
class StepConfig(Checked):
    """Which base model is trained, in which precision and memory, and how steps are computed.

    Only `dtype` and quantisation change what is learned. Raises ConfigError, with every problem
    at once.
    """

    model_path: str = option("model_path", "")
    trust_remote_code: bool = option("trust_remote_code", False)
    memory_limit: float = option("memory_limit", 24.0)
    dtype: str = option("dtype", "auto")
    quantize: str | None = option("quantize", None)
    double_quant: bool = option("double_quant", False)
    quantized_compute: str = option("quantized_compute", "auto")
    grad_checkpoint: str = option("grad_checkpoint", "auto")
    compile: str = option("compile", "auto")

    def contradictions(self) -> list[str]:
        problems = quantization_problems(
            self.quantize, self.quantized_compute, double_quant=self.double_quant
        )
        return super().contradictions() + problems

    def loading(self) -> dict[str, Any]:
        """Return the keywords of `open_base` that load the base model as these options say."""
        return {
            "trust_remote_code": self.trust_remote_code,
            "quantize": self.quantize,
            "double_quant": self.double_quant,
            "quantized_compute": self.quantized_compute,
        }


def quantization_problems(
    quantize: str | None, quantized_compute: str, *, double_quant: bool
) -> list[str]:
    """Return how options of quantisation contradict each other."""
    problems = []
    if double_quant and quantize != "nf4":
        problems += ["--double-quant goes with --quantize nf4: leave it out, or give both"]
    if quantize == "nf4" and quantized_compute == "quantized":
        problems += [
            "--quantized-compute quantized: MLX has no products with nf4 weights: leave it out"
        ]
    return problems
