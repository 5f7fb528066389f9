"""fastvit.convert on random forwards: the same step, or an error where the original has one too."""

import copy
import random

import pytest
import torch
from convert_models import spread
from torch import nn

import fastvit

ACTIVATIONS = [
    nn.ReLU, nn.GELU, nn.Hardswish, lambda: nn.ReLU(inplace=True), lambda: nn.SiLU(inplace=True),
    lambda: nn.LeakyReLU(0.2), lambda: nn.LeakyReLU(0.2, inplace=True), lambda: nn.ELU(inplace=True),
]  # fmt: skip
ADDITIONS = [
    "t = t + {}",
    "t = {} + t",
    "t += {}",
    "t = torch.add(t, {})",
    "t = t.add_({})",
    "z = {}; z += t; t = z",
]
OTHERS = [
    "v.append(v[{i}] + v[{j}])", "v.append(v[{i}] * v[{j}])", "v.append(v[{i}].view(v[{i}].shape))",
    "t = v[{i}]; t += v[{j}]; v.append(t)", "v.append(torch.cat([v[{i}], v[{j}]], 1)[:, 2:6])",
    "v[{i}][:, :2].mul_(1.5)", "v.append(self.first(v[{i}]))",
]  # fmt: skip


def program(seed: int) -> tuple[nn.Module, str]:
    """A module with a forward of up to ten lines' worth of blocks, residuals, views and writes."""
    choose, modules = random.Random(seed), {"first": nn.Conv2d(4, 4, 1), "shared": nn.SiLU()}
    lines, values = ["v = [self.first(x)]"], 1

    def add(module: nn.Module) -> str:
        modules[f"m{len(modules)}"] = module
        return f"self.m{len(modules) - 1}"

    for _ in range(choose.randint(3, 9)):
        recent, any_ = max(0, values - 1 - int(choose.expovariate(1))), choose.randrange(values)
        if choose.random() < 0.4:
            lines.append(choose.choice(OTHERS).format(i=recent, j=any_))
            values += "append" in lines[-1]
            continue
        convolution, norm = add(nn.Conv2d(4, 4, 1, bias=False)), add(nn.BatchNorm2d(4))
        activation = "self.shared" if choose.random() < 0.3 else add(choose.choice(ACTIVATIONS)())
        lines.append(f"t = {convolution}(v[{recent}])")
        if choose.random() < 0.2:
            lines.append("v.append(t)")
            values += 1
        lines.append(f"t = {norm}(t)")
        if choose.random() < 0.6:
            lines.append(choose.choice(ADDITIONS).format(f"v[{choose.choice([recent, recent, any_])}]"))
        if choose.random() < 0.2:
            lines.append(f"t = {add(nn.Identity())}(t)")
        if choose.random() < 0.1:
            lines.append(f"v[{any_}].mul_(1.5)")
        lines += [f"t = {activation}(t)"] * (choose.random() < 0.9) + ["v.append(t)"]
        values += 1
    lines.append(f"return self.first(v[-1]) + self.first(v[{choose.randrange(values)}])")
    source = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines)
    namespace = {"torch": torch}
    exec(source, namespace)
    model = type("Program", (nn.Module,), {"forward": namespace["forward"]})()
    for name, module in modules.items():
        model.add_module(name, module)
    return spread(model).double(), source


def step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """All that a step leaves; None where autograd refuses, as it does when what it kept was overwritten."""
    try:
        out = model(x * 1)
        torch.manual_seed(0)
        (out * torch.randn_like(out)).sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return None
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {name: b.double() for name, b in model.named_buffers()} | {"output": out.detach()}


@pytest.mark.parametrize("programs", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory", ["auto", "recompute", "keep"])
def test_random_programs(memory, programs):
    compared = added = overwritten = 0
    for seed in range(programs):
        model, source = program(seed)
        x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
        for training in (True, False):
            original, converted = (copy.deepcopy(model) for _ in range(2))
            _, report = fastvit.convert(converted, memory)
            want, got = (step(m.train(training), x) for m in (original, converted))
            if want is None:
                continue
            assert got is not None and got.keys() == want.keys(), f"{seed}\n{source}\n{report}"
            largest = max(tensor.abs().max() for tensor in want.values())
            for name in want:
                scale = max(want[name].abs().max(), 1e-4 * largest)
                assert (got[name] - want[name]).abs().max() <= 1e-7 * scale, (
                    f"{seed} {name}\n{source}\n{report}"
                )
            compared += 1
            added += sum("residual go" in layer.reason for layer in report)
            overwritten += any(layer.mode == "inplace" for layer in report)
    assert (
        compared > programs / 2 and added > programs / 4 and (overwritten > programs / 10 or memory != "auto")
    )
