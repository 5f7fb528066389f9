"""`python -m fastvit.training`, also installed as `fastvit-train`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

from . import distributed
from .command_line import parse
from .errors import MissingPackage, TrainingError, check_packages
from .launch import find_launch


def _complain(error: object) -> None:
    print(f"fastvit-train: error: {error}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainer with command-line arguments (`sys.argv` when None).

    Returns:
        0, or 1 when the run failed; a wrong option exits with 2.
    """
    config, given, local_rank = parse(arguments)
    try:
        check_packages(config)
        ranks = distributed.init(find_launch(local_rank), config.device, config.backend, config.timeout)
    except (MissingPackage, ValueError) as error:
        _complain(error)
        return 1
    from .run import train

    status = 0
    try:
        train(config, given, ranks)
    except TrainingError as error:  # every rank has it, so one of them says it
        if distributed.is_main_process():
            _complain(error)
        status = 1
    except Exception:
        if ranks.world < 2:
            raise
        _give_up(ranks.rank)
    # The frames of train, and with them the model and the optimizer, are gone here.
    distributed.shutdown()
    return status


def _give_up(rank: int) -> None:
    """End a rank that has met an error of its own, or whose peer is gone, without waiting for the others.

    The barrier of an orderly end would wait for ranks that never come, and destroying the group aborts. A
    launcher that has noticed as well asks this rank to end by SIGTERM, which may not cut short what it says.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    traceback.print_exc()
    _complain(f"rank {rank} ends alone; the other ranks notice it, and the last checkpoint is intact")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
