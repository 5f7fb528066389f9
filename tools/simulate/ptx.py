"""Rewrites the PTX of today's nvcc for GPGPU-Sim, which reads the PTX of 2018.

An instruction passes as it is only if its form is listed in AS_THEY_ARE; one that a rule spells anew becomes
others that mean the same; any other is an error. Kernels that wait for other ranks (%globaltimer) are left
out. What differs from a GPU, and so cannot be proven here:

    memory order   scopes and orders of loads, stores and atomics are dropped: the simulator performs each in
                   program order, and block after block. It takes a fence for a barrier of the block, so
                   fences are dropped.
    rounding       fma.rn.f32 is a product and a sum in double, rounded once more; fma.rn.f64 is not fused.
                   Approximations (ex2, lg2, rcp, div) are the host's.
    bf16           packs and unpacks are integer arithmetic, which rounds to nearest even.
    shuffles       go through shared memory: the simulator has them in its timing mode only, which ends by
                   signal 11.
"""

import functools
import re
from collections.abc import Callable

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
NEXT = re.compile(r"\s*(?:([$%\w]+:)(?!:)|([{}])|([^;]+);)")
# Orders, scopes and hints of memory accesses.
HINTS = re.compile(r"\.(?:relaxed|acquire|release|acq_rel|weak|volatile|gpu|sys|cta|L[12]::\w+)(?=\.|$)")
HEADER = ".version 6.0\n.target sm_70\n.address_size 64\n"
DYNAMIC_BYTES = (228 << 10) // 2 - (32 << 10)  # as csrc/cuda/launch.cuh gives a block of runtime.cpp's GPU
SHUFFLED, THREADS = "spelled_shuffled", 256  # a number of each thread of a block: csrc/cuda/plan.h
INTEGER = re.compile(r"-?\d+|0[xX][0-9a-fA-F]+")

FLOATS, INTS, BITS = r"f(?:32|64)", r"[su](?:16|32|64)", r"b(?:16|32|64)"
COMPARISONS = "(?:eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan|lo|ls|hi|hs)"
MEMORY = r"(?:\.(?:global|shared|local|param))?(?:\.nc|\.ca|\.cg|\.cs)?(?:\.v[24])?\.[bfsu](?:8|16|32|64)"
AS_THEY_ARE = re.compile(
    "|".join([
        rf"(?:add|sub|mul|div)(?:\.rn)?\.{FLOATS}", r"div\.(?:approx|full)\.f32",
        rf"(?:abs|neg|min|max)\.{FLOATS}", rf"(?:sqrt|rcp)\.rn\.{FLOATS}",
        r"(?:ex2|lg2|rcp|sqrt|rsqrt)\.approx(?:\.ftz)?\.f32", r"rcp\.approx\.ftz\.f64",
        rf"(?:add|sub|min|max|div|rem)\.{INTS}", r"(?:abs|neg)\.s(?:16|32|64)", rf"mul\.lo\.{INTS}",
        r"(?:mul\.(?:wide|hi)|mad\.wide)\.[su](?:16|32)", rf"mad\.lo\.{INTS}",
        rf"setp\.{COMPARISONS}\.(?:{FLOATS}|{INTS})",
        rf"selp\.(?:{FLOATS}|{BITS}|{INTS})", rf"(?:and|or|xor|not)\.(?:pred|{BITS})", rf"shl\.{BITS}",
        rf"shr\.(?:{INTS}|{BITS})", r"shf\.[lr]\.(?:wrap|clamp)\.b32", r"bfe\.u32", r"prmt\.b32",
        rf"mov\.(?:pred|{FLOATS}|{INTS}|{BITS})", r"clz\.b32", r"popc\.b32",
        r"cvt\.[su](?:8|16|32|64)\.[su](?:8|16|32|64)", r"cvt\.rn\.f(?:32|64)\.[su](?:16|32)",
        r"cvt\.(?:f64\.f32|rn\.f32\.f64|f32\.f16|rn\.f16\.f32)", r"cvt\.r[nzmp]i\.[su]32\.f32",
        r"cvt\.r[nzmp]i\.f(?:32\.f32|64\.f64)", r"cvta\.(?:to\.global|shared)\.u64",
        rf"ld{MEMORY}", rf"st{MEMORY}", r"atom(?:\.global)?\.(?:add|inc|exch)\.[bu]32",
        r"bar\.sync", r"bra(?:\.uni)?", r"ret", r"exit",
    ])
)  # fmt: skip


