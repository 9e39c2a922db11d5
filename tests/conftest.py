"""Fixtures for all tests: real tokenizers and data, a local hub, and commands with their input.

Nothing here imports mlx before a test requests a model.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from tests.paths import SHARED
from tests.waiting import SECONDS

# Property tests use the same examples on every machine; the profile "explore" tries others.
_NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("same", derandomize=True, max_examples=15, **_NO_CLOCK)
settings.register_profile("explore", derandomize=False, print_blob=True, **_NO_CLOCK)
settings.load_profile("same")

# Parallel test processes use one thread each, because more threads would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | os.environ

# Write bytecode, so that processes which tests start do not compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# MLX reads this at import. TF32, its default on CUDA and M5, rounds float32 products to three
# digits, but tests need five.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# This must come before the import of these modules, so that their failed asserts show values.
pytest.register_assert_rewrite("tests.command", "tests.core.training.fake_pipeline")

from mlxtune.cli import main  # noqa: E402
from mlxtune.errors import MlxTuneError  # noqa: E402
from tests.command import ROWS, Cli, Outcome, unless_given  # noqa: E402
from tests.hub_server import Hub, serving  # noqa: E402
from tests.models import sums, write_chat, write_model  # noqa: E402

# Tests expect messages as the command line shows them; tests of Python's keywords change this.
MlxTuneError.names_flags = True


def pytest_collection_finish() -> None:
    """Make later garbage collections skip all objects that exist now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forget_old_garbage() -> None:
    """Make garbage collections skip the objects of earlier modules and imports."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def heed_interrupts() -> None:
    """Restore the handlers of signals that a background test run inherits as ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """Make flushes return immediately: each of hundreds of runs would flush some fifty times.

    The processes that tests start do flush, and tests/core/files/test_writing.py checks that files
    are flushed before they are renamed.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        # `fstat` still raises an error for a closed descriptor.
        monkeypatch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_trials() -> Iterator[None]:
    """Try each tokenizer file once: a trial takes a process, and hundreds of runs have no cache."""
    tokenizer = sys.modules.get("mlxtune.backend.text.tokenizer")
    if tokenizer is None:  # the modules of these tests use none
        yield
        return
    passed: set[str] = set()
    try_in_process = tokenizer._problem_of

    def problem_of(path: Path) -> str | None:
        if (key := tokenizer._trial_key(path)) in passed:
            return None
        if not (problem := try_in_process(path)):
            passed.add(key)
        return problem

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tokenizer, "_problem_of", problem_of)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep encoded data out of the user's cache, in this process and its children."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real tokenizers, chat data and models next to the repository."""
    if not SHARED.is_dir():
        pytest.skip("needs the real material in ../shared, which is not part of the project")
    return SHARED


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local hub that the real client uses, without a token."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    with serving(Hub()) as hub:
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_DISABLE_XET": True,
            "DOWNLOAD_CHUNK_SIZE": 4000,
            # These limits suffice on a busy machine; tests of a silent hub shorten them.
            "HF_HUB_DOWNLOAD_TIMEOUT": SECONDS,
            "HF_HUB_ETAG_TIMEOUT": SECONDS,
        }.items():
            monkeypatch.setattr(constants, name, value)
        for module in (file_download, _http):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
            monkeypatch.delenv(name, raising=False)
        # The hub's responses are cached here.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield hub


# The command


@pytest.fixture
def cli(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, short_checks: None
) -> Cli:
    """A function that runs a command in this process, which has already loaded mlx."""
    # `main` replaces this function for the rest of the process; monkeypatch restores it.
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        assert isinstance(exit_.value.code, int)
        return Outcome(exit_.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def train(cli: Cli, model: Path, chat: Path, output: Path) -> Cli:
    """A function that runs `mlxtune train --quiet` on a valid model and file, or on given ones.

    Samples are off, because generating them takes longer than the run.
    """

    def run(*arguments: object, quiet: bool = True) -> Outcome:
        good = unless_given(arguments, model_path=model, data=chat, output=output, samples=0)
        return cli("train", *good, *(["--quiet"] if quiet else []), *arguments)

    return run


@pytest.fixture
def inspect(cli: Cli, model: Path, chat: Path) -> Cli:
    """A function that runs `mlxtune inspect` on a valid model and file, unless others are given."""

    def run(*arguments: object) -> Outcome:
        return cli("inspect", *unless_given(arguments, model_path=model, data=chat), *arguments)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of one layer, because a run's cost grows with them; tests never change it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    return write_model(folder, "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of two layers, for files whose tests tell layers apart."""
    return write_model(tmp_path_factory.mktemp("models") / "deep-qwen3", "qwen3")


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, for tests to damage."""
    return Path(shutil.copytree(model, tmp_path / "broken"))


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return write_chat(tmp_path / "chat.jsonl", sums(ROWS))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "adapters.safetensors"


@pytest.fixture(scope="session")
def run_to_copy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter whose run took two steps and saved both, for tests to copy."""
    from mlxtune import TrainConfig
    from mlxtune import train as run

    folder = tmp_path_factory.mktemp("run")
    chat = write_chat(folder / "chat.jsonl", sums(ROWS))
    adapter = folder / "out" / "adapters.safetensors"
    config = TrainConfig(
        model_path=str(model),
        data=str(chat),
        output=str(adapter),
        max_steps=2,
        save_steps=1,
        samples=0,
        quiet=True,
    )
    run(config)
    return adapter.parent


@pytest.fixture
def own_run(run_to_copy: Path, output: Path) -> Path:
    """The checkpoints of a finished run of two steps that is marked as this user's own."""
    from mlxtune.core.files import remembered

    run = Path(shutil.copytree(run_to_copy, output.parent)) / "checkpoints"
    remembered.mark(run)
    return run


@pytest.fixture
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the proofs of exports and the passes that measure memory.

    tests/backend/adapters and tests/backend/memory test them at full length.
    """
    from mlxtune.backend.adapters import compare_logits
    from mlxtune.backend.memory import measure
    from mlxtune.session import verified_output as exports

    monkeypatch.setattr(compare_logits, "NEW_TOKENS", 8)
    monkeypatch.setattr(exports, "_PROMPTS", exports._PROMPTS[:2])
    for lengths in ("_LAZY_LENGTHS", "_EAGER_LENGTHS"):
        monkeypatch.setattr(measure, lengths, (8, 16, 32))
