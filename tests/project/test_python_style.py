"""Names and sentences of the Python code and of the pages follow the rules of style in CONTRIBUTING.md."""

import ast
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("fastvit", "benchmarks", "examples", "tools", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

# A sentence that begins with one of these words has its subject behind a clause.
INVERTED = re.compile(r"(?:\A|(?<=[.!?] ))(?:Of|By|Where|Those|What|Inside)\b.{0,40}")
# Participles, prepositions, adverbs and pronouns that say nothing of a value.
NO_NAMES = frozenset(
    """
    against alive alone aside at at_hand besides both but by chosen each either every everybody few found
    given gone got held here instead it itself known laid least left less made many mine more most now of
    others ours own part plain plainly polled rest said seen several shown signed so some stand_by such taken
    telling theirs then there thrice together told until waiting wanted watched whole why wish
    """.split()
)


def paragraphs(text: str) -> list[str]:
    return [
        " ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.|\w[\w, ]*:) )", text)
    ]


def sentences_of_source(path: Path) -> list[str]:
    """Returns the docstrings by paragraph, and the comments, with those of consecutive lines as one."""
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [
        part
        for node in nodes
        if isinstance(node, kinds)
        for part in paragraphs(ast.get_docstring(node) or "")
    ]
    last_line = 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                comment = token.string.lstrip("# ")
                if token.start[0] == last_line + 1:
                    texts[-1] += f" {comment}"
                else:
                    texts.append(comment)
                last_line = token.start[0]
    return texts


def sentences_of_page(path: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return [re.sub(r"^(?:[-*>|#]+|\d+\.) *", "", paragraph) for paragraph in paragraphs(text)]


def test_sentences_begin_with_their_subject():
    texts = [(path, text) for path in SOURCES for text in sentences_of_source(path)]
    texts += [(path, text) for path in PAGES for text in sentences_of_page(path)]
    found = [(str(path), match[0]) for path, text in texts for match in INVERTED.finditer(text)]
    assert found == []


def defined_names(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
    return names


def test_names_say_what_a_value_is():
    paths = [path for path in SOURCES if not path.name.startswith("test_")]
    names = [(str(path), name) for path in paths for name in defined_names(ast.parse(path.read_text()))]
    assert [(path, name) for path, name in names if name.strip("_") in NO_NAMES] == []
