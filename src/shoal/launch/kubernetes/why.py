"""Kubernetes' answers as plain sentences, without their full stops: what a job waits for, what ended it, why it was
refused. The texts that are read here are those of Kubernetes 1.34 to 1.37 and Kueue 0.19; what is new to us is passed
on as it is."""

from __future__ import annotations

import re

from shoal.errors import SetupError, ShoalError, UsageError
from shoal.launch.kubernetes.client import Refused, condition
from shoal.launch.kubernetes.names import Manifest

EXIT_CODES = {
    0: "done",
    2: "the command or the run file is wrong; a retry cannot help",
    75: "a failure that a retry may cure",
    78: "the environment or the data is wrong; a retry cannot help",
    127: "a program of the container's command is not in the image",
    128: "the container could not be started",
    137: "killed",
    143: "told to stop; the state is saved",
}
_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)")
_NODES = re.compile(r"(\d+)/(\d+) nodes are available: (.*?)(?:\.? preemption: .*)?$", re.DOTALL)
_LACK = re.compile(r"(\d+) Insufficient ([\w./-]*\w)")  # 1.36 ends it with a full stop
_NEVER = re.compile(r"insufficient quota for (\S+) in flavor (\S+?),.*request \((\S+)\) > maximum capacity \((\S+)\)")
_SHORT_OF = re.compile(r"insufficient (?:unused )?quota.*? for (\S+) in flavor (\S+?),.*?(\S+) more needed")


def quota(message: str) -> str | None:
    """`exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: …=12, limited: …=16`."""
    found = _QUOTA.search(message)
    if found is None:
        return None
    asked, used, limit = (dict(part.split("=", 1) for part in text.split(",")) for text in found.groups()[1:])
    short = [
        f"{used.get(resource, '?')} of {limit.get(resource, '?')} {resource.removeprefix('requests.')} are used and it "
        f"asks for {amount} more"
        for resource, amount in asked.items()
    ]
    return f"the quota '{found[1]}' of the namespace is full: {', '.join(short)}"


def unscheduled(message: str) -> str:
    """What the scheduler says of a pod that no node can take."""
    if unbound := re.search(r'persistentvolumeclaim "([^"]+)" not found', message):
        return f"there is no PersistentVolumeClaim '{unbound[1]}'; create it, or mend launch.volumes"
    if "unbound immediate PersistentVolumeClaims" in message:
        return "a PersistentVolumeClaim of launch.volumes is not bound to a volume yet"
    found = _NODES.search(message.strip())
    if found is None:
        return f"no node takes it: {_short(message)}" if message else "the scheduler has not looked at it yet"
    parts = [_obstacle(part.strip().rstrip(".")) for part in re.split(r", (?=\d)", found[3])]
    return f"no room on any of {found[2]} nodes: {', '.join(parts)}"


def _obstacle(part: str) -> str:
    if lack := _LACK.match(part):
        return f"{lack[1]} have too little {lack[2]} free"
    words = {
        r"(\d+) node\(s\) had untolerated taint(?:\(s\))? (\{.*\})": r"\1 keep it away by the taint \2",
        r"(\d+) node\(s\) had untolerated taint\(s\)": r"\1 keep it away by a taint",
        r"(\d+) node\(s\) didn't match Pod's node affinity/selector": r"\1 have not the labels it wants",
        r"(\d+) node\(s\) were unschedulable": r"\1 are closed (cordoned)",
        r"(\d+) node\(s\) had volume node affinity conflict": r"\1 cannot reach its volume",
        r"(\d+) Too many pods": r"\1 run as many pods as they may",
    }
    for pattern, said in words.items():
        if re.fullmatch(pattern, part):
            return re.sub(pattern, said, part)
    return part.replace("node(s) ", "")


