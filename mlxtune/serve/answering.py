"""Answers requests with mlx-lm's server: its batches, its prompt cache and its streams."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import Any

import mlxtune.backend  # noqa: F401  sets MLX's folder before mlx is imported

# isort: split
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    ModelProvider,
    Response,
    ResponseGenerator,
)

from mlxtune.core.data.prompt import Prompt
from mlxtune.core.data.text_stream import TextStream
from mlxtune.errors import ModelError
from mlxtune.serve.served_models import ServedModel, ServedModels

# The number of prompts whose keys and values are kept.
_KEPT_PROMPTS = 10
# How often a request may be overtaken by later ones for the adapter that is attached.
_MAX_OVERTAKEN = 32


class AnswerError(BaseException):
    """An answer has failed.

    Not an Exception, because mlx-lm's handler writes the text of an Exception as it is, and this
    one must reach our handler, which writes it in the protocol's form.
    """


@dataclass
class LiveRequest(CompletionRequest):  # type: ignore[misc]  # mlx-lm has no types
    """A request with its model, its rendered prompt and its stop texts.

    `pieces` are the tokens of the answer since they were last taken.
    """

    model: ServedModel
    rendered: Prompt
    stop: tuple[str, ...]
    pieces: list[Response] = field(default_factory=list)


class AdapterProvider(ModelProvider):  # type: ignore[misc]
    """Provides mlx-lm's server with the base model and the adapter that a request names."""

    def __init__(self, models: ServedModels, max_tokens: int) -> None:
        # The options that mlx-lm's server reads, with its own defaults.
        options = Namespace(
            model=None, adapter_path=None, draft_model=None, num_draft_tokens=0, pipeline=False,
            trust_remote_code=False, chat_template="", use_default_chat_template=False,
            chat_template_args={}, temp=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=max_tokens,
            decode_concurrency=32, prompt_concurrency=8, prefill_step_size=2048,
            prompt_cache_size=_KEPT_PROMPTS, prompt_cache_bytes=None, kv_bits=None,
            kv_group_size=64, quantized_kv_start=0, allowed_origins=[],
        )  # fmt: skip
        super().__init__(options)
        self.models = models
        # As mlx-lm decides, but before the first request, so that it starts a batch too.
        cache = make_prompt_cache(models.base.model)
        self.is_batchable = all(hasattr(each, "merge") for each in cache)

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[Any, Any]:
        """Switch to the model named `model_path`, and return it with its tokenizer."""
        model = self.models.current(model_path)
        assert model is not None
        self.models.switch_to(model)
        self.model_key = (model.name, model.version, None)
        self.model, self.tokenizer = self.models.base.model, self.models.tokenizer(model)
        return self.model, self.tokenizer


class Answers(ResponseGenerator):  # type: ignore[misc]
    """Answers requests in mlx-lm's thread; answers end as `mlxtune generate` ends them."""

    def __init__(self, models: ServedModels, max_tokens: int) -> None:
        self.models = models
        super().__init__(AdapterProvider(models, max_tokens), LRUPromptCache(_KEPT_PROMPTS))
        # The thread takes requests from this attribute each time, and none was made so far.
        self.requests = _RequestQueue()

    def generate(
        self,
        request: CompletionRequest,
        generation_args: GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[GenerationContext, Iterator[Response]]:
        """Return the context of an answer, and its tokens as they come. Raises AnswerError."""
        assert isinstance(request, LiveRequest)
        try:
            context, pieces = super().generate(request, generation_args, progress_callback)
        except Exception as error:
            raise AnswerError(str(error)) from error
        return context, self._shown(context, request, pieces)

    def _shown(
        self, context: GenerationContext, request: LiveRequest, pieces: Iterator[Response]
    ) -> Iterator[Response]:
        """Yield the tokens, each with the text that is now certain, up to a stop text or end token.

        As mlx-lm's handler drops the text of a token with the reason `stop`, no token has it, and
        the iterator ends instead.
        """
        stream = TextStream((*request.stop, request.rendered.end_text))
        try:
            for piece in pieces:
                if math.isnan(piece.logprob):
                    raise ModelError(f"the logits of {request.model.name} are not finite numbers")
                at_end = piece.finish_reason is not None
                text = ""
                if piece.finish_reason != "stop":
                    text = stream.add(self.models.token_bytes(request.model, piece.token))
                    request.pieces.append(piece)
                reason = "length" if piece.finish_reason == "length" else None
                if stream.stopped:
                    reason = None
                elif at_end:
                    text += stream.finish()
                yield replace(piece, text=text, finish_reason=reason)
                if stream.stopped or at_end:
                    context.stop()
                    return
        except OSError:  # the client has left, as mlx-lm sees when it reports progress
            raise
        except Exception as error:
            raise AnswerError(str(error)) from error


class _RequestQueue(Queue[Any]):
    """A queue that keeps requests for one model together, so that they share batches.

    A request is overtaken a limited number of times.
    """

    def _init(self, maxsize: int) -> None:
        self._waiting: list[Any] = []
        self._last, self._overtaken = "", 0

    def _qsize(self) -> int:
        return len(self._waiting)

    def _put(self, item: Any) -> None:
        self._waiting.append(item)

    def _get(self) -> Any:
        same = (i for i, item in enumerate(self._waiting) if item[1].model.name == self._last)
        index = next(same, 0) if self._overtaken < _MAX_OVERTAKEN else 0
        self._overtaken = self._overtaken + 1 if index else 0
        item = self._waiting.pop(index)
        self._last = item[1].model.name
        return item
