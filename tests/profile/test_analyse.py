"""What a trace says, against what was worked out by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.profile.advice import advice
from shoal.profile.analyse import analyse, slowest
from shoal.profile.intervals import sweep
from shoal.profile.kernels import short_name
from shoal.profile.kinds import kind_of_name
from shoal.profile.least_work import work
from shoal.profile.render import report
from shoal.profile.trace import Event, Span
from tests.profile import gpu_trace


def operator(name: str, dims: list[Any], types: list[str]) -> Event:
    return Event(name, "cpu_op", 0, 1, 1, {"Input Dims": dims, "Input type": types})


def us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def test_every_instant_of_a_gpu_step_has_its_kind(tmp_path: Path) -> None:
    found = analyse(gpu_trace.write(tmp_path / "t.json.gz"))
    assert {part.kind: us(part.seconds) for part in found.parts} == gpu_trace.EXPECTED
    assert us(found.step_s) == 1000
    assert us(found.hidden_s) == gpu_trace.HIDDEN
    late = {f"waiting for the host in {phase}": length for phase, length in gpu_trace.LATE.items()}
    assert {why: us(s) for why, s in found.idle.items()} == {"between two kernels": gpu_trace.BETWEEN, **late}
    assert {name: us(s) for name, s in found.unknown.items()} == {"mystery_kernel_v2": 10}
    assert found.waits == {"aten::_local_scalar_dense in clip": 1.0}


def test_what_the_loops_clock_saw_and_the_trace_did_not_is_unaccounted(tmp_path: Path) -> None:
    found = analyse(gpu_trace.write(tmp_path / "t.json.gz", step_s=[1.2e-3, 1.0e-3]))
    assert us(found.step_s) == 1100
    assert us(found.part("unaccounted").seconds) == 10 + 100
    assert found.accounted == pytest.approx(1 - 110 / 1100)
    assert "below 97%" in report([found])


def test_kernels_are_measured_against_the_roof_of_their_device(tmp_path: Path) -> None:
    found = analyse(gpu_trace.write(tmp_path / "t.json.gz"))
    product = next(k for k in found.kernels if k.name.startswith("nvjet"))
    assert product.bound == "compute"
    assert product.roof == pytest.approx(794.5e12)  # the catalogue's best product of an H200 in bf16
    assert product.achieved == pytest.approx(2 * 4096 * 2048 * 2048 / 100e-6)
    assert product.share == pytest.approx(2 * 4096 * 2048 * 2048 / 794.5e12 / 100e-6)
    logits = next(k for k in found.kernels if k.name == "triton_red_fused_7")
    assert logits.bound == "memory"
    assert logits.share == pytest.approx(4096 * 1000 * 2 / 4.8e12 / 20e-6)
    unknown = next(k for k in found.kernels if k.name.startswith("mystery"))
    assert unknown.share is None


def test_utilisation_is_that_of_an_untraced_step_by_the_work_it_had(tmp_path: Path) -> None:
    """4 ms a step and process: of the H200's 989 TFLOP/s and 4.8 TB/s."""
    used = {"flops_per_step": 2 * 1.978e12, "hardware_flops_per_step": 2 * 2.5e12, "moved_bytes": 4.8e9}
    peaks = {"peak_flops": 989e12, "peak_bandwidth": 4.8e12, "world": 2, "untraced_step_s": 4e-3}
    text = report([analyse(gpu_trace.write(tmp_path / "t.json.gz", **used, **peaks))])
    told = "494 TFLOP/s a process, MFU 50.0% (causal), HFU 63.2%, memory 1.20 TB/s (25% of its bandwidth)"
    assert told in text


def test_attention_that_skips_is_not_counted_as_if_it_did_not() -> None:
    heads, bf16 = [[1, 32, 4096, 64]] * 3, "c10::BFloat16"
    for name, left in (("triton_tem_fused_flex_attention_3", 0.1), ("aten::_scaled_dot_product_flash_attention", 1)):
        whole, packed = (work(operator(name, heads, [bf16] * 3), attended) for attended in (None, 0.05))
        assert whole is not None
        assert packed is not None
        assert packed.flops == pytest.approx(left * whole.flops)
        assert packed.bytes == whole.bytes