def pod_waits(pod: Manifest, events: list[str]) -> str:
    """What a pod that does not run yet waits for. `events`: the messages of its warnings, the newest last."""
    status = pod.get("status", {})
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") != "True":
            if each.get("reason") == "SchedulingGated":
                return "somebody holds its pods back (a scheduling gate)"
            return unscheduled(each.get("message", ""))
    for container in status.get("containerStatuses") or ():
        if waiting := container.get("state", {}).get("waiting"):
            reason = waiting.get("reason", "")
            if reason not in ("ContainerCreating", "PodInitializing"):
                return container_waits(reason, waiting.get("message", ""), container.get("image", "?"))
    if not pod["spec"].get("nodeName"):
        return "the scheduler has not looked at it yet"
    if events:
        return f"its container cannot be made: {_short(events[-1])}"
    return "its container is made: the image is pulled, the volumes are mounted"


def container_waits(reason: str, message: str, image: str) -> str:
    if reason in ("ErrImagePull", "ImagePullBackOff"):
        denied = re.search(r"unauthorized|denied|forbidden|no basic auth|401|403", message, re.IGNORECASE)
        how = "the registry does not let it in: launch.kubernetes.pull_secret" if denied else "is its name right?"
        missing = re.search(r"not found|manifest unknown", message, re.IGNORECASE)
        return f"the image {image} cannot be pulled ({'there is none' if missing and not denied else how})"
    if reason in ("InvalidImageName", "ErrImageNeverPull"):
        return f"the image {image} cannot be used ({reason}); mend launch.image"
    if reason == "CrashLoopBackOff":
        return "its container ends as soon as it starts, and is started again ever more seldom"
    if secret := re.search(r'secret "([^"]+)" not found', message):
        return f"there is no Secret '{secret[1]}'; create it, or mend launch.secrets"
    if key := re.search(r"couldn't find key (\S+) in Secret (\S+)", message):
        return f"the Secret {key[2]} has no key {key[1]}; mend launch.secrets"
    if "runAsNonRoot" in message:
        return "the image wants to run as root, which is not allowed; set launch.kubernetes.user"
    return f"its container cannot be made: {reason}{': ' + _short(message) if message else ''}"


def pod_ended(pod: Manifest) -> tuple[str, int | None]:
    """What ended a failed pod, and the exit code of its agent."""
    status = pod.get("status", {})
    code, said, reason = None, "", ""
    for container in status.get("containerStatuses") or ():
        if ended := container.get("state", {}).get("terminated"):
            code, reason = ended.get("exitCode"), ended.get("reason", "")
            said = _last_words(ended.get("message", ""))
    if reason == "OOMKilled":
        return "it used more memory than launch.memory_gb allows and was killed (OOMKilled)", code
    if status.get("reason") == "Evicted":
        return f"its node evicted it ({_short(status.get('message', 'no reason given'))})", code
    if status.get("reason") == "DeadlineExceeded":
        return "launch.time_limit was reached", code
    if disrupted := condition(pod, "DisruptionTarget"):
        return disruption(disrupted), code
    if code is None:
        return f"its pod is lost ({status.get('reason') or status.get('message') or 'no reason given'})", None
    meaning = EXIT_CODES.get(code, "no code of Shoal's")
    return f"exit code {code}, {meaning}{': ' + said if said else ''}", code


def disruption(disrupted: Manifest) -> str:
    known = {
        "PreemptionByScheduler": "preempted: its place was needed for a job of higher priority",
        "DeletionByTaintManager": "its node was lost or closed",
        "EvictionByEvictionAPI": "evicted: its node is drained",
        "DeletionByPodGC": "its node is gone",
        "TerminationByKubelet": "its node ran short of something, or shut down",
    }
    return known.get(disrupted.get("reason", ""), f"moved away by the cluster ({disrupted.get('reason', 'no reason')})")


