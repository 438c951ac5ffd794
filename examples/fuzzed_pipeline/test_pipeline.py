# SPDX-License-Identifier: Apache-2.0
"""Whatever the pieces, a decoder gives what one call over the whole sequence gives.

Run with ``pytest examples/fuzzed_pipeline``; no GPU is needed.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline import Decoder

from cuflash import testing

#: Calls that a decoder can be asked for: causal, as many keys as queries, and the options that do
#: not say anything about single pairs.
PROBLEMS = testing.problems(
    dtypes=("float32",),
    causal=True,
    same_lengths=True,
    layouts=("bshd",),
    options=("softcap", "alibi_slopes", "sinks"),
)


@settings(max_examples=60, deadline=None)  # the first call of a kind compiles a kernel
@given(call=PROBLEMS, data=st.data())
def test_pieces_add_up(call: testing.Inputs, data: st.DataObject) -> None:
    length = call.q.shape[-3]
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4), label="cuts"))
    options = {name: x for name, x in call.options.items() if name not in ("causal", "layout")}
    decoder = Decoder(call.k, call.v, length + 3, **options)
    pieces = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    outs = [decoder.step(*(x[..., at, :, :] for x in (call.q, call.k, call.v))) for at in pieces]
    testing.check_forward(np.concatenate(outs, axis=-3), None, call)
