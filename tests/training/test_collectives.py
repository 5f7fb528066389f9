"""Collectives of the ranks of a run: numbers, objects, errors, weights and cores."""

import os
import signal
import threading
import time

import pytest
import torch
from on_ranks import on_ranks

from fastvit.training import distributed
from fastvit.training.config import TrainingError


@on_ranks(2)
def test_numbers_and_objects_of_every_rank_are_gathered(rank, world):
    assert (distributed.is_main_process(), distributed.get_world_size()) == (rank == 0, 2)
    value = torch.tensor([1.0 + rank])
    assert distributed.average_over_ranks(value).item() == 1.5 and value.item() == 1.0 + rank
    assert distributed.all_gather_numbers(torch.tensor([value[0], 2 * rank])) == [[1.0, 2.0], [0, 2]]
    assert distributed.all_gather_objects(rank) == [0, 1]
    assert distributed.run_on_main(lambda: rank) == 0 and distributed.run_on_all_ranks(lambda: rank) == rank


@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all(rank, world):
    def fail():
        raise OSError(f"disk of rank {rank} is full")

    with pytest.raises(TrainingError, match="^disk of rank 0 is full$"):
        distributed.run_on_main(fail)
    with pytest.raises(TrainingError, match="^rank 1: disk of rank 1 is full$"):
        distributed.run_on_all_ranks(fail if rank else lambda: None)
    distributed.raise_on_all_ranks(None)


@on_ranks(2)
def test_running_statistics_are_averaged_and_weights_are_those_of_rank_0(rank, world):
    norm = torch.nn.BatchNorm1d(3)
    norm.running_mean.fill_(rank)
    distributed.average_running_statistics(norm)
    assert norm.running_mean.tolist() == [0.5] * 3 and norm.running_var.tolist() == [1.0] * 3
    linear = torch.nn.Linear(2, 2).requires_grad_(bool(rank))
    linear.weight.data.fill_(rank)
    distributed.broadcast_weights(linear)
    assert linear.weight.tolist() == [[0.0] * 2] * 2


@on_ranks(2, breaks=True, group_timeout=3)
def test_the_wait_for_a_loss_obeys_an_interrupt(rank, world):
    distributed.all_gather_numbers(torch.ones(1))
    if rank == 1:
        time.sleep(1.5)  # The rank is there, but has no loss.
        return None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells let background jobs ignore it.
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        distributed.all_gather_numbers(torch.ones(1))
    return time.monotonic() - begin


@test_the_wait_for_a_loss_obeys_an_interrupt.check
def _(results):
    assert results[0] < 1.2


@on_ranks(3)
def test_ranks_divide_the_cores_that_they_share_and_no_others(rank, world):
    every = set(range(9))
    for cores_of_ranks, expected in (
        ([every, every, every], [3, 3, 3]),  # torchrun
        ([{0, 1}, {2, 3}, {4, 5, 6}], [2, 2, 3]),  # srun: each task has its own
        ([{0}, {0}, every], [1, 1, 9]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _, cores=cores_of_ranks[rank]: cores)
            assert distributed.cores_per_rank() == expected[rank]
