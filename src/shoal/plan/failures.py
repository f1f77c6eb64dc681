"""How often runs fail, from what others have published or from what you have counted. No torch.

The rate has two terms, because one cannot explain what was seen: `job` stops a run whatever its size (software, file
systems, people), `device` grows with the number of devices (GPUs, memories, links, hosts). With N devices a failure
comes lambda = a + b N times an hour. At 16,384 devices b N is nearly all of it, at 1,024 a is most of it: Meta's RSC-1
saw one in 7.9 h there where its node failures alone would make one in 28.8 h.

Each term is a Gamma distribution: what is known of a rate after so many failures in so many hours. So every rate has
an interval, narrow where hundreds were counted, wide where a few were or where something had to be assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import SpecError

HOUR_S = 3600.0
# Of a standard normal: what lies between has 90%. All intervals of the plan's goodput are these.
LOW_Z, HIGH_Z = -1.6449, 1.6449


@dataclass(frozen=True)
class Term:
    """A rate per hour of which as much is known as `failures` independent ones in `hours` would tell."""

    failures: float
    hours: float

    @classmethod
    def counted(cls, failures: int, hours: float) -> Term:
        """After Jeffreys' prior: half a failure more, so that none in a hundred hours is not never."""
        return cls(failures + 0.5, hours)

    @classmethod
    def known(cls, per_hour: float, failures: float) -> Term:
        """A rate that was published without its count: `failures` is our word for how firm it is."""
        return cls(failures, failures / per_hour)

    @property
    def per_hour(self) -> float:
        return self.failures / self.hours

    @property
    def variance(self) -> float:
        return self.failures / self.hours**2


NEVER = Term(0.0, 1.0)


@dataclass(frozen=True)
class FailureRate:
    """lambda = a + b N, where it is from, and how it was derived."""

    name: str
    job: Term  # an hour of the run
    device: Term  # an hour of one device
    source: str
    date: str
    derived: str
    # Below this size `a` shrinks with the run: 8 GPUs of RSC-1 ran 47.7 days between failures, not 10.8 hours.
    full_at: int = 1

    def job_per_hour(self, devices: int) -> float:
        return self.job.per_hour * self._taper(devices)

    def device_per_hour(self, devices: int) -> float:
        return self.device.per_hour * devices

    def per_hour(self, devices: int) -> float:
        return self.job_per_hour(devices) + self.device_per_hour(devices)

    def mttf_s(self, devices: int) -> float:
        """Mean time between failures of a run on so many devices."""
        return HOUR_S / self.per_hour(devices)

    def between(self, devices: int) -> tuple[float, float]:
        """Failures an hour that it lies between with 90%.

        The sum of two Gammas is taken for the Gamma of the same mean and variance, and its quantiles are Wilson and
        Hilferty's: within 2% of the mean where three failures or more stand behind it.
        """
        mean = self.per_hour(devices)
        variance = self.job.variance * self._taper(devices) ** 2 + self.device.variance * devices**2
        if not variance:
            return mean, mean
        shape = mean**2 / variance
        low, high = (max(0.0, 1 - 1 / (9 * shape) + z / (3 * shape**0.5)) ** 3 for z in (LOW_Z, HIGH_Z))
        return mean * low, mean * high

    def _taper(self, devices: int) -> float:
        return min(1.0, devices / self.full_at)


def measured(
    device_failures: int, device_hours: float, other_failures: int = 0, run_hours: float = 0.0, name: str = "measured"
) -> FailureRate:
    """Your own: failures of hardware in so many device-hours, and all others in so many hours of your runs.

    A term without hours is the default's: who has counted broken GPUs only has not shown that software never fails.
    """
    if min(device_failures, device_hours, other_failures, run_hours) < 0:
        raise SpecError(f"the failure rate '{name}' has a negative count or time; give how many and in how many hours.")
    return FailureRate(
        name,
        Term.counted(other_failures, run_hours) if run_hours else DEFAULT.job,
        Term.counted(device_failures, device_hours) if device_hours else DEFAULT.device,
        "your own count",
        "now",
        f"{device_failures} in {device_hours:g} device-hours, {other_failures} in {run_hours:g} hours of runs",
    )


def per_node_days(failures: float, devices_per_node: int = 8) -> float:
    """`failures` in 1,000 node-days, the usual unit, as a rate of one device an hour."""
    return failures / (1000 * 24 * devices_per_node)


