"""`python -m fastvit.compat [--prefer apex|fastvit] [--cpu] [--half TYPE] (script.py | -m module) args...`

Runs a script like `python script.py args...`, with `import apex` and `import inplace_abn` available. torchrun
and torch.distributed.launch can start it:

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
from ._finder import PREFERENCES, install
from ._half import HALVES
from ._local_rank import spell_local_rank


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the script or module with its arguments, among them a launcher's rank."""
    parser = argparse.ArgumentParser(
        prog="python -m fastvit.compat",
        description="Run a script for which apex and inplace_abn resolve to fastvit's look-alikes.",
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
        "--cpu", action="store_true", help="run a script that was written for CUDA on the CPU, to try it"
    )
    parser.add_argument(
        "--half",
        choices=HALVES,
        default=os.environ.get("FASTVIT_HALF"),
        help="half precision on the CPU, by FASTVIT_HALF too (default: bfloat16)",
    )
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=[], help="or a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script, with its arguments as they are")
    options = parser.parse_args(arguments)
    if not (words := options.module + options.script):
        parser.error("no script given")
    if options.local_rank is not None:
        words.insert(1, f"--local-rank={options.local_rank}")
    return options, words


def _run_script(path: str) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    safe_path, absolute = getattr(sys.flags, "safe_path", False), os.path.abspath(path)
    if pkgutil.get_importer(path):  # a folder or a zip file
        sys.path[: not safe_path] = [absolute]
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # as python does
        return
    if not safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", absolute)
    vars(main).update(__file__=absolute, __loader__=loader, __cached__=None)
    code: Any = loader.get_code("__main__") if isinstance(loader, SourcelessFileLoader) else None
    exec(code or compile(loader.get_data(absolute), absolute, "exec", dont_inherit=True), vars(main))


def _leave_process_group(status: int | None) -> None:
    """Destroys the default process group of a script that leaves it open; runs last in the process.

    A rank that failed skips the barrier, because its peers may wait in another collective. It, and a peer
    whose barrier fails, end without destroying the group. `status` is None for an end by a signal.
    """
    if status is None or not dist.is_available() or not dist.is_initialized():
        return
    if status:
        exit_without_teardown(status)
    try:
        destroy_process_group(timedelta(seconds=30), release_models=sys.modules["__main__"].__dict__.clear)
    except RuntimeError:
        exit_without_teardown(status)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; the whole one when the script did not run."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in ours:
        inner = inner.tb_next
    return inner


def main() -> None:
    options, sys.argv = _parse(sys.argv[1:])
    script = sys.argv[0]
    if options.half:
        os.environ["FASTVIT_HALF"] = options.half
    install(options.prefer)
    spell_local_rank()
    if options.cpu:
        from . import _cpu

        os.environ["FASTVIT_COMPAT_CPU"] = "1"  # for the processes that the script starts
        _cpu.install()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(_cpu.SAID, file=sys.stderr, flush=True)
    status: int | None = 1
    # Registered first, so it runs after all functions that the script registers.
    atexit.register(lambda: _leave_process_group(status))
    try:
        if options.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif not os.path.exists(script):
            print(f"python -m fastvit.compat: can't open file {script!r}", file=sys.stderr)
            sys.exit(2)
        else:
            _run_script(script)
        status = 0
    except SystemExit as end:  # Python prints other codes than numbers, and exits with 1
        status = 0 if end.code is None else end.code & 0xFF if isinstance(end.code, int) else 1
        raise
    except KeyboardInterrupt as error:
        status = None  # Python ends itself by the signal
        raise error.with_traceback(_without_our_frames(error.__traceback__)) from None
    except BaseException as error:
        error.__traceback__ = _without_our_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    main()
