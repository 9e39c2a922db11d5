"""The content of a certificate, and its tolerances."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxtune.backend.adapters.certificate import (
    Certificate,
    Comparison,
    Retention,
    WeightCheck,
    check,
    fraction_lost,
    try_in_order,
)
from mlxtune.backend.adapters.storage import Storage
from mlxtune.core.files.output_folder import hashes
from mlxtune.errors import OutputError
from tests.paths import DOCS


def certificate(
    comparison: Comparison, tolerance: float | None = 1e-3, weights: WeightCheck | None = None
) -> Certificate:
    return Certificate("peft", "float32", tolerance, 2.0, comparison, {}, weights=weights)


def compared(difference: float) -> Comparison:
    trained = np.random.default_rng(0).standard_normal((6, 11)).astype(np.float32)
    written = trained.copy()
    written[4, 7] += difference
    comparison = Comparison()
    comparison.add(trained, written, 3)
    return comparison


def test_difference_and_divergence_match_the_formula() -> None:
    rng = np.random.default_rng(1)
    trained, written = rng.standard_normal((2, 5, 9)).astype(np.float32)
    found = Comparison()
    found.add(trained, written, 2)
    found.add(written, written, 2)
    p, q = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (trained, written))
    assert found.largest_difference == np.abs(trained - written).max()
    assert found.mean_kl == pytest.approx((p * np.log(p / q)).sum() / 10, rel=1e-5)
    same = (trained[3:].argmax(-1) == written[3:].argmax(-1)).sum()
    assert (found.prompts, found.tokens, found.same, found.generated) == (2, 10, same + 2, 4)


def test_rounding_that_may_hide_the_adapter_is_reported() -> None:
    sure, coarse = (replace(certificate(compared(0)), effect=effect) for effect in (1.0, 1e-6))
    assert not any("may hide" in line for line in sure.lines())
    assert "logits alone prove little: use --dtype float32" in " ".join(coarse.lines())


def test_differences_beyond_rounding_fail() -> None:
    assert not certificate(compared(0.9e-3)).problems
    failed = certificate(compared(1.2e-3))
    assert failed.problems
    with pytest.raises(
        OutputError, match=r"out: differs from what was trained.* rounding explains only 0.001"
    ):
        check(failed, Path("out"))


@pytest.mark.parametrize("tolerance", [1e-3, None])
def test_nan_logits_fail(tolerance: float | None) -> None:
    found = compared(math.nan)
    assert certificate(found, tolerance).problems


@pytest.mark.parametrize(("effect", "tolerance"), [(math.inf, 1e-3), (2.0, math.inf)])
def test_adapter_with_nan_logits_is_not_certified(effect: float, tolerance: float) -> None:
    found = Certificate("peft", "float32", tolerance, effect, compared(0.0), {})
    assert found.problems == ["the logits of the trained model itself are not finite"]


def test_wrong_weights_fail_even_if_logits_match() -> None:
    bad = WeightCheck(3, 2, 0.5, ("q_proj.weight is off", "k_proj.weight is off"))
    failed = certificate(compared(0.0), None, bad)
    assert not failed.as_dict()["passed"]
    with pytest.raises(OutputError, match=r"q_proj\.weight is off; and 1 more"):
        check(failed, Path("out"))


def test_quantized_weights_are_judged_by_themselves_alone() -> None:
    assert not certificate(compared(0.5), None, WeightCheck(3, 2, 0.1)).problems


def test_documentation_lists_the_keys_of_the_json() -> None:
    page = (DOCS / "export.md").read_text(encoding="utf-8")
    table = page.partition("| in `certificate.json` | |")[2].partition("\n\n")[0]
    first_cells = re.findall(r"(?m)^\| (`.*?) \|", table)
    documented = [key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)]
    whole = replace(
        certificate(compared(1e-4), weights=WeightCheck(3, 2, 0.1)),
        retention=tried({"as the base": 2.0}),
        quantized="Q4_K_M",
    )
    assert sorted(documented) == sorted(whole.as_dict())


def test_every_file_is_hashed_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "sub" / "b").write_bytes(b"abc")
    assert hashes(tmp_path) == {
        "a": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "sub/b": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }


STORAGES = [
    Storage("as the base", 4),
    Storage("by GPTQ", 4, gptq=True),
    Storage("in 6 bits", 6),
    Storage("in 8 bits", 8),
    Storage("plain", None),
]


@pytest.mark.parametrize(
    ("base", "trained", "value", "lost"),
    [
        # Base 7, trained 5, fused 5.5: a quarter of the gain is lost.
        (7.0, 5.0, 5.5, 0.25),
        (7.0, 5.0, 4.9, 0.0),
        (7.0, 5.0, 8.0, 1.5),
        # Divergences from the trained model, whose own divergence is 0.
        (0.4, 0.0, 0.1, 0.25),
        # The adapter changes nothing, so there is no gain to lose.
        (0.0, 0.0, 0.1, 0.0),
        (7.0, 5.0, math.nan, 1.0),
        (math.inf, 5.0, 5.0, 1.0),
    ],
)
def test_fraction_lost_is_of_the_gain(
    base: float, trained: float, value: float, lost: float
) -> None:
    assert fraction_lost(base, trained, value) == pytest.approx(lost)


def tried(values: dict[str, float | None], storages: list[Storage] = STORAGES) -> Retention:
    asked = []

    def value_of(storage: Storage) -> float | None:
        asked.append(storage.name)
        return values[storage.name]

    found = try_in_order("Loss on 9 validation rows", "nats", 3.0, 2.0, storages, value_of)
    assert [name for name in asked if values[name] is not None] == [
        each.storage for each in found.tried
    ]
    return found


def test_base_storage_is_kept_if_it_loses_at_most_3_percent() -> None:
    assert tried({"as the base": 2.03}).selected.storage == "as the base"


def test_first_sufficient_storage_is_chosen_without_measuring_more() -> None:
    values = {"as the base": 2.5, "by GPTQ": 2.1, "in 6 bits": 2.04, "in 8 bits": 2.01}
    found = tried(values)
    assert found.selected.storage == "in 8 bits"
    assert found.line() == (
        "Loss on 9 validation rows: 3 nats without the adapter, 2 with it, "
        "2.01 stored in 8 bits (1% of the gain lost); "
        "2.5 stored as the base (50% of the gain lost)"
    )


def test_certificate_has_bits_method_and_gain_kept() -> None:
    found = tried({"as the base": 2.5, "by GPTQ": 2.01}).as_dict()
    assert found["bits"] == 4
    assert found["method"] == "gptq"
    assert found["kept"] == pytest.approx(0.99)
    assert found["tried"][0] == {
        "storage": "as the base",
        "bits": 4,
        "method": "nearest",
        "value": 2.5,
        "lost": pytest.approx(0.5),
    }


def test_storage_without_a_value_is_left_out() -> None:
    found = tried({"as the base": 2.5, "by GPTQ": None, "in 6 bits": 2.01})
    assert found.selected.storage == "in 6 bits"


def test_storage_that_loses_least_is_chosen_where_none_keeps_enough() -> None:
    values = {"as the base": 2.9, "by GPTQ": 2.3}
    assert tried(values, STORAGES[:2]).selected.storage == "by GPTQ"
    assert tried({**values, "by GPTQ": 2.95}, STORAGES[:2]).selected.storage == "as the base"
    assert tried({"as the base": 2.9}, STORAGES[:1]).selected.storage == "as the base"
