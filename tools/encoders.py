"""Measures text encoders of other libraries beside Quire's: the same files and texts, in turns.

    python -m tools encoders FOLDER --python PYTHON --libraries quire quire-int8 transformers onnxruntime openvino

A process a library loads the model and embeds all texts whenever its turn comes; the others wait. PYTHON is of an environment
with sentence-transformers, onnx, onnxruntime and openvino. Tokenizers are in the time. The libraries sort texts by length, and
pad batches of 32.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.arguments import positive_int
from loadtest.errors import LoadtestError
from loadtest.output import print_table, save_json
from loadtest.workload import text_of

Embed = Callable[[list[str]], Any]  # returns vectors, a row each

_BATCH = 32
_CHILD = "from tools.encoders import serve; serve()"


def _quire(folder: str, num_threads: int, **settings: Any) -> Embed:
    from quire import LLM

    model = LLM(folder, dtype="bfloat16", num_threads=num_threads, **settings)
    return lambda texts: [each.outputs.embedding for each in model.embed(texts)]


def _transformers(folder: str, num_threads: int, dtype: str) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(num_threads)
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: model.encode(texts, batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False)


class _Graph:
    """A model as an ONNX file, and what surrounds it: tokens, batches, pooling."""

    def __init__(self, folder: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers import AutoModel

        self.tokenizer = SentenceTransformer(folder, device="cpu").tokenizer
        self.is_cls = '"pooling_mode_cls_token": true' in (Path(folder) / "1_Pooling/config.json").read_text()
        self.file = f"/tmp/quire-encoders-{os.getpid()}.onnx"  # noqa: S108
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.heads, self.hidden = model.config.num_attention_heads, model.config.hidden_size
        self.names = ("input_ids", "attention_mask", "token_type_ids")
        axes = {name: {0: "texts", 1: "tokens"} for name in (*self.names, "last_hidden_state")}
        some = tuple(torch.ones(2, 8, dtype=torch.long) for _ in self.names)

        class Last(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, ids: Any, mask: Any, kinds: Any) -> Any:
                return self.model(input_ids=ids, attention_mask=mask, token_type_ids=kinds).last_hidden_state

        torch.onnx.export(
            Last(), some, self.file, input_names=[*self.names], output_names=["last_hidden_state"],
            dynamic_axes=axes, opset_version=17, dynamo=False,
        )  # fmt: skip

    def batches(self, texts: list[str]) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Yield which texts a batch has, and its arrays."""
        ids = self.tokenizer(texts)["input_ids"]
        order = sorted(range(len(texts)), key=lambda at: -len(ids[at]))
        for first in range(0, len(texts), _BATCH):
            chosen = order[first : first + _BATCH]
            yield chosen, dict(self.tokenizer.pad({"input_ids": [ids[at] for at in chosen]}, return_tensors="np"))

    def feed(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the graph."""
        import numpy as np

        ids = arrays["input_ids"]
        given = (ids, arrays["attention_mask"], np.zeros_like(ids))
        return {name: each.astype(np.int64) for name, each in zip(self.names, given, strict=True)}

    def pool(self, hidden: Any, mask: Any) -> Any:
        """Return vectors of length one."""
        import numpy as np

        vectors = hidden[:, 0] if self.is_cls else (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _onnxruntime(folder: str, num_threads: int, *, is_int8: bool) -> Embed:
    import numpy as np
    import onnx
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model

    graph = _Graph(folder)
    sizes = {"num_heads": graph.heads, "hidden_size": graph.hidden}
    optimize_model(graph.file, model_type="bert", **sizes).save_model_to_file(graph.file)
    if is_int8:
        quantize_dynamic(graph.file, graph.file, extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = onnxruntime.InferenceSession(graph.file, options, ["CPUExecutionProvider"])

    def embed(texts: list[str]) -> Any:
        found: Any = [None] * len(texts)
        for chosen, arrays in graph.batches(texts):
            feed = graph.feed(arrays)
            for at, vector in zip(chosen, graph.pool(session.run(None, feed)[0], feed["attention_mask"]), strict=True):
                found[at] = vector
        return np.stack(found)

    return embed


def _openvino(folder: str, num_threads: int, precision: str) -> Embed:
    import numpy as np
    import openvino

    graph = _Graph(folder)
    hints = {"INFERENCE_NUM_THREADS": num_threads, "NUM_STREAMS": num_threads, "INFERENCE_PRECISION_HINT": precision}
    queue = openvino.AsyncInferQueue(openvino.Core().compile_model(graph.file, "CPU", hints), num_threads)

    def embed(texts: list[str]) -> Any:
        found: Any = [None] * len(texts)

        def done(request: Any, given: tuple[list[int], Any]) -> None:
            chosen, mask = given
            for at, vector in zip(chosen, graph.pool(request.get_output_tensor().data, mask), strict=True):
                found[at] = vector

        queue.set_callback(done)
        for chosen, arrays in graph.batches(texts):
            feed = graph.feed(arrays)
            queue.start_async(feed, (chosen, feed["attention_mask"]))
        queue.wait_all()
        return np.stack(found)

    return embed


LIBRARIES: dict[str, Callable[[str, int], Embed]] = {
    "quire": _quire,
    "quire-int8": partial(_quire, quantization="int8"),
    "transformers": partial(_transformers, dtype="float32"),
    "transformers-bf16": partial(_transformers, dtype="bfloat16"),
    "onnxruntime": partial(_onnxruntime, is_int8=False),
    "onnxruntime-int8": partial(_onnxruntime, is_int8=True),
    "openvino": partial(_openvino, precision="f32"),
    "openvino-bf16": partial(_openvino, precision="bf16"),
}


def serve() -> None:
    """Embed as often as a line comes, and print the seconds; the first time prints a vector's beginning."""
    import numpy as np

    name, folder, num_threads, num_texts, num_words = sys.argv[1:]
    out, sys.stdout = sys.stdout, sys.stderr
    embed, rng = LIBRARIES[name](folder, int(num_threads)), random.Random(0)
    texts = [text_of(rng, int(num_words)) for _ in range(int(num_texts))]
    print(*np.asarray(embed(texts)[0])[:4], file=out, flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        embed(texts)
        print(time.perf_counter() - begun, file=out, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `encoders`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a model in sentence-transformers' layout")
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON", help="of the other libraries")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), help="default: all")
    parser.add_argument("--texts", type=positive_int, default=1000, metavar="N", help="default %(default)s")
    parser.add_argument("--words", type=positive_int, default=24, metavar="N", help="of a text; default %(default)s")
    parser.add_argument("--num-threads", type=positive_int, default=os.cpu_count(), metavar="N", help="one a core")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of every round")


def run(options: argparse.Namespace) -> int:
    """Measure in turns, print the medians."""
    numbers = [str(each) for each in (options.num_threads, options.texts, options.words)]
    children = {}
    for name in options.libraries:
        python = sys.executable if name.startswith("quire") else options.python
        argv = [python, "-c", _CHILD, name, str(options.folder), *numbers]
        children[name] = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        print(f"{name}: {_line(name, children[name])}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in children}
    for _ in range(options.rounds):
        for name, child in children.items():
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            seconds[name].append(float(_line(name, child)))
    for child in children.values():
        child.communicate()
    print_table(("library", "seconds", "of the first's"), _rows(seconds))
    save_json(options.json, seconds)
    return 0


def _line(name: str, child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    if not (line := child.stdout.readline()):
        raise LoadtestError(f"{name} has ended.")
    return line.strip()


def _rows(seconds: dict[str, list[float]]) -> Iterator[Sequence[str]]:
    first = next(iter(seconds.values()))
    for name, rounds in seconds.items():
        ratios = [one / other for one, other in zip(rounds, first, strict=True)]
        yield name, f"{statistics.median(rounds):.2f}", f"{statistics.median(ratios):.2f}"
