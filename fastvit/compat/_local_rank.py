"""Passes the local rank to a script under the option name that the script declares.

Old scripts declare `--local_rank`. Newer launchers pass `--local-rank`, and torchrun passes only LOCAL_RANK
in the environment.
"""

import argparse
import os
import sys
from typing import Any

SPELLINGS = {"--local-rank": "--local_rank", "--local_rank": "--local-rank"}
Parser: Any = argparse.ArgumentParser


def _launched(words: list[str]) -> tuple[str | None, list[str]]:
    """The rank that a launcher passes, always before the script's own words, and those words."""
    name, equals, rank = words[0].partition("=") if words else ("", "", "")
    if name not in SPELLINGS:
        return None, words
    return (rank, words[1:]) if equals else (" ".join(words[1:2]), words[2:])


def spell_local_rank() -> None:
    """Patches argparse so that every parser that declares a local rank finds it, under its own spelling.

    Second parsers, and those of subcommands, see other words than the command line, which the launcher's rank
    begins. They get this rank, or else LOCAL_RANK, before their words. `sys.argv` does not change.
    """
    parse, find = Parser.parse_known_args, Parser._parse_optional

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        rank, others = _launched(words)
        declared = [name for name in self._option_string_actions if name in SPELLINGS]
        if declared and rank is None:
            rank = _launched(sys.argv[1:])[0] or os.environ.get("LOCAL_RANK")
            words[:0] = [f"{declared[0]}={rank}"] if rank else []
        elif not declared and self._subparsers is not None:
            words = others  # a launcher's option is before the command, whose parser may declare it
        return parse(self, words, namespace)

    def find_option(self: Any, word: str) -> Any:  # argparse tells which words may be options
        name, equals, rank = word.partition("=")
        options = self._option_string_actions
        if name not in options and SPELLINGS.get(name) in options:
            word = SPELLINGS[name] + equals + rank
        return find(self, word)

    Parser.parse_known_args, Parser._parse_optional = parse_known_args, find_option
