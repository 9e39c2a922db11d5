"""The Hugging Face hub: data sets and adapters. Only this package imports huggingface_hub.

Importing it, as mlxtune.backend does, raises ConfigError if HF_ENDPOINT is malformed: the hub's
client, which mlx-lm imports too, would not load.
"""

import os
import re
from urllib.parse import urlsplit

from mlxtune.errors import ConfigError

_ENDPOINT = "HF_ENDPOINT"
_UNUSUAL_CHARACTER = re.compile(r"[^!-~]")


def check_endpoint(*, loads: bool = False) -> None:
    """Raise ConfigError if HF_ENDPOINT is not an address.

    With `loads`, only if the hub's client would not load.
    """
    address = os.environ.get(_ENDPOINT, "https://huggingface.co")
    try:
        parts = urlsplit(address)
        named = bool(parts.hostname) and parts.scheme in ("http", "https")
        # A malformed port raises ValueError.
        valid = loads or (named and parts.port != 0 and not _UNUSUAL_CHARACTER.search(address))
    except ValueError:
        valid = False
    if not valid:
        # The value itself may contain a password.
        raise ConfigError([f"{_ENDPOINT} is not an address: set it to https://HOST, or unset it"])


check_endpoint(loads=True)
