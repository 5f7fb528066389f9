"""The kinds of random programs: tables of templates from which source.py draws the source.

A template is called a line, however many lines of text it has; a new case is a new line of a table. Most
lines are one or more statements of a model's forward. A line that a table repeats is drawn more often.

Names in a line:

| name | meaning |
|---|---|
| `x` | the input of the forward, `(8, 8, 6, 6)` |
| `v` | the list of values so far, each `(8, 8, 6, 6)`; a line may append, replace or write to a value |
| other single letters | temporary names, which no other line reads |
| `aliases` | a list of tensors without gradients that share memory with values; later lines write to them |
| `extras` | a list of outputs of the model besides the last value |
| `self` | the module whose forward this is |
| `model` | the model of the program |
| `outputs`, `losses` | the outputs of a step, and a loss for each output |
| `first_half`, `last_half` | the two halves of the model's trainable parameters |
| `RUN` | the `Run` of names.py |
| `SCOPE` | a function that makes the scope of the forward |
| `scale(*shape)` | a parameter that multiplies; autograd saves it for backward |
| `shift(*shape)` | a parameter that is added; autograd does not save it |
| `frozen_scale(*shape)`, `frozen_shift(*shape)` | such parameters without gradients |
| `shift_buffer(*shape)` | a buffer that is added |
| `matrix(*shape)` | a parameter for a matrix product |
| other names | functions and classes of names.py |

Placeholders in a line:

| placeholder | stands for |
|---|---|
| `<<nn.GELU()>>` | a submodule, parameter or buffer: a new one, or an earlier one of the same text |
| `{i}` | the index in `v` of a value, mostly of a recent one |
| `{j}` | the index in `v` of any value |
| `{norm_t}`, `{norm_v}` | an entry of NORMS, whose `{}` becomes `t` or `v[{i}]` |
| `{activation}`, `{activation_out_of_place}` | an entry of ACTIVATIONS; one that does not work in place |
| `{maskable}` | an entry of MASKABLE_ACTIVATIONS |
| `{sum}` | an entry of SUMS, which adds a value to `t` |
| `{small}` | a vector that the module has: a parameter or a running statistic |
| `{bias}` | a vector like `{small}` that no backward reads |
| `{large}` | a matrix that the module has, or the weight of its convolution or Linear |
| `{batch_norm}` | a BatchNorm that the module has |
| `{subclass}` | a subclass of Tensor, which is the same in the whole program |
| `{number}` | a number that no other line has |

A placeholder stands for the same text wherever it occurs in a line. A line is left out if the module has no
vector, matrix or BatchNorm that the line names. A line between forward and backward takes its vector or
matrix from the whole model.

The engine, fastvit.recompute, drops saved tensors; a recipe is the op call that recomputes one. The engine
copies small operands of recipes, but no large ones. Two endings mark lines that write to a large tensor:

- MAY_BE_REFUSED: a backward may need the numbers from before the write. The engine may refuse the step with
  an error that names a site (one op call of a module) and the argument `skip` of `convert`, which exempts it.
- ONE_FORWARD_ONLY: the version counter does not count the write. The engine cannot see such a write after a
  forward, as the second of two forwards makes it. Therefore a step of two forwards leaves the line out, and
  `pre_backward_lines` has no such line.
"""

from __future__ import annotations

import dataclasses

# The endings are comments in the source of a program, and flags that other files look for.
MAY_BE_REFUSED = "  # writes to a large tensor"
ONE_FORWARD_ONLY = MAY_BE_REFUSED + ", which no version counts"


@dataclasses.dataclass(frozen=True)
class Kind:
    """The tables of a kind. For empty tables `draw_program` has defaults, such as `outputs = model(x)`."""

    lines: tuple[str, ...] = ()  # statements of a forward
    line_contexts: tuple[str, ...] = ()  # context managers around a statement of a forward
    forward_contexts: tuple[str, ...] = ()  # context managers around the forward of the model
    backward_contexts: tuple[str, ...] = ()  # context managers around the backward
    step_contexts: tuple[str, ...] = ()  # context managers around the whole step
    forward_calls: tuple[str, ...] = ()  # statements that run the model and set `outputs`
    pre_backward_lines: tuple[str, ...] = ()  # statements after the forward
    backward_calls: tuple[str, ...] = ()  # statements that run the backward of `losses`
    set_up: tuple[str, ...] = ()  # statements that change the new model, before or after its conversion
    inputs: tuple[str, ...] = ()  # expressions of the model's input
    options: tuple[str, ...] = ()  # keys of OPTIONS (see source.py); half of the programs take one


