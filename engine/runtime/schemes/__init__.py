"""Schemes: how a model's weights are stored and multiplied, by the names of --quantization.

A scheme is one file with a subclass of Scheme (linear.py), and one line here; a checkpoint's weights choose it, or the
user. Standard library only; a scheme's module is imported when it is asked for.
"""

SCHEMES = {
    "none": "engine.runtime.schemes.linear:Scheme",
    "gguf": "engine.runtime.schemes.gguf:GGUFScheme",
    "stored": "engine.runtime.schemes.stored:StoredScheme",
    "int8": "engine.runtime.schemes.int8:Int8Scheme",
    "fp8": "engine.runtime.schemes.stored:Fp8Scheme",
}
