"""Structured output: which tokens may follow, computed by llguidance while the model's next forward runs.

Owns the tokenizer's trie, the cache of compiled grammars, one matcher per constrained request and the threads that
compute masks. Knows nothing of logits or slots. Never imports torch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from diptych.core.request import Grammar
from diptych.errors import Unsupported
from diptych.sampling.grammar_check import LIMITS, grammar_error, grammar_source, on_deep_stack, validate_grammar

_CACHE_LEN = 64


class GrammarMatcher:
    """One request's place in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar, *, num_mask_words: int, eos_token_ids: tuple[int, ...]):
        self._matcher = matcher
        self._grammar = grammar
        self._words = np.zeros(num_mask_words, dtype=np.int32)
        self._eos_token_ids = eos_token_ids

    @property
    def is_complete(self) -> bool:
        """Whether the text satisfies the grammar and nothing but EOS may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error() and self._matcher.is_accepting()

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may follow. After the grammar's end these are the EOS tokens.

        Args: mask: int32 [ceil(vocab / 32)], bit i of word w is token 32 * w + i; overwritten.
        Raises: RequestError if the grammar cannot go on or its limits are exceeded.
        """
        if self.is_complete:
            mask[:] = 0
            bits = mask.view(np.uint32)
            for token_id in self._eos_token_ids:
                bits[token_id // 32] |= np.uint32(1 << (token_id % 32))
            return
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self.is_complete:  # some grammars notice their end only while computing a mask
            return self.fill(mask)
        if self._matcher.is_error() or self._matcher.is_stopped():
            raise grammar_error(self._grammar, self._matcher.get_error() or self._matcher.stop_reason())
        mask[:] = self._words[: len(mask)]

    def accept(self, token_id: int) -> None:
        """Advance by one token; after the grammar's end any is ignored. Raises RequestError if it does not fit."""
        if not self.is_complete and not self._matcher.consume_token(token_id):
            raise grammar_error(self._grammar, self._matcher.get_error())


class GrammarCompiler:
    """Compiles grammars for one tokenizer, once per text.

    Args: tokenizer_json: the tokenizer in the format of the tokenizers library. vocab_size: columns of the logits;
    those that the tokenizer does not know are never allowed. eos_token_ids: what may follow a complete grammar.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...], *, num_threads: int = 2
    ) -> None:
        self.vocab_size = vocab_size
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        # The trie of a large vocabulary takes a second to build, on a thread of the pool; the GIL is held meanwhile.
        self._tokenizer: Future[LLTokenizer] = self.pool.submit(self._build_tokenizer, tokenizer_json)

    @staticmethod
    def validate(grammar: Grammar) -> None:
        """Raise RequestError if the grammar cannot be compiled. Needs no tokenizer and no torch."""
        validate_grammar(grammar)

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of the grammar. Raises RequestError if it does not compile. Safe on any thread."""
        tokenizer = self._tokenizer.result()
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._compile(grammar, tokenizer)
        return GrammarMatcher(
            compiled.deep_copy(),
            grammar,
            num_mask_words=-(-tokenizer.vocab_size // 32),
            eos_token_ids=self._eos_token_ids or tuple(tokenizer.eos_tokens),
        )

    def close(self) -> None:
        """Stop the threads; masks being computed are finished, queued ones dropped."""
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        source = grammar_source(grammar)
        compiled = on_deep_stack(lambda: LLMatcher(tokenizer, source, log_level=0, limits=LIMITS))
        if compiled.is_error():
            raise grammar_error(grammar, compiled.get_error())
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _CACHE_LEN:
                self._compiled.popitem(last=False)
        return compiled

    def _build_tokenizer(self, tokenizer_json: str) -> LLTokenizer:
        eos = list(self._eos_token_ids) or None
        try:
            try:
                return LLTokenizer(tokenizer_json, n_vocab=self.vocab_size, eos_token=eos)
            except ValueError:  # the tokenizer knows more tokens than the model has rows: the mask is cut
                return LLTokenizer(tokenizer_json, eos_token=eos)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise Unsupported(f"structured output is not possible with this tokenizer: {reason}", "grammar") from error


class PendingMask:
    """A matcher and the mask of the next token, which a thread of the compiler's pool computes in the meantime.

    Compiling, replaying the output so far, and advancing all happen on the pool, in order; an error appears in `wait`.
    """

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, output_token_ids: list[int]) -> None:
        self._pool = compiler.pool
        self._mask = np.zeros(-(-compiler.vocab_size // 32), dtype=np.int32)
        self._future: Future[GrammarMatcher] = self._pool.submit(self._start, compiler, grammar, output_token_ids)

    def wait(self) -> NDArray[np.int32]:
        """The mask, int32 [ceil(vocab / 32)], valid until `advance`. Raises RequestError if there is no going on."""
        self._future.result()
        return self._mask

    def advance(self, token_id: int) -> None:
        """Accept a token and begin to compute the mask after it; returns at once. Only after a successful `wait`."""
        self._future = self._pool.submit(self._step, self._future.result(), token_id)

    def _start(self, compiler: GrammarCompiler, grammar: Grammar, output_token_ids: list[int]) -> GrammarMatcher:
        matcher = compiler.compile(grammar)
        for token_id in output_token_ids:
            matcher.accept(token_id)
        matcher.fill(self._mask)
        return matcher

    def _step(self, matcher: GrammarMatcher, token_id: int) -> GrammarMatcher:
        matcher.accept(token_id)
        matcher.fill(self._mask)
        return matcher