class Unknown(Exception):
    """An instruction that has neither a form in the list nor a rule."""


class Kernel:
    """Spells the statements of one kernel."""

    def __init__(self) -> None:
        self.temporaries: dict[str, int] = {}
        self.targets: dict[str, list[str]] = {}  # of brx.idx
        self.shuffles = False

    def new(self, kind: str) -> str:
        """A register of its own for .b16, .b32, .b64, .f32, .f64 or .pred."""
        self.temporaries[kind] = self.temporaries.get(kind, 0) + 1
        return f"%spelled_{kind}_{self.temporaries[kind]}"

    def spell(self, statement: str) -> list[str]:
        if statement.startswith(".") or statement.endswith(":"):
            return [directive(statement)]
        negated, predicate, opcode, rest = STATEMENT.fullmatch(statement).groups()
        operands = split(rest)
        lines = self.instruction(opcode, operands)
        if predicate is None:
            return [f"{line};" if not line.endswith(":") else line for line in lines]
        if any(line.endswith(":") for line in lines):
            raise Unknown(f"{opcode} with a predicate")
        return [f"@{negated}{predicate} {line};" for line in lines]

    def instruction(self, opcode: str, operands: list[str]) -> list[str]:
        memory = opcode.split(".")[0] in ("ld", "st", "atom", "red")
        plain = HINTS.sub("", opcode) if memory else opcode
        before, operands = self.wide_literals(plain, operands)
        for i, operand in enumerate(operands):
            if operand.startswith("{"):
                lines, operand = self.vector(plain, operand)
                before, operands = before + lines, [*operands[:i], operand, *operands[i + 1 :]]
        rule = rule_of(plain)
        if rule:
            return before + rule(self, plain, operands)
        operands = [self.new("b32") if operand == "_" else operand for operand in operands]
        return [*before, f"{plain} {', '.join(operands)}".strip()]

    def wide_literals(self, opcode: str, operands: list[str]) -> tuple[list[str], list[str]]:
        """The simulator reads literals as 32 bits with a sign: those of 64 bits come in two halves."""
        lines = []
        if re.search(r"\.[sub]64", opcode) and not opcode.startswith(("ld", "st", "atom")):
            for i, operand in enumerate(operands):
                if INTEGER.fullmatch(operand) and not -(2**31) <= int(operand, 0) < 2**31:
                    low, high, both = self.new("b32"), self.new("b32"), self.new("b64")
                    value = int(operand, 0) % 2**64
                    lines += [f"mov.u32 {low}, {signed(value)}", f"mov.u32 {high}, {signed(value >> 32)}"]
                    lines.append(f"mov.b64 {both}, {{{low}, {high}}}")
                    operands = [*operands[:i], both, *operands[i + 1 :]]
        return lines, operands

    def vector(self, opcode: str, operand: str) -> tuple[list[str], str]:
        """A vector's parts are registers: literals are moved to some, what is thrown away goes to others."""
        parts = [part.strip() for part in operand.strip("{}").split(",")]
        bits = int(re.findall(r"\d+", opcode)[-1])
        kind = f"b{bits // len(parts) if opcode.startswith('mov') else bits}"
        lines = []
        for i, part in enumerate(parts):
            if not part.startswith("%"):
                parts[i] = self.new(kind)
                lines += [] if part == "_" else [f"mov.{kind} {parts[i]}, {part}"]
        return lines, f"{{{', '.join(parts)}}}"

    def boolean_setp(self, opcode: str, operands: list[str]) -> list[str]:  # setp.lt.and.f32 p, a, b, q
        _, comparison, join, kind = opcode.split(".")
        target, a, b, other = operands
        mine, lines = self.new("pred"), []
        if other.startswith("!"):
            lines, other = [f"not.pred {(inverse := self.new('pred'))}, {other[1:]}"], inverse
        compare = self.compare_bits(f"setp.{comparison}.{kind}", [mine, a, b])
        return [*lines, *compare, f"{join}.pred {target}, {mine}, {other}"]

    def compare_bits(self, opcode: str, operands: list[str]) -> list[str]:  # as numbers without sign
        return [f"{re.sub('[.]b(?=16$|32$|64$)', '.u', opcode)} {', '.join(operands)}"]

    def branch_by_index(self, opcode: str, operands: list[str]) -> list[str]:
        index, table = operands
        lines = []
        for i, target in enumerate(self.targets[table]):
            here = self.new("pred")
            lines += [f"setp.eq.u32 {here}, {index}, {i}", f"@{here} bra {target}"]
        return lines

    def fused(self, opcode: str, operands: list[str]) -> list[str]:
        """Of floats in doubles: their product is exact there, so only the sum is rounded twice."""
        target, *factors = operands
        lines, wide = [], []
        for factor in factors:
            if re.match("0[fF]", factor):
                lines.append(f"mov.f32 {(held := self.new('f32'))}, {factor}")
                factor = held
            wide.append(self.new("f64"))
            lines.append(f"cvt.f64.f32 {wide[-1]}, {factor}")
        a, b, c = wide
        return [
            *lines, f"mul.rn.f64 {a}, {a}, {b}", f"add.rn.f64 {a}, {a}, {c}", f"cvt.rn.f32.f64 {target}, {a}",
        ]  # fmt: skip

    def to_bf16(self, operand: str) -> tuple[list[str], str]:
        """Bits of a bf16 in a 32-bit register, to nearest even; a NaN is 0x7fff."""
        bits, odd, nan = self.new("b32"), self.new("b32"), self.new("pred")
        return [
            f"mov.b32 {bits}, {operand}", f"setp.nan.f32 {nan}, {bits}, {bits}",
            f"shr.u32 {odd}, {bits}, 16", f"and.b32 {odd}, {odd}, 1", f"add.u32 {odd}, {odd}, 32767",
            f"add.u32 {bits}, {bits}, {odd}", f"shr.u32 {bits}, {bits}, 16",
            f"selp.b32 {bits}, 32767, {bits}, {nan}",
        ], bits  # fmt: skip

    def pack_bf16(self, opcode: str, operands: list[str]) -> list[str]:  # the first source is the upper half
        target, upper, lower = operands
        first, high = self.to_bf16(upper)
        second, low = self.to_bf16(lower)
        return [*first, *second, f"shl.b32 {high}, {high}, 16", f"or.b32 {target}, {high}, {low}"]

    def one_bf16(self, opcode: str, operands: list[str]) -> list[str]:
        lines, bits = self.to_bf16(operands[1])
        return [*lines, f"cvt.u16.u32 {operands[0]}, {bits}"]

    def from_bf16(self, opcode: str, operands: list[str]) -> list[str]:
        bits = self.new("b32")
        target, source = operands
        return [f"cvt.u32.u16 {bits}, {source}", f"shl.b32 {bits}, {bits}, 16", f"mov.b32 {target}, {bits}"]

    def pack_f16(self, opcode: str, operands: list[str]) -> list[str]:
        target, upper, lower = operands
        high, low = self.new("b16"), self.new("b16")
        return [
            f"cvt.rn.f16.f32 {high}, {upper}", f"cvt.rn.f16.f32 {low}, {lower}",
            f"mov.b32 {target}, {{{low}, {high}}}",
        ]  # fmt: skip

    def keeping_nan(self, opcode: str, operands: list[str]) -> list[str]:  # min.NaN, max.NaN
        target, a, b = operands
        nan, found = self.new("pred"), self.new("f32")
        return [
            f"setp.nan.f32 {nan}, {a}, {b}", f"{opcode.replace('.NaN', '')} {found}, {a}, {b}",
            f"selp.f32 {target}, 0f7FFFFFFF, {found}, {nan}",
        ]  # fmt: skip

    def copysign(self, opcode: str, operands: list[str]) -> list[str]:  # the sign of the first source
        target, sign, size = operands
        if opcode.endswith("64"):
            lines, halves = [], []
            for operand in (sign, size):
                halves.append((self.new("b32"), self.new("b32"), self.new("b64")))
                low, high, held = halves[-1]
                lines += [f"mov.f64 {held}, {operand}", f"mov.b64 {{{low}, {high}}}, {held}"]
            (_, sign_high, _), (low, high, both) = halves
            join = [f"mov.b64 {both}, {{{low}, {high}}}", f"mov.f64 {target}, {both}"]
        else:
            sign_high, high = self.new("b32"), self.new("b32")
            lines = [f"mov.b32 {sign_high}, {sign}", f"mov.b32 {high}, {size}"]
            join = [f"mov.b32 {target}, {high}"]
        return [
            *lines, f"and.b32 {sign_high}, {sign_high}, -2147483648", f"and.b32 {high}, {high}, 2147483647",
            f"or.b32 {high}, {high}, {sign_high}", *join,
        ]  # fmt: skip

    def shuffle(self, opcode: str, operands: list[str]) -> list[str]:
        """All lanes of the warp take part, in each instruction together. The predicate is not used."""
        target, source, lane, _, _ = operands
        self.shuffles = True
        thread, base, own, other = (self.new("b32") for _ in range(4))
        return [
            f"mov.u32 {thread}, %tid.x", f"mov.u32 {base}, {SHUFFLED}", f"shl.b32 {own}, {thread}, 2",
            f"add.u32 {own}, {own}, {base}", f"st.shared.b32 [{own}], {source}",
            f"xor.b32 {other}, {thread}, {lane}", f"shl.b32 {other}, {other}, 2",
            f"add.u32 {other}, {other}, {base}", f"ld.shared.b32 {target.partition('|')[0]}, [{other}]",
        ]  # fmt: skip

    def from_wide(self, opcode: str, operands: list[str]) -> list[str]:
        """By halves in doubles: the simulator converts 64-bit integers from an undefined number."""
        target, source = operands
        low, high, wide, upper = self.new("b32"), self.new("b32"), self.new("f64"), self.new("f64")
        sign = "s" if opcode.endswith("s64") else "u"
        return [
            f"mov.b64 {{{low}, {high}}}, {source}", f"cvt.rn.f64.u32 {wide}, {low}",
            f"cvt.rn.f64.{sign}32 {upper}, {high}", f"mul.rn.f64 {upper}, {upper}, 0d41F0000000000000",
            f"add.rn.f64 {wide}, {upper}, {wide}",
            f"cvt.rn.f32.f64 {target}, {wide}" if ".f32." in opcode else f"mov.f64 {target}, {wide}",
        ]  # fmt: skip


