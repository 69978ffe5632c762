"""Diptych inside your own Python process: `Engine` (SGLang's face) and `LLM` (offline batches).

The same parts as a server, as threads: an event loop with the text side, the engine's loop, and the worker. Nothing is
guarded by `if __name__ == "__main__"`, because no process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import zmq

from diptych.config import EngineConfig
from diptych.config_tree import config_from_tree
from diptych.core.batch import Speculation, TokenLogprobs
from diptych.core.calls import JoinWeightsGroup
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import EngineInfo, EngineLoad, FromEngine, InFlight, ToEngine
from diptych.core.request import SamplingParams
from diptych.engine.engine import EngineCore
from diptych.engine.multi_process import create_executor
from diptych.errors import RequestError
from diptych.metrics import ServerMetrics
from diptych.resolve import resolve
from diptych.server.adapters import ServedAdapters
from diptych.server.bodies import validated
from diptych.server.client import EngineClient
from diptych.server.generation import Generation, GenerationOptions, GenerationService, run_all
from diptych.server.native import NativeAnswer
from diptych.server.schemas import GenerateRequest
from diptych.server.token_texts import TokenTexts
from diptych.server.upkeep import MEMORY_TAGS, EngineUpkeep, LoadFormat, float_values, new_update_id
from diptych.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from diptych.models.named_tensors import FlattenedBucket

Result = TypeVar("Result")
Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One generated sequence. finish_reason: "stop", "length" or "abort". matched_stop: the stop string or token that
    ended it. speculation: what drafts have brought; None where none were verified.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    matched_stop: int | str | None
    cached_tokens: int
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    speculation: Speculation | None = None


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
        core = EngineCore(self.config, create_executor(self.config), channel)
        self._engine_thread = threading.Thread(target=core.run, name="diptych-engine", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="diptych-text", daemon=True)
        self._client = EngineClient(client_socket)
        self._engine_thread.start()
        self._loop_thread.start()
        try:
            info = self.call(self._client.start())
            model = self.config.model
            tokenizer = load_tokenizer(model.model_path, model.tokenizer_path)
            adapters = ServedAdapters(self._client, self.config)
            self.call(adapters.load_configured())
        except BaseException:
            self.shutdown()
            raise
        metrics = ServerMetrics(self.config.server.metrics_prefix, "")
        self.service = GenerationService(
            self._client, info, tokenizer, TokenTexts(tokenizer), metrics, self.config, served_adapters=adapters
        )
        self._client.on_change = self._note_change

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

    @property
    def info(self) -> EngineInfo:
        """What is served now."""
        return self.service.info

    @property
    def upkeep(self) -> EngineUpkeep:
        """What is done to weights and memory; its coroutines run through `call`."""
        return EngineUpkeep(self._client)

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, Any]] | FlattenedBucket,
        *,
        in_flight: InFlight,
        weight_version: str | None,
    ) -> int:
        """Compute with these torch tensors, as `Engine` says."""
        # Imported here: only whoever has tensors has torch already.
        from diptych.models.named_tensors import as_bytes

        upkeep, update_id = self.upkeep, new_update_id()
        self.call(upkeep.stage(update_id, as_bytes(named_tensors)))
        return self.call(upkeep.commit(update_id, in_flight, weight_version))

    def _note_change(self, info: EngineInfo) -> None:
        self.service.info = info

    def load_lora_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Load an adapter in PEFT's format while requests run; pinned: once on the device, it stays there.

        Raises: AdapterError saying what is wrong with it; then nothing has changed.
        """
        self.call(self.service.adapters.load(name, path, pinned=pinned))

    def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter as soon as its running requests have ended. Raises: UnknownModel."""
        self.call(self.service.adapters.unload(name))

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

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """Load an adapter (a PEFT folder), to be named by `lora_path=lora_name`. Raises: AdapterError."""
        self._engine.load_lora_adapter(lora_name, lora_path, pinned=pinned)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter as soon as its running requests have ended. Raises: UnknownModel."""
        self._engine.unload_lora_adapter(lora_name)

    def get_server_info(self) -> dict[str, Any]:
        """What is served, and the load now."""
        info, load = self._engine.info, self._engine.load()
        return {name: getattr(info, name) for name in info.__struct_fields__} | {
            name: getattr(load, name) for name in load.__struct_fields__
        }

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, Any]] | FlattenedBucket,
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        in_flight: InFlight = "wait",
        weight_version: str | None = None,
    ) -> int:
        """Compute with these weights: torch tensors under their Hugging Face names, whole, all or some of the model's.

        named_tensors: pairs of name and tensor on any device (copied through host memory), or a bucket as
        `FlattenedBucket.of` makes it. in_flight: what becomes of requests in flight ("wait", "abort", "keep",
        "retract"). The prefix cache is emptied in any case. Returns: how many requests were in flight. Raises:
        RequestError naming a tensor that does not fit; then nothing has changed.
        """
        return self._engine.update_weights_from_tensor(
            named_tensors, in_flight=in_flight, weight_version=weight_version
        )

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: LoadFormat | None = None,
        *,
        in_flight: InFlight = "wait",
        weight_version: str | None = None,
    ) -> int:
        """Compute with another checkpoint of the same model. As `update_weights_from_tensor`."""
        return self._engine.call(
            self._engine.upkeep.update_from_disk(
                model_path, load_format or "auto", in_flight=in_flight, weight_version=weight_version
            )
        )

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "gloo",
        *,
        timeout_s: float = 60.0,
    ) -> None:
        """Meet a trainer, who is rank 0 of `diptych.WeightsGroup` with the same arguments. Raises: Unavailable."""
        call = JoinWeightsGroup(group_name, master_address, master_port, rank_offset, world_size, backend, timeout_s)
        self._engine.call(self._engine.upkeep.join_group(call))

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """Part from that trainer."""
        self._engine.call(self._engine.upkeep.leave_group(group_name))

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[tuple[int, ...]],
        group_name: str = "weight_update_group",
        *,
        in_flight: InFlight = "wait",
        weight_version: str | None = None,
    ) -> int:
        """Compute with tensors that the trainer broadcasts, in this order. As `update_weights_from_tensor`."""
        upkeep, update_id = self._engine.upkeep, new_update_id()
        dtypes = [dtype.removeprefix("torch.") for dtype in dtypes]
        self._engine.call(upkeep.receive(update_id, group_name, names=names, dtypes=dtypes, shapes=shapes))
        return self._engine.call(upkeep.commit(update_id, in_flight, weight_version))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a tensor, as the model computes with it, as nested lists. Raises: RequestError."""
        (tensor,) = self._engine.call(self._engine.upkeep.read([name], truncate_size))
        rows: list[Any] = float_values(tensor).tolist()
        return rows

    def pause_generation(self, mode: InFlight = "abort") -> None:
        """Hold new requests, and plan no steps; those in flight are aborted, finished first, kept or retracted."""
        self._engine.call(self._engine.upkeep.pause(mode))

    def continue_generation(self) -> None:
        """End a pause."""
        self._engine.call(self._engine.upkeep.resume_generation())

    def release_memory_occupation(
        self, tags: Sequence[str] = MEMORY_TAGS, *, in_flight: Literal["wait", "abort"] = "wait"
    ) -> None:
        """Return the memory of "weights" and "kv_cache" to the system; requests are refused until it is resumed."""
        self._engine.call(self._engine.upkeep.release(tags, in_flight))

    def resume_memory_occupation(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have released memory again: the weights as they were, the prefix cache empty."""
        self._engine.call(self._engine.upkeep.resume(tags))

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

    def load_lora_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Load an adapter (a PEFT folder), to be named in `generate`. Raises: AdapterError."""
        self._engine.load_lora_adapter(name, path, pinned=pinned)

    def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter as soon as its running requests have ended. Raises: UnknownModel."""
        self._engine.unload_lora_adapter(name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapters: str | Sequence[str] = "",
    ) -> list[Completion]:
        """Generate for all prompts (texts or token ids) together; one SamplingParams for all, or one each.

        `max_tokens` left out means 16. adapters: the loaded adapter to use, one for all or one each; "" for none.
        Raises: RequestError if one does not fit; then none has been generated.
        """
        many = [prompts] if _is_single(prompts) else list(prompts)
        each = [sampling or SamplingParams()] * len(many) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} SamplingParams for {len(many)} prompts", param="sampling")
        names = [adapters] * len(many) if isinstance(adapters, str) else list(adapters)
        if len(names) != len(many):
            raise RequestError(f"{len(names)} adapters for {len(many)} prompts", param="adapters")
        return self._engine.call(self._generate(many, each, names))  # type: ignore[arg-type]

    async def _generate(
        self, prompts: list[Prompt], sampling: list[SamplingParams], adapters: list[str]
    ) -> list[Completion]:
        service = self._engine.service
        generations = []
        for prompt, params, adapter in zip(prompts, sampling, adapters, strict=True):
            token_ids = (
                await service.encode(prompt) if isinstance(prompt, str) else service.check_token_ids(prompt, "prompt")
            )
            await service.check_grammar(params.grammar)
            options = GenerationOptions(default_max_tokens=16, adapter=adapter)
            generations += service.submit(token_ids, params, options)
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
        speculation=generation.speculation,
    )
