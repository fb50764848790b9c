"""Makes traces of any size as torch.profiler writes them: `python tests/measure/profile/large.py FILE EVENTS`."""

import json
import sys
from pathlib import Path

OPERATORS = ("aten::mm", "aten::add", "aten::_softmax", "aten::copy_", "aten::mul")


def events(count, steps=4):
    """Steps, each with operators that launch a kernel each: four events a turn."""
    yield {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}}
    turns = count // 4
    for turn in range(turns):
        start, host = 1e9 + 20.0 * turn, {"ph": "X", "pid": 7, "tid": 7}
        if turn % max(1, turns // steps) == 0:
            length = 20.0 * max(1, turns // steps) - 1
            name = f"ProfilerStep#{turn * steps // max(1, turns)}"
            yield {**host, "cat": "user_annotation", "name": name, "ts": start, "dur": length, "args": {}}
        arguments = {"External id": turn, "Sequence number": turn, "Fwd thread id": 0, "Record function id": 0,
                     "Concrete Inputs": ["", ""], "Input type": ["float", "float"],
                     "Input Strides": [[512, 1], [512, 1]],
                     "Input Dims": [[64, 512], [512, 512]], "Ev Idx": turn}  # fmt: skip
        name = OPERATORS[turn % len(OPERATORS)]
        yield {**host, "cat": "cpu_op", "name": name, "ts": start + 1, "dur": 15.0, "args": arguments}
        launch = {"External id": turn, "cbid": 211, "correlation": turn}
        yield {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start + 5, "dur": 3.0, "args": launch}
        shape = {"External id": turn, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": turn,
                 "registers per thread": 32, "shared memory": 0, "blocks per SM": 4.0, "grid": [64, 1, 1]}  # fmt: skip
        device = {"ph": "X", "pid": 0, "tid": 7, "cat": "kernel", "name": f"void kernel_{turn % 50}<float>(int)"}
        yield {**device, "ts": start + 9, "dur": 8.0, "args": shape}
        yield {"ph": "f", "id": turn, "pid": 7, "tid": 7, "ts": start + 5, "cat": "ac2g", "name": "ac2g", "bp": "e"}


def write(path, count):
    with path.open("w") as file:
        file.write('{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],\n')
        file.write('  "traceEvents": [\n  ')
        file.write(",\n  ".join(json.dumps(each, indent=2).replace("\n", "\n  ") for each in events(count)))
        file.write('\n  ],\n  "traceName": "trace.json"\n}\n')
    return path


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
