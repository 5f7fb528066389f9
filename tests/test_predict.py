"""The cost model: reads the planner and the machine code correctly, and predicts times."""

import os
import subprocess
import sys
from pathlib import Path

import predict
import pytest
from predict import H200, OPS, Kernel
from shapes import Case

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))
import sass  # noqa: E402

# As ptxas and cuobjdump write them; a loop of two loads, one store and a jump table of two activations.
SASS = """
\t\tFunction : one
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   MOV R1, c[0x0][0x28] ;          /* 0x00 */
                                                                   /* 0x00 */
        /*0010*/              @!P0 BRA 0xf0 ;                      /* 0x00 */
        /*0020*/               @P1 LDG.E.128 R4, desc[UR8][R2.64] ; /* 0x00 */
        /*0030*/              @!P1 LDG.E.128 R8, desc[UR8][R2.64+0x10] ; /* 0x00 */
        /*0040*/                   BRX R24 -0x50 ;                 /* 0x00 */
        /*0050*/                   FADD R4, R4, 1 ;                /* 0x00 */
        /*0060*/                   BRA 0xb0 ;                      /* 0x00 */
        /*0070*/                   FMUL R4, R4, R5 ;               /* 0x00 */
        /*0080*/                   MUFU.EX2 R4, R4 ;               /* 0x00 */
        /*0090*/                   NOP ;                           /* 0x00 */
        /*00a0*/                   FADD R4, R4, 1 ;                /* 0x00 */
        /*00b0*/                   STG.E.128 desc[UR8][R6.64], R4 ; /* 0x00 */
        /*00c0*/                   IADD3 R0, R0, 1, RZ ;           /* 0x00 */
        /*00d0*/              @!P2 BRA 0x20 ;                      /* 0x00 */
        /*00e0*/                   LDG.E R9, desc[UR8][R2.64] ;    /* 0x00 */
        /*00f0*/                   EXIT ;                          /* 0x00 */
\t\tFunction : two
        /*0000*/                   EXIT ;                          /* 0x00 */
"""


@pytest.mark.parametrize("jump", ["BRX R24 -0x50", "BRXU UR4 -0x50"])
def test_instructions_of_a_loop(jump):
    found = sass.functions(SASS.replace("BRX R24 -0x50", jump))
    (loop,) = sass.loops(found["one"])
    assert (loop.begin, loop.end) == (0x20, 0xD0) and sass.loops(found["two"]) == []
    assert loop.least[:3] == (2, 1, 8)  # 3 to the table, FADD and BRA, 3 behind
    assert loop.most[:3] == (2, 1, 9)
    assert sass.main_loop([loop]) == (loop, loop)
    row = {"loops": (loop, loop), "kernel": "forward_kernel<float, (Activations)1, true, 4, false>"}
    assert sass.per_access(row) == (2.7, 3.0)


# A loop of two activations told apart by comparisons, and the way of those that it was not compiled with: it
# moves packets about, stores one as it came, and is shorter than either.
AROUND = """
\t\tFunction : one
        /*0000*/                   LDG.E.128 R4, desc[UR8][R2.64] ; /* 0x00 */
        /*0010*/                   LDG.E.128 R8, desc[UR8][R2.64+0x10] ; /* 0x00 */
        /*0020*/                   ISETP.EQ.AND P0, PT, R30, RZ, PT ; /* 0x00 */
        /*0030*/                   MOV R12, R8 ;                   /* 0x00 */
        /*0040*/               @P0 BRA 0x0a0 ;                     /* 0x00 */
        /*0050*/                   ISETP.NE.AND P0, PT, R30, 0x1, PT ; /* 0x00 */
        /*0060*/               @P0 BRA 0x0d0 ;                     /* 0x00 */
        /*0070*/                   FMUL R4, R4, R20 ;              /* 0x00 */
        /*0080*/                   FFMA R12, R12, R20, R21 ;       /* 0x00 */
        /*0090*/                   BRA 0x0d0 ;                     /* 0x00 */
        /*00a0*/                   FADD R4, R4, R21 ;              /* 0x00 */
        /*00b0*/                   FMNMX R4, R4, RZ, !PT ;         /* 0x00 */
        /*00c0*/                   FADD R12, R12, R21 ;            /* 0x00 */
        /*00d0*/                   STG.E.128 desc[UR8][R6.64], R4 ; /* 0x00 */
        /*00e0*/                   MOV R12, R0 ;                   /* 0x00 */
        /*00f0*/                   IADD3 R0, R12, 0x1, RZ ;        /* 0x00 */
        /*0100*/              @!P2 BRA 0x000 ;                     /* 0x00 */
        /*0110*/                   EXIT ;                          /* 0x00 */
"""


