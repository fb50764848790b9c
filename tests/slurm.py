"""Slurm for tests: a cluster of one node, this machine, from Debian's `slurm-wlm`."""

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd")
MISSING = [name for name in DAEMONS if shutil.which(name) is None]
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
DefMemPerCPU=300
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES MaxTime=60
"""


def _ends_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Cluster:
    """Slurm's daemons as children of this process, which they do not outlive.

    Args:
        folder: empty, and short-lived.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname().partition(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            ports = []
            for _ in DAEMONS:
                bound = stack.enter_context(socket.socket())
                bound.bind(("127.0.0.1", 0))
                ports.append(bound.getsockname()[1])
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(host=self.host, ports=ports, user=getpass.getuser(), folder=folder))
        self.environment = {"SLURM_CONF": str(conf)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [name, "-D", *words],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_ends_with_parent,
            )

    def stop(self, name: str) -> None:
        daemon = self._running.pop(name)
        daemon.terminate()
        try:
            daemon.wait(60)  # one that is killed loses what it knows of jobs
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def __enter__(self) -> "Cluster":
        for name in DAEMONS:
            self.start(name)
        try:
            self.until(lambda: self.run("sinfo", "--noheader", "--format=%T", check=False).strip() == "idle", 30)
        except BaseException as error:
            self.__exit__()
            raise AssertionError(f"Slurm did not come up:\n{self.logs()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._running:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                self.clear()
        for name in list(self._running):
            self.stop(name)

    def clear(self) -> None:
        """End all jobs."""
        self.run("scancel", f"--user={os.getuid()}")
        self.until(lambda: not self.run("squeue", "--noheader"), 30)

    def run(self, *words: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stderr}"
        return done.stdout

    def requeue(self, job: str) -> None:
        """Put a running job back into the queue, and let it start at once when its first run is all over."""
        number = self.run("squeue", "--noheader", f"--jobs={job}", "--format=%A").strip()
        self.run("scontrol", "requeue", job)
        self.until(lambda: not _steps_of(number))
        # Slurm waits two minutes, so that nothing that comes late from the first run is taken for the second one's.
        self.until(lambda: self.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").strip() == "PENDING")
        # slurmd launches nothing of a job within the second in which it has ended it ("Job credential revoked").
        time.sleep(2)
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now")

    def until(self, holds, seconds: float = 60):
        """Wait until it holds; what it returned then."""
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < deadline, f"it did not come\n{self.logs()}"
            time.sleep(0.05)
        return found

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


def _steps_of(number: str) -> list[int]:
    """Slurm's processes around the parts of a job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"slurmstepd: [{number}.".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
