"""What prefix-shared attention computes, in plain torch: the oracle for every kernel.

Attention over a long context is exact when it is computed over pieces of the context and the
pieces are merged by online softmax (paper, Eq. 1). So the queries of all requests that share a
prefix can read the prefix's keys and values once, together:

    prefix = partial_attention(q, k_prefix, v_prefix, scale=scale)
    distinct = partial_attention(q, k_distinct, v_distinct, scale=scale, causal_offset=offset)
    out, lse = merge_partials([prefix, distinct])

A piece is summed up by its output and the log-sum-exp (LSE) of its scores. Both are float32
whatever the inputs are, and every LSE is a natural logarithm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]
"""(out, lse): [num_tokens, num_q_heads, head_dim] and [num_tokens, num_q_heads], float32."""


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal_offset: int | None = None
) -> Partial:
    """Softmax attention of `q` over one piece of the context.

    Args:
        q: [num_tokens, num_q_heads, head_dim].
        k: [num_kv_tokens, num_kv_heads, head_dim]; num_q_heads is a multiple of num_kv_heads, and
            query head h reads key head h // (num_q_heads // num_kv_heads).
        v: the shape of `k`.
        scale: factor on the scores, usually head_dim ** -0.5.
        causal_offset: query i sees the keys j <= i + causal_offset: the number of keys before
            the first query's own. None: every query sees every key, as in a shared prefix.

    Returns:
        (out, lse). A query that sees no key gets out = 0 and lse = -inf, the neutral element of
        `merge_partials`.

    Raises:
        ValueError: the shapes don't fit together.
    """
    _check_shapes(q, k, v)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_tokens, num_kv_heads, _ = k.shape
    queries = q.float().reshape(num_tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scores = torch.einsum("thgd,shd->thgs", queries, k.float()) * scale
    if causal_offset is not None:
        visible = torch.ones(num_tokens, num_kv_tokens, dtype=torch.bool, device=q.device)
        visible = visible.tril(causal_offset)[:, None, None, :]
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - _finite(lse)[..., None])
    out = torch.einsum("thgs,shd->thgd", weights, v.float())
    return out.reshape(q.shape), lse.reshape(num_tokens, num_q_heads)


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint pieces, from the pieces' results (online softmax).

    The order of the pieces doesn't matter, and the result can be merged again.

    Args:
        partials: at least one (out, lse), all of the same shapes, as `partial_attention` gives
            them.

    Returns:
        (out, lse) of the union; 0 and -inf where every piece was empty.
    """
    outs = torch.stack([out for out, _ in partials])
    lses = torch.stack([lse for _, lse in partials])
    lse = lses.logsumexp(dim=0)
    weights = torch.exp(lses - _finite(lse))
    return (weights[..., None] * outs).sum(dim=0), lse


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for -inf: empty pieces then weigh exp(-inf) = 0, where -inf - -inf is NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            "expected q [num_tokens, num_q_heads, head_dim] and k, v [num_kv_tokens, num_kv_heads, "
            f"head_dim], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads can't share {k.shape[1]} key heads evenly")
