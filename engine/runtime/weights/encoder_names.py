"""One spelling for the tensors of encoders, whose families and converters have many.

Matrices that a file has merged, of queries, keys and values or of gates and ups, are divided. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from engine.runtime.weights.checkpoint import Checkpoint, Cut, StoredTensor, cut

_PREFIX = re.compile(r"^(?:bert|roberta|distilbert|mpnet|nomic_bert|gte|new|model)\.")
_LAYER = re.compile(r"(?:encoder\.layers?|transformer\.layer|layers|blk)\.(\d+)\.(.+)")
_OLD = {"gamma": "weight", "beta": "bias"}  # of checkpoints that were made from TensorFlow's
_OUTSIDE = {
    "embeddings.word_embeddings": "words", "embeddings.tok_embeddings": "words", "token_embd": "words",
    "embeddings.position_embeddings": "positions", "position_embd": "positions",
    "embeddings.token_type_embeddings": "types", "token_types": "types",
    "embeddings.LayerNorm": "norm", "embeddings.norm": "norm", "emb_ln": "norm", "token_embd_norm": "norm",
    "encoder.relative_attention_bias": "distances", "output_norm": "final_norm",
}  # fmt: skip
_WITHIN = {
    **{f"attention.self.{name}": name[0] for name in ("query", "key", "value")},
    **{place.format(name): name for name in "qkv"
       for place in ("attention.{}_lin", "attention.attn.{}", "self_attn.{}_proj", "attn_{}")},
    "attn.Wqkv": "q+k+v", "attention.qkv_proj": "q+k+v", "attn_qkv": "q+k+v",
    "attention.output.dense": "o", "attention.out_lin": "o", "attention.attn.o": "o", "self_attn.o_proj": "o",
    "attention.o_proj": "o", "attn.out_proj": "o", "attn.Wo": "o", "attn_output": "o",
    "attention.output.LayerNorm": "mixer_norm", "sa_layer_norm": "mixer_norm", "attention.LayerNorm": "mixer_norm",
    "post_attention_layernorm": "mixer_norm", "norm1": "mixer_norm", "attn_norm": "mixer_norm", "attn_ln": "mixer_norm",
    "attn_output_norm": "mixer_norm",
    "intermediate.dense": "up", "ffn.lin1": "up", "mlp.up_proj": "up", "mlp.fc11": "up", "ffn_up": "up",
    "mlp.gate_proj": "gate", "mlp.fc12": "gate", "ffn_gate": "gate", "mlp.Wi": "gate+up", "mlp.up_gate_proj": "up+gate",
    "output.dense": "down", "ffn.lin2": "down", "mlp.down_proj": "down", "mlp.fc2": "down", "mlp.Wo": "down",
    "ffn_down": "down",
    "output.LayerNorm": "mlp_norm", "output_layer_norm": "mlp_norm", "post_mlp_layernorm": "mlp_norm", "norm2": "mlp_norm",
    "mlp_norm": "mlp_norm", "mlp_ln": "mlp_norm", "layer_output_norm": "mlp_norm", "ffn_norm": "mlp_norm",
}  # fmt: skip


class EncoderTensors(Checkpoint):
    """A checkpoint whose tensors have an encoder's names; random weights have them already."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.config, self.quantization = checkpoint, checkpoint.config, checkpoint.quantization

    @property
    def num_weights(self) -> int | None:
        return self._checkpoint.num_weights

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[StoredTensor]:
        for tensor in self._checkpoint.tensors(wanted):
            name = plain_name(tensor.name)
            place, _, end = name.rpartition(".")
            before, _, part = place.rpartition(".")
            parts = part.split("+")
            if part == "up" and tensor.shape[0] == 2 * self.config.integer(
                "intermediate_size", 0
            ):  # ModernBERT's in GGUF
                parts = ["gate", "up"]
            for index, each in enumerate(parts):
                num = tensor.shape[0] // len(parts)
                own = tensor if len(parts) == 1 else cut(tensor, Cut(index * num, num, tensor.shape[0]))
                yield own._replace(name=f"{before}.{each}.{end}" if before else f"{each}.{end}")


def plain_name(name: str) -> str:
    """Return an encoder's name for a tensor; "+" is between the parts of a merged one."""
    module, _, end = _PREFIX.sub("", name).rpartition(".")
    layer = _LAYER.fullmatch(module)
    if layer is not None:
        module = f"layers.{layer[1]}.{_WITHIN.get(layer[2], layer[2])}"
    return f"{_OUTSIDE.get(module, module)}.{_OLD.get(end, end)}"
