"""Replaces apex's compiled module `syncbn`, the local steps of a synchronised BatchNorm, by fastvit's ops.

tools/run_apex_tests.py copies this file as `syncbn.py` beside apex's scripts. test_groups.py is older than
25.05's other scripts: it passes and expects means where they use sums.
"""

import sys

import torch

from fastvit import ops

EXPECTS_MEANS = sys.argv[0].endswith("test_groups.py")


def _pack_saved(mean, invstd, count):
    """Returns `mean[C], invstd[C], count`, `(2C + 2,)`, for fastvit's ops; the count has two numbers."""
    high, low = divmod(int(count), 2**24)
    return torch.cat([mean, invstd, mean.new_tensor([high, low])])


def _count_values_per_channel(x):
    return x.numel() // x.shape[1]


def welford_mean_var(x):
    channels = x.shape[1]
    moments = ops.bn_stats(x)
    return moments[:channels], moments[channels : 2 * channels] / _count_values_per_channel(x)


def batchnorm_forward(x, mean, invstd, weight, bias):
    return ops.bn_apply(x, _pack_saved(mean, invstd, _count_values_per_channel(x)), weight, bias)


def reduce_bn(dy, x, mean, invstd, weight):
    sums = ops.bn_reduce(x, dy, _pack_saved(mean, invstd, _count_values_per_channel(x)), weight)
    dbias, dweight = sums[0].chunk(2)  # Row 0 has the sums of this rank.
    divisor = _count_values_per_channel(x) if EXPECTS_MEANS else 1
    return dbias / divisor, dweight / invstd / divisor, dweight, dbias


def batchnorm_backward(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count=None):
    sums = torch.cat([sum_dy, sum_dy_xmu * invstd]) * (_count_values_per_channel(x) if EXPECTS_MEANS else 1)
    count = _count_values_per_channel(x) if EXPECTS_MEANS else count.sum()
    return ops.bn_backward(x, dy, _pack_saved(mean, invstd, count), weight, global_sums=sums)[0]
