"""`mlxtune fuse`: writes a model with an adapter merged into the weights, and tests the result."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mlxtune.backend.adapters import compare_logits, fusing, gptq
from mlxtune.backend.adapters.attach import AdapterSwitch, load_adapted
from mlxtune.backend.adapters.certificate import MAX_LOST, Retention, try_in_order
from mlxtune.backend.adapters.file_formats import merged_gguf
from mlxtune.backend.adapters.storage import AS_BASE, Storage
from mlxtune.backend.device import allocator
from mlxtune.backend.models.loading import BaseModel, as_base_model, open_base, read_weights
from mlxtune.backend.models.quantize import NF4
from mlxtune.backend.step.evaluator import Evaluator
from mlxtune.config import DataConfig, EvalConfig, FuseConfig
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.evaluation.row_losses import sums_of
from mlxtune.core.files.remembered import is_own
from mlxtune.core.formatting import byte_size, duration, pluralize
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.errors import MlxTuneError
from mlxtune.session import verified_output
from mlxtune.session.arguments import takes_options
from mlxtune.session.dataset import load_dataset
from mlxtune.session.resuming import run_config
from mlxtune.session.trained_model import with_recorded_options

# The largest number of rows to measure on: more rows take longer and hardly change the result.
_MAX_ROWS = 100


@dataclass(frozen=True)
class _Measure:
    """A model's loss or distance in nats; lower is better.

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
            text_only=config.gguf,  # llama.cpp's converter knows few names of other parts
            storage=storage,
            retention=retention,
        )
        if config.gguf:
            _write_gguf(source, folder, stored)
        return verified_output.certify(source, folder, certificate)


def _dequantizes(config: FuseConfig, source: verified_output.TrainedAdapter) -> bool:
    """Return whether to dequantise the weights, as the options or the format require.

    Raises ModelError if --gguf is set but this model cannot be written as GGUF.
    """
    if config.gguf:
        merged_gguf.check_convertible(source.model_config["model_type"], "--gguf")
    if config.dequantize or not source.has_quantized_base:
        return config.dequantize
    if source.base_options.quantize == NF4:
        source.console.say("", "mlx-lm has no nf4: writing plain weights, as with --dequantize")
        return True
    if config.gguf:
        source.console.say("", "llama.cpp needs plain weights: writing them, as with --dequantize")
    return config.gguf


def _write_gguf(source: verified_output.TrainedAdapter, folder: Path, stored: str) -> None:
    program = merged_gguf.converter()
    if program is None:
        source.console.warn(merged_gguf.advice(source.config.output_path, stored))
    else:
        verified_output.convert_to_gguf(
            source, program, folder, stored, "leave out --gguf to write the folder alone"
        )


def main(config: FuseConfig) -> None:
    verified_output.print_result(fuse(config), config)


def _choose_storage(
    config: FuseConfig, source: verified_output.TrainedAdapter
) -> tuple[Storage, Retention | None]:
    """Return how to store the trained projections, and how much of the adapter's gain is lost.

    Measures the loss on held-out rows, if there are any and the adapter lowers their loss, or else
    the KL divergence from the trained model on the proof's prompts. If only one way is possible, as
    without quantised projections, nothing is measured, and the second value is None.

    Raises ConfigError, or the errors of `load_source_base` and `load_adapted`.
    """
    storages = fusing.storages(source.fusion, config.bits)
    if len(storages) == 1 and config.bits is None:
        return AS_BASE, None
    source.console.say("Measuring", "how much of the adapter's gain is lost by quantising again")
    rows = _rows_of_data(config, source) if config.data else _rows_of_run(source)
    adapted = load_adapted(verified_output.load_source_base(source), source.file)
    measure = _measure_of(source, adapted, rows.validation)
    del adapted
    allocator.release()
    rounded: dict[str, Storage] = {}

    def value_of(storage: Storage) -> float | None:
        if storage.gptq:
            if (rounding := _round_by_gptq(source, storage, rows.train)) is None:
                return None
            storage = rounded[storage.name] = rounding
        fused = fusing.fused_model(source.fusion, dequantize=False, storage=storage)
        model = as_base_model(*fused, source.folder, config.dtype)
        read_weights(model)
        value = measure.value_of(model)
        del fused, model
        allocator.release()
        return value

    selected = storages[:1] if config.force else storages
    retention = try_in_order(
        measure.name, "nats", measure.base, measure.trained, selected, value_of
    )
    first, best = retention.tried[0], retention.selected
    if first.lost > MAX_LOST:
        if not any(storage.gptq for storage in storages):
            source.console.say("GPTQ", "not tried, as it is for the affine mode: more bits remain")
        source.console.warn(
            f"with the trained projections stored {first.storage}, the adapter loses "
            f"{first.lost:.0%} of its gain: "
            + (
                "it is worth more on its own, or with --dequantize"
                if best is first
                else f"they are stored {best.storage}, which loses {best.lost:.0%} "
                "(--force stores them as in the base)"
            )
        )
    named = {storage.name: storage for storage in storages} | rounded
    return named[best.storage], retention


