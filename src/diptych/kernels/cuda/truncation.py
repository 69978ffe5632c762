"""Device functions that find where a row's distribution is cut, and that draw from what is kept.

Used by `sampling` alone, which explains the two steps. A logit's *key* is its bits as an int32 that orders as the
logits do. A *cut* is a pair of keys: tokens from `high` on are kept, and of those from `low` to `high`, which are
equal, the first `num_equal` by token id. A *row* is a pointer to a row of logits, a *list* one to the numbers of the
chunks that can hold a kept token.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)  # tokens whose maximum and sum stand for them
_TILE = tl.constexpr(128)  # chunks looked at together: 16 tokens a thread, kept in registers
_BOUND_STEPS = tl.constexpr(20)
_ALMOST_ONE = tl.constexpr(1.0 - 2.0**-52)
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def key_of(x):
    """Bits of a float32 as an int32 of the same order; -0.0 equals 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, best, scale, min_p):
    weights = tl.exp2((x - best) * scale)
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def _load_tile(row, list_ptr, start, count, VOCAB_SIZE: tl.constexpr):
    """Logits of the listed chunks from the start-th on, float32 [tile, chunk], -inf beyond the end."""
    place = start + tl.arange(0, _TILE)
    chunk = tl.load(list_ptr + place, mask=place < count, other=VOCAB_SIZE)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(row + token, mask=token < VOCAB_SIZE, other=-float("inf")).to(tl.float32)


@triton.jit
def _above(keys, weights, threshold):
    """Number and mass of the tokens from a key on, [tile] each."""
    is_above = keys >= threshold
    return tl.sum(is_above.to(tl.int32), axis=1), tl.sum(tl.where(is_above, weights, 0.0), axis=1)


@triton.jit
def _measure(row, list_ptr, count, keys, weights, t1, t2, t3, best, scale, min_p, VOCAB_SIZE: tl.constexpr):
    """Numbers and masses from each of three keys on; keys and weights are those of the first tile."""
    n1, m1 = _above(keys, weights, t1)
    n2, m2 = _above(keys, weights, t2)
    n3, m3 = _above(keys, weights, t3)
    start = tl.full([], _TILE, tl.int32)
    while start < count:  # not range(): the interpreter cannot count to a tensor
        x = _load_tile(row, list_ptr, start, count, VOCAB_SIZE)
        keys = key_of(x)
        weights = _weights(x, best, scale, min_p)
        more_n1, more_m1 = _above(keys, weights, t1)
        more_n2, more_m2 = _above(keys, weights, t2)
        more_n3, more_m3 = _above(keys, weights, t3)
        n1 += more_n1
        n2 += more_n2
        n3 += more_n3
        m1 += more_m1
        m2 += more_m2
        m3 += more_m3
        start += _TILE
    return tl.sum(n1), tl.sum(n2), tl.sum(n3), tl.sum(m1), tl.sum(m2), tl.sum(m3)


