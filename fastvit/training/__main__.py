"""`python -m fastvit.training`, also installed as `fastvit-train`."""

from __future__ import annotations

import io
import signal
import sys
import traceback
from collections.abc import Sequence

from ..sync.teardown import destroy_process_group, exit_without_teardown
from . import distributed
from .command_line import parse
from .config import ConfigError, TrainingError, check_packages
from .launch import find_launch

INTERRUPTED = 130  # a shell's status of a program that SIGINT ended


def _complain(error: object) -> None:
    print(f"fastvit-train: error: {error}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainer with command-line arguments (`sys.argv` when None).

    Returns:
        0, 1 when the run failed, or 130 when it was interrupted; a wrong option exits with 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path that it cannot encode must not end a run
            stream.reconfigure(errors="backslashreplace")
    config, given = parse(arguments)
    status, speaks = 0, True
    try:
        check_packages(config)
        launch = find_launch()
        device = distributed.init(launch, config.device, config.timeout)
        # One rank of each host, where a user may look for what is wrong there.
        speaks = launch is None or launch.rank == 0 or launch.local_rank == 0
        from .run import train  # which needs the packages

        train(config, given, device)
    except (ConfigError, TrainingError) as error:  # raised on every rank
        if speaks:
            _complain(error)
        status = 1
    except KeyboardInterrupt:
        run = config.out if config.resume in ("", "auto") else config.resume
        how = "" if config.evaluate else f": --resume {run} continues the run after its last checkpoint"
        _complain(f"KeyboardInterrupt{how}")
        if distributed.get_world_size() > 1:  # the others may wait in an exchange
            exit_without_teardown(INTERRUPTED)
        return INTERRUPTED
    except Exception:
        if distributed.get_world_size() < 2:
            raise
        # The others may not have this error: a barrier would wait for them, and destroying the group aborts.
        # SIGTERM, by which the launcher ends them, is ignored so that the message is complete.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traceback.print_exc()
        rank = distributed.get_rank()
        _complain(f"rank {rank} ends alone; the other ranks notice it, and the last checkpoint is intact")
        exit_without_teardown(1)
    # The frames of train have ended, and with them the model and the optimizer.
    destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
