"""apex.amp over torch.autocast and casts of float32 weights.

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
optimizer.step()
"""

from . import lists
from ._amp_state import _amp_state, master_params
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss
from .lists import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
