"""The hardware catalogue: names that resolve, figures that agree and say whence they are, entries of one's own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.plan import catalogue
from shoal.plan.catalogue import described_scale_out, devices, fabrics, find, find_fabric, price, scale_out
from shoal.plan.hardware_read import DATE

PUBLISHED = {
    "A100-SXM-40GB": "A100-40GB",
    "A100-SXM-40GB (DGX-A100)": "A100-40GB",
    "A100-SXM-80GB": "A100-80GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB",
    "a100": "A100-80GB",
    "V100-32GB (DGX-2)": "V100-32GB DGX-2",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "H100-SXM-80GB": "H100 SXM",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "8xH100": "H100 SXM",
    "H100-96GB-HBM2e 500W": "H100-96GB",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "GH200 96GB": "GH200-96GB",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "GH200 144GB HBM3e": "GH200-144GB",
    "NVIDIA H200": "H200",
    "H20": "H20",
    "H800": "H800",
    "B200": "B200",
    "B200-SXM-180GB": "B200",
    "B300": "B300",
    "GB200": "GB200",
    "GB200 NVL72": "GB200",
    "GB300": "GB300",
    "AMD Instinct MI300X": "MI300X",
    "MI250X (per GCD)": "MI250X",
    "MI250": "MI250",
    "MI325X": "MI325X",
    "AMD_Instinct_MI355X_OAM": "MI355X",
    "TPU v3": "TPU v3",
    "TPUv4": "TPU v4",
    "TPU v5e": "TPU v5e",
    "v5litepod-256": "TPU v5e",
    "TPU v5p-128": "TPU v5p",
    "TPU v6e (Trillium)": "TPU v6e",
    "TPU7x (Ironwood)": "TPU v7x",
    "trn1.32xlarge": "Trainium1",
    "Trainium2": "Trainium2",
    "Intel Gaudi 2": "Gaudi2",
    "Gaudi3": "Gaudi3",
    "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40",
    "NVIDIA L4": "L4",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "Tesla T4": "T4",
    "A40": "A40",
    "RTX A6000": "RTX A6000",
    "A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000",
    "GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "RTX5090": "RTX 5090",
    "Apple M4 Max": "Apple M4 Max",
    "cpu": "CPU",
    "cpu-laptop": "CPU laptop",
    "AMD EPYC 7763": "CPU server",
}


@pytest.fixture(autouse=True)
def _no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_HARDWARE", raising=False)


def write(folder: Path, text: str, name: str = "ours.toml") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_published_spellings_and_drivers_names_resolve() -> None:
    assert {name: find(name).name for name in PUBLISHED} == PUBLISHED


def test_every_name_and_alias_finds_a_device_of_its_family() -> None:
    for device in devices():
        assert find(device.name) is device
        for alias in device.aliases:
            assert find(alias).peak.keys() == device.peak.keys(), alias


def test_figures_of_every_device_hang_together() -> None:
    for d in devices():
        assert d.peak.get("fp8", 1e9) >= d.peak.get("bf16", 0), d.name
        assert d.peak.get("fp4", 1e9) >= d.peak.get("fp8", 0), d.name
        assert all(d.matmul[p] <= d.peak[p] for p in d.matmul), d.name
        assert (d.link.per_peer_gbs or d.link.gbs) <= d.link.gbs <= 2000, d.name
        assert d.scale_out.gbs <= 100, d.name
        assert d.link.domain >= 1, d.name
        assert 0.01 < d.bandwidth_tbs < 25, d.name
        assert int(d.architecture) <= d.released <= 2026, d.name
        assert all(DATE.fullmatch(p.date) and p.date < "2027" for p in d.prices), d.name
    h100, a100, gb200 = find("h100"), find("a100"), find("gb200")
    assert (h100.peak["bf16"], h100.link.gbs, h100.memory_bytes >> 30, h100.scale_out.gbs) == (989, 450, 80, 50)
    assert (a100.peak["bf16"], a100.link.in_switch, h100.link.in_switch, gb200.link.domain) == (312, False, True, 72)


def test_a_product_nobody_measured_is_as_far_from_its_peak_as_one_somebody_did() -> None:
    h100, t4 = find("h100"), find("t4")
    assert h100.ceiling("bf16") == 794.5
    assert find("MI300X").ceiling("fp8") == pytest.approx(2610 * 668.4 / 1307.4)
    assert find("TPU v5e").ceiling("bf16") == pytest.approx(0.95 * 197)
    assert (h100.ceiling("fp4"), t4.ceiling("bf16"), t4.ceiling("fp16")) == (None, None, 0.8 * 65)


def test_every_figure_of_the_package_says_whence_it_is() -> None:
    figures = ("peak", "matmul", "memory_gb", "bandwidth_tbs", "units", "link", "per_node", "scale_out", "watts")
    for device in devices():
        told = {name for source in device.sources for name in source.fields}
        untold = [f for f in (*figures, "released") if f not in told and f not in device.assumed]
        assert untold == [], device.name
        assert all(DATE.fullmatch(source.date) for source in device.sources), device.sources
    for fabric in fabrics():
        told = {name for source in fabric.sources for name in source.fields}
        assert {"gbs", "latency_us", "achievable"} <= told, fabric.name


def test_ten_lines_describe_a_machine(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "hardware",
        """
        [[device]]
        name = "Our Box 48GB"
        peak.bf16 = 200
        memory_gb = 48
        bandwidth_tbs = 0.9
        link.gbs = 25
        link.domain = 4
        """,
    )
    ours = find("our-box 48GB", [folder])
    assert (ours.link.kind, ours.per_node, ours.scale_out.fabric) == ("pcie", 4, "ethernet-100")
    assert ours.scale_out.gbs == 12.5 / 4
    assert set(ours.assumed) == {"matmul", "units", "link.kind", "per_node", "scale_out", "watts", "released"}
    assert not ours.measured
    assert ours.sources[0].text == str(folder / "ours.toml")


def test_a_wrong_key_or_value_is_named_with_the_right_one(tmp_path: Path) -> None:
    for text, said in (
        ('[[device]]\nname = "x"\nmemroy_gb = 4', "no key 'device 'x'.memroy_gb'; did you mean memory_gb?"),
        ('[[device]]\nname = "x"\npeak.bf61 = 4', "did you mean bf16?"),
        ('[[device]]\nname = "x"\nmemory_gb = -4', "memory_gb must be a number above 0, not -4"),
        ('[[device]]\nname = "x"\npeak.bf16 = 4', "lacks memory_gb, bandwidth_tbs, link.gbs, link.domain"),
        ('[[device]]\nname = "x"\nlike = "H100 SXN"', "is like 'H100 SXN', which is not known"),
        ('[[device]]\nname = "x"\nlike = "H200"\nscale_out.fabric = "ib-nrd"', "the nearest are ib-ndr"),
        ('[[device]]\nname = "x"\nlike = "H200"\nprices = [{ usd_per_hour = 1 }]', "lacks usd_per_hour or date"),
        ("[[device]\n", "is no TOML"),
    ):
        with pytest.raises(SpecError, match=r"ours\.toml") as error:
            find("h100", [write(tmp_path / "hardware", text)])
        assert said in str(error.value)


def test_a_later_folder_wins_and_changes_only_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[[device]]\nname = "H100 SXM"\nwatts = {watts}\nprices = [{{ usd_per_hour = 1.5, date = "2026-10" }}]\n'
    first = write(tmp_path / "first", text.format(watts=600))
    second = write(tmp_path / "second", text.format(watts=500))
    monkeypatch.setenv("SHOAL_HARDWARE", str(first))
    assert find("h100").watts == 600
    ours = find("NVIDIA H100 80GB HBM3", [second])
    assert (ours.watts, ours.peak["bf16"], ours.link.gbs) == (500, 989, 450)
    assert price(ours) is not None
    assert price(ours).usd_per_hour == 1.5  # type: ignore[union-attr]  # said to be there a line above
    assert [s.fields for s in ours.sources if "second" in s.text] == [("watts",)]
    monkeypatch.setenv("SHOAL_HARDWARE", str(tmp_path / "none"))
    with pytest.raises(SpecError, match=r"SHOAL_HARDWARE names .* no folder"):
        find("h100")


def test_an_entry_like_another_takes_its_silicon_and_not_its_name_or_prices(tmp_path: Path) -> None:
    text = '[[device]]\nname = "slow-net"\nlike = "H100 SXM"\nscale_out = { fabric = "ethernet-25" }\nlink.gbs = 200\n'
    ours = find("slow-net", [write(tmp_path / "hardware", text)])
    assert (ours.peak, ours.link.domain, ours.link.in_switch) == (find("h100").peak, 8, True)
    assert (ours.link.gbs, ours.prices, ours.aliases) == (200, (), ())
    assert (ours.scale_out.fabric, ours.scale_out.gbs) == ("ethernet-25", 3.125 / 8)
    assert find("h100", [tmp_path / "hardware"]).name == "H100 SXM"


def test_measurements_are_carried_as_they_are(tmp_path: Path) -> None:
    rows = 'when = "2026-11-02"\nmatmul = [[4096, 4096, 4096, "bf16", 702.5]]\n'
    text = f'[[device]]\nname = "H200"\n[device.measured]\n{rows}'
    measured = find("H200", [write(tmp_path / "hardware", text)]).measured
    assert measured
    assert (measured.matmul, measured.when) == (((4096, 4096, 4096, "bf16", 702.5),), "2026-11-02")


def test_an_unknown_name_tells_the_nearest_and_how_to_describe_ones_own() -> None:
    with pytest.raises(SpecError, match=r"no accelerator 'H1000'.*nearest are H100 SXM.*hardware/NAME.toml"):
        find("H1000")
    with pytest.raises(SpecError, match="slice of a device"):
        find("NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    with pytest.raises(SpecError, match="no fabric 'inifniband'"):
        find_fabric("inifniband")


def test_short_names_of_fabrics_mean_what_is_sold_with_the_device() -> None:
    assert {name: find_fabric(name).name for name in ("ib", "infiniband", "roce", "efa", "ethernet", "internet")} == {
        "ib": "ib-ndr",
        "infiniband": "ib-ndr",
        "roce": "roce-400",
        "efa": "efa-v2",
        "ethernet": "ethernet-100",
        "internet": "internet-1gbit",
    }
    assert [scale_out(find(name), "ib").fabric for name in ("v100", "a100", "h100", "b300", "mi300x")] == [
        "ib-edr",
        "ib-hdr",
        "ib-ndr",
        "ib-xdr",
        "ib-ndr",
    ]
    assert scale_out(find("a100"), "efa").gbs == 50 / 8
    assert scale_out(find("h100")).gbs == 50
    for name in ("ib-edr", "ib-xdr", "roce-200", "efa-v1", "efa-v3", "ethernet-10", "tcpxo", "dcn", "slingshot"):
        assert find_fabric(name).name == name


def test_fabrics_are_read_from_published_descriptions() -> None:
    said = {
        ("H100-SXM-80GB", "HGX-8 NVLink4 + 8x400Gb IB"): ("ib-ndr", 50),
        ("B300", "HGX-8 NVLink5 + 8x800Gb"): ("ib-xdr", 100),
        ("A100-SXM-40GB", "RoCE 1600 Gbps/node"): ("roce-200", 25),
        ("A100-SXM-80GB", "Selene HDR200 IB"): ("ib-hdr", 25),
        ("H100", "AWS p5, EFA"): ("efa-v2", 50),
        ("GB200", "NVL72 NVLink5 + scale-out"): ("ib-ndr", 50),
        ("TPU v5e", "4 x v5e-256 slice (2D torus ICI; DCN between slices)"): ("dcn", 3.1),
        ("V100-32GB (DGX-2)", "NVSwitch"): ("ib-edr", 6.25),
    }
    for (name, text), (fabric, gbs) in said.items():
        told = described_scale_out(find(name), text)
        assert (told.fabric, told.gbs) == (fabric, gbs), text


def test_the_price_is_the_newest_that_is_no_spot_price() -> None:
    h100 = find("h100")
    newest, before = price(h100), price(h100, date="2026-04")
    assert newest is not None
    assert before is not None
    assert (newest.basis, newest.date) == ("median", "2026-05-20")
    assert before.date == "2026-03"
    assert price(h100, date="2020") is None
    assert price(find("H20")) is None


def test_all_of_it_loads_in_a_blink() -> None:
    taken_s = []
    for _ in range(5):
        catalogue._packaged.cache_clear()
        catalogue._load.cache_clear()
        began_s = time.process_time()
        devices()
        taken_s.append(time.process_time() - began_s)
    assert min(taken_s) < 0.06  # 0.015 on a quiet machine
