"""Reads machine code: the loops of each kernel, and how many instructions a pass of them takes.

A pass is a way through the loop's blocks that performs all of its 16-byte accesses and works on what they
load: to copy it or store it as it came is no work. So the way around an activation that the kernel was not
compiled with is no pass. `least` is the shortest one: the activation that costs nothing. `most` is the
longest: the activation that costs most, with both sides of what may diverge in turn. Loops inside of a loop
count once.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
PARTS = re.compile(r"(?:@(!?U?P\w+)\s+)?(\S+)(.*)")
TABLES = ("BRX", "BRXU")  # jumps by a table, the second with the same for the whole warp
MOST_WAYS = 64  # to a block, of which the best go on: n conditions on packets would give 2^n
REGISTER = re.compile(r"\bR(\d+)\b")


# Of integers, comparisons and conversions: half as many a cycle as of products and sums of floats.
HALF_RATE = tuple(
    "IADD LOP3 SHF ISETP PRMT SEL FSEL IMNMX VIMNMX FMNMX FSETP F2FP LEA PLOP3 R2P IABS".split()
)


@dataclass(frozen=True)
class Count:  # of one pass
    loads: int  # of 16 bytes
    stores: int
    instructions: int
    half: int = field(default=0, compare=False)  # of them, those of HALF_RATE

    def __add__(self, other: "Count") -> "Count":
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def slots(self) -> int:
        """Cycles of a scheduler: instructions, or twice those of half rate where they take longer."""
        return max(self.instructions, 2 * self.half)

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
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    for inside in ("triton/backends/nvidia/bin", "nvidia/cu13/bin", "nvidia/cu12/bin"):
        folders += [Path(place) / inside for place in sys.path]
    given = os.environ.get("CUOBJDUMP")
    if given:
        return given if Path(given).is_file() else None
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.pathsep.join(map(str, folders)))


def disassemble(cubin: Path) -> str:
    program = disassembler()
    if program is None:
        raise SystemExit(
            "sass: counting instructions needs cuobjdump: `pip install nvidia-cuda-cuobjdump "
            "nvidia-cuda-nvdisasm` (or triton, that carries both), or the toolkit's packages cuda-cuobjdump "
            "and cuda-nvdisasm; CUOBJDUMP may say where it is"
        )
    # It starts nvdisasm, which lies beside it or on PATH.
    environment = os.environ | {"PATH": f"{Path(program).resolve().parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run([program, "-sass", str(cubin)], capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"sass: {program} -sass failed: {result.stderr.strip()}")
    return result.stdout


def kernels(text: str) -> dict[str, list[Loop]]:
    """Loops with 16-byte accesses by kernel, in the order of their ends: inner ones come first."""
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
            if least and least.accesses:
                end = code[blocks.end[tail] - 1][0]
                found.append(Loop(code[blocks.begin[head]][0], end, least, most))
    return sorted(found, key=lambda loop: (loop.end, -loop.begin))


class _Step:
    """What an instruction does to registers."""

    def __init__(self, address: int, text: str):
        predicate, opcode, rest = PARTS.match(text).groups()
        first, _, others = rest.partition(",")
        stores = opcode.startswith(("STG", "STS", "STL", "RED"))
        target = None if stores else REGISTER.match(first.strip())
        # Of 64 bits are doubles, products of addresses and the like.
        words = 4 if ".128" in opcode else 2 if re.search(r"\.64|WIDE|^D[AFM]|F64\.", opcode) else 1
        self.address = address
        self.maybe = predicate is not None
        self.copies = opcode.startswith(("MOV", "IMAD.MOV"))
        self.loads = opcode.startswith(("LDG", "LDS")) and ".128" in opcode
        self.writes = range(int(target[1]), int(target[1]) + words) if target else range(0)
        read = others if target else "" if opcode.startswith("STG") else rest
        self.reads = {int(number) for number in REGISTER.findall(read)}


Held = frozenset[tuple[int, int]]  # registers, and the address of the load that filled each


class _Blocks:
    """Basic blocks, and which may follow which."""

    def __init__(self, code: list[tuple[int, str]]):
        at = {address: i for i, (address, _) in enumerate(code)}
        begins, jumps = {0}, {}
        for i, (_, text) in enumerate(code):
            predicate, opcode, rest = PARTS.match(text).groups()
            kind = opcode.split(".")[0]
            if kind not in ("BRA", *TABLES, "EXIT", "RET"):
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
        self.steps = [
            [_Step(*code[i]) for i in range(b, e)] for b, e in zip(self.begin, self.end, strict=True)
        ]
        self.loads = [any(step.loads for step in steps) for steps in self.steps]
        self.known: dict[tuple[int, Held], tuple[Held, int]] = {}
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
            if jumps.get(end - 1, ("",))[0] in TABLES:
                table = k

    @staticmethod
    def _count(texts) -> Count:
        opcodes = [PARTS.match(text).group(2) for text in texts]
        wide = [opcode for opcode in opcodes if opcode.startswith(("LDG", "STG")) and ".128" in opcode]
        loads = sum(opcode.startswith("LDG") for opcode in wide)
        half = sum(opcode.startswith(HALF_RATE) for opcode in opcodes)
        return Count(loads, len(wide) - loads, sum(opcode != "NOP" for opcode in opcodes), half)

    def _through(self, k: int, held: Held) -> tuple[Held, int]:
        """What is loaded and not worked on yet behind block k, and how many loads were worked on in it."""
        if not held and not self.loads[k]:
            return held, 0
        if (k, held) in self.known:
            return self.known[k, held]
        now, worked = set(held), 0
        for step in self.steps[k]:
            read = {load for register, load in now if register in step.reads}
            copied = {(step.writes[0], load) for load in read} if step.copies and step.writes else set()
            if read and not step.copies:
                now = {(register, load) for register, load in now if load not in read}
                worked += len(read)
            if not step.maybe:
                now = {(register, load) for register, load in now if register not in step.writes}
            now |= copied
            if step.loads:
                now |= {(register, step.address) for register in step.writes}
        self.known[k, held] = frozenset(now), worked
        return self.known[k, held]

    def way(self, head: int, tail: int, sign: int) -> Count | None:
        """From head to tail without going back: most accesses first, then most loads that are worked on, then
        least (or most) instructions.
        """

        def rank(found: tuple[Count, int]) -> tuple[int, int, int]:
            count, worked = found
            return -count.accesses, -worked, sign * count.instructions

        start: Held = frozenset()
        best: dict[int, dict[Held, tuple[Count, int]]] = {head: {start: (Count(0, 0, 0), 0)}}
        ends = []
        for k in range(head, tail + 1):
            ways = best.pop(k, {}).items()
            if len(ways) > MOST_WAYS:
                ways = sorted(ways, key=lambda way: rank(way[1]))[:MOST_WAYS]
            for held, (count, worked) in ways:
                after, more = self._through(k, held)
                found = count + self.count[k], worked + more
                if k == tail:
                    ends.append(found)
                for n in self.next[k]:
                    if k < n <= tail:
                        known = best.setdefault(n, {})
                        known[after] = min(known.get(after, found), found, key=rank)
        return min(ends, key=rank)[0] if ends else None