def stated(per_1000_device_days: float) -> FailureRate:
    """A number without its counts: as firm as the default, and so is what fails whatever the size."""
    return FailureRate(
        f"{per_1000_device_days:g}",
        DEFAULT.job,
        Term.known(per_1000_device_days / (1000 * 24), DEFAULT.device.failures),
        "as stated",
        "now",
        f"{per_1000_device_days:g} failures of hardware in 1,000 device-days; one a day of any other kind",
    )


def preset(name: str) -> FailureRate:
    if name in PRESETS:
        return PRESETS[name]
    raise SpecError(
        f"there is no failure rate '{name}'; use one of {', '.join(PRESETS)}, or a number: failures of hardware in "
        "1,000 device-days."
    )


# Months of one fleet differ: failure modes come and go. Taken as 40% of the mean from month to month, 11 months tell as
# much as 11 / 0.4^2 independent failures. An assumption; the counts themselves (thousands) would claim 2%.
_ELEVEN_MONTHS = 69.0
_RSC_1 = per_node_days(6.50)
_RSC_JOB = Term.known(1 / 7.9 - 1024 * _RSC_1, 10.0)
_RSC_SOURCE = "Kokolis et al., HPCA 2025, arXiv 2410.21680 (read second-hand)"
_LLAMA_3_HOURS = 54 * 24.0

# Hardware: all of Llama 3's unexpected interruptions, which include its hosts and its network. How firm: fleets differ,
# and the four below with a count of hardware have a standard deviation of 0.47 in the logarithm, which is what four
# failures would tell. Others: one a day for the run as a whole, as a laptop is shut or a server is rebooted; it could
# be one in an hour or in a month. It is not one a day for each node: that would be 2,048 a day for Llama 3, which saw
# 7.8 with its hardware. `checkpoint.every: auto` begins with this rate.
DEFAULT = FailureRate(
    "default",
    Term.known(1 / 24, 1.0),
    Term.known(1 / 50_700, 4.0),
    "arXiv 2407.21783, table 5, and the spread of the other presets",
    "2024-07",
    "419 unexpected interruptions in 54 days of 16,384 GPUs; one a day of any other kind is an assumption",
)

PRESETS: Mapping[str, FailureRate] = {
    rate.name: rate
    for rate in (
        DEFAULT,
        FailureRate(
            "meta-rsc-1",
            _RSC_JOB,
            Term.known(_RSC_1, _ELEVEN_MONTHS),
            _RSC_SOURCE,
            "2024-10",
            "6.50 failures in 1,000 node-days; the job term is what the measured 7.9 h at 1,024 GPUs leave (firm as "
            "10 failures: an assumption), less below that size so that 8 GPUs run for weeks",
            full_at=1024,
        ),
        FailureRate(
            "meta-rsc-2",
            _RSC_JOB,
            Term.known(per_node_days(2.34), _ELEVEN_MONTHS),
            _RSC_SOURCE,
            "2024-10",
            "2.34 failures in 1,000 node-days; the job term of RSC-1 (an assumption: same company, same software)",
            full_at=1024,
        ),
        FailureRate(
            "llama3",
            Term.counted(54 + 7 + 2, _LLAMA_3_HOURS),
            Term.counted(419 - 54 - 7 - 2, _LLAMA_3_HOURS * 16_384),
            "arXiv 2407.21783, table 5 (read second-hand)",
            "2024-07",
            "419 in 54 days on 16,384 H100; software bugs (54), NCCL time-outs (7) and dependencies (2) are the job's",
        ),
        FailureRate(
            "byterobust",
            NEVER,
            Term.known((38_236 + 5_948) * (1 - 0.173) / (200_000 * 91 * 24 * 0.8), 3.0),
            "Wan et al., SOSP 2025, arXiv 2509.16293 (read second-hand)",
            "2025-09",
            "44,184 failures in three months, less 17.3% that people made by changing code or data; over 200,000 GPUs "
            "four fifths busy (an assumption), so all causes are in the device term",
        ),
        FailureRate(
            "lablup-b200",
            DEFAULT.job,
            Term.counted(10, 63 * 64 * 24 * 8),
            "arXiv 2605.09370 (abstract)",
            "2026-05",
            "10 GPU failures on 63 nodes of 8 B200 in 55 to 73 days (64 taken); no network, host or software failures "
            "were counted, so the job term is the default's",
        ),
    )
}
