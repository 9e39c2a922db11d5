"""Requests of the OpenAI API: their entries, within the limits of mlx-lm's thread."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

# The entries of a request that mlx-lm reads; others name files, or have no effect.
_READ_ENTRIES = (
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "repetition_penalty", "repetition_context_size"),
    *("presence_penalty", "presence_context_size", "frequency_penalty", "frequency_context_size"),
    *("xtc_probability", "xtc_threshold", "logit_bias", "logprobs", "top_logprobs", "seed"),
)
_INTEGER_ENTRIES = frozenset(
    (
        *("max_tokens", "max_completion_tokens", "top_k", "top_logprobs", "seed"),
        *("repetition_context_size", "presence_context_size", "frequency_context_size"),
    )
)
_NUMBERS = frozenset(
    (
        *("temperature", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    )
)
# Numbers beyond these would overflow in the logits, which ends mlx-lm's thread.
_BOUNDS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0.01, 100),
    "seed": (0, 2**63 - 1),
    "top_k": (0, 2**31 - 1),
    "repetition_context_size": (1, 2**31 - 1),
    "presence_context_size": (1, 2**31 - 1),
    "frequency_context_size": (1, 2**31 - 1),
}
_MIN_TEMPERATURE = 1e-4
_MAX_BIASES, _MAX_BIAS = 1024, 100
_MAX_STOPS, _MAX_STOP_CHARS = 16, 1000


class RefusedRequestError(Exception):
    """A request is refused with an error in the protocol's form."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = "") -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": code or None}
        self.status, self.content = status, {"error": error}


def checked_body(body: Mapping[str, Any], vocab_size: int, context: object) -> dict[str, Any]:
    """Return the entries that mlx-lm's handler reads, within its thread's limits.

    `context` is the most tokens of a sequence, if the model's config says so.
    """
    for name in ("n", "best_of"):
        require(body.get(name, 1) == 1, name, "must be 1: this server gives one answer")
    form = body.get("response_format", {"type": "text"})
    require(form == {"type": "text"}, "response_format", "must be text")
    # As in OpenAI's API, null asks for the default.
    body = {name: value for name, value in body.items() if value is not None}
    _check_numbers(body)
    checked = {name: body[name] for name in _READ_ENTRIES if name in body}
    for name, (lowest, highest) in _BOUNDS.items():
        value = checked.get(name, lowest)
        require(
            not isinstance(value, int | float) or lowest <= value <= highest,
            name,
            f"must be from {lowest} to {highest}",
        )
    # mlx-lm takes some of these as floats only.
    checked |= {name: float(checked[name]) for name in _NUMBERS & checked.keys()}
    if checked.get("temperature", 1.0) < _MIN_TEMPERATURE:
        checked["temperature"] = 0.0
    if isinstance(top_k := checked.get("top_k"), int) and top_k >= vocab_size:
        checked["top_k"] = 0
    _check_biases(checked.get("logit_bias", {}), vocab_size)
    with_usage = checked.pop("stream_options", {})
    require(isinstance(with_usage, dict), "stream_options", "must be an object")
    checked["stream_options"] = {"include_usage": bool(with_usage.get("include_usage"))}
    longest = body.get("max_completion_tokens", checked.get("max_tokens"))
    if isinstance(longest, int) and isinstance(context, int) and context > 0:
        longest = min(longest, context)
    if longest is not None:
        checked["max_tokens"] = longest
    return checked


def _check_numbers(body: Mapping[str, Any]) -> None:
    """Raise RefusedRequestError for an entry that is not the number that mlx-lm expects."""
    for names, kind, noun in (
        (_INTEGER_ENTRIES, int, "a whole number"),
        (_NUMBERS, (int, float), "a number"),
    ):
        for name in names & body.keys():
            value = body[name]
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            require(is_number, name, f"must be {noun}")


def require(holds: bool, param: str, problem: str) -> None:
    """Raise RefusedRequestError for an entry of a request unless it holds."""
    if not holds:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"{param} {problem}", param)


def tools_of(body: Mapping[str, Any]) -> list[Any] | None:
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    require(isinstance(tools, list), "tools", "must be a list")
    require(choice in ("auto", "none"), "tool_choice", "must be auto or none")
    return None if choice == "none" else tools or None


def stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    fits = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    require(fits, "stop", f"must be a text or a list of at most {_MAX_STOPS} texts")
    for each in stops:
        fits = isinstance(each, str) and 0 < len(each) <= _MAX_STOP_CHARS
        require(fits, "stop", f"must be text of 1 to {_MAX_STOP_CHARS:,} characters")
    return tuple(stops)


def _check_biases(biases: object, vocab_size: int) -> None:
    """Raise RefusedRequestError for biases of tokens that the model lacks, or without limits."""
    require(
        isinstance(biases, dict)
        and len(biases) <= _MAX_BIASES
        and all(
            re.fullmatch("[0-9]{1,9}", token)
            and int(token) < vocab_size
            and isinstance(bias, int | float)
            and abs(bias) <= _MAX_BIAS
            for token, bias in biases.items()
        ),
        "logit_bias",
        f"must have numbers from -{_MAX_BIAS} to {_MAX_BIAS} for tokens of the model",
    )
