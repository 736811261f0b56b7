"""The flash kernel for packed rows against the masked softmax in fp64."""

import pytest
import torch
from tests.core.nn.test_attention import Causal, reference

from tevatron.core.nn.attention import Segments, packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_gradients(dtype, window):
    lengths = (3, 70, 1, 130, 17)
    generator = torch.Generator(device="cuda").manual_seed(0)
    inputs = [
        torch.randn(1, heads, sum(lengths), 64, device="cuda", generator=generator)
        .to(dtype)
        .requires_grad_()
        for heads in (6, 2, 2)
    ]
    segments = Segments.of(lengths, torch.device("cuda"))
    out, _ = packed_attention(
        Causal(), *inputs, None, scaling=0.125, sliding_window=window, segments=segments
    )
    cpu = [one.detach().cpu().double().requires_grad_() for one in inputs]
    expected = reference(*cpu, lengths, scale=0.125, window=window)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        out.detach().cpu().double(), expected, atol=tolerance, rtol=tolerance
    )
    got = torch.autograd.grad(out.float().square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), cpu)
    for one, other in zip(got, wanted, strict=True):
        scale = max(other.abs().max().item(), 1.0)
        assert (one.cpu().double() - other).abs().max().item() < 3 * tolerance * scale