Rule = Callable[[Kernel, str, list[str]], list[str]]
RULES: dict[str, Rule] = {
    rf"setp\.{COMPARISONS}\.(?:and|or|xor)\.\w+": Kernel.boolean_setp,
    rf"setp\.{COMPARISONS}\.b(?:16|32|64)": Kernel.compare_bits,
    r"brx\.idx(?:\.uni)?": Kernel.branch_by_index,
    r"fma\.rn\.f32": Kernel.fused,
    r"fma\.rn\.f64": lambda kernel, opcode, operands: [f"{opcode} {', '.join(operands)}"],
    r"cvt\.rn\.bf16x2\.f32": Kernel.pack_bf16,
    r"cvt\.rn\.bf16\.f32": Kernel.one_bf16,
    r"cvt\.f32\.bf16": Kernel.from_bf16,
    r"cvt\.rn\.f16x2\.f32": Kernel.pack_f16,
    r"(?:min|max)\.NaN\.f32": Kernel.keeping_nan,
    r"copysign\.f(?:32|64)": Kernel.copysign,
    r"cvt\.rn\.f(?:32|64)\.[su]64": Kernel.from_wide,
    r"shfl\.sync\.bfly\.b32": Kernel.shuffle,
    r"(?:fence|membar|prefetch)\..*": lambda kernel, opcode, operands: [],
    r"barrier(?:\.cta)?\.sync(?:\.aligned)?": lambda kernel, opcode, operands: [f"bar.sync {operands[0]}"],
}


