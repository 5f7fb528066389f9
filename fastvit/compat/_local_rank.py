"""Passes the local rank to a script under the option name that the script declares.

Old scripts declare `--local_rank`. Newer launchers pass `--local-rank`, and torchrun passes only LOCAL_RANK
in the environment.
"""

import argparse
import functools
import os
import re
import sys
from typing import Any

LOCAL_RANK = re.compile(r"--local[-_]rank(=|$)")


def _taken(words: list[str]) -> tuple[str | None, list[str]]:
    """The local rank that `words` give, as one word or two, and the other words."""
    rank, others, following = None, [], iter(words)
    for word in following:
        if LOCAL_RANK.match(word):
            rank = word.partition("=")[2] if "=" in word else next(following, None)
        else:
            others.append(word)
    return rank, others


def spell_local_rank() -> None:
    """Patches argparse so that every parser that declares a local rank finds it, under its own spelling.

    Second parsers, and those of subcommands, see other words than the command line, in which it may have been
    found already. `sys.argv` does not change.
    """
    parse = argparse.ArgumentParser.parse_known_args
    launched: str | None = None  # the rank on the command line

    @functools.wraps(parse)
    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        nonlocal launched
        words = list(sys.argv[1:] if args is None else args)
        rank, others = _taken(words)
        if words == sys.argv[1:]:
            launched = rank
        rank = rank or launched or os.environ.get("LOCAL_RANK")
        declared = [name for name in self._option_string_actions if LOCAL_RANK.match(name)]
        if declared and rank:
            words = [f"{declared[0]}={rank}", *others]
        elif self._subparsers is not None:
            words = others  # a launcher's option is before the command, whose parser may declare it
        return parse(self, words, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
