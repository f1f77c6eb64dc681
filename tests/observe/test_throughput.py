"""Speed and utilisation: published peaks, a named convention, and nothing made up."""

from __future__ import annotations

import pytest

from shoal import readable
from shoal.observe.throughput import mfu, peak_flops, tokens_per_s

STEP = {"t": 1.0, "begin": 0.0, "tokens": 1000}


@pytest.mark.parametrize(
    ("device", "bf16_tflops", "fp32_tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA A10G", 70, 35),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 5090", 209.5, 104.8),
        ("Tesla V100-SXM2-32GB", None, 15.7),
        ("Tesla V100-PCIE-16GB", None, 14),
        ("AMD Instinct MI300X", 1307.4, 163.4),
    ],
)
def test_a_device_is_known_by_the_name_its_driver_gives(
    device: str, bf16_tflops: float | None, fp32_tflops: float
) -> None:
    assert peak_flops(device, "bf16") == (None if bf16_tflops is None else bf16_tflops * 1e12)
    assert peak_flops(device, "fp32") == fp32_tflops * 1e12


@pytest.mark.parametrize(
    "device",
    ["cpu", "NVIDIA GeForce GTX 1080", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU"],
)
def test_a_device_without_a_published_peak_has_none(device: str) -> None:
    assert peak_flops(device, "bf16") is None
    assert mfu({**STEP, "flops": 6e15}, {"peak_flops": None, "world": 8}) is None


def test_mfu_of_a_published_row_comes_out_as_published() -> None:
    """Llama-3-8B on 8 H100 at 12,273 tokens/s a GPU, counted causally: 51.47 GFLOP a token at 8,192 context."""
    start = {"peak_flops": peak_flops("NVIDIA H100 80GB HBM3", "bf16"), "world": 8}
    step = {**STEP, "tokens": 8 * 12_273}
    assert mfu({**step, "flops": 51.47e9 * 8 * 12_273}, start) == pytest.approx(0.6387, abs=1e-3)
    # A journal of an older version states FLOPs per token.
    assert mfu(step, {**start, "flops_per_token": 51.47e9}) == pytest.approx(0.6387, abs=1e-3)


def test_a_step_without_duration_has_no_speed_and_no_crash() -> None:
    assert tokens_per_s({"t": 5.0, "begin": 5.0, "tokens": 100}) == 0.0
    assert tokens_per_s({"t": 5.0, "begin": 4.5, "tokens": 100}) == 200.0


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (readable.count(999), "999"),
        (readable.count(1234), "1.23k"),
        (readable.count(999_950), "1M"),
        (readable.count(135e6), "135M"),
        (readable.duration(4.23), "4.2 s"),
        (readable.duration(59.97), "1 m 00 s"),
        (readable.duration(200), "3 m 20 s"),
        (readable.duration(7500), "2 h 05 m"),
        (readable.duration(300_000), "3 d 11 h"),
        (readable.number("nan"), "nan"),
        (readable.number(None), "-"),
        (readable.size(12_000_000), "11.4 MiB"),
    ],
)
def test_numbers_read_as_people_write_them(said: str, expected: str) -> None:
    assert said == expected
