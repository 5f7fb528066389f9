"""The fixtures and the hooks of pytest for all tests.

FASTVIT_TEST_DEVICE is the device of the tests of ops and layers: cpu, cuda or cuda_host. cuda_host runs the
CUDA sources on the model of CUDA: tensors stay on the CPU, and the emulated kernels replace the CPU's.
"""

import contextlib
import gc
import os
import tempfile
import zlib

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

import pytest  # noqa: E402
import torch  # noqa: E402

TEST_DEVICE = os.environ.get("FASTVIT_TEST_DEVICE", "cpu")
# `make test` leaves these tests to `make test ARGS='-m thorough'`: long trainings, programs drawn at random,
# combinations whose pairs of parameters other cases have, and tests that run tools. An entry is the beginning
# of a test's name, or the beginning and the end with a * between them.
THOROUGH = """
    test_arguments::test_opcheck[cropped] test_arguments::test_opcheck[nhwc
    test_arguments::test_opcheck[tokens] test_benchmarks test_budget::test_a_smaller_budget
    test_budget::test_each_op_is_repeated test_budget::test_the_peak_that_remains
    test_budget::test_under_autocast test_budget_curve::test_a_curve test_build::test_a_build_without
    test_build::test_a_package_without
    test_build::test_kernels_that_do_not_compile test_build::test_what_cannot
    test_compat_cpu::test_apex_recipe test_compat_cpu::test_torch_amp_with
    test_compat_runner::test_every_rank_fails test_compat_runner::test_folders_and_zip_files[app
    test_compat_runner::test_folders_and_zip_files[zip
    test_compat_runner::test_processes_that_a_script_starts_find_apex[exec
    test_compat_runner::test_processes_that_a_script_starts_find_apex[shell
    test_compat_runner::test_processes_that_a_script_starts_find_apex[spawn
    test_compat_runner::test_the_example test_compile::test_fullgraph*aot_eager-eval]
    test_compile::test_fullgraph*inductor-train]
    test_convert::test_a_model_with_each_norm_keeps_less_with_the_same_bits*-nhwc]
    test_convert::test_a_model_with_each_norm_keeps_less_with_the_same_bits[another
    test_convert::test_a_model_with_each_norm_keeps_less_with_the_same_bits[without
    test_convert::test_copies_of_a_converted_model_are_converted[<lambda>
    test_convert::test_copies_of_a_converted_model_are_converted[copy test_convert_compiled
    test_convert_coverage::test_an_activation_in_place_after_an_instance_norm*least]
    test_convert_coverage::test_an_activation_in_place_after_an_instance_norm*products]
    test_convert_pins_large test_convert_programs test_convert_vit::test_a_layer_norm_of_ours
    test_convert_vit::test_a_mask_of_dropout_takes_a_bit*fp16]
    test_convert_vit::test_the_same_bits_and_less_kept*16] test_convert_vit_ranks test_demo
    test_exchange_model test_faults::test_survivors_raise_soon_after_a_rank_is_killed[agreeing
    test_faults::test_survivors_raise_soon_after_a_rank_is_killed[between
    test_faults::test_survivors_raise_soon_after_a_rank_is_killed[forward test_gpu_tool test_hosts test_kills
    test_ops::test_kernels_of_other_instruction_sets test_ops::test_results_larger_than_the_caches[sizes1
    test_ops::test_results_larger_than_the_caches[sizes2 test_ops::test_results_larger_than_the_caches[sizes3
    test_report::test_compiled_models test_report::test_under_autocast
    test_report_step::test_the_largest_batch*resnet] test_set_up::test_killed
    test_set_up::test_shared_memory_that_cannot test_training_faults::test_a_run_that_cannot_read
    test_training_faults::test_names_that_stdout test_training_memory::test_less_is_kept*matmuls]
    test_training_memory::test_less_is_kept_and_no_loss_changes[O
    test_training_memory::test_memory_takes_a_budget test_training_runs::test_a_killed
    test_training_runs::test_a_signal_to_every*1-15] test_training_runs::test_a_signal_to_every*10]
    test_training_runs::test_a_signal_to_one_rank*options1] test_training_runs::test_stop_after
""".split()
CUDA_MODEL_SAMPLE_PERIOD = 8  # `make test-cuda-model` runs one case in 8 of the tests of ops
is_cuda_context_lost = False


def pytest_configure(config):
    if TEST_DEVICE not in ("cpu", "cuda", "cuda_host"):
        raise pytest.UsageError(f"FASTVIT_TEST_DEVICE is {TEST_DEVICE!r}; cpu, cuda or cuda_host expected")
    if TEST_DEVICE == "cuda_host":
        from cuda_host import redirect

        redirect.install()
        torch.use_deterministic_algorithms(True, warn_only=True)  # also fills new tensors with NaN
    if TEST_DEVICE == "cuda":
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


def pytest_collection_modifyitems(items):
    """Marks the tests that `make test` leaves out as thorough."""
    for item in items:
        name = item.nodeid.removeprefix("tests/").replace(".py", "", 1)
        is_sampled = TEST_DEVICE == "cuda_host" and "cuda_host" not in item.nodeid
        is_left_out = is_sampled and zlib.crc32(name.encode()) % CUDA_MODEL_SAMPLE_PERIOD != 0
        entries = (entry.partition("*")[::2] for entry in THOROUGH)
        is_left_out |= any(name.startswith(begin) and name.endswith(end) for begin, end in entries)
        if is_left_out and not any(map(item.get_closest_marker, ("slow", "models"))):
            item.add_marker(pytest.mark.thorough)


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
def device() -> str:
    if TEST_DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.fail("FASTVIT_TEST_DEVICE=cuda, but there is no GPU")
    return "cuda" if TEST_DEVICE == "cuda" else "cpu"


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


@pytest.fixture(scope="session")
def ranks():
    """Returns the pool of processes that run tests as ranks."""
    from ranks import Ranks

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
