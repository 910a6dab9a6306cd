"""The oracle against torch's own attention, and its behaviour at the edges."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from batchllm_kernels.prefix_attention.reference import merge_partials, partial_attention

HEAD_DIM = 16
SCALE = HEAD_DIM**-0.5
LENGTHS = [1, 63, 64, 65]
NEG_INF = float("-inf")


def random_qkv(
    num_tokens: int, num_kv_tokens: int, *, num_q_heads: int = 8, num_kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens * 1000 + num_kv_tokens)
    shapes = [(num_tokens, num_q_heads), (num_kv_tokens, num_kv_heads)]
    q, k = (torch.randn(*shape, HEAD_DIM, generator=generator) for shape in shapes)
    return q, k, torch.randn(k.shape, generator=generator)


def stock_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's attention, with tokens first as in the oracle."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("num_kv_tokens", LENGTHS)
@pytest.mark.parametrize("group_size", [1, 4, 8])
def test_equals_torch_attention(num_kv_tokens: int, group_size: int) -> None:
    """The LSE is the natural logarithm of the summed scores."""
    q, k, v = random_qkv(5, num_kv_tokens, num_q_heads=8, num_kv_heads=8 // group_size)
    out, lse = partial_attention(q, k, v, scale=SCALE)
    torch.testing.assert_close(out, stock_attention(q, k, v))
    assert lse.shape == q.shape[:2]
    scores = (q[:, 0] @ k[:, 0].T) * SCALE
    torch.testing.assert_close(lse[:, 0], scores.exp().sum(dim=-1).log())


@pytest.mark.parametrize("num_prefix_tokens", LENGTHS)
@pytest.mark.parametrize("num_distinct_tokens", LENGTHS)
def test_prefix_and_distinct_part_merge_to_causal_attention(
    num_prefix_tokens: int, num_distinct_tokens: int
) -> None:
    num_kv_tokens = num_prefix_tokens + num_distinct_tokens
    q, k, v = random_qkv(num_distinct_tokens, num_kv_tokens)
    prefix = partial_attention(q, k[:num_prefix_tokens], v[:num_prefix_tokens], scale=SCALE)
    own_position = torch.arange(num_distinct_tokens)
    distinct = partial_attention(
        q, k[num_prefix_tokens:], v[num_prefix_tokens:], scale=SCALE, last_key=own_position
    )
    out, lse = merge_partials([prefix, distinct])

    mask = torch.ones(num_distinct_tokens, num_kv_tokens, dtype=torch.bool)
    mask = mask.tril(num_prefix_tokens)
    torch.testing.assert_close(out, stock_attention(q, k, v, mask))
    whole = partial_attention(q, k, v, scale=SCALE, last_key=own_position + num_prefix_tokens)
    torch.testing.assert_close((out, lse), whole)


def test_merge_is_independent_of_how_the_context_is_cut() -> None:
    q, k, v = random_qkv(4, 65)
    cuts = [(0, 1), (1, 1), (1, 64), (64, 65)]
    pieces = [partial_attention(q, k[a:b], v[a:b], scale=SCALE) for a, b in cuts]
    whole = partial_attention(q, k, v, scale=SCALE)
    torch.testing.assert_close(merge_partials(pieces), whole)
    torch.testing.assert_close(merge_partials(pieces[::-1]), whole)
    nested = merge_partials([merge_partials(pieces[:2]), merge_partials(pieces[2:])])
    torch.testing.assert_close(nested, whole)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_no_keys_give_zero_and_minus_infinity(num_tokens: int) -> None:
    q, k, v = random_qkv(num_tokens, 0)
    empty = partial_attention(q, k, v, scale=SCALE)
    expected = torch.zeros_like(q), torch.full(q.shape[:2], NEG_INF)
    torch.testing.assert_close(empty, expected, rtol=0, atol=0)
    torch.testing.assert_close(merge_partials([empty, empty]), expected, rtol=0, atol=0)


def test_queries_before_every_key_see_nothing() -> None:
    q, k, v = random_qkv(3, 2)
    out, lse = partial_attention(q, k, v, scale=SCALE, last_key=torch.arange(len(q)) - 2)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(lse[:2], torch.full_like(lse[:2], NEG_INF))
    torch.testing.assert_close(out[2], v[0].repeat_interleave(4, dim=0))


def test_large_scores_stay_finite() -> None:
    q, k, v = random_qkv(2, 63)
    out, lse = partial_attention(q * 1e4, k, v, scale=SCALE)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_accumulates_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in random_qkv(2, 65))
    out, lse = partial_attention(q, k, v, scale=SCALE)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, stock_attention(q.float(), k.float(), v.float()))