def test_the_way_around_an_activation_is_no_pass():
    (loop,) = sass.loops(sass.functions(AROUND)["one"])
    assert loop.least[:3] == (2, 1, 12)  # by 0xa0; around it 11, by 0x70 14
    assert loop.most[:3] == (2, 1, 14)


def test_a_kernel_that_does_not_wait_for_the_previous_one():
    code, wait = sass.functions(SASS)["one"], (0x8, "ACQBULK")
    assert sass.accesses_early(code) and sass.accesses_early([*code[:4], wait, *code[4:]])
    assert not sass.accesses_early([wait, *code])


@pytest.mark.parametrize(
    "kernel,least,most,over",
    [
        ("forward_kernel<__half, (Activations)1, true, 8, false>", 50.0, 500.0, False),
        ("forward_kernel<__half, (Activations)1, true, 8, false>", 56.0, 60.0, True),
        ("forward_kernel<__half, (Activations)2, true, 8, false>", 56.0, 60.0, False),
        ("forward_kernel<__half, (Activations)2, true, 8, false>", 136.0, 136.0, True),
        ("local_backward_kernel<__half, (Activations)1, true, 8, (Source)2>", 64.0, 76.0, False),
        ("local_backward_kernel<__half, (Activations)1, true, 8, (Source)2>", 66.0, 76.0, True),
        ("layer_norm_backward_kernel<__half, __half, 8>", 64.0, 160.0, False),
        ("layer_norm_backward_kernel<__half, __half, 8>", 66.0, 160.0, True),
        ("stats_kernel<__half, false, true, 8>", 20.0, 74.0, False),
        ("stats_kernel<__half, false, true, 8>", 20.0, 76.0, True),
        ("stats_kernel<double, false, true, 2>", 20.0, 500.0, False),
        ("stats_kernel<__half, false, true, 1>", "", "", False),
    ],
)
def test_budget(kernel, least, most, over):
    assert sass.over_budget({"kernel": kernel, "least": least, "most": most}) is over


@pytest.mark.parametrize(
    "change,fault",
    [
        ({}, None),
        ({"spills": 8}, "spills or has a stack frame"),
        ({"stack": 16}, "spills or has a stack frame"),
        ({"least": 56.0}, "over the budget with 56.0 to 60.0"),
        ({"early": True}, "accesses memory before it waits for the previous kernel"),
    ],
)
def test_a_fault_ends_the_count_with_an_error(monkeypatch, capsys, change, fault):
    row = dict.fromkeys(sass.COLUMNS, 0) | {"kernel": "forward_kernel<float>", "least": 50.0, "most": 60.0}
    monkeypatch.setattr(sass, "measured", lambda arch: [row | {"sm": arch, "early": False} | change])
    monkeypatch.setattr(sys, "argv", ["sass.py", "--arch", "90"])
    with pytest.raises(SystemExit) as ended:
        sass.main()
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == (0 if fault is None else 1)
    assert lines[2:] == (
        ["1 kernels, 0 faults"]
        if fault is None
        else ["1 kernels, 1 faults", f"forward_kernel<float> sm_90: {fault}"]
    )


def test_a_missing_disassembler_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sys, "path", [])
    real = sass.shutil.which
    monkeypatch.setattr(
        sass.shutil, "which", lambda n, path=None: None if n == "cuobjdump" else real(n, path=path)
    )
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-cuobjdump"):
        sass.find_disassembler()


