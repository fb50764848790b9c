"""Files by which other launchers start a training run: each starts torchrun on some nodes, with its flags as they are.

What each file may hold is from its launcher's own definitions: Slurm's `sbatch` (22.05), the task schema of SkyPilot
0.14.1 (`sky/utils/schemas.py`), and TrainJob `trainer.kubeflow.org/v1alpha1` of Kubeflow Trainer 2.3
(`kubeflow-trainer-api` 2.3.0), which followed PyTorchJob. Imports no torch.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainstep.base.errors import UsageError

Launcher = Literal["slurm", "skypilot", "kubeflow"]
NOTICE_S = 120
"""Before its time is up, a run on Slurm is told to save and stop."""
RESTARTS = 3
"""Number of times that torchrun starts all processes again, from the newest checkpoint, where one died."""
PORT = 29500
"""At which the processes meet, torchrun's usual one; on Slurm, where jobs share nodes, one of the job's own."""


@dataclass(frozen=True)
class Launch:
    """Place in which a run is to be launched, by a file for another launcher."""

    emit: Launcher | None = None
    """Print the file that starts this run by slurm (sbatch), skypilot (sky launch) or kubeflow (kubectl create), and
    train nothing. It starts torchrun on every node."""
    nodes: int = 1
    """Nodes, with --emit."""
    processes: int = 8
    """Processes on each node, with --emit: one for each of its GPUs."""
    cpus: int = 4
    """CPU cores for each process, with --emit."""
    gpu: str | None = None
    """The GPU as the launcher names it, as H100, with --emit slurm (default: any) or skypilot."""
    image: str | None = None
    """Container image in which trainstep is installed, with --emit skypilot or kubeflow."""
    minutes: int = 24 * 60
    """Time limit, with --emit slurm. The run saves and stops two minutes before."""

    def __post_init__(self) -> None:
        for name in ("nodes", "processes", "cpus"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for name in ("gpu", "image"):  # they stand in a script's comments and in YAML as they are
            if (value := getattr(self, name)) is not None and not re.fullmatch(r"[\w./:@-]+", value):
                raise UsageError(f"{name} is {value!r}; expected a name without spaces, quotes or ;")
        if self.minutes * 60 < 2 * NOTICE_S:
            raise UsageError(f"minutes is {self.minutes}; expected {2 * NOTICE_S // 60} or more, of which the last "
                             f"{NOTICE_S // 60} are for saving")  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes

    def check(self, given: Sequence[str], *, on_gpu: bool) -> None:
        """See that the flags go together, of which `given` were given.

        Raises:
            UsageError: a flag that this launcher has no use for, or one that it needs.
        """
        if self.emit is None:
            raise UsageError(f"--{given[0]} is for a file of another launcher; give --emit too, or leave it out")
        used = {"slurm": {"gpu", "minutes"}, "skypilot": {"gpu", "image"}, "kubeflow": {"image"}}[self.emit]
        if idle := [name for name in given if name in ("gpu", "image", "minutes") and name not in used]:
            raise UsageError(f"--{idle[0]} says nothing to {self.emit}; leave it out")
        if "image" in used and self.image is None:
            raise UsageError(f"--emit {self.emit} needs --image, a container image in which trainstep is installed")
        if self.gpu is not None and not on_gpu:
            raise UsageError(f"--gpu {self.gpu} beside --device cpu; leave one of them out")
        if self.emit == "skypilot" and on_gpu and self.gpu is None:
            raise UsageError("--emit skypilot needs --gpu, as SkyPilot names it (sky show-gpus), or --device cpu")

    def file(self, words: Sequence[str], *, on_gpu: bool) -> str:
        """The file. `words` follow `trainstep` on the command line of every process."""
        assert self.emit is not None
        return {"slurm": self._slurm, "skypilot": self._skypilot, "kubeflow": self._kubeflow}[self.emit](words, on_gpu)

    def _slurm(self, words: Sequence[str], on_gpu: bool) -> str:
        """`--signal` reaches torchrun and its processes, and `--open-mode` keeps the log of a job that is requeued."""
        gpus = f"\n#SBATCH --gpus-per-node={self.gpu + ':' if self.gpu else ''}{self.processes}" if on_gpu else ""
        return f"""\
#!/bin/bash
# Start it with sbatch. Requeued, or submitted again, the run goes on from its newest checkpoint.
#SBATCH --job-name=trainstep
#SBATCH --nodes={self.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={self.processes * self.cpus}{gpus}
#SBATCH --time={self.minutes}
#SBATCH --signal=TERM@{NOTICE_S}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=trainstep-%j.log

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 50000))
srun --cpus-per-task={self.processes * self.cpus} torchrun \\
    {self._torchrun("$SLURM_NNODES", "$SLURM_JOB_ID", "$host:$port")} \\
    -m trainstep {shlex.join(words)}
"""

    def _skypilot(self, words: Sequence[str], on_gpu: bool) -> str:
        accelerators = f"\n  accelerators: {json.dumps(f'{self.gpu}:{self.processes}')}" if on_gpu else ""
        run = f"""\
host=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
torchrun \\
  {self._torchrun("$SKYPILOT_NUM_NODES", "$SKYPILOT_TASK_ID", f"$host:{PORT}")} \\
  -m trainstep {shlex.join(words)}
"""
        return f"""\
# Start it with sky launch, or with sky jobs launch, which starts it again where it is preempted.
name: trainstep
num_nodes: {self.nodes}
resources:
  image_id: {json.dumps(f"docker:{self.image}")}
  cpus: {json.dumps(f"{self.processes * self.cpus}+")}{accelerators}
run: |
{textwrap.indent(run, "  ")}"""

    def _kubeflow(self, words: Sequence[str], on_gpu: bool) -> str:
        """torchrun has its nodes, rank and address from variables PET_…, which the runtime torch-distributed sets."""
        command = ["torchrun", "-m", "trainstep", *words]
        amounts = {"cpu": self.processes * self.cpus, **({"nvidia.com/gpu": self.processes} if on_gpu else {})}
        lines = "".join(f"\n        {json.dumps(name)}: {amount}" for name, amount in amounts.items())
        return f"""\
# Start it with kubectl create -f. Kubeflow Trainer sets torchrun's nodes and address in each node's environment.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: trainstep
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: {json.dumps(self.image)}
    numNodes: {self.nodes}
    numProcPerNode: {self.processes}
    command: {json.dumps(command)}
    resourcesPerNode:
      requests:{lines}
      limits:{lines}
"""

    def _torchrun(self, nodes: str, name: str, endpoint: str) -> str:
        """torchrun's own flags; the shell fills in what the launcher knows."""
        return (
            f'--nnodes="{nodes}" --nproc-per-node={self.processes} --max-restarts={RESTARTS} '
            f'--rdzv-backend=c10d --rdzv-id="{name}" --rdzv-endpoint="{endpoint}"'
        )