# The tables avoid two segmentation faults of torch 2.13. The backward of GroupNorm fails if its input has no
# gradient and is in channels_last. register_hook fails on a view that was written to in place.
NORMS = (  # {} is the tensor to normalise
    "<<nn.BatchNorm2d(8)>>({})", "<<nn.GroupNorm(2, 8)>>({}.contiguous())", "<<nn.LayerNorm(6)>>({})",
    "<<nn.InstanceNorm2d(8, affine=True)>>({})", "<<nn.RMSNorm(6)>>({})", "<<nn.InstanceNorm2d(8)>>({})",
    "<<nn.LayerNorm(36)>>({}.flatten(2)).view(8, 8, 6, 6)",
)  # fmt: skip
ACTIVATIONS = (
    "nn.ReLU()", "nn.GELU()", "nn.Hardswish()", "nn.SiLU()", "nn.ReLU(inplace=True)", "nn.SiLU(inplace=True)",
    "nn.LeakyReLU(0.2)", "nn.LeakyReLU(0.2, inplace=True)", "nn.ELU(inplace=True)", "nn.ReLU6()",
    "nn.ReLU6(inplace=True)", "nn.Threshold(0.1, 0.2)", "nn.Sigmoid()", "nn.Tanh()", "nn.GELU('tanh')",
)  # fmt: skip
# The backward of these activations only reads which elements were in bounds, so that a mask may replace the
# saved tensor.
MASKABLE_ACTIVATIONS = (
    "nn.ReLU()", "nn.LeakyReLU(0.2)", "nn.ReLU6()", "nn.Hardtanh()", "nn.Hardtanh(-0.7, 0.7)",
    "nn.Hardtanh(-0.1, 0.1)", "nn.Hardtanh(0.0, 6.0)", "nn.Hardtanh(0.1, 0.1001)", "nn.Hardtanh(0.0, 1e-8)",
    "nn.Hardtanh(-1e-3, 1e-3)", "nn.Hardtanh(-0.7, 0.7, inplace=True)", "nn.ReLU(inplace=True)",
    "nn.LeakyReLU(0.01, inplace=True)", "nn.Threshold(0.1, 0.0)", "nn.Hardtanh(0.3, 1.1)",
)  # fmt: skip
SUMS = ("t = t + v[{j}]", "t = v[{j}] + t", "t += v[{j}]", "t = torch.add(t, v[{j}])", "t = t.add_(v[{j}])",
        "z = v[{j}]; z += t; t = z")  # fmt: skip

_CONV_BLOCK = (
    "t = <<nn.Conv2d(8, 8, 1, bias=False)>>(v[{i}]); t = {norm_t}; t = <<{activation}>>(t); v.append(t)"
)
_RESIDUAL_BLOCK = (
    "t = <<nn.Conv2d(8, 8, 1)>>(v[{i}]); t = {norm_t}; {sum}; t = <<{activation}>>(t); v.append(t)"
)
PLAIN = Kind(
    lines=(
        *[_CONV_BLOCK] * 6,
        *[_RESIDUAL_BLOCK] * 6,
        "t = <<nn.Conv2d(8, 8, 1)>>(v[{i}]); v.append(t); t = {norm_t}; {sum}; v.append(t)",
        "v.append(<<nn.Linear(12, 6)>>(<<{activation}>>(<<nn.Linear(6, 12)>>(v[{i}]))))",
        "v.append(<<nn.Linear(6, 6)>>(<<{activation}>>(v[{i}])))",
        "v.append(v[{i}] + v[{j}])", "v.append(v[{i}] * v[{j}])", "v.append(v[{i}].view(v[{i}].shape))",
        "t = v[{i}]; t += v[{j}]; v.append(t)", "v.append(torch.cat([v[{i}], v[{j}]], 1)[:, 4:12])",
        "v[{i}][:, :2].mul_(1.5)", "v.append(<<nn.MaxPool2d(3, 1, 1)>>(v[{i}]))", "v[{i}].relu_()",
        "v.append(<<nn.Conv2d(8, 8, 3, padding=1)>>(v[{i}]))",
        "v.append(torch.sigmoid(v[{i}]))", "v[{i}] = <<nn.Conv2d(8, 8, 1)>>(v[{j}])",
        "v.append(F.dropout(v[{i}], 0.1))", "v.append(<<nn.Dropout(0.3)>>(v[{i}]))",
        "v.append(<<nn.Linear(6, 12)>>(v[{i}])[..., :6])", "v.append(v[{i}] - 0.5)",
        "v.append(F.silu(<<nn.Linear(6, 12)>>(v[{i}]).chunk(2, -1)[0]) * v[{j}])",
        "q = v[{i}].flatten(2).mT; k = v[{j}].flatten(2); "
        "v.append(((q @ k).softmax(-1) @ q).mT.reshape(8, 8, 6, 6))",
        "v.append(F.scaled_dot_product_attention(v[{i}], v[{j}], <<nn.Linear(6, 6)>>(v[{j}])))",
        "with torch.no_grad(): v[{i}].mul_(1.5)",
    ),
)  # fmt: skip

