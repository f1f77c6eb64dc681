"""Published runs: what a row leaves open is inferred or refused with a reason, never guessed in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.plan.case import Case
from shoal.plan.published import Published, Refused, read
from shoal.plan.software import Attention, software
from tests.plan.table import table

SHIPPED = Path(__file__).resolve().parents[2] / "benchmarks/data/published_runs.csv"

GPT_2 = {"params_B": 0.124, "layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocab": 50257}


def one(path: Path, **changes: Any) -> Published:
    (found,) = read(table(path / "runs.csv", changes))
    assert isinstance(found, Published), found
    return found


def case(path: Path, **changes: Any) -> Case:
    return one(path, **changes).case


def refused(path: Path, **changes: Any) -> str:
    (found,) = read(table(path / "runs.csv", changes))
    assert isinstance(found, Refused), found
    return found.why


def test_a_row_is_a_case(tmp_path: Path) -> None:
    found = one(tmp_path)
    net, plan = found.case.net, found.case.plan
    assert (net.matrices, net.tied, net.head_dim, net.experts) == (3, False, 128, 0)
    assert net.params == pytest.approx(8.03e9, rel=0.001)
    assert (plan.zero, plan.micro_batch, plan.recompute, found.case.batch) == (3, 1, 0.0, 16)
    assert (found.case.machine.name, found.tokens_s, found.memory_gb, found.dense) == ("H100 SXM", 8000, None, True)


@pytest.mark.parametrize(
    ("row", "gated", "tied", "head_dim"),
    [
        (GPT_2, 2, 1, 64),  # two matrices, one embedding
        # Llama 2 7B: gated without shared heads of keys.
        ({"params_B": 6.74, "kv_heads": 32, "ffn": 11008, "vocab": 32000}, 3, 0, 128),
        # Qwen3 0.6B: heads are wider than the stream divided by their number.
        ({"params_B": 0.6, "layers": 28, "hidden": 1024, "heads": 16, "ffn": 3072, "vocab": 151936}, 3, 1, 128),
        # Llama 3.2 1B.
        ({"params_B": 1.24, "layers": 16, "hidden": 2048, "ffn": 8192}, 3, 1, 64),
    ],
    ids=["GPT-2", "Llama 2 7B", "Qwen3 0.6B", "Llama 3.2 1B"],
)  # fmt: skip
def test_what_kind_of_model_it_is_follows_from_its_parameters(
    tmp_path: Path, row: dict[str, Any], gated: int, tied: int, head_dim: int
) -> None:
    net = case(tmp_path, **row).net
    assert (net.matrices, net.tied, net.head_dim) == (gated, bool(tied), head_dim)
    assert net.params == pytest.approx(row["params_B"] * 1e9, rel=0.02)


def test_experts_are_counted_and_groups_of_them_kept(tmp_path: Path) -> None:
    found = one(tmp_path, params_B=46.7, ffn=14336, vocab=32000, experts=8, topk=2, ep=8)
    assert not found.dense
    assert (found.case.net.experts, found.case.net.top_k, found.case.plan.ep) == (8, 2, 8)
    assert found.case.net.params == pytest.approx(46.7e9, rel=0.01)


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("bf16", "bf16"),
        ("amp_bf16", "bf16"),
        ("FP8 (hybrid)", "fp8"),
        ("amp_fp8", "fp8"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "fp4"),
        ("bf16 or fp8", "bf16"),
        ("", "bf16"),
        ("fp16", "bf16"),
    ],
)
def test_precisions_are_read_as_people_write_them(tmp_path: Path, words: str, precision: str) -> None:
    assert case(tmp_path, precision=words).precision == precision


@pytest.mark.parametrize(
    ("words", "again"),
    [("full (assumed)", 1.0), ("none, by the log", 0.0), ("", None), ("not stated", None), ("selective", 0.12)],
)
def test_recomputing_is_what_is_said_or_left_open(tmp_path: Path, words: str, again: float | None) -> None:
    assert case(tmp_path, recompute=words).plan.recompute == again


@pytest.mark.parametrize(
    ("words", "zero", "shard"),
    [
        ("FSDP FULL_SHARD", 3, 0),
        ("SHARD_GRAD_OP", 2, 0),
        ("ZeRO-1", 1, 0),
        ("DeepSpeed ZeRO stage 3", 3, 0),
        ("distributed optimizer", 1, 0),
        ("DDP", 0, 0),
        ("HSDP", 3, 8),
        ("", 1, 0),
    ],
)
def test_sharding_is_what_is_said(tmp_path: Path, words: str, zero: int, shard: int) -> None:
    plan = case(tmp_path, sharding=words, n_gpus=64, global_batch=64).plan
    assert (plan.zero, plan.shard) == (zero, shard)


def test_speed_is_as_stated_or_from_the_step_or_from_flops_by_the_sources_own_counting(tmp_path: Path) -> None:
    assert one(tmp_path, step_time_s=3.0).tokens_s == 8000  # what is stated comes first
    assert one(tmp_path, tokens_s_gpu=None, step_time_s=4.0).tokens_s == pytest.approx(16 * 8192 / 4 / 8)
    net = case(tmp_path).net
    rates = {}
    for counting in ("attention halved", "model flops, attention NOT halved", "hardware flops with recompute"):
        found = one(tmp_path, tokens_s_gpu=None, tflops_gpu=400, flops_convention=counting)
        assert found.tokens_s is not None
        rates[counting] = found.tokens_s
    halved, whole, hardware = rates.values()
    assert halved == pytest.approx(400e12 / net.flops_per_token(8192, causal=True))
    assert whole == pytest.approx(400e12 / net.flops_per_token(8192, causal=False))
    assert hardware == pytest.approx(whole * 3 / 4)
    assert one(tmp_path, tokens_s_gpu=None, mfu_pct=40.0).tokens_s == pytest.approx(
        whole * 0.4 * 989.4 / 400, rel=0.001
    )


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"layers": None}, "the model's layers is not stated"),
        ({"seq": None}, "no sequence length is stated"),
        ({"n_gpus": "many"}, "n_gpus is not stated"),
        ({"tp": 3}, "tp 3 x pp 1 x cp 1 does not divide 8 devices"),
        ({"tokens_s_gpu": None}, "neither a speed nor a memory is stated"),
        ({"gpu_type": "abacus"}, "there is no accelerator 'abacus' in the catalogue"),
        ({"gpu_type": "H100 MIG 1g.10gb"}, "is a slice of a device"),
    ],
    ids=str,
)
def test_what_cannot_be_predicted_is_refused_with_the_reason(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    assert why in refused(tmp_path, **row)


def test_a_fabric_that_a_row_names_is_taken(tmp_path: Path) -> None:
    usual, slow = case(tmp_path).machine, case(tmp_path, fabric="100 Gb Ethernet").machine
    assert slow.nic < usual.nic / 5
    assert case(tmp_path, fabric="not stated").machine == usual


def test_numbers_with_commas_and_a_spreadsheets_mark_are_read(tmp_path: Path) -> None:
    path = table(tmp_path / "runs.csv", {"tokens_s_gpu": "8,000", "n_gpus": "1,024", "global_batch": "1,024"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (found,) = read(path)
    assert isinstance(found, Published)
    assert (found.tokens_s, found.case.devices) == (8000, 1024)


def test_a_file_that_is_no_table_of_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no\.csv cannot be read: No such file"):
        list(read(tmp_path / "no.csv"))
    with pytest.raises(SpecError, match="the column gpu_type is missing; a table of runs has at least"):
        list(read(table(tmp_path / "runs.csv", {}, without="gpu_type")))
    (tmp_path / "binary.csv").write_bytes(b"\x89PNG\r\n\xff")
    with pytest.raises(SpecError, match="it is no table in UTF-8"):
        list(read(tmp_path / "binary.csv"))
    optional = list(read(table(tmp_path / "runs.csv", {}, without="vocab")))
    assert isinstance(optional[0], Published)


def test_software_is_known_by_its_name_and_date() -> None:
    assert software("Megatron-DeepSpeed 2021", 2020.5).attention == Attention.SCORES
    assert software("NeMo 25.04.01", 2022.8).year == pytest.approx(2025 + 4 / 12)
    assert software("NeMo 25.04.01", 2022.8).hides_tp
    assert not software("FSDP 2024-05", 2022.8).hides_tp
    assert software("torchtitan 2024-10", 2022.8).fused
    assert software("MaxText", 2023.6).attention == Attention.NATIVE
    assert software("something", 2022.8).year is None


def test_of_the_shipped_table_nearly_every_row_is_read() -> None:
    rows = list(read(SHIPPED))
    assert len(rows) == 547
    assert sum(isinstance(row, Refused) for row in rows) <= 30
    assert {row.why for row in rows if isinstance(row, Refused)} <= {
        "the model's layers is not stated",
        "the model's hidden is not stated",
    }
