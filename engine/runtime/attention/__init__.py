"""Attention backends, by the names of --attention-backend: one file and one line each.

backend.py is their interface, table.py chooses. Standard library only.
"""

BACKENDS = {
    "cpu_native": "engine.runtime.attention.cpu_native:CpuNativeAttention",
    "torch": "engine.runtime.attention.torch_paged:TorchPagedAttention",
    "triton": "engine.runtime.attention.triton_paged:TritonPagedAttention",
}
