"""The metadata of a model card, as the hub's own tools read it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from mlxtune.core.run.stored_run import Run, read_run
from mlxtune.core.run.summary import RunView
from mlxtune.hub.upload import model_card
from tests.hub.test_model_card import HUB
from tests.runs import EVALUATION, LEDGER, write_run


def card_of(run: Run, base: str = "org/base", *, peft: bool = True) -> Any:
    view = RunView.of(run)
    return ModelCard(model_card(run, view, repository="me/sums", base=base, peft=peft))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = write_run(tmp_path, evaluation=EVALUATION, about={"hub": [HUB]})
    (folder / "ledger.json").write_text(json.dumps([{**LEDGER, "path": "org/sums:train"}]))
    return read_run(folder)


def test_metadata_names_base_data_and_results(run: Run) -> None:
    card = card_of(run)
    assert card.text.strip().startswith("# sums\n")
    assert card.data.base_model == "org/base"
    assert card.data.base_model_relation == "adapter"
    assert card.data.datasets == ["org/sums"]
    assert card.data.library_name == "peft"
    assert [each.metric_value for each in card.data.eval_results] == [4.0, 1.0]
    assert {each.dataset_type for each in card.data.eval_results} == {"org/sums"}


def test_metadata_names_no_base_model_that_is_not_on_the_hub(run: Run) -> None:
    card = card_of(run, "tiny", peft=False)
    assert card.data.base_model is None
    assert card.data.library_name == "mlx"


def test_metadata_of_forged_records_stays_metadata(tmp_path: Path) -> None:
    forged = {**HUB, "repository": "org/x\n---\n# Owned"}
    run = read_run(write_run(tmp_path, about={"hub": [forged, 7, None]}))
    card = card_of(run)
    assert card.data.datasets is None
    assert card.data.eval_results is None
    assert card.text.strip().startswith("# sums\n")
