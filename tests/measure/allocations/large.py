"""Makes snapshots of any size in the form that torch writes."""

import random


def snapshot(events, *, devices=1, device=0, stacks=200, shares_lists=True):
    """A history of that many events on one of several devices: allocations of a training step, most freed again.

    Stacks are lists of frames that events share; without `shares_lists` each event has its own list of shared frames.
    """
    rng = random.Random(0)
    lists = [
        [{"name": f"f{line}", "filename": f"/me/model/part{line % 17}.py", "line": line} for line in range(at, at + 4)]
        for at in range(0, 4 * stacks, 4)
    ]
    log, alive = [], []
    for each in range(events):
        if alive and rng.random() < 0.495:
            action, made = "free_completed", alive.pop(rng.randrange(len(alive)))
        else:
            size = rng.choice((512, 4096, 65536, 1 << 20))
            action, made = "alloc", {"addr": each << 20, "size": size, "frames": rng.choice(lists)}
            alive.append(made)
        frames = made["frames"] if shares_lists else [*made["frames"]]
        log.append(
            made
            | {"action": action, "time_us": 1_700_000_000_000_000 + each, "compile_context": "N/A", "frames": frames}
        )
    segments = [
        {"device": device, "address": made["addr"], "blocks": [made | {"state": "active_allocated"}]} for made in alive
    ]
    return {"segments": segments, "device_traces": [log if each == device else [] for each in range(devices)]}