# Statements that write to the tensor {}. The version counter counts the writes of the first table only.
_COUNTED_WRITES = (
    "with torch.no_grad(): {}.mul_(1.5)", "{}.detach().add_(0.1)", "with torch.no_grad(): {}[:2] = 0.5",
    "with torch.no_grad(): torch._foreach_add_([{}], 0.1)", "nn.init.normal_({})",
    "with torch.no_grad(): {}.lerp_(torch.ones_like({}), 0.1)", "with torch.no_grad(): {}.copy_({} * 0.9)",
    "with torch.no_grad(): torch.mul({}, 0.9, out={})",
)  # fmt: skip
_UNCOUNTED_WRITES = (
    "{}.data.mul_(1.5)", "{}.data = {}.data * 0.5", "torch._foreach_mul_([{}.data], 1.5)",
    "torch.mul({}.data, 1.5, out={}.data)", "torch.ops.aten.mul_.Scalar({}.data, 1.5)",
    "{}.detach().view(torch.uint8).numpy()[...] = 0", "torch.from_dlpack({}.detach()).mul_(1.5)",
    "{}.untyped_storage().fill_(0)", "{}.data.copy_({}.data.flip(0))", "{}.data[:2] = 0.5",
)  # fmt: skip
_UNCOUNTED_PARAMETER_WRITES = (
    *_UNCOUNTED_WRITES, "nn.utils.vector_to_parameters(torch.ones({}.numel(), dtype={}.dtype), [{}])",
)  # fmt: skip


def _fill_target(statements: tuple[str, ...], target: str, ending: str = "") -> tuple[str, ...]:
    """Returns the statements with {} replaced by `target`, and with an ending."""
    return tuple(line.replace("{}", target) + ending for line in statements)


# A backward raises if it reads a tensor after a counted write. Therefore counted writes are to `{bias}`.
SMALL_WRITES = (
    *_fill_target(_COUNTED_WRITES, "{bias}"),
    *_fill_target(_UNCOUNTED_PARAMETER_WRITES, "{small}"),
)
# These lines read small operands. The engine has to copy those that autograd does not save.
_SMALL_OPERAND_LINES = (
    "v.append(<<{activation}>>(v[{i}] - <<shift(8, 1, 1)>>))",
    "v.append(<<{activation}>>(v[{i}] + <<shift_buffer(8, 1, 1)>>))",
    "v.append(<<{activation}>>(<<shift(6)>> - v[{i}]))",
    "v.append(<<{activation}>>(v[{i}] * <<scale(8, 1, 1)>>))",
    "v.append(<<{activation}>>(v[{i}] * <<frozen_scale(8, 1, 1)>>))",
    "v.append(torch.addcmul(<<frozen_shift(6)>>, v[{i}], <<scale(6)>>).sigmoid())",
    "v.append(F.gelu(torch.cat([v[{i}], <<shift(8, 1, 1)>>.expand(8, 8, 6, 6)], 1)[:, 4:12]))",
    "v.append(F.gelu(torch.stack([v[{i}], <<shift(6)>>.expand(8, 8, 6, 6)]).mean(0)))",
    "v.append(v[{j}] + <<frozen_scale(8, 1, 1)>> * {norm_v})",
    "v.append(F.gelu(F.linear(v[{i}], <<matrix(6, 6)>>, <<frozen_shift(6)>>)))",
    "v.append(F.gelu(F.linear(v[{i}], <<matrix(6, 6)>>, <<shift_buffer(6)>>)))",
    "v.append(F.gelu(F.conv2d(v[{i}], <<matrix(8, 8, 1, 1)>>, <<frozen_shift(8)>>)))",
    "v.append(F.gelu(F.batch_norm(v[{i}], None, None, <<scale(8)>>, <<frozen_shift(8)>>, True)))",
    "v.append(F.gelu(F.batch_norm(v[{i}], <<shift_buffer(8)>>, <<shift_buffer(8)>>.exp(), "
    "<<scale(8)>>, <<shift_buffer(8)>>)))",
    "v.append(F.silu(F.group_norm(v[{i}].contiguous(), 2, <<scale(8)>>, <<frozen_shift(8)>>)))",
    "v.append(F.gelu(F.group_norm(v[{i}].contiguous(), 2, <<scale(8)>>, <<shift_buffer(8)>>)))",
    "v.append(F.gelu(F.layer_norm(v[{i}], (6,), <<scale(6)>>, <<shift_buffer(6)>>)))",
    "v.append(F.gelu(F.instance_norm(v[{i}], weight=<<scale(8)>>, bias=<<shift_buffer(8)>>)))",
)
WRITES = Kind(
    lines=(
        *SMALL_WRITES,
        *_fill_target(_COUNTED_WRITES, "v[{i}]"),
        *_fill_target(_UNCOUNTED_WRITES, "v[{i}]"),
        *_fill_target(_UNCOUNTED_WRITES, "{large}", ONE_FORWARD_ONLY),
        "with torch.no_grad(): {large}.mul_(0.9)" + MAY_BE_REFUSED,
        "v[{i}].data.clamp_(-1, 1)", "F.relu(v[{i}].data, inplace=True)", "v[{i}].data[:, :2] = 0",
        "d = v[{i}].data; v[{i}] = F.gelu(v[{i}]); d.zero_()", "x.detach().mul_(0.9)" + MAY_BE_REFUSED,
        "aliases.append(v[{i}].data)", "aliases.append(v[{i}].detach().view(-1))",
        "aliases.append(v[{i}].detach()[:, 2:4])", "if aliases: aliases[-1].mul_(0.9)",
        "if aliases: aliases[0].zero_()",
        "t = torch.relu(v[{i}]); v.append(F.max_pool2d(t, 3, 1, 1)); t.data.clamp_(max=0.0)",
        *_SMALL_OPERAND_LINES * 2,
    ),
    pre_backward_lines=(
        *SMALL_WRITES,
        "with torch.no_grad(): {large}.mul_(0.9)" + MAY_BE_REFUSED,
        "with torch.no_grad(): {large}.add_(torch.ones_like({large}), alpha=-0.01)" + MAY_BE_REFUSED,
        "with torch.no_grad(): outputs[-1].clamp_(-1, 1)" + MAY_BE_REFUSED,
        "outputs[0].detach().mul_(0.5)" + MAY_BE_REFUSED,
    ),
)  # fmt: skip