@functools.cache
def rule_of(opcode: str) -> Rule | None:
    """None where the simulator takes it as it is."""
    for pattern, rule in RULES.items():
        if re.fullmatch(pattern, opcode):
            return rule
    if AS_THEY_ARE.fullmatch(opcode):
        return None
    raise Unknown(opcode)


def signed(bits: int) -> int:
    bits &= 2**32 - 1
    return bits - 2**32 if bits >= 2**31 else bits


def split(operands: str) -> list[str]:
    """At the commas outside of braces."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", operands) if part.strip()]


def directive(statement: str) -> str:
    return statement if statement.endswith(":") else f"{statement};"


def entries(ptx: str) -> dict[str, tuple[str, str]]:
    """Head and body of each kernel."""
    found = {}
    for match in re.finditer(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+(\w+)", ptx):
        begin = ptx.index("{", match.end())
        end, depth = begin, 0
        while depth > 0 or end == begin:
            depth += {"{": 1, "}": -1}.get(ptx[end], 0)
            end += 1
        found[match[1]] = ptx[match.start() : begin].strip(), ptx[begin + 1 : end - 1]
    return found


def statements(body: str) -> list[str]:
    """Labels, blocks' braces and what ends in a semicolon, without it."""
    found, at = [], 0
    while match := NEXT.match(body, at):
        at = match.end()
        found.append(" ".join(match[match.lastindex or 0].split()))
    if body[at:].strip():
        raise Unknown(body[at:].strip()[:80])
    return found


