"""The kernel that sums a token's copies against the same in fp64; and small tensors that are sent."""

import pytest
import torch

from tevatron.core.nn.sending import sent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("width", [8, 2048, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_rows(width, dtype):
    from tevatron.trainer.program.backends.megatron.rows import sum_rows

    generator = torch.Generator(device="cuda").manual_seed(0)
    counts = torch.randint(0, 9, (501,), device="cuda", generator=generator)
    total = int(counts.sum())
    rows = torch.randn(total, width, device="cuda", generator=generator).to(dtype)
    places = torch.randperm(total, device="cuda", generator=generator)
    found = sum_rows(rows, places, counts.cumsum(0) - counts)
    parts = rows.double()[places].split(counts.tolist())
    expected = torch.stack([part.sum(0) for part in parts])
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_no_rows_are_zeros():
    from tevatron.trainer.program.backends.megatron.rows import sum_rows

    none = torch.empty(0, dtype=torch.int64, device="cuda")
    found = sum_rows(torch.empty(0, 64, device="cuda"), none, torch.zeros_like(none.new_empty(5)))
    assert torch.equal(found, torch.zeros(5, 64, device="cuda"))


@pytest.mark.parametrize("tensor", [torch.arange(6).expand(4, -1), torch.arange(24).view(4, 6).t()])
def test_a_tensor_is_sent_as_it_is(tensor):
    assert torch.equal(sent(tensor, torch.device("cuda")).cpu(), tensor)
