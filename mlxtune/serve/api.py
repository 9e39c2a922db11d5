"""The protocol of the OpenAI API: access to the server, its errors, and mlx-lm's answers."""

import hmac
import io
import json
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import mlxtune.backend  # noqa: F401  sets MLX's folder before mlx is imported

# isort: split
from mlx_lm.server import APIHandler, CompletionRequest, Response

from mlxtune.config.limits import Limits, TooLargeError, parse_json
from mlxtune.core.data.prompt import MAX_BYTES
from mlxtune.errors import DataError, MlxTuneError
from mlxtune.serve.answering import AnswerError, LiveRequest
from mlxtune.serve.api_requests import (
    RefusedRequestError,
    checked_body,
    require,
    stops_of,
    tools_of,
)
from mlxtune.serve.api_server import ApiServer
from mlxtune.serve.served_models import RenderedMessages, ServedModel, trained_on
from mlxtune.watch.connections import LimitedReader

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost\.?|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_BODY = Limits(2 * MAX_BYTES, values=100_000, entries=20_000, text=MAX_BYTES)
# Limits of a request in seconds and bytes, including its headers; a client that takes no bytes of
# its answer for the second number of seconds is disconnected.
_SECONDS, _WRITE_SECONDS, _MAX_REQUEST_BYTES = 10.0, 60.0, _BODY.bytes + 128 * 1024
# After a refusal, how much of the rest of a request is read, so that the client sees the answer.
_DRAIN_SECONDS, _DRAIN_BYTES = 1.0, 2**26
_CHAT, _TEXT = ("/v1/chat/completions", "/chat/completions"), ("/v1/completions",)
_MODELS = "/v1/models"