def spell_kernel(head: str, body: str, shared: dict[str, str]) -> str:
    """One kernel's file; `shared` holds declarations of the module's shared memory by name."""
    kernel = Kernel()
    found = statements(body)
    for label, statement in zip(found, found[1:], strict=False):
        if statement.startswith(".branchtargets"):
            kernel.targets[label.rstrip(":")] = split(statement.removeprefix(".branchtargets"))
    used = set(re.findall(r"[\w$]+", body))
    lines = []
    for statement in found:
        if statement.startswith((".branchtargets", ".pragma")) or statement.rstrip(":") in kernel.targets:
            continue
        lines += [statement] if statement in "{}" else kernel.spell(statement)
    declared = [declaration for name, declaration in shared.items() if name in used]
    declared += [f".shared .align 4 .b32 {SHUFFLED}[{THREADS}]"] if kernel.shuffles else []
    head = re.sub(r"\.maxntid\s+(\d+)(?=\s|$)", r".maxntid \1, 1, 1", head)
    registers = [
        f".reg .{kind} %spelled_{kind}_{i};"
        for kind, count in kernel.temporaries.items()
        for i in range(1, count + 1)
    ]
    return "\n".join([HEADER, head, "{", *registers, *(f"{line};" for line in declared), *lines, "}", ""])


def shared_memory(outside: str) -> dict[str, str]:
    """Declarations of a module's shared memory; of a size that launches say, with DYNAMIC_BYTES."""
    found = {}
    for match in re.finditer(r"(\.shared\s[^;]*?)([\w$]+)(\[\d*\])?\s*;", outside):
        size = f"[{DYNAMIC_BYTES}]" if match[3] == "[]" else match[3] or ""
        found[match[2]] = f"{' '.join(match[1].split())} {match[2]}{size}"
    return found


def spell(ptx: str) -> dict[str, str]:
    """The files of a module's kernels, by kernel."""
    plain = COMMENT.sub("", ptx)
    kernels = entries(plain)
    outside = plain
    for _, body in kernels.values():
        outside = outside.replace(body, "", 1)
    shared = shared_memory(outside)
    return {
        name: spell_kernel(head, body, shared)
        for name, (head, body) in kernels.items()
        if "%globaltimer" not in body
    }