_GLOBAL_FLAGS = (
    "torch.backends.mkldnn.flags(enabled=False)", "matmul_precision('medium')", "deterministic_algorithms()",
)  # fmt: skip
_AUTOCAST = "torch.autocast('cpu', torch.bfloat16)"
_NO_AUTOCAST = "torch.autocast('cpu', enabled=False)"
_AUTOCAST_WITHOUT_CACHE = "torch.autocast('cpu', torch.bfloat16, cache_enabled=False)"
_FLAGS = (*_GLOBAL_FLAGS, _AUTOCAST, _NO_AUTOCAST, _AUTOCAST_WITHOUT_CACHE)
FLAGS = Kind(
    lines=(
        "v.append(<<nn.Linear(12, 6)>>(F.gelu(<<nn.Linear(6, 12)>>(v[{i}]))))",
        "v.append(<<nn.Conv2d(8, 8, 3, padding=1)>>(F.gelu(<<nn.Conv2d(8, 8, 3, padding=1)>>(v[{i}]))))",
        "v.append(F.gelu({norm_v}))",
        "v.append((v[{i}].flatten(2) @ <<matrix(36, 36)>>).softmax(-1).view(8, 8, 6, 6))",
    ),
    line_contexts=_FLAGS,
    forward_contexts=(*_GLOBAL_FLAGS, _AUTOCAST, _AUTOCAST_WITHOUT_CACHE),
    backward_contexts=_FLAGS,
    step_contexts=(*_GLOBAL_FLAGS, _AUTOCAST),
)  # fmt: skip

STATISTICS = Kind(
    lines=(
        "t = v[{i}].flatten(1, 2).mT; v.append(<<nn.BatchNorm1d(6, affine=False)>>(t)"
        ".mT.reshape(8, 8, 6, 6))",
        "v.append(<<nn.Linear(6, 6)>>(<<nn.BatchNorm1d(6, affine=False)>>("
        "<<nn.Linear(6, 6)>>(v[{i}]).flatten(1, 2).transpose(1, 2)).transpose(1, 2)).view(8, 8, 6, 6))",
        "v.append(<<nn.Linear(6, 6)>>(<<nn.BatchNorm1d(6)>>("
        "<<nn.Linear(6, 6)>>(v[{i}]).flatten(1, 2).mT).mT).view(8, 8, 6, 6))",
        "v.append(F.gelu(<<nn.BatchNorm2d(8, momentum=None)>>(v[{i}])))",
        "v.append(F.gelu(<<nn.BatchNorm2d(8, affine=False)>>(v[{i}])))",
        "v.append(F.gelu(<<nn.BatchNorm2d(8, track_running_stats=False)>>(v[{i}])))",
        "v.append(F.leaky_relu_(<<nn.InstanceNorm2d(8, affine=True)>>(v[{i}]), 0.1))",
        "v.append(F.relu_(<<nn.InstanceNorm2d(8, track_running_stats=True)>>(v[{i}])))",
        "v.append(<<nn.Conv2d(8, 8, 1)>>(<<nn.BatchNorm2d(8)>>(v[{i}])))",
        "v.append(<<nn.Conv2d(8, 8, 1)>>(F.silu(<<nn.BatchNorm2d(8).requires_grad_(False)>>(v[{i}]))))",
        "v.append(F.gelu(<<nn.BatchNorm2d(8).eval()>>(v[{i}])))",
        "{batch_norm}.eval()", "{batch_norm}.train()", "{batch_norm}.train(not {batch_norm}.training)",
        "{batch_norm}.reset_running_stats()", "{batch_norm}.momentum = 0.3",
        "with torch.no_grad(): v.append(<<nn.BatchNorm2d(8)>>(v[{j}]))",
        "v.append(<<nn.BatchNorm2d(8)>>(v[{i}])); v.append(F.gelu(<<nn.BatchNorm2d(8)>>(v[{i}])))",
    ),
    pre_backward_lines=(
        "with torch.no_grad(): model(x * 3)",
        "model.train()\nwith torch.no_grad(): model(x * 3)\nmodel.eval()",
        "{small}.data.mul_(1.5)",
    ),
    forward_calls=(
        "model.eval(); outputs = model(x); model.train(); outputs += model(x * 2 + 1)",
        "model.train(); outputs = model(x); model.eval(); outputs += model(x * 2 + 1)",
        "outputs = model(x); outputs += model(x * 2 + 1)",
        "with torch.no_grad(): model(x * 3)\noutputs = model(x)",
        "model.eval(); outputs = model(x); model.train()\nwith torch.no_grad(): model(x * 3)\nmodel.eval()",
    ),
)  # fmt: skip

