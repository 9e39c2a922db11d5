"""Which addresses of a server only this machine reaches."""

from __future__ import annotations

import pytest

from mlxtune.serve.api_server import is_loopback


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *(("127.0.0.1", True), ("127.8.8.8", True), ("::1", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("128.127.0.1", False)),
    ],
)
def test_only_this_machine_reaches_a_loopback_address(address: str, local: bool) -> None:
    assert is_loopback(address) is local
