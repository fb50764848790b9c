"""What wrappers do with odd models, of which docs/limits.md tells: some of them here, all in docs/measure_limits.py."""

import json
from pathlib import Path

import pytest

from tests.parallel.odd import added, callers
from tests.parallel.odd.runs import OURS, PEERS, outcome_of
from tests.parallel.odd.scenarios import SCENARIOS
from tests.workers import Workers

pytestmark = pytest.mark.distributed

KEPT = Path(__file__).parents[2] / "docs" / "results" / "cpu-limits.json"

TRAINS = {
    "fsdp": [
        *("plain", "tied by reading", "position read", "mean read", "decay in forward", "norm after use"),
        *(
            "weights in a list",
            "block reads another",
            "read in a checkpoint",
            "aux in a list",
            "aux alone",
            "aux apart",
        ),
        *("returns its weight", "returns a view", "keeps its weight", "dataclass", "object", "nested"),
        *(
            "shared module",
            "tensor hooks",
            "accumulation hooks",
            "gradient penalty",
            "optimizer before",
            "adapters",
            "own clip",
        ),
        *("GradScaler", "finish each", "plain state, inner", "declared optimizer", "evaluation", "two forwards"),
        *("no_grad between", "zeros", "forward called"),
        *list(callers.SCENARIOS)[:-2],
    ],
    "fsdp in pairs": [
        *("tied by reading", "block reads another", "read in a checkpoint", "aux in a list", "returns its weight"),
        *("dataclass", "shared module", "gradient penalty", "adapters"),
    ],
    "sharded optimizer": [
        *("finish each", "no zero_grad", "step twice", "zeros", "dropped by hand", "own clip"),
        *added.SCENARIOS,
    ],
    "ddp": ["finish last, no overlap", "clip by hand", *list(added.SCENARIOS)[-2:]],
}
RAISES = {
    "fsdp": {
        "changed by itself": "blocks.0.up.weight was changed in place",
        "norms in the loss": "norm of first.weight, which is sharded: a rank has only its rows of it",
        "head in the loss": "linear of head.weight, which is sharded: a rank has only its rows of it",
        "order by rank, later": "the ranks are not at the same point",
        "skipped, odd size": "rank 0 comes to gather blocks.2, rank 1 comes to gather blocks.3",
        "unused on one rank": "rank 0 comes to gather spare, rank 1 comes to gather head",
        "Muon": "Muon is not known to treat each element alone",
        "torch's clip": "a rank has only its rows",
        "forgotten finish": "call finish_gradient_synchronization() of FullyShardedDataParallel",
        "halved too early": "before finish_gradient_synchronization()",
        "plain optimizer's state": "has shape (8, 8), that of the whole parameter",
        "own norms": "norm of first.weight, which is sharded",
        "get_state_dict": "use save_checkpoint",
        "autograd.grad": "grad of first.weight, which is sharded",
        "a weight that is given other memory": "blocks.0.up.weight was changed in place while it was gathered",
        "frozen weights that backward reaches past an output": "backward came to blocks.1 and had not gone through",
    },
    "fsdp in pairs": {
        "in place": "blocks.0 changes its input in place",
        "skipped, odd size": "rank 0 comes to gather blocks.2 and blocks.3, rank 1 comes to gather head",
    },
    "sharded optimizer": {"torch's clip": "clip_grad_norm_ of the optimizer"},
    "ddp": {
        "forgotten, no overlap": "call finish_gradient_synchronization() of DistributedDataParallel",
        "halved too early": "while it was being averaged",
    },
}


@pytest.fixture(scope="module")
def workers():
    with Workers(2, timeout_s=20, preload=["tests.parallel.odd.scenarios"]) as started:
        yield started


@pytest.mark.parametrize("scheme", TRAINS)
def test_trains_as_one_process_does(workers, scheme):
    found = {name: outcome_of(name, scheme, workers) for name in TRAINS[scheme]}
    assert {name: outcome for name, outcome in found.items() if outcome.what != "trains"} == {}


@pytest.mark.thorough
def test_blocks_in_pairs_come_out_as_single_ones(workers):
    kept = json.loads(KEPT.read_text())["scenarios"]
    found = {name: outcome_of(name, "fsdp in pairs", workers).what for name in SCENARIOS}
    assert found == {name: row["outcomes"]["fsdp"]["what"] for name, row in kept.items()}


@pytest.mark.parametrize(("scheme", "name"), [(scheme, name) for scheme in RAISES for name in RAISES[scheme]])
def test_says_what_is_unsupported(workers, scheme, name):
    outcome = outcome_of(name, scheme, workers)
    assert outcome.is_named, outcome
    assert RAISES[scheme][name] in outcome.detail


def test_a_wrong_result_is_noticed(workers):
    """The yardstick can tell: torch's wrapper beside which the module is called trains something else."""
    assert outcome_of("inner called", "torch ddp", workers).what == "wrong"


def test_kept_limits():
    """Every scenario is in the table, and none of our wrappers does anything but train rightly or say what is wrong."""
    kept = json.loads(KEPT.read_text())["scenarios"]
    assert {name: row["odd"] for name, row in kept.items()} == {name: each.what for name, each in SCENARIOS.items()}
    assert len(SCENARIOS) >= 60
    for name, row in kept.items():
        assert list(row["outcomes"]) == [*OURS, *PEERS]
        for scheme in OURS:
            outcome = row["outcomes"][scheme]
            assert outcome["what"] == "trains" or outcome["is_named"], (name, scheme, outcome)