LOSSES = Kind(
    lines=("extras.append(v[{i}])", "extras.append(v[{i}] * v[{j}])",
           "extras.append(<<nn.Linear(6, 6)>>(v[{i}]))",
           "v.append(F.gelu(v[{i}] - <<shift(8, 1, 1)>>)); extras.append(v[{i}] * <<scale(8, 1, 1)>>)"),
    pre_backward_lines=(
        "with torch.no_grad(): outputs[-1].clamp_(-1, 1)" + MAY_BE_REFUSED,
        "outputs[-1].detach().div_(2)" + MAY_BE_REFUSED,
        "if len(losses) > 1: del outputs[-1], losses[-1]", "{small}.data.mul_(1.5)",
    ),
    backward_calls=(
        "losses[0].backward(retain_graph=True); sum(losses).backward()",
        "losses[0].backward()",
        "losses[-1].backward()",
        "for loss in losses: loss.backward(retain_graph=True)\nsum(losses).backward()",
        "losses[0].backward(inputs=first_half, retain_graph=True); losses[-1].backward(inputs=last_half)",
        "losses[-1].backward(inputs=first_half, retain_graph=True); take_sgd_step(first_half); "
        "losses[-1].backward(inputs=last_half)" + MAY_BE_REFUSED,
        "losses[0].backward(inputs=last_half, retain_graph=True); take_sgd_step(last_half); "
        "losses[0].backward(inputs=first_half)" + MAY_BE_REFUSED,
        "losses[0].backward(retain_graph=True); take_sgd_step([p for p in first_half if p.dim() < 2]); "
        "losses[-1].backward()",
        "(-losses[0]).backward(inputs=first_half[:4], retain_graph=True); take_sgd_step(first_half[:4]); "
        "losses[0].backward(inputs=last_half)" + MAY_BE_REFUSED,
        # This line notes the sum of each gradient, or True for a parameter without one.
        "for g in torch.autograd.grad(sum(losses), last_half, allow_unused=True): "
        "RUN.note(g is None or g.sum().item())",
        "g, = torch.autograd.grad(losses[0], last_half[-1:], create_graph=True); "
        "(g.square().sum() + sum(losses)).backward()",
    ),
)  # fmt: skip

# These saved-tensor hooks copy, as an offloader does. Under hooks that do not copy, autograd misses writes to
# saved tensors. Then eager (the program without `convert`) has wrong gradients, and is no reference.
_HOOKS = ("copy_on_save()", "tuple_on_save()")
HOOKS = Kind(
    lines=(
        "v.append(v[{i}] * 1.0); v[-1].requires_grad and v[-1].register_hook(lambda g: g * 0.5)",
        "v.append(v[{i}] * 1.0); "
        "v[-1].requires_grad and v[-1].register_hook(lambda g: RUN.note(g.float().sum().item()))",
        "v.append(v[{i}] * 1.0); v[-1].requires_grad and v[-1].retain_grad()",
        "RUN.note(v[{i}].detach().float().numpy().sum().item())",
        "RUN.note(v[{i}].detach().flatten()[:4].tolist())", "RUN.note(v[{i}].float().std().item())",
        "v.append(checkpoint(<<{activation_out_of_place}>>, v[{i}], use_reentrant=False))",
        "v.append(checkpoint(<<nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.GELU())>>, v[{i}], "
        "use_reentrant=False))",
        "v.append(checkpoint(<<nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())>>, v[{i}], "
        "use_reentrant=True))",
        "m = <<nn.LayerNorm(6)>>; v.append(checkpoint(lambda t, m=m: F.gelu(m(t)), v[{i}], "
        "use_reentrant=False))",
    ),
    line_contexts=_HOOKS,
    forward_contexts=_HOOKS,
    step_contexts=_HOOKS,
    set_up=(
        "for m in list_leaf_modules(model): m.register_full_backward_hook(lambda m, given, g: None)",
        "for m in list_leaf_modules(model, 2): m.register_full_backward_pre_hook(lambda m, g: None)",
        "for m in list_leaf_modules(model, 3): m.register_full_backward_pre_hook("
        "lambda m, g: [t * 0.5 for t in g])",
        "for m in list_leaf_modules(model, 3): m.register_full_backward_hook(lambda m, given, g: "
        "[t if t is None else t * 2 for t in given])",
        "for m in list_leaf_modules(model): m.register_forward_hook(lambda m, a, o: "
        "RUN.note(o.detach().float().numpy().sum().item()))",
        "for m in list_leaf_modules(model): m.register_forward_hook(lambda m, a, o: "
        "RUN.note(o.detach().flatten()[:4].tolist()))",
        "for m in list_leaf_modules(model, 2): m.register_forward_hook(lambda m, a, o: o * 0.5)",
        "for m in list_leaf_modules(model, 2): m.register_forward_hook(lambda m, a, o: o.clone())",
        "for m in list_leaf_modules(model, 2): m.register_forward_hook("
        "lambda m, a, o: F.silu(o, inplace=True))",
        "for m in list_leaf_modules(model, 2): m.register_forward_pre_hook(lambda m, a: (a[0] * 1.1,))",
        "for p in model.parameters(): p.requires_grad and p.register_hook(lambda g: g * 0.5)",
        "for m in model.parts: m.register_full_backward_hook(lambda m, given, g: None)",
    ),
)  # fmt: skip

