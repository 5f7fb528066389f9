"""tools/simulate: how PTX is spelled for GPGPU-Sim, and what is said where the simulator is not there."""

import os
import runpy
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PTX = runpy.run_path(str(ROOT / "tools/simulate/ptx.py"))


def module(*body: str, name: str = "one") -> str:
    return "\n".join([
        ".version 9.0", ".target sm_90", ".address_size 64", ".extern .shared .align 16 .b8 slots[];",
        f".visible .entry {name}(", f".param .align 8 .b8 {name}_param_0[64]", ")", ".maxntid 256", "{",
        *body, "}",
    ])  # fmt: skip


def spelled(*body: str) -> list[str]:
    """What becomes of the statements of a kernel, without registers' declarations."""
    text = PTX["spell"](module(*body))["one"]
    lines = text.partition("{\n")[2].rpartition("}")[0].splitlines()
    return [line for line in lines if not line.startswith((".reg .", ".shared"))]


def bits(kind: str, value: float) -> int:  # of a float (f) or a double (d)
    return int.from_bytes(struct.pack(f"<{kind}", value), "little")


def number(kind: str, value: int) -> float:
    size = struct.calcsize(kind)
    return struct.unpack(f"<{kind}", (value % 2 ** (8 * size)).to_bytes(size, "little"))[0]


WORD = 2**32
MEANINGS = {  # of the few instructions that packs, signs and fused products are spelled with
    "mov.b32": lambda a, b, c: a,
    "setp.nan.f32": lambda a, b, c: max(a % 2**31, b % 2**31) > 0x7F800000,
    "shr.u32": lambda a, b, c: a >> b,
    "shl.b32": lambda a, b, c: (a << b) % WORD,
    "and.b32": lambda a, b, c: (a & b) % WORD,
    "or.b32": lambda a, b, c: (a | b) % WORD,
    "add.u32": lambda a, b, c: (a + b) % WORD,
    "selp.b32": lambda a, b, c: a if c else b,
    "selp.f32": lambda a, b, c: a if c else b,
    "min.f32": lambda a, b, c: bits("f", min(number("f", a), number("f", b))),
    "cvt.f64.f32": lambda a, b, c: bits("d", number("f", a)),
    "mul.rn.f64": lambda a, b, c: bits("d", number("d", a) * number("d", b)),
    "add.rn.f64": lambda a, b, c: bits("d", number("d", a) + number("d", b)),
    "cvt.rn.f32.f64": lambda a, b, c: bits("f", number("d", a)),
}


def run(lines: list[str], registers: dict[str, int]) -> dict[str, int]:
    value = dict(registers)
    for line in lines:
        opcode, _, rest = line.rstrip(";").partition(" ")
        target, *sources = [part.strip() for part in rest.split(",")]
        found = [value[s] if s in value else int(s.replace("0f", "0x"), 0) for s in sources]
        value[target] = MEANINGS[opcode](*(found + [0, 0])[:3])
    return value


def test_bf16_packs_round_as_torch_does():
    special = [0.0, -0.0, 1.0, -1.00390625, 1.01171875, 3.4e38, float("inf"), -float("inf"), 1e-40]
    numbers = torch.cat([torch.tensor(special), torch.randn(64)])
    lines = spelled("cvt.rn.bf16x2.f32 %r3, %r1, %r2;")
    raw, expected = numbers.view(torch.int32), numbers.bfloat16().view(torch.int16)
    for i in range(len(numbers) - 1):
        packed = run(lines, {"%r1": raw[i].item() % WORD, "%r2": raw[i + 1].item() % WORD})["%r3"]
        assert packed >> 16 == expected[i].item() % 2**16
        assert packed % 2**16 == expected[i + 1].item() % 2**16
    assert run(lines, {"%r1": bits("f", float("nan")), "%r2": 0})["%r3"] == 0x7FFF0000


def test_fused_products_are_rounded_once():
    lines = spelled("fma.rn.f32 %r4, %r1, %r2, %r3;")
    a, b, c = 1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11  # unfused the product loses 2^-24, and the sum is 0
    result = run(lines, {"%r1": bits("f", a), "%r2": bits("f", b), "%r3": bits("f", c)})["%r4"]
    assert Fraction(number("f", result)) == Fraction(a) * Fraction(b) + Fraction(c) == Fraction(1, 2**24)


def test_signs_and_nans():
    one, minus_two, nan = 0x3F800000, 0xC0000000, 0x7FC00000
    lines = spelled("copysign.f32 %r3, %r1, %r2;")
    assert run(lines, {"%r1": minus_two, "%r2": one})["%r3"] == one | 0x80000000
    assert run(lines, {"%r1": one, "%r2": minus_two})["%r3"] == 0x40000000
    lines = spelled("min.NaN.f32 %r3, %r1, %r2;")
    assert run(lines, {"%r1": one, "%r2": minus_two})["%r3"] == minus_two
    assert run(lines, {"%r1": nan, "%r2": one})["%r3"] & 0x7FFFFFFF > 0x7F800000
    assert run(lines, {"%r1": one, "%r2": nan})["%r3"] & 0x7FFFFFFF > 0x7F800000


