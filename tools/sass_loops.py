"""Reads machine code: the loops of each kernel, and how many instructions a pass of them takes.

A pass is a way through the loop's blocks that performs all of its 16-byte accesses. `least` is the shortest
one: the activation that costs nothing. `most` is the longest: the activation that costs most, with both sides
of what may diverge in turn. Loops inside of a loop count once.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
PARTS = re.compile(r"(?:@(!?U?P\w+)\s+)?(\S+)(.*)")


@dataclass(frozen=True)
class Count:  # of one pass
    loads: int  # of 16 bytes
    stores: int
    instructions: int

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.loads + other.loads,
            self.stores + other.stores,
            self.instructions + other.instructions,
        )

    @property
    def accesses(self) -> int:
        return self.loads + self.stores


@dataclass(frozen=True)
class Loop:
    begin: int  # addresses
    end: int
    least: Count
    most: Count


def disassembler() -> str | None:
    """cuobjdump: CUOBJDUMP, PATH, the CUDA toolkit, or a Python package that carries it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / "bin" for home in homes if home]
    for package, inside in (
        ("triton", "backends/nvidia/bin"),
        ("nvidia", "cu13/bin"),
        ("nvidia", "cu12/bin"),
    ):
        spec = importlib.util.find_spec(package)
        folders += [
            Path(place) / inside for place in (spec.submodule_search_locations if spec else None) or ()
        ]
    given = os.environ.get("CUOBJDUMP")
    if given:
        return given if Path(given).is_file() else None
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.pathsep.join(map(str, folders)))


def disassemble(cubin: Path) -> str:
    program = disassembler()
    if program is None:
        raise SystemExit(
            "sass: counting instructions needs cuobjdump: `pip install nvidia-cuda-cuobjdump` (or triton, "
            "that carries it), or the toolkit's package cuda-cuobjdump; CUOBJDUMP may say where it is"
        )
    return subprocess.run([program, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout


def kernels(text: str) -> dict[str, list[Loop]]:
    """Loops with 16-byte loads by kernel, in the order of their ends: inner ones come first."""
    found = {}
    for block in text.split("Function : ")[1:]:
        name = block.split("\n", 1)[0].strip()
        code = [
            (int(m[1], 16), m[2].strip()) for line in block.splitlines() if (m := INSTRUCTION.match(line))
        ]
        found[name] = loops(code)
    return found


def loops(code: list[tuple[int, str]]) -> list[Loop]:
    blocks = _Blocks(code)
    found = []
    for tail, targets in enumerate(blocks.next):
        for head in targets:
            if head > tail:
                continue
            least, most = (blocks.way(head, tail, sign) for sign in (1, -1))
            if least and least.loads:
                end = code[blocks.end[tail] - 1][0]
                found.append(Loop(code[blocks.begin[head]][0], end, least, most))
    return sorted(found, key=lambda loop: (loop.end, -loop.begin))


class _Blocks:
    """Basic blocks, and which may follow which."""

    def __init__(self, code: list[tuple[int, str]]):
        at = {address: i for i, (address, _) in enumerate(code)}
        begins, jumps = {0}, {}
        for i, (_, text) in enumerate(code):
            predicate, opcode, rest = PARTS.match(text).groups()
            kind = opcode.split(".")[0]
            if kind not in ("BRA", "BRX", "EXIT", "RET"):
                continue
            target = at.get(int(re.findall(r"0x([0-9a-f]+)", rest)[-1], 16)) if kind == "BRA" else None
            maybe = predicate is not None or (kind == "BRA" and re.search(r"\bU?P\d", rest) is not None)
            jumps[i] = kind, target, maybe
            begins |= {i + 1} | ({target} if target is not None else set())
        self.begin = sorted(i for i in begins if i < len(code))
        self.end = [*self.begin[1:], len(code)]
        number = {i: k for k, i in enumerate(self.begin)}
        self.count = [
            self._count(code[i][1] for i in range(b, e)) for b, e in zip(self.begin, self.end, strict=True)
        ]
        self.next: list[list[int]] = []
        for k, end in enumerate(self.end):
            kind, target, maybe = jumps.get(end - 1, ("", None, True))
            follows = [k + 1] if maybe and k + 1 < len(self.begin) else []
            self.next.append(([number[target]] if target is not None else []) + follows)
        # A jump by a table leads to the blocks behind it that nothing else leads to.
        known = {k for targets in self.next for k in targets}
        table = None
        for k, end in enumerate(self.end):
            if table is not None and k not in known:
                self.next[table].append(k)
            if jumps.get(end - 1, ("",))[0] == "BRX":
                table = k

    @staticmethod
    def _count(texts) -> Count:
        opcodes = [PARTS.match(text).group(2) for text in texts]
        wide = [opcode for opcode in opcodes if opcode.startswith(("LDG", "STG")) and ".128" in opcode]
        loads = sum(opcode.startswith("LDG") for opcode in wide)
        return Count(loads, len(wide) - loads, sum(opcode != "NOP" for opcode in opcodes))

    def way(self, head: int, tail: int, sign: int) -> Count | None:
        """From head to tail without going back: most accesses first, then least (or most) instructions."""
        best = {tail: self.count[tail]}
        for k in range(tail - 1, head - 1, -1):
            ways = [best[n] for n in self.next[k] if n > k and n in best]
            if ways:
                best[k] = self.count[k] + min(ways, key=lambda c: (-c.accesses, sign * c.instructions))
        return best.get(head)
