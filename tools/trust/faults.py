"""A campaign of faults against `trainstep train` on two hosts: what was said, what was lost, how long it took.

`python -m tools.trust.faults` draws faults from a seed, over kinds and schemes. Each comes into a run of its own, at an
update that was drawn too. The run, or the command that goes on with it, must end with the curve of a run in peace: to
the bit on as many ranks, within the roundings of 1e-5 on fewer. Needs what `tests/hosts.py` needs. What came out goes
to docs/results/faults.json, from which docs/train.md has its table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.hosts import Hosts, kill
from tests.train.on_hosts import NAME, SETTINGS, Training, resumed, said
from tests.train.runs import far_apart, losses, rows
from tests.train.test_own import alone, on_rank, own
from tests.workers import WorkerError, Workers
from trainstep.base.errors import UsageError

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "faults.json"
SCHEMES = ("ddp", "sharded-optimizer", "fsdp", "hsdp")
KINDS = {
    "kill": r"^(rank \d \(host \w\), )*rank {rank} \(host \w\)(, rank \d \(host \w\))* do(es)? not answer: killed",
    "power": r"^rank \d \(host b\)(, rank 3 \(host b\))? do(es)? not answer",
    "pull": r"^rank \d \(host b\)(, rank 3 \(host b\))? do(es)? not answer",
    "hang": r"^rank {rank} \(host \w\) hangs or is late: it is at faulty\.py:\d+ \(misbehave\)",
    "slow": r"^rank {rank} \(host \w\) hangs or is late: it is at faulty\.py:\d+ \(misbehave\)",
    "full": r"could not be written: .*No space left|cannot be written \(No space left",
    "flip": r"^checkpoint .* is damaged: .* give --resume-from step-\d+",
    "two": r"^another process is training",
}
"""Kind of fault → what must be said. A rank is killed, upon which torchrun ends its host's others; a host loses its
power, its cable is pulled, a rank hangs for ever or for 9 s, the disk is full, a bit of the newest checkpoint is turned
over, a second trainer comes to the run."""
FEWER = ("power", "pull")
"""After these the run goes on with one host less."""


@dataclass(frozen=True)
class Fault:
    kind: str
    scheme: str
    update: int  # after how many updates it comes
    rank: int  # whom it befalls; of hosts always the second's, as the first keeps the rendezvous
    seed: int  # of what else is drawn

    @property
    def ranks_each(self) -> int:
        """On each host."""
        return 2 if self.scheme == "hsdp" else 1

    @property
    def words(self) -> re.Pattern[str]:
        """What must be said."""
        return re.compile(KINDS[self.kind].replace("{rank}", str(self.rank)))


@dataclass(frozen=True)
class Found:
    said: str
    again: int  # updates that were made again
    lost: int  # updates that are missing from the curve, or are not those of the run in peace
    said_s: float  # from the fault until it was said
    on_s: float  # from the fault until the run had made another update; 0 where it was not disturbed


def drawn(count: int, seed: int) -> list[Fault]:
    """Every kind as often as every other, but for one, and so every scheme."""
    dice = random.Random(seed)
    kinds = [kind for _ in range(-(-count // len(KINDS))) for kind in dice.sample(list(KINDS), len(KINDS))]
    schemes = [scheme for _ in range(-(-count // len(SCHEMES))) for scheme in dice.sample(SCHEMES, len(SCHEMES))]
    made = []
    for kind, scheme in zip(kinds[:count], schemes[:count], strict=True):
        ranks = 4 if scheme == "hsdp" else 2
        made.append(Fault(kind, scheme, dice.randint(12, 40), dice.randrange(ranks), dice.randrange(1000)))
    return made


class Suffering:
    """One fault and the run that it comes into, in `folder`."""

    def __init__(self, fault: Fault, hosts: Hosts, folder: Path) -> None:
        self.fault, self.hosts, self.out, self.dice = fault, hosts, folder / "run", random.Random(fault.seed)
        self.run: Training
        self.came = 0.0  # when the fault did

    def go(self) -> tuple[str, float, float]:
        """What was said; after how many seconds; and after how many there was another update."""
        fault, told = self.fault, None
        if fault.kind in ("hang", "slow"):
            passes = fault.update * SETTINGS["batches_per_update"] // (2 * fault.ranks_each)
            told = {
                "what": fault.kind,
                "rank": fault.rank,
                "update": passes,
                "seconds": 9 if fault.kind == "slow" else 600,
            }
        least = 1 if fault.kind in FEWER else None
        words = ("--scheme", fault.scheme, *(("--replicas", "2") if fault.scheme == "hsdp" else ()))
        self.run = Training(self.hosts, self.out, *words, least=least, ranks=fault.ranks_each, restarts=9, fault=told)
        if told is None:
            self.run.until(fault.update)
        else:
            self.run.wait(Path(f"{self.out}.fault").exists)
        self.came = time.monotonic()
        return getattr(self, f"_{fault.kind}")()

    def _until_on(self) -> tuple[str, float, float]:
        """Wait for the words, and for an update after a restart."""
        words, logs = self.fault.words, range(len(self.run.logs))

        def found() -> list[str]:
            return [each for host in logs for each in said(self.run.output(host)) if words.search(each)]

        self.run.wait(found)
        said_s = time.monotonic() - self.came
        self.run.wait(lambda: any(resumed(self.run.output(host)) for host in logs))
        step = max(step for host in logs for step in resumed(self.run.output(host)))
        self.run.wait(lambda: any(row["step"] == step + 1 and row["since_start"] == 1 for row in self._rows()))
        on_s = time.monotonic() - self.came
        self.run.ends()
        return found()[0], said_s, on_s

    def _rows(self) -> list[dict[str, Any]]:
        try:
            return rows(self.out)
        except ValueError:  # a line that is being written
            return []

    def _kill(self) -> tuple[str, float, float]:
        host, place = divmod(self.fault.rank, self.fault.ranks_each)
        kill(self._workers(host)[place])
        return self._until_on()

    def _workers(self, host: int) -> list[int]:
        """The ranks' processes on a host."""
        agents = self.hosts.processes(host, "torch.distributed.run")
        return [each for each in self.hosts.processes(host, "-m trainstep train") if each not in agents]

    def _power(self) -> tuple[str, float, float]:
        self.hosts.kill(1)
        return self._until_on()

    def _pull(self) -> tuple[str, float, float]:
        self.hosts.pull(1)
        return self._until_on()

    def _hang(self) -> tuple[str, float, float]:
        return self._until_on()

    _slow = _hang

    def _full(self) -> tuple[str, float, float]:
        """The disk is emptied again when it was said: torchrun's next start goes on."""
        filler = self.out.parent / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        words = self.fault.words
        self.run.wait(lambda: any(words.search(each) for host in (0, 1) for each in said(self.run.output(host))))
        filler.unlink()
        return self._until_on()

    def _flip(self) -> tuple[str, float, float]:
        """All processes are killed, a bit of the newest checkpoint is turned over, and the command is given again."""
        self.run.wait(lambda: len(list(self.out.glob("checkpoints/step-*"))) > 1)
        for host in range(2):
            for each in self.hosts.processes(host):
                kill(each)
        self.run.wait(lambda: not any(self.hosts.processes(host) for host in range(2)))
        *_, before, newest = sorted(self.out.glob("checkpoints/step-*"))
        path = self.dice.choice([path for path in sorted(newest.iterdir()) if path.stat().st_size])
        content = bytearray(path.read_bytes())
        content[self.dice.randrange(len(content))] ^= 1 << self.dice.randrange(8)
        path.write_bytes(content)
        self.came = time.monotonic()
        sentence = self._refused()
        said_s = time.monotonic() - self.came
        run = own(NAME, **SETTINGS, scheme=self.fault.scheme, replicas=2 if self.fault.scheme == "hsdp" else 0)
        with Workers(2 * self.fault.ranks_each) as workers:
            workers.run(functools.partial(on_rank, resume_from=before.name), run, self.out)
        return sentence, said_s, time.monotonic() - self.came

    def _two(self) -> tuple[str, float, float]:
        sentence = self._refused()
        said_s = time.monotonic() - self.came
        self.run.ends()
        return sentence, said_s, 0.0

    def _refused(self) -> str:
        """What a trainer in this process is told."""
        deadline = time.monotonic() + 10
        while True:
            try:
                alone(own(NAME, **SETTINGS, scheme=self.fault.scheme), self.out)
            except UsageError as error:
                is_late = self.fault.kind == "flip" and str(error).startswith("another process is training")
                if (
                    not is_late or time.monotonic() > deadline
                ):  # the kernel lets go of a killed one's lock a little later
                    return str(error)
            else:
                raise AssertionError("it was let in")


@functools.cache
def in_peace(scheme: str) -> list[float]:
    """The curve of a run without a fault on as many ranks."""
    ranks = 4 if scheme == "hsdp" else 2
    with tempfile.TemporaryDirectory() as folder, Workers(ranks) as workers:
        run = own(NAME, **SETTINGS, scheme=scheme, replicas=2 if scheme == "hsdp" else 0)
        workers.run(on_rank, run, Path(folder) / "run")
        return losses(Path(folder) / "run")


def attempt(fault: Fault) -> Found | str:
    """The same; why it could not be judged, if something else than was expected came of it."""
    try:
        return suffer(fault)
    except (AssertionError, OSError, ValueError, WorkerError) as error:
        return f"{type(error).__name__}: {' | '.join(said(str(error))) or str(error)[-500:]}"


def suffer(fault: Fault) -> Found:
    """Let a fault come into a run."""
    with tempfile.TemporaryDirectory() as folder:
        return _suffer(fault, Path(folder))


def _suffer(fault: Fault, folder: Path) -> Found:
    with _disk(folder) if fault.kind == "full" else contextlib.nullcontext(), Hosts(2) as hosts:
        sentence, said_s, on_s = Suffering(fault, hosts, folder).go()
        curve, made = losses(folder / "run"), rows(folder / "run")
    assert fault.words.search(sentence), sentence
    again = sum(row.get("trained_again", 0) for row in made)
    return Found(
        sentence, again, lost(curve, in_peace(fault.scheme), fault.kind in FEWER), round(said_s, 1), round(on_s, 1)
    )


