"""Attention backends, by the names of --attention-backend: one file and one line each.

backend.py is their interface, table.py chooses. Standard library only.
"""

BACKENDS = {
    "cpu_native": "engine.runtime.attention.cpu_native:CpuNativeAttention",
    "torch": "engine.runtime.attention.torch_paged:TorchPagedAttention",
    "reference": "engine.runtime.attention.reference:ReferenceAttention",
}
GPU_BACKENDS = {"triton": "engine.runtime.attention.triton_paged:TritonPagedAttention"}
# Optional libraries for prompts over the Triton backend's pool; only used when named.
LIBRARIES = {
    "torch_varlen": "engine.runtime.attention.torch_varlen:TorchVarlen",
    "flashinfer": "engine.runtime.attention.flashinfer_prompts:FlashInferPrompts",
}
