"""Passes the local rank to a script under the option name that the script declares.

Old scripts declare `--local_rank`. Newer launchers pass `--local-rank`, and torchrun passes only LOCAL_RANK
in the environment.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

LOCAL_RANK = re.compile(r"--local[-_]rank(=|$)")


def _spelled(arguments: Sequence[str], declared: list[str]) -> list[str]:
    """`arguments` with the local rank under one of the `declared` names, if there are any."""
    if not declared:
        return list(arguments)
    if "LOCAL_RANK" in os.environ and not any(LOCAL_RANK.match(a) for a in arguments):
        return [f"{declared[0]}={os.environ['LOCAL_RANK']}", *arguments]
    words = (argument.partition("=") for argument in arguments)
    return [
        (declared[0] if LOCAL_RANK.match(name) and name not in declared else name) + equals + value
        for name, equals, value in words
    ]


def spell_local_rank() -> None:
    """Patches argparse so that every parser of the command line gets the local rank under a declared name.

    `sys.argv` does not change.
    """
    parse = argparse.ArgumentParser.parse_known_args

    @functools.wraps(parse)
    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if words == sys.argv[1:]:
            words = _spelled(words, [name for name in self._option_string_actions if LOCAL_RANK.match(name)])
        return parse(self, words, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