@triton.jit
def _search(row, list_ptr, count, keys, weights, low, high, k, limit, best, scale, min_p, VOCAB_SIZE: tl.constexpr):
    """The greatest key from which on there are k tokens and a mass of `limit`, as (low, high, mass from high on).

    `low` has both on entry, or is taken to have them, and `high` has not. On return there is one key, or one token, in
    [low, high), or there are exactly k tokens from low on and no mass is asked for.
    """
    low_number = tl.full([], 2**30, tl.int32)
    high_number = tl.full([], 0, tl.int32)
    high_mass = tl.full([], 0.0, tl.float32)
    width = high.to(tl.int64) - low
    while (width > 1) & (low_number - high_number > 1) & ((low_number != k) | (limit > 0.0)):
        t1 = (low + width // 4).to(tl.int32)
        t2 = (low + width // 2).to(tl.int32)
        t3 = (low + width * 3 // 4).to(tl.int32)
        n1, n2, n3, m1, m2, m3 = _measure(
            row, list_ptr, count, keys, weights, t1, t2, t3, best, scale, min_p, VOCAB_SIZE
        )
        is_1 = (n1 >= k) & (m1 >= limit)
        is_2 = (n2 >= k) & (m2 >= limit) & is_1
        is_3 = (n3 >= k) & (m3 >= limit) & is_2
        low_number = tl.where(is_3, n3, tl.where(is_2, n2, tl.where(is_1, n1, low_number)))
        high_number = tl.where(is_3, high_number, tl.where(is_2, n3, tl.where(is_1, n2, n1)))
        high_mass = tl.where(is_3, high_mass, tl.where(is_2, m3, tl.where(is_1, m2, m1)))
        high = tl.where(is_3, high, tl.where(is_2, t3, tl.where(is_1, t2, t1)))
        low = tl.where(is_3, t3, tl.where(is_2, t2, tl.where(is_1, t1, low)))
        width = high.to(tl.int64) - low
    return low, high, high_mass


@triton.jit
def lower_bound(maxima, measure, target, high):
    """A key, nearly the greatest, from which on the chunks' maxima measure at least `target`; below all if none."""
    keys = key_of(maxima)
    low = tl.full([], _LOWEST, tl.int32)
    for _ in range(_BOUND_STEPS):
        middle = (low + (high.to(tl.int64) - low) // 2).to(tl.int32)
        is_enough = tl.sum(tl.where(keys >= middle, measure, 0.0)) >= target
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def find_cut(row, list_ptr, count, low, best, scale, top_k, top_p, min_p, total, VOCAB_SIZE: tl.constexpr):
    """The cut (low, high, num_equal) of one row; `total`: mass of the whole vocabulary."""
    x = _load_tile(row, list_ptr, 0, count, VOCAB_SIZE)
    keys = key_of(x)
    weights = _weights(x, best, scale, min_p)
    end = key_of(best) + 1
    if top_k > 0:
        low, _high, _mass = _search(
            row, list_ptr, count, keys, weights, low, end, top_k, 0.0, best, scale, min_p, VOCAB_SIZE
        )
    high = low
    num_equal = tl.full([], 0, tl.int32)
    if top_p < 1.0:
        if (top_k > 0) | (min_p > 0.0):
            _n1, _n2, _n3, total, _m2, _m3 = _measure(
                row, list_ptr, count, keys, weights, low, low, low, best, scale, min_p, VOCAB_SIZE
            )
        limit = top_p * total
        low, high, above = _search(
            row, list_ptr, count, keys, weights, low, end, 0, limit, best, scale, min_p, VOCAB_SIZE
        )
        weight = tl.exp2((value_of(low) - best) * scale)
        fitting = tl.ceil((limit - above) / tl.maximum(weight, 1e-30))
        is_one_token = high.to(tl.int64) - low > 1
        num_equal = tl.where(is_one_token, 1.0, tl.minimum(tl.maximum(fitting, 1.0), 1e6)).to(tl.int32)
    return low, high, num_equal


@triton.jit
def store_kept(row, list_ptr, count, above_ptr, equal_ptr, low, high, best, scale, min_p, VOCAB_SIZE: tl.constexpr):
    """Store, for each listed chunk, its mass from `high` on and its number of equal tokens; their weight."""
    equal_weight = tl.full([], 0.0, tl.float32)
    start = tl.full([], 0, tl.int32)
    while start < count:
        x = _load_tile(row, list_ptr, start, count, VOCAB_SIZE)
        keys = key_of(x)
        weights = _weights(x, best, scale, min_p)
        is_equal = (keys >= low) & (keys < high) & (weights > 0.0)
        equal_weight = tl.maximum(equal_weight, tl.max(tl.where(is_equal, weights, 0.0)))
        place = start + tl.arange(0, _TILE)
        chunk = tl.load(list_ptr + place, mask=place < count, other=0)
        mass = tl.sum(tl.where(keys >= high, weights, 0.0), axis=1)
        tl.store(above_ptr + chunk, mass, mask=place < count)
        tl.store(equal_ptr + chunk, tl.sum(is_equal.to(tl.int32), axis=1), mask=place < count)
        start += _TILE
    return equal_weight


@triton.jit
def _pick(weights, fraction, SIZE: tl.constexpr):
    """Inverse CDF over float64 weights: the index, and which fraction of the index's own weight lies below the draw."""
    index = tl.arange(0, SIZE)
    ends = tl.cumsum(weights, axis=0)
    target = fraction * tl.max(ends)
    found = tl.min(tl.where((ends > target) & (weights > 0.0), index, SIZE))
    found = tl.where(found == SIZE, tl.max(tl.where(weights > 0.0, index, 0)), found)  # only if rounding says so
    own = tl.sum(tl.where(index == found, weights, 0.0))
    before = tl.sum(tl.where(index == found, ends, 0.0)) - own
    return found, tl.minimum(tl.maximum((target - before) / own, 0.0), _ALMOST_ONE)


@triton.jit
def draw(
    row,
    above,
    equal,
    equal_weight,
    low,
    high,
    num_equal,
    noise,
    best,
    scale,
    min_p,
    VOCAB_SIZE: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    """A token id by inverse CDF in the order of token ids; above, equal: the chunks' masses and numbers of equals."""
    before = tl.cumsum(equal, axis=0) - equal
    num_kept = tl.minimum(tl.maximum(num_equal - before, 0), equal)
    masses = above.to(tl.float64) + num_kept.to(tl.float64) * equal_weight.to(tl.float64)
    chunk, fraction = _pick(masses, tl.minimum(noise.to(tl.float64), _ALMOST_ONE), CHUNKS_BLOCK)
    num_before = tl.sum(tl.where(tl.arange(0, CHUNKS_BLOCK) == chunk, before, 0))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row + token, mask=token < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
    keys = key_of(x)
    weights = _weights(x, best, scale, min_p)
    is_equal = (keys >= low) & (keys < high) & (weights > 0.0)
    rank = num_before + tl.cumsum(is_equal.to(tl.int32), axis=0) - 1
    is_kept = (keys >= high) | (is_equal & (rank < num_equal))
    place, _ = _pick(tl.where(is_kept, weights, 0.0).to(tl.float64), fraction, CHUNK)
    return chunk * CHUNK + place
