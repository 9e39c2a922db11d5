"""Requests to stop a run and to save it, on which several workers act after the same step."""

from __future__ import annotations

from typing import NamedTuple


class Requests(NamedTuple):
    """Whether to stop a run, and whether to save it."""

    stop: bool = False
    save: bool = False

    def merged(self, others: Requests) -> Requests:
        return Requests(self.stop or others.stop, self.save or others.save)


NO_REQUESTS = Requests()


class RequestExchange:
    """Makes several workers act on requests after the same step; one worker acts at once.

    The way of requests that are made after step n has started:

        running  host of a worker                                     device
        n        `exchange` takes the worker's requests as `sent`     computes n
        n + 1    starts n + 1 with `sent`                             sums all workers' requests
        n + 2    `receive` takes the sums, `exchange` returns them    computes n + 2
    """

    def __init__(self, world_size: int) -> None:
        self._alone = world_size == 1
        # The requests to send with the next step, and the requests received with earlier steps.
        self.sent = self._received = NO_REQUESTS
        self._save_pending = False

    def exchange(self, own: Requests) -> Requests:
        """Take the requests of this worker; return the requests on which all workers now act."""
        if self._alone:
            return own
        # Several steps may start before the answer arrives, so this requests a save only once.
        self.sent = Requests(own.stop, own.save and not self._save_pending)
        agreed, self._received = self._received, NO_REQUESTS
        self._save_pending = (self._save_pending or own.save) and not agreed.save
        return agreed

    def receive(self, requests: Requests) -> None:
        """Take the requests of all workers, received with a finished step."""
        self._received = self._received.merged(requests)
