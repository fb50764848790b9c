"""All scenarios: each is a module, and how it is trained if that is odd.

`runs` trains it under every wrapper. What the wrappers then do is docs/limits.md.
"""

from tests.parallel.odd import (
    added,
    beside,
    blocks,
    callers,
    gradients,
    kinds,
    optimizers,
    reading,
    routing,
    sending,
    state,
)
from tests.parallel.odd.nets import Net
from tests.parallel.odd.runs import Scenario

SCENARIOS = {"plain": Scenario("nothing odd", Net)}
"""Name → scenario, in the order of the table."""
for each in (reading, beside, routing, blocks, kinds, optimizers, gradients, sending, state):
    SCENARIOS |= each.SCENARIOS
EVERY = SCENARIOS | callers.SCENARIOS | added.SCENARIOS
"""With those of one of our wrappers alone, which are not in the table."""
