"""The scheduler: decides what each step computes and follows every sequence from its request to its last token.

Owns the sequences and, through `Seats` and `KVCache`, slots and pages. One loop serves every role and depth: `plan` ->
(the engine submits) -> `apply` -> `take_answers`. It knows nothing of sockets, devices or text. Engine thread; never
imports torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from diptych.core.batch import Batch, FinishReason, RowOutput, SequenceStep, StepOutput, TokenLogprobs
from diptych.core.messages import EngineLoad, RequestFailed, RequestOutput
from diptych.core.request import Request
from diptych.core.sequence import Sequence, SequenceState
from diptych.errors import DeadlineExceeded, DiptychError, InvariantError, Overloaded, RequestError, WorkerError
from diptych.kv.cache import KVCache, SequencePages
from diptych.scheduler.adapter_slots import AdapterSlots
from diptych.scheduler.adapters import LocalPrefill, NoSink
from diptych.scheduler.deadlines import Deadlines
from diptych.scheduler.drafts import DraftPlanner
from diptych.scheduler.intake import check_prompt, new_sequence
from diptych.scheduler.pipelining import Pipeline
from diptych.scheduler.policy import POLICIES, WaitingQueue, choose_victim
from diptych.scheduler.ports import Begin, Dropped, FirstToken, GaveUp, Landed, PageSink, PrefillSource, Sent
from diptych.scheduler.results import count_row, finish_reason, new_prompt_logprobs
from diptych.scheduler.seats import Seats
from diptych.scheduler.step import Counters, SchedulerLimits, StepDraft

Answer = RequestOutput | RequestFailed


class Scheduler:
    """Plans steps over live sequences and turns their results into answers.

    Args: limits: resolved numbers. cache: the door to pages. source, sink: ports to other engines, which may be
    replaced while nothing is under way there. clock: seconds since the epoch, injectable for tests.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KVCache,
        *,
        source: PrefillSource | None = None,
        sink: PageSink | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits, self.counters = limits, Counters()
        self.source = source or LocalPrefill()
        self.sink = sink or NoSink()
        self._cache, self._clock = cache, clock
        self._key = POLICIES[limits.policy]
        self._eos = frozenset(limits.eos_token_ids)
        self.adapters = AdapterSlots(limits.max_loras)
        self._seats = Seats(cache, limits.max_num_seqs, tells_tokens=limits.awaits_tokens, adapters=self.adapters)
        self._pipeline = Pipeline(limits.max_inflight_steps, awaits_tokens=limits.awaits_tokens)
        self._drafts = DraftPlanner(cache, limits.max_drafts, is_adaptive=limits.adapts_drafts)
        self._sequences: dict[str, Sequence] = {}  # unanswered
        self._waiting = WaitingQueue(self._key, self.adapters)
        self._loading: dict[Sequence, SequencePages] = {}
        self._landed: deque[tuple[Sequence, SequencePages]] = deque()  # filled by a peer, not yet seated
        self._running: dict[Sequence, None] = {}  # seated and plannable
        self._leaving: dict[Sequence, SequenceState] = {}  # seated until their steps in flight are applied
        self._sending: dict[Sequence, SequencePages] = {}  # computed: a slot is no longer needed, the pages are
        self._inflight: deque[tuple[int, list[tuple[Sequence, SequenceStep]]]] = deque()
        self._deadlines = Deadlines()
        self._answers: list[Answer] = []
        self._num_arrivals = 0

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError or Overloaded, and then nothing has changed."""
        if request.request_id in self._sequences:
            raise RequestError(f"request_id {request.request_id!r} is already in use", param="request_id")
        check_prompt(request.prompt_token_ids, self.limits)
        if len(self._waiting) >= self.limits.max_queued_requests:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again later")
        self._num_arrivals += 1
        sequence = new_sequence(request, self.limits, self._num_arrivals)
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)
        deadline = request.deadline
        if deadline is None and self.limits.request_timeout is not None:
            deadline = self._clock() + self.limits.request_timeout
        if deadline is not None:
            self._deadlines.add(sequence, deadline)

    def abort(self, request_id: str) -> None:
        """End a request at any moment; answered with finish reason `abort`. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, RequestOutput(request_id, [], FinishReason.ABORT))

    def fail(self, request_id: str, error: DiptychError) -> None:
        """End an open request with an error."""
        self._end(self._sequences[request_id], RequestFailed.of(request_id, error))

    def open_requests(self) -> list[str]:
        """Ids of requests that have not been answered to the end."""
        return list(self._sequences)

    def take_answers(self) -> list[Answer]:
        """Everything to tell clients since the last call, in order."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def is_idle(self) -> bool:
        """No request is open and no step is in flight: every page is free or cached."""
        return not (self._sequences or self._inflight or self._leaving or self._loading or self._sending)

    @property
    def num_awaiting_pages(self) -> int:
        """Requests whose prompt a peer is to compute, and that wait for the pages that it is to fill."""
        return sum(self.source.wants(sequence) for sequence in self._waiting)

    @property
    def num_inflight_steps(self) -> int:
        """Steps submitted and not yet applied."""
        return len(self._inflight)

    # ------------------------------------------------------------------ planning

    def plan(self) -> Batch | None:
        """The next step, or None when nothing can run now. The caller must submit what it gets."""
        self._end_expired()
        self._hear_peers()
        if len(self._inflight) >= self.limits.max_inflight_steps:
            return None
        draft = StepDraft(self.limits.max_num_batched_tokens)
        self._plan_running(draft)
        self._seat_landed(draft)
        self._admit_waiting(draft)
        if not draft.rows:
            return None
        self.counters.steps_total += 1
        self._inflight.append((self.counters.steps_total, list(draft.rows.items())))
        return draft.batch(self.counters.steps_total, self._seats)

    def _plan_running(self, draft: StepDraft) -> None:
        """Decodes first, so that no chunk of a prompt delays them; then the prompts under way."""
        decodes, chunks = self._pipeline.ready(self._running)
        self._drafts.begin_step(len(decodes))
        for sequence in (*decodes, *chunks):
            # One planned earlier in this loop may have retracted this one.
            if draft.budget > 0 and sequence in self._running and self._may_compute(sequence):
                count = min(sequence.num_uncomputed_tokens, draft.budget)
                if self._make_room(sequence, sequence.num_computed_tokens + count, draft):
                    self._add_row(sequence, count, draft)

    def _may_compute(self, sequence: Sequence) -> bool:
        """A sequence's last token is never computed; one that decodes elsewhere stops after its prompt."""
        if sequence.num_computed_tokens >= sequence.max_len - 1:
            return False
        return sequence.num_computed_tokens < sequence.num_prompt_tokens or not self.sink.wants(sequence)

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Pages for `num_tokens` tokens, retracting whoever is served last; False: not in this step."""
        while not self._cache.extend(self._seats.pages(sequence), num_tokens):
            free = (s for s in self._running if s not in draft.rows and not self.sink.is_reading(s))
            victim = choose_victim(free, self._key)
            if victim is None or (victim is sequence and self._leaving):
                return False  # pages come back when the steps in flight are applied
            if victim is sequence and len(self._running) == 1:
                if self._landed:  # they wait for a page of this one, as it does for one of theirs
                    self._retract_landed()
                    continue
                if self._peers_hold_pages:
                    return False  # they come back, too
                raise InvariantError(f"request {sequence.request_id} alone does not fit the KV pool")
            self.counters.retractions_total += 1
            self._leave(victim, SequenceState.WAITING)
            if victim is sequence:
                return False
        return True

    @property
    def _peers_hold_pages(self) -> bool:
        return bool(self._loading or self._sending or self._cache.num_taken_out)

    def _add_row(self, sequence: Sequence, count: int, draft: StepDraft) -> None:
        goes_on = count == sequence.num_uncomputed_tokens == 1 and not self.sink.wants(sequence)
        num_drafts = self._drafts.allow(sequence, self._seats.pages(sequence), draft.budget - 1) if goes_on else 0
        row = draft.rows[sequence] = self._seats.row(sequence, count, num_drafts)
        draft.budget -= count + num_drafts
        sequence.num_computed_tokens += count
        sequence.num_pending_tokens += row.samples
        sequence.num_inflight_steps += 1
        if row.start < sequence.num_prompt_tokens:
            # Published before they are computed: steps run in order, and within one every layer writes all rows' KV
            # before it attends, so whoever leases these pages reads them written.
            self._cache.commit(self._seats.pages(sequence), sequence.token_ids, sequence.num_computed_tokens)

    def _admit_waiting(self, draft: StepDraft) -> None:
        while draft.budget > 0 and self._seats.num_free:
            sequence = self._waiting.peek()
            pages = self._open_pages(sequence) if sequence is not None else None
            if sequence is None or pages is None:
                return
            begin = self.source.begin(sequence, pages)
            if begin is Begin.LATER:
                self._cache.discard(pages)
                return
            self._waiting.pop()
            if begin is Begin.ELSEWHERE:
                sequence.move_to(SequenceState.LOADING)
                self._loading[sequence] = pages
            else:
                cached = pages.num_leased * self._cache.page_size
                sequence.num_computed_tokens = sequence.num_confirmed_tokens = cached
                self._seat(sequence, pages, draft)

    def _open_pages(self, sequence: Sequence) -> SequencePages | None:
        """Pages for the whole prompt, if a page of growth for each running sequence is left besides."""
        token_ids, key = sequence.token_ids, sequence.request.page_key
        cached = self._cache.match_length(token_ids, key) // self._cache.page_size
        needed = self._cache.num_pages_for(len(token_ids)) - cached
        if self._running and needed + len(self._running) > self._cache.num_available:
            return None
        sampling = sequence.request.sampling
        # The logits at p - 1 predict token p: what is asked for must be computed here, not taken from the cache.
        max_cached = None if sampling.prompt_logprobs is None else max(0, sampling.prompt_logprobs_start - 1)
        return self._cache.open(token_ids, key, num_tokens=len(token_ids), max_cached_tokens=max_cached)

    def _seat_landed(self, draft: StepDraft) -> None:
        """Sequences filled by a peer decode from the next token on, before anything new is admitted."""
        while draft.budget > 0 and self._seats.num_free and self.adapters.bring_forward(self._landed):
            sequence, pages = self._landed[0]
            if self._cache.extend(pages, sequence.num_tokens):
                self._landed.popleft()
                self._seat(sequence, pages, draft)
            elif self._running or self._leaving:
                return  # they will give back pages
            else:
                self._retract_landed()

    def _retract_landed(self) -> None:
        """The one that landed last gives its pages back; as far as they stay in the cache nothing is computed again."""
        sequence, pages = self._landed.pop()
        self._cache.close(pages, sequence.token_ids, sequence.num_computed_tokens)
        self.counters.retractions_total += 1
        self._wait_again(sequence)

    def _seat(self, sequence: Sequence, pages: SequencePages, draft: StepDraft) -> None:
        """Give a sequence with pages a slot and plan its first row."""
        self._note_first_step(sequence, pages.num_leased * self._cache.page_size)
        if sequence.state is not SequenceState.RUNNING:
            sequence.move_to(SequenceState.RUNNING)
        self._running[sequence] = None
        draft.admissions.append(self._seats.take(sequence, pages, self.limits.eos_token_ids))
        if self._may_compute(sequence):
            self._add_row(sequence, min(sequence.num_uncomputed_tokens, draft.budget), draft)

    def _note_first_step(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Its time in the queue is over, and what the prefix cache spared is known; later admissions change neither."""
        if sequence.queue_s is None:
            sequence.queue_s = max(0.0, self._clock() - sequence.request.arrival_time)
            sequence.num_cached_tokens = num_cached_tokens
            self.counters.prompt_tokens_total += sequence.num_prompt_tokens
            self.counters.cached_tokens_total += num_cached_tokens
            self.counters.prefix_queries_total += sequence.num_prompt_tokens

    # ------------------------------------------------------------------ results

    def apply(self, output: StepOutput) -> None:
        """Account for the oldest step in flight. Raises InvariantError if `output` is not of that step."""
        step_id, rows = self._inflight.popleft()
        if step_id != output.step_id or len(rows) != len(output.rows):
            raise InvariantError(
                f"step {output.step_id} with {len(output.rows)} rows, expected {step_id} with {len(rows)}"
            )
        for (sequence, step), row in zip(rows, output.rows, strict=True):
            count_row(sequence, step, row)
            if row.num_drafts:
                self._drafts.learn(sequence, row, self.counters)
            if not sequence.is_answered:
                self._accept(sequence, step, row)
            if sequence in self._leaving and sequence.num_inflight_steps == 0:
                self._vacate(sequence, self._leaving.pop(sequence))
        self._drafts.note_step([step for _, step in rows], output)

    def _accept(self, sequence: Sequence, step: SequenceStep, row: RowOutput) -> None:
        """Take over one row's result, and tell the sink that more pages may be read."""
        if row.error is not None:
            self.fail(sequence.request_id, WorkerError(row.error))
            return
        if sequence in self._running:
            self.sink.computed(sequence, self._seats.pages(sequence))
        prompt_logprobs = new_prompt_logprobs(sequence, step, row.prompt_logprobs)
        if prompt_logprobs and self.sink.wants(sequence):
            sequence.prompt_logprobs += prompt_logprobs
        if row.token_ids or prompt_logprobs:
            self._append(sequence, row.token_ids, row.logprobs, prompt_logprobs)
        if row.token_ids and sequence in self._running and self.sink.wants(sequence):
            del self._running[sequence]
            sequence.move_to(SequenceState.SENDING)
            self._sending[sequence] = self._seats.leave(sequence)
            self.sink.sampled(sequence, row)

    def _append(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
    ) -> None:
        """Append tokens and answer; ends the sequence at EOS, a stop token or its length."""
        sequence.token_ids.extend(token_ids)
        self.counters.generation_tokens_total += len(token_ids)
        # Whoever decodes a sequence decides where it ends.
        wanted = self.sink.wants(sequence)
        reason, matched = (None, None) if wanted else finish_reason(sequence, token_ids, self._eos)
        answer = RequestOutput(
            sequence.request_id,
            token_ids,
            reason,
            matched,
            sequence.num_cached_tokens,
            logprobs,
            prompt_logprobs,
            sequence.queue_s,
            sequence.speculation,
        )
        if reason is None:
            self._answers.append(answer)
        else:
            self._end(sequence, answer)

    # ------------------------------------------------------------------ leaving

    def _end(self, sequence: Sequence, answer: Answer) -> None:
        """Say the last word now; pages and slot go back as soon as nothing can touch them."""
        self._answers.append(answer)
        sequence.is_answered = True
        del self._sequences[sequence.request_id]
        if self.sink.wants(sequence):
            self.sink.cancel(sequence)
        match sequence.state:
            case SequenceState.WAITING:
                if self.source.wants(sequence):
                    self.source.cancel(sequence)
                self._waiting.remove(sequence)
                sequence.move_to(SequenceState.FINISHED)
            case SequenceState.LOADING:
                self._end_loading(sequence)
            case SequenceState.RUNNING:
                self._leave(sequence, SequenceState.FINISHED)
            case SequenceState.SENDING:
                pass  # pinned until the sink says Sent

    def _end_loading(self, sequence: Sequence) -> None:
        """A transfer that still fills the pages is cancelled and brings them back; landed pages go back now."""
        if sequence in self._loading:
            self.source.cancel(sequence)
        for landed, pages in list(self._landed):
            if landed is sequence:
                self._landed.remove((landed, pages))
                self._cache.discard(pages)
                sequence.move_to(SequenceState.FINISHED)

    def _leave(self, sequence: Sequence, target: SequenceState) -> None:
        self._running.pop(sequence, None)
        self._leaving.pop(sequence, None)
        if sequence.num_inflight_steps:
            self._leaving[sequence] = target
        else:
            self._vacate(sequence, target)

    def _vacate(self, sequence: Sequence, target: SequenceState) -> None:
        self._seats.vacate(sequence)
        if target is SequenceState.WAITING:
            self._wait_again(sequence)
        else:
            sequence.move_to(target)

    def _wait_again(self, sequence: Sequence) -> None:
        """Its pages are gone; what it has said so far is computed again, as far as it is not cached."""
        sequence.move_to(SequenceState.WAITING)
        sequence.num_computed_tokens = sequence.num_confirmed_tokens = 0
        sequence.num_retractions += 1
        self._waiting.push(sequence)

    def _end_expired(self) -> None:
        for sequence in self._deadlines.expired(self._clock()):
            self.fail(sequence.request_id, DeadlineExceeded("the request's deadline passed before it finished"))

    # ------------------------------------------------------------------ peers

    def _hear_peers(self) -> None:
        """Take over what has happened at both ports since the last step."""
        for news in self.source.news():
            match news:
                case FirstToken():
                    self._take_first_token(news)
                case Landed(sequence):
                    self._take_landed(sequence)
                case GaveUp():
                    self._take_back(news)
        if freed := self.source.freed_pages():
            self._cache.give_back(freed)
        for event in self.sink.news():
            match event:
                case Sent(sequence, error):
                    self._end_sent(sequence, error)
                case Dropped(request_id, error) if request_id in self._sequences:
                    self.fail(request_id, error) if error is not None else self.abort(request_id)

    def _take_first_token(self, news: FirstToken) -> None:
        sequence, row = news.sequence, news.row
        if sequence.is_answered or sequence.num_output_tokens:
            return
        self._note_first_step(sequence, news.num_cached_tokens)
        self._append(sequence, row.token_ids, row.logprobs, row.prompt_logprobs)

    def _take_landed(self, sequence: Sequence) -> None:
        pages = self._loading.pop(sequence)
        sequence.num_computed_tokens = sequence.num_confirmed_tokens = sequence.num_prompt_tokens
        if sequence.is_answered:
            self._cache.close(pages, sequence.token_ids, sequence.num_computed_tokens)
            sequence.move_to(SequenceState.FINISHED)
        else:
            self._cache.commit(pages, sequence.token_ids, sequence.num_computed_tokens)
            self._landed.append((sequence, pages))

    def _take_back(self, news: GaveUp) -> None:
        """The prompt is computed here after all, with whatever of the output is known, or the sequence fails."""
        sequence = news.sequence
        pages = self._loading.pop(sequence)
        if news.keeps_pages:
            self.source.keep(sequence, self._cache.take_out(pages))
        else:
            self._cache.discard(pages)
        if sequence.is_answered:
            sequence.move_to(SequenceState.FINISHED)
            return
        sequence.move_to(SequenceState.WAITING)
        self._waiting.push(sequence)
        if news.error is not None:
            self.fail(sequence.request_id, news.error)

    def _end_sent(self, sequence: Sequence, error: DiptychError | None) -> None:
        self._cache.close(self._sending.pop(sequence), sequence.token_ids, sequence.num_computed_tokens)
        sequence.move_to(SequenceState.FINISHED)
        if sequence.is_answered:
            return
        sequence.is_answered = True
        del self._sequences[sequence.request_id]
        request_id = sequence.request_id
        reason = FinishReason.LENGTH
        self._answers.append(
            RequestOutput(request_id, [], reason) if error is None else RequestFailed.of(request_id, error)
        )

    # ------------------------------------------------------------------ books

    def load(self) -> EngineLoad:
        """Gauges and totals of now; the engine adds its own times."""
        cache, limits = self._cache, self.limits
        return EngineLoad(
            timestamp=self._clock(),
            num_running=len(self._running) + len(self._sending),
            num_waiting=len(self._waiting) + len(self._loading) + len(self._landed),
            num_pages=cache.num_pages,
            num_free_pages=cache.num_free,
            num_cached_pages=cache.num_cached,
            num_owned_pages=cache.num_owned,
            num_quarantined_pages=cache.num_taken_out,
            page_size=cache.page_size,
            num_slots=limits.max_num_seqs,
            num_free_slots=self._seats.num_free,
            **asdict(self.counters),
        )

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while any request is open."""
        return self.is_idle and self._cache.flush()

    def outdate_cache(self) -> None:
        """Nothing that was computed so far is found by sequences that are admitted from now on."""
        self._cache.outdate()

    def retract_running(self) -> None:
        """Every sequence that decodes gives its pages back and waits, but for those that go to a peer."""
        while self._landed:
            self._retract_landed()
        for sequence in [s for s in self._running if not self.sink.wants(s)]:
            self._leave(sequence, SequenceState.WAITING)

    def check(self) -> None:
        """Raise InvariantError unless pages and slots add up, and nothing but quarantined pages is held when idle."""
        self._cache.check()
        self._seats.check(is_idle=self.is_idle)
