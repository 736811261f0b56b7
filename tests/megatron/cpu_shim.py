"""TEST ONLY: lets Megatron run on the CPU under gloo. It never ships and no product code knows of it.

Megatron asks for CUDA devices, streams and random states by name; here each of them is the CPU's. Transformer Engine,
which Megatron-Bridge imports whether it is needed or not, is shown as a placeholder during that import alone, so that
every layer is the one that Megatron takes where Transformer Engine is not installed. What this leaves unproved: NCCL,
Transformer Engine's kernels, fused kernels, grouped GEMM and overlap; the GPU runs in benchmarks/ are for those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import sys
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def install() -> None:
    """Patch torch, then import Megatron in the order that keeps it free of Transformer Engine."""
    _patch_cuda()
    _patch_collectives()
    _CpuDevices().__enter__()
    _import_without_transformer_engine()
    _patch_sharding()


class _CpuDevices(TorchFunctionMode):
    """Turns `device="cuda"`, `.cuda()` and CUDA type names into the CPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(one) else one for one in args)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer sorts parameters by these names.
            return str(func(*args)).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _Stream:
    """A class, since Megatron checks for one by `isinstance`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    def _nothing(self, *args: object, **kwargs: object) -> None:
        return None

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: object = None) -> object:
        return event or _Event()


class _Event(_Stream):
    record = wait = _Stream._nothing

    def elapsed_time(self, end: object) -> float:
        return 0.0

    def query(self) -> bool:
        return True


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.device_count = lambda: 1
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = lambda name: None
    cuda.nvtx.range_pop = lambda: None


def _patch_collectives() -> None:
    """Gloo reads the memory of inputs that are not contiguous in another order, and says nothing."""
    scatter = dist.scatter

    def contiguous_scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        if scatter_list is not None:
            scatter_list = [one.contiguous() for one in scatter_list]
        return scatter(tensor, scatter_list, *args, **kwargs)

    exchange = dist.all_to_all_single

    def listed_exchange(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return exchange(
            output,
            input.contiguous(),
            _as_list(output_split_sizes),
            _as_list(input_split_sizes),
            **kwargs,
        )

    dist.scatter = contiguous_scatter
    dist.all_to_all_single = listed_exchange


def _patch_sharding() -> None:
    """Megatron-FSDP writes its device and its meshes' out by name, and lets NCCL divide the sums."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter
    import megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp as fsdp
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as buffers

    preprocessing = buffers.gradient_reduce_preprocessing

    def unfused(data: Any, factor: Any, settings: Any) -> Any:
        return preprocessing(
            data, factor, dataclasses.replace(settings, gradient_reduce_div_fusion=False)
        )

    cpu_torch = types.ModuleType("torch")
    cpu_torch.__dict__.update(vars(torch), device=lambda name: CPU)
    vars(fsdp)["torch"] = cpu_torch
    from_group = adapter.DeviceMesh.from_group
    mesh = types.SimpleNamespace(
        from_group=lambda groups, device_type, **kwargs: from_group(groups, "cpu", **kwargs)
    )
    vars(adapter)["DeviceMesh"] = mesh
    buffers.gradient_reduce_preprocessing = unfused


class _Anything(type):
    """Classes whose every attribute is another one: enough for annotations and bases."""

    def __getattr__(cls, name: str) -> Any:
        return _placeholder_class(name)


def _placeholder_class(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


def _as_list(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def _import_without_transformer_engine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.extensions.transformer_engine
        import megatron.core.fp8_utils
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer

        names = ["transformer_engine", "transformer_engine.pytorch"]
        for name in names:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
            sys.modules[name] = module
        vars(sys.modules["transformer_engine"])["__version__"] = "2.20.2"
        placeholder: Any = sys.modules["transformer_engine.pytorch"]
        placeholder.__getattr__ = _placeholder_class
        sys.modules["transformer_engine"].pytorch = placeholder  # type: ignore[attr-defined]
        try:
            import megatron.bridge
        finally:
            for name in names:
                del sys.modules[name]
        import megatron.bridge.peft.module_matcher
        import megatron.bridge.peft.utils
        import megatron.core.tensor_parallel.random

    megatron.core.utils._te_version = None
    random: Any = megatron.core.tensor_parallel.random
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    for user in (megatron.bridge.peft.utils, megatron.bridge.peft.module_matcher):
        for name in [name for name in vars(user) if name.startswith("HAVE_TE")]:
            setattr(user, name, False)
