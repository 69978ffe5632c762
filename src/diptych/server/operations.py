"""Routes for operators, routers and tools: health, what is served, load, cache, aborts, tokenizing, metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import diptych
from diptych.core.messages import EngineInfo, EngineLoad
from diptych.core.request import SamplingParams
from diptych.errors import RequestError, Unavailable
from diptych.metrics import cache_hit_rate, kv_usage
from diptych.server.adapter_routes import adapter_card
from diptych.server.bodies import read_schema
from diptych.server.errors import json_response
from diptych.server.generation import GenerationOptions, run_all
from diptych.server.schemas import AbortRequest, DetokenizeRequest, RoleSwitch, TokenizeRequest
from diptych.server.state import ServerState
from diptych.server.streaming import while_connected

HEALTH_GENERATE_TIMEOUT_S = 20.0
MAX_FLUSH_TIMEOUT_S = 600.0
SCRAPE_TIMEOUT_S = 1.0
FLUSH_RETRY_S = 0.1
MAX_TEXTS = 2048


async def health(state: ServerState, request: Request) -> Response:
    """GET /health, /ready: 200 when requests are served, else 503; no body."""
    return _status(is_well=state.is_serving)


async def ping(state: ServerState, request: Request) -> Response:
    """GET /ping: 200 while there is an engine, though it may sleep; else 503; no body."""
    return _status(is_well=state.is_alive)


def _status(*, is_well: bool) -> Response:
    return Response(status_code=200) if is_well else Response(status_code=503, headers={"Retry-After": "1"})


async def health_generate(state: ServerState, request: Request) -> Response:
    """GET /health_generate: 200 once the engine has generated a token."""
    service = state.service
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    options = GenerationOptions(timeout_s=HEALTH_GENERATE_TIMEOUT_S, priority=2**31 - 1)
    await while_connected(request, run_all(service.submit([_some_token(service.info)], sampling, options)))
    return Response(status_code=200)


def _some_token(info: EngineInfo) -> int:
    return info.eos_token_ids[0] if info.eos_token_ids else 0


async def models(state: ServerState, request: Request) -> Response:
    """GET /v1/models: the model, then its adapters."""
    adapters = [adapter_card(state, info) for info in state.adapters]
    return json_response({"object": "list", "data": [_model_card(state), *adapters]})


async def model(state: ServerState, request: Request) -> Response:
    """GET /v1/models/{id}."""
    adapter = state.adapter_of(request.path_params["model_id"])
    cards = [adapter_card(state, info) for info in state.adapters if info.name == adapter]
    return json_response(cards[0] if cards else _model_card(state))


def _model_card(state: ServerState) -> dict[str, Any]:
    info = state.info
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "diptych",
        "root": state.config.model.model_path,
        "parent": None,
        "max_model_len": info.max_model_len if info else state.config.model.max_model_len,
    }


async def model_info(state: ServerState, request: Request) -> Response:
    """GET /model_info and its old name."""
    info, config = state.ready_info, state.config
    return json_response(
        {
            "model_path": config.model.model_path,
            "tokenizer_path": config.model.tokenizer_path or config.model.model_path,
            "served_model_name": state.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": info.weight_version,
            "model_type": info.architecture,
            "architectures": [info.architecture],
            "disaggregation_mode": state.matchmaker.mode,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "reasoning_parser": config.server.reasoning_parser,
            "tool_call_parser": state.text.tool_call_parser,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
        }
    )


async def server_info(state: ServerState, request: Request) -> Response:
    """GET /server_info and its old name: every setting, flat, as routers read them. Keys are left out."""
    info, config = state.ready_info, state.config
    load = await _load(state)
    settings: dict[str, Any] = {}
    for section in (config.model, config.cache, config.scheduler, config.parallel, config.transfer, config.server):
        settings |= dataclasses.asdict(section)
    for secret in ("api_key", "cluster_key"):
        settings.pop(secret)
    settings |= {
        "served_model_name": state.model_name,
        "tokenizer_path": config.model.tokenizer_path or config.model.model_path,
        "role": state.matchmaker.role,
        "disaggregation_mode": state.matchmaker.mode,
        "disaggregation_bootstrap_port": state.matchmaker.bootstrap_port,
        "instance_id": info.peer.instance_id if info.peer else None,
        "peer_address": info.peer.address if info.peer else None,
        "model_fingerprint": info.fingerprint,
        "weight_version": info.weight_version,
        "released_memory": list(info.released),
        "is_paused": info.is_paused,
        "max_total_num_tokens": info.num_kv_tokens,
        "max_model_len": info.max_model_len,
        "dtype": info.dtype,
        "device": info.device,
        "attention_backend": info.attention_backend,
        "version": diptych.__version__,
        "internal_states": [{"last_gen_throughput": load.generation_tokens_per_s, "load_s": info.load_s}],
    }
    return json_response(settings)


async def loads(state: ServerState, request: Request) -> Response:
    """GET /v1/loads?include=core,disagg,queues,memory."""
    load = await _load(state)
    include = set(request.query_params.get("include", "core").split(","))
    entry: dict[str, Any] = {"dp_rank": 0, **_core_load(load)}
    if include & {"queues", "all"}:
        entry["queues"] = {
            "waiting": load.num_waiting,
            "running": load.num_running,
            "retracted": load.retractions_total,
        }
    if include & {"memory", "all"}:
        entry["memory"] = {
            "num_pages": load.num_pages,
            "num_free_pages": load.num_free_pages,
            "num_cached_pages": load.num_cached_pages,
            "page_size": load.page_size,
        }
    if include & {"disagg", "all"}:
        entry["disaggregation"] = {"mode": state.matchmaker.mode, **_transfer_load(state, load)}
    return json_response({"timestamp": load.timestamp, "version": diptych.__version__, "loads": [entry]})


def _transfer_load(state: ServerState, load: EngineLoad) -> dict[str, Any]:
    """Queues, in SGLang's words, then what is ours; empty without peers."""
    transfer = load.transfer
    if transfer is None:
        return {}
    speed = state.metrics.transfer_speed
    return {
        "prefill_bootstrap_queue_reqs": transfer.num_outgoing_waiting,
        "prefill_inflight_queue_reqs": transfer.num_outgoing_rooms - transfer.num_outgoing_waiting,
        "decode_prealloc_queue_reqs": transfer.num_incoming_waiting,
        "decode_transfer_queue_reqs": transfer.num_incoming_rooms,
        "kv_transfer_speed_gb_s": speed.gb_per_s,
        "kv_transfer_latency_ms": speed.latency_ms,
        "transport": transfer.transport,
        "quarantined_pages": transfer.num_quarantined_pages,
        "free_rooms": transfer.num_free_rooms,
        "peers": transfer.num_peers,
        "lost_peers": transfer.num_lost_peers,
        "bytes_sent": transfer.bytes_sent_total,
        "transfer_seconds": transfer.transfer_s_total,
        "descriptors": transfer.descriptors_total,
        "rooms_done": transfer.rooms_done_total,
        "failures": transfer.failures_total,
        "foreign_frames": transfer.foreign_frames_total,
    }