def kernels(registers=72, shared=3088, instructions=100, costliest=400):
    """The same for all of OPS."""
    code = Kernel(registers, shared, 4, (instructions, costliest), (instructions, costliest))
    words = [
        {"T": t, "G": t, "set": which, "rows": rows, "V": v, "K": held}
        for t, wide in (("float", 4), ("__nv_bfloat16", 8))
        for rows in ("true", "false")
        for v, which in ((wide, predict.CHEAP), (wide, predict.TRANSCENDENTAL), (1, predict.ALL))
        for held in range(2, 9)
    ]
    return {op.kernel.format(**w): code for op in OPS.values() for w in words}


BIG = Case((128, 256, 56, 56), "channels_last", "bf16")


def test_blocks_of_a_multiprocessor():
    assert H200.resident(72, 3088) == 3  # not 2: 72 registers are what bn_stats takes over planes
    assert H200.resident(128, 3088) == 2 and H200.resident(32, 0) == 8 and H200.resident(32, 100 << 10) == 2
    assert H200.resident(81, 0) == H200.resident(88, 0) == 2


def test_bytes_and_bounds():
    forward = predict.predict("bn_forward", BIG, kernels())
    assert forward.bytes_MB == pytest.approx(2 * BIG.nbytes / 1e6)
    assert forward.stream_us == pytest.approx(2 * BIG.nbytes / H200.copy_GB_s / 1e3, rel=0.02)
    assert forward.tail_us == 0 and 0.9 < forward.share < 1
    packets = 2 * BIG.nbytes / 16 / 32 / 2  # of a warp, for a loop of 4 loads and as many stores
    cycles = packets / 4 * 100 / (H200.multiprocessors * H200.issue)
    assert forward.issue_us == pytest.approx(cycles / H200.clock_GHz / 1e3, rel=0.05)
    slow = predict.predict("bn_forward", BIG, kernels(instructions=3000))
    assert slow.us > 2 * forward.us and slow.share < 0.5 * forward.share
    assert forward.us_costliest > forward.us


def test_merging_is_priced_and_shown():
    stats = predict.predict("bn_stats", BIG, kernels())
    assert stats.tail_us > 0
    assert stats.us == pytest.approx(
        (stats.stream_us**4 + stats.issue_us**4) ** 0.25 + stats.prologue_us + stats.tail_us + H200.ends_us
    )
    planes = predict.predict("bn_stats", Case(BIG.shape, "nchw", "bf16"), kernels())
    assert planes.tail_us < stats.tail_us and planes.share > stats.share


def test_few_blocks_wait_for_latency():
    small = Case((1, 64, 8, 8), "channels_last", "fp32")
    row = predict.predict("bn_forward", small, kernels())
    assert row.stream_us >= H200.latency_ns / 1e3 > 10 * small.nbytes / H200.copy_GB_s / 1e3


def test_nothing_predicted_is_called_measured():
    alone = predict.predict("bn_forward", BIG, kernels())
    assert "Nothing here was measured" in predict.table([alone])


@pytest.mark.parametrize(
    "kernel,instructions",
    [
        ("stats_kernel<__nv_bfloat16, false, true, 8>", 110),  # 4 rows: one batch of 8 ends a group
        ("stats_kernel<float, false, false, 4>", 140),  # 16 values of a plane
        ("stats_kernel<__nv_bfloat16, false, false, 8>", 180),
        ("local_forward_kernel<__half, (Activations)1, true, 8, false>", 110),
        ("local_forward_kernel<float, (Activations)1, false, 4, false>", 180),
    ],
)
def test_a_group_of_values_ends_in_some_batches(kernel, instructions):
    loop = sass.Loop(0, 0, sass.Count(4, 0, 100), sass.Count(4, 0, 180))
    second = sass.Loop(0, 0, sass.Count(0, 4, 50), sass.Count(0, 4, 90))
    row = {"kernel": kernel, "registers": 80, "shared": 0, "loops": (loop, loop), "least": 25.0}
    assert Kernel.of(row | {"second": None}) == Kernel(80, 0, 4, (instructions,) * 2, (instructions,) * 2)
    assert Kernel.of(row | {"second": second}).again == (50, 90)


