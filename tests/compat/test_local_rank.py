"""The local rank of scripts under `python -m fastvit.compat`: its spelling, and LOCAL_RANK in its place."""

import argparse
import sys

import pytest

from fastvit.compat._local_rank import patch_local_rank_parsing

OLD, NEW = ("--local_rank",), ("--local-rank",)


@pytest.fixture
def patched_parsing(monkeypatch):
    for name in ("parse_known_args", "_parse_optional"):
        monkeypatch.setattr(argparse.ArgumentParser, name, getattr(argparse.ArgumentParser, name))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    patch_local_rank_parsing()


@pytest.mark.parametrize(
    ("declared", "environment", "given", "expected"),
    [
        (OLD, None, ["--local-rank=1", "a"], 1),
        (OLD, None, ["--local-rank", "1", "a"], 1),
        (OLD, None, ["--local_rank=1", "a"], 1),
        (OLD, "3", ["a"], 3),
        (OLD, "3", ["--local_rank", "2", "a"], 2),
        (OLD, None, ["a"], -1),
        (NEW, None, ["--local_rank=1", "a"], 1),
        (NEW, "2", ["a"], 2),
        (OLD + NEW, None, ["--local-rank=1", "a"], 1),
        ((), "2", ["a"], None),
    ],
    ids=str,
)
def test_local_rank_is_spelled_as_declared(
    monkeypatch, patched_parsing, declared, environment, given, expected
):
    if environment is not None:
        monkeypatch.setenv("LOCAL_RANK", environment)
    monkeypatch.setattr("sys.argv", ["main.py", *given])
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    if declared:
        parser.add_argument(*declared, type=int, default=-1)
    for args in (parser.parse_args(), parser.parse_args(sys.argv[1:])):
        assert args.file == "a" and getattr(args, "local_rank", None) == expected
    assert parser.parse_known_args(iter(["b"]))[0].file == "b"  # not the command line
    assert sys.argv == ["main.py", *given]


@pytest.mark.parametrize(
    ("environment", "given"),
    [("3", []), (None, ["--local-rank=3"]), ("9", ["--local_rank", "3"]), ("3", ["--local-rank=3"])],
    ids=str,
)
def test_parsers_after_the_first_find_the_local_rank(monkeypatch, patched_parsing, environment, given):
    if environment is not None:
        monkeypatch.setenv("LOCAL_RANK", environment)

    def parser(rank=True, **options):
        made = argparse.ArgumentParser(**options)
        if rank:
            made.add_argument("--local_rank", type=int, default=-1)
        return made

    for outer in (False, True):  # the command's parser alone declares it, and both do
        monkeypatch.setattr("sys.argv", ["main.py", *given, "train", "--lr", "2"])
        commands = parser(outer)
        train = commands.add_subparsers(dest="command").add_parser("train")
        train.add_argument("--local_rank", type=int, default=-1)
        train.add_argument("--lr", type=int)
        args = commands.parse_args()
        assert (args.command, args.local_rank, args.lr) == ("train", 3, 2)

        monkeypatch.setattr("sys.argv", ["main.py", *given, "--lr", "2"])
        _, rest = parser(outer).parse_known_args()
        second = parser()
        second.add_argument("--lr", type=int)
        args = second.parse_args(rest)
        assert (args.local_rank, args.lr) == (3, 2)
    assert second.parse_args(["--local_rank=5"]).local_rank == 5


POSITIONALS = {
    "remainder": {"rest": {"nargs": argparse.REMAINDER}},
    "script_and_remainder": {"script": {}, "rest": {"nargs": "..."}},
    "any_number": {"rest": {"nargs": "*"}},
    "command": {"rest": {"nargs": argparse.PARSER}},
}
WORDS = [
    "--local_rank=1 train.py --local_rank=9",
    "--local_rank 1 train.py --local_rank 9 -- --local_rank=8",
    "--local_rank=1 -- --local_rank 9",
    "--local_rank=1 -- --local-rank 9",
    "-- --local_rank=9",
    "train.py --local_rank=9",
    "train.py --local_rank 9 --local_rank=2",
    "--local_r 1 train.py",
    "--local 1 train.py --lr 2",
    "--lr=2 --local=1 a b",
    "--local_rank",
    "--local_rank --lr 2 train.py",
    "--local_rank=a train.py",
    "",
]


@pytest.mark.parametrize("positionals", POSITIONALS)
def test_argparse_tells_which_words_give_the_local_rank(monkeypatch, positionals):
    """A word after `--`, in a remainder, or abbreviated is what it is for argparse alone."""

    def outcomes(environment=None):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if environment is not None:
            monkeypatch.setenv("LOCAL_RANK", environment)
        for words in WORDS:
            parser = argparse.ArgumentParser(prog="main.py")
            parser.add_argument("--local_rank", type=int, default=-1)
            parser.add_argument("--lr", type=int)
            for name, options in POSITIONALS[positionals].items():
                parser.add_argument(name, **options)
            parser.error = lambda message: (_ for _ in ()).throw(ValueError(message))
            monkeypatch.setattr("sys.argv", ["main.py", *words.split()])
            try:
                yield words, *parser.parse_known_args()
            except ValueError as error:
                yield words, str(error), None

    alone = list(outcomes())
    assert any(getattr(found, "rest", None) and "--local_rank=9" in found.rest for _, found, _ in alone)
    with monkeypatch.context() as patch:
        for name in ("parse_known_args", "_parse_optional"):
            patch.setattr(argparse.ArgumentParser, name, getattr(argparse.ArgumentParser, name))
        patch_local_rank_parsing()
        assert list(outcomes()) == alone
        for (words, expected, _), (_, found, _) in zip(alone, outcomes("7"), strict=True):
            if isinstance(expected, argparse.Namespace):
                if expected.local_rank == -1:
                    expected.local_rank = 7  # LOCAL_RANK, where the words do not give it
                assert found == expected, words


def test_words_that_are_no_options_keep_their_spelling(patched_parsing):
    parser = argparse.ArgumentParser()
    parser.add_argument(*OLD, type=int)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    for rank in (["--local-rank=1"], ["--local-rank", "1"]):
        for rest in (
            ["train.py", "--local-rank=9"],
            ["train.py", "--local-rank", "9"],
            ["a", "--local-rank"],
        ):
            found = parser.parse_args([*rank, *rest])
            assert (found.local_rank, found.rest) == (1, rest)
    other = argparse.ArgumentParser()  # declares none
    other.add_argument("rest", nargs=argparse.REMAINDER)
    assert other.parse_args(["train.py", "--local-rank=9"]).rest == ["train.py", "--local-rank=9"]
    assert other.parse_known_args(["--local-rank=9"])[1] == ["--local-rank=9"]
