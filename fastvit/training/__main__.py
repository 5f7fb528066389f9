"""Runs the trainer from the command line: `python -m fastvit.training`, installed as `fastvit-train` too."""

from __future__ import annotations

import io
import signal
import sys
import traceback
from collections.abc import Sequence

from ..sync.teardown import destroy_process_group, exit_without_teardown
from . import distributed
from .command_line import parse_arguments
from .config import Config, ConfigError, TrainingError, check_packages
from .launcher import detect_launcher

SIGINT_EXIT_STATUS = 130  # A shell shows this status for a program that SIGINT ended.


def _print_error(error: object) -> None:
    print(f"fastvit-train: error: {error}", file=sys.stderr, flush=True)


def _resume_hint(config: Config) -> str:
    run_dir = config.out if config.resume in ("", "auto") else config.resume
    return "" if config.evaluate else f"--resume {run_dir} continues the run after its last checkpoint"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the trainer with command-line arguments (`sys.argv` when None).

    Returns:
        0, or 1 if the run failed, or 130 if it was interrupted. A wrong option exits with status 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # A path that the stream cannot encode must not end a run.
            stream.reconfigure(errors="backslashreplace")
    config, explicit = parse_arguments(arguments)
    exit_status, prints_errors = 0, True
    try:
        check_packages(config)
        launch_info = detect_launcher()
        device = distributed.init_distributed(launch_info, config.device, config.timeout)
        # One rank of each host prints, since a user may look for the cause on any host.
        prints_errors = launch_info is None or 0 in (launch_info.rank, launch_info.local_rank)
        from .run import run_training  # This import needs the packages that were checked above.

        run_training(config, explicit, device)
    except (ConfigError, TrainingError) as error:  # Every rank raises these errors.
        if prints_errors:
            _print_error(error)
        exit_status = 1
    except KeyboardInterrupt:
        _print_error(": ".join(filter(None, ("KeyboardInterrupt", _resume_hint(config)))))
        if distributed.get_world_size() > 1:  # The teardown would wait for ranks in an exchange.
            exit_without_teardown(SIGINT_EXIT_STATUS)
        return SIGINT_EXIT_STATUS
    except Exception:
        if distributed.get_world_size() < 2:
            raise
        # The other ranks may not have this error, so a barrier would wait for them, and without a barrier the
        # end of the group may abort the process. The launcher ends ranks by SIGTERM; this rank ignores the
        # signal, so that the whole message is printed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traceback.print_exc()
        hint = _resume_hint(config)
        message = f"rank {distributed.get_rank()} failed and exits; the other ranks stop too"
        _print_error(f"{message}, and {hint}" if hint else message)
        exit_without_teardown(1)
    # The frames of run_training have ended, which frees the model and the optimizer.
    destroy_process_group()
    return exit_status


if __name__ == "__main__":
    sys.exit(main())
