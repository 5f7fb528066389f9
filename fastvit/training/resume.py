"""Locks the directory of a run, and finds the checkpoint from which `--resume` continues."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import checkpoint
from .command_line import merge_saved
from .config import Config, TrainingError
from .distributed import all_gather_objects, get_world_size, print_on_main, run_on_all_ranks, run_on_main


def open_run(
    config: Config, explicit: dict[str, Any], exit_stack: ExitStack
) -> tuple[Config, dict[str, Any] | None]:
    """Locks the directory of the run. Returns the configuration, and the state of the resumed checkpoint."""
    if not config.resume:
        run_on_main(checkpoint.lock_run_dir, Path(config.out), exit_stack)
        return config, None
    run_dir, state = _find_resumed_run(config, explicit, exit_stack)
    if state is not None:
        config = run_on_all_ranks(merge_saved, explicit, state["config"], run_dir)
    return config, state


def _find_resumed_run(
    config: Config, explicit: dict[str, Any], exit_stack: ExitStack
) -> tuple[Path, dict[str, Any] | None]:
    """Locks the directory in which the run continues. Returns the directory and the checkpoint's state.

    The state is None if `--resume auto` finds no checkpoint.
    """
    is_auto = config.resume == "auto"
    resumed = Path(config.out if is_auto else config.resume)
    uses_out = is_auto or "out" in explicit
    run_dir = Path(config.out) if uses_out else run_on_main(checkpoint.run_dir_of, resumed)
    run_on_main(checkpoint.lock_run_dir, run_dir, exit_stack)
    # Another run may have written a checkpoint before this one got the lock, so list them now.
    newest = [checkpoint.parse_checkpoint_name(path) for path in checkpoint.list_checkpoints(resumed)[-1:]]
    newest_by_rank = all_gather_objects(newest)
    if max(newest_by_rank) > newest_by_rank[0]:  # This run would replace the newer checkpoint.
        rank = newest_by_rank.index(max(newest_by_rank))
        raise TrainingError(
            f"--resume: rank {rank} sees a newer checkpoint in {resumed} than rank 0, which reads and writes "
            "them; put the run on a disk that all hosts share"
        )
    if is_auto and not newest_by_rank[0]:
        print_on_main(f"no checkpoint in {resumed}: a new run")
        return run_dir, None
    return run_dir, run_on_main(_load_resumed_state, resumed)


def _load_resumed_state(resumed: Path) -> dict[str, Any]:
    """Returns the state to resume: the newest that this number of ranks can continue.

    Another number of ranks divides an epoch into other steps, so it must continue from the end of an epoch.
    """
    path, world_size = checkpoint.find_checkpoint(resumed), get_world_size()
    state = checkpoint.load_checkpoint(path)
    if not state["progress"]["step"] or state["world"] == world_size:
        return state
    complete_epochs = [(epoch, 0) for epoch in range(state["epoch"] + 1)]
    whole_epochs = [
        path
        for path in checkpoint.list_checkpoints(checkpoint.run_dir_of(resumed))
        if checkpoint.parse_checkpoint_name(path) in complete_epochs
    ]
    if not whole_epochs:
        raise TrainingError(
            f"--resume: {path} is within an epoch, so the {state['world']} rank(s) that wrote it must "
            f"continue it, got {world_size}; there is no checkpoint of a whole epoch"
        )
    return checkpoint.load_checkpoint(whole_epochs[-1])


def prepare_run_dir(run_dir: Path, config: Config) -> None:
    """Saves the configuration. Raises if the directory has another run than the resumed one."""
    resumed = Path(config.resume).resolve() if config.resume else None
    continues_run = config.resume == "auto" or resumed and run_dir.resolve() in (resumed, *resumed.parents)
    if not continues_run and ((run_dir / "metrics.jsonl").exists() or (run_dir / "checkpoints").exists()):
        raise TrainingError(
            f"--out {run_dir} already holds a run; give another directory, or continue the run with "
            f"--resume {run_dir}"
        )
    config.save(run_dir / "config.toml")