_MODES = (
    "LargeEpsMode()", "NoisyDropoutMode()", "ChangedSumMode()", "RUN.make_noting_mode()",
    "torch.device('cpu')",
)  # fmt: skip
_WITHOUT_SUBCLASSES = "torch._C.DisableTorchFunctionSubclass()"
SUBCLASSES = Kind(
    lines=(
        "v.append(v[{i}].as_subclass({subclass}))", "v.append(v[{i}].as_subclass(torch.Tensor))",
        "v.append(F.gelu(v[{i}] + 0.5))", "v.append(<<nn.Linear(6, 6)>>(F.dropout(v[{i}], 0.3)))",
        "v.append(<<nn.Linear(6, 6)>>(<<nn.LayerNorm(6)>>(v[{i}] * 0.1)))", "v.append(F.gelu(0.5 + v[{i}]))",
        "v.append(<<nn.Linear(6, 6)>>(F.layer_norm(v[{i}] * 0.1, (6,), <<scale(6)>>, "
        "<<frozen_shift(6)>>, eps=1e-5)))",
        "v.append(F.gelu(v[{i}] * <<scale_of({subclass}, 8, 1, 1)>>))",
        "v.append(<<nn.Linear(6, 6)>>(F.silu(v[{i}])))",
    ),
    line_contexts=(*_MODES, _WITHOUT_SUBCLASSES),
    forward_contexts=(*_MODES, _WITHOUT_SUBCLASSES),
    backward_contexts=("torch.device('cpu')", "RUN.make_noting_mode()"),
    step_contexts=_MODES,
    inputs=("x.as_subclass({subclass})",),
)  # fmt: skip

MASKS = Kind(
    lines=(
        "v.append(F.max_pool2d(<<{maskable}>>(<<nn.Conv2d(8, 8, 1)>>(v[{i}])), 3, 1, 1))",
        "v.append(F.max_pool2d(<<{maskable}>>({norm_v}), 3, 1, 1))",
        "v.append(<<freeze(nn.Conv2d(8, 8, 1))>>(<<{maskable}>>(<<nn.Conv2d(8, 8, 1)>>(v[{i}]))))",
        "v.append(<<freeze(nn.Conv2d(8, 8, 1))>>(<<{maskable}>>({norm_v})))",
        "v.append(<<freeze(nn.Linear(6, 6))>>(<<{maskable}>>(<<nn.Linear(6, 6)>>(v[{i}]))))",
        "v.append(<<freeze(nn.Linear(6, 6))>>(<<{maskable}>>(v[{i}] * 1.0)))",
        "v.append(<<{maskable}>>(v[{i}] * 1.0)); v.append(F.max_pool2d(v[-1], 3, 1, 1))",
        "v.append(<<{maskable}>>(<<freeze(nn.Conv2d(8, 8, 1))>>(v[{i}])))",
        "v.append((v[{i}] * 10).round() / 10)",
        "v.append(torch.where(v[{i}] > 2, float('inf'), v[{i}]))",
        "v.append(F.max_pool2d(<<{maskable}>>(torch.where(v[{i}] > 2, float('nan'), v[{i}])), 3, 1, 1))",
        "v.append(F.max_pool2d(<<{maskable}>>(torch.where(v[{i}] > 2, -float('inf'), v[{i}])), 3, 1, 1))",
        "t = <<{maskable}>>(v[{i}] * 1.0); v.append(F.max_pool2d(t, 3, 1, 1)); t.data.clamp_(max=0.0)",
        "v.append(F.avg_pool2d(<<{maskable}>>(<<nn.Conv2d(8, 8, 1)>>(v[{i}])), 3, 1, 1))",
    ),
    inputs=("put_nan_and_inf(x)", "(x * 10).round() / 10"),
)  # fmt: skip

