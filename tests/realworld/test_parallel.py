"""`bench parallel` on models of transformers: what a Trainer holds, experts, 0-dim parameters, masks by numpy."""

import functools
import os
from unittest import mock

import pytest
import torch

from tests.realworld import models
from tools.trust.planted.parallel import quick
from trainstep.base.config import StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.run import run_cases
from trainstep.rows.records import SoFar
from trainstep.step.workload import WorkloadSource

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.realworld, pytest.mark.distributed]


def trainer(folder="/nonexistent"):
    """As a Trainer under torchrun holds it: its loader shards by rank."""
    from transformers import Trainer, TrainingArguments

    made = models.llama()
    data = [{"input_ids": row, "labels": row} for batch in made.batches for row in batch["input_ids"]]
    arguments = TrainingArguments(folder, per_device_train_batch_size=4, use_cpu=True, report_to=[])
    made.batches = Trainer(made.module, arguments, train_dataset=data).get_train_dataloader()
    return made


def rows_of(process, make, precision, schemes):
    torchruns = {"RANK": process.rank, "LOCAL_RANK": process.rank, "WORLD_SIZE": process.world_size}
    torchruns |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}  # what accelerate asks for, and does not use here

    def build(step):
        torch.manual_seed(step.seed)
        return make()

    config = StepConfig(device="cpu", precision=precision)
    cases = [ParallelCase(WorkloadSource("w", build), config, SCHEMES[name], warmup=1, steps=1) for name in schemes]
    with quick(), mock.patch.dict(os.environ, {name: str(each) for name, each in torchruns.items()}):
        rows = [row for row in run_cases(cases, process) if not isinstance(row, SoFar)]
    return {row.scheme: row for row in rows if row.kind == "parallel"}


ALL = ("single", "flat", "bucketed-25", "sharded-optimizer", "fsdp", "torch-ddp", "torch-zero", "torch-fsdp2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make", [models.mixtral, trainer, models.clip, models.wav2vec2, models.llama_bf16], ids=lambda make: make.__name__
)
def test_every_scheme_is_right_or_named_for_what_it_cannot_do(two, make, tmp_path):
    given = functools.partial(make, str(tmp_path)) if make is trainer else make
    found = two.run(rows_of, given, "bf16-pure" if make is models.llama_bf16 else "fp32", ALL)[0]
    failed = {name: row.reason for name, row in found.items() if row.status != "ok"}
    if make is models.clip:
        assert "takes no parameter without dimensions, such as logit_scale" in failed.pop("torch-fsdp2")
    if make is models.wav2vec2:
        for name in ("fsdp", "torch-fsdp2"):
            failed.pop(name, None)  # a layer that one rank leaves out is one that others wait for
    assert failed == {}
    row = found["flat"]
    assert (row.batches is None) is (make is not trainer)
    if make is models.wav2vec2:
        assert row.share_difference is None, "its masks are drawn anew"
    else:
        assert (row.share_difference > 0.01) is (make is models.clip), row.share_difference