def job_failed(failed: Manifest, ended: str | None) -> str:
    """`failed`: the Job's condition; `ended`: what ended the pod that mattered, where it is still there."""
    reason = failed.get("reason", "")
    if reason == "PodFailurePolicy" and ended is None:
        code = re.search(r"exit code (\d+)", failed.get("message", ""))
        ended = f"exit code {code[1]}, {EXIT_CODES.get(int(code[1]), 'no code of Shoal')}" if code else None
    if reason == "FailedIndexes" and ended:  # of a batch, whose pods fail one by one
        return ended
    if reason in ("MaxFailedIndexesExceeded", "BackoffLimitExceeded", "FailedIndexes"):
        return f"started again as often as launch.requeues allows{', the last time: ' + ended if ended else ''}"
    if reason == "DeadlineExceeded":
        return "its deadline (activeDeadlineSeconds) has passed"
    return ended or f"{reason}: {_short(failed.get('message', ''))}"


def kueue_waits(workload: Manifest | None) -> str:
    """Why Kueue holds it back; None: it has not made a Workload of it."""
    if workload is None:
        return "Kueue has not taken it in yet; is the queue's name right, and Kueue running?"
    if workload.get("spec", {}).get("active") is False:
        return "somebody has switched its Kueue workload off"
    conditions = {each.get("type"): each for each in workload.get("status", {}).get("conditions") or ()}
    evicted, reserved = conditions.get("Evicted"), conditions.get("QuotaReserved")
    if reserved is not None and reserved.get("status") == "True":
        return "Kueue has kept its quota free and waits for its admission checks"
    before = ""
    if evicted is not None and evicted.get("status") == "True" and evicted.get("reason") == "Preempted":
        before = "preempted by another workload, and now "
    message = reserved.get("message", "") if reserved else ""
    if short := _SHORT_OF.search(message):
        return f"{before}Kueue's quota is full: {short[3].rstrip('.')} more {short[1]} are needed in flavor {short[2]}"
    if never := _NEVER.search(message):
        return f"it can never start: it asks for {never[3]} {never[1]}, and its Kueue queue has {never[4]} in all"
    if "doesn't exist" in message or "not found" in message or "inactive" in message:
        return f"{before}its Kueue queue cannot be used: {_short(message)}"
    return f"{before}Kueue holds it back: {_short(message)}" if message else f"{before}it waits in Kueue's queue"


def refusal(refused: Refused, where: str, namespace: str) -> ShoalError:
    """A refusal of the API server, as an error for the person who launches."""
    said, message = refused.reason, refused.message
    if full := quota(message):
        return SetupError(f"{where} refuses it: {full}.")
    if said == "Forbidden" and (may := re.search(r"cannot (\w+) resource \"([^\"]+)\"", message)):
        return SetupError(
            f"{where} does not let you {may[1]} {may[2]} in namespace '{namespace}'; ask its owner for the role of "
            "Shoal's chart (deploy/chart/shoal)."
        )
    if missing := re.search(r'namespaces "([^"]+)" not found', message):
        return SetupError(f"{where} has no namespace '{missing[1]}'; create it, or mend launch.kubernetes.namespace.")
    if said == "NoSuchKind":
        return SetupError(f"{where} lacks a kind of object that the job needs: {_short(message)}.")
    if webhook := re.search(r'admission webhook "([^"]+)" denied the request: (.*)', message):
        return UsageError(f"{where} refuses it: {_short(webhook[2])} (says {webhook[1]}).")
    if said in ("Invalid", "BadRequest"):
        return UsageError(f"{where} refuses it as invalid: {_short(message)}; mend the launch section.")
    return SetupError(f"{where} refuses it ({said}): {_short(message)}.")


def _last_words(log: str) -> str:
    """The last line of a log that says something: Shoal's own sentence where there is one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [line.removeprefix("shoal: ") for line in lines if line.startswith("shoal: ")]
    return _short((ours or lines or [""])[-1])


def _short(message: str, most: int = 240) -> str:
    message = " ".join(message.split()).rstrip(".")
    return message if len(message) <= most else message[: most - 1] + "…"
