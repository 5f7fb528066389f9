"""Arguments that fastvit.compat.apex.optimizers refuse, and attributes that scripts read and write."""

import pytest
import torch
from torch import nn

from compat.optimizer_steps import assert_all_close, make_parameters, set_gradients
from fastvit.compat import amp_C
from fastvit.compat.apex._warn_once import warn_once
from fastvit.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from fastvit.compat.apex.parallel import LARC


def test_wrong_options_gradients_and_closures_are_refused():
    warn_once.cache_clear()
    for kind in (FusedAdam, FusedLAMB, FusedNovoGrad):
        with pytest.raises(RuntimeError, match=f"{kind.__name__} takes amsgrad=False"):
            kind(make_parameters(), amsgrad=True)
    with pytest.raises(RuntimeError, match="norm_type takes 2 or 0"):
        FusedNovoGrad(make_parameters(), norm_type=1)
    with pytest.raises(ValueError, match="nesterov needs momentum above 0 and dampening 0"):
        FusedSGD(make_parameters(), 0.1, nesterov=True)
    with pytest.raises(ValueError, match="lr must be at least 0, got -1"):
        FusedSGD(make_parameters(), -1)
    with pytest.warns(UserWarning, match="materialize_master_grads=False has no effect"):
        FusedSGD(make_parameters(), 0.1, materialize_master_grads=False)
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="FusedAdam takes dense real gradients"):
        FusedAdam(embedding.parameters()).step()
    complex_one = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    complex_one.grad = torch.ones_like(complex_one)
    with pytest.raises(RuntimeError, match=r"dense real gradients.*torch.optim.Adam for complex"):
        FusedAdam([complex_one]).step()
    with pytest.raises(RuntimeError, match="LARC.step takes no closure"):
        LARC(torch.optim.SGD(make_parameters(), 0.1)).step(lambda: 0)


def test_options_of_an_older_adam_are_refused():
    for name in ("eps_inside_sqrt", "use_mt", "amp_scale_adjustment"):
        with pytest.raises(TypeError, match=rf"FusedAdam takes no {name}; leave out.*{name}"):
            FusedAdam(make_parameters(), **{name: False})


def test_arguments_of_a_step_of_an_older_adam_are_refused():
    params = make_parameters()
    set_gradients(params, 0)
    optimizer, before = FusedAdam(params), params[0].detach().clone()
    for place, name in enumerate(["grads", "output_params", "scale", "grad_norms", "grad_scaler"]):
        for args, kwargs in (((), {name: 1}), ((None, *[None] * place, 1), {})):
            with pytest.raises(RuntimeError, match=rf"takes a closure alone, got {name}; write p.grad ="):
                optimizer.step(*args, **kwargs)
    assert torch.equal(params[0], before)
    optimizer.step(None, *[None] * 5)
    assert not torch.equal(params[0], before)


def test_attributes_that_are_not_there_say_what_to_use():
    optimizer = FusedAdam(make_parameters(), capturable=True, master_weights=True)
    with pytest.raises(AttributeError, match=r'no param_groups_master; use optimizer.state\[parameter\]\["m'):
        _ = optimizer.param_groups_master
    with pytest.raises(AttributeError, match="use amp_C.multi_tensor_adam_capturable, see docs"):
        _ = amp_C.multi_tensor_adam_capturable_master
    with pytest.raises(TypeError, match="amp_C.multi_tensor_adam takes chunk_size.*got 2 arguments after"):
        amp_C.multi_tensor_adam(0, torch.zeros(1), [[], [], [], []], 0.1, 0.9)


def test_a_scale_of_sgd_divides_the_gradients_of_one_step():
    """A script writes the scale. Momentum buffers are made when a script asks for them."""
    params = make_parameters()
    optimizer = FusedSGD(params, 0.1, 0.9)
    assert optimizer.materialize_master_grads and not optimizer.scale_set_by_backward
    buffers, first = optimizer.get_momentums(iter(params))
    assert first and not any(buffer.any() for buffer in buffers)
    again, first = optimizer.get_momentums(params)
    assert not first and all(map(torch.equal, again, buffers))
    start = [p.detach().clone() for p in params]
    set_gradients(params, 0)
    optimizer.most_recent_scale, optimizer.scale_set_by_backward = 8.0, True
    optimizer.step()
    assert_all_close(params, [p - 0.1 * q.grad / 8 for p, q in zip(start, params, strict=True)])
    assert optimizer.most_recent_scale == 1.0 and not optimizer.scale_set_by_backward