def _core_load(load: EngineLoad) -> dict[str, Any]:
    return {
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": load.num_waiting,
        "num_total_reqs": load.num_running + load.num_waiting,
        "num_used_tokens": load.num_owned_pages * load.page_size,
        "num_total_tokens": load.num_owned_pages * load.page_size,
        "max_total_num_tokens": load.num_pages * load.page_size,
        "token_usage": kv_usage(load),
        "gen_throughput": load.generation_tokens_per_s,
        "prompt_tokens": load.prompt_tokens_total - load.cached_tokens_total,
        "cache_hit_rate": cache_hit_rate(load),
        "utilization": (load.num_slots - load.num_free_slots) / load.num_slots if load.num_slots else 0.0,
    }


async def get_load(state: ServerState, request: Request) -> Response:
    """GET /get_load, which older routers poll."""
    load = await _load(state)
    return json_response(
        [
            {
                "dp_rank": 0,
                "num_reqs": load.num_running + load.num_waiting,
                "num_waiting_reqs": load.num_waiting,
                "num_tokens": load.num_owned_pages * load.page_size,
            }
        ]
    )


async def server_load(state: ServerState, request: Request) -> Response:
    """GET /load: requests that this server is working on."""
    return json_response({"server_load": state.client.num_open if state.client is not None else 0})


async def _load(state: ServerState) -> EngineLoad:
    return await state.service.client.load()


async def version(state: ServerState, request: Request) -> Response:
    """GET /version."""
    return json_response({"version": diptych.__version__})


async def abort_request(state: ServerState, request: Request) -> Response:
    """POST /abort_request: ends requests by their rid, or all of them."""
    body = await read_schema(request, AbortRequest, state.max_body_nbytes)
    service = state.service
    if body.abort_all:
        service.client.abort(None)
    elif body.rid:
        service.abort(body.rid)
    return Response(status_code=200)


