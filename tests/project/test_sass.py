"""tools/kernel_resources.py: rules for the machine code of the kernels, and each way to break one."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("c++filt"), reason="c++filt demangles the names of kernels")

FORWARD = "bn_forward_kernel<float, false, 4, false>"
STATS = "bn_stats_kernel<float, true, false, 4>"  # with an exchange
MANGLED = "_ZN7fastvit17bn_forward_kernelIfLb0ELi4ELb0EEEvNS_12KernelParamsINS_15BnForwardParamsEEE"

# A load, a branch around the arithmetic and a store, as in every kernel. Constants are read before the wait.
BODY = """
LDC R1, c[0x0][0x28]
ACQBULK
S2R R7, SR_TID.X
PREEXIT
@!P0 LDG.E.EF.128 R24, desc[UR8][R38.64]
@P0 BRA `(.L_x_0)
FFMA R24, R24, R2, R3
.L_x_0:
@!P0 STG.E.128 desc[UR8][R40.64], R24
EXIT
"""
EXCHANGE = BODY.replace("PREEXIT", "LDG.E.128.STRONG.SYS R8, desc[UR4][R2.64]")


@pytest.fixture
def sass(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import kernel_resources

    yield kernel_resources
    del sys.modules["kernel_resources"]


def disassembly(body: str) -> str:
    """Returns the text that nvdisasm -c prints for a kernel of these instructions and labels."""
    lines = [
        line if line.endswith(":") else f"        /*0010*/    {line} ;" for line in body.split("\n") if line
    ]
    section = f'\t.target\tsm_90\n\n\t.section\t.text.{MANGLED},"ax",@progbits\n\t.align\t128'
    return "\n".join([section, f".text.{MANGLED}:", f"{MANGLED}:", *lines])


def test_basic_blocks_end_at_branches_and_labels(sass):
    (code,) = sass.parse_disassembly(disassembly(BODY)).values()
    assert [len(block) for block in code if block] == [6, 1, 2]
    assert list(
        sass.parse_disassembly(disassembly(BODY) + disassembly(BODY).replace("Lb0ELi4", "Lb1ELi4"))
    ) == [
        FORWARD,
        "bn_forward_kernel<float, true, 4, false>",
    ]


@pytest.mark.parametrize(
    ("kernel", "body"),
    [
        (FORWARD, BODY),
        (STATS, EXCHANGE),
        ("bn_stats_kernel<float, false, false, 4>", BODY.replace("STG.E.128", "STG.E")),  # stores sums alone
        ("bn_forward_kernel<float, false, 1, false>", BODY.replace(".128", "")),
        ("layer_norm_forward_kernel<float, __half, 4, 8>", BODY.replace("STG.E.128", "STG.E.64")),
        (
            "merge_messages_kernel<float, float>",
            BODY.replace("STG.E.128", "ST.E.STRONG.SYS"),
        ),  # a fault, to the host
    ],
    ids=["forward", "exchange", "sums", "single_row", "half", "to_the_host"],
)
def test_good_code_has_no_fault(sass, kernel, body):
    (code,) = sass.parse_disassembly(disassembly(body)).values()
    assert sass.find_code_faults(kernel, code) == []


@pytest.mark.parametrize(
    ("kernel", "body", "expected"),
    [
        (FORWARD, BODY.replace("ACQBULK\n", ""), "does not begin with griddepcontrol.wait"),
        (FORWARD, BODY.replace("ACQBULK", "@P0 ACQBULK"), "does not begin with griddepcontrol.wait"),
        (
            FORWARD,
            BODY.replace("ACQBULK", "@P0 BRA `(.L_x_0)\nACQBULK"),
            "does not begin with griddepcontrol.wait",
        ),
        (
            FORWARD,
            BODY.replace("ACQBULK", "@P1 LD.E R0, desc[UR6][R2.64]\nACQBULK"),
            "before griddepcontrol.wait: LD.E",
        ),
        (FORWARD, BODY.replace("PREEXIT", "NOP"), "lacks griddepcontrol.launch_dependents"),
        (
            STATS,
            EXCHANGE.replace("EXIT", "PREEXIT\nEXIT"),
            "exchanges with peers, and lets the next kernel begin",
        ),
        (FORWARD, BODY.replace("FFMA", "STL.64 [R1], R24\nFFMA"), "local memory"),
        (FORWARD, BODY.replace("LDG.E.EF.128", "LDG.E.EF.64"), "no vector load"),
        (FORWARD, BODY.replace("STG.E.128", "STG.E.64"), "no vector store"),
        # A packet of 16 bytes from a peer is no vector of the tensor.
        (STATS, EXCHANGE.replace("LDG.E.EF.128", "LDG.E.EF"), "no vector load"),
        (
            "layer_norm_forward_kernel<float, __half, 4, 8>",
            BODY.replace("STG.E.128", "STG.E"),
            "no vector store",
        ),
    ],
    ids=[
        "no_wait",
        "wait_of_some",
        "branch_around_wait",
        "load_before_wait",
        "no_launch",
        "launch_in_exchange",
    ]
    + ["local_memory", "narrow_load", "narrow_store", "packets_alone", "narrow_row_store"],
)
def test_faults_are_found(sass, kernel, body, expected):
    (code,) = sass.parse_disassembly(disassembly(body)).values()
    (found,) = sass.find_code_faults(kernel, code)
    assert expected in found


