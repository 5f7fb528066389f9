"""`python -m fastvit.compat [--prefer apex|fastvit] [--cpu] [--half TYPE] (script.py | -m module) args...`

Runs a script like `python script.py args...`, with `import apex` and `import inplace_abn` available. torchrun
and torch.distributed.launch can start this module:

    torchrun --nproc_per_node 2 -m fastvit.compat main.py args...
"""

import argparse
import atexit
import builtins
import os
import pkgutil
import runpy
import sys
from datetime import timedelta
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch.distributed as dist

from ..sync.teardown import destroy_process_group, exit_without_teardown
from ._cpu_half import CPU_HALF_NAMES
from ._import_hook import PREFERENCES, install
from ._local_rank import patch_local_rank_parsing

_BARRIER_TIMEOUT = timedelta(seconds=30)


def _parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the script or module with its arguments, among them a launcher's rank."""
    parser = argparse.ArgumentParser(
        prog="python -m fastvit.compat",
        description="Run a script in which `import apex` and `import inplace_abn` find fastvit's modules.",
        usage="%(prog)s [--prefer apex|fastvit] [--cpu] [--half TYPE] (script.py | -m module) [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--prefer",
        choices=PREFERENCES,
        default="apex",
        help="the package that provides a part that both have (default: apex)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run CUDA calls of the script on the CPU, to try the script"
    )
    parser.add_argument(
        "--half",
        choices=CPU_HALF_NAMES,
        default=os.environ.get("FASTVIT_HALF"),
        help="half precision on the CPU (default: FASTVIT_HALF, or else bfloat16)",
    )
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, default=[], help="run a module instead of a script"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    options = parser.parse_args(arguments)
    if not (script_and_arguments := options.module + options.script):
        parser.error("got no script; a script or -m module expected")
    if options.local_rank is not None:
        script_and_arguments.insert(1, f"--local-rank={options.local_rank}")
    return options, script_and_arguments


def _run_script(path: str) -> None:
    """Runs a file, a folder or a zip file as the module `__main__`, as `python path` does."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    safe_path, absolute_path = getattr(sys.flags, "safe_path", False), os.path.abspath(path)
    if pkgutil.get_importer(path):  # finds an importer for a folder or a zip file
        sys.path[: not safe_path] = [absolute_path]  # replaces the first entry, or with -P inserts one
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if not safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", absolute_path)
    vars(main).update(__file__=absolute_path, __loader__=loader, __cached__=None)
    code: Any = loader.get_code("__main__") if isinstance(loader, SourcelessFileLoader) else None
    exec(
        code or compile(loader.get_data(absolute_path), absolute_path, "exec", dont_inherit=True), vars(main)
    )


def _destroy_process_group_at_exit(status: int | None) -> None:
    """Destroys the default process group if the script has left the group open. Runs last in the process.

    A rank that failed skips the barrier, because its peers may wait in another collective. This rank, and a
    peer whose barrier fails, end without destroying the group. `status` is None for an end by a signal.
    """
    if status is None or not dist.is_available() or not dist.is_initialized():
        return
    if status:
        exit_without_teardown(status)
    try:
        destroy_process_group(_BARRIER_TIMEOUT, release_models=sys.modules["__main__"].__dict__.clear)
    except RuntimeError:
        exit_without_teardown(status)


def _strip_launcher_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the script's first frame on, or None if all frames are the launcher's."""
    launcher_files = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in launcher_files:
        traceback = traceback.tb_next
    return traceback


def main() -> None:
    options, sys.argv = _parse_arguments(sys.argv[1:])
    script = sys.argv[0]
    if options.half:
        os.environ["FASTVIT_HALF"] = options.half
    install(options.prefer)
    patch_local_rank_parsing()
    if options.cpu:
        from . import _cuda_on_cpu

        os.environ["FASTVIT_COMPAT_CPU"] = "1"  # read by the processes that the script starts
        _cuda_on_cpu.install()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(_cuda_on_cpu.NOTICE, file=sys.stderr, flush=True)
    status: int | None = 1
    # This function is registered first, so it runs after all functions that the script registers.
    atexit.register(lambda: _destroy_process_group_at_exit(status))
    try:
        if options.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif not os.path.exists(script):
            print(f"python -m fastvit.compat: can't open file {script!r}", file=sys.stderr)
            sys.exit(2)
        else:
            _run_script(script)
        status = 0
    except SystemExit as exit_error:  # Python prints a code that is no number, and exits with 1
        code = exit_error.code
        # The system keeps 8 bits of a status.
        status = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        raise
    except KeyboardInterrupt as error:
        status = None  # Python ends itself by the signal
        raise error.with_traceback(_strip_launcher_frames(error.__traceback__)) from None
    except BaseException as error:
        error.__traceback__ = _strip_launcher_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    main()
