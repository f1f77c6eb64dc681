"""Why a job waits: what Slurm calls a reason, as a sentence without its full stop that says what to do about it."""

from __future__ import annotations

import re

# From the reason codes of Slurm's manual (slurm.schedmd.com/job_reason_codes.html, read 2026-11 for 22.05 to 25.05).
_REASONS = {
    "None": "Slurm has not looked at it yet; wait",
    "Priority": "jobs of higher priority stand before it; wait, or ask for less time or fewer nodes to fit into a gap",
    "Resources": "not enough nodes are free for it; it starts as soon as they are",
    "Dependency": "it waits for another job that it depends on",
    "DependencyNeverSatisfied": "the job that it depends on has failed, so it will never start; stop it",
    "BeginTime": "it may not start before {start}",
    "JobHeldUser": "it is held; `scontrol release {id}` lets it go",
    "JobHeldAdmin": "an administrator holds it; ask them",
    "JobArrayTaskLimit": "as many tasks of its sweep run as may run at once",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved{detail}; `sinfo -R` says why, wait or ask "
    "for others",
    "Reservation": "it waits for its reservation to begin",
    "ReservationDeleted": "its reservation is gone; stop it and launch it without",
    "PartitionDown": "its partition is closed; wait, or launch it in another (launch.queue)",
    "PartitionInactive": "its partition is closed; wait, or launch it in another (launch.queue)",
    "PartitionNodeLimit": "it asks for more nodes than its partition has or allows; lower launch.nodes or change "
    "launch.queue",
    "PartitionConfig": "its partition has not so many nodes, or not such ones, so it will never start; lower "
    "launch.nodes and what each is to have, or change launch.queue",
    "PartitionTimeLimit": "launch.time_limit is longer than its partition allows, so it will never start; shorten it: "
    "the run saves and is started again",
    "TimeLimit": "its time limit was reached; it is started again",
    "NodeDown": "a node that it needs is down; wait, or ask for others",
    "BadConstraints": "no node can ever satisfy what it asks for, perhaps because bad ones are excluded; ask for less",
    "Licenses": "it waits for a licence that is in use",
    "Cleaning": "its last start is still being cleared away",
    "Prolog": "its nodes are being prepared",
    "InvalidAccount": "its account is not valid any more; launch it with another launch.slurm.account",
    "InvalidQOS": "its QOS is not valid any more; launch it with another launch.priority",
    "QOSNotAllowed": "its partition does not take that QOS; launch it with another launch.priority",
    "AccountNotAllowed": "its partition does not take that account; launch it with another launch.slurm.account",
    "QOSResourceLimit": "a limit of its QOS is reached; it starts when other jobs of the QOS have ended",
    "QOSTimeLimit": "its QOS has used up its time; ask those who run the cluster",
    "QOSJobLimit": "as many jobs of its QOS run as may run at once; it starts when one ends",
    "JobLaunchFailure": "its last start failed before our script ran; see the log, then `scontrol release {id}`",
    "launch_failed_requeued_held": "its last start failed before our script ran, and Slurm holds it; see `sinfo -R`, "
    "then `scontrol release {id}`",
    "SystemFailure": "Slurm itself failed; ask those who run the cluster",
    "FrontEndDown": "Slurm itself is not whole; wait",
    "MaxPowerCap": "the cluster's power limit is reached; wait",
}
_DOWN = "Nodes required for job are DOWN"
_LIMIT = re.compile(
    r"^(?P<whose>QOS|Assoc)(?P<how>Grp|Max|Min)(?P<what>[A-Z][A-Za-z]*?)(?P<per>Per[A-Z]\w*)?(?:Limit|Minutes)?$"
)
_WHATS = {
    "Job": "jobs at once",
    "Submit": "jobs in the queue",
    "Cpu": "cores",
    "CPU": "cores",
    "GRES": "GPUs",
    "Gres": "GPUs",
    "Mem": "memory",
    "Node": "nodes",
    "Wall": "time",
    "Billing": "billed resources",
    "License": "licences",
    "BB": "burst buffer",
    "Energy": "energy",
}  # fmt: skip


def waits_for(reason: str, job: str, start: str | None) -> str:
    """`start`: when Slurm expects or allows it to begin."""
    code, _, detail = reason.partition(",")
    code = code.strip()
    if reason.replace("_", " ").startswith(_DOWN):
        return (
            "nodes that it needs are down, drained or kept for jobs of higher priority; `sinfo -R` says why, else wait"
        )
    if found := _REASONS.get(code) or _REASONS.get(code.replace(" ", "_")):
        about = f" ({detail.strip()})" if detail.strip() else ""
        return found.format(id=job, start=start or "a time that Slurm has not said", detail=about)
    if limit := _LIMIT.match(code):
        return _limited(limit, code)
    return f"Slurm gives the reason {reason}; `scontrol show job {job}` tells more"


def _limited(limit: re.Match[str], code: str) -> str:
    qos = limit["whose"] == "QOS"
    whose, key = ("QOS", "launch.priority") if qos else ("account", "launch.slurm.account")
    what = next((words for sign, words in _WHATS.items() if limit["what"].startswith(sign)), limit["what"])
    per = limit["per"] or ""
    if limit["how"] == "Min":
        return f"its {whose} wants a job to ask for more {what} ({code}), so it will never start; launch it with more"
    if per in ("PerJob", "PerNode") or (limit["how"] == "Max" and what == "time"):
        return f"it asks for more {what} than its {whose} allows one job ({code}), so it will never start; ask for less"
    whole = "all of its users have together" if limit["how"] == "Grp" else "you may have"
    return (
        f"the limit of {what} that {whole} in its {whose} is reached ({code}); it starts when other jobs have ended, "
        f"or with another {key}"
    )
