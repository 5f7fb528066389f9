"""The fixtures, the options and the markers of pytest for all tests.

`--device` is the device of the tests of ops and layers. With cuda_model the CUDA sources run on the model of
CUDA in tests/cuda_host: tensors stay on the CPU, and the emulated kernels replace the CPU's.
"""

import contextlib
import enum
import gc
import importlib.util
import os
import socket
import tempfile

# torch reads this variable when it loads OpenMP. Else idle threads spin on cores that other processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# CUDA reads this variable when it starts. Ranks that wait for each other need a queue each; the default is 8.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# cuBLAS reads this variable when it starts. Tests that compare bits need it for deterministic algorithms.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# torch's compiler caches code without its instruction set. With another one, cached code fails to compile.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{capability}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# Examples of a push are always the same. `--hypothesis-profile=nightly` draws others, and remembers failures.
hypothesis.settings.register_profile("push", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=300)
hypothesis.settings.load_profile("push")

DEVICES = ("cpu", "cuda", "cuda_model")
is_cuda_context_lost = False


def pytest_addoption(parser):
    help_text = "the device of the tests of ops and layers; on cuda_model only tests with this marker run"
    parser.addoption("--device", choices=DEVICES, default="cpu", help=help_text)


def pytest_configure(config):
    device = config.getoption("device")
    if device == "cuda_model":
        from cuda_host import redirect

        redirect.install()
        torch.use_deterministic_algorithms(True, warn_only=True)  # also fills new tensors with NaN
    if device == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda, but there is no GPU")
        torch.backends.cudnn.allow_tf32 = False  # tests compare convolutions in float32
        torch.backends.cudnn.deterministic = True  # tests compare bits, which atomic sums would change
        torch.backends.cudnn.benchmark = False
        _use_exact_hardswish()


def _use_exact_hardswish():
    """Replaces torch's hardswish by the CPU's, since the CUDA kernel multiplies doubles by a float 1 / 6."""
    hardswish = torch.nn.functional.hardswish

    def exact_hardswish(v, inplace=False):
        return hardswish(v.cpu()).to(v.device) if v.dtype == torch.float64 else hardswish(v, inplace)

    torch.nn.functional.hardswish = exact_hardswish


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their markers
def pytest_collection_modifyitems(config, items):
    """Selects the tests of the device, and skips those whose packages or memory this machine lacks."""
    if config.getoption("device") == "cuda_model":
        deselected = [item for item in items if not item.get_closest_marker("cuda_model")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item.get_closest_marker("cuda_model")]
        for item in items:
            if "nightly" in item.get_closest_marker("cuda_model").args:
                item.add_marker(pytest.mark.nightly)
    for item in items:
        needs = [name for marker in item.iter_markers("packages") for name in marker.args]
        missing = [name for name in needs if importlib.util.find_spec(name) is None]
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            missing.append("a GPU")
        for marker in item.iter_markers("memory"):
            if marker.args[0] > _free_gigabytes(config.getoption("device")):
                missing.append(f"{marker.args[0]} GB of free memory")
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


def _free_gigabytes(device: str) -> float:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / 1e9
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


def pytest_make_parametrize_id(val, argname):
    """Returns the id of a parameter, which pytest would number in the names of tests."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, tuple) and all(isinstance(item, int) for item in val):
        return "x".join(map(str, val))
    has_id = isinstance(val, (str, bytes, int, float, enum.Enum, type(None)))
    if not has_id and getattr(val, "__name__", "<lambda>") == "<lambda>":
        raise TypeError(f"the parameter {argname} needs an id, as `ids=` or by pytest.param: {val!r}")
    return None


def pytest_collection_finish():
    """Freezes the objects of imports and of the collection."""
    import torch._dynamo  # noqa: F401  else the first optimizer or profile imports torch._dynamo

    _freeze_objects()


@pytest.fixture(scope="module", autouse=True)
def freeze_objects_after_module():
    """Freezes what the tests of a module leave behind, such as caches of compilers."""
    yield
    _freeze_objects()


def _freeze_objects():
    """Makes gc.collect(), which tests of memory call, skip all objects that exist now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device_option(pytestconfig) -> str:
    """Returns the value of --device."""
    return pytestconfig.getoption("device")


@pytest.fixture(scope="session")
def device(device_option) -> str:
    """Returns the device of tensors."""
    return "cuda" if device_option == "cuda" else "cpu"


@pytest.fixture
def default_device(device):
    """Makes new tensors and modules on the device; for the CPU no function mode of torch is active."""
    with torch.device(device) if device != "cpu" else contextlib.nullcontext():
        yield


def pytest_collectstart():
    torch.manual_seed(0)  # test modules may draw random numbers when they are imported


@pytest.fixture(autouse=True)
def seed_random_numbers():
    torch.manual_seed(0)


@pytest.fixture
def amp_off():
    """Resets `fastvit.compat.apex.amp` after a test."""
    from fastvit.compat.apex import amp

    yield
    amp._amp_state.allow_incoming_model_not_fp32 = False
    amp.initialize([], enabled=False)


@pytest.fixture
def port():
    """Returns a port at which a server of the test can listen.

    A socket is bound to the port and does not listen. The kernel then gives the port to no connection of
    another process, while a server with SO_REUSEADDR, as torch's stores have, can listen there.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


@pytest.fixture(scope="session")
def ranks():
    """Returns the pool of processes that run tests as ranks."""
    from on_ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def engine():
    """Returns the controls of the model of CUDA, and restores them after a test."""
    from cuda_host import redirect

    engine = redirect.install()
    names = [name for name in dir(engine.config) if not name.startswith("_")]
    old_values = {name: getattr(engine.config, name) for name in names}
    yield engine
    engine.set_device(0)
    for name, value in old_values.items():
        setattr(engine.config, name, value)


def pytest_runtest_logreport(report):
    """Notes whether an illegal access has ended the CUDA context of this process: later tests would fail."""
    global is_cuda_context_lost
    if report.failed and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            is_cuda_context_lost = True


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish():
    """Ends a worker of xdist that has lost its CUDA context, after its report; xdist starts another."""
    if is_cuda_context_lost and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)
