"""All scenarios: each is a module, and how it is trained if that is odd.

`runs` trains it under every wrapper. What the wrappers then do is docs/limits.md.
"""

from __future__ import annotations

from tests.parallel.odd import beside, blocks, gradients, kinds, optimizers, reading, routing, sending, state
from tests.parallel.odd.nets import Net
from tests.parallel.odd.runs import Scenario

SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario("nothing odd", Net),
    **reading.SCENARIOS,
    **beside.SCENARIOS,
    **routing.SCENARIOS,
    **blocks.SCENARIOS,
    **kinds.SCENARIOS,
    **optimizers.SCENARIOS,
    **gradients.SCENARIOS,
    **sending.SCENARIOS,
    **state.SCENARIOS,
}
"""Name → scenario, in the order of the table."""
