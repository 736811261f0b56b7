"""Packed attention against a plain masked softmax."""

import pytest
import torch
from torch import nn

from tevatron.core.nn.attention import Segments, packed_attention


class Causal(nn.Module):
    is_causal = True


def reference(query, key, value, lengths, *, scale, window=None):
    """Mask everything outside a token's own segment, its future, and its window; softmax in fp64."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).double()
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).double()
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    seen = (segment[:, None] == segment[None, :]) & (place[:, None] >= place[None, :])
    if window is not None:
        seen &= place[:, None] - place[None, :] < window
    logits = (query.double() @ key.transpose(-1, -2)) * scale
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


def random_qkv(length, *, heads=4, key_heads=2):
    generator = torch.Generator().manual_seed(1)
    make = lambda count: torch.randn(1, count, length, 8, generator=generator)  # noqa: E731
    return make(heads), make(key_heads), make(key_heads)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_segments_do_not_see_one_another(window):
    lengths = (3, 7, 1, 5)
    query, key, value = random_qkv(sum(lengths))
    segments = Segments.of(lengths, torch.device("cpu"))
    out, weights = packed_attention(
        Causal(), query, key, value, None, scaling=0.3, sliding_window=window, segments=segments
    )
    expected = reference(query, key, value, lengths, scale=0.3, window=window)
    assert weights is None
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)


def test_without_segments_each_row_is_one():
    query, key, value = random_qkv(6)
    out, _ = packed_attention(Causal(), query, key, value, None, scaling=0.5)
    torch.testing.assert_close(
        out.double(), reference(query, key, value, (6,), scale=0.5), atol=1e-6, rtol=0
    )


def test_gradients_equal_those_of_the_masked_softmax():
    lengths = (4, 2, 6)
    inputs = [tensor.requires_grad_() for tensor in random_qkv(sum(lengths))]
    segments = Segments.of(lengths, torch.device("cpu"))
    got = torch.autograd.grad(
        packed_attention(Causal(), *inputs, None, scaling=0.4, segments=segments)[0].square().sum(),
        inputs,
    )
    expected = torch.autograd.grad(
        reference(*inputs, lengths, scale=0.4).square().sum().float(), inputs
    )
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_cumulated_lengths():
    assert Segments.of((3, 1, 2), torch.device("cpu")).cu_seq_lens.tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "mask"),
    ],
)
def test_what_the_kernel_would_leave_out_is_refused(changes, words):
    query, key, value = random_qkv(4)
    arguments = {"attention_mask": None, **changes}
    with pytest.raises(NotImplementedError, match=words):
        packed_attention(Causal(), query, key, value, **arguments)


def test_a_cache_is_refused():
    query, key, value = random_qkv(4)
    with pytest.raises(NotImplementedError, match="1 queries and 4 keys"):
        packed_attention(Causal(), query[:, :, :1], key, value, None)