async def switch_role(state: ServerState, request: Request) -> Response:
    """POST /pd_role_switch {new_role}: what this engine advertises from now on; what runs is not touched."""
    # A foreign web page cannot send this content type to a server on this machine without being asked.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("send the body as Content-Type: application/json")
    body = await read_schema(request, RoleSwitch, state.max_body_nbytes)
    _ = state.service
    matchmaker = state.matchmaker
    await matchmaker.switch("unified" if body.new_role == "null" else body.new_role)
    return json_response(
        {
            "success": True,
            "message": f"this engine is {matchmaker.role} now",
            "disaggregation_mode": matchmaker.mode,
            "disaggregation_bootstrap_port": matchmaker.bootstrap_port,
        }
    )


async def flush_cache(state: ServerState, request: Request) -> Response:
    """GET, POST /flush_cache?timeout=: empties the prefix cache; 400 if requests still run after `timeout` seconds."""
    client = state.service.client
    deadline = time.monotonic() + _flush_timeout(request)
    while True:
        reply = await client.flush_cache()
        if reply.ok:
            return Response("Cache flushed.\n", media_type="text/plain")
        if time.monotonic() >= deadline or await request.is_disconnected():
            return Response(f"Cache not flushed: {reply.message}\n", status_code=400, media_type="text/plain")
        await asyncio.sleep(FLUSH_RETRY_S)


def _flush_timeout(request: Request) -> float:
    text = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        raise RequestError(f"timeout must be a number of seconds, got {text!r}", param="timeout") from None
    if not 0 <= timeout_s <= MAX_FLUSH_TIMEOUT_S:  # also refuses NaN
        raise RequestError(
            f"timeout must be between 0 and {MAX_FLUSH_TIMEOUT_S:g} seconds, got {text}", param="timeout"
        )
    return timeout_s


async def tokenize(state: ServerState, request: Request) -> Response:
    """POST /tokenize: a text, several, or a conversation."""
    body = await read_schema(request, TokenizeRequest, state.max_body_nbytes)
    service = state.service
    state.check_model(body.model)
    value = body.prompt if body.prompt is not None else body.text
    if body.messages is not None:
        rendered = await state.render(body)
        lists = [await service.encode(rendered.text, add_special_tokens=rendered.add_special_tokens, param="messages")]
    else:
        texts = _texts(value)
        lists = [await service.encode(text, add_special_tokens=body.add_special_tokens) for text in texts]
    is_single = body.messages is not None or isinstance(value, str)
    result: dict[str, Any] = {
        "tokens": lists[0] if is_single else lists,
        "count": len(lists[0]) if is_single else [len(token_ids) for token_ids in lists],
        "max_model_len": service.info.max_model_len,
    }
    if body.return_token_strs:
        strings = [[service.token_texts.text_of(token_id) for token_id in token_ids] for token_ids in lists]
        result["token_strs"] = strings[0] if is_single else strings
    return json_response(result)


def _texts(value: object) -> list[str]:
    texts: list[Any] = value if isinstance(value, list) else [value]
    if not texts or len(texts) > MAX_TEXTS or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"prompt must be a text or a list of at most {MAX_TEXTS} texts; or give messages", param="prompt"
        )
    return texts


async def detokenize(state: ServerState, request: Request) -> Response:
    """POST /detokenize: token ids, or lists of them, to text."""
    body = await read_schema(request, DetokenizeRequest, state.max_body_nbytes)
    service = state.service
    state.check_model(body.model)
    is_batch = isinstance(body.tokens, list) and bool(body.tokens) and isinstance(body.tokens[0], list)
    lists = [service.check_token_ids(item, "tokens") for item in (body.tokens if is_batch else [body.tokens])]
    texts = [service.tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens) for token_ids in lists]
    text: str | list[str] = texts if is_batch else texts[0]
    return json_response({"prompt": text, "text": text})


async def tokenizer_info(state: ServerState, request: Request) -> Response:
    """GET /tokenizer_info: special tokens and chat template, under the names of tokenizer_config.json."""
    tokenizer = state.service.tokenizer
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": state.ready_info.max_model_len,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
            **tokenizer.special_tokens,
            "chat_template": state.text.chat_template.source,
        }
    )


async def metrics(state: ServerState, request: Request) -> Response:
    """GET /metrics: Prometheus text, with the engine's load asked for now."""
    if state.client is not None and state.client.is_alive and state.info is not None:
        with suppress(Unavailable):  # the last report stands
            await state.client.load(SCRAPE_TIMEOUT_S)
    body, content_type = state.metrics.render()
    return Response(body, media_type=content_type)