def lost(curve: Sequence[float], expected: Sequence[float], is_on_fewer: bool) -> int:
    """Updates that the curve lacks, or that are others than expected."""
    same: Callable[[float, float], bool] = lambda a, b: a == b  # noqa: E731
    if is_on_fewer:
        same = lambda a, b: far_apart([a], [b]) < 1e-5  # noqa: E731
    return len(expected) - sum(same(a, b) for a, b in zip(curve, expected, strict=False))


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """A disk of 4 MB at this folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "trainstep", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    asked = parser.parse_args()
    git = functools.partial(subprocess.run, capture_output=True, text=True, check=True, cwd=RESULTS.parent)
    if asked.keep and git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout:
        sys.exit("the tree has changes; commit them first, so that the results are of a commit")
    commit = git(["git", "rev-parse", "--short=10", "HEAD"]).stdout.strip()
    faults, found, failed = drawn(asked.count, asked.seed), [], []
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        for number, (fault, came) in enumerate(zip(faults, pool.map(attempt, faults), strict=True), start=1):
            if isinstance(came, Found):
                found.append(asdict(fault) | asdict(came))
                told = f"lost {came.lost}, {came.said_s} s: {came.said}"
            else:
                failed.append(asdict(fault) | {"why": came})
                told = f"NOT AS EXPECTED: {came}"
            print(f"{number}/{len(faults)} {fault.kind} {fault.scheme}: {told}", flush=True)
    if asked.keep:
        about = {
            "commit": commit, "date": time.strftime("%Y-%m-%d", time.gmtime()), "seed": asked.seed,
            "hardware": f"{asked.jobs} at a time on {_processor()}", "torch": torch.__version__,
            "python": platform.python_version(),
        }  # fmt: skip
        parts = [",\n".join(json.dumps(each, ensure_ascii=False) for each in rows) for rows in (found, failed)]
        text = f'{{"about": {json.dumps(about)},\n"faults": [\n{parts[0]}\n],\n"failed": [{parts[1]}]}}\n'
        RESULTS.write_text(text, encoding="utf-8")
    sys.exit(1 if failed or any(each["lost"] for each in found) else 0)


def _processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{len(list(Path('/sys/devices/system/cpu').glob('cpu[0-9]*')))} cores of {found[1] if found else 'a CPU'}"


if __name__ == "__main__":
    main()
