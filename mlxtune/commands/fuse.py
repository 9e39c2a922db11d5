"""`mlxtune fuse`: writes a model with an adapter merged into the weights, and tests the result."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxtune.backend.adapters import compare_logits, fusing
from mlxtune.backend.adapters.attach import Adapted, load_adapted
from mlxtune.backend.adapters.certificate import MOST_LOST, Retention, try_in_order
from mlxtune.backend.adapters.file_formats import merged_gguf
from mlxtune.backend.adapters.storage import AS_BASE
from mlxtune.backend.device import allocator
from mlxtune.backend.models.loading import BaseModel, prepare, read_weights
from mlxtune.backend.models.model_folder import read_config
from mlxtune.backend.models.quantize import NF4, is_quantized
from mlxtune.backend.step.evaluator import Evaluator
from mlxtune.config import FuseConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.evaluation.row_losses import sums_of
from mlxtune.core.files.remembered import is_own
from mlxtune.core.formatting import pluralise
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.errors import MlxTuneError
from mlxtune.session import verified_output
from mlxtune.session.arguments import takes_options
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader
from mlxtune.session.resuming import run_config

# The largest number of rows to measure on: more rows take longer and hardly change the result.
_MOST_ROWS = 100


@dataclass(frozen=True)
class _Measure:
    """How good a model is, in nats, of which fewer are better.

    `base` and `trained` are the values without and with the adapter, and `value_of` measures a
    model.
    """

    name: str
    base: float
    trained: float
    value_of: Callable[[BaseModel], float]


@takes_options(FuseConfig)
def fuse(config: FuseConfig) -> verified_output.ExportResult:
    """Write a model with an adapter merged into the weights; compare it with the trained model.

    Raises a subclass of MlxTuneError, without writing the output folder.
    """
    source = verified_output.find_source(config)
    fusing.check_copied(source.folder)
    with verified_output.output_folder(source) as folder:
        dequantize = _dequantizes(config, source)
        storage, retention = (AS_BASE, None) if dequantize else _choose_storage(config, source)
        certificate, stored = verified_output.write_fused(
            source,
            folder,
            dequantize=dequantize,
            text_alone=config.gguf,  # llama.cpp's converter knows few names of other parts
            storage=storage,
            retention=retention,
        )
        if config.gguf:
            _write_gguf(source, folder, stored)
        return verified_output.certify(source, folder, certificate)


def _dequantizes(config: FuseConfig, source: verified_output.Source) -> bool:
    """Return whether to dequantise the weights, as the options or the format require.

    Raises ModelError if --gguf is set but this model cannot be written as GGUF.
    """
    model = read_config(source.folder, trust_remote_code=config.trust_remote_code)
    if config.gguf:
        merged_gguf.check_convertible(model["model_type"], "--gguf")
    quantized = is_quantized(model) or source.base_options.quantize is not None
    if config.dequantize or not quantized:
        return config.dequantize
    if source.base_options.quantize == NF4:
        source.console.say("", "mlx-lm has no nf4: writing plain weights, as with --dequantize")
        return True
    if config.gguf:
        source.console.say("", "llama.cpp needs plain weights: writing them, as with --dequantize")
    return config.gguf


def _write_gguf(source: verified_output.Source, folder: Path, stored: str) -> None:
    program = merged_gguf.converter()
    if program is None:
        source.console.warn(merged_gguf.advice(source.config.output_path, stored))
    else:
        verified_output.convert(
            source, program, folder, stored, "leave out --gguf to write the folder alone"
        )


def show(config: FuseConfig) -> None:
    verified_output.print_result(fuse(config), config)


def _choose_storage(
    config: FuseConfig, source: verified_output.Source
) -> tuple[str, Retention | None]:
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
    adapted = load_adapted(verified_output.load_base(source), source.file)
    measure = _measure_of(source, adapted)
    del adapted
    allocator.release()

    def value_of(storage: str) -> float:
        fused = fusing.fused_model(
            source.folder, source.adapter, source.base_options, dequantize=False, storage=storage
        )
        model = prepare(*fused, source.folder, config.dtype)
        read_weights(model)
        value = measure.value_of(model)
        del fused, model
        allocator.release()
        return value

    chosen = storages[:1] if config.force else storages
    retention = try_in_order(measure.name, "nats", measure.base, measure.trained, chosen, value_of)
    first = retention.tried[0]
    if first.lost > MOST_LOST:
        loses = (
            f"with weights quantised again as in the base, the adapter loses {first.lost:.0%} of "
            "its gain"
        )
        best = retention.chosen
        source.console.warn(
            f"{loses}: it is worth more on its own, or with --dequantize"
            if config.force
            else f"{loses}: the trained projections are stored {best.storage}, which loses "
            f"{best.lost:.0%} (--force stores them as in the base)"
        )
    return retention.chosen.storage, retention


def _measure_of(source: verified_output.Source, adapted: Adapted) -> _Measure:
    if (rows := _validation_rows(source)) is not None:

        def loss(base: BaseModel) -> float:
            with closing(Evaluator(base, source.console.warn)) as evaluator:
                return sums_of(rows, evaluator.losses, lambda done, total: None).loss.loss

        trained = loss(adapted.base)
        adapted.use_adapter(False)
        without = loss(adapted.base)
        adapted.use_adapter(True)
        if without > trained:
            return _Measure(
                f"Loss on {pluralise(len(rows), 'validation row')}", without, trained, loss
            )
    prompts = verified_output.prompts_for(source)
    reference = compare_logits.reference_of(adapted, prompts, "float32", everywhere=False)
    adapted.use_adapter(False)
    without = compare_logits.compare(adapted.model, reference).mean_kl

    def divergence(base: BaseModel) -> float:
        return compare_logits.compare(base.model, reference).mean_kl

    return _Measure(f"KL on {pluralise(len(prompts), 'prompt')}", without, 0.0, divergence)


def _validation_rows(source: verified_output.Source) -> CorpusRows | None:
    """Return rows that the adapter's run held out, or None.

    Ignores another user's run, which could choose the files to read.
    """
    origin = source.file.origin
    run = origin.run
    if run is None or not is_own(run):
        return None
    try:
        if (point := find_resume_point(run)) is None:
            return None
        data = run_config(run, point.checkpoint, {})
        rows = load_dataset(data, Reader(data, source.folder)).rows.validation
    except MlxTuneError:
        return None
    if origin.metadata.get("validation_hash") != rows.corpus.data_hash() or not len(rows):
        return None
    if len(rows) <= _MOST_ROWS:
        return rows
    drawn = np.random.default_rng(data.seed).permutation(len(rows))[:_MOST_ROWS]
    return CorpusRows(rows.corpus, [rows.indices[i] for i in sorted(drawn.tolist())])