def test_idle_is_what_to_fix_where_it_costs_most(tmp_path: Path) -> None:
    found = analyse(gpu_trace.write(tmp_path / "t.json.gz"))
    best = advice(found)
    assert best is not None
    assert (best.kind, us(best.saves_s)) == ("idle", 310)
    assert "mostly waiting for the host in backward" in best.sentence
    assert "aten::_local_scalar_dense in clip" in best.sentence


def test_the_rank_that_waits_least_is_the_one_that_others_wait_for(tmp_path: Path) -> None:
    first, second = (gpu_trace.write(tmp_path / f"{rank}.json.gz", rank=rank, world=2) for rank in (0, 1))
    ranks = [analyse(first), analyse(changed(second, lambda event: not event["name"].startswith("nccl")))]
    assert slowest(ranks).rank == 1
    text = report(ranks)
    assert "rank 1 is the one that others wait for (it waits 0 ms a step, rank 0 0.055 ms)" in text
    assert "rank 1: ms" in text


def changed(file: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The same trace with each event changed in place; False: left out."""
    content = json.loads(gzip.decompress(file.read_bytes()))
    content["traceEvents"] = [event for event in content["traceEvents"] if change(event) is not False]
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    return file


def test_a_host_that_is_ahead_does_not_move_the_end_of_a_step(tmp_path: Path) -> None:
    """The batch of each step is copied on a stream of its own, while the step before still computes."""

    def ahead(event: dict[str, Any]) -> None:
        if event["name"].startswith("Memcpy HtoD"):
            event["ts"] -= 150
            event["args"]["stream"] = 30

    found = analyse(changed(gpu_trace.write(tmp_path / "t.json.gz"), ahead))
    assert us(found.step_s) == 1000
    assert us(found.part("matmul").seconds) == gpu_trace.EXPECTED["matmul"]
    assert us(sum(part.seconds for part in found.parts)) == 1000


def test_kernels_of_a_graph_have_a_kind_but_not_the_work_of_what_launched_it(tmp_path: Path) -> None:
    def graphed(event: dict[str, Any]) -> None:
        if event["name"] == "cudaLaunchKernel":
            event["name"] = "cudaGraphLaunch"

    found = analyse(changed(gpu_trace.write(tmp_path / "t.json.gz"), graphed))
    assert us(found.part("matmul").seconds) == gpu_trace.EXPECTED["matmul"]
    assert us(found.part("optimizer").seconds) == gpu_trace.EXPECTED["optimizer"]
    assert all(kernel.share is None for kernel in found.kernels if kernel.kind == "matmul")


def test_a_trace_that_is_not_ours_is_read_too(tmp_path: Path) -> None:
    """Without our ranges phases are unknown, but for the optimizer that torch itself marks."""
    file = gpu_trace.write(tmp_path / "t.json.gz")
    content = json.loads(gzip.decompress(file.read_bytes()))
    del content["shoal"]
    for event in content["traceEvents"]:
        if event["name"] == "shoal:optimizer":
            event["name"] = "Optimizer.step#AdamW.step"
    content["traceEvents"] = [e for e in content["traceEvents"] if not e["name"].startswith("shoal:")]
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(content))
    found = analyse(plain)
    assert found.steps == 3
    assert us(found.part("optimizer").seconds) == 100
    assert us(found.part("matmul").seconds) == 230
    assert found.device == "NVIDIA H200"


def test_a_sweep_leaves_no_hole_and_no_overlap() -> None:
    spans = [Span(0, 10, "a"), Span(5, 20, "b"), Span(5, 5, "empty"), Span(30, 99, "c")]
    cut = [(since, until, "".join(sorted(s.name for s in active))) for since, until, active in sweep(spans, 2, 40)]
    assert cut == [(2, 5, "a"), (5, 10, "ab"), (10, 20, "b"), (20, 30, ""), (30, 40, "c")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64", "attention"),
        ("cudnn::fusion::compute_dot_do_o_specialized<true, true, Params>", "attention"),
        ("triton_tem_fused_flex_attention_backward_2", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(Params)", "attention"),
        ("triton_tem_fused_mm_5", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "matmul"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_0", "elementwise"),
        ("triton_per_fused__fused_rms_norm__fused_rms_norm_backward_add_mm_12", "norm"),
        ("graph_0_cpp_fused__unsafe_view_add_div_expand_mul_pow_sum_view_1", "norm"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "loss"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "elementwise"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("fsdp::all_gather_copy_in", "elementwise"),
        ("Memset (Device)", "copy"),
        ("aten::_grouped_mm", "matmul"),
        ("aten::_scaled_mm", "matmul"),
        ("some_vendor_thing", None),
    ],
)
def test_names_of_kernels(name: str, kind: str | None) -> None:
    assert kind_of_name(name) == kind


def test_work_is_counted_from_shapes() -> None:
    bf16, f32 = "c10::BFloat16", "float"
    product = work(operator("aten::mm", [[64, 32], [32, 16]], [bf16] * 2))
    assert product is not None
    assert (product.flops, product.bytes, product.precision) == (
        2 * 64 * 32 * 16,
        2 * (64 * 32 + 32 * 16 + 64 * 16),
        "bf16",
    )
    added = work(operator("aten::addmm", [[16], [64, 32], [32, 16]], [f32] * 3))
    assert added is not None
    assert added.flops == 2 * 64 * 32 * 16
    heads = [[2, 8, 128, 64], [2, 2, 128, 64], [2, 2, 128, 64]]
    forward = work(operator("aten::_scaled_dot_product_flash_attention", heads, [bf16] * 3))
    backward = work(operator("aten::_scaled_dot_product_flash_attention_backward", [heads[0], *heads], [bf16] * 4))
    assert forward is not None
    assert backward is not None
    assert forward.flops == 2 * 2 * 2 * 8 * 128 * 128 * 64 / 2  # two products, the causal half
    assert backward.flops == 2.5 * forward.flops
    inner = work(operator("aten::_flash_attention_forward", [[b, s, h, d] for b, h, s, d in heads], [bf16] * 3))
    assert inner is not None
    assert inner.flops == forward.flops  # the kernel's own operator has sequence and heads the other way round
    adam = work(operator("aten::_fused_adamw_", [[[100]]] * 4, ["TensorList"] * 4))
    assert adam is not None
    assert adam.bytes == 7 * 400
    assert work(operator("aten::mm", [], [])) is None


def test_names_are_shown_without_templates() -> None:
    assert short_name(gpu_trace.ADAM) == "at::native::multi_tensor_apply_kernel"


def test_a_trace_is_read_again_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = gpu_trace.write(tmp_path / "t.json.gz")
    assert main(["profile", "--trace", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accounted"] == pytest.approx(0.99)
    assert told["next"]["kind"] == "idle"
    assert main(["profile", "--trace", str(file)]) == 0
    out = capsys.readouterr().out
    assert "accounted for: 99.0% of a step; unaccounted: mystery_kernel_v2 0.01 ms" in out
    assert "perfetto" in out


def test_a_file_that_is_no_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = gpu_trace.write(tmp_path / "t.json.gz")
    for name, content, code in (
        ("cut.json.gz", file.read_bytes()[:500], 78),
        ("cut.json", b'{"traceEvents": [', 78),
        ("other.json", b'{"name": "x"}', 78),
        ("empty.json", b'{"traceEvents": []}', 78),
    ):
        (tmp_path / name).write_bytes(content)
        assert main(["profile", "--trace", str(tmp_path / name)]) == code, name
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert main(["profile", "--trace", str(tmp_path / "none.json")]) == 2
    assert main(["profile", "--trace", str(tmp_path)]) == 2