def test_local_ops_have_rows_where_they_fit():
    assert predict.predict("bn_forward without moments", BIG, kernels()) is None
    case = Case((8, 256, 56, 56), "channels_last", "bf16")
    local, stats, forward = (
        predict.predict(op, case, kernels())
        for op in ("bn_forward without moments", "bn_stats", "bn_forward")
    )
    assert local.bytes_MB == pytest.approx(2 * case.nbytes / 1e6)
    assert max(stats.us, forward.us) < local.us < stats.us + forward.us


def test_bytes_of_a_gate():
    (case,) = (case for case in predict.MLP if case.dtype == "bf16")
    assert predict.predict("glu_backward", case, kernels()).bytes_MB == pytest.approx(5 * case.nbytes / 1e6)


def test_rows_of_a_layer_norm():
    import planner

    assert planner.row_plan(1000, 384, 8) == (16, 1, 3) and planner.row_plan(1000, 768, 8) == (32, 1, 3)
    assert planner.row_plan(1000, 1024, 8) == (32, 1, 4)  # 24 columns a lane would take 64 lanes
    assert planner.row_plan(1000, 768, 4, True) == (64, 1, 4)  # 16 columns: sums take registers too
    assert planner.row_plan(1000, 768, 8, True) == (32, 1, 3)
    assert planner.row_plan(1000, 768, 8, True, True) == (64, 1, 2)  # __half has fewer registers
    assert planner.row_plan(1000, 8192, 8) == (256, 2, 3)
    found = {case.dtype: predict.predict("layer_norm_forward", case, kernels()) for case in predict.NORMS[:8]}
    assert found["bf16"].bytes_MB == pytest.approx(2 * 128 * 197 * 768 * 2 / 1e6)
    assert 0.5 < found["bf16"].share < found["fp32"].share < 1 and found["fp32"].tail_us == 0
    backward = predict.predict("layer_norm_backward", predict.NORMS[7], kernels())
    assert backward.bytes_MB == pytest.approx(1.5 * found["fp32"].bytes_MB) and backward.tail_us > 1
    assert predict.predict("layer_norm_forward to bf16", predict.NORMS[0], kernels()) is None


def loop(begin, end, packets, instructions=100):
    count = sass.Count(instructions=instructions, packets=packets)
    return sass.Loop(begin, end, count, count)


def test_loops_of_an_exchange():
    """Of those with the same packets the one around all."""
    main, header = loop(0, 10, 0), loop(20, 25, 3)
    of_8, of_4, of_2 = loop(30, 60, 8), loop(70, 90, 8), loop(100, 120, 8)
    inside = [loop(41, 45, 8), loop(35, 50, 8), loop(75, 80, 8), loop(101, 110, 8)]
    assert sass.exchange_loops([main, header, *inside, of_8, of_4, of_2]) == [of_8, of_4, of_2]
    assert sass.exchange_loops([main]) == []


def test_an_exchange():
    loops = [loop(0, 0, 8, instructions) for instructions in (220, 170, 180)]
    rows = [{"kernel": kernel, "exchange": loops} for kernel in predict.EXCHANGES.values()]
    found = predict.exchanges(rows)
    by = {(one["what"], one["world"], one["channels"]): one for one in found}
    assert [by["moments", world, 2048]["parts"] for world in (2, 4, 8)] == [2, 4, 8]
    assert [by["sums", world, 64]["parts"] for world in (2, 4, 8)] == [1, 1, 1]
    assert by["sums", 4, 2048]["instructions"] == 170
    last = 2 * H200.last_ns
    us = last + predict.HEADER_NS + 3 * H200.l2_ns + 2 * 170 * 2 / H200.clock_GHz
    assert by["moments", 4, 2048]["us"] == pytest.approx(us / 1e3)
    with pytest.raises(SystemExit, match="2 loops over packets; 3 expected"):
        predict.exchanges([row | {"exchange": loops[:2]} for row in rows])
    assert f"| {us / 1e3:.1f} |" in predict.exchange_table([by["moments", 4, 2048]])


