"""``python -m fastvit.training``, also installed as ``fastvit-train``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import distributed
from .config import parse
from .errors import MissingPackage, TrainingError, check_packages


def _complain(error: Exception) -> None:
    print(f"fastvit-train: error: {error}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainer with command-line arguments (``sys.argv`` when None).

    Returns:
        0, or 1 when the run failed; a wrong flag exits with 2.
    """
    config, given = parse(arguments)
    try:
        check_packages()
        from .run import train

        ranks = distributed.init(config.device, config.timeout)
    except (MissingPackage, ValueError) as error:
        _complain(error)
        return 1
    status = 0
    try:
        train(config, given, ranks)
    except TrainingError as error:  # every rank has it, so one of them says it
        if distributed.is_main_process():
            _complain(error)
        status = 1
    # The frames of train, and with them the model and the optimizer, are gone here.
    distributed.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main())
