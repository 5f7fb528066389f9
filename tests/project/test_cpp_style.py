"""The C++ and CUDA sources: headers of kernel files, sizes of functions, and what clang-format leaves."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for path in ROOT.glob("csrc/**/*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
KERNELS = [path for path in SOURCES if path.match("cpu/kernels/*.cpp") or "__global__" in path.read_text()]
KERNELS = [path for path in KERNELS if path.suffix in (".cpp", ".cu")]
LABELS = ["Memory", "Mapping", "Numerics", "Source"]
MAX_HEADER_LINES, MAX_LINES, MAX_BRANCHES, MAX_COLUMNS = 10, 60, 15, 110
REASON = "Kept in one function"  # the comment above a function that is larger


def functions_of(text: str) -> list[tuple[str, str]]:
    """The functions of a formatted source: comment and declaration, and the body without comments."""
    lines = text.splitlines()
    code = [re.sub(r"//.*", "", line).rstrip() for line in lines]
    found, first = [], 0
    while first < len(lines):
        declared = re.match(r"( {0,4})(?!(?:return|if|for|while|else|switch|case)\b)\w", code[first])
        last = first
        while declared and last + 1 < len(lines) and not re.search(r"[;{}:]$|^#", code[last]):
            last += 1
        head = " ".join(code[first : last + 1])
        is_function = re.search(r"\).*\{$", head) and not re.search(
            r"\[[&=]?\]|\b(struct|class) \w+ ?[:{<]", head
        )
        if declared and is_function:
            end = next(i for i in range(last, len(lines)) if code[i].startswith(declared[1] + "}"))
            above = first
            while lines[above - 1].lstrip().startswith("//"):
                above -= 1
            found.append(("\n".join(lines[above : last + 1]), "\n".join(code[last + 1 : end])))
            last = end
        first = last + 1
    return found


def test_kernel_files_open_with_their_traffic_mapping_numerics_and_source():
    for path in KERNELS:
        header = re.match(r"(//.*\n)*", path.read_text())[0].splitlines()
        labels = [match[1] for line in header if (match := re.match(r"// (\w+):", line))]
        assert 0 < len(header) <= MAX_HEADER_LINES, path
        assert [label for label in labels if label in LABELS] == LABELS, path


def test_lines_end_within_the_columns():
    """clang-format breaks no comments, since the headers are aligned by hand."""
    lines = [(str(path), line) for path in SOURCES for line in path.read_text().splitlines()]
    assert [(path, line) for path, line in lines if len(line) > MAX_COLUMNS] == []


def test_functions_are_small_or_say_why_not():
    for path in SOURCES:
        for head, body in functions_of(path.read_text()):
            lines = len((head + body).splitlines())
            branches = len(re.findall(r"\b(?:if|for|while)\b|\?|&&|\|\|", body))
            if lines > MAX_LINES or branches > MAX_BRANCHES:
                assert REASON in head, f"{path}: {head.strip()}: {lines} lines, {branches} branches"
