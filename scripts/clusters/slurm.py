"""A real Slurm on this machine, with several nodes: `python -m scripts.clusters.slurm` starts one to try things on.

The programs are Debian's (slurmctld, slurmd, munge), started by hand with a configuration of their own, so a Slurm that
the machine may have is not touched. Every slurmd has its own port, host name and /etc/hosts (UTS and mount namespaces),
so jobs see nodes n1, n2, … that find each other by name. All of it lives in one PID namespace whose first process is
tied to whoever started it: nothing can be left behind, not even the steps of killed jobs, which Slurm lets outlive its
daemons on purpose.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from scripts.clusters import debian
from scripts.clusters.debian import Missing

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "unshare")
READY_S = 30.0
CONF = """\
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=1
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
MaxArraySize=1001
KillWait={kill_wait_s}
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
PartitionName=short Nodes=ALL PriorityTier=1 MaxTime=5
"""


def install() -> None:
    """The packages, once. Debian's own place: slurmd finds its helpers and plugins nowhere else."""
    debian.get("Slurm", PACKAGES, PROGRAMS)


class Cluster:
    """Slurm with nodes n1 … of two cores and 4,000 MB each, whatever the machine has; CPUs are counted, not bound."""

    def __init__(self, folder: Path, nodes: int, grace_s: int, kill_wait_s: int) -> None:
        self.folder = folder
        self.nodes = tuple(f"n{i + 1}" for i in range(nodes))
        self._process: subprocess.Popen[bytes] | None = None
        ctld, *ports = _free_ports(1 + nodes)
        for name in ("state", "spool", "log"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        written = [
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"
            for name, port in zip(self.nodes, ports, strict=True)
        ]
        values = {"host": socket.gethostname(), "ctld": ctld, "grace_s": grace_s, "kill_wait_s": kill_wait_s}
        self.conf.write_text(CONF.format(folder=folder, nodes="\n".join(written), **values))
        hosts = Path("/etc/hosts").read_text().rstrip("\n")
        (folder / "hosts").write_text(f"{hosts}\n127.0.0.1 {' '.join(self.nodes)}\n")

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """What makes every Slurm command talk to this one."""
        return {"SLURM_CONF": str(self.conf)}

    def ask(self, *command: str) -> str:
        """What a Slurm command prints."""
        env = {**os.environ, **self.environment}
        # Jobs without an --output write to where they were sent from, which must not be the checkout.
        done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def start(self) -> None:
        """Ready when this returns: all nodes idle (about a second)."""
        inside = [sys.executable, "-m", "scripts.clusters.slurm", "--inside", str(self.folder), *self.nodes]
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "private", "--mount-proc"]
        tied = [sys.executable, "-m", "shoal.guard.tied", str(os.getpid()), *apart, *inside]
        root = Path(__file__).parents[2]
        with open(self.folder / "log" / "daemons.log", "ab") as log:
            self._process = subprocess.Popen(tied, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=root)
        try:
            self._await_nodes()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """With it goes everything in its PID namespace: the daemons and all jobs."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + READY_S
        said = ""
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            try:
                said = self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%N %t")
                if [line.split() for line in said.splitlines()] == [[name, "idle"] for name in self.nodes]:
                    return
            except RuntimeError as e:
                said = str(e)
            time.sleep(0.1)
        logs = [f"{path.name}: {path.read_text()[-1000:]}" for path in sorted((self.folder / "log").glob("*.log"))]
        raise RuntimeError("\n".join([f"Slurm did not start: {said}", *logs]))


@contextmanager
def slurm(folder: Path, nodes: int = 4, grace_s: int = 30, kill_wait_s: int = 10) -> Iterator[Cluster]:
    """A running one; gone when left. `folder` holds a Unix socket, so its path must be short (about 90 letters)."""
    install()
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount", "--uts", "true"], capture_output=True, text=True)
    if tried.returncode:
        raise Missing(f"several nodes on one machine need namespaces, for root only: {tried.stderr.strip()}")
    cluster = Cluster(folder, nodes, grace_s, kill_wait_s)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to outgoing connections."""
    given_away = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given_away.read_text().split()[0]) if given_away.exists() else 32768
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            candidate = stack.enter_context(socket.socket())
            with suppress(OSError):
                candidate.bind(("127.0.0.1", 10_000 + secrets.randbelow(first - 10_000)))
                ports.append(candidate.getsockname()[1])
        return ports


def _inside(folder: Path, nodes: list[str]) -> None:
    """The first process of the namespace: starts the daemons, then buries who dies, as an init must."""
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = ["munged", "--force", "--foreground", f"--socket={folder}/munge.sock", f"--key-file={folder}/munge.key"]
    kept = [f"--{what}-file={folder}/munge.{what}" for what in ("pid", "seed")]
    subprocess.Popen([*munge, *kept, f"--log-file={folder}/log/munged.log"])
    while not (folder / "munge.sock").exists():
        time.sleep(0.02)
    subprocess.Popen(["slurmctld", "-D", "-i"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for name in nodes:
        become = f"hostname {name} && mount --bind '{folder}/hosts' /etc/hosts && exec slurmd -D -N {name}"
        apart = ["unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", become]
        subprocess.Popen(apart, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        with suppress(ChildProcessError):
            os.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return _inside(Path(args.inside[0]), args.inside[1:])
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder), args.nodes) as cluster:
            print(f"Slurm runs with nodes {', '.join(cluster.nodes)} until Ctrl-C. In another shell:")
            print(f"  export SLURM_CONF={cluster.conf}", flush=True)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with suppress(KeyboardInterrupt):
                signal.pause()
    except Missing as e:
        sys.exit(f"clusters: {e}")


if __name__ == "__main__":
    main()
