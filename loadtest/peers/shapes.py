"""The shapes of the models that are compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama lineage; `bias`: Q, K and V have one, as in Qwen2.

    `is_embedded`: the weights are those of the model that comes with Quire; otherwise they are random.
    """

    name: str
    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int
    rope_base: float
    norm_eps: float
    bias: bool
    is_embedded: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", "llama", 30, 576, 9, 3, 1536, 49152, 8192, 100000.0, 1e-5, bias=False, is_embedded=True),
        Shape("qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 4864, 151936, 32768, 1e6, 1e-6, bias=True),
        Shape("qwen2.5-1.5b", "qwen2", 28, 1536, 12, 2, 8960, 151936, 32768, 1e6, 1e-6, bias=True),
    )
}
