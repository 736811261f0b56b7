"""The kernel that sums a token's copies on a GPU, compiled for one; tests/gpu/test_sum_rows.py has its numbers."""

import pytest
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tevatron.trainer.program.backends.megatron.rows import _sum_kernel


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_compiles_for_a_gpu(dtype: str):
    names = ["rows", "places", "starts", "sums", "num_places", "num_sums"]
    kinds = [f"*{dtype}", "*i64", "*i64", f"*{dtype}", "i32", "i32"]
    sizes = {"width": 2048, "block": 2048}
    signature = dict(zip(names, kinds, strict=True)) | dict.fromkeys(sizes, "constexpr")
    source = ASTSource(fn=_sum_kernel, signature=signature, constexprs=sizes)
    assert "cubin" in compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm
