"""`trainstep train` under torchrun on the hosts of a test, with a workload that may do wrong."""

import json
import re
import time

from tests.train.faulty import FAULT
from tests.train.runs import flags, updates

NAME = "tests.train.faulty:workload"
TIMEOUT_S = 8  # beside other tests a rank may stand still for three
SETTINGS = {"steps": 60, "save_every": 10, "eval_every": 60, "keep": 100, "batches_per_update": 12}
WORDS = ["-m", "trainstep", "train", "--workload", NAME, "--device", "cpu", "--no-tensorboard"]
WORDS += flags(SETTINGS)


class Training:
    """A run on the first `count` of `hosts`, or all; what each prints goes to a file beside `out`."""

    def __init__(self, hosts, out, *words, count=None, least=None, ranks=1, restarts=2, fault=None):
        count = len(hosts.names) if count is None else count
        nodes = f"{least}:{count}" if least else str(count)
        told = None if fault is None else {FAULT: json.dumps(fault | {"once": f"{out}.fault"})}
        command = [*WORDS, "--timeout", str(TIMEOUT_S), "--out", str(out), *words]
        self.hosts, self.out = hosts, out
        self.logs = [out.with_suffix(f".{name}.log") for name in hosts.names[:count]]
        self.running = [
            hosts.torchrun(host, *command, log=log, nodes=nodes, ranks=ranks, restarts=restarts, environment=told)
            for host, log in enumerate(self.logs)
        ]

    def output(self, host):
        return self.logs[host].read_text(errors="replace")

    def wait(self, holds, seconds=180):  # on a busy machine processes take half a minute to come together
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "".join(map(self.output, range(len(self.logs))))
            time.sleep(0.02)

    def until(self, made):
        """Wait until so many updates are made, and the first checkpoint is there."""
        self.wait(lambda: updates(self.out) >= made and list(self.out.glob("checkpoints/step-*")))

    def ends(self, host=0):
        """A host's exit code and output; an error if it hangs."""
        self.wait(lambda: self.running[host].poll() is not None)
        return self.running[host].returncode, self.output(host)

    def says(self, host, words, seconds=30):
        """What a rank of the host says with these words. Its torchrun may wait for minutes for a host that is gone."""
        self.wait(lambda: any(words in each for each in said(self.output(host))), seconds)
        return next(each for each in said(self.output(host)) if words in each)


def said(output):
    """The sentences of the ranks."""
    return re.findall(r"^(?:\[rank\d\]: )?trainstep: (.*)$", output, re.MULTILINE)


def resumed(output):
    """The step of each checkpoint that was gone on from."""
    return [int(step) for step in re.findall(r"resumed from step-(\d+)", output)]
