"""For which scripts a change is nothing, and for which it may be something."""

import pytest

from trainstep.ladder.change import all_changes
from trainstep.ladder.changes import loaders

BY_NAME = {rung.name: rung for rung in all_changes("script")}
SETTINGS = {
    "on_gpu": True,
    "picks_by_time": False,
    "matmul": "highest",
    "autocast": [],
    "loaders": [{"num_workers": 0, "pin_memory": False, "is_iterable": False}],
    "optimizers": [{"fused": False, "foreach": False, "file": "train.py"}],
    "models": [{"dtypes": ["float32"], "is_compiled": False, "blocks": 2, "is_whole_compiled": False}],
    "recompiles": True,
    "shares": {"data": 0.3, "optimizer": 0.2, "launches": 0.3},
    "debugging": [{"name": "anomaly-detection"}],
    "operators": [
        *("LogSoftmaxBackward0", "NllLossBackward0"),
        *("ScaledDotProductEfficientAttentionBackward0", "SoftmaxBackward0"),
    ],
}


@pytest.mark.parametrize("change", all_changes("script"), ids=lambda change: change.name)
def test_every_rung_is_worth_a_try_for_a_plain_script_on_a_gpu(change):
    assert change.skipped(SETTINGS) == ""


@pytest.mark.parametrize(
    ("name", "own", "why"),
    [
        ("TF32 matmuls", {"matmul": "high"}, 'sets it itself: float32 products are at "high"'),
        ("TF32 matmuls", {"on_gpu": False}, "needs a GPU"),
        ("no debugging", {"debugging": []}, "no setting for debugging is on"),
        ("fused optimizer", {"optimizers": [{"fused": True, "foreach": False}]}, "sets it itself: fused=True"),
        ("fused optimizer", {"optimizers": [{"fused": False, "foreach": False}]}, "no fused form"),
        ("bf16 autocast", {"autocast": ["float16"]}, "sets it itself: autocast to float16"),
        ("bf16 autocast", {"models": [{"dtypes": ["bfloat16"]}]}, "its weights are bfloat16"),
        ("compiled model", {"models": [{"is_compiled": True}]}, "sets it itself"),
        ("compiled model with CUDA graphs", {"on_gpu": False}, "needs a GPU"),
        *(
            (rung, {"models": []}, "no call of a model was seen outside of compiled code")
            for rung in ("bf16 autocast", "compiled model", "compiled model with CUDA graphs", "compiled blocks")
        ),
        ("compiled blocks", {"models": [{"blocks": 0}]}, "no repeated blocks"),
        ("pinned memory", {"loaders": [{"pin_memory": True}]}, "sets it itself: pin_memory=True"),
        ("pinned memory", {"on_gpu": False}, "needs a GPU"),
        ("loader workers", {"loaders": []}, "makes no DataLoader"),
        ("loader workers", {"loaders": [{"num_workers": 4}]}, "its loaders have workers"),
        ("loader workers", {"loaders": [{"num_workers": 0, "is_iterable": True}]}, "repeat an IterableDataset"),
        ("loader workers", {"shares": {"data": 0.004}}, "its steps spend 0.4% on data"),
        ("loader workers", {"shares": {"forward": 1.0}}, "its steps spend 0.0% on data"),
        ("fused optimizer", {"shares": {"optimizer": 0.009}}, "its steps spend 0.9% on optimizer"),
        ("compiled for any size", {"recompiles": False}, "nothing is compiled again after the first step"),
        ("our FlashAttention", {"on_gpu": False}, "needs a GPU"),
        ("our FlashAttention", {"operators": ["LogSoftmaxBackward0"]}, "call no scaled_dot_product_attention"),
        ("our FlashAttention", {"operators": ["ScaledDotProductX, dropping"]}, "its attention drops probabilities"),
        ("fused attention", {"operators": ["LogSoftmaxBackward0", "MmBackward0"]}, "no attention that is written out"),
        ("fused loss", {"models": [{"is_whole_compiled": True}]}, "head and loss left to the compiler"),
        ("fused loss", {"operators": ["MseLossBackward0"]}, "no head of a model whose logits go straight into"),
    ],
)
def test_what_is_nothing_for_a_script_is_said(name, own, why):
    assert why in BY_NAME[name].skipped({**SETTINGS, **own})


def test_a_loss_that_may_be_there_is_tried():
    for own in (None, ["NllLoss2DBackward0"], ["NllLossBackward0"]):
        assert BY_NAME["fused loss"].skipped({**SETTINGS, "operators": own}) == ""
    models = [{"is_whole_compiled": True}, {"is_whole_compiled": False}]
    assert BY_NAME["fused loss"].skipped({**SETTINGS, "models": models}) == ""


@pytest.mark.parametrize("name", ["our FlashAttention", "fused attention"])
def test_attention_that_may_be_there_is_tried(name):
    for own in (None, ["SoftmaxBackward0"], ["SafeSoftmaxBackward0"]):
        assert BY_NAME[name].skipped({**SETTINGS, "operators": own}) == ""
    some_drop = ["ScaledDotProductX", "ScaledDotProductX, dropping"]
    assert BY_NAME["our FlashAttention"].skipped({**SETTINGS, "operators": some_drop}) == ""


def test_no_more_workers_than_cores_that_the_process_may_run_on(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for allowed, expected in (({3}, 1), ({0, 5}, 2), (set(range(8)), 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, allowed=allowed: allowed)
        assert loaders.workers_here() == expected
