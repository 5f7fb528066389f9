"""The tests of this folder run on the model of CUDA alone."""


def pytest_ignore_collect(config):
    return config.getoption("device") != "cuda_model" or None
