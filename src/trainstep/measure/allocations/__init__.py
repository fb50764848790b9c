"""Every allocation of one step: who owns it, which line made it, and how long it lived."""
