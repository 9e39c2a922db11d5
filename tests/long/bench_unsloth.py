"""Compare training steps with Unsloth's MLX trainer.

    python -m tests.long.bench_unsloth --peer-python PATH [options of mlxtune bench]

Unsloth runs in the environment of the interpreter PATH, which has `unsloth_zoo` with its MLX
trainer; mlxtune need not be installed there. On Linux, without torch:

    python3 -m venv unsloth
    unsloth/bin/pip install "mlx[cpu]" mlx-lm "transformers<5.18" "datasets<5" psutil tyro msgspec \
        sentencepiece protobuf pillow
    unsloth/bin/pip install --no-deps unsloth unsloth_zoo

Unsloth uses its own loader, LoRA, batches, fused cross-entropy and compiled step, without clipping
and gradient checkpointing; it gets labels from mlxtune's mask, the same LoRA matrices, and one
example per row. Its first step is taken twice: the first time as a warm-up at a rate of 0, in which
it compiles (minutes on the CPU) and after which the optimizer is reset.
"""

from __future__ import annotations

import argparse
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mlxtune.benchmark.bench import measured, prepared, show_benchmark
from mlxtune.benchmark.result import Benchmark
from mlxtune.benchmark.worker import main as do_job
from mlxtune.config import BenchConfig
from mlxtune.core.files.files import make_folder, write_json
from mlxtune.errors import ConfigError, MlxTuneError
from mlxtune.views.console import RunConsole
from mlxtune.views.tables import result_console
from tests.long.bench_options import run_with_options
from tests.paths import ROOT


def measure(config: BenchConfig, python: str, console: RunConsole) -> Benchmark:
    """Time mlxtune's steps, and Unsloth's with another environment's interpreter."""
    if shutil.which(python) is None:
        raise MlxTuneError(f"--peer-python {python} is not a program")
    if config.quantize is not None:
        raise ConfigError(["unsloth has no --quantize: use a quantised base"])

    def command_of(job: Path) -> list[str]:
        # That environment may have another mlxtune or none.
        run = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
            "from tests.long.bench_unsloth import take_steps; take_steps()"
        )
        return [python, "-c", run, str(job)]

    config = replace(config, against=None)
    with prepared(config, console) as job:
        return measured(config, job, console, ("unsloth", command_of))


def take_steps() -> None:
    """Take the steps of the job file named on the command line."""
    from tests.long.unsloth import Unsloth

    do_job(lambda job: Unsloth(job.folder, job.config))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--peer-python", required=True)
    given, options = parser.parse_known_args()

    def bench_unsloth(config: BenchConfig) -> None:
        """Compare training steps with Unsloth's."""
        with closing(RunConsole(quiet=config.quiet)) as console:
            found = measure(config, given.peer_python, console)
        if config.json_path is not None:
            make_folder(config.json_path.parent)
            write_json(config.json_path, found.as_dict())
        show_benchmark(found, result_console())

    run_with_options("bench-unsloth", bench_unsloth, options)
