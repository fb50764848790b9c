"""Tools that test the tests: injected bugs, mutants of the checks, damaged files, faults in runs on several hosts."""
