"""Chooses how `fuse` stores a quantised model's trained projections, to keep the adapter's gain."""

from collections.abc import Callable
from contextlib import closing

import numpy as np

from mlxtune.backend.adapters import compare_logits
from mlxtune.backend.adapters import fuse as fusing
from mlxtune.backend.adapters.attach import Adapted, load_adapted
from mlxtune.backend.adapters.certificate import MOST_LOST, Retention, try_in_order
from mlxtune.backend.adapters.storage import AS_BASE
from mlxtune.backend.device import memory
from mlxtune.backend.models.loading import BaseModel, prepare, read_weights
from mlxtune.backend.step.evaluator import Evaluator
from mlxtune.config import FuseConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.evaluation.row_losses import sums_of
from mlxtune.core.files.remembered import is_own
from mlxtune.core.formatting import count
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.errors import MlxTuneError
from mlxtune.session.dataset import Reader, load_dataset
from mlxtune.session.proof import Source, load_base, prompts_for
from mlxtune.session.resuming import run_config

# The largest number of rows to measure on: more rows take longer and hardly change the result.
_MOST_ROWS = 100

# Measures a model: the lower the value, the better the model.
_Measure = Callable[[BaseModel], float]


def choose_storage(config: FuseConfig, source: Source) -> tuple[str, Retention | None]:
    """Return how to store the trained projections, and how much of the adapter's gain is lost.

    Measures the loss on the run's validation rows, if this user made the run, the data still exists
    and the adapter lowers that loss, or else the KL divergence from the trained model on the
    proof's prompts. If only one way is possible, as without quantised projections, nothing is
    measured, and the second value is None.

    Raises the errors of `load_base` and `load_adapted`.
    """
    storages = fusing.storages(source.folder, source.adapter, source.base_options)
    if len(storages) == 1:
        return AS_BASE, None
    source.console.say("Measuring", "how much of the adapter's gain is lost by quantising again")
    adapted = load_adapted(load_base(source), source.file)
    name, unit, base, trained, measure = _measure_of(source, adapted)
    del adapted
    memory.release()

    def value_of(storage: str) -> float:
        fused = fusing.fused_model(
            source.folder, source.adapter, source.base_options, dequantize=False, storage=storage
        )
        model = prepare(*fused, source.folder, config.dtype)
        read_weights(model)
        value = measure(model)
        del fused, model
        memory.release()
        return value

    chosen = storages[:1] if config.force else storages
    retention = try_in_order(name, unit, base, trained, chosen, value_of)
    first = retention.tried[0]
    if first.lost > MOST_LOST:
        loses = (
            f"with weights quantised again as in the base, the adapter loses {first.lost:.0%} of "
            "its gain"
        )
        kept = retention.chosen
        source.console.warn(
            f"{loses}: it is worth more on its own, or with --dequantize"
            if config.force
            else f"{loses}: the trained projections are stored {kept.storage}, which loses "
            f"{kept.lost:.0%} (--force stores them as in the base)"
        )
    return retention.chosen.storage, retention


def _measure_of(source: Source, adapted: Adapted) -> tuple[str, str, float, float, _Measure]:
    """Return a quality measure: name, unit, values without and with the adapter, and function."""
    if (rows := _validation_rows(source)) is not None:

        def loss(base: BaseModel) -> float:
            with closing(Evaluator(base.model, base.parameters, source.console.warn)) as evaluator:
                return sums_of(rows, evaluator.losses, lambda done, total: None).loss.loss

        trained = loss(adapted.base)
        adapted.use_adapter(False)
        without = loss(adapted.base)
        adapted.use_adapter(True)
        if without > trained:
            return f"Loss on {count(len(rows), 'validation row')}", "nats", without, trained, loss
    prompts = prompts_for(source)
    reference = compare_logits.reference_of(adapted, prompts, "float32", everywhere=False)
    adapted.use_adapter(False)
    without = compare_logits.compare(adapted.model, reference).mean_kl

    def divergence(base: BaseModel) -> float:
        return compare_logits.compare(base.model, reference).mean_kl

    return f"KL on {count(len(prompts), 'prompt')}", "nats", without, 0.0, divergence


def _validation_rows(source: Source) -> CorpusRows | None:
    """Return rows that the adapter's run held out, or None.

    Ignores another user's run, which could choose the files to read.
    """
    origin = source.file.origin
    run = origin.run
    if run is None or not is_own(run):
        return None
    try:
        if (found := find_resume_point(run)) is None:
            return None
        data = run_config(run, found.checkpoint, {})
        rows = load_dataset(data, Reader(data, source.folder)).rows.validation
    except MlxTuneError:
        return None
    if origin.metadata.get("validation_hash") != rows.corpus.data_hash() or not len(rows):
        return None
    if len(rows) <= _MOST_ROWS:
        return rows
    drawn = np.random.default_rng(data.seed).permutation(len(rows))[:_MOST_ROWS]
    return CorpusRows(rows.corpus, [rows.indices[i] for i in sorted(drawn.tolist())])