@pytest.mark.parametrize(
    "statement,lines",
    [
        ("ld.acquire.gpu.global.u32 %r1, [%rd1];", ["ld.global.u32 %r1, [%rd1];"]),
        ("@!%p1 ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+16];",
         ["@!%p1 ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+16];"]),
        ("barrier.sync 0;", ["bar.sync 0;"]),
        ("setp.eq.b32 %p1, %r1, 0;", ["setp.eq.u32 %p1, %r1, 0;"]),
        ("setp.lt.and.f32 %p1, %r1, %r2, %p2;",
         ["setp.lt.f32 %spelled_pred_1, %r1, %r2;", "and.pred %p1, %spelled_pred_1, %p2;"]),
        ("add.s64 %rd1, %rd2, 8589934593;",
         ["mov.u32 %spelled_b32_1, 1;", "mov.u32 %spelled_b32_2, 2;",
          "mov.b64 %spelled_b64_1, {%spelled_b32_1, %spelled_b32_2};",
          "add.s64 %rd1, %rd2, %spelled_b64_1;"]),
        ("mov.b32 %r1, {0, %rs1};",
         ["mov.b16 %spelled_b16_1, 0;", "mov.b32 %r1, {%spelled_b16_1, %rs1};"]),
        ("mov.b64 {_, %r1}, %rd1;", ["mov.b64 {%spelled_b32_1, %r1}, %rd1;"]),
        ("add.s64 %rd1, %rd2, -16;", ["add.s64 %rd1, %rd2, -16;"]),
        ("cvt.rn.f32.s64 %f1, %rd1;",
         ["mov.b64 {%spelled_b32_1, %spelled_b32_2}, %rd1;", "cvt.rn.f64.u32 %spelled_f64_1, %spelled_b32_1;",
          "cvt.rn.f64.s32 %spelled_f64_2, %spelled_b32_2;",
          "mul.rn.f64 %spelled_f64_2, %spelled_f64_2, 0d41F0000000000000;",  # 2^32
          "add.rn.f64 %spelled_f64_1, %spelled_f64_2, %spelled_f64_1;",
          "cvt.rn.f32.f64 %f1, %spelled_f64_1;"]),
    ],
)  # fmt: skip
def test_spelling(statement, lines):
    assert spelled(statement) == lines


def test_shuffles_pass_through_shared_memory():
    lines = spelled("shfl.sync.bfly.b32 %r2|%p1, %r1, %r3, 31, -1;")
    stores = [line for line in lines if line.startswith("st.shared.b32") and line.endswith("%r1;")]
    loads = [line for line in lines if line.startswith("ld.shared.b32 %r2, ")]
    assert len(stores) == len(loads) == 1 and lines.index(stores[0]) < lines.index(loads[0])
    text = PTX["spell"](module("shfl.sync.bfly.b32 %r2, %r1, 4, 31, -1;"))["one"]
    assert ".shared .align 4 .b32 spelled_shuffled[256];" in text
    assert "spelled_shuffled" not in PTX["spell"](module("ret;"))["one"]


def test_fences_are_dropped():
    assert spelled("fence.acq_rel.gpu;", "ret;") == ["ret;"]


def test_jump_tables_become_comparisons():
    lines = spelled("$L_0: .branchtargets $L1, $L2;", "brx.idx %r1, $L_0;", "$L1:", "$L2:", "ret;")
    jumps = ["@%spelled_pred_1 bra $L1;", "@%spelled_pred_2 bra $L2;"]
    assert [line for line in lines if "bra" in line] == jumps
    assert not any("targets" in line or line == "$L_0:" for line in lines)


def test_shared_memory_of_the_module_becomes_the_kernels_own():
    text = PTX["spell"](
        ".shared .align 1 .b8 last;\n" + module("mov.u64 %rd1, slots;", "mov.u64 %rd2, last;")
    )
    dynamic = ".shared .align 16 .b8 slots[83968];"  # 228 KiB for two blocks, less 32 KiB each
    assert dynamic in text["one"] and ".shared .align 1 .b8 last;" in text["one"]
    assert ".shared" not in PTX["spell"](module("ret;"))["one"]


def test_what_is_not_known_is_an_error():
    with pytest.raises(Exception, match="cp.async.cg.shared.global"):
        spelled("cp.async.cg.shared.global [%r1], [%rd1], 16;")
    with pytest.raises(Exception, match="mul.hi.u64"):  # which the simulator takes for mul.lo
        spelled("mul.hi.u64 %rd1, %rd2, %rd3;")


def test_kernels_that_wait_for_ranks_are_left_out():
    both = module("ret;") + module("mov.u64 %rd1, %globaltimer;", "ret;", name="two")
    assert list(PTX["spell"](both)) == ["one"]


def simulate(*arguments: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "GPGPUSIM"}
    result = subprocess.run(
        [sys.executable, "tools/simulate/run.py", *arguments], cwd=ROOT, env=clean | environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1
    return result.stderr


def test_what_it_needs_is_said(tmp_path):
    assert "GPGPUSIM is not set" in simulate()
    assert f"{tmp_path} is not GPGPU-Sim's sources" in simulate(GPGPUSIM=str(tmp_path))