_FROZEN_LAYER_LINES = (
    "v.append(<<nn.Linear(12, 6)>>(<<{activation}>>(<<freeze(nn.Linear(6, 12))>>(v[{i}]))))",
    "v.append(<<nn.Linear(12, 6)>>(<<{activation}>>(<<freeze(nn.Linear(6, 12), 'bias')>>({norm_v}))))",
    "v.append(<<freeze(nn.Linear(12, 6))>>(<<{activation}>>(<<freeze(nn.Linear(6, 12))>>({norm_v}))))",
    "v.append(<<freeze(nn.Linear(6, 6))>>(v[{i}]) + "
    "<<nn.Linear(2, 6, bias=False)>>(<<nn.Linear(6, 2, bias=False)>>(v[{i}])) * 0.5)",
    "v.append(F.gelu(<<freeze(nn.Conv2d(8, 8, 1), 'bias')>>(v[{i}])))",
    "v.append(F.gelu(<<freeze(nn.Conv2d(8, 8, 1))>>({norm_v})))",
    "v.append(<<{activation}>>(<<freeze(nn.BatchNorm2d(8), 'bias')>>(v[{i}])))",
    "v.append(<<{activation}>>(<<freeze(nn.GroupNorm(2, 8), 'bias')>>(v[{i}].contiguous())))",
    "v.append(<<{activation}>>(<<freeze(nn.LayerNorm(6), 'weight')>>(v[{i}])))",
    "with torch.no_grad(): v.append(<<nn.Conv2d(8, 8, 1)>>(v[{i}]))",
)  # fmt: skip
FROZEN = Kind(
    lines=(
        "t = v[{i}].detach().flatten(2); v.append(<<frozen_encoder(36)>>.eval()(t, "
        "src_key_padding_mask=padding_mask(t)).to(v[{i}].dtype).view(8, 8, 6, 6))",
        "with torch.no_grad(): t = v[{i}].flatten(2); v.append(<<frozen_encoder(36)>>.eval()(t, "
        "src_key_padding_mask=padding_mask(t)).to(v[{i}].dtype).view(8, 8, 6, 6))",
        "t = v[{i}].flatten(2); v.append(<<frozen_encoder(36)>>.eval()(t, "
        "src_key_padding_mask=padding_mask(t)).to(v[{i}].dtype).view(8, 8, 6, 6))",
        *_FROZEN_LAYER_LINES * 2,
    ),
    line_contexts=("torch.no_grad()",),
    forward_contexts=("torch.autocast('cpu', torch.bfloat16)",),
    set_up=("train_norms_only(model)", "train_biases_only(model)", "train_second_half(model)",
            "for p in model.parameters(): p.requires_grad_(p.dim() > 1)"),
    options=("products", "least", "recompute_weight_casts"),
)  # fmt: skip

