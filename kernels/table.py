"""The operations, and what each path has for them: the torch twin, and a launcher in Triton or C where there is one.

Engine and models call the operations by these names. A path whose entry is ``MISSING`` runs the twin.
"""

from __future__ import annotations

from ringkv.kernels import (
    advance as _advance,
)
from ringkv.kernels import (
    attention as _attention,
)
from ringkv.kernels import (
    key_scores as _key_scores,
)
from ringkv.kernels import (
    leverage as _leverage,
)
from ringkv.kernels import (
    norm as _norm,
)
from ringkv.kernels import (
    observe as _observe,
)
from ringkv.kernels import (
    penalize as _penalize,
)
from ringkv.kernels import (
    philox as _philox,
)
from ringkv.kernels import (
    prefill_attention as _prefill_attention,
)
from ringkv.kernels import (
    redundancy as _redundancy,
)
from ringkv.kernels import (
    sample as _sample,
)
from ringkv.kernels import (
    scores as _scores,
)
from ringkv.kernels import (
    select as _select,
)
from ringkv.kernels import (
    silu as _silu,
)
from ringkv.kernels import (
    steer as _steer,
)
from ringkv.kernels.backend import MISSING, Operation

# A step in each layer.
add_rms_norm = Operation(_norm.add_rms_norm, triton="norm_triton", native="native")
attend = Operation(_attention.attend, triton="attention_triton", native="native")
silu_mul = Operation(_silu.silu_mul, triton="silu_triton", native="native")
# A prompt.
causal_attention = Operation(_prefill_attention.causal_attention, triton=MISSING, native="native")
# The draw, and the end of a step.
penalize = Operation(_penalize.penalize, triton="penalize_triton", native=MISSING)
philox = Operation(_philox.philox, triton="philox_triton", native="native")
sample = Operation(_sample.sample, triton="sample_triton", native="native")
steer = Operation(_steer.steer, triton="steer_triton", native=MISSING)
commit = Operation(_advance.commit, triton="advance_triton", native=MISSING)
advance = Operation(_advance.advance, triton="advance_triton", native=MISSING)
# An eviction.
window_attention = Operation(_scores.window_attention, triton="scores_triton", native=MISSING)
received_attention = Operation(_observe.received_attention, triton="observe_triton", native=MISSING)
redundancy = Operation(_redundancy.redundancy, triton="redundancy_triton", native=MISSING)
leverage = Operation(_leverage.leverage, triton="leverage_triton", native=MISSING)
key_scores = Operation(_key_scores.key_scores, triton="key_scores_triton", native=MISSING)
lengths = Operation(_key_scores.lengths, triton="key_scores_triton", native=MISSING)
lowest = Operation(_select.lowest, triton="select_triton", native=MISSING)
free = Operation(_select.free, triton="select_triton", native=MISSING)
