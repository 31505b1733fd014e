"""The operations, and what each path has for them: the torch twin, and a launcher in Triton or C where there is one.

Engine and models call the operations by these names. A path whose entry is ``MISSING`` runs the twin.
"""

from __future__ import annotations

from ringkv.kernels.advance import advance as _advance
from ringkv.kernels.advance import commit as _commit
from ringkv.kernels.attention import attend as _attend
from ringkv.kernels.backend import MISSING, Operation
from ringkv.kernels.key_scores import key_scores as _key_scores
from ringkv.kernels.key_scores import lengths as _lengths
from ringkv.kernels.leverage import leverage as _leverage
from ringkv.kernels.norm import add_rms_norm as _add_rms_norm
from ringkv.kernels.observe import received_attention as _received_attention
from ringkv.kernels.penalize import penalize as _penalize
from ringkv.kernels.philox import philox as _philox
from ringkv.kernels.prefill_attention import causal_attention as _causal_attention
from ringkv.kernels.redundancy import redundancy as _redundancy
from ringkv.kernels.sample import sample as _sample
from ringkv.kernels.scores import window_attention as _window_attention
from ringkv.kernels.select import free as _free
from ringkv.kernels.select import lowest as _lowest
from ringkv.kernels.silu import silu_mul as _silu_mul
from ringkv.kernels.steer import steer as _steer

# A step in each layer.
add_rms_norm = Operation(_add_rms_norm, triton="norm_triton", native="native")
attend = Operation(_attend, triton="attention_triton", native="native")
silu_mul = Operation(_silu_mul, triton="silu_triton", native="native")
# A prompt.
causal_attention = Operation(_causal_attention, triton=MISSING, native="native")
# The draw, and the end of a step.
penalize = Operation(_penalize, triton="penalize_triton", native=MISSING)
philox = Operation(_philox, triton="philox_triton", native="native")
sample = Operation(_sample, triton="sample_triton", native="native")
steer = Operation(_steer, triton="steer_triton", native=MISSING)
commit = Operation(_commit, triton="advance_triton", native=MISSING)
advance = Operation(_advance, triton="advance_triton", native=MISSING)
# An eviction.
window_attention = Operation(_window_attention, triton="scores_triton", native=MISSING)
received_attention = Operation(_received_attention, triton="observe_triton", native=MISSING)
redundancy = Operation(_redundancy, triton="redundancy_triton", native=MISSING)
leverage = Operation(_leverage, triton="leverage_triton", native=MISSING)
key_scores = Operation(_key_scores, triton="key_scores_triton", native=MISSING)
lengths = Operation(_lengths, triton="key_scores_triton", native=MISSING)
lowest = Operation(_lowest, triton="select_triton", native=MISSING)
free = Operation(_free, triton="select_triton", native=MISSING)