LAYOUTS = Kind(
    lines=(
        "v.append(v[{i}].to(memory_format=torch.channels_last))", "v.append(v[{i}].contiguous())",
        "v.append(v[{i}].to(torch.bfloat16, memory_format=torch.channels_last).to(v[{i}].dtype))",
        "t = {norm_v}.transpose(1, 2).to(torch.bfloat16, memory_format=torch.contiguous_format).view(8, -1); "
        "v.append(F.gelu(t + 1.0).view(8, 6, 8, 6).transpose(1, 2).to(v[{i}].dtype))",
        "t = v[{i}].mT.to(torch.float64, memory_format=torch.contiguous_format).view(-1); "
        "v.append(t.sigmoid().view(8, 8, 6, 6).to(v[{i}].dtype))",
        "t = v[{i}].transpose(1, 3).clone(memory_format=torch.contiguous_format).view(-1); "
        "v.append(F.gelu(t).view(8, 6, 6, 8).transpose(1, 3))",
        "t = v[{i}] * 1.0; F.silu(t.flatten(1), inplace=True); v.append(t)",
        "t = <<nn.Linear(6, 6)>>(v[{i}]); F.silu(t.flatten(1), inplace=True); v.append(t)",
        "t = {norm_v}; F.silu(t.flatten(1), inplace=True); v.append(t)",
        "v.append(F.silu(<<nn.Linear(6, 6)>>(v[{i}]), inplace=True))",
        "v[{i}].flatten(2).relu_()", "v[{i}].transpose(1, 2).mul_(0.9)", "v[{i}][:, :2].relu_()",
        "v[{i}][..., 0] = 0", "v[{i}][:, 2:5] = v[{j}][:, 1:4]",
        "v[{i}].permute(0, 2, 3, 1)[..., 0].sigmoid_()",
        "t = {norm_v}; F.leaky_relu(t, 0.1, inplace=True); v.append(t)",
        "t = {norm_v}; t.unsqueeze(0).relu_(); v.append(t)",
        "t = <<nn.GroupNorm(2, 8)>>(v[{i}].contiguous().transpose(2, 3)); "
        "t.relu_(); v.append(t.transpose(2, 3))",
        "v.append(v[{i}].mean(1, keepdim=True).expand(8, 8, 6, 6))", "v.append(v[{i}].flip(3))",
        "v.append(v[{i}].mean(1, keepdim=True).expand(8, 8, 6, 6) * v[{j}])", "v.append(v[{i}].roll(1, 2))",
        "a, b = v[{i}].chunk(2, 1); v.append(torch.cat([b, F.gelu(a)], 1))", "v.append(v[{i}].mT.relu().mT)",
        "a, b = v[{i}].split(4, 1); v.append(torch.cat([b.sigmoid() * a, a], 1))",
        "v.append(<<nn.LayerNorm(8)>>(v[{i}].permute(0, 2, 3, 1)).permute(0, 3, 1, 2))",
        "v.append(<<nn.Linear(8, 8)>>(v[{i}].permute(0, 2, 3, 1)).permute(0, 3, 1, 2))",
        "v.append(torch.as_strided(v[{i}] * 1.0, (8, 8, 6, 6), (288, 1, 48, 8)).sigmoid())",
        "v.append(v[{i}].permute(0, 3, 1, 2).reshape(8, 8, 6, 6).tanh())",
        "v.append((v[{i}] * 1.0).transpose_(1, 2).mul_(2).transpose_(1, 2).sigmoid())",
        "v.append(v[{i}][..., ::2].repeat_interleave(2, 3))",
        "v.append(v[{i}].unflatten(1, (2, 4)).mul(2).flatten(1, 2))",
    ),
    set_up=("model.to(memory_format=torch.channels_last)",),
    inputs=("x.to(memory_format=torch.channels_last)", "x.transpose(2, 3)", "x[:1].expand(8, 8, 6, 6)",
            "torch.cat([x, x], 3)[..., ::2]", "x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)"),
)  # fmt: skip

# A module calls itself. Its outermost forward has depth 0; a nested call adds 1 or 2, and 2 ends the nesting.
_NESTED_CALL_LINES = (
    "v.append(v[{i}])\nif RUN.depth < 1: RUN.depth += 1; v[-1] = first_output(self(v[{i}])); RUN.depth -= 1",
    "if RUN.depth < 2: RUN.depth += 2; v[{i}] = first_output(self(v[{j}])); RUN.depth -= 2",
)
EXCEPTIONS = Kind(
    lines=(
        *("RUN.fail_once({number}, ValueError)", "RUN.fail_once({number}, StopProgram)") * 3,
        *_NESTED_CALL_LINES * 2,
        "with copy_on_save(): v.append(F.gelu(v[{i}])); RUN.fail_once({number}, ValueError)",
        "with torch.no_grad(): v.append(F.gelu(v[{i}])); RUN.fail_once({number}, StopProgram)",
    ),
    forward_calls=(
        *(
            f"RUN.interrupt_and_rewind(model, x, SCOPE, FailingHooks({num_saved}))\noutputs = model(x)"
            for num_saved in (0, 1, 2, 4, 8)
        ),
        "RUN.interrupt_and_rewind(model, x, SCOPE, torch.autocast('cpu', torch.bfloat16))\n"
        "outputs = model(x)",
    ),
)  # fmt: skip

STATE = Kind(
    lines=(
        "v.append(v[{i}] * RUN.next_number())", "RUN.note(len(v))",
        "v.append(F.gelu(v[{i}] + RUN.next_number()))",
        "v.append(v[{i}] * torch.rand(8, 1, 1, generator=RUN.generator).to(v[{i}].dtype))",
        "v.append(v[{i}] * torch.bernoulli(torch.full((8, 8, 1, 1), 0.9), "
        "generator=RUN.generator).to(v[{i}].dtype))",
        "v.append(v[{i}] * torch.rand(8, 1, 1).to(v[{i}].dtype))",
        "self.calls = getattr(self, 'calls', 0) + 1; v.append(v[{i}] / self.calls)",
    ),
    forward_calls=("outputs = model((x * 1.0).relu_())",
                   "outputs = model(x[:2].repeat(4, 1, 1, 1)); outputs += model(x)"),
    options=("share",),
)  # fmt: skip

KINDS = {
    "plain": PLAIN, "writes": WRITES, "flags": FLAGS, "statistics": STATISTICS, "losses": LOSSES,
    "hooks": HOOKS, "subclasses": SUBCLASSES, "masks": MASKS, "frozen": FROZEN, "layouts": LAYOUTS,
    "exceptions": EXCEPTIONS, "state": STATE,
}  # fmt: skip