def _round_by_gptq(
    source: verified_output.TrainedAdapter, storage: Storage, rows: CorpusRows | None
) -> Storage | None:
    """Return a storage format with the projections rounded; None, with a line, if impossible."""
    say = partial(source.console.say, "GPTQ")
    if not rows:
        say("not tried, without the rows of training: name them, or rows like them, with --data")
        return None
    base = open_base(source.folder, source.config.dtype, source.base_options)
    merged = fusing.merged_weights(source.fusion)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    examples = (example for index in order for example in rows[index])
    if (calibration := gptq.calibration(base, merged, examples)) is None:
        say("not tried: it needs more than the free memory")
        return None
    tokens, count = len(calibration.real), len(calibration.ids)
    used = f"{pluralize(tokens, 'token')} of {pluralize(count, 'example')}"
    say(f"rounding on {used}, in up to {byte_size(calibration.memory)} of memory")
    read_weights(base)
    rounding, nearest = gptq.round_projections(
        base, merged, storage, calibration, lambda seconds: say(f"takes about {duration(seconds)}")
    )
    if nearest:
        fell_back = f"{pluralize(nearest, 'weight')} fell back"
        say(f"{fell_back} to round-to-nearest: not affine, or too few inputs")
    del base, merged
    allocator.release()
    return rounding


def _measure_of(
    source: verified_output.TrainedAdapter, adapted: AdapterSwitch, rows: CorpusRows | None
) -> _Measure:
    if rows:

        def loss(base: BaseModel) -> float:
            with closing(Evaluator(base, source.console.warn)) as evaluator:
                return sums_of(rows, evaluator.losses, lambda done, total: None).loss.loss

        trained = loss(adapted.base)
        adapted.use_adapter(False)
        without = loss(adapted.base)
        adapted.use_adapter(True)
        if without > trained:
            return _Measure(
                f"Loss on {pluralize(len(rows), 'validation row')}", without, trained, loss
            )
    prompts = source.prompts
    reference = compare_logits.reference_of(adapted, prompts, "float32", everywhere=False)
    adapted.use_adapter(False)
    without = compare_logits.compare_logits(adapted.model, reference).mean_kl

    def divergence(base: BaseModel) -> float:
        return compare_logits.compare_logits(base.model, reference).mean_kl

    return _Measure(f"KL on {pluralize(len(prompts), 'prompt')}", without, 0.0, divergence)


@dataclass(frozen=True)
class _Rows:
    """The rows to round on, and the rows to measure on; None if there are none."""

    train: CorpusRows | None = None
    validation: CorpusRows | None = None


def _rows_of_data(config: FuseConfig, source: verified_output.TrainedAdapter) -> _Rows:
    """Return the rows of --data, read as in training; some are held out for the measurement."""
    adapter, trust = str(source.file.path), config.trust_remote_code
    named = EvalConfig(
        str(source.folder), adapter=adapter, data=config.data, trust_remote_code=trust
    )
    data = with_recorded_options(named, source.file).data_config(val_split=DataConfig.val_split)
    rows = load_dataset(data, source.reader.with_options(data)).rows
    return _Rows(rows.train, _sample(rows.validation, data.seed))


def _rows_of_run(source: verified_output.TrainedAdapter) -> _Rows:
    """Return the rows of the adapter's run, as far as they are unchanged.

    Ignores another user's run, which could choose the files to read.
    """
    origin = source.file.origin
    run = origin.run
    if run is None or not is_own(run):
        return _Rows()
    try:
        if (point := find_resume_point(run)) is None:
            return _Rows()
        data = run_config(run, point.checkpoint, {})
        rows = load_dataset(data, source.reader.with_options(data)).rows
    except MlxTuneError:
        return _Rows()

    def unchanged(part: CorpusRows, name: str) -> CorpusRows | None:
        return part if origin.metadata.get(name) == part.corpus.data_hash() else None

    validation = unchanged(rows.validation, "validation_hash")
    return _Rows(unchanged(rows.train, "data_hash"), validation and _sample(validation, data.seed))


def _sample(rows: CorpusRows, seed: int) -> CorpusRows:
    if len(rows) <= _MAX_ROWS:
        return rows
    sampled_indices = np.random.default_rng(seed).permutation(len(rows))[:_MAX_ROWS]
    return CorpusRows(rows.corpus, [rows.indices[i] for i in sorted(sampled_indices.tolist())])
