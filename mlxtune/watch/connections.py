"""An HTTP server on this machine whose connections and requests are limited."""

import io
import socket
import socketserver
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any


class LimitedServer(ThreadingHTTPServer):
    """Answers each connection in a thread, and closes connections beyond `most_connections`."""

    daemon_threads = True
    most_connections = 32

    def __init__(self, *args: Any) -> None:
        self._slots = threading.BoundedSemaphore(self.most_connections)
        super().__init__(*args)

    def server_bind(self) -> None:
        """Bind without asking a name server for the name of this machine."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close the connection if too many are open."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show the traceback of an error, unless the client has just disconnected."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class LimitedReader(io.RawIOBase):
    """Reads a connection. Raises TimeoutError beyond the limits of time and size."""

    def __init__(self, connection: socket.socket, seconds: float, most_bytes: int) -> None:
        self._connection = connection
        self._until, self._left = time.monotonic() + seconds, most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._until - time.monotonic()
        if seconds <= 0 or self._left <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count
