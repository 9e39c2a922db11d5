"""What options of quantisation contradict each other."""

from __future__ import annotations


def quantization_problems(
    quantize: str | None, quantized_compute: str, *, double_quant: bool
) -> list[str]:
    """Return what options of quantisation contradict each other."""
    problems = []
    if double_quant and quantize != "nf4":
        problems += ["--double-quant goes with --quantize nf4: leave it out, or give both"]
    if quantize == "nf4" and quantized_compute == "quantized":
        problems += [
            "--quantized-compute quantized: there are no products of nf4 itself: leave it out"
        ]
    return problems
