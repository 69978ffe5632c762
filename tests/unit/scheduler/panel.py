"""A scheduler with the toy worker, stepped by hand."""

from __future__ import annotations

from collections import deque

from diptych.core.batch import FinishReason
from diptych.core.messages import RequestFailed, RequestOutput
from diptych.core.request import Request, SamplingParams
from diptych.engine.toy import ToyWorker, expected_output
from diptych.kv.cache import KVCache
from diptych.scheduler.scheduler import Scheduler
from diptych.scheduler.step import SchedulerLimits

VOCAB = 50
EOS = (7,)


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Panel:
    """Scheduler and toy worker, stepped by hand; keeps what clients were told."""

    def __init__(
        self, *, num_pages: int = 64, page_size: int = 4, prefix_caching: bool = True, source=None, sink=None, **limits
    ) -> None:
        values = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,
            "max_inflight_steps": 2,
            "max_queued_requests": 100,
            "max_model_len": num_pages * page_size,
            "vocab_size": VOCAB,
            "eos_token_ids": EOS,
        }
        self.limits = SchedulerLimits(**(values | limits))
        self.cache = KVCache(num_pages, page_size, prefix_caching=prefix_caching)
        self.clock = Clock()
        self.scheduler = Scheduler(self.limits, self.cache, source=source, sink=sink, clock=self.clock)
        self.worker = ToyWorker(num_pages, page_size, vocab_size=VOCAB)
        self.batches = deque()
        self.history = []
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(
        self, request_id: str, prompt: list[int], *, priority: int = 0, deadline=None, key="", **sampling
    ) -> Request:
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, **sampling),
            priority=priority,
            deadline=deadline,
            cache_key=key,
        )
        self.scheduler.add(request)
        self.tokens[request_id] = []
        return request

    def plan(self):
        batch = self.scheduler.plan()
        if batch is not None:
            assert batch.num_tokens <= self.limits.max_num_batched_tokens
            self.batches.append(batch)
            self.history.append(batch)
        self.listen()
        return batch

    def apply(self) -> bool:
        if not self.batches:
            return False
        self.scheduler.apply(self.worker.step(self.batches.popleft()))
        self.scheduler.check()
        self.listen()
        return True

    def listen(self) -> None:
        for answer in self.scheduler.take_answers():
            assert answer.request_id not in self.reasons, "answered after its end"
            assert answer.request_id not in self.failures, "answered after its end"
            if isinstance(answer, RequestFailed):
                self.failures[answer.request_id] = answer
                continue
            self.tokens[answer.request_id] += answer.token_ids
            self.outputs.setdefault(answer.request_id, []).append(answer)
            if answer.finish_reason is not None:
                self.reasons[answer.request_id] = answer.finish_reason

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            planned = self.plan() is not None
            full = len(self.batches) >= self.limits.max_inflight_steps
            if (full or not planned) and not self.apply() and not planned:
                assert self.scheduler.is_idle, "stuck"
                return
        raise AssertionError("did not come to rest")

    def expected(self, request: Request) -> list[int]:
        return expected_output(
            request, vocab_size=VOCAB, max_len=self.limits.max_model_len, eos_token_ids=self.limits.eos_token_ids
        )


def prompt_of(length: int, start: int = 11) -> list[int]:
    return [(start + 3 * i) % VOCAB for i in range(length)]
