"""CUDA graphs: replays of layers, of converted models and of compiled models give the results of eager."""

import copy

import pytest
import torch
from ops.tolerances import assert_close_enough
from torch import nn

import fastvit
from fastvit import InPlaceABN, SyncBatchNorm
from gpu.stacks import DEVICE, SHAPES, copy_results, make_images, make_stack, run_step

pytestmark = pytest.mark.gpu


def warm_up(work) -> None:
    """Runs some steps beside the main stream, as torch asks before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("name", SHAPES)
def test_graph_replays_equal_eager_steps(name):
    model, dy = make_stack(name), make_images(name, 9)
    eager = copy.deepcopy(model)
    leaf = make_images(name).requires_grad_()
    warm_up(lambda: run_step(model, leaf, dy))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_step(model, leaf, dy)
    model.load_state_dict(eager.state_dict())
    for seed in (3, 4, 5):
        x = make_images(name, seed)
        with torch.no_grad():
            leaf.copy_(x)
        graph.replay()
        actual = copy_results(captured, model)
        expected = copy_results(run_step(eager, x.requires_grad_(), dy), eager)
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(a, b), f"replay {seed}, result {i}: {(a - b).abs().max()}"
    assert model.second.num_batches_tracked == 3


def make_eager_and_converted(matmuls):
    torch.manual_seed(0)
    parts = (nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    eager = nn.Sequential(*parts, nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 8)).to(DEVICE)
    return eager, fastvit.convert(copy.deepcopy(eager), matmuls=matmuls)


each_level = pytest.mark.parametrize("matmuls", [False, True], ids=["cheap", "matmuls"])


@each_level
def test_graphed_callables_of_a_converted_model_give_the_bits_of_eager(matmuls):
    """Replays of forward and backward, which recomputes."""
    eager, model = make_eager_and_converted(matmuls)
    inputs = [torch.randn(32, 50, 64, device=DEVICE, requires_grad=True) for _ in range(3)]
    example = inputs[0].detach().requires_grad_()
    # make_graphed_callables refuses a module that has hooks itself.
    graphed = torch.cuda.make_graphed_callables(nn.Sequential(model), (example,))
    for x in inputs:
        actual, expected = (
            torch.autograd.grad(run(x).square().sum(), [x, *run.parameters()]) for run in (graphed, eager)
        )
        assert all(map(torch.equal, actual, expected))


@each_level
def test_a_captured_step_of_a_converted_model_gives_the_bits_of_eager(matmuls):
    eager, model = make_eager_and_converted(matmuls)
    static = torch.randn(32, 50, 64, device=DEVICE)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (eager, model)]

    def train(model, optimizer, x):
        optimizer.zero_grad()  # to None, so that each replay writes the gradients anew
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    warm_up(lambda: train(model, optimizers[1], static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(model, optimizers[1], static)
    model.load_state_dict(eager.state_dict())
    for state in optimizers[1].state.values():  # the tensors are those of the graph
        state["momentum_buffer"].zero_()
    for _ in range(4):
        x = torch.randn(32, 50, 64, device=DEVICE)
        static.copy_(x)
        graph.replay()
        assert torch.equal(captured, train(eager, optimizers[0], x))
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_graphs_that_the_compiler_makes_give_the_results_of_eager():
    """`mode="reduce-overhead"` warms up in the graph's memory pool, and expects all of it back."""
    torch._dynamo.reset()
    model = nn.Sequential(SyncBatchNorm(8, fuse_relu=True), nn.Conv2d(8, 8, 1), InPlaceABN(8)).to(DEVICE)
    eager, dy = copy.deepcopy(model), make_images("planes", 9)
    compiled = torch.compile(model, mode="reduce-overhead")
    for seed in range(4):  # warm-up, capture, replays
        torch.compiler.cudagraph_mark_step_begin()
        for one in (compiled, eager):  # a replay overwrites gradients that lie in the graph's memory
            one.zero_grad(set_to_none=True)
        leaf, eager_leaf = (make_images("planes", seed).requires_grad_() for _ in range(2))
        y, eager_y = compiled(leaf), eager(eager_leaf)
        assert_close_enough(y, eager_y.double(), row="layer")
        y.backward(dy)
        eager_y.backward(dy)
        assert_close_enough(leaf.grad, eager_leaf.grad.double(), row="layer", least_scale=1.0)