class ApiHandler(APIHandler):  # type: ignore[misc]  # mlx-lm has no types
    """Checks a request, and lets mlx-lm's handler answer it."""

    server: ApiServer
    server_version, sys_version = "mlxtune", ""
    path: str
    rfile: Any
    _live: LiveRequest

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(LimitedReader(self.connection, _SECONDS, _MAX_REQUEST_BYTES))
        self._status, self._fields, self._begun = 200, dict[str, str](), False

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""

    # Responses

    def send_response(self, code: int, message: str | None = None) -> None:
        """Hold the status back until the headers are complete, as an error may replace it."""
        self._status, self._fields = code, {}

    def send_header(self, keyword: str, value: str) -> None:
        """Hold a header back; `_cors` decides which pages may read the answer."""
        if not keyword.startswith("Access-Control-"):
            self._fields[keyword.title()] = value

    def end_headers(self) -> None:
        """Send the status and the headers."""
        self.connection.settimeout(_WRITE_SECONDS)
        self.send_response_only(self._status)
        fixed = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        for name, value in {**self._fields, **fixed, **self._cors()}.items():
            super().send_header(name, value)
        self._begun = True
        super().end_headers()

    def _cors(self) -> dict[str, str]:
        """Return the headers that let a page of an allowed site read the answer."""
        origin = getattr(self, "headers", {}).get("Origin")
        if origin is None or not self._is_allowed(origin):
            return {}
        headers = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if self.command == "OPTIONS":
            requested = self.headers.get("Access-Control-Request-Headers", "")
            named = requested if re.fullmatch(r"[\w, -]{0,1000}", requested) else ""
            headers["Access-Control-Allow-Headers"] = named or "authorization, content-type"
            headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
        return headers

    def _is_allowed(self, origin: str) -> bool:
        safe = re.fullmatch(r"[\w.:/\[\]-]{1,300}", origin) is not None
        return safe and ("*" in self.server.origins or origin in self.server.origins)

    def _send(self, status: int, content: Any) -> None:
        text = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error in the protocol's form."""
        del explain  # for pages of HTML
        self._send(code, RefusedRequestError(code, message or HTTPStatus(code).phrase).content)

    def _refuse(self, refused: RefusedRequestError) -> None:
        if not self._begun:
            self._send(refused.status, refused.content)
        elif self.stream:
            self.wfile.write(f"data: {json.dumps(refused.content)}\n\n".encode())
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            until, left = time.monotonic() + _DRAIN_SECONDS, _DRAIN_BYTES
            while left > 0 and (seconds := until - time.monotonic()) > 0:
                self.connection.settimeout(seconds)
                if not (content := self.connection.recv(2**16)):
                    break
                left -= len(content)

    # Requests

    def do_OPTIONS(self) -> None:
        """Answer a browser that asks whether a page may send a request."""
        with self._refusing():
            self._check_place()
            self._send(HTTPStatus.NO_CONTENT, None)

    def do_GET(self) -> None:
        """List the models, or describe one."""
        with self._refusing():
            self._check_place()
            self._check_key()
            path = self.path.partition("?")[0]
            name = unquote(path.removeprefix(f"{_MODELS}/"))
            if path == _MODELS:
                described = [self._described(each) for each in self._models()]
                self._send(HTTPStatus.OK, {"object": "list", "data": described})
            elif path == "/health":
                self.handle_health_check()
            elif path.startswith(f"{_MODELS}/"):
                self._send(HTTPStatus.OK, self._described(self._model(name)))
            else:
                raise RefusedRequestError(HTTPStatus.NOT_FOUND, "no such address")

    def do_POST(self) -> None:
        """Answer messages, or complete a text."""
        with self._refusing():
            self._check_place()
            self._check_key()
            self.path = self.path.partition("?")[0]
            if self.path not in _CHAT + _TEXT:
                raise RefusedRequestError(HTTPStatus.NOT_FOUND, "no such address")
            body = self._body()
            with self.server.answering():
                self._live = self._request(body)
                base = self.server.models.base
                context = base.text_config.get("max_position_embeddings")
                content = json.dumps(checked_body(body, base.vocab_size, context)).encode()
                # mlx-lm's handler reads what was checked.
                self.rfile = io.BufferedReader(io.BytesIO(content))
                del self.headers["Content-Length"]
                self.headers["Content-Length"] = str(len(content))
                super().do_POST()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Send an error that the block raises."""
        try:
            yield
        except RefusedRequestError as refused:
            self._refuse(refused)
        except AnswerError as error:
            self._refuse(RefusedRequestError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)))

    def _check_place(self) -> None:
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if self.server.is_local and (len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0])):
            message = "the Host of a request must be this machine: ask at 127.0.0.1"
            raise RefusedRequestError(HTTPStatus.MISDIRECTED_REQUEST, message)
        if len(origins) > 1 or not all(map(self._is_allowed, origins)):
            message = "pages of this site may not ask: start the server with --allow-origin"
            raise RefusedRequestError(HTTPStatus.FORBIDDEN, message)

    def _check_key(self) -> None:
        scheme, _, sent = self.headers.get("Authorization", "").partition(" ")
        sent = sent.strip() if scheme.lower() == "bearer" else ""
        key = self.server.key
        if key is not None and not hmac.compare_digest(sent.encode("latin-1"), key.encode()):
            message = "the key is missing or wrong: send the server's --api-key after Bearer"
            raise RefusedRequestError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")

    def _body(self) -> dict[str, Any]:
        """Return the entries of a request's JSON that are not null."""
        if self.headers.get_content_type() != "application/json":
            message = "a request is JSON: send the header Content-Type: application/json"
            raise RefusedRequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
        if (size := self._length()) > _BODY.bytes:
            message = f"the request has {size:,} bytes, more than {_BODY.bytes:,}: shorten it"
            raise RefusedRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        try:
            content = self.rfile.read(size)
            body = parse_json(content, _BODY, "the request", constants=False)
        except TimeoutError as error:
            message = "the request did not arrive in time"
            raise RefusedRequestError(HTTPStatus.REQUEST_TIMEOUT, message) from error
        except TooLargeError as error:
            raise RefusedRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error
        except ValueError as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
        if not isinstance(body, dict):
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "the request is not an object")
        return {name: value for name, value in body.items() if value is not None}

    def _length(self) -> int:
        """Return the bytes of a request's body, of which a proxy must not have another opinion."""
        sizes = set(self.headers.get_all("Content-Length", []))
        if not sizes:
            raise RefusedRequestError(
                HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing: send it"
            )
        if "Transfer-Encoding" in self.headers:
            message = "a request has either Content-Length or Transfer-Encoding: send the former"
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, message)
        if len(sizes) > 1 or not re.fullmatch("[0-9]{1,15}", *sizes):
            message = "Content-Length is not one number of bytes: send the size of the body"
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, message)
        return int(sizes.pop())

    def _model(self, name: object) -> ServedModel:
        try:
            model = self.server.models.current(name) if isinstance(name, str) else None
        except MlxTuneError as error:
            raise RefusedRequestError(
                HTTPStatus.SERVICE_UNAVAILABLE, str(error), "model"
            ) from error
        if model is None:
            names = ", ".join(each.name for each in self.server.models)
            problem = (
                f"no model {name!r:.100}" if name is not None else "the request names no model"
            )
            raise RefusedRequestError(
                HTTPStatus.NOT_FOUND if name is not None else HTTPStatus.BAD_REQUEST,
                f"{problem}: choose one of {names}",
                param="model",
                code="model_not_found",
            )
        return model

    def _models(self) -> Iterator[ServedModel]:
        """Yield the models as they are on disk, or as they were where that cannot be served."""
        for model in self.server.models:
            with suppress(MlxTuneError):
                model = self.server.models.current(model.name) or model
            yield model

    def _request(self, body: Mapping[str, Any]) -> LiveRequest:
        """Return a request with its rendered prompt."""
        model, models = self._model(body.get("model")), self.server.models
        tools = tools_of(body)
        options = body.get("chat_template_kwargs", {})
        require(isinstance(options, dict), "chat_template_kwargs", "must be an object")
        try:
            if self.path in _TEXT:
                text = body.get("prompt")
                require(isinstance(text, str), "prompt", "must be text")
                messages: list[Any] = [{"role": "prompt"}]
                prompt = models.text_prompt(model, str(text))
            else:
                messages = body.get("messages", [])
                content = {"messages": messages, "chat_template_kwargs": options}
                prompt = models.prompt(model, content | ({"tools": tools} if tools else {}))
                messages = [{"role": each["role"]} for each in messages]
        except DataError as error:
            param = "prompt" if self.path in _TEXT else "messages"
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error), param) from error
        except MlxTuneError as error:
            raise RefusedRequestError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        conversation = RenderedMessages(messages, prompt)
        return LiveRequest("chat", "", conversation, tools, None, model, prompt, stops_of(body))

    # What mlx-lm's handler asks of us

    def validate_model_parameters(self) -> None:
        """Check the types of a request's entries, and name the adapter's version for mlx-lm."""
        try:
            super().validate_model_parameters()
        except ValueError as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
        # mlx-lm continues a batch with requests for an equal model and adapter.
        self.adapter = self._live.model.version

    def handle_chat_completions(self) -> CompletionRequest:
        """Return the request whose prompt was rendered."""
        self.request_id = f"chatcmpl-{uuid.uuid4()}"
        self.object_type = "chat.completion.chunk" if self.stream else "chat.completion"
        return self._live

    def handle_text_completions(self) -> CompletionRequest:
        """Return the request whose prompt was rendered."""
        self.request_id, self.object_type = f"cmpl-{uuid.uuid4()}", "text_completion"
        return self._live

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        """Answer; `Answers` finds the stop texts, also where tokens cross their edges."""
        super().handle_completion(request, [])

    def generate_response(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return mlx-lm's response, with log-probabilities as in the protocol, also streamed."""
        response: dict[str, Any] = super().generate_response(
            *args, **options | {"token_logprobs": None, "top_tokens": None}
        )
        pieces, self._live.pieces = self._live.pieces, []
        if self.logprobs or self.top_logprobs > 0:
            content = [self._logprob(piece) for piece in pieces]
            response["choices"][0]["logprobs"] = {"content": content, "refusal": None}
        return response

    def _logprob(self, piece: Response) -> dict[str, Any]:
        best = sorted(piece.top_tokens, key=lambda each: -each["logprob"])
        top = [self._scored(each["id"], each["logprob"]) for each in best]
        return self._scored(piece.token, piece.logprob) | {"top_logprobs": top}

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self.server.models.token_bytes(self._live.model, token)
        text = spelled.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}

    def _described(self, model: ServedModel) -> dict[str, Any]:
        entry = {"id": model.name, "object": "model", "created": self.created}
        adapter = model.session.adapter
        described = trained_on(adapter) if adapter else {"model": self.server.models.folder.name}
        return entry | {"owned_by": "mlxtune", "trained_on" if adapter else "base": described}
