"""Passes the local rank to a script under the option name that the script declares.

Old scripts declare `--local_rank`. Newer launchers pass `--local-rank`, and torchrun passes only LOCAL_RANK
in the environment.
"""

import argparse
import os
import sys
from typing import Any

OTHER_SPELLING = {"--local-rank": "--local_rank", "--local_rank": "--local-rank"}
Parser: Any = argparse.ArgumentParser


def _split_local_rank(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Returns the rank that a launcher passes before the script's arguments, or None, and these arguments."""
    name, equals, rank = arguments[0].partition("=") if arguments else ("", "", "")
    if name not in OTHER_SPELLING:
        return None, arguments
    return (rank, arguments[1:]) if equals else (" ".join(arguments[1:2]), arguments[2:])


def patch_local_rank_parsing() -> None:
    """Patches argparse so that every parser that declares a local rank finds the rank under its spelling.

    A second parser or a subcommand's parser gets other arguments than the command line. The rank on the
    command line, or else LOCAL_RANK, is put before these arguments. `sys.argv` does not change.
    """
    original_parse, original_find = Parser.parse_known_args, Parser._parse_optional

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        rank, script_arguments = _split_local_rank(arguments)
        declared_names = [name for name in self._option_string_actions if name in OTHER_SPELLING]
        if declared_names and rank is None:
            rank = _split_local_rank(sys.argv[1:])[0] or os.environ.get("LOCAL_RANK")
            arguments[:0] = [f"{declared_names[0]}={rank}"] if rank else []
        elif not declared_names and self._subparsers is not None:
            # The launcher's option precedes the command, whose parser may declare that option.
            arguments = script_arguments
        return original_parse(self, arguments, namespace)

    def find_option(self: Any, argument: str) -> Any:
        """Replaces the spelling of an argument if the parser declares only the other spelling."""
        name, equals, rank = argument.partition("=")
        options = self._option_string_actions
        if name not in options and OTHER_SPELLING.get(name) in options:
            argument = OTHER_SPELLING[name] + equals + rank
        return original_find(self, argument)

    Parser.parse_known_args, Parser._parse_optional = parse_known_args, find_option
