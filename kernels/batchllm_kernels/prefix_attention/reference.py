"""Prefix-shared attention in plain torch: the oracle for every kernel.

Attention computed over pieces of a context and merged by online softmax (paper, Eq. 1) is exact. So
the queries of all requests that share a prefix can read its keys and values together, once:

    prefix = partial_attention(q, k_prefix, v_prefix, scale=scale)
    distinct = partial_attention(q, k_distinct, v_distinct, scale=scale, last_key=last_key)
    out, lse = merge_partials([prefix, distinct])

The result of a piece is its output and the log-sum-exp (LSE) of its scores. Both are float32 for
all inputs, and every LSE is a natural logarithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import PagedBatch, SharedPrefix

Partial = tuple[Tensor, Tensor]
"""(out, lse): [num_tokens, num_q_heads, head_dim] and [num_tokens, num_q_heads], float32."""


def prefix_shared_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    prefixes: Sequence[SharedPrefix],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Causal attention of a step that reads every shared prefix once (paper, Sec. 4.4).

    The arguments are those of `prefix_attention`, for any strides and sizes. No request may be in
    two of the prefixes' groups; without any, this is plain paged attention. Returns [num_tokens,
    num_q_heads, head_dim] of float32; 0 for tokens of no request.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    for tokens, positions, request, start, end in _pieces(batch, prefixes):
        lowest = start if window is None else max(start, int(positions.min()) - window + 1)
        if lowest >= end:
            continue
        blocks = batch.block_table[request]
        piece = partial_attention(
            q[tokens],
            _tokens_of(k_cache, blocks, lowest, end) * k_scale,
            _tokens_of(v_cache, blocks, lowest, end) * v_scale,
            scale=scale,
            last_key=positions - lowest,
            window=window,
            soft_cap=soft_cap,
        )
        out[tokens], lse[tokens] = merge_partials([(out[tokens], lse[tokens]), piece])
    return out


def _pieces(
    batch: PagedBatch, prefixes: Sequence[SharedPrefix]
) -> Iterator[tuple[Tensor, Tensor, int, int, int]]:
    """Prefixes, then own parts: query tokens, their positions, and the request's [start, end) that
    they attend to."""
    starts = batch.query_start_loc.tolist()
    seq_lens = batch.seq_lens.tolist()

    def queries_of(request: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(starts[request], starts[request + 1], device=batch.seq_lens.device)
        return tokens, tokens + (seq_lens[request] - starts[request + 1])

    own_starts = [0] * batch.num_requests
    for prefix in prefixes:
        tokens, positions = map(torch.cat, zip(*map(queries_of, prefix.requests), strict=True))
        yield tokens, positions, prefix.requests[0], 0, prefix.num_tokens
        for request in prefix.requests:
            own_starts[request] = prefix.num_tokens
    for request in range(batch.num_requests):
        tokens, positions = queries_of(request)
        if len(tokens):
            yield tokens, positions, request, own_starts[request], seq_lens[request]


def _tokens_of(cache: Tensor, blocks: Tensor, start: int, end: int) -> Tensor:
    """Keys or values [start, end) of a context, in float32."""
    where = torch.arange(start, end, device=cache.device)
    block_size = cache.shape[1]
    return cache[blocks[where // block_size].long(), where % block_size].float()


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    last_key: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Partial:
    """Softmax attention of `q` over one piece of the context.

    Args:
        q: [num_tokens, num_q_heads, head_dim].
        k: [num_kv_tokens, num_kv_heads, head_dim]; num_q_heads is a multiple of num_kv_heads, and
            query head h reads key head h // (num_q_heads // num_kv_heads).
        v: the shape of `k`.
        scale: factor on the scores, usually head_dim ** -0.5.
        last_key: [num_tokens], the last key that each query sees, maybe after the piece.
            None: every query sees every key, as in a shared prefix.
        window: queries see the `window` keys up to `last_key`, which must be given (ValueError).
        soft_cap: scores are soft_cap * tanh(score / soft_cap).

    A query that sees no key gets out = 0 and lse = -inf, the neutral element of `merge_partials`.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_tokens, num_kv_heads, _ = k.shape
    queries = q.float().reshape(num_tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scores = torch.einsum("thgd,shd->thgs", queries, k.float()) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if last_key is not None:
        keys = torch.arange(num_kv_tokens, device=q.device)
        visible = keys <= last_key[:, None]
        if window is not None:
            visible &= keys > last_key[:, None] - window
        scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    elif window is not None:
        raise ValueError("a window needs last_key")
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - _finite(lse)[..., None])
    out = torch.einsum("thgs,shd->thgd", weights, v.float())
    return out.reshape(q.shape), lse.reshape(num_tokens, num_q_heads)


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint pieces, at least one, from their results of the same
    shapes (online softmax); 0 and -inf where every piece was empty.

    The order of the pieces doesn't matter, and the result can be merged again.
    """
    outs = torch.stack([out for out, _ in partials])
    lses = torch.stack([lse for _, lse in partials])
    lse = lses.logsumexp(dim=0)
    weights = torch.exp(lses - _finite(lse))
    return (weights[..., None] * outs).sum(dim=0), lse


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for -inf: empty pieces then weigh exp(-inf) = 0; -inf - -inf would be NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)
