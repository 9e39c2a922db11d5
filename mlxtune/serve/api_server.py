"""The server of the OpenAI API: its address, and the answers that it gives at once."""

import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

from mlxtune.serve.answering import Answers
from mlxtune.serve.api_requests import RefusedRequestError
from mlxtune.serve.served_models import ServedModels
from mlxtune.watch.connections import LimitedServer

_CONNECTIONS, _ANSWERS = 512, 128


class ApiServer(LimitedServer):
    """Serves models at an address. Raises OSError if it cannot be bound.

    A server on the loopback interface refuses requests that name another host, so that no site can
    reach it by a domain that resolves to this machine. `handler` answers a request.
    """

    request_queue_size = most_connections = _CONNECTIONS

    def __init__(
        self,
        address: tuple[str, int],
        answers: Answers,
        key: str | None,
        origins: Collection[str],
        handler: Callable[..., Any],
    ) -> None:
        infos = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, bind_address = infos[0]
        self.answers, self.key, self.origins = answers, key, origins
        self.is_local = is_loopback(str(bind_address[0]))
        self._answering, self._changed, self._closing = 0, threading.Condition(), False
        super().__init__(bind_address, partial(handler, answers, system_fingerprint="mlxtune"))

    @property
    def models(self) -> ServedModels:
        return self.answers.models

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count an answer. Raises RefusedRequestError if there are too many, or the server ends."""
        with self._changed:
            if self._closing or self._answering >= _ANSWERS:
                why = "the server is ending" if self._closing else "too many requests at once"
                raise RefusedRequestError(HTTPStatus.SERVICE_UNAVAILABLE, f"{why}: try again later")
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def finish(self, is_alive: Callable[[], bool]) -> None:
        """Accept no more connections, and wait for the answers that have begun."""
        self.shutdown()
        self.server_close()
        with self._changed:
            self._closing = True
            while self._answering and is_alive():
                self._changed.wait(0.2)


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