def test_registers_leave_room_for_the_blocks_that_are_demanded(sass, monkeypatch):
    monkeypatch.setattr(sass, "MIN_BLOCKS", {r"bn_forward_kernel<\w+, \w+, 1,": 4, "bn_forward_kernel": 3})
    # Registers are given out in eights: 80 for three blocks of 256 threads, 64 for four.
    assert sass.check_registers(FORWARD, 80) == [] != sass.check_registers(FORWARD, 81)
    scalar = FORWARD.replace("4", "1")
    assert sass.check_registers(scalar, 64) == []
    assert sass.check_registers(scalar, 65) == [
        "65 registers leave room for 3 blocks, and MIN_BLOCKS demands 4"
    ]
    assert sass.check_registers("bn_forward_single_launch_kernel<float>", 32) == ["has no row in MIN_BLOCKS"]


def arithmetic(**counts: int) -> list[str]:
    return [f"{op}.FTZ R0, R1, R2" for op, count in counts.items() for _ in range(count)]


def test_a_single_launch_computes_as_two_kernels(sass):
    two = [arithmetic(FADD=16, FFMA=16, FMUL=8), arithmetic(FADD=8, FFMA=24, MUFU=8), arithmetic(FFMA=3)]
    merging = arithmetic(FADD=40, FFMA=8)  # the single launch's own
    moved = [arithmetic(FMUL=8), arithmetic(FADD=16, FFMA=16), arithmetic(FADD=8, FFMA=24, MUFU=8), merging]
    fused = [arithmetic(FADD=8, FFMA=24), arithmetic(FADD=8, FFMA=24, MUFU=8), merging]

    def compare(two, one, name=FORWARD):
        single = name.replace("_kernel", "_single_launch_kernel")
        return sass.compare_single_launch(single, {name: two, single: one})

    assert compare(two, moved) == []
    assert compare(two, fused) == [f"lacks 1 of {FORWARD}'s blocks with FADD, FFMA, MUFU (16, 16, 0)"]
    assert "cannot be compared" in compare([arithmetic(FADD=2)], fused)[0]
    assert compare(two, fused, FORWARD.replace("float", "double")) == []
    assert sass.compare_single_launch(FORWARD, {FORWARD: two}) == []
    single = FORWARD.replace("_kernel", "_single_launch_kernel")
    assert sass.compare_single_launch(single, {single: two}) == []  # --only single_launch


@pytest.mark.parametrize(
    ("body", "registers", "spills", "disassembles", "status", "expected"),
    [
        (
            BODY,
            72,
            0,
            True,
            0,
            ["1 kernels, 0 faults", "The machine code for sm_90 was checked in 1 kernels"],
        ),
        (BODY.replace("ACQBULK", "NOP"), 72, 0, True, 1, [f"{FORWARD} sm_90: does not begin with"]),
        (BODY.replace("ACQBULK", "NOP"), 72, 0, False, 0, ["sm_90 was not checked: there is no nvdisasm"]),
        (BODY, 96, 0, False, 1, [f"{FORWARD} sm_90: 96 registers leave room for 2 blocks"]),
        (BODY, 72, 8, True, 1, [f"{FORWARD} sm_90: spills"]),
    ],
    ids=["good", "a fault", "no disassembler", "registers", "spills"],
)
def test_program(
    sass, monkeypatch, tmp_path, capsys, body, registers, spills, disassembles, status, expected
):
    """The program, with a toolkit that prints the outputs of nvcc and nvdisasm."""
    log = f"""ptxas info    : Compiling entry function '{MANGLED}' for 'sm_90'
    0 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 16 bytes smem
"""
    for name, stream, text in (("nvcc", "2", log), ("nvdisasm", "1", disassembly(body))):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\ncat >&{stream} <<'END'\n{text}\nEND\n")
        script.chmod(0o755)
    programs = {"nvcc": tmp_path / "bin/nvcc", "nvdisasm": disassembles and tmp_path / "bin/nvdisasm"}
    monkeypatch.setattr(sass, "find_program", programs.get)
    monkeypatch.setattr(sys, "argv", ["kernel_resources.py", "--arch", "90", "--only", "act.cu"])
    with pytest.raises(SystemExit) as end:
        sass.main()
    printed = capsys.readouterr().out
    assert end.value.code == status, printed
    assert all(line in printed for line in expected), printed
