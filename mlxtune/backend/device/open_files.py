"""How many files may be open: mlx-lm sets that when it is imported, and ends where it may not."""

import resource

from mlxtune.errors import ConfigError

# mlx_lm.utils: setrlimit(RLIMIT_NOFILE, (2048, 4096)).
_NEEDED = 4096


def check_limit() -> None:
    """Raise ConfigError if mlx-lm could not set its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_NEEDED // 2, _NEEDED))
    except (ValueError, OSError) as error:
        raise ConfigError(
            [
                f"only {hard:,} files may be open at once, and mlx-lm asks for {_NEEDED:,}: "
                f"allow more with ulimit -Hn {_NEEDED}, or in the limits of the container"
            ]
        ) from error
