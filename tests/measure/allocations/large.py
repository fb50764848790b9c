"""Makes snapshots of any size as torch writes them: `python tests/measure/allocations/large.py FILE EVENTS`."""

import pickle
import random
import sys
from pathlib import Path

STACKS = 200


def snapshot(events, *, devices=1, device=0, stacks=STACKS, shares_lists=True, seed=0):
    """A history of that many events on one of several devices: allocations of a training step, most freed again.

    Stacks are lists of frames that events share; without `shares_lists` each event has its own list of shared frames.
    """
    rng = random.Random(seed)
    frames = [
        {"name": f"f{each}", "filename": f"/me/model/part{each % 17}.py", "line": each} for each in range(4 * stacks)
    ]
    lists = [frames[4 * each : 4 * each + 4] for each in range(stacks)]
    log, alive, address = [], [], 0x7F0000000000
    while len(log) < events:
        if alive and rng.random() < 0.495:
            place = rng.randrange(len(alive))
            alive[place], alive[-1] = alive[-1], alive[place]
            action, (where, size, stack) = "free_completed", alive.pop()
        else:
            action, where, size, stack = (
                "alloc",
                address,
                rng.choice((512, 4096, 65536, 1 << 20)),
                rng.randrange(stacks),
            )
            address += size
            alive.append((where, size, stack))
        shown = lists[stack] if shares_lists else list(lists[stack])
        log.append(
            {"action": action, "addr": where, "size": size, "stream": 0, "time_us": 1_700_000_000_000_000 + len(log),
             "compile_context": "N/A", "frames": shown}
        )  # fmt: skip
    blocks = [
        {"address": where, "size": size, "requested_size": size, "state": "active_allocated", "frames": lists[stack]}
        for where, size, stack in sorted(alive)
    ]
    segments = [
        {"device": device, "address": each["address"], "total_size": each["size"], "stream": 0, "blocks": [each]}
        for each in blocks
    ]
    traces = [[] for _ in range(devices)]
    traces[device] = log
    return {"segments": segments, "device_traces": traces, "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""}}


def write(path, events, **options):
    """Write one with the protocol that torch uses."""
    with path.open("wb") as file:
        pickle.dump(snapshot(events, **options), file, protocol=4)
    return path


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
