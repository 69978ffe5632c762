"""Diptych inside your own Python process: `Engine` (SGLang's face) and `LLM` (offline batches).

The same parts as a server, as threads: an event loop with the text side, the engine's loop, and the worker. Nothing is
guarded by `if __name__ == "__main__"`, because no process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from diptych.config import EngineConfig
from diptych.config_tree import config_from_tree
from diptych.core.batch import TokenLogprobs
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import EngineInfo, EngineLoad, FromEngine, ToEngine
from diptych.core.request import SamplingParams
from diptych.engine.engine import EngineCore
from diptych.engine.executor import InProcessExecutor
from diptych.errors import RequestError
from diptych.metrics import ServerMetrics
from diptych.resolve import resolve
from diptych.server.bodies import validated
from diptych.server.client import EngineClient
from diptych.server.generation import Generation, GenerationOptions, GenerationService, run_all
from diptych.server.native import NativeAnswer
from diptych.server.schemas import GenerateRequest
from diptych.server.token_texts import TokenTexts
from diptych.tokenizer import load_tokenizer

Result = TypeVar("Result")
Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One generated sequence. finish_reason: "stop", "length" or "abort". matched_stop: the stop string or token that
    ended it.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    matched_stop: int | str | None
    cached_tokens: int
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


class InProcessEngine:
    """The engine's loop on a thread, and an event loop on another that talks to it.

    Args: config: any; it is resolved here. Construction loads the model. Raises: ConfigError if it cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = resolve(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client_socket = open_socket(self._context, "inproc://engine", bind=True)
        channel: Channel[FromEngine, ToEngine] = Channel(
            open_socket(self._context, "inproc://engine", bind=False), ToEngine
        )
        core = EngineCore(self.config, InProcessExecutor(self.config), channel)
        self._engine_thread = threading.Thread(target=core.run, name="diptych-engine", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="diptych-text", daemon=True)
        self._client = EngineClient(client_socket)
        self._engine_thread.start()
        self._loop_thread.start()
        try:
            self.info: EngineInfo = self.call(self._client.start())
            model = self.config.model
            tokenizer = load_tokenizer(model.model_path, model.tokenizer_path)
        except BaseException:
            self.shutdown()
            raise
        metrics = ServerMetrics(self.config.server.metrics_prefix, "")
        self.service = GenerationService(
            self._client, self.info, tokenizer, TokenTexts(tokenizer), metrics, self.config
        )

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the engine's event loop and wait for it; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def await_call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The same from another event loop, without blocking it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests run."""
        return self.call(self._client.flush_cache()).ok

    def load(self) -> EngineLoad:
        """Gauges and totals of the engine."""
        return self.call(self._client.load())

    def shutdown(self) -> None:
        """Abort what runs, end the threads, free the model. Calling it twice is harmless."""
        if not self._loop_thread.is_alive():
            return
        if self._client.is_alive:
            self.call(self._client.drain(0.0))
        self._engine_thread.join()
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()
        self._context.term()

    async def _close(self) -> None:
        self._client.close()


class Engine:
    """An engine with SGLang's methods: prompts and `sampling_params` dicts in, dicts with `text` and `meta_info` out.

    Args: config: an EngineConfig; or its fields by name, as in `Engine(model_path="...", page_size=32)`.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        self._engine = InProcessEngine(config or config_from_tree(options, "Engine"))

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Generate for one prompt or a batch; `fields` are those of POST /generate (return_logprob, rid, ...).

        Returns: a dict; a list of them for a batch or n above 1; with `stream` an iterator of dicts with the text so
        far. Raises: RequestError for a bad request.
        """
        answer = self._answer(prompt, sampling_params, input_ids, fields)
        if stream:
            return self._iterate(answer)
        return self._engine.call(answer.whole())

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for asyncio: awaits the result; with `stream`, an async iterator."""
        answer = self._answer(prompt, sampling_params, input_ids, fields)
        if stream:
            return self._aiterate(answer)
        return await self._engine.await_call(answer.whole())

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests run."""
        return self._engine.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        """What is served, and the load now."""
        info, load = self._engine.info, self._engine.load()
        return {name: getattr(info, name) for name in info.__struct_fields__} | {
            name: getattr(load, name) for name in load.__struct_fields__
        }

    def shutdown(self) -> None:
        """Abort what runs and free the model."""
        self._engine.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _answer(self, prompt: Any, sampling_params: Any, input_ids: Any, fields: dict[str, Any]) -> NativeAnswer:
        unknown = sorted(set(fields) - set(GenerateRequest.model_fields))
        if unknown:
            raise RequestError(f"generate has no argument {unknown[0]!r}", param=unknown[0])
        body = {"text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, **fields}
        return NativeAnswer(self._engine.service, validated(GenerateRequest, body), "")

    def _iterate(self, answer: NativeAnswer) -> Iterator[dict[str, Any]]:
        results = answer.results()
        with contextlib.closing(_Steps(self._engine, results)) as steps:
            while (result := self._engine.call(steps.next())) is not None:
                yield result

    async def _aiterate(self, answer: NativeAnswer) -> AsyncIterator[dict[str, Any]]:
        steps = _Steps(self._engine, answer.results())
        try:
            while (result := await self._engine.await_call(steps.next())) is not None:
                yield result
        finally:
            steps.close()


class _Steps:
    """An async generator that lives on the engine's event loop, taken one item at a time from elsewhere."""

    def __init__(self, engine: InProcessEngine, results: Any) -> None:
        self._engine = engine
        self._results = results

    async def next(self) -> dict[str, Any] | None:
        """The next item, None after the last."""
        item: dict[str, Any] | None = await anext(self._results, None)
        return item

    def close(self) -> None:
        """End the generator; a request that still runs is aborted."""
        self._engine.call(self._results.aclose())


class LLM:
    """Offline batches: prompts and `SamplingParams` in, `Completion`s out, in order.

    Args: model: folder, GGUF file or "demo". options: any field of EngineConfig by name (page_size=32,
    dtype="float32").
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self._engine = InProcessEngine(config_from_tree({"model_path": model, **options}, "LLM"))

    @property
    def info(self) -> EngineInfo:
        """What the engine serves."""
        return self._engine.info

    def load(self) -> EngineLoad:
        """Gauges and totals of the engine."""
        return self._engine.load()

    def flush_cache(self) -> bool:
        """Empty the prefix cache."""
        return self._engine.flush_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts (texts or token ids) together; one SamplingParams for all, or one each.

        `max_tokens` left out means 16. Raises: RequestError if one does not fit; then none has been generated.
        """
        many = [prompts] if _is_single(prompts) else list(prompts)
        each = [sampling or SamplingParams()] * len(many) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} SamplingParams for {len(many)} prompts", param="sampling")
        return self._engine.call(self._generate(many, each))  # type: ignore[arg-type]

    async def _generate(self, prompts: list[Prompt], sampling: list[SamplingParams]) -> list[Completion]:
        service = self._engine.service
        generations = []
        for prompt, params in zip(prompts, sampling, strict=True):
            token_ids = (
                await service.encode(prompt) if isinstance(prompt, str) else service.check_token_ids(prompt, "prompt")
            )
            await service.check_grammar(params.grammar)
            generations += service.submit(token_ids, params, GenerationOptions(default_max_tokens=16))
        await run_all(generations)
        return [_completion(generation) for generation in generations]

    def shutdown(self) -> None:
        """Free the model and end the threads."""
        self._engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _is_single(prompts: object) -> bool:
    return isinstance(prompts, str) or (isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int))


def _completion(generation: Generation) -> Completion:
    return Completion(
        prompt_token_ids=generation.request.prompt_token_ids,
        text=generation.text,
        token_ids=generation.token_ids,
        finish_reason=str(generation.finish_reason),
        matched_stop=generation.matched_stop,
        cached_tokens=generation.cached_tokens,
        logprobs=generation.logprobs,
        prompt_logprobs=generation.prompt_logprobs,
    )