def test_no_team_is_idle_in_the_last_turn():
    """At 128x64x112x112 in 16 bits five teams of 50 lanes would fill a fifth of their fourth turn."""
    import planner

    for resident in (3, 4):
        kernels = {(rows, wide): resident for rows in (False, True) for wide in (False, True)}
        plan = planner.plan(Case((128, 64, 112, 112), "nchw", "bf16"), 2, 0, kernels, 132, 0)
        teams, at_once = plan.slices * plan.teams, 132 * resident
        assert 128 / (-(-128 // teams) * teams) > 0.85
        assert plan.blocks / (-(-plan.blocks // at_once) * at_once) > 0.9


def test_tiles_whose_slices_are_merged_are_narrower():
    """Half the channels in a tile leave half the slices of a channel to the last block."""
    import planner

    resident = {(rows, wide): 2 for rows in (False, True) for wide in (False, True)}
    case = Case((32, 2048, 7, 7), "channels_last", "bf16")
    merged, apart = (planner.plan(case, 1, cached, resident, 132, 0) for cached in (1, 0))
    assert (merged.lanes, merged.teams) == (16, 16) and (apart.lanes, apart.teams) == (32, 8)
    assert merged.levels == 1 and merged.blocks == 16 * merged.slices > 0.9 * 264


@pytest.mark.parametrize("rows,packets", [(2**31 - 1, True), (2**31, False)])
def test_rows_that_32_bits_do_not_count_have_no_packets(rows, packets):
    import planner

    resident = {(rows, wide): 2 for rows in (False, True) for wide in (False, True)}
    plan = planner.plan(Case((1, rows, 8), "tokens", "bf16"), 1, 1, resident, 132, 0)
    assert plan.rows and bool(plan.vector) is packets and plan.units == rows


def test_lanes_have_packets():
    """At 56x56 in 16 bits, 392 packets: a team's batches are full, but for rounding to whole sectors."""
    import planner

    resident = {(rows, wide): 2 for rows in (False, True) for wide in (False, True)}
    plan = planner.plan(Case(BIG.shape, "nchw", "bf16"), 2, 0, resident, 132, 0)
    deep = -(-392 // (plan.lanes * 4))
    assert 392 * plan.teams / (deep * 4 * 256) >= 0.95


@pytest.mark.skipif(os.environ.get("FASTVIT_TEST_DEVICE") != "cuda_host", reason="asks the model of CUDA")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout,shape",
    [
        ("nchw", (64, 12, 56, 56)),
        ("nchw", (8, 24, 14, 14)),
        ("channels_last", (16, 24, 28, 28)),
        ("tokens", (3, 65, 48)),
    ],
)
def test_the_launchers_plan_alike(layout, shape, dtype):
    import planner
    from cuda_host import redirect

    from fastvit import ops

    engine = redirect.install()
    before = engine.config.sm_count
    engine.config.sm_count = 132
    try:
        case = Case(shape, layout, dtype)
        x = case.randn("cpu")
        resident = {(rows, wide): 2 for rows in (False, True) for wide in (False, True)}  # as the model says
        room = engine.config.shared_per_sm // 2 - (32 << 10)
        moments = ops.bn_stats(x, case.channel_dim)
        assert engine.blocks() == planner.plan(case, 1, 1, resident, 132, room).blocks
        ops.bn_forward(x, moments, channel_dim=case.channel_dim)
        assert engine.blocks() == planner.plan(case, 2, 0, resident, 132, room).blocks
    finally:
        engine.config.sm_count = before


def test_program_says_what_it_needs(tmp_path):
    """Without nvcc it ends before anything is written."""
    result = subprocess.run(
        [sys.executable, "benchmarks/predict.py", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FASTVIT_CUDA": "0"},
    )  # fmt: skip
    assert result.returncode == 1 and "nvcc is needed: FASTVIT_CUDA=0" in result.stderr
    assert not list(tmp_path.iterdir())
