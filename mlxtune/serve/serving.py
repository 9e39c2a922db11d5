"""`mlxtune serve`: starts the server, and ends it without breaking off answers."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from mlxtune.backend.text.generate import uncompiled_on_cpu

# isort: split
import mlx_lm.server

from mlxtune.config import ServeConfig
from mlxtune.errors import ConfigError, GpuError
from mlxtune.serve.answering import Answers
from mlxtune.serve.api import ApiHandler
from mlxtune.serve.api_server import ApiServer, is_loopback
from mlxtune.serve.served_models import ServedModels
from mlxtune.session.interrupt import stop_on_interrupt
from mlxtune.views.console import RunConsole

# The variable in which clients of the protocol look for their key.
_KEY = "OPENAI_API_KEY"
_POLL_SECONDS = 0.1


def main(config: ServeConfig) -> None:
    """Serve until Ctrl-C, which finishes the answers that have begun.

    Raises a subclass of MlxTuneError for errors in options, files or the model.
    """
    with closing(RunConsole(quiet=config.quiet)) as console, serving(config, console) as server:
        address, port = server.server_address[:2]
        console.say("Models", ", ".join(each.name for each in server.models))
        console.say("Address", f"http://{_in_url(str(address))}:{port}/v1; Ctrl-C ends")
        with stop_on_interrupt(lambda: console.say("Stop", "finishing answers")) as stops:
            while server.answers.is_healthy and not stops():
                time.sleep(_POLL_SECONDS)
            server.finish(server.answers.generation_available)
        if not server.answers.is_healthy:
            raise GpuError("the model failed, as the lines above show: start the server again")


@contextmanager
def serving(config: ServeConfig, console: RunConsole) -> Iterator[ApiServer]:
    """Serve models inside the block. Raises ConfigError or ModelError."""
    key = _key(config, console)
    models = ServedModels(config, console)
    with uncompiled_on_cpu(), _silent_mlx_lm():  # mlx-lm's samplers are compiled
        answers = Answers(models, config.max_new_tokens)
        try:
            with closing_server(_bound(config, answers, key)) as server:
                yield server
        finally:
            answers.stop_and_join()


@contextmanager
def _silent_mlx_lm() -> Iterator[None]:
    """Log only errors of mlx-lm's server inside the block: its warnings are about requests."""

    def is_kept(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or record.pathname != mlx_lm.server.__file__

    root = logging.getLogger()
    root.addFilter(is_kept)
    try:
        yield
    finally:
        root.removeFilter(is_kept)


def _bound(config: ServeConfig, answers: Answers, key: str | None) -> ApiServer:
    try:
        address, origins = (config.host, config.port), config.allow_origin
        return ApiServer(address, answers, key, origins, ApiHandler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        place = f"--host {config.host} --port {config.port}"
        raise ConfigError([f"{place} cannot be used: {why}: choose another --port"]) from error


@contextmanager
def closing_server(server: ApiServer) -> Iterator[ApiServer]:
    """Answer requests in the background inside the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _key(config: ServeConfig, console: RunConsole) -> str | None:
    """Return the key that requests need; warn if other machines can send some.

    Raises ConfigError if other machines could send requests without a key.
    """
    if config.host == "localhost" or is_loopback(config.host):
        return config.api_key
    key = config.api_key or os.environ.get(_KEY)
    if not key:
        raise ConfigError(
            [f"--host {config.host} lets other machines ask: set {_KEY}, or pass --api-key"]
        )
    console.warn(
        f"--host {config.host} lets other machines ask, and sends the key and the answers "
        "unencrypted: use it only in a network that you trust"
    )
    return key


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
